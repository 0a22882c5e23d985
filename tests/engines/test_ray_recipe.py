"""Reinforcement learning with training ranks and rollout actors over Ray: the numbers of one
process, whoever dies.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oxrl.assembly.assemble import assemble
from oxrl.assembly.assembly import Assembly
from oxrl.checkpoint.model_files import save_model
from oxrl.commands.train import run
from oxrl.errors import LostRankError, NonFiniteError
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.recipes.session import Session
from oxrl.rollouts.async_rollouts import AheadRollouts
from oxrl.runs.clock import Clock
from oxrl.types import PolicyBatch, TokenBatch
from support.figures import SEED, Learned
from support.rank_runs import samples
from support.small_runs import final_files, metric_lines, rl_config

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

from oxrl.engines.ray import cluster as ray_cluster  # noqa: E402
from oxrl.engines.ray import trainer as ray_trainer  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
RUN = {
    "steps": 3,
    "checkpoint_every": 1,
    "keep_checkpoints": 9,
    "threads": 1,
    "deadline_s": 60,
    "record": "tokens",
}


@pytest.fixture(scope="module", autouse=True)
def connected() -> Iterator[None]:
    """One small Ray cluster for the whole module."""
    ray_cluster._import_ray(loopback=True)
    with ray_cluster._own_signals():
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        ray.init(address="local", num_cpus=6, object_store_memory=200 << 20, **options)
    yield
    ray.shutdown()


def config(
    folder: Path, name: str, backend: str, *, actors: int = 0, **sections: dict[str, Any]
) -> Any:
    if backend == "local":
        ranks: dict[str, Any] = {}
    else:
        ranks = {"training_gpus": 2, "max_restarts": 0}
    content: dict[str, Any] = {
        "run": RUN | ranks | sections.pop("run", {}),
        "train": {"alg_name": "sgrpo", "lr": 1e-3, "backend": backend, "micro_batch_tokens": 60}
        | sections.pop("train", {}),
        "inference_engine": {"actors": actors},
    }
    return rl_config(folder, name, **content, **sections)


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
        if isinstance(policy, ray_trainer.RayTrainer):
            return policy._call("sync", gradients_of)
        return gradients_of(policy)


def test_two_zero3_ranks_and_a_rollout_actor_train_like_one_process(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make env-scale")
    local = config(tmp_path, "local", "local")
    scaled = config(tmp_path, "scaled", "deepspeed", actors=1)
    run(local)
    started = time.monotonic()
    run(scaled)
    figure = f"3 steps with 2 ZeRO-3 ranks and a rollout actor: {time.monotonic() - started:.1f} s, start included"
    print(figure)  # noqa: T201
    one, other = local.run.directory, scaled.run.directory
    assert samples(one, 1) == samples(other, 1)
    for ours, theirs in zip(metric_lines(one), metric_lines(other), strict=True):
        for key in (
            "reward/mean",
            "update/loss",
            "update/grad_norm",
            "data/tokens",
            "update/param_norm",
        ):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
        assert theirs["mismatch/logprob_max"] < 1e-4 if "mismatch/logprob_max" in theirs else True

    batch = recorded(min((one / "rollouts").glob("*.safetensors")))
    expected = gradients(local, batch)
    found = gradients(scaled, batch)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    worst = max(
        float((found[name] - gradient).norm() / norm) for name, gradient in expected.items()
    )
    assert found.keys() == expected.keys()
    assert 0 < float(norm)
    assert worst < 1e-5
    print(f"largest difference of a gradient, relative to the norm: {worst:.1e}")  # noqa: T201


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.full), True])
def test_sampling_ahead_in_actors_trains_like_sampling_ahead_in_one_process(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = {"max_tokens": 6, "n_samples": 4, "max_staleness": 3, "force_strict_on_policy": False}
    sections: dict[str, Any] = {"run": {"steps": 8, "checkpoint_every": 3}, "rollout": ahead}
    one, other = (
        config(tmp_path, f"actors_{actors}", "local", actors=actors, **copy.deepcopy(sections))
        for actors in (0, 2)
    )
    run(one)
    if killed:  # as soon as there is something to sample in the background
        dispatch = AheadRollouts._dispatch_batches

        def dispatching(source: Any, *arguments: Any, **named: Any) -> None:
            dispatch(source, *arguments, **named)
            if source.batches and source.batches[-1].end == 6 * 4:
                actor = source.parts.sampler.workers[0].actor
                os.kill(
                    ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60),
                    signal.SIGKILL,
                )

        monkeypatch.setattr(AheadRollouts, "_dispatch_batches", dispatching)
    run(other)
    ours, theirs = one.run.directory, other.run.directory
    for step in range(1, 9):
        assert samples(ours, step) == samples(theirs, step)
    for key in (
        "reward/mean",
        "data/staleness_max",
        "samples/in_flight",
        "update/loss",
        "update/param_norm",
    ):
        assert [line[key] for line in metric_lines(ours)] == [
            line[key] for line in metric_lines(theirs)
        ], key
    assert max(line["data/staleness_max"] for line in metric_lines(theirs)) == 3
    assert max(line["rollout/replaced_actors"] for line in metric_lines(theirs)) == killed


class Killer:
    """Sends a signal to training rank 1 after the given optimizer step, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int) -> None:
        self.groups: list[ray_trainer.RankGroup] = []
        self.at: float | None = None
        make, record = ray_trainer.RankGroup.__init__, Session.record

        def made(group: ray_trainer.RankGroup, *arguments: Any, **options: Any) -> None:
            make(group, *arguments, **options)
            self.groups.append(group)

        def recorded(session: Session, at: int, *arguments: Any, **options: Any) -> None:
            record(session, at, *arguments, **options)
            if at == step and self.at is None:
                actor = self.groups[-1]._ranks[1]
                victim = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
                os.kill(victim, number)
                self.at = time.monotonic()

        monkeypatch.setattr(ray_trainer.RankGroup, "__init__", made)
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
        ("deepspeed", {"rank": 4}, "adapter"),
        pytest.param("fsdp", {"rank": 4}, "merged", marks=pytest.mark.full),
        pytest.param("fsdp", DORA, "merged", marks=pytest.mark.full),
        pytest.param("deepspeed", DORA, "adapter", marks=pytest.mark.full),
    ],
)
def test_an_adapter_on_two_ranks_and_a_rollout_actor_trains_like_in_one_process(
    tmp_path: Path, backend: str, lora: dict[str, Any], delivery: str
) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[lora]"')
    if backend == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make env-scale")
    base = tmp_path / "base"
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7)), base)
    load_tokenizer("builtin:tiny").save_pretrained(base)
    sections: dict[str, Any] = {
        "model": {"name": str(base)},
        "lora": lora,
        "train": {"kl_coeff": 0.05, "lr": 1e-2},
    }
    local = config(tmp_path, "local", "local", **copy.deepcopy(sections))
    sections["lora"] = {**lora, "delivery": delivery}
    scaled = config(tmp_path, "scaled", backend, actors=1, **copy.deepcopy(sections))
    run(local)
    run(scaled)
    one, other = local.run.directory, scaled.run.directory
    assert samples(one, 1) == samples(other, 1)
    for ours, theirs in zip(metric_lines(one), metric_lines(other), strict=True):
        for key in ("reward/mean", "update/loss", "update/grad_norm", "kl/ref_k3"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
    of_policy = max(other.glob("checkpoints/step_*")) / "adapter_model.safetensors"
    whole = base / "model.safetensors"
    tensors = load_file(whole if delivery == "merged" else of_policy)
    sent = sum(tensor.nbytes for tensor in tensors.values())
    synced = metric_lines(other)[-1]
    assert synced["sync/sent_bytes"] == sent
    assert synced["sync/driver_bytes"] == 0


@pytest.mark.full
@pytest.mark.parametrize("delivery", ["adapter", "merged"])
def test_samples_that_actors_draw_ahead_end_under_the_adapter_that_they_began_with(
    tmp_path: Path, delivery: str, learned: Learned
) -> None:
    from support.adapter_runs import AHEAD, KEPT, assert_sampled_by_their_versions

    base = tmp_path / "base"
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7 + SEED)), base)
    load_tokenizer("builtin:tiny").save_pretrained(base)
    sections: dict[str, Any] = {"model": {"name": str(base)}, "run": {**KEPT, "steps": 6}}
    sections |= {"lora": {"rank": 4, "delivery": delivery}, "rollout": AHEAD, "train": {"lr": 1e-2}}
    cfg = config(tmp_path, "run", "fsdp", actors=1, **sections)
    run(cfg)
    assert_sampled_by_their_versions(cfg.run.directory, {0, 2}, learned)


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


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.full)])
def test_ranks_save_no_weights_that_are_not_finite(tmp_path: Path, backend: str) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make env-scale")
    # One step is enough to overflow them, and to be due for a checkpoint.
    cfg = config(tmp_path, "run", backend)
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"lr": 1e39})})
    said = r"(?s)no checkpoint of step 1 .*values are NaN or infinite.*step_00000000: --resume"
    with pytest.raises(NonFiniteError, match=said):
        run(cfg)
    saved = sorted(path.name for path in (cfg.run.directory / "checkpoints").iterdir())
    assert saved == ["step_00000000"]


