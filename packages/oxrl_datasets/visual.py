"""Questions about small drawings, made from a seed: which colour is the disc or square in a cell?

A drawing is a row of cells, in each a disc or a square of one of four colours, of random size and a
little off centre. "b?" asks for the colour in the second cell. Guessing a colour is right once in
four times; knowing the colours of a drawing of two cells, but not which one is asked for, is right
in 0.625 of all.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple

from oxrl.data.rows import Rows
from oxrl.errors import DataError
from oxrl.seeds import stable_seed
from oxrl_datasets.generated import Made, counts_of

# Exactly four: raster-world lays one at each of its four ends, in layouts that must not change.
COLORS = {
    "red": (230, 40, 40),
    "green": (30, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 40),
}
CELL = 16  # pixels
LETTERS = "abcdefgh"
# File -> the columns that hold the answer; those of eval are for evaluations of either stage.
BOTH = ("answer", "completion")
TOLD = {
    "sft": ("completion",),
    "rl": ("answer",),
    "eval": BOTH,
    "eval_other_images": BOTH,
    "eval_other_questions": BOTH,
}


class Shape(NamedTuple):
    """The shape in one cell: its colour, disc or square, radius, and distance from the centre."""

    color: str
    disc: bool
    radius: int
    right: int
    down: int


Scene = tuple[Shape, ...]
# A drawing, and the cell that is asked for.
Asked = tuple[Scene, int]


@dataclass(frozen=True, kw_only=True)
class VisualQuestions:
    """Drawings with a question: rows of sft (completion), rl (answer) and eval (both).

    No drawing of eval occurs in sft or rl. Two more files are controls, whose answers stay those of
    eval: eval_other_images has every question with the drawing of another row, and
    eval_other_questions every drawing with the question of another row.

    Args:
        cells: of a drawing, 2 to 8.
        sft_rows, rl_rows, eval_rows: how many of each; the controls have as many as eval.
    """

    cells: int = 2
    sft_rows: int = 4480
    rl_rows: int = 2560
    eval_rows: int = 256

    def make(self, seed: int, limit: int | None) -> Made:
        """Make the rows of all files, at most `limit` of each.

        Args:
            seed: of every random choice.
            limit: at most so many rows in each file; None: as the fields say.

        Returns:
            The rows of eval, rl, sft and both controls; and how often guessing is right.

        Raises:
            DataError: an option out of range.
        """
        if not 2 <= self.cells <= len(LETTERS):
            raise DataError(f"cells={self.cells} must lie in 2..{len(LETTERS)}")
        counts = counts_of(limit, eval=self.eval_rows, rl=self.rl_rows, sft=self.sft_rows)
        held_out: set[Scene] = set()
        asked: dict[str, list[Asked]] = {}
        for split, count in counts.items():
            chance = random.Random(stable_seed("visual questions", split, seed))
            found = asked[split] = []
            while len(found) < count:
                scene = tuple(_shape(chance) for _ in range(self.cells))
                if split == "eval":
                    held_out.add(scene)
                elif scene in held_out:
                    continue
                found.append((scene, chance.randrange(self.cells)))
        files = {split: _rows(split, drawn, drawn, drawn) for split, drawn in asked.items()}
        drawn = asked["eval"]
        turned = [*drawn[1:], drawn[0]]
        files["eval_other_images"] = _rows("eval_other_images", drawn, turned, drawn)
        files["eval_other_questions"] = _rows("eval_other_questions", drawn, drawn, turned)
        # One of a drawing's colours, chosen blindly, is the one asked for, or is so by chance.
        known = 1 / self.cells + (1 - 1 / self.cells) / len(COLORS)
        return files, {"guess": 1 / len(COLORS), "colors_known": known}


def draw(scene: Sequence[Shape]) -> bytes:
    """A drawing as a PNG file.

    Args:
        scene: a shape for every cell, from the left.

    Returns:
        CELL pixels high, CELL times the cells wide, in RGB.
    """
    # Imported where it draws: other datasets do without.
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELL * len(scene), CELL), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    for cell, shape in enumerate(scene):
        x = cell * CELL + CELL // 2 + shape.right
        y = CELL // 2 + shape.down
        box = (x - shape.radius, y - shape.radius, x + shape.radius, y + shape.radius)
        fill = pen.ellipse if shape.disc else pen.rectangle
        fill(box, COLORS[shape.color])
    written = BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def _shape(chance: random.Random) -> Shape:
    return Shape(
        color=chance.choice(list(COLORS)),
        disc=chance.random() < 0.5,
        radius=chance.randint(4, 7),
        right=chance.randint(-1, 1),
        down=chance.randint(-1, 1),
    )


def _rows(
    split: str, asked: Sequence[Asked], shown: Sequence[Asked], questions: Sequence[Asked]
) -> Rows:
    """Rows of a file: the drawings of `shown` and the questions of `questions`; the answers are
    those to what was asked.
    """
    rows: Rows = []
    for number, (scene, question) in enumerate(asked):
        coded = base64.b64encode(draw(shown[number][0])).decode()
        rows.append(
            {
                "prompt": f"{LETTERS[questions[number][1]]}?",
                **dict.fromkeys(TOLD[split], scene[question].color),
                "images": [f"data:image/png;base64,{coded}"],
                "uid": f"visual-questions/{split}/{number:06d}",
                "source": "visual-questions",
            }
        )
    return rows
