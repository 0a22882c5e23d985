"""A teacher of which there are texts alone (gad): a discriminator, what it compares and rewards."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.data.chat import ChatEncoder
from oxrl.errors import DataError, OxrlError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.types import (
    Output,
    Prompt,
    RolloutBatch,
    TokenBatch,
)
from oxrl_teachers.discriminator import (
    Discriminator,
    check_texts,
    discriminator_loss,
    pairs_of,
)
from support.feature_ranks import rollout_batch
from support.killed_runs import killed_until_done, uninterrupted
from support.small_runs import check_same, final_files, metric_lines, rl_config

Section = dict[str, Any]


def write_texts(folder: Path, answers: list[str]) -> Path:
    rows = [{"prompt": f"say {i}", "teacher_answer": text} for i, text in enumerate(answers)]
    path = folder / "texts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gad(folder: Path, name: str, *overrides: str, **sections: Section) -> Config:
    texts = write_texts(folder, [f"{i * 7 % 100}" for i in range(24)])
    own: dict[str, Section] = {
        "data": {"train": str(texts)},
        "reward": {"name": ""},
        "train": {"alg_name": "gad", "lr": 1e-3, "discriminator_lr": 1e-3},
    }
    for section, values in sections.items():
        own[section] = own.get(section, {}) | values
    return rl_config(folder, name, overrides, **own)


# --- What is computed.
@pytest.mark.parametrize(
    "scores", [[(2.0, -1.0)], [(0.0, 0.0), (-3.0, 4.0), (0.5, 0.1)], [(1.0, 1.5), (30.0, -30.0)]]
)
def test_a_pair_costs_what_the_lead_of_the_teachers_text_leaves(
    scores: list[tuple[float, float]],
) -> None:
    values = torch.tensor(scores, dtype=torch.float64).flatten().requires_grad_()
    batch = pairs_of([(1,)] * 2 * len(scores), [(2, 3)] * 2 * len(scores), 0)
    loss, metrics = discriminator_loss(Output(bootstrap=values), batch)
    leads = [teacher - own for teacher, own in scores]
    expected = sum(math.log1p(math.exp(-lead)) for lead in leads) / len(leads)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    (slope,) = torch.autograd.grad(loss, values)
    pulls = [-1 / (1 + math.exp(lead)) / len(leads) for lead in leads]
    assert slope[0::2].tolist() == pytest.approx(pulls, rel=1e-6)
    assert slope[1::2].tolist() == pytest.approx([-pull for pull in pulls], rel=1e-6)
    wins = sum(0.5 if lead == 0 else float(lead > 0) for lead in leads)
    assert float(metrics["reward_model/accuracy"]) == pytest.approx(wins / len(leads))


TEXTS = ("seven", "a longer answer", "4 2", "x")


class Judge:
    """Says of a row its second token after the prompt; keeps the pairs that it learns from."""

    def __init__(self) -> None:
        self.learned: list[Any] = []
        self.steps: list[str] = []

    def forward(self, inputs: TokenBatch, want: Any) -> Output:
        assert want == {"values"}
        return Output(values=inputs.tokens.float(), bootstrap=inputs.tokens.sum(1).float() / 100)

    def forward_backward(self, batch: Any, loss: Any, want: Any) -> Output:
        self.learned.append(batch)
        scores = torch.arange(float(len(batch.inputs)))
        return Output(values=batch.inputs.tokens.float(), bootstrap=scores)

    def optim_step(self) -> dict[str, float]:
        self.steps.append("taken")
        return {"update/skipped": 0.0}

    def skip_step(self) -> dict[str, float]:
        self.steps.append("refused")
        return {"update/skipped": 1.0}


def feature_with(judge: Judge, warmup: int = 0) -> tuple[Discriminator, list[Prompt]]:
    """The feature after it saw four samples to four prompts, in the order of TEXTS."""
    tokenizer = builtin_tokenizer()
    encoder = ChatEncoder(tokenizer)
    prompts: list[Prompt] = []
    for text in TEXTS:
        messages = ({"role": "user", "content": f"{len(text)}?"},)
        ids = tuple(encoder.encode_prompt(messages))
        fields = {"teacher_answer": text}
        prompts.append(Prompt(uid="same", messages=messages, token_ids=ids, metadata=fields))
    train: Any = SimpleNamespace(value=lambda number: warmup)
    given: Any = SimpleNamespace(models={"discriminator": judge}, train=train, tokenizer=tokenizer)
    feature = Discriminator(given)
    rollouts: Any = [
        SimpleNamespace(prompt=prompt, completion=SimpleNamespace(token_ids=(50 + place, 60, 1)))
        for place, prompt in enumerate(prompts)
    ]
    feature.on_sampled(rollouts)
    return feature, prompts


def of_places(places: list[int]) -> RolloutBatch:
    batch = rollout_batch(0).select(torch.arange(len(places)))
    return RolloutBatch(**{**vars(batch), "places": torch.tensor(places)})


def test_each_response_is_rewarded_by_what_is_said_of_it_at_its_end() -> None:
    judge = Judge()
    feature, _ = feature_with(judge)
    batch = of_places([2, 0, 3])
    found = feature.on_rollouts(batch)
    sums = [batch.inputs.tokens[row].sum().item() / 100 for row in range(3)]
    assert found.rewards.tolist() == pytest.approx(sums)
    for row in range(3):
        (places,) = batch.inputs.response_mask[row].nonzero(as_tuple=True)
        expected = torch.zeros_like(found.token_rewards[row])
        expected[places[-1]] = found.rewards[row]
        assert torch.equal(found.token_rewards[row], expected)
    told = feature.steer(None, None)  # pyright: ignore
    assert told["discriminator/reward_mean"] == pytest.approx(sum(sums) / 3)


def test_a_response_stands_beside_the_text_for_its_own_prompt() -> None:
    judge = Judge()
    feature, prompts = feature_with(judge)
    batch = of_places([2, 0, 3])
    feature.on_rollouts(batch)
    policy: Any = batch
    metrics = feature.add_gradients(torch.tensor([2, 0]), policy)
    assert metrics is not None and metrics["discriminator/accuracy"] == 0.0
    (pairs,) = judge.learned
    assert pairs.loss_weights.tolist() == [0.5, 0.5]
    tokenizer = builtin_tokenizer()
    for pair, place in enumerate([3, 2]):
        there = pairs.inputs.attention_mask[2 * pair]
        tokens = pairs.inputs.tokens[2 * pair][there].tolist()
        size = len(prompts[place].token_ids)
        assert tokens[:size] == [*prompts[place].token_ids]
        assert tokenizer.decode(tokens[size:-1]) == TEXTS[place]
        assert tokens[-1] == tokenizer.eos_token_id
        assert pairs.inputs.response_mask[2 * pair][there].tolist() == [False] * size + [True] * (
            len(tokens) - size
        )
        there = pairs.inputs.attention_mask[2 * pair + 1]
        own = [*prompts[place].token_ids, 50 + place, 60, 1]
        assert pairs.inputs.tokens[2 * pair + 1][there].tolist() == own
    assert [feature.optim_step(skip=skip)["discriminator/skipped"] for skip in (True, False)] == [
        1.0,
        0.0,
    ]
    assert judge.steps == ["refused", "taken"]


def test_nothing_behind_the_end_of_a_text_gives_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates write a line feed there, and no response has one."""
    tokenizer = builtin_tokenizer()
    plain = str(tokenizer.chat_template)
    encoder = ChatEncoder(tokenizer)
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    rendered = encoder.render(talk, generation_prompt=False)
    end = str(tokenizer.eos_token)
    assert rendered.endswith(f"b{end}") and end in plain
    feature, prompts = feature_with(Judge())
    feature._encoder._tokenizer.chat_template = plain.replace(end, f"{end}\n")
    text = feature._text_of(prompts[0])
    assert text[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(text[:-1]) == "seven"


def test_the_first_steps_train_the_discriminator_alone(tmp_path: Path) -> None:
    feature, _ = feature_with(Judge(), warmup=2)
    assert [feature.holds_policy(step) for step in (1, 2, 3)] == [True, True, False]


def test_a_row_without_a_text_is_named() -> None:
    _, prompts = feature_with(Judge())
    check_texts(prompts)
    for nothing in ({}, {"teacher_answer": " "}, {"teacher_answer": 7}):
        bare = Prompt(uid="of that row", messages=(), token_ids=(), metadata=nothing)
        with pytest.raises(DataError, match=r"row of that row has no teacher_answer.*columns"):
            check_texts([*prompts, bare])


# --- Runs.
def test_both_models_learn_and_are_in_the_checkpoint_and_a_step_is_made_again(
    tmp_path: Path,
) -> None:
    cfg = gad(tmp_path, "run", "run.keep_checkpoints=9")
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    # It begins with a head of zeros: it tells nothing, and rewards nothing.
    assert lines[0]["discriminator/reward_std"] == 0.0
    assert lines[0]["discriminator/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert lines[0]["discriminator/accuracy"] == 0.5
    assert lines[0]["update/grad_norm"] == 0.0
    assert lines[-1]["discriminator/loss"] < lines[0]["discriminator/loss"]
    assert lines[-1]["update/grad_norm"] > 0.0
    assert "reward/mean" not in lines[0] or math.isnan(lines[0]["reward/mean"])
    saved = final_files(cfg.run.directory)
    for folder in ("", "discriminator/"):
        own = [name.removeprefix(folder) for name in saved if name.startswith(folder)]
        assert "model.safetensors" in own
    first = cfg.run.directory / "checkpoints" / "step_00000002"
    for name in ("model.safetensors", "discriminator/model.safetensors"):
        assert (first / name).read_bytes() != saved[name]
    for step in (3, 6):
        findings = replay(cfg.run.directory, step)
        assert findings and all(finding.equal for finding in findings), findings


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_with_the_same_bytes_of_both_models(
    disk_path: Path, kills: int
) -> None:
    run = {"steps": 4 + 2 * kills}
    whole, killed = (
        gad(disk_path, name, run=run | {"name": name}, train={"minibatches": 2})
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    seed = int(os.environ.get("OXRL_KILL_SEED", "0"))
    assert len(killed_until_done(killed, kills=kills, seed=seed)) == kills
    check_same(killed.run.directory, whole.run.directory)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_policy_comes_to_write_what_the_teacher_does(tmp_path: Path, seed: int) -> None:
    """It is a game of two, which may go back later, and which other seeds take longer to begin."""
    sections: dict[str, Section] = {
        "run": {"steps": 80, "checkpoint_every": 0, "seed": seed},
        "rollout": {"max_tokens": 6, "n_samples": 8},
        "train": {"lr": 3e-3, "discriminator_lr": 1e-3},
    }
    cfg = gad(tmp_path, "run", **sections)
    write_texts(tmp_path, ["444"] * 24)
    run(cfg)
    lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    written = [""] * 8
    for sample in map(json.loads, lines):
        written[(sample["step"] - 1) // 10] += sample["response"]
    shares = [text.count("4") / max(1, len(text)) for text in written]
    assert shares[0] < 0.05
    assert max(shares) > 0.3


# --- Mistakes.
@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"data": {"train": "prompts.jsonl"}}, "data.train: row .* has no teacher_answer"),
        ({"data": {"columns": {"teacher_answer": "prompt"}, "train": "gold.jsonl"}}, "gold.jsonl"),
        ({"data": {"eval": "prompts.jsonl"}}, "reward.name"),
        ({"environment": {"name": "textarena"}}, "environment.name.*one text"),
        ({"train": {"discriminator_lr": -1.0}}, "train.discriminator_lr"),
        ({"train": {"alg_name": "sgrpo", "discriminator_lr": 0.1}}, "train.discriminator_lr"),
        ({"model": {"teachers": {"big": {"name": "builtin:tiny"}}}}, "model.teachers"),
    ],
)
def test_a_mistake_ends_with_exit_2_and_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Section], named: str
) -> None:
    gad(tmp_path, "run")
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    if content["train"]["alg_name"] == "sgrpo":
        content["reward"] = {"name": "exact"}
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    with pytest.raises(OxrlError, match=f"(?s){named}") as refused:
        run(load_config(tmp_path / "run.yaml"))
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
