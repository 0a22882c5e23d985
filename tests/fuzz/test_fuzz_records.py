"""A run directory damaged in any way has a report, a data frame and a replay, or an error of ours.

Every case is a function of its seed, as in test_fuzz.py.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oxrl
from oxrl.commands.replay import replay
from oxrl.errors import OxrlError
from oxrl.report.page import write_report
from support.damage import VALUES, bytes_changed, fails, file_changed, json_changed
from support.fuzzing import check, chunks

pytestmark = pytest.mark.filterwarnings("ignore")
HOSTILE = (10**400, -(10**30), 1e308, "</script><script>alert(1)</script>", "\x00\x1b]0;x\x07")
# Files that a report reads, and what a run leaves beside them.
LINES = ("metrics.jsonl", "samples.jsonl", "starts.jsonl")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of four samples, with the numbers of every token."""
    place = tmp_path_factory.mktemp("recorded")
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)]
    made: dict[str, Any] = {
        "run": {"name": "r", "dir": place / "run", "steps": 2, "mlflow": False, "threads": 1},
        "model": {"name": "builtin:tiny"},
        "data": {"prompts_per_step": 2},
        "reward": {"name": "exact"},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "train": {"alg_name": "sgrpo"},
    }
    made["run"] |= {"record": "tokens", "checkpoint_every": 1}
    oxrl.train(made, dataset=rows)
    return place / "run"


def line_changed(choose: random.Random, file: Path) -> None:
    """A line of a file of records with a field of another value, cut off, or written twice."""
    lines = file.read_bytes().splitlines(keepends=True)
    if not lines:
        return
    at = choose.randrange(len(lines))
    kind = choose.randrange(6)
    if kind == 0:
        lines[at] = bytes_changed(choose, lines[at])
    elif kind == 1:
        lines[-1] = lines[-1][: choose.randrange(len(lines[-1]))]
    elif kind == 2:
        lines.insert(at, choose.choice((b"[]\n", b"{}\n", b"7\n", b"\n", b"null\n", lines[at])))
    elif kind == 3:
        lines[at] = json_changed(choose, lines[at]) + b"\n"
    elif lines[at].startswith(b'{"') and lines[at].endswith(b"}\n"):
        try:
            values = json.loads(lines[at])
        except ValueError:
            # Earlier damage has hit this line: it has no fields any more, but bytes.
            lines[at] = bytes_changed(choose, lines[at])
        else:
            key = choose.choice(sorted(values))
            values[key] = choose.choice((*HOSTILE, *VALUES))
            if kind == 5 and isinstance(values[key], str | int):
                values = {str(values[key])[:200]: values[key], **values}
            lines[at] = json.dumps(values).encode() + b"\n"
    file.write_bytes(b"".join(lines))


def damaged(choose: random.Random, recorded: Path) -> Path:
    place = recorded.parent / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(recorded, place)
    for _ in range(choose.randrange(1, 3)):
        files = sorted(path for path in place.rglob("*") if path.is_file())
        known = [path for path in files if path.name in LINES]
        if known and choose.random() < 0.5:
            line_changed(choose, choose.choice(known))
        elif files:
            of_run = [path for path in files if path.parent == place] or files
            file_changed(choose, choose.choice(of_run if choose.random() < 0.7 else files))
    return place


def try_report(choose: random.Random, recorded: Path) -> None:
    place = damaged(choose, recorded)
    runs = [recorded, place] if choose.random() < 0.3 else [place]
    page = write_report(runs, recorded.parent / "page.html").read_text(encoding="utf-8")
    inert = re.findall(r'<script type="text/plain" id="[\w-]+">([\w+/=]*)</script>', page)
    # Whatever the record holds: two scripts, which are ours, and data that no browser runs.
    assert page.count("<script") == len(inert) + 2
    for text in inert:
        json.loads(gzip.decompress(base64.b64decode(text)))


def try_frames(choose: random.Random, recorded: Path) -> None:
    found = oxrl.load_run(damaged(choose, recorded))
    looks: tuple[Callable[[], object], ...] = (
        lambda: found.metrics,
        lambda: found.samples,
        lambda: found.config,
        lambda: found.checkpoint,
    )
    for look in looks:
        text = fails(0, lambda _, look=look: look(), 1, 2)
        assert not text, text


def try_replay(choose: random.Random, recorded: Path) -> None:
    replay(damaged(choose, recorded), choose.randrange(3), choose.choice((None, 0, 3)))


def test_a_line_that_earlier_damage_has_hit_can_be_damaged_again(tmp_path: Path) -> None:
    """Which line a seed hits twice depends on how long a run's lines are."""
    file = tmp_path / LINES[0]
    for broken in (b'{"step": 1, }\n', b'{"step\xff": 1}\n'):
        found: set[bytes] = set()
        for seed in range(50):
            file.write_bytes(broken)
            line_changed(random.Random(seed), file)
            found.add(file.read_bytes())
        assert len(found) > 20


@pytest.mark.parametrize("seeds", chunks(150, 50), ids=str)
def test_any_record_has_a_report_or_is_refused(recorded: Path, seeds: range) -> None:
    check(lambda choose: try_report(choose, recorded), seeds, 1, 2)


@pytest.mark.parametrize("seeds", chunks(30, 30), ids=str)
def test_any_record_is_data_or_is_refused(recorded: Path, seeds: range) -> None:
    check(lambda choose: try_frames(choose, recorded), seeds, 1, 2)


@pytest.mark.full
@pytest.mark.parametrize("seeds", chunks(20, 10), ids=str)
def test_any_record_is_replayed_or_refused(recorded: Path, seeds: range) -> None:
    check(lambda choose: try_replay(choose, recorded), seeds, 1, 2)


@pytest.mark.parametrize("step", [-1, 3, 10**30])
@pytest.mark.parametrize("sample", [None, -1, 10**30])
def test_a_step_that_is_not_there_is_said(recorded: Path, step: int, sample: int | None) -> None:
    with pytest.raises(OxrlError, match=r"has no (step|sample)") as refused:
        replay(recorded, step, sample)
    assert refused.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_place_that_may_not_be_read_is_said(recorded: Path) -> None:
    closed = recorded.parent / "closed"
    shutil.copytree(recorded, closed, ignore=shutil.ignore_patterns("checkpoints"))
    closed.chmod(0o700)
    os.seteuid(65534)
    try:
        looks = (lambda: write_report([closed]), lambda: replay(closed, 1))
        for look in (*looks, lambda: oxrl.load_run(closed).metrics):
            with pytest.raises(OxrlError, match="cannot be read|Permission denied") as refused:
                look()
            assert refused.value.exit_code == 2
    finally:
        os.seteuid(0)


PLACES = {
    "a file": lambda place: place.write_text("x"),
    "nothing": lambda place: None,
    "an empty folder": lambda place: place.mkdir(),
    "a folder of checkpoints": lambda place: (place / "checkpoints" / "step_00000001").mkdir(
        parents=True
    ),
}


@pytest.mark.parametrize("what", PLACES)
def test_what_is_no_run_is_said(tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    PLACES[what](place)
    looks = (lambda: write_report([place]), lambda: replay(place, 1))
    for look in (*looks, lambda: oxrl.load_run(place)):
        with pytest.raises(OxrlError, match="no run|not a run|is no ") as refused:
            look()
        assert refused.value.exit_code == 2
