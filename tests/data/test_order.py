from __future__ import annotations

import pytest

from oxrl.data.order import index_at


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
    # 6000 seeds over 6 rows: 1000 each; six standard deviations are sqrt(6000 * 1/6 * 5/6) * 6 = 173.
    counts = [0] * 6
    for seed in range(6000):
        counts[index_at(0, 6, seed)] += 1
    assert all(abs(count - 1000) < 173 for count in counts)


@pytest.mark.parametrize(("draw", "size"), [(-1, 5), (0, 0)])
def test_positions_that_do_not_exist_are_refused(draw: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"draw={draw}, size={size}"):
        index_at(draw, size, 0)
