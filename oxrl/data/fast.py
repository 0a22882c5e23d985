"""FAST: a chunk of actions as few tokens, by a cosine transform and byte-pair merges.

A chunk x [chunk, size], each number between -1 and 1, becomes

    c = DCT-II of every column, orthonormal        [chunk, size]
    q = round(scale * c), read row by row: the slowest changes of all numbers come first

and neighbours in q that occur together often are joined to pieces, as byte-pair encoding joins
letters. A turn has as many tokens as it takes, and not every row of pieces is a chunk.

Source: arXiv:2501.09747, section 4; its published processor (`UniversalActionProcessor`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from oxrl.data.actions import object_in
from oxrl.data.rows import Json
from oxrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers.models import BPE

    Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

FILE = "fast.json"
# The numbers of the paper: pieces in all, and what coefficients are multiplied by.
PIECES = 1024
SCALE = 10.0
# Characters stand for coefficients where pieces are joined; the first of them.
FIRST_LETTER = 0x100
# A pair that occurs once is not joined.
LEAST_COUNT = 2


class Merge(NamedTuple):
    """Two pieces, by their places, that are joined to the next piece."""

    left: int
    right: int


@dataclass(frozen=True, kw_only=True)
class FastCode:
    """Pieces of rounded coefficients, and how chunks of actions are made of them.

    Args:
        chunk: actions of a turn.
        size: numbers of an action.
        scale: of the coefficients, before they are rounded.
        least, most: rounded coefficients that have a piece of their own; others become the nearest.
        merges: the piece that they make stands behind those before.
    """

    chunk: int
    size: int
    scale: float
    least: int
    most: int
    merges: tuple[Merge, ...] = ()

    @cached_property
    def pieces(self) -> list[tuple[int, ...]]:
        """The rounded coefficients that each piece stands for."""
        found: list[tuple[int, ...]] = [(value,) for value in range(self.least, self.most + 1)]
        for left, right in self.merges:
            found.append(found[left] + found[right])
        return found

    def coefficients(self, numbers: Table) -> Table:
        """Compute the rounded coefficients of a chunk, [chunk, size].

        Args:
            numbers: [chunk, size], between -1 and 1.
        """
        return (self.scale * (cosines(self.chunk) @ numbers)).round()

    def encode(self, numbers: Table) -> list[int]:
        """Encode a chunk as pieces.

        Args:
            numbers: [chunk, size], between -1 and 1.

        Returns:
            Numbers of pieces; coefficients that have no piece of their own become the nearest.
        """
        bounded = self.coefficients(numbers).clip(self.least, self.most).flatten()
        return self.joined([int(value) - self.least for value in bounded])

    def decode(self, places: Sequence[int]) -> Table | None:
        """Decode pieces to the chunk that they stand for, [chunk, size].

        Args:
            places: numbers of pieces, each from 0 to below their count.

        Returns:
            Numbers between about -1 and 1, to be put between quantiles. None: they have more or
            fewer coefficients than a chunk.
        """
        import numpy as np

        values = [value for place in places for value in self.pieces[place]]
        if len(values) != self.chunk * self.size:
            return None
        coefficients = np.asarray(values, dtype=np.float64).reshape(self.chunk, self.size)
        return cosines(self.chunk).T @ (coefficients / self.scale)

    def joined(self, places: list[int]) -> list[int]:
        """Single pieces, joined by the merges in their order.

        Args:
            places: numbers of pieces, in the order of the coefficients; not changed.

        Returns:
            At most as many, which stand for the same coefficients.
        """
        text = "".join(map(_letter, places))
        return [token.id for token in self._joiner.tokenize(text)]

    @cached_property
    def _joiner(self) -> BPE:
        """The merges, of texts with a letter for each coefficient."""
        from tokenizers.models import BPE

        texts = ["".join(_letter(value - self.least) for value in piece) for piece in self.pieces]
        merges = [(texts[left], texts[right]) for left, right in self.merges]
        return BPE({text: place for place, text in enumerate(texts)}, merges)

    def write(self, path: Path) -> None:
        """Keep it in a file, which `read_code` reads.

        Args:
            path: of the file; what was there is overwritten.

        Raises:
            OSError: the disk refused.
        """
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_code(path: Path) -> FastCode:
    """Read a code that `FastCode.write` wrote.

    Args:
        path: of the file.

    Raises:
        DataError: the file holds no code.
    """
    return code_of(object_in(path), path)


def code_of(fields: Json, path: Path) -> FastCode:
    """Read a code as JSON has it.

    Args:
        fields: of the code.
        path: of its file, for the message.

    Returns:
        The code, made sure of.

    Raises:
        DataError: it is none.
    """
    try:
        merges = tuple(Merge(int(left), int(right)) for left, right in fields["merges"])
        whole = {name: int(fields[name]) for name in ("chunk", "size", "least", "most")}
        found = FastCode(scale=float(fields["scale"]), merges=merges, **whole)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} holds no code of FAST: {error}") from error
    singles = found.most - found.least + 1
    known = all(
        0 <= min(merge) and max(merge) < singles + rank for rank, merge in enumerate(merges)
    )
    known = known and len({*found.pieces}) == len(found.pieces)
    if min(found.chunk, found.size, singles) < 1 or not 0 < found.scale < math.inf or not known:
        raise DataError(
            f"{path} holds no code of FAST: numbers out of range, a merge of nothing, or two "
            "merges that make the same piece"
        )
    return found


def fit(chunks: Sequence[Table], *, pieces: int = PIECES, scale: float = SCALE) -> FastCode:
    """Fit a code to recorded chunks.

    Args:
        chunks: [chunk, size] each, numbers between -1 and 1.
        pieces: at most so many, of single coefficients and of joined ones.
        scale: larger is finer, and takes more tokens.

    Returns:
        A code for chunks of this size; the more often neighbours occur together, the earlier they
        are joined.

    Raises:
        DataError: there are more different coefficients than pieces.
    """
    import numpy as np

    table = np.stack(chunks)
    length = table.shape[1]
    coefficients = np.rint(scale * (cosines(length) @ table)).astype(int)
    least = int(coefficients.min())
    most = int(coefficients.max())
    singles = most - least + 1
    if singles > pieces:
        raise DataError(
            f"fast={pieces} is too few: single coefficients alone take {singles} pieces; use more, "
            f"or a fast_scale below {scale:g}"
        )
    texts = ["".join(_letter(value - least) for value in one.flatten()) for one in coefficients]
    return FastCode(
        chunk=length,
        size=table.shape[2],
        scale=scale,
        least=least,
        most=most,
        merges=_merges(texts, singles, pieces),
    )


def cosines(length: int) -> Table:
    """Return the orthonormal DCT-II, [length, length]: times a column, it gives the coefficients.

    Args:
        length: of a column, at least 1.

    Returns:
        float64; its transpose is its inverse.
    """
    import numpy as np

    places = np.arange(length)
    angles = np.pi * (places + 0.5) * places[:, None] / length
    found = np.sqrt(2.0 / length) * np.cos(angles)
    found[0] /= np.sqrt(2.0)
    return found


def _merges(texts: Sequence[str], singles: int, pieces: int) -> tuple[Merge, ...]:
    """Find the pairs that occur most often, joined one after the other."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    trained = Tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=pieces,
        min_frequency=LEAST_COUNT,
        show_progress=False,
        initial_alphabet=[_letter(place) for place in range(singles)],
        max_token_length=10_000,
    )
    trained.train_from_iterator(texts, trainer)
    told = json.loads(trained.to_str())["model"]["merges"]
    places = {_letter(place): place for place in range(singles)}
    found: list[Merge] = []
    for left, right in told:
        # Two ways to one piece: the first is kept.
        if left + right in places:
            continue
        found.append(Merge(places[left], places[right]))
        places[left + right] = len(places)
    return tuple(found)


def _letter(place: int) -> str:
    return chr(FIRST_LETTER + place)
