"""VllmEngine against the local sampler and the trainer. Runs where vLLM is installed (`make
test-scale`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oxrl.checkpoint.model_files import save_model
from oxrl.data.batching import to_rollout_batch
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train import Bucket
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import EngineError, WeightSyncError
from oxrl.models.load import LoadOptions, load_policy
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.models.weights import buckets
from oxrl.tables.columns import NOTHING_MORE, Column, Columns
from oxrl.types import Completion, Request, TokenRun
from support.samplers import TOKENIZER, largest, lively, make_requests, trainer_logprobs
from support.vision_runs import rollouts
from support.weight_attacks import ATTACKS

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
    ),
    # vLLM's own imports use what their authors have deprecated since.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


def _start(folder: Path, columns: Columns = NOTHING_MORE, **settings: Any) -> Any:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    save_model(lively(), folder)
    TOKENIZER.save_pretrained(folder)
    log_file = str(folder / "vllm.log")
    options = VllmOptions(max_model_len=256, log_file=log_file, **settings)
    return VllmEngine(str(folder), options, columns=columns)


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
    return lively()


@pytest.fixture
def engine(shared: Any, model: PreTrainedModel) -> Any:
    """The one engine, as it was at the start."""
    shared.update_weights(buckets(model.named_parameters()), 0)
    shared.metrics()
    return shared


def _local(model: PreTrainedModel, requests: list[Request]) -> list[Completion]:
    return generate(LocalSampler(model, TOKENIZER), requests, deadline_s=60)


def test_greedy_tokens_agree_with_the_local_sampler_on_at_least_99_percent(
    engine: Any, model: PreTrainedModel
) -> None:
    requests = make_requests(128, max_tokens=24, temperature=0.0)
    found, expected = generate(engine, requests, deadline_s=60), _local(model, requests)
    pairs = [
        (a, b)
        for c, d in zip(found, expected, strict=True)
        for a, b in zip(c.token_ids, d.token_ids, strict=False)
    ]
    assert len(pairs) > 1000
    equal = sum(a == b for a, b in pairs)
    print(f"greedy tokens equal to the local sampler's: {equal} of {len(pairs)}")  # noqa: T201
    assert equal >= 0.99 * len(pairs)
    assert sum(
        c.token_ids == d.token_ids for c, d in zip(found, expected, strict=True)
    ) >= 0.99 * len(found)


@pytest.mark.parametrize(
    "temperature", [*(pytest.param(t, marks=pytest.mark.full) for t in (0.5, 1.0, 1.5)), 0.7]
)
def test_samples_are_the_local_samplers_and_their_logprobs_the_trainers(
    engine: Any, model: PreTrainedModel, temperature: float
) -> None:
    requests = make_requests(16, 4, temperature=temperature)
    found = generate(engine, requests, deadline_s=60)
    assert (
        sum(a.token_ids == b.token_ids for a, b in zip(found, _local(model, requests), strict=True))
        >= 63
    )
    assert largest(found, trainer_logprobs(model, requests, found, temperature)) < 1e-4


def test_greedy_tokens_carry_logprobs_of_temperature_1_also_in_a_batch_with_sampled_ones(
    engine: Any, model: PreTrainedModel
) -> None:
    greedy = make_requests(4, temperature=0.0)
    others = [dataclasses.replace(r, id="s" + r.id) for r in make_requests(4, temperature=0.5)]
    alone, mixed = (
        generate(engine, greedy, deadline_s=60),
        generate(engine, greedy + others, deadline_s=60),
    )
    assert [c.token_ids for c in alone] == [c.token_ids for c in mixed[:4]]
    for found in (alone, mixed[:4]):
        assert largest(found, trainer_logprobs(model, greedy, found, 1.0)) < 1e-4
    assert largest(mixed[4:], trainer_logprobs(model, others, mixed[4:], 0.5)) < 1e-4


@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.7}, {"min_p": 0.2}]
)
def test_a_cut_distribution_is_drawn_and_recorded_like_the_local_samplers(
    engine: Any, model: PreTrainedModel, cut: dict[str, Any]
) -> None:
    requests = make_requests(8, 2, temperature=0.8, **cut)
    found, expected = generate(engine, requests, deadline_s=60), _local(model, requests)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert largest(found, [list(c.segments[0].logprobs) for c in expected]) < 1e-4


def test_samples_of_one_prompt_share_its_cached_keys_and_values_and_the_metrics_say_so(
    engine: Any,
) -> None:
    requests = make_requests(2, 8, words=20)
    generate(engine, requests, deadline_s=60)
    metrics = engine.metrics()
    prompt_tokens = sum(len(r.prompt.token_ids) for r in requests)
    assert (
        metrics["rollout/prefill_tokens"] + metrics["rollout/prefill_tokens_saved"] == prompt_tokens
    )
    assert metrics["rollout/prefix_hit_frac"] > 0.5
    assert 0 < metrics["rollout/kv_cache_frac"] <= 1
    assert metrics["rollout/preemptions"] == 0
    assert 0 < metrics["rollout/mean_active_rows"] <= 16
    assert metrics["rollout/tokens"] > 16
    assert metrics["throughput/rollout_tokens_per_s"] > 0
    assert set(engine.metrics().values()) == {0.0}


def test_vllm_writes_to_its_log_file_and_to_nothing_else(
    engine: Any, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generate(engine, make_requests(2), deadline_s=60)
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


def _sync(
    engine: Any, model: PreTrainedModel, dtype: torch.dtype = torch.float32, **options: Any
) -> WeightSync:
    policy = LocalTrainer(
        model, TrainerOptions(lr=1e-3, temperature=options.get("temperature", 1.0))
    )
    settings = {"vocabulary": 261, "temperature": 1.0, **options}
    return WeightSync(
        policy,
        engine,
        SyncOptions(dtype=dtype, **settings),
        lambda: lively(seed=3, dtype=dtype),
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_delivery_is_proved_and_the_next_samples_are_of_the_new_weights(
    engine: Any, temperature: float
) -> None:
    other = lively(seed=1)
    sync = _sync(engine, other, temperature=temperature)
    sync.deliver(5)
    metrics = sync.metrics()
    assert metrics["sync/probe_max"] < 1e-4
    assert metrics["sync/retries"] == 0
    requests = make_requests(4)
    found = generate(engine, requests, deadline_s=60)
    assert [c.token_ids for c in found] == [c.token_ids for c in _local(other, requests)]
    assert {version for c in found for version in c.segments[0].versions} == {5}


@pytest.mark.parametrize(
    ("attack", "says"), ATTACKS, ids=["dropped", "corrupted", "mis-cast", "swapped"]
)
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


def test_a_weight_that_changes_in_vllm_after_it_was_proved_is_found_at_the_next_delivery(
    engine: Any, model: PreTrainedModel
) -> None:
    def one_value_of_the_fused(worker: Any) -> None:
        norm = worker.model_runner.get_model().get_parameter(
            "model.layers.2.self_attn.q_norm.weight"
        )
        norm.data[3] = torch.nextafter(norm.data[3], torch.tensor(9.0))

    sync = _sync(engine, model)
    sync.deliver(1)
    sync.deliver(2)
    engine._engine.collective_rpc(one_value_of_the_fused)
    says = (
        r"version 2 as it was delivered: model\.layers\.2\.self_attn\.q_norm\.weight changed since"
    )
    with pytest.raises(WeightSyncError, match=says):
        sync.deliver(3)


def test_on_a_cpu_what_vllm_computes_with_is_read_without_a_product(
    engine: Any, model: PreTrainedModel
) -> None:
    def packed(worker: Any) -> list[str]:
        layers = worker.model_runner.get_model().named_modules()
        multiplying = [(name, layer) for name, layer in layers if hasattr(layer, "cpu_linear")]
        plain = torch.nn.functional.linear
        assert multiplying
        return [
            name
            for name, layer in multiplying
            if layer.cpu_linear is not plain or not layer.weight.numel()
        ]

    assert engine._engine.collective_rpc(packed) == [[]]
    sync = _sync(engine, model)
    sync.deliver(1)
    assert sync.metrics()["sync/unread"] == 0
    assert engine._engine.collective_rpc(packed) == [[]]


LORA = AdapterOptions(rank=4, alpha=6.0)
DORA = AdapterOptions(rank=4, alpha=6.0, dora=True, rslora=True)


def _adapted(folder: Path, seed: int, options: AdapterOptions, dtype: str = "float32") -> Any:
    """The model that vLLM starts with, and an adapter that has learned something."""
    policy: Any = load_policy(str(folder), LoadOptions(dtype=getattr(torch, dtype)))
    add_adapter(policy, options, base=str(folder), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
    return policy


def test_a_tied_output_head_that_vllm_leaves_stale_is_caught(
    engine: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_stale(vllm_model: Any) -> None:
        """As vLLM's own packed copy of a head is, which its reload does not renew."""
        head = vllm_model.lm_head
        stale = head.weight.detach().roll(1, 0)
        linear = torch.nn.functional.linear
        monkeypatch.setattr(head, "cpu_linear", lambda x, weight, bias: linear(x, stale, bias))

    monkeypatch.setattr("oxrl.engines.sample.vllm_worker._repack", leave_stale)
    with pytest.raises(WeightSyncError, match=r"holds something else: model\.embed_tokens\.weight"):
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


