"""`oxrl config convert`: files of verl and TRL as ours, each value under its new name or in a comment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import load_config
from oxrl.config.convert import converted
from oxrl.errors import ConfigError

VERL = """
algorithm: {adv_estimator: rloo, kl_ctrl: {kl_coef: 0.001}}
data:
  train_files: [%s]
  train_batch_size: 64
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  model: {path: "builtin:tiny", use_remove_padding: true}
  actor:
    optim: {lr: 1e-6, weight_decay: 0.1}
    ppo_mini_batch_size: 16
    clip_ratio_high: 0.28
  rollout: {name: hf, n: 5, temperature: 0.9, val_kwargs: {temperature: 0.5, n: 2}}
trainer: {total_training_steps: 100, save_freq: -1, experiment_name: mine, total_epochs: 15}
"""
GRPO = """
model_name_or_path: "builtin:tiny"
dataset_name: %s
learning_rate: 1.0e-5
num_generations: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 3
max_completion_length: 256
beta: 0.04
epsilon: 0.1
epsilon_high: 0.3
lr_scheduler_type: constant_with_warmup
max_steps: 20
warmup_ratio: 0.1
bf16: true
loss_type: dr_grpo
"""
DPO = """
model_name_or_path: "builtin:tiny"
dataset_name: %s
beta: 0.2
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_length: 512
max_steps: 20
loss_type: [ipo]
precompute_ref_log_probs: true
"""


def translated(folder: Path, text: str) -> tuple[dict[str, dict[str, object]], str]:
    """What a file becomes: its values, and the comments below."""
    data = folder / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "chosen": "2", "rejected": "3"}))
    file = folder / "theirs.yaml"
    file.write_text(text % data)
    made = converted(file)
    return yaml.safe_load(made), made


def test_nested_sections_of_verl_become_ours(tmp_path: Path) -> None:
    values, text = translated(tmp_path, VERL)
    assert values["train"]["alg_name"] == "rloo"
    assert float(str(values["train"]["lr"])) == 1e-6
    assert values["train"]["clip_high"] == 0.28
    assert values["data"]["prompts_per_step"] == 64
    assert values["data"]["train"] == str(tmp_path / "rows.jsonl")
    assert values["model"]["name"] == "builtin:tiny"
    assert values["run"] == {"name": "mine"}
    assert values["rollout"] == {
        "max_tokens": 1024,
        "n_samples": 5,
        "temperature": 0.9,
        "eval_temperature": 0.5,
        "eval_samples": 2,
    }
    assert "n_samples: 5  # actor_rollout_ref.rollout.n" in text
    for comment in (
        "# actor_rollout_ref.model.use_remove_padding = true; no counterpart",
        "# actor_rollout_ref.actor.ppo_mini_batch_size = 16; that is train.minibatches here",
        "# trainer.total_epochs = 15; that is run.steps here",
        "# algorithm.kl_ctrl.kl_coef = 0.001; that is train.kl_coeff here",
    ):
        assert comment in text
    missing = text.partition("# Before it can be loaded:")[2]
    assert "run.steps" in missing and "reward.name" in missing


def test_what_is_missing_is_all_that_keeps_it_from_being_loaded(tmp_path: Path) -> None:
    _, text = translated(tmp_path, GRPO)
    ours = tmp_path / "ours.yaml"
    ours.write_text(text)
    cfg = load_config(ours, ["reward.name=math"])
    assert cfg.train.alg_name == "sgrpo"
    assert cfg.data.prompts_per_step == 8 * 3 // 4
    assert (cfg.rollout.n_samples, cfg.rollout.max_tokens) == (4, 256)
    assert (cfg.train.clip_low, cfg.train.clip_high) == (0.1, 0.3)
    assert (cfg.train.lr, cfg.train.lr_schedule, cfg.run.steps) == (1e-5, "constant", 20)
    assert (cfg.model.dtype, cfg.train.weights) == ("bfloat16", "fixed_length")
    assert "train.kl_coeff" not in text and "kl_coeff: 0.04  # beta" in text
    assert "# warmup_ratio = 0.1; that is train.warmup_steps here" in text


def test_names_of_a_preference_trainer_become_ours_and_load_at_once(tmp_path: Path) -> None:
    _, text = translated(tmp_path, DPO)
    ours = tmp_path / "ours.yaml"
    ours.write_text(text)
    assert "Before it can be loaded" not in text
    cfg = load_config(ours)
    assert (cfg.train.alg_name, cfg.data.rows_per_step) == ("ipo", 16)
    assert cfg.model.max_length == 512
    assert "# precompute_ref_log_probs = true; the reference is asked once per row" in text


def test_values_that_cannot_be_meant_are_told_and_nothing_breaks(tmp_path: Path) -> None:
    _, text = translated(
        tmp_path,
        "dataset_name: %s\nlearning_rate: fast\nnum_generations: 0\n"
        'per_device_train_batch_size: 8\n"odd\\nname: x": {deep: [1, 2]}\n',
    )
    assert "learning_rate: train.lr = 'fast'" in text
    assert "# odd name: x.deep = [1, 2]; no counterpart" in text
    assert all(line.startswith(("#", " ")) or ":" in line or not line for line in text.split("\n"))


def test_the_command_prints_it_and_refuses_what_is_no_yaml(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("max_steps: 3\n")
    shown = CliRunner().invoke(app, ["config", "convert", str(file)])
    assert shown.exit_code == 0 and "steps: 3  # max_steps" in shown.output
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        converted(file)


PPO = """
algorithm: {adv_estimator: gae}
data: {train_files: [%s], train_batch_size: 64, filter_overlong_prompts: true, truncation: error}
actor_rollout_ref:
  model: {path: "builtin:tiny", enable_gradient_checkpointing: true}
  actor: {optim: {lr: 1e-6, weight_decay: 0.1}, ppo_epochs: 2, grad_clip: 1.0}
  ref: {fsdp_config: {param_dtype: fp16}}
  rollout: {n: 2, dtype: bfloat16, val_kwargs: {top_p: 0.7}}
