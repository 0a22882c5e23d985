"""Which row comes when: every row once per epoch, exact shares of several sources, and nothing to
save.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from oxrl.data.order import Mixture, Shuffled, _permutation, first_draws, index_at, open_rows


def test_every_epoch_visits_each_row_once_in_a_fresh_order() -> None:
    epochs = [[index_at(epoch * 50 + i, 50, seed=7) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


def test_a_position_does_not_depend_on_what_was_asked_before() -> None:
    forward = [index_at(draw, 13, seed=1) for draw in range(40)]
    assert [index_at(draw, 13, seed=1) for draw in reversed(range(40))] == forward[::-1]


def test_another_seed_is_another_order() -> None:
    orders = {tuple(index_at(draw, 20, seed=seed) for draw in range(20)) for seed in range(50)}
    assert len(orders) == 50


def test_the_first_position_is_uniform_over_rows() -> None:
    # 6000 seeds over 6 rows: 1000 each; six standard deviations are sqrt(6000 * 1/6 * 5/6) * 6 =
    # 173.
    counts = [0] * 6
    for seed in range(6000):
        counts[index_at(0, 6, seed)] += 1
    assert all(abs(count - 1000) < 173 for count in counts)


@pytest.mark.parametrize(("draw", "size"), [(-1, 5), (0, 0)])
def test_positions_that_do_not_exist_are_refused(draw: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"draw={draw}, size={size}"):
        index_at(draw, size, 0)


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
        assert all(
            abs(counts[source] - share * (draw + 1)) < 2
            for source, share in enumerate((0.5, 0.3, 0.2))
        )
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
    shards = [
        [mixture.at(draw, seed=2) for draw in range(rank, 60, 3)]
        for rank, mixture in enumerate(ranks)
    ]
    assert [row for group in zip(*shards, strict=True) for row in group] == whole


def test_shares_must_be_positive_and_one_per_source() -> None:
    for ratios in ([1.0], [1.0, 0.0], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="2 sources need as many positive ratios"):
            Mixture([Numbers(0, 1), Numbers(1, 1)], ratios)


def test_one_file_is_no_mixture() -> None:
    rows = open_rows("7", lambda path: Numbers(int(path), 3))
    assert isinstance(rows, Numbers)
    assert isinstance(open_rows({"7": 1, "8": 1}, lambda path: Numbers(int(path), 3)), Mixture)


def test_a_mixture_of_many_sources_keeps_every_order_at_hand() -> None:
    """Each is in an epoch of its own; making an order again at every draw would cost the size of
    its source.
    """
    mixture = Mixture([Numbers(0, 1000) for _ in range(40)], [1] * 40)
    _permutation.cache_clear()
    for draw in range(400):
        mixture.at(draw, seed=0)
    assert _permutation.cache_info().misses == 40


def test_a_step_that_must_repeat_rows_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    open_rows("7", lambda path: Numbers(int(path), 3), per_step=3)
    assert not caplog.records
    open_rows("7", lambda path: Numbers(int(path), 3), per_step=4)
    assert "7: 3 rows for batches of 4" in caplog.text


@pytest.mark.parametrize("train", ["7", {"7": 3, "11": 1}])
def test_first_draws_are_what_the_steps_draw(train: str | dict[str, float]) -> None:
    rows = open_rows(train, lambda path: Numbers(int(path) * 100, int(path)))
    for file in [train] if isinstance(train, str) else train:
        size = int(file)
        found = first_draws(train, file, size, steps=5, per_step=3, seed=4)
        seen: set[int] = set()
        for step, new in enumerate(found):
            drawn = [rows.at(draw, seed=4) for draw in range(step * 3, step * 3 + 3)]
            own = [value - size * 100 for value in drawn if 0 <= value - size * 100 < size]
            assert new == [row for row in dict.fromkeys(own) if row not in seen]
            seen.update(new)
        everything = [rows.at(draw, seed=4) - size * 100 for draw in range(15)]
        assert seen == {value for value in everything if 0 <= value < size}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 50])
def test_batches_hold_every_unit_once_in_file_order(size: int) -> None:
    units = [f"unit {number}" for number in range(7)]
    found = list(Shuffled(units).batches(size))
    assert [unit for batch in found for unit in batch] == units
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert len(found) == -(-len(units) // size)
