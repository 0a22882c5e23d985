"""What is run: a family is one way to train on one task; its settings are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Sections = dict[str, dict[str, Any]]

STEPS = 40
# Steps between two looks at the held-out rows while training.
LOOK_EVERY = 10
# Of the untrained model to each training question, of which pairs are made.
OWN_ANSWERS = 8
BEFORE = "before"


@dataclass(frozen=True)
class Task:
    """Questions with a verifiable answer.

    Args:
        scored: sections that say how answers are sampled and scored.
        samples: to each held-out question, before and after.
    """

    scored: Mapping[str, Mapping[str, Any]]
    samples: int = 8


@dataclass(frozen=True)
class Family:
    """One way to train.

    Args:
        task: what its rows and its evaluation are of.
        kind: `rl`, `sft` or `dpo`; `before` trains nothing.
        sections: of the configuration, beside those of the task.
        permuted: the control; its sections have rewards go to the wrong answers.
        steps: of the optimizer.
    """

    task: str
    kind: str
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    permuted: bool = False
    steps: int = STEPS


# A machine that does other work as well delays a reward; that says nothing of the answer.
PATIENT = {"timeout_s": 120}

TASKS = {
    "arithmetic": Task(
        {
            "reward": {"name": "math", **PATIENT},
            "rollout": {"n_samples": 8, "max_tokens": 24},
        }
    ),
    "svamp": Task(
        {
            "reward": {"name": "math", **PATIENT},
            "rollout": {"n_samples": 8, "max_tokens": 24},
        }
    ),
    "ifeval": Task(
        {
            "reward": {"name": "ifeval", **PATIENT},
            "rollout": {"n_samples": 8, "max_tokens": 64},
        }
    ),
    "calls": Task(
        {
            "environment": {
                "name": f"{HERE / 'calls.py'}:Calculator",
                "max_turns": 4,
                **PATIENT,
            },
            "rollout": {"n_samples": 8, "max_tokens": 16},
        },
        samples=4,
    ),
}

# A vocabulary of 49,152 makes logits large: so many tokens at once take 0.1 GB for them.
AT_ONCE = {"micro_batch_tokens": 512}
ON_POLICY = {
    "data": {"prompts_per_step": 8},
    "train": {"alg_name": "sgrpo", "lr": 5e-6, **AT_ONCE},
}

CONTROL = {
    **ON_POLICY,
    "train": {**ON_POLICY["train"], "features": {"permuted-rewards": {}}},
}

# The untrained model is asked once: what it answers does not depend on how others are trained.
UNTRAINED = {f"{task}-{BEFORE}": Family(task, BEFORE) for task in TASKS}
TRAINED: dict[str, Family] = {
    "arithmetic": Family("arithmetic", "rl", ON_POLICY),
    "arithmetic-permuted": Family("arithmetic", "rl", CONTROL, permuted=True),
    "sft": Family(
        "chats",
        "sft",
        {
            "data": {"rows_per_step": 8},
            "model": {"max_length": 512},
            "train": {"alg_name": "sft", "lr": 2e-5, "warmup_steps": 5, **AT_ONCE},
        },
    ),
    "dpo": Family(
        "arithmetic",
        "dpo",
        {
            "data": {"rows_per_step": 16},
            "train": {"alg_name": "dpo", "lr": 5e-6, "beta": 0.1, "warmup_steps": 5, **AT_ONCE},
        },
    ),
    "arithmetic-lora": Family(
        "arithmetic",
        "rl",
        {**ON_POLICY, "train": {"alg_name": "sgrpo", "lr": 2e-4, **AT_ONCE}, "lora": {"rank": 16}},
    ),
    "arithmetic-bfloat16": Family(
        "arithmetic", "rl", {**ON_POLICY, "model": {"dtype": "bfloat16"}}
    ),
    # An episode is read three times as long as an answer to arithmetic: fewer of them, fewer steps.
    "calls": Family("calls", "rl", {**ON_POLICY, "data": {"prompts_per_step": 4}}, steps=20),
    # Longer questions and answers than arithmetic's: fewer steps fit into a seed's time.
    "svamp": Family("svamp", "rl", ON_POLICY, steps=24),
    "ifeval": Family("ifeval", "rl", {**ON_POLICY, "data": {"prompts_per_step": 4}}, steps=24),
}

FAMILIES = UNTRAINED | TRAINED

# The warm start of calls: what a call looks like, from few demonstrations.
CALLS_WARM: Sections = {
    "data": {"rows_per_step": 8},
    "train": {"alg_name": "sft", "lr": 1e-5, **AT_ONCE},
}
CALLS_WARM_STEPS = 10


def sections_of(family: Family) -> Sections:
    """What a family's training is configured with, beside model, data files and run."""
    sections = {name: dict(told) for name, told in family.sections.items()}
    if family.kind == "rl":
        for name, told in TASKS[family.task].scored.items():
            sections[name] = {**told, **sections.get(name, {})}
        # The looks at the held-out rows while training are short ones.
        sections["rollout"] |= {"eval_samples": 2, "eval_temperature": 1.0}
    return sections


def seeds_of(family: str, seeds: list[int]) -> list[int]:
    """The seeds that a family is run with: one where nothing is trained."""
    return seeds[:1] if FAMILIES[family].kind == BEFORE else seeds
