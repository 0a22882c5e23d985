"""Fields that `run.exact` does not go with. Parts of the model without an exact form are found on a
small one of its kind: `oxrl.models.exact_contract`.
"""

from __future__ import annotations

from oxrl.config.schema import Config
from oxrl.config.source import Problem, Problems, at
from oxrl.modelfiles.folder import vision_family

FIELD = "run.exact"


def exact_problems(cfg: Config) -> Problems:
    """Every problem of a run in which all log-probabilities are to be the same to the last bit."""
    model = cfg.model
    engine = cfg.inference_engine.name
    if model.dtype != "float32":
        yield _no_form("model.dtype", model.dtype, "set it to float32")
    if model.attention not in ("auto", "sdpa"):
        yield _no_form("model.attention", f"{model.attention} attention", "set it to auto")
    if model.load_in_4bit:
        yield _no_form("model.load_in_4bit", "layers in four bits", "set it to false", "lora.rank")
    if vision_family(model.name) is not None:
        yield _no_form("model.name", "a model that reads images", "take one of text alone")
    if cfg.run.device not in ("auto", "cpu"):
        yield _no_form("run.device", f"what {cfg.run.device} computes", "set it to cpu")
    if cfg.train.backend == "deepspeed":
        yield _no_form("train.backend", "what deepspeed trains", "set it to local or fsdp")
    if engine != "local":
        yield _no_form(
            "inference_engine.name",
            f"what {engine} samples",
            "set it to local (of which inference_engine.processes or actors make several)",
        )

    if cfg.inference_engine.weights != "trained":
        yield at(
            "inference_engine.weights",
            "rounds what the sampler computes with, and run.exact promises that it computes what "
            f"the trainer does; the two contradict each other: set it to trained, or {FIELD} to "
            "false",
            FIELD,
        )


def _no_form(field: str, what: str, instead: str, *also: str) -> Problem:
    """A field that asks for something without an exact form."""
    rule = f"no exact form of {what} exists: {instead}, or {FIELD} to false"
    return at(field, rule, FIELD, *also)
