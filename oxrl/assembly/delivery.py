"""The delivery of weights to a sampler that has weights of its own, and its proof."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from oxrl.assembly.assembly import Assembly, Limits
from oxrl.config.sections.model import LoraConfig
from oxrl.config.sections.rollout import RolloutConfig
from oxrl.engines.delivery.proof import Compared
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.train import TrainEngine
from oxrl.engines.transport.base import WeightTransport

if TYPE_CHECKING:
    from oxrl.engines.sample.workers import RolloutWorkers


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
        compared=Compared(limits.never, only=assembly.sampled_alone),
        part=assembly.part_sent,
    )
    return WeightSync(policy, sampler, options, assembly.copy_of_policy, assembly.images, transport)


def proved_sampler(
    assembly: Assembly, model: PreTrainedModel, limits: Limits, stack: ExitStack
) -> RolloutWorkers:
    """A sampler in a process of its own that provably computes with the weights of a model.

    Args:
        model: as it is loaded here, an adapter merged into it.
        limits: of the model.
        stack: ends the process.

    Raises:
        WeightSyncError: it does not.
    """
    cfg = assembly.cfg
    train = cfg.train.model_copy(update={"backend": "local"})
    # Whatever is asked of it later, the probe is scored at temperature 1.
    changed = {"lora": LoraConfig(), "train": train, "rollout": RolloutConfig()}
    plain = Assembly(cfg.model_copy(update=changed))
    sampler = plain.hosted_sampler(stack.callback)
    policy = plain.trainer(model, trained=False)
    proved_delivery(plain, policy, sampler, limits).deliver(0)
    return sampler
