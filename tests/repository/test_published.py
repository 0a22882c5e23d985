"""What is published is generated: benchmarks from their JSON, experiments by scripts that go through
every stage.
"""

from __future__ import annotations

import json
import os
import runpy
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oxrl_stats import medians

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))
GPU: dict[str, Any] = runpy.run_path(str(ROOT / "experiments" / "gpu" / "run.py"))
NODE: dict[str, Any] = runpy.run_path(str(ROOT / "experiments" / "gsm8k_scale" / "node.py"))


def script(*words: str, code: int = 0) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_the_page_of_benchmarks_is_what_its_json_says() -> None:
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == BENCHMARKS["page"](), "run `make docs`"


def test_every_figure_has_a_cell_and_every_result_a_benchmark() -> None:
    suite = BENCHMARKS["suite"]()
    for benchmark in suite.values():
        assert (ROOT / benchmark.command.split()[1]).is_file(), benchmark.command
    for path in BENCHMARKS["RESULTS"].glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        benchmark = suite[path.stem]
        # How often it was repeated may have changed since; the page tells what was run then.
        assert found["command"].split()[:2] == benchmark.command.split()[:2], path
        assert {figure["case"] for figure in found["figures"]} <= {*benchmark.cases}
        assert len(found["commit"]) == 40 and found["machine"]["cores"] > 0


def test_a_cell_has_a_figure_or_a_reason(tmp_path: Path) -> None:
    empty = BENCHMARKS["page"](tmp_path)
    assert "not measured: needs vLLM" in empty and "not measured: it is the first row" in empty
    overhead = {
        "date": "2030-01-02",
        "commit": "0123456789abcdef",
        "changed_files": 0,
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "memory_gb": 8.0,
            "python": "3.11.7",
            "packages": {"torch": "2.13.0"},
        },
        "load_before": 0.1,
        "load_after": 9.5,
        "command": "python benchmarks/rl_step.py",
        "seconds": 12.5,
        "figures": [{"case": "overhead equal", "oxrl_cpu_s": 0.5, "ratio": [1234.5, 1000, 2000]}],
    }
    (tmp_path / "overhead.json").write_text(json.dumps(overhead))
    lines = BENCHMARKS["page"](tmp_path).splitlines()
    reason = "not measured: not run yet"
    row = f"| 64 tokens each | 0.5 |{f' {reason} |' * 4} 1,234 [1,000, 2,000] |"
    assert row in lines
    assert f"| lengths lognormal, median 32, at most 256 |{f' {reason} |' * 6}" in lines
    told = "2030-01-02, commit `0123456789ab`; a processor, 2 cores, 8.0 GB, load 0.1 before"
    assert any(line.startswith(told) for line in lines)


def test_a_figure_is_held_to_its_target(tmp_path: Path) -> None:
    head = "| full logits of 8,192 tokens over memory of the head, vocabulary 151,936 | >= 16 |"
    assert f"{head} not measured | not run yet |" in BENCHMARKS["page"](tmp_path).splitlines()
    figure = {"case": "8192 tokens", "times_less": 42.7, "of_first_row": 1.0}
    (tmp_path / "head_memory.json").write_text(json.dumps({"figures": [figure]}))
    figure = {"case": "equal", "cpu_ratio": [1.6, 1.4, 1.7]}
    (tmp_path / "rl_step.json").write_text(json.dumps({"figures": [figure]}))
    told = [*BENCHMARKS["aims"].lines(tmp_path)]
    assert f"{head} 42.7 | yes |" in told
    # The lower end of the interval is below what is wanted.
    wanted = "| RL step against TRL: equal lengths | >= 1.5 (lower end) | 1.6 [1.4, 1.7] | no"
    assert any(line.startswith(wanted) for line in told)
    suite = BENCHMARKS["suite"]()
    for target in BENCHMARKS["aims"].ROWS:
        assert target.case in suite[target.benchmark].cases, target
        assert target.column in suite[target.benchmark].columns, target


