"""No type of the core is wrong. `make check` looks at packages/ too."""

from __future__ import annotations

import pytest

from support.type_checker import wrong_types


@pytest.mark.timeout(900)
def test_no_type_is_wrong() -> None:
    assert wrong_types("oxrl", "main_rl.py", "main_sl.py") == ""
