"""VllmEngine on a model that reads images, against the trainer and the local sampler. Runs where
vLLM is installed (`make test-scale`).

Idefics3 is the family whose files vLLM imports without torchvision.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from typing import Any

import pytest
import torch

from oxrl.config.schema import Config
from oxrl.data.batching import to_rollout_batch
from oxrl.engines.delivery.proof import Compared
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import WeightSyncError
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.models.token_mask import banned_tokens
from oxrl.models.weights import buckets
from support.vision_families import write_family
from support.vision_runs import asked, config, parts_of, rollouts, write_rows

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
    ),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
FAMILIES = [
    "idefics3",
    *(
        pytest.param(
            family,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("torchvision") is None,
                reason="vLLM's files of this family import torchvision, which is not installed",
            ),
        )
        # Of Gemma 3 vLLM wants more of the tokenizer than a made-up one has.
        for family in ("qwen2_5_vl", "qwen3_vl")
    ),
]
WANT = frozenset({"logprobs"})


@pytest.fixture(scope="module", params=FAMILIES)
def cfg(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("vision")
    write_rows(folder)
    model = str(write_family(request.param, folder / request.param, heads=2))
    return config(folder, model)


@pytest.fixture(scope="module")
def engine(cfg: Config) -> Generator[Any]:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    log_file = str(cfg.run.directory.parent / "vllm.log")
    options = VllmOptions(max_model_len=512, max_rows=16, log_file=log_file)
    started = VllmEngine(cfg.model.name, options, images=parts_of(cfg).images)
    yield started
    started.close()


def apart(cfg: Config, model: Any, requests: Any, done: Any, temperature: float = 1.0) -> float:
    """The largest difference of the samples' log-probabilities from the trainer's."""
    batch = to_rollout_batch(rollouts(requests, done), pad_id=0, images=parts_of(cfg).images)
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3, temperature=temperature))
    said: Any = trainer.forward(batch.inputs, WANT).logprobs
    return float((said - batch.rollout_logprobs)[batch.inputs.response_mask].abs().max())


def test_samples_of_images_have_the_trainers_logprobs(cfg: Config, engine: Any) -> None:
    model = load_policy(cfg.model.name)
    engine.update_weights(buckets(model.named_parameters()), 0)
    for temperature in (1.0, 0.7):
        requests = asked(cfg, temperature=temperature)
        done = generate(engine, requests, deadline_s=120)
        difference = apart(cfg, model, requests, done, temperature)
        print(f"vLLM and trainer, temperature {temperature}: {difference:.1e} nats")  # noqa: T201
        assert difference < 1e-4
        local = parts_of(cfg).local_sampler(model)
        expected = generate(local, requests, deadline_s=60)
        equal = [a.token_ids == b.token_ids for a, b in zip(done, expected, strict=True)]
        assert sum(equal) >= len(equal) - 1


def test_vllm_never_samples_a_token_of_an_image(cfg: Config, engine: Any) -> None:
    model: Any = load_policy(cfg.model.name)
    banned = list(banned_tokens(model.config))
    assert banned
    with torch.no_grad():  # a policy that wants nothing else
        model.get_output_embeddings().weight[banned] *= 1e3
    engine.update_weights(buckets(model.named_parameters()), 1)
    for temperature in (1.0, 0.0):
        requests = asked(cfg, samples=1, temperature=temperature)
        done = generate(engine, requests, deadline_s=120)
        assert not set(banned) & {token for answer in done for token in answer.token_ids}
        assert apart(cfg, model, requests, done) < 1e-4


def test_a_delivery_is_proved_for_the_tower_too(cfg: Config, engine: Any) -> None:
    model: Any = load_policy(cfg.model.name)
    policy = LocalTrainer(model, TrainerOptions(lr=1e-2))
    options = SyncOptions(
        dtype=torch.float32,
        vocabulary=len(load_tokenizer(cfg.model.name)),
        temperature=1.0,
        compared=Compared(banned_tokens(model.config)),
        probe_tokens=64,
    )
    images = parts_of(cfg).images
    sync = WeightSync(policy, engine, options, lambda: load_policy(cfg.model.name), images)
    sync.deliver(2)
    assert sync.metrics()["sync/unread"] == 0  # every weight is read back under its own name
    requests = asked(cfg, samples=1)
    sync.remember(rollouts(requests, generate(engine, requests, deadline_s=120)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "vision" in name or "visual" in name:
                weight += 0.02 * torch.randn(weight.shape, generator=torch.manual_seed(0))
    sync.deliver(3)
    assert any(sync.shown)
    done = generate(engine, requests, deadline_s=120)
    assert apart(cfg, model, requests, done) < 1e-4
    # Images that were read with the old tower are not used again: other weights, other numbers.
    sync.deliver(4)
    held = engine.held

    def stale() -> Any:
        found = dict(held())
        tower = next(name for name in found if "vision" in name or "visual" in name)
        found[tower] = "0" * 16
        return found

    engine.held = stale
    try:
        with pytest.raises(WeightSyncError, match="vis"):
            sync.deliver(5)
    finally:
        del engine.held
