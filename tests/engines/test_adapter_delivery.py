"""Adapters on their way to samplers: they alone travel, and what is under them is proved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.engines.delivery import sync as sync_module
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample import vllm_worker
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train import Bucket, Part
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.transport.base import BASE, MADE
from oxrl.errors import WeightSyncError
from oxrl.models.fingerprints import fingerprint
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.lora import AdapterOptions, add_adapter, merged_weights
from oxrl.types import TokenBatch
from support.adapter_runs import learn
from support.samplers import make_requests
from support.weight_attacks import ATTACKS, Attack

pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
TOKENIZER = load_tokenizer("builtin:tiny")
ALPHA, RANK = 6.0, 4
TINY = "builtin:tiny"


LORA = AdapterOptions(rank=RANK, alpha=ALPHA)
RSLORA = AdapterOptions(rank=RANK, alpha=ALPHA, rslora=True)
DORA = AdapterOptions(rank=RANK, alpha=ALPHA, dora=True)
KINDS = pytest.mark.parametrize("options", [LORA, RSLORA, DORA], ids=["lora", "rslora", "dora"])


@cache
def made(seed: int, dtype: torch.dtype, options: AdapterOptions) -> Any:
    model = load_policy(TINY, LoadOptions(seed=0, dtype=dtype))
    add_adapter(model, options, base=TINY, seed=seed)
    return model


def adapted(
    seed: int, dtype: torch.dtype = torch.float32, options: AdapterOptions | None = None
) -> Any:
    """The same model everywhere, with an adapter of its own seed; a copy takes less than making
    another.
    """
    return deepcopy(made(seed, dtype, options or LORA))


class Remote(LocalSampler):
    """A sampler with an adapter of its own, on a line on which somebody sits."""

    attack: Attack | None = None
    names: tuple[str, ...] = ()

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        arrived = [named for bucket in buckets for named in bucket]
        self.names = tuple(name for name, _ in arrived)
        return super().update_weights([self.attack(arrived) if self.attack else arrived], version)


def policy_of(
    dtype: torch.dtype = torch.float32, options: AdapterOptions | None = None
) -> LocalTrainer:
    """A policy whose adapter has learned something."""
    policy = LocalTrainer(adapted(1, dtype, options), TrainerOptions(lr=1e-3))
    learn(policy, 2)
    return policy


def sync_of(
    policy: Any,
    sampler: Any,
    dtype: torch.dtype = torch.float32,
    options: AdapterOptions | None = None,
) -> WeightSync:
    how = SyncOptions(dtype=dtype, vocabulary=261, temperature=1.0, probe_tokens=64, part="adapter")
    return WeightSync(policy, sampler, how, lambda: adapted(9, dtype, options))


def new_sampler(dtype: torch.dtype = torch.float32) -> Remote:
    return Remote(adapted(5, dtype), TOKENIZER, max_rows=4)


def scores(policy: LocalTrainer, rows: list[list[int]]) -> Tensor:
    tokens = torch.tensor(rows)
    real = torch.ones_like(tokens, dtype=torch.bool)
    inputs = TokenBatch(tokens=tokens, attention_mask=real, response_mask=real)
    found = policy.forward(inputs, frozenset({"logprobs"})).logprobs
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_alone_is_delivered_as_it_is_and_the_first_one_of_zeros_too(
    dtype: torch.dtype,
) -> None:
    sampler = new_sampler(dtype)
    fresh = LocalTrainer(adapted(1, dtype), TrainerOptions(lr=1e-3))
    sync = sync_of(fresh, sampler, dtype)
    sync.deliver(0)
    trained = {n: p for n, p in fresh.model.named_parameters() if p.requires_grad}
    assert set(sampler.names) == trained.keys()
    assert sync.metrics()["sync/sent_bytes"] == sum(p.nbytes for p in trained.values())
    learn(fresh, 3)
    sync.deliver(1)
    held = dict(sampler.model.named_parameters())
    assert all(torch.equal(held[name], trained[name]) for name in trained)
    rows = [[5, 6, 7, 8, 9], [20, 30, 40, 50, 60]]
    found = torch.tensor(sampler.logprobs(rows))
    close = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, scores(fresh, rows), rtol=0, atol=close)


@pytest.mark.parametrize(
    "attack", [attack for attack, _ in ATTACKS[:3]], ids=["dropped", "corrupted", "mis-cast"]
)
def test_an_adapter_that_arrives_otherwise_than_it_was_sent_is_refused(attack: Attack) -> None:
    policy, sampler = policy_of(), new_sampler()
    sync = sync_of(policy, sampler)
    sync.deliver(0)
    learn(policy, 4, 1e-6)
    sampler.attack = attack
    with pytest.raises(WeightSyncError, match=r"lora_B|lora_A"):
        sync.deliver(1)


class Liar(LocalTrainer):
    def weights(self, part: Part = "all") -> Iterator[Bucket]:
        for bucket in super().weights(part):
            yield [(name, tensor * 1.001) for name, tensor in bucket]


def test_a_trainer_that_lies_about_its_adapter_is_seen() -> None:
    liar = Liar(adapted(1), TrainerOptions(lr=1e-3))
    with pytest.raises(WeightSyncError, match="lora_A.*is not what the optimizer holds"):
        sync_of(liar, new_sampler()).deliver(0)


def test_another_model_under_the_adapter_is_found_once_and_a_change_of_it_later() -> None:
    name = "model.layers.1.mlp.up_proj.base_layer.weight"
    other = new_sampler()
    change_a_value(other, name)
    with pytest.raises(WeightSyncError, match=name):
        sync_of(policy_of(), other).deliver(0)
    sampler = new_sampler()
    sync = sync_of(policy_of(), sampler)
    sync.deliver(0)
    change_a_value(sampler, name)
    with pytest.raises(WeightSyncError, match=f"no longer computes.*{name}"):
        sync.deliver(1)


def change_a_value(sampler: LocalSampler, name: str) -> None:
    with torch.no_grad():
        values = sampler.model.get_parameter(name).view(-1)
        values[7] = torch.nextafter(values[7], torch.tensor(9.0))


@KINDS
def test_merged_weights_compute_what_the_adapter_does(options: AdapterOptions) -> None:
    policy = policy_of(options=options)
    merged = load_policy(TINY, LoadOptions(seed=0))
    adapter = {n: t for b in policy.weights("adapter") for n, t in b}
    assert len(adapter) == 14 * (3 if options.dora else 2)
    base = [(n, p.detach().clone()) for n, p in merged.named_parameters()]
    whole = dict(merged_weights(base, adapter, options.scale))
    assert list(whole) == [name for name, _ in base]
    with torch.no_grad():
        for name, weight in whole.items():
            merged.get_parameter(name).copy_(weight)
    rows = [[5, 6, 7, 8, 9]]
    found = torch.tensor(LocalSampler(merged, TOKENIZER).logprobs(rows))
    torch.testing.assert_close(found, scores(policy, rows), rtol=0, atol=1e-5)


def merging_sync(policy: LocalTrainer, sampler: Any, dtype: torch.dtype) -> WeightSync:
    """Delivers whole weights to a sampler that knows nothing of adapters."""
    how = SyncOptions(dtype=dtype, vocabulary=261, temperature=1.0, probe_tokens=64, part="merged")
    return WeightSync(policy, sampler, how, lambda: load_policy(TINY, LoadOptions(dtype=dtype)))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_delivery_samples_as_the_adapter_itself_does(
    options: AdapterOptions, dtype: torch.dtype
) -> None:
    policy = policy_of(dtype, options)
    plain = Remote(load_policy(TINY, LoadOptions(seed=3, dtype=dtype)), TOKENIZER)
    with_adapter = Remote(adapted(5, dtype, options), TOKENIZER)
    sync = merging_sync(policy, plain, dtype)
    other = sync_of(policy, with_adapter, dtype, options)
    for version in range(2):
        learn(policy, 7 + version)
        sync.deliver(version)
        other.deliver(version)
    metrics = sync.metrics()
    assert metrics["sync/retries"] == 0 and metrics["sync/probe_limit_share"] < 1
    weights = list(plain.model.named_parameters())
    assert plain.names == tuple(name for name, _ in weights)
    assert metrics["sync/sent_bytes"] == sum(weight.nbytes for _, weight in weights)
    rows = [[5, 6, 7, 8, 9], [20, 30, 40, 50, 60]]
    close = 1e-5 if dtype == torch.float32 else 0.1
    found = torch.tensor(plain.logprobs(rows))
    torch.testing.assert_close(found, scores(policy, rows), rtol=0, atol=close)
    if dtype == torch.float32:
        requests = make_requests(8)
        one, two = (generate(s, requests, deadline_s=60) for s in (plain, with_adapter))
        assert [c.token_ids for c in one] == [c.token_ids for c in two]


@pytest.mark.parametrize(
    "attack", [attack for attack, _ in ATTACKS[:3]], ids=["dropped", "corrupted", "mis-cast"]
)
def test_merged_weights_that_arrive_otherwise_than_they_were_sent_are_refused(
    attack: Attack,
) -> None:
    policy = policy_of()
    sampler = Remote(load_policy(TINY, LoadOptions(seed=3)), TOKENIZER)
    sync = merging_sync(policy, sampler, torch.float32)
    sync.deliver(0)
    sampler.attack = attack
    learn(policy, 4, 1e-6)
    with pytest.raises(WeightSyncError, match="after two attempts"):
        sync.deliver(1)


def test_a_trainer_that_merges_otherwise_than_its_optimizer_holds_is_seen() -> None:
    liar = Liar(adapted(1), TrainerOptions(lr=1e-3))
    sampler = Remote(load_policy(TINY, LoadOptions(seed=3)), TOKENIZER)
    with pytest.raises(WeightSyncError, match="embed_tokens.*is not what the optimizer holds"):
        merging_sync(liar, sampler, torch.float32).deliver(0)


class Merging(vllm_worker.WorkerExtension):
    """vLLM's worker around a model of Hugging Face's, which loads weights by their names."""

    def __init__(self, dtype: torch.dtype) -> None:
        model: Any = load_policy(TINY, LoadOptions(seed=0, dtype=dtype))
        self.device = torch.device("cpu")
        self.model = model
        self.model_runner = self
        self.model_config = self

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def get_model(self) -> Any:
        return self

    def named_parameters(self) -> Any:
        return self.model.named_parameters()

    @torch.no_grad()
    def load_weights(self, named: Bucket) -> set[str]:
        for name, tensor in named:
            self.model.get_parameter(name).copy_(tensor)
        return {name for name, _ in named}

    def reset_encoder_cache(self) -> None: ...

    def reset_mm_cache(self) -> None: ...


class MergingSampler(LocalSampler):
    """As VllmEngine with an adapter's scale: what arrives is merged into the weights."""

    def __init__(self, worker: Merging, scale: float) -> None:
        super().__init__(worker.model, TOKENIZER, max_rows=4)
        self.worker = worker
        worker.oxrl_keep_base(TINY, LoadOptions(seed=0, dtype=worker.dtype), scale)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        self.worker.oxrl_begin_load()
        for bucket in buckets:
            self.worker.oxrl_load(vllm_worker.payload(bucket, other_processes=False))
        received, unloaded = self.worker.oxrl_finish_load()
        assert unloaded == []
        self._version = version
        return received

    def held(self) -> Mapping[str, str]:
        return {n: fingerprint(p) for n, p in self.worker.model.named_parameters()}


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    monkeypatch.setattr(vllm_worker, "vllm_module", lambda name: Nothing())
    monkeypatch.setattr(vllm_worker, "_is_plain", lambda model: True)
    monkeypatch.setattr(vllm_worker, "_repack", lambda model: None)


