"""Columns: what is recorded of every sampled token reaches the loss, at the token that it is of.

`toy_columns` records where a token was sampled, so that every place can be recomputed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oxrl.assembly.assemble import placed_steps
from oxrl.assembly.assembly import Assembly, Limits
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.data.actions import ActionHead
from oxrl.data.batching import to_rollout_batch
from oxrl.data.episode_rows import EpisodeInputs
from oxrl.engines.sample import vllm
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.hosted import ThisMachine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.rows import Recording, check_recorded
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.engines.train.fsdp import FsdpTrainer
from oxrl.engines.train.image_rows import DummyRows
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import CheckpointError, EngineError, InvariantError, RunDirectoryError
from oxrl.models import shared_prefix
from oxrl.models.load import load_policy
from oxrl.models.shared_prefix import groups_of, laid_out
from oxrl.models.token_mask import sample_only
from oxrl.recipes import rl
from oxrl.recipes.objective import Objective
from oxrl.rollouts import whole_samples
from oxrl.rollouts.batch import RowRules, trainable_rows
from oxrl.rollouts.sync import RolloutStep
from oxrl.rollouts.whole_samples import read_step
from oxrl.tables.columns import Column
from oxrl.tables.engines import SAMPLING_ENGINES
from oxrl.tables.watch import Deadlines
from oxrl.types import (
    CANDIDATES,
    Completion,
    Names,
    Output,
    Prompt,
    Request,
    Score,
    Segment,
    SupervisedBatch,
    TokenBatch,
    TokenRun,
    Turn,
)
from oxrl.usercode.messages import completion_of, decode, encode
from support.rank_processes import run_ranks
from support.samplers import TOKENIZER, lively, make_requests
from support.scripted import PAD, Play, scored
from support.scripted import requests as episode_requests
from support.small_runs import final_files, model_that_stops, rl_config
from support.talk import TALK
from support.toy_columns import (
    COLUMNS,
    TOYS,
    check_completion,
    check_inputs,
    expected_columns,
    noted,
    noting_loss,
    recording_sampler,
    recording_sampler_of,
)
from support.vision_runs import rl as rl_of_images
from support.vision_runs import write_rows

HEAD = ActionHead(token_ids=tuple(range(200, 216)), chunk=2, low=(-1.0, 0.0), high=(1.0, 4.0))
ACTS = """
from oxrl.environments import Step

class Made:
    def __init__(self):
        self.turn = 0
    def reset(self, prompt, seed):
        return prompt.messages
    def act(self, actions):
        self.turn += 1
        ups = str(actions).count("up")
        return Step("go on", 1.0 + ups, terminated=self.turn == 3, executed=1)
