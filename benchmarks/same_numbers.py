"""Bits in which sampler and trainer differ, with run.exact off and on, and what exact mode costs.

    python benchmarks/same_numbers.py --models builtin:tiny builtin:small PATH --tokens 100000
    [--rows 64] [--longest 60] [--temperature 1.0] [--threads 1] [--pairs 6] [--no-operations]

Of each model: tokens are sampled, and a trainer scores them in seven layouts; a token differs where
any bit of its log-probability does. Without exact mode a tenth of the tokens are sampled. Then
steps (samples, and an update with prompts read once), off and on in turns: processor seconds of
this process, medians over the pairs, with quartiles. Before that the operations of a decoder, as
they are today and in exact mode: in how many trials rows alone and in blocks differ from the same
rows within many. Instruction sets are those that the environment lets the libraries use
(MKL_ENABLE_INSTRUCTIONS, ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA). Lines that are JSON objects are
figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import oxrl.functional.logprobs
from oxrl.data.batching import pad_rows, to_token_batch
from oxrl.engines.sample.local import module_sampler
from oxrl.engines.sample.sampler import ModuleSampler, generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.exact import ExactSilu, ExactTanhGelu, attend_exactly, exact_linear
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.types import Prompt, Request, Sampling, TokenBatch
from oxrl_stats import medians

WANT = frozenset({"logprobs"})
SAMPLES = 4
PROMPTS = (1, 2, 5, 17, 31, 32, 33, 60, 100)
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded rows": {},
    "padded rows, 700 tokens": {"micro_batch_tokens": 700},
    "one row at a time": {"micro_batch_tokens": 1},
    "prompts once": {"share_prefix": True},
    "prompts once, 500 tokens": {"share_prefix": True, "micro_batch_tokens": 500},
}
SIZES = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 48, 64, 65, 100, 127, 128, 200, 333)
SIZES = (*SIZES, 512, 1000, 2048)
MANY = 2304
SHAPES = ((64, 64), (64, 95), (64, 256), (576, 192), (576, 1536), (1536, 576))


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int32)


def model_of(name: str, exact: bool) -> PreTrainedModel:
    """A model with its own weights; larger ones where they would be random."""
    model = load_policy(name, LoadOptions(seed=1, exact=exact))
    if name.startswith("builtin:"):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3.0)
    return model


# --- Operations.
def row_wise(operation: Callable[[Tensor], Tensor], width: int) -> str:
    """In how many trials rows differ from the same within many, and at which numbers of rows."""
    x = torch.randn(MANY, width)
    whole = operation(x)
    trials = 0
    wrong: list[int] = []
    for count in SIZES:
        for start in (0, 5, MANY - count):
            rows = slice(start, start + count)
            trials += 1
            if not torch.equal(bits(operation(x[rows].clone())), bits(whole[rows])):
                wrong.append(count)
    return f"{len(wrong)} of {trials}{f', up to {max(wrong)} rows' if wrong else ''}"


def padded(x: Tensor, weight: Tensor) -> Tensor:
    more = -len(x) % 16
    return nn.functional.linear(nn.functional.pad(x, (0, 0, 0, more)), weight)[: len(x)]


def of_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def attention(attend: Callable[..., Tensor], width: int) -> str:
    """In how many trials the last queries of some tokens differ from the same among all."""
    query, key, value = (torch.randn(4, 4, 640, width) for _ in range(3))
    whole = attend(query, key, value, is_causal=True)
    trials = 0
    wrong = 0
    for first, count in [(0, 5), (0, 17), (0, 64), (40, 1), (99, 60), (256, 1), (300, 9), (639, 1)]:
        for more in (0, 1, 30, 200):
            for rows in ([0], [0, 1, 2, 3]):
                asked = slice(first, first + count)
                span = min(640, first + count + more)
                sees = torch.arange(span) <= first + torch.arange(count)[:, None]
                seen = key[rows][:, :, :span], value[rows][:, :, :span]
                found = attend(query[rows][:, :, asked], *seen, sees[None, None])
                trials += 1
                wrong += not torch.equal(bits(found), bits(whole[rows][:, :, asked]))
    return f"{wrong} of {trials}"


def operations() -> Iterator[tuple[str, str, str]]:
    """Name, trials that differ today, and in exact mode."""
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        found = [
            row_wise(lambda x, product=product, weight=weight: product(x, weight), inputs)
            for product in (nn.functional.linear, padded, of_onednn, exact_linear)
        ]
        usual, filled, other, exact = found
        name = f"linear {inputs} to {outputs}"
        yield name, f"{usual} (rows padded to 16: {filled}; oneDNN: {other})", exact
    for width in (256, 95):
        yield f"silu {width}", row_wise(nn.functional.silu, width), row_wise(ExactSilu(), width)
        usual = row_wise(nn.GELU(approximate="tanh"), width)
        yield f"tanh gelu {width}", usual, row_wise(ExactTanhGelu(), width)
        for name, operation in (
            ("layer norm", nn.LayerNorm(width)),
            ("rms norm", nn.RMSNorm(width)),
            ("softmax", nn.Softmax(-1)),
            ("log softmax", nn.LogSoftmax(-1)),
        ):
            yield f"{name} {width}", row_wise(operation, width), "the same"
    for width in (16, 64, 80):
        usual = attention(nn.functional.scaled_dot_product_attention, width)
        yield f"attention {width}", usual, attention(attend_exactly, width)


# --- Tokens.
def sampled(
    sampler: ModuleSampler, asked: argparse.Namespace, seed: int, *, vocabulary: int
) -> tuple[TokenBatch, Tensor]:
    """Rows, and what the sampler said of their tokens, [B, T]."""
    draw = random.Random(seed)
    requests: list[Request] = []
    for group in range(asked.rows // SAMPLES):
        tokens = tuple(draw.randrange(3, vocabulary) for _ in range(draw.choice(PROMPTS)))
        prompt = Prompt(uid=str(group), messages=(), token_ids=tokens)
        for number in range(SAMPLES):
            most = draw.randrange(max(1, asked.longest // 2), asked.longest + 1)
            request = Request(
                id=f"{seed}.{group}.{number}",
                prompt=prompt,
                draw=group,
                sample=number,
                sampling=Sampling(temperature=asked.temperature, max_tokens=most),
                seed=draw.randrange(2**40),
            )
            requests.append(request)
    done = generate(sampler, requests, deadline_s=3600)
    rows: list[list[int]] = []
    trained: list[list[bool]] = []
    said: list[list[float]] = []
    for request, completion in zip(requests, done, strict=True):
        begin = request.prompt.token_ids
        rows.append([*begin, *completion.token_ids])
        trained.append([False] * len(begin) + [True] * len(completion.token_ids))
        numbers = [number for segment in completion.segments for number in segment.logprobs]
        said.append([0.0] * len(begin) + numbers)
    return to_token_batch(rows, trained, 0), pad_rows(said, 0, torch.float32)


def summed(output: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return output.logprobs.sum(), {}


def layouts(
    model: PreTrainedModel, batch: TokenBatch, temperature: float
) -> Iterator[tuple[str, Tensor]]:
    """What trainers say of a batch, by their layout."""
    options: dict[str, Any] = {"lr": 0.0, "temperature": temperature}
    for name, layout in LAYOUTS.items():
        trainer = LocalTrainer(model, TrainerOptions(**options, **layout, trained=False))
        yield name, trainer.forward(batch, WANT).logprobs
    trainer = LocalTrainer(model, TrainerOptions(**options, gradient_checkpointing=True))
    found: Any = trainer.forward_backward(batch, summed, WANT | {"entropy"})
    trainer.skip_step()
    yield "a gradient, recomputed", found.logprobs.detach()
    before = oxrl.functional.logprobs.head_chunk
    oxrl.functional.logprobs.head_chunk = lambda vocabulary: 7
    trainer = LocalTrainer(model, TrainerOptions(**options, trained=False))
    yield "head in chunks of 7", trainer.forward(batch, WANT).logprobs
    oxrl.functional.logprobs.head_chunk = before


def count(name: str, exact: bool, tokens: int, asked: argparse.Namespace) -> None:
    """Print how many of so many tokens differ, by layout."""
    model = model_of(name, exact)
    sampler = module_sampler(model, load_tokenizer(name), max_rows=48)
    vocabulary = int(model.config.get_text_config().vocab_size)
    differ: dict[str, int] = defaultdict(int)
    most: dict[str, float] = defaultdict(float)
    seen = 0
    seed = 0
    while seen < tokens:
        batch, said = sampled(sampler, asked, seed, vocabulary=vocabulary)
        seed += 1
        here = batch.response_mask
        seen += int(here.sum())
        for layout, logprobs in layouts(model, batch, asked.temperature):
            differ[layout] += int(((bits(logprobs) != bits(said)) & here).sum())
            most[layout] = max(most[layout], float((logprobs - said).abs().max()))
    for layout, wrong in differ.items():
        print(
            f"  {'on ' if exact else 'off'} {layout:26} {wrong:8} of {seen} tokens differ "
            f"({wrong / seen:.1%}), by up to {most[layout]:.2g}"
        )
    figure = {"figure": f"tokens that differ, {name}, {'on' if exact else 'off'}"}
    print(json.dumps({**figure, "tokens": seen, "layouts": len(differ), "differ": dict(differ)}))


# --- Price.
def price(name: str, asked: argparse.Namespace) -> None:
    """Print processor seconds of steps, off and on in turns."""
    models = {exact: model_of(name, exact) for exact in (False, True)}
    tokenizer = load_tokenizer(name)
    vocabulary = int(models[True].config.get_text_config().vocab_size)
    samplers = {
        exact: module_sampler(model, tokenizer, max_rows=asked.rows)
        for exact, model in models.items()
    }
    taken: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for turn in range(asked.pairs + 1):  # the first has kernels compiled
        for exact in (False, True) if turn % 2 else (True, False):
            begin = time.process_time()
            batch, _ = sampled(samplers[exact], asked, turn, vocabulary=vocabulary)
            middle = time.process_time()
            trainer = LocalTrainer(models[exact], TrainerOptions(lr=0.0, share_prefix=True))
            trainer.forward_backward(batch, summed, WANT)
            trainer.skip_step()
            end = time.process_time()
            if turn:
                taken["sampling", exact].append(middle - begin)
                taken["update", exact].append(end - middle)
                taken["step", exact].append(end - begin)
    for part in ("sampling", "update", "step"):
        off, on = taken[part, False], taken[part, True]
        ratio = medians.ratio(on, off)
        middle, low, high = ratio
        print(
            f"  {part:9} off {median(off):.3f} s, on {median(on):.3f} s of processor time: "
            f"{middle:.2f} times [{low:.2f}, {high:.2f}]"
        )
        figures = {"off_cpu_s": medians.median(off), "on_cpu_s": medians.median(on)}
        figure = {"case": f"{part}, {name}", **figures, "cpu_ratio": ratio}
        print(json.dumps({**figure, "pairs": asked.pairs, "rows": asked.rows}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["builtin:tiny", "builtin:small"])
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled with exact mode")
    parser.add_argument("--rows", type=int, default=64, help="that are sampled together")
    parser.add_argument("--longest", type=int, default=60, help="tokens of a response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=6, help="steps off and on; 0: no price")
    parser.add_argument("--no-operations", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    told = {name: text for name, text in os.environ.items() if name.startswith(("MKL_E", "ATEN"))}
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {capability}, {asked.threads} threads {told or ''}")
    if not asked.no_operations:
        print("trials that differ from the same rows within many: today | in exact mode")
        torch.manual_seed(0)
        with torch.no_grad():
            for name, today, exact in operations():
                print(f"  {name:20} {today} | {exact}")
    for name in asked.models:
        print(name)
        count(name, False, max(1, asked.tokens // 10), asked)
        count(name, True, asked.tokens, asked)
        if asked.pairs:
            price(name, asked)


if __name__ == "__main__":
    main()
