"""Reinforcement learning with training ranks and rollout actors over Ray, on text, on images and by
actions: the numbers of one process, whoever dies.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oxrl.assembly import ray_engines
from oxrl.assembly.assemble import assemble
from oxrl.assembly.assembly import Assembly
from oxrl.checkpoint.model_files import save_model
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.data.action_heads import read_head
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.ray.trainer import RankGroup, RayTrainer
from oxrl.errors import LostRankError, NonFiniteError
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.recipes.objective import Objective
from oxrl.recipes.session import Session
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.runs.clock import Clock
from oxrl.types import PolicyBatch, TokenBatch
from support.action_runs import make_data, reinforcement
from support.figures import SEED, Learned
from support.rank_runs import samples
from support.small_cluster import process_of
from support.small_runs import final_files, metric_lines, rl_config, write_inputs
from support.toy_columns import COLUMNS, TOYS, check_inputs, recording_sampler_of
from support.vision_families import write_family
from support.vision_runs import rl, write_rows

pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("connected"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make env-scale"
)
noisy = pytest.mark.filterwarnings("ignore")
Sections = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a policy learns from, and what of a run on it does not depend on who trains and samples.

    write: makes its data in a folder. make: a configuration from a folder, a name and sections. run,
    train: sections. steps: whose samples are equal. keys: of metrics that are.
    """

    write: Callable[[Path], object]
    make: Callable[..., Config]
    run: Sections
    train: Sections
    steps: Sequence[int]
    keys: Sequence[str]


KINDS = {
    "text": Kind(
        write=write_inputs,
        make=rl_config,
        run={
            "steps": 3,
            "checkpoint_every": 1,
            "keep_checkpoints": 9,
            "threads": 1,
            "deadline_s": 60,
            "record": "tokens",
        },
        train={"alg_name": "sgrpo", "lr": 1e-3, "micro_batch_tokens": 60},
        steps=[1],
        keys=["reward/mean", "update/loss", "update/grad_norm", "data/tokens", "update/param_norm"],
    ),
    "actions": Kind(
        write=make_data,
        make=reinforcement,
        run={"steps": 2, "threads": 1, "deadline_s": 120},
        # Groups that differ in their outcomes: some of these layouts are solved by a random policy.
        train={"alg_name": "sgrpo", "lr": 1e-3, "adam_eps": 1e-3},
        steps=[1, 2],
        keys=["reward/mean", "episode/success", "update/loss", "update/grad_norm"],
    ),
    "images": Kind(
        write=write_rows,
        make=rl,
        run={"steps": 3, "threads": 1, "deadline_s": 120},
        train={},
        steps=[1, 2, 3],
        keys=["reward/mean", "update/loss", "update/grad_norm", "update/param_norm"],
    ),
}


def config(
    folder: Path, name: str, backend: str, *, kind: str = "text", actors: int = 0, **sections: Any
) -> Config:
    """A run in one process, over two ranks where the backend is not local, and with actors."""
    common = KINDS[kind]
    scaled = backend != "local"
    ranks = {"training_gpus": 2, "max_restarts": 0} if scaled else {}
    micro = {"micro_batch_tokens": 60} if scaled else {}
    sections["run"] = common.run | ranks | sections.get("run", {})
    sections["train"] = common.train | micro | {"backend": backend} | sections.get("train", {})
    sections["inference_engine"] = {"actors": actors} | sections.get("inference_engine", {})
    return common.make(folder, name, **sections)


def assert_same(
    one: Config,
    other: Config,
    keys: Sequence[str],
    *,
    steps: Sequence[int] = (1,),
    rel: float = 1e-4,
) -> list[dict[str, Any]]:
    """Samples of these steps and metrics of these keys are equal; the lines of the other run."""
    ours, theirs = one.run.directory, other.run.directory
    for step in steps:
        drawn = samples(ours, step)
        assert drawn
        assert samples(theirs, step) == drawn
    lines = metric_lines(theirs)
    for line, expected in zip(lines, metric_lines(ours), strict=True):
        for key in keys:
            assert line[key] == pytest.approx(expected[key], rel=rel, abs=1e-6), key
    return lines


