"""The objective that a recipe builds from a config, against each row's second implementation: what is
prepared before the update, and the gradient of an update that follows others.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.assembly.assembly import Assembly
from oxrl.recipes.features.base import FeatureInputs
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.objective import Objective, prepare_update
from oxrl.recipes.rl import minibatch
from oxrl.tables.cells import BINARY_REWARDS, CRITIC, REWARD_PARTS
from oxrl.tables.numbers import Number
from oxrl.tables.policy import ROWS
from oxrl.types import Output, PolicyBatch, RolloutBatch, TokenBatch
from oxrl_proofs.literal import literal_loss
from oxrl_proofs.rows import GRADES, NUMBERS, SUCCESSES, Example, close_each, example, response_of
from support.small_runs import rl_config

# What a teacher or a discriminator says comes from a model: steps of such rows are computed again
# by hand in test_teachers.py beside this file, and in tests/packages (given rows, black box, self).
# What the sampler recorded of other tokens is in tests/functional/test_centering.py, by real cells.
TAUGHT = ("teacher", "teacher_top", "discriminator", "sampler_top")
RUN = [
    name
    for name, row in ROWS.items()
    if row.recipe == "rl" and not row.unsupported and not {*row.needs} & {*TAUGHT}
]
# Numbers of the proofs whose field of `train` goes by the same name and that act on few tokens.
SET = {name: value for name, value in NUMBERS.items() if name != "weights_length"}
SEED = 7
UPDATES = 4
VERSION = 5 * UPDATES


class Says:
    """Stands for an engine: what it says of the example, whatever it is asked."""

    def __init__(self, output: Output) -> None:
        self.output = output

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        return self.output


def top_ids(raw: Example) -> Tensor:
    """Ids of the top tokens: the sampled token, 0, leads them where the example says so."""
    flags = raw.versions % 2 == 0
    others = torch.tensor([1, 2, 3]).expand(*raw.mask.shape, 3).clone()
    others[..., 0] = torch.where(flags, 0, 1)
    return others


def rollouts_of(raw: Example) -> RolloutBatch:
    tokens = torch.zeros_like(raw.versions)
    everything = torch.ones_like(raw.mask)
    return RolloutBatch(
        inputs=TokenBatch(tokens=tokens, attention_mask=everything, response_mask=raw.mask),
        rollout_logprobs=raw.rollout,
        rewards=raw.rewards,
        token_rewards=raw.token_rewards,
        group_ids=raw.group_ids,
        versions=VERSION - UPDATES * (4 - raw.versions),
        terminated=~raw.truncated,
        truncated=raw.truncated,
        valid=torch.ones_like(raw.truncated),
        greedy_rewards=raw.greedy,
        part_rewards={"first": raw.first_part, "second": raw.second_part},
    )


def setting(name: str) -> dict[str, Any]:
    """The row's numbers, as `train` takes them, and as many updates as it allows."""
    row = ROWS[name]
    numbers: list[Number[Any]] = [number for part in row.parts for number in part.numbers]
    train: dict[str, Any] = {n.key: SET[n.name] for n in numbers if n.name in SET}
    for aside in ("nll_coeff", "critic_warmup_steps"):
        if aside in {number.name for number in numbers}:
            train[aside] = 0
    updates = 1 if row.gate == "policy_gradient" else UPDATES
    return {"alg_name": name, "epochs": updates, "minibatches": 1, **train}


@pytest.mark.parametrize("name", RUN)
def test_an_update_of_a_recipe_follows_its_rows_source(name: str, tmp_path: Path) -> None:
    rewards = SUCCESSES if BINARY_REWARDS in ROWS[name].parts else GRADES
    raw = example(rewards=rewards, seed=21)
    overrides: list[str] = []
    if REWARD_PARTS in ROWS[name].parts:
        overrides = ["~reward.name", "reward.parts.first={name: math}"]
        overrides.append("reward.parts.second={name: exact, weight: -0.4}")
    cfg = rl_config(
        tmp_path, "run", overrides, train=setting(name), run={"steps": 4}, rollout={"n_samples": 3}
    )
    row = cfg.train.row
    if row.gate == "policy_gradient":  # one update: the policy is the sampler
        likely = raw.logprobs.exp()  # a sum of squares that is no less than the largest
        raw = dataclasses.replace(raw, old=raw.logprobs, rollout=raw.logprobs, squares=likely)
    # Without an environment every response is one turn.
    raw = dataclasses.replace(raw, turns=torch.where(raw.mask, 0, -1))
    shape = raw.mask.shape
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    raw = dataclasses.replace(raw, noise=noise)
    said = Output(
        logprobs=raw.old,
        entropy=raw.entropy,
        top_ids=top_ids(raw),
        top_logprobs=raw.old_top,
        sum_p_squared=raw.squares,
    )
    policy: Any = Says(said)
    reference: Any = Says(Output(logprobs=raw.ref))
    critic: Any = Says(Output(values=raw.values, bootstrap=raw.bootstrap))
    models = {"policy": policy, "reference": reference}
    given = FeatureInputs(
        row=row,
        train=Assembly(cfg).algorithm,
        max_tokens=cfg.rollout.max_tokens,
        models=models | ({"critic": critic} if CRITIC in row.parts else {}),
        part_weights=Assembly(cfg).part_weights,
    )
    objective = Objective(
        Assembly(cfg).algorithm, build_features(given), max_tokens=cfg.rollout.max_tokens
    )
    kl_coeff = getattr(cfg.train, "kl_coeff", 0.0)
    if row.kl == "none":
        models = {"policy": policy}
    batch: PolicyBatch = prepare_update(
        objective, models, rollouts_of(raw), kl_coeff=kl_coeff, seed=SEED, version=VERSION
    )
    part = minibatch(objective, batch, torch.arange(len(raw.mask)))

    logprobs = raw.logprobs.clone().requires_grad_()
    top = raw.top.clone().requires_grad_()
    asked = Output(logprobs=logprobs, entropy=raw.entropy)
    if "top_logprobs" in row.needs:
        asked = dataclasses.replace(asked, top_logprobs=top)
    loss, _ = objective.policy_loss(asked, part)
    found = torch.autograd.grad(loss, [logprobs, top], allow_unused=True, materialize_grads=True)

    numbers = {
        number.name: getattr(cfg.train, number.key) for p in row.parts for number in p.numbers
    }
    if "weights_length" in numbers:
        numbers["weights_length"] = cfg.rollout.max_tokens
    again = raw.logprobs.clone().requires_grad_()
    top_again = raw.top.clone().requires_grad_()
    responses = [response_of(raw, i, again, top_again) for i in range(len(raw.mask))]
    expected = torch.autograd.grad(
        literal_loss(name, responses, numbers),
        [again, top_again],
        allow_unused=True,
        materialize_grads=True,
    )
    close_each(found[0], expected[0], "gradient of the logprobs")
    if row.gate == "simko":
        close_each(found[1], expected[1], "gradient of the candidates")
