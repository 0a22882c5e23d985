"""Every engine, at one and two ranks, against the local one: outputs, gradients, steps,
checkpoints.

DeepSpeed lives in `.venv-scale`: `make test-scale` runs everything; elsewhere its part is skipped.
The table of the largest differences is printed by `pytest -s tests/engines/test_conformance.py -k
table`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from oxrl.engines.train.micro_batches import micro_batches
from oxrl.runs.ranks import ALONE
from oxrl.tables.engines import (
    SAMPLING_ENGINES,
    TRAINING_ENGINES,
    SamplingEngineName,
    TrainingEngineName,
)
from support import conformance
from support.conformance import needs_deepspeed
from support.rank_processes import run_ranks

Measured = tuple[dict[str, Tensor], dict[str, Any]]
Launch = Callable[[str, int], Path]
CORE = [
    ("fsdp", "float32", 1),
    ("fsdp", "float32", 2),
    ("fsdp", "float64", 2),
    ("fsdp", "float64", 3),
]
CORE_DTYPES = ("float32", "float64")
SCALE = [
    ("fsdp", "bfloat16", 2),
    *((f"zero{stage}", "float32", ranks) for stage in range(4) for ranks in (1, 2)),
    *((f"zero{stage}", "bfloat16", 2) for stage in (1, 2, 3)),
    ("zero2+offload", "float32", 2),
    ("zero3+offload", "float32", 2),
    ("zero3", "float32", 3),
]
CASES: list[Any] = [*CORE, *(pytest.param(*case, marks=needs_deepspeed) for case in SCALE)]


def _values(case: Any) -> tuple[str, str, int]:
    return getattr(case, "values", case)


RESUMABLE = [case for case in CASES if _values(case)[1] != "float64"]
# Relative to the norm of what is compared, over all tensors of a group. bfloat16 weights that
# differ by one rounding differ by 2^-8; a few of them do after three steps.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5}
WEIGHT_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-3}


@pytest.fixture(scope="session")
def local_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="session")
def local(local_folder: Path) -> Callable[[str], Measured]:
    """What the local engine says, per dtype; measured once, its checkpoint left in
    `local_folder`.
    """

    @cache
    def measured(dtype: str) -> Measured:
        tensors, numbers = conformance.measure(
            "local", dtype, local_folder / f"checkpoint_{dtype}", ALONE
        )
        if dtype == "float32":
            gradients, numbers["layer_runs"] = conformance.measure_checkpointing("local", ALONE)
            tensors |= conformance.measure_critic("local", ALONE) | gradients
        return tensors, numbers

    return measured


@pytest.fixture(scope="session")
def launch(
    tmp_path_factory: pytest.TempPathFactory, local: Callable[[str], Measured], local_folder: Path
) -> Launch:
    """The folder of an engine's results: its ranks run as processes, once, all dtypes of a case in
    one start.
    """

    @cache
    def run(engine: str, world: int) -> Path:
        dtypes = sorted({dtype for e, dtype, w in [*CORE, *SCALE] if (e, w) == (engine, world)})
        dtypes = [
            dtype for dtype in dtypes if dtype in CORE_DTYPES or find_spec("deepspeed") is not None
        ]
        for dtype in dtypes:
            local(dtype)
        folder = tmp_path_factory.mktemp(f"{engine}_{world}".replace("+", "_"))
        run_ranks(world, conformance.measure_all, engine, folder, dtypes, local_folder)
        return folder

    return run


def read(folder: Path, name: str, dtype: str, rank: int = 0) -> Measured:
    file = folder / f"{name}_{dtype}_{rank}"
    return load_file(f"{file}.safetensors"), json.loads(Path(f"{file}.json").read_text())


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Group -> norm of the difference over the norm of `theirs`, all tensors of the group
    together.
    """
    squares: dict[str, tuple[float, float]] = {}
    for name, tensor in ours.items():
        group = name.rpartition("/")[0]
        reference = theirs[name].double()
        off, norm = squares.get(group, (0.0, 0.0))
        off += float((tensor.double() - reference).square().sum())
        squares[group] = (off, norm + float(reference.square().sum()))
    return {group: math.sqrt(off / max(norm, 1e-300)) for group, (off, norm) in squares.items()}


def differences_of_each(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs
    }


