"""The local engine on a CUDA device says what it says on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.seeds import sample_seed
from oxrl.types import Completion, Prompt, Request, Sampling, TokenBatch
from support.tiny import token_batch

pytestmark = pytest.mark.gpu
WANT = frozenset({"logprobs", "entropy"})
NAME = "builtin:tiny"


def _inputs() -> TokenBatch:
    return token_batch([(3, 9), (1, 4), (7, 2), (5, 20)], extra=3, vocabulary=261)


def _model(device: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = load_policy(NAME, LoadOptions(seed=0, dtype=dtype, device=device))
    with (
        torch.no_grad()
    ):  # as initialised, every distribution is nearly uniform and nothing can go wrong
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model


def _sample(model: PreTrainedModel, temperature: float, rows: int = 64) -> list[Completion]:
    prompt = Prompt(uid="p", messages=(), token_ids=(5, 6, 7, 8))
    sampling = Sampling(temperature=temperature, max_tokens=48)
    requests = [
        Request(
            id=str(i), prompt=prompt, draw=0, sample=i, sampling=sampling, seed=sample_seed(0, 0, i)
        )
        for i in range(rows)
    ]
    return generate(
        LocalSampler(model, load_tokenizer(NAME), max_rows=rows), requests, deadline_s=120
    )


def _trainer_logprobs(
    model: PreTrainedModel, completions: list[Completion], temperature: float
) -> torch.Tensor:
    rows = torch.tensor([[5, 6, 7, 8, *completion.token_ids] for completion in completions])
    trained = torch.ones_like(rows, dtype=torch.bool)
    trained[:, :4] = False
    inputs = TokenBatch(tokens=rows, attention_mask=torch.ones_like(trained), response_mask=trained)
    logprobs = (
        LocalTrainer(model, TrainerOptions(lr=0.0, temperature=temperature))
        .forward(inputs, frozenset({"logprobs"}))
        .logprobs
    )
    assert logprobs is not None
    return logprobs[:, 4:]


def _recorded(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor([completion.segments[0].logprobs for completion in completions])


def test_forward_agrees_with_the_cpu() -> None:
    one, other = (
        LocalTrainer(_model(device), TrainerOptions(lr=0.0)).forward(_inputs(), WANT)
        for device in ("cpu", "cuda")
    )
    for name in WANT:
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_recorded_logprobs_are_the_trainers_in_float32(temperature: float) -> None:
    model = _model("cuda")
    completions = _sample(model, temperature)
    difference = (_recorded(completions) - _trainer_logprobs(model, completions, temperature)).abs()
    assert difference.max() < 1e-4


def test_recorded_logprobs_are_near_the_trainers_in_bfloat16() -> None:
    model = _model("cuda", torch.bfloat16)
    completions = _sample(model, 1.0)
    difference = (_recorded(completions) - _trainer_logprobs(model, completions, 1.0)).abs()
    assert difference.mean() < 0.02 and difference.max() < 0.3


def test_the_same_seeds_draw_the_same_tokens_as_on_the_cpu() -> None:
    one, other = (_sample(_model(device), 1.0, rows=32) for device in ("cpu", "cuda"))
    # One float that rounds otherwise changes the rest of its row, so rows are compared, not tokens.
    assert sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True)) >= 30


def test_sampling_twice_is_bit_exact() -> None:
    model = _model("cuda")
    one, other = _sample(model, 1.0), _sample(model, 1.0)
    assert [c.token_ids for c in one] == [c.token_ids for c in other]
    assert torch.equal(_recorded(one), _recorded(other))
