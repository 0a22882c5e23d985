"""Policies whose turns are actions: imitation, then reinforcement in an environment with images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from oxrl.assembly import actions
from oxrl.assembly.assembly import Assembly
from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.data.action_heads import FastHead, read_head
from oxrl.errors import ConfigError
from oxrl.models.image_features import load_image_processor
from oxrl.models.load import load_policy, load_tokenizer
from support.action_runs import (
    CHOICES,
    WORLD,
    Sections,
    imitation,
    make_data,
    reinforcement,
)
from support.figures import Learned
from support.small_runs import final_files, metric_lines, stop_after_three_steps

pytestmark = pytest.mark.filterwarnings("ignore")
# Imitation that leaves a model what it is: what it answers first is what no training decided.
STILL = {"alg_name": "sft", "lr": 1e-9}


def sample_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("actions")
    make_data(found)
    run(imitation(found, "sft", action=CHOICES))
    start = str(found / "sft" / "checkpoints" / "step_00000003")
    run(reinforcement(found, "rl", model={"name": start}, run={"steps": 2, "record": "tokens"}))
    return found


def test_actions_are_kept_in_run_directories_and_checkpoints(folder: Path) -> None:
    head = read_head(folder / "sft")
    assert head is not None and head.choices == ("up", "down", "left", "right")
    for name in ("sft", "rl"):
        newest = max((folder / name / "checkpoints").glob("step_*"))
        assert read_head(folder / name) == read_head(newest) == head
        assert (newest / "preprocessor_config.json").is_file()
    tokenizer = load_tokenizer("builtin:tiny-vla")
    assert not set(head.token_ids) & set(tokenizer.all_special_ids)


def test_the_sampler_and_the_trainer_agree_and_both_know_actions_alone(folder: Path) -> None:
    lines = metric_lines(folder / "rl")
    assert all(line["mismatch/abs_logdiff_max"] <= 1e-4 for line in lines)
    head = read_head(folder / "rl")
    assert head is not None
    tensors = load_file(folder / "rl" / "rollouts" / "step_00000000.safetensors")
    trained = tensors["response_mask"].bool()
    assert set(tensors["tokens"][trained].tolist()) <= set(head.token_ids)
    # A uniform policy over four actions has entropy log 4, not log of the vocabulary.
    assert all(line["policy/entropy"] <= 1.3863 for line in lines)


def test_a_log_probability_is_that_of_the_softmax_over_the_actions_alone(folder: Path) -> None:
    """By hand: the model as transformers loads it, one frame, logits of the last position."""
    line = sample_lines(folder / "rl")[0]
    tensors = load_file(folder / "rl" / "rollouts" / "step_00000000.safetensors")
    head = read_head(folder / "rl")
    start = folder / "sft" / "checkpoints" / "step_00000003"
    assert head is not None and line["opening"][0]["role"] == "user"
    [image, text] = line["opening"][0]["content"]
    frame = Image.open(folder / "rl" / "images" / image["image"]).convert("RGB")
    assert frame.size == (40, 40)
    read = load_image_processor(str(start))(images=[frame], return_tensors="pt")
    assert read["image_grid_thw"].tolist() == [[1, 5, 5]]
    pads = "<|vision_start|>" + "<|image_pad|>" * 25 + "<|vision_end|>"
    tokenizer = load_tokenizer(str(start))
    ids = torch.tensor([tokenizer.encode(f"<|user|>{pads}{text['text']}<|end|><|assistant|>")])
    model = load_policy(str(start))
    types = (ids == model.config.image_token_id).int()  # pyright: ignore
    with torch.no_grad():
        said = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **read)
    everything = said.logits[0, -1].double()
    logits = everything[list(head.token_ids)]
    place = int(tensors["response_mask"][0].nonzero()[0])
    token = int(tensors["tokens"][0, place])
    expected = logits.log_softmax(-1)[head.token_ids.index(token)]
    for name in ("rollout_logprobs", "old_logprobs"):
        if name in tensors:
            assert float(tensors[name][0, place]) == pytest.approx(float(expected), abs=1e-4)
    # Imitation raised actions above each other, and hardly above other tokens.
    assert float(expected) > float(everything.log_softmax(-1)[token]) + 0.1


def test_an_episode_is_a_row_per_turn_and_samples_show_actions_and_frames(folder: Path) -> None:
    lines = sample_lines(folder / "rl")
    for metrics, step in zip(metric_lines(folder / "rl"), (1, 2), strict=True):
        drawn = [line for line in lines if line["step"] == step]
        assert metrics["episode/turns"] == sum(len(line["turns"]) for line in drawn)
        assert metrics["episode/success"] == sum(line["reward"] for line in drawn)
    names = {turn["text"] for line in lines for turn in line["turns"]}
    assert names <= set(CHOICES["choices"].split(","))
    # Groups begin alike: the frame, and the colour that is asked for.
    for draw in {line["draw"] for line in lines}:
        openings = [json.dumps(line["opening"]) for line in lines if line["draw"] == draw]
        assert len(openings) == 4 and len(set(openings)) == 1
    kept = {path.name for path in (folder / "rl" / "images").iterdir()}
    shown = [part["image"] for line in lines for m in line["opening"] for part in m["content"][:1]]
    assert set(shown) <= kept


def test_an_imitation_is_evaluated_in_the_environment(folder: Path) -> None:
    asked = [
        "environment.name=raster-world",
        'environment.options={"instruction": "{color}"}',
        "environment.max_turns=4",
        "rollout.context=last",
        f"data.eval={folder / 'data' / 'eval.jsonl'}",
    ]
    found = run_eval(folder / "sft", asked, samples=2, temperature=1.0)
    assert found["eval/responses"] == 24 and 0 <= found["eval/reward"] <= 1
    assert found["eval/length_mean"] >= 2  # tokens are actions


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"action": {"choices": "up,up"}}, "each once"),
        ({"rollout": {"max_tokens": 9}}, "must be 1, the tokens of a turn"),
        ({"environment": {"name": ""}}, "answered by an environment"),
        ({"action": {"choices": "", "size": 2}}, "action.statistics"),
        ({"action": {"bins": 9}}, "action.bins"),
        ({"action": {"code": "fast", "choices": "", "size": 2}}, "action.fast"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    folder: Path, sections: Sections, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        reinforcement(folder, "refused", **sections)


def test_other_actions_than_the_model_was_trained_with_are_refused(folder: Path) -> None:
    start = str(folder / "sft" / "checkpoints" / "step_00000003")
    cfg = reinforcement(
        folder, "other", model={"name": start}, action={"choices": "north,south,west,east"}
    )
    with pytest.raises(ConfigError, match="choices is .*north.* was trained with .*up"):
        run(cfg)


def test_reserved_tokens_are_those_that_the_tokenizer_does_not_use(folder: Path) -> None:
    cfg = reinforcement(folder, "reserved", action={"ids": "reserved"})
    with pytest.raises(ConfigError, match="needs 4 rows .* there are 0: use tail"):
        _ = Assembly(cfg).actions


def test_reserved_tokens_begin_behind_the_last_one_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rl.jsonl").write_text('{"prompt": "go"}\n')
    cfg = reinforcement(tmp_path, "reserved", action={"ids": "reserved"})
    tokenizer = load_tokenizer(cfg.model.name)
    known = len(tokenizer)
    monkeypatch.setattr(actions, "vocabulary_of", lambda name: known + 4)
    head = actions.action_head(cfg, tokenizer)
    assert head is not None
    assert head.token_ids == (known, known + 1, known + 2, known + 3)
    monkeypatch.setattr(actions, "vocabulary_of", lambda name: known + 3)
    with pytest.raises(ConfigError, match="needs 4 rows .* there are 3: use tail"):
        actions.action_head(cfg, tokenizer)


@pytest.mark.full  # a run more
def test_reserved_tokens_are_sampled_and_trained(folder: Path, tmp_path: Path) -> None:
    """A model whose embedding has more rows than its tokenizer has tokens, as Qwen's have."""
    name = "builtin:tiny-vla"
    tokenizer = load_tokenizer(name)
    model = load_policy(name)
    known = len(tokenizer)
    model.resize_token_embeddings(known + 6)
    place = tmp_path / "model"
    for part in (model, tokenizer, load_image_processor(name)):
        part.save_pretrained(place)
    shutil.copytree(folder / "data", tmp_path / "data")
    cfg = reinforcement(
        tmp_path,
        "reserved",
        model={"name": str(place)},
        action={"ids": "reserved"},
        run={"steps": 1, "record": "tokens"},
    )
    run(cfg)
    head = read_head(tmp_path / "reserved")
    assert head is not None and head.token_ids == tuple(range(known, known + 4))
    tensors = load_file(tmp_path / "reserved" / "rollouts" / "step_00000000.safetensors")
    assert set(tensors["tokens"][tensors["response_mask"].bool()].tolist()) <= set(head.token_ids)
    [line] = metric_lines(tmp_path / "reserved")
    assert line["mismatch/abs_logdiff_max"] <= 1e-4
    texts = {turn["text"] for said in sample_lines(tmp_path / "reserved") for turn in said["turns"]}
    assert texts <= set(CHOICES["choices"].split(","))


