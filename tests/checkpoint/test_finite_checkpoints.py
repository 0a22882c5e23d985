"""Weights that became NaN or infinite between two steps reach no checkpoint, whatever trains them
and whenever they are saved; the last good one stays.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oxrl.checkpoint.model_files import save_model
from oxrl.checkpoint.verify import verify_checkpoint
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train.local import LocalTrainer
from oxrl.errors import DataError, NonFiniteError
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.stored import non_finite_values
from support.small_runs import preference_config, rl_config, sft_config

Break = Callable[[LocalTrainer], None]


def break_after(monkeypatch: pytest.MonkeyPatch, step: int, damage: Break) -> None:
    """Every trainer is damaged at the end of its optimizer step `step`."""
    finish = LocalTrainer._finish_step

    def finish_and_break(self: LocalTrainer, norm: float, *, skipped: bool) -> Any:
        metrics = finish(self, norm, skipped=skipped)
        if self.step == step:
            damage(self)
        return metrics

    monkeypatch.setattr(LocalTrainer, "_finish_step", finish_and_break)


def weight_of(kind: str) -> Break:
    """Damage one value of the last weight of every model of a kind."""

    @torch.no_grad()
    def damage(trainer: LocalTrainer) -> None:
        if (type(trainer.model).__name__ == "ValueModel") == (kind == "critic"):
            list(trainer._parameters.values())[-1].view(-1)[0] = float("nan")

    return damage


@torch.no_grad()
def moment(trainer: LocalTrainer) -> None:
    for state in trainer._adam.state.values():
        state["exp_avg_sq"].view(-1)[0] = float("inf")


def checkpoints(cfg: Config) -> list[str]:
    return sorted(path.name for path in (cfg.run.directory / "checkpoints").iterdir())


def assert_all_finite(folder: Path) -> None:
    files = list(folder.rglob("*.safetensors"))
    assert files
    for file in files:
        for tensor in load_file(file).values():
            assert non_finite_values(tensor) == 0


def assert_refused(cfg: Config, said: str, left: list[str]) -> None:
    with pytest.raises(NonFiniteError, match=f"(?s){said}") as raised:
        run(cfg)
    assert raised.value.exit_code == 1
    assert f"good one is {cfg.run.directory / 'checkpoints' / left[-1]}" in str(raised.value)
    assert checkpoints(cfg) == left
    for name in left:
        assert verify_checkpoint(cfg.run.directory / "checkpoints" / name) == []
        assert_all_finite(cfg.run.directory / "checkpoints" / name)
    assert not (cfg.run.directory / "result.json").exists()


KEEP_ONE = ["run.keep_checkpoints=1", "run.checkpoint_every=1"]


def test_weights_that_a_step_made_nan_are_not_saved_and_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_after(monkeypatch, 3, weight_of("policy"))
    said = r"no checkpoint of step 3 .*weight model\.norm\.weight: 1 of 64 values"
    assert_refused(sft_config(tmp_path, "run", KEEP_ONE), said, ["step_00000002"])


def test_a_learning_rate_that_overflows_the_weights_is_told_so(tmp_path: Path) -> None:
    cfg = sft_config(tmp_path, "run", KEEP_ONE)
    # More than a configuration may say.
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"lr": 1e39})})
    said = r"no checkpoint of step 1 .*values are NaN or infinite.*since step 1.*lower train\.lr"
    assert_refused(cfg, said, ["step_00000000"])


@pytest.mark.parametrize("algorithm", ["sgrpo", "ppo"])
def test_policy_and_critic_of_reinforcement_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    broken = "critic" if algorithm == "ppo" else "policy"
    break_after(monkeypatch, 4, weight_of(broken))
    lines = ["train.critic_lr=1e-3"] if algorithm == "ppo" else []
    cfg = rl_config(tmp_path, "run", lines, train={"alg_name": algorithm, "lr": 1e-3})
    name = r"value_head\.bias" if algorithm == "ppo" else r"model\.norm\.weight"
    left = ["step_00000000", "step_00000002"]
    assert_refused(cfg, f"no checkpoint of step 4 .*weight {name}", left)


def test_the_last_save_of_a_run_and_infinite_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_after(monkeypatch, 2, moment)
    cfg = preference_config(tmp_path, "run", ["run.checkpoint_every=0", "run.steps=2"])
    said = r"no checkpoint of step 2 .*AdamW's exp_avg_sq of model\."
    assert_refused(cfg, said, ["step_00000000"])


def test_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7)), tmp_path / "base")
    load_tokenizer("builtin:tiny").save_pretrained(tmp_path / "base")
    break_after(monkeypatch, 2, weight_of("policy"))
    model = {"name": str(tmp_path / "base")}
    cfg = sft_config(tmp_path, "run", KEEP_ONE, model=model, lora={"rank": 2})
    assert_refused(cfg, r"no checkpoint of step 2 .*weight .*lora_B", ["step_00000001"])


def test_a_signal_does_not_save_them_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(trainer: LocalTrainer) -> None:
        weight_of("policy")(trainer)
        os.kill(os.getpid(), signal.SIGTERM)

    break_after(monkeypatch, 3, damage)
    cfg = sft_config(tmp_path, "run", ["run.checkpoint_every=0"])
    assert_refused(cfg, "no checkpoint of step 3 .*model.norm", ["step_00000000"])


def test_best_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_after(monkeypatch, 4, weight_of("policy"))
    # An evaluation that sees nothing wrong, and always finds the new weights better.
    scores = iter(range(1, 100))
    monkeypatch.setattr(
        "oxrl.recipes.preference.PreferenceLearner.evaluate",
        lambda *_: {"eval/accuracy": float(next(scores))},
    )
    every = {"eval_every": 2, "keep_best": True, "checkpoint_every": 3}
    data = {"eval": str(tmp_path / "held_out_pairs.jsonl")}
    preference_config(tmp_path, "inputs")
    cfg = preference_config(tmp_path, "run", run=every, data=data)
    said = r"no copy in best/ was written.*model\.norm\.weight"
    assert_refused(cfg, said, ["step_00000000", "step_00000003"])
    assert_all_finite(cfg.run.directory / "best")
    assert not (cfg.run.directory / ".best.partial").exists()


GATE = """
import torch

