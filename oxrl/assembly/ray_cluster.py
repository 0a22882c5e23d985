"""The Ray cluster of a run, and what each of its actors gets."""

from __future__ import annotations

from oxrl.config import Config
from oxrl.engines.ray.cluster import Cluster
from oxrl.errors import ConfigError


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