def test_figures_are_medians_with_intervals() -> None:
    assert medians.median([3.0, 1.0, 2.0, 100.0, 2.5])[0] == 2.5
    assert medians.median([1.0] * 9 + [50.0]) == [1.0, 1.0, 1.0]
    assert medians.median([2.0]) == [2.0, 2.0, 2.0]
    # Of two turns the median is in the middle, and a draw has one of them twice, or both.
    assert medians.median([1.0, 2.0]) == [1.5, 1.0, 2.0]
    assert medians.ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])[0] == 2.0
    # 11 by 10, where the median of both ratios would be 2.6.
    assert medians.ratio_of_sums([10.0, 1.0], [2.0, 8.0]) == [1.1, 0.125, 5.0]
    with pytest.raises(ValueError, match="shorter"):
        medians.ratio([1.0, 2.0], [1.0])


def test_a_benchmark_that_fails_leaves_the_figures_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = runpy.run_path(str(ROOT / "benchmarks" / "record.py"))
    program = tmp_path / "program.py"
    figure = '{"case": "equal", "rate": 2}'
    program.write_text(f"print('a remark')\nprint('{figure}')\nraise SystemExit(3)\n")
    path = tmp_path / "results" / "speed.json"
    with pytest.raises(subprocess.CalledProcessError):
        record["measure"]("speed", f"python {program}", path)
    found = json.loads(path.read_text())
    assert found["figures"] == [json.loads(figure)] and found["output"] == ["a remark"]
    assert found["seconds"] >= 0 and found["load_after"] >= 0


def found_on_a_gpu() -> dict[str, Any]:
    """Results as of a real run."""
    line = {"rollout/tokens": 40_000, "time/step_s": 20.0, "time/update_s": 5.0}
    line |= {"throughput/tokens_per_s": 2500.0, "throughput/mfu": 0.0123}
    speed = GPU["speed"]([line] * 5, 500_000_000, GPU["peak_of"]("NVIDIA H100 80GB HBM3"))
    learning = {
        "accuracy_before": 0.25,
        "accuracy_after": 0.5,
        "answers": 256.0,
        "training_s": 700.0,
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpu_memory_mb": 30_000,
        "process_memory_mb": 4_000,
        "torch": "2.13.0",
        "steps": 5,
        "reward_by_step": [0.25, 0.5],
        **speed,
    }
    return {
        "dry_run": False,
        "date": "2030-01-02",
        "commit": "0123456789abcdef",
        "seconds": 1200.0,
        "model": GPU["MODEL"],
        "identity": {"steps": 6, "files": 12, "different": []},
        "learning": learning,
    }


def test_the_gpu_experiments_page_says_what_was_found() -> None:
    page = GPU["page"](found_on_a_gpu())
    assert "Run on 2030-01-02 on one NVIDIA H100 80GB HBM3, commit `0123456789ab`" in page
    # 8 x 5e8 parameters x 40,000 tokens in 20 s of 989e12; 6 x of it in the 5 s of the update.
    assert "0.8% of the step, 2.4% of the update" in page
    assert "| MFU by what the machine does at best | 1.2% of the step |" in page
    assert "| 2,500, 2,000 |" in page and "every byte equal (12 files)" in page
    assert "0.250, 0.500, each of 256 answers" in page


