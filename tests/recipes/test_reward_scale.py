"""`reward.normalize` and `reward.clip`: what training sees of rewards, beside what the reward says."""

from __future__ import annotations

from pathlib import Path

import pytest

from oxrl.commands.train import run
from support.small_runs import metric_lines, rl_config


def test_a_run_trains_on_the_scale_and_records_what_the_reward_said(tmp_path: Path) -> None:
    """Advantages of plain REINFORCE are its rewards: their mean over a batch is 0 then."""
    train = {"alg_name": "reinforce", "lr": 1e-3}
    section = {"steps": 1}
    plain = rl_config(tmp_path, "plain", run=section, train=train)
    scaled = rl_config(tmp_path, "scaled", run=section, train=train, reward={"normalize": "batch"})
    run(plain)
    run(scaled)
    [first], [other] = metric_lines(plain.run.directory), metric_lines(scaled.run.directory)
    assert first["reward/mean"] == other["reward/mean"] == other["reward/normal_mean"] > 0
    assert other["reward/shaping"] == pytest.approx(-other["reward/mean"], abs=1e-6)
    assert "reward/normal_mean" not in first
    assert other["reward/clipped_frac"] == 0.0
    assert abs(other["advantage/mean"]) < abs(first["advantage/mean"])


def test_what_compares_parts_of_a_reward_one_by_one_refuses_a_scale_of_their_sum(
    tmp_path: Path,
) -> None:
    reward = {"parts": {"a": {"name": "exact"}, "b": {"name": "math"}}, "normalize": "batch"}
    rl_config(tmp_path, "sum", ["~reward.name"], reward=reward)
    with pytest.raises(ValueError, match="reads the parts"):
        rl_config(tmp_path, "run", ["~reward.name"], reward=reward, train={"alg_name": "gdpo"})


@pytest.mark.parametrize("more", ["reward.normalize=running", "reward.clip=0.5"])
def test_a_run_that_goes_on_may_begin_to_scale_its_rewards(
    more: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = rl_config(tmp_path, "run", run={"steps": 1})
    run(plain)
    scaled = rl_config(tmp_path, "run", [more], run={"steps": 2})
    with caplog.at_level("INFO"):
        run(scaled, resume=True, accept=[more.partition("=")[0]])
    assert "no rewards were normalised before; this begins now" in caplog.text
    before, *after = metric_lines(plain.run.directory)
    assert "reward/clipped_frac" not in before
    assert all("reward/clipped_frac" in line for line in after)
