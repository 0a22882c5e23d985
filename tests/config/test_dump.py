"""Writing a configuration back: equal when read again, readable by any YAML reader, comparable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from oxrl.config import config_diff, config_schema, dump_config, load_config
from oxrl.tables.policy import ROWS


@pytest.mark.parametrize("algorithm", [name for name, row in ROWS.items() if not row.unsupported])
def test_a_dump_loads_to_an_equal_object(write: Callable[..., Path], algorithm: str) -> None:
    cfg = load_config(
        write(train={"alg_name": algorithm}), ["run.steps=96", "train.lr=3e-7", "run.seed=5"]
    )
    Path("dump.yaml").write_text(dump_config(cfg))
    again = load_config("dump.yaml")
    assert again == cfg
    assert dump_config(again) == dump_config(cfg)


def test_overridden_cells_survive_the_dump(write: Callable[..., Path]) -> None:
    cells = [
        "train.advantage=gae",
        "train.loss=cispo",
        "train.weights=fixed_length",
        "train.denominator=old",
    ]
    cfg = load_config(
        write(), [*cells, "train.gamma=0.9", "train.weight_max=3", "data.eval=data/test.jsonl"]
    )
    Path("dump.yaml").write_text(dump_config(cfg))
    assert load_config("dump.yaml") == cfg
    assert load_config("dump.yaml").train.row.needs == ("critic",)


@pytest.mark.parametrize("written", [None, "truncate"])
def test_a_correction_that_is_switched_off_stays_off(
    write: Callable[..., Path], written: str | None
) -> None:
    stale = {"max_staleness": 1, "force_strict_on_policy": False}
    cfg = load_config(write(train={"correction": written}, rollout=stale))
    Path("dump.yaml").write_text(dump_config(cfg))
    assert load_config("dump.yaml").train.correction == cfg.train.correction == written
    assert load_config(write(rollout=stale)).train.correction == "truncate"


@pytest.mark.parametrize("name", ["a: b", "#1", "no", "1e-6", "über ✓ 😀", 'quo"te\\', "~", "- a"])
def test_any_text_survives_the_dump(write: Callable[..., Path], name: str) -> None:
    cfg = load_config(write(run={"name": name}))
    Path("dump.yaml").write_text(dump_config(cfg), encoding="utf-8")
    assert load_config("dump.yaml").run.name == name


def test_a_yaml_1_1_reader_sees_the_same_values(write: Callable[..., Path]) -> None:
    """PyYAML reads `1e-06` as text; the dump writes `1.0e-06`, which both versions of YAML read as
    a float.
    """
    values = yaml.safe_load(
        dump_config(load_config(write(), ["train.lr=1e-6", "train.adam_eps=2.5e-9"]))
    )
    assert (values["train"]["lr"], values["train"]["adam_eps"]) == (1e-6, 2.5e-9)


def test_the_dump_holds_only_what_is_read(write: Callable[..., Path]) -> None:
    values = yaml.safe_load(dump_config(load_config(write(train={"alg_name": "sft"}))))
    assert set(values) == {"run", "model", "data", "action", "lora", "train"}
    assert not {"prompts_per_step", "max_prompt_tokens", "eval_rows"} & set(values["data"])
    assert not {"clip_low", "minibatches", "kl_coeff", "gamma"} & set(values["train"])


def test_a_diff_names_values_and_fields_that_only_one_side_reads(
    write: Callable[..., Path],
) -> None:
    a = load_config(write("a.yaml", train={"lr": 1e-5}))
    b = load_config(write("b.yaml", train={"alg_name": "cispo"}))
    difference = config_diff(a, b)
    assert difference["train.lr"] == (1e-5, 1e-6)
    assert difference["train.clip_low"] == (0.2, "(not read)")
    assert difference["train.weight_max"] == ("(not read)", 5.0)
    assert "run.seed" not in difference
    assert not config_diff(a, a)


def test_the_schema_is_json_and_lists_the_names_of_the_table() -> None:
    schema = json.loads(json.dumps(config_schema()))
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert set(train["alg_name"]["enum"]) == set(ROWS)
    assert "ppo_clip" in train["loss"]["enum"]
    assert all("description" in field for field in train.values())
    assert train["lr"]["minimum"] == 0
