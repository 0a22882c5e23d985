"""Checkpoints are whole or absent, whatever happens while they are written and to the disk
afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oxrl.checkpoint.verify import latest_checkpoint, verify_checkpoint
from oxrl.checkpoint.writer import save_best
from oxrl.errors import CheckpointError, CheckpointWriteError, NonFiniteError
from oxrl.runs.checkpoints import is_checkpoint, is_run, longest_row, remove_leftovers
from support.whole_checkpoints import save_checkpoint


def save(root: Path, step: int, keep: int = 3) -> Path:
    def write(directory: Path) -> None:
        save_file({"weight": torch.full((64,), float(step))}, directory / "model.safetensors")
        (directory / "config.json").write_text("{}")

    return save_checkpoint(
        root, step, write, state={"draw": step * 16}, offsets={"metrics.jsonl": step}, keep=keep
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_saved_checkpoint_is_intact_and_comes_back_as_it_was_given(tmp_path: Path) -> None:
    save(tmp_path, 0)
    path = save(tmp_path, 40)
    assert path == tmp_path / "step_00000040"
    assert verify_checkpoint(path) == []
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.state, found.offsets) == (
        path,
        40,
        {"draw": 640},
        {"metrics.jsonl": 40},
    )
    assert load_file(found.path / "model.safetensors")["weight"].tolist() == [40.0] * 64
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors", "state.json"]
    assert manifest["files"]["config.json"]["bytes"] == 2
    # sha256 of the two bytes "{}"
    assert manifest["files"]["config.json"]["sha256"].startswith("44136fa355b3678a1146ad16f7e8649e")


def test_no_checkpoint_is_none_and_not_an_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    (tmp_path / ".tmp-step_00000000").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_00000020", "step_00000030"]


def test_a_run_that_went_back_removes_the_later_checkpoints_it_abandoned(tmp_path: Path) -> None:
    for step in (10, 20, 40):
        save(tmp_path, step)
    (tmp_path / "step_00000040" / "state.json").write_text("{")
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["step_00000030"]


def test_steps_beyond_eight_digits_sort_by_number(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 100_000_000


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_manifest_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"metrics.jsonl": 20', '"metrics.jsonl": 21'))


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        (
            "model.safetensors",
            lambda path: os.truncate(path, 100),
            "model.safetensors is 100 bytes",
        ),
        ("model.safetensors", lambda path: os.truncate(path, 0), "model.safetensors is 0 bytes"),
        (
            "model.safetensors",
            flip_a_bit,
            "model.safetensors has the right size but other contents",
        ),
        ("state.json", flip_a_bit, "state.json has the right size but other contents"),
        ("config.json", Path.unlink, "config.json is missing"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", damage_manifest_step, "manifest.json is damaged"),
        ("manifest.json", lambda path: os.truncate(path, 50), "manifest.json is damaged"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
        ("manifest.json", lambda path: path.write_text('["no"]'), "manifest.json is damaged"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(
    file: str,
    damage: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    damage(newest / file)
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 10
    assert f"step_00000020: {said}" in caplog.text
    assert "using" in caplog.text and "step_00000010" in caplog.text


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over_silently(
    tmp_path: Path,
) -> None:
    for step in (10, 20):
        flip_a_bit(save(tmp_path, step) / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"(?s)step_00000020: model.*step_00000010: model.*run\.dir"
    ):
        latest_checkpoint(tmp_path)


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Tamper like somebody who can compute hashes."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/passwd", "a/../../secret.json", "..\\secret.json"]
)
def test_a_manifest_that_leads_out_of_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (tmp_path / "secret.json").write_text("{}")
    rewrite_manifest(path, lambda body: body["files"].update({name: body["files"]["config.json"]}))
    assert verify_checkpoint(path) == [f"{name} is missing"]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("format"),
        lambda body: body.pop("offsets"),
        lambda body: body.update(step="twenty"),
        lambda body: body.update(files=["config.json"]),
        lambda body: body["files"].update({"config.json": 2}),
    ],
)
def test_a_manifest_of_another_shape_is_damaged_even_where_its_hash_fits(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    rewrite_manifest(newest, change)
    [problem] = verify_checkpoint(newest)
    assert problem.startswith("manifest.json is damaged")
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 10


def test_what_somebody_wrote_beside_the_fields_of_a_manifest_is_no_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"note": "kept for the paper"}))
    assert verify_checkpoint(path) == []


def test_a_symbolic_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (path / "config.json").unlink()
    (path / "config.json").symlink_to(outside)
    assert verify_checkpoint(path) == ["config.json is there, a symbolic link"]
    (tmp_path / "step_00000020").symlink_to(path)
    assert verify_checkpoint(tmp_path / "step_00000020") == ["step_00000020 is not a directory"]


class Canary:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, (os.environ["CANARY"],))


def test_a_pickle_in_a_checkpoint_is_refused_and_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    (tmp_path / "checkpoints").mkdir()
    path = save(tmp_path / "checkpoints", 10)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary()))
    assert verify_checkpoint(path) == [
        "pytorch_model.bin is there, a file of a kind that can run code when it is loaded"
    ]
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        latest_checkpoint(tmp_path / "checkpoints")
    assert not (tmp_path / "canary").exists()


def test_an_engine_that_writes_a_pickle_is_told_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer\.pt, a file of a kind that can run code"):
        save_checkpoint(
            tmp_path,
            1,
            lambda path: torch.save({}, path / "optimizer.pt"),
            state={},
            offsets={},
            keep=1,
        )
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_the_damaged_one(tmp_path: Path) -> None:
    flip_a_bit(save(tmp_path, 10) / "model.safetensors")
    assert verify_checkpoint(save(tmp_path, 10)) == []
    assert names(tmp_path) == ["step_00000010"]


def test_a_write_that_fails_leaves_older_checkpoints_and_no_rubbish(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise ZeroDivisionError("a bug in the engine keeps its own name")

    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path, 20, write, state={}, offsets={}, keep=2)
    assert names(tmp_path) == ["step_00000010"]


@pytest.mark.parametrize("writer", ["python", "safetensors"])
def test_a_full_disk_is_a_clear_error_and_the_old_checkpoint_stays(
    writer: str, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    limit = 1 << 20

    def write(directory: Path) -> None:
        if writer == "python":
            (directory / "model.json").write_bytes(b"x" * 2 * limit)
        else:
            save_file({"weight": torch.zeros(limit)}, directory / "model.safetensors")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (limit, before[1])
    )  # a write past it fails, as on a full disk
    try:
        with pytest.raises(
            CheckpointWriteError,
            match=r"(?s)step_00000020 could not be written.*step_00000010 is unt",
        ):
            save_checkpoint(tmp_path, 20, write, state={}, offsets={}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["step_00000010"]
    assert verify_checkpoint(tmp_path / "step_00000010") == []


def test_a_checkpoint_of_weights_that_are_not_finite_is_not_written(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 10)

    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"")
        raise NonFiniteError("weight lm_head: 1 of 4 values are NaN or infinite")

    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 11, "update/param_norm": 2.0}\n{"step": 12, "update/param_norm": "nan"}\n'
    )
    said = (
        r"(?s)no checkpoint of step 20 was written.*weight lm_head: 1 of 4.*since step 12"
        r".*newest good one is .*step_00000010: --resume"
    )
    with pytest.raises(NonFiniteError, match=said) as raised:
        save_checkpoint(tmp_path / "checkpoints", 20, write, state={}, offsets={}, keep=1)
    assert raised.value.exit_code == 1
    assert names(tmp_path / "checkpoints") == ["step_00000010"]
    with pytest.raises(NonFiniteError, match="no copy in best/ was written"):
        save_best(tmp_path, 20, write)
    assert names(tmp_path) == ["checkpoints", "metrics.jsonl"]


@pytest.mark.parametrize("root", ["file", "vanished/checkpoints"])
def test_a_place_that_went_away_is_a_clear_error_and_is_not_made_anew(
    root: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match="there is no earlier checkpoint"):
        save(tmp_path / root, 10)
    assert names(tmp_path) == ["file"]


# The victim stops at a named place inside CheckpointWriter, says so through a file, and is killed
# there. Places are the calls by which a checkpoint reaches the disk, counted: no function of ours
# is replaced.
VICTIM = """
import os, sys, time
from pathlib import Path
from oxrl.checkpoint.writer import CheckpointWriter

