"""Values without a meaning are refused, with what makes the bound a bound, or warned of."""

from __future__ import annotations

import typing
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from oxrl.config import load_config
from oxrl.config.schema import FIELDS, SECTIONS
from oxrl.errors import ConfigError
from oxrl.tables.policy import ROWS

# (override, word of the reason)
NONSENSE = [
    ("train.lr=100", "AdamW"),
    ("train.lr=1e4", "AdamW"),
    ("train.weight_decay=1e6", "share"),
    ("train.adam_eps=1e9", "disappear"),
    ("train.max_grad_norm=1e-300", "adam_eps"),
    ("rollout.temperature=100", "noise"),
    ("rollout.temperature=1e-300", "greedy"),
    ("rollout.eval_temperature=1e-9", "greedy"),
    ("rollout.n_samples=1000000", "memory"),
    ("data.prompts_per_step=10000000", "memory"),
    ("reward.workers=100000", "process"),
    ("reward.timeout_s=1e-9", "worker"),
    ("reward.timeout_s=1e300", "day"),
    ("run.deadline_s=1e-9", "answer"),
    ("run.threads=1000000", "crashes"),
    ("run.steps=1000000000000000000000000000000", "years"),
    ("rollout.max_staleness=1000000000", "old weights"),
    ("run.dir=/", "root"),
    ("run.dir=/tmp/..", "root"),
    ("run.name=../x", "run.dir"),
    ("run.name=..", "word"),
    ('run.name="  "', "word"),
    ('run.name="a\\0b"', "control"),
    ('run.name="\\e[31mred"', "control"),
    ('run.name="a\\nb"', "control"),
    ('run.dir="a\\0b"', "control"),
    ('run.dir="a\\nb"', "control"),
    ('model.name="a\\0b"', "control"),
    ('model.chat_template="a\\0b"', "control"),
    ('data.train="a\\0b"', "control"),
    ('data.train={"a\\0b": 1}', "control"),
    ('data.columns={prompt: "a\\0b"}', "control"),
    ('reward.name="a\\0.py:f"', "control"),
    ('reward.options={files: [{path: "a\\0b"}]}', "control"),
    ('reward.parts={p: {name: "a\\0.py:f"}}', "control"),
    ('rollout.from_samples="a\\0b"', "control"),
    ("run.name=" + "x" * 5000, "200"),
]


@pytest.mark.parametrize(("override", "word"), NONSENSE)
def test_a_value_without_a_meaning_is_refused_with_the_reason(
    write: Callable[..., Path], override: str, word: str
) -> None:
    path = override.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(write(), [override])
    report = str(caught.value)
    assert path in report
    assert word in report
    assert "\x1b" not in report and "\0" not in report


@pytest.mark.parametrize(
    ("override", "reason", "of_the_other"),
    [
        ("run.steps=0", "(Optimizer", "years"),
        ("run.steps=10000000000", "years", "nothing"),
        ("data.prompts_per_step=0", "(Prompts", "memory"),
        ("reward.timeout_s=0", "before a worker can answer", "day"),
        ("reward.timeout_s=100000", "more than a day is no limit", "worker can answer"),
        ("reward.workers=0", "(", "each is a process"),
        ("train.max_grad_norm=0", "smaller gradients disappear", "nothing else"),
        ("run.deadline_s=0", "before anything can answer", "week"),
    ],
)
def test_the_reason_is_that_of_the_bound_that_was_crossed(
    write: Callable[..., Path], override: str, reason: str, of_the_other: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(), [override])
    report = str(caught.value)
    assert reason in report
    assert of_the_other not in report


@pytest.mark.parametrize(
    ("overrides", "path", "word"),
    [
        (["train.clip_low=0", "train.clip_high=0"], "train.clip_high", "every token"),
        (["train.loss=ppo_clip", "train.clip_dual=1.1"], "train.clip_dual", "1.2"),
        (
            ["train.alg_name=clip_cov", "train.cov_low=6", "train.cov_high=5"],
            "train.cov_low",
            "no token",
        ),
        (["train.alg_name=dapo", "train.overlong_buffer=3000"], "train.overlong_buffer", "grows"),
    ],
)
def test_numbers_that_make_no_sense_together_are_refused(
    write: Callable[..., Path], overrides: list[str], path: str, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(), overrides)
    assert path in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr=0", "trains nothing"),
        ("data.eval=data/train.jsonl", "trained on"),
        ("train.alg_name=prorl", "never happens"),
    ],
)
def test_what_is_allowed_and_surprising_is_warned_of(
    write: Callable[..., Path], override: str, words: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config(write(), [override])
    assert any(words in str(warning.message) for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(write())


# A billion means something there: for ever, never, everything, or a random number.
ENDLESS = {
    "run.steps",
    "run.seed",
    "run.checkpoint_every",
    "run.eval_every",
    "run.keep_checkpoints",
    "run.max_restarts",
    "data.eval_rows",
    "data.max_prompt_tokens",
    "rollout.top_k",
    "train.max_skipped_steps",
    "train.max_grad_norm",
    "train.micro_batch_tokens",
    "train.warmup_steps",
    "inference_engine.probe_every",
}


@pytest.mark.parametrize("path", [path for path in FIELDS if not path.startswith("train.")])
def test_a_billion_is_refused_wherever_it_means_nothing(path: str) -> None:
    section, _, name = path.partition(".")
    field = SECTIONS[section].model_fields[name]
    if (
        not any(
            kind in typing.get_args(field.annotation) + (field.annotation,) for kind in (int, float)
        )
        or path in ENDLESS
    ):
        return
    if "dict" in str(field.annotation):
        return
    assert "Le(" in str(field.metadata) or "Lt(" in str(field.metadata), path


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["train.clip_high=1e9"], "train.clip_high"),
        (["train.kl_coeff=1e9"], "train.kl_coeff"),
        (["train.alg_name=cispo", "train.weight_max=1e7"], "train.weight_max"),
        (["train.correction=truncate", "train.correction_max=1e12"], "train.correction_max"),
    ],
)
def test_a_number_of_the_algorithm_that_hardly_bounds_anything_is_warned_of(
    write: Callable[..., Path], overrides: list[str], field: str
) -> None:
    with pytest.warns(UserWarning) as caught:
        load_config(write(), overrides)
    found = [str(warning.message) for warning in caught]
    assert any(field in text and "times what is usual" in text for text in found)


def test_every_algorithm_with_its_own_numbers_is_loaded_without_such_a_warning(
    write: Callable[..., Path],
) -> None:
    for name, row in ROWS.items():
        if row.unsupported:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_config(write(train={"alg_name": name}), ["run.steps=96"])
        assert not [w for w in caught if "times what is usual" in str(w.message)], name
