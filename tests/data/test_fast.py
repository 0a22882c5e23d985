"""FAST's tokens of actions: round trips within the rounding, and strings that stand for no chunk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from oxrl.data.action_heads import FastHead, read_head
from oxrl.data.actions import ActionHead
from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import ReadOptions
from oxrl.data.fast import FastCode, Merge, cosines, fit, read_code
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer

CHUNK = 8
SIZE = 3
END = 7


def smooth(count: int, seed: int = 0) -> list[np.ndarray]:
    """Chunks that change slowly, between -1 and 1."""
    random = np.random.default_rng(seed)
    times = np.linspace(0, 1, CHUNK)[:, None]
    found: list[np.ndarray] = []
    for _ in range(count):
        speed, phase = random.uniform(0, 3, SIZE), random.uniform(0, 6, SIZE)
        found.append(random.uniform(0.2, 1, SIZE) * np.cos(speed * times + phase))
    return found


@pytest.fixture(scope="module")
def code() -> FastCode:
    return fit(smooth(400), pieces=200, scale=10.0)


@pytest.fixture(scope="module")
def head(code: FastCode) -> FastHead:
    ids = tuple(range(100, 100 + len(code.pieces)))
    return FastHead(
        token_ids=ids, chunk=CHUNK, low=(-1.0, 0.0, 5.0), high=(1.0, 4.0, 5.0), code=code, end=END
    )


def test_the_transform_is_the_orthonormal_cosine_transform_of_the_second_kind() -> None:
    """By hand, element by element, as the definition of DCT-II has it."""
    found = cosines(5)
    np.testing.assert_allclose(found @ found.T, np.eye(5), atol=1e-12)
    column = np.asarray([0.3, -1.0, 0.7, 0.2, 0.9])
    for k in range(5):
        angles = [np.pi * k * (2 * n + 1) / 10 for n in range(5)]
        factor = np.sqrt(1 / 5) if k == 0 else np.sqrt(2 / 5)
        expected = factor * sum(x * np.cos(a) for x, a in zip(column, angles, strict=True))
        assert (found @ column)[k] == pytest.approx(expected)


def test_a_chunk_comes_back_within_the_rounding_in_fewer_tokens(code: FastCode) -> None:
    lengths: list[int] = []
    for chunk in smooth(100, seed=1):
        places = code.encode(chunk)
        back = code.decode(places)
        assert back is not None
        # Rounding moves every coefficient by a half at most, and the transform keeps lengths.
        assert np.sqrt(((back - chunk) ** 2).mean()) <= 0.5 / code.scale + 1e-9
        lengths.append(len(places))
    assert np.mean(lengths) < 0.6 * CHUNK * SIZE
    finer = fit(smooth(400), pieces=400, scale=40.0)
    [chunk] = smooth(1, seed=2)
    back = finer.decode(finer.encode(chunk))
    assert back is not None and np.abs(back - chunk).max() < 0.05


def test_the_slowest_changes_of_all_numbers_come_first_and_merges_in_their_order() -> None:
    plain = FastCode(chunk=4, size=2, scale=1.0, least=-9, most=9)
    chunk = np.asarray([[0.5, -1.0]] * 4)  # that do not change: two coefficients, then zeros
    assert [plain.pieces[place] for place in plain.encode(chunk)] == [
        (1,), (-2,), (0,), (0,), (0,), (0,), (0,), (0,)
    ]  # fmt: skip
    zero = 9
    merged = FastCode(
        chunk=4, size=2, scale=1.0, least=-9, most=9, merges=(Merge(zero, zero), Merge(19, 19))
    )
    found = [merged.pieces[place] for place in merged.encode(chunk)]
    assert found == [(1,), (-2,), (0,) * 4, (0, 0)]
    np.testing.assert_allclose(
        merged.decode(merged.encode(chunk)), plain.decode(plain.encode(chunk))
    )


def test_coefficients_are_rounded_to_the_nearest_and_not_towards_zero() -> None:
    """A chunk of one action is its own transform."""
    code = FastCode(chunk=1, size=4, scale=10.0, least=-9, most=9)
    places = code.encode(np.asarray([[0.16, -0.16, 0.14, -0.14]]))
    assert [code.pieces[place] for place in places] == [(2,), (-2,), (1,), (-1,)]
    # A fit has pieces from the least to the most of what it rounded likewise.
    fitted = fit([np.asarray([[0.16, -0.16]]), np.asarray([[0.14, 0.0]])], pieces=9, scale=10.0)
    assert (fitted.least, fitted.most) == (-2, 2)


def test_merges_go_by_their_order_and_from_the_left() -> None:
    a, b, c = 0, 1, 2
    code = FastCode(
        chunk=3, size=1, scale=1.0, least=0, most=2, merges=(Merge(b, c), Merge(a, b), Merge(a, a))
    )
    bc, ab, aa = 3, 4, 5
    assert code.joined([a, b, c]) == [a, bc]  # not ab first, though it stands first
    assert code.joined([a, b, a]) == [ab, a]
    assert code.joined([a, a, a]) == [aa, a]
    assert code.joined([a, b, c, a, b, c, c]) == [a, bc, a, bc, c]
    assert code.joined([c, b, a]) == [c, b, a]
    chained = FastCode(
        chunk=4, size=1, scale=1.0, least=0, most=1, merges=(Merge(0, 1), Merge(2, 2))
    )
    assert chained.joined([0, 1, 0, 1]) == [3] and chained.pieces[3] == (0, 1, 0, 1)


def test_the_most_frequent_pair_is_the_first_merge() -> None:
    chunks = [np.asarray([[0.0, 1.0, 1.0]])] * 3 + [np.asarray([[0.0, 0.0, 1.0]])]
    code = fit(chunks, pieces=4, scale=1.0)
    # Pieces 0 and 1; "0 1" stands there four times, "1 1" three times.
    assert code.merges[0] == Merge(0, 1)
    assert code.pieces[2] == (0, 1)


def test_what_training_never_had_becomes_the_nearest_that_it_had(code: FastCode) -> None:
    wild = np.ones((CHUNK, SIZE)) * np.asarray([1.0, -1.0] * 4)[:, None]
    places = code.encode(wild)
    values = [value for place in places for value in code.pieces[place]]
    assert len(values) == CHUNK * SIZE
    assert min(values) >= code.least and max(values) <= code.most


def test_coefficients_that_have_no_piece_of_their_own_are_counted() -> None:
    """Two actions of one number, [1, -1]: coefficients 0 and sqrt 2, times 10 and rounded 0, 14."""
    code = FastCode(chunk=2, size=1, scale=10.0, least=-3, most=14)
    narrow = FastCode(chunk=2, size=1, scale=10.0, least=-3, most=13)
    for found, count, most in ((code, 0, 14), (narrow, 1, 13)):
        ids = tuple(range(len(found.pieces)))
        head = FastHead(token_ids=ids, chunk=2, low=(0.0,), high=(4.0,), code=found, end=END)
        assert head.clipped([[4.0], [0.0]]) == count
        assert [found.pieces[place] for place in found.encode(np.asarray([[1.0], [-1.0]]))] == [
            (0,), (most,)
        ]  # fmt: skip
        # From -1 to 1 it is -14, below the least.
        assert head.clipped([[0.0], [4.0]]) == 1
    bins = ActionHead(token_ids=tuple(range(8)), chunk=2, low=(0.0,), high=(4.0,))
    assert bins.clipped([[9.0], [-9.0]]) == 0


def test_what_decodes_beyond_the_quantiles_is_the_quantile() -> None:
    """Of a chunk of one action coefficients are the number, times 10: 1.5 and -1.5 are beyond."""
    code = FastCode(chunk=1, size=1, scale=10.0, least=-15, most=15)
    ids = tuple(range(len(code.pieces)))
    head = FastHead(token_ids=ids, chunk=1, low=(0.0,), high=(4.0,), code=code, end=99)
    places = {value: place for place, (value,) in enumerate(code.pieces)}
    for value, number in ((15, 4.0), (10, 4.0), (5, 3.0), (0, 2.0), (-10, 0.0), (-15, 0.0)):
        assert head.decode([places[value], 99]) == [[pytest.approx(number)]]


def test_the_report_of_a_file_counts_what_was_clipped(tmp_path: Path) -> None:
    code = FastCode(chunk=2, size=1, scale=10.0, least=-3, most=13)
    ids = tuple(range(30, 30 + len(code.pieces)))
    head = FastHead(token_ids=ids, chunk=2, low=(0.0,), high=(4.0,), code=code, end=END)
    lines = [
        {"prompt": "go", "actions": [[4.0], [0.0]]},
        {"prompt": "stay", "actions": [[2.0], [2.0]]},
        {"prompt": "back", "actions": [[0.0], [4.0]]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ConversationDataset.load(path, builtin_tokenizer(), ReadOptions(actions=head))
    assert data.report["clipped"] == 2 and data.report["kept"] == 3


def test_a_turn_of_actions_comes_back_between_its_quantiles(head: FastHead) -> None:
    [chunk] = smooth(1, seed=3)
    actions = [[float(a), 2 + 2 * float(b), 5.0] for a, b, _ in chunk]
    tokens = head.encode(actions)
    assert tokens[-1] == END and set(tokens) <= set(head.support) and head.decodes(tokens)
    back = np.asarray(head.decode(tokens))
    np.testing.assert_allclose(back, actions, atol=0.3)
    assert back[:, 2].tolist() == [5.0] * CHUNK  # it never changes
    assert back[:, 1].min() >= 0.0 and back[:, 1].max() <= 4.0
    assert head.kept(tokens, 1) == len(tokens)


def test_a_turn_has_at_most_a_piece_per_number_and_its_end(head: FastHead) -> None:
    assert head.tokens == 25  # 8 actions of 3 numbers


def test_strings_that_stand_for_no_chunk_are_told_and_mean_the_middle(head: FastHead) -> None:
    [chunk] = smooth(1, seed=3)
    whole = head.encode([[float(a), 2 + 2 * float(b), 5.0] for a, b, _ in chunk])
    middle = [[0.0, 2.0, 5.0]] * CHUNK
    broken = [
        whole[:-1],  # it does not end
        (END,),
        (),
        (*whole[:-2], END),  # too few coefficients
        (head.token_ids[0], *whole),  # too many
        (*whole[:-1], END, END),
    ]
    for tokens in broken:
        assert not head.decodes(tokens), tokens
        assert head.decode(tokens) == middle


@pytest.mark.parametrize("actions", [[[0.0, 0.0, 0.0]], [[0.0, 1.0]] * 8, [["a", 1.0, 1.0]] * 8])
def test_actions_that_are_none_are_refused(head: FastHead, actions: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="has"):
        head.encode(actions)


def test_a_head_and_its_code_are_kept_beside_the_weights(tmp_path: Path, head: FastHead) -> None:
    head.write(tmp_path)
    assert read_head(tmp_path) == head
    head.code.write(tmp_path / "fast.json")
    assert read_code(tmp_path / "fast.json") == head.code
    assert (tmp_path / "fast.json").read_text().splitlines(keepends=True)[-1].endswith("}\n")
    unmerged = FastCode(chunk=4, size=2, scale=1.0, least=-9, most=9)
    unmerged.write(tmp_path / "fast.json")
    assert read_code(tmp_path / "fast.json") == unmerged
    plain = ActionHead(token_ids=(1, 2), choices=("a", "b"))
    plain.write(tmp_path)
    assert read_head(tmp_path) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"merges": [[0, 10**6]]},
        {"merges": [[0, 0], [0, 10**6]]},
        {"merges": 3},
        {"chunk": 0},
        {"scale": -1.0},
        {"least": "x"},
    ],
)
def test_a_damaged_code_is_refused(
    tmp_path: Path, code: FastCode, change: dict[str, object]
) -> None:
    path = tmp_path / "fast.json"
    code.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="holds no code of FAST"):
        read_code(path)


def test_two_ways_to_one_piece_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "fast.json"
    merges = (Merge(1, 2), Merge(0, 1), Merge(0, 3), Merge(4, 2))
    FastCode(chunk=3, size=1, scale=1.0, least=0, most=2, merges=merges[:3]).write(path)
    assert read_code(path).joined([0, 1, 2]) == [5]
    FastCode(chunk=3, size=1, scale=1.0, least=0, most=2, merges=merges).write(path)
    with pytest.raises(DataError, match="two merges that make the same piece"):
        read_code(path)


def test_too_few_pieces_are_refused_with_what_to_change() -> None:
    with pytest.raises(DataError, match="fast=5 is too few.*fast_scale below 10"):
        fit(smooth(50), pieces=5, scale=10.0)


def test_a_turn_has_all_of_its_actions_and_its_end(head: FastHead) -> None:
    actions = [[0.3, 1.0, 5.0]] * CHUNK
    whole = head.encode(actions)
    assert whole[-1] == END and head.decodes(whole)
    for count in (0, 1, CHUNK - 1, CHUNK + 1):
        with pytest.raises(ValueError, match=f"has {count} actions, and a turn has {CHUNK}"):
            head.encode(actions[:1] * count)
    middle = head.decode(())
    for cut in (whole[:-1], (*whole[:-1], whole[0]), whole[-1:]):
        assert not head.decodes(cut)
        assert head.decode(cut) == middle
    assert middle == pytest.approx(np.asarray([[0.0, 2.0, 5.0]] * CHUNK))
    assert head.decode(whole) != middle
