"""The worker pool: hung, crashed and misbehaving rewards cost their own sample and nothing else."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oxrl.errors import RewardError
from oxrl.rewards.pool_choice import reward_pool
from oxrl.rewards.workers import RewardPool
from oxrl.types import Completion, Prompt, Score, Segment

Open = Callable[..., RewardPool]


def group(*texts: str, uid: str = "p", answer: object = "") -> tuple[Prompt, list[Completion]]:
    prompt = Prompt(
        uid=uid,
        messages=({"role": "user", "content": "q"},),
        token_ids=(1, 2),
        answer=answer,
        metadata={"k": [1]},
    )
    segment = Segment(token_ids=(5, 6), logprobs=(-0.5, -0.25), versions=(3, 3))
    return prompt, [
        Completion(segments=(segment,), text=text, finish_reason="stop") for text in texts
    ]


@pytest.fixture
def open_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`open_pool(source, ...)` is a pool on the reward `score` of a file with that source, closed
    after the test.
    """
    monkeypatch.chdir(tmp_path)
    pools: list[RewardPool] = []

    def open_(source: str, workers: int = 1, timeout_s: float = 20.0) -> RewardPool:
        (tmp_path / "mine.py").write_text("import ctypes, os, re, sys, time\n" + source)
        pools.append(RewardPool("mine.py:score", workers=workers, timeout_s=timeout_s))
        return pools[-1]

    yield open_
    for pool in pools:
        pool.close()


def statuses(scores: list[list[Score]]) -> list[list[str]]:
    return [[score.status for score in scores_of_group] for scores_of_group in scores]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_scores_come_back_in_the_order_of_groups_larger_than_the_pool(open_pool: Open) -> None:
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    time.sleep(0.02 if completion.endswith('0') else 0)\n"
        "    return float(completion)",
        workers=3,
    )
    groups = [group(*[str(10 * g + i) for i in range(11)], uid=str(g)) for g in range(4)]
    assert [[s.value for s in scores] for scores in pool.score([*groups, group()])] == [
        *[[10.0 * g + i for i in range(11)] for g in range(4)],
        [],
    ]


def test_a_group_reward_sees_the_prompt_and_the_tokens_as_they_were(open_pool: Open) -> None:
    pool = open_pool(
        "def score(prompt, completions):\n"
        "    seen = prompt.answer, prompt.metadata, prompt.token_ids\n"
        "    assert prompt.uid == 'dry-call' or seen == (None, {'k': [1]}, (1, 2))\n"
        "    sums = [sum(c.token_ids) + sum(c.segments[0].logprobs) for c in completions]\n"
        "    return [value + len(completions) for value in sums]"
    )
    assert pool.score([group("a", "b", answer=None)]) == [[Score(value=11 - 0.75 + 2)] * 2]


def test_what_no_line_of_json_holds_is_refused_and_reaches_no_reward(open_pool: Open) -> None:
    pool = open_pool("def score(prompt, completion):\n    return 1.0")
    prompt, completions = group("a")
    pictured = dataclasses.replace(prompt, metadata={"picture": b"abc"})
    with pytest.raises(TypeError):
        pool.score([(pictured, completions)])


@pytest.mark.parametrize(
    "hang",
    [
        "time.sleep(1000)",
        "re.match('(a+)+$', 'a' * 60 + 'b')",  # exponential, and holds the interpreter lock
        "ctypes.PyDLL(None).sleep(1000)",  # sleeps in C without releasing the lock
        "os.kill(os.getpid(), 19)",  # SIGSTOP
    ],
)
def test_a_hung_sample_times_out_and_the_others_are_scored(open_pool: Open, hang: str) -> None:
    pool = open_pool(
        f"def score(prompt, completion):\n    if completion == 'hang': {hang}\n    return 1.0",
        timeout_s=0.5,
    )
    pool.start()
    began = time.monotonic()
    (scores,) = pool.score([group("a", "hang", "b")])
    assert [score.status for score in scores] == ["ok", "timeout", "ok"]
    late = "no score within 0.5 s (reward.timeout_s=0.5); killed"
    assert scores[1].reason == f"mine.py:score, sample 1 of prompt p: {late}"
    assert time.monotonic() - began < 10  # a deadline and a fresh worker


