"""Process reward models: where a step is judged, what is learned, and the worst step as a
reward.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.data.chat import ChatEncoder
from oxrl.data.steps import StepDataset, encode_steps, to_step_batch
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import DataError
from oxrl.models.load import load_critic, load_tokenizer
from oxrl.rewards.reward_model import RewardModel
from oxrl.types import Completion, Prompt, Segment
from support.figures import Learned
from support.small_runs import final_files, metric_lines, steps_config

QUESTION = ({"role": "user", "content": "count"},)
PROMPT = Prompt(uid="0", messages=QUESTION, token_ids=(1,))


def judge(folder: Path, name: str, lr: float = 3e-3, **run_section: Any) -> Config:
    train, run_section = {"lr": lr}, {"checkpoint_every": 10} | run_section
    return steps_config(folder, name, run=run_section, train=train, data={"rows_per_step": 16})


def completion(text: str) -> Completion:
    return Completion(
        segments=(Segment(token_ids=(1,), logprobs=(0.0,), versions=(0,)),),
        text=text,
        finish_reason="stop",
    )


def test_a_step_is_judged_at_the_token_after_it() -> None:
    encoder = ChatEncoder(load_tokenizer("builtin:tiny"))
    ids, ends = encode_steps(QUESTION, ["1+1=2", "so 2"], encoder)
    # <|user|>count<|end|><|assistant|> is 8 tokens, "1+1=2\n" 6, "so 2" 4, then <|end|>.
    assert ends == (14, 18) and len(ids) == 19
    whole = encoder.render(
        [*QUESTION, {"role": "assistant", "content": "1+1=2\nso 2"}], generation_prompt=False
    )
    assert list(ids) == encoder.encode(whole, {})


def test_the_loss_reads_only_what_is_known_after_a_step(tmp_path: Path) -> None:
    judge(tmp_path, "run")
    tokenizer = load_tokenizer("builtin:tiny")
    units = StepDataset.load(tmp_path / "steps.jsonl", tokenizer).in_order()[:5]
    batch = to_step_batch(units, 0)
    assert float(batch.loss_weights.sum()) == pytest.approx(1.0)
    assert int(batch.inputs.response_mask.sum()) == sum(len(unit.ends) for unit in units)
    assert batch.labels[batch.inputs.response_mask].tolist() == [
        label for unit in units for label in unit.labels
    ]
    critic = load_critic("builtin:tiny")
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
    values = (
        LocalTrainer(critic, TrainerOptions(lr=0.0))
        .forward(batch.inputs, frozenset({"values"}))
        .values
    )
    assert values is not None
    hidden = critic.backbone(batch.inputs.select(torch.tensor([0])))[0]
    expected = critic.value_head(hidden[torch.tensor(units[0].ends) - 1])[:, 0]
    torch.testing.assert_close(values[0, list(units[0].ends)], expected.detach(), rtol=0, atol=1e-5)


def test_held_out_steps_are_judged_right_and_the_checkpoint_is_a_reward(
    tmp_path: Path, learned: Learned
) -> None:
    # At three times the rate some seeds leave lines of one letter undecided.
    cfg = judge(tmp_path, "run", lr=1e-3, steps=60)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    # The head starts at zero.
    assert lines[0]["update/loss"] == pytest.approx(math.log(2), abs=1e-5)
    majority = lines[-1]["eval/majority"]
    learned("eval/accuracy", lines[-1]["eval/accuracy"], at_least=0.95, floor=majority + 0.2)
    folder = max((cfg.run.directory / "checkpoints").glob("step_*"))
    assert load_critic(str(folder)).kind == "process"
    held_out = (tmp_path / "held_out_steps.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in held_out]
    scores = RewardModel(folder, steps="sum")(
        PROMPT, [completion("\n".join(row["completions"])) for row in rows]
    )
    found: dict[bool, list[float]] = {True: [], False: []}
    for row, score in zip(rows, scores, strict=True):
        for label, (_, chance) in zip(row["labels"], score.steps, strict=True):
            found[label].append(chance)
    judged_right = sum(chance > 0.5 for chance in found[True])
    judged_right += sum(chance <= 0.5 for chance in found[False])
    assert judged_right / sum(map(len, found.values())) == pytest.approx(lines[-1]["eval/accuracy"])
    learned("chance of a right step", statistics.fmean(found[True]), at_least=0.8)
    learned("chance of a wrong step", statistics.fmean(found[False]), at_most=0.2)


def test_a_solution_is_as_good_as_its_worst_step_or_their_mean_or_their_sum(
    tmp_path: Path,
) -> None:
    cfg = judge(tmp_path, "run", steps=8)  # what it learned does not matter here
    run(cfg)
    folder = max((cfg.run.directory / "checkpoints").glob("step_*"))
    replies = ["12\nabc \n\n6", "12\nabc \n\nabc", ""]
    scores = {
        rule: RewardModel(folder, steps=rule)(PROMPT, [completion(reply) for reply in replies])
        for rule in ("worst", "mean", "sum")
    }
    chances = dict(scores["sum"][0].steps)
    assert list(chances) == [2, 6, 10]  # characters up to the end of each line that is not blank
    assert len(set(chances.values())) == 3
    other_end = dict(scores["sum"][1].steps)
    assert [other_end[2], other_end[6]] == pytest.approx([chances[2], chances[6]], abs=1e-5)
    assert scores["worst"][0].value == min(chances.values()) and scores["worst"][0].steps == ()
    assert scores["sum"][0].value == pytest.approx(sum(chances.values()))
    assert scores["mean"][0].value == pytest.approx(sum(chances.values()) / 3)
    assert dict(scores["mean"][0].steps) == {end: chance / 3 for end, chance in chances.items()}
    assert [scores[rule][2].value for rule in scores] == [0.0, 0.0, 0.0]


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    whole = judge(tmp_path, "whole", steps=8, checkpoint_every=4)
    run(whole)
    part = judge(tmp_path, "part", steps=4, checkpoint_every=4)
    run(part)
    (part.run.directory / "result.json").unlink()
    written = part.run.directory / "config.yaml"
    written.write_text(written.read_text().replace("steps: 4\n", "steps: 8\n"))
    run(judge(tmp_path, "part", steps=8, checkpoint_every=4), resume=True)
    left, right = final_files(whole.run.directory), final_files(part.run.directory)
    assert (
        left.keys() == right.keys() and [name for name in left if left[name] != right[name]] == []
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "completions": ["a"], "labels": []}, "of equal length"),
        ({"prompt": "p", "completions": ["a"], "labels": [2]}, "between 0 and 1"),
        ({"prompt": "p", "completions": ["a"], "labels": ["yes"]}, "between 0 and 1"),
        ({"completions": ["a"], "labels": [True]}, "prompt is NoneType"),
        ({"prompt": "p", "completions": [" "], "labels": [True]}, "1 empty"),
        (
            {
                "prompt": "p",
                "completions": [[{"role": "user", "content": "p"}] * 2],
                "labels": [True],
            },
            "a step that is not one text of the assistant",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        StepDataset.load(path, load_tokenizer("builtin:tiny"))
