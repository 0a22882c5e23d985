"""Whether a run learns at all: what goes on without an error and can teach nothing gets a name.

A warning is told once per cause, when it has held for PATIENCE optimizer steps in a row. Nothing
here is computed for a run but from its own lines of metrics, and a resumed run reads the lines that
it has, so that it neither repeats a warning nor begins to count anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from oxrl.runs.files import Json
from oxrl.types import Metrics

log = logging.getLogger(__name__)

PATIENCE = 3  # optimizer steps
HALF = 0.5  # of the responses
NO_GRADIENT = 1e-12
# Nats below the entropy of a uniform distribution: what logits of a standard deviation of 0.1 are.
UNIFORM = 0.005


class Sign(NamedTuple):
    """One way of learning nothing.

    holds: whether the line of a step shows it, given the size of the vocabulary. advice: what it
    means, and what to do. threshold: when it is told, in words. reads: the metrics that show it.
    """

    name: str
    holds: Callable[[Metrics, int], bool]
    advice: str
    threshold: str
    reads: tuple[str, ...]


def all_equal(line: Metrics, vocabulary: int) -> bool:
    """Every reward of the step is the same number, and not 0."""
    rewards = _rewards(line)
    return rewards is not None and rewards[0] == rewards[1] != 0 and not _parts_differ(line)


def all_zero(line: Metrics, vocabulary: int) -> bool:
    """Every reward of the step is 0."""
    return _rewards(line) == (0.0, 0.0) and not _parts_differ(line)


def failing(line: Metrics, vocabulary: int) -> bool:
    """Half or more of the responses have no reward."""
    return line.get("reward/failed_frac", 0.0) >= HALF


def no_gradient(line: Metrics, vocabulary: int) -> bool:
    """The step was taken with a gradient of 0, though rewards differ or there are none."""
    rewards = _rewards(line)
    equal = rewards is not None and rewards[0] == rewards[1]
    explained = equal and not _parts_differ(line)
    taken = not line.get("update/skipped") and not line.get("data/empty_steps")
    norm = line.get("update/grad_norm", math.nan)
    return taken and not explained and norm <= NO_GRADIENT


def uniform(line: Metrics, vocabulary: int) -> bool:
    """The policy gives every token of the vocabulary the same probability."""
    entropy = line.get("policy/entropy", math.nan)
    return vocabulary > 1 and entropy > math.log(vocabulary) - UNIFORM


def _parts_differ(line: Metrics) -> bool:
    """Whether responses are told apart by parts of the reward whose sums are equal."""
    return line.get("reward/zero_variance_groups", 1.0) < 1


def _rewards(line: Metrics) -> tuple[float, float] | None:
    """The smallest and the largest reward of a step; None where nothing was scored."""
    least = line.get("reward/min", math.nan)
    most = line.get("reward/max", math.nan)
    return None if math.isnan(least) or math.isnan(most) else (least, most)


SIGNS = (
    Sign(
        "zero-reward",
        all_zero,
        "every reward is 0, so no response is better than another. See samples.jsonl: do responses "
        "have the form that the reward reads, and do they end (data/truncated_frac, "
        "rollout.max_tokens)? Easier prompts, supervised training before, or a reward for parts of "
        "the way give it something to start from",
        f"every reward is 0, {PATIENCE} steps in a row",
        ("reward/min", "reward/max"),
    ),
    Sign(
        "constant-reward",
        all_equal,
        "every reward is the same number, so no response is better than another. If it is the "
        "best there is, the task is solved: take harder prompts. Otherwise the reward does not "
        "look at the response: try it on a right and on a wrong one",
        f"every reward is the same number, {PATIENCE} steps in a row",
        ("reward/min", "reward/max"),
    ),
    Sign(
        "failing-rewards",
        failing,
        "half or more of the responses have no reward, and nothing is learned from those. The "
        "reason of each is in samples.jsonl; reward.timeout_s and reward.workers help where they "
        "are late",
        f"half or more of the responses have no reward, {PATIENCE} steps in a row",
        ("reward/failed_frac",),
    ),
    Sign(
        "zero-gradient",
        no_gradient,
        "the gradient is 0, so the weights stay as they are. In reinforcement learning the rewards "
        "within each group are equal (reward/zero_variance_groups): larger rollout.n_samples, "
        "prompts of another difficulty, or train.alg_name: dapo, which samples until they differ. "
        "Otherwise look at the numbers of the loss (train.beta, weights that are 0)",
        f"update/grad_norm is 0, and rewards differ, {PATIENCE} steps in a row",
        ("update/grad_norm",),
    ),
    Sign(
        "uniform-entropy",
        uniform,
        "the policy gives every token the same probability, so its responses are noise. Are the "
        "weights of model.name trained ones, and rollout.temperature near 1? If it became so, "
        "lower train.lr and train.entropy_coeff and start from an earlier checkpoint",
        f"policy/entropy is that of the uniform distribution, {PATIENCE} steps in a row",
        ("policy/entropy",),
    ),
)


class Health:
    """Looks at the line of every optimizer step.

    Args:
        vocabulary: tokens of the model; 0 where that is not known.
    """

    def __init__(self, vocabulary: int = 0) -> None:
        self._vocabulary = vocabulary
        self._in_a_row = {sign.name: 0 for sign in SIGNS}
        self._told: set[str] = set()

    def look(self, line: Metrics) -> None:
        """Warn of what the line of a step and those before it show."""
        for sign in self.new(line):
            log.warning("%s, %d steps in a row: %s", sign.name, PATIENCE, sign.advice)

    def remember(self, records: Iterable[Json]) -> None:
        """Take over the lines that a run recorded before it was resumed; nothing is told again."""
        for record in records:
            self.new(_numbers(record))

    def new(self, line: Metrics) -> list[Sign]:
        """The signs that have held long enough with this line, and were not told before."""
        found: list[Sign] = []
        for sign in SIGNS:
            holds = sign.holds(line, self._vocabulary)
            self._in_a_row[sign.name] = self._in_a_row[sign.name] + 1 if holds else 0
            if self._in_a_row[sign.name] >= PATIENCE and sign.name not in self._told:
                self._told.add(sign.name)
                found.append(sign)
        return found


class Verdict(NamedTuple):
    """What a check says of a whole run.

    state: ok, warning (since `step`), or unknown where its numbers were never measured.
    """

    name: str
    state: str
    step: int | None
    threshold: str
    advice: str


def verdicts(records: Iterable[Json], vocabulary: int = 0) -> list[Verdict]:
    """Every check on the lines of a run, in the order of SIGNS.

    Args:
        records: lines of metrics.jsonl.
        vocabulary: tokens of the model; 0 where that is not known.
    """
    health = Health(vocabulary)
    since: dict[str, int] = {}
    measured: set[str] = set()
    for record in records:
        line = _numbers(record)
        measured.update(line)
        for sign in health.new(line):
            since[sign.name] = int(line["step"])
    found: list[Verdict] = []
    for sign in SIGNS:
        known = measured.issuperset(sign.reads)
        state = "warning" if sign.name in since else "ok" if known else "unknown"
        step = since.get(sign.name)
        found.append(Verdict(sign.name, state, step, sign.threshold, sign.advice))
    return found


def _numbers(record: Mapping[str, object]) -> Metrics:
    """The numbers of a line as it was read, those by name ("nan") included."""
    return {name: float(value) for name, value in record.items()}  # pyright: ignore