def test_critic_and_reference_live_on_the_same_ranks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make env-scale")
    train = {"alg_name": "ppo", "lr": 1e-3, "critic_lr": 1e-3, "kl": "loss_k3", "kl_coeff": 0.1}
    one, other = (
        config(tmp_path, backend, backend, run={"steps": 2}, train=train)
        for backend in ("local", "deepspeed")
    )
    run(one)
    run(other)
    assert samples(one.run.directory, 1) == samples(other.run.directory, 1)
    for ours, theirs in zip(
        metric_lines(one.run.directory), metric_lines(other.run.directory), strict=True
    ):
        for key in ("value/loss", "update/loss", "update/grad_norm", "value/grad_norm"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
    assert (
        max((other.run.directory / "checkpoints").iterdir()) / "critic" / "config.json"
    ).is_file()


def test_vllm_in_two_actors_samples_for_the_local_trainer(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make env-scale")
    # vLLM on CPU has no attention heads as small as builtin:tiny's.
    sections = {
        "model": {"name": "builtin:small", "max_length": 64},
        "run": {"steps": 2, "deadline_s": 120},
    }
    one = config(tmp_path, "one", "local", **copy.deepcopy(sections))
    other = config(tmp_path, "other", "local", actors=2, **copy.deepcopy(sections))
    other = other.model_copy(
        update={"inference_engine": other.inference_engine.model_copy(update={"name": "vllm"})}
    )
    run(one)
    run(other)
    assert samples(one.run.directory, 1) == samples(other.run.directory, 1)
    for line in metric_lines(other.run.directory):
        assert line["sync/probe_max"] < 1e-4
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
