"""Whole runs with score centering: what the sampler recorded is what the loss reads, on every way
from one to the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oxrl.assembly.assembly import Assembly
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.sample.likeliest import LikeliestRecorder, likeliest
from oxrl.engines.sample.rows import Recording
from oxrl.errors import ConfigError, EngineError
from oxrl.functional.logprobs import NO_CHANCE
from oxrl.recipes.objective import Objective
from oxrl.recipes.score_centering import outcomes_of, sampler_outcomes
from oxrl.tables.columns import HEAD_IDS, HEAD_LOGPROBS, HEAD_REST
from oxrl.types import Output, PolicyBatch, RolloutBatch
from support import feature_ranks
from support.feature_ranks import rollout_batch
from support.killed_runs import killed_until_done, uninterrupted
from support.rank_processes import run_ranks
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config
from support.talk import TALK

TOP = 5
CENTERED = {"alg_name": "sgrpo", "lr": 1e-3, "centering": "score", "center_top": TOP}
AHEAD = {"max_staleness": 3, "rounds": 3, "force_strict_on_policy": False}
SMALL = {"max_tokens": 6, "n_samples": 4}
Sections = dict[str, dict[str, Any]]


def talking(folder: Path, reads: str) -> Sections:
    """A run of episodes whose turns read everything before, or the last answer alone."""
    (folder / "talk.py").write_text(TALK)
    return {
        "environment": {"name": f"{folder / 'talk.py'}:Talk", "max_turns": 3},
        "reward": {"name": ""},
        "rollout": {"max_tokens": 12, "n_samples": 2, "context": reads},
        "model": {"name": str(model_that_stops(folder / "model"))},
    }


def centered(folder: Path, name: str, train: dict[str, Any], **sections: Any) -> Config:
    lines = {"steps": 4, "checkpoint_every": 0, "record": "tokens"} | sections.pop("run", {})
    return rl_config(folder, name, run=lines, train=CENTERED | train, **sections)


def recorded(cfg: Config) -> list[dict[str, Tensor]]:
    """What a run learned from, batch by batch."""
    files = sorted((cfg.run.directory / "rollouts").glob("step_????????.safetensors"))
    return [load_file(path) for path in files]


def check_heads(batch: dict[str, Tensor], prefix: str = "", top: int = TOP) -> tuple[int, int]:
    """Every trained token has the likeliest tokens of the place where it was sampled.

    Where it is one of them its own log-probability is theirs, to the bit; all have probability 1.
    How many there are, and how many of them are among the likeliest.
    """
    mask = batch[f"{prefix}response_mask"]
    tokens = batch[f"{prefix}tokens"][mask]
    ids = batch[f"{prefix}{HEAD_IDS}"].view(*mask.shape, top)[mask]
    logprobs = batch[f"{prefix}{HEAD_LOGPROBS}"].view(*mask.shape, top)[mask]
    rest = batch[f"{prefix}{HEAD_REST}"][mask]
    assert ids.dtype == torch.int32 and (ids >= 0).all()
    assert (logprobs.diff(dim=1) <= 0).all()
    whole = logprobs.double().exp().sum(1) + rest.double().exp()
    assert torch.allclose(whole, torch.ones_like(whole), rtol=0, atol=2e-6)
    same = ids == tokens[:, None]
    if not prefix:
        own = batch["rollout_logprobs"][mask]
        assert torch.equal(logprobs[same], own[same.any(1)])
        assert (own[~same.any(1)] <= rest[~same.any(1)] + 1e-6).all()
    return len(tokens), int(same.sum())


def checked(cfg: Config, top: int = TOP) -> None:
    """All batches of a run have heads, and some sampled tokens are in them and some are not."""
    counts = [check_heads(batch, top=top) for batch in recorded(cfg)]
    tokens = sum(count for count, _ in counts)
    assert tokens > 50
    assert 0 < sum(found for _, found in counts) < tokens


# way of a run -> its sections.
RUNS: dict[str, tuple[dict[str, Any], Sections]] = {
    "synchronous": ({}, {"rollout": {"max_tokens": 9, "n_samples": 4}}),
    "two updates": ({"minibatches": 2}, {}),
    "bypass": ({"old_logprobs": "bypass"}, {}),
    "micro-batches": ({"micro_batch_tokens": 40}, {}),
    "one by one": ({"share_prefix": False}, {}),
    "temperature": ({}, {"rollout": {**SMALL, "temperature": 0.6}}),
    "cached sampler": ({}, {"model": {"attention": "eager"}}),
    "one token": ({"center_top": 1}, {}),
    "sampling ahead": ({}, {"rollout": {**SMALL, **AHEAD}}),
    "interpolated": ({"alg_name": "a3po"}, {"rollout": {**SMALL, **AHEAD}}),
    "critic": ({"alg_name": "ppo", "critic_lr": 1e-3}, {}),
    "token": ({"center_tail": "token"}, {}),
}


@pytest.mark.parametrize("way", RUNS)
def test_a_run_trains_and_its_records_have_the_heads(way: str, tmp_path: Path) -> None:
    train, sections = RUNS[way]
    # One of its tokens is likely.
    model = {"name": str(model_that_stops(tmp_path / "model"))}
    cfg = centered(
        tmp_path, "run", train, **{**sections, "model": sections.get("model", {}) | model}
    )
    run(cfg)
    checked(cfg, cfg.train.center_top)
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 4
    for line in lines:
        assert 0 <= line["update/center_tail_frac"] <= 1
    assert max(line["update/grad_norm"] for line in lines) > 0


# way of a run -> what is known of the head before the update, where anything is.
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "current": ({}, ""),
    "recompute": ({"minibatches": 2}, "said by the policy"),
    "bypass": ({"old_logprobs": "bypass"}, "recorded"),
}


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("reads", ["", "last"])
def test_the_policy_is_asked_about_the_tokens_of_the_sampler(
    way: str, reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With next to no learning rate it says of them what the sampler said, but for rounding."""
    compared: list[int] = []
    policy_loss = Objective.policy_loss

    def checked_loss(self: Objective, output: Output, batch: PolicyBatch) -> Any:
        mask = batch.inputs.response_mask
        sampler = sampler_outcomes(batch.inputs.columns)[mask]
        now = outcomes_of(output)[mask]
        assert torch.allclose(now, sampler, rtol=0, atol=1e-4)
        old = batch.old_outcomes
        assert (old is None) == (way == "current")
        if old is not None:
            assert torch.allclose(old[mask], sampler, rtol=0, atol=1e-4)
            assert torch.equal(old[mask], sampler) == (ASKED[way][1] == "recorded")
        compared.append(len(now))
        return policy_loss(self, output, batch)

    monkeypatch.setattr(Objective, "policy_loss", checked_loss)
    sections = talking(tmp_path, reads) if reads else {}
    run(centered(tmp_path, "run", {"lr": 1e-9, **ASKED[way][0]}, **sections))
    assert sum(compared) > 50


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_episodes_have_heads_in_every_row(reads: str, tmp_path: Path) -> None:
    cfg = centered(tmp_path, "run", {"minibatches": 2}, **talking(tmp_path, reads))
    run(cfg)
    checked(cfg)
    of_rows = [batch for batch in recorded(cfg) if "rows.tokens" in batch]
    assert bool(of_rows) == (reads == "last")
    for batch in of_rows:
        check_heads(batch, "rows.")
    assert replay_is_equal(cfg, 3)


