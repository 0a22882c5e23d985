"""`oxrl score`: what another reward says of a run's samples, and what that would have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path

import numpy as np

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.reward_pools import build_rewards
from oxrl.config import Config
from oxrl.config.checks.usual import check_reward
from oxrl.config.given import apply_overrides
from oxrl.config.load import checked
from oxrl.config.load_evaluation import EVALUATED
from oxrl.config.source import Problem, read_source
from oxrl.errors import ConfigError, DataError
from oxrl.recipes.scored_answers import mean
from oxrl.rewards.pools import GroupScorer
from oxrl.rollouts.episode_scores import EpisodeScorer
from oxrl.rollouts.stored import Line, stored_groups
from oxrl.runs.checkpoints import is_run
from oxrl.runs.files import encode_line
from oxrl.runs.waiting import Patience
from oxrl.types import Score
from oxrl_stats.intervals import Interval
from oxrl_stats.paired import difference

# Groups that the reward gets at once: enough for its workers, few enough to hold.
AT_ONCE = 64
# What is no difference: rounding.
EQUAL = 1e-9
SHOWN = 5  # samples that changed most
OUTCOMES = ("ok", "timeout", "error", "invalid")


@dataclass(frozen=True)
class Rescored:
    """One sample with both of its scores.

    place: its rank in its group, 1 the best, equal ones alike; None without a score. now_place: by
    the new score.
    """

    line: Line
    score: Score
    place: int | None
    now_place: int | None

    @property
    def before(self) -> float | None:
        """The recorded reward."""
        return self.line["reward"]

    @property
    def difference(self) -> float | None:
        """New minus recorded reward; None where one of them is missing."""
        if self.before is None or self.score.value is None:
            return None
        return self.score.value - self.before


@dataclass
class Comparison:
    """The changes that another reward would have made, over all samples of a run."""

    samples: list[Rescored] = field(default_factory=list)
    groups: int = 0
    other_order: int = 0  # groups in which two responses change places
    other_best: int = 0  # groups in which another response is the best
    teaching: int = 0  # groups whose rewards differ
    now_teaching: int = 0
    pairs: int = 0  # of responses that both rewards tell apart
    turned: int = 0  # of these, in the other order

    def add(self, group: Sequence[Rescored]) -> None:
        """Take a group in."""
        self.samples += group
        self.groups += 1
        known = [one for one in group if one.difference is not None]
        before = [float(one.line["reward"]) for one in known]
        now = [float(one.score.value or 0.0) for one in known]
        for one, other in combinations(zip(before, now, strict=True), 2):
            was = _sign(one[0] - other[0])
            is_now = _sign(one[1] - other[1])
            self.pairs += bool(was and is_now)
            self.turned += was * is_now < 0
        places = ranks(before)
        now_places = ranks(now)
        self.other_order += places != now_places
        self.other_best += [place == 1 for place in places] != [place == 1 for place in now_places]
        self.teaching += any(place != 1 for place in places)
        self.now_teaching += any(place != 1 for place in now_places)


def _sign(difference: float) -> int:
    if abs(difference) <= EQUAL:
        return 0
    return 1 if difference > 0 else -1


def ranks(rewards: Sequence[float | None]) -> list[int | None]:
    """The rank of every reward, 1 for the largest, equal ones alike; None where one is None."""
    known = [reward for reward in rewards if reward is not None]
    found: list[int | None] = []
    for reward in rewards:
        if reward is None:
            found.append(None)
        else:
            found.append(1 + sum(other - reward > EQUAL for other in known))
    return found


def run_score(run: str | Path, overrides: Sequence[str], out: Path | None = None) -> Comparison:
    """`oxrl score`: score the recorded samples of a run with another reward.

    Args:
        run: its directory; nothing in it is changed.
        overrides: of `reward`; `reward.name` or `reward.parts` take the place of the run's,
            anything else changes those.
        out: write one JSON line per sample there.

    Raises:
        ConfigError: no such run, or no such reward.
        DataError: the run has no samples.
        RewardError: the reward cannot be loaded.
    """
    folder = Path(run)
    if not is_run(folder):
        raise ConfigError(f"{folder} is no run directory: there is no config.yaml of a run in it")
    samples = folder / "samples.jsonl"
    if not samples.is_file():
        raise DataError(f"{samples} is not there: only reinforcement learning records samples")
    cfg = load_reward_config(folder / "config.yaml", overrides)
    found = Comparison()
    with closing(build_rewards(Assembly(cfg))) as pool:
        pool.start()
        scorer: GroupScorer = EpisodeScorer(pool) if cfg.environment.name else pool
        groups = stored_groups(samples, cfg.rollout.n_samples)
        while stored := list(islice(groups, AT_ONCE)):
            scores = scorer.score([one.group for one in stored], Patience())
            for one, new in zip(stored, scores, strict=True):
                places = ranks([line["reward"] for line in one.lines])
                now_places = ranks([score.value for score in new])
                found.add(list(map(Rescored, one.lines, new, places, now_places)))
    if not found.samples:
        raise DataError(f"{samples} holds no sample yet")
    if out is not None:
        out.write_bytes(b"".join(encode_line(sample_fields(one)) for one in found.samples))
    return found


def load_reward_config(path: Path | str, overrides: Sequence[str]) -> Config:
    """The configuration of a run with another reward, to score what was sampled.

    Args:
        path: of the run.
        overrides: of `reward`; a name or parts take the place of the run's own, with its options.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
    source = read_source(path)
    if any(override.startswith(("reward.name=", "reward.parts=")) for override in overrides):
        for reward_field in ("reward.name", "reward.parts", "reward.options"):
            source.values.pop(reward_field, None)
    for override in overrides:
        if not override.removeprefix("~").startswith("reward."):
            source.wrong(
                override.partition("=")[0],
                "is not what scores: only reward.FIELD=VALUE can be given here",
                f"override '{override}'",
            )
    apply_overrides(source, overrides)
    return checked(source, _reward_problems, EVALUATED)


