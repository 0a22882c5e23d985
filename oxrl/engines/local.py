"""The local engine: trainer and sampler in one process, sharing one set of weights."""

from __future__ import annotations

from oxrl.engines.local_sampler import LocalSampler
from oxrl.engines.local_trainer import LocalTrainer

__all__ = ["LocalSampler", "LocalTrainer"]
