"""Section `fsdp`: how PyTorch's FSDP2 divides memory."""

from __future__ import annotations

from oxrl.config.field import Section, setting


class FsdpConfig(Section):
    """The division of memory by FSDP2 in training (`train.backend: fsdp`)."""

    offload_optimizer: bool = setting(
        False,
        "Keep each rank's pieces of weights, gradients and what the optimizer holds in CPU memory, "
        "and step there; a layer's weights come to the device when it runs.",
    )
