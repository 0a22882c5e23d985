"""`train.micro_batch_tokens: auto`: how many tokens go through the model at once, by a rule.

A trial would time the machine, and two runs of one configuration could come to other numbers, and
so to sums in another order. The rule looks at the kind of device and at the width of the model, so
that two runs decide alike.
"""

from __future__ import annotations

from oxrl.config.schema import Config
from oxrl.modelfiles.dims import model_dims

FIELD = "train.micro_batch_tokens"
# Not measured: what it was before there was a rule.
USUAL = 16384
# Numbers in the widest tensor of a layer: 16 MiB in float32. What is larger than 32 MiB goes back
# to the system when it is freed, and every operation pages it in anew: at 3.3M parameters updates
# of 4,096 tokens at once take up to 15 % less time than those of 16,384 where nothing is padded
# (benchmarks/micro_batches.py).
WIDEST = 4 * 2**20
LEAST = 1024
MOST = 8192
UNKNOWN = 4096


class ByRule(int):
    """The number that auto came to: rows are then cut where that saves padding, too."""


def by_rule(cfg: Config) -> bool:
    """True if `train.micro_batch_tokens` is auto, or was before it was settled."""
    tokens = cfg.train.micro_batch_tokens
    return tokens == "auto" or isinstance(tokens, ByRule)


def micro_batch_tokens(cfg: Config, *, on_cpu: bool) -> int:
    """The number of `train.micro_batch_tokens`, or what the rule makes of auto.

    Args:
        on_cpu: where the model is computed.
    """
    tokens = cfg.train.micro_batch_tokens
    return tokens_by_rule(cfg, on_cpu=on_cpu)[0] if tokens == "auto" else tokens


def tokens_by_rule(cfg: Config, *, on_cpu: bool) -> tuple[int, str]:
    """Return what auto comes to, and why.

    Args:
        on_cpu: where the model is computed.
    """
    if cfg.train.engine.several_ranks:
        return USUAL, f"the number for train.backend {cfg.train.backend}"
    if not on_cpu:
        return USUAL, "the number for a GPU"
    dims = model_dims(cfg.model.name)
    if dims is None:
        return UNKNOWN, "for a model of unknown size on a CPU"
    fitting = max(1, WIDEST // dims.intermediate)
    power = 1 << (fitting.bit_length() - 1)
    tokens = min(max(power, LEAST), MOST)
    return tokens, "for a model of this size on a CPU"


def read_at_once(tokens: int, origin: str) -> str:
    """In words, what a limit of so many tokens does.

    Args:
        tokens: of a micro-batch.
        origin: of the number.
    """
    return f"up to {tokens:,} tokens ({origin}); affects memory, not the gradient"
