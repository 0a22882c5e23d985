"""Results of trials of shared prompts, kept in the user's cache: they are the same in every run."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from oxrl.errors import RunDirectoryError
from oxrl.models.sharing_trial import MOST, try_sharing
from oxrl.runs.files import read_json, write_atomically


def remembered_trial(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Return what `try_sharing` finds, and run it only where no earlier difference is kept.

    Args:
        config: of the model, none with code of its own: that would be no part of the key.
        dtype: that it computes in.

    Returns:
        The difference, relative to the gradient. A file that holds none is written anew; where
        none can be written, the next run tries again.

    Raises:
        SharingRefused: as of `try_sharing`; nothing is kept of it.
    """
    settings = config.to_dict()  # transformers' version among them
    settings.pop("_name_or_path", None)
    code = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    attention = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    described = f"{settings} {attention} {dtype} {torch.__version__} {code}"
    key = sha256(described.encode()).hexdigest()
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    file = Path(caches, "oxrl", "sharing_trials", f"{key}.json")
    kept = (read_json(file) or {}).get("difference")
    if isinstance(kept, float) and 0 <= kept <= MOST:
        return kept
    difference = try_sharing(config, dtype)
    with suppress(OSError, RunDirectoryError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"difference": difference}))
    return difference
