"""A trial of exact mode before the first step: a small model of the run's family samples, and a
trainer scores what it sampled in several layouts. Not a bit may differ.

A processor, a version of a library or a family that nobody has tried may have kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedModel

from oxrl.data.batching import pad_rows, to_token_batch
from oxrl.engines.sample.local import module_sampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError, required
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.models.exact import OFF
from oxrl.models.exact_contract import exact_copy
from oxrl.types import Output, Prompt, Request, Sampling, Tensors, TokenBatch, TrainBatch

# Tokens of the prompts, and of the samples of each: rows alone, and on either side of what
# attention takes at a time; a head that has one token to look at. Fewer are decoded together than
# are asked for, so steps have other numbers of rows.
PROMPTS = (1, 5, 17, 300)
RESPONSES = (24, 23, 1)
ROWS = 5
DEADLINE_S = 600.0
# Of inner layers: no multiple of what a vector has, so that rows begin and end within one.
INNER = 120

WANT = frozenset({"logprobs"})
# How a trainer lays rows out: its options beside the temperature.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "padded rows": {},
    "padded rows of 700 tokens": {"micro_batch_tokens": 700},
    "one row at a time": {"micro_batch_tokens": 1},
    "prompts read once": {"share_prefix": True},
    "prompts read once, 500 tokens": {"share_prefix": True, "micro_batch_tokens": 500},
}
RECOMPUTED = "a gradient with activations computed anew"


def check_exact(
    config: PreTrainedConfig,
    *,
    temperature: float,
    share_prefix: bool,
    trust_remote_code: bool = False,
) -> None:
    """Make sure that sampler and trainer agree to the last bit, with the threads there are.

    Args:
        config: of the run's model.
        temperature: that the run samples with.
        share_prefix: prompts are read once.
        trust_remote_code: run Python code that the model's authors ship with it.

    Raises:
        ConfigError: they do not, or a part of the model has no exact form.
    """
    # The sums of a head are over its tokens: no fewer than the run has.
    vocabulary = config.get_text_config().vocab_size
    model = exact_copy(
        config, trust_remote_code=trust_remote_code, inner=INNER, vocabulary=vocabulary
    )
    batch, said = _sample(model, temperature)
    found = {RECOMPUTED: _score_with_gradient(model, batch, temperature)}
    for layout, options in LAYOUTS.items():
        if share_prefix or "share_prefix" not in options:
            found[layout] = _score(model, batch, temperature, options)
    for layout, logprobs in found.items():
        apart = _differing(logprobs, said) & batch.response_mask
        if not bool(apart.any()):
            continue
        row, place = (int(index) for index in apart.nonzero()[0])
        module = first_apart(model, batch, row, place - 1)
        raise ConfigError(
            f"run.exact: on a tiny {type(model).__name__} the sampler and a trainer of {layout} "
            f"differ in {int(apart.sum())} of {int(batch.response_mask.sum())} tokens, with "
            f"{torch.get_num_threads()} threads and {torch.backends.cpu.get_cpu_capability()}: row "
            f"{row}, token {place}: {float(said[row, place]):.9g} and "
            f"{float(logprobs[row, place]):.9g}. The first module whose output depends on the "
            f"batch is {module}; {OFF}"
        )


def _differing(numbers: Tensor, others: Tensor) -> Tensor:
    """Tell where two float32 tensors of one shape differ in any bit."""
    return numbers.contiguous().view(torch.int32) != others.contiguous().view(torch.int32)


def _sample(model: PreTrainedModel, temperature: float) -> tuple[TokenBatch, Tensor]:
    """Have the model's sampler continue prompts of several lengths.

    Returns:
        The rows, and the sampler's log-probabilities [B, T].
    """
    text = model.config.get_text_config()
    longest = max(PROMPTS) + max(RESPONSES)
    context = min(longest, getattr(text, "max_position_embeddings", None) or longest)
    requests: list[Request] = []
    for draw, length in enumerate(PROMPTS):
        kept = min(length, context - max(RESPONSES))
        ids = [7 * draw + 5 * at for at in range(kept)]
        tokens = tuple(2 + number % (text.vocab_size - 2) for number in ids)
        prompt = Prompt(uid=str(draw), messages=(), token_ids=tokens)
        for number, most in enumerate(RESPONSES):
            request = Request(
                id=f"{draw}.{number}",
                prompt=prompt,
                draw=draw,
                sample=number,
                sampling=Sampling(temperature=temperature, max_tokens=most),
                seed=len(RESPONSES) * draw + number,
            )
            requests.append(request)
    sampler = module_sampler(model, builtin_tokenizer(), max_rows=ROWS, longest=longest)
    done = generate(sampler, requests, deadline_s=DEADLINE_S)
    rows: list[list[int]] = []
    trained: list[list[bool]] = []
    said: list[list[float]] = []
    for request, completion in zip(requests, done, strict=True):
        begin = request.prompt.token_ids
        rows.append([*begin, *completion.token_ids])
        trained.append([False] * len(begin) + [True] * len(completion.token_ids))
        logprobs = [number for segment in completion.segments for number in segment.logprobs]
        said.append([0.0] * len(begin) + logprobs)
    return to_token_batch(rows, trained, 0), pad_rows(said, 0, torch.float32)


def _score(
    model: PreTrainedModel, batch: TokenBatch, temperature: float, options: Mapping[str, Any]
) -> Tensor:
    """Compute what a trainer says of a batch in one of the layouts, [B, T]."""
    given = TrainerOptions(lr=0.0, temperature=temperature, trained=False, **options)
    logprobs = LocalTrainer(model, given).forward(batch, WANT).logprobs
    return required(logprobs, "log-probabilities")


def _score_with_gradient(model: PreTrainedModel, batch: TokenBatch, temperature: float) -> Tensor:
    """Compute what a trainer says of a batch on the way to a gradient, [B, T]."""
    given = TrainerOptions(lr=0.0, temperature=temperature, gradient_checkpointing=True)
    trainer = LocalTrainer(model, given)
    found = trainer.forward_backward(batch, _summed, WANT).logprobs
    trainer.skip_step()
    return required(found, "log-probabilities").detach()


def _summed(output: Output, batch: TrainBatch) -> tuple[Tensor, Tensors]:
    """Take any loss: what is said on the way to a gradient does not depend on it."""
    return required(output.logprobs, "log-probabilities").sum(), {}


@torch.no_grad()
def first_apart(model: PreTrainedModel, batch: TokenBatch, row: int, place: int) -> str:
    """The name of the first module that says something else of a token in another batch.

    Args:
        model: is given the row alone, among the others, and token by token over its cache.
        batch: [B, T].
        row, place: of the token.
    """
    tokens = batch.tokens
    alone = tokens[row : row + 1, : place + 1]
    decoder: Any = model.base_model

    def one_row() -> None:
        decoder(input_ids=alone, use_cache=False)

    def padded() -> None:
        decoder(input_ids=tokens, use_cache=False)

    whole = _said_of(model, one_row, 0, place)
    ways = [_said_of(model, padded, row, place)]
    if place:
        cache = decoder(input_ids=alone[:, :place], use_cache=True).past_key_values

        def over_cache() -> None:
            at = torch.tensor([[place]])
            decoder(input_ids=alone[:, place:], past_key_values=cache, position_ids=at)

        ways.append(_said_of(model, over_cache, 0, 0))
    for way in ways:
        for (name, wanted), (_, found) in zip(whole, way, strict=False):
            if bool(_differing(found, wanted).any()):
                return name
    return "the output head"


def _said_of(
    model: Module, run: Callable[[], object], row: int, place: int
) -> list[tuple[str, Tensor]]:
    """Note what every module got and said of one token, in the order in which a model computes.

    What a module got that is no output of another was computed in the module around it.
    """
    noted: list[tuple[str, Tensor]] = []

    def note(name: str, value: Any) -> None:
        first = value[0] if isinstance(value, tuple) and value else value
        if not isinstance(first, Tensor) or first.dim() < 3 or place >= first.shape[1]:
            return
        at = row if len(first) > 1 else 0  # rotations are there once for all rows
        noted.append((name, first[at, place].clone()))

    def hooked(name: str, module: Module) -> list[Any]:
        def got(module: Module, given: tuple[Any, ...]) -> None:
            note(name.rpartition(".")[0] or name, given)

        def said(module: Module, given: Any, output: Any) -> None:
            note(name, output)

        return [module.register_forward_pre_hook(got), module.register_forward_hook(said)]

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles += hooked(name, module)
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return noted