def gate(logprobs, anchor, advantages, mask, loss_weights, *, correction=None):
    loss = -(logprobs * advantages * loss_weights)[mask].sum()
    # The derivative of a root at 0 is infinite, and 0 times that is NaN: in the gradient only, and
    # only where a token is less likely than any on which a gate is tried before the run.
    rare = logprobs[mask & (logprobs < -3.5)]
    return loss + 0.0 * torch.sqrt(rare - rare.detach()).sum(), {}
"""


def test_a_loss_of_the_users_with_a_nan_gradient_reaches_no_weight(tmp_path: Path) -> None:
    (tmp_path / "gate.py").write_text(GATE)
    cfg = rl_config(
        tmp_path,
        "run",
        ["run.checkpoint_every=1"],
        train={"alg_name": "sgrpo", "lr": 1e-3, "loss": f"{tmp_path / 'gate.py'}:gate"},
    )
    with pytest.raises(NonFiniteError, match="optimizer steps in a row were skipped"):
        run(cfg)
    for name in checkpoints(cfg):
        assert_all_finite(cfg.run.directory / "checkpoints" / name)


def test_a_model_that_was_broken_before_training_is_named(tmp_path: Path) -> None:
    model = load_policy("builtin:tiny")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = float("nan")
    save_model(model, tmp_path / "base")
    load_tokenizer("builtin:tiny").save_pretrained(tmp_path / "base")
    cfg = sft_config(tmp_path, "run", model={"name": str(tmp_path / "base")})
    with pytest.raises(DataError, match=r"NaN or infinite numbers in 'model\.norm\.weight'"):
        run(cfg)
    assert not (cfg.run.directory / "checkpoints").exists()