def recorded(path: Path) -> PolicyBatch:
    held: dict[str, Any] = load_file(path)
    inputs = TokenBatch(
        **{name: held.pop(name) for name in ("tokens", "attention_mask", "response_mask")}
    )
    empty = {"old_logprobs": None, "ref_logprobs": None}
    return PolicyBatch(inputs=inputs, **(empty | held))


def gradients(cfg: Any, batch: PolicyBatch) -> dict[str, torch.Tensor]:
    # In here, so that it is sent to actors whole: they cannot import this file.
    def gradients_of(trainer: Any) -> dict[str, torch.Tensor]:
        return {name: gradient.clone() for name, gradient in trainer.gradients()}

    with ExitStack() as stack:
        machine = assemble(Assembly(cfg), Clock(), stack)
        policy: Any = machine.policy
        policy.forward_backward(
            batch, machine.objective.policy_loss, frozenset({"logprobs", "entropy"})
        )
        if isinstance(policy, RayTrainer):
            return policy._call("sync", gradients_of)
        return gradients_of(policy)


def check_gradients(one: Config, other: Config) -> None:
    """Of a batch that was recorded, the same in one process and over ranks."""
    batch = recorded(min((one.run.directory / "rollouts").glob("*.safetensors")))
    expected = gradients(one, batch)
    found = gradients(other, batch)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    worst = max(
        float((found[name] - gradient).norm() / norm) for name, gradient in expected.items()
    )
    assert found.keys() == expected.keys()
    assert 0 < float(norm)
    assert worst < 1e-5
    print(f"largest difference of a gradient, relative to the norm: {worst:.1e}")  # noqa: T201


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Config]:
    """`alone("images")` is the run of that kind in one process, which is made once."""

    @cache
    def run_of(kind: str) -> Config:
        folder = tmp_path_factory.mktemp(kind)
        KINDS[kind].write(folder)
        cfg = config(folder, "one", "local", kind=kind)
        run(cfg)
        return cfg

    return run_of


