"""vLLM through oxRL's engine against vLLM's own `LLM.generate`.

    python benchmarks/vllm_raw.py [--rows 64] [--pairs 10] [--warmup 1] [--settings equal heavy]

The same prompts, weights (3.3M parameters, float32), sampling parameters and vLLM settings, each in
a process of its own with one thread, in turns; processor seconds, of which the engine's are all in
its process. oxRL asks for the log-probability of every sampled token, for training needs it; so
does vLLM in the comparison, and once more without, which is told beside it. Needs `make env-scale`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import problem
from rl_step import Side
from sampler import requests_of

from oxrl_stats import medians

CONTEXT = 512
CACHE_GB = 1.0


def through_oxrl(folder: Path, rows: int) -> Callable[[list[Any]], int]:
    """What samples requests with oxRL's engine, and says how many tokens."""
    from oxrl.engines.sample.sampler import generate
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    options = VllmOptions(
        log_file=str(folder / "vllm.log"),
        max_rows=rows,
        kv_cache_gb=CACHE_GB,
        max_model_len=CONTEXT,
    )
    engine = VllmEngine(str(folder / "model"), options)

    def work(requests: list[Any]) -> int:
        done = generate(engine, requests, deadline_s=3600)
        return sum(completion.sampled for completion in done)

    return work


def raw(folder: Path, rows: int) -> Callable[..., int]:
    """The same of vLLM itself, with log-probabilities or without."""
    from oxrl.engines.sample.vllm import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ |= {**ENVIRONMENT, **CPU_ENVIRONMENT}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        str(folder / "model"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT,
        max_num_seqs=rows,
        kv_cache_memory_bytes=int(CACHE_GB * 2**30),
        block_size=32,
        seed=0,
        disable_log_stats=True,
    )

    def work(requests: list[Any], logprobs: int | None = 0) -> int:
        prompts = [{"prompt_token_ids": [*request.prompt.token_ids]} for request in requests]
        params: list[Any] = []
        for request in requests:
            most = request.sampling.max_tokens
            told = {"max_tokens": most, "ignore_eos": True, "detokenize": False}
            params.append(SamplingParams(logprobs=logprobs, **told))
        done = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return work


def timed(work: Callable[..., int], *inputs: Any) -> dict[str, float]:
    seconds, cpu = time.perf_counter(), time.process_time()
    tokens = work(*inputs)
    cpu = time.process_time() - cpu
    return {"seconds": time.perf_counter() - seconds, "cpu": cpu, "tokens": tokens}


def child(side: str, folder: Path) -> None:
    """Sample everything once for every line from the parent."""
    channel = problem.Channel()
    import torch

    from oxrl.models.load import load_tokenizer

    given = json.loads((folder / "given.json").read_text())
    tokenizer = load_tokenizer(str(folder / "model"))
    work = {"oxrl": through_oxrl, "raw": raw}[side](folder, given["rows"])
    torch.set_num_threads(1)
    chosen = problem.setting(given["setting"])
    requests = requests_of(chosen, given["rows"], tokenizer)
    channel.send(ready=True)
    while True:
        channel.wait()
        with torch.inference_mode():
            said: dict[str, Any] = dict(timed(work, requests))
            if side == "raw":
                said["without"] = timed(work, requests, None)
        channel.send(**said)


def compare(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both in turns; the figure.

    Raises:
        RuntimeError: they sampled another number of tokens than each other.
    """
    given = {"rows": options.rows, "setting": name}
    (folder / "given.json").write_text(json.dumps(given))
    taken: dict[str, list[dict[str, Any]]] = {"oxrl": [], "raw": []}
    script = Path(__file__).name
    with Side(script, folder, 1, "oxrl") as oxrl, Side(script, folder, 1, "raw") as other:
        sides = {"oxrl": oxrl, "raw": other}
        for turn in range(options.warmup + options.pairs):
            for key in ("oxrl", "raw")[:: 1 if turn % 2 else -1]:
                step = sides[key].step()
                if turn >= options.warmup:
                    taken[key].append(step)
    if len({step["tokens"] for steps in taken.values() for step in steps}) > 1:
        raise RuntimeError(f"they sampled different numbers of tokens: {taken}")
    ours = [step["cpu"] for step in taken["oxrl"]]
    theirs = [step["cpu"] for step in taken["raw"]]
    without = [step["without"]["cpu"] for step in taken["raw"]]
    tokens = taken["oxrl"][0]["tokens"]
    return {
        "case": name,
        "tokens": tokens,
        "oxrl_rate": medians.median([tokens / taken for taken in ours]),
        "raw_rate": medians.median([tokens / taken for taken in theirs]),
        "of_raw": medians.ratio(theirs, ours),
        "of_raw_without": medians.ratio(without, ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--settings", nargs="+", default=["equal", "heavy"])
    options = parser.parse_args()
    from oxrl.checkpoint.model_files import save_model
    from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(load_policy("builtin:small", LoadOptions(seed=0)), folder / "model")
        load_tokenizer("builtin:small").save_pretrained(folder / "model")
        for setting in options.settings:
            print(json.dumps(compare(setting, options, folder)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ("oxrl", "raw"):
        child(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
