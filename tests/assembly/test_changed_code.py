"""A resumed run is that of the code it began with, or says what differs and stops with exit 2."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

import oxrl as package
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.errors import RunDirectoryError
from oxrl.runs.code import LIBRARIES, code_changes, code_of_run
from support.command_line import oxrl
from support.small_runs import sft_config


def began_with(run_directory: Path, **other: str) -> None:
    """Write into a run's record that it began with other code."""
    file = run_directory / "code.json"
    noted = json.loads(file.read_text())
    file.write_text(json.dumps(noted | other))


def test_what_is_noted_are_the_files_that_score_and_act_and_versions_of_libraries() -> None:
    noted = code_of_run()
    folder = Path(package.__file__).parent
    for name in ("types.py", "functional/gates.py", "rewards/builtin.py"):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert digest.startswith(noted[f"oxrl/{name}"]) and len(noted[f"oxrl/{name}"]) >= 12
    tops = {name.partition("/")[0] for name in noted if "/" in name}
    assert tops == {"oxrl", "oxrl_graders", "oxrl_envs", "oxrl_robots", "oxrl_sandbox"}
    assert noted["torch"] == version("torch") and noted["python"].count(".") == 1
    known = {name for name in noted if "/" not in name}
    assert known <= LIBRARIES | {"python", "commit"}


@pytest.mark.parametrize(
    ("other", "then", "now"),
    [
        ({"torch": "2.0.0"}, "torch 2.0.0", "torch "),
        ({"python": "3.1"}, "python 3.1", "python 3."),
        ({"vanished": "1.0"}, "vanished 1.0", "vanished not installed"),
        ({"oxrl/types.py": "0" * 12}, "oxRL of commit ", "other in oxrl/types.py"),
        ({"oxrl/gone.py": "0" * 12}, "oxRL of commit ", "other in oxrl/gone.py"),
    ],
)
def test_a_resume_with_other_code_is_refused_unless_it_is_meant(
    tmp_path: Path, other: dict[str, str], then: str, now: str
) -> None:
    cfg = sft_config(tmp_path, "run", ["run.steps=1"])
    run(cfg)
    began_with(cfg.run.directory, **other)
    before = (cfg.run.directory / "metrics.jsonl").read_bytes()
    longer = sft_config(tmp_path, "run", ["run.steps=2"])
    with pytest.raises(RunDirectoryError) as refused:
        run(longer, resume=True)
    assert refused.value.exit_code == 2
    said = str(refused.value)
    assert f"  code: {then}" in said and now in said and "--accept-changes=code" in said
    assert (cfg.run.directory / "metrics.jsonl").read_bytes() == before

    run(longer, resume=True, accept=["code"])
    log = (cfg.run.directory / "run.log").read_text()
    assert f"resuming (accepted by --accept-changes) with code: {then}" in log
    start = json.loads((cfg.run.directory / "starts.jsonl").read_text().splitlines()[-1])
    assert list(start["input_changes"]) == ["code"] and start["accepted"] == ["code"]
    # From then on it is the code of the run.
    assert json.loads((cfg.run.directory / "code.json").read_text()) == code_of_run()
    run(sft_config(tmp_path, "run", ["run.steps=3"]), resume=True)


def test_another_commit_with_the_same_files_is_no_change(tmp_path: Path) -> None:
    cfg = sft_config(tmp_path, "run", ["run.steps=1"])
    run(cfg)
    began_with(cfg.run.directory, commit="0" * 40)
    run(sft_config(tmp_path, "run", ["run.steps=2"]), resume=True)


def test_a_run_that_noted_no_code_goes_on_and_notes_it(tmp_path: Path) -> None:
    cfg = sft_config(tmp_path, "run", ["run.steps=1"])
    run(cfg)
    (cfg.run.directory / "code.json").unlink()
    run(sft_config(tmp_path, "run", ["run.steps=2"]), resume=True)
    assert "when the run began: code;" in (cfg.run.directory / "run.log").read_text()
    assert json.loads((cfg.run.directory / "code.json").read_text()) == code_of_run()


