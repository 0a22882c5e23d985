"""The page for those who come from TRL or verl names fields that exist, and agrees with the errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oxrl.config.names import other_names
from oxrl.config.schema import FIELDS, SECTIONS
from oxrl.config.sections.train import cell_names
from oxrl.tables.policy import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| TRL", "| verl"))
]
FIELD = re.compile(rf"`({'|'.join(SECTIONS)})\.(\w+)(?:: (\w+))?")


def test_every_field_on_the_right_exists_and_takes_the_value_that_stands_there() -> None:
    assert len(TABLE) > 80
    for _, here, note in TABLE:
        for section, name, value in FIELD.findall(f"{here} {note}"):
            path = f"{section}.{name}"
            assert path in FIELDS, path
            if value and section == "train" and name in ("weights", "advantage", "ratio", "kl"):
                assert value in cell_names(name), f"{path}: {value}"
            if value and name == "alg_name":
                assert value in ROWS


def test_the_page_and_the_errors_about_other_names_agree() -> None:
    """Where both know a name, some row of it has what the error says."""
    shown: dict[str, str] = {}
    for theirs, here, note in TABLE:
        for word in re.findall(r"[\w.]+", theirs):
            name = word.rpartition(".")[2]
            shown[name] = shown.get(name, "") + f" {here} {note}"
    known = {name: text for name, text in shown.items() if name in other_names()}
    assert len(known) > 40
    for name, text in known.items():
        fields = other_names()[name].fields
        assert not fields or any(f"`{field}" in text for field in fields), (name, fields)


@pytest.mark.parametrize(
    "kind", ["GRPOConfig", "DPOConfig", "SFTConfig", "KTOConfig", "RewardConfig"]
)
def test_names_of_trl_are_those_of_the_installed_version(kind: str) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    fields = set(getattr(trl, kind).__dataclass_fields__)
    text = PAGE.read_text(encoding="utf-8").partition("## From verl")[0]
    assert len([name for name in fields if f"`{name}" in text]) >= 5
