"""The rows of a file that a model learns from, and those of data.eval, by recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oxrl.assembly.assembly import Assembly
from oxrl.config import Config
from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import Dataset, ReadOptions
from oxrl.data.preferences import PreferenceDataset
from oxrl.data.rows import in_our_words, read_rows
from oxrl.data.steps import StepDataset
from oxrl.tables.preference import METHODS

# Columns of what rejection keeps, as far as training reads them.
KEPT = ("prompt", "completion")


def given_rows(assembly: Assembly, *, held_out: bool) -> tuple[type[Dataset[Any]], ReadOptions]:
    """Return the dataset that a recipe without prompts reads a data file as, and its options.

    Args:
        held_out: it is that of `data.eval`.
    """
    cfg = assembly.cfg
    options = assembly.row_options(held_out=held_out)
    if cfg.recipe in ("supervised", "rejection"):
        return ConversationDataset, options
    if cfg.train.alg_name == "process_reward_model":
        return StepDataset, options
    if cfg.recipe == "preference":
        unpaired = holds_singles(cfg) if held_out else METHODS[cfg.train.alg_name].unpaired
        options = replace(options, unpaired=unpaired)
    return PreferenceDataset, options


def load_rows(assembly: Assembly, path: str, *, held_out: bool) -> Dataset[Any]:
    """Read the rows of a file that a model learns from, or of data.eval."""
    cfg = assembly.cfg
    kind, options = given_rows(assembly, held_out=held_out)
    if cfg.recipe == "rejection":
        # What was kept is in our words; rows of data.eval still have their own.
        columns = {ours: theirs for ours, theirs in options.columns.items() if ours in KEPT}
        options = replace(options, columns=columns)
    return kind.load(path, assembly.tokenizer, options)


def holds_singles(cfg: Config) -> bool:
    """Tell whether the rows of data.eval are single judged completions, not pairs."""
    first = next(read_rows(cfg.data.eval or ""), None)
    return first is not None and "chosen" not in in_our_words(first, cfg.data.columns).fields
