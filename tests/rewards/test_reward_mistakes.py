"""A mistake in a reward is found before anything is trained: exit code 2, where it is, no traceback."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from oxrl.cli import main
from oxrl.commands.train import run
from oxrl.errors import OxrlError, RewardDefinitionError
from support.small_runs import rl_config

MISTAKES = {
    "def digits(prompt, completion):\n    return nmae": r"NameError: name 'nmae' .* \(.*reward\.py:2\)",
    "def digits(prompt, completion):\n    return '1'": r"returned '1' \(str\), need a number",
    "def digits(prompt, completion):\n    return None": r"returned None \(NoneType\), need a number",
    "def digits(prompt, completion):\n    return float('nan')": "returned nan, need a finite number",
    "def digits(prompt, completions):\n    return [1.0]": "returned 1 scores for 2 completions",
    "def digits(response, answer):\n    return 1.0": r"reward\.py:1\) has the signature \(response, ans",
    "def other(prompt, completion):\n    return 1.0": "defines no 'digits'",
    "import no_such_thing\ndef digits(prompt, completion): ...": r"No module .* \(.*reward\.py:1\)",
    # The data has no such field; the made-up sample could not know.
    "def digits(prompt, completion):\n    return prompt.metadata['gold'] == completion": (
        r"it failed on 3 of 3 prompts of the data.*KeyError: 'gold' \(.*reward\.py:2\)"
    ),
}


@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_in_a_reward_exits_2_and_says_where(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    cfg = rl_config(tmp_path, "run")
    (tmp_path / "reward.py").write_text(source)
    monkeypatch.setattr(sys, "argv", ["oxrl", "train", str(tmp_path / "run.yaml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert not list(cfg.run.directory.glob("checkpoints/step_*"))
    assert re.search(MISTAKES[source], " ".join(said.split())), said


def test_when_the_mistake_is_mended_the_run_starts_where_it_was_refused(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "run", run={"name": "run", "steps": 1, "mlflow": False})
    mended = (tmp_path / "reward.py").read_text()
    (tmp_path / "reward.py").write_text("def digits(prompt, completion): return nmae")
    with pytest.raises(RewardDefinitionError):
        run(cfg)
    (tmp_path / "reward.py").write_text(mended)
    run(cfg)
    # What has trained stays, whatever is refused after it.
    (tmp_path / "reward.py").write_text("def digits(prompt, completion): return nmae")
    with pytest.raises(OxrlError):
        run(cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": 2})}), resume=True)
    assert list(cfg.run.directory.glob("checkpoints/step_*"))
