"""Progress: plain lines where nobody redraws, one live line on a terminal, and never the reason a
run fails.
"""

from __future__ import annotations

import io
import logging
import math
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oxrl.runs.bars import Count, bars, followed
from oxrl.runs.console import Console, format_duration, phase_shares, run_logging, sample_text
from oxrl.runs.live import sparkline

METRICS = {
    "reward/mean": 0.4123,
    "data/length_mean": 34.25,
    "kl/ref_k3": 0.00123,
    "throughput/tokens_per_s": 5130.4,
    "update/lr": 1e-6,
}


def test_piped_output_is_one_plain_line_per_step() -> None:
    stream = io.StringIO()
    with Console(300, "quickstart", stream=stream) as console:
        console.message("sampling [bold] prompts")
        console.step(12, METRICS)
        console.step(300, {"update/nll": 2.5})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sampling [bold] prompts"
    assert lines[1] == "step 12/300  reward 0.412  length 34.2  KL 1.23e-03  tokens/s 5,130"
    assert lines[2] == "step 300/300  loss 2.5000  ETA 0s"


def test_what_rounds_to_zero_has_no_sign() -> None:
    stream = io.StringIO()
    with Console(1, "x", stream=stream) as console:
        console.step(1, {"reward/mean": -1e-5, "reward/part/right": -1e-5})
    assert stream.getvalue() == "step 1/1  reward 0.000  right 0.000\n"


def test_the_time_left_is_told_by_steps_alone_without_the_first_one() -> None:
    """The first step waits for what is loaded and compiled; the others do not."""
    stream = io.StringIO()
    with Console(1000, "x", stream=stream) as console:
        time.sleep(0.5)
        console.step(1, METRICS)
        time.sleep(0.01)
        console.step(2, METRICS)
    first, second = stream.getvalue().splitlines()
    assert "ETA" not in first
    # 998 steps of half a second would be eight minutes.
    minutes, _, _ = second.partition("ETA ")[2].partition("m")
    assert "s" in minutes or int(minutes) < 4, second


@pytest.mark.parametrize("kind", ["preference", "reward_model"])
def test_what_is_judged_shows_loss_accuracy_and_margin(kind: str) -> None:
    stream = io.StringIO()
    metrics = {"update/loss": 0.69314, f"{kind}/accuracy": 0.75, f"{kind}/margin": -0.25}
    with Console(2, "x", stream=stream) as console:
        console.step(1, metrics | {"eval/accuracy": 0.5})
        console.step(2, metrics | {"reward/mean": 1.0})
    first, second = stream.getvalue().splitlines()
    assert first == "step 1/2  loss 0.6931  accuracy 0.750  margin -0.250  eval accuracy 0.500"
    assert "loss" not in second


def test_long_work_says_how_far_it_is_at_once_then_now_and_then_and_at_the_end() -> None:
    stream = io.StringIO()
    with Console(2, "x", stream=stream) as console:
        console.work("reference", 100, 400, unit="rows", rate=0.0)
        console.work("reference", 200, 400, unit="rows", rate=50.0)
        console.work("reference", 400, 400, unit="rows", rate=50.0)
    assert stream.getvalue().splitlines() == [
        "reference 100/400 rows",
        "reference 400/400 rows  50 rows/s  ETA 0s",
    ]


def test_no_escape_codes_where_nobody_redraws() -> None:
    stream = io.StringIO()
    with Console(300, "quickstart", stream=stream) as console:
        console.step(12, METRICS)
    assert "\x1b" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_asks_for_plain_text_gets_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    stream = Terminal()
    with Console(3, "x", stream=stream) as console:
        console.step(1, METRICS)
    assert (
        stream.getvalue().startswith("step 1/3  reward 0.412") and "\x1b" not in stream.getvalue()
    )


def test_plain_lines_and_silence_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, quiet = Terminal(), Terminal()
    with Console(3, "x", mode="plain", stream=plain) as console:
        console.step(1, METRICS)
    with Console(3, "x", mode="quiet", stream=quiet) as console:
        console.step(1, METRICS)
        console.work("reference", 1, 1, unit="rows", rate=0.0)
        console.message("done: 3 steps")
    assert plain.getvalue().startswith("step 1/3  reward 0.412")
    assert quiet.getvalue() == "done: 3 steps\n"