critic:
  optim: {lr: 1e-5, weight_decay: 0.01}
  model: {path: theirs, enable_gradient_checkpointing: false, fsdp_config: {param_dtype: bf16}}
  ppo_epochs: 1
  cliprange_value: 0.5
  grad_clip: 2.0
reward_model: {model: {path: judge}, max_length: 99, enable: true}
"""


def test_what_is_of_the_critic_or_the_reward_model_is_not_taken_for_the_policy(
    tmp_path: Path,
) -> None:
    values, text = translated(tmp_path, PPO)
    assert values["model"] == {"name": "builtin:tiny", "gradient_checkpointing": True}
    assert values["rollout"] == {"n_samples": 2}
    assert values["data"]["overlong"] == "drop"
    train = values["train"]
    assert (train["alg_name"], train["epochs"], train["max_grad_norm"]) == ("ppo", 2, 1.0)
    assert (train["weight_decay"], train["value_clip"]) == (0.1, 0.5)
    assert float(str(train["critic_lr"])) == 1e-5
    for left in ("critic.model.path", "reward_model.max_length", "critic.grad_clip"):
        assert f"# {left} = " in text
    assert 'rollout.dtype = "bfloat16"; of the sampler alone' in text


def test_a_switch_that_is_off_does_not_set_what_another_switch_set(tmp_path: Path) -> None:
    values, _ = translated(tmp_path, f"{GRPO}fp16: false\n")
    assert values["model"]["dtype"] == "bfloat16"
    kl = "actor_rollout_ref: {actor: {use_kl_loss: false, kl_loss_type: low_var_kl}}\n"
    values, text = translated(tmp_path, f"{kl}dataset_name: %s\n")
    assert "kl" not in values["train"]
    assert 'kl_loss_type = "low_var_kl"; that is train.kl here' in text


def test_what_is_translated_is_not_told_to_be_left_and_nothing_vanishes(tmp_path: Path) -> None:
    text = translated(tmp_path, VERL)[1]
    assert "prompts_per_step: 64  # data.train_batch_size" in text
    text = translated(tmp_path, f"{GRPO}batch_size: 3\n")[1]
    left = text.partition("# Not translated")[2]
    assert "per_device_train_batch_size" not in left and "# batch_size = 3; that is" in left
    assert "prompts of a rollout step in reinforcement learning" in left
    values, text = translated(
        tmp_path,
        "model: builtin:tiny\ntrain_file: %s\nlearning_rate: 1.0\nlearning_rate: 2.0\n"
        "max_steps: !mine 3\ngradient_accumulation_steps: 2\n",
    )
    assert values["model"] == {"name": "builtin:tiny"} and values["train"]["lr"] == 1.0
    assert "# learning_rate: written twice, first at" in text
    assert "# max_steps: needs a plain value" in text and "'!mine'" in text
    assert "# gradient_accumulation_steps = 2; that is" in text


def test_a_file_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    ours = "run: {name: mine, steps: 3}\nmodel: {name: 'builtin:tiny'}\n" + (
        "data: {train: %s, prompts_per_step: 4}\nreward: {name: math}\ntrain: {alg_name: sgrpo}\n"
    )
    values, text = translated(tmp_path, ours)
    assert values == yaml.safe_load(ours % (tmp_path / "rows.jsonl"))
    assert "guess" not in text and "Before it can be loaded" not in text


def test_prompts_of_openrlhf_are_those_of_its_rollout_batch(tmp_path: Path) -> None:
    theirs = (
        "pretrain: 'builtin:tiny'\nprompt_data: %s\nrollout_batch_size: 1024\n"
        "train_batch_size: 128\nn_samples_per_prompt: 8\n"
    )
    values, text = translated(tmp_path, theirs)
    assert values["train"]["alg_name"] == "sgrpo"
    assert values["data"]["prompts_per_step"] == 1024
    assert "# train_batch_size = 128; that is train.minibatches here" in text
