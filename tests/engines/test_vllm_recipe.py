"""A whole run that samples with vLLM. In `make test-scale`; skipped where vLLM or Ray is not
installed.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import EngineError
from support.command_line import Command
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("ray") is None,
    reason="needs vLLM and Ray: `make env-scale`",
)
# vLLM's attention on the CPU has no heads as small as those of builtin:tiny.
SHARED = ["model.name=builtin:small", "run.steps=3", "run.checkpoint_every=0"]
TALK = """
import random
from oxrl.environments import Step

class Talk:
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        return f"{prompt.messages[0]['content']} {self.chance.randint(0, 9)}"
    def step(self, text):
        return Step(f"go on {self.chance.randint(0, 9)}", reward=len(set(text)) / 10)
"""
VLLM = ["inference_engine.name=vllm", "inference_engine.actors=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], Config]:
    folder, done = tmp_path_factory.mktemp("vllm"), dict[str, Config]()

    def train(name: str, overrides: tuple[str, ...]) -> Config:
        if name not in done:
            done[name] = rl_config(folder, name, [*SHARED, *overrides])
            run(done[name])
        return done[name]

    return train


def test_a_run_on_vllm_samples_and_learns_what_a_local_run_does(
    trained: Callable[..., Config],
) -> None:
    local, vllm = trained("local", ()), trained("vllm", (*VLLM, "inference_engine.probe_every=1"))
    texts = [
        [(line["uid"], line["response"]) for line in map(json.loads, file.read_text().splitlines())]
        for file in (local.run.directory / "samples.jsonl", vllm.run.directory / "samples.jsonl")
    ]
    assert texts[0] == texts[1]
    for ours, theirs in zip(
        metric_lines(local.run.directory), metric_lines(vllm.run.directory), strict=True
    ):
        assert theirs["update/grad_norm"] == pytest.approx(ours["update/grad_norm"], rel=1e-4)
        assert theirs["mismatch/abs_logdiff_max"] < 1e-4
        assert theirs["sync/probe_max"] < 1e-4
        assert theirs["sync/retries"] == 0
        assert 0 < theirs["rollout/kv_cache_frac"] <= 1


def test_episodes_on_vllm_are_those_of_a_local_run(tmp_path: Path) -> None:
    """Turn by turn, with the rewards that the environment gives."""
    (tmp_path / "talk.py").write_text(TALK)
    model = model_that_stops(tmp_path / "model", "builtin:small")
    played: list[list[tuple[str, str, float]]] = []
    for name, engine in (("local", []), ("vllm", VLLM)):
        cfg = rl_config(
            tmp_path,
            name,
            ["run.steps=3", "run.checkpoint_every=0", f"model.name={model}", *engine],
            environment={"name": f"{tmp_path / 'talk.py'}:Talk", "max_turns": 3},
            rollout={"max_tokens": 24, "n_samples": 4},
            reward={"name": ""},
        )
        run(cfg)
        lines = map(json.loads, (cfg.run.directory / "samples.jsonl").read_text().splitlines())
        played.append([(one["uid"], json.dumps(one["turns"]), one["reward"]) for one in lines])
        assert metric_lines(cfg.run.directory)[-1]["mismatch/abs_logdiff_max"] < 1e-4
    assert played[0] == played[1]
    assert sum(turns.count("go on") for _, turns, _ in played[1]) > 24  # of 48 episodes


def test_what_vllm_says_is_in_a_file_of_the_run(trained: Callable[..., Config]) -> None:
    (log,) = trained("vllm", (*VLLM, "inference_engine.probe_every=1")).run.directory.glob(
        "vllm_*.log"
    )
    assert "vLLM" in log.read_text() or "vllm" in log.read_text()


def test_memory_that_is_too_small_for_one_response_is_an_error_that_names_the_log(
    tmp_path: Path,
) -> None:
    cfg = rl_config(tmp_path, "small", [*SHARED, *VLLM, "inference_engine.kv_cache_gb=0.0001"])
    with pytest.raises(EngineError, match=r"vLLM does not start .*vllm_\d+\.log"):
        run(cfg)


@pytest.mark.full
def test_two_processes_that_share_a_model_sample_what_one_does(
    trained: Callable[..., Config],
) -> None:
    one, two = (
        trained("vllm", (*VLLM, "inference_engine.probe_every=1")),
        trained(
            "two",
            (
                *VLLM,
                "inference_engine.tensor_parallel=2",
                "inference_engine.gpu_memory_fraction=0.3",
            ),
        ),
    )
    lines = [
        json.loads((cfg.run.directory / "samples.jsonl").read_text().splitlines()[0])
        for cfg in (one, two)
    ]
    assert lines[0]["response"] == lines[1]["response"]
    assert metric_lines(two.run.directory)[-1]["mismatch/abs_logdiff_max"] < 1e-4


@pytest.mark.full
def test_an_adapter_on_four_bits_is_merged_for_vllm_which_samples_as_a_local_run_does(
    tmp_path: Path,
) -> None:
    """What vLLM is sent was taken out of the codes; the local run computes with these."""
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[qlora]"')
    pytest.importorskip("bitsandbytes", reason='needs bitsandbytes: pip install -e ".[qlora]"')
    base = model_that_stops(tmp_path / "base", "builtin:small")
    model = {"name": str(base), "load_in_4bit": True}
    steps = ["run.steps=3", "run.checkpoint_every=0", "lora.rank=8", "train.lr=0.01"]
    local = rl_config(tmp_path, "local", steps, model=model)
    vllm = rl_config(tmp_path, "vllm", [*steps, *VLLM, "lora.delivery=merged"], model=model)
    run(local)
    run(vllm)
    found = [metric_lines(cfg.run.directory) for cfg in (local, vllm)]
    for ours, theirs in zip(*found, strict=True):
        assert theirs["reward/mean"] == ours["reward/mean"]
        assert theirs["update/grad_norm"] == pytest.approx(ours["update/grad_norm"], rel=1e-3)
        assert theirs["mismatch/abs_logdiff_max"] < 1e-4
        assert theirs["sync/retries"] == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_adapter_on_zero3_ranks_and_vllm_survives_kill_9_at_any_moment(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[lora]"')
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make env-scale")
    base = model_that_stops(tmp_path / "base", "builtin:small")
    runs = [rl_config(tmp_path, name, ADAPTED, model={"name": str(base)}) for name in "ab"]
    whole, killed = (cfg.run.directory for cfg in runs)
    assert _train(whole).wait(400) == 0
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    took = sum(json.loads(line)["time/step_s"] for line in lines[1:]) / len(lines)
    moments: list[str] = []
    for resumed in (False, True):
        command = _train(killed, *["--resume"] * resumed)
        _wait_for_a_line(killed, command)
        moment = random.SystemRandom().uniform(0, 2 * took)
        time.sleep(moment)
        command.send_signal(signal.SIGKILL)
        command.wait(60)
        moments.append(f"{moment:.1f} s after a step, at step {len(metric_lines(killed))}")
    print(f"killed {' and '.join(moments)}")  # noqa: T201
    last = _train(killed, "--resume")
    assert last.wait(400) == 0, last.errors
    assert metric_lines(killed) == metric_lines(whole)
    assert (killed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert final_files(killed) == final_files(whole)


ADAPTED = [
    "run.steps=10",
    "run.checkpoint_every=2",
    "run.training_gpus=2",
    "lora.rank=8",
    "train.lr=1e-2",
    "train.backend=deepspeed",
    "deepspeed.zero_stage=3",
    *VLLM,
]


def _train(run_directory: Path, *words: str) -> Command:
    config = run_directory.with_suffix(".yaml")
    return Command("train", config, *ADAPTED, *words, folder=run_directory.parent)


def _wait_for_a_line(run_directory: Path, command: Command) -> None:
    """Until the run has done one more step."""
    path = run_directory / "metrics.jsonl"
    before = path.read_bytes().count(b"\n") if path.exists() else 0
    end = time.monotonic() + 300
    while not path.exists() or path.read_bytes().count(b"\n") <= before:
        assert command.returncode is None and time.monotonic() < end, "it ended before a step"
        time.sleep(0.05)