def test_bytes_that_differ_are_told_beside_those_of_two_whole_runs() -> None:
    told = GPU["told_of_identity"]
    same = {"different": ["model.safetensors"], "whole_runs_differ_in": []}
    assert told(same) == "different: model.safetensors; two runs that nobody killed are equal"
    same["whole_runs_differ_in"] = ["model.safetensors"]
    assert "but so are two runs that nobody killed" in told(same)
    assert GPU["differences"]({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["a", "b", "c"]


def test_parameters_are_counted_in_the_heads_of_weight_files(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    head = json.dumps({"w": tensor, "__metadata__": {"format": "pt"}}).encode()
    for name in ("model-00001-of-00002", "model-00002-of-00002", "optimizer"):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(48))
    assert GPU["parameters_of"](tmp_path) == 24


def test_a_dry_run_leaves_the_published_page_alone() -> None:
    said = script("experiments/gpu/run.py", "--dry-run", code=2)
    assert "--dry-run needs --out" in said


@pytest.mark.full
def test_the_gpu_experiment_goes_through_every_stage_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "page"
    given = ["--dry-run", "--work", str(tmp_path / "work"), "--out", str(out)]
    said = script("experiments/gpu/run.py", *given)
    results = json.loads((out / "results.json").read_text())
    assert results["identity"]["different"] == [] and results["identity"]["files"] > 8
    learned = results["learning"]
    assert learned["steps"] == 4 and learned["tokens_per_s"] > 0 and learned["answers"] == 8
    assert learned["parameters"] == 148_160 and len(learned["reward_by_step"]) == 4
    assert "every byte equal" in said and "no figure means anything" in said
    assert (out / "README.md").read_text() == said


def test_the_page_of_a_node_has_what_was_planned_beside_what_was_found() -> None:
    found = {"steps": 9, "in_time": True, "parameters": 7 * 10**9, "gpu_peak_bytes": 71e9}
    found |= {"first_load_s": 61.2, "sync_s": 1.52, "sync_bytes": 15.2e9, "driver_bytes": 0.0}
    found |= {"checkpoint_bytes": 107e9, "step_s": 30.0, "tokens_per_s": 1234, "mfu": 0.101}
    plan = {"model": "seven", "ranks": 8, "peak_bytes": 42e9, "checkpoint_bytes": 106.6e9}
    of_run = {"dry_run": False, "date": "2030-01-02", "commit": "0123456789abcdef", "seconds": 1100}
    of_run |= {"gpus": 8, "gpu": "NVIDIA H100 80GB HBM3", "config": "rl_7b_8gpus.yaml"}
    page = NODE["page"]({**of_run, "plan": plan, "measured": found})
    assert "Run on 2030-01-02 on 8 x NVIDIA H100 80GB HBM3, commit `0123456789ab`" in page
    assert "| most memory of a GPU, GB | 42 | 71 |" in page
    assert "| a checkpoint, GB | 106.6 | 107 |" in page
    assert "| of it through the driver, GB |  | 0 |" in page
    assert "| MFU by the data sheet, of the step |  | 10.1% |" in page
    assert "| of it update, s |  | none |" in page


def test_the_published_page_of_a_node_says_whether_it_was_run() -> None:
    folder = ROOT / "experiments" / "gsm8k_scale"
    page = (folder / "NODE.md").read_text()
    assert ("**Not run**" in page) != (folder / "node.json").exists()
    said = script("experiments/gsm8k_scale/node.py", "--dry-run", code=2)
    assert "--dry-run needs --out" in said


@pytest.mark.full
def test_a_node_is_measured_through_both_stages_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "page"
    given = ["--dry-run", "--work", str(tmp_path / "work"), "--out", str(out)]
    said = script("experiments/gsm8k_scale/node.py", *given)
    found = json.loads((out / "node.json").read_text())
    assert found["measured"]["steps"] == 4 and found["measured"]["in_time"]
    assert found["measured"]["first_load_s"] > 0 and found["measured"]["resumed_s"] > 0
    written = found["measured"]["checkpoint_bytes"]
    assert found["plan"]["checkpoint_bytes"] == pytest.approx(written, rel=0.02)
    assert found["measured"]["save_s"] > 0 and found["measured"]["update_s"] > 0
    assert (out / "NODE.md").read_text() == said and "no figure means anything" in said


@pytest.mark.parametrize("prompts", [4, 16])
@pytest.mark.parametrize("name", ["equal", "heavy long"])
def test_a_step_that_is_measured_has_as_many_responses_as_its_prompts_ask(
    name: str, prompts: int
) -> None:
    problem = runpy.run_path(str(ROOT / "benchmarks" / "problem.py"))
    chosen = problem["setting"](name, prompts)
    assert len(chosen.lengths) == chosen.prompts * chosen.samples == prompts * 8
    assert max(chosen.lengths) <= chosen.cap and chosen.force_stop == (name != "equal")
