"""`make test-processors`: every test that trains, under the roundings that this machine can show.

Each rounding changes one thing from the default. Tests of learned figures (those that ask for the
fixture `learned`) run first, then under other seeds; then every other test that trains. Under the
default rounding that is every quick test: a hook on the optimizers notes which of them train.
What was recorded under build/processors is not run again, unless it failed or `--again` asks.

`make test-noise` runs every test that trains under one noise, which the commit chooses: for CI,
whose run of the tests before it notes which ones train.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests share

from processors import margins
from processors.processor_plugin import trained
from processors.roundings import (
    DEFAULT,
    ROOT,
    ROUNDINGS,
    SEEDS,
    Rounding,
    bits,
    cpu_flags,
    environment,
    noise,
)

RECORDS = ROOT / "build" / "processors"
# Which tests train: a line for each of their phases that does.
NOTED = RECORDS / "trained.txt"
Lines = list[dict[str, Any]]
# Values of a figure that make a deviation.
FEWEST = 4
# Tests that train, and fixtures; there were some 500 when this was written.
FEWEST_TRAIN = 400
# Far more than any part takes; a test has a deadline of its own.
DEADLINE_S = 7200


class Part:
    """One group of tests under one rounding, and its record.

    Args:
        rounding: or seed.
        group: "learned", "others" that train, or "both".
        marked: the marker expression of pytest.
    """

    def __init__(self, rounding: Rounding, group: str, marked: str) -> None:
        self.rounding = rounding
        self.group = group
        self._marked = marked
        slow = "" if marked.startswith("not") else "slow "
        self.folder = RECORDS / f"{slow}{group}" / rounding.name.replace(" ", "_")

    def outcomes(self) -> dict[str, str]:
        """How each test ended: a failure in any phase of it is one."""
        ended: dict[str, str] = {}
        for line in read(self.folder / "outcomes.jsonl"):
            if ended.get(line["test"]) != "failed":
                ended[line["test"]] = line["outcome"]
        return ended

    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcomes().items() if outcome == "failed"]

    def result(self) -> dict[str, Any] | None:
        """The end of the record, once it has one."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def run(self, workers: int) -> None:
        """Run the tests and record how they ended, in a folder that is whole or not there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        variables = environment(self.rounding) | {
            "OXRL_TEST_GROUP": self.group,
            "OXRL_TEST_OUTCOMES": str(self.folder / "outcomes.jsonl"),
            "OXRL_TEST_FIGURES": str(self.folder / "figures.jsonl"),
        }
        if self.group != "learned":
            variables |= self._trained()
        command = [sys.executable, "-m", "pytest", "-p", "processors.processor_plugin"]
        command += ["-m", self._marked]
        command += ["-n", str(workers), "--dist", "worksteal"]
        command += self._files()
        began = time.monotonic()
        with (self.folder / "pytest.log").open("w") as log:
            done = subprocess.run(
                command,
                env=variables,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                check=False,
                timeout=DEADLINE_S,
            )
        result = {
            "exit": done.returncode,
            "seconds": round(time.monotonic() - began),
            "commit": commit(),
            "bits": bits(self.rounding),
        }
        (self.folder / "result.json").write_text(json.dumps(result) + "\n")

    def _files(self) -> list[str]:
        """Those to look for tests in: to collect all takes longer than to run the learned ones."""
        if self.group == "learned":
            every = sorted((ROOT / "tests").rglob("test_*.py"))
            return [str(path) for path in every if " learned: " in path.read_text()]
        only = self.folder / "only.txt"
        names = only.read_text().splitlines() if only.is_file() else ["tests"]
        files = {name.split("::")[0] for name in names}
        return ["tests"] if "" in files else sorted(files)

    def _trained(self) -> dict[str, str]:
        """The default rounding notes which tests train; the others run those."""
        if self.rounding is DEFAULT:
            NOTED.unlink(missing_ok=True)
            return {"OXRL_TEST_TRAINED": str(NOTED)}
        only = self.folder / "only.txt"
        only.write_text("".join(f"{name}\n" for name in trained(NOTED.read_text().splitlines())))
        return {"OXRL_TEST_ONLY": str(only)}


def twin(parts: list[Part], part: Part) -> str:
    """The rounding whose tests stand for those of this one: an earlier one of the same bits."""
    if part.rounding in SEEDS:
        return ""
    mine = bits(part.rounding)
    for other in parts:
        if other is part:
            return ""
        result = other.result()
        if other.group == part.group and result is not None and result["bits"] == mine:
            return other.rounding.name
    return ""


def read(path: Path) -> Lines:
    """The lines of a file, none where there is none."""
    return [json.loads(line) for line in path.open()] if path.is_file() else []


def commit() -> str:
    """The commit of the working tree; a + says that there are changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def show_roundings(parts: list[Part]) -> bool:
    """Print how the tests ended, by rounding; whether all did, and well."""
    flags = cpu_flags()
    if "avx512f" not in flags:
        print("This processor has no AVX-512; margins of three deviations stand for it.\n")
    print(f"{'':34}{'bits':8}{'learned':>16}{'others that train':>20}{'seconds':>9}  commit")
    well = True
    for rounding in (*ROUNDINGS, *SEEDS):
        mine = {part.group: part for part in parts if part.rounding == rounding}
        if not mine:
            print(f"{rounding.name:34}this processor has no {rounding.needs}")
            continue
        seconds, commits, hashes, cells = 0, set[str](), set[str](), []
        for group in ("learned", "others"):
            part = mine.get(group)
            result = part.result() if part is not None else None
            same = twin(parts, part) if part is not None else ""
            if part is None or result is None:
                cells.append("-" if part is None else "the same bits" if same else "not yet")
                well &= part is None or bool(same)
                continue
            outcomes = list(part.outcomes().values())
            said = f"{outcomes.count('passed')} passed"
            if result["exit"]:
                said = f"{outcomes.count('failed')} FAILED"
                well = False
            cells.append(said)
            seconds += result["seconds"]
            commits.add(result["commit"])
            hashes.add(result["bits"])
        cell = f"{cells[0]:>16}{cells[1]:>20}{seconds:>9,}"
        print(f"{rounding.name:34}{' '.join(hashes):8}{cell}  {' '.join(sorted(commits))}")
    for part in parts:
        for test in part.failed():
            print(f"\nFAILED under {part.rounding.name}: {test}\n  see {part.folder}/pytest.log")
    return well


