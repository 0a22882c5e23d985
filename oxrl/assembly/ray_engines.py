"""Training ranks and samplers in Ray actors. Ray is an extra: this file is read where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from oxrl.assembly.assembly import (
    Engines,
    Limits,
    build_images,
    build_sampler,
    build_trainers,
    choose_device,
    limits_of,
    new_model_of,
)
from oxrl.assembly.ray_cluster import gpus_per_actor, open_cluster
from oxrl.config import Config
from oxrl.engines.ray.cluster import by_node, layout
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.ray.trainer import RankGroup, RayTrainer
from oxrl.engines.ray.transport import RayTransport
from oxrl.engines.train.base import TrainEngine
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import required
from oxrl.plan.needs import model_bytes, models_trained

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore


def build_ray_engines(cfg: Config, stack: ExitStack) -> Engines:
    """Ray actors that train, sample or both."""
    sampling = cfg.inference_engine
    waits = cfg.run.waits
    nbytes = model_bytes(cfg)
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
    trainers: Mapping[str, TrainEngine]
    limits: Limits
    group: RankGroup | None = None
    if training:
        build_rank = partial(trainers_of_rank, cfg)
        group = RankGroup(
            cluster, placed.trainers, build_rank, waits, nbytes=models_trained(cfg) * nbytes
        )
        trainers = {name: RayTrainer(group, name) for name in group.sizes}
        limits = group.call("policy", limits_of, cfg)
    else:
        trainers = build_trainers(cfg)
        limits = limits_of(trainers["policy"], cfg)
    if not sampling.actors:
        sampler = build_sampler(cfg)
        return Engines(trainers=trainers, sampler=sampler, limits=limits, shared=False)
    build = partial(build_sampler, cfg)
    images = build_images(cfg)
    rollouts = RayRollouts(
        cluster,
        placed.samplers,
        build,
        waits,
        nbytes=nbytes,
        before_wake=group.free_cache if colocated and group is not None else None,
        images=images,
    )
    transport = None
    if group is not None:
        new_images = None if images is None else partial(required_images, cfg)
        transport = RayTransport(group, "policy", rollouts, new_model_of(cfg), new_images)
    return Engines(
        trainers=trainers, sampler=rollouts, limits=limits, shared=False, transport=transport
    )


@contextmanager
def trainers_of_rank(cfg: Config) -> Iterator[dict[str, Trainer]]:
    """What a training actor builds, in an environment that says which rank it is."""
    with joined_ranks(choose_device(cfg), cfg.run.waits) as ranks:
        yield build_trainers(cfg, ranks)


def required_images(cfg: Config) -> ImageStore:
    """A store of the images of a run that shows some."""
    return required(build_images(cfg), "images")