def replay_is_equal(cfg: Config, step: int) -> bool:
    """A step is computed again, to the byte."""
    return all(finding.equal for finding in replay(cfg.run.directory, step, tolerance=0.0))


@pytest.mark.parametrize("ahead", [{}, AHEAD], ids=["at once", "ahead"])
def test_a_step_is_replayed(ahead: dict[str, Any], tmp_path: Path) -> None:
    cfg = centered(
        tmp_path, "run", {}, rollout={**SMALL, **ahead}, run={"steps": 6, "checkpoint_every": 1}
    )
    run(cfg)
    assert replay_is_equal(cfg, 4)


def test_the_gradient_does_not_depend_on_how_a_step_is_cut(tmp_path: Path) -> None:
    found = []
    for name, train in (
        ("whole", {}),
        ("cut", {"micro_batch_tokens": 40}),
        ("plain", {"share_prefix": False}),
    ):
        cfg = centered(tmp_path, name, train, run={"steps": 1})
        run(cfg)
        found.append(metric_lines(cfg.run.directory)[0])
    for line in found[1:]:
        for number in ("update/loss", "update/grad_norm", "update/center_tail_frac"):
            assert line[number] == pytest.approx(found[0][number], rel=1e-4, abs=1e-6)


def test_the_whole_vocabulary_in_the_head_leaves_no_tail(tmp_path: Path) -> None:
    cfg = centered(tmp_path, "run", {"center_top": 261}, run={"steps": 2})
    run(cfg)
    for line in metric_lines(cfg.run.directory):
        assert line["update/center_tail_frac"] == 0
        assert line["update/skipped"] == 0
    for batch in recorded(cfg):
        rest = batch[HEAD_REST][batch["response_mask"]]
        assert len(rest) and (rest == NO_CHANCE).all()


