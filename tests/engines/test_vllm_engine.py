"""VllmEngine against the local sampler and the trainer. Runs where vLLM is installed (`make test-scale`)."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_weight_sync import ATTACKS
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oxrl.engines.base import Bucket, generate
from oxrl.engines.local import LocalSampler, LocalTrainer
from oxrl.engines.weight_sync import WeightSync, differences, probe_rows
from oxrl.errors import DeadlineError, EngineError, WeightSyncError
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.models.weights import buckets, save_model
from oxrl.seeds import sample_seed
from oxrl.types import Completion, Prefix, Prompt, Request, Sampling, TokenBatch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"),
    # vLLM's own imports use what their authors have deprecated since.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
TOKENIZER = load_tokenizer("builtin:tiny")
END = int(TOKENIZER.eos_token_id)  # pyright: ignore


def _lively(seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, neither uniform nor certain about a token. vLLM on CPU has no heads as small as tiny's."""
    policy = load_policy("builtin:small", seed=seed, dtype=dtype)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(5 if "embed_tokens" in name else 6)
    return policy


def _start(folder: Path, **settings: Any) -> Any:
    from oxrl.engines.vllm_engine import VllmEngine

    save_model(_lively(0), folder)
    TOKENIZER.save_pretrained(folder)
    return VllmEngine(str(folder), max_model_len=256, log_file=str(folder / "vllm.log"), **settings)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "vllm.log"


@pytest.fixture(scope="module")
def shared(log: Path) -> Generator[Any]:
    engine = _start(log.parent)
    yield engine
    engine.close()


@pytest.fixture
def model() -> PreTrainedModel:
    return _lively(0)


@pytest.fixture
def engine(shared: Any, model: PreTrainedModel) -> Any:
    """The one engine, as it was at the start."""
    shared.update_weights(buckets(model.named_parameters()), 0)
    shared.metrics()
    return shared


def _requests(prompts: int, samples: int = 1, *, words: int = 1, **sampling: Any) -> list[Request]:
    options = Sampling(**{"max_tokens": 12, "stop_token_ids": (END,), **sampling})
    return [
        Request(
            id=f"{draw}/{sample}",
            prompt=Prompt(
                uid=str(draw), messages=(), token_ids=tuple(TOKENIZER(f"{draw} + {draw * 37} =" * words)["input_ids"])
            ),
            draw=draw,
            sample=sample,
            sampling=options,
            seed=sample_seed(7, draw, sample),
        )
        for draw in range(prompts)
        for sample in range(samples)
    ]


def _local(model: PreTrainedModel, requests: list[Request]) -> list[Completion]:
    return generate(LocalSampler(model, TOKENIZER), requests, deadline_s=60)


