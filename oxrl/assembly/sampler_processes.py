"""Samplers in processes of their own, and the delivery of weights to them, with its proof."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from oxrl.assembly.assembly import Assembly, Limits
from oxrl.config import Config
from oxrl.config.checks.engines import ON_CPU_ALONE
from oxrl.config.sections.model import LoraConfig
from oxrl.config.sections.rollout import RolloutConfig
from oxrl.engines.delivery.proof import Compared
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.hosted import ThisMachine
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.engines.train import TrainEngine
from oxrl.engines.transport.base import WeightTransport
from oxrl.errors import ConfigError
from oxrl.models.lora import AdapterOptions
from oxrl.models.rounded import BITS

if TYPE_CHECKING:
    from oxrl.models.exact_contract import Contract

# Takes what is to be called at the end.
Closing = Callable[[Callable[[], None]], object]


def sampler_of(cfg: Config, promised: Contract | None = None) -> RolloutEngine:
    """The sampler that a process of its own builds, on a model of its own.

    Args:
        promised: by the process that began the run; None: nothing is.

    Raises:
        EngineError: this process cannot keep it.
    """
    assembly = Assembly(cfg)
    if assembly.contract is not None:
        assembly.contract.check_same(promised)
    return sampler_here(assembly)


def sampler_here(assembly: Assembly) -> RolloutEngine:
    """The rollout engine of the config in one process, on a model of its own."""
    if assembly.cfg.inference_engine.name == "vllm":
        return _vllm(assembly)
    if assembly.part_sent == "merged":
        return assembly.local_sampler(assembly.model())
    return assembly.local_sampler(assembly.policy_to_train())


def _vllm(assembly: Assembly) -> RolloutEngine:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions  # an extra

    cfg = assembly.cfg
    sampling = cfg.inference_engine
    model = cfg.model
    folder = cfg.run.directory
    if not folder.is_dir():  # an evaluation makes none
        folder = Path(gettempdir())
    adapter = AdapterOptions(**cfg.lora.model_dump(exclude={"delivery"}))
    options = VllmOptions(
        log_file=str(folder / f"vllm_{os.getpid()}.log"),
        dtype=model.dtype,
        max_rows=sampling.max_rows,
        tensor_parallel=sampling.tensor_parallel,
        gpu_memory_fraction=sampling.gpu_memory_fraction,
        kv_cache_gb=sampling.kv_cache_gb,
        max_model_len=model.max_length,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        batch_invariant=cfg.run.deterministic,
        adapter_scale=adapter.scale if assembly.part_sent == "adapter" else None,
        keep_cache=cfg.rollout.swap == "keep",
    )
    return VllmEngine(
        model.name,
        options,
        images=assembly.images,
        only=assembly.sampled_alone,
        columns=assembly.columns,
    )


def hosted_sampler(assembly: Assembly, closing: Closing) -> RolloutWorkers:
    """The rollout engine of the config in processes of their own on this machine.

    On a GPU, which it shares with this process, the only one sleeps while it has nothing to sample.

    Args:
        closing: is told what ends the processes.

    Raises:
        ConfigError: `inference_engine.processes` are asked for on a GPU.
    """
    cfg = assembly.cfg
    shares = assembly.device_type == "cuda"
    if shares and cfg.inference_engine.processes:
        raise ConfigError(
            f"inference_engine.processes is {cfg.inference_engine.processes}: they {ON_CPU_ALONE}"
        )
    cores = os.cpu_count() or 1
    machine = ThisMachine(cfg.run.threads or max(1, cores // cfg.samplers))
    closing(machine.close)
    return RolloutWorkers(
        machine,
        [None] * cfg.samplers,
        partial(sampler_of, cfg, assembly.contract),
        cfg.run.waits,
        nbytes=cfg.model.nbytes,
        before_wake=torch.cuda.empty_cache if shares else None,
        images=assembly.images,
    )


def proved_delivery(
    assembly: Assembly,
    policy: TrainEngine,
    sampler: RolloutEngine,
    limits: Limits,
    transport: WeightTransport | None = None,
) -> WeightSync:
    """Build the delivery of the policy's weights to the sampler, with its proof.

    Args:
        limits: of the policy's model.
        transport: moves the weights where this process is not the policy's; None: it is.
    """
    sampling = assembly.cfg.inference_engine
    options = SyncOptions(
        dtype=assembly.dtype,
        vocabulary=len(assembly.tokenizer),
        temperature=assembly.cfg.rollout.temperature,
        probe_every=sampling.probe_every,
        probe_tokens=sampling.probe_tokens,
        probe_limit=sampling.probe_limit,
        compared=Compared(limits.image_ids, only=assembly.sampled_alone),
        part=assembly.part_sent,
        bits=BITS.get(sampling.weights),
    )
    return WeightSync(policy, sampler, options, assembly.copy_of_policy, assembly.images, transport)


def proved_sampler(
    assembly: Assembly, model: PreTrainedModel, limits: Limits, stack: ExitStack
) -> RolloutWorkers:
    """A sampler in processes of their own that provably computes with the weights of a model.

    Args:
        model: as it is loaded here, an adapter merged into it.
        limits: of the model.
        stack: ends the processes.

    Raises:
        WeightSyncError: it does not.
    """
    cfg = assembly.cfg
    train = cfg.train.model_copy(update={"backend": "local"})
    # Whatever is asked of it later, the probe is scored at temperature 1.
    changed = {"lora": LoraConfig(), "train": train, "rollout": RolloutConfig()}
    plain = Assembly(cfg.model_copy(update=changed))
    sampler = hosted_sampler(plain, stack.callback)
    policy = plain.trainer(model, trained=False)
    proved_delivery(plain, policy, sampler, limits).deliver(0)
    return sampler
