"""Models whose weights are files of the repository: bits equal on every processor."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_model

from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"


def model_that_adds(folder: Path, noise: float = 0.0) -> Path:
    """Write a model that answers sums, sometimes rightly, and does not end every answer in time.

    `noise`: deviation of what is added to every weight.
    """
    model = builtin_policy("builtin:tiny", seed=0)
    load_model(model, WEIGHTS / "sums.safetensors")
    if noise:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    return folder
