"""`oxrl compare`: is one model better than another, and by how much?

Both answer the same prompts with the same seeds. A sampler of oxRL's draws each token by a hash of
seed and place, so that what chance does to one model it does to the other too, and most of it
cancels in the difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import numpy as np

from oxrl.commands.evaluator import open_evaluators
from oxrl.errors import ConfigError, DataError
from oxrl.runs.files import Json, json_safe, pretty_json
from oxrl_stats.evaluated import (
    Evaluated,
    answered,
    check_measure_the_same,
    is_file_of_answers,
    read_answers,
)
from oxrl_stats.intervals import (
    FEWEST,
    Interval,
    Numbers,
    all_scored,
    is_binary,
    mean_interval,
)
from oxrl_stats.paired import Chance, difference, holm, mcnemar, sign_flips

# A difference counts where chance alone would show it, or a larger one, in fewer cases.
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two models on the prompts of one file.

    first, second: mean rewards. gap: first minus second. equal: share of responses with the same
    reward. answers: p-value of McNemar's test, of one right or wrong answer per prompt, else None.
    adjusted: p-value where several comparisons are made. left_out: prompts without a score on one
    side.
    """

    data: str
    names: tuple[str, str]
    prompts: int
    samples: int
    left_out: int
    first: Interval
    second: Interval
    gap: Interval
    chance: Chance
    answers: float | None
    equal: float
    common_noise: bool
    adjusted: float | None = None

    @property
    def p(self) -> float:
        """The p-value that the verdict goes by."""
        return self.chance.p if self.adjusted is None else self.adjusted

    @property
    def better(self) -> str | None:
        """Name of the better model; None where the difference may be chance."""
        if self.p > LEVEL or self.gap.value == 0:
            return None
        return self.names[0] if self.gap.value > 0 else self.names[1]

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.better is None:
            return f"no difference is shown (p = {self.p:.3g})"
        return f"{self.better} is better by {abs(self.gap.value):.3f} (p = {self.p:.3g})"


def compared(data: str, first: Evaluated, second: Evaluated) -> Compared:
    """Compare two models on the prompts that both answered.

    Args:
        data: name of the file of prompts.
        first, second: of the same prompts, with as many samples of each.

    Raises:
        DataError: they answered other prompts, or another number of times, or fewer than 5 prompts
            have scores on both sides.
    """
    check_same_prompts(first, second)
    whole = all_scored(first.rewards) & all_scored(second.rewards)
    one, two = first.rewards[whole], second.rewards[whole]
    prompts, samples = one.shape
    if prompts < FEWEST:
        raise DataError(
            f"{data}: {prompts} prompts have a score on both sides, and a comparison needs "
            f"{FEWEST} or more"
        )
    gaps = one.mean(1) - two.mean(1)
    return Compared(
        data=data,
        names=(first.name, second.name),
        prompts=prompts,
        samples=samples,
        left_out=int((~whole).sum()),
        first=mean_interval(one),
        second=mean_interval(two),
        gap=difference(gaps),
        chance=sign_flips(gaps),
        answers=_of_answers(one, two),
        equal=float((one == two).mean()),
        common_noise=first.noise == second.noise,
    )


def _of_answers(one: Numbers, two: Numbers) -> float | None:
    """McNemar's p-value, where each prompt has one answer, which is right or wrong."""
    if one.shape[1] != 1 or not (is_binary(one) and is_binary(two)):
        return None
    return mcnemar(int((one > two).sum()), int((one < two).sum()))


