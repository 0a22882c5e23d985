"""No type of what is in packages/ is wrong. `make check` looks at the core too."""

from __future__ import annotations

import pytest

from support.type_checker import wrong_types


@pytest.mark.timeout(900)
def test_no_type_is_wrong() -> None:
    assert wrong_types("packages") == ""
