"""A run that can learn nothing says so, by name and once."""

from __future__ import annotations

import logging
import math
import runpy
import subprocess
from pathlib import Path

import pytest

from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.errors import ConfigError, Interrupted
from oxrl.rewards.repeats import MOST, Repeats, differs
from oxrl.runs.health import Health, verdicts
from oxrl.runs.health_checks import PATIENCE, SIGNS, History
from oxrl.tables.watch import HEALTH_CHECKS
from oxrl.types import Completion, Metrics, Prompt, Score
from support.command_line import oxrl
from support.small_runs import metric_lines, rl_config

FINE: Metrics = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/failed_frac": 0.0,
    "update/grad_norm": 0.1,
    "update/skipped": 0.0,
    "policy/entropy": 1.0,
}
SHOWN: dict[str, Metrics] = {
    "zero-reward": {"reward/max": 0.0, "update/grad_norm": 0.0},
    "constant-reward": {"reward/min": 1.0, "update/grad_norm": 0.0},
    "failing-rewards": {"reward/failed_frac": 0.5},
    "zero-gradient": {"update/grad_norm": 0.0},
    "uniform-entropy": {"policy/entropy": math.log(260) - 1e-4},
    "same-groups": {"reward/zero_variance_groups": 0.95, "reward/all_pass_groups": 0.1},
    "entropy-collapse": {"policy/entropy": 0.04},
    "repeated-responses": {"data/looping_frac": 0.5},
    "truncated-responses": {"data/truncated_frac": 0.6},
    "clipped-tokens": {"update/clip_frac_high": 0.2, "update/clip_frac_low": 0.15},
    "jumping-policy": {"kl/old_k3": 0.2},
    "sampler-mismatch": {"mismatch/kl_k3": 0.02},
    "far-from-reference": {"kl/ref_k3": 1.5},
    "displaced-likelihood": {"preference/displacement": 0.06},
    "dropped-rows": {"data/dropped_rows": 8.0, "data/rows": 8.0},
    "stale-samples": {"data/staleness_mean": 5.0},
    "large-updates": {"update/update_norm_ratio": 0.2},
    "nothing-trained": {"data/empty_steps": 1.0},
    "unlike-teacher": {"teacher/overlap": 0.49},
    "unseen-by-teacher": {"teacher/mass": 0.49},
    "lost-prefix": {"teacher/gap_first": -0.5, "teacher/gap_last": -1.6},
    "clamped-teacher": {"teacher/clamped_frac": 0.1},
}
# The same checks on what a run shows that learns: each just short of its threshold.
HEALTHY: Metrics = FINE | {
    "reward/failed_frac": 0.49,
    "reward/zero_variance_groups": 0.89,
    "reward/all_pass_groups": 0.2,
    "policy/entropy": 0.06,
    "data/looping_frac": 0.49,
    "data/duplicate_frac": 0.89,
    "data/truncated_frac": 0.49,
    "data/length_mean": 19.9,
    "data/dropped_rows": 7.0,
    "data/rows": 8.0,
    "data/staleness_mean": 3.9,
    "update/grad_norm": 4.9,
    "update/clip_frac_high": 0.2,
    "update/clip_frac_low": 0.09,
    "update/update_norm_ratio": 0.09,
    "kl/old_k3": 0.09,
    "kl/ref_k3": 0.9,
    "mismatch/kl_k3": 0.009,
    "preference/displacement": 0.05,
    "teacher/overlap": 0.5,
    "teacher/mass": 0.5,
    "teacher/gap_first": -0.5,
    "teacher/gap_last": -1.4,
    "teacher/clamped_frac": 0.09,
    "monitor/gap_low": 0.05,
    "monitor/grader": 0.6,
}

# Shown by what was before: tests of their own.
OF_HISTORY = {"flat-reward", "growing-length", "skipped-steps", "gradient-spike", "hacked-reward"}
PATIENCE_OF = {sign.name: sign.patience for sign in SIGNS}


def test_every_sign_is_tested() -> None:
    assert {*HEALTH_CHECKS} == {*SHOWN} | OF_HISTORY
    assert len(HEALTH_CHECKS) >= 15
    assert all(sign.threshold and sign.reads and sign.advice for sign in SIGNS)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(",")[0] for record in caplog.records]


