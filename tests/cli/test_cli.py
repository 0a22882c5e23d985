"""The command line from outside: exit codes, messages, and no more than is needed before an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.tables.policy import ROWS
from support.checks_here import planned
from support.command_line import oxrl
from support.small_runs import rl_config

ROOT = Path(__file__).resolve().parents[2]
OXRL = Path(sys.executable).with_name("oxrl")
CONFIG = """\
run: {name: demo, steps: 2}
model: {name: "builtin:tiny"}
data: {train: train.jsonl, prompts_per_step: 4}
reward: {name: exact}
train: {alg_name: sgrpo}
rollout: {n_samples: 2, max_tokens: 8}
"""
MISTAKES = (
    CONFIG.replace("steps: 2", "stepps: 2")
    .replace("exact", "exakt")
    .replace("n_samples: 2", "n_samples: two")
)


def write_run(folder: Path) -> Path:
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def call(
    folder: Path, *command: str | Path, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )


# In place of the process in which `oxrl plan` has its checks made, which imports everything: one that
# finds everything in order.
CHECKS = """\
import sys
from oxrl.usercode.messages import Replies
Replies(int(sys.argv[1])).answer_all(lambda request: {"state": "ok", "text": "in order"})
"""
PLAN = (
    "import sys\nfrom oxrl.plan import preflight_process\n"
    "sys.path.append('.')\npreflight_process.__name__ = 'checks'\n"
)


# One process imports what all programs do, and is forked for each: its words go to a file.
EACH = """\
import os, sys
{first}
assert not {heavy!r} & set(sys.modules)
for name, program in {programs!r}.items():
    if os.fork() == 0:
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 1)
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def each_told(
    folder: Path, first: str, heavy: set[str], programs: dict[str, str]
) -> dict[str, list[str]]:
    """The lines that each of the programs prints, by name, after `first`, which imports nothing of
    what is heavy.
    """
    text = EACH.format(first=first, heavy=heavy, programs=programs)
    done = call(folder, sys.executable, "-c", text)
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text().splitlines() for name in programs}


