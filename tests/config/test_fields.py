"""No dead knob, as far as the configuration goes: every field is read by some run, refused by all
others, and shows up in what is resolved. That reading it changes what a run does is tested beside
the recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from oxrl.assembly.assembly import Assembly
from oxrl.config import Config, check_config, dump_config, load_config
from oxrl.config.conditions import has_environment, samples_ahead
from oxrl.config.field import about
from oxrl.config.reads import fields_read
from oxrl.config.schema import FIELDS, SECTIONS
from oxrl.config.sections.reward import CODE_OPTIONS
from oxrl.config.sections.train import CELLS, cell_names
from oxrl.errors import ConfigError
from oxrl.modelfiles.builtin import BUILTIN_DIMS
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.numbers import NUMBERS, SIMPO_BETA, SIMPO_GAMMA, TOP_CANDIDATES
from oxrl.tables.policy import ROWS

# Overrides that switch on a field which no algorithm reads by default.
FIELD_OF = {kind: name for name, kind in CELLS.items()}
CELL_CHOICES = {
    f"train.{number.key}": f"train.{FIELD_OF[kind]}={name}"
    for (kind, name), cell in TABLE.items()
    for number in cell.numbers
    if kind not in ("ratio", "selection")
}
# A second valid value, where it cannot be derived from the type.
SECOND: dict[str, Any] = {
    "run.day": "2031-04-09",
    "model.name": "builtin:small",
    "model.chat_template": "template.jinja",
    "model.attention": "eager",
    "model.teachers": {"big": {"name": "builtin:tiny"}},
    "data.given_rows": "data/other.jsonl",
    "data.train": "data/other.jsonl",
    "train.mix": {"nll": 0.5},
    "data.image_roots": ".",
    "run.health": {"flat-reward": "off"},
    "run.deadlines": {"rollout": 60.0},
    "run.trackers": "wandb",
    "data.columns": {"prompt": "question"},
    "train.loss_numbers": {"reach": 0.5},
    "train.features": {"my_feature.py:Mine": {"coeff": 0.5}},
    "environment.name": "tools",
    "action.choices": "up,down",
    "action.size": 2,
    "action.statistics": "q2.json",
    "action.fast": "fast2.json",
    "environment.options": {"max_calls": 3},
    "environment.max_seconds": 60.0,
    "rollout.max_episode_tokens": 100_000,
    "rollout.context": "window: 3",
    "train.turn_gamma": 0.5,
    "train.turn_lambda": 0.5,
    "data.eval": "data/other.jsonl",
    "data.prompts_per_step": 24,
    "reward.name": "exact",
    "reward.options": {"pattern": "x"},
    "reward.parts": {"right": {"name": "math"}},
    "train.epochs": 2,
    "train.minibatches": 2,
    "train.ratio": "sequence",
    "train.maxrl_order": 3,
    "train.clip_dual": 3.0,
    "train.old_logprobs": "recompute",
    "train.micro_batch_tokens": 30,
    "train.share_prefix": False,
    "rollout.temperature": 0.7,
    "rollout.rounds": 5,
    "model.max_length": 2000,
    "data.pack_tokens": 64,
    "train.reference_sync_steps": 48,
    "deepspeed.zero_stage": 2,
    "deepspeed_ref.zero_stage": 0,
}
CODE_FIELDS = tuple(f"reward.{name}" for name in CODE_OPTIONS)
# Fields with a single legal value while only the local engine exists, that only an evaluation may
# change, or that name a run (tests/rollouts/test_stored_samples.py).
FIXED = (
    "run.training_gpus",
    "rollout.from_samples",
)


@cache
def read_by(algorithm: str, **data: str) -> frozenset[str]:
    """The fields that a run of an algorithm reads, everything else by default."""
    sections = {
        "run": {"name": "x", "steps": 1},
        "model": {"name": "x"},
        "data": {"train": "t.jsonl", **data},
    }
    return fields_read(Config.model_validate({**sections, "train": {"alg_name": algorithm}}))


def reader(path: str) -> tuple[str, list[str]]:
    """An algorithm, and overrides, under which `path` is read."""
    held_out = "data.eval=data/test.jsonl"
    if path == "train.backend" or path.startswith("deepspeed."):
        return "sft", [held_out, *(["train.backend=deepspeed"] if path != "train.backend" else [])]
    if path.startswith("deepspeed_ref."):
        return "tr_dpo", [held_out, "train.backend=deepspeed"]
    if path.startswith("fsdp."):
        return "sft", [held_out, "train.backend=fsdp"]
    if path == "train.master_weights":
        return "sft", [held_out, "model.dtype=bfloat16"]
    if path == "model.revision":
        return "sgrpo", [held_out, "model.name=some/model"]
    if path == "lora.delivery":
        adapted = ["model.name=some/model", "lora.rank=4"]
        return "sgrpo", [held_out, "inference_engine.actors=1", *adapted]
    if path.startswith("lora.") or path == "model.load_in_4bit":
        return "sft", [
            held_out,
            "model.name=some/model",
            *(["lora.rank=4"] if path != "lora.rank" else []),
        ]
    if path.removeprefix("inference_engine.") in (
        "tensor_parallel",
        "gpu_memory_fraction",
        "kv_cache_gb",
    ):
        return "sgrpo", [held_out, "inference_engine.actors=1", "inference_engine.name=vllm"]
    if path in (
        "inference_engine.probe_every",
        "inference_engine.probe_tokens",
        "inference_engine.probe_limit",
        "run.ray_address",
        "run.max_restarts",
        "inference_engine.placement",
    ):
        return "sgrpo", [held_out, "train.backend=fsdp", "inference_engine.actors=1"]
    if path.startswith("data.image_") or path in ("model.freeze", "train.tower_lr"):
        return "sft", [held_out, "model.name=builtin:tiny-vl"]
    if path.startswith("action."):
        Path("q.json").write_text('{"q01": [0, 0], "q99": [1, 1]}')
        Path("q2.json").write_text('{"q01": [0, 0], "q99": [2, 2]}')
        if path in ("action.choices", "action.chunk", "action.ids"):
            return "sgrpo", [held_out, "environment.name=tools", "action.choices=left,right"]
        piece = '{"chunk": 1, "size": 2, "scale": 10, "least": 0, "most": 9, "merges": []}'
        for file in ("fast.json", "fast2.json"):
            Path(file).write_text(piece)
        if path == "action.fast":
            numbers = ["action.size=2", "action.statistics=q.json", "action.code=fast"]
            return "sgrpo", [held_out, "environment.name=tools", *numbers, "action.fast=fast.json"]
        with_numbers = ["action.size=2", "action.statistics=q.json"]
        if path == "action.size":
            with_numbers = []
        return "sgrpo", [held_out, "environment.name=tools", *with_numbers]
    if path == "reward.parts":
        return "sgrpo", [held_out, "~reward.name", "reward.parts.base={name: exact}"]
    if path == "model.offload_activations":
        return "sft", [held_out, "model.gradient_checkpointing=true"]
    if path == "run.ray_working_dir":
        return "sgrpo", [held_out, "inference_engine.actors=1", "run.ray_address=auto"]
    if path == "reward.options":
        return "sgrpo", [held_out, "reward.name=format"]
    if path == "reward.actors":
        Path("rm").mkdir(exist_ok=True)
        Path("rm/value_head.safetensors").touch()
        return "sgrpo", [held_out, "reward.name=rm", "reward.timeout_s=60"]
    if path in CODE_FIELDS:
        return "sgrpo", [held_out, "reward.name=code", "reward.timeout_s=60"]
    if path == "train.loss_numbers":
        Path("my_gate.py").write_text("def my_gate(*tensors, correction=None, reach=1.0): ...")
        return "sgrpo", [held_out, "train.loss=my_gate.py:my_gate"]
    if path == "train.features":
        Path("my_feature.py").write_text("class Mine: ...")
    if path in ("train.turn_gamma", "train.turn_lambda"):
        return "ppo", [held_out, "environment.name=tools"]
    if path == "environment.name" or has_environment in about(FIELDS[path]).when:
        return "sgrpo", [held_out, *(["environment.name=tools"] * (path != "environment.name"))]
    if path == "rollout.max_staleness":
        return "sgrpo", [held_out, "rollout.force_strict_on_policy=false"]
    if samples_ahead in about(FIELDS[path]).when:
        ahead = ["rollout.max_staleness=1", "rollout.force_strict_on_policy=false"]
        if path == "rollout.swap":
            ahead += ["rollout.schedule=free", "inference_engine.name=vllm"]
        return "sgrpo", [held_out, *ahead]
    for algorithm in ROWS:
        if not ROWS[algorithm].unsupported and path in read_by(algorithm, eval="e.jsonl"):
            return algorithm, [held_out]
    return "sgrpo", [held_out, CELL_CHOICES[path]]


def second_value(path: str) -> Any:
    section, _, name = path.partition(".")
    field = SECTIONS[section].model_fields[name]
    if path in SECOND:
        return SECOND[path]
    if path.startswith("train.") and name in CELLS and CELLS[name] not in ("ratio", "denominator"):
        return next(
            cell
            for cell in cell_names(CELLS[name])
            if cell not in ("none", *vars(ROWS["sgrpo"]).values())
        )
    kinds = get_args(field.annotation) or (field.annotation,)
    choices = [
        choice
        for kind in kinds
        for choice in (get_args(kind) or (kind,))
        if isinstance(choice, str)
    ]
    if choices:
        return next(choice for choice in choices if choice != field.default)
    if bool in kinds:
        return not field.default
    if int in kinds:
        return (field.default if isinstance(field.default, int) else 2) + 1
    if float in kinds:
        # No default of another row is a third of another's.
        return (field.default or 1.5) / 3 if (field.default or 0) <= 1 else field.default + 1
    return "other"


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_read_by_some_run_and_its_value_shows_in_the_resolved_config(
    write: Callable[..., Path], path: str
) -> None:
    if path == "train.alg_name":
        return
    Path("template.jinja").write_text("")
    algorithm, overrides = reader(path)
    config, steps = write(train={"alg_name": algorithm}), ["run.steps=96"]
    base = load_config(config, [*steps, *overrides])
    assert path in fields_read(base)
    if path in FIXED:
        with pytest.raises(ConfigError):
            load_config(config, [*steps, *overrides, f"{path}=2"])
        return
    value = second_value(path)
    text = "true" if value is True else "false" if value is False else str(value)
    changed = load_config(
        config,
        [
            *steps,
            *overrides,
            f"{path}={text}",
            *(["train.kl_coeff=0.1"] if path == "train.kl" else []),
            *(["action.statistics=q.json"] if path == "action.size" else []),
            *(["action.fast=fast.json"] if path == "action.code" else []),
        ],
    )
    section, _, name = path.partition(".")
    found = getattr(getattr(changed, section), name)
    if path in ("reward.parts", "model.teachers"):
        found = {key: part.model_dump(exclude_unset=True) for key, part in found.items()}
    assert found == value
    assert dump_config(changed) != dump_config(base)


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_that_is_not_read_is_refused_with_who_reads_it(
    write: Callable[..., Path], path: str
) -> None:
    value = second_value(path)
    text = "true" if value is True else "false" if value is False else str(value)
    for recipe in ("rl", "supervised"):
        algorithm = next(
            (
                name
                for name, row in ROWS.items()
                if row.recipe == recipe and path not in read_by(name)
            ),
            None,
        )
        if algorithm is None:
            continue
        config = write(train={"alg_name": algorithm})
        with pytest.raises(ConfigError) as caught:
            load_config(config, ["run.steps=96", f"{path}={text}"])
        report = str(caught.value)
        assert f"override '{path}={text}': {path}" in report
        assert "remove it" in report


def test_every_parameter_of_the_table_is_a_field_and_every_field_says_what_it_means() -> None:
    train = SECTIONS["train"].model_fields
    assert {number.key for cell in TABLE.values() for number in cell.numbers} <= set(train)
    assert {name for row in ROWS.values() for name in row.defaults} <= set(train)
    for path in FIELDS:
        section, _, name = path.partition(".")
        assert SECTIONS[section].model_fields[name].description, f"{path} has no description"


def test_every_cell_of_the_table_is_listed_with_its_parameters() -> None:
    for row in ROWS.values():
        for kind in (
            ("advantage", "gate", "correction", "kl", "weights") if row.recipe == "rl" else ()
        ):
            assert (kind, getattr(row, kind)) in TABLE


@pytest.mark.parametrize("name", BUILTIN_DIMS)
def test_every_built_in_model_is_a_valid_name(write: Callable[..., Path], name: str) -> None:
    assert load_config(write(), [f"model.name={name}"]).model.name == name


BASIC = {"run": {"name": "x", "steps": 1}, "model": {"name": "x"}, "data": {"train": "t.jsonl"}}


def validated(**train: Any) -> Config:
    return Config.model_validate({**BASIC, "train": train})


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"alg_name": "sgrpo", "loss": "dppo_tv"}, {"weight_max": 20.0}),
        ({"alg_name": "sgrpo", "loss": "gmpo"}, {"clip_low": 0.4, "clip_high": 0.4}),
        ({"alg_name": "sgrpo", "ratio": "geometric"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        ({"alg_name": "gmpo", "ratio": "geometric"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        ({"alg_name": "gspo", "loss": "gmpo"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        ({"alg_name": "gspo", "ratio": "token"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"alg_name": "sgrpo", "loss": "dppo_topk_kl"}, {"top_candidates": 20}),
        ({"alg_name": "simko"}, {"top_candidates": 3}),
        ({"alg_name": "sgrpo", "correction": "reject"}, {"correction_level": "geometric"}),
        # The row's override holds for its own cells, and not for another that was chosen by hand.
        ({"alg_name": "dapo"}, {"clip_low": 0.2, "clip_high": 0.28}),
        ({"alg_name": "dapo", "loss": "ppo_clip"}, {"clip_high": 0.28}),
        ({"alg_name": "dapo", "loss": "gmpo"}, {"clip_high": 0.4}),
        ({"alg_name": "mis", "correction": "truncate"}, {"correction_max": 2.0}),
        ({"alg_name": "prorl", "kl": "loss_k2"}, {"kl_coeff": 1e-3, "clip_high": 0.4}),
        # What is written down always holds.
        ({"alg_name": "dapo", "loss": "gmpo", "clip_high": 0.3}, {"clip_high": 0.3}),
        ({"alg_name": "sgrpo", "ratio": "geometric", "clip_low": 0.1}, {"clip_low": 0.1}),
    ],
)
def test_a_number_comes_from_the_user_then_the_chosen_cell_then_the_row_then_its_cell(
    train: dict[str, Any], expected: dict[str, Any]
) -> None:
    cfg = validated(**train)
    assert {name: getattr(cfg.train, name) for name in expected} == expected


def test_the_resolved_config_shows_the_numbers_of_a_chosen_cell(write: Callable[..., Path]) -> None:
    shown = dump_config(load_config(write(), ["train.loss=dppo_tv"]))
    assert "  weight_max: 20.0\n" in shown
    shown = dump_config(load_config(write(), ["train.ratio=geometric"]))
    assert "  clip_low: 0.0003\n" in shown and "  clip_high: 0.0004\n" in shown


def test_a_part_knows_its_numbers_by_the_names_of_its_function() -> None:
    cfg = validated(alg_name="simpo", preference_gamma=1.0)
    assert (cfg.train.value(SIMPO_BETA), cfg.train.value(SIMPO_GAMMA)) == (2.5, 1.0)
    cfg = validated(alg_name="simko")
    algorithm = Assembly(cfg).algorithm
    assert algorithm.numbers("selection", "simko") == {"explore_quantile": 0.8}
    assert cfg.train.value(TOP_CANDIDATES) == 3


@pytest.mark.parametrize("algorithm", ["sgrpo", "sft", "rft", "dpo", "reward_model"])
def test_a_recipe_reads_only_its_own_fields(algorithm: str) -> None:
    read = fields_read(validated(alg_name=algorithm))
    assert ("train.clip_low" in read) == (algorithm == "sgrpo")
    assert ("train.beta" in read) == (algorithm == "dpo")
    assert ("train.keep_reward" in read) == (algorithm == "rft")
    assert ("rollout.max_tokens" in read) == (algorithm in ("sgrpo", "rft"))
    with pytest.raises(ConfigError, match="is not read by|is read by"):
        wrong = {"beta": 1.0} if algorithm != "dpo" else {"gamma": 0.5}
        check_config(validated(alg_name=algorithm, **wrong))


def test_every_number_of_the_tables_has_a_line() -> None:
    lines = {
        field.number: path.removeprefix("train.")
        for path, field in ((path, about(field)) for path, field in FIELDS.items())
        if field.number is not None
    }
    assert list(lines.items()) == [(number, name) for name, number in NUMBERS.items()]