@pytest.mark.parametrize("name", SHOWN)
def test_a_sign_is_told_once_after_a_few_steps_in_a_row(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(260)
    patience = PATIENCE_OF[name]
    for _ in range(5):
        health.look(FINE)
    for _ in range(patience - 1):
        health.look(FINE | SHOWN[name])
    health.look(FINE)
    assert caplog.text == ""
    for _ in range(3 * patience):
        health.look(FINE | SHOWN[name])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{name}, {patience} steps in a row: ")


def test_every_check_is_silent_short_of_its_threshold(caplog: pytest.LogCaptureFixture) -> None:
    """The reward rises slowly, and one step of twelve is refused."""
    assert {name for sign in SIGNS for name in sign.reads} - {"reward/mean"} <= HEALTHY.keys()
    start = HEALTHY | {"data/length_mean": 10.0, "update/grad_norm": 0.1, "policy/entropy": 1.0}
    health = Health(260)
    for step in range(320):
        line = start if step < 20 else HEALTHY
        refused = float(step % 12 == 11)
        health.look(line | {"reward/mean": 0.001 * step, "update/skipped": refused})
    assert caplog.text == ""


def test_the_page_of_the_checks_is_what_they_are() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    maker = runpy.run_path(str(docs / "make_health.py"))
    page = (docs / "health.md").read_text(encoding="utf-8")
    assert page == maker["HEAD"] + "".join(map(maker["section"], SIGNS)) + maker["TAIL"]
    for verdict in verdicts([]):
        file, _, anchor = verdict.page.partition("#")
        assert file == "docs/health.md" and f"\n## {anchor}\n" in page


def test_signs_of_the_past_are_told(caplog: pytest.LogCaptureFixture) -> None:
    noise = [0.01 * (step % 7) for step in range(120)]
    flat = Health()
    for step in range(120):
        flat.look(FINE | {"reward/mean": 0.3 + noise[step]})
    rising, solved, short = Health(), Health(), Health()
    for step in range(300):
        rising.look(FINE | {"reward/mean": 0.003 * step + noise[step % 120]})
        solved.look(FINE | {"reward/mean": 0.99})
    for _ in range(90):
        short.look(FINE | {"reward/mean": 0.3})
    assert told(caplog) == ["flat-reward"]
    caplog.clear()
    longer, better = Health(), Health()
    for step in range(80):
        line = FINE | {"data/length_mean": 10.0 + step}
        longer.look(line | {"reward/mean": 0.3})
        better.look(line | {"reward/mean": 0.3 + 0.005 * step})
    assert told(caplog) == ["growing-length"]
    caplog.clear()
    skipping, spiking = Health(), Health()
    for step in range(40):
        skipping.look(FINE | {"update/skipped": float(step % 5 == 4)})
        spiking.look(FINE | {"update/grad_norm": 6.0 if step == 30 else 0.1})
    assert told(caplog) == ["skipped-steps", "gradient-spike"]


def seen(lines: list[Metrics], vocabulary: int = 260) -> History:
    history = History(vocabulary)
    for line in lines:
        history.add(line)
    return history


def rewards(values: list[float], best: float = 1.0) -> list[Metrics]:
    return [{"reward/mean": value, "reward/max": best} for value in values]


HIGH_AT_FIRST = rewards([10.0] + 49 * [0.25] + 50 * [0.375], best=20.0)
LONGER = 5 * [{"data/length_mean": 10.0, "reward/mean": 0.5}]
SAME = {"data/duplicate_frac": 0.95}
USUAL = {"update/grad_norm": 0.1}
SPIKE = {"update/grad_norm": 6.0}


@pytest.mark.parametrize(
    ("name", "history", "told"),
    [
        ("zero-gradient", [FINE | {"update/grad_norm": 1e-12}], True),
        ("zero-gradient", [FINE | {"update/grad_norm": 2e-12}], False),
        ("flat-reward", HIGH_AT_FIRST, True),
        ("flat-reward", HIGH_AT_FIRST[1:], False),
        # A run whose first steps have no rewards.
        ("flat-reward", 10 * [FINE] + rewards(90 * [0.25]), False),
        ("flat-reward", rewards(100 * [0.25]), True),
        ("flat-reward", rewards(100 * [1.0], best=2.0), True),
        ("flat-reward", rewards(100 * [1.9375], best=2.0), False),
        # A rise of 0.1 that the noise of one step would hide, and that of a mean of 50 does not.
        ("flat-reward", rewards(50 * [0.4] + 25 * [0.0, 1.0]), False),
        ("growing-length", LONGER + 45 * [{"data/length_mean": 20.5, "reward/mean": 0.5}], True),
        ("growing-length", LONGER + 45 * [{"data/length_mean": 19.5, "reward/mean": 0.5}], False),
        ("repeated-responses", [SAME], True),
        ("repeated-responses", [SAME | {"reward/all_pass_groups": 0.5}], False),
        ("clipped-tokens", [{"update/clip_frac_high": 0.3}], True),
        ("clipped-tokens", [{"update/clip_frac_low": 0.3}], True),
        ("gradient-spike", [*10 * [USUAL], SPIKE], True),
        ("gradient-spike", [*9 * [USUAL], SPIKE], False),
    ],
)
def test_where_a_sign_begins_and_ends(name: str, history: list[Metrics], told: bool) -> None:
    sign = {sign.name: sign for sign in SIGNS}[name]
    assert sign.holds(seen(history)) is told


def test_one_token_alone_has_no_entropy_to_lack() -> None:
    sign = {sign.name: sign for sign in SIGNS}["uniform-entropy"]
    assert not sign.holds(seen([{"policy/entropy": 0.0}], vocabulary=1))
    assert sign.holds(seen([{"policy/entropy": math.log(2)}], vocabulary=2))


def test_equal_responses_are_told_unless_they_are_right(caplog: pytest.LogCaptureFixture) -> None:
    same = FINE | {"data/duplicate_frac": 0.95}
    right, wrong = Health(), Health()
    for _ in range(12):
        right.look(same | {"reward/all_pass_groups": 0.9})
        wrong.look(same | {"reward/all_pass_groups": 0.1})
    assert told(caplog) == ["repeated-responses"]
    caplog.clear()
    silent = Health(wanted={"repeated-responses": "off"})
    for _ in range(12):
        silent.look(same)
    assert caplog.text == ""


def test_a_sign_can_be_silenced_and_can_stop(caplog: pytest.LogCaptureFixture) -> None:
    line = FINE | SHOWN["zero-reward"]
    silent = Health(wanted={"zero-reward": "off"})
    stopping = Health(wanted={"zero-reward": "stop"})
    assert [silent.look(line) for _ in range(4)] == ["", "", "", ""]
    assert caplog.text == ""
    stop = "run.health, which stops at zero-reward"
    assert [stopping.look(line) for _ in range(4)] == ["", "", stop, ""]


def test_a_run_stops_at_a_sign_and_goes_on_from_there(tmp_path: Path) -> None:
    health = {"constant-reward": "stop"}
    cfg = rl_config(tmp_path, "run", run={"health": health, "checkpoint_every": 50})
    (tmp_path / "reward.py").write_text("def digits(prompt, completion):\n    return 1.0\n")
    with pytest.raises(
        Interrupted, match="run.health, which stops at constant-reward after step 3"
    ):
        run(cfg)
    run(cfg, resume=True)
    assert (cfg.run.directory / "metrics.jsonl").read_text().count("\n") == 6
    with pytest.raises(ConfigError, match="did you mean 'flat-reward'"):
        rl_config(tmp_path, "other", run={"health": {"flat-rewards": "off"}})


def train(cfg: Config, *options: str) -> subprocess.CompletedProcess[str]:
    folder = cfg.run.directory.parent
    return oxrl("train", f"{cfg.run.name}.yaml", *options, folder=folder)


def ends_with_nothing_trained(cfg: Config, *named: str) -> None:
    """`oxrl train` ends after 10 steps with exit code 1 and one sentence that names the cause; and
    says so once more where nothing was mended.
    """
    for end, options in ((10, ()), (20, ("--resume",))):
        ended = train(cfg, *options)
        assert ended.returncode == 1, ended.stderr
        told = ended.stderr.splitlines()[-1]
        assert told.startswith("error: nothing was trained on, 10 steps in a row: ")
        assert f"after step {end}:" in told and "Traceback" not in ended.stderr
        assert [words for words in named if words not in told] == []


def goes_on(cfg: Config, accepted: str) -> None:
    ended = train(cfg, "--resume", "--accept-changes", accepted)
    assert ended.returncode == 0, ended.stderr
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 24
    assert lines[-1]["update/grad_norm"] > 0 and not lines[-1]["data/empty_steps"]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("return 0.25", ("all rewards of a group are equal",)),
        # As one that fails in service: what it is tried on before, and no model here says, is read.
        (
            "return 0.0 if 'answer' in completion else 1 / 0",
            ("160 samples have no reward", "samples/dropped_unscored"),
        ),
    ],
)
def test_a_run_that_has_nothing_to_learn_from_ends(
    tmp_path: Path, broken: str, named: tuple[str, ...]
) -> None:
    cfg = rl_config(tmp_path, "run", run={"steps": 24}, reward={"max_error_rate": 1.0})
    file = tmp_path / "reward.py"
    right = file.read_text()
    file.write_text(f"def digits(prompt, completion):\n    {broken}\n")
    ends_with_nothing_trained(cfg, *named)
    file.write_text(right)
    goes_on(cfg, "reward.name")