@pytest.mark.full  # two runs more
@pytest.mark.parametrize("context", ["whole", "window: 2"])
def test_one_row_per_episode_and_numbers_in_chunks(tmp_path: Path, context: str) -> None:
    options = '{"control": "velocity", "instruction": "{color}"}'
    rows = "episodes" if context == "whole" else "turns"
    make_data(tmp_path, options=options, chunk=2, rows=rows, limit=6)
    numbers = {"size": 2, "bins": 16, "chunk": 2}
    told = numbers | {"statistics": str(tmp_path / "data" / "statistics.json")}
    run(imitation(tmp_path, "sft", action=told, run={"steps": 1}, train=STILL))
    start = str(tmp_path / "sft" / "checkpoints" / "step_00000001")
    world = WORLD | {"options": {"control": "velocity", "instruction": "{color}", "max_steps": 6}}
    cfg = reinforcement(
        tmp_path,
        "rl",
        model={"name": start},
        environment=world,
        action=numbers | {"choices": ""},
        run={"steps": 2},
        rollout={"context": context},
        train={"alg_name": "ppo", "lr": 1e-3},
    )
    assert cfg.rollout.max_tokens == 4
    run(cfg)
    metrics = metric_lines(tmp_path / "rl")
    for line in metrics:
        assert line["mismatch/abs_logdiff_max"] <= 1e-4
        assert line["update/skipped"] == 0 and line["value/grad_norm"] >= 0
        assert context != "whole" or line.get("episode/rows", 8) == 8
    assert metrics[0]["episode/turns"] > 8
    assert context == "whole" or metrics[0]["episode/rows"] > 8
    lines = sample_lines(tmp_path / "rl")
    assert all(len(json.loads(turn["text"])[0]) == 2 for line in lines for turn in line["turns"])


