"""Images in what is asked of models and of runs beside training: generate, report, replay; and runs
that are killed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import oxrl
from oxrl.cli import app
from oxrl.commands.evaluate import run_generate
from oxrl.commands.replay import compare_samples, compare_update, go_through
from oxrl.commands.train import run
from oxrl.config.schema import Config
from oxrl.errors import ConfigError, DataError
from oxrl.report.page import write_report
from oxrl.types import Sampling
from support.browser import needs_browser, opened, pieces
from support.killed_runs import killed_until_done, uninterrupted
from support.small_runs import final_files, metric_lines
from support.vision_runs import config, rl, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "builtin:tiny-vl"
FEW = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    write_rows(found)
    return found


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Path:
    cfg = rl(folder, "recorded", run={"record": "tokens"})
    run(cfg)
    return cfg.run.directory


def test_a_question_is_answered_by_the_image_that_it_shows(folder: Path) -> None:
    images = [str(folder / f"{number}.png") for number in (1, 3)]

    def answer(*shown: str, prompt: str = "what is it?") -> str:
        [record] = run_generate(NAME, [prompt], sampling=FEW, images=shown)
        return str(record["response"])

    first = answer(images[0])
    assert first == answer(images[0])
    assert first != answer(images[1])
    between = "<image> or <image>?"
    assert answer(*images, prompt=between) != answer(*reversed(images), prompt=between)
    with pytest.raises(DataError, match=r"--prompt: .*more images are shown than the 1"):
        answer(images[0], prompt=between)
    with pytest.raises(DataError, match="no file"):
        answer(str(folder / "gone.png"))
    with pytest.raises(ConfigError, match="reads text alone"):
        run_generate("builtin:tiny", ["?"], sampling=FEW, images=images)
    file = folder / "said.jsonl"
    command = ["generate", NAME, "--prompt", "what is it?", "--max-tokens", "12"]
    said = CliRunner().invoke(app, [*command, "--image", images[0], "--out", str(file)])
    assert said.exit_code == 0, said.output
    assert json.loads(file.read_text())["response"] == first


def test_a_report_holds_the_images_of_its_samples(recorded: Path, tmp_path: Path) -> None:
    page = write_report([recorded], tmp_path / "report.html").read_text()
    held = {name: url for name, url in pieces(page).items() if name.startswith("image-")}
    kept = {path.name: path.read_bytes() for path in (recorded / "images").iterdir()}
    assert held.keys() == {f"image-{name}" for name in kept}
    for name, content in kept.items():
        kind, _, data = held[f"image-{name}"].partition(";base64,")
        assert kind == "data:image/png" and base64.b64decode(data) == content


@pytest.mark.full
@needs_browser
def test_a_browser_shows_the_images_of_samples(recorded: Path, tmp_path: Path) -> None:
    file = write_report([recorded], tmp_path / "report.html")
    seen, dom = opened(file)
    assert seen["ready"] == "true" and "error" not in seen
    assert re.search(r'<img class="picture"[^>]*src="data:image/png;base64,', dom)


def test_a_run_with_images_is_replayed(recorded: Path) -> None:
    seen = go_through(recorded, last_step=2, begin=0)
    for step in (1, 2):
        findings = list(compare_samples(recorded, seen, step, tolerance=0.0))
        assert findings and all(found.equal for found in findings), findings
    for step in (1, 2):
        findings = list(compare_update(recorded, seen, step, tolerance=0.0))
        assert findings and all(found.equal for found in findings), findings


def kill_config(folder: Path, recipe: str, name: str) -> Config:
    sections: dict[str, Any] = {"run": {"steps": 10, "checkpoint_every": 3}}
    if recipe == "rl":
        return rl(folder, name, **sections)
    return config(folder, NAME, name, **sections)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["rl", pytest.param("sft", marks=pytest.mark.full)])
def test_a_run_with_images_that_was_killed_equals_the_one_that_was_not(
    folder: Path, recipe: str
) -> None:
    whole = kill_config(folder, recipe, f"{recipe}_whole")
    killed = kill_config(folder, recipe, f"{recipe}_killed")
    uninterrupted(whole)
    hits = killed_until_done(killed, kills=2, seed=int(os.environ.get("OXRL_KILL_SEED", "0")))
    assert len(hits) == 2, hits
    ours, theirs = killed.run.directory, whole.run.directory
    assert metric_lines(ours) == metric_lines(theirs)
    for name in ("samples.jsonl",) if recipe == "rl" else ():
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    left, right = final_files(ours), final_files(theirs)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []
    images = [{p.name: p.read_bytes() for p in (at / "images").iterdir()} for at in (ours, theirs)]
    assert images[0] == images[1] and images[0]


@pytest.mark.full
def test_a_run_of_text_imports_nothing_that_reads_images(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1", "completion": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config(tmp_path, "builtin:tiny", "text", run={"steps": 1})
    program = (
        "import sys\n"
        "from oxrl.config import load_config\n"
        "from oxrl.commands.train import run\n"
        f"run(load_config({str(tmp_path / 'text.yaml')!r}))\n"
        "ours = [n for n in sys.modules if n.startswith('oxrl') and 'image' in n]\n"
        "print('modules', [n for n in ('oxrl.data.image_store', 'oxrl.data.image_files') "
        "if n in sys.modules], ours)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    assert "modules [] []" in done.stdout, done.stdout[-500:]
    assert cfg.run.directory.is_dir() and oxrl.load_run(cfg.run.directory)
