"""Two toy columns, which say of every token that is sampled where it was sampled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.sampler_processes import sampler_here
from oxrl.config import Config
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.rows import Recording, Slots
from oxrl.recipes.objective import Objective
from oxrl.tables.columns import Column
from oxrl.types import Completion, Output, Request, TokenBatch
from support.killed_runs import run_in_child
from support.samplers import TOKENIZER, lively

POSITION = Column("int32", -7)
TRACE = Column("uint8", 9, width=3)
COLUMNS = {"position": POSITION, "trace": TRACE}


def place(slots: Slots, rows: slice) -> Tensor:
    """Where in its row the token stands that is being sampled."""
    return slots.prompt_end[rows] + slots.count[rows] + 1


def position_of(slots: Slots, rows: slice, logits: Tensor) -> Tensor:
    return place(slots, rows).to(torch.int32)


def trace_of(slots: Slots, rows: slice, logits: Tensor) -> Tensor:
    """Bytes of the request's seed, of the place among the response's tokens, of that in the row."""
    numbers = (slots.seed[rows], slots.count[rows], place(slots, rows))
    return (torch.stack(numbers, dim=1) & 255).to(torch.uint8)


TOYS = {"position": Recording(POSITION, position_of), "trace": Recording(TRACE, trace_of)}


def recording_sampler() -> LocalSampler:
    """A sampler with toy columns, also for a process of its own."""
    torch.set_num_threads(1)
    return LocalSampler(lively("builtin:tiny"), TOKENIZER, max_rows=3, recorded=TOYS)


def recording_sampler_of(cfg: Config, promised: None) -> RolloutEngine:
    """The sampler of a run with the toy columns, in a process of its own; no bits are promised."""
    assembly = Assembly(cfg)
    vars(assembly)["recorded"] = TOYS
    return sampler_here(assembly)


def run_recording_in_child(cfg: Config) -> None:
    """Body of a forked process that is going to be killed: a run with toy columns, whose losses see
    every one of them.
    """
    setattr(Assembly, "recorded", TOYS)  # noqa: B010 - a type checker knows a property
    policy_loss = Objective.policy_loss

    def checked(self: Objective, output: Output, batch: Any) -> Any:
        check_inputs(batch.inputs)
        return policy_loss(self, output, batch)

    setattr(Objective, "policy_loss", checked)  # noqa: B010 - as above
    run_in_child(cfg)


def expected_columns(request: Request, first: int, count: int) -> Mapping[str, tuple[object, ...]]:
    """Of `count` tokens of a response, of which the first one stands at `first` of its row."""
    answers = first - len(request.prompt.token_ids)
    places = range(first, first + count)
    trace = [
        bytes((request.seed & 255, (answers + at) & 255, where & 255))
        for at, where in enumerate(places)
    ]
    return {"position": tuple(places), "trace": tuple(trace)}


def check_completion(request: Request, completion: Completion) -> None:
    """A response has the columns of its tokens, and no others."""
    [segment] = completion.segments
    first = len(request.prompt.token_ids)
    expected = expected_columns(request, first, len(segment.token_ids))
    assert segment.columns == (expected if segment.token_ids or segment.columns else {})


def check_inputs(inputs: TokenBatch) -> int:
    """Every trained token has its place, every other one the fill; how many are trained."""
    trained = inputs.response_mask
    places = torch.arange(trained.shape[1]).expand_as(trained)
    position = inputs.columns["position"]
    assert position.dtype == torch.int32
    assert torch.equal(position, torch.where(trained, places, -7).to(torch.int32))
    trace = inputs.columns["trace"]
    assert trace.dtype == torch.uint8 and trace.shape == (*trained.shape, 3)
    assert torch.equal(trace[..., 2][trained], (places[trained] & 255).to(torch.uint8))
    assert (trace[~trained] == 9).all()
    return int(trained.sum())


def noting_loss(folder: Path) -> Callable[..., Any]:
    """The loss of a run, which checks what it is given, wherever that is: each process writes how
    many tokens it trained on to a file in `folder`.
    """
    policy_loss = Objective.policy_loss

    def checked(self: Objective, output: Output, batch: Any) -> Any:
        if batch.inputs.response_mask.any():  # a rank may have to sit a micro-batch out
            count = check_inputs(batch.inputs)
            if torch.is_grad_enabled():  # without, it is asked once more for what is reported
                with (folder / str(os.getpid())).open("a") as file:
                    file.write(f"{count}\n")
        return policy_loss(self, output, batch)

    return checked


def noted(folder: Path) -> list[int]:
    """How many tokens each process trained on."""
    files = sorted(folder.iterdir())
    return [sum(map(int, file.read_text().split())) for file in files]
