"""An export destroys nothing: it is written beside its place and put there whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oxrl.checkpoint.model_files import save_model
from oxrl.commands import export
from oxrl.commands.export import run_export
from oxrl.commands.train import run
from oxrl.errors import CheckpointError, DataError
from oxrl.models.load import load_policy
from support.command_line import oxrl
from support.small_runs import sft_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps, in a folder of its own."""
    folder = tmp_path_factory.mktemp("finished")
    cfg = sft_config(folder, "run", ["run.steps=2"])
    run(cfg)
    return cfg.run.directory


def everything(folder: Path) -> dict[str, str]:
    """Every path under a folder, with the hash of what is in it."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def test_an_export_is_a_folder_that_transformers_reads(finished: Path, tmp_path: Path) -> None:
    out = run_export(finished, tmp_path / "models" / "out")
    newest = max((finished / "checkpoints").glob("step_*"))
    ours = dict(load_policy(str(out)).named_parameters())
    for name, weight in load_policy(str(newest)).named_parameters():
        assert torch.equal(weight, ours[name])
    marker = json.loads((out / "oxrl_export.json").read_text())
    assert marker["source"] == str(newest.resolve()) and marker["dtype"] == "float32"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    assert run_export(newest, tmp_path / "empty", dtype="bfloat16") == tmp_path / "empty"
    tensors = load_file(tmp_path / "empty" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("checkpoints/step_00000002", "step_00000002, which is|is a checkpoint|is a run directory"),
        ("checkpoints/step_00000000", "is a checkpoint"),
        ("checkpoints", "lies inside .*run, which is a run directory"),
        ("checkpoints/new", "lies inside .*run, which is a run directory"),
        ("checkpoints/step_00000002/new", "lies inside .*step_00000002, which is a checkpoint"),
        ("new/deeper", "lies inside .*run, which is a run directory"),
        (".", "is a run directory"),
        ("..", "holds run, a run or checkpoint|which is exported"),
        ("../link", "is a run directory"),
        ("../link/new", "lies inside"),
        ("../notes", "not empty .*holds a.txt"),
        ("../notes/a.txt", "a.txt is a file"),
        ("../notes/a.txt/new", "a.txt is a file"),
        ("../dangling", "symbolic link to nothing"),
        ("../dangling/new", "symbolic link to nothing"),
        ("../loop", "symbolic link to nothing"),
        ("../" + "x" * 300, "cannot be looked at"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_export_lands_where_something_would_be_lost(
    finished: Path, tmp_path: Path, place: str, said: str, overwrite: bool
) -> None:
    home = finished.parent
    (home / "notes").mkdir(exist_ok=True)
    (home / "notes" / "a.txt").write_text("mine")
    for name, target in (("link", "run"), ("dangling", "nowhere"), ("loop", "loop")):
        if not (home / name).is_symlink():
            (home / name).symlink_to(target)
    before = everything(home)
    with pytest.raises(DataError, match=said) as raised:
        run_export(finished, finished / place, overwrite=overwrite)
    assert raised.value.exit_code == 2 and "--out" in str(raised.value)
    assert everything(home) == before


def test_another_run_is_as_safe_as_the_one_that_is_exported(finished: Path, tmp_path: Path) -> None:
    other = sft_config(tmp_path, "other", ["run.steps=2"])
    run(other)
    before = everything(tmp_path)
    newest = max((other.run.directory / "checkpoints").glob("step_*"))
    for place in (other.run.directory, newest, newest / "merged", tmp_path):
        with pytest.raises(DataError, match="run|checkpoint|empty"):
            run_export(finished, place, overwrite=True)
    # A run whose config.yaml is gone is still known by its checkpoints.
    (other.run.directory / "config.yaml").rename(tmp_path / "config.yaml")
    with pytest.raises(DataError, match="lies inside .*which is a run directory"):
        run_export(finished, other.run.directory / "merged")
    (tmp_path / "config.yaml").rename(other.run.directory / "config.yaml")
    assert everything(tmp_path) == before


def test_a_model_is_not_exported_into_itself(tmp_path: Path) -> None:
    save_model(load_policy("builtin:tiny"), tmp_path / "model")
    for place in ("model", "model/new", "."):
        with pytest.raises(DataError, match="which is exported"):
            run_export(tmp_path / "model", tmp_path / place)
    with pytest.raises(DataError, match="is no folder"):
        run_export(tmp_path / "none", tmp_path / "out")


def test_overwrite_replaces_an_earlier_export_and_nothing_else(
    finished: Path, tmp_path: Path
) -> None:
    out = run_export(finished, tmp_path / "out")
    first = everything(out)
    with pytest.raises(DataError, match="earlier export; add --overwrite"):
        run_export(finished, out, dtype="bfloat16")
    assert everything(out) == first
    run_export(finished, out, dtype="bfloat16", overwrite=True)
    assert everything(out) != first
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").write_text("which benchmark it won")
    before = everything(out)
    with pytest.raises(DataError, match=r"to which notes\.txt was added"):
        run_export(finished, out, overwrite=True)
    assert everything(out) == before


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_an_export_that_fails_half_way_loses_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    out = run_export(finished, tmp_path / "out")
    before = everything(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def only_into_place(source: Path, target: Path) -> None:
        if source.name.endswith(".partial"):
            full()
        rename(source, target)

    rename: Callable[[Path, Path], None] = os.rename
    if moment == "write":
        monkeypatch.setattr(export, "pretty_json", full)  # what is written last
    else:
        monkeypatch.setattr(os, "rename", only_into_place)
    with pytest.raises(CheckpointError, match="could not be written.*No space left"):
        run_export(finished, out, overwrite=True)
    assert everything(tmp_path) == before


def test_the_command_line_says_so_with_exit_code_2(finished: Path) -> None:
    before = everything(finished)
    for place in (finished, finished / "checkpoints" / "step_00000002", finished / "result.json"):
        said = oxrl("export", finished, "--out", place, folder=finished.parent)
        assert said.returncode == 2 and "Traceback" not in said.stderr, said.stderr
        assert "error: --out" in said.stderr
    assert everything(finished) == before
