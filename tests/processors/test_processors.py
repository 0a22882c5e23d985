"""What `make test-processors` counts with: margins, which tests train, and that roundings differ."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from processors.margins import Spread, spreads
from processors.processor_plugin import trained
from processors.rounding_noise import shake
from processors.roundings import ROUNDINGS, SEEDS, environment, noise
from support.figures import Learned


def line(value: float, **bounds: float) -> dict[str, Any]:
    return {"test": "t", "figure": "f", "value": value, **bounds}


def test_a_margin_is_room_over_the_deviations_of_seeds_and_roundings_together() -> None:
    found = spreads(
        [line(4.0, at_least=0.0)],
        [[line(1.0)], [line(7.0)]],  # variance 9
        [[line(12.0)]],  # of 4 and 12: variance 32
    )[("t", "f")]
    assert (found.mean, found.at_least, found.at_most) == (4.0, 0.0, math.inf)
    assert found.deviation == pytest.approx(math.sqrt(9 + 32))
    assert found.margin == pytest.approx(4 / math.sqrt(41))


@pytest.mark.parametrize(
    ("value", "bounds", "margin"),
    [
        (0.9, {"at_least": 0.5}, math.inf),
        (0.5, {"at_least": 0.5}, math.inf),  # nothing varies: it is always there
        (0.4, {"at_least": 0.5}, -math.inf),
        (0.6, {"at_most": 0.5}, -math.inf),
    ],
)
def test_what_does_not_vary_is_on_one_side(
    value: float, bounds: dict[str, float], margin: float
) -> None:
    assert Spread(seeds=[value] * 3, roundings=[value] * 3, **bounds).margin == margin


def test_the_nearer_of_two_bounds_counts() -> None:
    spread = Spread(seeds=[2.0, 4.0, 6.0], roundings=[4.0], at_least=0.0, at_most=5.0)
    assert spread.margin == pytest.approx(1 / 2)


def test_a_figure_is_asserted_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.jsonl"
    monkeypatch.setenv("OXRL_TEST_FIGURES", str(file))
    check = Learned("t")
    check("f", 0.7, at_least=0.6, floor=0.5)
    with pytest.raises(AssertionError, match=r"f: 0\.7"):
        check("f", 0.7, at_most=0.6)
    with pytest.raises(AssertionError, match="no more is asserted"):
        check("f", 0.7, at_least=0.5, floor=0.5)
    written = [json.loads(text) for text in file.read_text().splitlines()]
    assert written[0] == {"test": "t", "figure": "f", "value": 0.7, "at_least": 0.6}
    assert written[1] == {"test": "t", "figure": "f", "value": 0.7, "at_most": 0.6}


def test_every_rounding_changes_one_thing_and_has_a_name_of_its_own() -> None:
    names = [rounding.name for rounding in (*ROUNDINGS, *SEEDS)]
    assert len(set(names)) == len(names) and ROUNDINGS[0].settings == {}
    plain = environment(ROUNDINGS[0])
    for rounding in ROUNDINGS[1:]:
        changed = set(environment(rounding).items()) - set(plain.items())
        assert {name for name, _ in changed} == set(rounding.settings), rounding.name
        two = rounding.name in ("two threads", "MKL_ENABLE_INSTRUCTIONS=SSE4_2")
        assert len(changed) == (2 if two else 1)


def test_the_hook_notes_who_trains_in_whatever_process_and_chooses_the_products(
    tmp_path: Path,
) -> None:
    noted = tmp_path / "trained.txt"
    program = (
        "import importlib, os, torch\n"
        "from oxrl.models import linear\n"
        "weight = torch.zeros(2, requires_grad=True)\n"
        "weight.sum().backward()\n"
        "for chosen in ('off', 'all'):\n"
        "    os.environ['OXRL_TEST_PRODUCTS'] = chosen\n"
        "    os.environ['PYTEST_CURRENT_TEST'] = f'tests/test_a.py::test_b[{chosen}] (call)'\n"
        "    importlib.reload(linear)\n"
        "    print(linear.onednn_is_faster(), linear.SMALL)\n"
        "    torch.optim.AdamW([weight]).step()\n"
        "    torch.optim.AdamW([weight]).step()\n"
    )
    hooked = {"OXRL_TEST_TRAINED": str(noted), "OXRL_TEST_PRODUCTS": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(ROUNDINGS[0]) | hooked,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"False {2**22}", "True 0"]
    assert noted.read_text().splitlines() == [
        "tests/test_a.py::test_b[off] (call)",
        "tests/test_a.py::test_b[all] (call)",
    ]


# Steps by next to nothing, and says how far weights went, in units.
SHAKEN = """
import importlib, os, torch
from oxrl.engines.train import optimizers, options, per_weight_optimizers

