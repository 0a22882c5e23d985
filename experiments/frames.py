"""Put what a policy saw in one episode of a run side by side, as one PNG.

    python experiments/frames.py runs/x/seed0/rl --out experiments/x/frames.png [--step 34] [--at 0]

Of the successful episodes of a step (by default the last one), in the order of samples.jsonl,
number `--at`. A white line lies between images; what was done is said on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from oxrl.data.image_files import FORMATS

GAP = 4  # pixels


def images_in(messages: list[dict[str, Any]]) -> list[str]:
    """Names of the images of some messages."""
    found: list[str] = []
    for message in messages:
        if isinstance(message["content"], list):
            found += [part["image"] for part in message["content"] if part["type"] == "image"]
    return found


def episodes_of(run: Path, step: int | None) -> list[dict[str, Any]]:
    """The successful episodes of a step; None: of the last one."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    wanted = lines[-1]["step"] if step is None else step
    return [line for line in lines if line["step"] == wanted and line["reward"] == 1.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--scale", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    episode = episodes_of(chosen.run, chosen.step)[chosen.at]
    names = images_in(episode["opening"])
    for turn in episode["turns"]:
        names += images_in(turn["messages"])
        sys.stdout.write(turn["text"] + "\n")
    # What is shown after the last turn nobody reads, and no run keeps it.
    files = [chosen.run / "images" / name for name in names]
    there = [file for file in files if file.is_file()]
    frames = [Image.open(file, formats=FORMATS).convert("RGB") for file in there]
    width, height = (chosen.scale * side for side in frames[0].size)
    strip = Image.new("RGB", (len(frames) * (width + GAP) - GAP, height), "white")
    for place, frame in enumerate(frames):
        large = frame.resize((width, height), Image.Resampling.NEAREST)
        strip.paste(large, (place * (width + GAP), 0))
    strip.save(chosen.out, optimize=True)


if __name__ == "__main__":
    main()
