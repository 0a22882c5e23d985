"""Features beside those of the core: their limits, what they change, and what they refuse."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError, OxrlError, Stopped
from oxrl.plan.preflight import Prepared, check_features, examine
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.scored_answers import ScoredSampler
from oxrl.tables.policy import ROWS
from oxrl.types import (
    Output,
    PolicyBatch,
    Rollout,
    RolloutBatch,
    Rollouts,
    Score,
    SupervisedBatch,
    TokenBatch,
)
from oxrl.usercode.given import giving, name_of
from oxrl_features.chord import Chord, Schedule, imitation_loss
from oxrl_features.echo import environment_tokens
from oxrl_features.entropy_mask import EntropyMask, forks
from oxrl_features.held_out_grader import HeldOutGrader, is_due, worth
from oxrl_features.permuted_rewards import PermutedRewards, moved
from support.command_line import oxrl
from support.feature_ranks import rollout_batch, train_alone, train_on_rank
from support.killed_runs import killed_until_done, uninterrupted
from support.rank_processes import run_ranks
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config, write_inputs

Features = dict[str, dict[str, Any]]


def with_features(
    folder: Path, name: str, features: Features, **sections: dict[str, Any]
) -> Config:
    train = {"alg_name": "sgrpo", "lr": 1e-2, "features": features} | sections.pop("train", {})
    return rl_config(folder, name, train=train, **sections)


def inputs(folder: Path) -> Path:
    """Given answers are in chats.jsonl, held-out prompts in prompts.jsonl."""
    write_inputs(folder)
    return folder


def monitor(folder: Path, **numbers: Any) -> dict[str, Any]:
    data = str(inputs(folder) / "prompts.jsonl")
    return {"data": data, "grader": "exact", "every": 3} | numbers


def lines_without(folder: Path, *prefixes: str) -> list[dict[str, Any]]:
    lines = metric_lines(folder)
    return [{k: v for k, v in line.items() if not k.startswith(prefixes)} for line in lines]


def weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in final_files(folder).items() if "safetensors" in name}


# --- Limits.
def assert_same_as_the_row(
    build: Callable[[str, Features], Config], features: Features, *own: str
) -> None:
    with_it = build("with", features)
    without = build("without", {})
    run(with_it)
    run(without)
    left, right = with_it.run.directory, without.run.directory
    assert lines_without(left, *own) == lines_without(right, *own)
    assert (left / "samples.jsonl").read_bytes() == (right / "samples.jsonl").read_bytes()
    assert weights(left) and weights(left) == weights(right)


def test_without_a_quantile_or_a_share_a_row_is_itself(tmp_path: Path) -> None:
    chord = {"rows": str(inputs(tmp_path) / "chats.jsonl"), "peak": 0.0, "valley": 0.0}
    features = {"entropy-mask": {"quantile": 0.0}, "chord": chord}

    def build(name: str, features: Features) -> Config:
        return with_features(tmp_path, name, features, train={"minibatches": 2})

    assert_same_as_the_row(build, features, "chord/", "entropy_mask/")


TALK = """
from oxrl.environments import Step

class Talk:
    def reset(self, prompt, seed):
        return "hm"
    def step(self, text):
        return Step("go on", reward=len(set(text)) / 10)
