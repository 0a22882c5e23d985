"""`oxrl score`: another reward judges the samples of a run; the report says what that changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oxrl.commands.scored_again import ScoredAgain, score_again
from oxrl.recipes.scored_answers import mean
from oxrl.runs.files import encode_line
from oxrl.types import Score
from oxrl_stats.intervals import Numbers
from oxrl_stats.paired import difference

# Less than that is no difference: rounding.
EQUAL = 1e-9
SHOWN = 5  # samples that changed most
OUTCOMES = ("ok", "timeout", "error", "invalid")


class Changes(NamedTuple):
    """Counts of what another reward changes, over groups of responses to one prompt.

    other_order: groups in which two responses change places. other_best: in which another response
    is the best. teaching, now_teaching: whose rewards differ, before and now. pairs: of responses
    that both rewards tell apart. turned: of these, in the other order.
    """

    other_order: int
    other_best: int
    teaching: int
    now_teaching: int
    pairs: int
    turned: int


class BothRewards:
    """All samples of a run with both of their rewards, group after group.

    Args:
        groups: as the run recorded them, with their new scores.
    """

    def __init__(self, groups: Iterable[ScoredAgain]) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.scores: list[Score] = []
        self.groups: list[slice] = []
        for lines, scores in groups:
            first = len(self.lines)
            self.groups.append(slice(first, first + len(lines)))
            self.lines += lines
            self.scores += scores
        # [samples], NaN where there is none.
        self.before = np.array([line["reward"] for line in self.lines], dtype=float)
        self.now = np.array([score.value for score in self.scores], dtype=float)
        self.differences = self.now - self.before

    @property
    def changes(self) -> Changes:
        """The counts over all groups."""
        of_groups = [changes(self.before[group], self.now[group]) for group in self.groups]
        return Changes(*np.sum(of_groups, axis=0).tolist())


def order(rewards: Numbers) -> Numbers:
    """The order of every two responses by their rewards.

    Args:
        rewards: [n], NaN where there is none.

    Returns:
        [n, n], 1 where that of the row is larger, -1 where that of the column is, 0 where they are
        equal or one is missing.
    """
    gaps = rewards[:, None] - rewards
    return np.where(np.abs(gaps) > EQUAL, np.sign(gaps), 0.0)


def ranks(rewards: Numbers) -> list[int | None]:
    """The rank of every reward, 1 for the largest, equal ones alike.

    Args:
        rewards: [n], NaN where there is none.

    Returns:
        None where there is no reward.
    """
    places = 1 + (order(rewards) < 0).sum(1)
    return [
        None if np.isnan(reward) else int(place)
        for reward, place in zip(rewards, places, strict=True)
    ]


def changes(before: Numbers, now: Numbers) -> Changes:
    """Count what changes in a group.

    Args:
        before, now: [n] rewards; responses that lack one of them are left out.
    """
    known = ~np.isnan(now - before)
    was = order(before[known])
    is_now = order(now[known])
    places = (was < 0).sum(1)
    now_places = (is_now < 0).sum(1)
    told_apart = was * is_now
    return Changes(
        other_order=int((places != now_places).any()),
        other_best=int(((places == 0) != (now_places == 0)).any()),
        teaching=int(was.any()),
        now_teaching=int(is_now.any()),
        pairs=int(np.count_nonzero(told_apart)) // 2,
        turned=int((told_apart < 0).sum()) // 2,
    )


def run_score(run: str | Path, overrides: Sequence[str], out: Path | None = None) -> BothRewards:
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
    found = BothRewards(score_again(run, overrides))
    if out is not None:
        out.write_bytes(b"".join(map(encode_line, sample_fields(found))))
    return found


def sample_fields(found: BothRewards) -> Iterator[Mapping[str, object]]:
    """Yield the lines of the file that `--out` names.

    Args:
        found: by `run_score`.
    """
    for group in found.groups:
        places = ranks(found.before[group])
        now_places = ranks(found.now[group])
        of_group = zip(found.lines[group], found.scores[group], places, now_places, strict=True)
        for line, score, place, now_place in of_group:
            fields = {name: line[name] for name in ("uid", "draw", "sample", "step")}
            known = place is not None and score.value is not None
            fields |= {
                "reward": line["reward"],
                "status": line["status"],
                "rank": place,
                "new_reward": score.value,
                "new_status": score.status,
                "new_reason": score.reason,
                "new_rank": now_place,
                "difference": score.value - line["reward"] if known else None,
            }
            if score.parts:
                fields["new_parts"] = dict(score.parts)
            if score.statuses:
                fields["new_part_statuses"] = dict(score.statuses)
            yield fields


def report(found: BothRewards) -> str:
    """The comparison in lines of text.

    Args:
        found: by `run_score`.
    """
    both = ~np.isnan(found.differences)
    sizes = np.abs(found.differences[both])
    changed = sizes[sizes > EQUAL]
    counts = found.changes
    groups = len(found.groups)
    lines = [
        f"{len(found.lines)} samples in {groups} groups",
        "",
        f"{'':<24}{'recorded':>14}{'now':>14}",
    ]
    for outcome in OUTCOMES:
        before = sum(line["status"] == outcome for line in found.lines)
        now = sum(score.status == outcome for score in found.scores)
        if before or now or outcome == "ok":
            lines.append(f"{outcome:<24}{before:>14}{now:>14}")
    if both.any():
        before = found.before[both].mean()
        now = found.now[both].mean()
        lines.append(f"{'mean of those with both':<24}{before:>14.6g}{now:>14.6g}")
        lines.append(f"{'mean difference':<24}{_over_prompts(found):>28}")
    lines += [
        f"{'groups that differ':<24}{counts.teaching:>14}{counts.now_teaching:>14}",
        "",
        f"{len(changed)} of {len(sizes)} samples have another reward, by "
        f"{changed.mean():.6g} on average"
        if len(changed)
        else f"none of {len(sizes)} samples has another reward",
        f"{counts.other_order} of {groups} groups rank their responses otherwise, "
        f"{counts.other_best} have another best one",
        f"{counts.turned} of {counts.pairs} pairs that both tell apart are in the other order",
    ]
    return "\n".join([*lines, *_largest(found)])


def _over_prompts(found: BothRewards) -> str:
    """New minus recorded reward with its interval: a prompt of a step is one observation."""
    groups: dict[tuple[int, int], list[float]] = {}
    for line, gap in zip(found.lines, found.differences, strict=True):
        if not np.isnan(gap):
            groups.setdefault((line["step"], line["draw"]), []).append(float(gap))
    return difference(np.array([mean(gaps) for gaps in groups.values()])).text


def _largest(found: BothRewards) -> list[str]:
    """The samples whose reward changed most, and the first ones that lost or gained one."""
    sizes = np.nan_to_num(np.abs(found.differences))
    changed = [place for place in np.argsort(-sizes, kind="stable") if sizes[place] > EQUAL]
    other = np.flatnonzero(np.isnan(found.before) != np.isnan(found.now))
    told: list[str] = []
    for place in (*changed[:SHOWN], *other[:SHOWN]):
        line = found.lines[place]
        score = found.scores[place]
        reward = found.before[place]
        before = line["status"] if np.isnan(reward) else f"{reward:g}"
        now = score.status if score.value is None else f"{score.value:g}"
        reason = f" ({score.reason[:120]})" if score.reason else ""
        where = f"step {line['step']} draw {line['draw']} sample {line['sample']}"
        told.append(f"  {where}: {before} -> {now}{reason}")
    return ["", "largest changes:", *told] if told else []