# What is imported takes most of the second in which these answer: some 430 modules.
FEW_MODULES = 600
LIGHT = [
    ["--help"],
    ["train", "--help"],
    ["train", "run.yaml", "train.lr=fast"],
    ["plan", "run.yaml"],
    ["config", "show", "run.yaml"],
    ["config", "schema"],
    ["algorithms"],
]


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of these commands prints, and then which heavy libraries it has imported, and whether
    its modules are few.
    """
    heavy = {"torch", "transformers", "mlflow", "ray", "numpy", "pyarrow", "math_verify"}
    folder = write_run(tmp_path_factory.mktemp("light"))
    (folder / "checks.py").write_text(CHECKS)
    programs = {
        " ".join(arguments): (PLAN if arguments[0] == "plan" else "")
        + f"sys.argv = ['oxrl', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('packages', *[name for name in sys.modules if name.startswith('oxrl_')])\n"
        f"print('loaded', *({heavy!r} & set(sys.modules)), len(sys.modules) < {FEW_MODULES})"
        for arguments in LIGHT
    }
    return each_told(folder, "from oxrl.cli import main", heavy, programs)


@pytest.mark.parametrize("arguments", LIGHT)
def test_what_needs_no_model_loads_no_heavy_library(
    light: dict[str, list[str]], arguments: list[str]
) -> None:
    lines = light[" ".join(arguments)]
    assert lines[-1] == "loaded True"
    # Their commands are listed by what their files say; a plan asks those that plan.
    planners = {"oxrl_schedules", "oxrl_schedules.planner", "oxrl_schedules.simulator"}
    assert set(lines[-2].split()[1:]) <= (planners if arguments[0] == "plan" else set())
    assert arguments != ["--help"] or any(line.startswith("  compare ") for line in lines)
    assert arguments[0] != "plan" or "in order" in "\n".join(lines)


def test_three_mistakes_give_three_errors_and_exit_code_2(folder: Path) -> None:
    (folder / "bad.yaml").write_text(MISTAKES)
    result = call(folder, OXRL, "train", "bad.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    for line in (
        "3 problems in bad.yaml",
        "bad.yaml:1: run.stepps",
        "bad.yaml:4: reward.name",
        "bad.yaml:6: rollout.n_samples",
    ):
        assert line in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_command(folder: Path) -> None:
    result = call(folder, OXRL, "--help")
    assert result.returncode == 0
    for command in (
        "train",
        "plan",
        "eval",
        "generate",
        "prepare",
        "config",
        "algorithms",
        "doctor",
    ):
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan"], 2, "Missing argument"),
        (["plan", "rn.yaml"], 2, "did you mean 'run.yaml'?"),
        (["trian", "run.yaml"], 2, "No such command"),
        (["train", "run.yaml", "--resum"], 2, "No such option"),
        (["prepare", "gsm8", "--out", "x"], 2, "did you mean 'gsm8k'?"),
        (["prepare", "gsm8k", "--out", "x", "seed=3"], 2, "write --seed 3"),
        (["generate", "builtin:tiny"], 2, "--prompt"),
        (["generate", "builtin:tiny", "--prompt", "x", "--top-p", "0"], 2, "above 0"),
        (["generate", "builtin:tiny", "--prompts-file", "none.txt"], 2, "No such file"),
        (
            ["generate", "builtin:tiny", "--prompt", "x", "--out", "none/a.jsonl"],
            2,
            "folder none does not exist",
        ),
        (["eval", "run.yaml", "--out", "."], 2, "is a folder"),
        (["generate", "builtin:tiny", "--prompts-file", "run.yaml.jsonl"], 2, "No such file"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(
    folder: Path, arguments: list[str], code: int, words: str
) -> None:
    result = oxrl(*arguments, folder=folder)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_plan_prints_the_batch_equation_and_the_warning_goes_to_standard_error(
    folder: Path,
) -> None:
    result = planned("run.yaml", "train.clip_low=-0.2", folder=folder)
    assert result.returncode == 0
    assert "4 prompts x 2 samples = 8 rows per rollout step" in result.stdout
    assert result.stderr.count("warning:") == 1


WITHOUT = ("sklearn", "scipy", "pandas", "pyarrow")
SERVE = (
    "import socket, sys\nfrom oxrl.plan.preflight_process import serve\n"
    "ours, theirs = socket.socketpair()\ntheirs.close()\nserve(ours.fileno())\n"
)
GENERATE = (
    "import sys\nfrom oxrl.cli import main\n"
    "sys.argv = ['oxrl', 'generate', 'builtin:tiny', '--prompt', 'x', '--max-tokens', '1']\n"
    "try:\n    main()\nexcept SystemExit:\n    pass\n"
)
PROGRAMS = {"the checks of a plan": SERVE, "generate": GENERATE}
# Seconds of imports that a default run has no use for; all of them come with the dependencies.
OTHER_USES = (*WITHOUT, "mlflow", "matplotlib", "sqlalchemy")
FIRST_LINE = """\
from oxrl.config import load_config
from oxrl.commands.train import run
from oxrl.runs.recorder import Recorder

def record_step(self, step, line):
    heavy = [name for name in (*{heavy!r}, "torch") if name in sys.modules]
    print("step", step, "with", heavy, flush=True)
    os._exit(0)

