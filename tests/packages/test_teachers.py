"""Runs that learn from teachers: on ranks, killed, gone through again; rows without an answer."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oxrl.commands.replay import compare_samples, compare_update, go_through
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import DataError, EngineError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.recipes.features.base import Teacher
from oxrl.types import Output, TokenBatch, Want
from oxrl_teachers.features import gap_metrics
from oxrl_teachers.trials import compare_with_itself
from support.feature_ranks import train_alone, train_on_rank
from support.killed_runs import killed_until_done, uninterrupted
from support.rank_processes import run_ranks
from support.samplers import lively
from support.small_runs import check_same, metric_lines, rl_config

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-scale` runs this",
)


def model(folder: Path, seed: int) -> str:
    lively("builtin:tiny", seed=seed).save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    return str(folder)


def config(folder: Path, name: str, algorithm: str = "opd_topk", **sections: Any) -> Config:
    """Two teachers of two sources."""
    folder.mkdir(parents=True, exist_ok=True)
    teachers = {
        "first": {"name": model(folder / "first", 5), "sources": ["sums"]},
        "second": {"name": model(folder / "second", 6)},
    }
    teachers |= sections.pop("teachers", {})
    policy = {"name": model(folder / "policy", 7), "teachers": teachers}
    train = {"alg_name": algorithm, "lr": 1e-2} | sections.pop("train", {})
    return rl_config(folder, name, ["~reward.name"], model=policy, train=train, **sections)


# --- Ranks.
@pytest.mark.parametrize("algorithm", ["opd", "opd_topk"])
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
@pytest.mark.parametrize("student", ["whole", "adapter", "bfloat16 teacher"])
def test_two_ranks_learn_what_one_process_learns(
    student: str, backend: str, algorithm: str, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4}} if student == "adapter" else {}
    train = {"adam_eps": 1e-3}
    folder = tmp_path / "models"
    other = {"second": {"name": model(folder / "second", 6), "dtype": "bfloat16"}}
    teachers = other if student == "bfloat16 teacher" else {}
    one = train_alone(config(folder, "one", algorithm, teachers=teachers, train=train, **sections))
    two_ranks = {"training_gpus": 2, "deadline_s": 60}
    stages = {"deepspeed": {"zero_stage": 3}, "deepspeed_ref": {"zero_stage": 3}}
    further = stages if backend == "deepspeed" else {}
    cfg = config(
        folder,
        "two",
        algorithm,
        teachers=teachers,
        train=train | {"backend": backend},
        run=two_ranks,
        **sections,
        **further,
    )
    run_ranks(2, train_on_rank, cfg, tmp_path / "out")
    two = torch.load(tmp_path / "out")
    assert two.keys() == one.keys()
    before = lively("builtin:tiny", seed=7).state_dict()
    moved = 0.0
    for key, values in one.items():
        torch.testing.assert_close(two[key], values, rtol=1e-3, atol=1e-5)
        if key in before:
            moved = max(moved, float((values - before[key]).abs().max()))
    assert moved > 1e-3 or student == "adapter"


# --- Kills, and what was recorded.
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_with_the_same_bytes(disk_path: Path) -> None:
    long = {"steps": 24, "checkpoint_every": 3, "record": "tokens"}
    whole = config(disk_path / "whole", "run", run=long, train={"minibatches": 2})
    killed = config(disk_path / "killed", "run", run=long, train={"minibatches": 2})
    uninterrupted(whole)
    assert len(killed_until_done(killed, kills=3, seed=4)) == 3
    check_same(whole.run.directory, killed.run.directory)


def test_steps_are_gone_through_again(tmp_path: Path) -> None:
    cfg = config(tmp_path, "run", run={"steps": 4, "checkpoint_every": 2, "record": "tokens"})
    run(cfg)
    home = cfg.run.directory
    seen = go_through(home, last_step=4, begin=0)
    for step in range(1, 5):
        findings = [*compare_update(home, seen, step, tolerance=0.0)]
        findings += compare_samples(home, seen, step, only=3, tolerance=0.0)
        assert len(findings) == 4 and all(found.equal for found in findings), findings
    file = home / "rollouts" / "step_00000001.safetensors"
    tensors = load_file(file)
    assert tensors["teacher_logprobs"][tensors["response_mask"]].max() < 0
    tensors["teacher_logprobs"] += 0.5
    save_file(tensors, file)
    assert not all(found.equal for found in compare_samples(home, seen, 2, tolerance=0.0))


# --- Rows without an answer.
class Answers:
    """A scorer that is told what to say."""

    def __init__(self, silent: tuple[int, ...]) -> None:
        self.silent = silent

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        logprobs = torch.full(inputs.tokens.shape, -2.0)
        logprobs[list(self.silent)] = float("nan")
        if len(want) == 1:
            return Output(logprobs=logprobs)
        every = torch.arange(len(builtin_tokenizer()))
        ids = every.repeat(*inputs.tokens.shape, 1)
        ids[list(self.silent)] = -1
        top = logprobs[..., None].repeat(1, 1, len(every)) - 4
        return Output(logprobs=logprobs, top_ids=ids, top_logprobs=top)


def with_answers(monkeypatch: pytest.MonkeyPatch, silent: tuple[int, ...]) -> None:
    def build(*_: object) -> dict[str, Teacher]:
        return {"only": Teacher(Answers(silent), frozenset())}

    monkeypatch.setattr("oxrl.assembly.teachers.build_teachers", build)


def test_a_row_without_an_answer_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_answers(monkeypatch, (1, 4, 5))
    cfg = config(tmp_path, "run", "opd", run={"steps": 1, "record": "tokens"})
    run(cfg)
    [line] = metric_lines(cfg.run.directory)
    assert line["teacher/left_out"] == 3
    batch = load_file(cfg.run.directory / "rollouts" / "step_00000000.safetensors")
    trained = batch["response_mask"].any(1)
    assert (~trained).nonzero()[:, 0].tolist() == [1, 4, 5]
    assert batch["advantages"].isfinite().all()
    assert line["update/grad_norm"] > 0


@pytest.mark.parametrize("silent", [(), (1, 4, 5), (0, 1, 2, 3, 4, 5, 6), tuple(range(8))])
def test_a_row_without_an_answer_has_no_part_in_the_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: tuple[int, ...]
) -> None:
    """The teacher names all tokens, so all that it names are the policy's too."""
    with_answers(monkeypatch, silent)
    every = {"teacher_candidates": len(builtin_tokenizer())}
    cfg = config(tmp_path, "run", run={"steps": 1}, train=every)
    run(cfg)
    [line] = metric_lines(cfg.run.directory)
    assert line["teacher/left_out"] == len(silent)
    # Eight rows are compared.
    assert line.get("teacher/overlap") == (None if len(silent) == 8 else 1.0)


