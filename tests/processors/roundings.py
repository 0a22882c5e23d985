"""The ways to round that one machine can show: each changes one thing from the default."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Rounding:
    """One way to round.

    name: what the table calls it.
    settings: environment variables.
    needs: a flag of /proc/cpuinfo without which the setting does nothing or is refused.
    """

    name: str
    settings: dict[str, str] = field(default_factory=dict, hash=False)
    needs: str = ""


def _of(variable: str, value: str, needs: str = "") -> Rounding:
    return Rounding(f"{variable}={value}", {variable: value}, needs)


def noise(seed: int) -> Rounding:
    """Move what an optimizer stepped by a few units in the last place, as another processor might
    have: rounding_noise.py.
    """
    return Rounding(f"noise {seed}", {"OXRL_TEST_NOISE": str(seed)})


DEFAULT = Rounding("default")
# These need no processor.
NOISES = tuple(noise(seed) for seed in range(1, 17))
ROUNDINGS = (
    DEFAULT,
    _of("ATEN_CPU_CAPABILITY", "default"),
    _of("MKL_CBWR", "COMPATIBLE"),
    Rounding("two threads", {"OMP_NUM_THREADS": "2", "OXRL_TEST_THREADS": "2"}),
    Rounding("own products off", {"OXRL_TEST_PRODUCTS": "off"}),
    Rounding("own products, small ones too", {"OXRL_TEST_PRODUCTS": "all"}),
    _of("ATEN_CPU_CAPABILITY", "avx2", "avx2"),
    _of("MKL_CBWR", "AVX512", "avx512f"),
    _of("ONEDNN_MAX_CPU_ISA", "SSE41"),
    _of("ONEDNN_MAX_CPU_ISA", "AVX2", "avx2"),
    _of("MKL_CBWR", "AVX2", "avx2"),
    # Without AVX, MKL rounds as the places of values in memory say, unless it is told not to: what
    # is compared with the device that is none, whose copies lie elsewhere, differed.
    Rounding(
        "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
        {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "AUTO"},
    ),
    _of("MKL_ENABLE_INSTRUCTIONS", "AVX2", "avx2"),
    _of("MKL_ENABLE_INSTRUCTIONS", "AVX512", "avx512f"),
    _of("ATEN_CPU_CAPABILITY", "avx512", "avx512f"),
    _of("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512f"),
    *NOISES,
)
# Seeds beside the one that tests have, under the default rounding.
SEEDS = tuple(Rounding(f"seed + {n}", {"OXRL_TEST_SEED": str(n)}) for n in (1, 2, 3, 4, 5))


def cpu_flags() -> set[str]:
    """What the processor says that it can do."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def environment(rounding: Rounding) -> dict[str, str]:
    """Variables of the processes that show a rounding; those of the caller do not interfere."""
    chosen = {name for one in (*ROUNDINGS, *SEEDS) for name in one.settings}
    kept = {name: value for name, value in os.environ.items() if name not in chosen}
    path = f"{HERE / 'hook'}{os.pathsep}{HERE.parent}"
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | rounding.settings


@cache
def bits(rounding: Rounding) -> str:
    """A hash of what some products, sums and functions come to: equal ones round alike there."""
    done = subprocess.run(
        [sys.executable, str(HERE / "probe.py")],
        env=environment(rounding),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
