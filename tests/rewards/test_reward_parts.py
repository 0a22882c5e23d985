"""What a reward says its score is made of is recorded."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.commands.train import check_accepted, run
from oxrl.config import Config, load_config
from oxrl.data.batching import to_rollout_batch
from oxrl.errors import ConfigError, RewardDefinitionError, RunDirectoryError
from oxrl.functional.part_advantages import group_normalize_parts
from oxrl.rollouts.parts import (
    alike_groups,
    groups_of_different_parts,
    metrics_of_parts,
    part_metrics,
)
from oxrl.types import Completion, Prompt, Rollout, Score, Segment
from support.small_runs import metric_lines, rl_config

REWARD = """
from oxrl.types import Score

def score(prompt, completion):
    long = len(completion) / 10
    parts = {"long": long} if len(completion) % 2 else {"long": long, "even": 1.0}
    return Score(value=sum(parts.values()), parts=parts)

def of_verl(solution_str, ground_truth):
    return {"score": 1.0, "letters": len(solution_str), "note": "no number"}
"""


def test_parts_have_means_spreads_and_counts_by_name() -> None:
    scores = [
        Score(value=1.0, parts={"a": 1.0, "b": 4.0}),
        Score(value=1.0, parts={"a": 3.0}),
        Score(value=None, status="error", reason="x"),
    ]
    assert part_metrics(scores) == {
        "reward/part/a": 2.0,
        "reward/part/a/std": math.sqrt(2),
        "reward/part/a/count": 2.0,
        "reward/part/b": 4.0,
        "reward/part/b/std": 0.0,
        "reward/part/b/count": 1.0,
    }
    assert part_metrics([Score(value=1.0)]) == {}


def test_groups_are_counted_whose_baseline_a_failed_part_moves() -> None:
    def scored(group: int, status: str, value: float | None = 1.0) -> Rollout:
        statuses: dict[str, Any] = {"a": "ok", "b": status}
        score = Score(value=value, status="ok" if value else "error", statuses=statuses)
        prompt = Prompt(uid="p", messages=(), token_ids=(1,))
        completion = Completion(segments=(), text="", finish_reason="stop")
        return Rollout(
            prompt=prompt, completion=completion, score=score, group_id=group, sample=0, seed=0
        )

    rollouts = [
        # Counts for one and not for the other.
        *(scored(0, "ok"), scored(0, "timeout"), scored(0, "error")),
        *(scored(1, "invalid"), scored(1, "ok")),
        # For all, or for none.
        *(scored(2, "ok"), scored(2, "ok")),
        *(scored(3, "error"), scored(3, "timeout")),
        *(scored(4, "left_out"), scored(4, "error")),
        # The response without it has no score at all.
        *(scored(5, "ok"), scored(5, "error", value=None)),
    ]
    found = metrics_of_parts(rollouts, ())
    assert found["reward/part/a/uneven_groups"] == 0.0
    assert found["reward/part/b/uneven_groups"] == 2.0
    assert found["reward/part/b/left_out"] == 1.0
    assert found["reward/part/b/error"] == 4.0


def test_groups_teach_where_a_part_of_a_scored_response_differs() -> None:
    def scored(group: int, value: float | None, **parts: float) -> Rollout:
        score = Score(value=value, status="error" if value is None else "ok", parts=parts)
        completion = Completion(segments=(), text="", finish_reason="stop")
        prompt = Prompt(uid="p", messages=(), token_ids=(1,))
        return Rollout(
            prompt=prompt, completion=completion, score=score, group_id=group, sample=0, seed=0
        )

    rollouts = [
        # Equal sums of parts that differ.
        *(scored(3, 1.0, a=1.0, b=0.0), scored(3, 1.0, a=0.0, b=1.0)),
        # Equal parts; one differs where the response has no score.
        *(scored(1, 1.0, a=1.0), scored(1, 1.0, a=1.0), scored(1, None, a=0.0)),
        # A part that nobody compares differs.
        *(scored(2, 1.0, a=1.0, c=0.0), scored(2, 1.0, a=1.0, c=1.0)),
        # One alone has nothing to differ from.
        scored(4, 1.0, a=1.0, b=0.0),
    ]
    assert groups_of_different_parts(rollouts, ["a", "b"]) == [3]
    assert alike_groups(rollouts, ["a", "b"]) == 0.75
    assert groups_of_different_parts(rollouts, ["a", "b", "c"]) == [2, 3]
    assert alike_groups(rollouts[4:5], ["a"]) == 1.0


def test_a_part_that_is_left_out_is_compared_with_nothing() -> None:
    def scored(place: int, a: float, b: float | None) -> Rollout:
        parts = {"a": a} if b is None else {"a": a, "b": b}
        statuses: dict[str, Any] = {"a": "ok", "b": "error" if b is None else "left_out"}
        segment = Segment(token_ids=(5,), logprobs=(-1.0,), versions=(0,))
        completion = Completion(segments=(segment,), text="", finish_reason="stop")
        prompt = Prompt(uid="p", messages=(), token_ids=(1,))
        score = Score(value=a, parts=parts, statuses=statuses)
        return Rollout(
            prompt=prompt, completion=completion, score=score, group_id=0, sample=place, seed=0
        )

    # The same of `a`; `b` differs, but failed on the third response.
    rollouts = [scored(0, 1.0, 1.0), scored(1, 1.0, 0.0), scored(2, 1.0, None)]
    assert groups_of_different_parts(rollouts, ["a", "b"]) == []
    batch = to_rollout_batch(rollouts, pad_id=0)
    assert batch.part_rewards["b"].isnan().all()
    parts = torch.stack([batch.part_rewards["a"], batch.part_rewards["b"]], 1)
    advantages = group_normalize_parts(parts, torch.ones(2), batch.group_ids)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("optional", [True, "group"])
def test_a_run_says_where_a_part_failed_for_some_of_a_group(
    tmp_path: Path, optional: bool | str
) -> None:
    cfg = two_parts(tmp_path, "run", name=f"{tmp_path / 'parts.py'}:moody", optional=optional)
    run(cfg)
    samples = [line for line in samples_of(cfg) if line["step"] == 1]
    failed = {line["draw"] for line in samples if line["part_statuses"]["even"] == "error"}
    kinds: dict[int, set[str]] = {}
    for line in samples:
        kinds.setdefault(line["draw"], set()).add(line["part_statuses"]["even"])
    line = metric_lines(cfg.run.directory)[0]
    assert failed
    if optional is True:
        uneven = sum(found == {"ok", "error"} for found in kinds.values())
        assert line["reward/part/even/uneven_groups"] == uneven > 0
        assert line["reward/part/even/left_out"] == 0.0
        return
    assert line["reward/part/even/uneven_groups"] == 0.0
    assert line["reward/part/even/left_out"] > 0.0
    for sample in samples:
        counted = 0.0 if sample["draw"] in failed else 0.25 * sample["parts"]["even"]
        assert sample["reward"] == pytest.approx(sample["parts"]["digits"] + counted)


@pytest.mark.parametrize(
    ("function", "names"), [("score", {"long", "even"}), ("of_verl", {"letters"})]
)
def test_parts_of_a_run_are_in_its_samples_and_metrics(
    tmp_path: Path, function: str, names: set[str]
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    cfg = rl_config(
        tmp_path, "run", run={"steps": 1}, reward={"name": f"{tmp_path / 'mine.py'}:{function}"}
    )
    run(cfg)
    lines = [
        json.loads(line) for line in (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    ]
    found = metric_lines(cfg.run.directory)[-1]
    for name in names:
        values = [line["parts"][name] for line in lines if name in line["parts"]]
        assert found[f"reward/part/{name}"] == pytest.approx(statistics.fmean(values))
        assert found[f"reward/part/{name}/count"] == len(values)
    assert not [key for key in found if key.startswith("reward/part/note")]


PARTS = """
def digits(prompt, completion):
    return sum(character.isdigit() for character in completion) / 6

