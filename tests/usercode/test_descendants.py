"""What environments, agents, rewards and judged programs start ends with them, wherever it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.environments.pool import EnvironmentPool, EpisodeProcess, LostEpisode
from oxrl.rewards.workers import RewardPool
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Prompt, Segment
from oxrl_sandbox.client import Sandbox
from oxrl_sandbox.code_reward import judged
from oxrl_sandbox.inside.confine import Limits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="keepers are those of Linux")

PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "q"},), token_ids=(1,))
# Starts a program in a session of its own, and a daemon as daemons are started: by two forks, so
# that nobody is its parent. Writes the numbers of both.
STARTS = """
import os, subprocess, sys, time

def start(place):
    with open(place, "a") as file:
        program = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(program.pid, file=file, flush=True)
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork() == 0:
                print(os.getpid(), file=file, flush=True)
                time.sleep(600)
            os._exit(0)
        os.waitpid(middle, 0)
    while len(open(place).read().split()) < 2:
        time.sleep(0.01)
"""
ENVIRONMENT = (
    STARTS
    + """
class Made:
    def reset(self, prompt, seed):
        return "begin"
    def step(self, text):
        if text.startswith("start"):
            start(text.split()[1])
        if text == "leave an orphan" and os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.1)
            os._exit(0)
        if text == "exit":
            os._exit(3)
        if text == "kill":
            os.kill(os.getppid(), 9)
            time.sleep(60)
        if text == "hang":
            time.sleep(60)
        return {"messages": text}
"""
)
REWARD = (
    STARTS
    + """
def score(prompt, completion):
    if not completion.startswith("start "):
        return 0.0  # it is tried before a run
    _, place, then = completion.split(" ", 2)
    start(place)
    if then == "exit":
        os._exit(3)
    if then == "hang":
        time.sleep(60)
    return 1.0