def kill_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An actor dies with requests of version 1 in flight; its process, once it has."""
    submit = RayRollouts.submit
    killed: list[int] = []

    def submitting(group: Any, requests: Any) -> None:
        submit(group, requests)
        if not killed and group.version == 1:
            killed.append(process_of(group.workers[0].actor))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(RayRollouts, "submit", submitting)
    return killed


@pytest.mark.parametrize(
    ("kind", "backend", "sections"),
    [
        pytest.param("text", "deepspeed", {}, marks=needs_deepspeed, id="text-ZeRO-3"),
        pytest.param("actions", "fsdp", {}, marks=noisy, id="actions-FSDP2"),
        pytest.param(
            "actions",
            "deepspeed",
            {"deepspeed": {"zero_stage": 2}},
            marks=[noisy, needs_deepspeed],
            id="actions-ZeRO-2",
        ),
        # Their actor dies, and the next one is given the images again.
        pytest.param("images", "fsdp", {}, marks=noisy, id="images-FSDP2"),
    ],
)
def test_two_ranks_and_a_rollout_actor_train_like_one_process(
    kind: str,
    backend: str,
    sections: Sections,
    alone: Callable[[str], Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = alone(kind)
    killed = kill_once(monkeypatch) if kind == "images" else []
    if kind != "text":
        sections = {**sections, "inference_engine": {"probe_tokens": 64}}
    folder = one.run.directory.parent
    other = config(folder, backend, backend, kind=kind, actors=1, **sections)
    run(other)
    lines = assert_same(one, other, KINDS[kind].keys, steps=KINDS[kind].steps)
    for line in lines:
        assert line["mismatch/abs_logdiff_max"] < 1e-5
        assert line["sync/probe_max"] < 1e-4 and line["sync/retries"] == 0
    assert any(line["update/grad_norm"] > 0 for line in lines)
    assert len(killed) == (kind == "images")
    assert max(line["rollout/replaced_actors"] for line in lines) == len(killed)
    runs = [cfg.run.directory for cfg in (one, other)]
    shown, also_shown = (sorted(p.name for p in (at / "images").glob("*")) for at in runs)
    assert shown == also_shown and bool(shown) == (kind != "text")
    head, other_head = map(read_head, runs)
    assert head == other_head and (head is not None) == (kind == "actions")
    if kind == "text":
        check_gradients(one, other)


@pytest.mark.parametrize(
    "names", [["permuted-rewards"], ["entropy-mask", "chord", "held-out-grader"]]
)
def test_features_do_on_ranks_and_with_an_actor_what_they_do_in_one_process(
    names: list[str], alone: Callable[[str], Config]
) -> None:
    without = alone("text")
    folder = without.run.directory.parent
    held_out = {"data": str(folder / "prompts.jsonl"), "grader": "exact", "every": 2}
    numbers: Sections = {
        "permuted-rewards": {},
        "entropy-mask": {"quantile": 0.5},
        "chord": {"rows": str(folder / "chats.jsonl"), "peak": 0.5},
        "held-out-grader": held_out,
    }
    train = {"features": {name: numbers[name] for name in names}, "adam_eps": 1e-3}
    one = config(folder, f"one_{names[0]}", "local", train=train)
    other = config(folder, f"ranks_{names[0]}", "fsdp", actors=1, train=train)
    run(one)
    run(other)
    told = ["entropy_mask/frac", "chord/share", "chord/nll"] if len(names) > 1 else []
    lines = assert_same(one, other, [*KINDS["text"].keys, *told])
    # What was trained on is not what it is without them.
    assert lines[0]["update/grad_norm"] != pytest.approx(
        metric_lines(without.run.directory)[0]["update/grad_norm"], rel=1e-2
    )
    ours, theirs = (final_weights(cfg.run.directory) for cfg in (one, other))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        torch.testing.assert_close(theirs[name], values, rtol=1e-3, atol=1e-5)
    if "held-out-grader" in names:
        probed = [line for line in lines if "monitor/gap" in line]
        assert [line["step"] for line in probed] == [1, 2]
        assert all(line["monitor/prompts"] == 24 for line in probed)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").glob("step_*")) / "model.safetensors")


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.full), True])
def test_sampling_ahead_in_actors_trains_like_sampling_ahead_in_one_process(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = {
        "max_tokens": 6,
        "n_samples": 4,
        "max_staleness": 3,
        "rounds": 3,
        "force_strict_on_policy": False,
    }
    sections: Sections = {"run": {"steps": 8, "checkpoint_every": 3}, "rollout": ahead}
    one, other = (
        config(tmp_path, f"actors_{actors}", "local", actors=actors, **sections)
        for actors in (0, 2)
    )
    run(one)
    if killed:  # as soon as there is something to sample in the background
        begin = ContinuousRollouts._begin
        victims: list[int] = []

        def beginning(source: ContinuousRollouts) -> None:
            begin(source)
            if not victims and source._working is not None:
                engine: Any = source.parts.sampler
                victims.append(process_of(engine.workers[0].actor))
                os.kill(victims[0], signal.SIGKILL)

        monkeypatch.setattr(ContinuousRollouts, "_begin", beginning)
    run(other)
    ours, theirs = one.run.directory, other.run.directory
    for step in range(1, 9):
        assert samples(ours, step) == samples(theirs, step)
    lines = metric_lines(theirs)
    expected = metric_lines(ours)
    for key in ("reward/mean", "data/staleness_max", "samples/in_flight"):
        assert [line[key] for line in lines] == [line[key] for line in expected], key
    for key in ("update/loss", "update/param_norm"):
        # Weights of truncate come from log-probabilities, which shapes of batches round.
        for line, before in zip(lines, expected, strict=True):
            assert line[key] == pytest.approx(before[key], rel=1e-4, abs=1e-7), key
    assert max(line["data/staleness_max"] for line in lines) == 3
    assert max(line["rollout/replaced_actors"] for line in lines) == killed


class Killer:
    """Sends a signal to training rank 1 after the given optimizer step, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int) -> None:
        self.groups: list[RankGroup] = []
        self.at: float | None = None
        make, record = RankGroup.__init__, Session.record

        def made(group: RankGroup, *arguments: Any, **options: Any) -> None:
            make(group, *arguments, **options)
            self.groups.append(group)

        def recorded(session: Session, at: int, *arguments: Any, **options: Any) -> None:
            record(session, at, *arguments, **options)
            if at == step and self.at is None:
                os.kill(process_of(self.groups[-1]._ranks[1]), number)
                self.at = time.monotonic()

        monkeypatch.setattr(RankGroup, "__init__", made)
        monkeypatch.setattr(Session, "record", recorded)

    @property
    def seconds(self) -> float:
        assert self.at is not None
        return time.monotonic() - self.at


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = config(tmp_path_factory.mktemp("uninterrupted"), "run", "fsdp")
    run(cfg)
    return cfg.run.directory


