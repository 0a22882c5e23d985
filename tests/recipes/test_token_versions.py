"""Every token is of the weights whose version it carries, and a proof of their delivery changes
nothing, with requests that run all the while.

pytest tests/recipes/test_token_versions.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oxrl.assembly import assemble, sampler_processes
from oxrl.assembly.assembly import Assembly
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.delivery import SharedWeights
from oxrl.engines.delivery.sync import WeightSync
from oxrl.engines.sample import local
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.errors import InvariantError
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.usercode import worker as worker_module
from support.sampling_processes import FORKING
from support.small_runs import final_files, rl_config

pytestmark = pytest.mark.timeout(300)
Patch = pytest.MonkeyPatch
TEMPERATURE = 0.8
# Sampler, processes that sample, batches of lag, minibatches, decode rounds of a batch.
Kind = tuple[str, int, int, int, int]
QUICK: Kind = ("local", 0, 2, 1, 3)
CACHED: Kind = ("cached", 0, 3, 1, 4)
IN_TWO: list[Kind] = [("local", 2, 2, 1, 2), ("cached", 2, 2, 2, 4)]
FURTHER: list[Kind] = [CACHED, ("local", 0, 1, 2, 5), *IN_TWO]
full = pytest.mark.full
KINDS = [QUICK, *(pytest.param(kind, marks=full) for kind in FURTHER)]


@pytest.fixture(autouse=True)
def _quick_to_start(monkeypatch: Patch) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)


def config(folder: Path, name: str, kind: Kind, **engine: int) -> Config:
    """Six batches of eight samples, a checkpoint of every version, every token recorded."""
    _, processes, ahead, minibatches, rounds = kind
    if not (folder / "model").is_dir():
        builtin_policy("builtin:tiny", seed=3).save_pretrained(folder / "model")
        builtin_tokenizer().save_pretrained(folder / "model")
    steps = 6 * minibatches
    return rl_config(
        folder,
        name,
        model={"name": str(folder / "model")},
        inference_engine={"max_rows": 6, "processes": processes} | engine,
        rollout={
            "max_tokens": 12,
            "n_samples": 4,
            "temperature": TEMPERATURE,
            "max_staleness": ahead * minibatches,
            "rounds": rounds,
            "force_strict_on_policy": False,
        },
        data={"prompts_per_step": 2},
        train={"alg_name": "sgrpo", "lr": 1e-2, "minibatches": minibatches},
        run={
            "steps": steps,
            "record": "tokens",
            "checkpoint_every": minibatches,
            "keep_checkpoints": steps,
        },
    )


def choose(kind: Kind, patch: Patch) -> None:
    """Have models sampled from as a kind says, here and in processes that are forked from here."""
    if kind[0] == "cached":
        patch.setattr(local, "FAST", frozenset())


Sample = dict[str, Any]


def samples_of(run_dir: Path) -> list[Sample]:
    """Prompt, response, log-probabilities and versions of every sample."""
    found: list[Sample] = []
    for path in sorted((run_dir / "rollouts").glob("*.samples.jsonl")):
        for line in path.read_text().splitlines()[1:]:
            group = json.loads(line)
            for response in group["responses"]:
                (segment,) = response["completion"]["segments"]
                found.append({"prompt": group["prompt"]["token_ids"], **segment})
    return found


def mixed_share(samples: list[Sample]) -> float:
    """The share of samples that are of several versions."""
    return sum(len(set(sample["versions"])) > 1 for sample in samples) / len(samples)


@torch.no_grad()
def scored(model: PreTrainedModel, sample: Sample) -> Tensor:
    """The log-probability of every token of a response, read as a whole."""
    tokens = torch.tensor([sample["prompt"] + sample["token_ids"]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(sample["prompt"]) - 1 : -1]
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    return logprobs[torch.arange(len(logprobs)), torch.tensor(sample["token_ids"])]


def farthest(cfg: Config) -> float:
    """How far a recorded log-probability is from what its version says, at most, in nats."""
    run_dir = cfg.run.directory
    samples = samples_of(run_dir)
    worst = 0.0
    for version in sorted({version for sample in samples for version in sample["versions"]}):
        checkpoint = run_dir / "checkpoints" / f"step_{version:08d}"
        folder = cfg.model.name if version == 0 else checkpoint
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(folder))
        for sample in samples:
            own = torch.tensor(sample["versions"]) == version
            if own.any():
                off = scored(model, sample) - torch.tensor(sample["logprobs"])
                worst = max(worst, off[own].abs().max().item())
    return worst


NOTABLY = 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_of_the_weights_of_its_version(
    kind: Kind, tmp_path: Path, monkeypatch: Patch
) -> None:
    choose(kind, monkeypatch)
    cfg = config(tmp_path, "run", kind)
    run(cfg)
    samples = samples_of(cfg.run.directory)
    assert len(samples) == 48
    assert mixed_share(samples) >= 1 / 3
    assert farthest(cfg) <= NOTABLY


def nothing_forgotten(patch: Patch) -> None:
    """What was computed with the weights before a delivery is kept."""
    patch.setattr(LocalSampler, "_forget_computed", lambda self: None)
    patch.setattr(CachedSampler, "_forget_computed", lambda self: None)


def set_version(engine: Any, version: int) -> None:
    """In whichever process samples."""
    engine._version = version


def version_noted_early(patch: Patch) -> None:
    """The version of the next weights is noted before the rounds for which a batch trains."""
    source: Any = ContinuousRollouts
    begin = source._begin

    def note_and_begin(self: Any) -> None:
        next_version = (self._batch + 1) * self._updates
        workers = getattr(self._sampler, "members", None)
        if workers is None:
            set_version(self._sampler, next_version)
        else:
            for worker in workers.values():
                worker.call(set_version, next_version)
        begin(self)

    patch.setattr(ContinuousRollouts, "_begin", note_and_begin)


def scores_replaced(patch: Patch) -> None:
    """Tokens that were sampled before a delivery get what the new weights say of them."""
    update = ModuleSampler.update_weights

    @torch.inference_mode()
    def update_and_score(self: Any, buckets: Any, version: int) -> Any:
        answer = update(self, buckets, version)
        for slots in self._rows():
            contexts = slots.contexts()
            said = self.logprobs(contexts, TEMPERATURE)
            for slot, row in enumerate(said):
                prompt = len(slots.requests[slot].prompt.token_ids)
                new = torch.tensor(row[prompt:])
                slots.sampled["logprobs"][slot, : len(new)] = new
        return answer

    patch.setattr(ModuleSampler, "update_weights", update_and_score)


MUTANTS = [nothing_forgotten, version_noted_early, scores_replaced]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize(
    "kind", [QUICK, *(pytest.param(kind, marks=full) for kind in (CACHED, *IN_TWO))]
)
def test_tokens_of_other_weights_are_found(
    kind: Kind, mutant: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    choose(kind, monkeypatch)
    mutant(monkeypatch)
    cfg = config(tmp_path, "run", kind)
    run(cfg)
    assert farthest(cfg) > 10 * NOTABLY


def prove_every_delivery(patch: Patch) -> None:
    """Have the sampler of this process hold weights of its own, and every delivery proved."""

    def build(assembly: Assembly, stack: ExitStack) -> assemble.Engines:
        trainers = assembly.trainers()
        policy = trainers["policy"]
        limits = assembly.limits(cast(PreTrainedModel, policy.model))
        sampler = sampler_processes.sampler_here(assembly)
        delivery = sampler_processes.proved_delivery(assembly, policy, sampler, limits)
        delivery.options = replace(delivery.options, probe_every=1)
        return assemble.Engines(trainers, sampler, limits, delivery)

    patch.setattr(assemble, "build_engines", build)


def count_perturbed(patch: Patch) -> list[str]:
    """Note, as they come, deliveries and perturbed copies."""
    seen: list[str] = []
    for name in ("deliver", "_prove_perturbed"):
        own = getattr(WeightSync, name)

        def noted(self: Any, given: Any, own: Any = own, name: str = name) -> None:
            seen.append(name)
            own(self, given)

        patch.setattr(WeightSync, name, noted)
    return seen


def plain_delivery(
    assembly: Assembly, policy: Any, sampler: Any, limits: Any, transport: Any = None
) -> SharedWeights:
    """In place of a proved one: the weights are sent, and nobody asks what became of them."""
    return SharedWeights(policy, sampler)


def plain_and_proved(folder: Path, kind: Kind, patch: Patch) -> tuple[Config, Config]:
    """The same run twice, with and without a proof of every delivery."""
    choose(kind, patch)
    processes = kind[1]
    plain = config(folder, "plain", kind)
    proved = config(folder, "proved", kind, **({"probe_every": 1} if processes else {}))
    with pytest.MonkeyPatch.context() as without:
        if processes:
            without.setattr(sampler_processes, "proved_delivery", plain_delivery)
        run(plain)
    if not processes:
        prove_every_delivery(patch)
    seen = count_perturbed(patch)
    run(proved)
    batches = proved.run.steps // proved.train.updates
    assert seen == ["deliver", "_prove_perturbed"] * batches
    return plain, proved


def same_samples(one: Config, other: Config) -> bool:
    """Whether tokens, versions and log-probabilities of every sample are the same."""
    return samples_of(one.run.directory) == samples_of(other.run.directory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_proved_delivery_changes_nothing_of_what_is_running(
    kind: Kind, tmp_path: Path, monkeypatch: Patch
) -> None:
    plain, proved = plain_and_proved(tmp_path, kind, monkeypatch)
    samples = samples_of(proved.run.directory)
    assert mixed_share(samples) >= 1 / 3
    assert min(version for sample in samples for version in sample["versions"]) == 0
    assert same_samples(plain, proved)
    name = "model.safetensors"
    assert final_files(plain.run.directory)[name] == final_files(proved.run.directory)[name]


@full
def test_a_proof_during_which_rows_go_on_is_found(tmp_path: Path, monkeypatch: Patch) -> None:
    score = ModuleSampler.logprobs

    def score_and_go_on(self: Any, *asked: Any) -> Any:
        if self._here and not self._finished:
            self._work()
        return score(self, *asked)

    monkeypatch.setattr(ModuleSampler, "logprobs", score_and_go_on)
    # Its tokens are of the perturbed copy, which is older than everything.
    with pytest.raises(InvariantError, match="lags? 3 weight versions"):
        plain_and_proved(tmp_path, QUICK, monkeypatch)
