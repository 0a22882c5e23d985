"""A signal asks the run to stop; a second one does not wait; what was there before comes back."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from oxrl.runs.waiting import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_a_request_and_handlers_come_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.requested is None and not stop
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.requested == number.name and stop
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "stopping after this piece of work" in capfd.readouterr().err


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


# Says where it is, and saves after its terminal has gone.
TALKATIVE = """
import sys, time
from oxrl.runs.waiting import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.01)
    print("saving", flush=True)
    print("error: stopped", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write(stop.requested)
sys.exit(75)
"""


def test_a_terminal_that_is_closed_does_not_keep_the_run_from_saving(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", TALKATIVE, str(saved)])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 100)
    os.close(terminal)  # hangs up
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert saved.read_text() == "SIGHUP"


def test_outside_the_main_thread_nothing_is_requested_and_nothing_breaks() -> None:
    entered: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            entered.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [False]


# Ignores the request, as a save that takes minutes would.
STUBBORN = """
import sys, time
from oxrl.runs.waiting import StopRequest
with StopRequest():
    print("ready", flush=True)
    try:
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
"""


def test_a_second_signal_exits_at_once_with_the_code_of_a_resumable_stop() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert time.monotonic() - sent < 5
    assert process.returncode == 75
    assert out == "" and "second signal (SIGINT)" in err
