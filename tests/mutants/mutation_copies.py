"""Mutants that lived, once more: in a copy of the tree, by whole test files.

A fork runs quick tests of one process only. Here the mutated file is written to a copy of the
repository, so that tests which start processes, or take long, meet it too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from mutants.mutation_runs import Outcome

HERE = Path(__file__).resolve().parent
# Test files of a mutated one: those that name it most often.
MOST_FILES = 4
LIMIT_S = 900.0
# At the root; `oxrl/runs` is the package's own.
LEFT_OUT = {".git", ".venv", "build", "runs", "site"}


def test_files(root: Path, file: str) -> list[str]:
    """Test files of a file of the package: as whole_tests.toml says, or those that name it most."""
    table = tomllib.loads((HERE / "whole_tests.toml").read_text(encoding="utf-8"))
    fitting = [beginning for beginning in table if file.startswith(beginning)]
    if fitting:
        return table[max(fitting, key=len)]
    module = file.removesuffix(".py").replace("/", ".")
    stem = Path(file).stem
    counts: dict[str, int] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        # A file that imports the module is about it; one that shares its name may be.
        count = 100 * text.count(module) + text.count(stem) + 10 * (stem in path.stem)
        if count and path.parent.name != "mutants":
            counts[str(path.relative_to(root))] = count
    return sorted(counts, key=lambda name: -counts[name])[:MOST_FILES]


def left_out(root: Path, folder: str, names: list[str]) -> set[str]:
    """Of a folder's names, those that a copy of the tree does without."""
    return (LEFT_OUT if Path(folder) == root else {"__pycache__"}) & set(names)


@dataclass
class Copies:
    """Copies of the tree, one for each worker, and what is known of test files without a mutant."""

    root: Path
    tell: Callable[[str], None]
    free: SimpleQueue[Path] = field(default_factory=SimpleQueue)
    sound: dict[str, bool] = field(default_factory=dict)

    @contextmanager
    def one(self) -> Iterator[Path]:
        """A copy that nobody else uses meanwhile."""
        copy = self.free.get()
        try:
            yield copy
        finally:
            self.free.put(copy)

    def passes(self, copy: Path, name: str) -> bool:
        """Whether a test file passes there."""
        command = [sys.executable, "-m", "pytest", "-qq", "-x", "-p", "no:cacheprovider"]
        command += ["-m", "not full", "--no-summary", f"--basetemp={copy}.tmp", name]
        data = str(self.root.parent / "shared" / "data")
        here = {
            "OXRL_TEST_DATA": data,
            **os.environ,
            "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'packages'}",
        }
        try:
            done = subprocess.run(
                command, cwd=copy, env=here, capture_output=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        # 5: it has no test for this machine.
        return done.returncode in (0, 5)

    def try_again(self, outcome: Outcome) -> Outcome:
        """A survivor by the tests of whole files, those left out that fail without it."""
        began = time.monotonic()
        mutant = outcome.mutant
        names = test_files(self.root, mutant.point.segment.file)
        with self.one() as copy:
            mutated = copy / mutant.point.segment.file
            original = mutated.read_text(encoding="utf-8")
            for name in names:
                if name not in self.sound:
                    self.sound[name] = self.passes(copy, name)
                if not self.sound[name]:
                    continue
                mutated.write_text(mutant.source, encoding="utf-8")
                try:
                    alive = self.passes(copy, name)
                finally:
                    mutated.write_text(original, encoding="utf-8")
                if not alive:
                    took = time.monotonic() - began
                    return replace(outcome, status="killed", by=f"{name}, whole", seconds=took)
        self.tell(f"lives on: {mutant.point.segment.file}:{mutant.point.line} by {names}")
        return outcome


def once_more(
    root: Path, outcomes: list[Outcome], *, workers: int, tell: Callable[[str], None]
) -> list[Outcome]:
    """Outcomes, of which what survived was tried again by whole test files.

    Args:
        root: of the repository, which is copied.
        outcomes: of forks.
        workers: mutants at a time, with a copy each.
        tell: takes a line about each that lives on.

    Returns:
        As many outcomes, in order.
    """
    with tempfile.TemporaryDirectory(prefix="oxrl-mutants-") as folder:
        copies = Copies(root, tell)
        for number in range(workers):
            copy = Path(folder) / str(number) / "oxrl"
            shutil.copytree(root, copy, ignore=partial(left_out, root))
            copies.free.put(copy)
        with ThreadPoolExecutor(workers) as pool:

            def judged(outcome: Outcome) -> Outcome:
                return copies.try_again(outcome) if outcome.status == "survived" else outcome

            return list(pool.map(judged, outcomes))
