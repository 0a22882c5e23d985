from __future__ import annotations

import runpy
from pathlib import Path

from oxrl.tables.cells import CELLS
from oxrl.tables.policy import ROWS

ROOT = Path(__file__).resolve().parents[2]


def test_the_algorithms_page_is_what_the_table_and_the_docstrings_say() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "make_algorithms.py"))
    assert (ROOT / "docs" / "algorithms.md").read_text() == generator["page"](), "run `make docs`"


def test_every_row_and_every_cell_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for name, row in ROWS.items():
        assert row.recipe != "rl" or f"\n### {name}\n" in page
    for kind, name in CELLS:
        assert kind == "selection" or name == "none" or f"\n### {kind} {name}\n" in page


def test_the_comparison_page_holds_the_numbers_that_the_functions_return() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "make_comparison.py"))
    assert (ROOT / "docs" / "comparison.md").read_text() == generator["page"](), "run `make docs`"
