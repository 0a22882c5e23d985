"""`oxrl eval --budgets`, and what the responses of an evaluation say together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.errors import ConfigError, OxrlError
from oxrl.types import Completion, Prompt, Rollout, Score, Segment
from oxrl_stats.budgets import read_budgets, run_budgets
from oxrl_stats.evaluation import Answers, answers_of, figures_at_k, majority_at_k
from support.small_runs import model_that_stops, rl_config

VARIED = "def varied(prompt, completion):\n    return float(len(set(completion)) > 2)\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose responses have various lengths."""
    folder = tmp_path_factory.mktemp("budgets")
    (folder / "varied.py").write_text(VARIED)
    sections: dict[str, Any] = {
        "reward": {"name": f"{folder / 'varied.py'}:varied"},
        "model": {"name": str(model_that_stops(folder / "model"))},
        "data": {"eval": str(folder / "prompts.jsonl")},
    }
    cfg = rl_config(folder, "run", ["run.steps=1", "train.lr=1e-7"], **sections)
    run(cfg)
    return cfg.run.directory


def test_a_smaller_budget_gives_what_an_evaluation_with_it_gives(
    trained: Path, tmp_path: Path
) -> None:
    told = run_budgets(str(trained), (), "2,4,8", samples=4, temperature=1.0)
    lines = told.splitlines()
    for line, budget in zip(lines[1:4], (2, 4, 8), strict=True):
        fields = [f"rollout.max_tokens={budget}"]
        alone = run_eval(trained, fields, samples=4, temperature=1.0)
        low, high = alone["eval/reward_low"], alone["eval/reward_high"]
        expected = f"{alone['eval/reward']:.3f} [{low:.3f}, {high:.3f}]"
        assert line.split(maxsplit=1)[0] == str(budget) and expected in line
    assert "pass@k" in lines[5] and [line.split()[0] for line in lines[6:]] == ["1", "2", "4"]
    # Most answers end by themselves between the smallest and the largest budget.
    cut = [float(line.rsplit(maxsplit=1)[1].rstrip("%")) for line in lines[1:4]]
    assert cut[0] > cut[1] > cut[2] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budgets", "64,32"], "--budgets 64,32: write numbers of tokens that rise"),
        (["--budgets", "0,4"], "write numbers of tokens that rise"),
        (["--budgets", "few"], "write numbers of tokens that rise"),
        (["--budgets", "2,4", "--out", "x.jsonl"], "--out is for one budget"),
        (["--budgets", "2,4", "--pick", "exact"], "--pick is for one budget"),
        (["--plot", "x.svg"], "--plot draws what --budgets"),
    ],
)
def test_budgets_that_cannot_be_are_refused(
    options: list[str], said: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["eval", str(trained), *options])
    assert isinstance(done.exception, OxrlError) and done.exception.exit_code == 2
    assert said in str(done.exception)


def test_budgets_are_drawn(trained: Path, tmp_path: Path) -> None:
    picture = tmp_path / "budgets.svg"
    command = ["eval", str(trained), "--samples", "2", "--budgets", "2,4", "--plot", str(picture)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "most tokens of a response" in picture.read_text()


def test_episodes_have_no_budgets(trained: Path) -> None:
    with pytest.raises(ConfigError, match="--budgets is for prompts with one response"):
        fields = [
            "~reward.name",
            "environment.name=tools",
            "environment.options={tools: [calculator]}",
        ]
        run_budgets(str(trained), fields, "2,4", samples=1, temperature=0.0)
    assert read_budgets("7") == [7]


def rollout(answer: str, reward: float | None, *, prompt: str = "q") -> Rollout:
    segment = Segment(token_ids=(1,), logprobs=(0.0,), versions=(0,))
    score = Score(value=reward, status="ok" if reward is not None else "error", answer=answer)
    return Rollout(
        prompt=Prompt(uid=prompt, messages=(), token_ids=(1,)),
        completion=Completion(segments=(segment,), text=f" so {answer}", finish_reason="stop"),
        score=score,
        group_id=0,
        sample=0,
        seed=0,
    )


def test_the_majority_is_of_what_rewards_read_and_ties_go_to_the_first() -> None:
    table = [("4", 1.0), ("5", 0.0), ("5", 0.0), ("4", 1.0)], [("7", 0.0), ("8", 1.0)] * 2
    group = [rollout(answer, reward) for row in table for answer, reward in row]
    answers = answers_of([*group, rollout("x", None), *group[:3]], samples=4)
    assert answers.rewards.shape == (2, 4) and answers.said[0] == ["4", "5", "5", "4"]
    assert majority_at_k(answers, k=4).tolist() == [1.0, 0.0]
    assert majority_at_k(answers, k=2).tolist() == [0.5, 0.0]
    # What is left over of four is not counted.
    assert majority_at_k(answers, k=3).tolist() == [0.0, 0.0]
    assert majority_at_k(answers, k=1).tolist() == answers.rewards.mean(1).tolist()
    said = [rollout("", 1.0)]
    said[0] = Rollout(**{**vars(said[0]), "score": Score(value=1.0)})
    assert answers_of(said, samples=1).said == [["so"]]


def test_votes_of_a_model_that_is_right_more_often_than_not_are_better_than_one_answer() -> None:
    random = np.random.default_rng(0)
    right = random.random((400, 16)) < 0.6
    said = [["good" if one else f"wrong {n}" for n, one in enumerate(row)] for row in right]
    found = figures_at_k(Answers(right.astype(float), said))
    assert found["maj@1"].value == pytest.approx(right.mean())
    assert found["maj@16"].value > 0.95 > found["maj@4"].value > found["maj@1"].value
    assert found["pass@1"].low < 0.6 < found["pass@1"].high
    assert found["pass@16"].value == found["best@16"].value == right.any(1).mean()
