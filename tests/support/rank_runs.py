"""Runs on several ranks: what only the first may do, and what they have in common with one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from support.small_runs import metric_lines


def run_where_only_rank_0_may_write(cfg: Config, resume: bool = False) -> None:
    """On one rank: the whole run. On every rank but the first, touching the run directory is an
    error, but for its share of tensors in files that are there.
    """
    home = str(cfg.run.directory)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in (
            "os.mkdir",
            "os.rename",
            "os.remove",
            "os.rmdir",
            "shutil.rmtree",
            "os.truncate",
        )
        writes = (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        )
        tensors = str(arguments[0]).endswith(".safetensors")
        share = event == "open" and tensors and arguments[1] == "r+"
        if (changes or writes) and not share and str(arguments[0]).startswith(home):
            raise AssertionError(f"rank {os.environ['RANK']}: {event} {arguments[0]}")

    if os.environ["RANK"] != "0":
        sys.addaudithook(watch)
    run(cfg, resume=resume)


def assert_same_lines(found: Path, expected: Path) -> None:
    left, right = metric_lines(found), metric_lines(expected)
    assert [line["step"] for line in left] == [line["step"] for line in right]
    for ours, theirs in zip(left, right, strict=True):
        # Counts are equal: the rows of a step do not depend on who reads them.
        assert {k: v for k, v in ours.items() if k.startswith("data/")} == {
            k: v for k, v in theirs.items() if k.startswith("data/")
        }
        # Before anything is trained all margins are zero, and the sign of zero is rounding;
        # afterwards that of one row in eight or more may still be.
        for key in [key for key in ours if key.endswith("/accuracy")]:
            accuracies = ours.pop(key), theirs.pop(key)
            assert ours["step"] == 1 or abs(accuracies[0] - accuracies[1]) <= 1 / 8
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def samples(folder: Path, step: int) -> list[tuple[str, float]]:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [(line["response"], line["reward"]) for line in lines if line["step"] == step]
