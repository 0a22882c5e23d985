"""A sampler with weights of few bits: how they are rounded, and that it provably has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from oxrl.commands.train import run
from oxrl.engines.delivery.proof import perturb
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train import Bucket
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError, WeightSyncError
from oxrl.modelfiles.dims import model_dims
from oxrl.models.rounded import round_rows
from oxrl.plan.memory import memory
from oxrl.types import Prompt, Request, Sampling
from oxrl.usercode import worker
from support.killed_runs import killed_until_done
from support.known_weights import model_that_adds
from support.sampling_processes import FORKING
from support.small_runs import final_files, metric_lines, rl_config
from support.weight_attacks import Remote, small_step, synced, tiny_model


def by_definition(weight: NDArray[Any], bits: int) -> NDArray[Any]:
    """Row by row, in double precision."""
    most = 2 ** (bits - 1) - 1
    rounded = np.zeros(weight.shape)
    for at in np.ndindex(weight.shape[:-1]):
        row = weight[at].astype(np.float64)
        step = np.abs(row).max() / most
        if step:
            rounded[at] = np.rint(row / step) * step
    return rounded


# --- Rounding.
def test_rows_have_a_step_of_their_own() -> None:
    weight = torch.tensor([[1.27, -0.004, 0.016, 0.5], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.1, 0.9, 1]])
    found = round_rows(weight, 8)
    expected = torch.tensor([[1.27, 0.0, 0.02, 0.5], [0.0] * 4, [-254.0, 4.0, 0.0, 0.0]])
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    two_bits = round_rows(weight, 2)
    expected = torch.tensor([[1.27, 0.0, 0.0, 0.0], [0.0] * 4, [-254.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(two_bits, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(40, 33), (3, 7, 64)])
def test_every_weight_is_within_half_a_step(bits: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    found = round_rows(weight, bits)
    most = 2 ** (bits - 1) - 1
    step = weight.abs().amax(-1, keepdim=True) / most
    assert ((found - weight).abs() <= step * 0.5001).all()
    counts = found / step
    assert torch.allclose(counts, counts.round(), atol=1e-4)
    assert int(counts.round().unique().numel()) <= 2 * most + 1
    assert torch.allclose(
        found.double(), torch.from_numpy(by_definition(weight.numpy(), bits)), atol=1e-5
    )


def test_a_row_does_not_depend_on_other_rows_and_vectors_stay() -> None:
    weight = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    whole = round_rows(weight, 8)
    for row in range(50):
        assert torch.equal(round_rows(weight[row : row + 1], 8)[0], whole[row])
    norm = torch.randn(20)
    assert round_rows(norm, 8) is norm
    assert round_rows(weight.bfloat16(), 8).dtype == torch.bfloat16


# --- Delivery.
def rounded_policy(seed: int = 0) -> LocalTrainer:
    return LocalTrainer(tiny_model(seed), TrainerOptions(lr=1e-3))


def test_every_delivery_leaves_the_sampler_with_the_rounded_weights() -> None:
    policy = rounded_policy()
    sampler = Remote(tiny_model(5))
    sync = synced(sampler, policy, bits=8)
    for version in range(3):
        sync.deliver(version)
        for (name, mine), held in zip(
            policy.model.named_parameters(), sampler.model.parameters(), strict=True
        ):
            if mine.dim() < 2:
                assert torch.equal(held, mine)
                continue
            expected = torch.from_numpy(by_definition(mine.detach().numpy(), 8))
            assert torch.allclose(held.double(), expected, rtol=0, atol=1e-6), name
            assert not torch.equal(held, mine)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.5).add_(0.01)
    metrics = sync.metrics()
    assert metrics["sync/retries"] == 0 and metrics["sync/probe_limit_share"] < 1


class Unrounded(Remote):
    """A sampler that keeps what it was told to round, and says that it got what was sent."""

    weights: Mapping[str, Tensor]

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        answered = super().update_weights(buckets, version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.weights:
                    parameter.copy_(self.weights[name])
        return answered

    def held(self) -> Mapping[str, str]:
        return {}


def test_a_sampler_with_the_policys_own_weights_is_found_by_what_it_says() -> None:
    """Two bits, so that rounding is more than the limit of a right sampler."""
    policy = rounded_policy()
    sampler = Unrounded(tiny_model(5))
    sampler.weights = dict(policy.model.named_parameters())
    with pytest.raises(WeightSyncError, match="does not use it"):
        synced(sampler, policy, bits=2, probe_every=0).deliver(0)


@pytest.mark.parametrize("bits", [None, 7])
def test_weights_that_are_rounded_otherwise_are_found(bits: int | None) -> None:
    policy = rounded_policy()

    def otherwise(bucket: Bucket) -> Bucket:
        own = dict(policy.model.named_parameters())
        changed: list[tuple[str, Tensor]] = []
        for name, _ in bucket:
            weight = own[name].detach()
            changed.append((name, weight if bits is None else round_rows(weight, bits)))
        return changed

    with pytest.raises(WeightSyncError, match="arrived changed"):
        synced(Remote(tiny_model(5), otherwise), policy, bits=8).deliver(0)


def test_weights_of_the_step_before_are_found() -> None:
    """Though a step may be less than rounding: then both are the same weights indeed."""
    policy = rounded_policy()
    sampler = Remote(tiny_model(5))
    sync = synced(sampler, policy, bits=8)
    sync.deliver(0)
    stale = {name: weight.clone() for name, weight in sampler.model.named_parameters()}
    small_step(policy)
    sampler.attack = lambda bucket: [(name, stale[name]) for name, _ in bucket]
    with pytest.raises(WeightSyncError, match="arrived changed"):
        sync.deliver(1)


def test_what_is_rounded_is_the_perturbed_copy_too() -> None:
    """Else the proof would compare it with weights that nobody has."""
    policy = rounded_policy()
    seen: list[Bucket] = []
    sampler = Remote(tiny_model(5), lambda bucket: (seen.append(bucket), bucket)[1])
    synced(sampler, policy, bits=8, probe_every=0).deliver(0)
    name, first = seen[0][0]
    weight = policy.model.get_parameter(name).detach()
    assert torch.equal(first, round_rows(perturb(weight), 8))


# --- Samples.
def test_a_token_does_not_depend_on_the_rows_beside_it() -> None:
    texts: list[list[tuple[int, ...]]] = []
    for max_rows in (1, 4):
        sampler = Remote(tiny_model(5))
        sampler.max_rows = max_rows
        policy = rounded_policy()
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0)  # a random model says the same of all tokens
        synced(sampler, policy, bits=8).deliver(0)
        requests = [
            Request(
                id=str(at),
                prompt=Prompt(uid=str(at), messages=(), token_ids=tuple(range(3, 6 + at))),
                draw=at,
                sample=0,
                sampling=Sampling(max_tokens=9),
                seed=at,
            )
            for at in range(6)
        ]
        done = generate(sampler, requests, deadline_s=60)
        texts.append([completion.token_ids for completion in done])
    assert texts[0] == texts[1]


# --- Runs.
def rounded_run(folder: Path, name: str, **sections: Any) -> Any:
    if not (folder / "model").is_dir():
        model_that_adds(folder / "model")
    return rl_config(
        folder,
        name,
        model={"name": str(folder / "model")},
        run={"steps": 3, "checkpoint_every": 1, "keep_checkpoints": 5} | sections.pop("run", {}),
        rollout={"max_tokens": 8, "n_samples": 4} | sections.pop("rollout", {}),
        train={"alg_name": "sgrpo", "lr": 1e-2} | sections.pop("train", {}),
        inference_engine={"weights": "int8"} | sections.pop("inference_engine", {}),
        **sections,
    )


@pytest.mark.parametrize("processes", [0, 1])
def test_a_run_samples_with_rounded_weights_and_corrects_for_it(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "subprocess", FORKING)
    cfg = rounded_run(tmp_path, "rounded", inference_engine={"processes": processes})
    assert cfg.train.correction == "truncate"
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 3
    # A few parts in a thousand of the weights, and no more.
    assert all(1e-5 < line["mismatch/abs_logdiff_mean"] < 0.2 for line in lines)
    assert all(line["sync/retries"] == 0 for line in lines)
    same = rounded_run(tmp_path, "again")
    run(same)
    assert final_files(same.run.directory) == final_files(cfg.run.directory)


def test_a_run_that_is_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole = rounded_run(tmp_path, "whole")
    run(whole)
    cut = rounded_run(tmp_path, "cut")
    killed_until_done(cut, kills=1, seed=1)
    assert final_files(cut.run.directory) == final_files(whole.run.directory)
    assert metric_lines(cut.run.directory) == metric_lines(whole.run.directory)


def test_ahead_of_training_the_sampler_has_rounded_weights_of_older_steps(tmp_path: Path) -> None:
    ahead = {"max_staleness": 1, "force_strict_on_policy": False, "rounds": 6}
    cfg = rounded_run(tmp_path, "ahead", rollout=ahead, run={"steps": 4})
    run(cfg)
    assert len(metric_lines(cfg.run.directory)) == 4


def test_its_copy_is_counted_in_memory(tmp_path: Path) -> None:
    cfg = rounded_run(tmp_path, "rounded")
    usual = rounded_run(tmp_path, "usual", inference_engine={"weights": "trained"})
    dims = model_dims(cfg.model.name)
    assert dims is not None
    more = memory(cfg, dims).held - memory(usual, dims).held
    assert more == 4 * dims.parameters


@pytest.mark.parametrize(
    ("sections", "field", "told"),
    [
        ({"inference_engine": {"name": "vllm"}}, "inference_engine.weights", "name: local"),
        ({"run": {"exact": True}}, "inference_engine.weights", "contradict"),
        ({"train": {"backend": "fsdp"}}, "inference_engine.weights", "pieces of rows"),
        ({"lora": {"rank": 4}}, "inference_engine.weights", "lora.delivery to merged"),
        ({"inference_engine": {"weights": "int4"}}, "inference_engine.weights", "int8"),
    ],
)
def test_what_has_no_rounded_weights_is_refused(
    tmp_path: Path, sections: dict[str, Any], field: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){field}.*{told}"):
        rounded_run(tmp_path, "refused", **sections)


def test_an_adapter_is_merged_and_then_rounded(tmp_path: Path) -> None:
    cfg = rounded_run(tmp_path, "merged", lora={"rank": 4, "delivery": "merged"})
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert all(line["mismatch/abs_logdiff_mean"] > 1e-5 for line in lines)
