"""`connected`: a Ray cluster that all tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.small_cluster import small_cluster


@pytest.fixture(scope="module")
def connected() -> Iterator[None]:
    with small_cluster():
        yield
