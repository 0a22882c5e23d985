"""Everything of a field stands in its line: one that is added there shows wherever fields do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BEFORE = "    deadline_s: float = setting(\n"
LINE = """    naps: int = setting(
        7,
        "Naps of a run, which are short.",
        ge=0,
        le=9,
        why="nobody sleeps more",
        of=OFFLINE,
        when=evaluates,
        resume="reorders",
        aka=Aka("siestas", note="in winter too"),
    )
"""
CONFIG = """\
run: {name: x, steps: 2}
model: {name: "builtin:tiny"}
data: {train: rows.jsonl, eval: rows.jsonl}
train: {alg_name: sft}
"""
# What is said of the field, as JSON.
SAYS = """
import json, sys
from pathlib import Path
from oxrl.config import config_schema, dump_config, load_config
from oxrl.config.reads import resume_rules
from oxrl.errors import ConfigError
from oxrl.plan.plan import plan_text
sys.path.append(sys.argv[1])
from make_config_reference import reference

def said(*overrides, file="run.yaml"):
    try:
        cfg = load_config(file, overrides)
    except ConfigError as error:
        return str(error)
    return dump_config(cfg) + plan_text(cfg)

print(json.dumps({
    "schema": config_schema()["$defs"]["RunConfig"]["properties"].get("naps"),
    "reference": [line for line in reference().splitlines() if "`naps`" in line],
    "rule": resume_rules().get("run.naps"),
    "default": said(),
    "set": said("run.naps=3"),
    "too many": said("run.naps=10"),
    "not evaluated": said("run.naps=3", file="plain.yaml"),
    "evaluated no more": said("data.eval=null", "run.naps=3"),
    "of another recipe": said("train.alg_name=sgrpo", "reward.name=exact", "run.naps=3"),
    "of another library": said("siestas=3"),
}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What a copy of oxRL with one line more says."""
    folder = tmp_path_factory.mktemp("declared")
    shutil.copytree(ROOT / "oxrl", folder / "oxrl", ignore=shutil.ignore_patterns("__pycache__"))
    section = folder / "oxrl" / "config" / "sections" / "run.py"
    text = section.read_text()
    assert text.count(BEFORE) == 1
    section.write_text(text.replace(BEFORE, LINE + BEFORE))
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "plain.yaml").write_text(CONFIG.replace(", eval: rows.jsonl", ""))
    (folder / "rows.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n' * 4)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAYS, str(ROOT / "docs")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_field_is_in_the_schema_and_on_the_reference_page(said: Mapping[str, Any]) -> None:
    assert said["schema"] == {
        "default": 7,
        "description": "Naps of a run, which are short.",
        "maximum": 9,
        "minimum": 0,
        "recipes": ["supervised", "rejection", "preference", "reward_model"],
        "title": "Naps",
        "type": "integer",
        "why": "nobody sleeps more",
    }
    assert said["reference"] == ["| `naps` | integer | 7 | Naps of a run, which are short. |"]


def test_a_field_is_in_the_resolved_configuration_of_a_run_that_is_planned(
    said: Mapping[str, Any],
) -> None:
    assert "\n  naps: 7\n" in said["default"] and "\n  naps: 3\n" in said["set"]
    assert "\nmicro-batch " in said["set"]  # the plan of that run


def test_a_field_is_held_to_its_bounds_and_to_when_it_has_a_meaning(
    said: Mapping[str, Any],
) -> None:
    assert "run.naps = 10\n    must be less than or equal to 9, because nobody" in said["too many"]
    assert "run.naps = 3\n    has no effect without data.eval" in said["not evaluated"]
    assert "naps" not in said["evaluated no more"]
    reason = "run.naps = 3\n    is read by supervised and preference algorithms; sgrpo is"
    assert reason in said["of another recipe"]


def test_a_field_says_what_becomes_of_a_run_that_is_resumed_with_another_value(
    said: Mapping[str, Any],
) -> None:
    assert said["rule"] == "reorders"


def test_a_field_answers_to_its_names_in_other_libraries(said: Mapping[str, Any]) -> None:
    meant = "siestas\n    unknown section; that is run.naps here: in winter too"
    assert meant in said["of another library"]