# Tests from here on have engines of their own: closing one ends the groups of processes that all of
# a process share, so the shared engine is not used again.


@pytest.mark.parametrize(
    ("options", "dtype", "part"),
    [
        (LORA, "float32", "adapter"),
        (DORA, "float32", "adapter"),
        (DORA, "float32", "merged"),
        (LORA, "bfloat16", "adapter"),
        pytest.param(DORA, "bfloat16", "adapter", marks=pytest.mark.full),
        pytest.param(LORA, "bfloat16", "merged", marks=pytest.mark.full),
    ],
)
def test_what_learned_in_an_adapter_is_what_vllm_samples_with(
    options: AdapterOptions, dtype: str, part: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    kept = options.scale if part == "adapter" else None
    engine = _start(tmp_path, adapter_scale=kept, dtype=dtype)
    policy = LocalTrainer(_adapted(tmp_path, 1, options, dtype), TrainerOptions(lr=0.0))
    stored = LoadOptions(dtype=getattr(torch, dtype))

    def new_model() -> Any:
        if part == "merged":
            return load_policy(str(tmp_path), stored)
        return _adapted(tmp_path, 2, options, dtype)

    how = SyncOptions(
        dtype=stored.dtype, vocabulary=261, temperature=1.0, probe_tokens=64, part=part
    )
    try:
        sync = WeightSync(policy, engine, how, new_model)
        for version in range(2):
            sync.deliver(version)
        metrics = sync.metrics()
        sent = [tensor.nbytes for bucket in policy.weights(part) for _, tensor in bucket]
        assert metrics["sync/sent_bytes"] == sum(sent)
        assert metrics["sync/unread"] == metrics["sync/retries"] == 0
        requests = make_requests(8)
        found = generate(engine, requests, deadline_s=100)
        if dtype == "float32":
            local = LocalSampler(_adapted(tmp_path, 1, options), TOKENIZER, max_rows=8)
            expected = generate(local, requests, deadline_s=100)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    finally:
        engine.close()


def _lose_one_embedding(vllm_model: Any) -> None:
    vllm_model.get_parameter("model.embed_tokens.weight").data[7].zero_()


@dataclasses.dataclass(frozen=True)
class Returned:
    """A recorder that reads one thing out of what vLLM returned of a sampled token."""

    field: str

    def __call__(
        self, request: Request, tokens: Sequence[int], logprobs: Any, column: Column
    ) -> list[Any]:
        found = getattr(logprobs, self.field)
        return [found[start] for start in logprobs.start_indices[: len(tokens)]]


def place(request: Request, tokens: Sequence[int], logprobs: Any, column: Column) -> list[int]:
    first = len(request.prompt.token_ids) + len(request.prefix.token_ids)
    return list(range(first, first + len(tokens)))


RECORDERS = {"position": place, "said": Returned("logprobs"), "token": Returned("token_ids")}
RECORDED = {
    "position": Column("int32", -7),
    "said": Column("float32", 0.0),
    "token": Column("int32", -1),
}


def test_what_is_recorded_of_vllms_answers_reaches_the_batch_at_its_tokens(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights arrive in the middle, and where a response is taken out and goes on."""
    from oxrl.engines.sample import vllm

    monkeypatch.setattr(vllm, "RETURNED", RECORDERS)
    engine = _start(tmp_path, columns=RECORDED)
    options = {"max_tokens": 24, "stop_token_ids": ()}
    asked = make_requests(4, 2, **options)
    [short] = make_requests(1, prefix="short", **{**options, "max_tokens": 5})
    try:
        engine.update_weights(buckets(model.named_parameters()), 0)
        engine.submit([short, *asked])
        finished = engine.poll(60)
        assert [item.request for item in finished] == [short]
        engine.update_weights(buckets(lively(seed=1).named_parameters()), 1)
        for item in engine.abort([request.id for request in asked[::2]]):
            [part] = item.completion.segments
            assert 0 < len(part.token_ids) < 24
            engine.submit([dataclasses.replace(item.request, prefix=TokenRun().then(part))])
        while found := engine.poll(60):
            finished += found
    finally:
        engine.close()
    assert len(finished) == 9
    for item in finished:
        [segment] = item.completion.segments
        first = len(item.request.prompt.token_ids)
        places = range(first, first + len(segment.token_ids))
        recorded = {"position": places, "said": segment.logprobs, "token": segment.token_ids}
        assert segment.columns == {name: tuple(entries) for name, entries in recorded.items()}
        assert set(segment.versions) == ({0} if item.request == short else {0, 1})
    requests, done = zip(*((item.request, item.completion) for item in finished), strict=True)
    batch = to_rollout_batch(rollouts(requests, done), pad_id=0, columns=RECORDED)
    inputs, trained = batch.inputs, batch.inputs.response_mask
    places = torch.arange(trained.shape[1]).expand_as(trained)
    expected = {"position": places, "said": batch.rollout_logprobs, "token": inputs.tokens}
    assert int(trained.sum()) == 5 + 8 * 24
    for name, column in RECORDED.items():
        at_tokens = torch.where(trained, expected[name], column.fill)
        torch.testing.assert_close(
            inputs.columns[name], at_tokens.to(inputs.columns[name].dtype), rtol=0, atol=0
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [True, False])
def test_in_low_precision_deliveries_are_proved_by_limits_from_rounding_and_a_lost_row_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scaled: bool
) -> None:
    engine = _start(tmp_path, dtype=str(dtype).removeprefix("torch."))
    plain = load_policy("builtin:small", LoadOptions(seed=1, dtype=dtype))
    policy = lively(seed=1, dtype=dtype) if scaled else plain
    try:
        sync = _sync(engine, policy, dtype)
        for version in range(3):
            sync.deliver(version)
            metrics = sync.metrics()
            assert metrics["sync/retries"] == 0
            assert metrics["sync/unread"] == 0
            # Neither at the noise floor nor far above it: correct forwards come close to a share
            # of what is allowed, and no closer.
            assert 0.1 < metrics["sync/probe_limit_share"] < 0.7
        monkeypatch.setattr("oxrl.engines.sample.vllm_worker._repack", _lose_one_embedding)
        lost = r"holds something else: model\.embed_tokens\.weight"
        with pytest.raises(WeightSyncError, match=lost):
            _sync(engine, policy, dtype).deliver(3)
    finally:
        engine.close()


def test_a_small_cache_puts_requests_back_and_changes_no_sample(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    requests = make_requests(32, max_tokens=60, stop_token_ids=())
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
    other, requests = lively(seed=1), make_requests(8)
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
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    save_model(_experts(0), tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    engine = VllmEngine(str(tmp_path), VllmOptions(log_file=str(tmp_path / "vllm.log")))
    policy = LocalTrainer(_experts(1), TrainerOptions(lr=0.0))
    options = SyncOptions(dtype=torch.float32, vocabulary=261, temperature=1.0)
    try:
        sync = WeightSync(policy, engine, options, lambda: _experts(2))
        sync.deliver(1)
        metrics = sync.metrics()
        assert metrics["sync/probe_max"] < 1e-4
        # The experts of both layers, which are packed in a way that is not read back.
        assert metrics["sync/unread"] == 4
        monkeypatch.setattr("oxrl.engines.sample.vllm_worker._repack", lambda model: None)
        with pytest.raises(WeightSyncError, match="weight version -1 but does not use it"):
            WeightSync(policy, engine, options, lambda: _experts(2)).deliver(2)
    finally:
        engine.close()


def test_a_built_in_model_needs_no_folder_and_a_head_size_that_vllm_cannot_run_on_a_cpu_is_refused(
    tmp_path: Path,
) -> None:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    with pytest.raises(EngineError, match="no attention for heads of 16"):
        VllmEngine(
            "builtin:tiny", VllmOptions(max_model_len=64, log_file=str(tmp_path / "vllm.log"))
        )


def test_a_model_that_vllm_cannot_load_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    folder, log_file = tmp_path / "model", tmp_path / "vllm.log"
    save_model(load_policy("builtin:small"), folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    with pytest.raises(EngineError, match=f"vLLM does not start .* its messages: {log_file}"):
        VllmEngine(str(folder), VllmOptions(max_model_len=64, log_file=str(log_file)))


def test_kept_caches_stay_with_the_requests_that_run_and_are_found_by_no_other(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    """What `rollout.swap: keep` does at a plain delivery, at a proved one, and at one that is proved
    while the cache has no room for the probe: then even those that run are read again.
    """
    other = lively(seed=1)
    sampling: dict[str, Any] = {"words": 20, "stop_token_ids": ()}
    running = make_requests(2, 2, max_tokens=40, **sampling)
    # All have the prompts of those that run: some wait while the weights come.
    waiting = make_requests(2, 2, prefix="waits ", max_tokens=8, **sampling)
    after = make_requests(2, 2, prefix="after ", max_tokens=8, **sampling)
    asked = [*running, *waiting, *after]
    engine = _start(tmp_path, keep_cache=True, max_rows=len(running))

    def sampled(deliver: Callable[[], object]) -> dict[str, Completion]:
        engine.update_weights(buckets(model.named_parameters()), 0)
        engine.submit([*running, *waiting])
        assert engine.poll(60, until=engine.round + 12) == []
        assert engine.state()["kept"]
        engine.metrics()
        deliver()
        engine.submit(after)
        done: dict[str, Completion] = {}
        while len(done) < len(asked):
            done |= {item.request.id: item.completion for item in engine.poll(60)}
        assert engine.metrics()["rollout/preemptions"] == 0
        new = [done[request.id] for request in [*waiting, *after]]
        assert {version for one in new for version in one.segments[0].versions} == {1}
        scores = trainer_logprobs(other, [*waiting, *after], new, 1.0)
        assert largest(new, scores) < 1e-3
        versions = [done[request.id].segments[0].versions for request in running]
        assert all({*each} == {0, 1} for each in versions)
        return done

    def off(done: Mapping[str, Completion]) -> float:
        """How far the tokens that came after the delivery are from what the new weights alone give."""
        found = [done[request.id] for request in running]
        scores = trainer_logprobs(other, running, found, 1.0)
        pairs = zip(found, scores, strict=True)
        apart = [
            abs(ours - theirs)
            for one, row in pairs
            for ours, theirs, version in zip(
                one.segments[0].logprobs, row, one.segments[0].versions, strict=True
            )
            if version == 1
        ]
        return max(apart)

    def proved() -> None:
        _sync(engine, other, probe_every=1, probe_tokens=64).deliver(1)

    def without_room() -> None:
        engine._has_room_for = lambda rows: False
        proved()
        del engine._has_room_for

    try:
        plain, kept, again = map(
            sampled,
            (
                lambda: engine.update_weights(buckets(other.named_parameters()), 1),
                proved,
                without_room,
            ),
        )
        assert not engine._has_room_for([[0] * (1 << 20)])
    finally:
        engine.close()
    # No weights alone give these: keys and values of the older ones are among those they read.
    assert off(plain) > 0.01 and off(kept) > 0.01
    assert off(again) < 1e-3
    assert {id: one.token_ids for id, one in kept.items()} == {
        id: one.token_ids for id, one in plain.items()
    }
    for request in asked:
        [one], [expected] = kept[request.id].segments, plain[request.id].segments
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_caches_of_images_are_not_kept(tmp_path: Path) -> None:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    options = VllmOptions(log_file=str(tmp_path / "vllm.log"), keep_cache=True)
    images: Any = object()
    with pytest.raises(EngineError, match=r"rollout.swap is keep, and what vLLM keeps of images"):
        VllmEngine("builtin:tiny", options, images=images)