def show_margins(parts: list[Part]) -> bool:
    """Print every learned figure with its margin; whether all are wide enough."""
    written = {
        part.rounding.name: read(part.folder / "figures.jsonl")
        for part in parts
        if part.group == "learned" and part.result() is not None
    }
    found = margins.spreads(
        written.get(DEFAULT.name, []),
        [written.get(seed.name, []) for seed in SEEDS],
        [written.get(rounding.name, []) for rounding in ROUNDINGS[1:]],
    )
    print("\nLearned figures: mean over seeds, deviation over seeds and roundings, and how many")
    print(
        f"deviations the bound is away (at least {margins.LEAST:g}; > 999: hardly anything varies).\n"
    )
    print(f"{'bound':>19}{'mean':>10}{'deviation':>11}{'margin':>8}  figure, test")
    well = bool(found)
    for (test, figure), spread in sorted(found.items(), key=lambda item: item[1].margin):
        bounds = [f"{sign} {bound:.4g}" for sign, bound in ((">=", spread.at_least), ("<=", spread.at_most)) if math.isfinite(bound)]  # fmt: skip
        enough = spread.margin >= margins.LEAST and spread.values >= FEWEST
        well &= enough
        margin = f"{spread.margin:8.1f}" if spread.margin < 1000 else f"{'> 999':>8}"
        said = "" if enough else "  TOO FEW VALUES" if spread.values < FEWEST else "  TOO NEAR"
        print(
            f"{', '.join(bounds):>19}{spread.mean:>10.4g}{spread.deviation:>11.2g}{margin}  "
            f"{figure}, {test}{said}"
        )
    return well


def show_trained() -> None:
    """Print which tests train, and how many."""
    noted = NOTED.read_text().splitlines()
    fixtures = trained([line for line in noted if line.endswith("(fixture)")])
    tests = sorted(set(trained(noted)) - set(fixtures))
    for name in tests:
        print(name)
    for name in fixtures:
        print(f"{name}: a fixture")
    print(f"\n{len(tests)} tests train, and {len(fixtures)} fixtures")


def one_noise(commit: str, workers: int) -> int:
    """Run every test that trains under the noise of a commit; the exit code of pytest."""
    if not NOTED.is_file() or len(trained(NOTED.read_text().splitlines())) < FEWEST_TRAIN:
        print(f"{NOTED} names no {FEWEST_TRAIN} tests that train: `make test-noted` first, whole")
        return 1
    chosen = noise(int(commit[:6], 16))
    print(f"every test that trains, under {chosen.name} (of commit {commit[:6]})", flush=True)
    part = Part(chosen, "both", "not full")
    part.run(workers)
    print((part.folder / "pytest.log").read_text())
    result = part.result()
    return 1 if result is None else result["exit"]


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-processors", description=__doc__)
    parser.add_argument("--again", action="store_true", help="what was recorded too")
    parser.add_argument("--learned", action="store_true", help="tests of learned figures alone")
    parser.add_argument("--slow", action="store_true", help="those that are marked full instead")
    parser.add_argument("--table", action="store_true", help="run nothing; print what there is")
    parser.add_argument("--only", nargs="*", default=[], help="names of roundings and seeds")
    parser.add_argument("--list", action="store_true", help="print which tests train")
    parser.add_argument("--noise-of", metavar="COMMIT", help="run all that train under its noise")
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    args = asked()
    if args.list:
        show_trained()
        return 0
    if args.noise_of:
        return one_noise(args.noise_of, args.workers)
    flags = cpu_flags()
    shown = [rounding for rounding in ROUNDINGS if not rounding.needs or rounding.needs in flags]
    marked = "full" if args.slow else "not full"
    parts = [Part(rounding, "learned", marked) for rounding in (*shown, *SEEDS)]
    if not args.learned and not args.slow:
        parts += [Part(rounding, "others", marked) for rounding in shown]
    chosen = [part for part in parts if not args.only or part.rounding.name in args.only]
    for part in [] if args.table else chosen:
        result = part.result()
        done = result is not None and result["exit"] == 0 and not args.again
        if not done and not twin(parts, part):
            print(f"{time.strftime('%H:%M:%S')} {part.rounding.name}: {part.group}", flush=True)
            part.run(args.workers)
    print()
    well = show_roundings(parts)
    well &= show_margins(parts)
    print("\nall green" if well else "\nNOT all green, or not all recorded")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
