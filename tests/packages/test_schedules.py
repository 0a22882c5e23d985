"""Who waits for whom under which schedule: small cases by hand, and a table that was measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.errors import OxrlError
from oxrl.plan.planners import planned_lines
from oxrl.plan.recorded_run import RecordedRun, read_recorded_run
from oxrl_schedules import planner, simulator
from oxrl_schedules.simulator import (
    Work,
    blocks,
    continuous,
    free,
    logical,
    lognormal,
    propose_rounds,
    sequential,
)
from support.small_runs import rl_config


def small(lengths: Sequence[int], *, rows: int, train_s: float, **others: Any) -> Work:
    """Two slots, a second a round, whatever is in it."""
    given = {"slots": 2, "round_s": 1.0, "row_s": 0.0, "edges": True} | others
    return Work(lengths=lengths, rows=rows, train_s=train_s, **given)


# Three rows a batch: 1 and 3 begin, 2 takes the slot of 1 at the end of round 1; round 3 ends both.
THREE = (1, 3, 2)


def test_a_batch_after_the_other_takes_the_rounds_of_its_rows_and_the_training() -> None:
    """3 rounds + 2 s. At best 6 tokens in 2 slots take 3 rounds, which hide the training: 3 / 5."""
    found = sequential(small(THREE * 2, rows=3, train_s=2.0))
    assert found.seconds == 5.0 and found.share == pytest.approx(3 / 5)
    assert (found.trainer_waits, found.samplers_wait) == pytest.approx((3 / 5, 2 / 5))


def test_a_round_costs_more_for_every_row_in_it() -> None:
    """Rounds of 2, 2 and 2 rows, each 1 + 2 x 0.5 s; of one row alone 1.5 s."""
    assert sequential(small(THREE, rows=3, train_s=0.0, row_s=0.5)).seconds == 6.0
    assert sequential(small((3, 1, 1), rows=3, train_s=0.0, row_s=0.5)).seconds == 5.5


def test_a_block_is_sampled_while_the_one_before_it_trains() -> None:
    """3 s alone for the first; then 3 rounds beside 2 s of training, of which 1 s is waited for;
    the last trains alone: 3 + (2 + 1) + 2 = 8 s of two batches.
    """
    found = blocks(small(THREE * 2, rows=3, train_s=2.0), 1)
    assert found.seconds == 4.0
    assert found.trainer_waits == pytest.approx((3 + 1) / 8)
    assert found.samplers_wait == pytest.approx(2 / 8)


def test_blocks_of_two_batches_fill_slots_and_an_even_lag_is_the_odd_one_below_it() -> None:
    """Rows of 4 and 1: a batch alone takes 4 rounds with 5 tokens; two together 4, 1 | 1, 4 -> the
    second row ends after 1, the third after 2, the fourth after 6.
    """
    work = small((4, 1, 1, 4), rows=2, train_s=1.0)
    assert sequential(work).seconds == 5.0
    # One block of both: 6 rounds, then 2 s of training.
    assert blocks(work, 3).seconds == (6 + 2) / 2
    assert blocks(work, 4) == blocks(work, 3) and blocks(work, 2) == blocks(work, 1)


def test_the_logical_schedule_trains_for_so_many_rounds_whatever_they_take() -> None:
    """Lag 1, R = 2. Both batches are asked for at once: 1 and 3, then 2 (rounds 2-3), then the next
    batch: 1 (round 4), 3 (4-6), 2 (5-6). The first batch is complete after 3 rounds, so two windows
    of 2 are waited for; training hides rounds 5 and 6, in which the second is done, and no wait is
    left: 4 + 2 + 2 = 8 s.
    """
    found = logical(small(THREE * 2, rows=3, train_s=2.0), 1, 2)
    assert found.seconds == 4.0 and found.trainer_waits == pytest.approx(4 / 8)
    # Who waits waits for a whole window: 5 of the 6 rounds, and the last one is hidden.
    assert logical(small(THREE * 2, rows=3, train_s=5.0), 1, 5).seconds == (5 + 5 + 5) / 2
    # With windows of 3 the first batch costs 3, and 3 rounds beside 2 s of training cost 1 more.
    assert logical(small(THREE * 2, rows=3, train_s=2.0), 1, 3).seconds == (3 + 1 + 2 + 2) / 2


def test_the_free_schedule_trains_a_batch_as_soon_as_it_is_there() -> None:
    """3 rounds, then 2 s of training beside rounds 4 and 5; round 6 is waited for: 3 + 2 + 1 + 2."""
    found = free(small(THREE * 2, rows=3, train_s=2.0), 1)
    assert found.seconds == 4.0 and found.trainer_waits == pytest.approx((3 + 1) / 8)
    # The second batch is there with the first one, and trains while 10 is at rounds 3 to 4 of 10.
    found = free(small((1, 1, 10), rows=1, train_s=2.0), 2)
    assert found.seconds == pytest.approx((1 + 2 + 2 + 6 + 2) / 3)
    # Weights come between two rounds: the one that is under way when training ends goes on.
    assert free(small(THREE * 2, rows=3, train_s=1.5), 1).seconds == (3 + 0.5 + 1.5 + 1 + 1.5) / 2


def test_a_row_longer_than_its_windows_is_waited_for() -> None:
    """Lag 1, R = 2, one slot for each row: of the batch that is asked for at the start 2 rounds are
    waited for with the first batch, and 2 are hidden by its training. A row of 4 costs nothing more;
    one of 5 is waited for, for a round.
    """
    for longest, seconds in ((4, 2 + 2 + 2), (5, 2 + 2 + 1 + 2)):
        work = small((2, longest), rows=1, train_s=2.0)
        assert 2 * logical(work, 1, 2).seconds == seconds


@pytest.mark.parametrize("schedule", [lambda work: blocks(work, 1), lambda work: free(work, 1)])
def test_one_process_that_samples_and_trains_overlaps_nothing(schedule: Any) -> None:
    work = small(THREE * 2, rows=3, train_s=2.0, overlaps=False)
    # The slots are fuller all the same where rows of the next batch are taken along: 6 rounds.
    assert schedule(work).seconds == sequential(work).seconds == (6 + 4) / 2
    assert logical(work, 1, 3).seconds == (6 + 4) / 2


# Measured with the real local sampler: 24 batches, the first and the last ones too.
SEQUENTIAL = 0.27
IN_BLOCKS = {1: 0.37, 2: 0.37, 4: 0.52, 8: 0.60}
LOGICAL = {1: 0.45, 2: 0.59, 4: 0.80}


def table_work(*, seed: int = 1, edges: bool = True) -> Work:
    """64 rows at once, 16 prompts x 8 samples, lognormal with sigma 1, cut at ten medians, training
    as long as ideal sampling; a full round costs a third more than an empty one.
    """
    lengths = lognormal(24 * 128, median=24, cap=246, seed=seed)
    work = Work(
        lengths=lengths, rows=128, slots=64, round_s=0.02, row_s=1e-4, train_s=0.0, edges=edges
    )
    return dataclasses.replace(work, train_s=work.ideal_rounds * work.full_round_s)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shares_of_the_ideal_are_those_that_were_measured(seed: int) -> None:
    work = table_work(seed=seed)
    rounds = round(work.ideal_rounds)
    assert sequential(work).share == pytest.approx(SEQUENTIAL, rel=0.15)
    for lag, share in IN_BLOCKS.items():
        assert blocks(work, lag).share == pytest.approx(share, rel=0.15)
    for lag, share in LOGICAL.items():
        assert logical(work, lag, rounds).share == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize("edges", [True, False])
def test_a_larger_lag_is_never_slower(edges: bool) -> None:
    work = table_work(edges=edges)
    rounds = round(work.ideal_rounds)
    for schedule in (blocks, free, lambda work, lag: logical(work, lag, rounds)):
        shares = [sequential(work).share, *(schedule(work, lag).share for lag in range(1, 9))]
        # Rows of other batches move the last digits.
        assert all(
            after >= 0.98 * before for before, after in zip(shares, shares[1:], strict=False)
        )
        assert shares[4] > 1.5 * shares[0]


def test_one_seed_gives_one_result() -> None:
    assert lognormal(9, median=24, cap=99, seed=3) == lognormal(9, median=24, cap=99, seed=3)
    assert lognormal(9, median=24, cap=99, seed=3) != lognormal(9, median=24, cap=99, seed=4)
    assert continuous(table_work(), 2) == continuous(table_work(), 2)


def test_rounds_that_are_proposed_are_about_those_of_training() -> None:
    work = table_work(edges=False)
    proposed = propose_rounds(work, 4)
    assert 0.5 <= proposed / work.ideal_rounds <= 1.3
    assert continuous(work, 4).share >= logical(work, 4, round(work.ideal_rounds)).share
    assert continuous(work, 4).share > 1.3 * blocks(work, 4).share


def test_what_no_lag_hides_is_told_with_what_to_change() -> None:
    """The longest row may be (n + 1) R rounds."""
    work = small((2, 2, 2, 40) * 8, rows=4, train_s=4.0, edges=False)
    (label, text), (_, told) = planner.rounds_lines(work, 1)
    rounds = propose_rounds(work, 1)
    assert label == "rounds" and text.startswith(f"rollout.rounds={rounds}: ")
    assert told.startswith(f"25.0% of the responses have more than {2 * rounds} tokens")
    for field in ("rollout.max_staleness", "data.prompts_per_step", "rollout.max_tokens"):
        assert field in told
    assert len([*planner.rounds_lines(work, 20)]) == 1


@pytest.mark.parametrize("lengths", [(), (3, 0), (3, -1), (3,)])
def test_work_of_no_token_or_of_no_batch_is_refused(lengths: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=rf"^{len(lengths)} responses, the shortest of"):
        small(lengths, rows=2, train_s=1.0)


# --- `oxrl plan CONFIG --like RUN`.
STEP = {"time/rollout_s": 4.0, "time/update_s": 2.0, "time/eval_s": 1.0, "time/step_s": 7.5}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of two steps: rounds of 4 rows that took 0.2 s, and rounds of 8 rows that took 0.4 s."""
    cfg = rl_config(tmp_path, "new", ["inference_engine.max_rows=4"])
    run = tmp_path / "old"
    (run / "checkpoints").mkdir(parents=True)
    (run / "starts.jsonl").write_text("{}\n")
    (run / "config.yaml").write_text("inference_engine:\n  actors: 0\n")
    steps = [
        {"step": 1, "rollout/decode_steps": 20.0, "rollout/mean_active_rows": 4.0, **STEP},
        {"step": 2, "rollout/decode_steps": 10.0, "rollout/mean_active_rows": 8.0, **STEP},
    ]
    write(run / "metrics.jsonl", steps)
    write(run / "samples.jsonl", [{"versions": [[0, 0, 3], [1, 3, 5]]}, {"versions": []}])
    assert cfg.run.directory.name == "new"
    return run


