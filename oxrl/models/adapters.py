"""Adapters that a model carries: found, switched off, and what their weights are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

# peft's own file names: whatever reads adapters reads these.
ADAPTER_FILE = "adapter_model.safetensors"
# An adapter's parameters in the model and in its file: `x.lora_A.default.weight`,
# `base_model.model.x.lora_A.weight`.
IN_MODEL = ".default.weight"
IN_FILE = ".weight"
# How the weight that an adapter lies beside is called.
UNDER_ADAPTER = ".base_layer."
FILE_PREFIX = "base_model.model."


def adapted_layers(model: Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of all that carry an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


def has_adapter(model: Module) -> bool:
    """True if some layer of `model` carries an adapter."""
    return any(True for _ in adapted_layers(model))


@contextmanager
def adapter_off(model: Module) -> Iterator[None]:
    """Turn adapters off inside the block: the model is a reference then, without a copy."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def plain_name(name: str) -> str:
    """The name that a frozen weight has in the model without an adapter."""
    return name.replace(UNDER_ADAPTER, ".")


def file_name(name: str) -> str:
    """Return the name that a parameter of an adapter has in ADAPTER_FILE."""
    return FILE_PREFIX + name.removesuffix(IN_MODEL) + IN_FILE


def model_name(key: str) -> str:
    """The parameter that ADAPTER_FILE holds under `key`."""
    return key.removeprefix(FILE_PREFIX).removesuffix(IN_FILE) + IN_MODEL