"""


# --- Runs of tokens.


def test_a_run_of_tokens_with_a_value_missing_names_every_column_with_its_count() -> None:
    whole: dict[str, Any] = {"token_ids": (4, 5), "logprobs": (-1.0, -2.0), "versions": (0, 0)}
    said = "'token_ids': 2, 'logprobs': 2, 'versions': 2, 'position': 1"
    with pytest.raises(ValueError, match=said):
        TokenRun(**whole, columns={"position": (3,)})
    with pytest.raises(ValueError, match="'token_ids': 2, 'logprobs': 1"):
        Segment(**{**whole, "logprobs": (-1.0,)})
    assert hash(TokenRun(**whole)) == hash(TokenRun(**whole))


def test_tokens_are_cut_and_joined_with_everything_recorded_of_them() -> None:
    run_of = TokenRun(
        token_ids=(4, 5, 6),
        logprobs=(-1.0, -2.0, -3.0),
        versions=(0, 0, 1),
        columns={"position": (7, 8, 9), "trace": (b"abc", b"def", b"ghi")},
    )
    first = run_of.first(1)
    assert first.columns == {"position": (7,), "trace": (b"abc",)} and first.versions == (0,)
    rest = TokenRun(
        token_ids=(5, 6),
        logprobs=(-2.0, -3.0),
        versions=(0, 1),
        columns={"position": (8, 9), "trace": (b"def", b"ghi")},
    )
    assert first.then(rest) == run_of and TokenRun().then(run_of) == run_of
    with pytest.raises(ValueError, match=r"\['position', 'trace'\].*\[\]"):
        first.then(TokenRun(token_ids=(5,), logprobs=(-2.0,), versions=(0,)))


# --- Samplers.


SAMPLERS: dict[str, Callable[[], Any]] = {
    "local": recording_sampler,
    "cached": lambda: CachedSampler(lively("builtin:tiny"), TOKENIZER, max_rows=3, recorded=TOYS),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampled_token_has_its_entries_whatever_slots_it_moved_through(kind: str) -> None:
    # More requests than slots: rows in front end earlier than those behind, which move there.
    short = make_requests(6, max_tokens=5, stop_token_ids=())
    long = make_requests(6, prefix="long", max_tokens=11, stop_token_ids=())
    asked = [request for pair in zip(short, long, strict=True) for request in pair]
    done = generate(SAMPLERS[kind](), asked, deadline_s=60)
    for request, completion in zip(asked, done, strict=True):
        check_completion(request, completion)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_was_aborted_goes_on_with_the_entries_that_it_had(kind: str) -> None:
    engine = SAMPLERS[kind]()
    asked = make_requests(2, max_tokens=12, stop_token_ids=())
    [short] = make_requests(1, prefix="short", max_tokens=4, stop_token_ids=())
    engine.submit([short, *asked])
    assert [item.request for item in engine.poll(60)] == [short]
    parts = {item.request.id: item.completion for item in engine.abort([one.id for one in asked])}
    again: list[Request] = []
    for request in asked:
        [segment] = parts[request.id].segments
        count = len(segment.token_ids)
        assert 0 < count < 12
        entries = {name: getattr(segment, name) for name in ("token_ids", "logprobs", "versions")}
        # Marked, so that what comes back is known to be what was there.
        columns = {**segment.columns, "position": tuple(range(1000, 1000 + count))}
        again.append(dataclasses.replace(request, prefix=TokenRun(**entries, columns=columns)))
    for request, completion in zip(again, generate(engine, again, deadline_s=60), strict=True):
        known = len(request.prefix.token_ids)
        columns = completion.segments[0].columns
        first = len(request.prompt.token_ids)
        expected = expected_columns(request, first, 12)
        assert columns["trace"] == expected["trace"]
        assert (
            columns["position"] == request.prefix.columns["position"] + expected["position"][known:]
        )


def test_a_prefix_of_which_nothing_was_recorded_is_refused() -> None:
    [request] = make_requests(1, stop_token_ids=())
    prefix = TokenRun(token_ids=(5,), logprobs=(-1.0,), versions=(0,))
    with pytest.raises(ValueError, match=r"\[\] is recorded.*\['position', 'trace'\]"):
        generate(recording_sampler(), [dataclasses.replace(request, prefix=prefix)], deadline_s=60)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            lambda slots, rows, logits: slots.count[rows],
            r"'x' gave torch\.int64.*torch\.int32 of \[1\]",
        ),
        (
            lambda slots, rows, logits: slots.count[:9].int(),
            r"'x' gave torch\.int32 of \[3\].*\[1\]",
        ),
        (lambda slots, rows, logits: slots.stops[rows].int(), r"'x' gave torch\.int32 of \[1, 1\]"),
    ],
)
def test_a_recorder_of_another_dtype_or_shape_is_refused(record: Any, said: str) -> None:
    recorded = {"x": Recording(Column("int32", 0), record)}
    sampler = LocalSampler(lively("builtin:tiny"), TOKENIZER, max_rows=3, recorded=recorded)
    with pytest.raises(EngineError, match=said):
        generate(sampler, make_requests(1), deadline_s=60)


def test_a_sampling_process_sends_the_columns_back() -> None:
    machine = ThisMachine(threads=1)
    asked = make_requests(3, 2)
    try:
        engine = RolloutWorkers(machine, [None], recording_sampler, Deadlines.alike(60))
        done = generate(engine, asked, deadline_s=60)
    finally:
        machine.close()
    for request, completion in zip(asked, done, strict=True):
        check_completion(request, completion)
    assert done == generate(recording_sampler(), asked, deadline_s=60)


def need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is started later, whose actors find what tests share."""
    pytest.importorskip("ray", reason="Ray is not installed here; `make test-scale` runs this")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


# --- vLLM, whose parts stand in here.


def test_vllm_refuses_what_it_cannot_record_and_says_who_can() -> None:
    told = "inference_engine.name is vllm, .*'position'.*; local can"
    with pytest.raises(EngineError, match=told):
        check_recorded("vllm", TOYS)
    check_recorded("local", TOYS)
    assert SAMPLING_ENGINES["vllm"].records == tuple(vllm.RETURNED)


