"""How many images a model reads per second, and how much of that time its vision tower takes.

    python benchmarks/vision.py [--rows 64] [--sizes 32x16 64x64] [--tokens 8] [--repeat 5] [--json]

`builtin:tiny-vl` on one thread, rows of one image each: pixels from files (decoding, resizing,
cutting into patches), forward and backward of a supervised step, and sampling of 4 responses per
prompt, with a tower that is trained and with one that is frozen. Seconds are processor time, so
that other work on the machine does not count; the best of `--repeat` is told. The tower's share is
that of its forward and backward passes in the step, and of its forward pass in sampling.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from oxrl.assembly.assembly import Assembly
from oxrl.config import Config, load_config
from oxrl.data.conversations import ConversationDataset
from oxrl.data.prompts import PromptDataset
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.models.vision_network import freeze
from oxrl.recipes.supervised import loss_fn, to_supervised_batch
from oxrl.rollouts.sync import make_requests
from oxrl.types import Sampling

NAME = "builtin:tiny-vl"
SAMPLES = 4


def configured(folder: Path, rows: int, size: tuple[int, int]) -> Config:
    """A configuration on `rows` rows, each with an image of its own."""
    random = np.random.default_rng(0)
    lines: list[str] = []
    for number in range(rows):
        pixels = random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        row = {"prompt": "what is it?", "completion": "red", "images": [f"{number}.png"]}
        lines.append(json.dumps(row) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    content = {
        "run": {"name": "vision", "dir": str(folder / "run"), "steps": 1, "mlflow": False},
        "model": {"name": NAME},
        "data": {"train": str(folder / "rows.jsonl"), "rows_per_step": rows},
        "train": {"alg_name": "sft", "lr": 1e-3},
    }
    (folder / "vision.yaml").write_text(json.dumps(content))
    return load_config(folder / "vision.yaml")


@contextmanager
def timed(tower: Any, spent: list[float]) -> Iterator[None]:
    """Add the processor time of a module's forward and backward passes to `spent`."""
    began: list[float] = []

    def start(*_: object) -> None:
        began.append(time.process_time())

    def stop(*_: object) -> None:
        spent.append(time.process_time() - began.pop())

    def through(_: object, __: object, output: Any) -> None:
        stop()
        if (
            output.pooler_output.requires_grad
        ):  # its backward pass begins where this gets a gradient
            output.pooler_output.register_hook(start)

    hooks = [tower.register_forward_pre_hook(start), tower.register_forward_hook(through)]
    # And it ends where its first layer does: pixels have no gradient.
    first = next(tower.parameters())
    if first.requires_grad:
        hooks.append(first.register_hook(stop))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def best(work: Callable[[], None], tower: Any, repeat: int) -> tuple[float, float]:
    """(seconds of the fastest of some repetitions, those of them that the tower took)."""
    found: list[tuple[float, float]] = []
    for _ in range(repeat):
        spent: list[float] = []
        with timed(tower, spent):
            start = time.process_time()
            work()
            found.append((time.process_time() - start, sum(spent)))
    return min(found)


def measure(size: tuple[int, int], asked: argparse.Namespace, frozen: bool) -> list[list[str]]:
    """Lines of the table for images of one size."""
    with tempfile.TemporaryDirectory() as place:
        cfg = configured(Path(place), asked.rows, size)
        tokenizer = load_tokenizer(NAME)
        assembly = Assembly(cfg)
        images = assembly.images
        assert images is not None
        start = time.process_time()
        options = assembly.row_options(held_out=False)
        data = ConversationDataset.load(cfg.data.train_files[0], tokenizer, options)
        read = time.process_time() - start
        units = data.in_order()
        batch = to_supervised_batch(units, 0, images=images)
        model = load_policy(NAME)
        if frozen:
            freeze(model, "vision+projector")
        tower = model.base_model.visual
        trainer = LocalTrainer(model, TrainerOptions(lr=0.0))

        def step() -> None:
            trainer.forward_backward(batch, loss_fn, frozenset({"logprobs"}))
            trainer.optim_step()

        path = Path(place) / "prompts.jsonl"
        shown = [{"prompt": "what is it?", "images": [f"{n}.png"]} for n in range(asked.rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in shown))
        prompts = PromptDataset.load(str(path), tokenizer, options)
        sampling = Sampling(max_tokens=asked.tokens)
        draws = list(enumerate(prompts.in_order()))
        requests = make_requests(draws, samples=SAMPLES, sampling=sampling, run_seed=0)
        sampler = assembly.local_sampler(model)

        def sample() -> None:
            generate(sampler, requests, deadline_s=600)

        of_image = images.features(units[0].images[0])
        about = [f"{size[0]} x {size[1]}", str(of_image.patches), str(of_image.tokens)]
        about.append("frozen" if frozen else "trained")
        kinds = [("step", *best(step, tower, asked.repeat))]
        kinds.append(("sampling", *best(sample, tower, asked.repeat)))
        lines = [[*about, "reading", f"{asked.rows / read:.0f}", ""]] if not frozen else []
        for kind, seconds, inside in kinds:
            rate = f"{asked.rows / seconds:.0f}"
            lines.append([*about, kind, rate, f"{inside / seconds:.0%}"])
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sizes", nargs="+", default=["32x16", "64x64"])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="the figures as JSON, not as a table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    head = ["image", "patches", "tokens", "tower", "what", "images/s", "share of the tower"]
    lines: list[list[str]] = []
    for size in asked.sizes:
        width, _, height = size.partition("x")
        for frozen in (False, True):
            lines += measure((int(width), int(height)), asked, frozen)
    if asked.json:
        figures = [dict(zip(head, line, strict=True)) for line in lines]
        sys.stdout.write(json.dumps({"figures": figures}, indent=1) + "\n")
        return
    for line in (head, ["---"] * len(head), *lines):
        sys.stdout.write(f"| {' | '.join(line)} |\n")


if __name__ == "__main__":
    main()
