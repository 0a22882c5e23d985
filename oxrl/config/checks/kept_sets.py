"""Sampling from a part of the vocabulary, which training follows: what it does not go with."""

from __future__ import annotations

from oxrl.config.schema import Config
from oxrl.config.source import Problems, at
from oxrl.tables.cells import TEACHER_TOP, TOP_LOGPROBS
from oxrl.tables.engines import SAMPLING_ENGINES

# Fields of the cuts, and the value with which each is off.
CUTS = {"top_p": 1, "top_k": 0, "min_p": 0}


def kept_set_problems(cfg: Config) -> Problems:
    """Find what cannot be computed of the tokens alone that sampling keeps.

    Args:
        cfg: of a run that trains on samples of a cut distribution.
    """
    rollout = cfg.rollout
    row = cfg.train.row
    asked = [name for name, off in CUTS.items() if getattr(rollout, name) != off]
    field = f"rollout.{asked[0]}"
    whole = ", ".join(f"rollout.{name}: {CUTS[name]}" for name in asked)
    for feature in (TOP_LOGPROBS, TEACHER_TOP):
        if row.has(feature):
            rule = (
                f"cuts the distribution, and {row.name} needs {feature.meaning}: some of them may "
                f"be left out; set {whole}, or another train.alg_name"
            )
            yield at(field, rule, "train.loss")
    engine = cfg.inference_engine.name
    most = SAMPLING_ENGINES[engine].most_likely
    if most is not None and not 0 < rollout.top_k <= most:
        rule = (
            f"must be from 1 to {most} where {field} cuts the distribution: training needs every "
            f"token that is kept, and inference_engine.name: {engine} tells of so many; or set "
            f"{whole}, or that engine to local"
        )
        yield at("rollout.top_k", rule, "inference_engine.name")
    for name, teacher in cfg.model.teachers.items():
        if teacher.engine != "local":
            rule = (
                f"cuts the distribution, and model.teachers.{name}.engine: {teacher.engine} tells "
                f"of the whole one alone: set {whole}, or that engine to local"
            )
            yield at(field, rule, f"model.teachers.{name}.engine")