@KINDS
def test_a_sampler_that_merges_adapters_into_its_weights_proves_what_it_made(
    options: AdapterOptions, no_vllm: None
) -> None:
    policy = policy_of(options=options)
    sampler = MergingSampler(Merging(torch.float32), options.scale)
    sync = sync_of(policy, sampler, options=options)
    for version in range(2):
        sync.deliver(version)
        metrics = sync.metrics()
        assert metrics["sync/retries"] == 0
        assert metrics["sync/probe_limit_share"] < 1
        learn(policy, version)
    sent = sync.deliver(2)
    assert sent is None
    answered = sampler.update_weights(policy.weights("adapter"), 3)
    kinds = {name.partition("/")[0] + "/" for name in answered if "/" in name}
    assert kinds == {MADE, BASE}
    # A weight that is not what was made of it is found, and so is another base.
    sampler.update_weights(policy.weights("adapter"), 2)
    change_a_value(sampler, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(WeightSyncError, match=r"no longer computes.*up_proj"):
        sync.deliver(3)
    sync._held.clear()
    base = dict(sampler.worker.oxrl_base_prints)
    base[f"{BASE}model.norm.weight"] = "another"
    sampler.worker.oxrl_base_prints = base
    with pytest.raises(WeightSyncError, match="is under the adapter changed"):
        sync.deliver(3)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_a_new_adapter_whose_term_is_lost_in_rounding_is_proved_by_a_larger_one(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = AdapterOptions(rank=RANK, alpha=alpha)
    policy = LocalTrainer(adapted(1, torch.bfloat16, options), TrainerOptions(lr=1e-3))
    sampler = Remote(adapted(5, torch.bfloat16, options), TOKENIZER, max_rows=4)
    sync = sync_of(policy, sampler, torch.bfloat16, options)
    sync.deliver(0)
    metrics = sync.metrics()
    assert metrics["sync/retries"] == 0 and metrics["sync/probe_limit_share"] <= 1
    # Without copies beyond the new one there is none that rounding does not hide.
    monkeypatch.setattr(sync_module, "STRENGTHS", (1.0, 0.3, 0.1))
    fresh = sync_of(policy, sampler, torch.bfloat16, options)
    with pytest.raises(WeightSyncError, match="would prove nothing"):
        fresh.deliver(0)
