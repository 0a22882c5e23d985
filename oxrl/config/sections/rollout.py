"""Sections `rollout` and `inference_engine`: what is sampled, and by what."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from oxrl.config.conditions import (
    evaluates,
    has_environment,
    has_own_samplers,
    reads_history,
    samples_in_actors,
    trains_in_actors,
    uses_vllm,
)
from oxrl.config.field import EVALUATING, RL, SAMPLING, Section, aka, setting
from oxrl.tables.engines import SamplingEngineName

# Why bounds are where they are.
TEMPERATURE = (
    "samples at more are noise; 0.01 and less but 0 leaves one token, which is what 0 says"
)


class RolloutConfig(Section):
    """The sampling for training, and for evaluation where the name says so."""

    temperature: float = setting(
        1.0,
        "Sampling temperature; 0 is greedy (not for training).",
        ge=0,
        le=10,
        why=TEMPERATURE,
        of=SAMPLING,
    )
    top_p: float = setting(1.0, "Nucleus mass; 1: off. Training needs 1.", gt=0, le=1, of=SAMPLING)
    top_k: int = setting(
        0, "Keep the k most likely tokens; 0: off. Training needs 0.", ge=0, of=SAMPLING
    )
    max_tokens: int = setting(
        512,
        "Longest response in tokens; with an environment, of one turn.",
        ge=1,
        le=100_000_000,
        why="no model reads longer rows",
        aka=aka(
            "max_completion_length",
            "max_new_tokens",
            "max_response_length",
            "response_length",
            "generate_max_len",
        ),
    )
    max_episode_tokens: int | None = setting(
        None,
        "Tokens that the policy samples in all turns of an episode; null: as many as its turns may "
        "have.",
        ge=1,
        le=100_000_000,
        why="no model reads longer rows",
        of=RL,
        when=has_environment,
    )
    context: str = setting(
        "whole",
        "What a turn of an episode reads. whole: all before it. last: the system's messages and "
        "the environment's last answer. window: k (in YAML {window: k}): those and the last k "
        "answers with the turns between. Turns that do not read all before are rows of their own.",
        of=RL,
        takes_mapping=True,
        when=has_environment,
    )
    rewritten_history: Literal["refuse", "split"] = setting(
        "refuse",
        "A chat template that writes earlier turns otherwise than they were read and sampled is "
        "refused, or (split) the next turn reads what the template makes of them, in a new row.",
        of=RL,
        when=(
            has_environment,
            reads_history,
        ),
    )
    n_samples: int = setting(
        8,
        "Responses per prompt: the group of group-relative advantages.",
        ge=1,
        le=65536,
        why="all of a step's responses are held in memory",
        of=SAMPLING,
        aka=aka(
            "num_generations",
            "n",
            "n_samples_per_prompt",
            "num_return_sequences",
            "group_size",
            "rloo_k",
        ),
    )
    force_strict_on_policy: bool = setting(
        True, "Refuse any token not sampled by the current weights.", of=RL
    )
    max_staleness: int = setting(
        0,
        "Weight versions a sample may lag behind. 0: rollout, then train. Above: the next rollout "
        "batches are sampled while one trains (with inference_engine.actors at the same time), "
        "then they lag epochs x minibatches or more.",
        ge=0,
        le=1000,
        why="samples of so old weights say nothing of the present ones",
        of=RL,
    )
    from_samples: str | None = setting(
        None,
        "Train on the samples of this run directory, recorded with run.record: tokens, and sample "
        "none; null: sample. What decides about samples must be as it was there.",
        min_length=1,
        of=RL,
    )
    eval_samples: int = setting(
        1,
        "Responses per held-out prompt.",
        ge=1,
        le=65536,
        why="all of a prompt's responses are held in memory",
        of=EVALUATING,
        when=evaluates,
        aka=aka("val_kwargs.n", "num_generations_eval"),
    )
    eval_temperature: float = setting(
        1.0,
        "Evaluation temperature; 0 is greedy.",
        ge=0,
        le=10,
        why=TEMPERATURE,
        of=EVALUATING,
        when=evaluates,
        aka=aka("val_kwargs.temperature"),
    )

    @field_validator("context", mode="before")
    @classmethod
    def _context_by_name(cls, value: object) -> object:
        """`{window: 3}` and `window: 3` are one; others are as they should be, or refused."""
        if isinstance(value, dict) and [*value] == ["window"]:  # pyright: ignore
            value = f"window: {value['window']}"  # pyright: ignore
        found = re.fullmatch(r"window\s*:\s*([1-9][0-9]{0,4})", str(value))
        if found is None and value not in ("whole", "last"):
            raise ValueError(
                "must be whole, last or {window: k} with k from 1 to 99999, the answers that are "
                "read"
            )
        return value if found is None else f"window: {found[1]}"

    @field_validator("temperature", "eval_temperature")
    @classmethod
    def _greedy_or_warm(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise ValueError(f"must be 0 (greedy), or from 0.01 to 10, because {TEMPERATURE}")
        return value


class EngineConfig(Section):
    """The engine that samples."""

    name: SamplingEngineName = setting(
        "local",
        "local: oxRL's sampler. vllm: an extra, in Ray actors, or with actors: 0 in a process of "
        "its own on this machine, without Ray; makes train.correction truncate by default.",
        aka=aka(
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
        "Ray actors that sample, each with a model of its own; 0: this process samples, or, of "
        "vllm, one that it starts.",
        ge=0,
        le=65536,
        why="each is a process",
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
        aka=aka("vllm_mode", values={"colocate": "colocated"}),
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
        aka=aka("tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    )
    gpu_memory_fraction: float = setting(
        0.5,
        "vllm: share of a GPU's memory for weights and cache.",
        gt=0,
        lt=1,
        when=uses_vllm,
        aka=aka("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    )
    kv_cache_gb: float | None = setting(
        None,
        "vllm: cache in GB, instead of that share (CPU: null is 0.25).",
        gt=0,
        le=100_000,
        why="no device has more memory",
        when=uses_vllm,
    )
