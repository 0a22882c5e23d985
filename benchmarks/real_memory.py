"""What `oxrl plan` says of memory on a real model, beside what whole runs take.

    oxrl prepare gsm8k --source train.jsonl --out gsm8k
    oxrl prepare oasst-pairs --source trees.jsonl --out pairs
    python benchmarks/real_memory.py MODEL --conversations gsm8k/train.jsonl \\
        --pairs pairs/trees.jsonl

Four runs of the model in a folder, each in a process of its own, in float32 on a CPU: RL on sums in
words (8 prompts x 8 samples x at most 24 tokens), the same with an adapter, SFT and DPO, once over
the first rows of files as `oxrl prepare` writes them, so that a run reads the longest row that the
plan has read. Resident: the most that the process held, as `/usr/bin/time -v` tells it. With
--tensors a second run counts the bytes behind every tensor at their peak in an update
(benchmarks/tensor_bytes.py), which is slow. Planned: by the length of the data's rows, and by the
longest that the model reads, as the plan tells both, and what it counts of tensors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
STEPS = 2
RL: dict[str, Any] = {
    "data": {"prompts_per_step": 8},
    "reward": {"name": "math"},
    "rollout": {"n_samples": 8, "max_tokens": 24},
    "train": {"alg_name": "sgrpo", "lr": 5e-6},
}
CASES: dict[str, dict[str, Any]] = {
    "rl": RL,
    "lora": RL | {"lora": {"rank": 16}},
    "sft": {"data": {"rows_per_step": 16}, "train": {"alg_name": "sft", "lr": 1e-5}},
    "dpo": {"data": {"rows_per_step": 4}, "train": {"alg_name": "dpo", "lr": 1e-6}},
}
DATA = {"sft": "conversations", "dpo": "pairs"}


def write_config(folder: Path, case: str, model: str, rows: Path | None) -> Path:
    """The configuration of a run once over a few rows."""
    sections = {name: dict(values) for name, values in CASES[case].items()}
    count = STEPS * (sections["data"].get("rows_per_step") or RL["data"]["prompts_per_step"])
    if rows is None:
        sums = [(a, b) for a in range(2, 13) for b in range(2, 13)][:: 121 // count]
        asked = "What is {} times {}? Answer with only the number."
        lines = [json.dumps({"prompt": asked.format(a, b), "answer": str(a * b)}) for a, b in sums]
    else:
        with rows.open() as file:
            lines = [line.strip() for line in itertools.islice(file, count)]
    (folder / "rows.jsonl").write_text("\n".join(lines[:count]) + "\n")
    sections["run"] = {"name": case, "dir": str(folder / "run"), "steps": STEPS, "device": "cpu"}
    sections["run"] |= {"mlflow": False, "console": "quiet"}
    sections["model"] = {"name": model}
    sections["data"]["train"] = str(folder / "rows.jsonl")
    path = folder / "run.yaml"
    path.write_text(json.dumps(sections))
    return path


def planned(path: Path) -> dict[str, float]:
    """What the plan says, in GB."""
    from oxrl.config import load_config
    from oxrl.modelfiles.dims import model_dims
    from oxrl.plan.memory import memory, memory_needed, rows_no_longer
    from oxrl.plan.preflight import Prepared, check_data, check_tokenizer

    cfg = load_config(path)
    dims = model_dims(cfg.model.name)
    assert dims is not None
    with closing(Prepared()) as prepared:
        check_tokenizer(cfg, prepared)
        check_data(cfg, prepared)
        longest = prepared.longest
        if cfg.train.row.recipe == "rl":
            longest += cfg.rollout.max_tokens
        by_data = rows_no_longer(cfg, longest)
        needed, _ = memory_needed(by_data, dims)
        limit, _ = memory_needed(cfg, dims)
        return {
            "longest": longest,
            "planned": needed / 1e9,
            "planned_limit": limit / 1e9,
            "planned_tensors": memory(by_data, dims).phases["update"] / 1e9,
        }


def taken(path: Path, *, tensors: bool) -> dict[str, float]:
    """What a run takes, in GB, in this process."""
    import oxrl

    if not tensors:
        oxrl.train(path)
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    from plan_memory import measured

    found = measured(lambda: oxrl.train(path))
    return {"tensors": found["peak"] / 1e9}


def in_own_process(path: Path, what: str) -> dict[str, float]:
    """`planned` or `taken`, in a process that has done nothing else."""
    command = [sys.executable, __file__, "--child", what, str(path)]
    done = subprocess.run(
        command,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, model: str, rows: Path | None, *, tensors: bool) -> dict[str, Any]:
    """The plan of a case beside one or two runs of it."""
    found: dict[str, float] = {}
    for what in ("planned", "resident", "tensors")[: 2 + tensors]:
        with tempfile.TemporaryDirectory() as name:
            path = write_config(Path(name), case, model, rows)
            found |= in_own_process(path, what)
    found["off"] = found["planned"] / found["resident"] - 1
    if tensors:
        found["tensors_off"] = found["planned_tensors"] / found["tensors"] - 1
    return {"case": case} | {name: round(value, 3) for name, value in found.items()}


def child(what: str, path: Path) -> None:
    """What `in_own_process` starts."""
    found = planned(path) if what == "planned" else taken(path, tensors=what == "tensors")
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--tensors", action="store_true", help="count tensors as well")
    options = parser.parse_args()
    for case in options.cases:
        rows = getattr(options, DATA[case]) if case in DATA else None
        print(json.dumps(compare(case, options.model, rows, tensors=options.tensors)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
