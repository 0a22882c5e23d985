"""Supervised runs whose evaluations answer prompts, and runs that end when they are good enough."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.data.conversations import AnsweredPrompts
from oxrl.errors import ConfigError, DataError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.plan.plan import plan_text
from oxrl.recipes.scored_answers import evaluation_metrics
from support.figures import Learned
from support.small_runs import final_files, metric_lines, preference_config, rl_config, sft_config

ROWS = [
    {"prompt": "say", "completion": "aa", "answer": "a"},
    {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "b"}]},
]
SECTIONS: dict[str, dict[str, Any]] = {
    "reward": {"name": "{folder}/letters.py:share"},
    "rollout": {"max_tokens": 4, "eval_samples": 2, "eval_temperature": 0.0},
}


def config(folder: Path, name: str, overrides: list[str] | None = None) -> Any:
    (folder / "letters.py").write_text(
        "def share(prompt, completion):\n"
        "    same = [a == b for a, b in zip(completion, prompt.answer)]\n"
        "    return sum(same) / len(prompt.answer)\n"
    )
    rows = [{"prompt": "say", "completion": "7a7b"}, {"prompt": "tell", "completion": "7a7b"}]
    for file in ("sevens", "held_out"):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sft_config(
        folder,
        name,
        ["run.steps=40", "run.eval_every=2", "run.checkpoint_every=0", *(overrides or [])],
        reward={"name": str(folder / "letters.py:share")},
        rollout=SECTIONS["rollout"],
        data={
            "train": str(folder / "sevens.jsonl"),
            "eval": str(folder / "held_out.jsonl"),
            "rows_per_step": 2,
        },
    )


def test_an_evaluation_scores_what_the_model_answers_and_ends_the_run_that_is_good_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], learned: Learned
) -> None:
    cfg = config(tmp_path, "run", ["run.stop_at=1.0", "train.lr=2e-4", "run.keep_best=true"])
    assert "x 2 samples, every 2 optimizer steps" in plan_text(cfg)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    evaluated = [line for line in lines if "eval/reward" in line]
    learned("steps to what cannot be better", len(lines), at_most=39)
    assert [line["step"] for line in evaluated] == list(range(2, len(lines) + 1, 2))
    learned("eval/reward at first", evaluated[0]["eval/reward"], at_most=0.9)
    assert evaluated[-1]["eval/reward"] == 1.0
    assert evaluated[-1]["eval/responses"] == 4 and "eval/loss" in evaluated[-1]
    told = capsys.readouterr().out
    assert "eval reward 1.000" in told and "run.stop_at = 1 is reached: 1 at step" in told
    assert (cfg.run.directory / "best").is_dir()
    result = json.loads((cfg.run.directory / "result.json").read_text())
    assert result["step"] == len(lines)
    before = final_files(cfg.run.directory)
    run(cfg, resume=True)
    assert final_files(cfg.run.directory) == before
    assert metric_lines(cfg.run.directory) == lines


def test_evaluations_change_nothing_that_is_learned(tmp_path: Path) -> None:
    often = config(tmp_path, "often", ["run.steps=4", "run.eval_every=1"])
    once = config(tmp_path, "once", ["run.steps=4", "run.eval_every=0"])
    run(often)
    run(once)
    assert (
        final_files(often.run.directory)["model.safetensors"]
        == (final_files(once.run.directory)["model.safetensors"])
    )


@pytest.mark.parametrize(
    ("make", "key", "stop_at"),
    [
        (rl_config, "eval/reward", 0.0),
        (preference_config, "eval/accuracy", 0.0),
        (sft_config, "eval/loss", 99),
    ],
)
def test_every_recipe_ends_where_it_is_good_enough(
    make: Any, key: str, stop_at: float, tmp_path: Path
) -> None:
    make(tmp_path, "inputs")
    held_out = {"eval/accuracy": "held_out_pairs", "eval/reward": "prompts", "eval/loss": "chats"}
    data = {"eval": str(tmp_path / f"{held_out[key]}.jsonl")}
    overrides = [f"run.stop_at={stop_at}", "run.eval_every=1", "run.steps=4"]
    cfg = make(tmp_path, "run", overrides, data=data)
    run(cfg)
    (line,) = metric_lines(cfg.run.directory)
    assert key in line
    assert (cfg.run.directory / "result.json").is_file()


def test_rows_of_any_layout_become_prompts_with_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    first, second = AnsweredPrompts.load(path, builtin_tokenizer()).in_order()
    assert first.token_ids == second.token_ids
    assert (first.answer, second.answer) == ("a", "b")
    path.write_text(json.dumps({"prompt": "x"}) + "\n")
    with pytest.raises(DataError, match="nor .prompt. with a .completion."):
        AnsweredPrompts.load(path, builtin_tokenizer())


def test_what_evaluations_would_not_read_is_refused(tmp_path: Path) -> None:
    config(tmp_path, "run")
    with pytest.raises(ConfigError, match=r"set reward\.name and data\.eval, or remove it"):
        config(tmp_path, "run", ["~data.eval", "~run.eval_every"])
    with pytest.raises(ConfigError, match=r"(?s)reward\.name.*no such file"):
        config(tmp_path, "run", ["reward.name=none.py:share"])
    with pytest.raises(ConfigError, match=r"(?s)one process: set train\.backend to local"):
        config(tmp_path, "run", ["train.backend=fsdp"])
    with pytest.raises(ConfigError, match=r"without data\.eval"):
        sft_config(tmp_path, "run", ["run.stop_at=1"])


def test_of_no_responses_there_is_no_mean_reward_and_everything_else_is_zero() -> None:
    found = evaluation_metrics([], samples=2)
    assert math.isnan(found.pop("eval/reward"))
    assert set(found.values()) == {0.0} and "eval/length_mean" in found
