"""How much of the time of a teacher behind a server is hidden while other responses are sampled.

    python benchmarks/teacher_endpoint.py [--seconds 0.02] [--pairs 5]

A server on loopback, in a process of its own, that takes so long for a row, one after the other.
Runs of `opd_topk` in turn: with it, and with the same server at once, their medians over the steps
after the first. Prints the seconds of sampling and of a step, what a step waits for its teacher
once all is sampled, and the step over the larger of scoring and sampling, and over the larger of
scoring and the whole step with a server that answers at once: of each pair, and the medians.
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
                time.sleep(seconds)
            body = json.dumps(answer(request)).encode()
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


def one_run(folder: Path, options: argparse.Namespace, url: str) -> list[float]:
    """Run a few steps; medians of the seconds of a step, of its sampling and of the teacher."""
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
    content["run"] |= {"mlflow": False, "threads": 1, "checkpoint_every": 0}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(content))
    run(load_config(config))
    text = (folder / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()][1:]
    names = ("time/step_s", "time/rollout_s", "time/logprobs_s")
    return [statistics.median(line[name] for line in lines) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--seconds", type=float, default=0.02, help="of the server, for a row")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
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
    of_sampling: list[float] = []
    of_step: list[float] = []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as temporary:
            step, _, waited = one_run(Path(temporary) / "slow", options, urls[options.seconds])
            without, sampling, told = one_run(Path(temporary) / "quick", options, urls[0.0])
        of_sampling.append(step / max(sampling, scoring))
        of_step.append(step / max(without, scoring))
        sys.stdout.write(
            f"pair {pair}: sampling {sampling:.2f} s, scoring {scoring:.2f} s, of which a step "
            f"waits {waited:.2f} s ({told:.2f} s at once), step {step:.2f} s ({without:.2f} s at "
            f"once): {of_sampling[-1]:.3f} and {of_step[-1]:.3f} x the larger\n"
        )
    for name, ratios in (("sampling", of_sampling), ("the step at once", of_step)):
        middle = statistics.median(ratios)
        sys.stdout.write(
            f"step over the larger of scoring and {name}: median {middle:.3f} ({min(ratios):.3f} "
            f"to {max(ratios):.3f})\n"
        )


if __name__ == "__main__":
    main()
