"""What a run over mutants found, as JSON and as a page, and whether it is good enough."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants.mutation_runs import Outcome

Key = tuple[str, str, str, str]
LEAST_KILLED = 0.95
MOST_ARGUED = 0.05


@dataclass(frozen=True)
class Verdict:
    """The figures of a run.

    killed: timeouts included. argued: survivors with an argument. unargued: the others.
    wrong: argued to be equivalent, and killed.
    """

    total: int
    killed: int
    timeouts: int
    argued: int
    unargued: int
    wrong: int

    @property
    def passed(self) -> bool:
        enough = self.killed >= LEAST_KILLED * self.total
        few = self.argued <= MOST_ARGUED * self.total
        return enough and few and not self.unargued and not self.wrong

    def __str__(self) -> str:
        share = self.killed / max(self.total, 1)
        return (
            f"{self.total} mutants: {self.killed} killed ({share:.1%}; {self.timeouts} by their "
            f"time limit), {self.argued} survived and argued, {self.unargued} survived without an "
            f"argument, {self.wrong} argued wrongly: {'passed' if self.passed else 'FAILED'}"
        )


def read_arguments(path: Path) -> dict[Key, str]:
    """Why mutants that survive are not worth a test, by file, function, line before and after."""
    found: dict[Key, str] = {}
    for entry in tomllib.loads(path.read_text()).get("mutant", []):
        after = entry["after"]
        for text in [after] if isinstance(after, str) else after:
            found[entry["file"], entry["function"], entry["before"], text] = entry["argument"]
    return found


def judge(outcomes: list[Outcome], arguments: dict[Key, str]) -> Verdict:
    """Count."""
    alive = [x for x in outcomes if x.status == "survived"]
    dead = [x for x in outcomes if x.status != "survived"]
    argued = sum(x.mutant.key in arguments for x in alive)
    return Verdict(
        total=len(outcomes),
        killed=len(dead),
        timeouts=sum(x.status == "timeout" for x in outcomes),
        argued=argued,
        unargued=len(alive) - argued,
        wrong=sum(x.mutant.key in arguments for x in dead),
    )


def described(outcome: Outcome, arguments: dict[Key, str]) -> dict[str, Any]:
    """One mutant, for the report."""
    mutant = outcome.mutant
    argument = arguments.get(mutant.key)
    status = outcome.status
    if argument is not None and status == "survived":
        status = "argued"
    return {
        "file": mutant.point.segment.file,
        "function": mutant.point.segment.function,
        "line": mutant.point.line,
        "operator": mutant.point.operator,
        "before": mutant.before,
        "after": mutant.after,
        "status": status,
        "by": outcome.by,
        "argument": argument,
        "tests": outcome.tests,
        "seconds": round(outcome.seconds, 2),
    }


def write(
    folder: Path, outcomes: list[Outcome], arguments: dict[Key, str], about: dict[str, Any]
) -> Verdict:
    """mutants.json and mutants.md in `folder`."""
    verdict = judge(outcomes, arguments)
    ordered = sorted(outcomes, key=lambda x: (x.mutant.point.segment.file, x.mutant.point.line))
    rows = [described(outcome, arguments) for outcome in ordered]
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**about, **vars(verdict), "passed": verdict.passed, "mutants": rows}
    (folder / "mutants.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "mutants.md").write_text(page(rows, str(verdict), about))
    return verdict


def page(rows: list[dict[str, Any]], verdict: str, about: dict[str, Any]) -> str:
    """The report to read: figures of every file, survivors, then who killed the others."""
    lines = ["# Mutants", "", verdict, ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        "| file | mutants | killed | timeout | argued | survived |",
        "|---|---|---|---|---|---|",
    ]
    for file in dict.fromkeys(row["file"] for row in rows):
        counts = Counter(row["status"] for row in rows if row["file"] == file)
        cells = [counts[status] for status in ("killed", "timeout", "argued", "survived")]
        lines.append("| " + " | ".join(map(str, [file, counts.total(), *cells])) + " |")
    for status in ("survived", "argued", "timeout"):
        lines += ["", f"## {status}", ""]
        for row in rows:
            if row["status"] == status:
                lines += listed(row)
    lines += ["", "## killed", ""]
    lines += ["| where | function | operator | after | by |", "|---|---|---|---|---|"]
    for row in rows:
        if row["status"] == "killed":
            after = row["after"].replace("|", "\\|").replace("\n", " / ")
            by = row["by"].replace("|", "\\|")
            where = f"{row['file']}:{row['line']}"
            cells = [where, row["function"], row["operator"], f"`{after}`", by]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def listed(row: dict[str, Any]) -> list[str]:
    """A mutant with its change."""
    head = f"`{row['file']}:{row['line']}` {row['function']}, {row['operator']}"
    told = row["argument"] or row["by"] or f"{row['tests']} tests run it, none fails"
    before = ["    - " + line for line in row["before"].split("\n")]
    after = ["    + " + line for line in row["after"].split("\n")]
    return [f"{head}: {told}", "", *before, *after, ""]
