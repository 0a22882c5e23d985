"""`oxrl report`: one file, nothing of a run becomes markup, and a real browser shows and filters it."""

from __future__ import annotations

import html
import http.client
import json
import math
import re
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import oxrl
from oxrl.cli import app
from oxrl.commands.train import run
from oxrl.errors import RunDirectoryError
from oxrl.redact import shown
from oxrl.report.live import LiveServer
from oxrl.report.page import write_report
from oxrl.report.samples import PIECE
from oxrl.runs.files import read_records
from oxrl.tables.engines import KEPT_CACHES
from support.browser import needs_browser, opened, pieces
from support.small_runs import preference_config, rl_config, sft_config

EVIL = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)><!--'


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 96 samples with tokens, one of whose samples is hostile."""
    folder = tmp_path_factory.mktemp("recorded")
    cfg = rl_config(
        folder, "run", run={"record": "tokens", "name": f"a<b>{EVIL[:20].replace('/', '')}"}
    )
    run(cfg)
    samples = cfg.run.directory / "samples.jsonl"
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines[5] |= {
        "response": EVIL,
        "prompt": EVIL,
        "status": "error",
        "reason": EVIL,
        "reward": None,
    }
    turn = {
        "text": EVIL,
        "messages": [{"role": EVIL, "content": EVIL}],
        "reward": 0.5,
        "reason": "",
    }
    lines[6] |= {
        "turns": [turn],
        "opening": [{"role": "user", "content": EVIL}],
        "end": "max_turns",
    }
    lines[20] |= {"reward": 0.5}  # of step 2
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return cfg.run.directory


def test_a_page_asks_for_nothing_and_holds_a_run_only_as_packed_data(recorded: Path) -> None:
    page = write_report([recorded]).read_text()
    assert EVIL not in page and "onerror" not in page and "taken" not in page
    assert "default-src 'none'" in page and "unsafe" not in page
    assert not re.findall(r"<(?:link|img|iframe|object|embed)|\ssrc=|@import|url\(", page)
    data = pieces(page)
    (facts,) = data["runs"]["runs"]
    assert facts["count"] == 96 == len(data["index-0"]["step"]) == len(data["samples-0-0"])
    assert data["samples-0-0"][5]["response"] == EVIL
    assert (
        data["metrics-0"]["step"] == [1, 2, 3, 4, 5, 6] and "system/chain" not in data["metrics-0"]
    )
    rows = {name: (value, default) for name, value, default in facts["config"]}
    assert rows["train.lr"][0] == "0.001" and rows["train.lr"][1] is not None
    assert rows["train.weight_decay"][1] is None
    assert {check["state"] for check in facts["health"]} <= {"ok", "warning", "unknown"}
    tokens = (
        data["tokens-0-5"][str(5 * 16)]
        if "80" in data["tokens-0-5"]
        else next(iter(data["tokens-0-5"].values()))
    )
    assert {"advantage", "ratio", "entropy", "version"} <= set(tokens["numbers"])
    assert len(tokens["texts"]) == len(tokens["mask"]) == len(tokens["numbers"]["ratio"])


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward_model"])
def test_every_recipe_has_a_page_and_several_runs_share_one(
    kind: str, recorded: Path, tmp_path: Path
) -> None:
    """Runs without samples have everything else: curves, health, settings."""
    if kind == "sft":
        cfg = sft_config(tmp_path, kind, ["run.steps=2"])
    else:
        cfg = preference_config(tmp_path, kind, ["run.steps=2"], train={"alg_name": kind})
    run(cfg)
    page = write_report([cfg.run.directory, recorded], tmp_path / "both.html").read_text()
    data = pieces(page)
    shown, other = data["runs"]["runs"]
    assert [shown["count"], other["count"]] == [0, 96]
    lines = list(read_records(cfg.run.directory / "metrics.jsonl"))
    wanted = {"sft": "update/nll", "dpo": "preference/accuracy"}.get(kind, "reward_model/accuracy")
    assert wanted in lines[0] and wanted in json.dumps(data)
    assert oxrl.load_run(cfg.run.directory).report() == cfg.run.directory / "report.html"


@needs_browser
def test_a_browser_shows_and_filters_the_samples_without_a_word_on_its_console(
    recorded: Path, tmp_path: Path
) -> None:
    file = write_report([recorded], tmp_path / "report.html")
    lines = [json.loads(line) for line in (recorded / "samples.jsonl").read_text().splitlines()]
    seen, dom = opened(file)
    assert seen["ready"] == "true" and "error" not in seen
    assert (seen["found"], seen["shown"]) == ("96", "25")
    assert "<title>oxRL: a&lt;b&gt;" in dom
    wanted = [line for line in lines if 2 <= line["step"] <= 3 and (line["reward"] or 0) >= 0.1]
    seen, _ = opened(file, fragment="step-from=2&step-to=3&reward-from=0.1")
    assert int(seen["found"]) == len(wanted) > 0
    draw = lines[0]["draw"]
    seen, dom = opened(file, fragment=f"status=error&group=1/{draw}&color=ratio")
    assert seen["found"] == "1" and "error" not in seen
    assert 'id="group" data-count="4"' in dom
    assert EVIL not in dom and "&lt;/script&gt;" in dom
    seen, _ = opened(file, fragment="text=onerror&end=max_turns")
    assert seen["found"] == "1"
    seen, dom = opened(file, fragment="order=oldest&draw-to=0&color=ratio&step-from=0")
    assert 'class="tokens"' in dom and "error" not in seen


@needs_browser
def test_a_browser_draws_the_curves(recorded: Path, tmp_path: Path) -> None:
    file = write_report([recorded], tmp_path / "report.html")
    seen, dom = opened(file, "--window-size=1400,3000", fragment="metric=reward/m&log=true")
    assert int(seen["charts"]) >= 1 and "error" not in seen
    assert 'class="uplot' in dom


@needs_browser
def test_bars_of_a_step_stand_on_each_other(tmp_path: Path) -> None:
    """Shares of lags, of which a step has some, and what was waited for out of the whole step."""
    metrics = {
        "step": [1, 2, 3],
        "time/step_s": [4.0, 2.0, 1.0],
        "time/trainer_wait_s": [1.0, 0.5, 0.0],
        "time/samplers_wait_s": [0.0, 0.5, 3.0],  # of two steps, all in the line of the second
        "data/lag_10_frac": [None, None, 0.25],
        "data/lag_0_frac": [1.0, 0.25, None],
        "data/lag_2_frac": [None, 0.75, 0.75],
    }
    script = (Path(oxrl.__file__).parent / "report" / "report.js").read_text()
    functions, begins, _ = script.rpartition("begin()")
    shown = f"document.documentElement.dataset.stacks = JSON.stringify(stacksOf({{metrics: {json.dumps(metrics)}}}));"
    page = tmp_path / "bars.html"
    page.write_text(f"<!doctype html><html><script>{functions}{shown}</script></html>")
    stacks = json.loads(html.unescape(opened(page)[0]["stacks"]))
    found = {
        stack["name"]: {line["label"]: (line["own"], line["values"]) for line in stack["lines"]}
        for stack in stacks
    }
    assert begins and found == {
        "data/lag_<versions>_frac": {
            "lag 10": ([0, 0, 0.25], [1, 1, 1]),
            "lag 2": ([0, 0.75, 0.75], [1, 1, 0.75]),
            "lag 0": ([1, 0.25, 0], [1, 0.25, 0]),
        },
        "time/trainer_wait_s": {
            "busy": ([3, 1.5, 1], [4, 2, 1]),
            "waits": ([1, 0.5, 0], [1, 0.5, 0]),
        },
        "time/samplers_wait_s": {
            "busy": ([4, 1.5, 0], [4, 2, 3]),
            "waits": ([0, 0.5, 3], [0, 0.5, 3]),
        },
    }
    # The highest is drawn first, so that the others stand before it.
    assert [line["label"] for line in stacks[0]["lines"]] == ["lag 10", "lag 2", "lag 0"]


@pytest.fixture
def lagging(recorded: Path, tmp_path: Path) -> Path:
    """A run with a lag, whose sampler kept its caches."""
    folder = tmp_path / "lagging"
    shutil.copytree(recorded, folder, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    config = (folder / "config.yaml").read_text()
    assert "\nrollout:\n" in config
    (folder / "config.yaml").write_text(
        config.replace("\nrollout:\n", "\nrollout:\n  swap: keep\n")
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    waits = {"data/lag_1_frac": 1.0, "time/trainer_wait_s": 0.1, "time/samplers_wait_s": 0.1}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line | waits) + "\n" for line in lines)
    )
    return folder


def test_a_report_says_that_caches_were_kept(recorded: Path, lagging: Path) -> None:
    page = write_report([recorded, lagging], lagging / "both.html").read_text()
    plain, kept = pieces(page)["runs"]["runs"]
    assert plain["notes"] == []
    assert kept["notes"] == [KEPT_CACHES]
    assert "no proof exists of which weights their log-probabilities are" in KEPT_CACHES


@needs_browser
def test_a_browser_draws_bars_of_a_run_with_a_lag_alone(recorded: Path, lagging: Path) -> None:
    seen, dom = opened(write_report([lagging]))
    assert seen["ready"] == "true" and "error" not in seen
    assert KEPT_CACHES in dom
    for name in ("data/lag_&lt;versions&gt;_frac", "time/trainer_wait_s", "time/samplers_wait_s"):
        box = re.search(
            rf'<figure data-name="{re.escape(name)}".*?</figure>', dom.split('id="phases"')[1]
        )
        assert box is not None and "<canvas" in box[0]
    seen, dom = opened(write_report([recorded], lagging / "plain.html"))
    assert "<figure" not in dom.split('id="phases"')[1] and KEPT_CACHES not in dom


@pytest.mark.full
@needs_browser
def test_a_hundred_thousand_samples_open(recorded: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    shutil.copytree(recorded, big, ignore=shutil.ignore_patterns("checkpoints", "rollouts"))
    line = json.loads((recorded / "samples.jsonl").read_text().splitlines()[0])
    with (big / "samples.jsonl").open("w") as file:
        for place in range(100_000):
            text = f"{place} " * 60
            file.write(
                json.dumps(line | {"step": place // 100, "draw": place // 4, "response": text})
                + "\n"
            )
    started = time.process_time()
    page = write_report([big])
    written_s = time.process_time() - started
    assert page.stat().st_size < 40_000_000
    assert len(pieces(page.read_text())["samples-0-7"]) == PIECE
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seen, _ = opened(page, fragment="step-from=900")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (seen["found"], seen["shown"]) == ("10000", "25")
    opened_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    size = page.stat().st_size / 1e6
    told = f"{size:.1f} MB, {written_s:.1f} s to write, browser {opened_s:.1f} s, of the processor"
    sys.stdout.write(f"{told}\n")


def test_what_is_no_run_or_no_place_is_refused(recorded: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "no" / "x.html", tmp_path):
        refused = CliRunner().invoke(app, ["report", str(recorded), "--out", str(out)])
        assert refused.exit_code == 2, refused.output
    for runs in ([tmp_path], [recorded, tmp_path]):
        with pytest.raises(RunDirectoryError, match="no run directory"):
            write_report(runs, tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


DAMAGE = {
    "no number": ("metrics.jsonl", '{"step": 1, "reward/mean": "much"}', "line 7: reward/mean"),
    "no step": ("metrics.jsonl", '{"reward/mean": 1}', "line 7: step = None"),
    "no object": ("metrics.jsonl", "[1, 2]", "not a JSON object"),
    "a reward": ("samples.jsonl", '{"reward": "much"}', "line 97: no sample"),
    "versions": ("samples.jsonl", '{"versions": "x"}', "line 97: no sample"),
    "a config": ("config.yaml", ": : [", "is no configuration of a run"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_record_is_named_and_ends_in_no_traceback(
    what: str, recorded: Path, tmp_path: Path
) -> None:
    name, line, told = DAMAGE[what]
    damaged = tmp_path / "run"
    shutil.copytree(recorded, damaged, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    with (damaged / name).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RunDirectoryError, match=re.escape(told)):
        write_report([damaged])
    assert not (damaged / "report.html").exists()


def test_numbers_that_are_not_finite_and_texts_that_are_no_utf8_have_a_page(
    recorded: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "run"
    shutil.copytree(recorded, odd, ignore=shutil.ignore_patterns("checkpoints"))
    line = json.loads((recorded / "samples.jsonl").read_text().splitlines()[0])
    with (odd / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/mean": "nan", "update/loss": "-inf"}\n')
    with (odd / "samples.jsonl").open("a") as file:
        file.write(json.dumps(line | {"response": "\x00\x1b[31m\u2028\ud800", "step": 7}) + "\n")
    data = pieces(write_report([odd]).read_text())
    assert data["metrics-0"]["reward/mean"][-1] is None
    assert data["samples-0-0"][-1]["response"] == "\x00\x1b[31m\u2028\ud800"
    found = oxrl.load_run(odd).metrics
    assert found["update/loss"].iloc[-1] == -math.inf


def test_the_live_page_answers_this_machine_alone(recorded: Path) -> None:
    with LiveServer([recorded], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = server.url.removeprefix(f"http://127.0.0.1:{server.server_port}")
        assert len(place) > 20 and shown(server.url) == server.url
        asked = [("", place, 200), ("evil.example", place, 403), ("", "/etc", 403)]
        asked += [("", "/", 403), ("", place[:-1], 403), ("", f"{place}/x", 403)]
        for host, path, status in asked:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", path, headers={"Host": host} if host else {})
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            assert answer.status == status
            if status == 200:
                assert pieces(body)["runs"]["live"] is True
        server.shutdown()