def test_a_run_with_a_column_that_its_engine_cannot_record_ends_before_a_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dataclasses.replace(SAMPLING_ENGINES["local"], records=("trace",))
    monkeypatch.setattr(
        "oxrl.engines.sample.rows.SAMPLING_ENGINES", {**SAMPLING_ENGINES, "local": row}
    )
    monkeypatch.setattr(Assembly, "recorded", TOYS)

    def read(*given: object, **named: object) -> None:
        raise AssertionError("a model is read")

    monkeypatch.setattr(Assembly, "model", read)
    with pytest.raises(EngineError, match="local, which cannot record the column 'position'"):
        run(rl_config(tmp_path, "run"))


def test_entries_of_vllm_are_taken_over_before_it_forgets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def position(request: Request, tokens: Any, logprobs: Any, column: Column) -> list[int]:
        first = len(request.prompt.token_ids) + len(request.prefix.token_ids)
        return [lost, *range(first + 1, first + len(tokens))] if tokens else []

    lost = 0
    monkeypatch.setattr(vllm, "RETURNED", {"position": position})
    monkeypatch.setattr(vllm, "sampled_logprobs", lambda logprobs, tokens: [-1.0] * len(tokens))
    [request] = make_requests(1)
    known = TokenRun(token_ids=(7,), logprobs=(-2.0,), versions=(3,), columns={"position": (100,)})
    request = dataclasses.replace(request, prefix=known)
    engine = vllm.VllmEngine.__new__(vllm.VllmEngine)
    vllm.Sampler.__init__(engine, TOKENIZER, context=99)
    engine._columns = {"position": Column("int32", -1)}
    engine._active = {}
    monkeypatch.setattr(engine, "_add", lambda *given, **named: None)
    engine._accept(request)
    tokens = [5, 6]
    detokenizer = SimpleNamespace(num_output_tokens=lambda: len(tokens), output_token_ids=tokens)
    state = SimpleNamespace(
        detokenizer=detokenizer, logprobs_processor=SimpleNamespace(logprobs=None)
    )
    monkeypatch.setattr(engine, "_state", lambda name: state)
    first = len(request.prompt.token_ids) + 1
    lost = first
    engine._note_versions()
    lost = -1  # what vLLM says of the first token after it was interrupted
    tokens.append(8)
    [segment] = engine._end(request.id, "length", tokens, None).completion.segments
    assert segment.columns == {"position": (100, first, first + 1, first + 2)}
    assert segment.token_ids == (7, 5, 6, 8)


# --- Whole runs.


