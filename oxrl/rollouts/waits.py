"""Measures of sampling that goes on while a batch trains: the age of tokens, the share of slots in
use, and who waited for whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from oxrl.types import Metrics, Request, Rollouts
from oxrl.usercode.messages import Json

ROUNDS = "rollout/rounds"


class Waits:
    """Seconds that the trainer and the samplers waited for each other, for the line of a step.

    The seconds of a sampling that still goes on belong to a later line.
    """

    def __init__(self) -> None:
        self._trainer_s = 0.0
        self._samplers_s = 0.0
        # Since when nothing is sampled; None: before the first time, and while something is.
        self._idle_since: float | None = None

    @contextmanager
    def of_trainer(self) -> Iterator[None]:
        """Count the seconds inside, in which the trainer can do nothing but wait for samples."""
        start = monotonic()
        try:
            yield
        finally:
            self._trainer_s += monotonic() - start

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the seconds since the last time inside, in which nothing was sampled."""
        if self._idle_since is not None:
            self._samplers_s += monotonic() - self._idle_since
            self._idle_since = None
        try:
            yield
        finally:
            self._idle_since = monotonic()

    def counters(self) -> Metrics:
        """`time/..._wait_s` since the last call."""
        found = {
            "time/trainer_wait_s": self._trainer_s,
            "time/samplers_wait_s": self._samplers_s,
        }
        self._trainer_s = 0.0
        self._samplers_s = 0.0
        return found


def lag_metrics(rollouts: Rollouts, groups: tuple[int, ...], *, version: int) -> Metrics:
    """`data/...`: the versions of the weights that sampled the rows of a step.

    Args:
        rollouts: of the step.
        groups: whose rows are trained on, those with a score.
        version: of the weights being trained.

    Returns:
        Shares of rows by their lag, that of the oldest token; the oldest and the newest version;
        the share of rows that have several. Nothing without rows.
    """
    sampled: list[set[int]] = []
    for rollout in rollouts:
        versions = {v for run in rollout.completion.segments for v in run.versions}
        if versions and rollout.group_id in groups and rollout.score.value is not None:
            sampled.append(versions)
    if not sampled:
        return {}
    lags = Counter(version - min(versions) for versions in sampled)
    found = {f"data/lag_{lag}_frac": lags[lag] / len(sampled) for lag in sorted(lags)}
    found["data/version_oldest"] = float(min(map(min, sampled)))
    found["data/version_newest"] = float(max(map(max, sampled)))
    found["data/mixed_versions_frac"] = sum(len(one) > 1 for one in sampled) / len(sampled)
    return found


def busy_metrics(counters: Metrics, slots: int) -> Metrics:
    """`rollout/busy_frac`: rows decoded, as a share of the slots in the rounds that passed.

    Args:
        counters: of the sampler since the step before.
        slots: of all samplers.

    Returns:
        Nothing where no round passed, or the sampler does not say how many rows it decoded.
    """
    rounds = counters.get(ROUNDS, 0.0)
    if not rounds or not slots or "rollout/mean_active_rows" not in counters:
        return {}
    decoded = counters["rollout/mean_active_rows"] * counters["rollout/decode_steps"]
    return {"rollout/busy_frac": decoded / (slots * rounds)}


def tokens_read_again(state: Json, requests: Mapping[str, Request]) -> int:
    """Count the tokens of rows in slots that new weights make a sampler read again.

    Args:
        state: of the sampler, or of each of its processes.
        requests: by id.

    Returns:
        All tokens but the last of every row; 0 of samplers that keep no rows in slots of their own,
        or that keep what older weights computed.
    """
    found = 0
    for part in state.get("workers", [state]):
        lanes = () if part.get("kept") else part.get("rows", ())
        for line in (line for lane in lanes for line in lane):
            prompt = requests[line["id"]].prompt.token_ids
            found += len(prompt) + len(line["token_ids"]) - 1
    return found
