"""MiniGrid and MuJoCo's Reacher, seen as images: imitation, then reinforcement by the outcome.

    python experiments/simulators/run.py minigrid [--seeds 3]
    MUJOCO_GL=egl python experiments/simulators/run.py reacher --seeds 3

Judged by sampled episodes whose seeds occur in no training, beside an agent that takes random
actions and the trained policy when it is blind (it is shown its first image at every time).
Figures and the curve of every seed go to `<out>/<task>.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Environments in processes of their own import pointing_reacher from here.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Of the renderer in software.
os.environ.setdefault("LP_NUM_THREADS", "1")

import yaml

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.types import Prompt
from oxrl_datasets.prepare import PREPARERS
from oxrl_robots.simulator import SimulatorEnvironment

HERE = Path(__file__).resolve().parent
# Imitation ends where the wanted share of TRIED sampled episodes of other seeds succeeds, or after
# the most steps of the task: how many that takes differs from one random model to the next, and
# reinforcement has nothing to show where imitation left nothing to gain.
TRIED = 100
# Of the agent that takes random actions.
RANDOM_EPISODES = 200
# judged_on: held-out episodes of an evaluation. alive: those that have a process at the same time.
TASKS: dict[str, dict[str, Any]] = {
    "minigrid": {
        "options": {
            "id": "minigrid:MiniGrid-Empty-Random-5x5-v0",
            "settings": {"tile_size": 8, "highlight": False},
            "instruction": "go",
            "outcome_at": 0.001,
            "expert": f"{HERE / 'experts.py'}:minigrid",
        },
        "action": {"choices": "left,right,forward"},
        "max_turns": 8,
        "chunk": 1,
        "episodes": 800,
        "first_steps": 60,
        "more_steps": 10,
        "most_steps": 200,
        "wanted": 0.5,
        "rl_steps": 35,
        "rl_lr": 6e-4,
        "groups": 8,
        "judged_on": 200,
        "alive": 16,
    },
    "reacher": {
        "options": {
            "id": "pointing_reacher:PointingReacher-v0",
            "size": 40,
            "instruction": "reach",
            "outcome_at": -0.03,
            "expert": f"{HERE / 'experts.py'}:pointing_reacher",
        },
        "action": {"size": 2, "bins": 16, "chunk": 1},
        "max_turns": 4,
        "chunk": 1,
        "episodes": 500,
        "first_steps": 60,
        "more_steps": 20,
        "most_steps": 200,
        "wanted": 0.5,
        "rl_steps": 25,
        "rl_lr": 2e-4,
        "groups": 8,
        "judged_on": 200,
        "alive": 16,
        # The target stays where it is, so that a first image would show it at every time.
        "blind": {"settings": {"hidden": True}},
    },
}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def cpu_seconds() -> float:
    """Processor time of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def curve(run_directory: Path, name: str) -> list[float]:
    """A metric of every step of a run."""
    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [round(line[name], 4) for line in found if name in line]


def random_success(task: dict[str, Any], episodes: int) -> float:
    """Share of episodes that random actions bring to success."""
    made = SimulatorEnvironment(**(task["options"] | {"blind": True}))
    chance = random.Random(0)
    names = str(task["action"].get("choices", "")).split(",")
    wins = 0
    for number in range(episodes):
        made.reset(Prompt(uid="", messages=(), token_ids=(), metadata={"seed": number}), 0)
        for _ in range(task["max_turns"]):
            if names[0]:
                actions: list[Any] = [chance.choice(names)]
            else:
                actions = [[chance.uniform(-0.2, 0.2) for _ in range(2)]]
            step = made.act(actions)
            if step.terminated or step.truncated:
                wins += bool(step.success)
                break
    made.close()
    return wins / episodes


def config(place: Path, name: str, sections: dict[str, Any]) -> Any:
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(sections))
    return load_config(path)


def judged(
    place: Path,
    task: dict[str, Any],
    name: str,
    *,
    rows: str = "eval",
    blind: bool = False,
) -> float:
    """Share of the episodes of some rows, by default held-out ones, that succeed, sampled."""
    options = task["options"] | (task.get("blind", {"blind": True}) if blind else {})
    overrides = [
        f"data.eval={place / 'data' / f'{rows}.jsonl'}",
        "environment.name=simulator",
        f"environment.max_turns={task['max_turns']}",
        "environment.timeout_s=120",
        f"environment.alive={task['alive']}",
        f"environment.options={json.dumps(options)}",
        "rollout.context=last",
    ]
    return run_eval(place / name, overrides, samples=1, temperature=1.0)["eval/reward"]