class Losses:
    """What losses of a run saw: trained tokens, and with which columns."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.names: set[str] = set()
        self.packed = 0


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    """Runs record the toy columns, and every call of a loss and every packed row is checked."""
    found = Losses()
    policy_loss = Objective.policy_loss

    def checked_loss(self: Objective, output: Output, batch: Any) -> Any:
        found.tokens.append(check_inputs(batch.inputs))
        found.names |= batch.inputs.columns.keys()
        return policy_loss(self, output, batch)

    def checked_layout(batch: TokenBatch, groups: Any) -> Any:
        layout = laid_out(batch, groups)
        check_packed(batch, layout)
        found.packed += 1
        return layout

    monkeypatch.setattr(Objective, "policy_loss", checked_loss)
    monkeypatch.setattr(shared_prefix, "laid_out", checked_layout)
    monkeypatch.setattr(Assembly, "recorded", TOYS)
    return found


def check_packed(batch: TokenBatch, layout: Any) -> None:
    """Columns of a packed row are those of the tokens that stand in it."""
    sources = layout.sources
    assert torch.equal(batch.tokens.flatten()[sources][None], layout.tokens)
    if "position" in batch.columns:
        position = batch.columns["position"].flatten()[sources]
        trained = batch.response_mask.flatten()[sources]
        assert torch.equal(position[trained].long(), layout.position_ids[0][trained])
        assert batch.columns["trace"].flatten(0, 1)[sources].shape == (len(sources), 3)


Sections = dict[str, dict[str, Any]]
SMALL = {"max_tokens": 6, "n_samples": 4}
RUNS: dict[str, Sections] = {
    "synchronous": {"rollout": {"max_tokens": 9, "n_samples": 4}},
    "minibatches": {"train": {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": 2}},
    "micro-batches": {"train": {"alg_name": "sgrpo", "lr": 1e-3, "micro_batch_tokens": 40}},
    "one by one": {"train": {"alg_name": "sgrpo", "lr": 1e-3, "share_prefix": False}},
    "cached sampler": {"model": {"name": "builtin:tiny", "attention": "eager"}},
    "in rounds": {"train": {"alg_name": "dapo", "lr": 1e-3, "overlong_buffer": 2}},
    "sampling ahead": {
        "rollout": {
            "max_tokens": 6,
            "n_samples": 4,
            "max_staleness": 3,
            "rounds": 3,
            "force_strict_on_policy": False,
        }
    },
    "baseline": {"train": {"alg_name": "remax", "lr": 1e-3}},
    "candidates": {"train": {"alg_name": "simko", "lr": 1e-3, "top_candidates": 3}},
}


def short_run(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    steps = {"steps": 4, "checkpoint_every": 0} | sections.pop("run", {})
    return rl_config(folder, name, run=steps, **sections)


@pytest.mark.parametrize("case", RUNS)
def test_losses_see_every_token_with_its_columns(case: str, tmp_path: Path, losses: Losses) -> None:
    model = {"name": str(model_that_stops(tmp_path / "model"))}
    sections = RUNS[case]
    run(short_run(tmp_path, "run", **{**sections, "model": sections.get("model", {}) | model}))
    assert sum(losses.tokens) > 100
    assert (CANDIDATES in losses.names) == (case == "candidates")
    assert bool(losses.packed) == (case not in ("one by one", "cached sampler"))


def talking(folder: Path, reads: str) -> Sections:
    """A run of episodes whose turns read everything before, or the last answer alone."""
    (folder / "talk.py").write_text(TALK)
    return {
        "environment": {"name": f"{folder / 'talk.py'}:Talk", "max_turns": 3},
        "reward": {"name": ""},
        "rollout": {"max_tokens": 12, "n_samples": 2, "context": reads},
        "model": {"name": str(model_that_stops(folder / "model"))},
    }


@pytest.mark.parametrize("algorithm", ["sgrpo", "simko"])
@pytest.mark.parametrize("reads", ["whole", "last"])
def test_losses_see_every_token_of_episodes_with_its_columns(
    reads: str, algorithm: str, tmp_path: Path, losses: Losses
) -> None:
    train = {"alg_name": algorithm, "lr": 1e-3, "minibatches": 2}
    run(short_run(tmp_path, "run", **talking(tmp_path, reads), train=train))
    assert sum(losses.tokens) > 50
    assert (CANDIDATES in losses.names) == (algorithm == "simko")


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_losses_see_every_action_that_was_done_with_its_columns(
    reads: str, tmp_path: Path, losses: Losses
) -> None:
    (tmp_path / "acts.py").write_text(ACTS)
    cfg = short_run(
        tmp_path,
        "run",
        environment={"name": f"{tmp_path / 'acts.py'}:Made", "max_turns": 3},
        action={"choices": "up,down,left,right", "chunk": 2},
        reward={"name": ""},
        rollout={"max_tokens": 2, "n_samples": 2, "context": reads},
    )
    run(cfg)
    # Of each turn one action of two, a token each; for the gradient, and for what is reported.
    assert sum(losses.tokens) == 2 * 4 * 4 * 2 * 3


@pytest.mark.filterwarnings("ignore")
def test_losses_see_every_token_beside_images_with_its_columns(
    tmp_path: Path, losses: Losses
) -> None:
    write_rows(tmp_path)
    run(rl_of_images(tmp_path, "run"))
    assert sum(losses.tokens) > 20


# What is not done in the run's own process.
PLACES: dict[str, Sections] = {
    "a sampling process": {},
    "two ranks": {
        "run": {"training_gpus": 2, "max_restarts": 0, "deadline_s": 60},
        "train": {"backend": "fsdp", "micro_batch_tokens": 60},
    },
    "two ranks and an actor": {
        "run": {"training_gpus": 2, "max_restarts": 0, "deadline_s": 60},
        "train": {"backend": "fsdp", "micro_batch_tokens": 60},
        "inference_engine": {"actors": 1},
    },
}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reads", ["", "last"])
@pytest.mark.parametrize(
    "place",
    [
        "a sampling process",
        "two ranks",
        pytest.param("two ranks and an actor", marks=pytest.mark.full),
    ],
)
def test_a_run_in_several_processes_has_the_columns_of_a_run_in_one(
    place: str, reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = talking(tmp_path, reads) if reads else {}
    train = {"alg_name": "sgrpo", "lr": 1e-3}
    small = {"steps": 2, "record": "tokens"}
    monkeypatch.setattr(Assembly, "recorded", TOYS)
    folders: list[Path] = []
    for name, moved in (("one", {}), ("several", PLACES[place])):
        seen = tmp_path / f"{name}.seen"
        seen.mkdir()
        if name == "several":
            samples_elsewhere(place, monkeypatch)
        own = {
            **sections,
            **moved,
            "run": small | moved.get("run", {}),
            "train": train | moved.get("train", {}),
        }
        cfg = short_run(tmp_path, name, **own)
        with monkeypatch.context() as patch:
            patch.setattr(Objective, "policy_loss", noting_loss(seen))
            run(cfg)
        folders.append(cfg.run.directory)
        counts = noted(seen)
        assert len(counts) == (2 if name == "several" and "ranks" in place else 1)
        steps = [read_step(path, COLUMNS) for path in cfg.run.directory.glob("rollouts/*.jsonl")]
        sampled = [item.completion.sampled for step in steps for item in step.rollouts]
        assert len(steps) == 2 and sum(counts) == sum(sampled) > 40
    # Weights that several ranks have trained are those of one process but for rounding.
    first = Path("rollouts") / "step_00000000.samples.jsonl"
    one, several = folders
    assert (one / first).read_bytes() == (several / first).read_bytes()
    if place == "a sampling process":
        files = final_files(several)
        del files["delivery/probe.json"]  # a delivery to another process is proved
        assert files == final_files(one)


def samples_elsewhere(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a run sample, and train, where it is said."""
    if place != "a sampling process":
        need_ray(monkeypatch)
        monkeypatch.setattr("oxrl.assembly.ray_engines.sampler_of", recording_sampler_of)
        return
    row = dataclasses.replace(SAMPLING_ENGINES["local"], own_process=True)
    monkeypatch.setattr("oxrl.config.schema.SAMPLING_ENGINES", {**SAMPLING_ENGINES, "local": row})
    monkeypatch.setattr("oxrl.assembly.sampler_processes.sampler_of", recording_sampler_of)


