"""Parking: what a sampler has in flight as JSON, and the way back into a sampler.

A state holds the rows in their places with what was sampled of each, the order of those that wait,
and the round. It holds no keys and values: a sampler that is restored computes them anew, as every
sampler does after a delivery. So from the next delivery on it goes on to the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from oxrl.engines.sample import Responses, RolloutEngine
from oxrl.errors import EngineError
from oxrl.tables.columns import NOTHING_MORE, Columns
from oxrl.types import Entries, Request, TokenRun
from oxrl.usercode.messages import Json, fields_of, segment_of

if TYPE_CHECKING:
    # A process that samples imports the classes of models in its own way, and reads this before.
    from oxrl.engines.sample.rows import Recorded, Slots


class ParkingEngine(RolloutEngine, Protocol):
    """A rollout engine that counts its rounds, and whose requests can be parked in between."""

    # Decode rounds so far; whoever goes by them may set it.
    round: int

    def poll(self, deadline_s: float, until: float = inf) -> Responses:
        """Sample until at least one request finishes, nothing is left, or a round is reached.

        Args:
            deadline_s: seconds to wait for a finished request.
            until: the round.

        Returns:
            All that have finished since the last call, in any order; empty: nothing is left, or it
            is that round.

        Raises:
            DeadlineError: neither within `deadline_s`; everything stays in flight.
        """
        ...

    def state(self) -> Json:
        """Say what is in flight, which stays as it is.

        Returns:
            Ids of requests, what was sampled of them, and the round, as JSON has them.

        Raises:
            EngineError: something has finished that was not polled.
        """
        ...

    def restore(self, state: Json, requests: Mapping[str, Request]) -> None:
        """Drop what is in flight, and take in what a state has, in its places.

        After the next delivery, what is sampled is to the byte what the engine that gave the state
        samples after it.

        Args:
            state: of an engine of the same kind with as many rows; it may have been JSON meanwhile.
            requests: by their ids, as they were submitted; further ones are ignored.

        Raises:
            EngineError: the state has requests that are not in `requests`, more rows than there are
                here, or other columns. Everything stays as it was.
        """
        ...


class ParkedRows(NamedTuple):
    """Rows that are decoded together, in the order of their slots, and what was sampled of each."""

    requests: list[Request]
    sampled: list[TokenRun]

    def enter(self, slots: Slots) -> None:
        """Put the rows into free slots, behind those that are there.

        Args:
            slots: with room for them.
        """
        first = len(slots.requests)
        slots.occupy(self.requests)
        for slot, run in enumerate(self.sampled, first):
            count = len(run.token_ids)
            slots.count[slot] = count
            slots.last[slot] = run.token_ids[-1]
            known = len(slots.requests[slot].prefix.token_ids)
            for name, entries in run.per_token.items():
                own = slots.sampled[name]
                if name in slots.lists:
                    sizes = slots.lists[name].put(slot, entries[known:])
                    own[slot, known:count] = own.new_tensor(sizes)
                    continue
                own[slot, :count] = _tensor_of(entries, own)


class Parked(NamedTuple):
    """A state that was read: rows, requests that wait, and the round."""

    rows: list[ParkedRows]
    waiting: list[Request]
    round: int


def state_of(
    finished: Responses, rows: Sequence[Slots], waiting: Iterable[Request], round: int
) -> Json:
    """Return what is in flight as JSON has it.

    Args:
        finished: what was not polled, for which a state has no room.
        rows: that are being decoded; those of one `Slots` are decoded together.
        waiting: requests without a row, in their order.
        round: of the sampler.

    Raises:
        EngineError: something has finished that was not polled.
    """
    check_polled(finished)
    return {
        "round": round,
        "rows": [_lines_of(slots) for slots in rows if slots.requests],
        "waiting": [request.id for request in waiting],
    }


def check_polled(finished: Responses) -> None:
    """Refuse a state while there is something that it has no room for.

    Args:
        finished: what was not polled.

    Raises:
        EngineError: it is there.
    """
    if finished:
        raise EngineError(
            f"{len(finished)} requests have finished and were not polled, such as "
            f"{finished[0].request.id!r}: poll them before the state is asked for"
        )


def _lines_of(slots: Slots) -> list[Json]:
    """Return the id of every row and what was sampled of it."""
    responses = slots.responses(range(len(slots.requests)))
    pairs = zip(slots.requests, responses, strict=True)
    return [{"id": request.id, **fields_of(response)} for request, response in pairs]


def parked_of(
    state: Json, requests: Mapping[str, Request], recorded: Recorded, most: int
) -> Parked:
    """Read a state.

    Args:
        state: as `state_of` returned it, or as JSON brought it back.
        requests: by their ids.
        recorded: what the sampler records of every token.
        most: rows that the sampler decodes at the same time.

    Raises:
        EngineError: it is no state of such a sampler with these requests.
    """
    own = requests_in(state, requests)
    count = sum(map(len, state["rows"]))
    if count > most:
        raise EngineError(
            f"the state of a sampler has {count} rows, and this one decodes {most} at the "
            "same time: set inference_engine.max_rows to what it was"
        )
    columns = {name: recording.column for name, recording in recorded.items()}
    rows: list[ParkedRows] = []
    for lane in state["rows"]:
        sampled = [run_of(line, columns, columns) for line in lane]
        rows.append(ParkedRows([own[line["id"]] for line in lane], sampled))
    return Parked(rows, [own[id] for id in state["waiting"]], state["round"])


def requests_in(state: Json, requests: Mapping[str, Request]) -> dict[str, Request]:
    """Return the requests that the state of one sampler has, by id: rows first, in their order.

    Args:
        state: as `state_of` returned it, or as JSON brought it back.
        requests: by their ids; further ones are ignored.

    Raises:
        EngineError: it has others, or is the state of several samplers.
    """
    if "rows" not in state:
        count = len(state.get("workers", []))
        raise EngineError(
            f"the state is that of {count} samplers in processes of their own, and this one is in "
            f"none: set inference_engine.processes or inference_engine.actors to {count}"
        )
    lines = [line for lane in state["rows"] for line in lane]
    ids = [*(line["id"] for line in lines), *state["waiting"]]
    unknown = [id for id in ids if id not in requests]
    if unknown:
        raise EngineError(
            f"the state of a sampler has {len(unknown)} requests that it is not restored with, "
            f"such as {unknown[0]!r}"
        )
    return {id: requests[id] for id in ids}


def run_of(line: Json, names: Collection[str], columns: Columns = NOTHING_MORE) -> TokenRun:
    """Return what was sampled of a row, with these columns and no others.

    Args:
        line: of a state.
        names: of the columns.
        columns: of which every entry is checked.

    Raises:
        EngineError: it has other columns, or something else in one.
    """
    fields = dict(line)
    id = fields.pop("id")
    given = sorted(fields.get("columns", {}))
    if given != sorted(names):
        raise EngineError(
            f"the state of a sampler has the columns {given} of request {id!r}, and this one "
            f"records {sorted(names)}"
        )
    try:
        found = segment_of(fields, columns)
    except ValueError as error:
        raise EngineError(f"the state of a sampler, request {id!r}: {error}") from error
    return TokenRun(
        token_ids=found.token_ids,
        logprobs=found.logprobs,
        versions=found.versions,
        columns=found.columns,
    )


def _tensor_of(entries: Entries, like: Tensor) -> Tensor:
    """Return entries of a column as a tensor [n] or, where they are bytes, [n, width]."""
    if like.ndim == 2:
        return torch.tensor(entries, dtype=like.dtype)
    whole = bytearray().join(entries)
    return torch.frombuffer(whole, dtype=like.dtype).view(len(entries), -1)
