"""Runs of models that read images: their rows and configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oxrl.assembly.assembly import Assembly
from oxrl.config import load_config
from oxrl.config.schema import Config
from oxrl.data.conversations import ConversationDataset
from oxrl.data.prompts import PromptDataset
from oxrl.models.load import load_tokenizer
from oxrl.recipes.supervised import to_supervised_batch
from oxrl.rollouts.sync import make_requests
from oxrl.types import Rollout, Sampling, Score
from support.figures import SEED, THREADS
from support.rewards_here import DIGITS
from support.vision_families import write_image


def write_rows(folder: Path) -> None:
    """Rows with no, one and two images of different sizes; the first is a text alone."""
    sizes = [(32, 16), (48, 32), (16, 64), (64, 64), (40, 24)]
    names = [write_image(folder / f"{n}.png", *size, seed=n) for n, size in enumerate(sizes)]
    rows: list[dict[str, Any]] = [
        {"prompt": "say hello", "completion": "hello"},
        {"prompt": "what?", "completion": "red", "images": [names[0]]},
        {"prompt": "<image> or <image>", "completion": "the second", "images": names[1:3]},
        {"prompt": "and?", "completion": "yes", "images": [names[3]]},
        {"prompt": "see <image>!", "completion": "no", "images": [names[4]]},
    ]
    for row in rows:
        row["answer"] = row["completion"]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    prompts = [{key: value for key, value in row.items() if key != "completion"} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


# Whoever reads rows of a configuration and shows their images does it with one assembly.
ASSEMBLIES: dict[int, Assembly] = {}


def parts_of(cfg: Config) -> Assembly:
    return ASSEMBLIES.setdefault(id(cfg), Assembly(cfg))


def config(folder: Path, chosen: str, name: str = "run", **sections: dict[str, Any]) -> Config:
    content: dict[str, dict[str, Any]] = {
        "run": {
            "name": name,
            "dir": str(folder / name),
            "steps": 2,
            "mlflow": False,
            "threads": THREADS,
            "seed": SEED,
        },
        "model": {"name": chosen},
        "data": {"train": str(folder / "rows.jsonl"), "rows_per_step": 5},
        "train": {"alg_name": "sft", "lr": 1e-3},
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    if "prompts_per_step" in sections.get("data", {}) and content["train"]["alg_name"] != "rft":
        del content["data"]["rows_per_step"]
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))
    return load_config(path)


def rl(folder: Path, name: str, algorithm: str = "sgrpo", **sections: dict[str, Any]) -> Config:
    reward = folder / "reward.py"
    reward.write_text(DIGITS)
    return config(
        folder,
        "builtin:tiny-vl",
        name,
        data={"train": str(folder / "prompts.jsonl"), "prompts_per_step": 2},
        train={"alg_name": algorithm, "lr": 1e-3} | sections.pop("train", {}),
        reward={"name": f"{reward}:digits"},
        rollout={"max_tokens": 6, "n_samples": 4} | sections.pop("rollout", {}),
        **sections,
    )


def batch_of(cfg: Config) -> Any:
    tokenizer = load_tokenizer(cfg.model.name)
    data = ConversationDataset.load(
        cfg.data.train_files[0], tokenizer, parts_of(cfg).row_options(held_out=False)
    )
    return to_supervised_batch(data.in_order(), 0, images=parts_of(cfg).images)


def asked(cfg: Config, samples: int = 2, **sampling: Any) -> Any:
    path = str(Path(cfg.data.train_files[0]).with_name("prompts.jsonl"))
    tokenizer = load_tokenizer(cfg.model.name)
    prompts = PromptDataset.load(path, tokenizer, parts_of(cfg).row_options(held_out=False))
    chosen = Sampling(**({"max_tokens": 8, "stop_token_ids": (1,)} | sampling))
    draws = list(enumerate(prompts.in_order()))
    return make_requests(draws, samples=samples, sampling=chosen, run_seed=0)


def rollouts(requests: Any, done: Any) -> list[Rollout]:
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            score=Score(value=0.0),
            group_id=request.draw,
            sample=request.sample,
            seed=0,
        )
        for request, completion in zip(requests, done, strict=True)
    ]