def _trainer_logprobs(
    model: PreTrainedModel, requests: list[Request], done: list[Completion], temperature: float
) -> list[list[float]]:
    """What the trainer says of the sampled tokens."""
    rows = [[*r.prompt.token_ids, *c.token_ids] for r, c in zip(requests, done, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    column = torch.arange(width)
    mask = column < torch.tensor([len(row) for row in rows])[:, None]
    starts = [len(r.prompt.token_ids) for r in requests]
    batch = TokenBatch(
        tokens=tokens, attention_mask=mask, response_mask=mask & (column >= torch.tensor(starts)[:, None])
    )
    logprobs = LocalTrainer(model, lr=0.0, temperature=temperature).forward(batch, frozenset({"logprobs"})).logprobs
    assert logprobs is not None
    return [row[start : len(ids)].tolist() for row, start, ids in zip(logprobs, starts, rows, strict=True)]


def _largest(found: list[Completion], expected: list[list[float]]) -> float:
    return max(
        abs(a - b)
        for c, row in zip(found, expected, strict=True)
        for a, b in zip(c.segments[0].logprobs, row, strict=True)
    )


def test_greedy_tokens_agree_with_the_local_sampler_on_at_least_99_percent(engine: Any, model: PreTrainedModel) -> None:
    requests = _requests(128, max_tokens=24, temperature=0.0)
    found, expected = generate(engine, requests, deadline_s=60), _local(model, requests)
    pairs = [
        (a, b) for c, d in zip(found, expected, strict=True) for a, b in zip(c.token_ids, d.token_ids, strict=False)
    ]
    assert len(pairs) > 1000
    assert sum(a == b for a, b in pairs) >= 0.99 * len(pairs)
    assert sum(c.token_ids == d.token_ids for c, d in zip(found, expected, strict=True)) >= 0.99 * len(found)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_samples_are_the_local_samplers_and_their_logprobs_the_trainers(
    engine: Any, model: PreTrainedModel, temperature: float
) -> None:
    requests = _requests(16, 4, temperature=temperature)
    found = generate(engine, requests, deadline_s=60)
    assert sum(a.token_ids == b.token_ids for a, b in zip(found, _local(model, requests), strict=True)) >= 63
    assert _largest(found, _trainer_logprobs(model, requests, found, temperature)) < 1e-4


def test_greedy_tokens_carry_logprobs_of_temperature_1_also_in_a_batch_with_sampled_ones(
    engine: Any, model: PreTrainedModel
) -> None:
    greedy = _requests(4, temperature=0.0)
    others = [dataclasses.replace(r, id="s" + r.id) for r in _requests(4, temperature=0.5)]
    alone, mixed = generate(engine, greedy, deadline_s=60), generate(engine, greedy + others, deadline_s=60)
    assert [c.token_ids for c in alone] == [c.token_ids for c in mixed[:4]]
    for found in (alone, mixed[:4]):
        assert _largest(found, _trainer_logprobs(model, greedy, found, 1.0)) < 1e-4
    assert _largest(mixed[4:], _trainer_logprobs(model, others, mixed[4:], 0.5)) < 1e-4


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.7}])
def test_a_cut_distribution_is_drawn_and_recorded_like_the_local_samplers(
    engine: Any, model: PreTrainedModel, cut: dict[str, Any]
) -> None:
    requests = _requests(8, 2, temperature=0.8, **cut)
    found, expected = generate(engine, requests, deadline_s=60), _local(model, requests)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert _largest(found, [list(c.segments[0].logprobs) for c in expected]) < 1e-4


def test_a_request_gives_the_same_tokens_alone_in_a_batch_and_in_another_order(engine: Any) -> None:
    requests = _requests(8, 2)
    together = [c.token_ids for c in generate(engine, requests, deadline_s=60)]
    assert [c.token_ids for r in requests for c in generate(engine, [r], deadline_s=60)] == together
    assert [c.token_ids for c in generate(engine, requests[::-1], deadline_s=60)][::-1] == together
    assert len(set(together)) == 16


def test_a_stop_token_is_the_last_token_and_responses_without_one_end_at_the_limit(engine: Any) -> None:
    requests = _requests(16, temperature=1.5, max_tokens=40, stop_token_ids=tuple(range(100, 112)))
    found = generate(engine, requests, deadline_s=60)
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion in found:
        assert not set(completion.token_ids[:-1]) & set(range(100, 112))
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in range(100, 112)
        else:
            assert len(completion.token_ids) == 40
        assert completion.text == TOKENIZER.decode(list(completion.token_ids), skip_special_tokens=True)


def _partly(engine: Any, requests: list[Request], short: Request) -> None:
    """Submit, and return when `short` is done and the rest are on the way."""
    engine.submit([short, *requests])
    assert [item.request.id for item in engine.poll(60)] == [short.id]


def _short(tokens: int = 5) -> Request:
    return dataclasses.replace(_requests(1, max_tokens=tokens, stop_token_ids=())[0], id="short")


def test_aborted_requests_come_back_as_aborted_with_what_they_had_and_continue_as_if_never_stopped(
    engine: Any, model: PreTrainedModel
) -> None:
    requests = _requests(3, max_tokens=30, stop_token_ids=())
    whole = [c.token_ids for c in generate(engine, requests, deadline_s=60)]
    _partly(engine, requests, _short())
    parts = engine.abort([r.id for r in requests] + ["unknown"])
    assert [item.completion.finish_reason for item in parts] == ["abort"] * 3
    resumed: list[Request] = []
    for request, item, tokens in zip(requests, parts, whole, strict=True):
        segment = item.completion.segments[0]
        assert 1 <= len(segment.token_ids) < 30
        assert segment.token_ids == tokens[: len(segment.token_ids)]
        assert len(segment.logprobs) == len(segment.versions) == len(segment.token_ids)
        prefix = Prefix(token_ids=segment.token_ids, logprobs=segment.logprobs, versions=segment.versions)
        resumed.append(dataclasses.replace(request, prefix=prefix))
    assert engine.poll(60) == []
    done = generate(engine, resumed, deadline_s=60)
    assert [c.token_ids for c in done] == whole
    assert _largest(done, _trainer_logprobs(model, requests, done, 1.0)) < 1e-4


