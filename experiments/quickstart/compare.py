"""How many samples does common noise save? Models of the quickstart, compared with noise that they
share and with noise of their own.

    python experiments/quickstart/compare.py [--seeds 3] [--first 0] [--out runs/common-noise]

For each seed the quickstart is run once (a folder that has its checkpoints is not run again), and
its warm start, step 50 and step 100 answer the held-out sums with three evaluation seeds. A pair of
models is then compared prompt by prompt: with the same evaluation seed on both sides, which is what
`oxrl compare` does, and with every two that differ. The factor is the variance of the difference
with other noise over that with common noise: as many times the samples would other noise need to be
as sure. Its interval is a bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from run import EVAL_SAMPLES, quickstart
from scipy import stats

from oxrl_stats.compare import Options, ask, compared
from oxrl_stats.evaluated import Evaluated
from oxrl_stats.intervals import DRAWS, Interval, Numbers
from oxrl_stats.paired import difference

EVALUATION_SEEDS = (1, 2, 3)
# Two models of one run that are near each other, and two pairs that are far apart.
PAIRS = (("step 50", "step 100"), ("warm start", "step 50"), ("warm start", "step 100"))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def trained(folder: Path, seed: int) -> Mapping[str, Path]:
    """The models of a quickstart, by what they are called; runs it if they are not there."""
    models = {
        "step 50": folder / "rl/checkpoints/step_00000050",
        "step 100": folder / "rl/checkpoints/step_00000100",
        "warm start": folder / "sft/checkpoints/step_00000550",
    }
    if not models["step 100"].is_dir():
        folder.mkdir(parents=True)
        quickstart(folder, seed, control=False)
    return models


def answers(folder: Path, models: Mapping[str, Path]) -> Mapping[str, list[Evaluated]]:
    """What every model answers the held-out sums, once with each evaluation seed."""
    found: dict[str, list[Evaluated]] = {name: [] for name in models}
    for seed in EVALUATION_SEEDS:
        data = str(folder / "data/eval.jsonl")
        asked = Options(data=(data,), samples=EVAL_SAMPLES, temperature=1.0, seed=seed)
        [answered] = ask([str(path) for path in models.values()], asked).values()
        for name, one in zip(models, answered, strict=True):
            found[name].append(one)
    return found


def gaps(first: Sequence[Evaluated], second: Sequence[Evaluated]) -> Numbers:
    """Differences of two models, [seed of one, seed of the other, prompt]."""
    one = np.stack([model.rewards.mean(1) for model in first])
    two = np.stack([model.rewards.mean(1) for model in second])
    return one[:, None] - two[None]


def factor(differences: Numbers) -> float:
    """Variance over prompts of a difference with other noise, over that with common noise.

    Args:
        differences: [seeds, seeds, prompts]; equal seeds are common noise.
    """
    variances = differences.var(-1, ddof=1)
    same = np.eye(len(variances), dtype=bool)
    return float(variances[~same].mean() / variances[same].mean())


def factor_interval(differences: Numbers) -> Interval:
    """The factor, with its interval by a bootstrap over prompts.

    Args:
        differences: [seeds, seeds, prompts].
    """
    ends = stats.bootstrap(
        (np.arange(differences.shape[-1]),),
        lambda chosen: factor(differences[..., chosen]),
        vectorized=False,
        n_resamples=DRAWS,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(factor(differences), float(ends.low), float(ends.high))


def line(seed: int, pair: tuple[str, str], found: Mapping[str, list[Evaluated]]) -> str:
    """A row of the table: of the first evaluation seed what `oxrl compare` says, and the factor."""
    first, second = found[pair[0]], found[pair[1]]
    first_asked = compared("sums", first[0], second[0])
    if not first_asked.common_noise:
        raise SystemExit(f"{pair[0]} and {pair[1]} drew with noise of their own")
    told = factor_interval(gaps(first, second))
    with_other = difference(gaps(first, second)[0, 1])
    equal_with_other = float((first[0].rewards == second[1].rewards).mean())
    cells = (
        f"{seed}",
        f"{pair[0]}, {pair[1]}",
        f"{first_asked.first.value:.3f}, {first_asked.second.value:.3f}",
        _ends(first_asked.gap),
        _ends(with_other),
        f"{first_asked.equal:.3f}, {equal_with_other:.3f}",
        f"{told.value:.2f} [{told.low:.2f}, {told.high:.2f}]",
    )
    return f"| {' | '.join(cells)} |"


def _ends(found: Interval) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="What common noise saves, on the quickstart.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/common-noise"))
    arguments = parser.parse_args()
    rows: list[str] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        folder = arguments.out / f"seed_{seed}"
        found = answers(folder, trained(folder, seed))
        rows += [line(seed, pair, found) for pair in PAIRS]
    say(
        "\n| seed | models | rewards | difference, common noise | difference, other noise | "
        "equal rewards, common and other | factor |"
    )
    say("|---|---|---|---|---|---|---|")
    for row in rows:
        say(row)


if __name__ == "__main__":
    main()
