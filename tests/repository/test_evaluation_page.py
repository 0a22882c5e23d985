"""docs/evaluation.md, typed as a reader would: what it prints is what comes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.train import run
from support.known_weights import model_that_adds
from support.small_runs import rl_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
# A command, and what it prints.
TYPED = re.compile(r"(?m)^ {4}(oxrl .+)\n(?:\n```text\n((?:.*\n)*?)```)?")
# A row of the table of common noise.
NOISE = re.compile(r"(?m)^\| \d \| (?:step 50|warm start), step .*$")
# Where lines are left out.
REST = "..."
NEAR = '''def near(prompt, completion):
    """1 for a number that is off by 3 at most."""
    said = completion.strip()
    return float(said.isdigit() and abs(int(said) - int(prompt.answer)) <= 3)
'''
# How certain the models of the page are, as a factor on their logits.
CERTAIN = {"before": 0.8, "trained": 1.6, "permuted": 0.79}
TRAINED_ON = {
    "13+2=": 15,
    "What is 3+4= ?": 7,
    "1+13=": 14,
    "2+11=": 13,
    "12+9=": 21,
    "3+10=": 13,
    "4+12=": 16,
    "2+15=": 17,
}


def write_model(folder: Path, certain: float) -> Path:
    """A model that answers sums, more or less certain of what it says."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_that_adds(folder))
    with torch.no_grad():
        model.model.norm.weight.mul_(certain)
    model.save_pretrained(folder)
    return folder


def write_runs() -> None:
    """What the page speaks of: held-out sums, a reward, and three runs, which learn nothing."""
    sums = (ROOT / "one_page" / "sums.jsonl").read_text().splitlines()
    asked = [{name: json.loads(line)[name] for name in ("prompt", "answer")} for line in sums]
    given = [{"prompt": text, "answer": str(answer)} for text, answer in TRAINED_ON.items()]
    rows = {"held_out": asked, "train": given}
    for name, content in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        Path(f"{name}.jsonl").write_text(text)
    Path("near.py").write_text(NEAR)
    for name, certain in CERTAIN.items():
        cfg = rl_config(
            Path(),
            name,
            run={"name": name, "dir": f"runs/{name}", "steps": 1},
            model={"name": str(write_model(Path(f"models/{name}"), certain))},
            data={"train": "train.jsonl", "eval": "held_out.jsonl", "prompts_per_step": 8},
            reward={"name": "near.py:near"},
            rollout={"n_samples": 8, "max_tokens": 6, "eval_samples": 4},
            train={"lr": 1e-12},
        )
        run(cfg)


def in_order(lines: list[str], printed: list[str]) -> list[str]:
    """The lines of the page that were not printed, or not in this order."""
    left = iter(printed)
    return [line for line in lines if line != REST and line not in left]


def test_a_reader_sees_what_the_page_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs()
    typed = TYPED.findall(PAGE)
    assert len(typed) == PAGE.count("\n    oxrl ") >= 9
    assert sum(bool(shown) for _, shown in typed) == PAGE.count("```text")
    for command, shown in typed:
        done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"
        missing = in_order(shown.splitlines(), done.output.splitlines())
        assert missing == [], f"{command}\n{done.output}"


def test_the_table_of_common_noise_is_that_of_its_experiment() -> None:
    experiment = (ROOT / "experiments" / "quickstart" / "README.md").read_text(encoding="utf-8")
    tables = [re.findall(NOISE, page) for page in (PAGE, experiment)]
    assert tables[0] == tables[1] and len(tables[0]) == 9


def test_lines_that_are_not_printed_are_noticed() -> None:
    assert in_order(["a", REST, "c"], ["a", "b", "c"]) == []
    assert in_order(["c", "a"], ["a", "b", "c"]) == ["a"]
