"""Models that read images on several ranks: the gradient, the steps and the run of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from oxrl.commands.train import run
from oxrl.runs.ranks import ALONE
from support.rank_processes import run_ranks
from support.rank_runs import assert_same_lines, run_where_only_rank_0_may_write
from support.vision_families import FAMILIES, write_family
from support.vision_ranks import measure, measure_all
from support.vision_runs import config, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-scale` runs this",
)
CASES: list[Any] = [
    ("fsdp", 2),
    pytest.param("fsdp", 3, marks=pytest.mark.full),
    *(pytest.param(f"zero{stage}", 2, marks=needs_deepspeed) for stage in range(4)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    write_rows(found)
    for family in FAMILIES:
        write_family(family, found / family)
    return found


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor], group: str) -> float:
    """Largest difference, relative to the largest value, over all tensors of a group."""
    names = [name for name in theirs if name.startswith(f"{group}/")]
    largest = max(float(theirs[name].float().abs().max()) for name in names)
    off = [float((ours[name].float() - theirs[name].float()).abs().max()) for name in names]
    return max(off) / largest


@pytest.mark.parametrize(("engine", "world"), CASES)
def test_ranks_read_images_as_one_process_does(folder: Path, engine: str, world: int) -> None:
    models = [str(folder / family) for family in FAMILIES]
    run_ranks(world, measure_all, engine, models, folder, ["float32"])
    for family in FAMILIES:
        expected = measure("local", str(folder / family), folder, ALONE)
        for rank in range(world):
            found = load_file(folder / f"{engine}_{world}_{rank}_{family}_float32.safetensors")
            for group in ("forward", "gradient_all", "gradient_one", "gradient_mixed"):
                assert apart(found, expected, group) < 1e-5, (family, rank, group)
            assert apart(found, expected, "gradient_text") < 1e-5
            if engine.startswith("zero"):
                # DeepSpeed steps every weight: the last layer of LLaVA's tower, which is read by
                # nobody and has no gradient, decays there.
                for name in [name for name in expected if name.startswith("weights/")]:
                    if name.replace("weights/", "gradient_all/") not in expected:
                        del expected[name]
            assert apart(found, expected, "weights") < 1e-5


@pytest.mark.full
def test_a_run_on_two_ranks_is_the_run_of_one(folder: Path) -> None:
    sections: dict[str, Any] = {"data": {"eval": str(folder / "rows.jsonl")}}
    train = {"backend": "fsdp", "micro_batch_tokens": 80, "adam_eps": 1e-3}
    places = {"training_gpus": 2, "deadline_s": 60}
    alone = config(folder, "builtin:tiny-vl", "alone", train={"adam_eps": 1e-3}, **sections)
    run(alone)
    several = config(folder, "builtin:tiny-vl", "several", run=places, train=train, **sections)
    run_ranks(2, run_where_only_rank_0_may_write, several)
    assert_same_lines(several.run.directory, alone.run.directory)
    images = [
        sorted(path.name for path in (cfg.run.directory / "images").iterdir())
        for cfg in (alone, several)
    ]
    assert images[0] == images[1] and len(images[0]) == 5
    last = several.run.directory / "checkpoints" / "step_00000002"
    assert (last / "preprocessor_config.json").is_file()
