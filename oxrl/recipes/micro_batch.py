"""`train.micro_batch_tokens: auto` is settled when a run begins, noted, and done so ever after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.config import Config
from oxrl.config.micro_batch import FIELD, tokens_by_rule
from oxrl.recipes.build import choose_device
from oxrl.runs.checkpoint import list_checkpoints
from oxrl.runs.choices import Choice, note_choice, noted_choice

if TYPE_CHECKING:
    from oxrl.engines.train.ranks import Ranks
    from oxrl.recipes.session import Session


def with_micro_batches(cfg: Config, session: Session, ranks: Ranks) -> Config:
    """The configuration with a number: that which was noted, or which the rule gives now.

    Args:
        session: of the run; looked at on the first rank.
        ranks: the training ranks, which do as the first one.
    """
    if cfg.train.micro_batch_tokens != "auto":
        return cfg
    return _settled(cfg, ranks.agree(_chosen(cfg, session) if ranks.first else 0))


def micro_batches_as_noted(cfg: Config, run: Path) -> Config:
    """The configuration of a replay: as the run in a directory was carried out."""
    choice = noted_choice(run, FIELD)
    if cfg.train.micro_batch_tokens != "auto" or choice is None:
        return cfg
    return _settled(cfg, choice.value)


def _settled(cfg: Config, tokens: int) -> Config:
    train = cfg.train.model_copy(update={"micro_batch_tokens": tokens})
    return cfg.model_copy(update={"train": train})


def _chosen(cfg: Config, session: Session) -> int:
    run = session.run
    choice = noted_choice(run.path, FIELD)
    if choice is None:
        before, _ = run.changes.get(FIELD, (None, None))
        if run.resuming and list_checkpoints(run.checkpoints) and isinstance(before, int):
            choice = Choice(before, "so it was when the run began")
        else:
            choice = Choice(*tokens_by_rule(cfg, on_cpu=choose_device(cfg).type == "cpu"))
        note_choice(run.path, FIELD, choice)
        session.message(
            f"at most {choice.value:,} tokens go through the model at once ({FIELD}: auto): "
            f"{choice.why}"
        )
    return choice.value
