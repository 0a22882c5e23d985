"""The parts of a model that reads images: vision tower, projector, language part."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch.nn import Linear
from transformers import PreTrainedModel

from oxrl.errors import EngineError
from oxrl.modelfiles.folder import family_of

log = logging.getLogger(__name__)


def part_of(model: PreTrainedModel) -> dict[str, str]:
    """Name the part that every parameter belongs to: vision, projector or language.

    Args:
        model: of one of the families of `oxrl.tables.vision`.

    Raises:
        EngineError: it is of no such family.
    """
    family = family_of(model)
    if family is None:
        raise EngineError(f"{type(model).__name__} has no vision tower that is known here")
    body = f"{model.base_model_prefix}."
    found: dict[str, str] = {}
    for name, _ in model.named_parameters():
        inside = name.removeprefix(body)
        if inside.startswith(family.projector):
            found[name] = "projector"
        elif inside.startswith(family.tower):
            found[name] = "vision"
        else:
            found[name] = "language"
    return found


def freeze(model: PreTrainedModel, parts: str) -> None:
    """Let parts of a model stay as they are, and say in the log which weights these are.

    Args:
        model: changed in place.
        parts: "vision", "projector" or "vision+projector".
    """
    chosen = parts.split("+")
    parameters = dict(model.named_parameters())
    frozen = [name for name, part in part_of(model).items() if part in chosen]
    for name in frozen:
        parameters[name].requires_grad_(False)
    count = sum(parameters[name].numel() for name in frozen)
    total = sum(parameter.numel() for parameter in parameters.values())
    log.info(
        "model.freeze: %s: %d of %d parameters are frozen: %s",
        parts,
        count,
        total,
        ", ".join(frozen),
    )


def language_linears(model: PreTrainedModel) -> Iterator[tuple[str, Linear]]:
    """The linear layers of the language part but the output head: where adapters go."""
    family = family_of(model)
    inside = "" if family is None else f"{model.base_model_prefix}.{family.language}"
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module is not head and name.startswith(inside):
            yield name, module