@pytest.mark.parametrize(("engine", "dtype", "world"), CASES)
def test_an_engine_computes_what_the_local_one_does(
    engine: str, dtype: str, world: int, launch: Launch, local: Callable[[str], Measured]
) -> None:
    expected, expected_numbers = local(dtype)
    folder = launch(engine, world)
    for rank in range(world):
        tensors, numbers = read(folder, "measured", dtype, rank)
        assert tensors.keys() == expected.keys()
        for group, difference in differences(tensors, expected).items():
            limit = WEIGHT_TOLERANCE if group.startswith("weights") else TOLERANCE
            assert difference < limit[dtype], (rank, group)
        assert numbers["lies"] == []
        assert numbers.get("layer_runs") == expected_numbers.get("layer_runs")
        for name in (name for name in expected_numbers if name.endswith(("/loss", "/norm"))):
            assert numbers[name] == pytest.approx(expected_numbers[name], rel=TOLERANCE[dtype])
        for line, expected_line in zip(numbers["steps"], expected_numbers["steps"], strict=True):
            assert line == pytest.approx(expected_line, rel=max(1e-5, WEIGHT_TOLERANCE[dtype]))
        # No trained token, or infinity in the loss or NaN in the gradient of one rank's row: no
        # rank steps.
        for name in ("empty", "poisoned", "steep"):
            assert numbers[name]["update/skipped"] == 1.0
        for name in tensors:
            if name.startswith("weights/"):
                for broken in ("poisoned", "steep"):
                    assert torch.equal(
                        tensors[name], tensors[name.replace("weights/", f"weights_after_{broken}/")]
                    )


@pytest.mark.parametrize(
    ("engine", "dtype", "world"),
    [
        ("fsdp", "float32", 2),
        ("fsdp", "bfloat16", 2),
        *(
            pytest.param(f"zero{stage}", dtype, 2, marks=needs_deepspeed)
            for stage, dtype in ((0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16"))
        ),
    ],
)
def test_every_rank_refuses_to_save_a_weight_that_is_not_finite(
    tmp_path: Path, engine: str, dtype: str, world: int
) -> None:
    run_ranks(world, conformance.save_what_is_not_finite, engine, dtype, tmp_path)
    for rank in range(world):
        assert (tmp_path / f"rank_{rank}").read_text() == (
            "weight model.layers.1.mlp.down_proj.weight: 1 of 16384 values are NaN or infinite"
        )


@pytest.mark.parametrize(("engine", "dtype", "world"), RESUMABLE)
@pytest.mark.parametrize("onto", ["another", "local"])
def test_a_checkpoint_resumes_on_another_engine_and_on_the_local_one(
    engine: str, dtype: str, world: int, onto: str, launch: Launch, local: Callable[[str], Measured]
) -> None:
    folder = launch(engine, world)
    if onto == "another":
        expected, expected_numbers = local(dtype)
        tensors, numbers = read(folder, "resumed", dtype)
    else:
        expected, expected_numbers = read(folder, "measured", dtype)
        tensors, numbers = conformance.resume("local", dtype, folder / f"checkpoint_{dtype}", ALONE)
    loaded = {
        name: tensor for name, tensor in tensors.items() if name.startswith("weights_loaded/")
    }
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name.replace("weights_loaded", "weights")])
    end = {name: tensor for name, tensor in tensors.items() if name not in loaded}
    assert differences(end, expected)["weights_at_the_end"] < WEIGHT_TOLERANCE[dtype]
    for line, expected_line in zip(
        numbers["steps_after_save"], expected_numbers["steps_after_save"], strict=True
    ):
        assert line == pytest.approx(expected_line, rel=max(1e-5, WEIGHT_TOLERANCE[dtype]))


@needs_deepspeed
def test_deepspeed_refuses_a_checkpoint_whose_weights_were_stepped_unequally_often(
    tmp_path: Path,
) -> None:
    trainer = conformance.make_trainer("local", conformance.make_model("float32"), ALONE)
    trainer.model.model.norm.weight.requires_grad_(False)
    batch = conformance.batches(conformance.LENGTHS, dtype=torch.float32, vocabulary=261)[
        "supervised"
    ]
    conformance.steps(trainer, batch, 1)
    trainer.model.model.norm.weight.requires_grad_(True)
    conformance.steps(trainer, batch, 1)
    trainer.save(tmp_path / "saved")
    run_ranks(1, conformance.refuse, "zero2", tmp_path / "saved", tmp_path / "refused")
    assert "weights were stepped [1, 2] times" in (tmp_path / "refused").read_text()


@pytest.mark.parametrize(("engine", "dtype", "world"), RESUMABLE)
def test_transformers_reads_a_checkpoint_without_any_conversion(
    engine: str, dtype: str, world: int, launch: Launch
) -> None:
    folder = launch(engine, world)
    expected, _ = read(folder, "measured", dtype)
    model = AutoModelForCausalLM.from_pretrained(folder / f"checkpoint_{dtype}", dtype="auto")
    found = {f"weights/{name}": tensor for name, tensor in model.named_parameters()}
    assert {name for name in expected if name.startswith("weights/")} == found.keys()
    for name, tensor in found.items():
        assert tensor.dtype == conformance.DTYPES[dtype]
        assert torch.equal(tensor.float(), expected[name])


