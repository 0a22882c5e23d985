"""Names that programs outside this repository rely on: oxrl.functional, oxrl.config, oxrl.rewards."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

# Every argument listed is positional (a tensor); everything else the function takes must be keyword-only.
FUNCTIONAL: dict[str, tuple[str, ...]] = {
    "logprobs_from_logits": ("logits", "tokens"),
    "masked_mean": ("values", "mask"),
    "gae": (),
    "group_normalize": ("rewards", "group_ids"),
    "group_center": ("rewards", "group_ids"),
    "leave_one_out": ("rewards", "group_ids"),
    "whiten": ("values", "mask"),
    "kl_k1": (),
    "kl_k2": (),
    "kl_k3": (),
    "token_mean": ("mask",),
    "sequence_mean": ("mask",),
    "sequence_sum": ("mask",),
    "fixed_length": ("mask",),
    "prompt_mean": ("mask", "group_ids"),
    "ppo_clip": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "cispo": ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights"),
    "truncate_weights": (),
    "mask_weights": (),
    "value_loss": (),
    "supervised_loss": (),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_public_function_takes_tensors_by_position_and_numbers_by_keyword(name: str) -> None:
    function = getattr(import_module("oxrl.functional"), name)
    parameters = inspect.signature(function).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional, f"{name} takes no tensor"
    for parameter in positional:
        assert "Tensor" in str(parameter.annotation), f"{name}({parameter}) is positional but no tensor"
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            assert "Tensor" not in str(parameter.annotation), (
                f"{name}(*, {parameter}) is a required keyword-only tensor"
            )
    assert [parameter.name for parameter in positional][: len(FUNCTIONAL[name])] == list(FUNCTIONAL[name])


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
