"""Training ranks, samplers and reward models in Ray actors. Ray is an extra, imported by need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedModel

from oxrl.assembly.assembly import Assembly, Engines, Limits
from oxrl.assembly.reward_models import reward_model_of_actor
from oxrl.assembly.sampler_processes import proved_delivery, sampler_here, sampler_of
from oxrl.config import Config
from oxrl.config.roles import roles_of
from oxrl.config.sections.reward import AskedReward
from oxrl.engines.ray.cluster import Cluster, by_node, layout
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.ray.trainer import RankGroup, RayTrainer
from oxrl.engines.ray.transport import RayTransport
from oxrl.engines.train import Models
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import ConfigError, required
from oxrl.rewards.reward_model_actors import ModelActorPool
from oxrl.tables.roles import POLICY

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore
    from oxrl.models.exact_contract import Contract


def open_cluster(cfg: Config) -> Cluster:
    """The Ray cluster of a run; one that is started here has room for all of its actors."""
    ranks = cfg.run.training_gpus if cfg.train.engine.several_ranks else 0
    of_rewards = len(cfg.reward.names) * cfg.reward.actors
    return Cluster(
        2 * max(ranks, cfg.inference_engine.actors) + of_rewards,
        address=cfg.run.ray_address,
        ship=cfg.run.ray_working_dir == "ship",
    )


def gpus_per_actor(cfg: Config, available: int) -> int:
    """One GPU each where the cluster has some: the driver's own machine may well have none.

    Raises:
        ConfigError: GPUs were asked for, and no node has one.
    """
    if cfg.run.device == "cuda" and not available:
        raise ConfigError(
            "run.device is cuda, and no node of the Ray cluster has a GPU; use run.device=cpu or "
            "auto, or start nodes with GPUs (`ray status` lists what there is)"
        )
    return int(cfg.run.device != "cpu" and available > 0)


def build_ray_engines(assembly: Assembly, stack: ExitStack) -> Engines:
    """Ray actors that train, sample or both; each makes an assembly of its own."""
    cfg = assembly.cfg
    sampling = cfg.inference_engine
    waits = cfg.run.waits
    nbytes = cfg.model.nbytes
    colocated = sampling.placement == "colocated"
    training = cfg.train.backend != "local"
    ranks = cfg.run.training_gpus if training else 0
    cluster = open_cluster(cfg)
    stack.callback(cluster.close)
    gpus = gpus_per_actor(cfg, cluster.gpus())
    planned = layout(
        ranks,
        sampling.actors,
        colocated=colocated,
        trainer_gpus=gpus,
        sampler_gpus=gpus * sampling.tensor_parallel,
    )
    placed = by_node(planned, cluster.reserve(planned.bundles))
    group = None
    if training:
        build_rank = partial(trainers_of_rank, cfg, assembly.contract)
        group = RankGroup(
            cluster, placed.trainers, build_rank, waits, nbytes=len(roles_of(cfg)) * nbytes
        )
        trainers = Models((name, RayTrainer(group, name)) for name in group.sizes)
        limits = group.call(waits.of("step"), POLICY, limits_of, cfg)
    else:
        trainers = assembly.trainers()
        limits = assembly.limits(cast(PreTrainedModel, trainers[POLICY].model))
    transport = None
    if sampling.actors:
        images = assembly.images
        sampler = RayRollouts(
            cluster,
            placed.samplers,
            partial(sampler_of, cfg, assembly.contract),
            waits,
            nbytes=nbytes,
            before_wake=group.free_cache if colocated and group is not None else None,
            images=images,
        )
        if group is not None:
            new_images = None if images is None else partial(required_images, cfg)
            new_model = partial(copy_of_policy, cfg)
            transport = RayTransport(group, sampler, new_model, new_images)
    else:
        sampler = sampler_here(assembly)
    delivery = proved_delivery(assembly, trainers[POLICY], sampler, limits, transport)
    return Engines(trainers, sampler, limits, delivery)


@contextmanager
def trainers_of_rank(cfg: Config, promised: Contract | None) -> Iterator[dict[str, Trainer]]:
    """Build the trainers of a training actor, in an environment that says which rank it is.

    Args:
        promised: by the process that began the run; None: nothing is.

    Raises:
        EngineError: this one cannot keep it.
    """
    contract = Assembly(cfg).contract
    if contract is not None:
        contract.check_same(promised)
    with joined_ranks(Assembly(cfg).device, cfg.run.waits) as ranks:
        yield Assembly(cfg, ranks).trainers()


def limits_of(trainer: Trainer, cfg: Config) -> Limits:
    """The limits of a trainer's model, in the actor that has it."""
    return Assembly(cfg).limits(cast(PreTrainedModel, trainer.model))


def copy_of_policy(cfg: Config) -> PreTrainedModel:
    """A model like the policy on the CPU, in the actor that trains it."""
    return Assembly(cfg).copy_of_policy()


def required_images(cfg: Config) -> ImageStore:
    """A store of the images of a run that shows some, in the actor that trains."""
    return required(Assembly(cfg).images, "images")


def actor_pool(cfg: Config, asked: AskedReward) -> ModelActorPool:
    """The pool of a reward model in actors."""

    def gpus(cluster: Cluster) -> int:
        return gpus_per_actor(cfg, cluster.gpus())

    return ModelActorPool(
        asked.name,
        partial(reward_model_of_actor, cfg, asked),
        cluster=partial(open_cluster, cfg),
        actors=cfg.reward.actors,
        gpus=gpus,
        timeout_s=asked.timeout_s,
        field=asked.field,
    )
