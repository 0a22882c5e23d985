"""What the fork server of runs on the device that is none does before the first one is forked.

It imports and uses what most runs need. It computes no gradient: the threads that PyTorch starts for
those of a device are not there in a forked process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from oxrl.models.lazy_transformers import import_model_classes
from oxrl.runs import environment
from support import pretend_device

IMPORTED = [
    "oxrl.assembly.assemble_preference",
    "oxrl.cli",
    "oxrl.commands.replay",
    "oxrl.recipes.reward_model",
    "transformers.models.qwen2.modeling_qwen2",
    *(name for name in ("peft",) if find_spec(name)),
]

gc.disable()
os.environ["PYTHONPATH"] = os.environ.pop("OXRL_TEST_PYTHONPATH")
pretend_device.offered()
import_model_classes()
environment.git_state = cache(environment.git_state)
for module in IMPORTED:
    import_module(module)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    from oxrl.commands.evaluate import run_generate
    from oxrl.types import Sampling

    torch.set_num_threads(1)  # others would not be there in a forked process
    run_generate("builtin:tiny", ["hm"], sampling=Sampling(max_tokens=2))
gc.collect()
gc.freeze()
gc.enable()
