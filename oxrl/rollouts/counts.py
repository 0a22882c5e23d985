"""Every sample is accounted for: dispatched = trained + dropped for a reason + in flight."""

from __future__ import annotations

from collections.abc import Mapping

from oxrl.errors import InvariantError
from oxrl.types import Metrics


def count_samples(
    counts: dict[str, int],
    *,
    dispatched: int,
    in_flight: int,
    trained: int,
    dropped: Mapping[str, int],
) -> Metrics:
    """Enter what became of one rollout step's samples into the counts of the whole run.

    Args:
        counts: of the run so far, changed in place: dispatched, trained, dropped_<reason>.
        dispatched: samples sent to the sampler since the step before.
        in_flight: samples that are not handed over yet.
        trained: samples of this step that are trained on.
        dropped: how many others of it, by reason.

    Returns:
        `samples/<name>` of every count, and of what is in flight.

    Raises:
        InvariantError: a sample was lost, or counted twice.
    """
    entries = {"dispatched": dispatched, "trained": trained}
    entries |= {f"dropped_{reason}": number for reason, number in dropped.items()}
    for name, number in entries.items():
        counts[name] = counts.get(name, 0) + number
    everything = counts | {"in_flight": in_flight}
    accounted = sum(everything.values()) - counts["dispatched"]
    if accounted != counts["dispatched"]:
        raise InvariantError(
            f"{counts['dispatched']} samples were dispatched but {accounted} are accounted for: "
            f"{everything}"
        )
    return {f"samples/{name}": float(value) for name, value in everything.items()}
