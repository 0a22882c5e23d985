"""Kinds of runs whose sampler goes on while a batch trains, in this process or in others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxrl.config import Config
from support.killed_runs import run_in_child
from support.sampling_processes import FORKING
from support.small_runs import model_that_stops, rl_config, write_inputs
from support.vision_runs import write_rows

Put = Callable[[Any, Any], object]
Sections = dict[str, dict[str, Any]]
# A model at random calls no tool, so what it writes is put into a call.
CALCULATES = """
import json
import random
from oxrl.environments.tool_environment import ToolEnvironment

class Calculates(ToolEnvironment):
    reusable = True
    def __init__(self):
        super().__init__(["calculator"])
    def reset(self, prompt, seed):
        self.calls = self.failures = 0
        self.chance = random.Random(seed)
        self.most = self.chance.randint(1, 5)
        return prompt.messages
    def step(self, text):
        if self.calls == self.most:
            return super().step("the answer")
        expression = f"{self.chance.randint(2, 99)} * {sum(map(ord, text))}"
        call = {"name": "calculator", "arguments": {"expression": expression}}
        return super().step(f"<tool_call>{json.dumps(call)}</tool_call>")
"""


def learns(algorithm: str, **more: Any) -> Callable[[Path], Sections]:
    return lambda folder: {"train": {"alg_name": algorithm, "lr": 1e-3} | more}


def groups_that_differ(folder: Path) -> Sections:
    """Dynamic sampling, with groups whose rewards differ for long."""
    return learns("dapo", overlong_buffer=2, lr=1e-5)(folder) | {"rollout": {"n_samples": 8}}


def adapter(folder: Path) -> Sections:
    return {"lora": {"rank": 4, "alpha": 16}, "train": {"alg_name": "sgrpo", "lr": 3e-3}}


def images(folder: Path) -> Sections:
    (folder / "shown").mkdir(exist_ok=True)
    write_rows(folder / "shown")
    return {
        "model": {"name": "builtin:tiny-vl"},
        "data": {"train": str(folder / "shown" / "prompts.jsonl")},
    }


def tools(folder: Path) -> Sections:
    (folder / "mine.py").write_text(CALCULATES)
    environment = {"name": f"{folder / 'mine.py'}:Calculates", "max_turns": 4, "alive": 7}
    return {"environment": environment}


def evaluations(folder: Path) -> Sections:
    held_out = {"eval": str(folder / "chats.jsonl"), "eval_rows": 3}
    write_inputs(folder)
    return {"run": {"eval_every": 1}, "data": held_out}


def tools_and_evaluations(folder: Path) -> Sections:
    return tools(folder) | evaluations(folder)


def saved_beside(folder: Path) -> Sections:
    return {"run": {"async_checkpoints": True, "checkpoint_every": 1}}


KINDS: dict[str, Callable[[Path], Sections]] = {
    "sgrpo": learns("sgrpo"),
    "two minibatches": learns("sgrpo", minibatches=2),
    "ppo": learns("ppo"),
    "dapo": groups_that_differ,
    "remax": learns("remax"),
    "cispo": learns("cispo"),
    "adapter": adapter,
    "images": images,
    "tools": tools_and_evaluations,
    "evaluations": evaluations,
    "asynchronous checkpoints": saved_beside,
    "cached": learns("sgrpo"),
}


def config(
    folder: Path, name: str, kind: str, *, processes: int = 0, steps: int = 8, **more: Any
) -> Config:
    """A run of a kind; `more` are fields of `run`."""
    if not (folder / "model").is_dir():
        model_that_stops(folder / "model")
    sections = KINDS[kind](folder)
    updates = sections.get("train", {}).get("minibatches", 1)
    common: Sections = {
        "model": {"name": str(folder / "model")},
        "rollout": {
            "max_tokens": 12,
            "n_samples": 4,
            "max_staleness": 2 * updates,
            "rounds": 4,
            "force_strict_on_policy": False,
        },
        "data": {"prompts_per_step": 2},
        "run": {"steps": steps * updates, "checkpoint_every": 3},
    }
    for section, values in sections.items():
        common[section] = common.get(section, {}) | values
    common["run"] |= more
    overrides = [f"inference_engine.max_rows={6 // max(1, processes)}"]
    if processes:
        overrides.append(f"inference_engine.processes={processes}")
    return rl_config(folder, name, overrides, **common)


def prepare(kind: str, put: Callable[[str, object], object]) -> None:
    """Have runs of this process sample as this kind does, and start processes quickly.

    put: sets an attribute by its whole name, as a monkeypatch does.
    """
    if kind == "cached":
        put("oxrl.engines.sample.local.attends_to_everything", lambda *given: False)
    put("oxrl.usercode.worker.subprocess", FORKING)


def run_of_kind_in_child(cfg: Config, kind: str) -> None:
    """Body of a forked process that is going to be killed."""
    from oxrl.engines.sample import local
    from oxrl.usercode import worker

    if kind == "cached":
        local.attends_to_everything = lambda *given: False
    setattr(worker, "subprocess", FORKING)  # noqa: B010 - a type checker knows a module
    run_in_child(cfg)
