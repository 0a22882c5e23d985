"""Stateless seeds: every random choice is a function of what it is for, never of what ran before.

A sample can therefore be drawn again alone, in another order, on another engine or after a crash,
and comes out the same. Nothing here is saved in a checkpoint because nothing here has state.
"""

from __future__ import annotations

import hashlib


def stable_seed(*parts: int | str) -> int:
    """Hash `parts` to an integer in [0, 2**63), the same on every machine and Python version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(run_seed: int, draw: int, sample: int) -> int:
    """Seed of one sample.

    Args:
        run_seed: `run.seed`.
        draw: the prompt's global position in the data order.
        sample: position among the samples of the prompt.
    """
    # The zeros stood for more once: they keep the seeds, and so the samples, of earlier runs.
    return stable_seed("sample", run_seed, draw, sample, 0, 0)
