"""Rows per turn against one row: where every turn reads the same, so does the gradient."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from oxrl.assembly.assembly import Assembly
from oxrl.config.checks.algorithm import AT_RATIO_ONE
from oxrl.data.batching import check_rollout_batch, to_rollout_batch
from oxrl.data.episode_rows import EpisodeInputs
from oxrl.functional.advantages import AdvantageInputs
from oxrl.modelfiles.builtin import builtin_policy
from oxrl.models.network import CausalNetwork, read_tokens
from oxrl.recipes.features.base import FeatureInputs
from oxrl.recipes.features.episodes import Episodes
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.objective import Objective, prepare_update
from oxrl.recipes.rl import minibatch, split_by_group
from oxrl.tables.policy import ROWS
from oxrl.types import (
    Completion,
    Output,
    PolicyBatch,
    Prompt,
    Rollout,
    RolloutBatch,
    Score,
    Segment,
    TokenBatch,
    Turn,
)
from support.small_runs import rl_config

END = 1
SAMPLES = 4
# What a whole sequence decides, a row decides: a ratio, a rejection, a sum over its tokens.
OF_SEQUENCES = (
    "gspo",
    "gspo_token",
    "luspo",
    "vespo",
    "gmpo",
    "kimi",
    "fipo",
    "geometric_rejection",
    "k3_rejection",
    "veto",
    "opsm",
)
UNBUILT = ("rspo", "r3")
# Heads of the sampler are in the rows of test_centered_runs.py.
TEACHERS = {"teacher", "teacher_top", "discriminator", "sampler_top"}
TAUGHT = [row.name for row in ROWS.values() if TEACHERS & {*row.needs}]
RANDOM = ("clip_cov",)  # chooses tokens by noise that is laid out as the batch is
APART = (*OF_SEQUENCES, *UNBUILT, *TAUGHT, *RANDOM)
# Of the reward, for the rows that compare them one by one, with their weights.
PARTS = {"won": 1.0, "brief": 0.5}
TOKEN_LEVEL = [row.name for row in ROWS.values() if row.recipe == "rl" and row.name not in APART]


def episodes(*, rows: bool) -> list[Rollout]:
    """Two prompts, four episodes each, of one to four turns; one of each group was cut.

    Args:
        rows: every turn has its context, which is all that was before.
    """
    chance = random.Random(5)
    found: list[Rollout] = []
    for group in range(2):
        prompt = Prompt(
            uid=str(group), messages=(), token_ids=tuple(chance.choices(range(5, 200), k=3))
        )
        for sample in range(SAMPLES):
            read = [*prompt.token_ids]
            segments: list[Segment] = []
            turns: list[Turn] = []
            count = chance.randint(1, 4)
            cut = sample == 1
            for turn in range(count):
                tokens = (*chance.choices(range(5, 200), k=chance.randint(0, 5)), END)
                reward = float(sample == 0 and turn == count - 1)
                segments.append(
                    Segment(
                        token_ids=tokens,
                        logprobs=tuple(-4 - 2 * chance.random() for _ in tokens),
                        versions=(3,) * len(tokens),
                        reward=reward,
                        turn=turn,
                        context=tuple(read) if rows and turn else None,
                    )
                )
                turns.append(Turn(text="", reward=reward))
                read += tokens
                if turn < count - 1 or cut:
                    answer = tuple(chance.choices(range(5, 200), k=2))
                    segments.append(
                        Segment(
                            token_ids=answer,
                            logprobs=(0.0,) * 2,
                            versions=(-1,) * 2,
                            origin="environment",
                            turn=turn,
                        )
                    )
                    read += answer
            completion = Completion(
                segments=tuple(segments),
                text="",
                finish_reason="stop",
                turns=tuple(turns),
                end="max_turns" if cut else "completed",
            )
            won = sum(turn.reward for turn in turns)
            score = Score(value=won, parts={"won": won, "brief": -float(len(read))})
            found.append(
                Rollout(
                    prompt=prompt,
                    completion=completion,
                    score=score,
                    group_id=group,
                    sample=sample,
                    seed=0,
                )
            )
    return found


class Reads:
    """A language model as a TrainEngine, as far as it is asked here."""

    def __init__(self, seed: int) -> None:
        self.model = builtin_policy("builtin:tiny", seed=seed)

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        with torch.no_grad():
            return read_tokens(CausalNetwork(self.model), inputs, want, temperature=1.0)


class Judges:
    """A critic: any function of the tokens before a place."""

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        real = torch.where(inputs.attention_mask, inputs.tokens, 0).double()
        before = torch.sin(real.cumsum(1) / 50)
        values = torch.nn.functional.pad(before[:, :-1], (1, 0)).float()
        return Output(
            values=torch.where(inputs.response_mask, values, 0.0), bootstrap=before[:, -1].float()
        )


class Trained(NamedTuple):
    """What the update of one optimizer step reads, and from whom."""

    objective: Objective
    policy: Reads
    part: PolicyBatch


def prepared(
    folder: Path, name: str, *, rows: bool, minibatches: int = 1, **train: Any
) -> list[Trained]:
    """The minibatches of the episodes under the algorithm `name`."""
    given = {"alg_name": name, "lr": 1e-3, **train}
    sections: dict[str, dict[str, Any]] = {
        "train": given,
        "rollout": {"max_tokens": 24, "n_samples": SAMPLES},
        "run": {"steps": 1000},
        "environment": {"name": "tools"},
    }
    overrides: list[str] = []
    if ROWS[name].advantage == "group_normalize_parts":
        parts = {part: {"name": "math", "weight": weight} for part, weight in PARTS.items()}
        sections["reward"] = {"parts": parts}
        overrides = ["~reward.name"]
    cfg = rl_config(folder, "run", overrides, **sections)
    policy, reference = Reads(0), Reads(1)
    models: Any = {"policy": policy, "critic": Judges(), "reference": reference}
    inputs: dict[str, Any] = {"part_weights": PARTS, "compared_parts": tuple(PARTS)}
    features = build_features(
        FeatureInputs(
            row=cfg.train.row,
            train=Assembly(cfg).algorithm,
            max_tokens=24,
            models=models,
            **inputs,
        )
    )
    objective = Objective(Assembly(cfg).algorithm, [*features, Episodes()], max_tokens=24)
    batch = to_rollout_batch(episodes(rows=rows), pad_id=0)
    check_rollout_batch(batch, stop_token_ids=(END,), max_tokens=None, strict_version=3)
    assert isinstance(batch.inputs, EpisodeInputs) == rows
    batch = dataclasses.replace(batch, greedy_rewards=torch.full((8,), 0.25))
    for feature in objective.features:
        batch = feature.on_rollouts(batch)
    whole = prepare_update(objective, models, batch, kl_coeff=0.1, seed=3, version=3)
    found: list[Trained] = []
    for chosen in split_by_group(whole.group_ids, minibatches, seed=1):
        part = minibatch(objective, whole, chosen)
        assert not isinstance(part.inputs, EpisodeInputs)
        found.append(Trained(objective, policy, part))
    return found


def gradients(folder: Path, name: str, *, rows: bool, **given: Any) -> list[Tensor]:
    """Gradient of each minibatch by every weight of the policy, and its loss at the end."""
    found: list[Tensor] = []
    for objective, policy, part in prepared(folder, name, rows=rows, **given):
        said = read_tokens(
            CausalNetwork(policy.model), part.inputs, objective.want, temperature=1.0
        )
        loss, _ = objective.policy_loss(said, part)
        weights = [p for p in policy.model.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(loss, weights, allow_unused=True)
        flat = [slope.flatten() for slope in slopes if slope is not None]
        found.append(torch.cat([*flat, loss.detach().reshape(1)]))
    return found


def numbers_of(name: str) -> dict[str, Any]:
    """So that what a row can do is done: bootstraps, KL, other clips than the first step meets."""
    read = ROWS[name].defaults
    wanted: dict[str, Any] = {
        "correction_level": "token",
        "kl_coeff": 0.1,
        "bootstrap_on_truncation": True,
        "gamma": 0.9,
        "gae_lambda": 0.8,
    }
    found = {key: value for key, value in wanted.items() if key in read}
    row = ROWS[name]
    if row.ratio == "token":
        found["old_logprobs"] = "bypass" if row.correction == "none" else "recompute"
    if row.gate in AT_RATIO_ONE:
        found["epochs"] = 2
    return found


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_rows_per_turn_give_the_gradient_of_one_row(tmp_path: Path, name: str) -> None:
    given = numbers_of(name)
    if name == "a3po":
        del given["old_logprobs"]
    [one] = gradients(tmp_path / "one", name, rows=False, **given)
    [several] = gradients(tmp_path / "several", name, rows=True, **given)
    assert float(one.abs().max()) > 1e-4
    assert float((one - several).abs().max()) < 1e-5 * float(one.abs().max())


@pytest.mark.parametrize("rows", [False, True])
def test_only_sampled_tokens_have_a_gradient_by_finite_differences(
    tmp_path: Path, rows: bool
) -> None:
    given = {"kl_coeff": 0.3, "entropy_coeff": 0.1, "old_logprobs": "bypass"}
    [(objective, policy, part)] = prepared(tmp_path, "grpo", rows=rows, **given)
    said = policy.forward(part.inputs, objective.want)
    # A number everywhere, also where nothing is asked of the model.
    noise = torch.Generator().manual_seed(1)
    shape = part.inputs.tokens.shape
    logprobs = -3 - torch.rand(shape, generator=noise, dtype=torch.float64)
    entropy = torch.rand(shape, generator=noise, dtype=torch.float64)
    assert said.logprobs is not None

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        found, _ = objective.policy_loss(Output(logprobs=logprobs, entropy=entropy), part)
        return found

    logprobs.requires_grad_()
    entropy.requires_grad_()
    slopes = torch.autograd.grad(loss(logprobs, entropy), [logprobs, entropy])
    mask = part.inputs.response_mask
    step = 1e-5
    with torch.no_grad():
        for row, place in part.inputs.attention_mask.nonzero().tolist():
            moved = torch.zeros_like(logprobs)
            moved[row, place] = step
            for number, (first, second) in enumerate(((moved, 0 * moved), (0 * moved, moved))):
                up = loss(logprobs + first, entropy + second)
                down = loss(logprobs - first, entropy - second)
                slope = float(up - down) / (2 * step)
                assert slope == pytest.approx(float(slopes[number][row, place]), abs=1e-6)
                assert bool(mask[row, place]) or up == down
    assert all(bool((slope[mask] != 0).any()) for slope in slopes)


def test_what_is_cut_between_two_turns_is_told_from_what_is_cut_in_one() -> None:
    given = episodes(rows=False)
    inside = given[0]
    assert inside.completion.segments[-1].origin == "policy"
    cut = dataclasses.replace(inside.completion, end="max_tokens", finish_reason="length")
    batch = to_rollout_batch([dataclasses.replace(inside, completion=cut), given[1]], pad_id=0)
    inputs = AdvantageInputs(
        rewards=batch.rewards,
        token_rewards=batch.token_rewards,
        response_mask=batch.inputs.response_mask,
        group_ids=batch.group_ids,
    )
    found = Episodes().on_advantage_inputs(inputs, batch)
    assert found.need("next_turn").tolist() == [False, True]


def test_an_episode_cut_before_its_first_turn_was_cut_between_two() -> None:
    """Three tokens: the first row has one to read and none of the policy, the second one of each."""
    read = torch.tensor([[True, False, False], [True, True, False]])
    mask = torch.tensor([[False, False, False], [False, True, False]])
    nothing = torch.zeros(2)
    inputs = AdvantageInputs(
        rewards=nothing, token_rewards=nothing, response_mask=mask, group_ids=nothing
    )
    rows: Any = SimpleNamespace(inputs=SimpleNamespace(attention_mask=read), turns=None)
    found = Episodes().on_advantage_inputs(inputs, rows)
    assert found.need("next_turn").tolist() == [True, False]


def test_every_row_is_of_tokens_or_of_sequences_and_those_do_differ(tmp_path: Path) -> None:
    rows = {row.name for row in ROWS.values() if row.recipe == "rl"}
    assert rows == {*TOKEN_LEVEL, *APART}
    given: dict[str, Any] = {"old_logprobs": "bypass"}
    [one] = gradients(tmp_path / "one", "gspo", rows=False, **given)
    [several] = gradients(tmp_path / "several", "gspo", rows=True, **given)
    assert float((one - several).abs().max()) > 1e-3 * float(one.abs().max())


def test_minibatches_keep_the_rows_of_an_episode_together(tmp_path: Path) -> None:
    one = gradients(tmp_path / "one", "grpo", rows=False, minibatches=2)
    several = gradients(tmp_path / "several", "grpo", rows=True, minibatches=2)
    for first, second in zip(one, several, strict=True):
        assert float((first - second).abs().max()) < 1e-5 * float(first.abs().max())


def test_what_is_cut_is_masked_in_every_row(tmp_path: Path) -> None:
    for rows in (False, True):
        folder = tmp_path / str(rows)
        [found] = gradients(folder, "sgrpo", rows=rows, mask_truncated=True)
        kept = found if not rows else kept  # noqa: F821
        assert float((found - kept).abs().max()) < 1e-5 * float(kept.abs().max())


def test_selected_episodes_keep_their_rows_and_their_places(tmp_path: Path) -> None:
    batch = to_rollout_batch(episodes(rows=True), pad_id=0)
    order = torch.tensor([5, 0, 3])
    chosen: RolloutBatch = batch.select(order)
    assert isinstance(chosen.inputs, EpisodeInputs) and isinstance(batch.inputs, EpisodeInputs)
    for place, episode in enumerate(order.tolist()):
        mine = batch.inputs.episode_ids == episode
        other = chosen.inputs.episode_ids == place
        assert batch.inputs.rows.tokens[mine].equal(chosen.inputs.rows.tokens[other])
    lines = torch.where(chosen.inputs.response_mask, chosen.inputs.tokens, 0)
    assert chosen.inputs.join(chosen.inputs.split(lines)).equal(lines)
    read = chosen.inputs.as_read(chosen)
    assert chosen.inputs.as_given(read.inputs.tokens).equal(lines)
    trained = torch.where(chosen.inputs.rows.response_mask, chosen.inputs.rows.tokens, 0)
    assert chosen.inputs.split(lines).equal(trained)


def test_the_rows_that_episodes_are_read_in_are_counted() -> None:
    """Three episodes of one row each; with a context of each turn there are as many as turns."""
    given = episodes(rows=True)
    turns = sum(len(rollout.completion.turns) for rollout in given)
    for rows, count in ((False, len(given)), (True, turns)):
        rollouts = to_rollout_batch(episodes(rows=rows), pad_id=0)
        batch: Any = SimpleNamespace(inputs=rollouts.inputs)
        progress: Any = SimpleNamespace()
        assert Episodes().steer(batch, progress) == {"episode/rows": count}
