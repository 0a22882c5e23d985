"""Does a tiny model learn to use what a game says after its first guess?

    python experiments/guessing/run.py [--seeds 3] [--first 0] [--out runs/guessing]

A number from 1 to 6, two guesses, and after a wrong one the number in letters. The warm start shows
games of which a few listen. Games with fresh secrets, before and after reinforcement, sampled and
greedy; the same policies where the game says any number's word; and a run whose rewards are
permuted across the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
from pathlib import Path

from guessing import WORDS

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config

HERE = Path(__file__).parent
GAME = f"{HERE / 'guessing.py'}"
GAMES = 4000
# How many of the games that are shown say what the word said; the others guess blindly twice.
LISTENS = 0.5
JUDGED = 256


def cpu_seconds() -> float:
    """Processor time of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def shown_game(chance: random.Random) -> str:
    """A game to imitate."""
    numbers = list(WORDS)
    secret, first, second = (chance.choice(numbers) for _ in range(3))
    texts = ["?", str(first)]
    if first != secret:
        listened = chance.random() < LISTENS
        texts += [WORDS[secret], str(secret if listened else second)]
    roles = ["user", "assistant", "user", "assistant"]
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"messages": said}) + "\n"


def write_data(folder: Path, seed: int) -> None:
    """Games to imitate, and rows that only say that there is a game."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    games = [shown_game(chance) for _ in range(GAMES)]
    (folder / "sft.jsonl").write_text("".join(games))
    rows = [json.dumps({"prompt": "?", "uid": str(number)}) + "\n" for number in range(JUDGED)]
    (folder / "rl.jsonl").write_text("".join(rows))
    (folder / "eval.jsonl").write_text("".join(rows))


def newest(folder: Path) -> str:
    return str(max((folder / "checkpoints").glob("step_*")))


def warm_start(folder: Path, seed: int) -> str:
    given = [
        f"run.seed={seed}",
        f"run.dir={folder / 'sft'}",
        f"data.train={folder / 'sft.jsonl'}",
    ]
    run(load_config(HERE / "sft.yaml", given))
    return newest(folder / "sft")


def reinforce(folder: Path, seed: int, model: str, *, permuted: bool = False) -> str:
    name = "permuted" if permuted else "rl"
    given = [
        f"run.seed={seed}",
        f"run.dir={folder / name}",
        f"data.train={folder / 'rl.jsonl'}",
        f"model.name={model}",
        f"environment.name={GAME}:Guessing",
    ]
    if permuted:
        given.append("train.features={permuted-rewards: {}}")
    run(load_config(HERE / "rl.yaml", given))
    return newest(folder / name)


def right(folder: Path, seed: int, model: str, environment: str, temperature: float) -> float:
    """Share of the games that a policy wins; their secrets are none of the training's draws."""
    given = [
        f"run.seed={seed + 1000}",
        f"model.name={model}",
        f"data.train={folder / 'rl.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}",
        f"environment.name={GAME}:{environment}",
        f"rollout.eval_temperature={temperature}",
    ]
    return run_eval(HERE / "rl.yaml", given)["eval/reward"]


def trained(folder: Path, seed: int) -> tuple[str, str]:
    """The policies before and after reinforcement."""
    write_data(folder, seed)
    began = cpu_seconds()
    warm = warm_start(folder, seed)
    learned = reinforce(folder, seed, warm)
    took = cpu_seconds() - began
    say(f"seed {seed} warm start and reinforcement: {took:.0f} s of processor time")
    return warm, learned


def gained(folder: Path, seed: int, policies: tuple[str, str]) -> float:
    """Print how many games the policies win; what the sampled guesses gained."""
    asked = {
        "sampled": ("Guessing", 1.0),
        "greedy": ("Guessing", 0.0),
        "nonsense": ("Nonsense", 1.0),
    }
    gain = 0.0
    for name, (environment, temperature) in asked.items():
        before, after = (right(folder, seed, m, environment, temperature) for m in policies)
        say(f"seed {seed} {name:<9} {before:.3f} -> {after:.3f}")
        if name == "sampled":
            gain = after - before
    return gain


def control(folder: Path, seed: int, warm: str) -> None:
    """The same training with rewards that say nothing."""
    permuted = reinforce(folder, seed, warm, permuted=True)
    before, after = (right(folder, seed, model, "Guessing", 1.0) for model in (warm, permuted))
    say(f"seed {seed} {'permuted':<9} {before:.3f} -> {after:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny model learns to guess a number.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/guessing"))
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    policies = {seed: trained(arguments.out / f"seed_{seed}", seed) for seed in seeds}
    gains = [gained(arguments.out / f"seed_{seed}", seed, policies[seed]) for seed in seeds]
    say(f"gain, sampled: mean {statistics.mean(gains):.3f}, least {min(gains):.3f}")
    for seed in seeds:
        control(arguments.out / f"seed_{seed}", seed, policies[seed][0])


if __name__ == "__main__":
    main()