"""


def test_what_the_environment_said_without_a_weight_is_the_row_itself(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    model = str(model_that_stops(tmp_path / "model"))

    def build(name: str, features: Features) -> Config:
        return with_features(
            tmp_path,
            name,
            features,
            model={"name": model},
            environment={"name": f"{tmp_path / 'talk.py'}:Talk", "max_turns": 3},
            reward={"name": ""},
            run={"steps": 3},
            train={"lr": 2e-5},
            rollout={"max_tokens": 24, "n_samples": 4},
        )

    assert_same_as_the_row(build, {"echo": {"coeff": 0.0}}, "echo/")
    heard = build("heard", {"echo": {"coeff": 0.5}})
    run(heard)
    lines = metric_lines(heard.run.directory)
    told = [line["echo/nll"] for line in lines if line["echo/tokens"]]
    assert len(told) >= 2 and told[-1] < told[0] - 0.05


# --- What they compute.
def test_the_schedule_rises_and_falls_as_that_of_the_authors() -> None:
    schedule = Schedule(peak=0.9, valley=0.1, warmup_steps=4, decay_steps=10)
    found = [schedule.at(step) for step in (0, 2, 4, 9, 14, 100)]
    assert found == pytest.approx([0.0, 0.45, 0.9, 0.5, 0.1, 0.1])
    assert Schedule(peak=0.3, valley=0.3, warmup_steps=0, decay_steps=0).at(0) == 0.3


def test_given_answers_weigh_most_where_the_policy_is_unsure() -> None:
    logprobs = torch.tensor([[0.0, math.log(0.5), math.log(0.01)]], requires_grad=True)
    mask = torch.tensor([[False, True, True]])
    batch = SupervisedBatch(
        inputs=TokenBatch(tokens=mask.long(), attention_mask=~mask | mask, response_mask=mask),
        loss_weights=mask * (0.4 / 2),
    )
    loss, _ = imitation_loss(Output(logprobs=logprobs), batch)
    expected = -0.4 * (0.25 * math.log(0.5) + 0.0099 * math.log(0.01)) / 2
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    (slope,) = torch.autograd.grad(loss, logprobs)
    # phi has no gradient of its own.
    assert slope[0].tolist() == pytest.approx([0.0, -0.05, -0.4 * 0.0099 / 2], rel=1e-4)


def test_at_a_share_of_one_nothing_but_the_given_answers_is_learned(tmp_path: Path) -> None:
    rows = str(inputs(tmp_path) / "chats.jsonl")
    at_most = {"chord": {"rows": rows, "peak": 1.0, "valley": 1.0}}
    named = {"alone": at_most, "exchanged": at_most | {"permuted-rewards": {}}, "row": {}}
    found: dict[str, dict[str, bytes]] = {}
    for name, features in named.items():
        cfg = with_features(tmp_path, name, features, run={"steps": 2})
        run(cfg)
        found[name] = weights(cfg.run.directory)
        told = [line.get("chord/nll", math.nan) for line in metric_lines(cfg.run.directory)]
        assert name == "row" or told[1] < told[0]
    newest = "model.safetensors"
    assert found["alone"][newest] == found["exchanged"][newest]
    assert found["alone"][newest] != found["row"][newest]


def test_given_answers_weigh_m_of_their_step_and_ones_own_the_rest(tmp_path: Path) -> None:
    mask = torch.tensor([[False, True, True]])
    answers = SupervisedBatch(
        inputs=TokenBatch(tokens=mask.long(), attention_mask=~mask | mask, response_mask=mask),
        loss_weights=mask / 2,
    )
    drawn: list[range] = []
    learned: list[SupervisedBatch] = []

    def at(draws: range) -> SupervisedBatch:
        drawn.append(draws)
        return answers

    def forward_backward(batch: SupervisedBatch, loss: object, want: object) -> Output:
        learned.append(batch)
        return Output(logprobs=torch.full(mask.shape, -2.0))

    policy: Any = SimpleNamespace(forward_backward=forward_backward)
    made = replace(given(rows=lambda path: at), models={"policy": policy})
    path = str(inputs(tmp_path) / "chats.jsonl")
    feature = Chord(made, path, rows_per_step=3, peak=0.8, valley=0.2, decay_steps=10)
    batch = policy_batch(rollout_batch(0))
    batch = replace(batch, loss_weights=torch.ones_like(batch.advantages))
    before: Any = SimpleNamespace(version=4)
    feature.on_prepared(batch, before)
    for step in (4, 5):
        share = Schedule(peak=0.8, valley=0.2, warmup_steps=0, decay_steps=10).at(step)
        own = feature.on_minibatch(batch).loss_weights
        assert torch.allclose(own, batch.loss_weights * (1 - share))
        told = feature.add_gradients(torch.zeros(0), batch)
        assert told == pytest.approx({"chord/share": share, "chord/nll": 2.0})
        assert drawn[-1] == range(3 * step, 3 * step + 3)
        assert torch.allclose(learned[-1].loss_weights, answers.loss_weights * share)


def test_only_forks_learn() -> None:
    entropy = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 4.0, 5.0, 5.0]])
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    assert forks(entropy, mask, quantile=0.6).tolist() == [
        [False, False, False, False],
        [False, True, True, False],
    ]
    assert torch.equal(forks(entropy, mask, quantile=0.0), mask)
    assert int(forks(entropy, mask, quantile=0.99).sum()) == 1


def test_the_share_of_tokens_that_learn_is_told_and_the_rest_learns_nothing(
    tmp_path: Path,
) -> None:
    cfg = with_features(tmp_path, "run", {"entropy-mask": {"quantile": 0.75}}, run={"steps": 2})
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert all(0.25 <= line["entropy_mask/frac"] < 0.3 for line in lines)
    feature = EntropyMask(given())
    batch = rollout_batch(0)
    tokens = int(batch.inputs.response_mask.sum())
    feature._group_ids = batch.group_ids
    feature._learns = batch.inputs.response_mask & (torch.arange(batch.inputs.tokens.shape[1]) < 5)
    policy: Any = replace(policy_batch(batch), loss_weights=torch.ones(batch.inputs.tokens.shape))
    rows = torch.arange(4, 12)
    left = feature.on_minibatch(policy.select(rows)).loss_weights
    assert torch.equal(left, feature._learns[rows].float())
    assert 0 < int(feature._learns.sum()) < tokens


def given(**more: Any) -> FeatureInputs:
    engine: Any = None
    return FeatureInputs(
        row=ROWS["sgrpo"], train=engine, max_tokens=8, models={"policy": engine}, **more
    )


def policy_batch(batch: RolloutBatch) -> PolicyBatch:
    nothing = torch.zeros(batch.inputs.tokens.shape)
    return PolicyBatch(
        inputs=batch.inputs,
        old_logprobs=None,
        rollout_logprobs=nothing,
        ref_logprobs=None,
        advantages=nothing,
        loss_weights=nothing,
        versions=batch.versions,
        group_ids=batch.group_ids,
    )


def test_what_the_environment_said_is_neither_prompt_nor_answer() -> None:
    said = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    own = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]).bool()
    inputs = TokenBatch(tokens=said.long(), attention_mask=said, response_mask=own)
    assert environment_tokens(inputs).int().tolist() == [[0, 0, 0, 1, 0, 1], [0, 0, 1, 1, 0, 0]]


# --- The control.
def test_rewards_are_exchanged_over_the_batch_and_their_mean_stays() -> None:
    batch = rollout_batch(8)
    batch = replace(batch, part_rewards={"all": batch.rewards.clone()})
    found = PermutedRewards(given(seed=3)).on_rollouts(batch)
    assert sorted(found.rewards.tolist()) == sorted(batch.rewards.tolist())
    assert found.rewards.tolist() != batch.rewards.tolist()
    # Not only within groups: the signal between them is gone too.
    of_groups = [sorted(rewards) for rewards in found.rewards.view(4, 4).tolist()]
    assert of_groups != [sorted(rewards) for rewards in batch.rewards.view(4, 4).tolist()]
    assert torch.equal(found.part_rewards["all"], found.rewards)
    assert torch.allclose(found.token_rewards.sum(1), found.rewards)
    last = found.inputs.response_mask.int().cumsum(1).argmax(1)
    assert torch.equal(found.token_rewards.argmax(1), last)
    again = PermutedRewards(given(seed=3)).on_rollouts(batch)
    assert torch.equal(again.rewards, found.rewards)
    for seed, draw in ((4, 8), (3, 12)):
        moved_on = replace(batch, group_ids=batch.group_ids + draw - 8)
        other = PermutedRewards(given(seed=seed)).on_rollouts(moved_on)
        assert not torch.equal(other.rewards, found.rewards)


def test_rewards_of_tokens_keep_their_distance_from_the_end() -> None:
    earned = torch.tensor([[0.0, 1.0, 2.0, 4.0], [0.0, 0.0, 8.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    swapped = moved(earned, mask, torch.tensor([1, 0]))
    assert swapped.tolist() == [[0.0, 0.0, 0.0, 8.0], [0.0, 3.0, 4.0, 0.0]]


def test_a_control_learns_from_nothing_and_its_samples_say_what_the_reward_said(
    tmp_path: Path,
) -> None:
    plain = with_features(tmp_path, "plain", {}, run={"steps": 1})
    control = with_features(tmp_path, "control", {"permuted-rewards": {}}, run={"steps": 1})
    run(plain)
    run(control)
    told = [
        [
            json.loads(line)
            for line in (cfg.run.directory / "samples.jsonl").read_text().splitlines()
        ]
        for cfg in (plain, control)
    ]
    for one, other in zip(*told, strict=True):
        assert (one["response"], one["reward"]) == (other["response"], other["reward"])
    advantages = [[line["advantage"] for line in lines] for lines in told]
    assert advantages[0] != advantages[1]
    assert sorted(advantages[0]) != advantages[1]


# --- The monitor.
def test_probes_are_made_at_the_start_and_on_schedule(tmp_path: Path) -> None:
    held_out = str(inputs(tmp_path) / "prompts.jsonl")
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 8},
        "train": {"epochs": 2},
        "rollout": {"max_tokens": 6, "n_samples": 4, "eval_samples": 2},
        "data": {"train": held_out, "prompts_per_step": 4, "eval": held_out},
    }
    cfg = with_features(
        tmp_path,
        "run",
        {"held-out-grader": monitor(tmp_path, pattern="^")},
        **sections,
    )
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    probed = [line for line in lines if "monitor/gap" in line]
    assert [line["step"] for line in probed] == [2, 4, 6]
    for line in probed:
        gap = line["monitor/reward"] - line["monitor/grader"]
        assert line["monitor/gap"] == pytest.approx(gap)
        assert line["monitor/gap_low"] < line["monitor/gap"] < line["monitor/gap_high"]
        assert line["monitor/prompts"] == 24
        assert line["monitor/pattern_frac"] == 1.0
    # The answers are those of an evaluation, which never touch what is trained on.
    without = with_features(tmp_path, "without", {}, **sections)
    run(without)
    assert weights(cfg.run.directory) == weights(without.run.directory)
    (last,) = [line for line in metric_lines(without.run.directory) if "eval/reward" in line]
    assert last["step"] == 8
    assert is_due(3, 6, 8) is False and is_due(3, 0, 2) and is_due(3, 4, 6)


def test_a_prompt_has_a_worth_where_all_of_its_answers_have() -> None:
    right, wrong, failed = Score(value=1.0), Score(value=0.0), Score(value=None, status="error")
    found = worth([[right, wrong], [right, failed], [wrong, wrong, right]])
    assert found.tolist() == pytest.approx([0.5, math.nan, 1 / 3], nan_ok=True)


def test_of_answers_their_length_is_told_and_how_many_match_a_pattern() -> None:
    monitor: Any = HeldOutGrader(
        given(score=lambda name, groups: []), data="any", grader="exact", pattern=r"\d$"
    )
    answers = [
        SimpleNamespace(completion=SimpleNamespace(text=text, sampled=len(text)))
        for text in ("12", "3 or so", "x7", "8", "")
    ]
    told = monitor._about(answers)
    assert told == {"monitor/length_mean": 12 / 5, "monitor/pattern_frac": 0.6}


def test_a_plan_names_the_monitors_and_what_they_cost(tmp_path: Path) -> None:
    held_out = str(inputs(tmp_path) / "prompts.jsonl")
    features = {"permuted-rewards": {}, "held-out-grader": monitor(tmp_path, every=4)}
    cfg = with_features(
        tmp_path,
        "run",
        features,
        run={"steps": 16},
        rollout={"max_tokens": 6, "n_samples": 4, "eval_samples": 2},
        data={"train": held_out, "prompts_per_step": 4, "eval": held_out},
    )
    assert check_features(cfg, Prepared()) == (
        "held-out-grader (5 probes x 24 prompts x 2 samples = 240 responses more), "
        "permuted-rewards: made when a run starts"
    )


# --- Mistakes.
NO_COLUMNS = '{"question": "1+1="}\n' * 8
HELD_OUT = {"data": "prompts.jsonl", "grader": "exact"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that are right and files that are not; it is where one is."""
    inputs(tmp_path)
    (tmp_path / "odd.jsonl").write_text(NO_COLUMNS)
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "unanswered.jsonl").write_text('{"prompt": "1+1="}\n' * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"held-out-grader": {"grader": "exact"}}, "held-out-grader: data: is missing: give a"),
        ({"held-out-grader": HELD_OUT | {"data": "gone.jsonl"}}, "data: gone.jsonl: no such file"),
        ({"held-out-grader": {"data": "prompts.jsonl"}}, "grader: is missing: give another"),
        ({"held-out-grader": HELD_OUT | {"grader": "exakt"}}, "grader: .*did you mean 'exact'"),
        (
            {"held-out-grader": HELD_OUT | {"data": "odd.jsonl"}},
            "held-out-grader: data: give a JSONL .* of prompts .*odd.jsonl:1",
        ),
        (
            {"held-out-grader": HELD_OUT | {"data": "few.jsonl"}},
            "data: 4 prompts of few.jsonl may be asked .data.eval_rows., and an interval takes 5",
        ),
        (
            {"held-out-grader": HELD_OUT | {"every": 0}},
            "every: must be a whole number from 1 on, got 0",
        ),
        (
            {"held-out-grader": HELD_OUT | {"pattern": "[0-9"}},
            r"pattern: '\[0-9' is no regular expression, unterminated .*: write one of Python's",
        ),
        ({"echo": {}}, "echo: environment: .*set environment.name"),
        ({"echo": {"coeff": -1.0}}, "echo: coeff: must be a number from 0 to 100"),
        ({"chord": {}}, "chord: rows: is missing: give a JSONL"),
        ({"chord": {"rows": "gone.jsonl"}}, "chord: rows: gone.jsonl: no such file"),
        ({"chord": {"rows": "chats.jsonl", "peak": 2.0}}, "peak: must be a number from 0 to 1"),
        ({"chord": {"rows": "odd.jsonl"}}, "chord: rows: give a JSONL .*odd.jsonl:1"),
        ({"entropy-mask": {"quantile": 1.0}}, "quantile: must be a number from 0 to 0.99"),
        ({"permuted-rewards": {"seed": 1}}, "permuted-rewards: .*seed"),
    ],
)
def test_a_mistake_is_found_by_a_plan_and_before_a_run_and_names_its_field(
    files: Path, features: Features, named: str
) -> None:
    cfg = with_features(files, "run", features)
    with closing(Prepared()) as prepared:
        found = examine(cfg, prepared, "features")
    assert found.state == "wrong"
    assert re.search(f"(?s)train.features.*{named}", found.text), found.text
    with pytest.raises(OxrlError, match=f"(?s)train.features.*{named}") as refused:
        run(cfg)
    assert refused.value.exit_code == 2
    assert not cfg.run.directory.exists()


