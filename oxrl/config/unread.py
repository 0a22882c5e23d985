"""Why a run does not read a field, in words."""

from __future__ import annotations

from oxrl.config.conditions import SENTENCES
from oxrl.config.field import (
    ANSWERING,
    COMPARING,
    EVALUATING,
    OFFLINE,
    PREFERENCE,
    RL,
    SAMPLING,
    SUPERVISED,
)
from oxrl.config.reads import unmet, verdicts
from oxrl.config.schema import Config
from oxrl.config.sections.train import CELLS
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.numbers import Number
from oxrl.tables.policy import ROWS

# Recipes that read a field -> why a run of another recipe does not, {} its algorithm.
OF_RECIPES = {
    RL: "is read by reinforcement learning; {} is not: remove it",
    SAMPLING: "is read by reinforcement learning; {} is not: remove it",
    ANSWERING: (
        "is read by reinforcement learning and supervised fine-tuning; {} is neither: remove it"
    ),
    EVALUATING: (
        "is read by reinforcement learning and evaluations of supervised fine-tuning; {} is "
        "neither: remove it"
    ),
    OFFLINE: (
        "is read by supervised and preference algorithms; {} is reinforcement learning: remove it"
    ),
    PREFERENCE: "is read by preference methods; {} is none: remove it",
    COMPARING: (
        "is read by reinforcement learning and preference methods; {} is neither: remove it"
    ),
    SUPERVISED: "is read by supervised fine-tuning; {} is not: remove it",
}


def why_unread(path: str, cfg: Config) -> str:
    """Say what reads `path`, and so why this run does not.

    Args:
        path: dotted, of a field that this run does not read.
        cfg: of the run.
    """
    lacking = unmet(path, cfg, verdicts(cfg))
    if isinstance(lacking, tuple):
        return OF_RECIPES[lacking].format(cfg.train.alg_name)
    if isinstance(lacking, Number):
        return _why_no_number(lacking.key, cfg)
    return "" if lacking is None else SENTENCES[lacking].format(cfg=cfg)


def _why_no_number(name: str, cfg: Config) -> str:
    """Which algorithms and cells read a number that this run does not."""
    algorithms = [row.name for row in ROWS.values() if name in row.defaults]
    fields = {kind: field for field, kind in CELLS.items() if kind != "ratio"}
    choices: list[str] = []
    for (kind, cell), found in TABLE.items():
        if kind in fields and name in [number.key for number in found.numbers]:
            choices.append(f"train.{fields[kind]}: {cell}")
    known = [f"algorithms: {', '.join(algorithms)}"] if algorithms else []
    if choices:
        known.append(", ".join(choices))
    hint = ""
    if name == "beta" and cfg.recipe == "rl":
        hint = "; the weight of a KL term is train.kl_coeff here"
    return (
        f"is not read by {cfg.train.alg_name} as configured (read by {'; '.join(known)}); "
        f"remove it, or choose one of those{hint}"
    )
