"""Every number that a run writes is explained, and the pages that explain them are well formed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CELL = re.compile(r"(?<!\\)\|")
SHARED = {"run": {"name": "run", "steps": 1, "threads": 1, "mlflow": False, "checkpoint_every": 0}}
MODEL = {"model": {"name": "builtin:tiny"}}
TAUGHT = {"model": {"name": "builtin:tiny", "teachers": {"other": {"name": "builtin:tiny"}}}}
RL = {
    **SHARED,
    **MODEL,
    "data": {"train": "rl.jsonl", "eval": "rl.jsonl", "eval_rows": 2, "prompts_per_step": 2},
    "reward": {"name": "exact"},
    "rollout": {"n_samples": 2, "max_tokens": 4, "eval_samples": 2},
}
OFFLINE = {**SHARED, **MODEL}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "sgrpo": {**RL, "train": {"alg_name": "sgrpo", "kl_coeff": 0.1, "correction": "truncate"}},
    "grpo": {
        **RL,
        "run": SHARED["run"] | {"exact": True},
        "data": RL["data"] | {"eval_rows": 6},
        "train": {
            "features": {
                "chord": {"rows": "sft.jsonl"},
                "entropy-mask": {},
                "held-out-grader": {"data": "rl.jsonl", "grader": "exact", "pattern": "[0-9]"},
            }
        },
    },
    "ahead": {
        **RL,
        "rollout": RL["rollout"] | {"max_staleness": 2, "force_strict_on_policy": False},
        "train": {"alg_name": "cispo"},
    },
    "vapo": {**RL, "train": {"alg_name": "vapo"}},
    "kdrl": {**RL, **TAUGHT},
    "opd_topk": {**RL, **TAUGHT},
    "dapo": {
        **RL,
        "reward": {"name": "reward.py:length"},
        "train": {"alg_name": "dapo", "overlong_buffer": 2},
    },
    "ppo_rlhf": {**RL, "train": {"alg_name": "ppo_rlhf"}},
    "sft": {**OFFLINE, "data": {"train": "sft.jsonl", "eval": "sft.jsonl", "rows_per_step": 2}},
    "dpo": {**OFFLINE, "data": {"train": "pairs.jsonl", "eval": "pairs.jsonl", "rows_per_step": 2}},
    "kto": {**OFFLINE, "data": {"train": "pairs.jsonl", "rows_per_step": 2}},
    "reward_model": {
        **OFFLINE,
        "data": {"train": "pairs.jsonl", "eval": "pairs.jsonl", "rows_per_step": 2},
    },
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    width = 0
    wrong: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("|"):
            width = 0
            continue
        # A bar inside code is written \| there, or stands between backticks.
        cells = len(CELL.findall(re.sub(r"`[^`]*`", "", line)))
        width = width or cells
        if cells != width:
            wrong.append(f"{page.name}:{number}: {line}")
    assert wrong == []


def explained() -> list[re.Pattern[str]]:
    """The keys that docs/metrics.md and docs/preference.md name; what is in <> stands for any."""
    text = "".join((DOCS / name).read_text() for name in ("metrics.md", "preference.md"))
    keys = re.findall(r"`([a-z_]+/[^`\s]+)`", text)
    patterns = [re.sub(r"<[^>]*>", "[^/]+", key.replace(".", "[.]")) for key in keys]
    return [re.compile(re.sub(r"@(?:k|\d+)$", r"@\\d+", pattern)) for pattern in patterns]


@pytest.mark.parametrize("algorithm", RUNS)
def test_every_metric_of_a_run_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": f"{n}+1", "answer": "2", "source": f"s{n % 2}"} for n in range(6)]
    talks = [{"prompt": "1+1", "completion": str(n)} for n in range(4)]
    pairs = [{"prompt": "1+1", "chosen": str(n), "rejected": "9"} for n in range(4)]
    for name, rows in (("rl", prompts), ("sft", talks), ("pairs", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "reward.py").write_text(
        "def length(prompt, completion): return float(sum(map(ord, completion)) % 7)\n"
    )
    values = RUNS[algorithm]
    train = {"alg_name": algorithm, **values.get("train", {})}
    run(Config.model_validate({**values, "train": train}))
    [line] = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    patterns = explained()
    written = [key for key in json.loads(line) if key != "step"]
    unexplained = [key for key in written if not any(p.fullmatch(key) for p in patterns)]
    assert unexplained == []
