"""The built-in tool `python`: runs what the policy wrote in a sandbox, and says what it printed."""

from __future__ import annotations

from oxrl.environments import ToolUnavailable
from oxrl.environments.typed_tool import ToolFailure
from oxrl.errors import did_you_mean
from oxrl_sandbox.client import LEVELS, Sandbox
from oxrl_sandbox.findings import Job, SandboxError
from oxrl_sandbox.inside.confine import Limits
from oxrl_sandbox.layers import FIXES

FOLDER_MB = 64
# Runs the policy's source as a notebook does: the value of a last expression is printed, and so is
# an exception, with the policy's own lines.
PROGRAM = """
import ast, linecache, sys, traceback, types
def run(source, name):
    sys.stderr = sys.stdout
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), vars(module))
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), vars(module))
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="")
    except BaseException as error:
        trace = error.__traceback__.tb_next
        print("".join(traceback.format_exception(type(error), error, trace, limit=-5)), end="")
run({source!r}, "<python>")
"""


class PythonTool:
    """A sandbox that runs one program per call; nothing is kept from call to call.

    Args:
        sandbox: "strict", "basic" or "off", what is promised; there is no default, so that none is
            chosen in silence.
        seconds: of processor time for a program; three more may pass in waiting.
        memory_mb: megabytes of memory for a program.

    Raises:
        ValueError: no such level, or limits that leave nothing.
    """

    def __init__(
        self, sandbox: str | None = None, seconds: float = 3.0, memory_mb: int = 1024
    ) -> None:
        if sandbox not in LEVELS:
            hint = did_you_mean(str(sandbox), LEVELS)
            raise ValueError(
                f"the tool python needs a sandbox, one of {', '.join(LEVELS)}: write "
                f"{{name: python, sandbox: strict}}; got {sandbox!r}{hint}"
            )
        if not (0 < seconds <= 3600 and memory_mb > 0):
            raise ValueError(
                f"the tool python needs seconds from 0 to 3600 and memory_mb above 0, got "
                f"seconds={seconds}, memory_mb={memory_mb}"
            )
        limits = Limits(cpu_s=seconds, memory_mb=memory_mb, disk_mb=FOLDER_MB)
        self._sandbox = Sandbox(sandbox, limits)
        # What the policy calls; and how to end the sandbox.
        self.function = self.python
        self.close = self._sandbox.close

    def python(self, code: str) -> str:
        """Run a Python program; returns what it prints, and the value of a last expression.

        Args:
            code: The program, which may use the standard library. Nothing is kept between calls.
        """
        job = Job("case", {"code": PROGRAM.format(source=code), "input": ""}, {"shown": True})
        try:
            found = self._sandbox.judge(job)
        except SandboxError as error:
            raise ToolUnavailable(f"the sandbox of the tool python failed: {error}") from error
        printed = found.output.rstrip()
        if found.reason:
            before = f", having printed:\n{printed}" if printed else ""
            raise ToolFailure(f"{found.reason}{before}")
        return printed or "(it printed nothing)"

    def check(self) -> None:
        """Start the sandbox once, so that one that cannot be had is found before anything runs.

        Raises:
            ValueError: it cannot be had here; says why and what helps.
        """
        try:
            self._sandbox.start()
        except SandboxError as error:
            level = self._sandbox.level
            raise ValueError(
                f"sandbox: {level} of the tool python cannot be had on this machine: {error}. What "
                f"helps: {FIXES[level].replace('reward.sandbox=', 'sandbox: ')}. `oxrl doctor` "
                "says which levels work here"
            ) from error
        finally:
            self.close()
