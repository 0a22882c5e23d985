"""Runs tests on mutants: one warm pytest session, a fork of it for each mutant.

Everything is imported and collected once. A fork puts the mutated code into the functions that
exist already, so that every importer has it, and runs the tests that the mutated line is covered
by, fastest first, until one fails. A test that starts processes of its own would start them
without the mutant; such tests are not given to it.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import coverage
import pytest

from mutants.mutation_points import MODULE, Mutant

# Of a test, in seconds of its own processor time: how busy the machine is must not choose tests.
LONGEST_TEST_S = 4.0
LONGEST_CHILDREN_S = 0.05
# Of a mutant, in seconds on the clock.
TIMEOUT_S = 60.0
TIMEOUT_FACTOR = 20.0


@dataclass
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    status: str  # killed, survived, timeout
    by: str  # the test that failed, and how
    tests: int  # that the mutated line is covered by
    seconds: float


@dataclass
class Running:
    """A fork at work."""

    mutant: Mutant
    tests: int
    pid: int
    since: float
    deadline: float
    said: bytes = b""


@dataclass
class Lines:
    """Which tests execute which lines, and how long they take."""

    tests: dict[str, dict[int, set[str]]] = field(default_factory=dict)  # file -> line -> tests
    seconds: dict[str, float] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)  # tests that are quick and start no process

    def touching(self, file: str) -> set[str]:
        """Tests that execute anything of a file."""
        return set[str]().union(*self.tests.get(file, {}).values())

    def covering(self, mutant: Mutant) -> list[str]:
        """Tests that execute the mutated line, or the function where only its head changes."""
        segment = mutant.point.segment
        by_line = self.tests.get(segment.file, {})
        if segment.function == MODULE:
            found = set[str]().union(*(self.touching(file) for file in readers(mutant)))
        else:
            lines = statement_lines(mutant)
            found = set[str]().union(*(by_line.get(line, set()) for line in lines))
        return sorted(found, key=lambda test: self.seconds[test])


def readers(mutant: Mutant) -> list[str]:
    """Files of the package whose modules hold a constant under its name."""
    constant = mutant.before.split(" ")[0]
    found = [name for name, module in sys.modules.items() if constant in vars(module)]
    files = [name.replace(".", "/") + ".py" for name in found if name.startswith("oxrl")]
    return [f"packages/{file}" if file.startswith("oxrl_") else file for file in files]


def statement_lines(mutant: Mutant) -> range:
    """Lines of the innermost statement that holds the mutated place; all of them for a default."""
    point = mutant.point
    line = point.line - point.segment.first + 1
    tree = ast.parse(point.segment.source)
    best = range(1, len(point.segment.lines) + 1)
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef):
            continue
        last = node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            last = max(node.lineno, body[0].lineno - 1)
        if node.lineno <= line <= last and last - node.lineno < len(best):
            best = range(node.lineno, last + 1)
    return range(point.segment.first + best.start - 1, point.segment.first + best.stop - 1)


class Session:
    """A pytest plugin that runs the collected tests once, and then some of them on every mutant."""

    def __init__(
        self,
        root: Path,
        files: list[str],
        mutants: list[Mutant],
        *,
        workers: int,
        tell: Callable[[str], None],
    ) -> None:
        self.root = root
        self.tell = tell
        self.files = files
        self.mutants = mutants
        self.workers = workers
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []
        self.lines = Lines()
        self.items: dict[str, pytest.Item] = {}
        self.live = Live({}, [])
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = getattr(crash, "message", str(report.longrepr)).split("\n")[0]
            self.failed = f"{report.nodeid}: {message[:200]}"

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.measure()
        if not self.broken:
            gc.collect()
            self.live = Live.of([str(self.root / file) for file in self.files])
            gc.freeze()
            self.run_mutants()
        return True

    def run(self, names: list[str]) -> None:
        """The tests named, until one fails."""
        items = [self.items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return

    def measure(self) -> None:
        """Every test once: does it pass as things are, how long does it take, what does it run."""
        paths = [str(self.root / file) for file in self.files]
        recorder = coverage.Coverage(data_file=None, include=paths, config_file=False)
        recorder.start()
        names = list(self.items)
        for name, following in zip(names, [*names[1:], None], strict=True):
            recorder.switch_context(name)
            began = os.times()
            item = self.items[name]
            next_item = None if following is None else self.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            ended = os.times()
            took = ended.user + ended.system - began.user - began.system
            children = ended.children_user + ended.children_system
            children -= began.children_user + began.children_system
            self.lines.seconds[name] = took
            if took <= LONGEST_TEST_S and children <= LONGEST_CHILDREN_S:
                self.lines.alone.add(name)
            if self.failed:
                self.broken.append(self.failed)
                self.failed = None
        recorder.stop()
        data = recorder.get_data()
        alone = self.lines.alone
        for file, path in zip(self.files, paths, strict=True):
            by_line = data.contexts_by_lineno(path)
            self.lines.tests[file] = {line: alone & set(found) for line, found in by_line.items()}

    def run_mutants(self) -> None:
        """`workers` forks at a time."""
        waiting = list(reversed(self.mutants))
        running: dict[int, Running] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                mutant = waiting.pop()
                tests = self.lines.covering(mutant)
                if tests:
                    pipe, fork = self.start(mutant, tests)
                    running[pipe] = fork
                else:
                    self.note(Outcome(mutant, "survived", "no test runs it", 0, 0.0))
            ready, _, _ = select.select(list(running), [], [], 0.5)
            for pipe in list(running):
                self.look_after(pipe, running, pipe in ready)

    def start(self, mutant: Mutant, tests: list[str]) -> tuple[int, Running]:
        """Fork; the fork never returns."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(reading)
            # The fork server is a child of the session; a fork that needs one starts its own.
            forkserver._forkserver._forkserver_pid = None
            self.be_mutant(mutant, tests, writing)
        os.close(writing)
        now = time.monotonic()
        usual = sum(self.lines.seconds[test] for test in tests)
        deadline = now + TIMEOUT_S + TIMEOUT_FACTOR * usual
        return reading, Running(mutant, len(tests), pid, now, deadline)

    def look_after(self, pipe: int, running: dict[int, Running], ready: bool) -> None:
        """Read what a fork says; note its end, or end it when its time is up."""
        fork = running[pipe]
        if ready:
            said = os.read(pipe, 65536)
            fork.said += said
            if said:
                return
        elif time.monotonic() < fork.deadline:
            return
        else:
            os.killpg(fork.pid, signal.SIGKILL)
        os.close(pipe)
        del running[pipe]
        os.waitpid(fork.pid, 0)
        answer = {"status": "timeout" if not ready else "killed", "by": "the process died"}
        if fork.said:
            answer = json.loads(fork.said)
        seconds = time.monotonic() - fork.since
        found = Outcome(fork.mutant, answer["status"], answer["by"], fork.tests, seconds)
        self.note(found)

    def note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        segment = outcome.mutant.point.segment
        place = f"{segment.file}:{outcome.mutant.point.line} {segment.function}"
        if outcome.status != "killed":
            change = outcome.mutant.after.replace("\n", " / ")
            self.tell(f"{outcome.status} {place}: {change} {outcome.by}")
        if len(self.outcomes) % 50 == 0:
            self.tell(f"{len(self.outcomes)} of {len(self.mutants)}")

    def be_mutant(self, mutant: Mutant, tests: list[str], writing: int) -> None:
        """In the fork: change the code, run the tests, say what came of it, end."""
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        try:
            install(self.root, mutant, self.live)
            self.run(tests)
            answer = {"status": "survived", "by": ""}
            if self.failed:
                answer = {"status": "killed", "by": self.failed}
        except BaseException as error:  # noqa: BLE001 - whatever a mutant does, it is noted
            answer = {"status": "killed", "by": f"{type(error).__name__}: {error}"[:300]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)


