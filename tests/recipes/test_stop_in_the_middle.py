"""A signal or a deadline while rewards or evaluations run: over in seconds, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from oxrl.assembly.assembly import Assembly
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.delivery import SharedWeights
from oxrl.engines.sample.local import LocalSampler
from oxrl.errors import DeadlineError, Interrupted, OxrlError
from oxrl.rewards.workers import RewardPool
from oxrl.rollouts import rounds
from support.command_line import forked
from support.small_runs import final_files, metric_lines, preference_config, rl_config, sft_config
from support.toy_columns import TOYS

# Seconds from the signal to the end of the process, on a machine that does other things too; each
# sleeping reward alone would take 600.
GRACE_S = 20.0
DEADLINE_S = 240.0
REWARD = '''
import os, time

def digits(prompt, completion):
    """As in small_runs; while the file `hang` is there it hangs, in evaluations or in training."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if os.path.exists(f"{folder}/hang_{prompt.source or 'training'}"):
        open(f"{folder}/hangs", "w").close()
        time.sleep(600)
    return sum(character.isdigit() for character in completion[:6]) / 6
'''


def config(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    folder.mkdir(exist_ok=True)
    held_out = folder / "held_out.jsonl"
    rows = [
        f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}", "source": "held_out"}}\n' for i in (1, 2)
    ]
    held_out.write_text("".join(rows))
    data = {
        "train": str(folder / "prompts.jsonl"),
        "prompts_per_step": 4,
        "eval": str(held_out),
    }
    (folder / "rewards").mkdir(exist_ok=True)
    (folder / "rewards" / "slow.py").write_text(REWARD)
    reward = {"name": f"{folder}/rewards/slow.py:digits", "timeout_s": 900}
    run = {"name": name, "steps": 8, "eval_every": 4} | sections.pop("run", {})
    return rl_config(folder, name, run=run, data=data, reward=reward, **sections)


def run_in_child(cfg: Config) -> None:
    try:
        run(cfg, resume=True)
    except OxrlError as error:
        sys.exit(error.exit_code)


def start(cfg: Config) -> multiprocessing.process.BaseProcess:
    process = forked(run_in_child, cfg)
    process.start()
    return process


def wait_for(there: Path, process: multiprocessing.process.BaseProcess, lines: int = 0) -> None:
    end = time.monotonic() + DEADLINE_S
    while not there.exists() or there.read_bytes().count(b"\n") < lines:
        assert process.is_alive() and time.monotonic() < end, f"{there} did not come"
        time.sleep(0.01)


def finish(cfg: Config) -> None:
    process = start(cfg)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def stop_while_hanging(cfg: Config, where: str, number: int, *, after: int = 0) -> None:
    """Let the rewards hang once `after` lines are written, and send a signal when one does."""
    rewards = Path(cfg.reward.name.rpartition("/")[0])
    if not after:
        (rewards / f"hang_{where}").touch()
    process = start(cfg)
    if after:
        wait_for(cfg.run.directory / "metrics.jsonl", process, after)
        (rewards / f"hang_{where}").touch()
    wait_for(rewards / "hangs", process)
    sent = time.monotonic()
    os.kill(process.pid or 0, number)
    process.join(DEADLINE_S)
    assert time.monotonic() - sent < GRACE_S
    assert process.exitcode == Interrupted.exit_code
    (rewards / f"hang_{where}").unlink()
    (rewards / "hangs").unlink()


def assert_same(stopped: Path, whole: Path) -> None:
    assert metric_lines(stopped) == metric_lines(whole)
    samples = "samples.jsonl"
    if (whole / samples).exists():
        assert (stopped / samples).read_bytes() == (whole / samples).read_bytes()
    left, right = final_files(stopped), final_files(whole)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


STALE = {
    "max_tokens": 6,
    "n_samples": 4,
    "max_staleness": 3,
    "rounds": 3,
    "force_strict_on_policy": False,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Run directories of what was never stopped: one for all that differ only in what they save."""

    @cache
    def directory(*, ahead: bool = False, eval_every: int = 4) -> Path:
        rollout = {"rollout": STALE} if ahead else {}
        run = {"eval_every": eval_every}
        cfg = config(tmp_path_factory.mktemp("whole"), "run", run=run, **rollout)
        finish(cfg)
        return cfg.run.directory

    return directory


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("where", "number", "after", "sections"),
    [
        pytest.param("training", signal.SIGTERM, 3, {}, marks=pytest.mark.full),
        ("training", signal.SIGHUP, 3, {"run": {"checkpoint_every": 50}}),
        ("held_out", signal.SIGTERM, 1, {"run": {"checkpoint_every": 50}}),
        # No evaluation but the last one, after which nothing is trained any more.
        pytest.param(
            "held_out", signal.SIGTERM, 0, {"run": {"eval_every": 0}}, marks=pytest.mark.full
        ),
        pytest.param("training", signal.SIGTERM, 3, {"rollout": STALE}, marks=pytest.mark.full),
        ("held_out", signal.SIGINT, 1, {"rollout": STALE, "run": {"keep_checkpoints": 1}}),
    ],
)
def test_a_signal_while_rewards_hang_ends_the_run_and_resume_gives_the_uninterrupted_one(
    tmp_path: Path,
    uninterrupted: Callable[..., Path],
    where: str,
    number: int,
    after: int,
    sections: dict[str, dict[str, Any]],
) -> None:
    stopped = config(tmp_path, "run", **sections)
    stop_while_hanging(stopped, where, number, after=after)
    finish(stopped)
    eval_every = sections.get("run", {}).get("eval_every", 4)
    whole = uninterrupted(ahead="rollout" in sections, eval_every=eval_every)
    assert_same(stopped.run.directory, whole)


# How rollouts are sampled, of a run that is stopped somewhere in them.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "steps": {},
    "rounds": {"train": {"alg_name": "dapo", "lr": 1e-3, "overlong_buffer": 2}},
    "ahead": {"rollout": STALE},
}
# What is called in the middle of it, and when a signal comes there.
Moment = tuple[object, str, Callable[[int, Any], bool]]
MOMENTS: dict[str, Moment] = {
    "delivery": (SharedWeights, "deliver", lambda call, found: call == 2),
    "sampling": (LocalSampler, "poll", lambda call, found: call == 4),
    "scoring": (RewardPool, "_outcome", lambda call, found: call == 20),
    "a further round": (rounds, "still_missing", lambda call, found: call > 1 and found > 0),
}


def recording(folder: Path, kind: str) -> Config:
    run = {"steps": 5, "checkpoint_every": 50, "record": "tokens"}
    return config(folder, "run", run=run, **KINDS[kind])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Run directories of what was never stopped, with toy columns."""

    @cache
    def directory(kind: str) -> Path:
        cfg = recording(tmp_path_factory.mktemp("whole"), kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Assembly, "recorded", TOYS)
            run(cfg)
        return cfg.run.directory

    return directory


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *((kind, moment) for kind in KINDS for moment in ("delivery", "sampling", "scoring")),
        ("rounds", "a further round"),
    ],
)
def test_a_signal_in_the_middle_of_a_rollout_step_costs_no_byte(
    kind: str,
    moment: str,
    tmp_path: Path,
    recorded: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = recorded(kind)
    monkeypatch.setattr(Assembly, "recorded", TOYS)
    stopped = recording(tmp_path, kind)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_when(patch, *MOMENTS[moment])
        run(stopped)
    run(stopped, resume=True)
    assert_same(stopped.run.directory, whole)
    left, right = (
        {path.name: path.read_bytes() for path in (home / "rollouts").iterdir()}
        for home in (stopped.run.directory, whole)
    )
    assert left == right and len(left) > 10


def signal_when(
    patch: pytest.MonkeyPatch, owner: object, name: str, now: Callable[[int, Any], bool]
) -> None:
    """A signal arrives in a call of something: the number of the call, and what it returns, say in
    which.
    """
    real = getattr(owner, name)
    calls: list[object] = []

    def called(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        calls.append(found)
        if now(len(calls), found):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return found

    patch.setattr(owner, name, called)


def test_a_stop_that_is_asked_twice_in_the_same_evaluation_still_resumes(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    stopped = config(tmp_path, "run")
    for _ in range(2):
        stop_while_hanging(stopped, "held_out", signal.SIGTERM)
    finish(stopped)
    assert_same(stopped.run.directory, uninterrupted())


def test_the_deadline_reaches_rewards_and_evaluations(tmp_path: Path) -> None:
    for where in ("training", "held_out"):
        cfg = config(tmp_path / where, "run", run={"deadline_s": 3.0, "steps": 1})
        rewards = Path(cfg.reward.name.rpartition("/")[0])
        source = (rewards / "slow.py").read_text()
        # Not in the rehearsal, which is before the run.
        hang = f"hang = prompt.source == 'held_out' if {where == 'held_out'} else True\n"
        text = f"    {hang}    if hang and '#' not in completion and len(completion) > 1:\n"
        text += "        time.sleep(600)\n    return"
        (rewards / "slow.py").write_text(source.replace("    return", text))
        began = time.monotonic()
        with pytest.raises(
            DeadlineError, match=r"waited run\.deadlines\.rollout=3 s for .*slow\.py:digits"
        ):
            run(cfg)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("make", [sft_config, preference_config])
def test_a_signal_during_an_evaluation_on_given_rows_is_seen_between_two_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    from oxrl.recipes.session import Session

    def with_evaluation(name: str) -> Config:
        folder = tmp_path / name
        data = {"eval": make(folder, "run").data.train}
        return make(folder, "run", data=data, run={"steps": 4, "eval_every": 2})

    whole, stopped = with_evaluation("whole"), with_evaluation("stopped")
    run(whole)
    looks: list[int] = []
    real = Session.look

    def look(self: Session) -> None:
        looks.append(1)
        if len(looks) == 5:  # in the middle of the second evaluation
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        real(self)

    monkeypatch.setattr(Session, "look", look)
    with pytest.raises(Interrupted):
        run(stopped)
    assert len(looks) == 5
    run(stopped, resume=True)
    assert_same(stopped.run.directory, whole.run.directory)