root, place, here = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
calls = 0

def stop_at(function):
    def counted(*arguments, **keywords):
        global calls
        calls += 1
        if calls == place:
            here.write_text(function.__name__)
            time.sleep(60)
        return function(*arguments, **keywords)
    return counted

def write(directory):
    for shard in range(2):
        half = directory / f"model-{shard}.txt"
        with open(half, "wb") as file:
            file.write(b"x" * 1000)
            file.flush()
            os.fsync(file.fileno())
            file.write(b"y" * 1000)

os.fsync, os.rename = stop_at(os.fsync), stop_at(os.rename)
writer = CheckpointWriter(root, 20, state={"draw": 2}, offsets={}, keep=2)
writer.fill(write)
writer.complete(lambda: None)
here.write_text("done")
"""


def run_until(root: Path, place: int, here: Path) -> str:
    """Start a save of step 20, SIGKILL it at its `place`-th flush or rename; what it was about to
    do.
    """
    command = [sys.executable, "-c", VICTIM, str(root), str(place), str(here)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not (here.exists() and here.read_text()):
            assert process.poll() is None or here.exists(), "the victim died by itself"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if (place_name := here.read_text()) != "done":
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    return place_name


@pytest.mark.parametrize(
    "damaged", [False, True], ids=["new step", "a damaged step is saved again"]
)
def test_a_kill_anywhere_in_the_write_leaves_a_whole_checkpoint(
    damaged: bool, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for step in (0, 10, 20) if damaged else (0, 10):
        save(base, step, keep=3)
    if damaged:
        flip_a_bit(base / "step_00000020" / "model.safetensors")
    places: list[str] = []
    while not places or places[-1] != "done":
        root = tmp_path / str(len(places))
        shutil.copytree(base, root)
        places.append(run_until(root, len(places) + 1, tmp_path / f"here-{len(places)}"))
        remove_leftovers(root)
        found = latest_checkpoint(root)
        assert found is not None
        assert found.state == {10: {"draw": 160}, 20: {"draw": 2}}[found.step]
        # Whatever else is there is whole too, apart from the one that was damaged before.
        assert all(
            damaged and path.name == "step_00000020"
            for path in root.iterdir()
            if verify_checkpoint(path)
        )
        assert all(path.name.startswith("step_") for path in root.iterdir())
    assert found.step == 20
    # Two shards mid-write, three files, the manifest, directories, the renames: every place was
    # really hit.
    assert len(places) >= 10
    assert places.count("rename") >= 2


def test_what_is_a_checkpoint(tmp_path: Path) -> None:
    assert not is_checkpoint(tmp_path / "gone")
    for files, is_one in (
        ([], False),
        (["model.safetensors"], False),
        (["trainer_state.json"], True),
        (["state.json"], False),
        (["manifest.json"], False),
        (["state.json", "manifest.json"], True),
    ):
        folder = tmp_path / "_".join(["files", *files])
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
        assert is_checkpoint(folder) is is_one, files


def test_the_longest_row_of_a_run_is_that_of_its_checkpoints_and_of_nothing_below(
    tmp_path: Path,
) -> None:
    (tmp_path / "starts.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("model: {max_length: 77}\n")
    for place, longest in (
        ("best", 77),
        ("checkpoints/step_00000001", 77),
        ("checkpoints/step_00000001/policy", 5),
        ("gone", 5),
    ):
        if place != "gone":
            (tmp_path / place).mkdir(parents=True)
        assert longest_row(tmp_path / place, 5) == longest, place


def test_a_run_is_what_was_started_or_has_a_checkpoint(tmp_path: Path) -> None:
    for files, is_one in (
        (["config.yaml"], False),
        (["starts.jsonl"], False),
        (["config.yaml", "starts.jsonl"], True),
        (["checkpoints/step_00000001/trainer_state.json"], True),
        (["checkpoints/step_00000001/model.safetensors"], False),
        (["step_00000001/trainer_state.json"], False),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        assert is_run(folder) is is_one, files
