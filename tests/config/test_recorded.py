"""Configs as oxRL wrote them into run directories before later fields existed: they still resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from oxrl.config import dump_config, load_config
from oxrl.config.recorded import completed
from oxrl.runs.directory import MAY_CHANGE, differences, flatten_config

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.yaml"))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that these configs name."""
    monkeypatch.chdir(tmp_path)
    for name in ("prompts", "chats", "pairs"):
        Path(f"{name}.jsonl").touch()
    Path("reward.py").write_text("def digits(prompt, completion):\n    return 1.0\n")


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_config_of_an_earlier_version_means_today_what_it_meant(path: Path) -> None:
    recorded = flatten_config(path.read_text())
    now = flatten_config(dump_config(load_config(path)))
    later = now.keys() - recorded.keys()
    assert len(later) >= 5  # of those that were written down since
    assert set(differences(recorded, now)) - MAY_CHANGE
    found = differences(completed(recorded, now), now)
    assert set(found) - MAY_CHANGE == set()


@pytest.mark.usefixtures("inputs")
def test_a_later_field_that_is_set_to_something_else_is_a_difference() -> None:
    path = next(path for path in RECORDED if path.stem == "sgrpo")
    recorded = flatten_config(path.read_text())
    cfg = load_config(path, ["train.optimizer=muon", "reward.normalize=batch", "train.lr=1e-6"])
    now = flatten_config(dump_config(cfg))
    found = differences(completed(recorded, now), now)
    assert found["train.optimizer"] == ("adamw", "muon")
    assert found["reward.normalize"] == ("none", "batch")
    assert found["train.lr"] == (0.001, 1e-6)


def test_a_config_that_is_refused_today_is_compared_as_it_is() -> None:
    recorded = {"run.steps": -1, "train.alg_name": "sgrpo"}
    assert completed(recorded, {"run.seed": 0}) == recorded