DORA = {"rank": 4, "dora": True, "rslora": True}


@pytest.mark.parametrize(
    ("backend", "lora", "delivery"),
    [
        ("fsdp", {"rank": 4}, "adapter"),
        pytest.param("deepspeed", {"rank": 4}, "adapter", marks=needs_deepspeed),
        pytest.param("fsdp", {"rank": 4}, "merged", marks=pytest.mark.full),
        pytest.param("fsdp", DORA, "merged", marks=pytest.mark.full),
        pytest.param("deepspeed", DORA, "adapter", marks=[pytest.mark.full, needs_deepspeed]),
    ],
)
def test_an_adapter_on_two_ranks_and_a_rollout_actor_trains_like_in_one_process(
    tmp_path: Path, backend: str, lora: dict[str, Any], delivery: str
) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[lora]"')
    base = tmp_path / "base"
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7)), base)
    load_tokenizer("builtin:tiny").save_pretrained(base)
    sections: Sections = {
        "model": {"name": str(base)},
        "lora": lora,
        "train": {"kl_coeff": 0.05, "lr": 1e-2},
    }
    local = config(tmp_path, "local", "local", **sections)
    sections["lora"] = {**lora, "delivery": delivery}
    scaled = config(tmp_path, "scaled", backend, actors=1, **sections)
    run(local)
    run(scaled)
    keys = ["reward/mean", "update/loss", "update/grad_norm", "kl/ref_k3"]
    synced = assert_same(local, scaled, keys)[-1]
    checkpoints = scaled.run.directory.glob("checkpoints/step_*")
    of_policy = max(checkpoints) / "adapter_model.safetensors"
    whole = base / "model.safetensors"
    tensors = load_file(whole if delivery == "merged" else of_policy)
    sent = sum(tensor.nbytes for tensor in tensors.values())
    assert synced["sync/sent_bytes"] == sent
    assert synced["sync/driver_bytes"] == 0


@pytest.mark.full
@pytest.mark.parametrize("delivery", ["adapter", "merged"])
def test_tokens_that_actors_draw_ahead_are_of_the_adapters_whose_versions_they_have(
    tmp_path: Path, delivery: str, learned: Learned
) -> None:
    from support.adapter_runs import AHEAD, KEPT, assert_sampled_by_their_versions

    base = tmp_path / "base"
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7 + SEED)), base)
    load_tokenizer("builtin:tiny").save_pretrained(base)
    sections: Sections = {"model": {"name": str(base)}, "run": {**KEPT, "steps": 6}}
    sections |= {"lora": {"rank": 4, "delivery": delivery}, "rollout": AHEAD, "train": {"lr": 1e-2}}
    cfg = config(tmp_path, "run", "fsdp", actors=1, **sections)
    run(cfg)
    assert_sampled_by_their_versions(cfg.run.directory, learned)