# --- Records and checkpoints.


@pytest.mark.parametrize("reads", ["", "last"])
def test_stored_samples_make_the_same_batches_to_the_byte(
    reads: str, tmp_path: Path, losses: Losses
) -> None:
    sections = talking(tmp_path, reads) if reads else {}
    kept: Any = {**sections, "run": {"record": "tokens"}}
    first = short_run(tmp_path, "first", **kept)
    run(first)
    drawn = [*losses.tokens]
    stored = {"from_samples": str(first.run.directory)} | sections.get("rollout", {})
    second = short_run(tmp_path, "second", **{**kept, "rollout": SMALL | stored})
    run(second)
    assert losses.tokens == drawn * 2
    assert final_files(first.run.directory) == final_files(second.run.directory)
    names = sorted(path.name for path in (first.run.directory / "rollouts").iterdir())
    for name in names:
        one, two = (cfg.run.directory / "rollouts" / name for cfg in (first, second))
        assert one.read_bytes() == two.read_bytes()
    [line, *_] = (first.run.directory / "samples.jsonl").read_text().splitlines()
    assert "position" not in line


def test_rows_in_records_have_their_columns(tmp_path: Path, losses: Losses) -> None:
    cfg = short_run(
        tmp_path,
        "run",
        run={"record": "tokens", "steps": 1},
        train={"alg_name": "simko", "lr": 1e-3, "top_candidates": 3},
    )
    run(cfg)
    kept = load_file(cfg.run.directory / "rollouts" / "step_00000000.safetensors")
    columns = {name: kept[name] for name in COLUMNS}
    mask = kept["response_mask"]
    check_inputs(
        TokenBatch(
            tokens=kept["tokens"],
            attention_mask=kept["attention_mask"],
            response_mask=mask,
            columns=columns,
        )
    )
    assert CANDIDATES not in kept


def cut_short(cfg: Config, after: int) -> Path:
    """A run that is gone after a step; what its newest checkpoint has of samples in flight."""
    finish = rl.finish_step

    def gone(machine: Any, session: Any, progress: Any, before: int) -> None:
        finish(machine, session, progress, before)
        if progress.step == after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rl, "finish_step", gone)
        run(cfg)
    newest = max((cfg.run.directory / "checkpoints").glob("step_*"))
    return newest / "samples" / "samples.json"


