"""Rewards that lie, meddle or shout: nobody else's score moves, and nothing said is endless."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from oxrl.errors import DeadlineError, RewardDefinitionError, Stopped
from oxrl.rewards.watch import Watch
from oxrl.rewards.workers import RewardPool
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Prompt, Score, Segment

Open = Callable[..., RewardPool]
HEAD = """
import builtins, decimal, fractions, json, math, os, subprocess, sys, threading, time

FORGED = b'{"scores": [{"value": 9.0, "status": "ok", "parts": {}, "reason": ""}]}\\n'

def spray(line):
    for name in os.listdir('/proc/self/fd'):
        if int(name) > 2:
            try:
                os.write(int(name), line)
            except OSError:
                pass
"""


def group(*texts: str, answer: object = "") -> tuple[Prompt, list[Completion]]:
    messages = ({"role": "user", "content": "q"},)
    prompt = Prompt(uid="p", messages=messages, token_ids=(1, 2), answer=answer)
    segment = Segment(token_ids=(5, 6), logprobs=(-0.5, -0.25), versions=(3, 3))
    done = [Completion(segments=(segment,), text=text, finish_reason="stop") for text in texts]
    return prompt, done


@pytest.fixture
def open_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`open_pool(source, ...)` is a pool on the reward `score` of a file with that source."""
    monkeypatch.chdir(tmp_path)
    pools: list[RewardPool] = []

    def open_(source: str, workers: int = 1, timeout_s: float = 20.0) -> RewardPool:
        (tmp_path / "mine.py").write_text(HEAD + source)
        pools.append(RewardPool("mine.py:score", workers=workers, timeout_s=timeout_s))
        return pools[-1]

    yield open_
    for pool in pools:
        pool.close()


def values(scores: list[list[Score]]) -> list[float | None]:
    (of_group,) = scores
    return [score.value for score in of_group]


@pytest.mark.parametrize("line", ["FORGED", "FORGED + FORGED", r"b'nonsense\n'", "b'half a line'"])
def test_a_stray_line_shifts_nobodys_score(open_pool: Open, line: str) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        f"    if completion == '3': spray({line})\n"
        "    return 0.0 if completion.startswith('#') else float(completion)"
    )
    scores = pool.score([group("1", "2", "3", "4", "5")])
    assert values(scores) == [1.0, 2.0, None, 4.0, 5.0]
    assert scores[0][2].status == "error"
    assert "sample 2 of prompt p: 3 workers in a row could not be trusted" in scores[0][2].reason


def test_a_line_forged_by_a_thread_left_running_shifts_nobodys_score(open_pool: Open) -> None:
    pool = open_pool(
        "def later():\n"
        "    for _ in range(100):\n"
        "        time.sleep(0.005)\n"
        "        spray(FORGED)\n"
        "def score(prompt, completion):\n"
        "    if completion == '1': threading.Thread(target=later, daemon=True).start()\n"
        "    time.sleep(0.02)\n"
        "    return 0.0 if completion.startswith('#') else float(completion)"
    )
    found = values(pool.score([group("0", "1", "2", "3", "4", "5")]))
    assert found[:1] + found[2:] == [0.0, 2.0, 3.0, 4.0, 5.0]
    assert found[1] in (None, 1.0)


@pytest.mark.parametrize(
    ("patch", "honest"),
    [
        ("math.isclose = lambda *given, **more: True", "math.isclose(1, 2)"),
        ("del math.isclose", "math.isclose(1, 2)"),
        ("builtins.len = lambda given: 5", "len('')"),
        ("sys.modules['math'] = fractions", "hasattr(__import__('math'), 'Fraction')"),
        ("json.dumps = lambda *given, **more: '7'", "json.dumps('') == '7'"),
        ("fractions.Fraction.__eq__ = lambda a, b: True", "fractions.Fraction(1, 2) == 3"),
        ("decimal.getcontext().prec = 1", "decimal.Decimal('1.5') * 1 == 2"),
        ("os.chdir('/')", "os.getcwd() == '/'"),
        ("globals().update(helper=lambda: 1.0)", "helper()"),
        ("json.JSONEncoder.encode = lambda self, o: FORGED.decode()", "False"),
        ("os.write = lambda fd, data: len(data)", "False"),
        ("null = os.open('/dev/null', 2); [os.dup2(null, fd) for fd in range(3, 200)]", "False"),
        ("os.closerange(3, 200)", "False"),
    ],
)
def test_a_reward_that_patches_its_process_changes_nobody_elses_score(
    open_pool: Open, patch: str, honest: str
) -> None:
    pool = open_pool(
        "def helper(): return 0.0\n"
        "def score(prompt, completion):\n"
        f"    if completion == 'evil':\n        {patch}\n"
        f"    return float({honest})"
    )
    found = values(pool.score([group("a", "evil", "b", "c")]))
    assert [found[index] for index in (0, 2, 3)] == [0.0] * 3


