"""`reward.parts`: several rewards in one section, by names of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oxrl.config import Config, dump_config, load_config
from oxrl.config.load import check_config
from oxrl.config.sections.reward import asked_rewards
from oxrl.errors import ConfigError
from oxrl.flat_config import differences, written_config

Write = Callable[..., Path]
TWO = {"correct": {"name": "math"}, "form": {"name": "format", "weight": 0.2, "optional": True}}


@pytest.fixture
def parts(write: Write) -> Path:
    """A config whose reward has two parts, and no name."""
    return write(reward={"name": ..., "parts": TWO})


def test_each_part_has_settings_of_its_own_or_those_of_the_section(parts: Path) -> None:
    cfg = load_config(parts, ["reward.parts.form.timeout_s=3", "reward.workers=2"])
    correct, form = asked_rewards(cfg.reward)
    assert (correct.name, correct.weight, correct.optional) == ("math", 1.0, False)
    assert (form.name, form.weight, form.optional) == ("format", 0.2, True)
    assert (correct.timeout_s, form.timeout_s) == (10.0, 3.0)
    assert (correct.workers, form.workers) == (2, 2)
    assert (correct.field, form.field) == ("reward.parts.correct", "reward.parts.form")


def test_the_one_reward_is_what_it_was(write: Write) -> None:
    cfg = load_config(write())
    assert [(one.part, one.field, one.name) for one in asked_rewards(cfg.reward)] == [
        ("", "reward", "math")
    ]
    assert "parts" not in dump_config(cfg)


def test_the_resolved_dump_loads_to_the_same(parts: Path, tmp_path: Path) -> None:
    cfg = load_config(parts, ["reward.parts.form.workers=3"])
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(cfg))
    assert load_config(dumped) == cfg
    assert "name: " not in dump_config(cfg).partition("reward:")[2].partition("parts:")[0]


def test_a_code_part_has_the_sections_sandbox_and_may_have_another(parts: Path) -> None:
    tests = ["reward.parts.solved={name: code, timeout_s: 60}"]
    tests.append("reward.parts.way={name: code, timeout_s: 60, options: {partial: true}}")
    cfg = load_config(parts, [*tests, "reward.sandbox=basic"])
    *_, solved, way = asked_rewards(cfg.reward)
    assert (solved.options["sandbox"], way.options["sandbox"]) == ("basic", "basic")
    assert (solved.options["partial"], way.options["partial"]) == (False, True)


@pytest.mark.parametrize(
    ("override", "path", "said"),
    [
        ("reward.parts.form.wieght=2", "reward.parts.form.wieght", "did you mean 'weight'"),
        ("reward.parts.form.weight=abc", "reward.parts.form.weight", "valid number"),
        ("reward.parts.form.weight=.inf", "reward.parts.form.weight", "finite"),
        ("reward.parts.form.weight=", "reward.parts.form.weight", "is empty"),
        (
            "reward.parts.form.optional=1",
            "reward.parts.form.optional",
            "must be true, false or group",
        ),
        ("reward.parts.form.workers=2000", "reward.parts.form.workers", "each is a process"),
        ("reward.parts.form.timeout_s=0", "reward.parts.form.timeout_s", "answer"),
        ("reward.parts.form.name=", "reward.parts.form.name", "is empty"),
        ("reward.parts.form.name=maths", "reward.parts.form.name", "did you mean 'math'"),
        ("reward.parts.form.name=no.py:f", "reward.parts.form.name", "no.py"),
        ("reward.parts.form.options={patern: x}", "reward.parts.form.options", "'pattern'"),
        ("reward.parts.form.options=3", "reward.parts.form.options", "dictionary"),
        ("reward.parts.new={weight: 2}", "reward.parts.new.name", "is required"),
        ("reward.parts.new=3", "reward.parts", "'new' is a part and holds fields"),
        ("reward.parts.new.weight=3", "reward.parts", "no such part"),
        ("reward.parts=3", "reward.parts", "dictionary"),
        ("reward.parts.a/b={name: math}", "reward.parts", "'a/b' names a part"),
        ("reward.parts.environment={name: math}", "reward.parts", "choose another name"),
        ("reward.name=math", "reward.parts", "keep one of the two"),
        ("reward.options={x: 1}", "reward.options", "each of reward.parts"),
        ("reward.parts.form={name: code, timeout_s: 2}", "reward.parts.form.timeout_s", "or more"),
        ("~reward.parts.other", "reward.parts.other", "name a part or field there"),
        ("reward.sandbox=basic", "reward.sandbox", "is read by reward.name: code"),
    ],
)
def test_what_is_wrong_with_a_part_is_said_where_it_stands(
    parts: Path, override: str, path: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(parts, [override])
    report = str(caught.value)
    assert report.startswith("1 problem in")
    assert f"{path}" in report
    assert said in report


def test_a_field_of_the_section_that_every_part_has_itself_is_not_read(parts: Path) -> None:
    own = [f"reward.parts.{name}.workers=2" for name in TWO]
    with pytest.raises(ConfigError, match=r"reward\.workers = 3\n.*each of reward\.parts"):
        load_config(parts, [*own, "reward.workers=3"])
    assert "\n  workers:" not in dump_config(load_config(parts, own))


def test_a_part_is_taken_back_and_changed_on_the_command_line(parts: Path) -> None:
    cfg = load_config(parts, ["~reward.parts.form", "reward.parts.correct.weight=2"])
    assert [(name, part.weight) for name, part in cfg.reward.parts.items()] == [("correct", 2.0)]
    cfg = load_config(parts, ["~reward.parts.form.weight"])
    assert cfg.reward.parts["form"].weight == 1.0


def test_the_place_in_the_file_is_that_of_the_field(parts: Path) -> None:
    lines = parts.read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "0.2" in line)
    parts.write_text(parts.read_text().replace("0.2", "many"))
    with pytest.raises(ConfigError, match=rf":{place}: reward\.parts\.form\.weight = 'many'"):
        load_config(parts)


def test_a_configuration_from_python_is_held_to_the_same(parts: Path) -> None:
    cfg = load_config(parts)
    check_config(cfg)
    values = cfg.model_dump()
    values["reward"]["parts"]["form"]["options"] = {"patern": "x"}
    with pytest.raises(ConfigError, match=r"reward\.parts\.form\.options"):
        check_config(Config.model_validate(values))


def test_a_resumed_run_may_have_other_workers_of_a_part_and_no_other_weight(parts: Path) -> None:
    old = written_config(dump_config(load_config(parts)).encode())
    changed = load_config(parts, ["reward.parts.form.weight=0.3", "reward.parts.form.workers=4"])
    new = written_config(dump_config(changed).encode())
    assert differences(old, new) == {
        "reward.parts.form.weight": (0.2, 0.3),
        "reward.parts.form.workers": (None, 4),
    }