def test_a_plan_ends_with_exit_2_where_a_feature_cannot_be_made(files: Path) -> None:
    with_features(files, "run", {"chord": {"rows": "odd.jsonl"}})
    ended = oxrl("plan", "run.yaml", folder=files)
    assert ended.returncode == 2
    assert "train.features=chord: rows: give a JSONL or Parquet file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_feature_of_another_name_is_not_found(files: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'permuted-rewards'"):
        with_features(files, "run", {"permuted-reward": {}})


def test_answers_that_a_grader_cannot_judge_are_told_at_the_first_probe(files: Path) -> None:
    numbers = HELD_OUT | {"data": "unanswered.jsonl", "grader": "math"}
    named = "data: only 0 prompts of 8 could be judged .*math"
    with pytest.raises(OxrlError, match=f"(?s)held-out-grader: {named}") as refused:
        run(with_features(files, "run", {"held-out-grader": numbers}))
    assert refused.value.exit_code == 2


# --- Hooks of the core.
class Looks(Feature):
    """Notes what it is shown; hooks of the core are called in this order."""

    def __init__(self, given: FeatureInputs) -> None:
        self.notes: list[tuple[str, int]] = NOTES
        assert given.score is not None
        self.score = given.score

    def on_sampled(self, rollouts: Rollouts) -> None:
        groups = [(rollout.prompt, [rollout.completion]) for rollout in rollouts]
        scores = [score for scores in self.score("exact", groups) for score in scores]
        assert all(score.value in (0.0, 1.0) for score in scores)
        assert all(rollout.score.value is not None for rollout in rollouts)
        self.notes.append(("sampled", len(rollouts)))

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        self.notes.append(("laid out", len(batch)))
        return batch

    def measure(self, before: int, step: int) -> dict[str, float]:
        self.notes.append(("measured", step))
        return {"own/before": float(before)}


