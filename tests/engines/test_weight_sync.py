from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from oxrl.engines.delivery import SharedWeights
from oxrl.engines.delivery import sync as sync_module
from oxrl.engines.delivery.proof import (
    Compared,
    Forwards,
    Probe,
    count_scored,
    distance,
    fixed_rows,
    limits,
    model_logprobs,
    perturb,
)
from oxrl.engines.delivery.sync import PERTURBED, WeightSync
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train import Bucket, Part
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import WeightSyncError
from oxrl.models.token_mask import sample_only
from oxrl.types import Completion, Prompt, Rollout, Score, Segment
from support.samplers import lively
from support.weight_attacks import (
    ATTACKS,
    TOKENIZER,
    Attack,
    Remote,
    corrupt,
    small_step,
    synced,
    tiny_model,
)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_a_delivery_leaves_the_sampler_with_the_policys_weights_and_scores(
    dtype: torch.dtype, limit: float, temperature: float
) -> None:
    policy = LocalTrainer(tiny_model(0, dtype), TrainerOptions(lr=1e-3, temperature=temperature))
    sampler = Remote(tiny_model(5, dtype))
    sync = synced(
        sampler,
        policy,
        dtype=dtype,
        temperature=temperature,
        new_model=lambda: tiny_model(9, dtype),
    )
    sync.deliver(0)
    assert sampler.version == 0
    for mine, theirs in zip(policy.model.parameters(), sampler.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    metrics = sync.metrics()
    assert metrics["sync/retries"] == 0
    assert (
        0 <= metrics["sync/probe_mean"] <= metrics["sync/probe_max"] < limit / min(1, temperature)
    )
    assert metrics["time/sync_s"] > 0
    assert sync.metrics() == {}


def _acting(seed: int) -> PreTrainedModel:
    """A model of which eight tokens alone may be sampled."""
    model = tiny_model(seed)
    sample_only(model, range(250, 258))
    return model


def test_of_policies_that_act_a_delivery_compares_the_tokens_of_actions_alone() -> None:
    """Other tokens have no probability: their scores are equal whatever the weights are."""
    compared = Compared(only=frozenset(range(250, 258)))
    policy = LocalTrainer(_acting(0), TrainerOptions(lr=1e-3))
    sampler = Remote(_acting(5))
    sync = synced(sampler, policy, compared=compared, probe_tokens=64, new_model=lambda: _acting(9))
    sync.deliver(0)
    assert {token for row in sync.rows for token in row} <= compared.only
    [sample] = _rollouts(1)
    acted = Segment(token_ids=(250, 251, 252), logprobs=(0.0,) * 3, versions=(0,) * 3)
    completion = Completion(segments=(acted,), text="", finish_reason="length")
    sync.remember([dataclasses.replace(sample, completion=completion)])
    sync.deliver(1)
    assert sync.rows[0][-2:] == [251, 252] and count_scored(sync.rows, compared) >= 64
    metrics = sync.metrics()
    assert metrics["sync/probe_max"] < 1e-5 and metrics["sync/retries"] == 0
    # Who samples all tokens holds the same weights, and is found out by what it says of them.
    other = Remote(tiny_model(5))
    with pytest.raises(WeightSyncError, match="probe"):
        synced(other, policy, compared=compared, new_model=lambda: _acting(9)).deliver(0)


@pytest.mark.parametrize("tokens", [64, 512])
def test_the_fixed_probe_scores_as_many_tokens_as_asked_inside_the_vocabulary(tokens: int) -> None:
    rows = fixed_rows(261, tokens)
    assert rows == fixed_rows(261, tokens)
    assert tokens <= count_scored(rows) < tokens + 24
    assert all(0 <= token < 261 for row in rows for token in row)


def test_a_perturbed_copy_is_loaded_first_and_every_few_syncs_and_never_left_in_place() -> None:
    sampler = Remote(tiny_model(5))
    sync = synced(sampler, probe_every=2)
    for version in range(5):
        sync.deliver(version)
    assert sampler.versions == [PERTURBED, 0, 1, PERTURBED, 2, 3, PERTURBED, 4]


def test_without_probe_every_only_the_first_sync_loads_a_perturbed_copy() -> None:
    sampler = Remote(tiny_model(5))
    sync = synced(sampler, probe_every=0)
    for version in range(3):
        sync.deliver(version)
    assert sampler.versions == [PERTURBED, 0, 1, 2]


def test_the_perturbed_copy_changes_every_tensor_and_moves_the_probe_far_beyond_the_tolerance() -> (
    None
):
    model, other = tiny_model(0), tiny_model(0)
    with torch.no_grad():
        for parameter in other.parameters():
            before = parameter.clone()
            parameter.copy_(perturb(parameter))
            assert not torch.equal(before, parameter)
    probe = Probe(fixed_rows(261, 512), 1.0, [])
    moved = distance(model_logprobs(other, probe, None), model_logprobs(model, probe, None))
    assert moved.largest > 0.2


def test_scores_are_the_local_samplers() -> None:
    model, rows = tiny_model(0), [[5, 6], *fixed_rows(261, 512), [7, 8, 9]]
    theirs = LocalSampler(model, TOKENIZER).logprobs(rows, 0.7)
    ours = model_logprobs(model, Probe(rows, 0.7, []), None)
    assert [len(row) for row in ours] == [len(row) for row in rows]
    assert distance(ours, theirs).largest < 1e-5


@pytest.mark.parametrize(
    ("attack", "says"), ATTACKS, ids=["dropped", "corrupted", "mis-cast", "swapped"]
)
@pytest.mark.parametrize("from_start", [True, False])
def test_a_tampered_payload_is_refused_twice_and_named(
    attack: Attack, says: str, from_start: bool
) -> None:
    policy, sampler = (
        LocalTrainer(tiny_model(0), TrainerOptions(lr=1e-3)),
        Remote(tiny_model(5), attack if from_start else lambda b: b),
    )
    sync = synced(sampler, policy)
    if not from_start:
        sync.deliver(0)
        sampler.attack = attack
        small_step(policy)
    with pytest.raises(WeightSyncError, match="after two attempts") as caught:
        sync.deliver(1)
    assert str(caught.value).count(says) == 2


def test_a_fault_that_goes_away_costs_one_counted_retry() -> None:
    sampler = Remote(tiny_model(5), corrupt, attacks=1)
    sync = synced(sampler)
    sync.deliver(0)
    assert sync.metrics()["sync/retries"] == 1
    assert sampler.version == 0


def test_a_sampler_that_keeps_serving_its_old_version_is_refused() -> None:
    class Late(Remote):
        @property
        def version(self) -> int:
            return self.versions[0] if len(self.versions) < 4 else self.versions[-2]

    sync = synced(Late(tiny_model(5)))
    with pytest.raises(WeightSyncError, match="acknowledges weight version -1, not 0"):
        sync.deliver(0)


def test_a_stale_output_head_is_caught_at_the_first_sync_though_every_fingerprint_fits() -> None:
    # The policy's own weights: without the perturbed copy the head would look current.
    sampler = Remote(tiny_model(0))
    network = sampler.network
    head = network.head._replace(weight=network.head.weight.detach().clone())
    sampler.network = SimpleNamespace(backbone=network.backbone, decoder=network.decoder, head=head)  # pyright: ignore
    with pytest.raises(
        WeightSyncError, match=r"weight version -1 but does not use it: the mean difference"
    ):
        synced(sampler).deliver(0)


def test_weights_that_the_sampler_acknowledges_and_does_not_load_are_named() -> None:
    class Idle(Remote):
        """Right names, right fingerprints, right version, nothing loaded."""

        def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
            before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            received = super().update_weights(buckets, version)
            self.model.load_state_dict(before, strict=False)
            return received

    with pytest.raises(WeightSyncError, match=r"holds something else: model\.embed_tokens\.weight"):
        synced(Idle(tiny_model(5))).deliver(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_changes_after_it_was_proved_is_found_before_the_next_delivery(
    dtype: torch.dtype,
) -> None:
    policy = LocalTrainer(tiny_model(0, dtype), TrainerOptions(lr=1e-3))
    sampler = Remote(tiny_model(5, dtype))
    sync = synced(sampler, policy, dtype=dtype, new_model=lambda: tiny_model(9, dtype))
    sync.deliver(0)
    sync.deliver(1)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        values = sampler.model.get_parameter(name).view(-1)
        values[7] = torch.nextafter(values[7], torch.tensor(9.0, dtype=dtype))
    delivered = len(sampler.versions)
    says = f"no longer computes with weight version 1 as it was delivered: {name} changed since"
    with pytest.raises(WeightSyncError, match=says):
        sync.deliver(2)
    assert len(sampler.versions) == delivered


class Liar(LocalTrainer):
    """Yields its weights with a lie in them, from the first call after `lie` was set."""

    lie: Attack | None = None

    def weights(self, part: Part = "all") -> Iterator[Bucket]:
        for bucket in super().weights(part):
            yield bucket if self.lie is None else self.lie(bucket)


@pytest.mark.parametrize(
    ("attack", "says"),
    [(attack, says.partition(" arrived")) for attack, says in ATTACKS],
    ids=["dropped", "corrupted", "mis-cast", "swapped"],
)
@pytest.mark.parametrize("from_start", [True, False])
def test_a_trainer_whose_weights_lie_is_seen_though_they_arrive_as_sent(
    attack: Attack, says: tuple[str, str, str], from_start: bool
) -> None:
    policy = Liar(tiny_model(0), TrainerOptions(lr=1e-3))
    sync = synced(Remote(tiny_model(5)), policy)
    if not from_start:
        sync.deliver(0)
        small_step(policy)
    policy.lie = attack
    with pytest.raises(WeightSyncError, match="after two attempts") as caught:
        sync.deliver(1)
    assert str(caught.value).count(says[0]) >= 2
    if says[1]:
        assert "is not what the optimizer holds" in str(caught.value)


def test_a_low_precision_weight_that_no_longer_follows_its_master_is_a_lie() -> None:
    policy = LocalTrainer(tiny_model(0, torch.bfloat16), TrainerOptions(lr=1e-3))
    sync = synced(
        Remote(tiny_model(5, torch.bfloat16)),
        policy,
        dtype=torch.bfloat16,
        new_model=lambda: tiny_model(9, torch.bfloat16),
    )
    sync.deliver(0)
    with torch.no_grad():
        policy.model.get_parameter("model.norm.weight")[3] += 0.01
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight is not what the optimizer"):
        sync.deliver(1)


class Sharper(Remote):
    """The right weights, used in another way."""

    temperature = 1.0

    def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        return super().logprobs(rows, temperature * self.temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_weights_that_are_used_otherwise_are_caught_by_limits_measured_with_them(
    dtype: torch.dtype,
) -> None:
    policy = LocalTrainer(lively("builtin:tiny", 0, dtype), TrainerOptions(lr=1e-3))
    sampler = Sharper(lively("builtin:tiny", 5, dtype))
    sync = synced(
        sampler,
        policy,
        dtype=dtype,
        new_model=lambda: lively("builtin:tiny", 9, dtype),
        probe_tokens=512,
    )
    sync.deliver(0)
    assert sync.metrics()["sync/probe_limit_share"] < 1
    sampler.temperature = 1.05 if dtype == torch.bfloat16 else 1.0001
    with pytest.raises(WeightSyncError, match="weight version 1 but does not use it"):
        sync.deliver(1)


def test_what_is_allowed_is_a_multiple_of_measured_rounding_and_can_be_set() -> None:
    policy = LocalTrainer(tiny_model(0, torch.bfloat16), TrainerOptions(lr=1e-3))
    shares: list[float] = []
    for limit in (4.0, 40.0):
        # Something to measure: the trainer does not round its logits, and this sampler is off.
        sampler = Sharper(tiny_model(5, torch.bfloat16))
        sampler.temperature = 1.001
        sync = synced(
            sampler,
            policy,
            dtype=torch.bfloat16,
            new_model=lambda: tiny_model(9, torch.bfloat16),
            probe_limit=limit,
        )
        sync.deliver(0)
        shares.append(sync.metrics()["sync/probe_limit_share"])
    assert shares[0] == pytest.approx(10 * shares[1])
    strict = synced(
        sampler,
        policy,
        dtype=torch.bfloat16,
        new_model=lambda: tiny_model(9, torch.bfloat16),
        probe_limit=0.01,
    )
    with pytest.raises(WeightSyncError, match=r"inference_engine\.probe_limit is how much"):
        strict.deliver(0)


def _rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(
            prompt=Prompt(uid="", messages=(), token_ids=(5, 6, 7 + draw)),
            completion=Completion(
                segments=(
                    Segment(token_ids=(8,) * 100, logprobs=(0.0,) * 100, versions=(0,) * 100),
                ),
                text="",
                finish_reason="stop",
            ),
            score=Score(value=0.0),
            group_id=draw,
            sample=0,
            seed=0,
        )
        for draw in range(count)
    ]


def test_the_probe_is_made_of_the_newest_samples_once_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync_module, "REFRESH", 5)
    rollouts = _rollouts(4)
    sync = synced(Remote(tiny_model(5)), probe_tokens=200, probe_every=0)
    sync.deliver(0)
    assert sync.rows == fixed_rows(261, 200)
    sync.remember(rollouts)
    sync.deliver(1)
    assert sync.rows == [[8] * 64] * 4
    assert sync.metrics()["sync/probe_limit_share"] < 1
    sync.remember(rollouts[:1])
    sync.deliver(2)
    assert sync.rows == [[8] * 64] * 4
    for version in range(3, 7):
        sync.deliver(version)
    # Newer samples after a while; what they are too few for, the fixed rows add.
    assert sync.rows == [[8] * 64, *fixed_rows(261, 200 - 63)]


def test_a_resumed_delivery_is_proved_by_the_probe_and_limits_of_the_one_before(
    tmp_path: Path,
) -> None:
    policy = LocalTrainer(lively("builtin:tiny", 0), TrainerOptions(lr=1e-3))

    def new_sync() -> WeightSync:
        return synced(
            Remote(lively("builtin:tiny", 5)), policy, new_model=lambda: lively("builtin:tiny", 9)
        )

    first = new_sync()
    first.deliver(0)
    first.remember(_rollouts(4))
    first.deliver(1)
    first.remember(_rollouts(2))
    first.metrics()
    first.save(tmp_path / "delivery")
    second = new_sync()
    second.load(tmp_path / "delivery")
    for sync in (first, second):
        sync.deliver(2)
    assert second.rows == first.rows
    ours, theirs = first.metrics(), second.metrics()
    del ours["time/sync_s"], theirs["time/sync_s"]
    assert ours == theirs
    second.load(tmp_path / "no such checkpoint had one")
    second.deliver(3)


def test_every_member_of_a_group_is_asked_by_name() -> None:
    class Group(Remote):
        """Delivers to all its members; one of them does not load what it is sent."""

        def __init__(self, members: Mapping[str, Remote]) -> None:
            super().__init__(tiny_model(5))
            self.members = members

        def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
            everything = list(buckets)
            return [member.update_weights(everything, version) for member in self.members.values()][
                0
            ]

    class Deaf(Remote):
        def logprobs(
            self, rows: Sequence[Sequence[int]], temperature: float = 1.0
        ) -> list[list[float]]:
            return [[-1.0] * len(row) for row in rows]

    synced(Group({"actor 0": Remote(tiny_model(5)), "actor 1": Remote(tiny_model(6))})).deliver(0)
    with pytest.raises(WeightSyncError, match="actor 1 holds weight version -1"):
        synced(Group({"actor 0": Remote(tiny_model(5)), "actor 1": Deaf(tiny_model(6))})).deliver(0)


def test_a_sampler_on_the_policys_own_memory_is_sent_nothing_and_asked_nothing() -> None:
    policy = LocalTrainer(tiny_model(0), TrainerOptions(lr=1e-3))
    sampler = LocalSampler(policy.model, TOKENIZER)  # pyright: ignore
    delivery = SharedWeights(policy, sampler)
    delivery.deliver(4)
    assert sampler.version == 4
    assert delivery.remember([]) == {}


@pytest.mark.parametrize("sign", [-1, 1])
def test_rounding_of_one_sign_all_over_the_probe_is_no_alarm(sign: int) -> None:
    """What every token shares, such as the largest logit of a sharp policy, is rounded once; a
    sampler that rounds it the other way is right.
    """
    high = [[0.0, *[-10.0 - at for at in range(23)]] for _ in range(23)]
    low = [[0.0, *[value + 0.05 for value in row[1:]]] for row in high]
    found = [[0.0, *[value + 0.055 * sign for value in row[1:]]] for row in high]
    allowed = limits(Forwards(low, high), multiple=4.0, temperature=1.0)
    assert max(distance(found, high).shares_of(allowed).values()) < 1
    stale = [[0.0, *[value + 0.25 * sign for value in row[1:]]] for row in high]
    assert max(distance(stale, high).shares_of(allowed).values()) > 1
