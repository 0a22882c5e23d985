"""The models that a run builds, counts and saves, by one table; a new one is a row of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oxrl.config.conditions import has_reference_model
from oxrl.config.schema import Config
from oxrl.tables import cells
from oxrl.tables.numbers import CRITIC_LR
from oxrl.tables.roles import CRITIC, POLICY, REFERENCE, Role


def policy(cfg: Config) -> Iterator[Role]:
    """The model that learns."""
    temperature = cfg.rollout.temperature
    yield Role(name=POLICY, model=cfg.model.name, trained=True, temperature=temperature, saved=".")


def critic(cfg: Config) -> Iterator[Role]:
    """A value model on the policy's backbone, where the row asks for one."""
    if cfg.train.row.has(cells.CRITIC):
        lr = cfg.train.value(CRITIC_LR)
        name = cfg.model.name
        yield Role(name=CRITIC, model=name, trained=True, head="values", lr=lr, saved=CRITIC)


def reference(cfg: Config) -> Iterator[Role]:
    """The policy as it was; without weights of its own it is the policy without its adapter."""
    if has_reference_model(cfg):
        temperature = cfg.rollout.temperature
        saved = REFERENCE if cfg.train.row.moves_reference else None
        yield Role(name=REFERENCE, model=cfg.model.name, temperature=temperature, saved=saved)


# In the order in which every rank builds them.
MODELS: list[Callable[[Config], Iterator[Role]]] = [policy, critic, reference]


def roles_of(cfg: Config) -> list[Role]:
    """List the models of a run that have weights of their own."""
    return [role for rows in MODELS for role in rows(cfg)]
