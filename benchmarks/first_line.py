"""How long a run takes to its first line of metrics, beside what it has to import.

    python benchmarks/first_line.py [REPEATS]

Processor seconds of the process itself, medians of interleaved repeats after one that warms up:
`import torch, transformers`; the classes that every model of transformers is made of as well; and
a default run of one step of a random model, from its start until metrics.jsonl has a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oxrl_stats import medians

IMPORTS = {
    "torch, transformers": "import torch, transformers",
    "and model classes": "import torch; from transformers import AutoModelForCausalLM",
}
WAITING = "; import sys; print(flush=True); sys.stdin.read()"
REWARD = "def length(prompt, completion):\n    return float(len(set(completion)))\n"
CONFIG = """
run: {{name: first, dir: {folder}/run, steps: 1, threads: 1}}
model: {{name: "builtin:tiny"}}
data: {{train: {folder}/prompts.jsonl, prompts_per_step: 4}}
reward: {{name: "{folder}/reward.py:length"}}
rollout: {{n_samples: 4, max_tokens: 8}}
train: {{alg_name: sgrpo, lr: 1e-3}}
"""
LIMIT_S = 300.0


def processor_seconds(pid: int) -> float:
    """Of a process so far, in its own code and in the kernel for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_imports(code: str) -> float:
    """Processor seconds of an interpreter that executes `code`."""
    command = [sys.executable, "-c", code + WAITING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = processor_seconds(process.pid)
        process.communicate()
    return seconds


def of_a_run() -> float:
    """Processor seconds of a run until its first line of metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        rows = [json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(20)]
        (folder / "prompts.jsonl").write_text("".join(rows))
        (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
        line = folder / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "oxrl", "train", str(folder / "config.yaml")]
        begun = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while not (line.exists() and line.stat().st_size):
                if process.poll() is not None or time.monotonic() - begun > LIMIT_S:
                    raise SystemExit("the run wrote no line")
                time.sleep(0.005)
            seconds = processor_seconds(process.pid)
            process.kill()
    return seconds


def main() -> None:
    """Print the figure: medians, and what the line takes beyond the imports of the same turn."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[float]] = {name: [] for name in (*IMPORTS, "first line")}
    for repeat in range(repeats + 1):
        taken = {name: of_imports(code) for name, code in IMPORTS.items()}
        taken["first line"] = of_a_run()
        if repeat:
            for name, seconds in taken.items():
                found[name].append(seconds)
    figure: dict[str, object] = {"case": "first line"}
    for name, seconds in found.items():
        figure[name.partition(",")[0].replace(" ", "_") + "_s"] = medians.median(seconds)
    for name in IMPORTS:
        pairs = zip(found["first line"], found[name], strict=True)
        over = [line - imports for line, imports in pairs]
        figure["over_" + name.partition(",")[0].replace(" ", "_") + "_s"] = medians.median(over)
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