def test_samples_in_flight_keep_their_columns_in_a_checkpoint(
    tmp_path: Path, losses: Losses
) -> None:
    sections: Sections = {**RUNS["sampling ahead"], "run": {"checkpoint_every": 2, "steps": 6}}
    whole, stopped = (short_run(tmp_path, name, **sections) for name in ("whole", "stopped"))
    run(whole)
    kept = json.loads(cut_short(stopped, 3).read_text())["completions"]
    assert kept
    for fields in kept.values():
        [segment] = completion_of(fields).segments
        assert segment.columns.keys() == COLUMNS.keys()
    run(stopped, resume=True)
    assert final_files(stopped.run.directory) == final_files(whole.run.directory)


def test_a_checkpoint_whose_samples_lack_a_column_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: Sections = {**RUNS["sampling ahead"], "run": {"checkpoint_every": 2, "steps": 6}}
    cfg = short_run(tmp_path, "run", **sections)
    assert "columns" not in cut_short(cfg, 3).read_text()
    monkeypatch.setattr(Assembly, "recorded", TOYS)
    with pytest.raises(CheckpointError, match=r"samples\.json.*'position'.*'trace'"):
        run(cfg, resume=True)


def test_stored_samples_that_lack_a_column_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = short_run(tmp_path, "first", run={"record": "tokens", "steps": 1})
    run(first)
    monkeypatch.setattr(Assembly, "recorded", TOYS)
    stored = SMALL | {"from_samples": str(first.run.directory)}
    with pytest.raises(
        RunDirectoryError, match=r"step_00000000\.samples\.jsonl, line 2.*'position'.*'trace'"
    ):
        run(short_run(tmp_path, "second", rollout=stored, run={"steps": 1}))


@pytest.mark.parametrize(
    ("name", "entries", "said"),
    [
        ("trace", ["YWI="] * 3, "'trace'.*width=3"),
        ("trace", ["!!!!"] * 3, "'trace' is no base64"),
        ("trace", [7] * 3, "'trace'.*width=3"),
        ("trace", ["YWJj", "YWJj", 7], "'trace'.*width=3"),
        ("trace", ["YWJj", "YWJj"], "'trace': 2"),
        ("position", [4, 5, "YWJj"], "'position'.*int32"),
        ("position", [4, 5, "six"], "'position' is no base64"),
        ("position", [4, 5, 6.5], "'position'.*int32"),
        ("position", [4, 5, None], "'position'.*int32"),
        ("position", [4, 5, 2**31], "'position'.*int32"),
        ("position", [], "'position': 0"),
    ],
)
def test_a_damaged_entry_is_named_with_its_file_line_and_column(
    name: str, entries: list[object], said: str, tmp_path: Path
) -> None:
    path = write_samples(tmp_path)
    lines = path.read_text().splitlines()
    group = json.loads(lines[1])
    group["responses"][0]["completion"]["segments"][0]["columns"][name] = entries
    lines[1] = json.dumps(group)
    path.write_text("\n".join(lines))
    with pytest.raises(RunDirectoryError, match=rf"{path.name}, line 2: .*{said}"):
        read_step(path, COLUMNS)


def write_samples(folder: Path) -> Path:
    """A step of one response of three tokens, as a run keeps it."""
    rollout = scored(*one_response())[0]
    step = RolloutStep(step=0, start=0, end=1, rollouts=[rollout])
    path = folder / "step_00000000.samples.jsonl"
    path.write_bytes(b"".join(map(encode, whole_samples.written(step))))
    return path


def one_response() -> tuple[list[Request], list[Completion]]:
    [request] = episode_requests(1)
    first = len(request.prompt.token_ids)
    segment = Segment(
        token_ids=(7, 8, 9),
        logprobs=(-1.0, -2.0, -3.0),
        versions=(4, 4, 4),
        columns=expected_columns(request, first, 3),
    )
    completion = Completion(segments=(segment,), text="", finish_reason="length", end="max_tokens")
    return [request], [completion]


def test_whole_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    [rollout] = read_step(write_samples(tmp_path), COLUMNS).rollouts
    assert rollout == scored(*one_response())[0]


