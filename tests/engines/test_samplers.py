"""Every RolloutEngine keeps one contract: both local samplers, one in a Ray actor, and vLLM.

Ray and vLLM live in `.venv-scale` (`make test-scale`); elsewhere their part is skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from functools import partial
from importlib.util import find_spec
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import PreTrainedModel

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.delivery.proof import distance, fixed_rows
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import DeadlineError, EngineError
from oxrl.models.fingerprints import fingerprint
from oxrl.models.weights import buckets
from oxrl.tables.watch import Deadlines
from oxrl.types import Completion, Prompt, Request, Sampling, TokenRun
from support.samplers import TOKENIZER, largest, lively, make_requests, trainer_logprobs

pytestmark = [
    # vLLM's own imports use what their authors have deprecated since; Ray's sockets are closed when
    # they are forgotten.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: `make env-scale`"
)
needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
)


@pytest.fixture(
    scope="module",
    params=[
        "local",
        "cached",
        pytest.param("ray", marks=needs_ray),
        pytest.param("vllm", marks=needs_vllm),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def size(kind: str) -> str:
    """vLLM takes heads of 32 and more."""
    return "builtin:small" if kind == "vllm" else "builtin:tiny"


@pytest.fixture(scope="module")
def shared(kind: str, size: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Any]:
    # Not a function of this file: actors cannot import it.
    local = partial(LocalSampler, lively(size), TOKENIZER, max_rows=32)
    if kind == "local":
        yield local()
    elif kind == "cached":
        yield CachedSampler(lively(size), TOKENIZER, max_rows=32)
    elif kind == "ray":
        from oxrl.engines.ray.cluster import Cluster, layout
        from oxrl.engines.ray.rollouts import RayRollouts

        bundles, _, places = layout(0, 1, trainer_gpus=0, sampler_gpus=0, colocated=False)
        cluster = Cluster(1)
        cluster.reserve(bundles)
        try:
            yield RayRollouts(cluster, places, local, Deadlines.alike(60))
        finally:
            cluster.close()
    else:
        from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

        folder = tmp_path_factory.mktemp("model")
        save_model(lively(size), folder)
        TOKENIZER.save_pretrained(folder)
        engine = VllmEngine(str(folder), VllmOptions(log_file=str(folder / "vllm.log")))
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def model(size: str) -> PreTrainedModel:
    return lively(size)


@pytest.fixture(scope="module")
def other(size: str) -> PreTrainedModel:
    """A model of the same sizes with other weights."""
    return lively(size, seed=1)


@pytest.fixture
def engine(shared: Any, model: PreTrainedModel) -> Any:
    """The one engine, as it was at the start."""
    shared.update_weights(buckets((name, p.detach()) for name, p in model.named_parameters()), 0)
    shared.metrics()
    return shared


def tokens(done: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in done]


def partly(engine: Any, requests: list[Request], *, length: int = 5) -> None:
    """Submit, and return when a short request is done and `requests` are on the way."""
    short = dataclasses.replace(
        make_requests(1, max_tokens=length, stop_token_ids=())[0], id="short"
    )
    engine.submit([short, *requests])
    assert [item.request.id for item in engine.poll(60)] == ["short"]


def rest(engine: Any, requests: list[Request]) -> list[Completion]:
    """What is still to come of `requests`, in their order."""
    done: dict[str, Completion] = {}
    while found := engine.poll(60):
        done |= {item.request.id: item.completion for item in found}
    assert done.keys() == {request.id for request in requests}
    return [done[request.id] for request in requests]


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5, 0.0])
def test_recorded_logprobs_are_the_trainers(
    engine: Any, model: PreTrainedModel, temperature: float
) -> None:
    requests = make_requests(6, 2, temperature=temperature, max_tokens=24)
    done = generate(engine, requests, deadline_s=60)
    assert largest(done, trainer_logprobs(model, requests, done, temperature or 1.0)) < 1e-4


def test_a_request_gives_the_same_tokens_alone_in_a_batch_and_in_another_order(engine: Any) -> None:
    requests = make_requests(5, 2)
    together = tokens(generate(engine, requests, deadline_s=60))
    assert [t for r in requests for t in tokens(generate(engine, [r], deadline_s=60))] == together
    assert tokens(generate(engine, requests[::-1], deadline_s=60))[::-1] == together
    assert len(set(together)) == 10


def test_a_stop_token_is_the_last_token_and_responses_without_one_end_at_the_limit(
    engine: Any,
) -> None:
    whole = generate(
        engine, make_requests(10, temperature=1.5, max_tokens=24, stop_token_ids=()), deadline_s=60
    )
    stops = set(range(100, 112))
    requests = make_requests(10, temperature=1.5, max_tokens=24, stop_token_ids=tuple(stops))
    found = generate(engine, requests, deadline_s=60)
    assert {c.finish_reason for c in whole} == {"length"}
    assert {len(c.token_ids) for c in whole} == {24}
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion, long in zip(found, whole, strict=True):
        cut = next((at + 1 for at, token in enumerate(long.token_ids) if token in stops), 24)
        assert completion.token_ids == long.token_ids[:cut]
        assert completion.finish_reason == ("stop" if stops & set(long.token_ids) else "length")
        ends = {TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, *stops}
        said = [token for token in completion.token_ids if token not in ends]
        assert completion.text == TOKENIZER.decode(said)


def test_top_k_one_is_greedy_and_its_logprob_is_that_of_the_restricted_distribution(
    engine: Any,
) -> None:
    greedy = generate(engine, make_requests(4, temperature=0.0), deadline_s=60)
    cuts: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}]
    for cut in cuts:
        restricted = generate(engine, make_requests(4, temperature=0.8, **cut), deadline_s=60)
        assert tokens(restricted) == tokens(greedy)
        assert {logprob for c in restricted for logprob in c.segments[0].logprobs} == {0.0}


def test_requests_with_different_sampling_share_a_batch(engine: Any) -> None:
    kinds = [
        make_requests(4, prefix="plain ", temperature=1.0),
        make_requests(4, prefix="greedy ", temperature=0.0),
        make_requests(4, prefix="limited ", temperature=0.6, top_k=5, top_p=0.9, max_tokens=5),
    ]
    mixed = generate(engine, [request for kind in kinds for request in kind], deadline_s=60)
    apart = [completion for kind in kinds for completion in generate(engine, kind, deadline_s=60)]
    assert tokens(mixed) == tokens(apart)


def test_aborted_requests_come_back_with_what_they_had_and_continue_as_if_never_stopped(
    engine: Any, model: PreTrainedModel
) -> None:
    requests = make_requests(3, max_tokens=30, stop_token_ids=())
    whole = generate(engine, requests, deadline_s=60)
    partly(engine, requests)
    parts = {
        item.request.id: item.completion
        for item in engine.abort([r.id for r in requests] + ["unknown"])
    }
    assert [part.finish_reason for part in parts.values()] == ["abort"] * 3
    assert engine.poll(60) == []
    resumed: list[Request] = []
    for request, expected in zip(requests, whole, strict=True):
        segment = parts[request.id].segments[0]
        assert 1 <= len(segment.token_ids) < 30
        assert segment.token_ids == expected.token_ids[: len(segment.token_ids)]
        assert segment.versions == (0,) * len(segment.token_ids)
        prefix = TokenRun(
            token_ids=segment.token_ids, logprobs=segment.logprobs, versions=segment.versions
        )
        resumed.append(dataclasses.replace(request, prefix=prefix))
    engine.update_weights(buckets((name, p.detach()) for name, p in model.named_parameters()), 4)
    done = generate(engine, resumed, deadline_s=60)
    assert tokens(done) == tokens(whole)
    assert largest(done, trainer_logprobs(model, requests, done, 1.0)) < 1e-4
    for request, completion in zip(resumed, done, strict=True):
        known, segment = request.prefix, completion.segments[0]
        assert segment.logprobs[: len(known.logprobs)] == known.logprobs
        assert segment.versions == known.versions + (4,) * (30 - len(known.versions))


def test_an_abort_of_all_rows_frees_the_memory_of_their_cache() -> None:
    engine = CachedSampler(lively("builtin:tiny"), TOKENIZER, max_rows=32)
    requests = make_requests(3, max_tokens=30, stop_token_ids=())
    partly(engine, requests)
    cache = ref(engine._lanes[0].cache)
    assert len(engine.abort([request.id for request in requests])) == 3
    assert cache() is None


def test_a_prefix_that_fills_the_limit_comes_back_at_once_from_poll_or_from_abort(
    engine: Any,
) -> None:
    prefix = TokenRun(token_ids=(5, 6), logprobs=(-1.0, -2.0), versions=(0, 0))
    request = dataclasses.replace(make_requests(1, max_tokens=2)[0], prefix=prefix)
    [done] = generate(engine, [request], deadline_s=60)
    assert (done.token_ids, done.finish_reason) == ((5, 6), "length")
    engine.submit([request])
    [item] = engine.abort([request.id])
    assert (item.completion.token_ids, item.completion.finish_reason) == ((5, 6), "length")
    assert engine.poll(60) == []


def test_new_weights_are_used_from_the_next_token_on_and_nothing_old_stays_cached(
    engine: Any, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    requests = make_requests(3, words=6, max_tokens=20, stop_token_ids=())
    partly(engine, requests, length=8)
    sent = {name: p.detach() for name, p in other.named_parameters()}
    received = engine.update_weights(buckets(sent.items()), 4)
    assert received == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert engine.version == 4
    found = rest(engine, requests)
    before, after = (trainer_logprobs(m, requests, found, 1.0) for m in (model, other))
    for completion, old, new in zip(found, before, after, strict=True):
        segment = completion.segments[0]
        assert set(segment.versions) == {0, 4}
        for logprob, version, a, b in zip(
            segment.logprobs, segment.versions, old, new, strict=True
        ):
            assert logprob == pytest.approx(a if version == 0 else b, abs=1e-4)
    # The same prompts again: a cached prefix of the old weights would be off by nats.
    again = generate(engine, requests, deadline_s=60)
    assert largest(again, after) > 1e-3
    assert tokens(again) == tokens(
        generate(LocalSampler(other, TOKENIZER), requests, deadline_s=60)
    )


def test_what_an_engine_holds_is_what_it_was_sent_name_by_name_and_bit_by_bit(
    engine: Any, other: PreTrainedModel
) -> None:
    sent = {name: p.detach() for name, p in other.named_parameters()}
    engine.update_weights(buckets(sent.items()), 1)
    assert engine.held() == {name: fingerprint(tensor) for name, tensor in sent.items()}
    name = "model.layers.1.mlp.up_proj.weight"
    sent[name] = sent[name].clone()
    sent[name][3, 5] = torch.nextafter(sent[name][3, 5], torch.tensor(9.0))
    engine.update_weights(buckets(sent.items()), 2)
    held = engine.held()
    assert held == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert held[name] != fingerprint(other.get_parameter(name))


def test_going_there_and_back_again_restores_every_score(
    engine: Any, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    rows = fixed_rows(261, 512)
    first = engine.logprobs(rows)
    for version, there in enumerate((other, model), 1):
        engine.update_weights(
            buckets((name, p.detach()) for name, p in there.named_parameters()), version
        )
        moved = distance(engine.logprobs(rows), first)
        assert (moved.largest > 0.5) == (version == 1)
    assert engine.logprobs(rows) == first


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_scores_are_the_models_own_also_while_requests_are_sampled(
    engine: Any, model: PreTrainedModel, temperature: float
) -> None:
    requests, rows = (
        make_requests(3, max_tokens=30, stop_token_ids=()),
        [[7, 8, 9], *fixed_rows(261, 92), [5, 6]],
    )
    partly(engine, requests)
    scored = engine.logprobs(rows, temperature)
    for row, found in zip(rows, scored, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        expected = (
            (logits / temperature)
            .log_softmax(-1)
            .gather(1, torch.tensor(row[1:])[:, None])
            .squeeze(1)
        )
        assert found == pytest.approx([0.0, *expected.tolist()], abs=1e-4)
    found = rest(engine, requests)
    assert largest(found, trainer_logprobs(model, requests, found, 1.0)) < 1e-4


def test_after_sleep_sampling_goes_on_as_before_without_what_was_aborted_meanwhile(
    engine: Any,
) -> None:
    requests = make_requests(4, max_tokens=20, stop_token_ids=())
    whole = tokens(generate(engine, requests, deadline_s=60))
    partly(engine, requests)
    engine.sleep()
    [gone] = engine.abort([requests[0].id])
    assert gone.completion.token_ids == whole[0][: len(gone.completion.token_ids)]
    engine.wake()
    assert tokens(rest(engine, requests[1:])) == whole[1:]


def test_samples_of_one_prompt_share_its_keys_and_values_and_the_metrics_say_so(
    engine: Any,
) -> None:
    requests = make_requests(2, 8, words=20, max_tokens=6, stop_token_ids=())
    generate(engine, requests, deadline_s=60)
    metrics = engine.metrics()
    prompt_tokens = sum(len(r.prompt.token_ids) for r in requests)
    assert (
        metrics["rollout/prefill_tokens"] + metrics["rollout/prefill_tokens_saved"] == prompt_tokens
    )
    assert metrics["rollout/prefill_tokens_saved"] > 0.5 * prompt_tokens
    assert metrics["rollout/tokens"] == 16 * 6
    assert 0 < metrics["rollout/mean_active_rows"] <= 16
    assert metrics["throughput/rollout_tokens_per_s"] > 0
    assert set(engine.metrics().values()) == {0.0}


def test_what_cannot_be_sampled_is_refused_with_the_fields_to_change_and_a_late_one_with_the_wait(
    engine: Any,
) -> None:
    [request] = make_requests(1, max_tokens=2000, stop_token_ids=())
    empty = dataclasses.replace(
        request, id="empty", prompt=Prompt(uid="", messages=(), token_ids=())
    )
    for refused, says in (
        (
            dataclasses.replace(request, sampling=Sampling(max_tokens=2047)),
            "context of 2048: lower rollout.max_tokens",
        ),
        (dataclasses.replace(request, sampling=Sampling(max_tokens=0)), "must be at least 1"),
        (empty, "has 0 prompt tokens"),
    ):
        with pytest.raises(EngineError, match=says):
            engine.submit([refused])
    engine.submit([request])
    with pytest.raises(EngineError, match="already being sampled"):
        engine.submit([request])
    with pytest.raises(
        DeadlineError, match=r"waited 0 s for a sampled response: .*1.* Raise run.deadlines.rollout"
    ):
        engine.poll(0.0)
    engine.abort([request.id])
