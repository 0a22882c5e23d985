"""The policy-gradient loop as a user sees it: same seed, refused steps, signals, what it writes."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.commands.evaluate import run_eval, run_generate
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.errors import NonFiniteError, RewardError, RunDirectoryError
from oxrl.recipes.rl import split_by_group
from oxrl.types import Sampling
from support.command_line import oxrl
from support.figures import Learned
from support.small_runs import (
    final_files,
    metric_lines,
    rl_config,
    sft_config,
    stop_after_three_steps,
    write_inputs,
)

ROOT = Path(__file__).parents[2]
# Keys of architecture.md section 6 and algorithms.md 2.12 that every policy-gradient run writes.
KEYS = """
reward/mean reward/std reward/pass_rate reward/zero_variance_groups reward/all_pass_groups reward/all_fail_groups
reward/timeout reward/error reward/invalid advantage/mean advantage/std advantage/abs_max advantage/positive_frac
data/tokens data/rows data/empty_rows data/dropped_rows data/truncated_frac data/length_mean data/length_p95
data/length_max data/length_correct data/length_wrong data/staleness_mean data/staleness_max
update/loss update/grad_norm update/lr update/skipped update/update_norm_ratio update/clip_frac_high
update/clip_frac_low update/ratio_mean update/ratio_std update/ratio_min update/ratio_max update/ratio_p01
update/ratio_p99 update/weight_mean update/weight_max update/weight_zero_frac update/weight_ess kl/old_k3
policy/entropy mismatch/kl_k1 mismatch/kl_k3 mismatch/abs_logdiff_mean mismatch/abs_logdiff_max
mismatch/prob_diff_max mismatch/ppl_ratio mismatch/chi2_token mismatch/chi2_seq
""".split()
PPO_KEYS = "value/loss value/clip_frac value/explained_variance value/mean value/grad_norm kl/ref_k1 kl/ref_k3".split()


def test_the_same_seed_twice_gives_the_same_metrics_samples_and_weights(tmp_path: Path) -> None:
    configs = [rl_config(tmp_path / name, "run", run={"steps": 4}) for name in ("one", "two")]
    for cfg in configs:
        run(cfg)
    one, two = (cfg.run.directory for cfg in configs)
    assert metric_lines(one) == metric_lines(two) and len(metric_lines(one)) == 4
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
    assert final_files(one) == final_files(two)


@pytest.mark.parametrize("algorithm", ["sgrpo", "grpo", "cispo", "ppo"])
def test_a_run_writes_every_metric_key_it_promises(algorithm: str, tmp_path: Path) -> None:
    train: dict[str, Any] = {"alg_name": algorithm, "lr": 1e-3}
    if algorithm == "ppo":
        train |= {"kl": "reward_k1", "kl_coeff": 0.05}
    cfg = rl_config(tmp_path, "run", run={"steps": 2}, train=train)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["step"] for line in lines] == [1, 2]
    wanted = [*KEYS, *(PPO_KEYS if algorithm == "ppo" else [])]
    assert [key for key in wanted if key not in lines[-1]] == []
    assert lines[0]["mismatch/abs_logdiff_max"] < 1e-4
    samples = [
        json.loads(line)
        for line in (cfg.run.directory / "samples.jsonl").read_text().split("\n")
        if line
    ]
    assert len(samples) == 2 * 16
    fields = "uid draw sample step prompt response reward status advantage versions seed finish_reason".split()
    assert [field for field in fields if field not in samples[0]] == []
    assert {sample["step"] for sample in samples} == {1, 2}


def test_a_reference_that_a_default_asks_for_is_told_on_the_console_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "a second copy of the policy, 592.6 kB, for train.kl_coeff = 0.03, the default of rloo"
    asked = rl_config(tmp_path, "asked", run={"steps": 1}, train={"alg_name": "rloo", "lr": 1e-3})
    run(asked)
    shown = capsys.readouterr()
    assert words in " ".join((shown.out + shown.err).split())
    assert words in (asked.run.directory / "run.log").read_text()
    without = {"alg_name": "rloo", "lr": 1e-3, "kl_coeff": 0.0}
    quiet = rl_config(tmp_path, "quiet", run={"steps": 1}, train=without)
    run(quiet)
    shown = capsys.readouterr()
    assert (
        "second copy" not in shown.out + shown.err + (quiet.run.directory / "run.log").read_text()
    )


def test_the_last_checkpoint_loads_in_transformers_as_it_stands(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "run", run={"steps": 2})
    run(cfg)
    newest = max((cfg.run.directory / "checkpoints").glob("step_*"))
    assert newest.name == "step_00000002" and (newest / "manifest.json").exists()
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(newest),
        AutoTokenizer.from_pretrained(newest),
    )
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True
    )
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    assert model(torch.tensor([ids])).logits.isfinite().all()


def test_several_minibatches_and_epochs_make_that_many_steps_and_start_at_ratio_one(
    tmp_path: Path, learned: Learned
) -> None:
    train = {"alg_name": "grpo", "lr": 5e-3, "minibatches": 2, "epochs": 2}
    cfg = rl_config(tmp_path, "run", run={"steps": 8}, train=train)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["data/rollout_step"] for line in lines] == [0.0] * 4 + [1.0] * 4
    for first in (lines[0], lines[4]):
        assert first["update/ratio_max"] == pytest.approx(1, abs=1e-4)
    learned("log10 of update/ratio_std", math.log10(lines[3]["update/ratio_std"]), at_least=-4)


def test_minibatches_left_empty_by_failed_rewards_do_not_end_the_run(tmp_path: Path) -> None:
    reward = tmp_path / "picky.py"
    reward.write_text(
        "def picky(prompt, completion):\n"
        "    if prompt.messages[-1]['content'].startswith(('3+', '4+', '5+', '6+')):\n        raise ValueError('no')\n"
        "    return float(len(completion) % 2)\n"
    )
    settings = {"epochs": 1, "minibatches": 4, "max_skipped_steps": 1}
    cfg = rl_config(
        *(tmp_path, "run", ["run.steps=8"]),
        train={"alg_name": "sgrpo", "lr": 1e-3, **settings},
        reward={"name": f"{reward}:picky", "max_error_rate": 1.0},
    )
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 8
    empty = [bool(line["data/empty_steps"]) for line in lines]
    assert any(one and other for one, other in zip(empty, empty[1:], strict=False)) and not all(
        empty
    )


@pytest.mark.parametrize("algorithm", ["grpo", "remax", "ppo"])
def test_a_step_of_which_every_reward_failed_asks_no_model_anything(
    tmp_path: Path, algorithm: str
) -> None:
    reward = tmp_path / "never.py"
    reward.write_text(
        "def never(prompt, completion):\n"
        "    if completion.startswith('####'):\n        return 1.0\n"
        "    raise ValueError('no')\n"
    )
    cfg = rl_config(
        tmp_path,
        "run",
        run={"steps": 2},
        train={"alg_name": algorithm, "kl_coeff": 0.1}
        if algorithm != "ppo"
        else {"alg_name": "ppo"},
        reward={"name": f"{reward}:never", "max_error_rate": 1.0},
    )
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["data/rows"] for line in lines] == [0.0, 0.0]
    assert all(line["data/empty_steps"] for line in lines)


def test_a_non_finite_step_is_refused_dumped_counted_and_finally_ends_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "loss.py").write_text(
        "def infinite(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None):\n"
        "    surprised = logprobs.min() < -4\n"
        "    return (logprobs * mask).sum() * (float('inf') if surprised else 1.0), {}\n"
    )
    loss = f"{tmp_path / 'loss.py'}:infinite"
    train = {"alg_name": "sgrpo", "lr": 1e-3, "loss": loss, "max_skipped_steps": 2}
    cfg = rl_config(
        tmp_path, "run", run={"steps": 9}, train=train, rollout={"max_tokens": 4, "n_samples": 4}
    )
    with pytest.raises((NonFiniteError, RewardError)) as caught:
        run(cfg)
    lines = metric_lines(cfg.run.directory)
    refused = [line["step"] for line in lines if line["update/skipped"]]
    assert isinstance(caught.value, NonFiniteError) and "max_skipped_steps=2" in str(caught.value)
    assert refused == [lines[-1]["step"] - 2, lines[-1]["step"] - 1, lines[-1]["step"]]
    dumps = sorted(path.name for path in (cfg.run.directory / "dumps").iterdir())
    assert dumps == [f"step_{step:08d}.safetensors" for step in refused]


def test_failing_rewards_are_counted_and_never_become_zero(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "moody.py").write_text(
        "def moody(prompt, completion):\n"
        "    if prompt.answer in ('5', '6', '7', '8', '9'):\n"
        "        raise ValueError('cannot score this')\n"
        "    return len(set(completion)) / 6\n"
    )
    reward = {"name": f"{tmp_path / 'moody.py'}:moody", "max_error_rate": 1.0}
    cfg = rl_config(tmp_path, "run", run={"steps": 2}, reward=reward)
    run(cfg)
    samples = [
        json.loads(line)
        for line in (cfg.run.directory / "samples.jsonl").read_text().split("\n")
        if line
    ]
    failed = [sample for sample in samples if sample["status"] == "error"]
    assert failed and all(s["reward"] is None and s["advantage"] is None for s in failed)
    assert all("cannot score this" in sample["reason"] for sample in failed)
    lines = metric_lines(cfg.run.directory)
    assert sum(line["reward/error"] for line in lines) == len(failed)
    assert all(line["data/rows"] + line["reward/error"] == 16 for line in lines)
    with pytest.raises(RewardError, match="max_error_rate"):
        run(
            rl_config(tmp_path, "strict", run={"steps": 3}, reward=reward | {"max_error_rate": 0.0})
        )


def test_starting_over_an_existing_run_is_refused_and_resuming_a_finished_one_does_nothing(
    tmp_path: Path,
) -> None:
    cfg = sft_config(tmp_path, "run", run={"steps": 2})
    run(cfg)
    before = final_files(cfg.run.directory)
    with pytest.raises(RunDirectoryError, match="--resume"):
        run(cfg)
    run(cfg, resume=True)
    assert final_files(cfg.run.directory) == before and len(metric_lines(cfg.run.directory)) == 2


def test_sigterm_saves_and_exits_75_and_resume_completes_the_same_run(tmp_path: Path) -> None:
    whole = rl_config(tmp_path / "whole", "run", run={"steps": 14, "checkpoint_every": 0})
    run(whole)
    cfg = rl_config(tmp_path / "stopped", "run", run={"steps": 14, "checkpoint_every": 0})
    stop_after_three_steps(cfg, tmp_path / "stopped" / "run.yaml")
    run(cfg, resume=True)
    assert metric_lines(cfg.run.directory) == metric_lines(whole.run.directory)
    assert final_files(cfg.run.directory) == final_files(whole.run.directory)


def test_the_documented_train_and_rollout_block_loads_unchanged_and_trains(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text((tmp_path / "prompts.jsonl").read_text())
    path = tmp_path / "documented.yaml"
    path.write_text(
        f"""\