def test_more_than_half_without_an_answer_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_answers(monkeypatch, tuple(range(9)))
    with pytest.raises(EngineError, match="9 of 16 rows of a step have no answer"):
        run(config(tmp_path, "run", "opd"))


def test_a_source_that_comes_up_late_is_named(tmp_path: Path) -> None:
    cfg = config(tmp_path, "run", teachers={"second": {"name": "builtin:tiny", "sources": ["x"]}})
    rows = [{"prompt": f"{i}+1=", "source": "sums"} for i in range(200)]
    rows[0]["source"] = "late"
    path = Path(cfg.data.train_files[0])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": 60})})
    told = r"a row's source is 'late', which no teacher names; they name sums, x"
    with pytest.raises(DataError, match=told):
        run(long)


class Wide(Answers):
    """Speaks of tokens that the policy has not: one of each row's candidates is one of them."""

    def __init__(self, mass: float) -> None:
        self.mass = mass

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        shape = inputs.tokens.shape
        ids = torch.tensor([7, 261, 9]).expand(*shape, 3)
        top = torch.tensor([0.5, self.mass, 0.25]).log().expand(*shape, 3)
        return Output(logprobs=torch.full(shape, -2.0), top_ids=ids, top_logprobs=top)


@pytest.mark.parametrize("mass", [1e-7, 1e-3])
def test_tokens_beyond_the_vocabulary_are_no_candidates(
    mass: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> dict[str, Teacher]:
        return {"only": Teacher(Wide(mass), frozenset())}

    monkeypatch.setattr("oxrl.assembly.teachers.build_teachers", build)
    train = {"teacher_candidates": 3}
    cfg = config(tmp_path, "run", run={"steps": 1, "record": "tokens"}, train=train)
    if mass > 1e-6:
        with pytest.raises(EngineError, match=r"gives 0\.001 of its probability .* from 261 on"):
            run(cfg)
        return
    run(cfg)
    [line] = metric_lines(cfg.run.directory)
    batch = load_file(cfg.run.directory / "rollouts" / "step_00000000.safetensors")
    policy = lively("builtin:tiny", seed=7)
    with torch.no_grad():
        logits = policy(batch["tokens"], attention_mask=batch["attention_mask"]).logits
    probabilities = logits[:, :-1].softmax(-1)[..., [7, 9]].sum(-1)
    mask = batch["response_mask"][:, 1:]
    assert line["teacher/mass"] == pytest.approx(float(probabilities[mask].mean()), rel=1e-3)


# --- What is measured.
def test_the_gap_is_told_by_fifths_of_responses() -> None:
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 2:12] = True
    mask[1, 1:4] = True
    gap = torch.zeros(2, 14)
    gap[0, 2:12] = torch.arange(10.0)
    gap[1, 1:4] = torch.tensor([20.0, 0.0, 40.0])
    gap[:, 13] = float("nan")
    found = gap_metrics(gap, mask)
    assert found["teacher/gap_mean"] == pytest.approx((45 + 60) / 13)
    assert found["teacher/gap_first"] == pytest.approx((0 + 1 + 20) / 3)
    assert found["teacher/gap_last"] == pytest.approx((8 + 9 + 40) / 3)


@pytest.mark.parametrize("how", ["alone", "twice"])
def test_a_teacher_is_asked_alone_in_a_batch_and_twice(how: str) -> None:
    calls: list[int] = []

    class Odd:
        def forward(self, inputs: TokenBatch, want: Want) -> Output:
            calls.append(len(inputs))
            off = 0.01 * (len(inputs) == 1) if how == "alone" else 0.01 * calls.count(3)
            return Output(logprobs=-inputs.tokens.float() - off)

    told = "alone and in a batch" if how == "alone" else "asked twice|alone and in a batch"
    with pytest.raises(EngineError, match=f"^model.teachers.x says something else .*({told})"):
        compare_with_itself("model.teachers.x", Odd(), range(50), 0, 1e-3)
    compare_with_itself("model.teachers.x", Odd(), range(50), 0, 0.05)
