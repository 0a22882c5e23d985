"""How weights reach a sampler that has weights of its own, and are proved to."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from oxrl.assembly.assembly import (
    DTYPES,
    Limits,
    build_images,
    build_trainer,
    hosted_sampler,
    new_model_of,
    part_sent,
    sampled_alone,
)
from oxrl.config import Config
from oxrl.config.sections.model import LoraConfig
from oxrl.config.sections.rollout import RolloutConfig
from oxrl.engines.delivery.proof import Compared
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.base import RolloutEngine
from oxrl.engines.train.base import TrainEngine
from oxrl.engines.transport.base import WeightTransport

if TYPE_CHECKING:
    from oxrl.engines.sample.workers import RolloutWorkers


def proved_delivery(
    cfg: Config,
    policy: TrainEngine,
    sampler: RolloutEngine,
    limits: Limits,
    vocabulary: int,
    transport: WeightTransport | None = None,
) -> WeightSync:
    """How the policy's weights reach the sampler, and are proved to.

    Args:
        limits: of the policy's model.
        vocabulary: how many token ids the tokenizer has.
        transport: moves the weights where this process is not the policy's; None: it is.
    """
    sampling = cfg.inference_engine
    options = SyncOptions(
        dtype=DTYPES[cfg.model.dtype],
        vocabulary=vocabulary,
        temperature=cfg.rollout.temperature,
        probe_every=sampling.probe_every,
        probe_tokens=sampling.probe_tokens,
        probe_limit=sampling.probe_limit,
        compared=Compared(limits.never, only=sampled_alone(cfg)),
        part=part_sent(cfg),
    )
    return WeightSync(policy, sampler, options, new_model_of(cfg), build_images(cfg), transport)


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
    proved_delivery(plain, policy, sampler, limits, vocabulary).deliver(0)
    return sampler