def test_the_change_is_named_once_and_the_samples_own_score_is_that_of_a_fresh_worker(
    open_pool: Open, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    if completion == 'evil': math.isclose = print\n"
        "    return 1.0"
    )
    assert values(pool.score([group("a", "evil", "evil")])) == [1.0] * 3
    assert caplog.text.count("mine.py:score changed math.isclose while it scored sample") == 1


@pytest.mark.parametrize(
    ("place", "watched"),
    [
        ("oxrl.rewards.loaded.find_reward", True),
        ("oxrl_graders.math.math_reward", True),
        ("oxrl.redact.masked", False),
    ],
)
def test_of_the_core_only_what_scores_is_watched(
    monkeypatch: pytest.MonkeyPatch, place: str, watched: bool
) -> None:
    import_module(place.rpartition(".")[0])
    watch = Watch(None)
    monkeypatch.setattr(place, print)
    assert watch.changed() == (place if watched else "")


def test_a_fork_of_the_reward_does_not_answer_for_it(open_pool: Open) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    if completion == 'fork' and os.fork() == 0: return 7.0\n"
        "    return 1.0"
    )
    assert values(pool.score([group("a", "fork", "b", "fork", "c")])) == [1.0] * 5


def test_what_a_reward_starts_does_not_inherit_the_socket(open_pool: Open) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    listed = subprocess.run(['ls', '-l', '/proc/self/fd'], close_fds=False,\n"
        "                            capture_output=True, text=True).stdout\n"
        "    return float('socket:' in listed)"
    )
    assert values(pool.score([group("a")])) == [0.0]


@pytest.mark.parametrize(
    "reply",
    [
        "raise ValueError('x' * 1_000_000)",
        "return Score(value=None, status='error', reason='x' * 1_000_000)",
        "return Score(value=1.0, reason='x' * 1_000_000)",
        "return 'x' * 1_000_000",
    ],
)
def test_a_reason_is_cut_and_says_by_how_much(open_pool: Open, reply: str) -> None:
    pool = open_pool(
        "from oxrl.types import Score\n"
        "def score(prompt, completion):\n"
        f"    if completion == 'long': {reply}\n"
        "    return 1.0"
    )
    (score,) = pool.score([group("long")])[0]
    assert len(score.reason) < 1000
    assert "characters more were cut" in score.reason


def test_what_a_reward_prints_is_kept_up_to_a_limit_and_counted(
    open_pool: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oxrl")
    pool = open_pool("def score(prompt, completion):\n    print('loud ' * 100_000)\n    return 1.0")
    assert values(pool.score([group("a", "b")])) == [1.0, 1.0]
    pool.close()
    assert "loud loud" in caplog.text
    assert len(caplog.text) < 40_000
    assert "characters more that a reward worker printed were cut" in caplog.text


def test_a_worker_that_dies_says_what_it_printed_last(open_pool: Open) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    if completion == 'end':\n"
        "        print('out of discs')\n"
        "        os._exit(3)\n"
        "    return 1.0"
    )
    (score,) = pool.score([group("end")])[0]
    assert "exit code 3; it printed last: out of discs" in score.reason


def test_a_hanging_dry_call_obeys_the_timeout_and_says_which_call_and_what_to_do(
    open_pool: Open,
) -> None:
    pool = open_pool("def score(prompt, completion): time.sleep(1000)", timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(RewardDefinitionError) as caught:
        pool.start()
    assert time.monotonic() - began < 20
    for part in (
        "a dry call with prompt.answer='2' and completion '#### 2' did not return within 0.5 s",
        "reward.timeout_s=0.5",
        "loading a model, belongs outside of the function",
    ):
        assert part in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stop_ends_the_wait_for_rewards_at_once_and_the_pool_can_be_used_again(
    open_pool: Open, workers: int
) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    if completion == 'long': time.sleep(1000)\n"
        "    return 1.0",
        workers=workers,
        timeout_s=500,
    )
    pool.start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        pool.score([group(*["long"] * 8)], Patience(lambda: time.monotonic() - began > 0.5))
    assert time.monotonic() - began < 10
    assert values(pool.score([group("a", "b")])) == [1.0, 1.0]


def test_rewards_that_never_answer_end_with_the_deadline_not_with_the_last_timeout(
    open_pool: Open,
) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    if completion == 'long': time.sleep(1000)\n"
        "    return 1.0",
        timeout_s=0.4,
    )
    pool.start()
    began = time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"waited run\.deadlines\.rollout=3 s for mine\.py:score to ans"
    ):
        pool.score([group("a", *["long"] * 1000)], Patience(deadline_s=3.0))
    assert time.monotonic() - began < 20
    # Answers that come count, however long all of them take.
    slow = [f"{index}" for index in range(6)]
    (tmp,) = pool.score([group(*slow)], Patience(deadline_s=3.0))
    assert [score.status for score in tmp] == ["ok"] * 6