@pytest.mark.full  # two runs more
@pytest.mark.parametrize("rows", ["episodes", "turns"])
def test_fasts_tokens_are_imitated_and_reinforced(
    tmp_path: Path, rows: str, learned: Learned
) -> None:
    options = '{"control": "velocity", "instruction": "{color}"}'
    make_data(tmp_path, options=options, chunk=4, rows=rows, limit=6, fast=64, fast_scale=4.0)
    numbers: dict[str, Any] = {"size": 2, "chunk": 4, "code": "fast"}
    files = {"fast": "fast.json", "statistics": "statistics.json"}
    told = numbers | {name: str(tmp_path / "data" / file) for name, file in files.items()}
    run(
        imitation(
            tmp_path, "sft", action=told, run={"steps": 2}, train={"alg_name": "sft", "lr": 4e-3}
        )
    )
    start = str(tmp_path / "sft" / "checkpoints" / "step_00000002")
    head = read_head(Path(start))
    assert isinstance(head, FastHead) and head == read_head(tmp_path / "sft")
    cfg = reinforcement(
        tmp_path,
        "rl",
        model={"name": start},
        environment=WORLD | {"options": {"control": "velocity", "instruction": "{color}"}},
        action=numbers | {"choices": ""},
        run={"steps": 2, "record": "tokens"},
        rollout={"context": "whole" if rows == "episodes" else "last"},
    )
    assert cfg.rollout.max_tokens == 9
    run(cfg)
    lines = metric_lines(tmp_path / "rl")
    for line in lines:
        assert line["mismatch/abs_logdiff_max"] <= 1e-4
        assert line["episode/undecoded"] <= line["episode/turns"]
    learned("first turns that say nothing", lines[0]["episode/undecoded"], at_least=1)
    tensors = load_file(tmp_path / "rl" / "rollouts" / "step_00000000.safetensors")
    trained = tensors["tokens"][tensors["response_mask"].bool()].tolist()
    assert set(trained) <= set(head.support)
    ends = trained.count(head.end) / lines[0]["episode/turns"]
    learned("share of turns that end", ends, at_least=0.3)
    bins = reinforcement(
        tmp_path,
        "bins",
        model={"name": start},
        action={"size": 2, "chunk": 4, "choices": ""},
    )
    with pytest.raises(ConfigError, match="code is bins, and .* trained with fast"):
        run(bins)


def kill_after_three_steps(cfg: Config, config: Path) -> None:
    """Start the run in a process of its own, and end it with SIGKILL."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "main_rl.py"), "--config", str(config)]
    process = subprocess.Popen(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = cfg.run.directory / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait(timeout=60) < 0


@pytest.mark.full  # three runs of six steps
@pytest.mark.parametrize("end", [stop_after_three_steps, kill_after_three_steps])
def test_a_run_of_actions_that_was_ended_goes_on_byte_for_byte(
    tmp_path: Path, end: Callable[[Config, Path], None]
) -> None:
    make_data(tmp_path)
    known: Sections = {"run": {"steps": 6, "checkpoint_every": 2}}
    whole = reinforcement(tmp_path, "whole", **known)
    run(whole)
    ended = reinforcement(tmp_path, "ended", **known)
    end(ended, tmp_path / "ended.yaml")
    run(ended, resume=True)
    assert final_files(whole.run.directory) == final_files(ended.run.directory)
    assert metric_lines(whole.run.directory) == metric_lines(ended.run.directory)
    samples = [(cfg.run.directory / "samples.jsonl").read_bytes() for cfg in (whole, ended)]
    assert samples[0] == samples[1]
