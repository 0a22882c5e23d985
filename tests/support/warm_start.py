"""What the fork server of tests does before the first process is forked from it.

It trains two small models and imports what other runs import: what transformers, torch and pydantic
find out when they are first used takes longer than a small run. How a run starts cold is tested
with fresh interpreters, in tests/cli/test_cli.py.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import tempfile
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from oxrl.models.lazy_transformers import import_model_classes
from oxrl.runs import environment

OF_OTHER_RUNS = [
    "support.conformance",  # of the ranks in tests/engines
    "oxrl.assembly.assemble_preference",
    "oxrl.cli",
    "oxrl.engines.train.fsdp",
    "oxrl.recipes.reward_model",
    "transformers.models.qwen2.modeling_qwen2",
    *(name for name in ("deepspeed", "peft") if find_spec(name)),
]


def _train(folder: Path) -> None:
    from oxrl.commands.train import run
    from support.small_runs import rl_config, sft_config

    # A second thread would not be there in a forked process, which would wait for it.
    few = {"steps": 1, "threads": 1}
    run(rl_config(folder, "rl", run=few))
    run(sft_config(folder, "sft", run=few))


gc.disable()  # hardly anything of what is imported is garbage
# The path was for the server: what is forked from it is told its own.
os.environ["PYTHONPATH"] = os.environ.pop("OXRL_TEST_PYTHONPATH")
import_model_classes()
# As in conftest.py: git is asked once, and what is forked from the server knows.
environment.git_state = cache(environment.git_state)
with (
    tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as folder,
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()),
):
    _train(Path(folder))
for module in OF_OTHER_RUNS:
    import_module(module)
# Later collections would touch, and so copy, every page that a forked process shares with the server.
gc.collect()
gc.freeze()
gc.enable()
