"""Score centering: cells that look at one token, samplers that record what it reads."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.schema import Config
from oxrl.config.source import Problem, Problems, at
from oxrl.flat_config import written_config
from oxrl.modelfiles.dims import model_dims
from oxrl.tables.cells import CELLS, find_cell
from oxrl.tables.engines import SAMPLING_ENGINES
from oxrl.tables.numbers import CENTER_TOP, CORRECTION_LEVEL

FIELD = "train.centering"
STORED = "rollout.from_samples"
FIELD_OF = {"ratio": "train.ratio", "gate": "train.loss", "correction": "train.correction"}


def centering_problems(cfg: Config) -> Problems:
    """All that is wrong with the centering of a run that centers."""
    yield from _cells(cfg)
    yield from _sampler(cfg)
    yield from _stored(cfg)


def works(kind: str) -> str:
    """Return the cells of a kind that centering works with, in words."""
    names = [cell.name for cell in CELLS.values() if cell.kind == kind and not cell.uncentered]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _cells(cfg: Config) -> Problems:
    """Every cell gives the loss of a token from that token alone: it is asked about others, too."""
    row = cfg.train.row
    asked = "centering asks for the loss of every token that could have been sampled instead"
    for kind, field in FIELD_OF.items():
        name = getattr(row, kind)
        cell = find_cell(kind, name)
        if cell.uncentered:
            yield Problem(
                FIELD,
                f"does not work with {field} {name}: {cell.uncentered}, and {asked}. It works with "
                f"{field} {works(kind)}",
                row.centering,
                also=(field,),
            )
    if row.has_own_loss:
        yield Problem(
            FIELD,
            f"does not work with a policy loss of your own, {row.gate}: it may look at several "
            f"tokens, and {asked}. It works with train.loss {works('gate')}",
            row.centering,
            also=("train.loss",),
        )
    level = cfg.train.value(CORRECTION_LEVEL)
    if CORRECTION_LEVEL.key in row.defaults and level != "token":
        yield at(
            "train.correction_level",
            f"weighs by the whole response, and {asked} ({FIELD}): set it to token",
            FIELD,
        )


def _sampler(cfg: Config) -> Problems:
    """The engine records what it could have sampled, and there are so many tokens."""
    name = cfg.inference_engine.name
    most = SAMPLING_ENGINES[name].most_likely
    top = cfg.train.value(CENTER_TOP)
    if most is not None and top > most:
        rule = f"must be at most {most}, of which inference_engine.name: {name} tells"
        yield at("train.center_top", rule, "inference_engine.name")
    dims = model_dims(cfg.model.name)
    if dims is not None and top > dims.vocabulary:
        rule = f"must be at most the {dims.vocabulary} tokens of the vocabulary"
        yield at("train.center_top", rule, "model.name")


def _stored(cfg: Config) -> Problems:
    """Stored samples have what is read of them."""
    stored = cfg.rollout.from_samples
    if stored is None:
        return
    try:
        recorded = written_config((Path(stored) / "config.yaml").read_bytes())
    except (OSError, ValueError):
        return  # said of the field itself
    there = recorded.get(f"train.{CENTER_TOP.key}")
    here = cfg.train.value(CENTER_TOP)
    if there is None:
        yield Problem(
            FIELD,
            f"needs the likeliest tokens of the sampler, which the samples of {stored} were drawn "
            "without: record samples with it (--rollout-only run.record=tokens), or set it to none",
            cfg.train.row.centering,
            also=(STORED,),
        )
    elif there != here:
        yield at("train.center_top", f"was {there} when the samples of {STORED} were drawn", STORED)
