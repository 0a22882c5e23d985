"""The first commands that people type, from a clone: req.txt, main_rl.py, main_sl.py."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from oxrl.data.rows import read_rows
from oxrl.runs.files import read_records
from support.figures import SEED, Learned

ROOT = Path(__file__).resolve().parents[2]


def train(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """`python main_KIND.py --config configs/KIND_args.yaml`, with a run directory of the test."""
    monkeypatch.chdir(ROOT)
    words = ["--config", f"configs/{kind}_args.yaml", f"run.dir={folder}", "run.mlflow=false"]
    monkeypatch.setattr(sys, "argv", [f"main_{kind}.py", *words, *overrides])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"main_{kind}.py", run_name="__main__")
    assert ended.value.code == 0
    return folder


def test_requirements_name_the_pins_and_this_package() -> None:
    lines = (ROOT / "req.txt").read_text().splitlines()
    asked = [line for line in lines if not line.startswith("#")]
    assert asked == ["-c constraints.txt", "-e ."]
    assert (ROOT / "constraints.txt").is_file() and (ROOT / "pyproject.toml").is_file()


def test_the_held_out_sums_are_held_out_and_all_answers_are_right() -> None:
    pairs: dict[str, set[tuple[int, ...]]] = {}
    for name in ("sums", "sums_eval"):
        pairs[name] = set()
        for row in read_rows(ROOT / "configs" / f"{name}.jsonl"):
            numbers = [int(digit) for digit in row.fields["prompt"].removesuffix("=").split("+")]
            assert row.fields["answer"] == row.fields["completion"] == str(sum(numbers))
            pairs[name].add(tuple(sorted(numbers)))
    assert len(pairs["sums"]) >= 8 and len(pairs["sums_eval"]) >= 2
    assert not pairs["sums"] & pairs["sums_eval"]


@pytest.mark.parametrize("kind", ["rl", "sl"])
def test_the_first_commands_train(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(kind, tmp_path / "run", monkeypatch, "run.steps=2")
    assert len(list(read_records(run / "metrics.jsonl"))) == 2
    assert json.loads((run / "result.json").read_text())["eval/reward"] >= 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rl", "sl"])
def test_what_the_first_commands_train_has_learned(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: Learned
) -> None:
    """Chance is 1/261 before anything is learned, 1/7 for somebody who knows only the answers."""
    run = train(kind, tmp_path / "run", monkeypatch, f"run.seed={SEED}")
    result = json.loads((run / "result.json").read_text())
    if kind == "rl":
        learned("reward/part/right", result["reward/part/right"], at_least=0.5, floor=1 / 7)
    else:
        learned("update/nll", result["update/nll"], at_most=0.2)
