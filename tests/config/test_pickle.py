"""A configuration travels: to Ray actors, to reward workers, to the ranks of a launcher."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest

from oxrl.config import Config, dump_config, load_config
from oxrl.config.load_evaluation import load_evaluation_config

Write = Callable[..., Path]
# One algorithm of each recipe.
ALGORITHMS = ("sgrpo", "sft", "rft", "dpo", "reward_model")
LOAD = """
import pickle, sys
from pathlib import Path

cfg = pickle.loads(Path(sys.argv[1]).read_bytes())
from oxrl.config import dump_config

print(type(cfg).__name__)
print(dump_config(cfg), end="")
"""


@pytest.fixture(params=ALGORITHMS)
def cfg(request: pytest.FixtureRequest, write: Write) -> Config:
    return load_config(write(train={"alg_name": request.param, "lr": 3e-5}))


def test_a_pickled_configuration_is_equal(cfg: Config) -> None:
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_classes_travel_by_name(cfg: Config) -> None:
    """A class that travelled by value would be another class at the other end."""
    sections = [getattr(cfg, name) for name in type(cfg).model_fields]
    for part in (cfg, *sections):
        assert type(cloudpickle.loads(cloudpickle.dumps(part))) is type(part)


def test_another_process_reads_it(cfg: Config, folder: Path) -> None:
    """A fresh interpreter, which has imported nothing of oxRL yet."""
    file = folder / "cfg.pickle"
    file.write_bytes(cloudpickle.dumps(cfg))
    command = [sys.executable, "-c", LOAD, str(file)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown == f"{type(cfg).__name__}\n{dump_config(cfg)}"


def test_a_configuration_to_evaluate_with_travels(write: Write) -> None:
    path = write(train={"alg_name": "sft"})
    trained = load_config(path)
    evaluated = load_evaluation_config(path, ["reward.name=math"])
    assert pickle.loads(pickle.dumps(trained)) == trained
    assert pickle.loads(pickle.dumps(evaluated)) == evaluated
