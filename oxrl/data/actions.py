"""Actions as tokens: names of a discrete space, or numbers in uniform bins between two quantiles.

A number x with the quantiles q01 and q99 of its training data becomes

    y = 2 (x - q01) / (q99 - q01) - 1, clipped to [-1, 1]       bin = floor((y + 1) / 2 * bins)

and bin i stands for the middle of its range. There is no continuous head here: no Gaussian, no
flow, no regression.

Source: the quantiles are those of OpenVLA (arXiv:2406.09246, section 3.2), which puts 256 bins on
the tokens that its tokenizer uses least; chunks of actions are those of arXiv:2304.13705.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from oxrl.data.rows import Fields, Json
from oxrl.errors import DataError
from oxrl.types import Names, TokenIds

# Beside the weights of a checkpoint, and in the run directory.
HEAD_FILE = "action_head.json"
# An action: the name of one of a few, or numbers.
Action = str | list[float]


class Quantiles(NamedTuple):
    """The 1 % and 99 % quantiles of every number of an action, over the training data."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ActionHead:
    """The tokens that stand for actions, and the actions that they stand for.

    Args:
        token_ids: that may be sampled at all; the k-th stands for choice k, or for bin k.
        chunk: actions of one turn.
        choices: names of the actions of a discrete space.
        low, high: of every number of a continuous one, the ends of its bins.
    """

    token_ids: TokenIds
    chunk: int = 1
    choices: Names = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Tokens of one action."""
        return 1 if self.choices else len(self.low)

    @property
    def tokens(self) -> int:
        """Tokens of a turn; most of them, where it ends by a token of its own."""
        return self.chunk * self.width

    @property
    def support(self) -> TokenIds:
        """Tokens that share all probability."""
        return self.token_ids

    @property
    def ends_by(self) -> int | None:
        """The token that ends a turn; None: turns end by their length."""
        return None

    def decodes(self, token_ids: Sequence[int]) -> bool:
        """True if a turn's tokens stand for as many actions as a turn has; here they always do.

        Args:
            token_ids: of a turn, without one that ends it.
        """
        return len(token_ids) == self.tokens

    def kept(self, token_ids: Sequence[int], executed: int) -> int:
        """Count the tokens of a turn that stand for its first actions: the executed ones, where an
        episode ended in the middle of a turn.

        Args:
            token_ids: of the turn, all of them.
            executed: how many actions, from the first on; at most `chunk`.

        Returns:
            A number of tokens, from the first on.
        """
        return len(token_ids) - (self.chunk - executed) * self.width

    def clipped(self, actions: Sequence[Json]) -> int:
        """Count the numbers of a chunk that its tokens cannot express, so that they stand for the
        nearest number that they can; here always 0, because numbers outside the quantiles are not
        counted.

        Args:
            actions: of a turn, as `encode` takes them.
        """
        return 0

    def encode(self, actions: Sequence[Json]) -> TokenIds:
        """Encode actions as the tokens of a chunk.

        Args:
            actions: `chunk` of them, names or lists of numbers; one alone may stand for itself.

        Returns:
            `tokens` token ids.

        Raises:
            ValueError: too many or too few, a name that is none, or numbers that are no numbers.
        """
        if len(actions) != self.chunk:
            raise ValueError(f"has {len(actions)} actions, and a turn has {self.chunk}")
        found: list[int] = []
        for action in actions:
            if not self.choices:
                found += self._bins(action)
            elif action in self.choices:
                found.append(self.token_ids[self.choices.index(action)])
            else:
                raise ValueError(f"has the action {action!r}, there are {', '.join(self.choices)}")
        return tuple(found)

    def decode(self, token_ids: Sequence[int]) -> list[Action]:
        """Decode tokens to the actions that they stand for.

        Args:
            token_ids: a multiple of `width`, each of `token_ids` of this head.

        Returns:
            Names, or lists of numbers in the data's own units: the middles of their bins.

        Raises:
            ValueError: a token that stands for none, or a part of an action.
        """
        places = {token: place for place, token in enumerate(self.token_ids)}
        if len(token_ids) % self.width or not places.keys() >= set(token_ids):
            raise ValueError(f"the tokens {list(token_ids)} are no actions of {self.width} each")
        found = [places[token] for token in token_ids]
        if self.choices:
            return [self.choices[place] for place in found]
        actions: list[Action] = []
        for start in range(0, len(found), self.width):
            bins = found[start : start + self.width]
            actions.append([self._middle(number, place) for number, place in enumerate(bins)])
        return actions

    def text(self, actions: Sequence[Action]) -> str:
        """Write actions as the record of a run shows them.

        Args:
            actions: names, or lists of numbers.

        Returns:
            Names with spaces between; or JSON, numbers rounded to six significant digits.
        """
        if self.choices:
            return " ".join(cast(Sequence[str], actions))
        rounded = [[float(f"{number:.6g}") for number in action] for action in actions]  # pyright: ignore
        return json.dumps(rounded)

    def _bins(self, action: Json) -> list[int]:
        bins = len(self.token_ids)
        places = [math.floor(share * bins) for share in self.shares(action)]
        return [self.token_ids[min(place, bins - 1)] for place in places]

    def shares(self, action: Json) -> list[float]:
        """Return the places of an action's numbers between their quantiles, from 0 to 1.

        Args:
            action: as many finite numbers as the space has, in the data's own units; one alone may
                stand for itself.

        Returns:
            0.0 at q01 and below, 1.0 at q99 and above; 0.5 where both are one.

        Raises:
            ValueError: it has too many or too few, or they are no numbers.
        """
        numbers = action if isinstance(action, list | tuple) else [action]
        right = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        if len(numbers) != len(self.low) or not right:
            raise ValueError(f"has the action {action!r}, need {len(self.low)} finite numbers")
        found: list[float] = []
        for number, low, high in zip(numbers, self.low, self.high, strict=True):
            share = 0.5 if high == low else (number - low) / (high - low)
            found.append(min(1.0, max(0.0, share)))
        return found

    def _middle(self, number: int, place: int) -> float:
        low = self.low[number]
        return low + (self.high[number] - low) * (place + 0.5) / len(self.token_ids)

    def write(self, directory: Path) -> None:
        """Keep it beside the weights, in HEAD_FILE.

        Args:
            directory: of the model; there is one.

        Raises:
            OSError: the disk refused.
        """
        content = dataclasses.asdict(self)
        (directory / HEAD_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_quantiles(path: Path) -> Quantiles:
    """Read quantiles of actions: `{"q01": [...], "q99": [...]}`, or that under `action`.

    Args:
        path: a JSON file, such as `statistics.json` of a prepared dataset.

    Returns:
        q01 and q99 of every number of an action, in the data's own units.

    Raises:
        DataError: the file has none.
    """
    fields = object_in(path)
    found = fields.get("action", fields)
    try:
        low = tuple(float(number) for number in found["q01"])
        high = tuple(float(number) for number in found["q99"])
    except (KeyError, TypeError, ValueError) as error:
        expected = '{"q01": [numbers], "q99": [numbers]}, or that under "action"'
        raise DataError(f"{path} has no quantiles of actions: need {expected}") from error
    paired = len(low) == len(high) > 0
    if not paired or not all(a <= b for a, b in zip(low, high, strict=True)):
        raise DataError(f"{path}: every q01 needs a q99 that is not below it: {low}, {high}")
    return Quantiles(low, high)


def object_in(path: Path) -> Fields:
    """Read the JSON object in a file.

    Args:
        path: of a JSON file.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds {type(found).__name__}, need an object")
    return found