def _reward_problems(cfg: Config) -> Iterator[Problem]:
    if not cfg.reward.exists:
        yield Problem(
            "reward.name", "is required: the run has no reward of its own; write reward.name=NAME"
        )
    yield from check_reward(cfg)


def sample_fields(one: Rescored) -> dict[str, object]:
    """A line of the file that `--out` names."""
    line = one.line
    fields: dict[str, object] = {name: line[name] for name in ("uid", "draw", "sample", "step")}
    fields |= {
        "reward": one.before,
        "status": line["status"],
        "rank": one.place,
        "new_reward": one.score.value,
        "new_status": one.score.status,
        "new_reason": one.score.reason,
        "new_rank": one.now_place,
        "difference": one.difference,
    }
    if one.score.parts:
        fields["new_parts"] = dict(one.score.parts)
    if one.score.statuses:
        fields["new_part_statuses"] = dict(one.score.statuses)
    return fields


def mean_difference(samples: Sequence[Rescored]) -> Interval:
    """New minus recorded reward, over groups.

    Args:
        samples: those with both rewards.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for one in samples:
        place = (one.line["step"], one.line["draw"])
        groups.setdefault(place, []).append(one.difference or 0.0)
    return difference(np.array([mean(values) for values in groups.values()]))


def report(found: Comparison) -> str:
    """The comparison in lines of text."""
    samples = found.samples
    both = [one for one in samples if one.difference is not None]
    scored = [float(one.line["reward"]) for one in both]
    rescored = [float(one.score.value or 0.0) for one in both]
    differences = [abs(one.difference or 0.0) for one in both]
    changed = [value for value in differences if value > EQUAL]
    lines = [
        f"{len(samples)} samples in {found.groups} groups",
        "",
        f"{'':<24}{'recorded':>14}{'now':>14}",
    ]
    for outcome in OUTCOMES:
        before = sum(one.line["status"] == outcome for one in samples)
        now = sum(one.score.status == outcome for one in samples)
        if before or now or outcome == "ok":
            lines.append(f"{outcome:<24}{before:>14}{now:>14}")
    lines.append(f"{'mean of those with both':<24}{mean(scored):>14.6g}{mean(rescored):>14.6g}")
    if both:
        lines.append(f"{'mean difference':<24}{mean_difference(both).text:>28}")
    lines.append(f"{'groups that differ':<24}{found.teaching:>14}{found.now_teaching:>14}")
    lines += [
        "",
        f"{len(changed)} of {len(both)} samples have another reward, by "
        f"{mean(changed):.6g} on average"
        if changed
        else f"none of {len(both)} samples has another reward",
        f"{found.other_order} of {found.groups} groups rank their responses otherwise, "
        f"{found.other_best} have another best one",
        f"{found.turned} of {found.pairs} pairs that both tell apart are in the other order",
    ]
    return "\n".join([*lines, *_largest(samples)])


def _largest(samples: Sequence[Rescored]) -> list[str]:
    """The samples whose reward changed most, and the first ones that lost or gained one."""
    known = [one for one in samples if abs(one.difference or 0.0) > EQUAL]
    known.sort(key=lambda one: -abs(one.difference or 0.0))
    other = [one for one in samples if (one.before is None) != (one.score.value is None)]
    told: list[str] = []
    for one in (*known[:SHOWN], *other[:SHOWN]):
        line = one.line
        before = line["status"] if one.before is None else f"{one.before:g}"
        now = one.score.status if one.score.value is None else f"{one.score.value:g}"
        place = f"step {line['step']} draw {line['draw']} sample {line['sample']}"
        reason = f" ({one.score.reason[:120]})" if one.score.reason else ""
        told.append(f"  {place}: {before} -> {now}{reason}")
    return ["", "largest changes:", *told] if told else []
