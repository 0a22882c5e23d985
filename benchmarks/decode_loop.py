"""The local sampler against a handwritten decode loop, and where the sampler's time goes.

    python benchmarks/decode_loop.py [MODEL] [ROWS] [TOKENS] [REPEATS]

Rows of equal length, random weights, one thread; processor seconds of interleaved repeats after one
that warms up. The loop is what one would write: transformers' cache, softmax, multinomial, and the
log-probability of what was drawn. Then the sampler's own functions by the time spent in them.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.types import Prompt, Request, Sampling
from oxrl_stats import medians

PROMPT = 32
DEADLINE_S = 600.0
SHOWN = 25


def handwritten(model: PreTrainedModel, prompts: torch.Tensor, tokens: int, seed: int) -> None:
    """Sample `tokens` tokens after each of `prompts`, [rows, length]."""
    noise = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    read = prompts
    for _ in range(tokens):
        logits = model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logprobs = logits.logits[:, -1].float().log_softmax(-1)
        read = torch.multinomial(logprobs.exp(), 1, generator=noise)
        logprobs.gather(1, read)


def requests(prompts: torch.Tensor, tokens: int, seed: int) -> list[Request]:
    """The same prompts as requests to a sampler."""
    sampling = Sampling(max_tokens=tokens)
    asked: list[Request] = []
    for row, ids in enumerate(prompts.tolist()):
        prompt = Prompt(uid=str(row), messages=(), token_ids=tuple(ids))
        name = f"{seed}-{row}"
        request = Request(
            id=name, prompt=prompt, sampling=sampling, seed=seed + row, draw=row, sample=0
        )
        asked.append(request)
    return asked


def processor_seconds(work: Callable[[int], object], seed: int) -> float:
    begun = time.process_time()
    work(seed)
    return time.process_time() - begun


def main() -> None:
    """Print the comparison and the profile."""
    given = sys.argv[1:] + [""] * 4
    name = given[0] or "builtin:small"
    rows, tokens, repeats = (
        int(text or usual) for text, usual in zip(given[1:4], (64, 64, 10), strict=True)
    )
    torch.set_num_threads(1)
    model = builtin_policy(name, seed=0).eval()
    prompts = torch.randint(4, 250, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    sampler = LocalSampler(model, builtin_tokenizer(), max_rows=rows)

    def ours(seed: int) -> None:
        generate(sampler, requests(prompts, tokens, seed), deadline_s=DEADLINE_S)

    @torch.inference_mode()
    def theirs(seed: int) -> None:
        handwritten(model, prompts, tokens, seed)

    pairs: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):
        pair = (processor_seconds(ours, repeat), processor_seconds(theirs, repeat))
        if repeat:
            pairs.append(pair)
    sampled, looped = zip(*pairs, strict=True)
    figure: dict[str, object] = {"case": f"{rows} rows of {tokens} tokens"}
    figure["oxrl_cpu_s"] = medians.median(sampled)
    figure["loop_cpu_s"] = medians.median(looped)
    figure["over_loop"] = medians.ratio(sampled, looped)
    print(json.dumps(figure), flush=True)
    profile = cProfile.Profile()
    profile.runcall(ours, repeats + 1)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(SHOWN)


if __name__ == "__main__":
    main()
