"""The functions whose docstrings hold the equations of the cells, as pages about them show them.

Some cells only call another function, which is meant here; adapters wrap theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import oxrl.functional.advantages as advantages
import oxrl.functional.group_advantages as group_advantages
import oxrl.functional.kl as kl
import oxrl.functional.part_advantages as part_advantages
import oxrl.functional.policy_losses as policy_losses
import oxrl.functional.preference_losses as preference_losses
import oxrl.functional.ratios as ratios
import oxrl.functional.reward_model_losses as reward_model_losses
import oxrl.functional.supervised_losses as supervised_losses
import oxrl.functional.weights as weights
from oxrl.functional.centering import CENTERINGS
from oxrl.functional.corrections import CORRECTIONS

# A loss or an estimator.
Function = Callable[..., Any]
EQUATIONS: Mapping[str, Mapping[str, Function]] = {
    "advantage": {
        **advantages.ADVANTAGES,
        "returns": advantages.gae,
        "whitened_returns": advantages.whiten,
        "batch_center": group_advantages.group_center,
        "gae": advantages.gae,
        "gae_length_adaptive": advantages.length_adaptive_lambda,
        "group_normalize_parts": part_advantages.group_normalize_parts,
        "turn_normalize": part_advantages.turn_normalize,
        "group_center_whitened": advantages.whiten,
        "otb": advantages.optimal_token_baseline,
        "length_weighted_center": group_advantages.length_weighted_center,
        "teacher_gap": advantages.teacher_gap,
        "teacher_return": advantages.teacher_return,
    },
    "ratio": ratios.RATIOS,
    "gate": policy_losses.GATES,
    "correction": CORRECTIONS,
    "centering": CENTERINGS,
    "kl": kl.KLS,
    "weights": weights.WEIGHTS,
    "preference": {**preference_losses.PAIR_LOSSES, **preference_losses.SINGLE_LOSSES},
}
# Of algorithms that are one loss, where it is not that of a preference method.
LOSSES: Mapping[str, Function] = {
    "sft": supervised_losses.supervised_loss,
    "dft": supervised_losses.dft_loss,
    "rft": supervised_losses.supervised_loss,
    "reward_model": reward_model_losses.bradley_terry,
    "process_reward_model": reward_model_losses.process_reward,
}


def told_of(function: Function) -> str:
    """Return what a function's docstring says, without its arguments.

    Args:
        function: of a cell.

    Returns:
        Its equation, text and source; empty: it has no docstring.
    """
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    listed = ("Args:", "Returns:", "Raises:")
    return "\n\n".join(text for text in paragraphs if not text.startswith(listed))
