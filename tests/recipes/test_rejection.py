"""Rejection-sampling fine-tuning: which responses survive, what is learned from them, and best-of-n
evaluation.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.assembly.assembly import Assembly
from oxrl.commands.evaluate import evaluation_metrics, picked_reward, run_eval
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.config.dry_run import dry_run_config
from oxrl.errors import ConfigError, DataError
from oxrl.functional.shaping import best_at_k, pass_at_k
from oxrl.plan.plan import plan_text
from oxrl.recipes.rejection import survivors
from oxrl.types import Completion, Prompt, Rollout, Score, Segment
from support.figures import Learned
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config, sft_config

SHORT = '''
from pathlib import Path

def short(prompt, completion):
    """1 for a reply of one character or two: a model that stops early gives some."""
    if Path(__file__).with_name("nothing_more").exists():
        raise RuntimeError("asked again")
    return float(1 <= len(completion) <= 2)

def ended(prompt, completion):
    """1 for every reply: those that end are kept."""
    return float(short(prompt, completion) >= 0)
'''


def rft_config(folder: Path, name: str, *overrides: str, **sections: dict[str, Any]) -> Config:
    (folder / "short.py").write_text(SHORT)
    train = {"alg_name": "rft", "lr": 1e-2} | sections.pop("train", {})
    sampling = {"max_tokens": 40, "n_samples": 24}
    reward = {"name": f"{folder / 'short.py'}:short"} | sections.pop("reward", {})
    data = {"rows_per_step": 8, "prompts_per_step": 24} | sections.pop("data", {})
    return rl_config(
        folder, name, overrides, train=train, rollout=sampling, reward=reward, data=data, **sections
    )


def small_config(folder: Path, name: str, *overrides: str, **sections: dict[str, Any]) -> Config:
    """Two steps on what is kept of few samples, whatever they say; most of them end."""
    model = {"name": str(model_that_stops(folder / "model"))}
    fewer = ["run.steps=2", "rollout.n_samples=2", f"reward.name={folder / 'short.py'}:ended"]
    return rft_config(folder, name, *fewer, *overrides, model=model, **sections)


def rollout(text: str, value: float | None, *, sample: int = 0, reason: Any = "stop") -> Rollout:
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "?"},), token_ids=(1,))
    segment = Segment(token_ids=(1,), logprobs=(0.0,), versions=(0,))
    score = Score(value=value, status="ok" if value is not None else "error")
    completion = Completion(segments=(segment,), text=text, finish_reason=reason)
    return Rollout(
        prompt=prompt, completion=completion, score=score, group_id=0, sample=sample, seed=0
    )


def test_who_survives_is_finished_good_and_different() -> None:
    group = [
        rollout("a", 1.0, sample=0),
        rollout("worse", 0.4, sample=1),
        rollout("a", 1.0, sample=2),  # the same text again
        rollout("cut", 1.0, sample=3, reason="length"),
        rollout("unscored", None, sample=4),
        rollout("best", 3.0, sample=5),
        rollout("b", 1.0, sample=6),
    ]
    assert [r.sample for r in survivors(group, keep_reward=1.0, most=None)] == [5, 0, 6]
    assert [r.sample for r in survivors(group, keep_reward=0.3, most=2)] == [5, 0]
    assert [r.sample for r in survivors(group, keep_reward=0.3, most=None)] == [5, 0, 6, 1]


def test_a_run_learns_what_was_kept_and_equals_supervised_tuning_on_it(
    tmp_path: Path, learned: Learned
) -> None:
    model = {"name": str(model_that_stops(tmp_path / "model"))}
    few = ["run.steps=12", "run.checkpoint_every=0"]
    cfg = rft_config(tmp_path, "rft", *few, "rollout.n_samples=4", model=model)
    before = run_eval(tmp_path / "rft.yaml", samples=4)
    run(cfg)
    kept = [
        json.loads(line) for line in (cfg.run.directory / "kept.jsonl").read_text().splitlines()
    ]
    assert kept and all(row["reward"] == 1.0 and len(row["completion"]) <= 2 for row in kept)
    after = run_eval(cfg.run.directory, samples=4)
    learned("gain", after["eval/reward"] - before["eval/reward"], at_least=0.3, floor=0.0)

    data = {"train": str(cfg.run.directory / "kept.jsonl"), "rows_per_step": 8}
    run(
        sft_config(
            tmp_path,
            "sft",
            few,
            model=model,
            data=data,
            train={"alg_name": "sft", "lr": 1e-2},
        )
    )
    assert metric_lines(tmp_path / "sft") == metric_lines(cfg.run.directory)
    left, right = final_files(tmp_path / "sft"), final_files(cfg.run.directory)
    assert [name for name in left if left[name] != right[name]] == []


def test_what_was_kept_may_be_longer_than_a_prompt(tmp_path: Path) -> None:
    """`data.max_prompt_tokens` is of prompts; rows of prompt and response have all of the model's."""
    most = longest_prompt_of(tmp_path)
    cfg = small_config(tmp_path, "rft", "run.steps=1", f"data.max_prompt_tokens={most}")
    run(cfg)
    whole = small_config(tmp_path, "whole", "run.steps=1")
    run(whole)
    assert final_files(cfg.run.directory) == final_files(whole.run.directory)