"""
)


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # its parent is not the one that waits
            return True
        time.sleep(0.02)
    return False


def started(place: Path) -> list[int]:
    """The two processes that were started, which still live."""
    pids = [int(word) for word in place.read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, 0)
    return pids


def group(text: str) -> tuple[Prompt, list[Completion]]:
    segment = Segment(token_ids=(5,), logprobs=(0.0,), versions=(0,))
    return PROMPT, [Completion(segments=(segment,), text=text, finish_reason="stop")]


@pytest.fixture
def environments(tmp_path: Path) -> Iterator[EnvironmentPool]:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    name = f"{tmp_path / 'mine.py'}:Made"
    pool = EnvironmentPool(name, options={}, timeout_s=10.0, memory_mb=0)
    yield pool
    pool.close()


def begun(pool: EnvironmentPool) -> EpisodeProcess:
    episode = pool.open(Patience())
    episode.reset(PROMPT, 0, Patience())
    return episode


def step(episode: EpisodeProcess, text: str) -> None:
    episode.step(text, Patience())


def ended(episode: EpisodeProcess) -> None:
    episode.end()


def crashed(episode: EpisodeProcess) -> None:
    with pytest.raises(LostEpisode, match=r"exit code 3"):
        step(episode, "exit")


def killed_in_a_step(episode: EpisodeProcess) -> None:
    episode._pool.timeout_s = 0.5
    with pytest.raises(LostEpisode, match="did not return"):
        step(episode, "hang")
    episode.end()


def closed(episode: EpisodeProcess) -> None:
    episode._pool.close()


@pytest.mark.parametrize("end", [ended, crashed, killed_in_a_step, closed])
def test_what_an_episode_started_ends_with_it(
    environments: EnvironmentPool, tmp_path: Path, end: Callable[[EpisodeProcess], None]
) -> None:
    episode = begun(environments)
    step(episode, f"start {tmp_path / 'pids'}")
    pids = started(tmp_path / "pids")
    end(episode)
    assert all(gone(pid) for pid in pids)


def test_what_another_episode_started_lives_on(
    environments: EnvironmentPool, tmp_path: Path
) -> None:
    one = begun(environments)
    other = begun(environments)
    step(other, f"start {tmp_path / 'pids'}")
    step(one, f"start {tmp_path / 'more'}")
    one.end()
    assert all(gone(int(pid)) for pid in (tmp_path / "more").read_text().split())
    assert started(tmp_path / "pids")
    step(other, "go on")


def test_what_ended_while_its_episode_goes_on_is_not_kept(environments: EnvironmentPool) -> None:
    episode = begun(environments)
    for _ in range(3):
        step(episode, "leave an orphan")
    children = Path(f"/proc/{episode.pid}/task/{episode.pid}/children")
    end = time.monotonic() + 10
    while len(children.read_text().split()) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(children.read_text().split()) == 1


def test_an_environment_that_kills_its_parent_costs_its_own_episode_alone(
    environments: EnvironmentPool,
) -> None:
    bad = begun(environments)
    good = begun(environments)
    worker = environments._worker
    with pytest.raises(LostEpisode, match="the process ended in step"):
        step(bad, "kill")
    step(good, "go on")
    step(begun(environments), "go on")
    assert environments._worker is worker


def test_what_an_agent_started_ends_with_its_episode(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        STARTS + "import json, urllib.request\n"
        "start(sys.argv[1])\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'q'}]}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
    )
    command = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "pids")]
    options: dict[str, Any] = {"command": command}
    pool = EnvironmentPool("agent", options=options, timeout_s=60.0, memory_mb=0)
    try:
        episode = begun(pool)
        pids = started(tmp_path / "pids")
        episode.finish()
        assert all(gone(pid) for pid in pids)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("then", "status"), [("go on", "ok"), ("exit", "error"), ("hang", "timeout")]
)
def test_what_a_reward_started_ends_with_its_worker(tmp_path: Path, then: str, status: str) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    pool = RewardPool(f"{tmp_path / 'mine.py'}:score", timeout_s=2.0 if then == "hang" else 20.0)
    place = tmp_path / "pids"
    try:
        ((score,),) = pool.score([group(f"start {place} {then}")])
        assert score.status == status
    finally:
        pool.close()
    pids = [int(word) for word in place.read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (tmp_path / "reward.py").write_text(REWARD)
    run = (
        "import os, signal, threading, time\n"
        "from test_descendants import EnvironmentPool, RewardPool, begun, group, step\n"
        "pool = EnvironmentPool('mine.py:Made', options={}, timeout_s=60.0, memory_mb=0)\n"
        "episode = begun(pool)\n"
        "step(episode, 'start of_environment')\n"
        "rewards = RewardPool('reward.py:score', timeout_s=60.0)\n"
        "for busy in (lambda: step(episode, 'hang'),\n"
        "             lambda: rewards.score([group('start of_reward hang')])):\n"
        "    threading.Thread(target=busy, daemon=True).start()\n"
        "while not (os.path.exists('of_reward') and len(open('of_reward').read().split()) == 2):\n"
        "    time.sleep(0.05)\n"
        "of_pool = [pool._worker.process.pid, episode.pid]\n"
        "of_pool += [worker.process.pid for worker in rewards._alive]\n"
        "print(*of_pool, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    for name in ("of_environment", "of_reward"):
        pids += [int(word) for word in (tmp_path / name).read_text().split()]
    assert len(pids) == 7
    assert all(gone(pid) for pid in pids)


def test_what_a_judged_program_started_ends_with_it_where_nothing_keeps_it_in(
    tmp_path: Path,
) -> None:
    sandbox = Sandbox("off", Limits(cpu_s=5.0, memory_mb=1024, disk_mb=8))
    place = tmp_path / "pids"
    program = STARTS + f"start({str(place)!r})\ndef add(a, b): return a + b\n"
    try:
        tests = {"tests": ["assert add(1, 2) == 3"]}
        assert judged(sandbox, program, tests, partial=False).value == 1.0
        pids = [int(word) for word in place.read_text().split()]
        assert len(pids) == 2 and all(gone(pid) for pid in pids)
    finally:
        sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a keeper is one of Linux")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL", "SIGABRT"])
def test_a_keeper_ends_by_the_signal_that_ended_its_child(tmp_path: Path, name: str) -> None:
    (tmp_path / "ends.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"os.kill(os.getpid(), signal.{name})\n"
        "signal.pause()\n"
    )
    paths = [str(tmp_path), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", "oxrl.usercode.keeper", "ends"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.Signals[name]
    assert done.stderr == ""