def units(after, before):
    return (after.detach().view(torch.int32) - before.view(torch.int32)).flatten().tolist()

def stepped(weight, optimizer):
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return units(weight, before)

RATE = 1e-30  # changes nothing by itself
first = torch.linspace(-2.0, 2.0, 40)
weight = torch.nn.Parameter(first.clone())
adam = torch.optim.AdamW([weight], lr=RATE)
again = torch.nn.Parameter(first.clone())
print(*stepped(weight, adam))
print(*stepped(weight, adam))
print(*stepped(again, torch.optim.AdamW([again], lr=RATE)))
for rule in ("adamw", "muon"):
    own = torch.nn.Parameter(first.clone().view(1, 40))
    print(*stepped(own, steps_one(own, rule)))
"""
STEPS_ONE = """
def steps_one(weight, rule):
    from types import SimpleNamespace
    from oxrl.checkpoint.shares import PieceOfWeight
    given = SimpleNamespace(rates={}, adam_betas=(0.9, 0.999), adam_eps=1e-8, seed=0)
    made = per_weight_optimizers.PerWeightOptimizers(
        {"w": weight}, {"w": rule}, {"w": 0.0}, given,
        place=lambda name, tensor: PieceOfWeight(name, 0, tensor.detach().view(-1)),
        whole=lambda tensor: tensor,
    )
    made.param_groups[0] |= {"lr": RATE, "index": 0}
    return made
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_noise_moves_what_was_stepped_by_two_units_at_most_the_same_in_equal_runs(
    seed: int, tmp_path: Path
) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS_ONE + SHAKEN)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(noise(seed)),
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, again, *own = [list(map(int, row.split())) for row in done.stdout.splitlines()]
    assert set(first) == {-2, -1, 1, 2}
    assert first == again and first != second
    # What steps weights one at a time has optimizers inside, which are not shaken once more.
    assert own == [first, first]


def test_a_noise_leaves_zeros_and_their_signs() -> None:
    zeros = torch.tensor([0.0, -0.0, 1e-45, -1e-45])
    shaken = zeros.clone()
    shake(shaken, step=1)
    assert torch.equal(shaken.view(torch.int32), zeros.view(torch.int32))


def test_ranks_move_their_pieces_as_one_process_moves_the_whole() -> None:
    whole = torch.linspace(1.0, 2.0, 999)
    pieces = whole.clone()
    shake(whole, step=3)
    shake(pieces[:400], step=3)
    shake(pieces[400:], step=3, start=400)
    assert torch.equal(whole, pieces)


def test_a_rounding_of_the_caller_is_not_mixed_with_one_that_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert "MKL_CBWR" not in environment(ROUNDINGS[0])
    assert os.environ["MKL_CBWR"] == "AVX2"


OF_FIXTURES = """
import pytest, torch
def train():
    weight = torch.zeros(2, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()
@pytest.fixture(scope="module")
def made():
    train()
@pytest.fixture(scope="session")
def of_all():
    train()
@pytest.fixture
def asks(made): ...
def test_first(asks): ...
def test_second(made, of_all): ...
def test_itself(): train()
def test_none(): ...
"""


def test_tests_and_fixtures_that_train_are_kept_each_once() -> None:
    noted = [
        "tests/a.py::test_one[x y] (call)",
        "tests/a.py::test_one[x y] (teardown)",
        "tests/b.py::done (fixture)",
        "::everywhere (fixture)",
        "tests/processors/test_processors.py::test_three (call)",
        "",
    ]
    assert trained(noted) == ["::everywhere", "tests/a.py::test_one[x y]", "tests/b.py::done"]


def test_a_test_trains_if_it_or_a_fixture_of_its_own_does(tmp_path: Path) -> None:
    """In processes that are forked, and in fixtures that others ask for, too."""
    (tmp_path / "test_of.py").write_text(OF_FIXTURES)
    noted = tmp_path / "noted.txt"
    noted.touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--rootdir", str(tmp_path)]
    hooked = environment(ROUNDINGS[0]) | {"OXRL_TEST_TRAINED": str(noted)}
    done = subprocess.run(
        [*command, str(tmp_path)], env=hooked, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert noted.read_text().splitlines() == [
        "test_of.py::made (fixture)",
        "::of_all (fixture)",
        "test_of.py::test_itself (call)",
    ]