def test_a_run_that_records_nothing_more_says_nothing_of_columns() -> None:
    segment = Segment(token_ids=(7,), logprobs=(-1.0,), versions=(4,))
    line = encode({"segment": segment})
    assert b"columns" not in line
    assert list(decode(line)["segment"]) == [
        "token_ids", "logprobs", "versions", "origin", "images", "reward", "turn", "context"
    ]  # fmt: skip


BYTES: dict[str, Callable[[Prompt, Completion], object]] = {
    "metadata": lambda prompt, done: dataclasses.replace(prompt, metadata={"picture": b"abc"}),
    "an answer": lambda prompt, done: dataclasses.replace(prompt, answer=b"abc"),
    "a message": lambda prompt, done: dataclasses.replace(done, opening=({"content": b"abc"},)),
    "a turn": lambda prompt, done: dataclasses.replace(done, turns=(Turn(text=cast(str, b"abc")),)),
    "a segment": lambda prompt, done: dataclasses.replace(
        done, segments=(dataclasses.replace(done.segments[0], images=cast(Names, (b"abc",))),)
    ),
    "a score": lambda prompt, done: Score(value=1.0, parts={"style": cast(float, b"abc")}),
    "a list": lambda prompt, done: [1, b"abc"],
}


@pytest.mark.parametrize("where", BYTES)
def test_bytes_are_refused_everywhere_but_in_columns(where: str) -> None:
    [request], [done] = one_response()
    found = completion_of(decode(encode(vars(done))))
    assert found == done
    with pytest.raises(TypeError):
        encode({"sent": BYTES[where](request.prompt, done)})


# --- Rows.


def test_columns_are_dropped_from_samples_once_rows_are_laid_out() -> None:
    asked, done = one_response()
    rollouts = scored(asked, done)
    step = RolloutStep(step=0, start=0, end=1, rollouts=rollouts, groups=(0,), next_draw=1)
    rules = RowRules(
        pad_id=0,
        stop_token_ids=(),
        max_tokens=None,
        strict=False,
        max_staleness=9,
        groups_of_two=False,
        images=None,
        columns=COLUMNS,
    )
    rows = trainable_rows(step, rules, version=4)
    assert check_inputs(rows.batch.inputs) == 3
    assert step.rollouts[0].completion.segments[0].columns == {}


def test_rewards_are_not_sent_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = one_response()

    class Seeing:
        def score(self, groups: Any, patience: Any = None) -> list[list[Score]]:
            [(_, [completion])] = groups
            assert completion == done[0].bare and completion.segments[0].columns == {}
            return [[Score(value=1.0)]]

    monkeypatch.setattr(Assembly, "recorded", TOYS)
    assembly = Assembly(rl_config(tmp_path, "run", reward={"name": "exact"}))
    scorer = placed_steps(assembly, Seeing(), Limits(None, (), None))
    assert scorer is not None
    assert scorer.score([(asked[0].prompt, done)]) == [[Score(value=1.0)]]
    assert done[0].segments[0].columns


def test_a_sampler_that_recorded_less_than_was_asked_for_is_no_hole_in_a_row() -> None:
    asked, done = one_response()
    bare = [one.bare for one in done]
    with pytest.raises(InvariantError, match=r"'position'.* were to be recorded"):
        to_rollout_batch(scored(asked, bare), pad_id=PAD, columns=COLUMNS)