def longest_prompt_of(folder: Path) -> int:
    """Tokens of the longest prompt that the runs here sample for."""
    cfg = rft_config(folder, "prompts")
    prompts = Assembly(cfg).prompts(str(cfg.data.train), None)
    return max(len(prompt.token_ids) for prompt in prompts.in_order())


def test_a_resumed_run_finds_what_was_kept(tmp_path: Path) -> None:
    cfg = small_config(tmp_path, "rft")
    run(cfg)
    kept, home = (cfg.run.directory / "kept.jsonl").read_bytes(), cfg.run.directory
    again = small_config(tmp_path, "again")
    run(again)
    assert (
        again.run.directory / "kept.jsonl"
    ).read_bytes() == kept  # the same seeds, the same samples
    (home / "result.json").unlink()
    (home / "config.yaml").write_text(
        (home / "config.yaml").read_text().replace("steps: 2", "steps: 3")
    )
    (tmp_path / "nothing_more").touch()
    run(replace_steps(cfg, 3), resume=True)
    assert (home / "kept.jsonl").read_bytes() == kept and len(metric_lines(home)) == 3


def replace_steps(cfg: Config, steps: int) -> Config:
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": steps})})


def test_nothing_kept_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lower it, raise rollout.n_samples"):
        run(small_config(tmp_path, "none", train={"keep_reward": 2.0}))


def test_what_cannot_be_kept_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all samples of a prompt are identical"):
        rft_config(tmp_path, "greedy", "rollout.temperature=0")
    shares = f"data.train={{{tmp_path / 'prompts.jsonl'}: 1.0}}"
    with pytest.raises(ConfigError, match="a path without shares"):
        rft_config(tmp_path, "shares", shares)
    cfg = rft_config(tmp_path, "plan")
    assert "24 prompts x 24 samples = 576 responses; rows are those that are kept" in plan_text(cfg)
    with pytest.raises(ConfigError, match="has no dry run"):
        dry_run_config(cfg, tmp_path / "dry", "builtin:tiny")


def test_best_at_k_is_the_mean_maximum_of_all_draws_and_pass_at_k_for_rewards_0_and_1() -> None:
    rewards = torch.tensor([[0.3, -1.0, 2.0, 0.3, 0.7]])
    for k in (1, 2, 3, 5):
        draws = torch.combinations(rewards[0].double(), r=k)
        torch.testing.assert_close(
            best_at_k(rewards, k=k)[0], draws.amax(1).mean(), rtol=1e-12, atol=1e-12
        )
    binary = torch.tensor([[1.0, 0, 0, 1, 0, 0], [0.0] * 6, [1.0] * 6])
    expected = pass_at_k(torch.full((3,), 6), binary.sum(1), k=4)
    torch.testing.assert_close(best_at_k(binary, k=4), expected, rtol=1e-12, atol=1e-12)


