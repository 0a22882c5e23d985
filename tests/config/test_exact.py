"""`run.exact` beside what has no exact form: which field, that there is none, and what to set."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.errors import ConfigError
from oxrl.plan.preflight import Prepared, examine
from support.small_runs import rl_config

EXACT = "run.exact=true"


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("model.dtype=bfloat16", "model.dtype", ["bfloat16", "float32"]),
        ("model.attention=eager", "model.attention", ["eager attention", "auto"]),
        ("run.device=cuda", "run.device", ["cuda", "cpu"]),
        ("run.device=mps", "run.device", ["mps", "cpu"]),
        ("train.backend=deepspeed", "train.backend", ["deepspeed", "local or fsdp"]),
        ("inference_engine.name=vllm", "inference_engine.name", ["vllm", "local", "processes"]),
        ("model.name=builtin:tiny-vl", "model.name", ["images", "text alone"]),
    ],
)
def test_a_field_without_an_exact_form_is_named_with_what_to_set(
    write: Callable[..., Path], override: str, field: str, words: list[str]
) -> None:
    actors = ["inference_engine.actors=1"] if "backend" in override else []
    load_config(write(), [override, *actors])
    with pytest.raises(ConfigError) as refused:
        load_config(write(), [override, EXACT, *actors])
    report = str(refused.value)
    assert report.startswith("1 problem in run.yaml")
    assert f": {field}" in report
    assert "no exact form of " in report
    assert " exists: " in report
    assert "or run.exact to false" in report
    for word in words:
        assert word in report


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            ["model.attention=flash_attention_2", "model.dtype=bfloat16"],
            "model.attention",
            "no exact form of flash_attention_2 attention exists: set it to auto",
        ),
        (
            ["model.load_in_4bit=true", "lora.rank=4", "model.name=Qwen/Qwen2.5-0.5B"],
            "model.load_in_4bit",
            "no exact form of layers in four bits exists: set it to false",
        ),
    ],
)
def test_so_is_one_that_is_told_beside_others(
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    field: str,
    words: str,
) -> None:
    """Where the packages are installed that these fields need."""
    monkeypatch.setattr("oxrl.config.checks.engines.find_spec", lambda name: object())
    with pytest.raises(ConfigError) as refused:
        load_config(write(), [EXACT, *overrides])
    report = str(refused.value)
    assert f": {field}" in report
    assert words in report


def test_what_has_an_exact_form_is_taken(write: Callable[..., Path]) -> None:
    for override in (
        "model.attention=sdpa",
        "run.device=cpu",
        "inference_engine.processes=2",
        "inference_engine.actors=2",
        "train.backend=fsdp",
        "train.share_prefix=true",
        "model.gradient_checkpointing=true",
    ):
        assert load_config(write(), [EXACT, override]).run.exact


def test_learning_from_given_answers_has_no_sampler_to_agree_with(tmp_path: Path) -> None:
    from support.small_runs import sft_config

    with pytest.raises(ConfigError, match=r"run.exact"):
        sft_config(tmp_path, "run", [EXACT])


# --- What is found on a small model of the kind, before the weights of the model are read.
def folder_of(folder: Path, **changed: Any) -> Path:
    """A model's folder, of which config.json asks for what has no exact form. Its weights are no
    weights: whoever reads them says so.
    """
    from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer

    place = folder / "model"
    model: Any = builtin_policy("builtin:tiny", seed=0)
    model.save_pretrained(place)
    builtin_tokenizer().save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changed))
    return place


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "an activation": ({"hidden_act": "mish"}, "MishActivation"),
    "windows": (
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding_window",
    ),
}


def of_model(folder: Path, kind: str) -> Config:
    changed, _ = KINDS[kind]
    model = {"name": str(folder_of(folder, **changed))}
    return rl_config(folder, "run", model=model, run={"exact": True})


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_an_exact_form_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cfg = of_model(tmp_path, kind)
    read: list[object] = []
    monkeypatch.setattr("oxrl.models.load.read_weights", lambda *given, **_: read.append(given))
    with pytest.raises(ConfigError) as refused:
        run(cfg)
    text = str(refused.value)
    assert "run.exact: no exact form of " in text
    assert KINDS[kind][1] in text
    assert "set run.exact: false" in text
    assert read == []
    assert not cfg.run.directory.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_finds_it_as_well(tmp_path: Path, kind: str) -> None:
    cfg = of_model(tmp_path, kind)
    with closing(Prepared()) as prepared:
        found = examine(cfg, prepared, "exact")
    assert found.state == "wrong"
    assert "run.exact: no exact form of " in found.text
    assert KINDS[kind][1] in found.text


def test_a_plan_says_what_it_costs_and_what_is_promised(tmp_path: Path) -> None:
    plain = rl_config(tmp_path, "run")
    assert examine(plain, Prepared(), "exact").text == ""
    found = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), EXACT])
    assert found.exit_code == 0, found.output
    assert "a step takes longer for it" in found.output
    assert "digest" in found.output


def test_a_pytorch_without_onednn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    cfg = rl_config(tmp_path, "run", run={"exact": True})
    with pytest.raises(ConfigError, match=r"run.exact: .*oneDNN.*; set run.exact: false"):
        run(cfg)
    assert not cfg.run.directory.exists()
