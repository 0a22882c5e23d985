"""Break the formulas one small change at a time and see whether a test notices: `make mutants`.

    python tests/mutants                                    the formulas, by the tests of formulas
    python tests/mutants FILE ... --tests TEST ...          any files, by any tests
    git diff --diff-filter=A --name-only COMMIT -- oxrl/data | xargs python tests/mutants --size 300
    python tests/mutants FILE ... --copies          survivors once more, in copies of the tree

Writes build/mutants/mutants.md and mutants.json; exits 1 unless 95 % of the mutants are killed and
every survivor has an argument in argued.toml.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The repository, and what tests share.
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import pytest  # noqa: E402
import torch  # noqa: E402

from mutants.mutation_copies import once_more  # noqa: E402
from mutants.mutation_points import by_hand, drawn, sample  # noqa: E402
from mutants.mutation_report import read_arguments, write  # noqa: E402
from mutants.mutation_runs import Session  # noqa: E402

OBJECTIVE = [
    "oxrl/recipes/objective.py",
    "oxrl/recipes/reference_kl.py",
    "oxrl/recipes/sampler_correction.py",
    "oxrl/recipes/step.py",
]
FOLDERS = ["oxrl/functional", "oxrl/recipes/features"]
# Quick ones, which run the code in their own process.
TESTS = [
    "tests/functional",
    "tests/recipes/test_objective.py",
    "tests/recipes/test_step.py",
    # Of features that whole runs have.
    "tests/recipes/test_episode_rows.py",
    "tests/usercode/test_own_code.py",
    "tests/recipes/test_parts_in_advantages.py",
    "tests/recipes/test_token_record.py",
    # Of mutants made by hand.
    "tests/recipes/test_preference_objective.py",
    "tests/recipes/test_ledger.py",
    "tests/recipes/test_supervised.py",
    "tests/data/test_batching.py",
    "tests/data/test_fast.py",
    "tests/engines/test_share_prefix.py",
    "tests/models/test_weights.py",
]


def sources() -> list[str]:
    """What is mutated, as paths from the root."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    names = sorted(str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py")
    return names + OBJECTIVE


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=__doc__)
    parser.add_argument(
        "files",
        nargs="*",
        help="Python files, from the root; others are passed over; none: formulas",
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--size", type=int, default=500, help="mutants: at least, of given files at most; 0 for all"
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", help="part of FILE:FUNCTION; may be repeated")
    parser.add_argument("--by-hand", action="store_true", help="only the mutants of by_hand.toml")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument(
        "--copies",
        action="store_true",
        help="try survivors once more, by whole test files that name the mutated file",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    return parser.parse_args()


def main() -> int:
    """The exit status."""
    given = arguments()
    torch.set_num_threads(1)
    began = time.monotonic()
    size = given.size or None
    named = by_hand(ROOT, HERE / "by_hand.toml")
    if given.files:
        files = sorted({name for name in given.files if name.endswith(".py")})
        named = [mutant for mutant in named if mutant.point.segment.file in files]
    else:
        files = sources()
    mutants = named
    if not given.by_hand:
        choose = drawn if given.files else sample
        mutants = named + choose(ROOT, files, seed=given.seed, size=size, only=given.only)
    files = sorted({*files, *(mutant.point.segment.file for mutant in named)})
    print(
        f"{len(mutants)} mutants of {len(files)} files, {len(named)} of them by hand, "
        f"seed {given.seed}",
        flush=True,
    )
    out = sys.stdout

    def tell(text: str) -> None:
        print(text, file=out, flush=True)

    session = Session(ROOT, files, mutants, workers=given.workers, tell=tell)
    options = ["-qq", "--no-summary", "-p", "no:cacheprovider", "-m", "not full"]
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, *given.tests], plugins=[session])
    if session.broken or not session.lines.tests:
        print("tests fail before anything is changed:", *session.broken, sep="\n  ")
        return 2
    outcomes = session.outcomes
    if given.copies:
        outcomes = once_more(ROOT, outcomes, workers=given.workers, tell=tell)
    about = {
        "seed": given.seed,
        "by_hand": len(named),
        "wall_s": round(time.monotonic() - began),
        "workers": given.workers,
        "load_at_the_end": [round(x, 1) for x in os.getloadavg()],
        "tests": len(session.items),
    }
    verdict = write(given.out, outcomes, read_arguments(HERE / "argued.toml"), about)
    print(f"{verdict}\n{about['wall_s']} s; see {given.out / 'mutants.md'}")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
