"""Every block of code in the documentation is executed, or stands here with the reason why not.

Python is run, YAML is loaded as the part of a configuration that it is, JSON is parsed, commands are
typed. Blocks of the same page share what they define and the folder that they run in.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import pytest
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.config.schema import FIELDS
from support.small_runs import rl_config, write_inputs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("experiments/**/*.md"),
        ROOT / "one_page" / "README.md",
    ]
)
COMMANDS = ("oxrl ", "make ", "pip ", "python", "torchrun ", ".venv/", "hf ", "MUJOCO_GL=")
# Pages whose blocks a test of their own executes, in their order.
ELSEWHERE = {
    "docs/tutorial.md": "tests/repository/test_tutorial.py",
    "docs/python.md": "tests/test_python_api.py",
    "docs/evaluation.md": "tests/repository/test_evaluation_page.py",
    "docs/algorithms.md": "generated; tests/repository/test_docs.py and `oxrl algorithms --check`",
}
# (page, how a block begins) -> why it is not executed.
NOT_EXECUTED = {
    ("README.md", "prompts ──>"): "a picture",
    ("README.md", "runs/gsm8k/"): "a listing",
    ("README.md", "oxrl/tables/"): "a listing",
    ("README.md", "@software"): "a citation",
    ("README.md", "make quickstart"): "make: targets are compared in tests/repository/test_docs.py",
    ("README.md", "pip install"): "tests/cli/test_first_commands.py runs it",
    ("README.md", "python3 -m venv"): "makes an environment",
    ("README.md", "torchrun"): "several ranks: tests/engines/test_ranks.py",
    ("CONTRIBUTING.md", "make env"): "make: targets are compared in tests/repository/test_docs.py",
    ("docs/action.md", "oxrl prepare lerobot"): "needs a dataset: tests/data",
    (
        "docs/action.md",
        "python experiments/simulators/replay.py",
    ): "needs a dataset: tests/data/test_actions.py",
    ("docs/action.md", "action: {size: 2, chunk: 8, code: fast"): "tests/data/test_fast.py",
    ("docs/code.md", "flowchart"): "a picture",
    ("docs/environments.md", "# my_agent.py"): "needs openai: tests/packages/test_agent_run.py",
    ("docs/exact.md", "checkpoints/step"): "a message: tests/models/test_exact_contract.py",
    ("docs/howto.md", "oxrl prepare gguf"): "needs a file: tests/packages/test_gguf.py",
    ("docs/howto.md", "oxrl train config.yaml inference_engine.processes=2"): (
        "tests/engines/test_sampling_processes.py"
    ),
    ("docs/howto.md", "oxrl train config.yaml inference_engine.name=vllm"): (
        "needs vLLM: tests/engines/test_vllm_host_process.py"
    ),
    ("docs/howto.md", "torchrun"): "several ranks: tests/engines/test_ranks.py",
    ("docs/sampling_ahead.md", "oxrl train"): "tests/engines/test_sampling_processes.py runs such",
    ("docs/preference.md", "oxrl prepare judged"): "needs a server: tests/rewards",
    ("docs/run_directory.md", '{"step": 1'): "shortened",
    (
        "docs/run_directory.md",
        '{"weights": 4',
    ): "with words beside: tests/rollouts/test_schedule.py",
    ("docs/run_directory.md", "reference: none"): "a picture: tests/runs/test_console.py",
    ("docs/vision.md", "oxrl prepare visual"): "needs NLVR: tests/data",
    ("docs/rewards.md", "oxrl score"): "a run of parts: tests/packages/test_score.py",
    ("docs/extend.md", "train:"): "tests/usercode/test_extension.py runs it",
    ("docs/extend.md", "[project.entry-points"): "tests/test_plug_ins.py offers all of it",
    ("docs/reading_path.md", "recipes/rl.py"): "a list of files: tests/repository/test_house.py",
    ("docs/report.md", "oxrl report runs/my-run "): "a server: tests/report/test_report.py",
    (
        "docs/run_directory.md",
        "oxrl replay runs/my-run --schedule",
    ): "needs a run with a free schedule: tests/commands/test_replay_schedule.py",
    (
        "docs/run_directory.md",
        "oxrl train config.yaml train.lr",
    ): "tests/assembly/test_changed_inputs.py",
    ("one_page/README.md", "oxrl train"): "needs its data: tests/repository/test_one_page.py",
    ("experiments/gsm8k_qwen2.5_0.5b/README.md", "pip install"): "a model that is not here",
    ("experiments/gsm8k_qwen2.5_0.5b/README.md", "oxrl prepare"): "a model that is not here",
    ("experiments/gsm8k_qwen2.5_0.5b/README.md", "oxrl train"): "needs the dataset",
    ("experiments/gsm8k_scale/README.md", "oxrl prepare"): "eight GPUs",
    ("experiments/gsm8k_scale/README.md", "oxrl train"): "eight GPUs",
    ("experiments/libero/README.md", "make env-libero"): "tests/packages/test_libero.py runs it",
    ("experiments/preference_gsm8k/README.md", "python"): "half an hour",
    ("experiments/raster_world/README.md", "python"): "half an hour",
    ("experiments/simulators/README.md", "pip"): "needs simulators",
    ("experiments/visual_questions/README.md", "python"): "half an hour",
}
# Lines of these are ways to call a command, not steps of one work.
ALTERNATIVES = {("README.md", "oxrl plan")}
# What the parts of configurations on the pages name.
FILES = {
    "answers.jsonl": '{"prompt": "1+1=", "completion": "2"}\n',
    "guess.py": "class Guess:\n    def reset(self, prompt, seed): ...\n    def step(self, text): ...\n",
    "my_libero.py": "class Libero:\n    def reset(self, prompt, seed): ...\n    def step(self, text): ...\n",
    "shop.py": "def price(what: str) -> int:\n    '''What a thing costs.'''\n    return 1\n",
    "rivals.py": "def move(observation): return '[0]'\n",
    "my_rewards.py": "def format(prompt, completion): return 1.0\ndef stricter(prompt, completion): return 0.5\n",
    "my_judge.py": "def score(prompt, completion): return 1.0\n",
    "my_gate.py": "def tanh_gate(*tensors, correction=None, reach): ...\n",
    "hint.jinja": "The answer is {{ answer }}. {{ prompt }}",
    "passages.jsonl": '{"text": "one"}\n',
}


class Block(NamedTuple):
    """A block of a page; `kind` is its language, "command" or "text"."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        """How NOT_EXECUTED names it, whether or not it does."""
        for page, start in (*NOT_EXECUTED, *ALTERNATIVES):
            if page == self.page and self.text.startswith(start):
                return page, start
        return self.page, self.text.split("\n")[0]


def blocks_of(page: Path) -> Iterator[Block]:
    name = page.relative_to(ROOT).as_posix()
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for match in fenced.finditer(text):
        yield Block(name, text.count("\n", 0, match.start()) + 1, match[1], match[2])
    # Lines are kept, so that the numbers below are those of the page.
    plain = fenced.sub(lambda match: re.sub(r"[^\n]", "#", match[0]), text)
    for match in re.finditer(r"(?:\A|\n\n)((?: {4}[^\n]*(?:\n|\Z)|\n(?= {4}))+)", plain):
        lines = [line[4:] for line in match[1].strip("\n").split("\n")]
        kind = "command" if lines[0].startswith(COMMANDS) else "text"
        yield Block(name, text.count("\n", 0, match.start()) + 1, kind, "\n".join(lines))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
OPEN = [block for block in BLOCKS if block.page not in ELSEWHERE]
EXECUTED = [block for block in OPEN if block.key not in NOT_EXECUTED]


def of_kind(*kinds: str) -> Any:
    found = [block for block in EXECUTED if block.kind in kinds]
    names = [f"{block.page}:{block.line}" for block in found]
    return pytest.mark.parametrize("block", found, ids=names)


def test_every_block_is_executed_or_has_its_reason() -> None:
    counts = dict.fromkeys(("python", "yaml", "json", "command"), 0)
    for block in EXECUTED:
        assert block.kind in counts, f"{block.page}:{block.line} has no reason in NOT_EXECUTED"
        counts[block.kind] += 1
    reasons = {block.key for block in OPEN} & {*NOT_EXECUTED}
    assert reasons == {*NOT_EXECUTED}, "reasons that no block has"
    assert {*ELSEWHERE} <= {block.page for block in BLOCKS}
    sys.stdout.write(
        f"{len(BLOCKS)} blocks, executed here {counts}, {len(reasons)} with a reason\n"
    )


@pytest.mark.parametrize("page", sorted({b.page for b in EXECUTED if b.kind == "python"}))
def test_python_runs(page: str, my_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(my_run)
    names: dict[str, Any] = {"__name__": "page"}
    for block in EXECUTED:
        if block.page == page and block.kind == "python":
            where = f"{block.page}:{block.line}"
            exec(compile(block.text, where, "exec"), names)


@of_kind("json")
def test_json_is_json(block: Block) -> None:
    for line in block.text.strip().splitlines():
        json.loads(line)


@of_kind("yaml")
def test_yaml_is_a_part_of_a_configuration(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, dict[str, Any]] = yaml.safe_load(block.text)
    write_inputs(tmp_path)
    algorithm = "sft" if "keep_best" in given.get("run", {}) else "sgrpo"
    whole: dict[str, dict[str, Any]] = {
        "run": {"name": "page", "steps": 4},
        "model": {"name": "builtin:tiny"},
        "data": {"train": "prompts.jsonl"},
        "train": {"alg_name": algorithm},
    }
    sampled = given.get("train", {}).get("alg_name", "sgrpo") not in ("sft", "dpo")
    earns = "environment" in given or not sampled
    if not earns and "reward" not in given:
        whole["reward"] = {"name": "math"}
    for section, fields in given.items():
        whole[section] = whole.get(section, {}) | fields
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    train = whole["data"]["train"]
    # A name on the hub, and models of other machines, are looked for when a run begins.
    if str(train).startswith("hf://"):
        whole["data"]["train"] = "prompts.jsonl"
    for name in (whole["data"]["train"], whole["data"].get("eval")):
        if name is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    reward = str(whole.get("reward", {}).get("name", ""))
    if reward.startswith("runs/"):
        (tmp_path / reward).mkdir(parents=True)
        (tmp_path / reward / "value_head.safetensors").touch()
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(whole))
    monkeypatch.chdir(tmp_path)
    cfg = load_config("page.yaml", [])
    assert cfg.run.steps


@pytest.fixture(scope="module")
def my_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages speak of: config.yaml, a run in runs/my-run, files of one's own."""
    folder = tmp_path_factory.mktemp("pages")
    sizes = {"rollout": {"max_tokens": 4, "n_samples": 4}, "data": {"prompts_per_step": 1}}
    once = {"name": "first", "dir": None, "steps": 12, "checkpoint_every": 6}
    data = {"train": str(folder / "prompts.jsonl"), **sizes["data"]}
    cfg = rl_config(folder, "config", run=once, rollout=sizes["rollout"], data=data)
    (folder / "runs").mkdir()
    directory = str(folder / "runs" / "my-run")
    run(cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": directory})}))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    rows = [{"question": f"{n}+1=", "meta": {"gold": str(n + 1)}} for n in range(20)]
    pandas.DataFrame(rows).to_parquet(folder / "raw.parquet")
    return folder


def lines_of(block: Block) -> list[list[str]]:
    """The words of every command of a block; what stands behind # is for readers."""
    text = block.text.replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@of_kind("command")
@pytest.mark.full
def test_commands_do_what_is_said(
    block: Block, my_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "page"
    shutil.copytree(my_run, folder)
    shutil.copytree(folder / "runs/my-run", folder / "runs/gsm8k")
    for words in lines_of(block):
        monkeypatch.chdir(folder)
        assert words[0] == "oxrl", words
        done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert done.exit_code == 0, f"{words}: {done.output}"
        if block.key in ALTERNATIVES:
            shutil.rmtree(folder / "runs/first", ignore_errors=True)


@cache
def options(command: str) -> set[str]:
    """Every option of a command, of the core or of a package."""
    told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0, told.output
    return set(re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", told.output))


@pytest.mark.parametrize("page", sorted({b.page for b in OPEN if b.kind == "command"}))
def test_commands_have_options_and_fields_that_exist(page: str) -> None:
    """Of all commands, also those that are not executed."""
    for block in BLOCKS:
        if block.page != page or block.kind != "command":
            continue
        for words in lines_of(block):
            if words[:1] != ["oxrl"] or words[1] == "config":
                continue
            for word in words[2:]:
                field, equals, _ = word.partition("=")
                if word.startswith("--"):
                    assert field in options(words[1]) | {"--help"}, f"{page}: {' '.join(words)}"
                elif equals and words[1] in ("train", "plan", "eval"):
                    known = field in FIELDS or field.startswith(("reward.", "environment."))
                    assert known, f"{page}: {' '.join(words)}"


def test_commands_of_make_and_scripts_name_files_that_exist() -> None:
    for block in BLOCKS:
        for words in lines_of(block) if block.kind == "command" else []:
            for word in words:
                if word.endswith(".py") and "/" in word or word.endswith(".yaml") and "/" in word:
                    assert (ROOT / word).is_file(), f"{block.page}: {' '.join(words)}"
    tracked = subprocess.run(
        ["git", "ls-files", "req.txt"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert tracked.returncode or tracked.stdout
