"""How much of the time of a teacher behind a server is hidden while other responses are sampled.

    python benchmarks/teacher_endpoint.py [--seconds 0.02] [--threads 1] [--pairs 5]

A server on loopback, in a process of its own, that takes so long for a row, one after the other.
Runs of `opd_topk` in turn: with it, and with the same server at once; the teacher finds all tokens
alike, so both sample the same. Of every step after the first: its seconds over the larger of
scoring and its own sampling, over the larger of scoring and sampling beside a server that answers
at once, and over the larger of scoring and the whole of that step. Prints the medians of each
pair, and of all steps with the least and the most of the pairs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from oxrl.commands.train import run
from oxrl.config import load_config

VOCABULARY = 261


def serve(seconds: float, told: Connection) -> None:
    """Say of every token that all of the vocabulary are alike, a row at a time."""
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:
                until = time.monotonic() + seconds
                body = json.dumps(answer(request)).encode()
                time.sleep(max(0.0, until - time.monotonic()))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    told.send(server.server_address[1])
    server.serve_forever()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A completion as vLLM's server has it."""
    alike = {"logprob": -5.5645, "rank": 1, "decoded_token": "?"}
    first = range(request["prompt_logprobs"])
    entries = [{str(token): alike for token in (own, *first)} for own in request["prompt"]]
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


def one_run(folder: Path, options: argparse.Namespace, url: str) -> list[dict[str, float]]:
    """Run a few steps; the metrics of all but the first."""
    folder.mkdir()
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = {"name": "big", "engine": "endpoint", "url": url}
    content: dict[str, Any] = {
        "run": {"name": "teacher", "dir": str(folder / "run"), "steps": options.steps},
        "model": {"name": options.model, "teachers": {"big": teacher}},
        "data": {"train": str(folder / "rows.jsonl"), "prompts_per_step": options.prompts},
        "rollout": {"n_samples": 1, "max_tokens": options.tokens},
        "train": {"alg_name": "opd_topk", "lr": 1e-6},
        "inference_engine": {"max_rows": options.rows},
    }
    content["run"] |= {"mlflow": False, "threads": options.threads, "checkpoint_every": 0}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(content))
    run(load_config(config))
    text = (folder / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--seconds", type=float, default=0.02, help="of the server, for a row")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of PyTorch; as many as it takes")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="responses sampled at the same time")
    options = parser.parse_args()
    spawning = multiprocessing.get_context("spawn")
    urls: dict[float, str] = {}
    for seconds in (options.seconds, 0.0):
        here, there = spawning.Pipe()
        spawning.Process(target=serve, args=(seconds, there), daemon=True).start()
        urls[seconds] = f"http://127.0.0.1:{here.recv()}/v1"
    scoring = options.seconds * options.prompts
    pairs: list[dict[str, list[float]]] = []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as temporary:
            slow = one_run(Path(temporary) / "slow", options, urls[options.seconds])
            quick = one_run(Path(temporary) / "quick", options, urls[0.0])
        pairs.append(ratios(slow, quick, scoring))
        middle = [f"{statistics.median(found):.3f}" for found in pairs[-1].values()]
        seconds = [
            f"{name} {statistics.median(line[key] for line in slow):.2f} s"
            for name, key in (
                ("step", "time/step_s"),
                ("sampling", "time/rollout_s"),
                ("update", "time/update_s"),
                ("what is left of scoring then", "time/logprobs_s"),
            )
        ]
        sys.stdout.write(
            f"pair {pair}: {', '.join(seconds)}; scoring alone {scoring:.2f} s: "
            f"{', '.join(middle)} x the larger\n"
        )
    for name in pairs[0]:
        middle = statistics.median(ratio for found in pairs for ratio in found[name])
        of_pairs = [statistics.median(found[name]) for found in pairs]
        sys.stdout.write(
            f"step over the larger of scoring and {name}: median {middle:.3f} "
            f"({min(of_pairs):.3f} to {max(of_pairs):.3f})\n"
        )


def ratios(
    slow: list[dict[str, float]], quick: list[dict[str, float]], scoring: float
) -> dict[str, list[float]]:
    """Compare steps of a pair of runs, one by one.

    Raises:
        ValueError: they did not sample the same.
    """
    found: dict[str, list[float]] = {"its sampling": [], "sampling alone": [], "the step alone": []}
    for line, alone in zip(slow, quick, strict=True):
        if line["data/tokens"] != alone["data/tokens"]:
            raise ValueError(f"{line['data/tokens']} and {alone['data/tokens']} tokens of a step")
        step = line["time/step_s"]
        found["its sampling"].append(step / max(line["time/rollout_s"], scoring))
        found["sampling alone"].append(step / max(alone["time/rollout_s"], scoring))
        found["the step alone"].append(step / max(alone["time/step_s"], scoring))
    return found


if __name__ == "__main__":
    main()
