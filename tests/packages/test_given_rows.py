"""Given answers beside samples (gkd): what they weigh, what a teacher says of them, and that it is
asked once.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.errors import EngineError, OxrlError
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.features.base import Teacher
from oxrl.recipes.row_cache import RowCache
from oxrl.types import CANDIDATES, Output, SupervisedBatch, TokenBatch
from oxrl_teachers import given_rows
from oxrl_teachers.given_rows import (
    BY_TEACHER,
    GivenRows,
    KeptCandidates,
    about_teacher,
    given_loss,
    row_keys,
)
from support.killed_runs import DEADLINE_S, killed_until_done, run_in_child, start_run
from support.small_runs import check_same, final_files, metric_lines, rl_config

WANT = frozenset({"logprobs", "top_k=2"})


def gkd(folder: Path, name: str, *, given: bool = True, **sections: dict[str, Any]) -> Config:
    """Four prompts x 2 samples, and as many given answers, in each of 6 steps."""
    own: dict[str, dict[str, Any]] = {
        "model": {"teachers": {"big": {"name": "builtin:tiny"}}},
        "data": {"given_rows": str(folder / "chats.jsonl")} if given else {},
        "reward": {"name": ""},
        "rollout": {"n_samples": 2},
        "train": {"alg_name": "gkd", "lr": 1e-3, "teacher_candidates": 8},
    }
    for section, values in sections.items():
        own[section] = own.get(section, {}) | values
    return rl_config(folder, name, **own)


def kept_in(cfg: Config) -> dict[str, bytes]:
    found = (cfg.run.directory / given_rows.FOLDER).glob("[!.]*")
    return {path.name: path.read_bytes() for path in found}


# --- The loss.
def kl(p: list[float], q: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def divergence(alpha: float, policy: list[float], teacher: list[float]) -> float:
    if alpha == 1:
        return kl(policy, teacher)
    if alpha == 0:
        return kl(teacher, policy)
    mixed = [(1 - alpha) * s + alpha * t for s, t in zip(policy, teacher, strict=True)]
    return alpha * kl(teacher, mixed) + (1 - alpha) * kl(policy, mixed)


def softmax(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def coarse(probabilities: list[float], kept: list[int]) -> list[float]:
    """Of the tokens that are kept, and of all others as one, where there are any."""
    own = [probabilities[token] for token in kept]
    return own if len(kept) == len(probabilities) else [*own, 1 - sum(own)]


def laid(logprobs: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Output, SupervisedBatch]:
    """[B, T, K] of policy and teacher; tokens of weight 0 are prompts."""
    mask = weights > 0
    inputs = TokenBatch(
        tokens=mask.long(),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        columns={BY_TEACHER: teacher},
    )
    said = Output(logprobs=logprobs[..., 0], top_logprobs=logprobs)
    return said, SupervisedBatch(inputs=inputs, loss_weights=weights)


def total(alpha: float, students: Tensor, teachers: Tensor, kept: Any, weights: Tensor) -> float:
    """By hand: the weighted sum over tokens [B, T], from logits [B, T, V] and ids [B, T, K]."""
    found = 0.0
    for row, token in (weights > 0).nonzero().tolist():
        ids = kept[row, token].tolist()
        policy = coarse(softmax(students[row, token].tolist()), ids)
        teacher = coarse(softmax(teachers[row, token].tolist()), ids)
        found += float(weights[row, token]) * divergence(alpha, policy, teacher)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_all_tokens_that_are_no_candidates_count_as_one(alpha: float, count: int) -> None:
    chance = torch.Generator().manual_seed(count)
    students = torch.randn(3, 4, 6, generator=chance, dtype=torch.float64).requires_grad_()
    teachers = torch.randn(3, 4, 6, generator=chance, dtype=torch.float64)
    kept = teachers.topk(count, -1).indices
    weights = torch.rand(3, 4, generator=chance, dtype=torch.float64)
    weights[:, 0] = 0.0

    def loss(how: str = "sampled", more: int = 0) -> LossAndMetrics:
        logprobs = students.log_softmax(-1).gather(2, kept)
        said = teachers.log_softmax(-1).gather(2, kept)
        if more:  # places without a candidate
            logprobs = torch.cat([logprobs, students.log_softmax(-1)[..., :more]], -1)
            said = torch.cat([said, torch.full_like(logprobs[..., :more], math.nan)], -1)
        return given_loss(*laid(logprobs, said, weights), alpha=alpha, rest=how)  # pyright: ignore

    found, metrics = loss()
    assert float(found.detach()) == pytest.approx(
        total(alpha, students, teachers, kept, weights), rel=1e-9
    )
    (slope,) = torch.autograd.grad(found, students)
    for place in ((0, 1, 0), (1, 3, 5), (2, 2, int(kept[2, 2, 0])), (2, 0, 1)):
        step = torch.zeros_like(students)
        step[place] = 1e-6
        up = total(alpha, students + step, teachers, kept, weights)
        down = total(alpha, students - step, teachers, kept, weights)
        assert float(slope[place]) == pytest.approx((up - down) / 2e-6, abs=1e-8)
    even = weights > 0
    told = total(alpha, students, teachers, kept, even.double()) / int(even.sum())
    assert float(metrics["teacher/given_divergence"]) == pytest.approx(told, rel=1e-9)
    with torch.no_grad():
        assert float(loss(more=2)[0]) == pytest.approx(float(found), rel=1e-9)
        assert float(loss("tail_bucket")[0]) == float(found)
        if count < 6:
            assert float(loss("truncated")[0]) != pytest.approx(float(found), rel=1e-3)


# --- What is kept.
PROMPT, TAIL = 100, 200
# Of each row of the file: how many trained tokens it has.
LENGTHS = (3, 1, 4, 2, 5, 2, 3)


def tokens_of(row: int) -> list[int]:
    """A prompt of two tokens, an answer whose tokens tell the row and the place, and one behind."""
    return [PROMPT, PROMPT + row, *(10 * row + place for place in range(LENGTHS[row])), TAIL]


def batch_of(rows: list[int]) -> SupervisedBatch:
    width = max(LENGTHS[row] for row in rows) + 4
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    there = torch.zeros(len(rows), width, dtype=torch.bool)
    trained = there.clone()
    for place, row in enumerate(rows):
        own = tokens_of(row)
        tokens[place, : len(own)] = torch.tensor(own)
        there[place, : len(own)] = True
        trained[place, 2 : len(own) - 1] = True
    inputs = TokenBatch(tokens=tokens, attention_mask=there, response_mask=trained)
    return SupervisedBatch(inputs=inputs, loss_weights=trained / trained.sum())


class File:
    """Seven rows, in each pass in another order; the first one is that of `first`."""

    first = (4, 0, 6, 2, 1, 5, 3)

    def row(self, draw: int) -> int:
        epoch, place = divmod(draw, len(LENGTHS))
        return self.first[(place * (epoch + 1)) % len(LENGTHS)]

    def __call__(self, draws: range) -> SupervisedBatch:
        return batch_of([self.row(draw) for draw in draws])


class Scorer:
    """Its candidates at a token follow from the token; counts the rows that it is asked about."""

    def __init__(self, unit: float = 1.0) -> None:
        self.asked = 0
        self.unit = unit

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        self.asked += len(inputs)
        (count,) = [int(name.partition("=")[2]) for name in want if name.startswith("top_k")]
        ranks = torch.arange(count)
        ids = inputs.tokens[..., None] + 1000 * ranks
        logprobs = -self.unit * (inputs.tokens[..., None] / 100 + 30.0 * ranks)
        mask = inputs.response_mask
        return Output(
            logprobs=torch.where(mask, -1.0, 0.0),
            top_ids=torch.where(mask[..., None], ids, 0),
            top_logprobs=torch.where(mask[..., None], logprobs, 0.0),
        )


def kept(folder: Path, scorer: Any, about: str = "t", want: Any = WANT) -> KeptCandidates:
    cache = RowCache(folder / "teacher_rows", f"{about} {sorted(want)}")
    return KeptCandidates(File(), partial(scorer.forward, want=want), 500, cache)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_rows, "ROWS_PER_PIECE", 3)


@pytest.mark.usefixtures("small_pieces")
def test_candidates_lie_at_the_tokens_of_their_own_row(tmp_path: Path) -> None:
    scorer = Scorer()
    mine = kept(tmp_path, scorer)
    rows = File()
    for draws in (range(2), range(1, 7), range(5, 16), range(14, 20)):
        inputs = rows(draws).inputs
        found = mine.beside(inputs).columns
        mask = inputs.response_mask
        tokens = inputs.tokens[mask]
        assert torch.equal(found[CANDIDATES][mask][:, 0], tokens)
        assert torch.equal(found[BY_TEACHER][mask][:, 0], -tokens / 100)
        # The others are no tokens of the policy's vocabulary.
        assert found[BY_TEACHER][mask][:, 1].isnan().all()
        assert (found[CANDIDATES][mask][:, 1] == 0).all()
    assert scorer.asked == len(LENGTHS)


@pytest.mark.usefixtures("small_pieces")
def test_a_teacher_that_likes_other_tokens_than_there_are_is_refused(tmp_path: Path) -> None:
    mine = kept(tmp_path, Scorer(unit=0.1))
    with pytest.raises(EngineError, match="tokens that the policy's tokenizer has not"):
        mine.beside(File()(range(2)).inputs)


@pytest.mark.usefixtures("small_pieces")
def test_it_is_asked_once_and_again_of_anything_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(about: str = "t", want: Any = WANT) -> int:
        scorer = Scorer()
        mine = kept(tmp_path, scorer, about, want)
        inputs = mine.beside(File()(range(9)).inputs)
        assert inputs.columns[CANDIDATES].shape[-1] == (3 if "top_k=3" in want else 2)
        return scorer.asked

    assert [asked(), asked()] == [7, 0]
    pieces = sorted((tmp_path / "teacher_rows").iterdir())
    assert len(pieces) == 3
    more = frozenset({"logprobs", "top_k=3"})
    assert [asked(about="another"), asked(want=more), asked(), asked(want=more)] == [7, 7, 0, 0]

    # What a kill or a disk left is not believed.
    whole = {path.name: path.read_bytes() for path in pieces}
    left = pieces[0].with_name(f".tmp-{pieces[0].name}")
    left.write_bytes(whole[pieces[0].name][:50])
    assert asked() == 0
    for damage in (whole[pieces[1].name][:-1] + b"?", whole[pieces[1].name][:70], b""):
        pieces[1].write_bytes(damage)
        assert 1 <= asked() <= 3
        assert pieces[1].read_bytes() == whole[pieces[1].name]
    assert caplog.text.count("is damaged and computed again") == 3

    monkeypatch.setattr(File, "first", (0, 4, 6, 2, 1, 5, 3))
    assert asked() == 3  # of one piece the rows are in another order
    monkeypatch.setitem(globals(), "PROMPT", 101)
    assert asked() == 7


def test_what_a_teacher_says_depends_on_its_weights_and_on_what_is_said_of_it() -> None:
    def about(name: str, **printed: str) -> str:
        engine: Any = SimpleNamespace(fingerprints=lambda dtype: printed)
        return about_teacher(Teacher(engine, frozenset(), None, name))

    known = about("big 1.0", a="1", b="2")
    assert known == about("big 1.0", b="2", a="1")
    others = {about("big 0.5", a="1", b="2"), about("big 1.0", a="2", b="1"), about("big 1.0")}
    assert len({known, *others}) == 4
    elsewhere: Any = object()
    assert about_teacher(Teacher(elsewhere, frozenset(), None, "big 1.0")).startswith("big 1.0")


def test_rows_are_told_apart_by_their_tokens_and_by_those_that_are_trained() -> None:
    inputs = batch_of([0, 0, 1]).inputs
    fewer = inputs.response_mask.clone()
    fewer[1, 2] = False
    keys = row_keys(replace(inputs, response_mask=fewer))
    assert len(set(keys)) == 3
    assert row_keys(batch_of([0, 2]).inputs)[0] == keys[0]  # in a wider batch


def test_a_run_finds_answers_by_teacher_candidates_temperature_and_rows(tmp_path: Path) -> None:
    def names(name: str, **sections: dict[str, Any]) -> frozenset[str]:
        cfg = gkd(tmp_path, name, run={"steps": 1, "checkpoint_every": 0}, **sections)
        if name == "rows":
            chats = tmp_path / "chats.jsonl"
            chats.write_text(chats.read_text().replace('"completion": "5"', '"completion": "6"', 1))
        run(cfg)
        return frozenset(kept_in(cfg))

    first = names("first")
    others = (
        names("candidates", train={"teacher_candidates": 4}),
        names("temperature", rollout={"temperature": 0.7, "n_samples": 2}),
        names("teacher", model={"teachers": {"big": {"name": "builtin:small"}}}),
        names("weights", model={"teachers": {"other": {"name": "builtin:tiny"}}}),
        names("rows"),
    )
    assert first == names("again", train={"lr": 1e-2})
    assert len({first, *others}) == 6


# --- A step.
def test_samples_weigh_their_share_of_a_step_and_given_answers_the_rest(tmp_path: Path) -> None:
    learned: list[SupervisedBatch] = []

    def forward_backward(batch: SupervisedBatch, loss: Any, want: Any) -> Output:
        learned.append(batch)
        shape = (*batch.inputs.tokens.shape, 2)
        return Output(logprobs=torch.zeros(shape[:2]), top_logprobs=torch.full(shape, -2.0))

    numbers = {"gkd_lambda": 0.8, "teacher_candidates": 2, "divergence_alpha": 0.5}
    train: Any = SimpleNamespace(value=lambda number: numbers.get(number.key, "sampled"))
    policy: Any = SimpleNamespace(forward_backward=forward_backward)
    given: Any = SimpleNamespace(
        train=train,
        teachers={"big": Teacher(Scorer(), frozenset())},
        given_rows="rows.jsonl",
        rows=lambda path: File(),
        samples=12,
        policy=policy,
        directory=tmp_path,
        tokenizer=range(500),
    )
    feature = GivenRows(given)
    before: Any = SimpleNamespace(version=5)
    feature.on_prepared(policy, before)
    for step in (5, 6):
        own: Any = replace(batch_of([0, 1]), loss_weights=torch.full((2, 7), 0.25))
        assert torch.equal(feature.on_minibatch(own).loss_weights, torch.full((2, 7), 0.2))
        metrics = feature.add_gradients(torch.arange(2), own)
        assert metrics is not None and metrics["teacher/given_divergence"] > 0
        given_batch = learned.pop()
        assert float(given_batch.loss_weights.sum()) == pytest.approx(0.2)
        rows = [File().row(draw) for draw in range(3 * step, 3 * step + 3)]
        assert torch.equal(given_batch.inputs.tokens, batch_of(rows).inputs.tokens)


def test_with_a_share_of_one_it_is_opd_topk(tmp_path: Path) -> None:
    numbers = {"lr": 1e-3, "teacher_candidates": 8, "divergence_alpha": 0.5}
    alone: dict[str, Any] = {"data": {"prompts_per_step": 3}, "run": {"steps": 3}}
    found = gkd(tmp_path, "gkd", train={"gkd_lambda": 1.0, **numbers}, given=False, **alone)
    topk = gkd(tmp_path, "opd", train={"alg_name": "opd_topk", **numbers}, given=False, **alone)
    run(found)
    run(topk)
    assert not (found.run.directory / given_rows.FOLDER).exists()
    check_same(found.run.directory, topk.run.directory)


def test_given_answers_are_learned_and_a_step_is_made_again(tmp_path: Path) -> None:
    # The teacher is asked about 24 rows once, though 192 are drawn, and tells all that it thinks.
    numbers = {"lr": 1e-2, "teacher_candidates": 261, "divergence_alpha": 1.0, "gkd_lambda": 0.25}
    cfg = gkd(tmp_path, "run", run={"steps": 8}, train=numbers)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert len(kept_in(cfg)) == 1
    told = [line["teacher/given_divergence"] for line in lines]
    assert told[-1] < 0.8 * told[0]
    shares = zip(lines, told, strict=True)
    assert all(line["teacher/given_loss"] == pytest.approx(0.75 * one) for line, one in shares)
    for step in (3, 8):
        findings = replay(cfg.run.directory, step)
        assert findings and all(finding.equal for finding in findings), findings


def slowly(cfg: Config, seconds: float) -> None:
    """A run that keeps two rows in a file, and takes `seconds` until each is in its place."""
    from oxrl.runs import recorder

    fsync = recorder.fsync

    def wait(path: Path) -> None:
        fsync(path)
        if path.parent.name == given_rows.FOLDER:
            time.sleep(seconds)

    recorder.fsync = wait
    given_rows.ROWS_PER_PIECE = 2
    run_in_child(cfg)


def slowly_at_all_times(cfg: Config) -> None:
    slowly(cfg, 0.05)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_run_killed_while_it_keeps_answers_and_later_has_the_same_bytes(
    disk_path: Path, kills: int
) -> None:
    whole, killed = (
        gkd(disk_path, name, run={"name": name, "steps": 2 + 2 * kills})
        for name in ("whole", "killed")
    )
    process = start_run(whole, slowly, 0.0)
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    pieces = kept_in(whole)
    assert len(pieces) == 12

    chance = random.Random(int(os.environ.get("OXRL_KILL_SEED", "0")))
    folder = killed.run.directory / given_rows.FOLDER
    process = start_run(killed, slowly, 0.1)
    deadline = time.monotonic() + DEADLINE_S
    many = chance.randint(2, 4)
    while len(kept_in(killed)) < many or not list(folder.glob(".tmp-*")):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(DEADLINE_S)
    left = kept_in(killed)
    assert many <= len(left) < 12 and left.items() <= pieces.items()

    seed = chance.randint(0, 99)
    hits = killed_until_done(killed, kills=kills - 1, seed=seed, body=slowly_at_all_times)
    assert len(hits) == kills - 1
    assert kept_in(killed) == pieces
    check_same(killed.run.directory, whole.run.directory)
    assert any("adam" in name or "optim" in name for name in final_files(whole.run.directory))


# --- Mistakes.
Section = dict[str, Any]
TWO = {"big": {"name": "builtin:tiny", "sources": ["a"]}, "other": {"name": "builtin:tiny"}}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"data": {"given_rows": None}}, "data.given_rows.*is required by gkd: .*gkd_lambda=1"),
        ({"data": {"given_rows": "gone.jsonl"}}, "data.given_rows.*gone.jsonl"),
        ({"data": {"given_rows": "rows.txt"}}, "data.given_rows.*must end in .jsonl"),
        ({"data": {"given_rows": "prompts.jsonl"}}, "prompts.jsonl:1.*completion"),
        ({"model": {"teachers": TWO}}, "model.teachers.*must be one"),
        ({"model": {"teachers": {"self": {"prompt": "h.jinja"}}}}, "model.teachers.*must be one"),
        ({"train": {"gkd_lambda": 0}}, "train.gkd_lambda"),
        ({"train": {"gkd_lambda": 1.5}}, "train.gkd_lambda"),
        ({"train": {"gkd_lambda": 1.0}}, "data.given_rows.*gkd_lambda below 1"),
        ({"train": {"alg_name": "opd_topk"}}, "data.given_rows"),
    ],
)
def test_a_mistake_ends_with_exit_2_and_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Section], named: str
) -> None:
    gkd(tmp_path, "run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.jinja").write_text("{{ prompt }} {{ answer }}")
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    for section, values in sections.items():
        content[section] = content[section] | values
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    with pytest.raises(OxrlError, match=f"(?s){named}") as refused:
        run(load_config(tmp_path / "run.yaml"))
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
