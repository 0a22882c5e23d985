"""The reference of a run, in words: why there is one, what it costs, how to do without."""

from __future__ import annotations

from rich.filesize import decimal

from oxrl.config.conditions import takes_kl
from oxrl.config.schema import Config
from oxrl.modelfiles.dims import model_dims
from oxrl.tables.numbers import KL_COEFF
from oxrl.tables.policy import ROWS


def reference_text(cfg: Config) -> str:
    """Describe the reference of a run, its cost, why there is one, and how to do without.

    A row's default may ask for a reference that nobody thought of: this is told by the plan, and
    at the start of the run. Empty where there is none.
    """
    row = cfg.train.row
    if row.recipe == "preference":
        return _preference_reference(cfg)
    if row.recipe != "rl" or not takes_kl(cfg):
        return ""
    coefficient = cfg.train.value(KL_COEFF)
    usual = row.defaults.get(KL_COEFF.key) == coefficient
    origin = f"the default of {row.name}" if usual else "as configured"
    why = f"for train.kl_coeff = {coefficient:g}, {origin}"
    return f"{_reference_model(cfg)}, {why}; train.kl_coeff=0 does without"


def _reference_model(cfg: Config) -> str:
    """Describe the reference's weights, and their size."""
    if cfg.lora.rank:
        return "the policy with its adapter switched off (no memory of its own)"
    dims = model_dims(cfg.model.name)
    if dims is None:
        return "a second copy of the policy, of unknown size"
    size = decimal(dims.parameters * cfg.model.weight_bytes)
    return f"a second copy of the policy, {size}"


def _preference_reference(cfg: Config) -> str:
    method, *added = [ROWS.methods[name] for name in (cfg.train.alg_name, *cfg.train.mix)]
    if not any(known.reference for known in (method, *added)):
        return ""
    free = "train.alg_name=simpo, orpo, cpo do without"
    if method.moves_reference:
        held = f"{_reference_model(cfg)}, which follows it"
        return f"{held}: {cfg.train.alg_name} asks for it; {free}"
    needs = f"{cfg.train.alg_name} needs log-probabilities of the policy before training"
    return f"{needs}: computed once per row and kept on disk; {free}"
