"""Policies that act on several training ranks: imitation as in one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.data.action_heads import read_head
from support.action_runs import CHOICES, imitation, make_data
from support.rank_processes import run_ranks
from support.rank_runs import assert_same_lines, run_where_only_rank_0_may_write

pytestmark = pytest.mark.filterwarnings("ignore")
BACKENDS: list[Any] = [
    "fsdp",
    pytest.param(
        "deepspeed",
        marks=pytest.mark.skipif(
            find_spec("deepspeed") is None,
            reason="DeepSpeed is not installed here; `make test-scale` runs this",
        ),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_imitate_actions_as_one_process_does(tmp_path: Path, backend: str) -> None:
    make_data(tmp_path, limit=6)
    train: dict[str, Any] = {"alg_name": "sft", "lr": 1e-3, "adam_eps": 1e-3}
    alone = imitation(tmp_path, "alone", action=CHOICES, train=train, run={"steps": 2})
    run(alone)
    several = imitation(
        tmp_path,
        "several",
        action=CHOICES,
        train=train | {"backend": backend, "micro_batch_tokens": 60},
        run={"steps": 2, "training_gpus": 2, "deadline_s": 200},
    )
    run_ranks(2, run_where_only_rank_0_may_write, several)
    assert_same_lines(several.run.directory, alone.run.directory)
    head = read_head(alone.run.directory)
    last = several.run.directory / "checkpoints" / "step_00000002"
    assert head is not None and head == read_head(several.run.directory) == read_head(last)
