"""docs/tutorial.md, executed as a reader would, and its numbers compared with what comes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.checks_here import planned
from support.command_line import oxrl
from support.figures import Learned

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
# How far a reward may be from the page's, by step: rounding differs between processors.
TOLERANCES = {1: 0.03, 10: 0.3, 20: 0.05}


class Block(NamedTuple):
    """A piece of the page that a reader uses."""

    section: int
    kind: str  # "python", "yaml", "shell" or "output"
    text: str
    saved_as: str


def blocks() -> Iterator[Block]:
    """Fenced blocks, and indented lines, which are commands or what commands print."""
    for number, section in enumerate(re.split(r"(?m)^## ", PAGE)):
        for match in re.finditer(
            r"(?ms)^```(\w+)\n(.*?)^```$|((?:^    [^\n]*\n|^\n(?=    ))+)", section
        ):
            before = section[: match.start()].rstrip().split("\n\n")[-1]
            named = re.findall(r"[Ss]ave this as `([^`]+)`", before)
            if match[1]:
                yield Block(number, match[1], match[2], named[-1] if named else "")
                continue
            lines = [line[4:] for line in match[3].strip("\n").splitlines()]
            printed = [at for at, line in enumerate(lines) if line.startswith(("step ", "error:"))]
            typed = "\n".join(lines[: printed[0]] if printed else lines).strip()
            if typed:
                yield Block(number, "shell", typed, "")
            if printed:
                yield Block(number, "output", "\n".join(lines[printed[0] :]), "")


def execute(folder: Path, block: Block) -> str:
    """What a reader does with a block; what it prints."""
    if block.kind == "output":
        return ""
    if block.saved_as:
        (folder / block.saved_as).write_text(block.text)
        return ""
    said = ""
    for done in typed(folder, block):
        said += done.stdout + done.stderr
        mistakes = "train.lrr" in block.text
        assert done.returncode == (2 if mistakes else 0), f"{block.text}\n{said}"
    assert "Traceback" not in said
    return said


def typed(folder: Path, block: Block) -> Iterator[subprocess.CompletedProcess[str]]:
    """A program, commands of oxrl one by one, or what needs a shell."""
    lines = block.text.splitlines()
    if block.kind == "python":
        script = folder / "typed.py"
        script.write_text(block.text)
        yield oxrl(folder=folder, script=script)
    elif all(re.match(r"oxrl [^&|>]*$", line) for line in lines):
        for line in lines:
            command, *words = shlex.split(line)[1:]
            if command == "plan":
                yield planned(*words, folder=folder)
                continue
            if command == "train":
                words.append("run.mlflow=false")  # its process takes half as long as the training
            yield oxrl(command, *words, folder=folder, seconds=280)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield subprocess.run(
            ["bash", "-c", block.text],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


def in_sections(*numbers: int) -> list[Block]:
    return [block for block in blocks() if block.section in numbers]


def test_the_page_has_what_is_executed_here() -> None:
    found = [(block.section, block.kind) for block in blocks()]
    assert found.count((3, "output")) == 1
    assert {"python", "yaml", "shell", "output"} == {kind for _, kind in found}
    assert {block.saved_as for block in blocks()} == {"", "reward.py", "digits.yaml"}


def test_a_reader_sees_the_numbers_of_the_page(tmp_path: Path, learned: Learned) -> None:
    """Sections 1 to 4: files, the plan, mistakes, training and what it left."""
    said = {block: execute(tmp_path, block) for block in in_sections(1, 2, 3, 4)}
    shown = "\n".join(said.values())
    for words in (
        "16 prompts x 8 samples = 128 rows",
        "did you mean 'sgrpo'?",
        "ok          reward",
    ):
        assert words in shown
    [printed] = [block.text for block in in_sections(3) if block.kind == "output"]
    promised = {
        int(step): float(reward)
        for step, reward in re.findall(r"step (\d+)/20  reward (\S+)", printed)
    }
    lines = (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()
    rewards = {line["step"]: line["reward/mean"] for line in map(json.loads, lines)}
    assert set(promised) == set(TOLERANCES)
    for step, tolerance in TOLERANCES.items():
        least, most = promised[step] - tolerance, promised[step] + tolerance
        learned(f"reward of step {step}", rewards[step], at_least=least, at_most=most)
    answers = re.findall(r"(?m)^\[(?:stop|length), \d+ tokens\]$", shown)
    assert len(answers) == 3


@pytest.mark.full  # four more runs
def test_the_rest_of_the_page_works_too(tmp_path: Path) -> None:
    """Sections 5 to 7: a kill and a resume that leave the same record, other rows, a data set."""
    said = [execute(tmp_path, block) for block in in_sections(1, 2, 3, 5, 6, 7)]
    # The kill met it in the middle: after a checkpoint, before the end.
    assert re.search("resuming after step (5|10|15) ", "\n".join(said))
    assert (tmp_path / "runs" / "rloo" / "metrics.jsonl").is_file()
    assert (tmp_path / "data" / "sums" / "report.json").is_file()
