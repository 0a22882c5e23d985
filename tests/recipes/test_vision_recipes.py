"""Every recipe of one process with images in its rows, one short run each."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.assembly.assembly import Assembly
from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.data.prompts import PromptDataset
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.models.vision_network import part_of
from oxrl_datasets.prepare import PREPARERS
from support.figures import SEED, Learned
from support.rewards_here import HARMLESS
from support.vision_families import write_family, write_image
from support.vision_runs import config, rl, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "builtin:tiny-vl"
LONG = "def long(prompt, completion):\n    return 1.0\n"
HARMLESS.add(LONG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    write_rows(found)
    pairs: list[dict[str, Any]] = []
    for number in range(6):
        name = write_image(found / f"p{number}.png", 32, 16 + 8 * number, seed=20 + number)
        row = {"prompt": "what?", "chosen": "red", "rejected": "blue", "images": [name]}
        pairs.append(row)
    pairs.append({"prompt": "hm", "chosen": "yes", "rejected": "no"})
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    steps = [
        {
            "prompt": "count",
            "completions": ["1", "b"],
            "labels": [True, False],
            "images": ["p1.png"],
        }
    ] * 4
    (found / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    return found


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]


@pytest.mark.parametrize(
    ("algorithm", "file"),
    [
        ("dpo", "pairs"),
        ("kto", "pairs"),
        ("reward_model", "pairs"),
        ("process_reward_model", "steps"),
    ],
)
def test_given_judgements_of_images_are_learned(folder: Path, algorithm: str, file: str) -> None:
    path = str(folder / f"{file}.jsonl")
    cfg = config(
        folder,
        NAME,
        algorithm,
        data={"train": path, "eval": path, "rows_per_step": 4},
        train={"alg_name": algorithm, "lr": 1e-3},
    )
    run(cfg)
    found = lines(folder, algorithm)
    assert len(found) == 2 and not any(line["update/skipped"] for line in found)
    assert all(line["update/grad_norm"] > 0 for line in found)


@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_other_rows_of_reinforcement_read_images(folder: Path, algorithm: str) -> None:
    cfg = rl(folder, algorithm, algorithm=algorithm)
    run(cfg)
    assert lines(folder, algorithm)[-1]["update/grad_norm"] >= 0


def test_kept_samples_are_imitated_with_their_images(folder: Path) -> None:
    reward = folder / "long.py"
    reward.write_text(LONG)
    cfg = config(
        folder,
        NAME,
        "rft",
        data={"train": str(folder / "prompts.jsonl"), "prompts_per_step": 5, "rows_per_step": 4},
        train={"alg_name": "rft", "lr": 1e-3, "keep_reward": 0.5},
        reward={"name": f"{reward}:long"},
        rollout={"max_tokens": 60, "n_samples": 16},
    )
    run(cfg)
    kept = [json.loads(line) for line in (folder / "rft" / "kept.jsonl").open()]
    assert any(isinstance(row["prompt"][0]["content"], list) for row in kept)
    assert len(lines(folder, "rft")) == 2


def test_adapters_are_put_on_the_language_part_alone(folder: Path) -> None:
    pytest.importorskip("peft")
    model = str(write_family("llava", folder / "llava"))
    cfg = config(folder, model, "lora", lora={"rank": 2, "targets": "q_proj,v_proj"})
    run(cfg)
    last = folder / "lora" / "checkpoints" / "step_00000002"
    before = load_policy(model)
    after = dict(load_policy(str(last)).named_parameters())
    changed = {name for name, p in before.named_parameters() if not torch.equal(p, after[name])}
    parts = part_of(before)
    assert changed and {parts[name] for name in changed} == {"language"}
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)


def test_evaluations_of_supervised_runs_answer_with_images(folder: Path) -> None:
    cfg = config(
        folder,
        NAME,
        "answered",
        run={"steps": 1},
        data={"eval": str(folder / "rows.jsonl")},
        reward={"name": "exact"},
        rollout={"max_tokens": 4},
    )
    run(cfg)
    assert lines(folder, "answered")[-1]["eval/responses"] == 5
    found = run_eval(folder / "answered", samples=1, temperature=0.0)
    assert found["eval/responses"] == 5


def test_drawings_and_questions_are_prepared_alike_for_a_seed(tmp_path: Path) -> None:
    make = PREPARERS["visual-questions"]
    report = make(None, tmp_path / "a", limit=40)
    make(None, tmp_path / "b", limit=40)
    assert report["guess"] == 0.25 and report["colors_known"] == 0.625
    for name in ("sft", "rl", "eval", "eval_other_images", "eval_other_questions"):
        text = (tmp_path / "a" / f"{name}.jsonl").read_bytes()
        assert text == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
    read = {
        name: [json.loads(line) for line in (tmp_path / "a" / f"{name}.jsonl").open()]
        for name in ("eval", "eval_other_images", "eval_other_questions", "rl")
    }
    held_out = {row["images"][0] for row in read["eval"]}
    assert not held_out & {row["images"][0] for row in read["rl"]}
    assert [row["answer"] for row in read["eval"]] == [
        row["answer"] for row in read["eval_other_images"]
    ]
    cfg = config(tmp_path, NAME, data={"train": str(tmp_path / "a" / "sft.jsonl")})
    options = Assembly(cfg).row_options(held_out=False)
    path = tmp_path / "a" / "eval.jsonl"
    [first, *_] = PromptDataset.load(path, load_tokenizer(NAME), options).in_order()
    assert len(first.images) == 1 and first.answer in ("red", "green", "blue", "yellow")


def test_nlvr_is_prepared_from_files_and_from_bytes(
    tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    report = PREPARERS["nlvr"](real_data("nlvr") / "dev_400.jsonl", tmp_path / "a", limit=8)
    assert report["rejected"] == 0
    PREPARERS["nlvr"](real_data("nlvr") / "dev_64.parquet", tmp_path / "b", limit=8)
    for name, file in (("a", "dev_400"), ("b", "dev_64")):
        path = tmp_path / name / f"{file}.jsonl"
        cfg = config(tmp_path, NAME, data={"train": str(path)})
        found = PromptDataset.load(
            path, load_tokenizer(NAME), Assembly(cfg).row_options(held_out=False)
        ).in_order()
        assert len(found) == 8
        assert {prompt.answer for prompt in found} == {"true", "false"}
        assert all(len(prompt.images) == 1 for prompt in found)


@pytest.mark.full  # a minute of processor time: whole learning
@pytest.mark.timeout(1800)
def test_a_tiny_model_learns_to_look_where_it_is_asked_to(tmp_path: Path, learned: Learned) -> None:
    place = Path(__file__).resolve().parent.parent.parent / "experiments" / "visual_questions"
    experiment = runpy.run_path(str(place / "run.py"))
    found = experiment["one_seed"](tmp_path, SEED)
    # Guessing is right in 0.25, colours without the question in 0.625.
    learned("eval", found["eval"], at_least=0.9, floor=0.625)
    learned("gain", found["eval"] - found["sft"], at_least=0.0)
    learned("eval_other_images", found["eval_other_images"], at_most=0.35)
    learned("eval_other_questions", found["eval_other_questions"], at_least=0.5, at_most=0.75)
