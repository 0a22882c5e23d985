"""What an acting policy costs: environment steps and images per second, and the tower's share.

    OMP_NUM_THREADS=1 python benchmarks/action.py [--simulators] [--json]

Every figure is per second of processor time (of this process, and of those that it starts where
they do the work), the best of three. One thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from oxrl.data.rows import Json
from oxrl.environments.pool import EnvironmentPool
from oxrl.modelfiles.builtin_vision import TINY_VLA, vision_policy, vision_tokenizer
from oxrl.models.image_features import ImageReader
from oxrl.models.network import CausalNetwork, unpadded
from oxrl.models.vision_network import read_with_images
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt, Ragged, TokenBatch
from oxrl.usercode.environment_answers import as_step
from oxrl_robots.raster_world import LAYOUTS, RasterEnvironment, RasterWorld
from oxrl_robots.simulator import SimulatorEnvironment

PROMPT = Prompt(uid="p", messages=(), token_ids=())
SIMULATORS: dict[str, Json] = {
    "MiniGrid-Empty-Random-5x5, 40 x 40": {
        "id": "minigrid:MiniGrid-Empty-Random-5x5-v0",
        "settings": {"tile_size": 8, "highlight": False},
    },
    "MuJoCo Reacher, 64 x 64": {"id": "Reacher-v5", "settings": {"width": 64, "height": 64}},
}


def used() -> float:
    """Processor seconds of this process, and of those that it has ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in found)


def rate(work: Callable[[], int]) -> float:
    """Best of three: what `work` counts, per second of processor time."""
    best = 0.0
    for _ in range(3):
        began = used()
        count = work()
        best = max(best, count / max(used() - began, 1e-9))
    return best


def bare_steps() -> int:
    world = RasterWorld(LAYOUTS["train"][0])
    for _ in range(10_000):
        if world.move(1.0, 0.0) is not None:
            world.place = (2.0, 2.0)
        world.frame()
    return 10_000


def steps_as_text() -> int:
    """Steps whose images are PNG in base64, as they leave an environment's process."""
    made = RasterEnvironment()
    for count in range(1000):
        if count % 2 == 0:
            made.reset(PROMPT, count)
        as_step(made.act([made.expert()]))
    return 1000


def steps_of_processes() -> int:
    """Steps of an environment in a process of its own, its start included."""
    pool = EnvironmentPool("raster-world", options={}, timeout_s=60, memory_mb=0)
    process = pool.open(Patience())
    for seed in range(250):
        process.reset(PROMPT, seed, Patience())
        for _ in range(2):
            process.step("up", Patience(), actions=["up"])
    process.end()
    pool.close()
    return 500


def simulator_steps(options: dict[str, Any]) -> int:
    made = SimulatorEnvironment(**options)
    made.reset(PROMPT, 0)
    action: Any = "left" if "MiniGrid" in options["id"] else [0.1, -0.1]
    for _ in range(40):
        made.act([action])
    made.close()
    return 40


# What was measured: (what, value, unit).
FOUND: list[tuple[str, float, str]] = []


def say(what: str, value: float, unit: str) -> None:
    FOUND.append((what, value, unit))
    # A long run shows how far it is; its results are one piece of text.
    sys.stderr.write(f"{what}: {value:,.0f} {unit}\n")


def network_shares() -> None:
    reader = ImageReader(TINY_VLA, vision_tokenizer())
    frame = Image.fromarray(RasterWorld(LAYOUTS["train"][0]).frame())

    def read() -> int:
        for _ in range(200):
            reader.features(frame)
        return 200

    say("images through the image processor, 40 x 40", rate(read), "images/s")
    rows = 64
    found = reader.features(frame)
    ids = vision_tokenizer().encode(f"<|user|>{found.text}red<|end|><|assistant|>")
    tokens = torch.tensor([ids] * rows)
    offsets = {name: torch.arange(rows + 1) * len(t) for name, t in found.tensors.items()}
    extras = {
        name: Ragged(values=torch.cat([t] * rows), row_offsets=offsets[name])
        for name, t in found.tensors.items()
    }
    plain = unpadded(tokens)
    batch = TokenBatch(
        tokens=tokens,
        attention_mask=plain.attention_mask,
        response_mask=plain.response_mask,
        extras=extras,
    )
    model = vision_policy(TINY_VLA, 0)
    decoder = CausalNetwork(model).decoder
    pixels = extras["pixel_values"].values
    grids = extras["image_grid_thw"].values

    def whole() -> int:
        read_with_images(decoder, batch, use_cache=False).last_hidden_state.sum().backward()
        return rows

    def tower() -> int:
        decoder.visual(pixels, grid_thw=grids).pooler_output.sum().backward()
        return rows

    all_of_it = rate(whole)
    of_tower = rate(tower)
    say(f"rows forward and backward, {TINY_VLA}", all_of_it, "rows/s")
    say("of that the vision tower", 100 * all_of_it / of_tower, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulators", action="store_true", help="MiniGrid and MuJoCo as well")
    parser.add_argument("--json", action="store_true", help="the figures as JSON, not as a table")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    say("raster world, step and frame", rate(bare_steps), "steps/s")
    say("the same, frames as PNG in base64", rate(steps_as_text), "steps/s")
    say("the same, in a process of its own", rate(steps_of_processes), "steps/s")
    if chosen.simulators:
        for name, options in SIMULATORS.items():

            def work(options: dict[str, Any] = options) -> int:
                return simulator_steps(options)

            say(name, rate(work), "steps/s")
    network_shares()
    wall_s = time.monotonic() - began
    if chosen.json:
        names = ("what", "value", "unit")
        figures = [dict(zip(names, found, strict=True)) for found in FOUND]
        sys.stdout.write(json.dumps({"figures": figures, "wall_s": wall_s}, indent=1) + "\n")
        return
    sys.stdout.write("| what | per second of processor time |\n|---|---|\n")
    for what, value, unit in FOUND:
        sys.stdout.write(f"| {what} | {value:,.0f} {unit} |\n")
    sys.stdout.write(f"wall {wall_s:.0f} s\n")


if __name__ == "__main__":
    main()
