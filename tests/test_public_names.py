"""Names that programs outside this repository rely on: oxrl.functional, oxrl.config, oxrl.rewards."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

# Name -> its positional arguments, all tensors, in order; everything else the function takes is keyword-only.
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
    "cispo": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "truncate_weights": ("old_logprobs", "rollout_logprobs", "mask"),
    "mask_weights": ("old_logprobs", "rollout_logprobs", "mask"),
    "value_loss": ("values", "old_values", "returns", "mask", "loss_weights"),
    "supervised_loss": ("logprobs", "mask", "loss_weights"),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_public_function_takes_tensors_by_position_and_numbers_by_keyword(name: str) -> None:
    function = getattr(import_module("oxrl.functional"), name)
    parameters = inspect.signature(function).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional, f"{name} takes no tensor"
    for parameter in positional:
        assert "Tensor" in str(parameter.annotation), f"{name}({parameter}) is positional but no tensor"
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