@pytest.mark.parametrize("reads", ["whole", "last", "window: 2"])
def test_rows_and_lines_of_episodes_have_the_columns_of_their_tokens(
    play: Play, reads: str, tmp_path: Path
) -> None:
    stops = load_policy(str(model_that_stops(tmp_path / "model")))
    sampler = LocalSampler(stops, TOKENIZER, max_rows=8, recorded=TOYS)
    asked = episode_requests(6, samples=2, max_tokens=32)
    engine = play(TALK.replace("Talk", "Made"), sampler, reads=reads)
    done = generate(engine, asked, deadline_s=120)
    batch = to_rollout_batch(scored(asked, done, samples=2), pad_id=PAD, columns=COLUMNS)
    inputs = batch.inputs
    if reads == "whole":
        assert check_inputs(inputs) > 0
        return
    assert isinstance(inputs, EpisodeInputs)
    chosen = inputs.select(torch.tensor([3, 1, 8]))
    for part in (inputs, chosen):
        trained = part.split(part.response_mask)
        check_inputs(dataclasses.replace(part.rows, response_mask=trained))
        assert torch.equal(part.join(part.rows.columns["position"])[part.response_mask],
                           part.columns["position"][part.response_mask])  # fmt: skip
        assert (part.columns["position"][~part.response_mask] == -7).all()
    columns = inputs.named()
    assert torch.equal(columns["rows.position"], inputs.rows.columns["position"])


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_turns_that_are_cut_short_keep_the_columns_of_what_was_done(play: Play, reads: str) -> None:
    model = lively("builtin:tiny")
    sample_only(model, HEAD.token_ids)
    sampler = LocalSampler(model, TOKENIZER, max_rows=8, recorded=TOYS)
    asked = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, stop_token_ids=()))
        for one in episode_requests(3, max_tokens=HEAD.tokens)
    ]
    engine = play(ACTS, sampler, actions=HEAD, reads=reads)
    done = generate(engine, asked, deadline_s=60)
    inputs = to_rollout_batch(scored(asked, done), pad_id=PAD, columns=COLUMNS).inputs
    if isinstance(inputs, EpisodeInputs):
        trained = inputs.split(inputs.response_mask)
        inputs = dataclasses.replace(inputs.rows, response_mask=trained)
    per_turn = HEAD.kept(HEAD.token_ids[:4], 1)
    assert check_inputs(inputs) == 3 * 3 * per_turn


def toy_rows(responses: list[int]) -> TokenBatch:
    """Rows of one prompt of four tokens, with the toy columns of their responses."""
    length = 4 + max(responses)
    places = torch.arange(length).expand(len(responses), -1)
    real = places < 4 + torch.tensor(responses)[:, None]
    trained = real & (places >= 4)
    trace = torch.full((len(responses), length, 3), 9, dtype=torch.uint8)
    trace[trained] = places[trained].to(torch.uint8)[:, None].expand(-1, 3)
    return TokenBatch(
        tokens=torch.where(real, places % 3 + 5, 0),
        attention_mask=real,
        response_mask=trained,
        columns={
            "position": torch.where(trained, places, -7).to(torch.int32),
            "trace": trace,
        },
    )


def test_packed_rows_say_where_each_token_comes_from() -> None:
    batch = toy_rows([3, 5, 1, 4])
    batch.tokens[::2, 0] = 99  # two prompts, the rows of which stand in turn
    layout = laid_out(batch, groups_of(batch))
    assert layout.sources.numel() == 2 * 4 + 3 + 5 + 1 + 4
    check_packed(batch, layout)


def test_a_row_with_images_beside_a_rank_s_rows_keeps_its_columns_and_fills() -> None:
    rows = toy_rows([2, 6, 1])
    patches = torch.tensor([[0], [3], [0]])
    mine = torch.tensor([0, 2])
    dummies = DummyRows(rows, patches, [[mine], [torch.tensor([1])]])
    read = rows.select(mine, 6)
    joined = dummies.beside(0, mine, read)
    assert joined.tokens.shape == (3, 10)
    assert check_inputs(joined.select(torch.arange(2))) == 3 and not joined.response_mask[2].any()
    assert torch.equal(joined.columns["position"], rows.columns["position"][[0, 2, 1]])
    assert dummies.beside(1, mine, read) is read and rows.response_mask[1].any()


def checked_on_rank(batch: SupervisedBatch) -> None:
    """On every rank: the loss sees the columns of the rank's own rows."""
    seen: list[int] = []

    def loss(output: Output, part: SupervisedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if part.inputs.response_mask.any():
            seen.append(check_inputs(part.inputs))
        assert output.logprobs is not None
        return -(output.logprobs * part.loss_weights).sum(), {}

    with joined_ranks(torch.device("cpu"), Deadlines.alike(60)) as ranks:
        options = TrainerOptions(lr=1e-3, micro_batch_tokens=20)
        trainer = FsdpTrainer(load_policy("builtin:tiny"), options, ranks=ranks)
        trainer.forward_backward(batch, loss, frozenset({"logprobs"}))
        trainer.skip_step()
        shares = ranks.gather(sum(seen))
    assert sum(shares) == int(batch.inputs.response_mask.sum()) and all(shares)


def test_ranks_see_the_columns_of_their_rows() -> None:
    inputs = toy_rows([3, 5, 1, 4])
    batch = SupervisedBatch(inputs=inputs, loss_weights=inputs.response_mask.float())
    run_ranks(2, checked_on_rank, batch)
