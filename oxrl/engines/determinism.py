"""Kernels that give the same bytes for the same input, where PyTorch has them."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from oxrl.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# What cuBLAS may be told so that it adds up in one order.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
# Read by vLLM when it is imported: a row's numbers then do not depend on the rows beside it.
VLLM_BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


def use_deterministic_kernels() -> None:
    """Have PyTorch refuse every operation of a GPU whose result may differ from run to run.

    For this process, before it first uses its GPU. The CPU's operations are deterministic anyway.

    Raises:
        ConfigError: the user told cuBLAS to work in a way that is not deterministic.
    """
    workspace = os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if workspace not in DETERMINISTIC_WORKSPACES:
        allowed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise ConfigError(
            f"run.deterministic: the variable {WORKSPACE} is {workspace!r}, with which sums of "
            f"cuBLAS differ from run to run; unset it, or use {allowed}"
        )
    torch.use_deterministic_algorithms(True)
    # Everything computed here is written before it is read; filling memory first costs time alone.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def cumulative_sum(values: Tensor) -> Tensor:
    """Sum up to every element of each row, [n, V].

    CUDA has no deterministic sum of that kind, so the CPU takes it where one is asked for.

    Args:
        values: [n, V], on any device; a gradient passes through.

    Returns:
        A tensor of the same shape, dtype and device.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(1).to(values.device)
    return values.cumsum(1)
