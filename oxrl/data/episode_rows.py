"""Episodes whose turns do not read one growing text: several rows that a model reads, and one line.

Rewards, groups, advantages, lengths and loss weights are of episodes. Models read rows: one per
turn, or one per stretch of turns that only grew. An episode's *line* has the tokens of its rows
that the policy sampled, in order, with one token of what it read before each turn; everything that
is computed before the update is computed on lines, as if an episode were one row. What then goes
into the update is cut into rows again.

    row 0   [ask, me,  4,  6, <end>]                 mask  0 0 1 1 1
    row 1   [other, context, 9, <end>]                     0 0 1 1
    line    [me, 4, 6, <end>, context, 9, <end>]           0 1 1 1 0 1 1
    places  [[-1, -1, 1, 2, 3], [-1, -1, 5, 6, -1]]        where a row's tokens stand in the line
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from oxrl.types import Batch, Forward, Output, Tensors, TokenBatch, each_tensor


@dataclass(frozen=True, kw_only=True)
class EpisodeInputs(TokenBatch):
    """E episodes: lines, [E, L] each, and the rows behind them. Example in the module docstring.

    rows: [R, T], what a model reads.
    episode_ids: [R] int64, the episode of each row, from 0; rows of one stand in order.
    places: [R, T] int64, place of a trained token in its episode's line, -1 elsewhere.
    """

    rows: TokenBatch
    episode_ids: Tensor
    places: Tensor

    def join(self, values: Tensor) -> Tensor:
        """Put what was computed of rows where it belongs in the lines of their episodes.

        Args:
            values: [R, T, ...], any dtype, of every token of the rows.

        Returns:
            [E, L, ...], of the same dtype; 0 where nothing was sampled.
        """
        lines = values.new_zeros((*self.tokens.shape, *values.shape[2:]))
        in_rows, in_lines = self._sampled()
        lines[in_lines] = values[in_rows]
        return lines

    def split(self, lines: Tensor) -> Tensor:
        """Put what was computed of lines where it belongs in the rows of the episodes.

        Args:
            lines: [E, L, ...], any dtype, of every token of the lines.

        Returns:
            [R, T, ...], of the same dtype; 0 where nothing was sampled.
        """
        values = lines.new_zeros((*self.places.shape, *lines.shape[2:]))
        in_rows, in_lines = self._sampled()
        values[in_rows] = lines[in_lines]
        return values

    def _sampled(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Find the sampled tokens: (row, place) of each, and (episode, place)."""
        row, place = (self.places >= 0).nonzero(as_tuple=True)
        return (row, place), (self.episode_ids[row], self.places[row, place])

    def select(self, rows: Tensor, length: int | None = None) -> EpisodeInputs:
        """See RowBatch; of episodes, each with all of its rows.

        Raises:
            ValueError: `length` is given: lines are never cut.
        """
        if length is not None:
            raise ValueError("episodes of several rows are read by rows, and cut there")
        of_each = [(self.episode_ids == episode).nonzero()[:, 0] for episode in rows.tolist()]
        chosen = torch.cat([rows[:0], *of_each])
        counts = torch.tensor([len(found) for found in of_each], dtype=torch.int64)
        return EpisodeInputs(
            tokens=self.tokens[rows],
            attention_mask=self.attention_mask[rows],
            response_mask=self.response_mask[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
            lists={name: ragged.select(rows) for name, ragged in self.lists.items()},
            rows=self.rows.select(chosen),
            episode_ids=torch.arange(len(rows)).repeat_interleave(counts),
            places=self.places[chosen],
        )

    def said_by(self, forward: Forward, want: frozenset[str]) -> Output:
        """See TokenBatch; a bootstrap is that of an episode's last row."""
        said = forward(self._rows_to_read(), want)
        found: Tensors = {}
        for name, value in vars(said).items():
            if value is not None:
                found[name] = value[self.last_rows] if name == "bootstrap" else self.join(value)
        return Output(**found)

    @property
    def last_rows(self) -> Tensor:
        """[E] int64: the last row of each episode."""
        numbers = torch.arange(len(self.episode_ids))
        first = torch.zeros(len(self.tokens), dtype=torch.int64)
        return first.scatter_reduce(0, self.episode_ids, numbers, "amax")

    def read_by_models(self, of_rows: Tensor) -> tuple[TokenBatch, Tensor]:
        """See TokenBatch: the rows behind the lines."""
        return self.rows, of_rows[self.episode_ids]

    def as_read(self, batch: Batch) -> Batch:
        """Return a batch of episodes as one of rows, without those on which nothing is trained.

        Every number of an episode is given to each of its rows.
        """
        trained = self.split(self.response_mask)
        rows = dataclasses.replace(self._rows_to_read(), response_mask=trained)
        fields = {name: value for name, value in vars(batch).items() if name != "inputs"}
        of_rows = dataclasses.replace(batch, inputs=rows, **each_tensor(fields, self._of_rows))
        return of_rows.select(trained.any(1).nonzero()[:, 0])

    def as_given(self, values: Tensor) -> Tensor:
        """See TokenBatch: of the rows on which something is trained, by lines."""
        trained = self.split(self.response_mask).any(1)
        rows = values.new_zeros((*self.places.shape, *values.shape[2:]))
        rows[trained] = values
        return self.join(rows)

    def _rows_to_read(self) -> TokenBatch:
        """Return the rows, beside their own columns with what was chosen of lines since."""
        columns = dict(self.rows.columns)
        for name in self.columns.keys() - columns.keys():
            columns[name] = self.split(self.columns[name])
        return dataclasses.replace(self.rows, columns=columns)

    def _of_rows(self, values: Tensor) -> Tensor:
        """Return numbers of tokens of lines, or of episodes, by rows."""
        return self.split(values) if values.ndim >= 2 else values[self.episode_ids]

    def named(self) -> Tensors:
        """See TokenBatch; and what each row is made of."""
        rows = {f"rows.{name}": value for name, value in self.rows.named().items()}
        places = {"rows.episode_ids": self.episode_ids, "rows.columns": self.places}
        return super().named() | rows | places
