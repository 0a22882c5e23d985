"""Preference learning: judged completions -> sums of log-probabilities -> a loss of Table B ->
update.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from oxrl.config import Config
from oxrl.data.preferences import Judged, PreferenceDataset, to_preference_batch
from oxrl.data.rows import read_rows
from oxrl.engines.train.base import Scorer, TrainEngine
from oxrl.engines.train.ranks import Ranks
from oxrl.engines.train.trainer import AdapterOff, Trainer
from oxrl.functional import preference_statistics as statistics
from oxrl.functional.preference_losses import PAIR_LOSSES, SINGLE_LOSSES
from oxrl.models.weights import fingerprint
from oxrl.recipes.build import (
    build_reference,
    build_tokenizer,
    build_trainer,
    load_policy_to_train,
    row_options,
)
from oxrl.recipes.objective import required
from oxrl.recipes.offline import run_steps
from oxrl.recipes.session import Session
from oxrl.recipes.step import apply_step
from oxrl.seeds import stable_seed
from oxrl.tables.preference import FIELDS, METHODS, Method
from oxrl.types import Metrics, Output, PreferenceBatch, TokenBatch

log = logging.getLogger(__name__)
WANT = frozenset({"logprobs"})
# Decay of running moments, as beta-DPO and alpha-DPO have it.
DECAY = 0.9
REFERENCE_ROWS = 256
# Nats per token by which the chosen completions may become less likely before the user is told.
DISPLACEMENT = 0.05
LOSSES: dict[str, Any] = {**PAIR_LOSSES, **SINGLE_LOSSES}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A method with the numbers of a run and the models it asks; of a reference that stays, a table
    will do.
    """

    method: Method
    numbers: Mapping[str, float]
    mix: Mapping[str, float]
    engine: Trainer
    moving: Trainer | None
    pad_id: int

    def ask(self, model: Scorer, inputs: TokenBatch) -> Tensor:
        """`model`'s log-probability of every row, [R * N]."""
        return self.sums(model.forward(inputs, WANT), inputs)[0]

    def batch(self, units: Sequence[Judged], rows: int) -> PreferenceBatch:
        """The first `rows` rows of each unit, with what a moving reference says of them now."""
        batch = to_preference_batch(units, self.pad_id, rows=rows)
        if self.moving is None:
            return batch
        return dataclasses.replace(batch, ref_logprobs=self.ask(self.moving, batch.inputs))

    def sums(self, output: Output, inputs: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probability, in nats, and trained tokens of every row, [R * N] each."""
        logprobs, mask = required(output.logprobs), inputs.response_mask
        total, lengths = statistics.sequence_logprobs(logprobs, mask)
        if (tail := self.numbers.get("tail_coeff")) is not None:
            shared = lengths.view(-1, 2).amin(1).repeat_interleave(2)
            total = statistics.length_desensitized_logprobs(logprobs, mask, shared, tail_coeff=tail)
        return total, lengths

    def loss(self, output: Output, batch: PreferenceBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss, or the weighted sum of its parts, and what is added to it, over one
        forward.
        """
        sums, lengths = self.sums(output, batch.inputs)
        ref = batch.ref_logprobs
        if batch.desirable is not None:
            tensors: tuple[Tensor | None, ...] = (sums, ref, batch.desirable, batch.loss_weights)
        else:
            refs = (None, None) if ref is None else (ref[0::2], ref[1::2])
            tensors = (
                sums[0::2],
                sums[1::2],
                *refs,
                lengths[0::2],
                lengths[1::2],
                batch.loss_weights,
            )
        total, metrics = sums.new_zeros(()), dict[str, Tensor]()
        own = {METHODS[name]: weight for name, weight in self.method.parts.items()} or {
            self.method: 1.0
        }
        added = {METHODS[name]: weight for name, weight in self.mix.items()}
        for part, weight in [*own.items(), *added.items()]:
            given = self.numbers if part in own else {}
            numbers = {name: given.get(name, default) for name, default in part.numbers.items()}
            extras = (batch.extras[name] for name in part.extras)
            function = LOSSES[part.loss]
            loss, more = function(*tensors, *extras, **numbers)
            total, metrics = total + weight * loss, more | metrics
        if ref is not None and batch.desirable is None:
            counts = batch.loss_weights != 0
            fallen = (ref[0::2] - sums[0::2].detach()) / lengths[0::2].clamp(min=1)
            metrics["preference/displacement"] = (fallen * counts).sum() / counts.sum().clamp(min=1)
        return total, metrics


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is
    one.
    """
    tokenizer, ranks, method = build_tokenizer(cfg), session.ranks, METHODS[cfg.train.alg_name]
    engine = build_trainer(cfg, load_policy_to_train(cfg), tokenizer, ranks=ranks)
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore
    numbers = {n: getattr(cfg.train, FIELDS.get(n, n)) for n in (*method.numbers, *method.knobs)}
    moving = None
    if "reference_sync_rate" in numbers:
        moving = build_reference(cfg, ranks=ranks)
    objective = Objective(
        method=method,
        numbers=numbers,
        mix=cfg.train.mix,
        engine=engine,
        moving=moving,
        pad_id=pad_id,
    )
    named = (
        f"{name} {fingerprint(tensor)}" for bucket in engine.weights() for name, tensor in bucket
    )
    digest = hashlib.sha256("\n".join(named).encode()).hexdigest()
    singly = cfg.data.eval is not None and "chosen" not in next(read_rows(cfg.data.eval)).fields

    def rows(path: str, held_out: bool) -> PreferenceDataset:
        unpaired = singly if held_out else method.unpaired
        options = row_options(cfg, held_out, unpaired=unpaired)
        data = PreferenceDataset.load(path, tokenizer, options)
        data = data.with_mismatched() if "kl_baseline" in method.extras and unpaired else data
        data = data.with_equal_lengths() if cfg.train.alg_name == "sampo" else data
        if not method.reference or moving is not None:
            return data
        # Without an adapter the policy still is its own reference: nothing has been trained or
        # restored yet.
        reference = AdapterOff(engine) if cfg.lora.rank else engine
        return data.with_reference(
            reference_sums(reference, objective, data, digest, cfg.run.directory, ranks)
        )

    drops: list[float] = []

    def step_on(units: list[Judged], step: int, memory: dict[str, Any]) -> tuple[Metrics, float]:
        if (
            moving is not None
            and step > 1
            and (step - 1) % int(numbers["reference_sync_steps"]) == 0
        ):
            follow(moving, engine, numbers["reference_sync_rate"])
        batch = objective.batch(units, rows=1 if method.unpaired else 2)
        batch = with_statistics(
            objective, batch, units, memory, seed=stable_seed("preference", cfg.run.seed, step)
        )
        metrics = apply_step(engine, session, batch, objective.loss, WANT, step=step)
        drops.append(metrics.get("preference/displacement", 0.0))
        if (
            len(drops) >= 10
            and min(drops[-10:]) > DISPLACEMENT
            and (len(drops) == 10 or drops[-11] <= DISPLACEMENT)
        ):
            fallen = f"step {step}: chosen completions have become {drops[-1]:.3g} nats per token less likely"
            cure = "an anchor (irpo, dpop), dpo_shift or a smaller lr holds them"
            log.warning("%s than under the reference (likelihood displacement); %s", fallen, cure)
        return metrics | {"data/rows": float(len(units))}, float(batch.inputs.attention_mask.sum())

    def evaluate(held_out: PreferenceDataset) -> Metrics:
        return evaluate_preferences(objective, held_out, singly=singly, rows=cfg.data.rows_per_step)

    engines = {".": engine} | ({"reference": moving} if moving is not None else {})
    run_steps(
        cfg, session, engines, rows, step_on, evaluate, best="eval/accuracy", lower_is_better=False
    )


def reference_sums(
    reference: Scorer,
    objective: Objective,
    data: PreferenceDataset,
    weights: str,
    folder: Path,
    ranks: Ranks,
) -> Tensor:
    """The reference's log-probability of every row of every unit, [units, R], from disk where it
    was computed before.

    The file's name hashes the weights, the tokens, what is trained and how it is summed; rank 0
    reads and writes it.
    """
    key = hashlib.sha256(f"{weights} {objective.numbers.get('tail_coeff')}".encode())
    for example in (
        example for units in data.batches(REFERENCE_ROWS) for unit in units for example in unit.rows
    ):
        key.update(
            np.array(
                [len(example.token_ids), *example.token_ids, *example.trained], dtype=np.int64
            ).tobytes()
        )
    path = folder / f"reference_{key.hexdigest()[:16]}.safetensors"
    found = ranks.agree(load_file(path)["logprobs"] if ranks.first and path.is_file() else None)
    if found is None:
        pieces: list[Tensor] = []
        for units in data.batches(REFERENCE_ROWS):
            sums = objective.ask(
                reference,
                to_preference_batch(units, objective.pad_id, rows=len(units[0].rows)).inputs,
            )
            pieces.append(sums.view(len(units), -1))
        found = torch.cat(pieces).float()
        if ranks.first:
            save_file({"logprobs": found}, partial := path.with_suffix(".partial"))
            os.replace(partial, path)
    return found


def follow(reference: Trainer, policy: TrainEngine, rate: float) -> None:
    """reference = rate * policy + (1 - rate) * reference. TR-DPO, arXiv:2404.09656, Eq. 3."""
    pairs = zip(
        chain.from_iterable(reference.weights()), chain.from_iterable(policy.weights()), strict=True
    )
    reference.set_weights(
        (name, held.lerp(current.to(held.dtype), rate)) for (name, held), (_, current) in pairs
    )


def with_statistics(
    objective: Objective,
    batch: PreferenceBatch,
    units: list[Judged],
    memory: dict[str, Any],
    *,
    seed: int,
) -> PreferenceBatch:
    """Add what the loss needs to know of the whole batch, from one forward without gradient before
    the step.
    """
    needed, numbers, engine = (
        set(objective.method.extras) - {"offsets"},
        objective.numbers,
        objective.engine,
    )
    if not needed:
        return batch
    ref = required(batch.ref_logprobs)
    if "kl_baseline" in needed:
        refs = [unit.ref_logprobs or () for unit in units]
        shown = [
            dataclasses.replace(u, rows=u.rows[1:], ref_logprobs=r[1:])
            for u, r in zip(units, refs, strict=True)
        ]
        other = to_preference_batch(shown, objective.pad_id, rows=1)
        sums = objective.ask(engine, other.inputs)
        return _with(batch, kl_baseline=statistics.kto_baseline(sums, required(other.ref_logprobs)))
    output = engine.forward(batch.inputs, WANT | {"sum_p_squared"})
    sums, lengths = objective.sums(output, batch.inputs)
    beta = numbers["beta"]
    u, v = (sums - ref)[0::2], (sums - ref)[1::2]
    if "reward_shift" in needed:
        mean, count = memory.get("mean", 0.0), memory.get("count", 0)
        shift, memory["count"] = statistics.bco_reward_shift(
            beta * (sums - ref), mean=mean, count=count
        )
        memory["mean"] = float(shift)
        return _with(batch, reward_shift=shift)
    if "matched_ref_margins" in needed:
        margins, ref_margins = sums[0::2] - sums[1::2], ref[0::2] - ref[1::2]
        return _with(batch, matched_ref_margins=statistics.rank_match(margins, ref_margins))
    if "matched_rejected" in needed:
        matched = {
            "matched_rejected": statistics.rank_match(u, v),
            "matched_chosen": statistics.rank_match(v, u),
        }
        return _with(batch, **matched)
    if "log_mean" in needed:
        losses, robustness = -F.logsigmoid(beta * (u - v)), numbers["robustness"]
        return _with(
            batch,
            log_mean=statistics.dr_dpo_log_mean(losses, batch.loss_weights, robustness=robustness),
        )
    if "pair_weights" in needed:
        squares, mask = required(output.sum_p_squared), batch.inputs.response_mask
        weights = statistics.wpo_weights(required(output.logprobs), squares, mask)
        return _with(batch, pair_weights=weights[0::2] * weights[1::2])
    if "standardized_gaps" in needed:
        gaps = u / lengths[0::2].clamp(min=1) - v / lengths[1::2].clamp(min=1)
        return _with(
            batch, standardized_gaps=statistics.standardize(gaps, **_moments(memory, gaps))
        )
    moments = _moments(memory, u - v)
    noise = torch.rand(len(u), generator=torch.Generator().manual_seed(seed)).clamp(1e-6, 1 - 1e-6)
    kept = statistics.beta_dpo_selection(u - v, noise, **moments, drop=numbers["drop_frac"])
    batch_beta = statistics.beta_dpo_beta(
        (u - v)[kept], mean=moments["mean"], beta=beta, scale=numbers["beta_scale"]
    )
    return _with(dataclasses.replace(batch, loss_weights=kept / kept.sum()), batch_beta=batch_beta)


def _with(batch: PreferenceBatch, **extras: Tensor) -> PreferenceBatch:
    return dataclasses.replace(batch, extras={**batch.extras, **extras})


def _moments(memory: dict[str, Any], values: Tensor) -> dict[str, float]:
    """Running mean and standard deviation with this batch in it; the first batch is taken as it
    is.
    """
    for name, now in (("mean", float(values.mean())), ("std", float(values.std(correction=0)))):
        memory[name] = DECAY * memory[name] + (1 - DECAY) * now if name in memory else now
    return {"mean": memory["mean"], "std": memory["std"]}


def evaluate_preferences(
    objective: Objective, data: PreferenceDataset, *, singly: bool, rows: int
) -> Metrics:
    """How often the implicit reward puts the better completion first, a tie counting one half.

    Reward: log-probability minus the reference's, per token where the method is. With `singly`,
    each desirable completion is compared with each undesirable one. `eval/longer_wins` is what
    preferring the longer one would score.
    """
    found, desirable = list[Tensor](), list[bool]()
    for units in data.batches(rows):
        batch = objective.batch(units, rows=1 if singly else 2)
        desirable += [unit.desirable for unit in units]
        sums, lengths = objective.sums(objective.engine.forward(batch.inputs, WANT), batch.inputs)
        rewards = sums if batch.ref_logprobs is None else sums - batch.ref_logprobs
        rewards = rewards / lengths.clamp(min=1) if objective.method.per_token else rewards
        found.append(torch.stack((rewards, sums, lengths)).double())
    values = torch.cat(found, 1)  # [3, R * N]: reward, log-probability, length
    if singly:
        good, bad = (
            values[0, torch.tensor(desirable)],
            values[0, ~torch.tensor(desirable)].sort().values,
        )
        below = (torch.searchsorted(bad, good) + torch.searchsorted(bad, good, right=True)) / 2
        return {"eval/accuracy": float(below.mean()) / max(len(bad), 1)}
    gaps = values[:, 0::2] - values[:, 1::2]
    wins = ((gaps.sign() + 1) / 2).mean(1)
    return {
        "eval/accuracy": float(wins[0]),
        "eval/margin": float(gaps[0].mean()),
        "eval/chosen": float(values[1, 0::2].mean()),
        "eval/rejected": float(values[1, 1::2].mean()),
        "eval/longer_wins": float(wins[2]),
    }
