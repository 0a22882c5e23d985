"""The machine of a run that learns from the rows of a file: what learns, and its rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.given_rows import load_rows
from oxrl.data.order import open_rows
from oxrl.functional.supervised_losses import dft_loss
from oxrl.models.self_checks import check_packing
from oxrl.recipes import offline_loop
from oxrl.recipes.offline_loop import Learner, OfflineMachine
from oxrl.recipes.session import Session
from oxrl.recipes.supervised import SupervisedLearner, loss_fn
from oxrl.tables.numbers import CENTER_COEFF


def train_offline(assembly: Assembly, session: Session) -> None:
    """Put a run together that learns from the rows of a file, and go through its loop.

    Args:
        assembly: has the parts.
        session: of the run.
    """
    offline_loop.train(assemble_offline(assembly, session), session)


def assemble_offline(assembly: Assembly, session: Session) -> OfflineMachine[Any]:
    """Put together everything that the loop over the rows of a file works with.

    Args:
        assembly: has the parts.
        session: of the run.
    """
    cfg = assembly.cfg
    data = cfg.data
    train = data.train
    if cfg.recipe == "rejection":
        from oxrl.assembly.answered import kept_samples  # others are given their rows

        train = str(kept_samples(assembly, session))
    load = partial(load_rows, assembly)
    if cfg.recipe == "preference":
        from oxrl.assembly.assemble_preference import build_preference  # others do without

        learner, load = build_preference(assembly, session)
    elif cfg.recipe == "reward_model":
        learner = build_reward_model(assembly, session)
    else:
        learner = build_supervised(assembly, session)
    rows = open_rows(train, partial(load, held_out=False), per_step=data.rows_per_step)
    return OfflineMachine(
        learner=learner,
        rows=rows,
        held_out=None if data.eval is None else load(data.eval, held_out=True),
        seed=cfg.run.seed,
        steps=cfg.run.steps,
        keep_best=cfg.run.keep_best,
    )


def build_supervised(assembly: Assembly, session: Session) -> Learner[Any]:
    """A model that imitates given answers."""
    cfg = assembly.cfg
    model = assembly.policy_to_train(on_meta=assembly.cuts_weights())
    engine = assembly.trainer(model, complete=True)
    generated = None
    if cfg.recipe == "supervised" and cfg.reward.exists:
        from oxrl.assembly.answered import build_generated  # given answers need no reward

        generated = build_generated(assembly, session, engine)
    if cfg.data.pack_tokens is not None:
        engine.checked(partial(check_packing, model))
    weighs = cfg.train.alg_name == "dft"
    return SupervisedLearner(
        engine=engine,
        session=session,
        pad_id=assembly.pad_id,
        images=assembly.images,
        rows_per_step=cfg.data.rows_per_step,
        best_metric="eval/loss" if generated is None else "eval/reward",
        lower_is_better=generated is None,
        pack_tokens=cfg.data.pack_tokens,
        generated=generated,
        loss=partial(loss_fn, of_tokens=dft_loss) if weighs else loss_fn,
        # Every other loss is the likelihood itself.
        nll="update/nll" if weighs else "update/loss",
    )


def build_reward_model(assembly: Assembly, session: Session) -> Learner[Any]:
    """A model that scores completions, or their steps."""
    from oxrl.recipes.reward_model import OutcomeLearner, ProcessLearner  # others do without

    train = assembly.cfg.train
    model = assembly.critic_to_train()
    by_steps = train.alg_name == "process_reward_model"
    model.kind = "process" if by_steps else "outcome"
    make = (
        ProcessLearner
        if by_steps
        else partial(OutcomeLearner, center_coeff=train.value(CENTER_COEFF))
    )
    return make(
        engine=assembly.trainer(model, complete=True),
        session=session,
        pad_id=assembly.pad_id,
        images=assembly.images,
        rows_per_step=assembly.cfg.data.rows_per_step,
    )
