"""Whatever is typed, damaged or missing: an error of ours with the documented exit code, never a
traceback.

Every case is a function of its seed; a failure names it. `OXRL_FUZZ_SEED` moves all of them.
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from oxrl.commands.evaluate import evaluation_config
from oxrl.commands.train import run
from oxrl.config import Config, check_config, dump_config, load_config
from oxrl.config.load_evaluation import load_evaluation_config
from oxrl.config.schema import FIELDS
from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import Dataset, ReadOptions
from oxrl.data.preferences import PreferenceDataset
from oxrl.data.prompts import PromptDataset
from oxrl.data.steps import StepDataset
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.plan.plan import plan_text
from oxrl.recipes.features.base import FeatureInputs, Planned
from oxrl.recipes.features.own_feature import OwnFeature, tried_features
from oxrl.rewards.dry_call import dry_call
from oxrl.rewards.loaded import find_reward
from oxrl.tables.policy import ROWS
from oxrl.types import Completion, Prompt
from support.command_line import oxrl
from support.damage import SYNTAX, VALUES, bytes_changed, file_changed, nested
from support.fuzzing import BASES, FIRST, TOKENIZER, Values, check, chunks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    (tmp_path / "file.py").write_text("def function(prompt, completion): return 1.0\n")
    return tmp_path


def values_changed(choose: random.Random) -> Values:
    """A configuration with some fields of any section set to anything."""
    values: Values = json.loads(json.dumps(choose.choice(BASES)))
    if choose.random() < 0.5:
        values["train"]["alg_name"] = choose.choice(sorted(ROWS))
    for _ in range(choose.randrange(1, 5)):
        section, _, name = choose.choice([*FIELDS]).partition(".")
        values.setdefault(section, {})[name] = choose.choice(VALUES)
    if choose.random() < 0.1:
        values["train"]["features"] = dict([feature_changed(choose)])
    if choose.random() < 0.2:
        values[choose.choice((*values, "trian", ""))] = choose.choice(VALUES)
    return values


def try_configuration(choose: random.Random) -> None:
    text = json.dumps(values_changed(choose), ensure_ascii=False)
    if choose.random() < 0.2:
        at = choose.randrange(len(text))
        text = text[:at] + choose.choice(SYNTAX) + text[at:]
    data = text.encode("utf-8", "replace")
    if choose.random() < 0.1:
        data = bytes_changed(choose, data)
    Path("run.yaml").write_bytes(data)
    overrides: list[str] = []
    for _ in range(choose.randrange(3)):
        path = choose.choice((*FIELDS, "learning_rate", "train", "~data.eval", "", "a.b.c", "="))
        value = choose.choice((*VALUES, *SYNTAX))
        overrides.append(f"{path}={value}" if choose.random() < 0.9 else path)
    load = load_config if choose.random() < 0.8 else load_evaluation_config
    cfg = load("run.yaml", overrides)
    if load is load_config:
        plan_text(cfg)
        Path("again.yaml").write_text(dump_config(cfg), encoding="utf-8")
        assert dump_config(load_config("again.yaml")) == dump_config(cfg)


@pytest.mark.parametrize("seeds", chunks(1200, 150), ids=str)
def test_any_configuration_is_read_or_refused(folder: Path, seeds: range) -> None:
    check(try_configuration, seeds, 2)


def try_python_configuration(choose: random.Random) -> None:
    """Fields are checked by pydantic, as Python users know it; what is across, by the door."""
    try:
        cfg = Config.model_validate(values_changed(choose))
    except ValueError:
        return
    check_config(cfg)


@pytest.mark.parametrize("seeds", chunks(300, 150), ids=str)
def test_any_configuration_from_python_is_taken_or_refused(folder: Path, seeds: range) -> None:
    check(try_python_configuration, seeds, 2)


ROWS_OF: tuple[tuple[type[Dataset[Any]], dict[str, Any]], ...] = (
    (PromptDataset, {"prompt": "1+1?", "answer": "2", "uid": "u", "source": "s"}),
    (PromptDataset, {"prompt": [{"role": "user", "content": "1+1?"}], "answer": {"a": [1]}}),
    (ConversationDataset, {"prompt": "1+1?", "completion": "2"}),
    (
        ConversationDataset,
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ),
    (PreferenceDataset, {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 1.0}),
    (PreferenceDataset, {"prompt": "1+1?", "completion": "2", "label": True}),
    (StepDataset, {"prompt": "1+1?", "steps": ["a", "b"], "labels": [1, 0]}),
)


def row_changed(choose: random.Random, row: dict[str, Any]) -> Any:
    """A row with a field gone, renamed or of any value."""
    changed = json.loads(json.dumps(row))
    for _ in range(choose.randrange(3)):
        name = choose.choice(sorted(changed) or ["prompt"])
        kind = choose.randrange(4)
        value = changed.pop(name, None)
        if kind == 0:
            changed[choose.choice(("question", "", "images", "tools", "conversations"))] = value
        elif kind > 1:
            changed[name] = nested(choose)
    return nested(choose) if choose.random() < 0.05 else changed


def try_rows(choose: random.Random) -> None:
    dataset, row = choose.choice(ROWS_OF)
    rows = [row_changed(choose, row) for _ in range(choose.randrange(1, 4))]
    text = "".join(json.dumps(item, ensure_ascii=choose.random() < 0.5) + "\n" for item in rows)
    data = text.encode("utf-8", "replace")
    if choose.random() < 0.2:
        data = bytes_changed(choose, data)
    file = Path(choose.choice(("rows.jsonl", "rows.jsonl", "rows.jsonl", "rows.parquet")))
    file.write_bytes(data)
    columns = {}
    if choose.random() < 0.1:
        columns = {choose.choice(sorted(row)): choose.choice(("question", "prompt", ""))}
    options = ReadOptions(
        max_tokens=choose.choice((None, None, 1, 20)),
        overlong=choose.choice(("drop", "error")),
        limit=choose.choice((None, 1)),
        stream=choose.random() < 0.2,
        unpaired=choose.random() < 0.3,
        columns=columns,
    )
    made = dataset.load(file, TOKENIZER, options)
    assert len(made.in_order()) > 0


@pytest.mark.parametrize("seeds", chunks(1200, 600), ids=str)
def test_any_rows_are_read_or_refused(folder: Path, seeds: range) -> None:
    check(try_rows, seeds, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder, small enough to be copied hundreds of times."""
    place = tmp_path_factory.mktemp("model") / "model"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=261, num_attention_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    TOKENIZER.save_pretrained(place)
    return place


