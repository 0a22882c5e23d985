"""Names that fields have elsewhere are answered with what they are called here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oxrl.config import check_config, load_config
from oxrl.config.names import other_names
from oxrl.config.schema import FIELDS
from oxrl.errors import ConfigError

Write = Callable[..., Path]


def test_no_name_of_another_library_is_one_of_ours() -> None:
    ours = {path.rpartition(".")[2] for path in FIELDS}
    assert not ours.intersection(other_names())


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("learning_rate", "train.lr"),
        ("num_train_epochs", "run.steps"),
        ("per_device_train_batch_size", "data.prompts_per_step or data.rows_per_step"),
        ("gradient_accumulation_steps", "data.prompts_per_step or data.rows_per_step"),
        ("kl_coef", "train.kl_coeff"),
        ("num_generations", "rollout.n_samples"),
        ("max_completion_length", "rollout.max_tokens"),
        ("max_prompt_length", "data.max_prompt_tokens"),
        ("output_dir", "run.dir"),
    ],
)
@pytest.mark.parametrize("section", ["train", "rollout", ""])
def test_a_name_of_another_library_is_answered(
    write: Write, section: str, name: str, field: str
) -> None:
    path = f"{section}.{name}" if section else name
    with pytest.raises(ConfigError, match=f"that is {field} here"):
        load_config(write(), [f"{path}=1"])


def test_a_dotted_name_of_another_library_is_answered_by_its_last_word(write: Write) -> None:
    with pytest.raises(ConfigError, match="that is rollout.n_samples here"):
        load_config(write(), ["actor_rollout_ref.rollout.n=8"])


@pytest.mark.parametrize(
    ("name", "home"), [("max_length", "model.max_length"), ("beta", "train.beta")]
)
def test_a_name_of_ours_in_the_wrong_section_is_led_home(
    write: Write, name: str, home: str
) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {home}"):
        load_config(write(), [f"rollout.{name}=1"])


def test_beta_is_another_thing_in_reinforcement_learning(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"the weight of a KL term is train\.kl_coeff here"):
        load_config(write(), ["train.beta=0.04"])


EVALUATED = {"eval": "data/test.jsonl", "eval_rows": 5}


@pytest.mark.parametrize("off", ["data.eval=null", "~data.eval"])
def test_evaluation_is_switched_off_by_one_field(write: Write, off: str) -> None:
    path = write(data=EVALUATED, run={"eval_every": 3})
    cfg = load_config(path, [off])
    assert cfg.data.eval is None
    check_config(cfg)  # as a run does
    with pytest.raises(ConfigError, match="has no effect without data.eval"):
        load_config(write(data={"eval_rows": 5}))


def test_every_mistake_of_a_file_with_names_of_others_is_told_at_once(tmp_path: Path) -> None:
    """Their meaning, values that would be wrong under the right name, and what is really missing."""
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "learning_rate: fast\n"
        "actor_rollout_ref:\n  rollout: {n: many, val_kwargs: {temperature: -2}}\n"
        "trian: {warmup_steps: -5}\n"
        "rollout: {top_pp: 3}\n"
        "run: {run_name: x}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    told = str(caught.value)
    for problem in (
        "mixed.yaml:1: learning_rate = 'fast'\n    unknown field; that is train.lr here",
        "mixed.yaml:1: train.lr = 'fast'\n    must be a valid number",
        "mixed.yaml:3: actor_rollout_ref.rollout.n = 'many'",
        "mixed.yaml:3: rollout.n_samples = 'many'\n    must be a valid integer",
        "mixed.yaml:3: rollout.eval_temperature = -2\n    must be greater than or equal to 0",
        "mixed.yaml:4: trian\n    unknown section; did you mean 'train'",
        "mixed.yaml:4: train.warmup_steps = -5",
        "mixed.yaml:5: rollout.top_p = 3",
        "model.name\n    is required",
        "`oxrl config convert FILE` writes such a file as ours",
    ):
        assert problem in told, problem
    assert "run.name\n    is required" not in told


def test_a_section_of_verl_is_not_taken_for_one_of_ours(write: Write, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("trainer: {total_epochs: 3, save_freq: 20}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "did you mean 'train'" not in str(caught.value)
    assert "trainer.save_freq = 20\n    unknown field; that is run.checkpoint_every here" in str(
        caught.value
    )


def test_a_file_that_repeats_itself_without_end_is_refused(tmp_path: Path) -> None:
    lines = ["x0: &x0", "  a: 1", "  b: 2"]
    for level in range(1, 40):
        lines += [f"x{level}: &x{level}", f"  a: *x{level - 1}", f"  b: *x{level - 1}"]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="not a configuration: more than 30000 values"):
        load_config(file)
    lines = [f"    {line}" for line in lines]
    file.write_text("\n".join(["run:", "  health:", *lines]))
    with pytest.raises(ConfigError, match="not a configuration: more than 30000 values"):
        load_config(file)


def test_a_name_of_others_can_be_taken_back_and_a_value_that_is_none_is_told(
    write: Write, tmp_path: Path
) -> None:
    path = write(train={"learning_rate": 1e-5})
    assert load_config(path, ["~train.learning_rate", "train.lr=1e-4"]).train.lr == 1e-4
    file = tmp_path / "tags.yaml"
    file.write_text("trainer: {save_freq: !mine 3}\nlearning_rate: !mine 4\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).count("a constructor for the tag '!mine'") == 2
