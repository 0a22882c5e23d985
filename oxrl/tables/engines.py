"""The engines: what each needs installed, and what it can do.

Pure data, which configuration, checks and memory plan read. A new training engine is a class that
passes tests/engines/test_conformance.py, a row here, its name in the type above the table, and its
class in `trainer_class` of `assembly/assembly.py`; a sampler's class is chosen in `sampler_here` of
`assembly/sampler_processes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from oxrl.tables.columns import HEAD_IDS, HEAD_LOGPROBS, HEAD_REST, KEPT

Optimizer = Literal["adamw", "muon", "adamw_8bit"]
# What the optimizer steps of weights in low precision: float32 copies, or the weights themselves.
Masters = Literal["float32", "none"]
# Of `rollout.swap: keep`, said wherever it is set.
KEPT_CACHES = (
    "responses in flight keep keys and values of older weights; no proof exists of which weights "
    "their log-probabilities are (rollout.swap=keep)"
)
# Of `run.exact`, said before a run.
EXACT = (
    "log-probabilities of sampler and trainer are the same to the last bit, which is proved in "
    "each step; a step takes longer for it (docs/benchmarks.md)"
)


@dataclass(frozen=True, kw_only=True)
class TrainingEngine:
    """An implementation of `oxrl.engines.train.TrainEngine`.

    several_ranks: trains with several processes; in reinforcement learning they are Ray actors.
    zero_stage: how much of a model it cuts up over the ranks, in ZeRO's counting; None: `settings`
        say it.
    settings: the config section with arguments of its own.
    reference_settings: as `settings`, of a reference model.
    bfloat16_adapters: adapters train beside frozen bfloat16 weights.
    optimizers: those it can step with. without_masters: steps weights in bfloat16 themselves.
    """

    several_ranks: bool
    zero_stage: int | None
    settings: str | None = None
    reference_settings: str | None = None
    bfloat16_adapters: bool = True
    optimizers: tuple[Optimizer, ...] = ("adamw", "muon", "adamw_8bit")
    without_masters: bool = True


@dataclass(frozen=True, kw_only=True)
class SamplingEngine:
    """An implementation of `oxrl.engines.sample.RolloutEngine`.

    own_process: takes a process over, so that in training it lives in Ray actors only.
    package: what has to be importable beside oxRL's own dependencies; None: nothing.
    records: columns that it can record of the tokens that it samples; None: any.
    most_likely: tokens that it tells of beside a sampled one, at most; None: any number.
    """

    own_process: bool
    package: str | None = None
    records: tuple[str, ...] | None = None
    most_likely: int | None = None


TrainingEngineName = Literal["local", "deepspeed", "fsdp"]
TRAINING_ENGINES: Mapping[TrainingEngineName, TrainingEngine] = MappingProxyType(
    {
        "local": TrainingEngine(several_ranks=False, zero_stage=0),
        "deepspeed": TrainingEngine(
            several_ranks=True,
            zero_stage=None,
            settings="deepspeed",
            reference_settings="deepspeed_ref",
            bfloat16_adapters=False,
            optimizers=("adamw",),
            without_masters=False,
        ),
        "fsdp": TrainingEngine(several_ranks=True, zero_stage=3, settings="fsdp"),
    }
)

SamplingEngineName = Literal["local", "vllm"]
SAMPLING_ENGINES: Mapping[SamplingEngineName, SamplingEngine] = MappingProxyType(
    {
        "local": SamplingEngine(own_process=False),
        # What `RETURNED` of engines/sample/vllm_columns.py reads.
        "vllm": SamplingEngine(
            own_process=True,
            package="vllm",
            records=(KEPT, HEAD_IDS, HEAD_LOGPROBS, HEAD_REST),
            most_likely=256,
        ),
    }
)