def try_model(choose: random.Random, model: Path) -> None:
    place = Path("copy")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(model, place)
    for _ in range(choose.randrange(1, 3)):
        files = sorted(path for path in place.iterdir() if path.is_file())
        file_changed(choose, choose.choice(files))
    if choose.random() < 0.5:
        load_tokenizer(str(place))
    else:
        load_policy(str(place))


@pytest.mark.parametrize("seeds", chunks(200, 100), ids=str)
def test_any_model_folder_is_loaded_or_refused(folder: Path, model: Path, seeds: range) -> None:
    check(lambda choose: try_model(choose, model), seeds, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short supervised run with two checkpoints."""
    place = tmp_path_factory.mktemp("trained")
    (place / "sft.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n' * 4)
    run(Config.model_validate(sft_values(place, "run", steps=1)))
    return place


def sft_values(place: Path, name: str, *, steps: int) -> Values:
    return {
        "run": {
            "name": "f",
            "dir": str(place / name),
            "steps": steps,
            "mlflow": False,
            "threads": 1,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"train": str(place / "sft.jsonl"), "rows_per_step": 2},
        "train": {"alg_name": "sft"},
    }


def try_run(choose: random.Random, trained: Path, *, resumes: bool) -> None:
    place = trained / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(trained / "run", place)
    for _ in range(choose.randrange(1, 3)):
        files = sorted(path for path in place.rglob("*") if path.is_file())
        file_changed(choose, choose.choice(files))
    if resumes:
        run(Config.model_validate(sft_values(trained, "copy", steps=2)), resume=True)
    else:
        evaluation_config(place, [], ExitStack())


@pytest.mark.parametrize("seeds", chunks(100, 100), ids=str)
def test_any_run_directory_is_looked_at_or_refused(
    folder: Path, trained: Path, seeds: range
) -> None:
    check(lambda choose: try_run(choose, trained, resumes=False), seeds, 1, 2)


@pytest.mark.parametrize("seeds", chunks(32, 16), ids=str)
def test_any_run_directory_goes_on_or_is_refused(folder: Path, trained: Path, seeds: range) -> None:
    check(lambda choose: try_run(choose, trained, resumes=True), seeds, 1, 2)


PARAMETERS = (
    "prompt, completion",
    "prompt, completions",
    "completion",
    "prompts, completions, **kwargs",
    "data_source, solution_str, ground_truth, extra_info=None",
    "*args",
    "**kwargs",
    "prompt, completion, answer",
    "words",
    "",
    "prompt, completion, *, strict",
    "self, prompt, completion",
)
BODIES = (
    "return 1.0",
    "return None",
    "return 'good'",
    "return float('nan')",
    "return [1.0] * 2",
    "return {'score': 1.0}",
    "return {}",
    "raise ValueError('no')",
    "raise SystemExit(3)",
    "raise KeyboardInterrupt",
    "return undefined",
    "return 10 ** 400",
    "return object()",
    "yield 1.0",
    "return len(completion)",
    "return prompt.answer",
    "return (1.0, 2.0)",
    "return iter([1.0, 2.0])",
    "return True",
)
HEADS = (
    "",
    "import no_such_module",
    "1 / 0",
    "raise SystemExit",
    "def (",
    "\x00",
    "from oxrl.types import Score",
    "import sys; sys.argv[0] = ''",
    "score = 3",
)


def try_reward(choose: random.Random) -> None:
    kind = choose.choice(("def", "def", "def", "async def"))
    parameters = choose.choice(PARAMETERS)
    head = choose.choice((*HEADS, "", "", "", "", ""))
    file = Path("reward.py")
    body = choose.choice(BODIES)
    file.write_text(f"{head}\n{kind} score({parameters}):\n    {body}\n")
    name = choose.choice(("score", "score", "score", "score", "scor", "", "a b"))
    prompt = Prompt(uid="u", messages=(), token_ids=(1,), answer="2")
    completion = Completion(segments=(), text="2", finish_reason="stop")
    try:
        reward = find_reward(f"{file}:{name}")
        dry_call(reward)
        scores = reward(prompt, [completion] * 2)
    except (SystemExit, KeyboardInterrupt):
        return  # ends the process of a reward, which its pool expects
    assert len(scores) == 2


@pytest.mark.parametrize("seeds", chunks(400, 400), ids=str)
def test_any_reward_is_taken_or_refused(folder: Path, seeds: range) -> None:
    check(try_reward, seeds, 2)


COMMANDS = ("train", "plan", "config show", "eval", "generate", "export", "prepare", "algorithms")
WORDS = (
    "run.yaml",
    "train.jsonl",
    "nowhere",
    "builtin:tiny",
    "builtin:none",
    ".",
    "/",
    "",
    "--resume",
    "--out",
    "out",
    "--n",
    "-1",
    "--prompt",
    "train.lr=x",
    "a=b",
    "\udcff",
    "--dry-run",
    "--check",
    "gsm8k",
    "--samples",
    "1e9",
    "--help",
)


# What a run may name of oxRL's own, and numbers of it that are right.
FEATURES: dict[str, dict[str, Any]] = {
    "chord": {"rows": "train.jsonl", "peak": 0.5, "decay_steps": 9, "warmup_steps": 1},
    "echo": {"coeff": 0.1},
    "entropy-mask": {"quantile": 0.5},
    "held-out-grader": {"data": "train.jsonl", "grader": "exact", "every": 3, "pattern": "[0-9]"},
    "permuted-rewards": {},
}


def feature_changed(choose: random.Random) -> tuple[str, dict[str, Any]]:
    """A feature, and numbers of it, some of which are anything."""
    name = choose.choice([*FEATURES])
    numbers = dict(FEATURES[name])
    for _ in range(choose.randrange(4)):
        number = choose.choice([*numbers, "seed", "rows_per_step", "valley"])
        files = ("file.py", "train.jsonl", "odd.jsonl", "few.jsonl", "gone.jsonl", "\x00")
        numbers[number] = choose.choice((*VALUES, *files, "(", "[0-9"))
    return name, numbers


def try_features(choose: random.Random) -> None:
    """Made and planned, with files that are there and rewards that are found."""
    name, numbers = feature_changed(choose)

    def rows(path: str) -> Any:
        return ConversationDataset.load(path, TOKENIZER, ReadOptions())

    def prompts(path: str) -> int:
        return len(PromptDataset.load(path, TOKENIZER, ReadOptions()))

    def score(name: str, groups: object) -> Any:
        find_reward(name)
        return []

    engine: Any = None
    given = FeatureInputs(
        row=ROWS["sgrpo"],
        train=engine,
        max_tokens=4,
        models={"policy": engine},
        plays=choose.random() < 0.5,
        score=score,
        rows=rows,
    )
    planned = Planned(steps=20, updates=2, samples=2, given=given, prompts=prompts)
    tried_features({name: numbers}, planned)
    OwnFeature(name, given, numbers)


@pytest.mark.parametrize("seeds", chunks(400, 400), ids=str)
def test_any_numbers_of_features_are_taken_or_refused(folder: Path, seeds: range) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n' * 8)
    (folder / "few.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n')
    (folder / "odd.jsonl").write_text('{"question": "1+1?"}\n' * 8)
    check(try_features, seeds, 2)


@pytest.mark.parametrize("seed", range(24))
def test_any_command_line_ends_with_a_documented_exit_code(folder: Path, seed: int) -> None:
    choose = random.Random(FIRST + seed)
    broken = values_changed(choose)
    broken["run"] = "broken"  # so that no training begins
    (folder / "run.yaml").write_text(json.dumps(broken), encoding="utf-8")
    command = choose.choice(COMMANDS).split()
    words = [choose.choice(WORDS) for _ in range(choose.randrange(4))]
    result = oxrl(*command, *words, folder=folder)
    said = result.stdout + result.stderr
    assert result.returncode in (0, 2), f"{command} {words}: {said}"
    assert "Traceback" not in said
