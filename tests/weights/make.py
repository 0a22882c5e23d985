"""Makes the weights anew that tests begin with; the files beside it are what tests read.

They are files because a model that is trained anew is another one on every processor, and so is
what it answers. From these it is the same everywhere, and seen to be what a test is about.

    python tests/weights/make.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from oxrl.commands.train import run
from oxrl.config import load_config

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Enough to answer sums, sometimes rightly, and too few to end every answer in time.
STEPS = 42


def make_sums() -> None:
    """sums.safetensors: builtin:tiny after one_page/sft.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "model.name=builtin:tiny",
            f"run.steps={STEPS}",
            f"run.dir={folder}/run",
            f"data.train={ROOT}/one_page/sums.jsonl",
            "run.mlflow=false",
        ]
        run(load_config(ROOT / "one_page" / "sft.yaml", overrides))
        last = f"step_{STEPS:08}"
        made = Path(folder) / "run" / "checkpoints" / last / "model.safetensors"
        shutil.copyfile(made, HERE / "sums.safetensors")


if __name__ == "__main__":
    make_sums()
