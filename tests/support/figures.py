"""Figures that come from training: asserted in every test run, and written down for
`make test-processors`, which sees them under other roundings and seeds.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

# Added to the seeds of learning tests.
SEED = int(os.environ.get("OXRL_TEST_SEED", "0"))
# `run.threads` of small runs.
THREADS = int(os.environ.get("OXRL_TEST_THREADS", "1"))


class Learned:
    """Asserts that a figure that comes from training is on the right side of a bound.

    The bound lies three deviations away or more, over seeds and roundings; `make test-processors`
    has every figure written to the file that OXRL_TEST_FIGURES names, and looks. A bound on what
    was learned lies above what needs no learning, its floor.
    """

    def __init__(self, test: str) -> None:
        self._test = test

    def __call__(
        self,
        figure: str,
        value: float,
        *,
        at_least: float = -math.inf,
        at_most: float = math.inf,
        floor: float = -math.inf,
    ) -> None:
        path = os.environ.get("OXRL_TEST_FIGURES")
        if path:
            bounds = {"at_least": at_least, "at_most": at_most}
            found: dict[str, object] = {"test": self._test, "figure": figure, "value": value}
            found |= {side: bound for side, bound in bounds.items() if math.isfinite(bound)}
            with Path(path).open("a") as file:
                file.write(json.dumps(found) + "\n")
        assert floor == -math.inf or at_least > floor, f"{figure}: no more is asserted than {floor}"
        assert at_least <= value <= at_most, f"{figure}: {value}"