def write(path: Path, lines: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def plan_of(recorded: Path, *overrides: str) -> list[str]:
    cfg = rl_config(recorded.parent, "new", ["inference_engine.max_rows=4", *overrides])
    return [*planned_lines(cfg, recorded)]


def test_a_run_tells_lengths_and_the_seconds_of_a_round_by_its_rows(recorded: Path) -> None:
    """0.2 s at 4 rows and 0.4 s at 8 are 0.05 s a row, of which at most 0.9 of a round; training is
    7.5 - 4 - 1 s.
    """
    found = read_recorded_run(recorded)
    assert found.lengths == [5] and found.train_s == 2.5
    assert found.row_s == pytest.approx(0.9 * 0.3 / 6)
    assert found.round_s + 6 * found.row_s == pytest.approx(0.3)


def test_a_plan_says_who_waits_for_whom_by_lag(recorded: Path) -> None:
    """16 rows of 5 tokens in 4 slots: 20 rounds of 0.03 + 4 x 0.045 = 0.21 s, and 2.5 s of training.

    Rows are alike, so blocks fill slots as well as anything: only what overlaps is gained.
    """
    nothing, first, sequence, *ahead = plan_of(recorded, "train.minibatches=2")
    assert nothing.startswith("overlap     none") and "inference_engine.processes=1" in nothing
    assert "by 1 responses" in first and "a full round 0.21 s, training 2.5 s a batch" in first
    assert "rollout.max_staleness=0: 6.7 s a batch, 0.63 of the ideal; the trainer" in sequence
    assert "waits 63% of the time for samplers, they 37%" in sequence
    lags = [line.split("=")[1].partition(":")[0] for line in ahead]
    assert lags == ["2", "4", "8", "16"]
    assert all("6.7 s a batch, 0.63 of the ideal" in line for line in ahead)
    # Rounds of two samplers with half of the rows each: all of it is hidden.
    _, _, *ahead = plan_of(recorded, "inference_engine.actors=2")
    assert all("2.5 s a batch, " in line for line in ahead)
    assert all(float(line.split(" a batch, ")[1].split()[0]) >= 0.98 for line in ahead)


def test_rounds_are_proposed_where_they_are_counted(recorded: Path) -> None:
    assert not [line for line in plan_of(recorded) if "rollout.rounds" in line]
    lag = ("rollout.max_staleness=4", "rollout.force_strict_on_policy=false")
    found = [line for line in plan_of(recorded, *lag) if "rollout.rounds=" in line]
    assert len(found) == 1 and found[0].startswith("rounds      rollout.rounds=")
    free = plan_of(recorded, *lag, "rollout.schedule=free")
    assert not [line for line in free if "rollout.rounds" in line]


def test_without_a_run_a_plan_says_what_is_true_of_all(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "new")
    assert [*planned_lines(cfg, None)] == []
    lag = ["rollout.max_staleness=1", "rollout.force_strict_on_policy=false"]
    [line] = planned_lines(rl_config(tmp_path, "new", lag), None)
    assert line.startswith("overlap     none, whatever rollout.max_staleness is")
    assert [
        *planned_lines(rl_config(tmp_path, "new", [*lag, "inference_engine.processes=1"]), None)
    ] == []


def no_samples(run: Path) -> None:
    (run / "samples.jsonl").unlink()


def no_run(run: Path) -> None:
    (run / "config.yaml").unlink()


def no_token(run: Path) -> None:
    write(run / "samples.jsonl", [{"versions": [[0, 0, 3]]}, {"versions": [[0, 0, 0]]}])


def only_empty(run: Path) -> None:
    write(run / "samples.jsonl", [{"versions": []}])


def other_lines(run: Path) -> None:
    write(run / "samples.jsonl", [{"reward": 1.0}])


def no_rounds(run: Path) -> None:
    write(run / "metrics.jsonl", [{"step": 1, **STEP}])


def sampled_ahead(run: Path) -> None:
    line = {"step": 1, "rollout/decode_steps": 20.0, "rollout/mean_active_rows": 4.0, **STEP}
    write(run / "metrics.jsonl", [line | {"data/staleness_max": 1.0}])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_samples, "samples.jsonl is not there: only reinforcement learning records samples"),
        (no_run, "is no run directory: there is no config.yaml of a run in it"),
        (no_token, "samples.jsonl, line 2: versions = [[0, 0, 0]] says of no token"),
        (only_empty, "samples.jsonl holds no response with a token"),
        (other_lines, "samples.jsonl, line 1: versions = None"),
        (no_rounds, "metrics.jsonl does not say what a decode round takes"),
        (sampled_ahead, "with rollout.max_staleness=0"),
    ],
)
def test_a_run_that_cannot_tell_is_refused_before_anything_is_printed(
    recorded: Path, damage: Any, words: str
) -> None:
    damage(recorded)
    config = str(recorded.parent / "new.yaml")
    found = CliRunner().invoke(app, ["plan", config, "--like", str(recorded)])
    assert isinstance(found.exception, OxrlError) and found.exception.exit_code == 2
    assert words in str(found.exception)
    assert found.output == ""


def test_a_run_that_does_not_sample_and_train_is_like_no_other(recorded: Path) -> None:
    cfg = rl_config(recorded.parent, "new", ["run.only=rollouts"])
    with pytest.raises(OxrlError, match="is for a run that samples and trains") as refused:
        [*planned_lines(cfg, recorded)]
    assert refused.value.exit_code == 2


def test_the_simulator_knows_no_run() -> None:
    assert "oxrl." not in Path(simulator.__file__).read_text().replace("oxrl_", "")
    assert RecordedRun.__module__ == "oxrl.plan.recorded_run"
