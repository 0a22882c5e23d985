"""One side of `rl_step.py`: whole steps of `oxrl.recipes.rl.train`, one per line read from standard
input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import problem
import torch
from torch import Tensor

import oxrl.engines.sample.local
import oxrl.models.load
from oxrl.assembly.opening import session_options
from oxrl.checkpoint import Saved
from oxrl.commands.loop import begin
from oxrl.config import load_config
from oxrl.engines.sample.local import LocalSampler
from oxrl.recipes.session import P, Progress, Session, SessionOptions
from oxrl.runs.clock import Clock
from oxrl.types import Request

CONFIG = """
run: {{name: bench, dir: {folder}/run, steps: 100000, device: cpu, threads: {threads},
      checkpoint_every: 0, mlflow: false}}
model: {{name: {model}}}
data: {{train: {folder}/prompts.jsonl, prompts_per_step: {prompts}}}
reward: {{name: "{folder}/reward.py:reward"}}
rollout: {{n_samples: {samples}, max_tokens: {cap}, temperature: 1.0}}
train: {{alg_name: sgrpo, lr: {lr}, micro_batch_tokens: {micro_batch_tokens}}}
"""


class ForcedSampler(LocalSampler):
    """Gives every response its length: the stop token is impossible before it and, in `heavy`,
    certain at it.
    """

    lengths: Sequence[int] = ()
    force_stop = False

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(
            [
                replace(request, sampling=replace(request.sampling, max_tokens=length))
                for request, length in zip(requests, self.lengths, strict=True)
            ]
        )

    def _sample_next(self, first: int, logits: Tensor) -> None:
        end = int(self.tokenizer.eos_token_id)  # pyright: ignore
        logits[:, end] = -torch.inf
        if self.force_stop:
            rows = slice(first, first + len(logits))
            last = self._slots.count[rows] + 1 == self._slots.limit[rows]
            logits[last] = -torch.inf
            logits[last, end] = 0.0
        super()._sample_next(first, logits)


class PhaseClock(Clock):
    """Keeps the seconds of each phase of a step for the parent as well."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, key: str) -> Iterator[None]:
        start = time.perf_counter()
        with super().phase(key):
            yield
        self.phases[key] = self.phases.get(key, 0.0) + time.perf_counter() - start


class GatedSession(Session):
    """Waits for the parent before every step and reports the step's time and phases after it."""

    channel: problem.Channel

    def __init__(self, options: SessionOptions) -> None:
        super().__init__(options)
        self.clock: PhaseClock = PhaseClock()

    def restore(self, engines: Mapping[str, Saved], fresh: P) -> P:
        progress = super().restore(engines, fresh)
        self.channel.send(ready=True)
        self._wait()
        return progress

    def boundary(self, engines: Mapping[str, Saved], progress: Progress) -> None:
        super().boundary(engines, progress)
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        self.channel.send(seconds=seconds, cpu=cpu, phases=self.clock.phases)
        self._wait()

    def _wait(self) -> None:
        self.channel.wait()
        self.clock.phases = {}
        self._start, self._cpu = time.perf_counter(), time.process_time()


def main() -> None:
    channel = problem.Channel()
    folder, given = Path(sys.argv[1]), problem.read_settings(Path(sys.argv[1]) / "oxrl.json")
    asked = problem.questions(given["setting"]["examples"])
    rows = [{"prompt": question, "answer": ""} for question in asked]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from problem import score_text\n\n"
        "def reward(prompt, completion):\n    return score_text(completion)\n"
    )
    values: dict[str, Any] = {
        "folder": folder,
        "prompts": given["setting"]["prompts"],
        "samples": given["setting"]["samples"],
    }
    text = CONFIG.format(
        **values, **given["oxrl"], cap=given["setting"]["cap"], lr=problem.LEARNING_RATE
    )
    (folder / "config.yaml").write_text(text)
    ForcedSampler.lengths = given["setting"]["lengths"]
    ForcedSampler.force_stop = given["setting"]["force_stop"]
    oxrl.engines.sample.local.LocalSampler = ForcedSampler
    if given["oxrl"]["plain_linears"]:
        oxrl.models.load.speed_up_linears = lambda model: None
    GatedSession.channel = channel
    cfg = load_config(folder / "config.yaml", given["oxrl"].get("overrides", ()))
    with GatedSession(session_options(cfg)) as session:
        begin(cfg, session)


if __name__ == "__main__":
    main()