Recorder.record_step = record_step
run(load_config({config!r}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of the programs prints; at its end, what it has imported."""
    folder = tmp_path_factory.mktemp("programs")
    models = "print('models', 'transformers.modeling_utils' in sys.modules)\n"
    found = f"print('found', *[name for name in {WITHOUT!r} if name in sys.modules])"
    programs = {name: text + models + found for name, text in PROGRAMS.items()}
    rl_config(folder, "first", run={"mlflow": True})
    config = str(folder / "first.yaml")
    programs["the first line"] = FIRST_LINE.format(heavy=OTHER_USES, config=config)
    first = "import torch, transformers.masking_utils, oxrl.cli"
    return each_told(folder, first, {"transformers.modeling_utils", *OTHER_USES}, programs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_models_are_had_without_the_libraries_that_only_others_need(
    told: dict[str, list[str]], program: str
) -> None:
    """A fifth of their time to start went into scikit-learn and what that imports."""
    assert told[program][-2:] == ["models True", "found"]


def test_nothing_heavy_is_imported_before_the_first_line_of_metrics(
    told: dict[str, list[str]],
) -> None:
    assert told["the first line"][-1] == "step 1 with ['torch']"


def test_config_show_loads_to_the_same_text_and_diff_says_what_changed(folder: Path) -> None:
    shown = oxrl("config", "show", "run.yaml", "train.lr=3e-6", folder=folder).stdout
    (folder / "shown.yaml").write_text(shown)
    assert oxrl("config", "show", "shown.yaml", folder=folder).stdout == shown
    assert (
        oxrl("config", "diff", "run.yaml", "shown.yaml", folder=folder).stdout
        == "train.lr: 1e-06 -> 3e-06\n"
    )
    assert json.loads(oxrl("config", "schema", folder=folder).stdout)["title"] == "Config"


def test_the_table_lists_every_algorithm(folder: Path) -> None:
    lines = oxrl("algorithms", folder=folder).stdout.splitlines()
    row = next(line for line in lines if line.startswith("ppo "))
    assert row.split() == [
        "ppo",
        "rl",
        "gae",
        "token/old",
        "ppo_clip",
        "none",
        "none",
        "none",
        "token_mean",
        "critic",
    ]


@pytest.mark.parametrize(
    ("family", "first", "least"),
    [("preference", "dpo", 45), ("critic", "ppo", 4), ("cispo", "cispo", 2)],
)
def test_a_family_is_the_rows_of_a_recipe_or_with_a_cell_or_a_need(
    family: str, first: str, least: int, tmp_path: Path
) -> None:
    text = oxrl("algorithms", "--family", family, folder=tmp_path).stdout
    table, _, words = text.partition("\n\n")
    rows = [line.split()[0] for line in table.splitlines()[1:]]
    assert len(rows) >= least and first in rows and len(rows) < 60
    assert [line.partition(":")[0] for line in words.splitlines()] == rows


def test_a_family_that_no_row_has_is_refused_and_one_thing_is_asked_at_a_time(
    tmp_path: Path,
) -> None:
    unknown = oxrl("algorithms", "--family", "prefrence", folder=tmp_path)
    assert unknown.returncode == 2 and "prefrence" in unknown.stderr
    for others in (("dpo",), ("--check",)):
        asked = ("algorithms", "--family", "preference", *others)
        assert oxrl(*asked, folder=tmp_path).returncode == 2


def test_every_algorithm_is_told_in_words_of_its_own() -> None:
    summaries = [row.summary for row in ROWS.values()]
    assert len(set(summaries)) == len(summaries)
    assert all(
        20 <= len(summary) <= 110 for summary in summaries if summary != "supervised fine-tuning"
    )


@pytest.mark.parametrize(
    ("script", "algorithm", "other"),
    [
        ("main_rl.py", "sft", "python main_sl.py --config"),
        ("main_sl.py", "sgrpo", "python main_rl.py --config"),
    ],
)
def test_a_door_refuses_the_other_kind_of_algorithm(
    folder: Path, script: str, algorithm: str, other: str
) -> None:
    text = (
        CONFIG
        if algorithm != "sft"
        else "".join(CONFIG.splitlines(keepends=True)[:3]).replace(", prompts_per_step: 4", "")
    )
    (folder / "door.yaml").write_text(
        text + ("" if algorithm != "sft" else "train: {alg_name: sft}\n")
    )
    result = oxrl("--config", "door.yaml", folder=folder, script=ROOT / script)
    assert result.returncode == 2
    assert f"{other} door.yaml" in result.stderr


def test_a_dry_run_takes_one_step_and_keeps_nothing(folder: Path) -> None:
    words = ("train", "run.yaml", "model.name=nobody/nothing-7b", "--dry-run")
    result = oxrl(*words, folder=folder)
    assert result.returncode == 0, result.stderr
    assert "dry run done" in result.stdout
    assert not (folder / "runs").exists()


def test_doctor_reports_and_exits_with_0_where_everything_is_there(folder: Path) -> None:
    result = oxrl("doctor", "--runs", "runs", folder=folder)
    assert result.returncode == 0, result.stdout
    for subject in ("python", "torch", "transformers", "device", "run directory"):
        assert subject in result.stdout
    needed, _, optional = result.stdout.partition("\noptional\n")
    assert needed.startswith("needed by every run\n") and "missing" not in needed
    assert all(name not in needed for name in ("sandbox", "peft", "flash-attn"))
    lines = optional.splitlines()
    absent = [line for line in lines if "not installed" in line]
    assert absent, "flash-attn at least is nowhere in this environment"
    assert all(line.startswith("  missing ") and "pip install" in line for line in absent)
    assert not [line for line in lines if not line.startswith(("  ok ", "  missing ", "  warn "))]
    packages = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("  ")]
    assert not [name for name in packages if packages.count(name) > 1 and name != "sandbox"]
    (peft,) = [line for line in lines if " peft " in line]
    assert "for lora, qlora" in peft


def test_doctor_fails_where_the_run_directory_cannot_be_written(folder: Path) -> None:
    result = oxrl("doctor", "--runs", "/proc/runs", folder=folder)
    assert result.returncode == 1
    assert "fix:" in result.stdout


def test_python_m_oxrl_is_the_same_program(folder: Path) -> None:
    command = (sys.executable, "-m", "oxrl", "config", "show", "run.yaml")
    assert call(folder, *command).returncode == 0
