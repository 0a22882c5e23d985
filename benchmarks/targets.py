"""Every figure of speed and memory beside its target: from benchmarks/results/*.json.

    python benchmarks/targets.py

`record.py` measures; this prints one table, and docs/benchmarks.md begins with the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MIDDLE, LOW = 0, 1


@dataclass(frozen=True)
class Target:
    """A row of the table.

    Args:
        figure: what is measured, in words.
        benchmark: of `suite.py`; case and column: of its figures.
        limit: what the figure is to reach.
        least: the figure is to be at least `limit`; otherwise at most.
        end: of [median, lower end, upper end], which is compared.
        why: it is not reached, in words, where that is known.
    """

    figure: str
    benchmark: str
    case: str
    column: str
    limit: float
    least: bool = True
    end: int = MIDDLE
    why: str = ""

    @property
    def wanted(self) -> str:
        """The target as the table writes it."""
        low = " (lower end)" if self.end == LOW else ""
        return f"{'>=' if self.least else '<='} {self.limit:g}{low}"

    def met(self, found: float | list[float]) -> bool:
        """Whether a figure reaches the target."""
        value = found[self.end] if isinstance(found, list) else found
        return value >= self.limit if self.least else value <= self.limit


PRODUCTS = (
    "more than half of a step are matrix products in MKL, at what the processor can do in float32 "
    "on both sides"
)
BY_LENGTH = (
    "TRL is fastest where it puts rows of about one length into a step, which then pads as little "
    "as oxRL does with its shuffled steps (its steps are unlike, hence the interval); against its "
    "best with rows as they come it was 1.5 in the trial; "
)
ONCE = "the prompt of a pair is read once and nothing is padded, 1.28 times what it was; the rest: "
ALIKE = (
    "prompts of 12 tokens and answers of one length leave nothing to share and nothing to pad: "
    "both sides compute the same products"
)
PER_OPERATION = (
    "a decode step of 32 rows takes 8.2 ms, one of a single row 3.1: the modules of transformers, "
    "operation by operation"
)
OF_ROWS = (
    f"{PER_OPERATION}. So rows that end early can save at most 2.5 times here; with 128 rows the "
    "heavy-tailed RL step is the figure"
)
STREAMED = (
    "in a profile of 1.9 s: weights that can be read back are not packed for oneDNN (0.06 s), "
    "noise that is a function of seed and position takes more operations than vLLM's one kernel "
    "(0.05), and counters are kept for the metrics (0.02)"
)
SHORT_ANSWERS = (
    "answers of at most 6 tokens have no tail and prompts of 8 little to share; both sides take "
    "about as many steps, and a step is 2.0 to 2.2 times as fast"
)
KEPT = "kept_and_centered_smollm2"
ROWS: tuple[Target, ...] = (
    Target(
        "RL step against TRL: equal lengths",
        "rl_step",
        "equal",
        "cpu_ratio",
        1.5,
        end=LOW,
        why=ALIKE,
    ),
    Target("the same, long prompts", "rl_step", "equal long", "cpu_ratio", 1.5, end=LOW),
    Target("RL step against TRL: heavy-tailed", "rl_step", "heavy", "cpu_ratio", 4.5, end=LOW),
    Target("the same, long prompts", "rl_step", "heavy long", "cpu_ratio", 4.5, end=LOW),
    Target(
        "SFT against TRL's best", "offline_step", "sft", "cpu_ratio", 1.8, why=BY_LENGTH + PRODUCTS
    ),
    Target("DPO against TRL's best", "offline_step", "dpo", "cpu_ratio", 1.8, why=ONCE + PRODUCTS),
    Target(
        "RL step of SmolLM2-135M against TRL", "rl_step_smollm2", "equal", "cpu_ratio", 1.5, end=LOW
    ),
    Target(
        "SFT of SmolLM2-135M against TRL's best", "offline_step_smollm2", "sft", "cpu_ratio", 1.3
    ),
    Target(
        "DPO of SmolLM2-135M against TRL's best", "offline_step_smollm2", "dpo", "cpu_ratio", 1.5
    ),
    Target(
        "sampler against `generate`: equal",
        "sampler",
        "equal",
        "over_transformers",
        1.3,
        why=PER_OPERATION,
    ),
    Target(
        "sampler against `generate`: heavy",
        "sampler",
        "heavy",
        "over_transformers",
        4.0,
        why=OF_ROWS,
    ),
    Target(
        "sampler against vLLM CPU: equal", "sampler", "equal", "over_vllm", 1.2, why=PER_OPERATION
    ),
    Target(
        "sampler against vLLM CPU: heavy", "sampler", "heavy", "over_vllm", 1.2, why=PER_OPERATION
    ),
    Target(
        "rollout over a handwritten decode loop",
        "decode_loop",
        "64 rows of 64 tokens",
        "over_loop",
        1.15,
        least=False,
    ),
    Target(
        "update over a bare loop: equal",
        "overhead",
        "overhead equal",
        "cpu_ratio",
        1.03,
        least=False,
    ),
    Target(
        "update over a bare loop: heavy",
        "overhead",
        "overhead heavy",
        "cpu_ratio",
        1.03,
        least=False,
    ),
    *(
        Target(f"step in exact mode over a usual one: {name}", part, case, "cpu_ratio", most, False)
        for name, part, case, most in (
            ("tiny", "exact", "step, builtin:tiny", 1.5),
            ("small", "exact", "step, builtin:small", 1.4),
            ("SmolLM2-135M", "exact_smollm2", "step, runs/smollm2/model", 1.25),
        )
    ),
    *(
        Target(f"step with {name} over a plain one", KEPT, case, column, most, False)
        for name, case, column, most in (
            ("kept sets", "kept", "cpu_ratio", 1.1),
            ("kept sets, memory", "kept", "memory_ratio", 1.05),
            ("score centering", "centered", "cpu_ratio", 1.1),
            ("score centering, memory", "centered", "memory_ratio", 1.05),
        )
    ),
    Target(
        "processor seconds to 0.9 sampled accuracy, TRL over oxRL",
        "seconds_to_accuracy",
        "all seeds",
        "ratio",
        3.0,
        why=SHORT_ANSWERS,
    ),
    Target(
        "vLLM through oxRL against raw vLLM: equal",
        "vllm_raw",
        "equal",
        "of_raw",
        0.98,
        why=STREAMED,
    ),
    Target(
        "vLLM through oxRL against raw vLLM: heavy",
        "vllm_raw",
        "heavy",
        "of_raw",
        0.98,
        why=STREAMED,
    ),
    Target(
        "first line of metrics over imports of torch and transformers, s",
        "first_line",
        "first line",
        "over_torch_s",
        1.0,
        least=False,
        why="transformers imports lazily: the classes that every model is made of come with the "
        "first model, in any program (the line takes that much longer than these)",
    ),
    Target(
        "prefix sharing, share of its bound", "share_prefix", "2 x 8, 200 + 50", "of_bound", 0.85
    ),
    Target(
        "the same, prompt and response alike", "share_prefix", "2 x 8, 100 + 100", "of_bound", 0.85
    ),
    Target("the same, 16 responses", "share_prefix", "2 x 16, 400 + 100", "of_bound", 0.85),
    Target(
        "full logits of 8,192 tokens over memory of the head, vocabulary 151,936",
        "head_memory",
        "8192 tokens",
        "times_less",
        16.0,
    ),
    Target(
        "memory of the head at 8,192 tokens over that at 1,024",
        "head_memory",
        "8192 tokens",
        "of_first_row",
        1.02,
        least=False,
    ),
    Target("quickstart before over now", "quickstart", "all seeds", "cpu_ratio", 1.2),
)


def shown(value: float | list[float]) -> str:
    """A figure as the page writes it."""
    if isinstance(value, list):
        middle, low, high = value
        return f"{shown(middle)} [{shown(low)}, {shown(high)}]"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def measured(target: Target, results: Path) -> Any:
    """The figure of a row; None where there is none."""
    path = results / f"{target.benchmark}.json"
    if not path.is_file():
        return None
    for figure in json.loads(path.read_text(encoding="utf-8"))["figures"]:
        if figure["case"] == target.case:
            return figure.get(target.column)
    return None


def verdict(target: Target, found: Any) -> str:
    """Whether the target is met, in words."""
    if found is None:
        return "not run yet"
    if target.met(found):
        return "yes"
    return f"no: {target.why}" if target.why else "no"


def lines(results: Path = RESULTS) -> Iterator[str]:
    """The table, in Markdown.

    Args:
        results: folder of what `record.py` wrote.
    """
    yield "| figure | target | measured | met |"
    yield "|---|---|---|---|"
    for target in ROWS:
        found = measured(target, results)
        value = "not measured" if found is None else shown(found)
        said = verdict(target, found)
        yield f"| {target.figure} | {target.wanted} | {value} | {said} |"


if __name__ == "__main__":
    print("\n".join(lines()))
