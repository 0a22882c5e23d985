"""Rollout actors: the samples of one process, whoever serves them and whoever dies over them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from oxrl.engines.ray.cluster import Cluster, layout
from oxrl.engines.ray.rollouts import RayRollouts, RolloutActor
from oxrl.engines.ray.trainer import RankGroup
from oxrl.engines.sample import Finished, RolloutEngine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import ConfigError, DeadlineError, EngineError, LostRankError, WeightSyncError
from oxrl.models.fingerprints import fingerprint
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.weights import buckets
from oxrl.tables.watch import Deadlines
from oxrl.types import Completion, Prompt, Request, Sampling
from support.samplers import make_requests
from support.small_cluster import process_of
from support.toy_columns import check_completion, recording_sampler

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

# Ray says of every actor that a test kills that it was killed.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def sampler(seed: int = 0) -> LocalSampler:
    torch.set_num_threads(1)
    return LocalSampler(
        load_policy("builtin:tiny", LoadOptions(seed=seed)),
        load_tokenizer("builtin:tiny"),
        max_rows=8,
    )


def requests(count: int, *, tokens: int = 24) -> list[Request]:
    """Four samples of each prompt."""
    return [
        Request(
            id=f"{i // 4}/{i % 4}",
            prompt=Prompt(uid=str(i // 4), messages=(), token_ids=tuple(range(5, 9 + i // 4))),
            draw=i // 4,
            sample=i % 4,
            sampling=Sampling(max_tokens=tokens, stop_token_ids=(7,)),
            seed=1000 + i,
        )
        for i in range(count)
    ]


def said(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def weights_of(seed: int) -> list[list[tuple[str, torch.Tensor]]]:
    named = load_policy("builtin:tiny", LoadOptions(seed=seed)).named_parameters()
    return list(buckets(((name, p.detach()) for name, p in named), limit=20_000))


@pytest.fixture
def rollouts(connected: None) -> Iterator[Any]:
    """`rollouts(count)` makes an engine of so many actors; all are ended after the test."""
    made: list[Any] = []

    def make(
        count: int,
        *,
        deadline_s: float = 20,
        waits: Deadlines | None = None,
        build: Any = sampler,
        **options: Any,
    ) -> RayRollouts:
        bundles, _, places = layout(0, count, trainer_gpus=0, sampler_gpus=0, colocated=False)
        cluster = Cluster(count)
        cluster.reserve(bundles)
        made.append(cluster)
        waits = waits or Deadlines.alike(deadline_s)
        return RayRollouts(cluster, places, build, waits, **options)

    yield make
    for cluster in made:
        cluster.close()


def pid(engine: RayRollouts, number: int) -> int:
    return process_of(engine.workers[number].actor)


def expected_samples() -> list[tuple[int, ...]]:
    """The samples of one process under the weights of seed 1."""
    local = sampler()
    local.update_weights(weights_of(1), version=3)
    return said(generate(local, requests(32), deadline_s=60))


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return expected_samples()


@pytest.mark.parametrize("actors", [1, 2])
def test_actors_give_the_samples_of_one_process(
    actors: int, rollouts: Any, expected: list[tuple[int, ...]]
) -> None:
    engine = rollouts(actors)
    assert engine.version == 0
    sent = weights_of(1)
    fingerprints = engine.update_weights(iter(sent), version=3)
    assert engine.version == 3
    assert fingerprints == {name: fingerprint(tensor) for bucket in sent for name, tensor in bucket}
    completions = generate(engine, requests(32), deadline_s=60)
    assert said(completions) == expected
    assert {v for c in completions for s in c.segments for v in s.versions} == {3}
    local = sampler(seed=1)
    rows = [[5, 6, 7, 8, 9], [20, 30]]
    for ours, theirs in zip(engine.logprobs(rows), local.logprobs(rows), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    metrics = engine.metrics()
    assert metrics["rollout/tokens"] == sum(map(len, expected))
    assert metrics["rollout/replaced_actors"] == 0
    # A prompt is computed once for its four samples, wherever they are.
    assert metrics["rollout/prefill_tokens_saved"] == 3 * metrics["rollout/prefill_tokens"]


def test_actors_send_the_columns_back(rollouts: Any) -> None:
    asked = make_requests(4, 2)
    done = generate(rollouts(2, deadline_s=60, build=recording_sampler), asked, deadline_s=60)
    for request, completion in zip(asked, done, strict=True):
        check_completion(request, completion)


@pytest.mark.parametrize(
    ("signal_number", "when"),
    [
        (signal.SIGKILL, "serving"),
        (signal.SIGSTOP, "idle"),
        pytest.param(signal.SIGKILL, "idle", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, "serving", marks=pytest.mark.full),
    ],
)
def test_a_lost_actor_is_replaced_and_no_sample_is_lost_or_doubled(
    signal_number: signal.Signals, when: str, rollouts: Any, expected: list[tuple[int, ...]]
) -> None:
    engine = rollouts(2, deadline_s=8)
    sent = weights_of(1)
    fingerprints = engine.update_weights(iter(sent), version=3)
    asked, victim = requests(32), pid(engine, 1)
    finished: list[Finished] = []
    started = time.monotonic()
    if when == "idle":
        os.kill(victim, signal_number)
        engine.submit(asked)
    else:
        engine.submit(asked)
        finished += engine.poll(20)
        assert engine.workers[1].in_flight
        os.kill(victim, signal_number)
    while len(finished) < len(asked) and (found := engine.poll(20)):
        finished += found
    seconds = time.monotonic() - started
    by_id = {item.request.id: item.completion for item in finished}
    assert len(finished) == len(asked) == len(by_id)
    assert said([by_id[request.id] for request in asked]) == expected
    assert engine.poll(20) == []
    assert engine.metrics()["rollout/replaced_actors"] == 1
    assert pid(engine, 1) != victim
    assert engine.update_weights(iter(sent), version=4) == fingerprints
    figure = (
        f"{signal_number.name} of an actor {when}: all {len(asked)} samples after {seconds:.1f} s"
    )
    print(figure)  # noqa: T201


def hanging() -> RolloutEngine:
    """A model that is never there."""
    time.sleep(600)
    return sampler()


@contextmanager
def hanging_rank() -> Iterator[dict[str, Any]]:
    yield {"policy": hanging()}


def test_who_hangs_while_it_loads_ends_the_run_within_the_deadline_of_loading(
    rollouts: Any,
) -> None:
    waits = Deadlines({**Deadlines.alike(60).seconds, "load": 4})
    began = time.monotonic()
    late = r"load its model, did not answer within run\.deadlines\.load=4 s"
    with pytest.raises(EngineError, match=late):
        rollouts(1, waits=waits, build=hanging)
    bundles, places, _ = layout(1, 0, trainer_gpus=0, sampler_gpus=0, colocated=False)
    cluster = Cluster(1)
    cluster.reserve(bundles)
    late = r"ranks \[0\] stopped answering; .* 4\.5 s \(run\.deadlines\.load=4 s, .* for 0\.01 GB\)"
    try:
        with pytest.raises(LostRankError, match=late):
            RankGroup(cluster, places, hanging_rank, waits, nbytes=10**7)
    finally:
        cluster.close()
    assert time.monotonic() - began < 60


def test_an_actor_lost_during_a_weight_update_is_replaced_with_the_new_weights(
    rollouts: Any, expected: list[tuple[int, ...]]
) -> None:
    engine = rollouts(2, deadline_s=20)
    os.kill(pid(engine, 0), signal.SIGKILL)
    sent = weights_of(1)
    assert engine.update_weights(iter(sent), version=3) == {
        n: fingerprint(t) for bucket in sent for n, t in bucket
    }
    assert said(generate(engine, requests(32), deadline_s=60)) == expected


class Suicidal(LocalSampler):
    """Dies over any request with a certain seed."""

    def submit(self, requests: Any) -> None:
        if any(request.seed == 1005 for request in requests):
            os._exit(1)
        super().submit(requests)


def suicidal() -> LocalSampler:
    return Suicidal(load_policy("builtin:tiny"), load_tokenizer("builtin:tiny"), max_rows=8)


def test_a_request_that_kills_every_actor_ends_the_run(rollouts: Any) -> None:
    engine = rollouts(1, build=suicidal)
    with pytest.raises(EngineError, match="rollout actor 0, asked to submit, died"):
        engine.submit(requests(8))


def test_errors_inside_an_actor_reach_the_caller_as_they_are(rollouts: Any) -> None:
    engine = rollouts(1)
    with pytest.raises(EngineError, match="the model's context of"):
        engine.submit(requests(1, tokens=100_000))
    wrong = [[("no.such.tensor", torch.zeros(3))]]
    with pytest.raises(WeightSyncError, match="no such tensor"):
        engine.update_weights(iter(wrong), version=1)
    with pytest.raises(ConfigError, match="cannot be built"):
        rollouts(1, build=unbuildable)


def unbuildable() -> LocalSampler:
    raise ConfigError("this engine cannot be built")


def test_aborted_requests_come_back_with_what_they_have_and_the_rest_goes_on(rollouts: Any) -> None:
    engine = rollouts(2)
    asked = requests(16, tokens=400)
    engine.submit(asked)
    finished = engine.poll(60)
    gone = {item.request.id for item in finished}
    half = [request.id for request in asked[:8] if request.id not in gone]
    aborted = engine.abort(half)
    assert {item.completion.finish_reason for item in aborted} <= {"abort"}
    while found := engine.poll(60):
        finished += found
    everything = [item.request.id for item in [*finished, *aborted]]
    assert sorted(everything) == sorted(request.id for request in asked)


def test_a_poll_that_brings_nothing_in_time_says_what_it_waited_for(rollouts: Any) -> None:
    engine = rollouts(1, build=partial(slow_sampler, 0.2))
    engine.submit(requests(4, tokens=200))
    with pytest.raises(
        DeadlineError, match=r"rollout actors answer, and have \[4\] requests in flight"
    ):
        engine.poll(2)


class Slow(LocalSampler):
    """Sleeps before every token."""

    def _decode_step(self) -> None:
        time.sleep(self.nap)
        super()._decode_step()


def slow_sampler(nap: float) -> LocalSampler:
    engine = Slow(load_policy("builtin:tiny"), load_tokenizer("builtin:tiny"), max_rows=8)
    engine.nap = nap
    return engine


def test_colocated_actors_sleep_whenever_nothing_is_sampled(rollouts: Any) -> None:
    woken: list[bool] = []
    engine = rollouts(1, before_wake=lambda: woken.append(engine._asleep))
    sent = weights_of(0)
    engine.update_weights(iter(sent), version=1)
    assert not engine._asleep
    generate(engine, requests(8), deadline_s=60)
    assert engine._asleep
    assert len(generate(engine, requests(8), deadline_s=60)) == 8
    engine.submit(requests(8))
    assert not engine._asleep
    engine.abort([request.id for request in requests(8)])
    assert engine._asleep
    # Who shares the device gave up its cache before each of them took its memory.
    assert woken == [True, True]


def test_a_member_that_is_lost_before_it_is_asked_is_replaced_with_the_weights_it_had(
    rollouts: Any,
) -> None:
    engine = rollouts(2)
    engine.update_weights(weights_of(1), version=3)
    os.kill(pid(engine, 1), signal.SIGKILL)
    assert [member.version for member in engine.members.values()] == [3, 3]
    assert engine.metrics()["rollout/replaced_actors"] == 1


class Drowsy(LocalSampler):
    """Knows whether it sleeps."""

    asleep = False

    def sleep(self) -> None:
        super().sleep()
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False


def drowsy() -> LocalSampler:
    return Drowsy(load_policy("builtin:tiny"), load_tokenizer("builtin:tiny"), max_rows=8)


def test_an_actor_that_is_lost_while_all_sleep_is_replaced_by_one_that_sleeps(
    rollouts: Any,
) -> None:
    engine = rollouts(2, before_wake=lambda: None, build=drowsy)
    generate(engine, requests(8), deadline_s=60)
    os.kill(pid(engine, 1), signal.SIGKILL)
    assert engine.metrics()["rollout/replaced_actors"] == 1
    actors = [worker.actor for worker in engine.workers]
    assert ray.get(
        [a.__ray_call__.remote(lambda a: a._engine.asleep) for a in actors], timeout=20
    ) == [True, True]
    assert len(generate(engine, requests(8), deadline_s=60)) == 8


def test_what_the_cluster_does_not_have_is_refused_in_seconds_with_both_numbers(
    connected: None,
) -> None:
    started = time.monotonic()
    bundles, _, _ = layout(2, 1, trainer_gpus=8, sampler_gpus=1, colocated=False)
    with pytest.raises(
        ConfigError, match=r"Asked: 3 CPU and 17 GPU.*Available: 6 CPU and 0 GPU of 6 CPU and 0 GPU"
    ):
        Cluster(3).reserve(bundles)
    assert time.monotonic() - started < 12


def test_colocated_actors_share_the_devices_of_training_ranks() -> None:
    bundles, trainers, samplers = layout(2, 1, trainer_gpus=1, sampler_gpus=1, colocated=True)
    assert bundles == [{"CPU": 2, "GPU": 1}] * 2
    assert [(p.bundle, p.gpus) for p in [*trainers, *samplers]] == [(0, 0.5), (1, 0.5), (0, 0.5)]
    bundles, trainers, samplers = layout(1, 2, trainer_gpus=0, sampler_gpus=0, colocated=False)
    assert bundles == [{"CPU": 1}] * 3
    assert [p.bundle for p in [*trainers, *samplers]] == [0, 1, 2]


def test_an_actor_that_reports_other_weights_than_the_others_is_found(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rollouts(2)
    actor = engine.workers[1].actor
    ray.get(actor.__ray_call__.remote(lose_a_tensor), timeout=20)
    with pytest.raises(
        WeightSyncError,
        match=r"rollout actor 1 holds other weights of version 1.*model.norm.weight",
    ):
        engine.update_weights(weights_of(1), version=1)


def lose_a_tensor(actor: RolloutActor) -> None:
    """From now on one tensor arrives with its last element lost."""
    whole = actor._engine.update_weights

    def broken(buckets: Any, version: int) -> Any:
        def lost(bucket: Any) -> Any:
            changed = [
                (n, t.clone().index_fill_(0, torch.tensor([-1 + len(t)]), 0.0)) for n, t in bucket
            ]
            return [
                (n, c if n == "model.norm.weight" else t)
                for (n, t), (_, c) in zip(bucket, changed, strict=True)
            ]

        return whole((lost(bucket) for bucket in buckets), version)

    actor._engine.update_weights = broken
