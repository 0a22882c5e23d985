"""`oxrl score`: the samples of a run scored again, by any reward, as if it had been there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.scored_again import ScoredAgain
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.data.samples import prompt_fields, recorded_prompt, sample_line
from oxrl.errors import ConfigError, DataError, RunDirectoryError
from oxrl.rollouts.stored import recorded_completion, stored_groups
from oxrl.types import Completion, Prompt, Rollout, Score, Segment, Turn
from oxrl_stats.score import BothRewards, Changes, ranks, report, run_score
from support.small_runs import rl_config

REWARDS = """
from oxrl.types import Score

def reads_all(prompt, completion):
    first = prompt.messages[0]["content"]
    bonus = len(first) + len(prompt.messages) + prompt.metadata["bonus"] + prompt.answer["k"]
    return bonus + sum(c.isdigit() for c in completion)

def opposite(prompt, completion):
    return -reads_all(prompt, completion)

def lengths(prompt, completions):
    if any(c.text.startswith("a") for c in completions):
        raise ValueError("an a")
    return [float(len(c.token_ids)) for c in completions]

def trl(completions, bonus, **kwargs):
    return [float(len(c[0]["content"])) + b for c, b in zip(completions, bonus)]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run on prompts of two messages, with other fields in their rows, and greedy baselines."""
    folder = tmp_path_factory.mktemp("rescore")
    (folder / "rewards.py").write_text(REWARDS)
    rows: list[dict[str, Any]] = []
    for index in range(8):
        system = {"role": "system", "content": "Be brief." + "!" * index}
        user = {"role": "user", "content": f"{index}+1="}
        answer = {"k": index}
        rows.append({"prompt": [system, user], "answer": answer, "bonus": index, "source": "sums"})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = rl_config(
        folder,
        "run",
        run={"steps": 2},
        data={"train": str(data)},
        reward={"name": f"{folder / 'rewards.py'}:reads_all"},
        train={"alg_name": "remax", "kl_coeff": 0.0},
    )
    run(cfg)
    return cfg


def named(cfg: Config, function: str) -> str:
    return f"reward.name={cfg.reward.name.rpartition(':')[0]}:{function}"


def samples_of(cfg: Config) -> list[dict[str, Any]]:
    lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_samples_hold_whole_prompts(finished: Config) -> None:
    for line in samples_of(finished):
        assert [message["role"] for message in line["messages"]] == ["system", "user"]
        assert line["messages"][1]["content"] == line["prompt"]
        assert line["metadata"] == {"bonus": line["answer"]["k"]}
        assert line["source"] == "sums" and line["plain"] is False


def test_the_same_reward_says_the_same(finished: Config) -> None:
    before = {p: p.read_bytes() for p in finished.run.directory.rglob("*") if p.is_file()}
    found = run_score(finished.run.directory, [])
    assert len(found.lines) == len(samples_of(finished)) == 2 * 4 * 5
    assert set(found.differences) == {0.0}
    assert found.changes.other_order == found.changes.turned == 0
    assert "none of 40 samples has another reward" in report(found)
    assert {p: p.read_bytes() for p in finished.run.directory.rglob("*") if p.is_file()} == before


def test_an_opposite_reward_turns_every_pair(finished: Config, tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    found = run_score(finished.run.directory, [named(finished, "opposite")], out)
    counts = found.changes
    assert counts.pairs == counts.turned > 0
    assert counts.teaching == counts.now_teaching
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    recorded = samples_of(finished)
    assert [(r["step"], r["draw"], r["sample"]) for r in rows] == [
        (line["step"], line["draw"], line["sample"]) for line in recorded
    ]
    for row, line in zip(rows, recorded, strict=True):
        assert row["reward"] == line["reward"] == -row["new_reward"]
        assert row["difference"] == row["new_reward"] - row["reward"]
        assert row["status"] == row["new_status"] == "ok"
    # Baselines are groups of their own.
    assert all(row["rank"] == row["new_rank"] == 1 for row in rows if row["sample"] == 4)


def test_rewards_of_groups_and_of_trl_read_what_they_read_in_a_run(finished: Config) -> None:
    by_length = run_score(finished.run.directory, [named(finished, "lengths")])
    for line, score in zip(by_length.lines, by_length.scores, strict=True):
        if score.value is not None:
            assert score.value == max(end for _, _, end in line["versions"])
        else:
            assert score.status == "error" and "an a" in score.reason
    by_trl = run_score(finished.run.directory, [named(finished, "trl")])
    for line, score in zip(by_trl.lines, by_trl.scores, strict=True):
        assert score.value == len(line["response"]) + line["metadata"]["bonus"]


def test_parts_and_other_settings_may_be_given(finished: Config) -> None:
    name = finished.reward.name
    parts = f"reward.parts={{all: {{name: '{name}', weight: 2}}}}"
    found = run_score(finished.run.directory, [parts, "reward.timeout_s=30"])
    assert found.now.tolist() == (2 * found.before).tolist()
    assert found.scores[0].statuses == {"all": "ok"}
    again = run_score(finished.run.directory, [parts, "reward.parts.all.weight=1"])
    assert set(again.differences) == {0.0}


def test_columns_of_small_means_stay_apart() -> None:
    line: Any = {"reward": -1.21376e-05, "status": "ok", "step": 1, "draw": 0, "sample": 0}
    found = BothRewards([ScoredAgain([line], [Score(value=-1.21376e-05)])])
    (mean,) = [row for row in report(found).splitlines() if row.startswith("mean of those")]
    assert mean.split()[-2:] == ["-1.21376e-05"] * 2


def test_the_command_says_what_would_have_changed(finished: Config) -> None:
    arguments = ["score", str(finished.run.directory), named(finished, "opposite")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "40 samples in 16 groups" in shown.output
    assert "largest changes:" in shown.output


def test_what_cannot_be_scored_is_said(finished: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        run_score(tmp_path, [])
    with pytest.raises(ConfigError, match=r"train\.lr\n.*is not what scores"):
        run_score(finished.run.directory, ["train.lr=1"])
    with pytest.raises(ConfigError, match=r"reward\.name = 'nonsense'"):
        run_score(finished.run.directory, ["reward.name=nonsense"])
    for name in ("config.yaml", "starts.jsonl"):
        (tmp_path / name).write_bytes((finished.run.directory / name).read_bytes())
    with pytest.raises(DataError, match=r"samples\.jsonl is not there"):
        run_score(tmp_path, [])
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no sample yet"):
        run_score(tmp_path, [])
    (tmp_path / "samples.jsonl").write_text('{"step": 0, "draw": 0, "sample": 0}\n')
    with pytest.raises(RunDirectoryError, match="draw 0 of step 0: not a sample"):
        run_score(tmp_path, [])
    (tmp_path / "samples.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(RunDirectoryError, match="line 1: not a sample"):
        run_score(tmp_path, [])


def test_a_prompt_and_an_episode_come_back_from_their_line() -> None:
    plain = Prompt(
        uid="p",
        messages=({"role": "user", "content": "q"},),
        token_ids=(1,),
        answer=[1],
        plain=True,
    )
    turn = Turn(text="t", messages=({"role": "user", "content": "no"},), reward=0.5, reason="r")
    segment = Segment(token_ids=(5, 6), logprobs=(-1.0, -1.0), versions=(3, 3))
    heard = Segment(
        token_ids=(7,) * 4, logprobs=(0.0,) * 4, versions=(-1,) * 4, origin="environment"
    )
    completion = Completion(
        segments=(segment, heard, segment),
        text="t",
        finish_reason="stop",
        turns=(turn,),
        opening=({"role": "user", "content": "begin"},),
        end="completed",
    )
    rollout = Rollout(
        prompt=plain, completion=completion, score=Score(value=1.0), group_id=0, sample=0, seed=0
    )
    line = json.loads(json.dumps(sample_line(rollout, step=0, advantage=None)))
    assert "messages" not in line and prompt_fields(plain) == {"prompt": "q", "plain": True}
    found = recorded_prompt(line)
    assert (found.uid, found.messages, found.answer, found.plain) == (
        plain.uid, plain.messages, plain.answer, True
    )  # fmt: skip
    again = recorded_completion(line)
    assert (again.text, again.turns, again.opening) == ("t", (turn,), completion.opening)
    assert (again.end, len(again.token_ids)) == ("completed", 8)
    # What the policy sampled is told from what it heard, as rewards of lengths do.
    assert again.sampled == completion.sampled == 4
    assert [part.versions for part in again.segments] == [(3, 3), (-1,) * 4, (3, 3)]


def test_a_baseline_is_a_group_of_its_own(tmp_path: Path) -> None:
    line = {"step": 0, "response": "t", "finish_reason": "stop", "prompt": "q", "uid": "a"}
    path = tmp_path / "samples.jsonl"
    lines = [line | {"draw": draw, "sample": sample} for draw in (4, 5) for sample in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = [
        [(line["draw"], line["sample"]) for line in stored.lines]
        for stored in stored_groups(path, samples=2)
    ]
    assert sizes == [[(4, 0), (4, 1)], [(4, 2)], [(5, 0), (5, 1)], [(5, 2)]]


def test_tokens_of_the_first_weights_are_the_policys() -> None:
    line = {"response": "t", "finish_reason": "stop", "versions": [[0, 0, 2], [-1, 2, 5]]}
    found = recorded_completion(line)
    assert [segment.origin for segment in found.segments] == ["policy", "environment"]
    assert found.sampled == 2 and all(token < 0 for token in found.token_ids)


def test_ranks_of_equal_and_missing_rewards() -> None:
    rewards = np.array([1.0, None, 3.0, 1.0 - 1e-12, 0.0], dtype=float)
    assert ranks(rewards) == [2, None, 1, 2, 4]
    assert ranks(np.zeros(0)) == []


def compared(*groups: tuple[list[float | None], list[float | None]]) -> Changes:
    """Of groups, their recorded rewards and those of now."""
    again: list[ScoredAgain] = []
    for draw, (before, now) in enumerate(groups):
        lines = [{"reward": reward, "status": "ok", "step": 1, "draw": draw} for reward in before]
        scores = [Score(value=reward, status="error" if reward is None else "ok") for reward in now]
        again.append(ScoredAgain(lines, scores))
    return BothRewards(again).changes


def test_another_best_response_is_one_that_was_not_the_best() -> None:
    assert compared(([1.0, 0.0], [2.0, 0.5])).other_best == 0
    assert compared(([1.0, 0.0], [0.5, 2.0])).other_best == 1
    assert compared(([1.0, 0.0], [1.0, 1.0])).other_best == 1
    assert compared(([-3.0, -1.0, -2.0], [-1.0, -1.0 - 1e-12, -5.0])).other_best == 1
    # Below the best, the order may be another.
    found = compared(([3.0, 2.0, 1.0], [3.0, 1.0, 2.0]), ([0.0, 1.0], [0.0, 1.0]))
    assert (found.other_best, found.other_order) == (0, 1)
    assert (found.pairs, found.turned, found.teaching, found.now_teaching) == (4, 1, 2, 2)


def test_what_has_no_score_on_one_side_is_compared_with_nothing() -> None:
    found = compared(([1.0, None, 0.0, 5.0], [0.0, 9.0, 1.0, None]), ([2.0, 2.0], [1.0, 0.0]))
    assert (found.pairs, found.turned, found.other_best) == (1, 1, 2)
    assert (found.teaching, found.now_teaching) == (1, 2)


def test_a_report_tells_means_and_what_changed_most_in_numbers_or_outcomes() -> None:
    def line(sample: int, reward: float | None) -> dict[str, Any]:
        status = "ok" if reward is not None else "error"
        return {"reward": reward, "status": status, "step": 1, "draw": 2, "sample": sample}

    scored = [
        (0.25, Score(value=0.5)),
        (0.75, Score(value=2.0, reason="better")),
        (1.0, Score(value=None, status="timeout", reason="too slow")),
        (None, Score(value=0.125)),
        (0.5, Score(value=0.5)),
    ]
    lines = [line(sample, reward) for sample, (reward, _) in enumerate(scored)]
    found = BothRewards([ScoredAgain(lines, [score for _, score in scored])])
    told = report(found).splitlines()
    [means] = [line for line in told if line.startswith("mean of those with both")]
    assert means.split()[-2:] == ["0.5", "1"]  # (0.25 + 0.75 + 0.5) / 3, (0.5 + 2 + 0.5) / 3
    assert told[told.index("largest changes:") + 1 :] == [
        "  step 1 draw 2 sample 1: 0.75 -> 2 (better)",
        "  step 1 draw 2 sample 0: 0.25 -> 0.5",
        "  step 1 draw 2 sample 2: 1 -> timeout (too slow)",
        "  step 1 draw 2 sample 3: error -> 0.125",
    ]
