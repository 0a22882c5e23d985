"""Tokens of samples with their numbers, from what `run.record: tokens` kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from oxrl.models.load import load_tokenizer
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.files import Json
from oxrl.runs.recorder import load_tensors

# Of a token, by the name of the tensor; the versions are in the line of the sample.
TOKEN_NUMBERS = {
    "advantages": "advantage",
    "ratio": "ratio",
    "kl": "kl",
    "entropy": "entropy",
    "logprobs": "logprob",
    "teacher_gap": "teacher's gap",
    "versions": "version",
}


class TokenReader:
    """Reads batches of one run.

    Args:
        directory: of the run; its newest checkpoint has the tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self._texts: dict[int, str] = {}
        found = list_checkpoints(directory / "checkpoints")
        self._tokenizer: Any = load_tokenizer(str(found[-1][1])) if found else None

    def rows(self, file: Path, places: list[int]) -> Json:
        """Place -> its tokens: text, whether it was trained on, and numbers by name.

        Args:
            file: of a batch; what the update said lies beside it.
            places: one per row.
        """
        tensors = load_tensors(file)
        beside = file.with_suffix(".update.safetensors")
        if beside.is_file():
            tensors |= load_tensors(beside)
        if "teacher_logprobs" in tensors and "logprobs" in tensors:
            tensors["teacher_gap"] = tensors["teacher_logprobs"] - tensors["logprobs"]
        kept = places[: len(tensors["tokens"])]
        return {str(place): self._row(tensors, row) for row, place in enumerate(kept)}

    def _row(self, tensors: Mapping[str, Tensor], row: int) -> Json:
        length = int(tensors["attention_mask"][row].sum())
        numbers: dict[str, list[float | None]] = {}
        for tensor, name in TOKEN_NUMBERS.items():
            if tensor in tensors:
                numbers[name] = [_short(v) for v in tensors[tensor][row, :length].tolist()]
        return {
            "texts": [self._text(token) for token in tensors["tokens"][row, :length].tolist()],
            "mask": [int(on) for on in tensors["response_mask"][row, :length].tolist()],
            "numbers": numbers,
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            text = f"<{token}>" if self._tokenizer is None else self._tokenizer.decode([token])
            self._texts[token] = str(text)
        return self._texts[token]


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
