"""Runs with other optimizers: every recipe steps, a run that was stopped goes on byte for byte, and
sums are learned.
"""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.errors import MissingExtraError, RunDirectoryError
from support.figures import SEED, THREADS, Learned
from support.small_runs import (
    final_files,
    metric_lines,
    preference_config,
    rl_config,
    sft_config,
    stop_after_three_steps,
)

MUON = {"optimizer": "muon"}
WITHOUT = {"master_weights": "none"}
EIGHT = {"optimizer": "adamw_8bit"}
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: the extra 8bit"
)
ROUTES = {"rl": (rl_config, "sgrpo"), "sft": (sft_config, "sft"), "dpo": (preference_config, "dpo")}


def config_of(folder: Path, name: str, route: str, chosen: dict[str, str], **more: Any) -> Config:
    build, algorithm = ROUTES[route]
    model = {"name": "builtin:tiny"}
    if "master_weights" in chosen:
        model["dtype"] = "bfloat16"
    train = {"alg_name": algorithm, "lr": 1e-3, **chosen}
    return build(folder, name, model=model, train=train, **more)


@pytest.mark.parametrize(
    ("route", "chosen"),
    [
        ("sft", MUON | WITHOUT),
        pytest.param("rl", MUON, marks=pytest.mark.full),
        pytest.param("sft", MUON, marks=pytest.mark.full),
        pytest.param("dpo", MUON, marks=pytest.mark.full),
        pytest.param("rl", WITHOUT, marks=pytest.mark.full),
        pytest.param("dpo", WITHOUT, marks=pytest.mark.full),
        pytest.param("rl", EIGHT, marks=[needs_bitsandbytes, pytest.mark.full]),
        pytest.param("sft", EIGHT, marks=[needs_bitsandbytes, pytest.mark.full]),
        pytest.param("dpo", EIGHT, marks=[needs_bitsandbytes, pytest.mark.full]),
    ],
)
def test_a_run_that_was_stopped_goes_on_byte_for_byte(
    route: str, chosen: dict[str, str], tmp_path: Path
) -> None:
    whole = config_of(tmp_path, "whole", route, chosen)
    run(whole)
    stopped = config_of(tmp_path, "stopped", route, chosen)
    stop_after_three_steps(stopped, tmp_path / "stopped.yaml")
    run(stopped, resume=True)
    assert final_files(stopped.run.directory) == final_files(whole.run.directory)
    lines = metric_lines(whole.run.directory)
    assert metric_lines(stopped.run.directory) == lines
    assert all(line["update/update_norm_ratio"] > 0 for line in lines)
    [newest] = sorted((whole.run.directory / "checkpoints").glob("step_*"))[-1:]
    states = [json.loads(path.read_text()) for path in newest.rglob("trainer_state.json")]
    assert states and all(chosen.items() <= state.items() for state in states)


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path: Path) -> None:
    short = {
        "steps": 1,
        "name": "r",
        "dir": str(tmp_path / "r"),
        "mlflow": False,
        "threads": THREADS,
    }
    run(config_of(tmp_path, "r", "sft", {}, run=short))
    other = config_of(tmp_path, "r", "sft", MUON, run=short | {"steps": 2})
    with pytest.raises(
        RunDirectoryError, match="train.optimizer: 'adamw' in config.yaml, 'muon' now"
    ):
        run(other, resume=True)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_run_without_the_library_does_not_begin(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, "r", "sft", EIGHT)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[8bit\]'"):
        run(cfg)
    assert not cfg.run.directory.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "chosen", [{}, MUON, WITHOUT, pytest.param(EIGHT, marks=needs_bitsandbytes)]
)
def test_sums_are_learned(chosen: dict[str, str], tmp_path: Path, learned: Learned) -> None:
    """Sums of digits up to 4 from text alone: the loss per token ends below 0.07 nats."""
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(5)]
    random.Random(0).shuffle(rows)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {
            "name": "r",
            "dir": str(tmp_path / "r"),
            "steps": 150,
            "mlflow": False,
            "seed": SEED,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"train": str(tmp_path / "sums.jsonl"), "rows_per_step": 25},
        "train": {"alg_name": "sft", "lr": 3e-3, **chosen},
    }
    if "master_weights" in chosen:
        sections["model"]["dtype"] = "bfloat16"
    path = tmp_path / "sums.yaml"
    path.write_text(json.dumps(sections))
    run(load_config(path))
    lines = metric_lines(tmp_path / "r")
    learned("update/loss", lines[-1]["update/loss"], at_most=0.07)