def even(prompt, completion):
    if completion.startswith("a"):
        raise ValueError("an a")
    return float(len(completion) % 2 == 0)

def moody(prompt, completion):
    if sum(map(ord, completion)) % 4 == 0:
        raise ValueError("a mood")
    return 1.0

def calm(prompt, completion):
    return float(len(completion) % 2 == 0)

def broken(prompt, completion):
    return 1 / 0
"""


def two_parts(folder: Path, run_name: str, **even: object) -> Config:
    """A run whose reward has two parts, the second of which sometimes fails."""
    file = folder / "parts.py"
    file.write_text(PARTS)
    parts = {
        "digits": {"name": f"{file}:digits"},
        "even": {"name": f"{file}:even", "weight": 0.25, **even},
    }
    reward = {"parts": parts, "max_error_rate": 1.0}
    return rl_config(folder, run_name, ["~reward.name"], run={"steps": 2}, reward=reward)


def samples_of(cfg: Config) -> list[dict[str, Any]]:
    lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_of_two_parts_records_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = two_parts(tmp_path, "run", name=f"{tmp_path / 'parts.py'}:calm")
    run(cfg)
    samples = samples_of(cfg)
    for line in samples:
        assert line["part_statuses"] == {"digits": "ok", "even": "ok"}
        parts = line["parts"]
        assert line["reward"] == pytest.approx(parts["digits"] + 0.25 * parts["even"])
    last = metric_lines(cfg.run.directory)[-1]
    rows = [line for line in samples if line["step"] == last["step"]]
    for name in ("digits", "even"):
        values = [line["parts"][name] for line in rows]
        assert last[f"reward/part/{name}"] == pytest.approx(statistics.fmean(values))
        assert last[f"reward/part/{name}/std"] == pytest.approx(statistics.stdev(values))
        for status in ("timeout", "error", "invalid"):
            assert last[f"reward/part/{name}/{status}"] == 0.0
    shown = capsys.readouterr().out
    assert f"even {last['reward/part/even']:.3f}" in shown


def test_files_of_parts_are_pinned_by_the_field_that_names_them(tmp_path: Path) -> None:
    cfg = two_parts(tmp_path, "run")
    run(cfg)
    (cfg.run.directory / "result.json").unlink()
    noted = json.loads((cfg.run.directory / "inputs.json").read_text())
    assert {"reward.parts.digits.name", "reward.parts.even.name"} <= noted.keys()
    (tmp_path / "parts.py").write_text(PARTS + "\n# changed\n")
    with pytest.raises(RunDirectoryError, match=r"reward\.parts\.even\.name: parts\.py") as raised:
        run(cfg, resume=True)
    assert "--accept-changes=reward.parts.even.name" in str(raised.value)
    again = load_config(cfg.run.directory / "config.yaml", ["reward.parts.even.weight=0.5"])
    with pytest.raises(RunDirectoryError, match=r"reward\.parts\.even\.weight: 0\.25 in config"):
        run(again, resume=True)
    with pytest.raises(ConfigError, match="no such field"):
        check_accepted(["reward.part.even.weight"], resume=True)
    check_accepted(["reward.parts.even.weight"], resume=True)


def test_a_part_that_scores_no_prompt_of_the_data_stops_the_run_before_it_begins(
    tmp_path: Path,
) -> None:
    cfg = two_parts(tmp_path, "run", name=f"{tmp_path / 'parts.py'}:broken")
    with pytest.raises(RewardDefinitionError, match=r"reward\.parts\.even\.name=") as raised:
        run(cfg)
    assert raised.value.exit_code == 2
    assert not cfg.run.directory.exists()