def test_a_prefix_that_fills_the_limit_is_returned_at_once(engine: Any) -> None:
    prefix = Prefix(token_ids=(5, 6), logprobs=(-1.0, -2.0), versions=(0, 0))
    request = dataclasses.replace(_requests(1, max_tokens=2)[0], prefix=prefix)
    [done] = generate(engine, [request], deadline_s=60)
    assert (done.token_ids, done.finish_reason) == ((5, 6), "length")


def test_new_weights_are_used_from_the_next_token_on_and_nothing_old_stays_cached(
    engine: Any, model: PreTrainedModel
) -> None:
    requests = _requests(3, words=6, max_tokens=20, stop_token_ids=())
    _partly(engine, requests, _short(8))
    other = _lively(1)
    engine.update_weights(buckets(other.named_parameters()), 4)
    assert engine.version == 4
    done: dict[str, Completion] = {}
    while len(done) < 3:
        done |= {item.request.id: item.completion for item in engine.poll(60)}
    found = [done[r.id] for r in requests]
    before, after = (_trainer_logprobs(m, requests, found, 1.0) for m in (model, other))
    for completion, old, new in zip(found, before, after, strict=True):
        segment = completion.segments[0]
        assert set(segment.versions) == {0, 4}
        for logprob, version, a, b in zip(segment.logprobs, segment.versions, old, new, strict=True):
            assert logprob == pytest.approx(a if version == 0 else b, abs=1e-4)
    # The same prompts again: a cached prefix of the old weights would be off by nats.
    assert _largest(generate(engine, requests, deadline_s=60), after) > 1e-3
    assert [c.token_ids for c in generate(engine, requests, deadline_s=60)] == [
        c.token_ids for c in _local(other, requests)
    ]


def test_going_there_and_back_again_restores_every_score(engine: Any, model: PreTrainedModel) -> None:
    rows, other = probe_rows(261), _lively(1)
    first = engine.logprobs(rows)
    engine.update_weights(buckets(other.named_parameters()), 1)
    assert differences(engine.logprobs(rows), first)[0] > 0.5
    engine.update_weights(buckets(model.named_parameters()), 2)
    assert engine.logprobs(rows) == first


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_scores_are_the_local_samplers_also_while_requests_are_sampled(
    engine: Any, model: PreTrainedModel, temperature: float
) -> None:
    requests, rows = _requests(3, max_tokens=30, stop_token_ids=()), [[7, 8, 9], *probe_rows(261)]
    _partly(engine, requests, _short())
    scored = engine.logprobs(rows, temperature)
    expected = LocalSampler(model, TOKENIZER).logprobs(rows, temperature)
    assert [len(row) for row in scored] == [len(row) for row in rows]
    assert max(abs(a - b) for x, y in zip(scored, expected, strict=True) for a, b in zip(x, y, strict=True)) < 1e-4
    done: dict[str, Completion] = {}
    while len(done) < 3:
        done |= {item.request.id: item.completion for item in engine.poll(60)}
    found = [done[r.id] for r in requests]
    assert _largest(found, _trainer_logprobs(model, requests, found, 1.0)) < 1e-4


def test_samples_of_one_prompt_share_its_cached_keys_and_values_and_the_metrics_say_so(engine: Any) -> None:
    requests = _requests(2, 8, words=20)
    generate(engine, requests, deadline_s=60)
    metrics = engine.metrics()
    prompt_tokens = sum(len(r.prompt.token_ids) for r in requests)
    assert metrics["rollout/prefill_tokens"] + metrics["rollout/prefill_tokens_saved"] == prompt_tokens
    assert metrics["rollout/prefix_hit_frac"] > 0.5
    assert 0 < metrics["rollout/kv_cache_frac"] <= 1
    assert metrics["rollout/preemptions"] == 0
    assert 0 < metrics["rollout/mean_active_rows"] <= 16
    assert metrics["rollout/tokens"] > 16
    assert metrics["throughput/rollout_tokens_per_s"] > 0
    assert set(engine.metrics().values()) == {0.0}


