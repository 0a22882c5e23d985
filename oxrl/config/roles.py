"""The models that a run builds, counts and saves, by one table; a new one is a row of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from oxrl.config.conditions import has_reference_model, has_teacher
from oxrl.config.schema import Config
from oxrl.tables import cells
from oxrl.tables.numbers import CRITIC_LR, DISCRIMINATOR_LR
from oxrl.tables.roles import CRITIC, DISCRIMINATOR, POLICY, REFERENCE, TEACHER, Role


def policy_role(cfg: Config, name: str = POLICY, **facts: Any) -> Role:
    """Return a role whose weights are those that the policy begins with.

    Args:
        cfg: of the run.
        name: of the role.
        facts: what else is said of it, see `Role`.
    """
    return Role(name=name, model=cfg.model.name, revision=cfg.model.revision, **facts)


def policy(cfg: Config) -> Iterator[Role]:
    """The model that learns."""
    temperature = cfg.rollout.temperature
    yield policy_role(cfg, trained=True, temperature=temperature, saved=".")


def critic(cfg: Config) -> Iterator[Role]:
    """A value model on the policy's backbone, where the row asks for one."""
    if cfg.train.row.has(cells.CRITIC):
        lr = cfg.train.value(CRITIC_LR)
        yield policy_role(cfg, CRITIC, trained=True, head="values", lr=lr, saved=CRITIC)


def discriminator(cfg: Config) -> Iterator[Role]:
    """A value model on the policy's backbone, which tells responses from a teacher's texts."""
    if cfg.train.row.has(cells.DISCRIMINATOR):
        lr = cfg.train.value(DISCRIMINATOR_LR)
        name = DISCRIMINATOR
        yield policy_role(cfg, name, trained=True, head="values", lr=lr, saved=name)


def reference(cfg: Config) -> Iterator[Role]:
    """The policy as it was; without weights of its own it is the policy without its adapter."""
    if has_reference_model(cfg):
        temperature = cfg.rollout.temperature
        saved = REFERENCE if cfg.train.row.moves_reference else None
        yield policy_role(cfg, REFERENCE, temperature=temperature, saved=saved)


def teachers(cfg: Config) -> Iterator[Role]:
    """Models that score what the policy samples, each on the engine that trains it."""
    asked = cfg.model.teachers if has_teacher(cfg) else {}
    for name, teacher in asked.items():
        role = f"{TEACHER}{name}"
        temperature = cfg.rollout.temperature
        if teacher.own_weights and teacher.name:
            yield Role(
                name=role,
                model=teacher.name,
                temperature=temperature,
                revision=teacher.revision,
                dtype=teacher.dtype,
                device=teacher.device,
                seed=role,
            )
        elif teacher.own_weights:
            saved = role if teacher.follows else None
            yield policy_role(
                cfg,
                role,
                temperature=temperature,
                saved=saved,
                dtype=teacher.held_dtype,
                device=teacher.device,
            )


# In the order in which every rank builds them.
MODELS: list[Callable[[Config], Iterator[Role]]] = [
    policy,
    critic,
    discriminator,
    reference,
    teachers,
]


def roles_of(cfg: Config) -> list[Role]:
    """List the models of a run that have weights of their own."""
    return [role for rows in MODELS for role in rows(cfg)]
