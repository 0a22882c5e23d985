"""Runs of policies whose turns are actions: their data and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from oxrl.config import Config, load_config
from oxrl_datasets.prepare import PREPARERS
from support.figures import THREADS

CHOICES = {"choices": "up,down,left,right"}
WORLD = {"name": "raster-world", "max_turns": 4, "options": {"instruction": "{color}"}}
Sections = dict[str, dict[str, Any]]


def config(folder: Path, name: str, sections: Sections) -> Config:
    content: Sections = {
        "run": {
            "name": name,
            "dir": str(folder / name),
            "steps": 3,
            "mlflow": False,
            "threads": THREADS,
        },
        "model": {"name": "builtin:tiny-vla"},
        "data": {"train": str(folder / "data" / "sft.jsonl")},
        "train": {"lr": 1e-3},
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(path)


def imitation(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    sections["data"] = {"rows_per_step": 8} | sections.get("data", {})
    return config(folder, name, {"train": {"alg_name": "sft", "lr": 1e-3}, **sections})


def reinforcement(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    """Two groups of four episodes a step, a row per turn."""
    data = {"train": str(folder / "data" / "rl.jsonl"), "prompts_per_step": 2}
    found: Sections = {
        "environment": WORLD,
        "action": CHOICES,
        "train": {"alg_name": "sgrpo", "lr": 1e-3},
        "data": data,
    }
    found["rollout"] = {"n_samples": 4, "context": "last"}
    for section, values in sections.items():
        found[section] = found.get(section, {}) | values
    return config(folder, name, found)


def make_data(folder: Path, **options: Any) -> None:
    told = {"options": '{"instruction": "{color}"}', "limit": 12} | options
    PREPARERS["demonstrations"](None, folder / "data", **told)
