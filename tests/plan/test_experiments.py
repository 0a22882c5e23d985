"""The configurations for GPUs, which no test can run: `oxrl plan` accepts them and their memory
fits.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import Config, load_config
from oxrl.config.reads import read_values
from oxrl.errors import ConfigError
from oxrl.modelfiles.dims import model_dims
from oxrl.plan.memory import memory, memory_needed
from support.checks_here import examine_here

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "experiments" / "gsm8k_scale").glob("*.yaml"))
IN_CI = ("rl_1.5b_2gpus", "sft_7b_8gpus")
# Bytes of the devices that the files are written for, less what the estimate leaves out.
DEVICE = 60e9


def examine_without_models(cfg: Config) -> list[tuple[str, str, str]]:
    """The checks of a plan, which find no model in the hub's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", "no cache")
        return [*examine_here(cfg)]


@pytest.fixture
def data(disk_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk_path)  # a plan looks for room for checkpoints
    monkeypatch.setattr(import_module("oxrl.cli.plan"), "examine_apart", examine_without_models)
    folder = Path("data/gsm8k")
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        row = {"prompt": "1 + 1?", "answer": "2", "completion": "#### 2"}
        (folder / f"{part}.jsonl").write_text(json.dumps(row) + "\n")


def test_there_is_a_file_for_each_model_and_number_of_gpus() -> None:
    asked = {(load_from_name(file)) for file in FILES}
    assert asked >= {("0.5B", 1), ("1.5B", 2), ("7B", 8)}


def on_gpus(file: Path, gpus: int) -> list[str]:
    """Overrides for another number of GPUs; every GPU has a training rank and, in RL, a rollout
    actor.
    """
    return [
        f"run.training_gpus={gpus}",
        *([f"inference_engine.actors={gpus}"] if file.stem.startswith("rl") else []),
    ]


def load_from_name(file: Path) -> tuple[str, int]:
    _, size, *_, gpus = file.stem.split("_")
    return size.upper(), int(gpus.removesuffix("s").removesuffix("gpu"))


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    "gpus", [2, pytest.param(1, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[] if file.stem in IN_CI else pytest.mark.full)
        for file in FILES
    ],
)
def test_plan_accepts_the_file_on_any_number_of_gpus(file: Path, gpus: int) -> None:
    shown = CliRunner().invoke(app, ["plan", str(file), *on_gpus(file, gpus)])
    # Of all that a plan looks at, this machine may lack a GPU alone.
    problems = str(shown.exception)
    no_gpu = problems.startswith("1 problem in") and "PyTorch sees no CUDA device" in problems
    lacks_gpu = no_gpu and not torch.cuda.is_available()
    assert shown.exit_code == 0 or lacks_gpu, shown.output
    cfg = load_config(file, on_gpus(file, gpus))
    dims = model_dims(cfg.model.name)
    assert dims is not None
    needed, text = memory_needed(cfg, dims)
    assert needed > 0 and text.startswith("about ")
    assert ("per rank" in text) == (gpus > 1)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_memory_of_a_rank_fits_and_falls_with_more_ranks(file: Path) -> None:
    size, gpus = load_from_name(file)
    cfg, dims = load_config(file), model_dims(f"Qwen/Qwen2.5-{size}")
    assert (cfg.model.name.removesuffix("-Instruct"), cfg.run.training_gpus) == (
        f"Qwen/Qwen2.5-{size}",
        gpus,
    )
    assert dims is not None

    def peak(ranks: int) -> int:
        return max(memory(load_config(file, on_gpus(file, ranks)), dims).phases.values())

    assert peak(gpus) < DEVICE
    if load_config(file).fsdp.offload_optimizer:  # what is cut up is not on the device
        assert peak(8) == peak(2) == peak(1)
    else:
        assert peak(8) < peak(2) < peak(1)


ROBOTS = sorted((ROOT / "experiments" / "robots").glob("*.yaml"))
WORLD = """
from oxrl.environments import Step


class Libero:
    def reset(self, prompt, seed):
        return "Begin."

    def act(self, actions):
        return Step(terminated=True)
"""
FRAME = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAADElEQVR42mNgGB4AAADIAAGHlI8MAAAAAElFTkSuQmCC"
)


@pytest.fixture
def robot(data: None) -> None:
    """What the files of robots name, but for their models."""
    Path("my_libero.py").write_text(WORLD)
    place = Path("data/libero")
    place.mkdir()
    (place / "statistics.json").write_text(json.dumps({"q01": [-1.0] * 7, "q99": [1.0] * 7}))
    shown = [{"type": "image", "base64": FRAME}, {"type": "text", "text": "go"}]
    row = {"messages": [{"role": "user", "content": shown}], "actions": [[0.5] * 7] * 8}
    (place / "sft.jsonl").write_text(json.dumps(row) + "\n")
    (place / "rl.jsonl").write_text(json.dumps({"prompt": "go"}) + "\n")


@pytest.mark.full
@pytest.mark.usefixtures("robot")
@pytest.mark.parametrize("file", ROBOTS, ids=lambda file: file.stem)
def test_plan_accepts_the_files_of_robots_without_their_models(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of the hub: it could not be reached in time."""
    assert file.read_text().startswith("# Not run")
    monkeypatch.setenv("HF_ENDPOINT", "http://10.255.255.1")
    shown = CliRunner().invoke(app, ["plan", str(file), "run.device=cpu"])  # no GPU is asked for
    assert shown.exit_code == 0, shown.output
    model = load_config(file).model.name
    assert f"unknown     model: {model} is not in the hub's cache" in shown.output
    assert "1 row of data/libero" in shown.output


def test_what_is_set_for_images_of_a_model_that_is_not_here_counts_as_read(
    hub: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    content: dict[str, dict[str, object]] = {
        "run": {"name": "seen", "steps": 1},
        "model": {"name": "somebody/not-here", "freeze": "vision"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "rows_per_step": 1},
        "train": {"alg_name": "sft"},
    }
    (tmp_path / "rows.jsonl").write_text("")
    file.write_text(json.dumps(content))
    found = read_values(load_config(file))
    assert found["model.freeze"] == "vision"
    assert "data.image_min_side" not in found
    content["model"]["name"] = "Qwen/Qwen2.5-0.5B"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="this one reads text alone"):
        load_config(file)
