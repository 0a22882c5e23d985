"""Section `action`: a policy whose turns are actions of a robot or a game, not text."""

from __future__ import annotations

from typing import Literal

from oxrl.config.conditions import codes_bins, codes_fast, has_actions, has_number_actions
from oxrl.config.field import Section, setting


class ActionConfig(Section):
    """Tokens that stand for actions; without choices and size turns are text."""

    choices: str = setting(
        "",
        "Names of the actions of a discrete space, with commas: up,down,left,right. A token each.",
    )
    size: int = setting(
        0,
        "Numbers of one action of a continuous space, each a token of its own; 0: none.",
        ge=0,
        le=1024,
        why="no robot has more joints",
        when=has_number_actions,
    )
    bins: int = setting(
        256,
        "Uniform bins that a number falls into, between its 1 % and its 99 % quantile.",
        ge=2,
        le=65536,
        why="each is a token",
        when=(
            has_actions,
            has_number_actions,
            codes_bins,
        ),
    )
    chunk: int = setting(
        1,
        "Actions of one turn, done one after the other before the policy sees the next image.",
        ge=1,
        le=1024,
        why="each takes tokens of the turn",
        when=has_actions,
    )
    code: Literal["bins", "fast"] = setting(
        "bins",
        "What the tokens of numbers are. bins: one per number. fast: pieces of a chunk's cosine "
        "transform, fewer of them, of which not every row stands for actions.",
        when=(
            has_actions,
            has_number_actions,
        ),
    )
    fast: str | None = setting(
        None,
        "JSON file with the pieces of code fast, as `oxrl prepare demonstrations fast=1024` writes "
        "it; null: those that the model was trained with.",
        min_length=1,
        when=(
            has_actions,
            has_number_actions,
            codes_fast,
        ),
    )
    ids: Literal["tail", "reserved"] = setting(
        "tail",
        "Tokens that stand for actions. tail: the last ones of the tokenizer that are no special "
        "ones, as in OpenVLA. reserved: rows of the embedding that the tokenizer has no token for.",
        when=has_actions,
    )
    statistics: str | None = setting(
        None,
        "JSON file with the quantiles q01 and q99 of the numbers, as `oxrl prepare demonstrations` "
        "and LeRobot (stats.json) write it; null: those that the model was trained with.",
        min_length=1,
        when=(
            has_actions,
            has_number_actions,
        ),
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the actions of a discrete space."""
        return tuple(name.strip() for name in self.choices.split(",") if name.strip())

    @property
    def exists(self) -> bool:
        """True if turns are actions."""
        return bool(self.names) or self.size > 0

    @property
    def tokens(self) -> int:
        """Tokens of a turn; of code fast most of them, and the one that ends it."""
        if self.names:
            return self.chunk
        return self.chunk * self.size + (self.code == "fast")