@pytest.mark.parametrize(
    ("engine", "dtype", "world"),
    [case for case in RESUMABLE if _values(case)[0] in conformance.REFERENCES],
)
def test_a_reference_says_what_the_local_one_does(
    engine: str, dtype: str, world: int, launch: Launch, tmp_path: Path
) -> None:
    said, _ = read(launch(engine, world), "reference", dtype, world - 1)
    expected = conformance.measure_reference("local", dtype, tmp_path, ALONE)
    for name, difference in differences_of_each(said, expected).items():
        assert difference < TOLERANCE[dtype], name
    assert torch.equal(expected["reference/other"], expected["reference/loaded"])
    assert not torch.equal(expected["reference/other"], expected["reference/first"])


def test_activation_checkpointing_runs_a_layer_again(local: Callable[[str], Measured]) -> None:
    tensors, numbers = local("float32")
    assert numbers["layer_runs"] == [1, 2]
    assert any(name.startswith("checkpointed/") for name in tensors)


@pytest.mark.parametrize(
    ("two", "one"),
    [("fsdp", "fsdp"), pytest.param("zero3", "zero1", marks=needs_deepspeed)],
    ids=["fsdp", "deepspeed"],
)
def test_a_run_moves_from_two_ranks_to_one_and_back(
    two: str, one: str, launch: Launch, tmp_path: Path
) -> None:
    start = launch(two, 2)
    expected = {
        name.partition("/")[2]: t
        for name, t in read(start, "measured", "float32")[0].items()
        if "_end/" in name
    }
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    run_ranks(1, conformance.take_over, one, start / "checkpoint_float32", tmp_path / "one")
    run_ranks(2, conformance.take_over, two, tmp_path / "one", tmp_path / "two")
    found = load_file(tmp_path / "two" / "model.safetensors")
    assert differences(found, expected)[""] < 1e-5


def test_the_gradient_of_an_adapter_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    conformance.adapter_gradients("local", tmp_path, ALONE)
    expected = load_file(tmp_path / "local_1_0.safetensors")
    # A and B of 14 layers, and with DoRA a magnitude.
    assert len(expected) == 28 + 42 and all(
        "lora_" in name and tensor.any() for name, tensor in expected.items()
    )
    for world in (1, 2, 3):
        run_ranks(world, conformance.adapter_gradients, "fsdp", tmp_path)
        for rank in range(world):
            found = load_file(tmp_path / f"fsdp_{world}_{rank}.safetensors")
            assert found.keys() == expected.keys()
            assert max(differences_of_each(found, expected).values()) < 1e-10


def test_rows_are_dealt_out_once_and_by_length() -> None:
    batch = conformance.batches(conformance.LENGTHS)["supervised"]
    lengths = batch.inputs.attention_mask.sum(1)
    for ranks in (1, 2, 3, 10):
        shares = micro_batches(batch, budget=15, ranks=ranks)
        rows = [int(row) for share in shares for units, _ in share for row in units]
        assert sorted(rows) == list(range(7))
        for units, longest in (micro for share in shares for micro in share):
            assert int(lengths[units].max()) == longest
            assert len(units) == 1 or longest * len(units) <= 15
        counts = [sum(len(units) for units, _ in share) for share in shares]
        assert max(counts) - min(counts) <= 1


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")


def test_table_of_the_largest_differences(
    launch: Launch, local: Callable[[str], Measured], table: list[str]
) -> None:
    groups = (
        "forward",
        "gradient",
        "gradient_of_two_calls",
        "gradient_of_pairs",
        "weights",
        "weights_at_the_end",
    )
    table.append(
        f"{'engine':<14}{'dtype':<10}ranks  " + "".join(f"{name[:22]:<24}" for name in groups)
    )
    for engine, dtype, world in CORE if find_spec("deepspeed") is None else [*CORE, *SCALE]:
        tensors, _ = read(launch(engine, world), "measured", dtype)
        found = differences(tensors, local(dtype)[0])
        table.append(
            f"{engine:<14}{dtype:<10}{world}      "
            + "".join(f"{found.get(name, math.nan):<24.1e}" for name in groups)
        )
        assert found["forward"] < TOLERANCE[dtype]


def test_every_training_engine_of_the_table_is_held_to_this_and_can_be_chosen() -> None:
    tested = {"deepspeed" if engine.startswith("zero") else engine for engine, *_ in CORE + SCALE}
    assert {"local"} | tested == set(TRAINING_ENGINES) == set(get_args(TrainingEngineName))
    assert set(SAMPLING_ENGINES) == set(get_args(SamplingEngineName))
