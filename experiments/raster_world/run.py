"""Does reinforcement by its outcome improve a tiny policy that sees, is told, and moves?

    python experiments/raster_world/run.py [--seeds 3] [--first 0] [--algorithm sgrpo] [--control]

The world (`environment.name: raster-world`): a cross of four coloured ends in 40 x 40 pixels, and
the name of a colour. A scripted expert is imitated for a while; then groups of episodes that begin
alike are compared by their outcome. Judged by *sampled* episodes with seeds of their own, before
and after: in the world as it is, of whose 96 layouts a quarter occurs in no training, and in that
quarter alone. And blind, with one image that never changes, which leaves guessing the end at which
a colour lies (0.25). `--control` trains once more, with rewards permuted across the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl_datasets.prepare import PREPARERS

HERE = Path(__file__).parent
WORLD = {"instruction": "{color}"}
EVAL_EPISODES = 200
HELD_OUT = 0.25  # of the layouts
# Imitation ends where this share of EVAL_EPISODES sampled episodes in training layouts succeeds:
# how many steps that takes differs from one random model to the next, and reinforcement that begins
# too low settles on going to one end for certain.
FIRST_STEPS = 40
MORE_STEPS = 5
MOST_STEPS = 300
WANTED = 0.8


def cpu_seconds() -> float:
    """Processor time of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def success(folder: Path, rows: Path, *, blind: bool = False) -> float:
    """Share of the sampled episodes of `rows` that reach the right end."""
    options = WORLD | {"blind": blind}
    overrides = [
        f"data.eval={rows}",
        "environment.name=raster-world",
        "environment.max_turns=4",
        f"environment.options={json.dumps(options)}",
        "rollout.context=last",
        "inference_engine.max_rows=256",
    ]
    return run_eval(folder, overrides, samples=1, temperature=1.0)["eval/reward"]


def success_in_world(folder: Path, data: Path, *, blind: bool = False) -> dict[str, float]:
    """Share of sampled episodes that succeed: in trained layouts, in others, in the whole world."""
    known = success(folder, data / "known.jsonl", blind=blind)
    never = success(folder, data / "eval.jsonl", blind=blind)
    world = HELD_OUT * never + (1 - HELD_OUT) * known
    return {"trained": known, "never_trained": never, "world": world}


def write_known(path: Path, first: int) -> None:
    """Episodes in layouts that are trained on."""
    seeds = range(first, first + EVAL_EPISODES)
    rows = [{"prompt": "Begin.", "seed": seed, "split": "train"} for seed in seeds]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def imitate(folder: Path, data: Path, seed: int) -> Path:
    """Imitate until WANTED of the sampled episodes in training layouts succeed; the checkpoint."""
    trial = data / "trial.jsonl"
    write_known(trial, first=0)
    for steps in range(FIRST_STEPS, MOST_STEPS + 1, MORE_STEPS):
        given = [
            f"run.seed={seed}",
            f"run.dir={folder}",
            f"run.steps={steps}",
            f"data.train={data / 'sft.jsonl'}",
        ]
        run(load_config(HERE / "sft.yaml", given), resume=True)
        found = success(folder, trial)
        say(f"seed {seed}: {found:.3f} of the training episodes after {steps} steps")
        if found >= WANTED:
            return folder / "checkpoints" / f"step_{steps:08d}"
    raise SystemExit(f"seed {seed}: after {MOST_STEPS} steps of imitation too little succeeds")


def reinforce(
    folder: Path, data: Path, seed: int, start: Path, chosen: argparse.Namespace, *fields: str
) -> None:
    """Train from the end of imitation."""
    given = [
        f"run.seed={seed}",
        f"data.train={data / 'rl.jsonl'}",
        f"run.dir={folder}",
        f"run.steps={chosen.rl_steps}",
        f"model.name={start}",
        f"train.alg_name={chosen.algorithm}",
    ]
    run(load_config(HERE / "rl.yaml", [*given, *fields]))


def one_seed(out: Path, seed: int, chosen: argparse.Namespace) -> dict[str, float]:
    """Imitation, then reinforcement, with the share of successes before, after and blind."""
    began = cpu_seconds()
    clock = time.monotonic()
    data = out / "data"
    PREPARERS["demonstrations"](
        None,
        data,
        seed=seed,
        episodes=1500,
        eval_rows=EVAL_EPISODES,
        options=json.dumps(WORLD),
        eval_columns='{"split": "held_out"}',
    )
    found: dict[str, float] = {}
    sft = out / "sft"
    start = imitate(sft, data, seed)
    write_known(data / "known.jsonl", first=1_000_000)
    found |= {f"sft_{name}": share for name, share in success_in_world(sft, data).items()}
    say(f"seed {seed}: after imitation {found['sft_world']:.3f} sampled")
    rl = out / "rl"
    reinforce(rl, data, seed, start, chosen)
    found |= {f"rl_{name}": share for name, share in success_in_world(rl, data).items()}
    found["blind_world"] = success_in_world(rl, data, blind=True)["world"]
    if chosen.control:
        permuted = out / "permuted"
        reinforce(permuted, data, seed, start, chosen, "train.features={permuted-rewards: {}}")
        shares = success_in_world(permuted, data)
        found |= {f"permuted_{name}": share for name, share in shares.items()}
    found["cpu_s"] = cpu_seconds() - began
    found["wall_s"] = time.monotonic() - clock
    say(f"seed {seed}: {json.dumps({name: round(value, 3) for name, value in found.items()})}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rl-steps", type=int, default=100)
    parser.add_argument("--algorithm", default="sgrpo")
    parser.add_argument("--control", action="store_true", help="permute rewards as well")
    parser.add_argument("--out", type=Path, default=Path("runs/raster_world"))
    chosen = parser.parse_args()
    results: list[dict[str, float]] = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        results.append(one_seed(chosen.out / f"{chosen.algorithm}_seed{seed}", seed, chosen))
    for name in results[0]:
        values = [result[name] for result in results]
        say(f"{name:16} mean {statistics.fmean(values):.3f}, least {min(values):.3f}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1) + "\n"
    (chosen.out / f"results_{chosen.algorithm}.json").write_text(text)


if __name__ == "__main__":
    main()
