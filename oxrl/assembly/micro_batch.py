"""`train.micro_batch_tokens: auto` is settled when a run begins, noted, and done so ever after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.assembly.assembly import device_type
from oxrl.assembly.micro_batch_rules import FIELD, ByRule, read_at_once, tokens_by_rule
from oxrl.config import Config
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.choices import Choice, note_choice, noted_choice

# Why a number was noted of a run that did not begin with auto.
AS_BEFORE = "so it was when the run began"
# On a rank that is told what the first one chose.
NOT_SAID = Choice(0, "")

if TYPE_CHECKING:
    from oxrl.recipes.session import Session
    from oxrl.runs.ranks import Ranks


def with_micro_batches(cfg: Config, session: Session, ranks: Ranks) -> Config:
    """The configuration with a number: that which was noted, or which the rule gives now.

    Args:
        session: of the run; looked at on the first rank.
        ranks: the training ranks, which do as the first one.
    """
    if cfg.train.micro_batch_tokens != "auto":
        return cfg
    return _settled(cfg, ranks.agree(_chosen(cfg, session) if ranks.first else NOT_SAID))


def micro_batches_as_noted(cfg: Config, run: Path) -> Config:
    """The configuration of a replay: as the run in a directory was carried out."""
    choice = noted_choice(run, FIELD)
    if cfg.train.micro_batch_tokens != "auto" or choice is None:
        return cfg
    return _settled(cfg, choice)


def _settled(cfg: Config, choice: Choice) -> Config:
    """A configuration with a number; a run that began with one is cut as it was then."""
    number = choice.value if choice.why == AS_BEFORE else ByRule(choice.value)
    train = cfg.train.model_copy(update={"micro_batch_tokens": number})
    return cfg.model_copy(update={"train": train})


def _chosen(cfg: Config, session: Session) -> Choice:
    run = session.run
    choice = noted_choice(run.path, FIELD)
    if choice is None:
        before, _ = run.changes.get(FIELD, (None, None))
        if run.resuming and list_checkpoints(run.checkpoints) and isinstance(before, int):
            choice = Choice(before, AS_BEFORE)
        else:
            choice = Choice(*tokens_by_rule(cfg, on_cpu=device_type(cfg) == "cpu"))
        note_choice(run.path, FIELD, choice)
        session.message(f"read at once: {read_at_once(choice.value)} ({FIELD}: auto, {choice.why})")
    return choice
