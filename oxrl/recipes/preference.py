"""Preference learning: judged completions -> sums of log-probabilities -> a loss of the table of
preference methods -> update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from oxrl.assembly.assembly import build_reference, cuts_weights, load_policy_to_train, row_options
from oxrl.config import Config
from oxrl.data.layouts import in_our_words
from oxrl.data.order import first_draws
from oxrl.data.preferences import Judged, PreferenceDataset
from oxrl.data.rows import read_rows
from oxrl.engines.train.trainer import AdapterOff
from oxrl.recipes.offline_loop import Learner, LookedAt, Memory, Stepped, learn
from oxrl.recipes.preference_batch import BeforeStep, with_statistics
from oxrl.recipes.preference_evaluation import evaluate_pairs, evaluate_singles
from oxrl.recipes.preference_objective import WANT, build_objective
from oxrl.recipes.preference_reference import ReferenceCache, follow
from oxrl.recipes.session import Session
from oxrl.recipes.step import apply_step
from oxrl.seeds import stable_seed
from oxrl.tables.preference import METHODS
from oxrl.types import Metrics

log = logging.getLogger(__name__)


def train(cfg: Config, session: Session) -> None:
    """Learn which completions are better, from the judgements in `data.train`."""
    learn(cfg, session, PreferenceLearner(cfg, session))


class PreferenceLearner(Learner[Judged]):
    """A policy that learns from judged completions, and the reference that it is compared with."""

    def __init__(self, cfg: Config, session: Session) -> None:
        super().__init__(cfg, session, load_policy_to_train(cfg, later=cuts_weights(cfg)))
        self.method = METHODS[cfg.train.alg_name]
        self.moving_reference = None
        if self.method.moves_reference:
            self.moving_reference = build_reference(cfg, ranks=session.ranks)
            self.engines["reference"] = self.moving_reference
        self.objective = build_objective(cfg, self.engine, self.moving_reference, self.pad_id)
        self.references: ReferenceCache | None = None
        if self.method.reference and self.moving_reference is None:
            # Without an adapter the policy still is its own reference: nothing has been trained or
            # restored yet.
            reference = AdapterOff(self.engine) if cfg.lora.rank else self.engine
            self.references = ReferenceCache(self.objective, reference, cfg.run.directory, session)
        self.held_out_unpaired = cfg.data.eval is not None and holds_singles(cfg)

    def load(self, path: str, *, held_out: bool) -> PreferenceDataset:
        unpaired = self.held_out_unpaired if held_out else self.method.unpaired
        options = row_options(self.cfg, held_out, unpaired=unpaired)
        data = PreferenceDataset.load(path, self.tokenizer, options)
        if unpaired and "kl_baseline" in self.method.extras:
            data = data.with_mismatched()
        if self.cfg.train.alg_name == "sampo":
            data = data.with_equal_lengths()
        if self.references is None:
            return data
        batches = self._read_at_once(path, len(data), held_out=held_out)
        return data.with_reference(*self.references.logprobs(data, batches))

    def _read_at_once(self, path: str, size: int, *, held_out: bool) -> Iterable[Sequence[int]]:
        """Indices of the rows of a file that the run looks at, as the reference reads them."""
        per_step = self.cfg.data.rows_per_step
        if held_out:
            everything = range(size)
            return [everything[start : start + per_step] for start in range(0, size, per_step)]
        return first_draws(
            self.cfg.data.train,
            path,
            size,
            steps=self.cfg.run.steps,
            per_step=per_step,
            seed=self.cfg.run.seed,
        )

    def update(self, units: list[Judged], step: int, memory: Memory) -> Stepped:
        self._move_reference(step)
        before = BeforeStep(
            objective=self.objective,
            batch=self.objective.batch(units, rows=1 if self.method.unpaired else 2),
            units=units,
            memory=memory,
            seed=stable_seed("preference", self.cfg.run.seed, step),
        )
        batch = with_statistics(before)
        metrics = apply_step(self.engine, self.session, batch, self.objective.loss, WANT, step=step)
        metrics["data/rows"] = float(len(units))
        return metrics, float(batch.inputs.attention_mask.sum())

    def evaluate(self, held_out: LookedAt[Judged]) -> Metrics:
        evaluate = evaluate_singles if self.held_out_unpaired else evaluate_pairs
        return evaluate(self.objective, held_out, self.cfg.data.rows_per_step)

    def _move_reference(self, step: int) -> None:
        if self.moving_reference is None or step == 1:
            return
        numbers = self.objective.numbers
        if (step - 1) % int(numbers["reference_sync_steps"]) == 0:
            follow(self.moving_reference, self.engine, numbers["reference_sync_rate"])


def holds_singles(cfg: Config) -> bool:
    """Whether the rows of data.eval are single judged completions, not pairs."""
    first = next(read_rows(cfg.data.eval or ""), None)
    return first is not None and "chosen" not in in_our_words(first, cfg.data.columns).fields