def test_a_hung_group_times_out_as_a_whole_after_the_time_of_its_samples(open_pool: Open) -> None:
    pool = open_pool(
        "def score(prompt, completions):\n"
        "    time.sleep(1000 if prompt.uid == 'hang' else 0.5)\n"
        "    return [1.0] * len(completions)",
        timeout_s=0.3,
    )
    scores = pool.score([group("a", "b", "c", uid="hang"), group("a", "b", "c", uid="fine")])
    assert statuses(scores) == [["timeout"] * 3, ["ok"] * 3]
    assert "samples 0 to 2 of prompt hang: no score within 0.9 s" in scores[0][0].reason


@pytest.mark.parametrize(
    ("end", "how"),
    [("os._exit(7)", "exit code 7"), ("sys.exit(3)", "exit code 3"), ("os.abort()", "signal 6")],
)
def test_a_worker_that_ends_is_an_error_of_its_sample_only(
    open_pool: Open, end: str, how: str
) -> None:
    pool = open_pool(
        f"def score(prompt, completion):\n    if completion == 'end': {end}\n    return 1.0",
        workers=2,
    )
    (scores,) = pool.score([group("a", "end", "b", "c")])
    assert [score.status for score in scores] == ["ok", "error", "ok", "ok"]
    assert "sample 1 of prompt p" in scores[1].reason and how in scores[1].reason


def test_exceptions_and_bad_values_arrive_with_their_reasons(open_pool: Open) -> None:
    pool = open_pool(
        "VALUES = {'nan': float('nan'), 'str': 'x', 'none': None}\n"
        "def score(prompt, completion):\n"
        "    if completion == 'raise': raise KeyError('gold')\n"
        "    return VALUES.get(completion, 0.1)"
    )
    (scores,) = pool.score([group("raise", "nan", "str", "none", "fine")])
    assert [score.status for score in scores] == ["error", "invalid", "invalid", "invalid", "ok"]
    assert scores[4].value == 0.1
    assert "sample 0 of prompt p: raised KeyError: 'gold'" in scores[0].reason
    assert "sample 1 of prompt p: returned nan" in scores[1].reason


def test_what_a_reward_prints_or_reads_does_not_disturb_the_exchange(
    open_pool: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oxrl")
    pool = open_pool(
        "def score(prompt, completion):\n"
        "    print('{\"scores\": []}', flush=True)\n"
        "    os.write(1, b'raw\\n')\n"
        "    return len(sys.stdin.read()) + 1.0"
    )
    assert pool.score([group("a", "b")]) == [[Score(value=1.0)] * 2]
    pool.close()
    assert "raw" in caplog.text


def test_large_and_odd_text_travels_unchanged(open_pool: Open) -> None:
    text = "é🙂\0\u2028\n" * 100_000 + "\ud800"
    pool = open_pool(
        "def score(prompt, completion): return len(completion) + (completion[-1] == '\\ud800') / 2"
    )
    assert pool.score([group(text)]) == [[Score(value=500_001.5)]]


def test_a_pool_works_from_a_thread_and_twice(open_pool: Open) -> None:
    pool = open_pool("def score(prompt, completion): return os.getpid()")
    first = pool.score([group("a")])
    second: list[list[list[Score]]] = []
    thread = threading.Thread(target=lambda: second.append(pool.score([group("a")])))
    thread.start()
    thread.join()
    assert second == [first]  # and by the same worker: it was not started anew


def test_a_worker_that_died_idle_is_replaced_without_losing_a_sample(open_pool: Open) -> None:
    pool = open_pool("def score(prompt, completion): return os.getpid()")
    pid = int(pool.score([group("a")])[0][0].value or 0)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    (score,) = pool.score([group("a")])[0]
    assert score.status == "ok" and score.value != pid


def test_a_reward_that_is_edited_while_the_run_goes_on_scores_nothing_by_new_rules(
    open_pool: Open, tmp_path: Path
) -> None:
    (tmp_path / "rules.py").write_text("WORTH = 1.0\n")
    pool = open_pool(
        "import rules\n"
        "def score(prompt, completion):\n"
        "    if completion == 'die':\n"
        "        os._exit(1)\n"
        "    return rules.WORTH"
    )
    assert [s.value for s in pool.score([group("a")])[0]] == [1.0]
    (tmp_path / "rules.py").write_text("WORTH = 9.0\n")
    assert [s.value for s in pool.score([group("a")])[0]] == [1.0]  # it was loaded before
    with pytest.raises(RewardError, match=r"has changed while the run .*--accept-changes reward"):
        pool.score([group("die")])
        pool.score([group("a")])
    (tmp_path / "rules.py").write_text("WORTH = 1.0\n")
    assert [s.value for s in pool.score([group("a")])[0]] == [1.0]


def test_killing_a_sample_ends_the_processes_it_started(open_pool: Open, tmp_path: Path) -> None:
    pool = open_pool(
        "import subprocess\n"
        "def score(prompt, completion):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    open(completion, 'w').write(str(child.pid))\n"
        "    child.wait()",
        timeout_s=1.0,
    )
    # The dry call would hang too: it must not run the child. Give it a reason to return.
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py")
        .read_text()
        .replace("    child =", "    if prompt.uid == 'dry-call': return 0\n    child =")
    )
    assert statuses(pool.score([group(str(tmp_path / "pid"))])) == [["timeout"]]
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
        if (
            Path(f"/proc/{pid}/stat").exists()
            and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        ):
            break  # dead, and waiting for an init process that does not collect
    else:
        assert not alive(pid)


