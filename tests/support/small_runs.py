"""Small complete runs for the tests of recipes: a random tiny model, a reward it can learn from, a
few steps.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from oxrl.config import Config, load_config
from support.command_line import Command
from support.figures import SEED, THREADS
from support.rewards_here import DIGITS


def write_inputs(folder: Path) -> None:
    """Prompts, conversations and a reward file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(2, 8) for b in range(3, 7)]
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    chats = [{"prompt": row["prompt"], "completion": row["answer"]} for row in prompts]
    for name, rows in (("prompts", prompts), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(DIGITS)


def model_that_stops(folder: Path, name: str = "builtin:tiny") -> Path:
    """A random model ends a turn hardly ever; this one with about every sixth token."""
    import torch

    from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer

    model: Any = builtin_policy(name, seed=0)
    model.generation_config.eos_token_id = [1]
    hidden: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda *call: hidden.append(call[2]))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 261, (4, 64), generator=noise))
        direction = hidden[0].flatten(0, 1).mean(0)
        model.lm_head.weight[1] = direction * (4.0 / direction.norm() ** 2)
    hook.remove()
    model.save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    return folder


def rl_config(
    folder: Path, name: str, overrides: Sequence[str] = (), **sections: dict[str, Any]
) -> Config:
    """A reinforcement learning run of 6 steps, 4 prompts x 4 samples x 6 tokens."""
    write_inputs(folder)
    content: dict[str, dict[str, Any]] = {
        "run": {
            "name": name,
            "dir": str(folder / name),
            "steps": 6,
            "checkpoint_every": 2,
            "mlflow": False,
            "threads": THREADS,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"train": str(folder / "prompts.jsonl"), "prompts_per_step": 4},
        "reward": {"name": f"{folder / 'reward.py'}:digits"},
        "rollout": {"max_tokens": 6, "n_samples": 4},
        "train": {"alg_name": "sgrpo", "lr": 1e-3},
    }
    return _load(folder, name, content, sections, overrides)


def sft_config(
    folder: Path, name: str, overrides: Sequence[str] = (), **sections: dict[str, Any]
) -> Config:
    """A supervised run of 6 steps of 8 rows."""
    write_inputs(folder)
    content: dict[str, dict[str, Any]] = {
        "run": {
            "name": name,
            "dir": str(folder / name),
            "steps": 6,
            "checkpoint_every": 2,
            "mlflow": False,
            "threads": THREADS,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"train": str(folder / "chats.jsonl"), "rows_per_step": 8},
        "train": {"alg_name": "sft", "lr": 1e-3},
    }
    return _load(folder, name, content, sections, overrides)


def preference_config(
    folder: Path, name: str, overrides: Sequence[str] = (), **sections: dict[str, Any]
) -> Config:
    """A run of 6 steps of 8 pairs: digits are better than letters, whatever is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, start in (("pairs", 0), ("held_out_pairs", 100)):
        rows = [
            {
                "prompt": f"say {i}",
                "chosen": f"{i * 7 % 1000}",
                "rejected": "abcdefg"[: 1 + i * 5 % 7],
            }
            for i in range(start, start + 40)
        ]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content: dict[str, dict[str, Any]] = {
        "run": {
            "name": name,
            "dir": str(folder / name),
            "steps": 6,
            "checkpoint_every": 2,
            "mlflow": False,
            "threads": THREADS,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"train": str(folder / "pairs.jsonl"), "rows_per_step": 8},
        "train": {"alg_name": "dpo", "lr": 1e-3},
    }
    return _load(folder, name, content, sections, overrides)


def steps_config(
    folder: Path, name: str, overrides: Sequence[str] = (), **sections: dict[str, Any]
) -> Config:
    """A process reward model, 6 steps of 8 solutions: a step of digits is right, one of letters
    wrong, wherever it is.

    Evaluated on other solutions.
    """
    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for file, size in (("steps", 60), ("held_out_steps", 30)):
        rows: list[dict[str, Any]] = []
        for _ in range(size):
            labels = [chance.random() < 0.5 for _ in range(chance.randint(1, 4))]
            texts = [
                str(chance.randint(0, 999)) if label else "abcdefg"[: chance.randint(1, 3)]
                for label in labels
            ]
            rows.append({"prompt": "count", "completions": texts, "labels": labels})
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(folder / "steps.jsonl"), "eval": str(folder / "held_out_steps.jsonl")}
    sections["data"] = data | sections.get("data", {})
    sections["train"] = {"alg_name": "process_reward_model"} | sections.get("train", {})
    return preference_config(folder, name, overrides, **sections)


def _load(
    folder: Path,
    run_name: str,
    content: dict[str, dict[str, Any]],
    sections: dict[str, dict[str, Any]],
    overrides: Sequence[str],
) -> Config:
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    if SEED:
        content["run"]["seed"] = content["run"].get("seed", 0) + SEED
    path = folder / f"{run_name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(path, overrides)


def stop_after_three_steps(cfg: Config, config: Path) -> None:
    """Start the run in a process of its own, send it SIGTERM, and see it end with 75."""
    process = Command("train", config, folder=config.parent)
    metrics, deadline = cfg.run.directory / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.returncode is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the three groups that may differ between identical runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    free = ("time/", "throughput/", "system/")
    return [
        {key: value for key, value in line.items() if not key.startswith(free)} for line in lines
    ]


def final_files(run: Path) -> dict[str, bytes]:
    """Every file of the newest checkpoint but the manifest (its offsets count bytes of lines that
    hold times).
    """
    newest = max((run / "checkpoints").glob("step_*"))
    skip = ("manifest.json",)
    return {
        str(p.relative_to(newest)): p.read_bytes()
        for p in newest.rglob("*")
        if p.is_file() and p.name not in skip
    }


def check_same(one: Path, other: Path) -> None:
    """Two runs came to the same metrics, samples and files of the last checkpoint."""
    assert metric_lines(one) == metric_lines(other)
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    left, right = final_files(one), final_files(other)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []
