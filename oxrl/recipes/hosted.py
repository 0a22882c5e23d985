"""What samples in a process of its own on this machine is delivered weights, and proves them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from oxrl.assembly.assemble import Engines, build_delivery
from oxrl.assembly.assembly import Limits, build_trainer, hosted_sampler
from oxrl.config import Config
from oxrl.config.sections.model import LoraConfig
from oxrl.config.sections.rollout import RolloutConfig
from oxrl.engines.delivery.sync import WeightSync
from oxrl.engines.train.base import TrainEngine

if TYPE_CHECKING:
    from oxrl.engines.sample.workers import RolloutWorkers


def delivery_to(
    cfg: Config, policy: TrainEngine, sampler: RolloutWorkers, limits: Limits, vocabulary: int
) -> WeightSync:
    """How a policy of this process gets to a sampler in another one."""
    engines = Engines(trainers={"policy": policy}, sampler=sampler, limits=limits, shared=False)
    return build_delivery(cfg, engines, vocabulary)


def proved_sampler(
    cfg: Config, model: PreTrainedModel, limits: Limits, vocabulary: int, stack: ExitStack
) -> RolloutWorkers:
    """A sampler in a process of its own that provably computes with the weights of a model.

    Args:
        model: as it is loaded here, an adapter merged into it.
        limits: of the model.
        vocabulary: size of its tokenizer's.
        stack: ends the process.

    Raises:
        WeightSyncError: it does not.
    """
    train = cfg.train.model_copy(update={"backend": "local"})
    # Whatever is asked of it later, the probe is scored at temperature 1.
    changed = {"lora": LoraConfig(), "train": train, "rollout": RolloutConfig()}
    plain = cfg.model_copy(update=changed)
    sampler = hosted_sampler(plain, stack.callback)
    policy = build_trainer(plain, model, trained=False)
    delivery_to(plain, policy, sampler, limits, vocabulary).deliver(0)
    return sampler