# As of a sampler that got no weights for long.
LATE = """
from dataclasses import replace
from oxrl.recipes.features.base import Feature

AGE = 9

class Late(Feature):
    def on_sampled(self, rollouts):
        for place, rollout in enumerate(rollouts):
            said = [
                replace(one, versions=tuple(version - AGE for version in one.versions))
                for one in rollout.completion.segments
            ]
            completion = replace(rollout.completion, segments=tuple(said))
            rollouts[place] = replace(rollout, completion=completion)
"""


def test_a_run_whose_samples_are_too_old_ends(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(LATE)
    cfg = rl_config(
        tmp_path,
        "run",
        run={"steps": 4},
        train={"features": {f"{file}:Late": {}}},
        rollout={"max_staleness": 1, "force_strict_on_policy": False},
    )
    ended = train(cfg)
    assert ended.returncode == 1
    assert "step 0 was given tokens that lag 9 weight versions behind it" in ended.stderr
    assert "rollout.max_staleness is 1" in ended.stderr and "Traceback" not in ended.stderr
    file.write_text(LATE.replace("AGE = 9", "AGE = 0"))
    ended = train(cfg, "--resume", "--accept-changes", "train.features")
    assert ended.returncode == 0, ended.stderr


def probes(*found: tuple[float, float]) -> list[Metrics]:
    """Lines of a run in which every second step has a probe: (lower end of the gap, grader)."""
    lines: list[Metrics] = []
    for gap, grader in found:
        lines += [{"monitor/gap_low": gap, "monitor/grader": grader}, dict(FINE)]
    return lines


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([(0.0, 0.5), (0.11, 0.5), (0.2, 0.5), (0.3, 0.5)], True),
        # The gap is not wide for long enough, not wide enough, or as wide from the start.
        ([(0.0, 0.5), (0.2, 0.5), (0.3, 0.5)], False),
        ([(0.0, 0.5), (0.1, 0.5), (0.2, 0.5), (0.3, 0.5)], False),
        ([(0.3, 0.5), (0.3, 0.5), (0.3, 0.5), (0.3, 0.5)], False),
        # Something is learned all the same; it was, and is no longer.
        ([(0.0, 0.5), (0.2, 0.6), (0.3, 0.7), (0.4, 0.8)], False),
        ([(0.0, 0.5), (0.0, 0.8), (0.2, 0.8), (0.3, 0.75), (0.4, 0.7)], True),
        # It was learned, and stays.
        ([(0.0, 0.5), (0.2, 0.6), (0.3, 0.8), (0.3, 0.79), (0.3, 0.79), (0.3, 0.78)], False),
        # The grader is the more lenient one of the two, and sees no difference.
        ([(-0.5, 1.0), (-0.3, 1.0), (-0.1, 1.0), (0.0, 1.0), (0.09, 1.0)], False),
        ([(-0.5, 1.0), (0.11, 1.0), (0.12, 1.0), (0.13, 1.0)], True),
    ],
)
def test_a_reward_is_hacked_where_another_grader_does_not_follow(
    found: list[tuple[float, float]], told: bool
) -> None:
    sign = {sign.name: sign for sign in SIGNS}["hacked-reward"]
    # The first probe is remembered, however long ago it was.
    for between in (0, 200):
        first, *later = (probes(one) for one in found)
        history = seen([*first, *between * [dict(FINE)], *(line for two in later for line in two)])
        assert sign.holds(history) is told


