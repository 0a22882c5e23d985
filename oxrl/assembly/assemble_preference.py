"""The learner of preferences, with the reference that it is compared with, and its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.given_rows import holds_singles, load_rows
from oxrl.config import Config
from oxrl.data.dataset import Dataset
from oxrl.data.order import first_draws
from oxrl.engines.train.trainer import AdapterOff
from oxrl.recipes.preference import PreferenceLearner
from oxrl.recipes.preference_objective import PreferenceObjective
from oxrl.recipes.preference_reference import ReferenceCache
from oxrl.recipes.session import Session
from oxrl.tables.preference import METHODS


def build_preference(
    assembly: Assembly, session: Session
) -> tuple[PreferenceLearner, partial[Dataset[Any]]]:
    """The policy with the reference that it is compared with, and what reads its rows."""
    cfg = assembly.cfg
    train = cfg.train
    method = METHODS[train.alg_name]
    model = assembly.policy_to_train(on_meta=assembly.cuts_weights())
    engine = assembly.trainer(model, complete=True)
    read = (*method.reads, *method.around)
    objective = PreferenceObjective(
        method=method,
        numbers={number.name: train.value(number) for number in read},
        mix=train.mix,
        policy=engine,
        moving_reference=assembly.scorer() if method.moves_reference else None,
        pad_id=assembly.pad_id,
        images=assembly.images,
    )
    references = None
    if method.reference and objective.moving_reference is None:
        # Without an adapter the policy still is its own reference: nothing has been trained or
        # restored yet.
        reference = AdapterOff(engine) if cfg.lora.rank else engine
        references = ReferenceCache(objective, reference, cfg.run.directory, session)
    learner = PreferenceLearner(
        engine=engine,
        session=session,
        pad_id=assembly.pad_id,
        images=assembly.images,
        rows_per_step=cfg.data.rows_per_step,
        objective=objective,
        seed=cfg.run.seed,
        held_out_singles=cfg.data.eval is not None and holds_singles(cfg),
    )
    return learner, partial(load_judged, assembly, references)


def load_judged(
    assembly: Assembly, references: ReferenceCache | None, path: str, *, held_out: bool
) -> Dataset[Any]:
    """Judged completions, with what the reference says of them where it stays.

    Args:
        references: None where it does not, or there is none.
    """
    cfg = assembly.cfg
    method = METHODS[cfg.train.alg_name]
    data: Any = load_rows(assembly, path, held_out=held_out)
    singles = holds_singles(cfg) if held_out else method.unpaired
    if singles and "kl_baseline" in method.extras:
        data = data.with_mismatched()
    if cfg.train.alg_name == "sampo":
        data = data.with_equal_lengths()
    if references is None:
        return data
    batches = read_at_once(cfg, path, len(data), held_out=held_out)
    return data.with_reference(*references.logprobs(data, batches))


def read_at_once(cfg: Config, path: str, size: int, *, held_out: bool) -> Iterable[Sequence[int]]:
    """Indices of the rows of a file that the run looks at, as the reference reads them."""
    per_step = cfg.data.rows_per_step
    if held_out:
        everything = range(size)
        return [everything[start : start + per_step] for start in range(0, size, per_step)]
    return first_draws(
        cfg.data.train,
        path,
        size,
        steps=cfg.run.steps,
        per_step=per_step,
        seed=cfg.run.seed,
    )
