"""Data files on the hub, without a network: a cache as huggingface_hub lays it out, and a local
server as the hub.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _detect_agent

from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.errors import ConfigError, DataError, RunDirectoryError, UnreachableError
from oxrl.modelfiles.hub import identity, locate
from oxrl.modelfiles.hub_status import ANSWER_S, answer_seconds, check_on_hub
from oxrl.models.load import load_tokenizer
from oxrl.plan.plan import plan_text
from support.small_runs import final_files, metric_lines, preference_config, rl_config, sft_config

OLD, NEW = "0123456789abcdef0123456789abcdef01234567", "f" * 40
NAME = "hf://datasets/me/sums/data/train.jsonl"


def rows(offset: int) -> str:
    return "".join(
        json.dumps({"prompt": f"{i}+{offset}=", "completion": str(i + offset)}) + "\n"
        for i in range(12)
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cached dataset me/sums, whose branch main is at OLD."""
    folder = tmp_path / "home" / "hub" / "datasets--me--sums"
    for commit, offset in ((OLD, 1), (NEW, 2)):
        (folder / "snapshots" / commit / "data").mkdir(parents=True)
        (folder / "snapshots" / commit / "data" / "train.jsonl").write_text(rows(offset))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder.parent))
    return folder


def program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_name_is_a_file_of_a_commit(cache: Path) -> None:
    for name in (
        NAME,
        "hf://datasets/me/sums@main/data/train.jsonl",
        f"hf://datasets/me/sums@{OLD}/data/train.jsonl",
    ):
        path = locate(name)
        assert identity(name, path) == OLD and path.read_text() == rows(1)
        assert locate(name, fetch=False) == path
    path = locate(NAME, NEW)
    assert identity(NAME, path) == NEW and path.read_text() == rows(2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf://me/sums/train.jsonl", "is written hf://datasets/<owner>/<name>"),
        ("hf://datasets/me", "is written hf://datasets/<owner>/<name>"),
        ("hf://datasets/me/sums", "is written hf://datasets/<owner>/<name>"),
        ("hf://datasets/me/sums/data/train.csv", "is written hf://datasets/<owner>/<name>"),
        ("hf://datasets/me/su ms/a.jsonl", "HFValidationError: Repo id must use alphanumeric"),
    ],
)
def test_what_cannot_be_had_is_refused_before_a_run(
    tmp_path: Path, cache: Path, name: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        locate(name, fetch=False)
    sft_config(tmp_path, "run")
    with pytest.raises(ConfigError, match=r"data\.train = ") as raised:
        load_config(tmp_path / "run.yaml", [f"data.train={name}"])
    assert "1 problem" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf://datasets/me/sums/test.jsonl", "hf download --repo-type dataset me/sums test.jsonl$"),
        (
            "hf://datasets/me/sums@dev/a.jsonl",
            "hf download --repo-type dataset me/sums a.jsonl --revision dev",
        ),
    ],
)
def test_what_cannot_be_reached_is_unknown_to_a_plan_and_ends_a_run(
    tmp_path: Path, cache: Path, name: str, said: str
) -> None:
    with pytest.raises(UnreachableError, match=said):
        locate(name, fetch=False)
    sft_config(tmp_path, "run")
    cfg = load_config(tmp_path / "run.yaml", [f"data.train={name}"])
    assert f"{name}: unknown rows" in plan_text(cfg)
    with pytest.raises(UnreachableError, match=said):
        run(cfg)
    assert not cfg.run.directory.exists()


@pytest.mark.filterwarnings("ignore:data.eval is trained on")
def test_a_resumed_run_reads_the_commit_it_began_with(tmp_path: Path, cache: Path) -> None:
    data = {"train": NAME, "eval": NAME}
    steps = {"steps": 3, "checkpoint_every": 1}
    whole = sft_config(tmp_path, "whole", data=data, run=steps)
    run(whole)
    assert json.loads((tmp_path / "whole" / "data.json").read_text()) == {NAME: OLD}
    run(sft_config(tmp_path, "part", ["run.steps=2"], data=data, run=steps))
    (cache / "refs" / "main").write_text(NEW)
    (tmp_path / "part" / "result.json").unlink()
    run(sft_config(tmp_path, "part", data=data, run=steps), resume=True)
    assert final_files(tmp_path / "part") == final_files(whole.run.directory)
    moved = sft_config(tmp_path, "moved", data=data, run=steps)
    run(moved)
    assert metric_lines(moved.run.directory) != metric_lines(whole.run.directory)
    with pytest.raises(DataError, match="two of .* are one file"):
        both = {NAME: 0.5, f"hf://datasets/me/sums@{NEW}/data/train.jsonl": 0.5}
        run(sft_config(tmp_path, "both", data={"train": both}))


def test_a_local_file_that_changed_is_refused_until_it_is_accepted(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "run", ["run.steps=1"])
    run(cfg)
    longer = rl_config(tmp_path, "run", ["run.steps=2"])
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "9+9=", "answer": "18"}) + "\n")
    said = r"has changed since it started.*data\.train: .*prompts\.jsonl sha256 .*, sha256 .* now"
    with pytest.raises(RunDirectoryError, match=f"(?s){said}.*--accept-changes=data.train"):
        run(longer, resume=True)
    run(longer, resume=True, accept=["data.train"])
    assert len(metric_lines(cfg.run.directory)) == 2