def check_same_prompts(first: Evaluated, second: Evaluated) -> None:
    """Two models answered the same prompts as often.

    Args:
        first, second: what they answered.

    Raises:
        DataError: they did not; names the first prompt that differs.
    """
    one, two = first.rewards.shape, second.rewards.shape
    pairs = zip(first.uids, second.uids, first.questions, second.questions, strict=False)
    for place, (uid, other, question, asked) in enumerate(pairs):
        # Rows without a uid may be numbered by their place: then the texts tell.
        if uid != other or question != asked:
            raise DataError(
                f"{first.name} and {second.name} answered other prompts: prompt {place} is "
                f"{question[:60]!r} (uid {uid}) in one and {asked[:60]!r} (uid {other}) in the "
                "other; evaluate both on one file"
            )
    if one != two:
        raise DataError(
            f"{first.name} has {one[0]} prompts with {one[1]} samples each, and {second.name} "
            f"{two[0]} with {two[1]}: evaluate both alike"
        )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The best of several checkpoints, chosen on one half of the prompts and told on the other."""

    data: str
    chosen: str
    chosen_by: Interval
    told: Interval
    others: dict[str, Interval]

    @property
    def verdict(self) -> str:
        """One sentence."""
        return (
            f"{self.chosen} is the best on one half, {self.chosen_by.text}; on the other half, "
            f"which did not choose it, {self.told.text}"
        )


def selected(data: str, models: Sequence[Evaluated]) -> Selection:
    """Choose a model on one half of the prompts, and tell its reward on the other half.

    Args:
        data: name of the file of prompts.
        models: of the same prompts.
    """
    for other in models[1:]:
        check_same_prompts(models[0], other)
    places = np.arange(len(models[0].uids))
    chooses = np.array([_half(uid) for uid in models[0].uids], dtype=bool)
    halves = [places[chooses], places[~chooses]]
    if min(map(len, halves)) < FEWEST:
        raise DataError(
            f"{data}: {len(places)} prompts make halves of {len(halves[0])} and {len(halves[1])}, "
            f"and each needs {FEWEST} or more"
        )
    by = [_mean(one.rewards[halves[0]]) for one in models]
    told = [_mean(one.rewards[halves[1]]) for one in models]
    best = max(range(len(models)), key=lambda place: by[place].value)
    return Selection(
        data=data,
        chosen=models[best].name,
        chosen_by=by[best],
        told=told[best],
        others={one.name: found for one, found in zip(models, told, strict=True)},
    )


def _half(uid: str) -> bool:
    return sha256(uid.encode()).digest()[0] % 2 == 0


def _mean(rewards: Numbers) -> Interval:
    return mean_interval(rewards[all_scored(rewards)])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that `oxrl compare` found.

    control: a run that must not have improved, with which both models were compared; None without.
    """

    pairs: list[Compared]
    selections: list[Selection]
    control: str | None = None

    @property
    def json(self) -> Json:
        """The fields that `--out` writes."""
        pairs = [
            asdict(one) | {"p": one.p, "better": one.better, "verdict": one.verdict}
            for one in self.pairs
        ]
        return json_safe(asdict(self) | {"pairs": pairs})

    @property
    def rows(self) -> list[tuple[str, Interval]]:
        """The names and intervals that `--plot` draws."""
        found: list[tuple[str, Interval]] = []
        for one in self.pairs:
            found += zip(one.names, (one.first, one.second), strict=True)
            found.append(("difference", one.gap))
        for one in self.selections:
            found += one.others.items()
        return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of all models of a comparison; what is None is as the first model's run has it.

    fields: of every configuration, "section.field=value". data: files of prompts; none: the
    held-out one of the first. samples, temperature, seed: of the responses.
    """

    fields: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    samples: int | None = None
    temperature: float | None = None
    seed: int | None = None


def run_compare(
    names: Sequence[str],
    options: Options,
    *,
    control: str | None = None,
    select: bool = False,
    out: Path | None = None,
) -> Comparison:
    """`oxrl compare`: ask models the same prompts with the same seeds, and compare their rewards.

    Args:
        names: two models, each a run, a checkpoint, a model or a file of `oxrl eval --out`; with
            `select` two or more.
        options: how they are asked.
        control: a run that must not have improved, as one with permuted rewards.
        select: choose the best on one half of the prompts, and tell it on the other.
        out: write what was found there, as JSON.

    Raises:
        ConfigError, DataError: they cannot be compared; says what to do.
    """
    _check_names(names, options, control, select)
    every = [*names, *([control] if control else [])]
    by_file = ask(every, options)
    pairs: list[Compared] = []
    selections: list[Selection] = []
    for data, models in by_file.items():
        if select:
            selections.append(selected(data, models))
        else:
            pairs += [compared(data, one, two) for one, two in combinations(models, 2)]
    if len(by_file) > 1 or control:
        adjusted = holm([one.chance.p for one in pairs])
        pairs = [replace(one, adjusted=p) for one, p in zip(pairs, adjusted, strict=True)]
    found = Comparison(pairs=pairs, selections=selections, control=control)
    if out is not None:
        out.write_text(pretty_json(found.json), "utf-8")
    return found


def _check_names(names: Sequence[str], options: Options, control: str | None, select: bool) -> None:
    if select and len(names) < 2:
        raise ConfigError(f"--select chooses among checkpoints, and {len(names)} is named")
    if not select and len(names) != 2:
        raise ConfigError(f"compare takes two models, not {len(names)}; --select takes more")
    if select and control:
        raise ConfigError("--control is for a comparison of two models; leave out --select")
    if not select and names[0] == names[1] and options.samples is None:
        way = "--samples K to see that equal seeds give equal answers"
        what = "file" if is_file_of_answers(names[0]) else f"model, or write {way}"
        raise ConfigError(f"{names[0]} is compared with itself; name another {what}")
    files = [name for name in (*names, *([control] if control else [])) if is_file_of_answers(name)]
    if files and options != Options():
        raise ConfigError(
            f"{files[0]} holds answers that were given: --data, --samples, --temperature and "
            "fields of the configuration are for models that answer now"
        )


def ask(names: Sequence[str], options: Options) -> dict[str, list[Evaluated]]:
    """Answers of every model to the prompts of every file, by the name of the file.

    Args:
        names: runs, checkpoints and models, or files of answers.
        options: how they are asked.

    Raises:
        ConfigError: files of answers and models are mixed, or two runs measure different things.
    """
    files = [name for name in names if is_file_of_answers(name)]
    if files:
        if len(files) < len(names):
            other = next(name for name in names if name not in files)
            raise ConfigError(
                f"{files[0]} is a file of answers and {other} a model: write its answers with "
                f"`oxrl eval {other} --out FILE`, and compare two files"
            )
        return {"answers": [read_answers(Path(name)) for name in names]}
    given = [f"data.eval={json.dumps(path)}" for path in options.data[:1]]
    with ExitStack() as pins:
        models = open_evaluators(names, (*given, *options.fields), pins)
        check_measure_the_same(models)
        asked = models[0].asked(samples=options.samples, temperature=options.temperature)
        if options.seed is not None:
            asked = replace(asked, seed=options.seed)
        return {
            path: [answered(model, replace(asked, path=path)) for model in models]
            for path in options.data or (asked.path,)
        }


def table(found: Comparison) -> str:
    """The comparison in lines of text.

    Args:
        found: by `run_compare`.
    """
    lines: list[str] = []
    for one in found.pairs:
        lines += _told(one)
    for one in found.selections:
        lines += [one.data, f"  {one.verdict}"]
        lines += [f"  {name:<40} {told.text}" for name, told in one.others.items()]
    if found.control:
        lines.append(control_verdict(found))
    return "\n".join(lines)


def _told(one: Compared) -> list[str]:
    width = max(len(name) for name in (*one.names, "difference"))
    noise = "yes" if one.common_noise else "no"
    left_out = f", {one.left_out} left out without a score" if one.left_out else ""
    chances = f"p = {one.chance.p:.3g}, mid-p = {one.chance.mid_p:.3g}"
    if one.answers is not None:
        chances += f", McNemar p = {one.answers:.3g}"
    if one.adjusted is not None:
        chances += f", adjusted p = {one.adjusted:.3g} (Holm)"
    return [
        f"{one.data}: {one.prompts} prompts x {one.samples} samples{left_out}; common noise: "
        f"{noise}, equal rewards {one.equal:.3f}",
        f"  {one.names[0]:<{width}}  {one.first.text}",
        f"  {one.names[1]:<{width}}  {one.second.text}",
        f"  {'difference':<{width}}  {_signed(one.gap)}  {chances}",
        f"  {one.verdict}",
    ]


def _signed(found: Interval) -> str:
    return f"{found.value:+z.3f} [{found.low:+z.3f}, {found.high:+z.3f}]"


def control_verdict(found: Comparison) -> str:
    """One sentence: is what was learned of the reward, or would the control have learned it too?

    Args:
        found: of a model, one before it, and the control, in this order in every file.
    """
    told: list[str] = []
    for place in range(0, len(found.pairs), 3):
        trained, of_control, left = found.pairs[place : place + 3]
        # `left` is the model before training, minus the control.
        moved = Interval(-left.gap.value, -left.gap.high, -left.gap.low)
        ends = _signed(moved)
        if left.better == found.control:
            text = f"the control improved too, by {ends}: what it shows is not due to the reward"
        elif trained.better == trained.names[0] and of_control.better == trained.names[0]:
            text = f"the control did not improve ({ends}): the reward is what it learned from"
        else:
            text = f"the control did not improve ({ends}), and neither is an improvement shown"
        told.append(f"{trained.data}: {text}")
    return "\n".join(told)