def test_sleeping_drops_what_is_cached_and_sampling_goes_on_as_before(engine: Any) -> None:
    requests = _requests(3, max_tokens=20, stop_token_ids=())
    whole = [c.token_ids for c in generate(engine, requests, deadline_s=60)]
    _partly(engine, requests, _short())
    engine.sleep()
    engine.wake()
    done: dict[str, Completion] = {}
    while len(done) < 3:
        done |= {item.request.id: item.completion for item in engine.poll(60)}
    assert [done[r.id].token_ids for r in requests] == whole


def test_what_cannot_be_sampled_is_refused_with_the_fields_to_change(engine: Any) -> None:
    for request, says in (
        (_requests(1, max_tokens=255)[0], "context of 256: lower rollout.max_tokens"),
        (_requests(1, max_tokens=0)[0], "must be at least 1"),
    ):
        with pytest.raises(EngineError, match=says):
            engine.submit([request])
    request = _requests(1, max_tokens=200, stop_token_ids=())[0]
    engine.submit([request])
    with pytest.raises(EngineError, match="already being sampled"):
        engine.submit([request])
    with pytest.raises(DeadlineError, match="waited 0 s for vLLM to finish a response: 1 requests"):
        engine.poll(0.0)
    engine.abort([request.id])


def test_vllm_writes_to_its_log_file_and_to_nothing_else(
    engine: Any, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generate(engine, _requests(2), deadline_s=60)
    assert capfd.readouterr() == ("", "")
    assert "vllm" in log.read_text()


class Line:
    """The way to the engine, with `attack` on it."""

    def __init__(self, engine: Any, attack: Callable[[Bucket], Bucket]) -> None:
        self._engine, self._attack = engine, attack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update_weights(self, payload: Iterable[Bucket], version: int) -> Mapping[str, str]:
        return self._engine.update_weights((self._attack(bucket) for bucket in payload), version)


def _sync(engine: Any, model: PreTrainedModel, dtype: torch.dtype = torch.float32, **options: Any) -> WeightSync:
    policy = LocalTrainer(model, lr=1e-3, temperature=options.get("temperature", 1.0))
    settings = {"vocabulary": 261, "temperature": 1.0, **options}
    return WeightSync(policy, engine, dtype=dtype, new_model=lambda: _lively(3, dtype), **settings)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_delivery_is_proved_and_the_next_samples_are_of_the_new_weights(engine: Any, temperature: float) -> None:
    other = _lively(1)
    sync = _sync(engine, other, temperature=temperature)
    sync.deliver(5)
    metrics = sync.metrics()
    assert metrics["sync/probe_max"] < 1e-4
    assert metrics["sync/retries"] == 0
    requests = _requests(4)
    found = generate(engine, requests, deadline_s=60)
    assert [c.token_ids for c in found] == [c.token_ids for c in _local(other, requests)]
    assert {version for c in found for version in c.segments[0].versions} == {5}


@pytest.mark.parametrize(("attack", "says"), ATTACKS, ids=["dropped", "corrupted", "mis-cast", "swapped"])
def test_a_tampered_payload_is_refused_and_named(
    engine: Any, model: PreTrainedModel, attack: Callable[[Bucket], Bucket], says: str
) -> None:
    with pytest.raises(WeightSyncError, match="after two attempts") as caught:
        _sync(Line(engine, attack), model).deliver(1)
    assert says in str(caught.value)


def test_a_stale_version_is_refused(engine: Any, model: PreTrainedModel) -> None:
    class Stale(Line):
        version = 0

    with pytest.raises(WeightSyncError, match="acknowledges weight version 0, not -1"):
        _sync(Stale(engine, lambda bucket: bucket), model).deliver(1)


def test_a_tied_output_head_that_vllm_leaves_stale_is_caught(
    engine: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oxrl.engines.vllm_worker._repack", lambda model: None)
    with pytest.raises(WeightSyncError, match="weight version -1 but does not use it"):
        _sync(engine, model).deliver(1)


def test_a_tensor_of_another_shape_is_refused_and_the_engine_can_be_loaded_again(
    engine: Any, model: PreTrainedModel
) -> None:
    def cut(bucket: Bucket) -> Bucket:
        return [(name, tensor[:5] if "down_proj" in name else tensor) for name, tensor in bucket]

    with pytest.raises(WeightSyncError, match="vLLM cannot load the weights"):
        _sync(Line(engine, cut), model).deliver(1)
    _sync(engine, model).deliver(2)
    assert engine.version == 2


def test_in_bfloat16_the_delivery_is_proved_within_the_stated_tolerance_and_a_stale_head_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _start(tmp_path, dtype="bfloat16")
    policy = load_policy("builtin:small", seed=1, dtype=torch.bfloat16)
    try:
        sync = _sync(engine, policy, torch.bfloat16)
        sync.deliver(1)
        metrics = sync.metrics()
        assert metrics["sync/probe_max"] < 0.1
        assert metrics["sync/probe_mean"] < 0.02
        monkeypatch.setattr("oxrl.engines.vllm_worker._repack", lambda model: None)
        with pytest.raises(WeightSyncError, match="weight version -1 but does not use it"):
            _sync(engine, policy, torch.bfloat16).deliver(2)
    finally:
        engine.close()


def test_a_small_cache_puts_requests_back_and_changes_no_sample(tmp_path: Path, model: PreTrainedModel) -> None:
    requests = _requests(32, max_tokens=60, stop_token_ids=())
    engine = _start(tmp_path, kv_cache_gb=0.004)
    try:
        found = generate(engine, requests, deadline_s=100)
        metrics = engine.metrics()
    finally:
        engine.close()
    assert metrics["rollout/preemptions"] > 0
    assert metrics["rollout/kv_cache_frac"] > 0.9
    assert [c.token_ids for c in found] == [c.token_ids for c in _local(model, requests)]


def test_two_tensor_parallel_workers_get_proved_weights_and_sample_like_one(tmp_path: Path) -> None:
    other, requests = _lively(1), _requests(8)
    engine = _start(tmp_path, tensor_parallel=2)
    try:
        _sync(engine, other).deliver(1)
        found = generate(engine, requests, deadline_s=100)
    finally:
        engine.close()
    assert [c.token_ids for c in found] == [c.token_ids for c in _local(other, requests)]


def _experts(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=261,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model


def test_fused_experts_get_new_weights_and_are_caught_when_vllm_leaves_them_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oxrl.engines.vllm_engine import VllmEngine

    save_model(_experts(0), tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    engine = VllmEngine(str(tmp_path), log_file=str(tmp_path / "vllm.log"))
    policy = LocalTrainer(_experts(1), lr=0.0)
    settings: dict[str, Any] = {"dtype": torch.float32, "vocabulary": 261, "temperature": 1.0}
    try:
        sync = WeightSync(policy, engine, new_model=lambda: _experts(2), **settings)
        sync.deliver(1)
        assert sync.metrics()["sync/probe_max"] < 1e-4
        monkeypatch.setattr("oxrl.engines.vllm_worker._repack", lambda model: None)
        with pytest.raises(WeightSyncError, match="weight version -1 but does not use it"):
            WeightSync(policy, engine, new_model=lambda: _experts(2), **settings).deliver(2)
    finally:
        engine.close()


def test_a_built_in_model_needs_no_folder_and_a_head_size_that_vllm_cannot_run_on_a_cpu_is_refused(
    tmp_path: Path,
) -> None:
    from oxrl.engines.vllm_engine import VllmEngine

    with pytest.raises(EngineError, match="no attention for heads of 16"):
        VllmEngine("builtin:tiny", max_model_len=64, log_file=str(tmp_path / "vllm.log"))


def test_a_model_that_vllm_cannot_load_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    folder, log_file = tmp_path / "model", tmp_path / "vllm.log"
    save_model(load_policy("builtin:small"), folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    from oxrl.engines.vllm_engine import VllmEngine

    with pytest.raises(EngineError, match=f"vLLM does not start .* its messages: {log_file}"):
        VllmEngine(str(folder), max_model_len=64, log_file=str(log_file))
