"""`model.teachers`: what a run that learns from teachers may say of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxrl.config import Config, dump_config, load_config
from oxrl.config.roles import roles_of
from oxrl.errors import ConfigError
from oxrl.flat_config import differences, written_config
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.tables.roles import Role

Write = Callable[..., Path]
BIG = {"name": "builtin:small"}


@pytest.fixture
def asked(write: Write, tmp_path: Path) -> Callable[..., Config]:
    """Load a run of opd_topk with teachers, and overrides."""
    (tmp_path / "hint.jinja").write_text("{{ answer }}: {{ prompt }}")

    def load(teachers: Any = None, *overrides: str, algorithm: str = "opd_topk") -> Config:
        given = {"big": BIG} if teachers is None else teachers
        model = {"name": "builtin:tiny", "teachers": given}
        train = {"alg_name": algorithm}
        return load_config(write(model=model, train=train), overrides)

    return load


def test_a_row_that_reads_no_reward_needs_none(asked: Callable[..., Config]) -> None:
    assert asked(None, "~reward.name").has_no_reward
    assert not asked().has_no_reward
    with pytest.raises(ConfigError, match=r"reward\.name.*\n +is required"):
        asked(None, "~reward.name", algorithm="kdrl")
    with pytest.raises(ConfigError, match=r"reward\.name.*\n +is required"):
        asked(None, "~reward.name", "data.eval=data/train.jsonl")


def test_teachers_are_roles_with_weights_of_their_own(
    asked: Callable[..., Config], tmp_path: Path
) -> None:
    prompt = str(tmp_path / "hint.jinja")
    cfg = asked(
        {
            "a": {"name": "builtin:small", "dtype": "bfloat16", "sources": ["x"]},
            "live": {"prompt": prompt, "sources": ["y"]},
            "frozen": {"prompt": prompt, "weights": "frozen", "sources": ["z"]},
            "slow": {"prompt": prompt, "weights": {"ema": 0.25}},
        },
        "rollout.temperature=0.6",
    )
    first, *others = roles_of(cfg)
    assert first.name == "policy"
    tiny = {"model": "builtin:tiny", "temperature": 0.6}
    assert others == [
        Role(
            name="teacher.a",
            model="builtin:small",
            temperature=0.6,
            dtype="bfloat16",
            seed="teacher.a",
        ),
        Role(name="teacher.frozen", **tiny),
        Role(name="teacher.slow", saved="teacher.slow", dtype="float32", **tiny),
    ]


def test_overrides_reach_into_one_teacher_and_the_dump_loads_to_the_same(
    asked: Callable[..., Config], tmp_path: Path
) -> None:
    cfg = asked(
        None,
        "model.teachers.big.dtype=bfloat16",
        "model.teachers.two={name: builtin:tiny, sources: [s]}",
    )
    assert cfg.model.teachers["big"].dtype == "bfloat16"
    assert cfg.model.teachers["two"].sources == ["s"]
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(cfg))
    assert load_config(dumped) == cfg
    changed = dump_config(asked(None, "model.teachers.big.dtype=bfloat16"))
    found = differences(written_config(changed.encode()), written_config(dumped.read_bytes()))
    assert {path.rpartition(".")[0] for path in found} == {"model.teachers.two"}
    assert {"model.teachers.two.name", "model.teachers.two.sources"} <= set(found)


REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "none": ({}, [], "model.teachers|opd_topk learns from one: write {NAME: {name: MODEL}}"),
    "no fields": ({"big": {"nam": "x"}}, [], "model.teachers.big.nam|did you mean 'name'"),
    "no name": ({"big": {}}, [], "model.teachers.big.name|is required: a model; or prompt"),
    "no model": ({"big": {"name": "builtin:tinny"}}, [], "name|did you mean 'builtin:tiny'"),
    "no folder": ({"big": {"name": "./nowhere"}}, [], "model.teachers.big.name|is no folder"),
    "empty folder": ({"big": {"name": "./empty"}}, [], "name|has no config.json"),
    "value model": ({"big": {"name": "./valued"}}, [], "name|is a reward model"),
    "itself": ({"big": {"name": "./policy"}}, ["model.name=./policy"], "name|is the policy itself"),
    "images": ({"big": {"name": "builtin:tiny-vl"}}, [], "name|reads images and the policy does"),
    "short": ({"big": {"name": "./short"}}, [], "name|reads rows of 64 tokens"),
    "twice": (
        {"a": BIG | {"sources": ["s", "t"]}, "b": BIG | {"sources": ["s"]}},
        [],
        "model.teachers|a source belongs to one teacher",
    ),
    "two for all": ({"a": BIG, "b": BIG}, [], "model.teachers|have the same rows"),
    "alpha": (None, ["train.divergence_alpha=0.995"], "train.divergence_alpha|is 0, 1, or from"),
    "small alpha": (None, ["train.divergence_alpha=0.001"], "train.divergence_alpha|is 0, 1, or"),
    "candidates": (None, ["train.teacher_candidates=400"], "candidates|at most the 261 tokens"),
    "none at all": (None, ["train.teacher_candidates=0"], "candidates|greater than or equal to 1"),
    "secret": (
        {"big": {"name": "x", "engine": "endpoint", "url": "http://user:hunter2@h/v1"}},
        [],
        "model.teachers.big.url|holds more than a place",
    ),
    "key": (
        {"big": {"name": "x", "engine": "endpoint", "url": "http://h/v1?key=hunter2"}},
        [],
        "model.teachers.big.url|holds more than a place",
    ),
    "openai": (
        {"big": {"name": "x", "engine": "endpoint", "url": "https://api.openai.com/v1"}},
        [],
        "model.teachers.big.url|does not score given tokens",
    ),
    "no place": (
        {"big": {"name": "x", "engine": "endpoint", "url": "ftp://h"}},
        [],
        "model.teachers.big.url|must begin with http",
    ),
    "no url": ({"big": {"name": "x", "engine": "endpoint"}}, [], "url|is required with engine"),
    "cold": (
        {"big": {"name": "x", "engine": "endpoint", "url": "http://h/v1"}},
        ["rollout.temperature=0.5"],
        "rollout.temperature|must be 1 with model.teachers.big.engine: endpoint",
    ),
    "cold vllm": (
        {"big": BIG | {"engine": "vllm"}},
        ["rollout.temperature=0.5"],
        "rollout.temperature|must be 1 with model.teachers.big.engine: vllm",
    ),
    "url": ({"big": BIG | {"url": "http://h/v1"}}, [], "big.url|is read with engine endpoint"),
    "reads": ({"big": BIG | {"reads": ["answer"]}}, [], "big.reads|is read with prompt"),
    "weights": ({"big": BIG | {"weights": "frozen"}}, [], "big.weights|is read of the policy"),
    "fast": ({"big": {"prompt": "hint.jinja", "weights": {"ema": 2}}}, [], "weights|{ema: SHARE}"),
    "revision": ({"own": {"prompt": "hint.jinja", "revision": "x"}}, [], "revision|is read of a m"),
    "served": ({"own": {"prompt": "hint.jinja", "engine": "vllm"}}, [], "engine|must be local"),
    "no file": ({"big": {"prompt": "nowhere.jinja"}}, [], "big.prompt|is no file"),
    "device": (
        {"big": BIG | {"device": "cpu"}},
        ["train.backend=fsdp", "inference_engine.actors=1"],
        "big.device|is read with train.backend local",
    ),
    "unread": (None, ["train.alg_name=sgrpo"], "model.teachers|is read by rows with a teacher"),
    "epochs": (None, ["train.alg_name=opd", "train.epochs=2"], "train.epochs|has no importance"),
    "self": (None, ["train.alg_name=opsd"], "model.teachers|needs the policy itself as one"),
}


def folders(here: Path) -> None:
    (here / "empty").mkdir()
    for name, changes in (
        ("policy", {}),
        ("valued", {}),
        ("short", {"max_position_embeddings": 64}),
    ):
        builtin_policy("builtin:tiny", seed=0).save_pretrained(here / name)
        builtin_tokenizer().save_pretrained(here / name)
        path = here / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (here / "valued" / "value_head.safetensors").write_bytes(b"")


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_its_field(
    case: str, asked: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders(tmp_path)
    teachers, overrides, expected = REFUSED[case]
    field, said = expected.split("|")
    with pytest.raises(ConfigError) as error:
        asked(teachers, *overrides)
    text = str(error.value)
    assert re.search(rf"{re.escape(field)} = [^\n]*\n +[^\n]*{re.escape(said)}", text), text
    assert "hunter2" not in text