run: {{name: documented, seed: 1, dir: {tmp_path / "documented"}, steps: 1, device: cpu, training_gpus: 1}}
model: {{name: "builtin:tiny", dtype: float32, gradient_checkpointing: false}}
data: {{train: {tmp_path / "prompts.jsonl"}, eval: {held_out}, prompts_per_step: 2}}
reward: {{name: {tmp_path / "reward.py"}:digits}}
train:
  alg_name: "sgrpo"
  clip_low: -0.2        # magnitudes are stored: abs() with one warning
  clip_high: 0.2
  kl_coeff: 0.0
rollout:
  temperature: 1.0
  max_tokens: 512
  n_samples: 8
  force_strict_on_policy: true
"""
    )
    with pytest.warns(UserWarning, match="clip bounds are magnitudes") as caught:
        cfg = load_config(path)
    assert len(caught) == 1 and cfg.train.clip_low == 0.2
    with pytest.warns(UserWarning, match="clip bounds are magnitudes"):
        # As it stands it takes half a minute.
        run(load_config(path, ["rollout.max_tokens=32", "run.mlflow=false"]))
    assert len(metric_lines(cfg.run.directory)) == 1


def test_eval_and_generate_read_the_checkpoint_of_a_run(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "run", run={"steps": 1, "dir": str(tmp_path / "lr: 1e-3 #2")})
    run(cfg)
    out = tmp_path / "responses.jsonl"
    overrides = [f"data.eval={tmp_path / 'prompts.jsonl'}", "data.eval_rows=5"]
    metrics = run_eval(cfg.run.directory, overrides, samples=4, temperature=1.0, out=out)
    assert (
        metrics["eval/responses"] == 20
        and {"eval/pass@1", "eval/pass@2", "eval/pass@4"} <= metrics.keys()
    )
    assert len(out.read_text().strip().split("\n")) == 20
    newest = max((cfg.run.directory / "checkpoints").glob("step_*"))
    five = Sampling(max_tokens=5)
    records = run_generate(str(newest), ["1+1=", "2+2="], samples=2, sampling=five, seed=3)
    assert [record["prompt"] for record in records] == ["1+1=", "1+1=", "2+2=", "2+2="]
    assert records == run_generate(str(newest), ["1+1=", "2+2="], samples=2, sampling=five, seed=3)


def test_both_doors_train_and_send_the_other_kind_away(tmp_path: Path) -> None:
    rl_config(tmp_path, "rl", run={"steps": 1})
    sft_config(tmp_path, "sft", run={"steps": 1})

    def door(script: str, config: str) -> subprocess.CompletedProcess[str]:
        words = ("--config", tmp_path / f"{config}.yaml")
        return oxrl(*words, folder=ROOT, script=ROOT / script)

    for script, config in (("main_rl.py", "rl"), ("main_sl.py", "sft")):
        done = door(script, config)
        assert done.returncode == 0, done.stderr
        assert "step 1/1" in done.stdout
    wrong = door("main_sl.py", "rl")
    assert wrong.returncode == 2 and "main_rl.py" in wrong.stderr


def test_minibatches_keep_groups_whole_and_use_every_row_once() -> None:
    groups = torch.tensor([9, 4, 9, 4, 7, 7, 1, 1, 30])
    parts = split_by_group(groups, 2, seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(9))
    assert not set(groups[parts[0]].tolist()) & set(groups[parts[1]].tolist())
    assert [part.tolist() for part in parts] == [
        part.tolist() for part in split_by_group(groups, 2, seed=3)
    ]
    assert split_by_group(groups, 1, seed=3)[0].tolist() == list(range(9))
