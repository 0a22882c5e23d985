"""The actions that a model was trained with, of whatever kind; and those that are FAST's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.data.actions import HEAD_FILE, Action, ActionHead, object_in
from oxrl.data.fast import FastCode, code_of
from oxrl.data.rows import Json
from oxrl.errors import DataError
from oxrl.types import TokenIds

if TYPE_CHECKING:
    from oxrl.data.fast import Table


def read_head(directory: Path) -> ActionHead | None:
    """Read the actions that a model was trained with; None where its folder names none.

    Args:
        directory: of the model, with `action_head.json` in it where it was trained with actions.

    Raises:
        DataError: the file is damaged.
    """
    path = directory / HEAD_FILE
    if not path.is_file():
        return None
    fields = object_in(path)
    code = code_of(fields["code"], path) if "code" in fields else None
    try:
        if code is not None:
            return FastHead(
                token_ids=tuple(fields["token_ids"]),
                chunk=code.chunk,
                low=tuple(fields["low"]),
                high=tuple(fields["high"]),
                code=code,
                end=int(fields["end"]),
            )
        given = {name: tuple(value) for name, value in fields.items() if name != "chunk"}
        return ActionHead(chunk=int(fields["chunk"]), **given)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} describes no actions: {error}") from error


@dataclass(frozen=True, kw_only=True)
class FastHead(ActionHead):
    """The tokens that stand for the pieces of a chunk.

    Args:
        token_ids: the k-th stands for piece k.
        code: what pieces are.
        end: the token that ends a turn.
    """

    code: FastCode
    end: int

    @property
    def tokens(self) -> int:
        """See ActionHead. A piece stands for one coefficient at least."""
        return self.chunk * len(self.low) + 1

    @property
    def support(self) -> TokenIds:
        """See ActionHead."""
        return (*self.token_ids, self.end)

    @property
    def ends_by(self) -> int | None:
        """See ActionHead."""
        return self.end

    def encode(self, actions: Sequence[Json]) -> TokenIds:
        """See ActionHead."""
        if len(actions) != self.chunk:
            raise ValueError(f"has {len(actions)} actions, and a turn has {self.chunk}")
        places = self.code.encode(self._numbers(actions))
        return (*(self.token_ids[place] for place in places), self.end)

    def clipped(self, actions: Sequence[Json]) -> int:
        """See ActionHead: of coefficients."""
        found = self.code.coefficients(self._numbers(actions))
        return int(((found < self.code.least) | (found > self.code.most)).sum())

    def _numbers(self, actions: Sequence[Json]) -> Table:
        """Return [chunk, size], from -1 at q01 to 1 at q99."""
        import numpy as np  # who only reads tokens of names does without

        return 2.0 * np.asarray([self.shares(action) for action in actions]) - 1.0

    def decode(self, token_ids: Sequence[int]) -> list[Action]:
        """See ActionHead.

        Tokens that stand for no chunk are the action in the middle of all quantiles, all the time.
        """
        import numpy as np

        found = self._chunk(token_ids)
        middle = np.zeros((self.chunk, len(self.low)))
        numbers = np.clip(middle if found is None else found, -1.0, 1.0)
        low = np.asarray(self.low)
        width = np.asarray(self.high) - low
        return (low + width * (numbers + 1.0) / 2.0).tolist()

    def decodes(self, token_ids: Sequence[int]) -> bool:
        """See ActionHead."""
        return self._chunk(token_ids) is not None

    def kept(self, token_ids: Sequence[int], executed: int) -> int:
        """See ActionHead. Every token stands for a part of every action: all are kept."""
        return len(token_ids)

    def _chunk(self, token_ids: Sequence[int]) -> Json:
        """Return the numbers of a turn, between -1 and 1; None: it does not end, or is no chunk."""
        if not token_ids:
            return None
        *said, last = token_ids
        places = {token: place for place, token in enumerate(self.token_ids)}
        if last != self.end or not places.keys() >= set(said):
            return None
        return self.code.decode([places[token] for token in said])
