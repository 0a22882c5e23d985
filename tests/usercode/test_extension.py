"""docs/extend.md, done as it says: a gate in a user's own file, trained with, and right by its own
formula.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from oxrl.config import load_config
from oxrl.errors import ConfigError
from support.checks_here import planned
from support.command_line import oxrl
from support.small_runs import metric_lines, rl_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for name, code in zip(("my_gate.py", "my_feature.py"), blocks, strict=True):
        assert len(code.splitlines()) <= 28
        (tmp_path / name).write_text(code)
    return tmp_path / "my_gate.py"


def test_a_gate_in_a_users_file_trains_without_touching_the_package(user_file: Path) -> None:
    cfg = rl_config(user_file.parent, "extension")  # writes extension.yaml
    overrides = [
        "run.steps=2",
        "train.minibatches=2",
        "train.alg_name=grpo",
        f"train.loss={user_file}:tanh_gate",
        "train.loss_numbers={reach: 0.3}",
    ]
    config = user_file.parent / "extension.yaml"
    result = oxrl("train", config, *overrides, folder=user_file.parent)
    assert result.returncode == 0, result.stderr
    metrics = metric_lines(Path(cfg.run.dir or ""))
    assert [line["step"] for line in metrics] == [1, 2]
    assert metrics[0]["update/weight_mean"] == 1.0 > metrics[1]["update/weight_mean"]


def test_a_feature_in_a_users_file_changes_rewards_and_is_said_by_the_plan(user_file: Path) -> None:
    cfg = rl_config(user_file.parent, "extension")
    config = user_file.parent / "extension.yaml"
    named = f"{user_file.parent}/my_feature.py:StopBonus"
    overrides = ["run.steps=2", f"train.features={{{named}: {{bonus: 0.2}}}}"]
    result = oxrl("train", config, *overrides, folder=user_file.parent)
    assert result.returncode == 0, result.stderr
    lines = metric_lines(Path(cfg.run.dir or ""))
    assert [line["reward/stop_bonus"] for line in lines] == pytest.approx([0.18, 0.162])
    assert all(0 <= line["reward/shaping"] <= 0.2 for line in lines)
    told = planned(config, *overrides, f"run.dir={cfg.run.dir}2", folder=user_file.parent)
    assert told.returncode == 0, told.stderr
    assert "StopBonus: made when a run starts" in told.stdout


def test_its_gradient_is_that_of_its_formula(user_file: Path) -> None:
    added = runpy.run_path(str(user_file))
    logprobs = torch.tensor([[-1.0, -0.4, -2.0]], dtype=torch.float64, requires_grad=True)
    old, advantages = (
        logprobs.detach() - torch.tensor([[0.0, 0.3, -0.2]]),
        torch.tensor([[1.0, -2.0, 0.5]]),
    )
    mask, weights = torch.ones(1, 3, dtype=torch.bool), torch.full((1, 3), 0.25)
    loss, _ = added["tanh_gate"](logprobs, old, advantages, mask, weights, reach=0.3)
    formula = -(0.25 * 0.3 * torch.tanh((logprobs - old) / 0.3) * advantages).sum()
    torch.testing.assert_close(loss, formula)
    found, expected = (torch.autograd.grad(scalar, logprobs)[0] for scalar in (loss, formula))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("loss", "numbers", "field", "hint"),
    [
        ("tanh_gat", "{reach: 0.3}", "train.loss", "did you mean 'tanh_gate'?"),
        ("tanh_gate", "{reech: 0.3}", "train.loss_numbers", "did you mean 'reach'?"),
        ("tanh_gate", "{}", "train.loss_numbers", "has no default for reach"),
    ],
)
def test_a_wrong_name_in_it_is_found_before_anything_runs(
    user_file: Path, loss: str, numbers: str, field: str, hint: str
) -> None:
    rl_config(user_file.parent, "extension")
    overrides = [f"train.loss={user_file}:{loss}", f"train.loss_numbers={numbers}"]
    with pytest.raises(ConfigError) as caught:
        load_config(user_file.parent / "extension.yaml", overrides)
    assert f": {field} = " in str(caught.value)
    assert hint in str(caught.value)


def test_a_file_that_is_not_there_and_numbers_without_a_loss_are_refused(user_file: Path) -> None:
    rl_config(user_file.parent, "extension")
    config = user_file.parent / "extension.yaml"
    with pytest.raises(ConfigError, match="did you mean 'my_gate.py'"):
        load_config(config, [f"train.loss={user_file.parent}/my_gat.py:tanh_gate"])
    with pytest.raises(ConfigError, match="is read with a policy loss of your own"):
        load_config(config, ["train.loss_numbers={reach: 0.3}"])
