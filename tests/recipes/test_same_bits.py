"""`mismatch/bits`: what the sampler recorded and what the trainer computes, bit by bit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import InvariantError
from oxrl.recipes.features.base import Prepared
from oxrl.recipes.features.same_bits import SameBits
from oxrl.recipes.session import RolloutProgress
from oxrl.rollouts.sync import RolloutStep, SyncRollouts
from oxrl.types import Output, PolicyBatch, Rollout, RolloutBatch, TokenBatch
from support.small_runs import metric_lines, model_that_stops, rl_config
from support.talk import TALK

NOW = 6
# Rows of a prompt of one token, and three that were sampled; the last is padding in one row.
MASK = torch.tensor([[False, True, True, True], [False, True, True, False]])
# Who sampled each token: the weights of the update, or those before.
VERSIONS = torch.tensor([[-1, NOW - 1, NOW, NOW], [-1, NOW - 1, NOW - 1, -1]])


def numbers() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return -torch.rand(2, 4, generator=generator) - 0.5


def batch(versions: Tensor = VERSIONS) -> PolicyBatch:
    return PolicyBatch(
        inputs=TokenBatch(
            tokens=torch.arange(8).view(2, 4) + 30, attention_mask=MASK | True, response_mask=MASK
        ),
        old_logprobs=None,
        rollout_logprobs=numbers(),
        ref_logprobs=None,
        advantages=numbers(),
        loss_weights=numbers(),
        versions=versions,
        group_ids=torch.tensor([11, 12]),
    )


def rollouts(of: PolicyBatch) -> RolloutBatch:
    rows = torch.zeros(2)
    return RolloutBatch(
        inputs=of.inputs,
        rollout_logprobs=of.rollout_logprobs,
        rewards=rows.double(),
        token_rewards=torch.zeros(2, 4, dtype=torch.float64),
        group_ids=of.group_ids,
        versions=of.versions,
        terminated=rows.bool(),
        truncated=rows.bool(),
        valid=rows.bool(),
    )


def next_to(said: Tensor, row: int, place: int, *, ulps: int = 1) -> Tensor:
    """Another number at one place: so many float32 further."""
    changed = said.clone()
    for _ in range(ulps):
        changed[row, place] = torch.nextafter(changed[row, place], torch.tensor(0.0))
    return changed


def looked_at(
    said: Tensor, *, before: Tensor | None = None, versions: Tensor = VERSIONS, later: int = 0
) -> dict[str, float]:
    """What the feature tells of an update, the last of several on the same rows.

    Args:
        said: by the trainer in it.
        before: by the trainer before all of them.
        later: updates on the same rows before this one.
    """
    whole = batch(versions)
    feature = SameBits()
    prepared = Prepared(rollouts(whole), Output(logprobs=before), None, seed=0, version=NOW)
    assert feature.on_prepared(whole, prepared) is whole
    assert feature.steer(whole, RolloutProgress()) == {}
    rows = torch.arange(2)
    found: dict[str, float] = {}
    for index in range(later + 1):
        spoken = said if index == later else whole.rollout_logprobs
        wrong = Output(logprobs=spoken - 9)
        assert feature.on_minibatch(whole) is whole
        assert feature.loss(wrong, whole) is None  # with gradients: pieces of the minibatch
        with torch.no_grad():
            assert feature.loss(Output(logprobs=spoken), whole) is None
        found = dict(feature.add_gradients(rows, whole))
    return found


def test_equal_numbers_of_the_current_weights_are_counted() -> None:
    said = batch().rollout_logprobs
    assert looked_at(said) == {"mismatch/bits": 0.0, "mismatch/bits_compared": 2.0}
    assert looked_at(said, before=said) == {"mismatch/bits": 0.0, "mismatch/bits_compared": 4.0}


@pytest.mark.parametrize("ulps", [1, 2, 1000])
@pytest.mark.parametrize("place", [2, 3])
@pytest.mark.parametrize("when", ["before", "in the update"])
def test_one_token_that_differs_ends_the_run_with_both_numbers(
    when: str, place: int, ulps: int
) -> None:
    recorded = batch().rollout_logprobs
    said = next_to(recorded, 0, place, ulps=ulps)
    with pytest.raises(InvariantError) as error:
        if when == "before":
            looked_at(recorded, before=said)
        else:
            looked_at(said, before=recorded)
    text = str(error.value)
    assert f"step {NOW + 1}, row 0 (draw 11), place {place}" in text
    assert f"token {30 + place} " in text
    theirs, ours = f"{float(recorded[0, place]):.9g}", f"{float(said[0, place]):.9g}"
    assert theirs != ours
    assert f"recorded the log-probability {theirs}, and the trainer computes {ours}" in text
    assert "1 of 2 tokens differ" in text
    assert "run.exact: false" in text


@pytest.mark.parametrize(
    ("row", "place"),
    [(0, 1), (1, 1), (1, 2), (0, 0), (1, 3)],
    ids=["older", "older", "older", "prompt", "padding"],
)
def test_tokens_of_older_weights_and_of_nobody_are_not_compared(row: int, place: int) -> None:
    said = next_to(batch().rollout_logprobs, row, place, ulps=1000)
    for before in (None, said):
        assert looked_at(said, before=before)["mismatch/bits"] == 0.0


def test_tokens_of_newer_weights_are_not_compared() -> None:
    said = batch().rollout_logprobs - 1
    later = torch.where(VERSIONS == NOW, NOW + 1, VERSIONS)
    assert looked_at(said, versions=later)["mismatch/bits_compared"] == 0.0


def test_later_updates_on_the_same_rows_compute_with_new_weights() -> None:
    recorded = batch().rollout_logprobs
    found = looked_at(recorded - 1, later=1)
    assert found == {"mismatch/bits": 0.0, "mismatch/bits_compared": 2.0}


def test_bits_are_compared_and_not_numbers() -> None:
    """0.0 equals -0.0, and has other bits."""
    whole = batch()
    whole.rollout_logprobs[0, 2] = 0.0
    said = whole.rollout_logprobs.clone()
    said[0, 2] = -0.0
    feature = SameBits()
    prepared = Prepared(rollouts(whole), Output(logprobs=said), None, seed=0, version=NOW)
    feature.on_prepared(whole, prepared)
    with pytest.raises(InvariantError, match="place 2"):
        feature.steer(whole, RolloutProgress())


def test_it_is_sent_to_training_ranks_without_what_it_holds() -> None:
    whole = batch()
    feature = SameBits()
    said = Output(logprobs=whole.rollout_logprobs)
    feature.on_prepared(whole, Prepared(rollouts(whole), said, None, seed=0, version=NOW))
    assert len(pickle.dumps(feature)) < 500
    assert pickle.loads(pickle.dumps(feature)).loss(said, whole) is None


# --- Whole runs.
def exact_config(folder: Path, name: str, **sections: Any) -> Config:
    run_section = {"exact": True, "steps": 4} | sections.pop("run", {})
    return rl_config(folder, name, run=run_section, **sections)


KINDS: dict[str, dict[str, Any]] = {
    "one update": {},
    "two minibatches, twice": {"train": {"alg_name": "sgrpo", "epochs": 2, "minibatches": 2}},
    "the sampler's as old ones": {"train": {"alg_name": "sgrpo", "old_logprobs": "bypass"}},
    "a reference": {"train": {"alg_name": "sgrpo", "kl_coeff": 0.1}},
    "a temperature": {"rollout": {"temperature": 0.7, "max_tokens": 6, "n_samples": 4}},
    "recomputed activations": {"model": {"name": "builtin:tiny", "gradient_checkpointing": True}},
    "small pieces": {"train": {"alg_name": "sgrpo", "micro_batch_tokens": 40}},
    "rows one by one": {"train": {"alg_name": "sgrpo", "share_prefix": False}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_run_says_zero_and_of_how_many(tmp_path: Path, kind: str) -> None:
    cfg = exact_config(tmp_path, "run", **KINDS[kind])
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 4
    for line in lines:
        assert line["mismatch/bits"] == 0.0
        assert line["mismatch/bits_compared"] >= line["data/tokens"] / cfg.train.updates


@pytest.mark.parametrize("old", ["current", "recompute"])
@pytest.mark.parametrize("reads", ["whole", "last"])
def test_every_turn_of_episodes_is_compared_and_a_wrong_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str, old: str
) -> None:
    """Whether they are read in one row, or each turn in a row of its own."""
    (tmp_path / "talk.py").write_text(TALK)
    sections: dict[str, Any] = {
        "environment": {"name": f"{tmp_path / 'talk.py'}:Talk", "max_turns": 3},
        "reward": {"name": ""},
        "rollout": {"max_tokens": 12, "n_samples": 2, "context": reads},
        "model": {"name": str(model_that_stops(tmp_path / "model"))},
        "train": {"alg_name": "sgrpo", "minibatches": 2, "old_logprobs": old},
    }
    if old == "current":
        del sections["train"]["minibatches"]
    cfg = exact_config(tmp_path, "run", **sections)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["mismatch/bits"] for line in lines] == [0.0] * 4
    updates = cfg.train.updates
    for line in lines:
        assert line["mismatch/bits_compared"] >= line["data/tokens"] / updates

    def change(step: RolloutStep) -> None:
        if step.step == updates:
            step.rollouts[3] = one_further(step.rollouts[3], 0, last=True)
            changed.append(step.rollouts[3])

    changed: list[Rollout] = []
    sampled_with(monkeypatch, change)
    with pytest.raises(InvariantError, match="something in this run is not exact") as error:
        run(exact_config(tmp_path, "wrong", **sections))
    [rollout] = changed
    assert f"(draw {rollout.group_id})" in str(error.value)


def test_a_run_that_promises_nothing_compares_nothing(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "run", run={"steps": 1})
    run(cfg)
    assert [key for key in metric_lines(cfg.run.directory)[0] if "bits" in key] == []


def one_further(rollout: Rollout, place: int, *, last: bool = False) -> Rollout:
    """The rollout, and one log-probability that its sampler did not say, in its first turn or in
    its last.
    """
    segments = [*rollout.completion.segments]
    turns = [at for at, segment in enumerate(segments) if segment.logprobs]
    at = turns[-1 if last else 0]
    said = torch.tensor(segments[at].logprobs)
    said[place] = torch.nextafter(said[place], torch.tensor(0.0))
    segments[at] = replace(segments[at], logprobs=tuple(said.tolist()))
    return replace(rollout, completion=replace(rollout.completion, segments=tuple(segments)))


Change = Callable[[RolloutStep], None]


def sampled_with(patch: pytest.MonkeyPatch, change: Change) -> None:
    """Change what is sampled before it is trained on."""
    usual = SyncRollouts.next

    def next_step(self: SyncRollouts, draw: int, *, step: int) -> RolloutStep:
        found = usual(self, draw, step=step)
        change(found)
        return found

    patch.setattr(SyncRollouts, "next", next_step)


@pytest.mark.parametrize("old", ["current", "recompute", "bypass"])
def test_a_sampler_that_says_something_else_of_one_token_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    """Whoever takes the sampler's number from the trainer would notice nothing."""

    def change(step: RolloutStep) -> None:
        if step.step == 2:
            step.rollouts[5] = one_further(step.rollouts[5], 1)
            changed.append(step.rollouts[5])

    changed: list[Rollout] = []
    sampled_with(monkeypatch, change)
    cfg = exact_config(tmp_path, "run", train={"alg_name": "sgrpo", "old_logprobs": old})
    with pytest.raises(InvariantError) as error:
        run(cfg)
    [rollout] = changed
    place = len(rollout.prompt.token_ids) + 1
    token = rollout.completion.token_ids[1]
    wanted = f"step 3, row 5 (draw {rollout.group_id}), place {place}: of token {token} the"
    assert wanted in str(error.value)
    assert len(metric_lines(cfg.run.directory)) == 2
    recorded = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    assert json.loads(recorded[-1])["step"] == 3  # what was sampled is there to be looked at


def test_samples_of_another_run_are_not_compared(tmp_path: Path) -> None:
    """Their versions are those of another run's weights."""
    sampled = exact_config(tmp_path, "sampled", run={"record": "tokens", "seed": 5})
    run(sampled)
    stored = {"from_samples": str(sampled.run.directory), "max_tokens": 6, "n_samples": 4}
    cfg = exact_config(tmp_path, "run", rollout=stored)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 4
    assert all("mismatch/bits" not in line for line in lines)
    assert max(line["mismatch/abs_logdiff_max"] for line in lines) > 1e-3