def test_many_files_are_a_short_line() -> None:
    now = {f"oxrl/{number}.py": "1" for number in range(40)}
    (change,) = code_changes({"commit": "a" * 40}, now | {"commit": "b" * 40})
    assert change.then == f"oxRL of commit {'a' * 12}"
    assert change.now.startswith(f"of commit {'b' * 12}, other in oxrl/0.py, ")
    assert change.now.endswith(" and 35 more")


def test_a_replay_goes_through_the_step_with_the_code_of_now_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = sft_config(tmp_path, "run", ["run.steps=2"])
    run(cfg)
    began_with(cfg.run.directory, torch="2.0.0")
    with caplog.at_level(logging.WARNING):
        found = replay(cfg.run.directory, 2)
    assert found and all(finding.equal for finding in found)
    assert "code: torch 2.0.0 then" in caplog.text


def test_the_command_line_and_the_console(tmp_path: Path) -> None:
    sft_config(tmp_path, "run", ["run.steps=1"])
    assert oxrl("train", "run.yaml", "run.steps=1", folder=tmp_path).returncode == 0
    began_with(tmp_path / "run", torch="2.0.0")
    resumed = ("train", "run.yaml", "run.steps=2", "--resume")
    refused = oxrl(*resumed, folder=tmp_path)
    assert refused.returncode == 2 and "code: torch 2.0.0 then" in refused.stderr
    meant = oxrl(*resumed, "--accept-changes", "code", folder=tmp_path)
    assert meant.returncode == 0, meant.stderr
    assert "with code: torch 2.0.0 -> torch" in meant.stdout + meant.stderr


# A folder with a run in it that is moved whole.


REWARD = "def digits(prompt, completion):\n    return float(sum(map(str.isdigit, completion)))\n"
ENVIRONMENT = """
from oxrl.environments import Step


class Game:
    def reset(self, prompt, seed):
        return "go"

    def step(self, text):
        return Step("", reward=1.0, terminated=True)
"""
BONUS = """
from oxrl.recipes.features.base import Feature


class Bonus(Feature):
    def __init__(self, given):
        pass

    def steer(self, batch, progress):
        return {}


class Malus(Bonus):
    pass
"""
CONFIG = """
run: {name: moved, dir: run, steps: 1, mlflow: false, threads: 1}
model: {name: "builtin:tiny"}
data: {train: rows.jsonl, prompts_per_step: 2}
rollout: {max_tokens: 4, n_samples: 2}
reward: {name: "code/reward.py:digits"}
train: {alg_name: sgrpo, lr: 0.001}
"""
MORE = {
    "a reward": "",
    "an environment": "environment: {name: code/game.py:Game}\n",
    "two features": "",
}


@pytest.mark.parametrize("kind", MORE)
def test_a_folder_that_was_moved_whole_is_as_it_was(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "code").mkdir(parents=True)
    (here / "code" / "reward.py").write_text(REWARD)
    (here / "code" / "game.py").write_text(ENVIRONMENT)
    (here / "code" / "bonus.py").write_text(BONUS)
    (here / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    features = "{code/bonus.py:Bonus: {}, code/bonus.py:Malus: {}}"
    train = f"train: {{alg_name: sgrpo, lr: 0.001, features: {features}}}\n"
    config = CONFIG + MORE[kind]
    if kind == "two features":
        config = config.replace("train: {alg_name: sgrpo, lr: 0.001}\n", train)
    (here / "config.yaml").write_text(config)
    monkeypatch.chdir(here)
    package.train("config.yaml")
    there = tmp_path / "there" / "deeper"
    there.parent.mkdir()
    shutil.move(here, there)
    monkeypatch.chdir(there)
    gone_on = package.train("config.yaml", overrides=["run.steps=2"], resume=True)
    assert len(gone_on.metrics) == 2
    # Another file at the same place is a change still, and so is the file in another place.
    (there / "code" / "reward.py").write_text(REWARD + "# other\n")
    with pytest.raises(RunDirectoryError, match=r"reward\.name: reward\.py sha256"):
        package.train("config.yaml", overrides=["run.steps=3"], resume=True)
