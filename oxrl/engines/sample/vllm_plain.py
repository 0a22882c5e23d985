"""The module that vLLM's workers import before they load a model: it keeps weights as they are.

On a CPU vLLM packs weights for its kernels and drops the originals. Only a product with a unit
matrix reads such a copy back, which takes many times as long as to deliver it. Plain weights are
read at the speed of memory, and torch multiplies by them about as fast.
"""

from __future__ import annotations

from typing import Any

import torch

from oxrl.engines.sample.vllm_worker import WorkerExtension as WorkerExtension
from oxrl.engines.sample.vllm_worker import vllm_module


def keep_weights_plain() -> None:
    """Have vLLM's layers on a CPU multiply by the weight itself from now on."""
    utils = vllm_module("model_executor.layers.utils")
    packs = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packs(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


keep_weights_plain()
