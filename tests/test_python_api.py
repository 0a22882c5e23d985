"""`oxrl.train` and `oxrl.load_run`: what docs/python.md says, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pandas
import pytest

import oxrl
from oxrl.commands.replay import replay
from oxrl.config import Config
from oxrl.environments import Step
from oxrl.errors import ConfigError, DataError, OxrlError, RunDirectoryError
from oxrl.runs.directory import owning
from support import command_line
from support.figures import SEED, THREADS, Learned
from support.given_functions import Once, digits, longer

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def config(folder: Path, name: str = "run", steps: int = 2, **sections: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run": {
            "name": name,
            "dir": folder / name,
            "steps": steps,
            "mlflow": False,
            "threads": THREADS,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"prompts_per_step": 2},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "train": {"alg_name": "sgrpo", "lr": 1e-3},
    }
    return {
        section: made.get(section, {}) | sections.get(section, {})
        for section in {**made, **sections}
    }


def test_oxrl_is_imported_lightly_and_the_page_runs_as_it_stands(
    tmp_path: Path, learned: Learned
) -> None:
    light = "import sys, oxrl\nassert not {'torch', 'pandas', 'pydantic'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", light], timeout=60, check=True)
    after = (
        "assert list(run.metrics['step']) == [*range(1, 21)] and 'system/chain' not in run.metrics\n"
        "assert len(run.samples) == 20 * 128 and run.samples['reward'].between(0, 1).all()\n"
        "assert run.checkpoint.name == 'step_00000020'\n"
        "assert len(run.generate('2+2=', n=2, max_tokens=3)) == 2\n"
        "print('first example', *run.metrics['reward/mean'].iloc[[0, -1]])\n"
        "again = oxrl.load_run('runs/notebook', reward=digits)\n"
        "assert again.evaluate(dataset=rows[:3])['eval/responses'] == 3\n"
        "assert again.config['reward.name'] == 'python:digits'\n"
    )
    page = BLOCKS[0] + after + BLOCKS[1] + BLOCKS[2]
    if SEED:
        page = page.replace("run_seed=0", f"run_seed={SEED}")
    (tmp_path / "page.py").write_text(page)
    done = command_line.oxrl(folder=tmp_path, script=tmp_path / "page.py")
    assert done.returncode == 0, done.stderr
    [ends] = [line for line in done.stdout.splitlines() if line.startswith("first example")]
    first, last = map(float, ends.split()[2:])
    learned("first example", last - first, at_least=0.5, floor=0.0)
    rewards = [float(line.split()[1]) for line in done.stdout.splitlines()[-20:]]
    gain = sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5
    learned("gain", gain, at_least=0.1, floor=0.0)
    assert (tmp_path / "my-checkpoint" / "model.safetensors").is_file()
    written = (tmp_path / "runs/notebook/given/train.jsonl").read_text().splitlines()
    assert len(written) == 25
    resumed = ("train", "runs/notebook/config.yaml", "--resume")
    refused = command_line.oxrl(*resumed, folder=tmp_path)
    assert refused.returncode == 2
    assert "oxrl.train(..., reward=digits, resume=True)" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_run_goes_on_with_the_same_function_and_rows_alone(tmp_path: Path) -> None:
    oxrl.train(config(tmp_path), reward=digits, dataset=ROWS)
    more = config(tmp_path, steps=3)
    with pytest.raises(RunDirectoryError, match=r"oxrl.train\(..., resume=True\)"):
        oxrl.train(more, reward=digits, dataset=ROWS)
    with pytest.raises(ConfigError, match="reward.name"):
        oxrl.train(more, resume=True)
    with pytest.raises(RunDirectoryError, match="reward.name"):
        oxrl.train(more, reward=longer, resume=True)
    with pytest.raises(RunDirectoryError, match="other rows|others than those of the start"):
        oxrl.train(more, reward=digits, dataset=ROWS[:5], resume=True)
    run = oxrl.train(more, reward=digits, resume=True)
    whole = oxrl.train(config(tmp_path, "whole", steps=3), reward=digits, dataset=ROWS)
    known = [
        name for name in run.metrics if not name.startswith(("time/", "throughput/", "system/"))
    ]
    assert run.metrics[known].equals(whole.metrics[known])


def test_a_function_that_cannot_be_sent_is_called_here(tmp_path: Path) -> None:
    lock = threading.Lock()
    seen: list[str] = []

    async def counted(prompt: Any, completion: str) -> float:
        with lock:
            seen.append(completion)
        return digits(prompt, completion)

    with pytest.warns(UserWarning, match="python:counted .*cannot be killed"):
        run = oxrl.train(config(tmp_path, steps=1), reward=counted, dataset=iter(ROWS))
    assert set(run.samples["response"]) <= set(seen)
    assert (run.samples["status"] == "ok").all()


def test_an_environment_earns_what_the_reward_it_wraps_does(tmp_path: Path) -> None:
    lock = threading.Lock()

    class Locked(Once):
        def step(self, text: str) -> Step:
            with lock:
                return super().step(text)

    frame = pandas.DataFrame(ROWS)
    plain = oxrl.train(config(tmp_path, "plain", 1), reward=digits, dataset=frame)
    sent = oxrl.train(config(tmp_path, "sent", 1), environment=Once, dataset=frame)
    with pytest.warns(UserWarning, match="cannot be killed"):
        kept = oxrl.train(config(tmp_path, "kept", 1), environment=Locked, dataset=frame)
    assert list(plain.samples["reward"]) == list(sent.samples["reward"])
    assert list(plain.samples["reward"]) == list(kept.samples["reward"])


def test_a_function_without_source_works_and_a_hanging_one_is_killed(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(
        "import time\ndef slow(prompt, completion):\n    time.sleep(60 * (prompt.uid != 'dry-call'))\n    return 1.0",
        names,
    )
    asked = config(tmp_path, steps=1, reward={"timeout_s": 0.5, "max_error_rate": 1.0})
    run = oxrl.train(asked, reward=names["slow"], dataset=ROWS)
    assert (run.samples["status"] == "timeout").all()
    pinned = json.loads((run.path / "inputs.json").read_text())["reward.name"]
    assert pinned["where"] == "python:slow"
    assert not pinned["files"]


def test_a_replay_without_the_reward_warns_of_nothing_that_the_run_did_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = oxrl.train(config(tmp_path, steps=1), reward=digits, dataset=ROWS)
    caplog.clear()
    assert all(finding.equal for finding in replay(run.path, 1, 0))
    assert "will not see changes" not in caplog.text


def test_a_run_of_this_process_keeps_its_directory_and_its_rows(tmp_path: Path) -> None:
    """Others in the same process, from the first row on that is written, are refused."""
    begun = threading.Event()
    ended = threading.Event()
    made = config(tmp_path, steps=2)

    def waits(prompt: Any, completion: str) -> float:
        begun.set()
        assert ended.wait(60)
        return digits(prompt, completion)

    with ThreadPoolExecutor(1) as thread, pytest.warns(UserWarning, match="cannot be killed"):
        running = thread.submit(oxrl.train, made, reward=waits, dataset=ROWS)
        try:
            assert begun.wait(60)
            for accept in ([], ["data.train"]):
                with pytest.raises(RunDirectoryError, match="is in use by process"):
                    oxrl.train(made, reward=longer, dataset=ROWS[:4], resume=True, accept=accept)
            with pytest.raises(RunDirectoryError, match=r"is in use by|is not empty"):
                oxrl.train(made, reward=longer, dataset=ROWS[:4])
        finally:
            ended.set()
        run = running.result()
    assert list(run.metrics["step"]) == [1, 2]
    assert len((run.path / "starts.jsonl").read_text().splitlines()) == 1
    assert len((run.path / "given" / "train.jsonl").read_text().splitlines()) == len(ROWS)


def test_of_two_starts_at_once_the_second_touches_nothing_of_the_first(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with owning(place, "again"):
        (place / "given").mkdir()
        (place / "given" / "train.jsonl").write_text('{"prompt": "mine"}\n')
        with ThreadPoolExecutor(1) as thread:
            late = thread.submit(oxrl.train, config(tmp_path), reward=digits, dataset=ROWS)
            with pytest.raises(RunDirectoryError, match="is in use by process"):
                late.result()
        assert (place / "given" / "train.jsonl").read_text() == '{"prompt": "mine"}\n'


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"dataset": []}, "no rows"),
    "row": ({"dataset": [{"prompt": "a"}, 3]}, "row 1: is int"),
    "value": ({"dataset": [{"prompt": {1, 2}}]}, "row 0: holds what a data file cannot"),
    "number": ({"dataset": [{"prompt": "a", "answer": float("nan")}]}, "row 0"),
    "text": ({"dataset": 7}, "dataset: is int"),
    "nothing": ({"dataset": None}, "data.train"),
    "reward": ({"reward": 3.0}, "float is not a function"),
    "parameters": ({"reward": lambda one, two: 0.0}, "parameters are bound by their names"),
    "environment": ({"environment": int}, "no method reset"),
    "twice": ({"config": {"reward": {"name": "exact"}}}, "leave one out"),
    "section": ({"config": {"trian": {}}}, "did you mean 'train'"),
    "field": ({"config": {"train": {"lrr": 1}}}, "train.lrr"),
    "list": ({"config": {"train": {"lr": [1e-3]}}}, "takes a single value"),
    "kind": ({"config": {"train": 3}}, "is a section and holds fields"),
    "overrides": ({"overrides": ["train.lr"]}, "section.field=value"),
    "accept": ({"accept": ["train.lr"]}, "resume"),
    "name": ({"config": {"run": {"name": "x" * 300, "dir": None}}}, "at most 200 characters"),
    "place": ({"config": {"run": {"dir": "x" * 300}}}, "no name of a file"),
    "digits": ({"config": {"run": {"steps": 10**5000}}}, "Exceeds the limit"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_and_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    given, text = MISTAKES[name]
    made = config(tmp_path)
    for section, fields in given.get("config", {}).items():
        made[section] = made.get(section, {}) | fields if isinstance(fields, dict) else fields
    arguments: dict[str, Any] = {"reward": digits, "dataset": ROWS, **given, "config": made}
    with pytest.raises(OxrlError, match=re.escape(text)) as refused:
        oxrl.train(**arguments)
    assert refused.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_what_is_no_configuration_and_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a YAML file"):
        oxrl.train(7)  # pyright: ignore
    with pytest.raises(RunDirectoryError, match="no run directory"):
        oxrl.load_run(tmp_path)
    with pytest.raises(DataError, match="no rows"):
        oxrl.train(config(tmp_path), reward=digits, dataset=pandas.DataFrame())
    with pytest.raises(AttributeError):
        oxrl.trian  # pyright: ignore  # noqa: B018


def test_a_configuration_object_may_leave_the_reward_to_the_call_and_sets_no_field_in_vain(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    values = config(tmp_path, steps=1, data={"train": str(rows)})
    values["run"]["dir"] = str(tmp_path / "run")
    in_vain = values | {"train": {"alg_name": "sgrpo", "critic_lr": 1e-3}}
    with pytest.raises(ConfigError, match=r"train\.critic_lr = 0\.001\n    is not read by sgrpo"):
        oxrl.train(Config.model_validate(in_vain), reward=digits)
    assert [*tmp_path.iterdir()] == [rows]
    run = oxrl.train(Config.model_validate(values), reward=digits)
    assert run.config["reward.name"] == "python:digits"


def test_parts_of_a_reward_are_said_by_mappings(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(prompt, completion):\n    return len(completion)\n"
    )
    exact = {"name": "exact", "weight": 0.5}
    long = {"name": f"{tmp_path / 'mine.py'}:score", "weight": 2}
    given: dict[str, Any] = {"parts": {"correct": exact, "long": long}}
    change = ["reward.parts.correct.weight=1"]
    run = oxrl.train(config(tmp_path, reward=given), dataset=ROWS, overrides=change)
    assert {"reward/part/correct", "reward/part/long"} <= set(run.metrics)
    assert run.config["reward.parts"]["correct"]["weight"] == 1
    assert exact["weight"] == 0.5
    for wrong in ({"correct": "exact"}, {"correct": {"nam": "exact"}}, ["exact"]):
        with pytest.raises(ConfigError, match=r"reward\.parts"):
            oxrl.train(config(tmp_path, "wrong", reward={"parts": wrong}), dataset=ROWS)


class Pad:
    """Where a program writes, with as few methods as Python itself asks for."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


@pytest.mark.parametrize("stream", [Pad(), StringIO(), None], ids=["write alone", "text", "none"])
def test_a_run_is_trained_whatever_standard_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    run = oxrl.train(config(tmp_path), dataset=ROWS, reward=digits)
    assert len(run.metrics) == 2


FEW_FILES = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from oxrl.usercode.messages import Replies
ours, theirs = socket.socketpair()
Replies(theirs.detach()).send({"id": 1})
print(ours.recv(100).decode())
"""


def test_a_process_answers_where_few_files_may_be_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == '{"id": 1}', done.stderr
