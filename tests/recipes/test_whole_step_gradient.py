"""A whole step's gradient, through the recipe's own losses: micro-batches, row order and padding
must not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxrl.assembly.assembly import Assembly
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.functional.advantages import AdvantageInputs
from oxrl.functional.weights import token_mean
from oxrl.models.load import LoadOptions, load_critic, load_policy
from oxrl.recipes.features.base import FeatureInputs
from oxrl.recipes.features.critic import Critic
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.objective import Objective
from oxrl.recipes.supervised import loss_fn as sft_loss
from oxrl.types import LossFn, PolicyBatch, SupervisedBatch, TokenBatch, ValueBatch
from support.small_runs import rl_config
from support.tiny import VOCABULARY, AttentionModel, token_batch

LENGTHS = [
    (3, 4),
    (2, 1),
    (5, 7),
    (1, 3),
    (4, 2),
    (2, 6),
]  # (prompt, response) of two groups of three rows
EXTRA = 9  # columns of padding
CASES = ["sgrpo", "grpo", "cispo", "ppo", "ppo value", "sft"]


def _noise(inputs: TokenBatch, seed: int, dtype: torch.dtype, poison: bool) -> Tensor:
    """The same random numbers on trained tokens whatever the width; NaN elsewhere when poisoned."""
    width = max(sum(pair) for pair in LENGTHS)
    values = torch.randn(
        len(LENGTHS), width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    values = nn.functional.pad(values, (0, inputs.tokens.shape[1] - width)).to(dtype)
    return values.masked_fill(~inputs.response_mask, torch.nan if poison else 0.0)


def _problem(
    case: str, folder: Path, dtype: torch.dtype, vocabulary: int, extra: int, poison: bool
) -> tuple[Any, LossFn, str]:
    """Batch, loss and what to ask the engine for; built as oxrl/recipes/rl.py builds them."""
    inputs = token_batch(LENGTHS, extra=extra, vocabulary=vocabulary)
    mask = inputs.response_mask
    if case == "sft":
        weights = token_mean(mask).to(dtype).masked_fill(~mask, torch.nan if poison else 0.0)
        return SupervisedBatch(inputs=inputs, loss_weights=weights), sft_loss, "logprobs"
    cfg = rl_config(
        folder,
        "run",
        train={"alg_name": case.split()[0], "lr": 1e-3, "epochs": 2},
        run={"steps": 2},
    )
    engine: Any = "never asked"
    given = FeatureInputs(
        row=cfg.train.row,
        train=Assembly(cfg).algorithm,
        max_tokens=cfg.rollout.max_tokens,
        models={"policy": engine, "critic": engine},
    )
    features = build_features(given)
    objective = Objective(Assembly(cfg).algorithm, features, max_tokens=cfg.rollout.max_tokens)
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.25], dtype=torch.float64)
    old = _noise(inputs, 1, dtype, poison) * 0.05 - 2.5
    values = _noise(inputs, 2, torch.float64, False)
    last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
    token_rewards = torch.zeros_like(values).scatter_(1, last[:, None], rewards[:, None])
    advantages, returns = objective.advantage(
        AdvantageInputs(
            rewards=rewards,
            token_rewards=token_rewards,
            response_mask=mask,
            group_ids=group_ids,
            values=values,
        )
    )
    empty = torch.nan if poison else 0.0

    def fill(x: Tensor) -> Tensor:
        return x.to(dtype).masked_fill(~mask, empty)

    if case == "ppo value":
        assert returns is not None
        batch = ValueBatch(
            inputs=inputs,
            old_values=fill(values),
            returns=fill(returns),
            loss_weights=fill(token_mean(mask)),
        )
        (critic,) = features
        assert isinstance(critic, Critic)
        return batch, critic.value_loss, "values"
    policy = PolicyBatch(
        inputs=inputs,
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=None,
        advantages=fill(advantages),
        loss_weights=fill(objective.weights(mask, group_ids)),
        versions=torch.zeros_like(inputs.tokens),
        group_ids=group_ids,
    )
    return policy, objective.policy_loss, "logprobs"


def _gradients(
    model: nn.Module, case: str, folder: Path, dtype: torch.dtype, vocabulary: int
) -> Iterator[tuple[str, Tensor]]:
    def gradient(batch: Any, loss_fn: LossFn, want: str, rows: int) -> Tensor:
        model.zero_grad()
        trainer = LocalTrainer(
            model, TrainerOptions(lr=1e-3, micro_batch_tokens=rows * batch.inputs.tokens.shape[1])
        )
        trainer.forward_backward(
            batch, loss_fn, frozenset({want, "entropy"} if want == "logprobs" else {want})
        )
        return torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ).clone()

    plain = _problem(case, folder, dtype, vocabulary, 0, False)
    yield "all rows at once", gradient(*plain, rows=len(LENGTHS))
    for rows in (1, 3):
        yield f"{rows} rows at a time", gradient(*plain, rows=rows)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    yield "another row order", gradient(plain[0].select(order), *plain[1:], rows=3)
    padded = _problem(case, folder, dtype, vocabulary, EXTRA, True)
    for rows in (1, 3, len(LENGTHS)):
        yield f"padding full of NaN, {rows} rows at a time", gradient(*padded, rows=rows)


def _worst(model: nn.Module, case: str, folder: Path, dtype: torch.dtype, vocabulary: int) -> float:
    variants = dict(_gradients(model, case, folder, dtype, vocabulary))
    reference = variants.pop("all rows at once")
    assert reference.norm() > 1e-4
    return max(
        ((other - reference).norm() / reference.norm()).item() for other in variants.values()
    )


@pytest.mark.parametrize("case", CASES)
def test_the_whole_steps_gradient_is_invariant_in_float64(case: str, tmp_path: Path) -> None:
    model = AttentionModel(1 if case == "ppo value" else VOCABULARY)
    worst = _worst(model, case, tmp_path, torch.float64, VOCABULARY)

    assert worst < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_the_whole_steps_gradient_is_invariant_in_float32_on_the_hf_model(
    case: str, tmp_path: Path
) -> None:
    if case == "ppo value":
        model: nn.Module = load_critic("builtin:tiny", LoadOptions(seed=0))
        nn.init.normal_(
            model.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(1)
        )  # pyright: ignore
    else:
        model = load_policy("builtin:tiny", LoadOptions(seed=0))
    worst = _worst(model, case, tmp_path, torch.float32, 261)

    assert worst < 1e-5
