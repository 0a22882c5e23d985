"""`oxrl eval --budgets`: what a model gets right with fewer tokens, and with fewer tries.

It answers once, with the largest budget. With a smaller one it would have written the same up to
there, as the noise of a token does not depend on what may follow; so an answer that is longer is
cut there, and counts for what it says so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from oxrl.commands.evaluator import open_evaluators
from oxrl.errors import ConfigError
from oxrl.types import Rollout
from oxrl_stats.evaluation import answers_of, figures_at_k
from oxrl_stats.intervals import Interval, mean_interval


@dataclass(frozen=True, kw_only=True)
class AtBudget:
    """The figures of a model with a budget.

    budget: most tokens of a response. reward: the mean. cut: share of responses that were longer.
    at_k: pass@k, best@k and maj@k by their names.
    """

    budget: int
    reward: Interval
    cut: float
    at_k: dict[str, Interval]


def read_budgets(text: str) -> list[int]:
    """Numbers of tokens, from small to large.

    Args:
        text: such as `64,128,256`.

    Raises:
        ConfigError: they are none.
    """
    try:
        budgets = [int(part) for part in text.split(",")]
    except ValueError:
        budgets = []
    rising = all(one < other for one, other in zip(budgets, budgets[1:], strict=False))
    if not budgets or budgets[0] < 1 or not rising:
        raise ConfigError(
            f"--budgets {text}: write numbers of tokens that rise, such as --budgets 64,128,256"
        )
    return budgets


def run_budgets(
    target: str,
    overrides: Sequence[str],
    budgets: str,
    *,
    samples: int | None,
    temperature: float | None,
    plot: Path | None = None,
) -> str:
    """Evaluate once, and tell the figures by the budget of a response.

    Args:
        target, overrides, samples, temperature: as of `oxrl eval`.
        budgets: as `read_budgets` takes them.
        plot: draw the curves there, as SVG.

    Returns:
        A table in lines of text.

    Raises:
        ConfigError: the config cannot be evaluated so.
    """
    limits = read_budgets(budgets)
    longest = (f"rollout.max_tokens={limits[-1]}", *overrides)
    with ExitStack() as pins:
        [model] = open_evaluators([target], longest, pins)
        if model.plays:
            raise ConfigError(
                "--budgets is for prompts with one response; a turn of an episode that is cut "
                "would have led to another one: change rollout.max_tokens instead"
            )
        asked = model.asked(samples=samples, temperature=temperature)
        by_limit = model.answer_within(asked, limits)
    found = [_at(limit, rollouts, asked.samples) for limit, rollouts in by_limit.items()]
    if plot is not None:
        draw(found, plot)
    return table(found)


def _at(limit: int, rollouts: Sequence[Rollout], samples: int) -> AtBudget:
    answers = answers_of(rollouts, samples=samples)
    lengths = [rollout.completion.finish_reason == "length" for rollout in rollouts]
    return AtBudget(
        budget=limit,
        reward=mean_interval(answers.rewards),
        cut=sum(lengths) / max(len(lengths), 1),
        at_k=figures_at_k(answers),
    )


def by_tries(found: AtBudget, kind: str) -> dict[int, Interval]:
    """One kind of figures by the number of tries.

    Args:
        found: with a budget.
        kind: "pass", "best" or "maj".
    """
    named = {name.partition("@"): told for name, told in found.at_k.items()}
    return {int(k): told for (name, _, k), told in named.items() if name == kind}


def table(found: Sequence[AtBudget]) -> str:
    """A line per budget, then a line per number of tries at the largest.

    Args:
        found: by budget, from small to large.
    """
    lines = [f"{'tokens':>8}  {'reward':<22}  longer"]
    lines += [f"{one.budget:>8}  {one.reward.text:<22}  {one.cut:.1%}" for one in found]
    lines += ["", f"{'tries':>8}  {'pass@k':<22}  maj@k"]
    votes = by_tries(found[-1], "maj")
    for k, passed in by_tries(found[-1], "pass").items():
        lines.append(f"{k:>8}  {passed.text:<22}  {votes[k].text}")
    return "\n".join(lines)


def draw(found: Sequence[AtBudget], path: Path) -> None:
    """Draw reward by budget, and pass@k and maj@k by tries.

    Args:
        found: by budget, from small to large.
        path: of the SVG file.
    """
    from oxrl_stats.plots import Curves, draw_curves  # matplotlib

    budgets = [one.budget for one in found]
    rewards = [one.reward for one in found]
    passed = by_tries(found[-1], "pass")
    tries = {"pass@k": [*passed.values()], "maj@k": [*by_tries(found[-1], "maj").values()]}
    left = Curves("most tokens of a response", budgets, {"reward": rewards})
    draw_curves([left, Curves("tries k", [*passed], tries)], path)
