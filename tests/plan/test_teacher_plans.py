"""The plans of runs with teachers that no machine here can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from oxrl.config import load_config
from oxrl.modelfiles.dims import model_dims
from oxrl.plan.memory import memory
from oxrl.plan.plan import plan_text
from support.small_runs import write_inputs

ROOT = Path(__file__).resolve().parents[2] / "experiments" / "teachers"


@pytest.mark.parametrize("name", ["opd_1.5b", "kdrl_1.5b"])
def test_eight_gpus_hold_a_teacher_of_seven_billion_parameters(
    name: str, hub: Path, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    cfg = load_config(ROOT / f"{name}.yaml", [f"data.train={tmp_path / 'prompts.jsonl'}"])
    lines = plan_text(cfg).splitlines()
    told = "big: Qwen/Qwen2.5-7B-Instruct, as a model of this run, bfloat16, every row"
    assert f"teachers    {told}" in lines
    dims, big = model_dims(cfg.model.name), model_dims("Qwen/Qwen2.5-7B-Instruct")
    assert dims is not None and big is not None
    with_teacher = memory(cfg, dims)
    alone = cfg.model_copy(update={"model": cfg.model.model_copy(update={"teachers": {}})})
    without = memory(alone, dims)
    # Cut up over six ranks, as a reference is.
    assert with_teacher.held - without.held == 2 * big.parameters // 6
    assert max(with_teacher.phases.values()) < 80e9
