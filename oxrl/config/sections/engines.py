"""Sections `inference_engine`, `fsdp`, `deepspeed` and `deepspeed_ref`: the engines that sample,
and how memory is divided by those that train.
"""

from __future__ import annotations

from typing import Literal

from oxrl.config.conditions import (
    has_own_samplers,
    samples_in_actors,
    trains_in_actors,
    uses_vllm,
)
from oxrl.config.field import EVALUATING, RL, Aka, Section, setting
from oxrl.tables.engines import SamplingEngineName


class EngineConfig(Section):
    """The engine that samples."""

    name: SamplingEngineName = setting(
        "local",
        "local: oxRL's sampler. vllm: an extra, in Ray actors, or with actors: 0 in processes of "
        "their own on this machine, without Ray; makes train.correction truncate by default.",
        aka=Aka(
            "use_vllm", "rollout.name", values={"true": "vllm", "false": "local", "hf": "local"}
        ),
    )
    max_rows: int = setting(
        128,
        "Rows decoded at once, per sampler.",
        ge=1,
        le=65536,
        why="each has keys and values in memory",
    )
    actors: int = setting(
        0,
        "Ray actors that sample, each with a model of its own; 0: this process samples, or those "
        "that it starts.",
        ge=0,
        le=65536,
        why="each is a process",
        of=RL,
    )
    processes: int = setting(
        0,
        "Processes of this machine that sample, each with a model of its own on the CPU, without "
        "Ray; 0: this process samples, or, of vllm, one that it starts.",
        ge=0,
        le=1024,
        why="each is a process",
    )
    weights: Literal["trained", "int8"] = setting(
        "trained",
        "trained: samplers compute with the policy's weights. int8: with these rounded to 8 bits, "
        "a scale for each row of a matrix; local sampler alone. int8 makes train.correction "
        "truncate by default.",
        of=RL,
    )
    placement: Literal["separate", "colocated"] = setting(
        "separate",
        "Rollout actors have devices of their own, or each shares one with a training actor.",
        of=RL,
        when=(
            trains_in_actors,
            samples_in_actors,
        ),
        aka=Aka("vllm_mode", values={"colocate": "colocated"}),
    )
    probe_every: int = setting(
        50,
        "Weight deliveries between two proofs with a perturbed copy, to samplers with weights of "
        "their own; 0: only the first has one.",
        ge=0,
        of=EVALUATING,
        when=has_own_samplers,
    )
    probe_tokens: int = setting(
        512,
        "Tokens, of the newest samples, that trainer and samplers both score after a delivery.",
        ge=64,
        le=65536,
        too_low="fewer say little about rounding",
        why="more cost more than the delivery",
        when=has_own_samplers,
    )
    probe_limit: float = setting(
        4.0,
        "How many times the rounding that is measured with the real weights the two may differ by.",
        gt=0,
        le=1000,
        too_low="two right implementations differ by one or two",
        why="no proof is left at a thousand",
        when=has_own_samplers,
    )
    tensor_parallel: int = setting(
        1,
        "vllm: devices that share one copy of the model, per sampler.",
        ge=1,
        le=1024,
        why="each is a process",
        when=uses_vllm,
        aka=Aka("tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    )
    gpu_memory_fraction: float = setting(
        0.5,
        "vllm: share of a GPU's memory for weights and cache.",
        gt=0,
        lt=1,
        when=uses_vllm,
        aka=Aka("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    )
    kv_cache_gb: float | None = setting(
        None,
        "vllm: cache in GB, instead of that share (CPU: null is 0.25).",
        gt=0,
        le=100_000,
        why="no device has more memory",
        when=uses_vllm,
    )


class FsdpConfig(Section):
    """The division of memory by FSDP2 in training (`train.backend: fsdp`)."""

    offload_optimizer: bool = setting(
        False,
        "Keep each rank's pieces of weights, gradients and what the optimizer holds in CPU memory, "
        "and step there; a layer's weights come to the device when it runs.",
    )


class DeepSpeedConfig(Section):
    """The division of memory by DeepSpeed in training (`train.backend: deepspeed`)."""

    zero_stage: int = setting(
        3,
        "Cut up over ranks: 0 nothing, 1 AdamW's state, 2 and gradients, 3 and weights.",
        ge=0,
        le=3,
    )
    offload_optimizer: bool = setting(
        False, "Keep AdamW's state in CPU memory and step there; needs stage 1 or more."
    )
    offload_param: bool = setting(
        False, "Keep weights in CPU memory until a layer needs them; needs stage 3."
    )


class ReferenceConfig(Section):
    """The division of a reference model's memory by DeepSpeed (`train.backend: deepspeed`)."""

    zero_stage: Literal[0, 3] = setting(
        3, "3: weights are cut up over ranks; 0: every rank holds all of them."
    )
    offload_param: bool = setting(
        False, "Keep weights in CPU memory until a layer needs them; needs stage 3."
    )