def test_rewards_are_drawn_and_phases_told_in_shares() -> None:
    assert sparkline([0.0, 0.5, math.nan, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([1.0]) == ""
    times = {"time/step_s": 2.0, "time/rollout_s": 1.0, "time/reward_s": 0.1}
    update = {"time/logprobs_s": 0.2, "time/update_s": 0.4}
    assert list(phase_shares(times | update)) == ["sampling 50%", "update 30%"]
    assert list(phase_shares({})) == []


LIVE = """
from oxrl.runs.console import Console
times = {"time/step_s": 2.0, "time/rollout_s": 1.2, "time/update_s": 0.6}
with Console(3, "demo [1]") as console:
    console.message("phase one")
    console.doing("time/rollout_s")
    for step in (1, 2, 3):
        sample = {"prompt": "2+2=", "response": f"{step}\\x1b[2J\\nten [b]", "reward": step / 4}
        console.samples([sample])
        console.doing("time/update_s")
        console.step(step, {"reward/mean": step / 4, "kl/ref_k3": 0.5} | times)
    console.doing("time/eval_s")
    console.work("evaluation", 5, 20, unit="responses", rate=0.0)
    print("printed meanwhile")
"""
BARS = """
import time
from oxrl.runs.bars import bars, followed
assert sum(followed(iter(range(5)), "rows of train")) == 10
with bars() as tell:
    tell("responses", 3, 12)
"""


def on_a_terminal(program: str, **environment: str) -> str:
    """What a terminal of 120 columns is sent."""
    master, slave = pty.openpty()
    others = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    others |= {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "24", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=slave, stderr=slave, env=others
    ) as process:
        os.close(slave)
        seen, deadline = b"", time.monotonic() + 60
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 1)[0]:
                continue
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end closed
                break
            if not chunk:
                break
            seen += chunk
    os.close(master)
    text = seen.decode()
    assert process.returncode == 0, text
    return text


def test_a_terminal_sees_lines_that_redraw_themselves_and_messages_that_stay() -> None:
    text = on_a_terminal(LIVE)
    assert "phase one" in text and "printed meanwhile" in text
    assert "\x1b[2K" in text  # the lines are erased and drawn again
    for expected in ("1/3", "3/3", "reward 0.250", "reward 0.750", "KL 5.00e-01", "ETA 0s"):
        assert expected in text
    # What the run is at, where the time went, the newest sample on one line, with no escape obeyed.
    for expected in (
        "sampling",
        "updating",
        "evaluating",
        "update 30%",
        "evaluation 5/20",
        "demo [1]",
    ):
        assert expected in text
    assert "[0.75] 2+2= → 3\\x1b[2J⏎ten [b]" in text
    assert "\x1b[2J" not in text


def test_many_numbers_push_no_shares_off_the_terminal() -> None:
    parts = {f"reward/part/{name * 30}": 0.5 for name in "abcdef"}
    text = on_a_terminal(
        LIVE.replace('{"time/step_s"', f'{parts} | {{"time/step_s"'), COLUMNS="110"
    )
    assert "aaaaaaaaaaaa" in text and "…" in text
    assert "sampling 60%  update 30%" in text[: text.index("evaluating")]


def test_a_narrow_terminal_has_one_line() -> None:
    text = on_a_terminal(LIVE, COLUMNS="80")
    assert "3/3" in text and "reward 0.750" in text and "2+2=" not in text


def test_commands_draw_bars_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = on_a_terminal(BARS)
    assert "responses" in text and "3/12" in text
    assert "responses" not in on_a_terminal(BARS, NO_COLOR="1")
    with bars() as tell:
        tell("responses", 3, 12)
    assert list(followed([1, 2], "rows")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_count_tells_now_and_then_and_at_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    count = Count(lambda *given: told.append(given), "rows", 3, every_s=1e9)
    for _ in range(3):
        count.one()
    assert told == [("rows", 3, 3)]


def test_verbose_lines_have_a_sample_and_log_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    times = {"time/step_s": 2.0, "time/rollout_s": 1.0}
    with Console(3, "x", mode="verbose", stream=stream) as console:
        console.samples([])
        console.samples(
            [{"prompt": "2+2=", "response": "4\x07", "reward": None, "status": "error"}]
        )
        console.step(1, METRICS | times)
    first, second = stream.getvalue().splitlines()
    assert "sampling 50%" in first and second == "  [error] 2+2= → 4\\x07"
    assert sample_text({"prompt": [{"type": "image"}], "response": "a", "reward": 1}).startswith(
        "[1]"
    )
    with run_logging(tmp_path / "run.log", "verbose"):
        logging.getLogger("oxrl.x").info("a detail")
    assert "a detail" in capsys.readouterr().err


def test_what_other_libraries_log_goes_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = logging.getLogger("transformers.models")
    before = logging.getLogger("transformers").handlers
    with run_logging(tmp_path / "run.log"):
        noisy.warning("a word from a library")
    assert "a word from a library" in (tmp_path / "run.log").read_text()
    assert "a word" not in capsys.readouterr().err
    assert logging.getLogger("transformers").handlers == before


def test_text_the_stream_cannot_spell_is_approximated() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(3, "x", stream=stream).message("reward ↑ 0.5")
    assert raw.getvalue() == b"reward ? 0.5\n"


def test_a_closed_stream_does_not_fail_the_run() -> None:
    stream = io.StringIO()
    console = Console(3, "x", stream=stream)
    stream.close()
    console.message("anyone?")
    console.step(1, METRICS)
    console.close()


PIPED = """
import sys
from oxrl.runs.console import Console
console = Console(5000, "x")
for step in range(1, 5001):
    console.step(step, {"reward/mean": 0.5})
print("the command's own last words", flush=True)
sys.stderr.write("trained to the end")
"""


def test_a_reader_that_goes_away_does_not_fail_the_run() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PIPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"step 1/5000")
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b"trained to the end"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (125, "2m05s"), (11_225, "3h07m")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_everything_is_kept_and_only_warnings_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("oxrl.somewhere")
    for text in ("first start", "second start"):
        with run_logging(tmp_path / "run.log"):
            logger.info("%s: detail \ud800", text)
            logger.warning("%s: attention", text)
    logger.warning("after the run")
    kept = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert kept.count("detail") == 2 and kept.count("attention") == 2 and "after" not in kept
    shown = capsys.readouterr().err
    assert "detail" not in shown and shown.count("WARNING: ") == 2
    assert logging.getLogger("oxrl").handlers == []
