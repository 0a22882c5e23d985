"""Preference and reward-model recipes on tiny runs: every method of the table steps, learns where
it can, resumes.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError
from oxrl.functional.preference_losses import PAIR_LOSSES, SINGLE_LOSSES
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.recipes.preference_batch import STATISTICS
from oxrl.recipes.preference_reference import follow
from oxrl.tables.policy import ROWS
from oxrl.tables.preference import METHODS
from support.figures import Learned
from support.small_runs import metric_lines, preference_config

LOG2 = math.log(2)
# Loss of a policy that equals its reference, by hand from algorithms.md Table B at the default
# numbers.
AT_REFERENCE = {
    **dict.fromkeys(
        "dpo cdpo robust_dpo rso_ sigmoid_norm_ dpop dpo_shift bpo minor_dpo ld_dpo sampo tr_dpo".split(),
        LOG2,
    ),
    "chi_po": LOG2,
    "wpo": None,
    "ipo": 25.0,
    "hinge": 1.0,
    "sppo": 500_000.0,  # half of 1 / beta squared
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "nca": 2 * LOG2,
    "bco": 2 * LOG2,
    "bco_unpaired": LOG2,
    "kto": 0.5,
    "beta_dpo": LOG2,
    "dr_dpo": LOG2,
    "cal_dpo": LOG2 + 500_000.0,
    "aot": LOG2,
    "aot_unpaired": LOG2,
    "odpo": LOG2,
    "discopop": 0.5 * LOG2 + 0.5,
}


RUNNABLE = [name for name in METHODS if name != "nll"]


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_method_takes_steps(tmp_path: Path, name: str) -> None:
    cfg = preference_config(
        tmp_path, "run", [f"train.alg_name={name}", "run.steps=2", "data.rows_per_step=6"]
    )
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[:12]))
    run(cfg)
    first, second = metric_lines(tmp_path / "run")
    assert not first["update/skipped"] and not second["update/skipped"]
    assert first["update/grad_norm"] > 0 and first["update/update_norm_ratio"] > 0
    expected = AT_REFERENCE.get(name)
    if expected is not None:
        assert first["update/loss"] == pytest.approx(expected, abs=2e-4, rel=1e-6)


def test_a_mix_adds_weighted_losses_with_their_own_numbers(tmp_path: Path) -> None:
    # At the reference: log 2 + 0.5 * 1 (hinge) + 0.01 * 1 / (2 * 0.1)^2 (ipo, mean margin 0).
    mixed = preference_config(
        tmp_path, "mixed", ["run.steps=1", "train.mix={hinge: 0.5, ipo: 0.01}", "train.beta=0.3"]
    )
    run(mixed)
    assert metric_lines(tmp_path / "mixed")[0]["update/loss"] == pytest.approx(
        LOG2 + 0.5 + 0.25, abs=2e-4
    )
    # The sum that is a row of its own, put together by hand.
    for name, overrides in (
        ("row", ["train.alg_name=cpo_simpo"]),
        ("sum", ["train.alg_name=simpo", "train.mix={nll: 1.0}"]),
    ):
        run(preference_config(tmp_path, name, ["run.steps=2", *overrides]))
    assert [line["update/loss"] for line in metric_lines(tmp_path / "row")] == [
        line["update/loss"] for line in metric_lines(tmp_path / "sum")
    ]


@pytest.mark.parametrize(
    ("algorithm", "mix", "words"),
    [
        ("dpo", "{hige: 1}", "hige is no preference loss; did you mean 'hinge'"),
        ("dpo", "{kto: 1}", "kto takes more than a pair"),
        ("dpo", "{dpo: 1}", "dpo is in it already"),
        ("simpo", "{dpo: 1}", "dpo needs a reference, and cannot be added to simpo"),
        ("kto", "{nll: 1}", "nll is a loss of pairs"),
        ("simpo", "{simpo: 1}", "simpo is in it already"),
        ("dpo", "{nll: 0}", "greater than 0"),
    ],
)
def test_a_mix_that_cannot_be_says_why(
    tmp_path: Path, algorithm: str, mix: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preference_config(tmp_path, "run", [f"train.alg_name={algorithm}", f"train.mix={mix}"])
    assert words in " ".join(str(caught.value).split())


def learning(folder: Path, name: str) -> Config:
    """A run that learns what is better, asked about other pairs at its end."""
    data = {"eval": str(folder / "held_out_pairs.jsonl"), "rows_per_step": 16}
    train = {"alg_name": name, "lr": 2e-3}
    steps = {"steps": 16, "checkpoint_every": 0}
    return preference_config(folder, "run", data=data, train=train, run=steps)


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo", "kto"])
def test_held_out_accuracy_on_a_synthetic_preference_exceeds_95_percent(
    tmp_path: Path, name: str, learned: Learned
) -> None:
    run(learning(tmp_path, name))
    last = metric_lines(tmp_path / "run")[-1]
    learned("eval/accuracy", last["eval/accuracy"], at_least=0.95, floor=0.5)
    assert last["eval/longer_wins"] < 1.0


def test_a_reward_model_learns_a_synthetic_preference_and_loads_again(
    tmp_path: Path, learned: Learned
) -> None:
    run(learning(tmp_path, "reward_model"))
    lines = metric_lines(tmp_path / "run")
    assert lines[0]["update/loss"] == pytest.approx(LOG2, abs=1e-6)  # the head starts at zero
    assert lines[0]["reward_model/accuracy"] == 0.5
    learned("eval/accuracy", lines[-1]["eval/accuracy"], at_least=0.95, floor=0.5)


def test_the_reference_is_computed_once_and_found_again(tmp_path: Path) -> None:
    short = {"steps": 1}
    cfg = preference_config(tmp_path, "run", run=short)
    run(cfg)
    (cached,) = (tmp_path / "run").glob("reference/*.safetensors")
    other = preference_config(tmp_path, "other", ["train.alg_name=cdpo"], run=short)
    run(other)
    (same,) = (tmp_path / "other").glob("reference/*.safetensors")
    assert cached.name == same.name and cached.read_bytes() == same.read_bytes()
    seeded = preference_config(tmp_path, "seeded", ["run.seed=1"], run=short)
    run(seeded)
    (different,) = (tmp_path / "seeded").glob("reference/*.safetensors")
    assert different.name != cached.name  # another seed, another random model
    run(preference_config(tmp_path, "free", ["train.alg_name=simpo"], run=short))
    assert not list((tmp_path / "free").glob("reference*"))


def test_a_longer_run_says_the_same_of_the_rows_before(tmp_path: Path) -> None:
    cfg = preference_config(tmp_path, "run", ["run.steps=1"])
    run(cfg)
    (short,) = (tmp_path / "run").glob("reference/*.safetensors")
    first = load_file(short)["logprobs"]
    assert len(first) == 8  # of 40 pairs
    run(preference_config(tmp_path, "longer", ["run.steps=2"]))
    (longer,) = (tmp_path / "longer").glob("reference/*.safetensors")
    assert torch.equal(load_file(longer)["logprobs"][:8], first)


def test_the_reference_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(preference_config(tmp_path, "run", ["run.steps=1"]))
    shown = capsys.readouterr().out.splitlines()
    (told,) = [line for line in shown if line.startswith("reference 8/8 rows  ")]
    assert re.fullmatch(r"reference 8/8 rows  [\d.,e+]+ rows/s  ETA 0s", told)
    (step,) = [line for line in shown if line.startswith("step 1/1")]
    assert re.match(r"step 1/1  loss 0\.6931  accuracy [\d.]+  margin -?0\.000  ", step)


def test_a_margin_is_zero_before_the_first_step(tmp_path: Path) -> None:
    run(preference_config(tmp_path, "run", ["run.steps=1"]))
    (line,) = metric_lines(tmp_path / "run")
    assert line["preference/margin"] == pytest.approx(0.0, abs=1e-5)
    assert line["preference/displacement"] == pytest.approx(0.0, abs=1e-5)


def test_micro_batches_do_not_change_a_run(tmp_path: Path) -> None:
    lines = []
    for tokens in (16384, 30):
        run(
            preference_config(
                tmp_path, f"run{tokens}", [f"train.micro_batch_tokens={tokens}", "run.steps=2"]
            )
        )
        lines.append(metric_lines(tmp_path / f"run{tokens}"))
    for step, (left, right) in enumerate(zip(*lines, strict=True)):
        accuracies = left.pop("preference/accuracy"), right.pop("preference/accuracy")
        # Before the first step every margin is zero but for rounding, which decides its sign;
        # afterwards one of eight may still be that small.
        assert step == 0 or abs(accuracies[0] - accuracies[1]) <= 1 / 8
        assert left == pytest.approx(right, rel=1e-3, abs=2e-5)


def test_the_moving_reference_follows_by_its_rate() -> None:
    engines = [
        LocalTrainer(load_policy("builtin:tiny", LoadOptions(seed=seed)), TrainerOptions(lr=0.0))
        for seed in (0, 1)
    ]
    reference, policy = engines
    before = [t.clone() for bucket in reference.weights() for _, t in bucket]
    follow(reference, policy, 0.6)
    for bucket_a, bucket_b in zip(reference.weights(), policy.weights(), strict=True):
        for (_, now), (_, current), old in zip(bucket_a, bucket_b, before, strict=False):
            torch.testing.assert_close(now, 0.6 * current + 0.4 * old, rtol=0, atol=1e-6)


def test_every_extra_tensor_of_a_loss_is_a_column_or_a_statistic() -> None:
    extras = {extra for method in METHODS.values() for extra in method.extras}
    assert extras == {"offsets", *STATISTICS}
    for method in METHODS.values():
        losses = SINGLE_LOSSES if method.unpaired else PAIR_LOSSES
        assert method.parts or method.loss in losses


def test_labels_are_read_by_the_unpaired_methods(tmp_path: Path, learned: Learned) -> None:
    rows = [
        {"prompt": f"{i}?", "completion": "7" if i % 2 else "no", "label": bool(i % 2)}
        for i in range(16)
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(tmp_path / "labels.jsonl"), "eval": str(tmp_path / "labels.jsonl")}
    steps = {"steps": 16, "checkpoint_every": 0}
    train = {"alg_name": "kto", "lr": 2e-3}
    run(preference_config(tmp_path, "labels", data=files, run=steps, train=train))
    last = metric_lines(tmp_path / "labels")[-1]
    learned("eval/accuracy", last["eval/accuracy"], at_least=0.9, floor=0.5)


def test_displacement_is_reported_when_both_likelihoods_fall(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, learned: Learned
) -> None:
    """Nearly equal completions at a large rate: the classic case in which DPO lowers both."""
    steps = {"steps": 55, "checkpoint_every": 55}
    cfg = preference_config(tmp_path, "run", ["train.lr=3e-3"], run=steps)
    rows = [
        {"prompt": f"{i}", "chosen": f"the answer is {i}a", "rejected": f"the answer is {i}b"}
        for i in range(16)
    ]
    Path(str(cfg.data.train)).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("WARNING"):
        run(cfg)
    steps = [line["preference/displacement"] for line in metric_lines(tmp_path / "run")]
    # It is told of ten steps in a row.
    in_a_row = longest = 0
    for step in steps:
        in_a_row = in_a_row + 1 if step > 0.05 else 0
        longest = max(longest, in_a_row)
    learned("steps above 0.05 in a row", longest, at_least=10)
    assert "likelihood displacement" in caplog.text + (tmp_path / "run" / "run.log").read_text()


def test_every_preference_row_is_listed_with_its_numbers() -> None:
    assert all(ROWS[name].recipe == "preference" and ROWS[name].numbers for name in RUNNABLE)


def test_the_best_weights_are_kept_and_load(tmp_path: Path) -> None:
    data = {"eval": str(tmp_path / "held_out_pairs.jsonl"), "eval_rows": 8}
    every = ["run.keep_best=true", "run.eval_every=1", "run.steps=3"]
    run(preference_config(tmp_path, "run", every, data=data, run={"checkpoint_every": 0}))
    lines = metric_lines(tmp_path / "run")
    scores = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert len(scores) == 3
    assert load_policy(str(tmp_path / "run" / "best")).num_parameters() > 0
    assert load_tokenizer(str(tmp_path / "run" / "best")).chat_template
