"""Drawing from several sources: exact shares at any prefix that allows them, and nothing to save."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from oxrl.data.mixture import Mixture, open_rows
from oxrl.data.order import index_at


@dataclass
class Numbers:
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def at(self, draw: int, *, seed: int) -> int:
        return self.first + index_at(draw, self.size, seed)


def three() -> Mixture[int]:
    return Mixture([Numbers(0, 7), Numbers(100, 50), Numbers(1000, 13)], [0.5, 0.3, 0.2])


def test_ratios_are_exact_after_ten_thousand_draws_and_never_off_by_more_than_the_sources() -> None:
    mixture, counts = three(), Counter[int]()
    for draw in range(10_000):
        counts[mixture.locate(draw)[0]] += 1
        assert all(abs(counts[source] - share * (draw + 1)) < 2 for source, share in enumerate((0.5, 0.3, 0.2)))
    assert counts == {0: 5000, 1: 3000, 2: 2000}


def test_two_sources_stay_within_one_draw() -> None:
    mixture, count = Mixture([Numbers(0, 3), Numbers(9, 3)], [1, 2]), 0
    for draw in range(3000):
        count += mixture.locate(draw)[0] == 0
        assert abs(count - (draw + 1) / 3) < 1
    assert count == 1000


def test_a_resumed_mixture_goes_on_where_it_was() -> None:
    whole = three()
    drawn = [whole.at(draw, seed=4) for draw in range(10_000)]
    resumed = three()
    assert [resumed.at(draw, seed=4) for draw in range(6_123, 10_000)] == drawn[6_123:]
    assert [three().at(draw, seed=5) for draw in range(50)] != drawn[:50]


def test_each_source_keeps_its_own_epochs() -> None:
    mixture = three()
    small = [mixture.at(draw, seed=1) for draw in range(28) if mixture.locate(draw)[0] == 0]
    assert sorted(small[:7]) == sorted(small[7:14]) == list(range(7))


def test_ranks_that_share_the_draws_see_disjoint_rows_of_one_order() -> None:
    whole = [three().at(draw, seed=2) for draw in range(60)]
    ranks = [three() for _ in range(3)]
    shards = [[mixture.at(draw, seed=2) for draw in range(rank, 60, 3)] for rank, mixture in enumerate(ranks)]
    assert [row for group in zip(*shards, strict=True) for row in group] == whole


def test_shares_must_be_positive_and_one_per_source() -> None:
    for ratios in ([1.0], [1.0, 0.0], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="2 sources need as many positive ratios"):
            Mixture([Numbers(0, 1), Numbers(1, 1)], ratios)


def test_one_file_is_no_mixture() -> None:
    rows = open_rows("7", lambda path: Numbers(int(path), 3))
    assert isinstance(rows, Numbers)
    assert isinstance(open_rows({"7": 1, "8": 1}, lambda path: Numbers(int(path), 3)), Mixture)