def test_verdicts_tell_what_was_seen_and_what_was_never_measured() -> None:
    lines = [{"step": step, **FINE, **SHOWN["sampler-mismatch"]} for step in range(1, 9)]
    found = {verdict.name: verdict for verdict in verdicts(lines, 260)}
    assert (found["sampler-mismatch"].state, found["sampler-mismatch"].step) == (
        "warning",
        PATIENCE,
    )
    assert found["zero-reward"].state == "ok"
    assert found["displaced-likelihood"].state == "unknown"
    silenced = verdicts(lines, 260, {"sampler-mismatch": "off"})
    assert {verdict.name for verdict in silenced if verdict.does == "off"} == {"sampler-mismatch"}


@pytest.mark.parametrize(
    "line",
    [
        FINE,
        {},
        {"update/grad_norm": 0.2, "reward/min": math.nan, "reward/max": math.nan},
        {"update/grad_norm": 0.0, "update/skipped": 1.0},
        {"update/grad_norm": 0.0, "data/empty_steps": 1.0},
        # A random model of the built-in size.
        FINE | {"policy/entropy": 5.549},
    ],
)
def test_a_step_that_can_be_learned_from_is_not_warned_of(
    line: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(260)
    for _ in range(2 * PATIENCE):
        health.look(line)
    assert caplog.text == ""


def test_a_resumed_run_goes_on_counting_and_repeats_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = FINE | SHOWN["zero-reward"]
    told = Health()
    told.remember([{**line, "loss": "nan"}] * PATIENCE)
    told.look(line)
    assert caplog.text == ""
    counting = Health()
    counting.remember([line] * (PATIENCE - 1))
    counting.look(line)
    assert len(caplog.records) == 1


def prompt(uid: str = "p", answer: str = "2") -> Prompt:
    message = {"role": "user", "content": "1+1"}
    return Prompt(uid=uid, messages=(message,), token_ids=(1,), answer=answer)


def completion(text: str) -> Completion:
    return Completion(segments=(), text=text, finish_reason="stop")


def look(
    repeats: Repeats, value: float, text: str = "2", uid: str = "p", answer: str = "2"
) -> None:
    score = Score(value=value, status="ok")
    repeats.look([(prompt(uid, answer), [completion(text)])], [[score]])


def test_a_reward_that_contradicts_itself_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats("mine.py:luck")
    look(repeats, 0.0)
    look(repeats, 1.0, text="3")
    look(repeats, 1.0, uid="q")
    look(repeats, 1.0, answer="3")
    look(repeats, 1e-5)
    repeats.look([(prompt(), [completion("2")])], [[Score(value=None, status="error")]])
    assert caplog.text == ""
    look(repeats, 1.0)
    look(repeats, 0.0)
    (record,) = caplog.records
    assert "nondeterministic-reward: mine.py:luck gave 1e-05 and then 1" in record.getMessage()


@pytest.mark.parametrize(
    ("before", "now", "apart"),
    [
        (0.0, 0.0009, False),
        (0.0, 0.0011, True),
        (0.5, 0.4991, False),
        (0.5, 0.4989, True),
        (1000.0, 1000.9, False),  # a thousandth of the first score, where that is large
        (1000.0, 1001.1, True),
        (-1000.0, -999.1, False),
        (-1000.0, -998.9, True),
    ],
)
def test_scores_differ_by_more_than_a_thousandth(before: float, now: float, apart: bool) -> None:
    assert differs(before, now) is apart


def test_what_is_remembered_of_responses_is_bounded() -> None:
    repeats = Repeats("x")
    for number in range(MOST + 10):
        look(repeats, 0.0, text=str(number))
    assert len(repeats._said) == MOST  # pyright: ignore


LUCK = """
import random
def luck(prompt, completion):
    return random.random()
"""


def test_luck_is_found_before_training_and_told_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from oxrl.rewards.workers import RewardPool

    (tmp_path / "luck.py").write_text(LUCK)
    pool = RewardPool(f"{tmp_path / 'luck.py'}:luck", timeout_s=30.0)
    try:
        pool.start()
        pool.rehearse([prompt()])
        assert caplog.text == ""
        pool.score([(prompt(), [completion("a")])])
    finally:
        pool.close()
    (record,) = [r for r in caplog.records if "nondeterministic-reward" in r.getMessage()]
    assert "for completion '#### 2' of prompt p" in record.getMessage()


def test_off_is_written_as_the_pages_write_it(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "silent")
    written = tmp_path / "silent.yaml"
    text = written.read_text().replace("run:\n", "run:\n  health: {flat-reward: off}\n")
    assert "off}" in text
    written.write_text(text)
    assert load_config(written).run.health == {"flat-reward": "off"}
    assert cfg.run.health == {}
