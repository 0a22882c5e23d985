"""A sampler with weights of its own, and what may happen to weights on the way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train import Bucket
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

TOKENIZER = load_tokenizer("builtin:tiny")
Attack = Callable[[Bucket], Bucket]
SAME_SHAPE = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight")


@cache
def _made(seed: int, dtype: torch.dtype) -> PreTrainedModel:
    return load_policy("builtin:tiny", LoadOptions(seed=seed, dtype=dtype))


def tiny_model(seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return deepcopy(_made(seed, dtype))


class Remote(LocalSampler):
    """A sampler with weights of its own, and a line on which `attack` sits, at first for `attacks`
    deliveries.
    """

    def __init__(
        self, model: PreTrainedModel, attack: Attack = lambda bucket: bucket, attacks: int = 10**9
    ) -> None:
        super().__init__(model, TOKENIZER, max_rows=4)
        self.attack, self.attacks = attack, attacks
        self.versions: list[int] = []

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        self.versions.append(version)
        self.attacks -= 1
        attack: Attack = self.attack if self.attacks >= 0 else lambda bucket: bucket
        return super().update_weights((attack(bucket) for bucket in buckets), version)


def synced(sampler: Any, policy: LocalTrainer | None = None, **options: Any) -> WeightSync:
    """`new_model` is one of the options too."""
    new_model = options.pop("new_model", lambda: tiny_model(9))
    defaults: dict[str, Any] = {
        "dtype": torch.float32,
        "vocabulary": 261,
        "temperature": 1.0,
        "probe_tokens": 128,
    }
    return WeightSync(
        policy or LocalTrainer(tiny_model(0), TrainerOptions(lr=1e-3)),
        sampler,
        SyncOptions(**defaults | options),
        new_model,
    )


def small_step(policy: LocalTrainer) -> None:
    """Weights as after an optimizer step at a learning rate of 1e-6: too little for any probe to
    see.
    """
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1e-6)


def _drop(bucket: Bucket) -> Bucket:
    return bucket[:3] + bucket[4:]


def corrupt(bucket: Bucket) -> Bucket:
    name, tensor = bucket[3]
    changed = tensor.clone()
    changed.view(-1)[5] = torch.nextafter(changed.view(-1)[5], torch.tensor(9.0))
    return [*bucket[:3], (name, changed), *bucket[4:]]


def _miscast(bucket: Bucket) -> Bucket:
    name, tensor = bucket[3]
    return [*bucket[:3], (name, tensor.bfloat16().float()), *bucket[4:]]


def _swap(bucket: Bucket) -> Bucket:
    held = dict(bucket)
    first, second = SAME_SHAPE
    return list((held | {first: held[second], second: held[first]}).items())


ATTACKS: Sequence[tuple[Attack, str]] = [
    (_drop, "model.layers.0.self_attn.v_proj.weight"),
    (corrupt, "model.layers.0.self_attn.v_proj.weight arrived changed"),
    (_miscast, "model.layers.0.self_attn.v_proj.weight arrived changed"),
    (_swap, f"{SAME_SHAPE[0]} arrived with the payload of {SAME_SHAPE[1]}"),
]