def test_the_command_line_checks_and_plans_without_torch(tmp_path: Path, cache: Path) -> None:
    assert "12 rows" in plan_text(sft_config(tmp_path, "run", data={"train": NAME}))
    text = f"""
import sys
from typer.testing import CliRunner
from oxrl.cli import app
from oxrl.plan import preflight_process
preflight_process.examine_apart = lambda cfg: []  # as if the process that imports torch said nothing
found = CliRunner().invoke(app, ["plan", {str(tmp_path / "run.yaml")!r}])
print(found.output, "torch" in sys.modules)
"""
    said = program(text, HF_HOME=str(cache.parent.parent), HF_HUB_OFFLINE="1")
    assert "12 rows" in said.stdout and said.stdout.endswith("False\n"), said


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub that has me/sums with data/train.jsonl."""
    files = ["README.md", "data/train.jsonl", "b.parquet"]
    listing = {"id": "me/sums", "sha": OLD, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": name, "oid": OLD, "size": 9} for name in files]

    class Hub(BaseHTTPRequestHandler):
        def answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in (
                {"Content-Length": str(len(body)), "X-Repo-Commit": OLD} | headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path.startswith("/api/datasets/me/sums"):
                found: Any = tree if "/tree/" in self.path else listing
                self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
            elif self.path.endswith("/data/train.jsonl"):
                self.answer(200, rows(1).encode(), {"ETag": '"abc"'})
            else:
                missing = "EntryNotFound" if "/me/sums/" in self.path else "RepoNotFound"
                self.answer(404, b"", {"X-Error-Code": missing})

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def asked(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks that hub, and has nothing in its cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    # Both are noted when the library is imported.
    monkeypatch.setattr(hf_api.api, "endpoint", hub)
    template = hub + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_detect_agent, "_registry", {})
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "20")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NAME, OLD),
        (
            "hf://datasets/me/sums/train.jsonl",
            "no such file; me/sums has data/train.jsonl, b.parquet",
        ),
        ("hf://datasets/me/sums", "is written hf://datasets/<owner>/<name>"),
        ("hf://datasets/me/sums", "; me/sums has data/train.jsonl, b.parquet"),
        ("hf://datasets/you/sums/a.jsonl", "needs `hf auth login`"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_a_hub_that_answers(name: str, said: str) -> None:
    try:
        path = locate(name)
    except DataError as error:
        assert said in str(error)
    else:
        assert identity(name, path) == said and path.read_text() == rows(1)


def test_preference_pairs_may_lie_there_too(tmp_path: Path, cache: Path) -> None:
    cfg = preference_config(tmp_path, "local", ["run.steps=2"])
    target = cache / "snapshots" / OLD / "pairs.jsonl"
    target.write_bytes((tmp_path / "pairs.jsonl").read_bytes())
    run(cfg)
    run(
        preference_config(
            tmp_path, "hub", ["run.steps=2"], data={"train": "hf://datasets/me/sums/pairs.jsonl"}
        )
    )
    assert metric_lines(tmp_path / "hub") == metric_lines(cfg.run.directory)


@pytest.fixture(params=["silent", "refused"])
def dead_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub that takes a call and never says anything, or that takes none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(8)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        # Noted when the library is imported.
        monkeypatch.setattr(hf_api.api, "endpoint", address)
        monkeypatch.setattr(_detect_agent, "_registry", {})
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield address


@pytest.mark.parametrize("missing", ["model", "data", "tokenizer"])
def test_a_hub_that_does_not_answer_costs_seconds_and_one_message(
    missing: str, dead_hub: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises((DataError, ConfigError)) as raised:
        if missing == "tokenizer":
            load_tokenizer("some/model")
        elif missing == "data":
            locate("hf://datasets/nobody/nothing/rows.jsonl")
        else:
            run(sft_config(tmp_path, "run", model={"name": "some/model"}))
    assert time.monotonic() - began < 5
    told = str(raised.value)
    assert f"the hub {dead_hub} cannot be reached within 2.5 s" in told
    assert "HF_HUB_ETAG_TIMEOUT" in told
    assert not constants.HF_HUB_OFFLINE


def test_what_is_in_the_cache_needs_no_hub_that_answers(dead_hub: str, cache: Path) -> None:
    began = time.monotonic()
    assert locate(NAME).read_text() == rows(1)
    assert time.monotonic() - began < 5


def test_a_longer_wait_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer_seconds() == ANSWER_S
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "20")
    assert answer_seconds() == 20


@pytest.mark.usefixtures("asked")
def test_a_hub_that_answers_says_which_model_it_has_not() -> None:
    with pytest.raises(DataError, match="'you/tiny' is no folder here, and the hub has no such"):
        check_on_hub("you/tiny", None)
    with pytest.raises(DataError, match="nor a name on the hub"):
        check_on_hub("you/ti ny", None)
