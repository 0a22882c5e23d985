"""Names that programs outside this repository rely on: oxrl.functional, oxrl.config,
oxrl.rewards.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from oxrl.functional import metrics

PAIRS = (
    "chosen_logprobs",
    "rejected_logprobs",
    "ref_chosen_logprobs",
    "ref_rejected_logprobs",
    "chosen_lengths",
    "rejected_lengths",
    "loss_weights",
)
# Name -> its positional arguments, all tensors, in order; everything else the function takes is
# keyword-only.
FUNCTIONAL: dict[str, tuple[str, ...]] = {
    "logprobs_from_logits": ("logits", "tokens"),
    "masked_mean": ("x", "mask"),
    "gae": ("token_rewards", "values", "mask", "bootstrap"),
    "group_normalize": ("rewards", "group_ids"),
    "group_center": ("rewards", "group_ids"),
    "leave_one_out": ("rewards", "group_ids"),
    "whiten": ("advantages", "mask"),
    "kl_k1": ("logprobs", "ref_logprobs", "mask"),
    "kl_k2": ("logprobs", "ref_logprobs", "mask"),
    "kl_k3": ("logprobs", "ref_logprobs", "mask"),
    "token_mean": ("response_mask",),
    "sequence_mean": ("response_mask",),
    "sequence_sum": ("response_mask",),
    "fixed_length": ("response_mask",),
    "prompt_mean": ("response_mask", "group_ids"),
    "ppo_clip": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "gspo": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "sapo": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "dppo_tv": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "cispo": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "truncate_weights": ("old_logprobs", "rollout_logprobs", "mask"),
    "mask_weights": ("old_logprobs", "rollout_logprobs", "mask"),
    "value_loss": ("values", "old_values", "returns", "mask", "loss_weights"),
    "dpo": PAIRS,
    "ipo": PAIRS,
    "simpo": PAIRS,
    "kto": ("logprobs", "ref_logprobs", "desirable", "loss_weights", "kl_baseline"),
    "supervised_loss": ("logprobs", "mask", "loss_weights"),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_public_function_takes_tensors_by_position_and_numbers_by_keyword(name: str) -> None:
    function = getattr(import_module("oxrl.functional"), name)
    parameters = inspect.signature(function).parameters.values()
    positional = [
        parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert positional, f"{name} takes no tensor"
    for parameter in positional:
        assert "Tensor" in str(parameter.annotation), (
            f"{name}({parameter}) is positional but no tensor"
        )
    assert tuple(parameter.name for parameter in positional) == FUNCTIONAL[name]


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_public_function_says_what_it_computes(name: str) -> None:
    assert inspect.getdoc(getattr(import_module("oxrl.functional"), name))


def test_the_config_is_loaded_by_one_function_of_a_path_and_overrides() -> None:
    config = import_module("oxrl.config")
    assert list(inspect.signature(config.load_config).parameters)[:2] == ["path", "overrides"]
    assert inspect.isclass(config.Config)


def test_a_maths_answer_is_scored_by_one_function() -> None:
    rewards = import_module("oxrl.rewards")
    assert list(inspect.signature(rewards.math_reward).parameters)[:2] == ["response", "answer"]


def a_batch_of_metrics() -> dict[str, float]:
    """Every function of functional/metrics.py and every loss that reports, on two groups of two
    rows of two tokens.
    """
    functional = import_module("oxrl.functional")
    group_ids, rewards = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    mask = torch.tensor([[False, True, True]] * 4)
    old, new = torch.full((4, 3), -1.0), torch.full((4, 3), -1.1)
    advantages, weights = torch.ones(4, 3), torch.full((4, 3), 0.125)
    found: dict[str, float] = {}
    found |= metrics.reward_metrics(rewards, group_ids)
    found |= metrics.data_metrics(mask, rewards == 0, rewards)
    found |= metrics.staleness_metrics(torch.zeros(4, 3, dtype=torch.int64), mask, version=1)
    found |= metrics.advantage_metrics(advantages, mask)
    found |= metrics.policy_metrics(new, old, mask, ref_logprobs=old, entropy=-old)
    found |= metrics.mismatch_metrics(old, new, mask, correction=advantages)
    found |= metrics.value_metrics(new, old, mask)
    found |= functional.ppo_clip(new, old, advantages, mask, weights, clip_dual=3.0)[1]
    found |= functional.value_loss(new, old, old, mask, weights, value_clip=0.2)[1]
    found |= functional.supervised_loss(new, mask, weights)[1]
    return found


METRICS = {
    "reward": "mean std min max pass_rate zero_variance_groups all_pass_groups all_fail_groups "
    "group_std",
    "data": "tokens rows empty_rows length_mean length_p95 length_max length_correct length_wrong "
    "truncated_frac staleness_mean staleness_max",
    "advantage": "mean std abs_max positive_frac",
    "update": "ratio_mean ratio_std ratio_min ratio_max ratio_p01 ratio_p99 ratio_clamped_frac "
    "clip_frac_high clip_frac_low clip_frac_dual weight_mean weight_zero_frac nll",
    "kl": "old_k3 ref_k1 ref_k3 ref_row_sum clamped_frac",
    "policy": "entropy logprob_mean",
    "mismatch": "kl_k1 kl_k3 abs_logdiff_mean abs_logdiff_max prob_diff_max ppl_ratio chi2_token "
    "chi2_seq weight_mean ess trunc_frac_hi trunc_frac_lo reject_frac_token reject_frac_row",
    "value": "mean return_mean error explained_variance clip_frac",
}


def test_the_metric_keys_of_the_maths_are_the_agreed_ones() -> None:
    agreed = {f"{group}/{name}" for group, names in METRICS.items() for name in names.split()}
    assert agreed <= a_batch_of_metrics().keys()


def test_every_metric_of_the_maths_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([a-z]+/[a-z0-9_]+)`", page))
    assert a_batch_of_metrics().keys() <= documented