NOTES: list[tuple[str, int]] = []


def test_a_feature_sees_what_was_sampled_and_scores_it_by_another_reward(tmp_path: Path) -> None:
    NOTES.clear()
    with giving({name_of(Looks): Looks}):
        cfg = with_features(
            tmp_path, "run", {name_of(Looks): {}}, run={"steps": 4}, train={"minibatches": 2}
        )
        run(cfg)
    once = [("sampled", 16), ("laid out", 16)]
    assert NOTES == [*once, ("measured", 2), *once, ("measured", 4)]
    found = {line["step"]: line.get("own/before") for line in metric_lines(cfg.run.directory)}
    assert found == {1: None, 2: 0.0, 3: None, 4: 2.0}


# --- Ranks, and kills.
@pytest.mark.parametrize("name", ["permuted-rewards", "entropy-mask", "chord"])
def test_two_ranks_do_what_one_process_does(tmp_path: Path, name: str) -> None:
    rows = {"rows": str(inputs(tmp_path) / "chats.jsonl")}
    numbers = rows if name == "chord" else {}
    sections: dict[str, Any] = {"train": {"minibatches": 2, "adam_eps": 1e-3}}
    one = train_alone(with_features(tmp_path, "one", {name: numbers}, **sections))
    without = train_alone(with_features(tmp_path, "without", {}, **sections))
    sections = {
        "train": sections["train"] | {"backend": "fsdp"},
        "run": {"training_gpus": 2, "deadline_s": 60},
    }
    run_ranks(
        2,
        train_on_rank,
        with_features(tmp_path, "two", {name: numbers}, **sections),
        tmp_path / "out",
    )
    two = torch.load(tmp_path / "out")
    assert two.keys() == one.keys()
    far = 0.0
    for key, values in one.items():
        torch.testing.assert_close(two[key], values, rtol=1e-3, atol=1e-5)
        far = max(far, float((values - without[key]).abs().max()))
    assert far > 1e-3  # the feature does something here


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "steps"), [(3, 24), pytest.param(10, 80, marks=pytest.mark.full)]
)
def test_a_killed_run_with_features_goes_on_with_the_same_bytes(
    disk_path: Path, kills: int, steps: int
) -> None:
    chord = {"rows": str(inputs(disk_path) / "chats.jsonl"), "rows_per_step": 3, "decay_steps": 20}
    features = {"held-out-grader": monitor(disk_path), "chord": chord, "permuted-rewards": {}}
    whole, killed = (
        with_features(
            disk_path,
            name,
            features,
            run={"name": name, "steps": steps, "checkpoint_every": 3},
            train={"lr": 1e-3, "minibatches": 2},
        )
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    hits = killed_until_done(killed, kills=kills, seed=int(os.environ.get("OXRL_KILL_SEED", "0")))
    assert len(hits) == kills, hits
    left, right = killed.run.directory, whole.run.directory
    assert metric_lines(left) == metric_lines(right)
    assert (left / "samples.jsonl").read_bytes() == (right / "samples.jsonl").read_bytes()
    assert final_files(left) == final_files(right)
    assert any("monitor/gap_low" in line for line in metric_lines(left))


@pytest.mark.parametrize("call", [1, 2])
def test_a_stop_while_answers_are_sampled_is_made_up_for_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """In the first probe; in an evaluation of a step that no probe belongs to."""
    held_out = str(inputs(tmp_path) / "prompts.jsonl")
    whole, cut = (
        with_features(
            tmp_path,
            name,
            {"held-out-grader": monitor(tmp_path)},
            data={"train": held_out, "prompts_per_step": 4, "eval": held_out},
            run={"steps": 4, "eval_every": 2},
        )
        for name in ("whole", "cut")
    )
    run(whole)
    asked = ScoredSampler.answer
    calls: list[int] = []

    def stopped(self: ScoredSampler, draws: Any) -> list[Rollout]:
        calls.append(len(calls) + 1)
        if calls[-1] == call:
            raise Stopped
        return asked(self, draws)

    monkeypatch.setattr(ScoredSampler, "answer", stopped)
    with pytest.raises(Stopped):
        run(cut)
    run(cut, resume=True)
    assert metric_lines(cut.run.directory) == metric_lines(whole.run.directory)
    assert final_files(cut.run.directory) == final_files(whole.run.directory)
