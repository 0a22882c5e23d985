"""Seconds a batch when sampling goes on while batches train, against turns and against waves.

    python benchmarks/overlap.py [--staleness 0 1 4 8] [--processes 1 2] [--before WORKTREE]

The device is a stand-in: a decode round sleeps 0.04 s and 0.4 ms for each of at most 32 rows, and
training sleeps as long as ideal sampling of a batch takes. Lengths are lognormal with sigma 1, cut
at 10 medians; a batch has twice as many responses as all slots together. The first and the last
n + 1 batches are left out. `--processes 0` samples in a thread of the trainer's process. The
ratio of two sources hangs on the draws: by the simulator its deviation over twelve other sets of
draws is 0.03 with 12 batches at a lag of 1, and 0.02 with the 48 that count here.

Sources: sequential, waves (what `rollout.max_staleness` was: of `--before`, a worktree of 59427f1),
and the logical and the free schedule. They work in turns. Prints a JSON line for each: seconds a
batch, its share of the ideal, and both by the simulator of `packages/oxrl_schedules`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from overlap_work import BATCH, GROUP, ROUND_S, ROW_S, SLOTS, length_of

from oxrl_schedules import simulator

ROOT = Path(__file__).resolve().parent.parent
SIDE = ROOT / "benchmarks" / "overlap_side.py"


class Case(NamedTuple):
    """A source, how far it is ahead, and the processes that sample for it."""

    source: str
    lag: int
    processes: int

    @property
    def name(self) -> str:
        """As figures name it."""
        where = f"{self.processes} processes" if self.processes else "a thread"
        return f"{self.source} {self.lag}, {where}"

    @property
    def block(self) -> int:
        """Batches that are unlike each other, and come again."""
        return (self.lag + 1) // 2 if self.source == "waves" else 1

    @property
    def edge(self) -> int:
        """Batches that are left out at the start, and at the end; whole blocks."""
        return -(-(self.lag + 1) // self.block) * self.block

    def batches(self, inner: int) -> int:
        """Batches of a run of which at least `inner` count."""
        return 2 * self.edge + -(-inner // self.block) * self.block


def work_of(case: Case, batches: int) -> simulator.Work:
    """What the case has to do, for the simulator."""
    samplers = max(1, case.processes)
    rows = BATCH * samplers
    prompts = rows // GROUP
    lengths = [length_of(draw, i) for draw in range(batches * prompts) for i in range(GROUP)]
    full_round_s = ROUND_S + ROW_S * SLOTS
    return simulator.Work(
        lengths=lengths,
        rows=rows,
        slots=SLOTS * samplers,
        round_s=ROUND_S,
        row_s=ROW_S / samplers,
        train_s=rows * fmean(lengths) / (SLOTS * samplers) * full_round_s,
    )


def simulated(case: Case, work: simulator.Work, rounds: int) -> simulator.Simulated:
    """What the simulator says of a case."""
    match case.source:
        case "sequential":
            return simulator.sequential(work)
        case "waves":
            return simulator.blocks(work, case.lag)
        case "logical":
            return simulator.logical(work, case.lag, rounds)
        case _:
            return simulator.free(work, case.lag)


def measured(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own, and compare it with what is simulated.

    Raises:
        CalledProcessError: it failed.
    """
    batches = case.batches(options.batches)
    work = work_of(case, batches)
    rounds = simulator.propose_rounds(work, case.lag) if case.source == "logical" else 0
    root = options.before if case.source == "waves" else ROOT
    given = {
        "--lag": case.lag,
        "--processes": case.processes,
        "--rounds": rounds,
        "--batches": batches,
        "--train-s": work.train_s,
        "--faster": options.faster,
    }
    words = [str(word) for pair in given.items() for word in pair]
    paths = os.pathsep.join(str(path) for path in (root, root / "packages", SIDE.parent))
    done = subprocess.run(
        [sys.executable, str(SIDE), case.source, *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    inner = slice(case.edge, batches - case.edge)
    seconds = options.faster * fmean(found["seconds"][inner])
    ideal = work.ideal_rounds * work.full_round_s
    expected = simulated(case, work, rounds)
    figures = {
        "case": case.name,
        "seconds": seconds,
        "of_ideal": ideal / seconds,
        "simulated": expected.seconds,
        "off": seconds / expected.seconds - 1,
        "waited": options.faster * fmean(found["waited"][inner]),
        "delivery": fmean(found["deliveries"]),
        "load": os.getloadavg()[0],
    }
    if found["snapshots"]:
        figures["snapshot_share"] = fmean(found["snapshots"][inner]) / seconds
    if found["memory_mb"]:
        figures["memory_mb"] = found["memory_mb"]
    rounded = {
        name: value if isinstance(value, str) else float(f"{value:.4g}")
        for name, value in figures.items()
    }
    return {**rounded, "rounds": rounds, "batches": batches, "samples": found["samples"]}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every source at every lag, those of one lag in turns."""
    for processes in options.processes:
        for lag in options.staleness:
            if not lag:
                yield Case("sequential", 0, processes)
                continue
            if options.before is not None:
                yield Case("waves", lag, processes)
            for schedule in options.schedules:
                yield Case(schedule, lag, processes)


def ratios(found: list[dict[str, Any]], options: argparse.Namespace) -> Iterator[str]:
    """How many times as fast as waves, and as the logical schedule."""
    seconds = {figures["case"]: figures["seconds"] for figures in found}
    memory = {figures["case"]: figures.get("memory_mb") for figures in found}
    for case in cases(options):
        waves = case._replace(source="waves").name
        logical = case._replace(source="logical").name
        if case.source == "logical" and waves in seconds:
            line = f"{case.name}: {seconds[waves] / seconds[case.name]:.2f} times the waves"
            ours, theirs = memory[case.name], memory[waves]
            if ours and theirs:
                line += f", memory {ours / theirs:.3f} of theirs"
            yield line
        if case.source == "free" and logical in seconds:
            yield f"{case.name}: {seconds[logical] / seconds[case.name]:.2f} times the logical one"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--schedules", nargs="+", default=["logical"], choices=("logical", "free"))
    parser.add_argument("--before", type=Path, help="a worktree of 59427f1, for the waves")
    parser.add_argument("--batches", type=int, default=48, help="that count, of each run")
    parser.add_argument("--faster", type=float, default=1.0, help="divides all times, for a try")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for case in cases(options):
        found.append(measured(case, options))
        print(json.dumps(found[-1]), flush=True)
    for line in ratios(found, options):
        print(line)


if __name__ == "__main__":
    main()