def test_a_reward_that_cannot_be_loaded_fails_at_start_with_the_reason(open_pool: Open) -> None:
    with pytest.raises(
        RewardError, match="raised ModuleNotFoundError: No module named 'no_such_library'"
    ):
        open_pool("import no_such_library\ndef score(prompt, completion): return 0").start()
    pool = open_pool("score = os._exit(4)")
    for _ in range(2):
        with pytest.raises(RewardError, match=r"its worker ended while loading it \(exit code 4\)"):
            pool.score([group("a")])


def test_a_name_that_leads_nowhere_fails_before_any_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="must be math, exact"):
        RewardPool("nonsense")
    with pytest.raises(RewardError, match=r"none\.py: no such file"):
        RewardPool(f"{tmp_path}/none.py:score")


def test_the_exact_reward_needs_no_process_and_math_gets_one() -> None:
    exact = reward_pool("exact")
    assert [score.value for score in exact.score([group("4", " 4 ", "5", answer="4")])[0]] == [
        1.0,
        1.0,
        0.0,
    ]
    maths = RewardPool("math", timeout_s=30)
    try:
        scores = maths.score(
            [group("#### 4", "\\boxed{\\frac{8}{2}}", "A: 5", answer="4"), group("4", answer=None)]
        )
        assert [[score.value for score in s] for s in scores] == [[1.0, 1.0, 0.0], [None]]
        assert scores[1][0].status == "invalid"
    finally:
        maths.close()


@pytest.mark.parametrize("answer", [list(range(5000)), {"text": "long " * 5000}])
def test_the_reason_of_the_exact_reward_is_short_whatever_the_answer(answer: object) -> None:
    ((score,),) = reward_pool("exact").score([group("4", answer=answer)])
    assert score.status == "invalid"
    assert score.reason.startswith(f"exact needs a string or integer answer, got {answer}"[:100])
    assert len(score.reason) < 200


def test_workers_end_with_their_pool(open_pool: Open) -> None:
    source = "def score(prompt, completion): return os.getpid()"
    closed = open_pool(source)
    pid = int(closed.score([group("a")])[0][0].value or 0)
    closed.close()
    assert not alive(pid)
    gc.freeze()  # what is there already is not looked through for garbage
    forgotten = RewardPool("mine.py:score")
    pid = int(forgotten.score([group("a")])[0][0].value or 0)
    del forgotten
    gc.collect()
    assert not alive(pid)


def test_importing_rewards_imports_no_torch() -> None:
    heavy = "'torch' in sys.modules or 'sympy' in sys.modules"
    code = f"import oxrl.rewards.workers, sys; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