def test_a_killed_training_rank_ends_the_run_with_the_reason_and_a_checkpoint_to_resume_from(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, "run", "fsdp")
    with monkeypatch.context() as patch:
        killer = Killer(patch, signal.SIGKILL, step=2)
        with pytest.raises(
            LostRankError, match=r"training rank 1 of 2 died.*the group of 2 ranks is ended"
        ):
            run(cfg)
        print(f"kill -9 of a training rank: the run ended after {killer.seconds:.1f} s")  # noqa: T201
    run(cfg, resume=True)
    assert metric_lines(cfg.run.directory) == metric_lines(uninterrupted)
    assert final_files(cfg.run.directory) == final_files(uninterrupted)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_the_whole_group_starts_again_from_the_checkpoint(
    number: signal.Signals,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deadline_s = 15 if number == signal.SIGSTOP else 60
    cfg = config(tmp_path, "run", "fsdp", run={"max_restarts": 1, "deadline_s": deadline_s})
    killer = Killer(monkeypatch, number, step=2)
    run(cfg)
    seconds = killer.seconds
    assert len(killer.groups) == 2
    assert "Starting the whole group again" in capsys.readouterr().out
    assert metric_lines(cfg.run.directory) == metric_lines(uninterrupted)
    assert final_files(cfg.run.directory) == final_files(uninterrupted)
    figure = f"{number.name} of a training rank: the run was complete {seconds:.1f} s later, one step repeated"
    print(figure)  # noqa: T201


@pytest.mark.parametrize(
    "backend", ["fsdp", pytest.param("deepspeed", marks=[pytest.mark.full, needs_deepspeed])]
)
def test_ranks_save_no_weights_that_are_not_finite(tmp_path: Path, backend: str) -> None:
    # One step is enough to overflow them, and to be due for a checkpoint.
    cfg = config(tmp_path, "run", backend)
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"lr": 1e39})})
    said = r"(?s)no checkpoint of step 1 .*values are NaN or infinite.*step_00000000: --resume"
    with pytest.raises(NonFiniteError, match=said):
        run(cfg)
    saved = sorted(path.name for path in (cfg.run.directory / "checkpoints").iterdir())
    assert saved == ["step_00000000"]


@needs_deepspeed
def test_critic_and_reference_live_on_the_same_ranks(tmp_path: Path) -> None:
    train = {"alg_name": "ppo", "lr": 1e-3, "critic_lr": 1e-3, "kl": "loss_k3", "kl_coeff": 0.1}
    one, other = (
        config(tmp_path, backend, backend, run={"steps": 2}, train=train)
        for backend in ("local", "deepspeed")
    )
    run(one)
    run(other)
    keys = ["value/loss", "update/loss", "update/grad_norm", "value/grad_norm"]
    assert_same(one, other, keys)
    newest = max((other.run.directory / "checkpoints").iterdir())
    assert (newest / "critic" / "config.json").is_file()


