"""The experiments on SmolLM2: settings that `oxrl plan` takes, parts that share no question, a page
that says what its records say.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.checkpoint.model_files import save_model
from oxrl.cli import app
from oxrl.models.load import load_policy, load_tokenizer
from oxrl_envs.calculator import calculator
from support.checks_here import examine_here
from support.command_line import oxrl

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "smollm2"
DATA = Path(os.environ.get("OXRL_TEST_DATA", ROOT.parent / "shared" / "data"))
MODULES = ("problems", "families", "page")
sys.path.insert(0, str(FOLDER))
try:
    PROBLEMS, FAMILIES, PAGE = (
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name) for name in MODULES
    )
    CALLS: dict[str, Any] = runpy.run_path(str(FOLDER / "calls.py"), run_name="calls")
finally:
    sys.path.pop(0)
    for name in (*MODULES, "demo"):  # other experiments have modules of these names
        sys.modules.pop(name, None)
needs_data = pytest.mark.skipif(
    not (DATA / "svamp").is_dir(), reason=f"no SVAMP in {DATA}: set OXRL_TEST_DATA"
)


def asked(row: dict[str, Any]) -> str:
    """What makes a row the same as another: of a conversation its first message."""
    return row["prompt"] if "prompt" in row else row["messages"][0]["content"]


def test_arithmetic_holds_out_questions_in_either_order() -> None:
    split = PROBLEMS["arithmetic"]()
    assert (len(split.train), len(split.held_out)) == (300, 64)

    def key(row: dict[str, Any]) -> tuple[str, frozenset[str]]:
        _, _, first, word, second, *_ = row["prompt"].replace("?", " ").split()
        return word, frozenset((first, second))

    assert not {key(row) for row in split.train} & {key(row) for row in split.held_out}
    assert len({key(row) for row in split.held_out}) == 64
    signs = {"plus": "+", "minus": "-", "times": "*"}
    for row in (*split.train, *split.held_out):
        _, _, first, word, second, *_ = row["prompt"].replace("?", " ").split()
        assert calculator(f"{first}{signs[word]}{second}") == row["answer"]
        assert int(row["answer"]) >= 0


@pytest.mark.parametrize("seed", [0, 7])
def test_demonstrations_of_calls_end_in_the_right_answer(seed: int) -> None:
    split = PROBLEMS["calls"]()
    assert not {asked(row) for row in split.train} & {asked(row) for row in split.held_out}
    for row in (*split.train[:40], *split.held_out[:40]):
        environment = CALLS["Calculator"]()
        prompt = SimpleNamespace(answer=row["answer"], messages=row["messages"][:1])
        assert environment.reset(prompt, seed) == row["messages"][:1]
        first, told, second, result, answer = (said["content"] for said in row["messages"][1:])
        assert environment.step(first).messages == [{"role": "user", "content": told}]
        assert environment.step(second).messages == [{"role": "user", "content": result}]
        last = environment.step(answer)
        assert last.terminated and last.reward == 1.0
        broken = CALLS["Broken"]()
        broken.reset(prompt, seed)
        said = broken.step(first).messages[0]["content"]
        assert len(said) == len(told)


@needs_data
@pytest.mark.parametrize(("name", "least"), [("svamp", 700), ("ifeval", 100), ("chats", 200)])
def test_held_out_rows_of_published_data_are_not_trained_on(name: str, least: int) -> None:
    split = PROBLEMS[name](DATA)
    assert len(split.train) >= least and len(split.held_out) >= 15
    assert not {asked(row) for row in split.train} & {asked(row) for row in split.held_out}


def test_the_most_frequent_answer_is_counted_on_the_held_out_rows() -> None:
    train = [{"answer": "3"}, {"answer": "3"}, {"answer": "4"}]
    split = PROBLEMS["Split"](train, [{"answer": "4"}, {"answer": "3"}, {"answer": "3"}])
    assert split.most_frequent() == 2 / 3


def run(tmp_path: Path, *given: str) -> list[dict[str, Any]]:
    """What the script records of a builtin model."""
    words = [*given, "--out", tmp_path / "out", "--work", tmp_path / "work", "--threads", 1]
    done = oxrl(*words, folder=ROOT, script=FOLDER / "run.py", seconds=280)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "out").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def test_every_family_is_missing_at_first_and_the_untrained_model_once(tmp_path: Path) -> None:
    done = oxrl("--list", "--out", tmp_path, folder=ROOT, script=FOLDER / "run.py")
    assert done.returncode == 0
    listed = done.stdout.split("\n")
    assert {f"arithmetic {seed}" for seed in range(3)} <= {*listed}
    assert "arithmetic-before 0" in listed and "arithmetic-before 1" not in listed
    assert len(listed) - 1 == 3 * 9 + 4
    assert listed.index("ifeval 0") < listed.index("arithmetic 1") < listed.index("arithmetic 2")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("model")
    save_model(load_policy("builtin:small"), folder)
    load_tokenizer("builtin:small").save_pretrained(folder)
    return folder


# The control has the settings of what it controls.
@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES["TRAINED"].items() if not family.permuted]
)
def test_plan_accepts_the_settings_of_every_family(
    name: str, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small model that is made here: adapters want one on disk."""
    family = FAMILIES["FAMILIES"][name]
    rows = {
        "rl": {
            "prompt": "1?",
            "answer": {"instructions": ["punctuation:no_comma"], "kwargs": [{}]},
        },
        "sft": {"prompt": "1?", "completion": "2"},
        "dpo": {"prompt": "1?", "chosen": "2", "rejected": "3"},
    }
    if family.task != "ifeval":
        rows["rl"]["answer"] = "2"
    sections = FAMILIES["sections_of"](family)
    sections["run"] = {"name": "planned", "steps": family.steps, "eval_every": 10}
    sections["model"] = {**sections.get("model", {}), "name": str(small)}
    if "environment" in sections:
        assert Path(sections["environment"]["name"].rpartition(":")[0]).is_file()
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(rows[family.kind]) + "\n", encoding="utf-8")
    sections["data"] = {**sections["data"], "train": str(file), "eval": str(file)}
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML, too
    command = importlib.import_module("oxrl.cli.plan")
    monkeypatch.setattr(command, "examine_apart", examine_here)
    shown = CliRunner().invoke(app, ["plan", str(config)])
    assert shown.exit_code == 0, shown.output


