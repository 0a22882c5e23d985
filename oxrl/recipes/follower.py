"""The session of the training ranks that write no file."""

from __future__ import annotations

import logging
from typing import Self

from oxrl.engines.train import TrainEngine
from oxrl.recipes.session import Session
from oxrl.runs.waiting import StopRequest
from oxrl.types import Metrics, TensorMap


class Follower(Session):
    """The session of every rank but the first: the same calls, rank 0's decisions, no file."""

    def __enter__(self) -> Self:
        # A signal reaches all ranks; rank 0 decides where the run stops.
        self.stop = self._stack.enter_context(StopRequest())
        # Else warnings would go to stderr, once per rank.
        logging.getLogger("oxrl").addHandler(logging.NullHandler())
        return self

    def message(self, text: str) -> None: ...
    def record(self, step: int, metrics: Metrics, *, tokens: float) -> None: ...
    def finish(self, step: int) -> None: ...
    def dump(self, step: int, tensors: TensorMap) -> None: ...

    def keep_best(self, engine: TrainEngine, step: int) -> None:
        engine.save(self._options.directory)  # rank 0 says where