@noisy
@pytest.mark.parametrize(
    ("kind", "actors", "length", "steps"),
    [("text", 2, 64, [1]), ("actions", 1, 256, [1, 2]), ("images", 1, 512, [1])],
)
def test_vllm_in_actors_samples_for_the_local_trainer(
    kind: str, actors: int, length: int, steps: Sequence[int], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make env-scale")
    KINDS[kind].write(tmp_path)
    # vLLM on a CPU has no attention for heads of 16, as those of the tiny models are.
    name = "builtin:small"
    if kind != "text":
        name = str(write_family("idefics3", tmp_path / "idefics3", heads=2))
    run_of = {"deadline_s": 120} | ({"steps": 2} if kind == "text" else {})
    sections: Sections = {"model": {"name": name, "max_length": length}, "run": run_of}
    one = config(tmp_path, "one", "local", kind=kind, **sections)
    sections["inference_engine"] = {"name": "vllm"}
    if kind != "text":
        sections["inference_engine"]["probe_tokens"] = 64
    other = config(tmp_path, "other", "local", kind=kind, actors=actors, **sections)
    run(one)
    run(other)
    for line in assert_same(one, other, ["update/grad_norm"], steps=steps, rel=1e-3):
        assert line["sync/probe_max"] < 1e-4 and line["sync/unread"] == 0
        assert line["mismatch/abs_logdiff_max"] < 1e-4
        assert line["rollout/replaced_actors"] == 0
    assert list(other.run.directory.glob("vllm_*.log"))


def test_each_half_of_a_run_is_had_with_actors_too(tmp_path: Path) -> None:
    """Training on what actors sampled, in this process and over ranks; sampling alone by actors."""
    whole = config(tmp_path, "whole", "local", actors=2)
    run(whole)
    first = whole.run.directory
    source = {"from_samples": str(first)}
    stored = config(tmp_path, "stored", "local", actors=2, rollout=source)
    run(stored)
    delivered = "delivery/probe.json"  # nothing is delivered where nothing is sampled
    files = {name: held for name, held in final_files(first).items() if name != delivered}
    assert files == final_files(stored.run.directory)
    ranks = config(tmp_path, "ranks", "fsdp", actors=2, rollout=source)
    run(ranks)
    lines = [metric_lines(found.run.directory) for found in (whole, ranks)]
    for name in ("reward/mean", "data/tokens", "update/grad_norm"):
        assert [line[name] for line in lines[0]] == pytest.approx([line[name] for line in lines[1]])
    only = config(tmp_path, "only", "local", actors=2, run={"only": "rollouts"})
    run(only)
    name = "rollouts/step_00000000.samples.jsonl"
    assert (first / name).read_bytes() == (only.run.directory / name).read_bytes()


def note_losses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the loss, wherever it is made, checks its columns and notes in a file of its
    process how many tokens had them.
    """
    folder.mkdir(parents=True)
    policy_loss = Objective.policy_loss

    # In here, so that it is sent to ranks whole.
    def noting(self: Objective, output: Any, batch: Any) -> Any:
        with open(folder / str(os.getpid()), "a", encoding="utf-8") as file:
            file.write(f"{check_inputs(batch.inputs)}\n")
        return policy_loss(self, output, batch)

    monkeypatch.setattr(Objective, "policy_loss", noting)


def noted(folder: Path) -> list[int]:
    """Trained tokens that the losses of every process saw."""
    return [sum(map(int, path.read_text().split())) for path in folder.iterdir()]


@pytest.mark.parametrize(("backend", "processes"), [("local", 1), ("fsdp", 3)])
def test_columns_that_actors_record_reach_the_loss_as_in_one_process(
    backend: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Assembly, "recorded", TOYS)
    monkeypatch.setattr(ray_engines, "sampler_of", recording_sampler_of)
    seen: list[list[int]] = []
    drawn: list[list[dict[str, torch.Tensor]]] = []
    for name, at, actors in (("one", "local", 0), ("other", backend, 2)):
        cfg = config(tmp_path, name, at, actors=actors)
        with monkeypatch.context() as patch:
            note_losses(tmp_path / "seen" / name, patch)
            run(cfg)
        seen.append(noted(tmp_path / "seen" / name))
        kept = sorted((cfg.run.directory / "rollouts").glob("step_????????.safetensors"))
        drawn.append([load_file(path) for path in kept])
    # What ranks learned from is summed up in the driver, by the same loss.
    assert len(seen[0]) == 1 and len(seen[1]) == processes
    assert sum(seen[0]) == sum(seen[1]) > 100 and all(seen[1])
    for ours, theirs in zip(*drawn, strict=True):
        for name in ("tokens", *COLUMNS):
            assert torch.equal(ours[name], theirs[name]), name
