"""Tokens per second of oxRL's sampler of this process, of `generate` of transformers, and of vLLM.

    python benchmarks/sampler.py [--model builtin:small] [--rows 64] [--pairs 4] [--vllm]
    [--settings equal heavy]

All sample the same prompts with the same weights in float32 on one thread of this process; no
response ends before its length. equal: 64 tokens each. heavy: lengths as of `rl_step.py`
(lognormal, median 32, at most 256), where `generate` goes on until the longest is done and the
others give a place to the next row. They work in turns; rates are tokens per second of processor
time. --vllm needs `make env-scale`; its CPU build keeps its cache in `--cache-gb` of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import problem
import torch

from oxrl.data.chat import ChatEncoder
from oxrl.engines.sample.local import module_sampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.vllm import CPU_ENVIRONMENT, ENVIRONMENT
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.rollouts.sync import make_requests
from oxrl.types import Prompt, Request, Sampling
from oxrl_stats import medians

Work = Callable[[list[Request]], int]


def requests_of(setting: problem.Setting, rows: int, tokenizer: Any) -> list[Request]:
    """Rows to sample, each with a length of its own and no stop token."""
    chat = ChatEncoder(tokenizer)
    draws: list[tuple[int, Prompt]] = []
    for place in range(rows):
        said = ({"role": "user", "content": problem.questions()[place]},)
        ids = tuple(chat.encode_prompt(said))
        draws.append((place, Prompt(uid=str(place), messages=said, token_ids=ids)))
    made = make_requests(draws, samples=1, sampling=Sampling(max_tokens=setting.cap), run_seed=0)
    found: list[Request] = []
    for place, request in enumerate(made):
        length = setting.lengths[place % len(setting.lengths)]
        found.append(replace(request, sampling=Sampling(max_tokens=length)))
    return found


def ours(model: Any, tokenizer: Any, rows: int) -> Work:
    sampler = module_sampler(model, tokenizer, max_rows=rows)

    def work(requests: list[Request]) -> int:
        done = generate(sampler, requests, deadline_s=3600)
        return sum(completion.sampled for completion in done)

    return work


def of_transformers(model: Any, tokenizer: Any) -> Work:
    def work(requests: list[Request]) -> int:
        longest = max(len(request.prompt.token_ids) for request in requests)
        pad = int(tokenizer.pad_token_id)
        rows = [[*request.prompt.token_ids] for request in requests]
        tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        most = max(request.sampling.max_tokens for request in requests)
        model.generate(
            input_ids=tokens,
            attention_mask=tokens != pad,
            do_sample=True,
            max_new_tokens=most,
            min_new_tokens=most,
            pad_token_id=pad,
        )
        return sum(request.sampling.max_tokens for request in requests)

    return work


def of_vllm(folder: str, rows: int, cache_gb: int) -> Work:
    # Its engine in this process, where its processor time is counted, and nothing compiled.
    os.environ |= {**ENVIRONMENT, **CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(cache_gb)}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=rows, seed=0
    )

    def work(requests: list[Request]) -> int:
        prompts = [{"prompt_token_ids": [*request.prompt.token_ids]} for request in requests]
        params: list[Any] = []
        for request in requests:
            most = request.sampling.max_tokens
            params.append(SamplingParams(max_tokens=most, ignore_eos=True, detokenize=False))
        done = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return work


def measure(
    name: str, engines: Mapping[str, Work], requests: list[Request], pairs: int
) -> dict[str, Any]:
    """A figure: the rate of every engine and how oxRL's compares.

    Raises:
        RuntimeError: one sampled another number of tokens than it was asked for.
    """
    wanted = sum(request.sampling.max_tokens for request in requests)
    rates: dict[str, list[float]] = {engine: [] for engine in engines}
    for turn in range(pairs + 1):
        for engine, work in engines.items():
            started = time.process_time()
            with torch.no_grad():
                tokens = work(requests)
            spent = time.process_time() - started
            if tokens != wanted:
                raise RuntimeError(f"{engine} sampled {tokens} tokens instead of {wanted}")
            if turn:  # the first one warms up
                rates[engine].append(tokens / spent)
    found: dict[str, Any] = {"case": name, "tokens": wanted}
    for engine, measured in rates.items():
        found[f"{engine}_rate"] = medians.median(measured)
        if engine != "oxrl":
            found[f"over_{engine}"] = medians.ratio(rates["oxrl"], measured)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:small")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--settings", nargs="+", default=["equal", "heavy"])
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--cache-gb", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_policy(options.model).eval()
    tokenizer = load_tokenizer(options.model)
    engines = {
        "oxrl": ours(model, tokenizer, options.rows),
        "transformers": of_transformers(model, tokenizer),
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.vllm:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            engines["vllm"] = of_vllm(folder, options.rows, options.cache_gb)
            torch.set_num_threads(1)
        for name in options.settings:
            requests = requests_of(problem.setting(name), options.rows, tokenizer)
            print(json.dumps(measure(name, engines, requests, options.pairs)), flush=True)


if __name__ == "__main__":
    main()