def test_the_page_says_what_the_records_say() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    kept = PAGE["read"](FOLDER / "results")
    assert readme == PAGE["page"](readme, kept), "run experiments/smollm2/page.py"


def test_the_pages_say_what_the_demonstration_recorded() -> None:
    """README the shares of right answers, the page of the experiment their intervals too."""
    record = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))
    front, page = (
        " ".join((folder / "README.md").read_text(encoding="utf-8").split())
        for folder in (ROOT, FOLDER)
    )
    for asked in (record["before"], record["after"]):
        right = f"{100 * asked['right']:.0f} %"
        low, high = (f"{100 * end:.0f}" for end in asked["interval"])
        assert right in front and f"{right} [{low}, {high}]" in page
    assert len(record["curve"]) == record["held_out_curve"][-1][0] == 24
    assert record["after"]["interval"][0] > record["before"]["interval"][1]


def made_records() -> dict[tuple[str, int], dict[str, Any]]:
    """Two runs of reinforcement and the untrained model's answers."""
    shared = {
        "task": "arithmetic",
        "date": "2026-01-02",
        "machine": {"processor": "P", "cores": 2, "packages": {"torch": "t"}},
        "busy": {"before": 5.2, "after": 7.9},
        "peak_gb": 5.04,
        "steps": 10,
    }
    untrained = {"samples": 8, "right": [0, 0, 4, 0] * 2, "shown": [["7?", "I *think*\nso", 0.0]]}
    learned = {"samples": 8, "right": [8, 0, 8, 0] * 2, "shown": [["7?", "8", 1.0]]}
    curve = [[step, 0.1 * step] for step in range(10)]
    before = {"family": "arithmetic-before", "seed": 0, "kind": "before", "before": untrained}
    told = {"family": "arithmetic", "kind": "rl", "curve": curve, "after": learned}
    found = {("arithmetic-before", 0): shared | before}
    for seed, processor in ((1, None), (0, 123.0)):
        seconds = {"clock": 200.0, "processor": processor}
        found["arithmetic", seed] = shared | told | {"seed": seed, "seconds": seconds}
    return found


def test_a_row_of_the_page_has_the_change_its_interval_and_what_it_cost() -> None:
    records = made_records()
    table = PAGE["reinforcement"](records)
    assert table[2] == (
        "| arithmetic | 0 | 12.5 [2.8, 41.3] | 50.0 [17.9, 82.1] | +37.5 [+12.5, +68.8] "
        "| 25.0 [5.7, 64.9] | 50.0 [17.9, 82.1] | 8 | 0.20 to 0.70 "
        "| 20.0 (busy: load 5 to 8) | 12.3 | 5.0 |"
    )
    assert "| – | 5.0 |" in table[3]
    assert {line.count("|") for line in table} == {13}
    assert PAGE["answers"](records)[2] == "| 7? | I \\*think\\* so (wrong) | 8 (right) |"
    absent = PAGE["missing"](records)[0]
    assert "arithmetic (2)" in absent and "sft (0, 1, 2)" in absent
    assert "arithmetic-before" not in absent


def test_without_records_the_page_says_that_everything_is_missing() -> None:
    text = PAGE["body"]({})
    assert all(name in text for name in FAMILIES["FAMILIES"])
    assert "curves.svg" not in text


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["arithmetic", "arithmetic-permuted", "arithmetic-lora", "dpo"])
def test_a_family_leaves_a_record(name: str, tmp_path: Path, small: Path) -> None:
    given = ["--model", str(small), "--families", name, "--seeds", "5"]
    (record,) = run(tmp_path, *given, "--steps", "2", "--rows", "4")
    assert (record["family"], record["seed"], record["steps"]) == (name, 5, 2)
    assert len(record["after"]["right"]) == 4 and len(record["curve"]) == 2
    assert not (tmp_path / "work" / f"{name}-5").exists()


@pytest.mark.full
@needs_data
@pytest.mark.timeout(900)
def test_imitation_leaves_a_record(tmp_path: Path, small: Path) -> None:
    given = ["--model", str(small), "--data", str(DATA), "--families", "sft", "--seeds", "5"]
    (record,) = run(tmp_path, *given, "--steps", "2", "--rows", "60")
    assert [step for step, _ in record["curve"]] == [1, 2]
    assert [step for step, _ in record["held_out_curve"]] == [0, 2]
    assert record["after"]["loss"] < record["before"]["loss"]