# --- ranks


def with_heads(first_draw: int) -> RolloutBatch:
    """Rows of random tokens, with heads of random tokens, the sampled one among every second."""
    batch = rollout_batch(first_draw)
    mask = batch.inputs.response_mask
    chance = torch.Generator().manual_seed(first_draw)
    ids = torch.stack(
        [torch.randperm(200, generator=chance)[:TOP] for _ in range(mask.numel())]
    ).view(*mask.shape, TOP)
    known = batch.inputs.tokens % 2 == 0
    among = (ids == batch.inputs.tokens[..., None]).any(-1)
    ids[..., 0] = torch.where(known & ~among, batch.inputs.tokens, ids[..., 0])
    said = torch.randn(*mask.shape, TOP + 1, generator=chance).log_softmax(-1)
    columns = {
        HEAD_IDS: ids.to(torch.int32),
        HEAD_LOGPROBS: said[..., :TOP],
        HEAD_REST: said[..., TOP],
    }
    return dataclasses.replace(batch, inputs=dataclasses.replace(batch.inputs, columns=columns))


def train_on_rank_with_heads(cfg: Config, out: Path) -> None:
    setattr(feature_ranks, "rollout_batch", with_heads)  # noqa: B010 - read by its module
    feature_ranks.train_on_rank(cfg, out)


@pytest.mark.timeout(300)
def test_two_ranks_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_ranks, "rollout_batch", with_heads)
    more = {"lr": 1e-3, "minibatches": 2}
    found = {}
    for name, centering in (("one", "score"), ("without", "none")):
        train = CENTERED | more | {"centering": centering}
        if centering == "none":
            del train["center_top"]
        found[name] = feature_ranks.train_alone(rl_config(tmp_path, name, train=train))
    cfg = centered(
        tmp_path,
        "two",
        more | {"backend": "fsdp"},
        run={"training_gpus": 2, "deadline_s": 60, "record": "text"},
    )
    run_ranks(2, train_on_rank_with_heads, cfg, tmp_path / "out")
    two = torch.load(tmp_path / "out")
    far = 0.0
    for key, values in found["one"].items():
        torch.testing.assert_close(two[key], values, rtol=1e-3, atol=1e-5)
        far = max(far, float((values - found["without"][key]).abs().max()))
    assert far > 1e-3, "centering does something here"


# --- stored samples, and runs that are killed


def test_stored_samples_train_to_the_same_bytes(tmp_path: Path) -> None:
    first = centered(tmp_path, "first", {"center_top": 261}, rollout=SMALL)
    run(first)
    stored = {**SMALL, "from_samples": str(first.run.directory)}
    second = centered(tmp_path, "second", {"center_top": 261}, rollout=stored)
    run(second)
    assert final_files(first.run.directory) == final_files(second.run.directory)
    for path in (first.run.directory / "rollouts").iterdir():
        again = second.run.directory / "rollouts" / path.name
        assert again.read_bytes() == path.read_bytes()


def test_stored_samples_without_heads_or_with_others_are_refused(tmp_path: Path) -> None:
    bare = rl_config(tmp_path, "bare", run={"record": "tokens"}, rollout=SMALL)
    run(bare)
    stored = {**SMALL, "from_samples": str(bare.run.directory)}
    with pytest.raises(ConfigError, match="train.centering = 'score'\n    needs the likeliest"):
        centered(tmp_path, "second", {}, rollout=stored)
    narrow = centered(tmp_path, "narrow", {}, rollout=SMALL)
    run(narrow)
    stored = {**SMALL, "from_samples": str(narrow.run.directory)}
    with pytest.raises(ConfigError, match="train.center_top = 6\n    was 5 when the samples"):
        centered(tmp_path, "third", {"center_top": 6}, rollout=stored)
    # Heads that nobody reads are no hindrance.
    run(rl_config(tmp_path, "plain", run={"steps": 4}, rollout=stored))


