"""Code reward: the program in a response is run against tests in a sandbox.

The program is the last fenced block (```), or the whole response where there is none. The tests
that judge it stand in `answer`:

    {"prompt", "test", "entry_point"}   HumanEval's: `test` defines check(candidate)
    {"tests": [...], "setup": ""}       MBPP's: statements with asserts
    {"cases": [{"input", "output"}]}    what it prints for what it reads; also as {"inputs": [...],
                                        "outputs": [...]}

All tests or 0, unless partial credit is asked for. A program that is wrong, crashes, does not end
or uses too much gets 0; a sandbox that cannot be had or fails is an error and no number.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from oxrl.errors import RewardDefinitionError, did_you_mean
from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Objects, Score
from oxrl_sandbox.client import LEVELS, Level, Sandbox
from oxrl_sandbox.findings import Job, Json, SandboxError, Verdict
from oxrl_sandbox.inside.confine import WAIT_S, Limits
from oxrl_sandbox.layers import FIXES

if TYPE_CHECKING:
    from oxrl_sandbox.remote import RemoteSandbox

# Seconds of processor time and megabytes that a program may use.
PROGRAM_S = 5.0
PROGRAM_MB = 1024
FOLDER_MB = 64
# Seconds for all cases of a program together.
TOTAL_S = 60.0
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})[^\n`]*$", re.MULTILINE)


def code_reward(
    response: str,
    answer: object,
    *,
    sandbox: str | None = None,
    partial: bool = False,
    program_s: float = PROGRAM_S,
    program_mb: int = PROGRAM_MB,
    url: str = "",
) -> Score:
    """Score the program in a response by tests.

    Args:
        response: the text that the model wrote.
        answer: the tests; see the top of this file.
        sandbox: "strict", "basic" or "off"; has to be named, so that none is chosen in silence.
        partial: the share of asserts or cases that hold, instead of all or nothing.
        program_s: seconds of processor time for the program, and for each case; WAIT_S more may
            pass in waiting. One that this machine was too busy for is judged once more, with no
            other beside it, and has to end then.
        program_mb: megabytes of memory for the program.
        url: of a service with SandboxFusion's `/run_code`, which is used instead of this machine.

    Returns:
        Value 1.0 if every test holds, else 0.0 with a reason, or the share with `partial`. Status
        "error" where the sandbox cannot be had or fails; "invalid" if `answer` holds no tests. All
        cases together have TOTAL_S seconds; those that have not begun then do not hold.

    Raises:
        RewardDefinitionError: no level is named.
    """
    if sandbox not in LEVELS:
        hint = did_you_mean(str(sandbox), LEVELS)
        raise RewardDefinitionError(
            f"code needs sandbox= one of {', '.join(LEVELS)}, got {sandbox!r}{hint}"
        )
    used = sandbox_of(sandbox=sandbox, program_s=program_s, program_mb=program_mb, url=url)
    return judged(used, response, answer, partial=partial)


def judged(
    used: Sandbox | RemoteSandbox,
    response: str,
    answer: object,
    *,
    partial: bool,
    total_s: float = TOTAL_S,
) -> Score:
    """Score the program in a response, as `code_reward` does, in a sandbox that is given.

    Args:
        used: started at the first program if it is not yet.
        response: the text that the model wrote.
        answer: the tests; see the top of this file.
        partial: the share of asserts or cases that hold, instead of all or nothing.
        total_s: seconds for all cases together, without those in which one waited to be begun;
            cases that have not begun then do not hold.

    Returns:
        As of `code_reward`.
    """
    try:
        jobs = jobs_of(code_of(response), answer, partial=partial)
    except ValueError as error:
        return Score(value=None, status="invalid", reason=str(error))
    end = time.monotonic() + total_s
    findings: list[Verdict] = []
    for number, job in enumerate(jobs, start=1):
        if time.monotonic() > end:
            reason = f"not begun: those before it took {total_s:g} s, all that there was"
            findings.append(Verdict(0, len(jobs) - number + 1, reason))
            break
        try:
            found = used.judge(job)
            end += found.waited_s
            if found.starved:
                found = used.judge(job, alone=True)
                end += found.waited_s
        except SandboxError as error:
            return Score(value=None, status="error", reason=str(error))
        findings.append(found)
        if found.bad or (found.reason and not partial):
            break
    return score_of(findings, len(jobs), partial=partial)


def sandbox_of(
    *,
    sandbox: str,
    program_s: float = PROGRAM_S,
    program_mb: int = PROGRAM_MB,
    url: str = "",
) -> Sandbox | RemoteSandbox:
    """The warm sandbox of this process for some limits.

    Args:
        sandbox: "strict", "basic" or "off".
        program_s: seconds of processor time for a program.
        program_mb: megabytes of memory for a program.
        url: of a service to use instead of this machine; empty: none.

    Returns:
        The same one for the same arguments; it may not have been started.
    """
    limits = Limits(cpu_s=program_s, memory_mb=program_mb, disk_mb=FOLDER_MB)
    return _sandbox(cast(Level, sandbox), limits, url)


def require_sandbox(
    *, sandbox: str, url: str = "", partial: bool = False, total_s: float = 0.0, **limits: Any
) -> None:
    """Start the sandbox that `score_code` with the same options uses.

    Args:
        sandbox, url, limits: as of `sandbox_of`.
        partial, total_s: of `judged`; not read.

    Raises:
        RewardDefinitionError: it cannot be had; says why, and what to install or write.
    """
    try:
        sandbox_of(sandbox=sandbox, url=url, **limits).start()
    except SandboxError as error:
        if url:
            raise RewardDefinitionError(f"reward.sandbox_url: {error}") from error
        raise RewardDefinitionError(
            f"reward.sandbox={sandbox} cannot be had on this machine: {error}. What helps: "
            f"{FIXES[sandbox]}. `oxrl doctor` says which levels work here"
        ) from error


def score_of(findings: Sequence[Verdict], count: int, *, partial: bool) -> Score:
    """Turn what a sandbox found into a score.

    Args:
        findings: of the jobs, up to the first that decides; at least one.
        count: of all jobs.
        partial: the share that held, instead of all or nothing.

    Returns:
        The score; status "invalid" where the tests are bad.
    """
    last = findings[-1]
    if last.bad:
        return Score(value=None, status="invalid", reason=last.bad)
    problems = [
        f"case {number}: {found.reason}" if count > 1 else found.reason
        for number, found in enumerate(findings, start=1)
        if found.reason
    ]
    value = float(not problems)
    if partial:
        value = sum(found.held for found in findings) / sum(found.run for found in findings)
    return Score(value=value, reason=problems[0] if problems else "")


def code_of(response: str) -> str:
    """The program in a response: its last fenced block that holds anything, closed or not; else all
    of it.

    Args:
        response: the text that the model wrote.

    Returns:
        Source without the fences.
    """
    blocks: list[str] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = fence
        elif fence[0].strip() == fence[1] and fence[1].startswith(opened[1]):
            blocks.append(response[opened.end() : fence.start()])
            opened = None
    if opened is not None:
        blocks.append(response[opened.end() :])
    blocks = [block.removeprefix("\n") for block in blocks if block.strip()]
    return blocks[-1] if blocks else response


def jobs_of(code: str, answer: object, *, partial: bool) -> list[Job]:
    """List the jobs by which a sandbox judges a program.

    Args:
        code: source of the program.
        answer: the tests, in one of the forms at the top of this file, or JSON of one.
        partial: go on after the first that fails.

    Returns:
        One job for all calls and asserts together, or one for each case of input and output.

    Raises:
        ValueError: `answer` holds no tests that are known; says what it needs.
    """
    if isinstance(answer, str):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    fields = cast(Objects, answer) if isinstance(answer, Mapping) else {}
    if "test" in fields and "entry_point" in fields:
        entry = _text(fields, "entry_point")
        prompt = _text({"prompt": "", **fields}, "prompt")
        program = {"code": code, "prompt": prompt, "entry": entry}
        tests: Json = {"test": _text(fields, "test"), "entry": entry, "prompt": prompt}
        return [Job("calls", program, tests, partial)]
    if "tests" in fields:
        setup = _text({"setup": "", **fields}, "setup")
        tests = {"tests": _texts(fields, "tests"), "setup": setup}
        return [Job("calls", {"code": code}, tests, partial)]
    cases = _cases(fields)
    if not cases:
        has = ", ".join(sorted(map(str, fields))) or f"it is {type(answer).__name__}"
        raise ValueError(
            'code needs an answer with "prompt", "test" and "entry_point"; with "tests" and '
            f'"setup"; or with "cases" of "input" and "output": got {has}'
        )
    return [
        Job("case", {"code": code, "input": given}, {"output": wanted}, partial)
        for given, wanted in cases
    ]


def _cases(fields: Objects) -> list[tuple[str, str]]:
    """List what a program reads and what it has to print for that, from either layout."""
    if "cases" in fields:
        cases = fields["cases"]
        if not _listed(cases):
            raise ValueError('answer["cases"] must be a list of {"input", "output"}')
        return [(_text(case, "input"), _text(case, "output")) for case in cases]
    if "inputs" in fields and "outputs" in fields:
        given = _texts(fields, "inputs")
        wanted = _texts(fields, "outputs")
        if len(given) != len(wanted):
            raise ValueError(f"answer has {len(given)} inputs and {len(wanted)} outputs")
        return list(zip(given, wanted, strict=True))
    return []


def _listed(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _text(fields: object, name: str) -> str:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f'answer["{name}"] must be a text, got {type(value).__name__}')
    return value


def _texts(fields: Objects, name: str) -> list[str]:
    values = fields[name]
    if not _listed(values) or not all(isinstance(value, str) for value in values):
        raise ValueError(f'answer["{name}"] must be a list of texts with at least one')
    return cast(list[str], [*values])


@functools.cache
def _sandbox(level: Level, limits: Limits, url: str) -> Sandbox | RemoteSandbox:
    if url:
        from oxrl_sandbox.remote import RemoteSandbox  # HTTP, which most do without

        return RemoteSandbox(url, limits)
    made = Sandbox(level, limits)
    atexit.register(made.close)
    return made


def score_code(
    response: str,
    answer: object,
    *,
    partial: bool = False,
    total_s: float = TOTAL_S,
    **of_sandbox: Any,
) -> Score:
    """`code`: whether the program in a response passes its tests; see `oxrl_sandbox.code_reward`.

    Args:
        response: the text that the model wrote.
        answer: the tests; see the top of this file.
        partial, total_s: as of `judged`.
        of_sandbox: as of `sandbox_of`; a level must be named.

    Returns:
        As of `code_reward`.
    """
    return judged(sandbox_of(**of_sandbox), response, answer, partial=partial, total_s=total_s)


CODE = BuiltIn(
    score_code,
    passes_on=sandbox_of,
    require=require_sandbox,
    wait_s=WAIT_S,
    keeps_time=True,
)