def test_an_evaluation_reports_best_of_k_and_what_another_reward_would_pick() -> None:
    values = [0.0, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.5]
    rollouts = [rollout(str(i), value, sample=i % 4) for i, value in enumerate(values)]
    metrics = evaluation_metrics(rollouts, samples=4)
    assert metrics["eval/best@1"] == metrics["eval/reward"] == pytest.approx(1.75 / 8)
    assert (
        metrics["eval/best@4"] == pytest.approx((1.0 + 0.5) / 2) and metrics["eval/pass@4"] == 0.5
    )
    scores = [Score(value=float(v)) for v in (0, 1, 2, 0, 5, 0, 0, 1)]
    assert picked_reward(rollouts, scores, samples=4)["eval/picked@4"] == pytest.approx(
        (0.25 + 0.0) / 2
    )
    unknown = [replace(score, value=None, status="error") for score in scores[:4]] + scores[4:]
    assert picked_reward(rollouts, unknown, samples=4) == {
        "eval/picked@4": 0.0,
        "eval/picked_prompts": 1.0,
    }


def test_the_mean_reward_and_pass_at_k_are_of_the_same_prompts() -> None:
    """The second prompt lacks a score: neither its right response nor its wrong one counts."""
    values = [1.0, 0.0, 1.0, None, 0.0, 0.0]
    rollouts = [rollout(str(i), value, sample=i % 2) for i, value in enumerate(values)]
    metrics = evaluation_metrics(rollouts, samples=2)
    assert metrics["eval/reward"] == metrics["eval/pass@1"] == metrics["eval/best@1"] == 0.25
    assert metrics["eval/pass@2"] == metrics["eval/best@2"] == 0.5
    assert metrics["eval/errors"] == 1.0 and metrics["eval/responses"] == 6.0
    assert metrics["eval/truncated_frac"] == 0.0
    cut = replace(rollouts[0], completion=replace(rollouts[0].completion, finish_reason="length"))
    cut_once = evaluation_metrics([cut, *rollouts[1:]], samples=2)
    assert cut_once["eval/truncated_frac"] == pytest.approx(1 / 6)
    assert cut_once["eval/length_mean"] == pytest.approx(
        sum(one.completion.sampled for one in rollouts) / 6
    )
    # Of no prompt all scores are there.
    metrics = evaluation_metrics(rollouts[2:4], samples=2)
    assert math.isnan(metrics["eval/reward"]) and "eval/pass@1" not in metrics


def test_an_evaluation_whose_every_reward_failed_is_not_a_number() -> None:
    metrics = evaluation_metrics([rollout("a", None), rollout("b", None, sample=1)], samples=2)
    assert math.isnan(metrics["eval/reward"]) and metrics["eval/errors"] == 2.0
    failed = [Score(value=None, status="error")] * 2
    picked = picked_reward([rollout("a", 1.0), rollout("b", 1.0, sample=1)], failed, samples=2)
    assert math.isnan(picked["eval/picked@2"]) and picked["eval/picked_prompts"] == 0.0


def test_evaluation_with_a_picking_reward_runs_from_a_config(tmp_path: Path) -> None:
    held_out = {"eval": str(tmp_path / "prompts.jsonl"), "eval_rows": 8}
    rft_config(tmp_path, "eval", data=held_out)
    metrics = run_eval(tmp_path / "eval.yaml", samples=4, pick=f"{tmp_path / 'short.py'}:short")
    assert metrics["eval/picked@4"] == pytest.approx(
        metrics["eval/best@4"]
    )  # it picks by what is measured
    other = run_eval(tmp_path / "eval.yaml", samples=4, pick=f"{tmp_path / 'reward.py'}:digits")
    assert other["eval/picked@4"] <= metrics["eval/best@4"]


def test_prompts_and_kept_rows_may_stay_on_disk(tmp_path: Path) -> None:
    for name, stream in (("held", False), ("streamed", True)):
        run(small_config(tmp_path, name, data={"stream": stream}))
    for file in ("kept.jsonl", "data.json"):
        assert (tmp_path / "held" / file).read_bytes() == (
            tmp_path / "streamed" / file
        ).read_bytes()
    assert final_files(tmp_path / "held") == final_files(tmp_path / "streamed")
    assert not list(tmp_path.rglob("*.partial"))
