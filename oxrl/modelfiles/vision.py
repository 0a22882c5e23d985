"""Detection of models that read images, by their config.json and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oxrl.modelfiles.builtin import BUILTIN_VISION, is_builtin
from oxrl.modelfiles.folder import ADAPTER_CONFIG, BASE
from oxrl.tables.vision import VISION_FAMILIES, VisionFamily

CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
# Of built-in models that read images.
BUILTIN_FAMILY = VISION_FAMILIES["qwen3_vl"]


def model_config(name: str) -> dict[str, Any] | None:
    """Read config.json of a model; None where it is not here.

    Args:
        name: a folder, or a hub name, of which the local cache is read.
    """
    return _object_in(config_file(name))


def config_file(name: str) -> Path:
    """Find where the model's config.json is, or would be: its folder, or the hub's cache."""
    local = Path(name) / CONFIG
    if local.is_file():
        return local
    # Imported here: a fifth of a second that only names on the hub cost.
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except ValueError:  # no name that the hub would give
        return local
    return Path(cached) if isinstance(cached, str) else local


def vision_family(name: str) -> VisionFamily | None:
    """The family of a model that reads images; None of others, and where it cannot be told.

    Args:
        name: as `model.name`; of an adapter's folder, what is below it counts.
    """
    if is_builtin(name):
        return BUILTIN_FAMILY if name in BUILTIN_VISION else None
    adapter = _object_in(Path(name) / ADAPTER_CONFIG)
    base = None if adapter is None else adapter.get(BASE)
    if isinstance(base, str) and base != name:
        return vision_family(base)
    values = model_config(name)
    family = None if values is None else values.get("model_type")
    return VISION_FAMILIES.get(family) if isinstance(family, str) else None


def family_of(decoder: object) -> VisionFamily | None:
    """The family of a model that reads images, by its config."""
    config = getattr(decoder, "config", None)
    return VISION_FAMILIES.get(str(getattr(config, "model_type", "")))


def has_image_processor(name: str) -> bool:
    """True if the model comes with what turns an image into its input."""
    return is_builtin(name) or (config_file(name).parent / PROCESSOR).is_file()


def _object_in(file: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file holds none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
