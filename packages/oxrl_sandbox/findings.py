"""The jobs that a sandbox is given, and the findings that its answers come to."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from oxrl_sandbox.inside.confine import Limits
from oxrl_sandbox.inside.plain import Json


class SandboxError(Exception):
    """The sandbox cannot be had, or did not do its work: nothing is known of the program."""


@dataclass(frozen=True)
class Job:
    """One program and its tests.

    kind: "calls": functions are called; "case": what it prints is compared, or only told.
    program: `code`; with calls perhaps `prompt` and `entry`, in a case `input`.
    tests: see `grader.grade` and `grader.compare_output`; {"shown": True}: nothing is compared.
    partial: run all tests, also after one that failed.
    """

    kind: Literal["calls", "case"]
    program: Json
    tests: Json
    partial: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of a job.

    held, run: asserts. reason: why not all held; empty if they did.
    bad: why the tests can judge no program. starved: it stood in line for a processor instead of
    ending, so that another look may find more.
    output: what the program printed, where that was asked for. waited_s: before it was begun.
    """

    held: int = 0
    run: int = 0
    reason: str = ""
    bad: str = ""
    starved: bool = False
    output: str = ""
    waited_s: float = 0.0


def finding(kind: str, limits: Limits, graded: Json | None, ended: Json) -> Verdict:
    """Put together what the grader found and how the processes ended.

    Args:
        kind: of the job.
        limits: of the program.
        graded: the grader's message, if it came to that.
        ended: the unit's message; see `Unit.judge`.

    Returns:
        How many asserts held, and why not all of them.
    """
    program = ended["program"]
    tests = ended["tests"]
    starved = program["starved"] or tests["starved"]
    blamed = reason_of(program, limits)
    if graded is not None:
        if "bad" in graded:
            return Verdict(bad=graded["bad"])
        found = {"reason": "", "output": "", **graded}
        if "lost" in found:
            found["reason"] = f"the program {blamed or found['lost'] or 'closed its connection'}"
        elif kind == "case" and blamed:
            found |= {"held": 0, "reason": f"the program {blamed}"}
        # By their names: a grader elsewhere may tell more.
        held = found["held"]
        run = found["run"]
        return Verdict(held, run, found["reason"], starved=starved, output=found["output"])
    if program["full"]:
        return Verdict(0, 1, f"the program {blamed}")
    how = reason_of(tests, limits) or "ended in silence"
    if tests["late"] and ended["waiting"]:
        reason = f"the program {how}"
    elif ended["answered"]:
        reason = f"the tests could not cope with what the program returned: they {how}"
    else:
        bad = f"the tests {how}, before the program had answered anything"
        return Verdict(bad=bad, starved=starved)
    return Verdict(0, 1, reason, starved=starved)


def reason_of(ended: Json, limits: Limits) -> str:
    """Say what is wrong with how a process ended.

    Args:
        ended: how the unit saw it end: `status` (below 0 the number of a signal; None while it
            ran), `late` and `full`.
        limits: that the process had to keep.

    Returns:
        A reason that goes on after "the program ..."; empty if nothing is wrong, or if the unit
        ended it when it was no longer needed.
    """
    status = ended["status"]
    if ended["full"]:
        return f"wrote more than {limits.disk_mb} MB into its folder"
    if ended["late"] and status is None:
        return f"did not end within {limits.wall_s:g} s"
    if status in (-signal.SIGKILL, -signal.SIGXCPU):
        return f"used more than {limits.cpu_s:g} s of processor time"
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}" if status else ""
