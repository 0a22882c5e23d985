"""Whole commands that sample with vLLM in a process of its own, without Ray. In `make test-scale`;
skipped where vLLM is not installed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.evaluate import run_eval, run_generate
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from support.command_line import Command, forked
from support.small_runs import final_files, metric_lines, rl_config, sft_config

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: `make env-scale`"),
    pytest.mark.timeout(600),
]
# vLLM's attention on the CPU has no heads as small as those of builtin:tiny.
SMALL = ["model.name=builtin:small", "run.seed=3", "run.checkpoint_every=0"]
VLLM = "inference_engine.name=vllm"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(cfg: Config) -> list[tuple[str, str]]:
    lines = lines_of(cfg.run.directory / "samples.jsonl")
    return [(line["uid"], line["response"]) for line in lines]


def run_without_ray(config: Path, overrides: list[str]) -> None:
    """In a process of its own: other tests may have imported Ray into this one."""
    run(load_config(config, overrides))
    assert "ray" not in sys.modules


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_reinforcement_learning_needs_no_ray_for_vllm(tmp_path: Path, dtype: str) -> None:
    steps = [*SMALL, "run.steps=3", f"model.dtype={dtype}", "inference_engine.probe_every=1", VLLM]
    cfg = rl_config(tmp_path, "hosted", steps)
    process = forked(run_without_ray, tmp_path / "hosted.yaml", steps)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    for line in metric_lines(cfg.run.directory):
        assert line["sync/retries"] == 0
        assert line["sync/probe_limit_share"] < 1
        assert line["sync/sent_bytes"] > 0
    if dtype == "float32":
        local = rl_config(tmp_path, "local", [*SMALL, "run.steps=3"])
        run(local)
        assert said(cfg) == said(local)


def test_cut_sampling_and_centering_train_alike_on_both_engines(tmp_path: Path) -> None:
    """A learning rate that changes what is kept, and the recorded columns in every step."""
    found: list[Config] = []
    for engine in ("local", "vllm"):
        cfg = rl_config(
            tmp_path,
            engine,
            [*SMALL, "run.steps=3", "run.record=tokens", f"inference_engine.name={engine}"],
            rollout={"top_k": 20, "top_p": 0.9, "min_p": 0.002, "max_tokens": 6, "n_samples": 4},
            train={"centering": "score", "center_top": 7, "lr": 3e-3},
        )
        run(cfg)
        found.append(cfg)
    local, hosted = found
    assert said(hosted) == said(local)
    lines = [metric_lines(cfg.run.directory) for cfg in found]
    for ours, theirs in zip(*lines, strict=True):
        for name in ("sampling/kept_mean", "update/center_tail_frac"):
            assert ours[name] == pytest.approx(theirs[name])
        for name in ("update/loss", "update/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6)
        assert theirs["mismatch/abs_logdiff_max"] < 1e-4
    assert lines[0][0]["sampling/kept_mean"] > 7 and lines[0][0]["update/center_tail_frac"] > 0
    replayed = replay(hosted.run.directory, 2)
    assert all(line.equal for line in replayed)


@pytest.mark.full
def test_the_run_is_that_of_a_ray_actor_to_the_byte(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: `make env-scale`")
    steps = [*SMALL, "run.steps=3", "run.checkpoint_every=3"]
    found: list[Config] = []
    for name, actors in (("hosted", 0), ("ray", 1)):
        cfg = rl_config(tmp_path, name, [*steps, VLLM, f"inference_engine.actors={actors}"])
        run(cfg)
        found.append(cfg)
    hosted, in_ray = (cfg.run.directory for cfg in found)
    assert metric_lines(hosted) == metric_lines(in_ray)
    assert final_files(hosted) == final_files(in_ray)


def test_eval_and_generate_answer_as_this_process_does_with_the_weights_that_it_has(
    tmp_path: Path,
) -> None:
    """Those of seed 3 are in no file: they have to be delivered."""
    cfg = rl_config(tmp_path, "evaluated", SMALL)
    config = cfg.run.directory.with_suffix(".yaml")
    outs: list[list[dict[str, Any]]] = []
    metrics: list[dict[str, float]] = []
    for engine in ("local", "vllm"):
        out = tmp_path / f"{engine}.jsonl"
        changed = [*SMALL, f"inference_engine.name={engine}"]
        metrics.append(run_eval(config, changed, samples=2, temperature=0.7, out=out))
        outs.append(lines_of(out))
    assert [line["response"] for line in outs[0]] == [line["response"] for line in outs[1]]
    assert metrics[0] == pytest.approx(metrics[1])
    answers = [
        run_generate("builtin:small", ["2+3=", "4+4="], samples=2, seed=3, engine=engine)
        for engine in ("local", "vllm")
    ]
    assert answers[0] == answers[1]
    assert not cfg.run.directory.exists()


def test_generated_evaluations_of_sft_follow_the_weights(tmp_path: Path) -> None:
    rows = [{"prompt": word, "completion": "7a7b", "answer": "7a7b"} for word in ("say", "tell")]
    (tmp_path / "sevens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.py").write_text(
        "def share(prompt, completion):\n"
        "    same = [a == b for a, b in zip(completion, prompt.answer)]\n"
        "    return sum(same) / len(prompt.answer)\n"
    )
    found: list[list[Any]] = []
    for engine in ("local", "vllm"):
        cfg = sft_config(
            tmp_path,
            engine,
            [*SMALL, "run.steps=12", "run.eval_every=6", f"inference_engine.name={engine}"],
            reward={"name": str(tmp_path / "letters.py:share")},
            rollout={"max_tokens": 4, "eval_samples": 2, "eval_temperature": 0.0},
            data={
                "train": str(tmp_path / "sevens.jsonl"),
                "eval": str(tmp_path / "sevens.jsonl"),
                "rows_per_step": 2,
            },
        )
        run(cfg)
        lines = metric_lines(cfg.run.directory)
        found.append([line["eval/reward"] for line in lines if "eval/reward" in line])
    assert found[0] == found[1]
    assert len(found[1]) == 2
    assert found[1][-1] > 0


def test_rejection_sampling_keeps_what_this_process_would(tmp_path: Path) -> None:
    kept: list[bytes] = []
    for engine in ("local", "vllm"):
        cfg = rl_config(
            tmp_path,
            engine,
            ["model.name=builtin:small", "run.steps=1", f"inference_engine.name={engine}"],
            train={"alg_name": "rft", "lr": 1e-3, "keep_reward": 0.0},
            rollout={"max_tokens": 60, "n_samples": 4},
            data={"rows_per_step": 4},
        )
        try:
            run(cfg)
        finally:
            files = [*cfg.run.directory.glob("kept.*")]
            kept.append(b"".join(path.read_bytes() for path in files))
    assert kept[0] == kept[1]


KILLED = ["run.steps=6", "run.checkpoint_every=1", "model.name=builtin:small", VLLM]


def train(directory: Path, *words: str) -> Command:
    config = directory.with_suffix(".yaml")
    return Command("train", config, *KILLED, *words, folder=directory.parent)


def of_run(directory: Path) -> list[int]:
    """Sampling processes that were started in the folder of a run, without their keepers."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) > 1:
            try:
                home = (entry / "cwd").readlink()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if home == directory.parent and b"oxrl.engines.sample.host" in words:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(state[1])
    return [process for process, parent in found.items() if parent in found]


def wait_for(what: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_kill_9_of_run_and_sampler_leaves_nothing_and_resumes_to_the_byte(tmp_path: Path) -> None:
    runs = [rl_config(tmp_path / name, "run", KILLED) for name in ("whole", "killed")]
    whole, killed = (cfg.run.directory for cfg in runs)
    assert train(whole).wait(500) == 0
    metrics = killed / "metrics.jsonl"
    command = train(killed)
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
    [sampler] = of_run(killed)
    command.send_signal(signal.SIGKILL)
    command.wait(60)
    wait_for(lambda: not Path(f"/proc/{sampler}").exists(), 20)
    command = train(killed, "--resume")
    wait_for(lambda: metrics.read_bytes().count(b"\n") >= 4)
    [sampler] = of_run(killed)
    os.kill(sampler, signal.SIGKILL)
    assert command.wait(500) == 0, command.errors
    assert "killed by signal 9" in (killed / "run.log").read_text()
    replaced = [line.pop("rollout/replaced_actors") for line in metric_lines(killed)]
    assert sum(replaced) == 1
    assert final_files(killed) == final_files(whole)
    assert (killed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
