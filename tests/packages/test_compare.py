"""`oxrl compare`: models asked the same questions with the same noise, and files of answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.train import run
from oxrl.errors import ConfigError, DataError, OxrlError
from oxrl_stats.compare import (
    Comparison,
    Options,
    _half,
    compared,
    control_verdict,
    run_compare,
    selected,
    table,
)
from oxrl_stats.evaluated import Evaluated, read_answers
from oxrl_stats.intervals import Numbers
from oxrl_stats.paired import holm, mcnemar
from oxrl_stats.plots import draw_intervals
from support.figures import Learned
from support.small_runs import rl_config

LETTERS = "def letters(prompt, completion):\n    return float(len(set(completion)) > 4)\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with one reward, and one with another, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "letters.py").write_text(LETTERS)
    for name, reward in (("one", "letters.py"), ("two", "letters.py"), ("other", "reward.py")):
        sections: dict[str, Any] = {"data": {"eval": str(folder / "prompts.jsonl")}}
        if reward == "letters.py":
            sections["reward"] = {"name": f"{folder / reward}:letters"}
        seed = len(name)
        cfg = rl_config(folder, name, ["run.steps=1", f"run.seed={seed}"], **sections)
        run(cfg)
    rows = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "four.jsonl").write_text("".join(rows[:4]))
    text = (folder / "one.yaml").read_text()
    (folder / "long.yaml").write_text(text.replace("max_tokens: 6", "max_tokens: 9"))
    return folder


def model(name: str, rewards: Any, *, noise: str = "same", uids: Any = None) -> Evaluated:
    """What a model got, a row per prompt."""
    table = np.array(rewards, dtype=float)
    if table.ndim == 1:
        table = table[:, None]
    names = [f"q{place}" for place in range(len(table))] if uids is None else uids
    return Evaluated(
        name=name, uids=tuple(names), questions=tuple(names), rewards=table, noise=noise
    )


def answers(path: Path, rewards: Numbers, *, drop: int = 0, **fields: Any) -> Path:
    """A file as `oxrl eval --out` writes it."""
    lines = [
        {"uid": f"u{draw}", "draw": draw, "sample": sample, "prompt": f"q{draw}", "seed": sample}
        | {"reward": float(reward)}
        | fields
        for draw, row in enumerate(rewards)
        for sample, reward in enumerate(row)
    ]
    kept = lines[: len(lines) - drop]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return path


def test_one_checkpoint_is_no_better_than_itself(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = ["compare", str(runs / "one"), str(runs / "one"), "--samples", "3"]
    done = CliRunner().invoke(app, [*command, "--temperature", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    [pair] = json.loads(out.read_text())["pairs"]
    assert pair["gap"] == {"value": 0, "low": 0, "high": 0} and pair["p"] == 1
    assert pair["better"] is None and pair["equal"] == 1 and pair["common_noise"] is True
    assert (pair["prompts"], pair["samples"]) == (24, 3)
    assert "no difference is shown (p = 1)" in done.output


def test_two_runs_are_asked_the_same_with_the_same_seeds(runs: Path, tmp_path: Path) -> None:
    asked = Options(samples=2, temperature=1.0, seed=5)
    found = run_compare([str(runs / "one"), str(runs / "two")], asked)
    [pair] = found.pairs
    assert pair.common_noise and pair.prompts == 24
    [again] = run_compare([str(runs / "two"), str(runs / "one")], asked).pairs
    assert again.gap.value == -pair.gap.value and again.chance == pair.chance
    [other] = run_compare([str(runs / "one"), str(runs / "two")], Options(samples=2, seed=6)).pairs
    assert other.first != pair.first
    # A model of no run is evaluated as the run is that it is compared with.
    [plain] = run_compare(["builtin:tiny", str(runs / "one")], asked).pairs
    assert plain.second == pair.first and plain.common_noise
    with pytest.raises(ConfigError, match="nothing scores what builtin:tiny answers"):
        plain = Options(data=(str(runs / "prompts.jsonl"),), samples=2)
        run_compare(["builtin:tiny", "builtin:tiny"], plain)


def test_several_files_are_adjusted_for_being_several(runs: Path, tmp_path: Path) -> None:
    rows = (runs / "prompts.jsonl").read_text().splitlines(keepends=True)
    halves = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, part in zip(halves, (rows[:12], rows[12:]), strict=True):
        path.write_text("".join(part))
    asked = Options(data=tuple(map(str, halves)), samples=2, temperature=1.0)
    found = run_compare([str(runs / "one"), str(runs / "two")], asked)
    assert [pair.data for pair in found.pairs] == [str(path) for path in halves]
    assert [pair.adjusted for pair in found.pairs] == holm([pair.chance.p for pair in found.pairs])
    assert "(Holm)" in table(found)


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (["one", "other"], [], "reward.name is .*letters' in .*one and .* in .*other"),
        (["one", "one"], [], "compared with itself; name another model, or write --samples K"),
        (["one"], [], "compare takes two models, not 1"),
        (["one", "two", "other"], [], "two models, not 3; --select takes more"),
        (["one"], ["--select"], "--select chooses among checkpoints, and 1 is named"),
        (["one", "two"], ["--select", "--control", "one"], "leave out --select"),
        (["one", "two"], ["--samples", "0"], "samples.*greater than or equal to 1"),
        (["one", "two", "rollout.max_token=3"], [], "max_tokens"),
        (["one", "nowhere"], [], "nowhere"),
        (["one", "prompts.jsonl"], [], "prompts.jsonl is a file of answers and .*one a model"),
        (["prompts.jsonl", "prompts.jsonl"], ["--samples", "2"], "holds answers that were given"),
        (["prompts.jsonl", "prompts.jsonl"], [], "compared with itself; name another file"),
        (
            ["prompts.jsonl", "four.jsonl"],
            [],
            "prompts.jsonl, line 1: not a response as `oxrl eval",
        ),
        (["one", "long.yaml"], [], "rollout.max_tokens is 6 in one and 9 in long.yaml: .*behind"),
        (["one", "two"], ["--data", "four.jsonl"], "four.jsonl: 4 prompts have .*needs 5 or more"),
        (["one", "two"], ["--samples", "2", "--temperature", "0"], "one would count as 2; write"),
        (["one", "two"], ["--data", "none.jsonl"], "none.jsonl"),
        (["one", "reward.py"], [], "reward.py"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    names: list[str], options: list[str], said: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    done = CliRunner().invoke(app, ["compare", *names, *options])
    error = done.exception
    told = str(error) if isinstance(error, OxrlError) else done.output
    assert (error.exit_code if isinstance(error, OxrlError) else done.exit_code) == 2, told
    assert re.search(said, told.replace("\n", " ")), told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": np.ones((4, 2))}, "4 prompts have a score on both sides.*needs 5"),
        ({"drop": 1}, r"draw 7 has the samples \[0\].*stopped half way"),
        ({"reward": "good"}, "line 1: not a response.*could not convert string to float"),
        ({"rewards": np.ones((8, 3))}, "8 prompts with 2 samples each.*8 with 3"),
        ({"uid": "x"}, r"prompt 0 is 'q0' \(uid u0\) in one and 'q0' \(uid x\)"),
        ({"prompt": "why"}, "prompt 0 is 'q0'.*and 'why'"),
        ({"step": 3}, "two.jsonl, line 1: step 3 of a training run, and no evaluation"),
        ({"draw": None}, "line 1: not a response as `oxrl eval RUN --out FILE` writes it"),
        ({"rewards": np.ones((0, 2))}, "is no evaluation: it has no line"),
    ],
)
def test_files_of_other_answers_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    few = change.get("rewards", np.ones((8, 2)))
    whole = few if len(few) == 4 else np.ones((8, 2))
    one = answers(tmp_path / "one.jsonl", whole)
    two = answers(tmp_path / "two.jsonl", **{"rewards": np.ones((8, 2)), **change})
    with pytest.raises(DataError, match=said):
        run_compare([str(one), str(two)], Options())


@pytest.mark.parametrize("name", ["uid", "draw", "sample", "reward", "prompt", "seed"])
def test_a_file_that_lacks_a_field_is_no_evaluation(name: str, tmp_path: Path) -> None:
    path = answers(tmp_path / "one.jsonl", np.ones((8, 2)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[3][name]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=f"one.jsonl, line 4: not a response.*KeyError: '{name}'"):
        read_answers(path)


def test_a_file_of_anything_else_is_no_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("to do\n")
    with pytest.raises(DataError, match=r"notes.jsonl is no evaluation; `oxrl eval RUN --out"):
        read_answers(path)


def test_a_response_that_is_there_twice_is_told(tmp_path: Path) -> None:
    path = answers(tmp_path / "one.jsonl", np.ones((8, 2)))
    path.write_text(path.read_text() * 2)
    with pytest.raises(DataError, match=r"draw 0 has the samples \[0, 0, 1, 1\]"):
        read_answers(path)


def test_a_run_and_its_own_configuration_are_the_model_after_and_before(runs: Path) -> None:
    asked = Options(samples=2, temperature=1.0, seed=5)
    own = str(runs / "one" / "config.yaml")
    [pair] = run_compare([str(runs / "one"), own], asked).pairs
    [before] = run_compare([str(runs / "one"), "builtin:tiny"], asked).pairs
    assert (pair.first, pair.second, pair.chance) == (before.first, before.second, before.chance)


def test_of_a_run_and_its_control_the_verdict_names_the_run(
    tmp_path: Path, learned: Learned
) -> None:
    for name, features in (("run", {}), ("control", {"permuted-rewards": {}})):
        often = ["run.steps=25", "run.checkpoint_every=25", "train.lr=3e-3"]
        data = {"eval": str(tmp_path / "prompts.jsonl")}
        run(rl_config(tmp_path, name, often, data=data, train={"features": features}))
    model, control = str(tmp_path / "run"), str(tmp_path / "control")
    command = ["compare", model, control, "--samples", "4", "--out", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    [pair] = json.loads((tmp_path / "found.json").read_text())["pairs"]
    learned("share of digits beyond that of the control", pair["gap"]["low"], at_least=0.15)
    assert pair["better"] == model and pair["p"] < 0.001
    assert f"{model} is better by" in done.output
    beside = ["compare", model, "builtin:tiny", "--control", control, "--samples", "4"]
    done = CliRunner().invoke(app, beside)
    assert done.exit_code == 0, done.output
    assert "the control did not improve" in done.output
    assert "the reward is what it learned from" in done.output


def test_files_of_answers_are_compared_as_models_are(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    first = random.integers(0, 2, (40, 2)).astype(float)
    second = np.where(random.random((40, 2)) < 0.4, 0.0, first)
    files = [
        str(answers(tmp_path / f"{name}.jsonl", rewards))
        for name, rewards in (("one", first), ("two", second))
    ]
    [pair] = run_compare(files, Options()).pairs
    gaps = (first - second).mean(1)
    assert pair.gap.value == pytest.approx(gaps.mean()) and pair.better == files[0]
    assert pair.common_noise and pair.equal == (first == second).mean()
    with pytest.raises(ConfigError, match="--data, --samples"):
        run_compare(files, Options(samples=4))


def test_prompts_without_a_score_on_one_side_are_left_out_of_both() -> None:
    one = model("one", [1, 1, np.nan, 0, 1, 1, 1])
    two = model("two", [0, 1, 1, np.nan, 0, 0, 1])
    found = compared("data", one, two)
    assert (found.prompts, found.left_out) == (5, 2)
    assert (found.first.value, found.second.value) == (1.0, 0.4)
    assert found.answers == pytest.approx(0.25) and "McNemar" in table(
        Comparison(pairs=[found], selections=[])
    )
    assert "2 left out without a score" in table(Comparison(pairs=[found], selections=[]))
    assert compared("data", model("a", [[1, 0]] * 6), model("b", [[1, 1]] * 6)).answers is None
    discordant = compared("data", model("a", [1, 1, 1, 0, 0, 1]), model("b", [0, 1, 0, 1, 0, 0]))
    assert discordant.answers == mcnemar(3, 1) < 1


def test_noise_is_common_where_seeds_are_equal() -> None:
    rewards = [1, 0, 1, 0, 1, 1]
    for noises, common in ((("a", "a"), True), (("a", "b"), False)):
        one, two = (model(noise, rewards, noise=noise) for noise in noises)
        assert compared("data", one, two).common_noise is common


def test_a_checkpoint_is_chosen_on_one_half_and_told_on_the_other() -> None:
    uids = [f"q{place}" for place in range(60)]
    chooses = np.array([_half(uid) for uid in uids])
    assert 20 < chooses.sum() < 40
    lucky = model("lucky", np.where(chooses, 1.0, 0.25), uids=uids)
    steady = model("steady", np.full(60, 0.75), uids=uids)
    found = selected("data", [steady, lucky])
    assert found.chosen == "lucky" and found.chosen_by.value == 1.0
    assert found.told.value == 0.25 and found.others["steady"].value == 0.75
    assert "which did not choose it, 0.250" in found.verdict
    with pytest.raises(DataError, match="8 prompts make halves of"):
        selected("data", [model("a", [1] * 8), model("b", [0] * 8)])


@pytest.mark.parametrize(
    ("trained", "control", "said"),
    [
        (0.9, 0.2, r"the control did not improve \(\+0.000.*the reward is what it learned from"),
        (0.9, 0.9, "the control improved too, by .0.700"),
        (0.2, 0.2, "neither is an improvement shown"),
    ],
)
def test_a_control_says_whether_the_reward_is_what_was_learned_from(
    trained: float, control: float, said: str
) -> None:
    models = [
        model(name, np.arange(40) % 10 < 10 * share)
        for name, share in (("trained", trained), ("before", 0.2), ("control", control))
    ]
    pairs = [compared("data", models[one], models[two]) for one, two in ((0, 1), (0, 2), (1, 2))]
    found = Comparison(pairs=pairs, selections=[], control="control")
    assert re.search(said, control_verdict(found)), control_verdict(found)
    assert (pairs[1].better == "trained") == (trained != control)


def test_a_comparison_is_drawn_the_same_every_time(tmp_path: Path) -> None:

    pair = compared("d", model("good", [1.0] * 9), model("bad", [0.0] * 9))
    found = Comparison(pairs=[pair], selections=[])
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in pictures:
        draw_intervals(found.rows, path)
    texts = [path.read_text() for path in pictures]
    assert texts[0] == texts[1]
    assert all(word in texts[0] for word in ("good", "bad", "difference", "95 % interval"))


def test_answers_are_read_whatever_the_order_of_their_lines(tmp_path: Path) -> None:
    path = answers(tmp_path / "a.jsonl", np.array([[1.0, 0.0], [0.5, 1.0]]))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(lines)))
    found = read_answers(path)
    assert found.rewards.tolist() == [[1.0, 0.0], [0.5, 1.0]] and found.uids == ("u0", "u1")
