"""Runs of every kind in a real browser, each alone and all on one page: nothing on the console,
curves of their own, and every filter finds what the record has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.report.page import write_report
from support.browser import needs_browser, opened
from support.small_runs import (
    model_that_stops,
    preference_config,
    rl_config,
    sft_config,
    steps_config,
)
from support.vision_runs import rl as rl_of_images
from support.vision_runs import write_rows

TURNS = """
from oxrl.environments import Step

class Talk:
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        return Step("go on", reward=len(set(text)) / 10, terminated="1" in text)
"""
# Room for every section at once: curves are drawn when they come into sight.
TALL = "--window-size=1400,9000"
# What a page of the kind shows first of all.
CURVE = {
    "sft": "update/loss",
    "dpo": "preference/accuracy",
    "reward_model": "update/loss",
    "process_reward_model": "update/loss",
    "rft": "update/loss",
    "rl": "reward/mean",
    "episodes": "reward/mean",
    "images": "reward/mean",
    "pipeline": "reward/mean",
}
SAMPLED = ("rl", "episodes", "images", "pipeline")


def _rl(folder: Path) -> Config:
    return rl_config(folder, "rl", ["run.steps=2"], run={"record": "tokens"})


def _episodes(folder: Path) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "talk.py").write_text(TURNS)
    environment = {"name": f"{folder / 'talk.py'}:Talk", "max_turns": 2}
    return rl_config(
        folder,
        "episodes",
        ["run.steps=2", "~reward.name"],
        environment=environment,
        model={"name": str(model_that_stops(folder / "model"))},
        run={"record": "tokens"},
    )


def _images(folder: Path) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    return rl_of_images(folder, "images")


def _pairs(name: str) -> Callable[[Path], Config]:
    def config(folder: Path) -> Config:
        return preference_config(folder, name, ["run.steps=2"], train={"alg_name": name})

    return config


def _rft(folder: Path) -> Config:
    return rl_config(
        folder,
        "rft",
        ["data.rows_per_step=2", "run.steps=2"],
        model={"name": str(model_that_stops(folder / "model"))},
        train={"alg_name": "rft", "keep_reward": 0.0, "lr": 1e-3},
        rollout={"n_samples": 4, "max_tokens": 12},
    )


def _pipeline(folder: Path) -> Config:
    """A warm start, and reinforcement learning from where it ended."""
    warm = sft_config(folder, "warm", ["run.steps=2"])
    run(warm)
    (model,) = (warm.run.directory / "checkpoints").glob("step_*2")
    return rl_config(folder, "pipeline", ["run.steps=2"], model={"name": str(model)})


KINDS: dict[str, Callable[[Path], Config]] = {
    "rl": _rl,
    "episodes": _episodes,
    "images": _images,
    "sft": lambda folder: sft_config(folder, "sft", ["run.steps=2"]),
    "dpo": _pairs("dpo"),
    "reward_model": _pairs("reward_model"),
    "process_reward_model": lambda folder: steps_config(
        folder, "process_reward_model", ["run.steps=2"]
    ),
    "rft": _rft,
    "pipeline": _pipeline,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    found: dict[str, Path] = {}
    for name, make in KINDS.items():
        cfg = make(folder / name)
        run(cfg)
        found[name] = cfg.run.directory
    return found


def of_file(directory: Path) -> list[dict[str, Any]]:
    file = directory / "samples.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def texts_in(value: Any) -> str:
    """Every text that a sample shows."""
    if isinstance(value, dict):
        kept = [part for name, part in value.items() if name not in ("role", "type", "image")]
        return texts_in(kept)
    if isinstance(value, list):
        return "\n".join(map(texts_in, value))
    return value if isinstance(value, str) else ""


def filters(lines: list[dict[str, Any]]) -> list[tuple[dict[str, object], int]]:
    """Settings of every filter, and how many of these samples are like that."""
    line = lines[len(lines) // 2]
    rewards = [float(f"{x['reward']:.4g}") for x in lines]  # as a page has them
    reward = rewards[len(lines) // 2]
    end = line.get("end") or line["finish_reason"]
    columns = ("prompt", "response", "turns", "messages", "opening")
    texts = [texts_in([x.get(name) or "" for name in columns]) for x in lines]
    word = line["response"].strip()[-2:]
    lengths = [max(span[2] for span in x["versions"]) for x in lines]
    some = sorted(lengths)[len(lengths) // 2]
    wanted: list[tuple[dict[str, object], list[bool]]] = [
        ({"step-from": 1, "step-to": 1}, [x["step"] == 1 for x in lines]),
        ({"draw-to": 0}, [x["draw"] == 0 for x in lines]),
        ({"reward-from": reward, "reward-to": reward}, [found == reward for found in rewards]),
        ({"length-to": some}, [length <= some for length in lengths]),
        ({"status": "ok"}, [x["status"] == "ok" for x in lines]),
        ({"end": end}, [(x.get("end") or x["finish_reason"]) == end for x in lines]),
        ({"text": word}, [word.lower() in text.lower() for text in texts]),
        ({"text": "assistant"}, [False for _ in lines]),  # a role is no text
        ({"reward-from": 99}, [False for _ in lines]),
    ]
    return [(setting, sum(found)) for setting, found in wanted]


@pytest.mark.full
@needs_browser
@pytest.mark.parametrize("kind", KINDS)
def test_a_browser_opens_a_run_of_every_kind(
    kind: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    file = write_report([runs[kind]], tmp_path / "report.html")
    seen, dom = opened(file, TALL)
    assert seen["ready"] == "true" and "error" not in seen
    assert int(seen["charts"]) >= 4 and f'<figure data-name="{CURVE[kind]}"' in dom
    assert dom.count('data-state="') > 15 and '<tr class="changed"' in dom
    lines = of_file(runs[kind])
    assert bool(lines) == (kind in SAMPLED) == ("found" in seen)
    if kind == "images":
        assert 'class="picture" alt' in dom and 'src="data:image/png;base64,' in dom
    if kind == "episodes":
        assert "turn 2, reward" in dom


@pytest.mark.full
@needs_browser
@pytest.mark.parametrize("kind", SAMPLED)
def test_every_filter_finds_what_the_record_has(
    kind: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    file = write_report([runs[kind]], tmp_path / "report.html")
    for setting, wanted in filters(of_file(runs[kind])):
        seen, _ = opened(file, fragment=urlencode(setting))
        assert (seen["found"], "error" in seen) == (str(wanted), False), setting


@pytest.mark.full
@needs_browser
def test_runs_of_every_kind_share_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    file = write_report([*runs.values()], tmp_path / "report.html")
    seen, dom = opened(file, TALL, fragment="run=2&color=ratio")
    assert seen["ready"] == "true" and "error" not in seen
    assert int(seen["found"]) == len(of_file(runs["images"]))
    for curve in CURVE.values():
        assert f'<figure data-name="{curve}"' in dom
    assert all(path.name in dom for path in runs.values())