@dataclass
class Live:
    """What of the package is in memory, found once: a fork has no time to look for it."""

    functions: dict[str, list[types.FunctionType]]  # by file; closures included
    caches: list[Any]

    @classmethod
    def of(cls, paths: list[str]) -> Live:
        functions: dict[str, list[types.FunctionType]] = {path: [] for path in paths}
        caches: list[Any] = []
        gc.unfreeze()  # what tests froze would not be listed
        for x in gc.get_objects():
            if type(x) is types.FunctionType:
                functions.get(x.__code__.co_filename, []).append(x)
            elif type(x) is functools._lru_cache_wrapper and is_ours(x):
                caches.append(x)
        return cls(functions, caches)


def is_ours(x: Any) -> bool:
    return (x.__module__ or "").startswith(("oxrl", "test"))


def install(root: Path, mutant: Mutant, live: Live) -> None:
    """Put the mutated code into the functions and constants of the imported package."""
    segment = mutant.point.segment
    path = str(root / segment.file)
    name = segment.file.removesuffix(".py").replace("/", ".")
    original = importlib.import_module(name)
    code = compile(mutant.source, path, "exec")
    changed = types.ModuleType(name)
    changed.__dict__.update(__file__=path, __package__=name.rpartition(".")[0])
    exec(code, changed.__dict__)
    for cache in live.caches:
        # What it holds was computed by the original.
        cache.cache_clear()
    if segment.function == MODULE:
        constant = mutant.before.split(" ")[0]
        replace_everywhere(constant, vars(original)[constant], vars(changed)[constant])
        return
    new = {code_name(found): found for found in codes(code)}
    for function in live.functions[path]:
        found = new.get(code_name(function.__code__), function.__code__)
        if found != function.__code__:
            function.__code__ = found
    target = named(original, segment.function)
    defaults = named(changed, segment.function)
    target.__defaults__ = defaults.__defaults__
    target.__kwdefaults__ = defaults.__kwdefaults__


def named(module: types.ModuleType, function: str) -> Any:
    """A function of a module by its qualified name."""
    found: Any = module
    for part in function.split("."):
        found = vars(found)[part]
    for wrapper in ("__func__", "fget", "func"):
        found = getattr(found, wrapper, found)
    return inspect.unwrap(found)


def code_name(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def codes(code: types.CodeType) -> list[types.CodeType]:
    """A code object and all inside it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return [code] + [found for x in inner for found in codes(x)]


def replace_everywhere(name: str, old: Any, new: Any) -> None:
    """A constant of a module, and wherever it was imported under its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
