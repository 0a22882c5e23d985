"""Rollouts that go on while a batch trains: every token has the log-probability of its version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.rows import Prompts
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.engines.train import Buckets, Fingerprints
from oxrl.rollouts.continuous import ContinuousRollouts
from support.fresh_scores import assert_every_token_is_of_its_version
from support.sampling_processes import FORKING
from support.small_runs import model_that_stops, rl_config

TEMPERATURE = 1.3
# (which sampler, processes that sample)
PLACES = {
    "local": ("local", 0),
    "cached": ("cached", 0),
    "local, two processes": ("local", 2),
    "cached, two processes": ("cached", 2),
}
Patch = pytest.MonkeyPatch


def use(place: str, patch: Patch) -> int:
    """Have runs sample so; how many processes do."""
    sampler, processes = PLACES[place]
    if sampler == "cached":
        patch.setattr("oxrl.engines.sample.local.attends_to_everything", lambda *given: False)
    # They have what is patched here.
    patch.setattr("oxrl.usercode.worker.subprocess", FORKING)
    return processes


def config(
    folder: Path, processes: int, *, ahead: int, rounds: int, steps: int, **train: Any
) -> Config:
    """A run that keeps everything it sampled, and all the weights that it had."""
    model_that_stops(folder / "model")
    train = {"alg_name": "sgrpo", "lr": 1e-2} | train
    updates = train.get("minibatches", 1)
    overrides = [f"inference_engine.max_rows={6 // max(1, processes)}"]
    if processes:
        overrides.append(f"inference_engine.processes={processes}")
    return rl_config(
        folder,
        "run",
        overrides,
        model={"name": str(folder / "model")},
        data={"prompts_per_step": 2},
        rollout={
            "max_tokens": 14,
            "n_samples": 4,
            "temperature": TEMPERATURE,
            "max_staleness": ahead * updates,
            "rounds": rounds,
            "force_strict_on_policy": False,
        },
        run={
            "steps": steps * updates,
            "record": "tokens",
            "checkpoint_every": 1,
            "keep_checkpoints": 50,
        },
        train=train,
    )


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("place", "ahead", "rounds", "train"),
    [
        ("local", 2, 3, {}),
        ("cached", 4, 2, {}),
        ("local, two processes", 2, 3, {}),
        pytest.param("local", 1, 1, {}, marks=FULL),
        pytest.param("local", 4, 5, {"minibatches": 2}, marks=FULL),
        pytest.param("local", 2, 2, {"alg_name": "remax", "lr": 2e-3}, marks=FULL),
        pytest.param("cached", 1, 4, {"minibatches": 2}, marks=FULL),
        pytest.param("local, two processes", 4, 5, {"minibatches": 2}, marks=FULL),
        pytest.param("cached, two processes", 3, 2, {}, marks=FULL),
    ],
)
def test_every_token_has_the_log_probability_of_its_version(
    place: str, ahead: int, rounds: int, train: dict[str, Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    processes = use(place, monkeypatch)
    cfg = config(tmp_path, processes, ahead=ahead, rounds=rounds, steps=7, **train)
    run(cfg)
    assert_every_token_is_of_its_version(cfg.run.directory, TEMPERATURE)


# --- Mutants, which the same check finds.


def keep_caches(patch: Patch, processes: int) -> None:
    """Keys and values outlive a delivery."""
    for sampler in (LocalSampler, CachedSampler):
        patch.setattr(sampler, "_forget_computed", lambda self: None)


def keep_prompts(patch: Patch, processes: int) -> None:
    """What was read of prompts outlives a delivery."""
    patch.setattr(Prompts, "drop_prefilled", lambda self: None)


def note_versions_early(patch: Patch, processes: int) -> None:
    """A version is noted, and tokens are sampled, before its weights are there."""
    if not processes:  # weights are the trainer's own: there at once when it has made them
        source: Any = ContinuousRollouts
        begin = source._begin

        def begin_with_the_next(self: Any) -> None:
            self._sampler._version += self._updates
            begin(self)

        patch.setattr(source, "_begin", begin_with_the_next)
        return
    update = ModuleSampler.update_weights

    def note_first(self: Any, buckets: Buckets, version: int) -> Fingerprints:
        self._version = version
        if any(slots.requests for slots in self._rows()):
            self._work()
        return update(self, buckets, version)

    patch.setattr(ModuleSampler, "update_weights", note_first)


def score_anew(patch: Patch, processes: int) -> None:
    """Tokens that are in flight get the log-probabilities of the weights that arrive."""
    update = ModuleSampler.update_weights

    @torch.inference_mode()
    def scored_anew(self: Any, buckets: Buckets, version: int) -> Fingerprints:
        fingerprints = update(self, buckets, version)
        for slots in self._rows():
            scores = self.logprobs(slots.contexts(), TEMPERATURE) if slots.requests else []
            for slot, row in enumerate(scores):
                count = int(slots.count[slot])
                slots.sampled["logprobs"][slot, :count] = torch.tensor(row[-count:])
        return fingerprints

    patch.setattr(ModuleSampler, "update_weights", scored_anew)


MUTANTS: dict[str, Callable[[Patch, int], None]] = {
    "caches kept": keep_caches,
    "versions noted early": note_versions_early,
    "old tokens scored anew": score_anew,
    "prompts kept": keep_prompts,
}


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        *(("local", mutant) for mutant in MUTANTS),
        ("cached", "caches kept"),
        pytest.param("cached", "versions noted early", marks=FULL),
        pytest.param("cached", "old tokens scored anew", marks=FULL),
        *(pytest.param("local, two processes", mutant, marks=FULL) for mutant in MUTANTS),
    ],
)
def test_a_mutant_is_caught(place: str, mutant: str, tmp_path: Path, monkeypatch: Patch) -> None:
    processes = use(place, monkeypatch)
    MUTANTS[mutant](monkeypatch, processes)
    cfg = config(tmp_path, processes, ahead=2, rounds=3, steps=5)
    run(cfg)
    with pytest.raises(AssertionError, match="tokens are up to .* nats off"):
        assert_every_token_is_of_its_version(cfg.run.directory, TEMPERATURE)