def _killed(folder: Path, *, kills: int, steps: int) -> None:
    lines = {"steps": steps, "checkpoint_every": 3}
    whole, killed = (
        centered(folder, name, {}, run=lines, rollout={**SMALL, **AHEAD})
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    hits = killed_until_done(killed, kills=kills, seed=int(os.environ.get("OXRL_KILL_SEED", "0")))
    assert len(hits) >= kills, hits
    one, two = killed.run.directory, whole.run.directory
    assert metric_lines(one) == metric_lines(two)
    assert final_files(one) == final_files(two)
    left, right = (
        {path.name: path.read_bytes() for path in folder.glob("rollouts/step_*")}
        for folder in (one, two)
    )
    assert left.keys() == right.keys() and len(left) == 3 * steps
    assert [name for name in left if left[name] != right[name]] == []


@pytest.mark.timeout(300)
def test_a_run_with_heads_in_flight_killed_twice_equals_the_uninterrupted_one(
    disk_path: Path,
) -> None:
    _killed(disk_path, kills=2, steps=8)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_run_with_heads_in_flight_killed_twenty_times_equals_the_uninterrupted_one(
    disk_path: Path,
) -> None:
    _killed(disk_path, kills=20, steps=80)


# --- the recorder


def test_the_likeliest_tokens_are_of_the_distribution_that_is_sampled_from() -> None:
    """After the temperature of each row and after cuts; alone as in a batch."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 40, generator=generator) * 3
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0])
    logits[3, 4:] = -torch.inf
    found = likeliest(logits, temperature, 4)
    exact = (logits.double() / temperature.double()[:, None]).log_softmax(1)
    top = exact.topk(4)
    assert torch.equal(found.ids.long(), top.indices)
    assert torch.allclose(found.logprobs.double(), top.values, rtol=1e-5, atol=1e-6)
    others = exact.scatter(1, top.indices, -torch.inf).logsumexp(1).clamp(min=NO_CHANCE)
    assert torch.allclose(found.rest.double(), others, rtol=1e-5, atol=1e-6)
    assert found.rest[3] == NO_CHANCE
    assert found.logprobs[3].double().exp().sum() == pytest.approx(1, abs=1e-6)
    for row in range(6):
        alone = likeliest(logits[row : row + 1], temperature[row : row + 1], 4)
        for one, all_rows in zip(alone, found, strict=True):
            assert torch.equal(one[0], all_rows[row])


def test_samples_with_heads_of_which_nothing_is_left_are_json(tmp_path: Path) -> None:
    """JSON has no word for minus infinity, though Python writes one."""
    cfg = centered(tmp_path, "run", {}, run={"steps": 1}, rollout={"top_k": 2, "max_tokens": 4})
    run(cfg)
    [kept] = (cfg.run.directory / "rollouts").glob("*.samples.jsonl")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in kept.read_text().splitlines()]
    assert len(lines) > 1 and "e+30" in kept.read_text()


def test_a_rest_that_rounding_would_hide_is_recorded() -> None:
    found = likeliest(torch.tensor([[0.0, -1.0, -40.0]]), torch.ones(1), 2)
    assert float(found.rest) == pytest.approx(-40.3133, abs=1e-3)


def test_more_tokens_than_there_are_is_said_in_words() -> None:
    with pytest.raises(EngineError, match="train.center_top is 4, and the model has 3 tokens"):
        likeliest(torch.zeros(1, 3), torch.ones(1), 4)


def test_logits_are_searched_once_for_the_three_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(*given: Any) -> Any:
        searched.append(1)
        return likeliest(*given)

    monkeypatch.setattr("oxrl.engines.sample.likeliest.likeliest", counted)
    columns = LikeliestRecorder(3).columns()
    slots: Any = type("Slots", (), {"temperature": torch.ones(2)})
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(2, 9, generator=generator) for _ in range(3)]
    for step, logits in enumerate(steps):
        entries = [column.record(slots, slice(0, 2), logits) for column in columns.values()]
        assert torch.equal(entries[0].long(), logits.topk(3).indices)
        assert len(searched) == step + 1


def test_a_run_that_does_not_center_records_nothing(tmp_path: Path) -> None:
    plain = rl_config(tmp_path, "plain")
    assert Assembly(plain).recorded == {}
    recording = Assembly(centered(tmp_path, "run", {})).recorded
    assert list(recording) == [HEAD_IDS, HEAD_LOGPROBS, HEAD_REST]
    assert all(isinstance(one, Recording) for one in recording.values())
