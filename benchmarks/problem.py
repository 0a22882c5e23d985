"""What both sides of `rl_step.py` are given: the same model files, prompts, reward and response
lengths.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

# Of a step, where a command asks for nothing else.
PROMPTS, SAMPLES = 16, 8
# Worked sums before a question, where prompts are as long as those of word problems.
EXAMPLES = 9
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """`lengths` has one entry per response of a step, in the order of prompts and samples; `cap` is
    the token limit.

    `force_stop`: a response ends in the stop token at its length. Without it responses run to the
    cap and are cut.
    `examples`: worked sums before every question, about 13 tokens each.
    `prompts`: of a step, each with `samples` responses.
    """

    name: str
    lengths: list[int]
    cap: int
    force_stop: bool
    examples: int = 0
    prompts: int = PROMPTS
    samples: int = SAMPLES


def setting(name: str, prompts: int = PROMPTS) -> Setting:
    """Of a name: "equal" or "heavy" lengths of responses, and " long" for prompts with examples.

    Args:
        prompts: of a step.
    """
    lengths, _, kind = name.partition(" ")
    count = prompts * SAMPLES
    examples = EXAMPLES if kind == "long" else 0
    if lengths == "equal":
        same = [64] * count
        return Setting(name, same, 64, force_stop=False, examples=examples, prompts=prompts)
    drawn = np.random.default_rng(0).lognormal(np.log(32), 1.0, count)
    cut = np.clip(np.round(drawn), 1, 256).astype(int).tolist()
    return Setting(name, cut, 256, force_stop=True, examples=examples, prompts=prompts)


def questions(examples: int = 0) -> list[str]:
    """Sums to be asked, each behind `examples` worked ones of its own."""
    chance = np.random.default_rng(0)
    asked: list[str] = []
    for a in range(10, 90):
        for b in range(10, 90, 7):
            shown = ""
            for one, other in chance.integers(10, 90, (examples, 2)).tolist():
                shown += f"{one} + {other} = {one + other}\n"
            asked.append(f"{shown}{a} + {b} =")
    return asked


def score_text(text: str) -> float:
    """Any cheap reward that differs between samples."""
    return sum(character in "aeiou0123456789" for character in text) / (1 + len(text))


class Channel:
    """Lines of JSON to the parent on the real standard output; prints of libraries go to standard
    error.
    """

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def wait(self) -> None:
        """Until the parent says go; a closed pipe means that the benchmark is over."""
        if not sys.stdin.readline():
            os._exit(0)


def read_settings(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write_settings(path: Path, chosen: Setting, **more: Any) -> None:
    path.write_text(json.dumps({"setting": asdict(chosen), **more}))