def imitate(place: Path, task: dict[str, Any], common: dict[str, Any]) -> int:
    """Imitate the expert until the wanted share of sampled episodes succeeds; steps of that."""
    # Demonstrations and held-out episodes have other seeds.
    trial = [{"prompt": "Begin.", "seed": 2_000_000 + number} for number in range(TRIED)]
    text = "".join(json.dumps(row) + "\n" for row in trial)
    (place / "data" / "trial.jsonl").write_text(text)
    action = dict(task["action"])
    if "size" in action:
        action["statistics"] = str(place / "data" / "statistics.json")
    most = task["most_steps"]
    for steps in range(task["first_steps"], most + 1, task["more_steps"]):
        sft = config(
            place,
            "sft",
            {
                "run": common | {"name": "sft", "dir": str(place / "sft"), "steps": steps},
                "model": {"name": "builtin:tiny-vla"},
                "data": {"train": str(place / "data" / "sft.jsonl"), "rows_per_step": 64},
                "action": action,
                "train": {"alg_name": "sft", "lr": 1e-3, "warmup_steps": 20},
            },
        )
        run(sft, resume=True)
        if steps == most:
            break
        found = judged(place, task, "sft", rows="trial")
        say(f"{found:.3f} of {TRIED} episodes after {steps} steps of imitation")
        if found >= task["wanted"]:
            return steps
    return most


def one_seed(place: Path, task: dict[str, Any], seed: int, algorithm: str) -> dict[str, Any]:
    """Demonstrations, imitation, reinforcement; shares of success, and curves."""
    place.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    used = cpu_seconds()
    report = PREPARERS["demonstrations"](
        None,
        place / "data",
        seed=seed,
        environment="simulator",
        options=json.dumps(task["options"]),
        episodes=task["episodes"],
        eval_rows=task["judged_on"],
        chunk=task["chunk"],
    )
    say(f"{report['expert_failed']} of {report['expert_episodes']} episodes of the expert failed")
    common: dict[str, Any] = {"threads": 1, "mlflow": False, "seed": seed, "checkpoint_every": 0}
    steps = imitate(place, task, common)
    found: dict[str, Any] = {"seed": seed, "sft_steps": steps}
    found["random"] = random_success(task, RANDOM_EPISODES)
    found["sft"] = judged(place, task, "sft")
    say(f"seed {seed}, {cpu_seconds() - used:.0f} processor seconds: {json.dumps(found)}")
    start = str(place / "sft" / "checkpoints" / f"step_{steps:08d}")
    rl = config(
        place,
        "rl",
        {
            "run": common | {"name": "rl", "dir": str(place / "rl"), "steps": task["rl_steps"]},
            "model": {"name": start},
            "data": {"train": str(place / "data" / "rl.jsonl"), "prompts_per_step": task["groups"]},
            "environment": {
                "name": "simulator",
                "max_turns": task["max_turns"],
                "timeout_s": 120,
                "alive": task["alive"],
                "options": task["options"],
            },
            "action": task["action"],
            "rollout": {"n_samples": 8, "context": "last"},
            "train": {"alg_name": algorithm, "lr": task["rl_lr"]},
        },
    )
    run(rl)
    found["rl"] = judged(place, task, "rl")
    found["blind"] = judged(place, task, "rl", blind=True)
    found["gained"] = round(found["rl"] - found["sft"], 3)
    found["cpu_s"] = round(cpu_seconds() - used)
    found["wall_s"] = round(time.monotonic() - began)
    say(f"seed {seed}: {json.dumps(found)}")
    found["sft_loss"] = curve(place / "sft", "update/loss")
    found["rl_reward"] = curve(place / "rl", "reward/mean")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rl-steps", type=int)
    parser.add_argument("--algorithm", default="sgrpo")
    parser.add_argument("--out", type=Path, default=Path("runs/simulators"))
    chosen = parser.parse_args()
    task = dict(TASKS[chosen.task])
    task["rl_steps"] = chosen.rl_steps or task["rl_steps"]
    results: list[dict[str, Any]] = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        place = chosen.out / f"{chosen.task}_seed{seed}"
        results.append(one_seed(place, task, seed, chosen.algorithm))
        text = ",\n".join(json.dumps(result) for result in results)
        (chosen.out / f"{chosen.task}.json").write_text(f"[\n{text}\n]\n")
    for name in ("random", "blind", "sft", "rl", "gained", "cpu_s"):
        values = [result[name] for result in results]
        say(f"{name:8} mean {statistics.fmean(values):.3f}, least {min(values):.3f}")


if __name__ == "__main__":
    main()
