"""The policy under another prompt as its own teacher: what it says there, by hand with transformers;
whose weights it has; who is shown what; and what is left out.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.assembly.assembly import Assembly
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.errors import ConfigError, DataError
from oxrl.modelfiles.builtin import VOCABULARY, builtin_policy, builtin_tokenizer
from oxrl.plan.preflight import Prepared, examine
from oxrl.recipes.features.base import Hint, Teacher
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.types import Completion, Prompt, Rollout, Score, Segment
from oxrl_teachers import templates
from oxrl_teachers.asking import follow
from oxrl_teachers.features import TeacherTop
from oxrl_teachers.hints import HintedRows, check_template
from support.command_line import oxrl
from support.killed_runs import killed_until_done, uninterrupted
from support.rank_processes import run_ranks
from support.small_runs import check_same, metric_lines, model_that_stops, rl_config

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-scale` runs this",
)
TEMPERATURE = 0.8
STEPS = 3
# Rows of several lengths; the one without a note has nothing that the template could write.
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "2+3="}], "answer": "5", "note": "x"},
    {
        "prompt": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "how many legs has a horse?"},
        ],
        "answer": "4",
        "note": "an animal, and a large one",
    },
    {"prompt": [{"role": "user", "content": "7+1="}], "answer": "8", "note": None},
    {
        "prompt": [
            {"role": "user", "content": "say a"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "and b"},
        ],
        "answer": 0,
        "note": "letters",
    },
]
TEMPLATE = "{{ note }}: {{ answer }}.\n{{ prompt }}"
OPTIONS = {"temperature": TEMPERATURE, "max_tokens": 6, "n_samples": 2}


def sharp_model(folder: Path) -> str:
    """A random model that is sure of things, so that a hint matters to it."""
    model: Any = builtin_policy("builtin:tiny", seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 4
    model.save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    return str(folder)


def config(
    folder: Path,
    name: str,
    weights: Any = "live",
    *,
    rows: list[dict[str, Any]] = ROWS,
    template: str = TEMPLATE,
    reads: tuple[str, ...] = ("answer", "note"),
    model: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Config:
    """Three steps on the rows above, all tokens of the vocabulary candidates."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hint.jinja").write_text(template)
    if not (folder / "model").exists():
        sharp_model(folder / "model")
    myself = {"prompt": str(folder / "hint.jinja"), "reads": list(reads), "weights": weights}
    given: dict[str, Any] = {
        "run": {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 9, "record": "tokens"},
        "model": {"name": str(folder / "model"), "teachers": {"self": myself}} | (model or {}),
        "data": {"train": str(folder / "rows.jsonl"), "prompts_per_step": 4},
        "reward": {"name": ""},
        "rollout": OPTIONS,
        "train": {"alg_name": "opsd", "lr": 3e-3, "teacher_candidates": VOCABULARY},
    }
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
        given[section] = {name: own for name, own in given[section].items() if own is not None}
    return rl_config(folder, name, **given)


# --- What is learned, by hand.
def checkpoint(cfg: Config, step: int) -> Path:
    return cfg.run.directory / "checkpoints" / f"step_{step:08d}"


def model_at(cfg: Config, step: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint(cfg, step), dtype=torch.float32)


def written(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def hinted(row: dict[str, Any]) -> list[dict[str, Any]]:
    *before, last = row["prompt"]
    return [*before, {**last, "content": f"{row['note']}: {row['answer']}.\n{last['content']}"}]


def said(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """[n, V] log-probabilities where each token of the response was sampled."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
    return (logits / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]


def divergence(policy: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """KL(policy || teacher) of each token, KL(teacher || policy), or Jensen-Shannon."""
    p, t = policy.exp(), teacher.exp()
    if alpha == 1:
        return (p * (policy - teacher)).sum(-1)
    if alpha == 0:
        return (t * (teacher - policy)).sum(-1)
    middle = ((1 - alpha) * p + alpha * t).log()
    of_teacher = (t * (teacher - middle)).sum(-1)
    return alpha * of_teacher + (1 - alpha) * (p * (policy - middle)).sum(-1)


def followed(average: Any, policy: Any, share: float) -> None:
    with torch.no_grad():
        for (name, held), (other, own) in zip(
            average.named_parameters(), policy.named_parameters(), strict=True
        ):
            assert name == other
            held.copy_(share * own + (1 - share) * held)


@pytest.mark.parametrize(("weights", "alpha"), [("live", 1.0), ("frozen", 0.0), (0.3, 0.5)])
def test_what_is_learned_from_a_hint_is_what_transformers_says(
    weights: Any, alpha: float, tmp_path: Path
) -> None:
    average = isinstance(weights, float)
    asked = {"ema": weights} if average else weights
    cfg = config(tmp_path, "run", asked, train={"divergence_alpha": alpha})
    run(cfg)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    lines = metric_lines(cfg.run.directory)
    samples = list(map(json.loads, (cfg.run.directory / "samples.jsonl").read_text().splitlines()))
    rows = {json.dumps(row["prompt"]): row for row in ROWS}
    teacher = model_at(cfg, 0)
    told: list[float] = []
    for step, line in enumerate(lines):
        policy = model_at(cfg, step)
        if weights == "live":
            teacher = model_at(cfg, step)
        batch = load_file(cfg.run.directory / "rollouts" / f"step_{step:08d}.safetensors")
        of_step = [sample for sample in samples if sample["step"] == step + 1]
        assert len(of_step) == len(batch["tokens"]) == 8
        values: list[Tensor] = []
        for place, sample in enumerate(of_step):
            row = rows[json.dumps(sample["messages"])]
            own = written(tokenizer, row["prompt"])
            tokens = batch["tokens"][place][batch["attention_mask"][place].bool()].tolist()
            assert tokens[: len(own)] == own
            response = tokens[len(own) :]
            mask = batch["response_mask"][place]
            if row["note"] is None:  # left out
                assert not mask.any()
                continue
            assert mask.nonzero()[:, 0].tolist() == [*range(len(own), len(tokens))]
            with torch.no_grad():
                behind = said(teacher, written(tokenizer, hinted(row)), response)
            values.append(divergence(said(policy, own, response), behind, alpha))
            sampled = behind[range(len(response)), response]
            assert torch.allclose(batch["teacher_logprobs"][place][mask], sampled, atol=1e-4)
        loss = torch.cat(values).mean()
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in policy.parameters()]).norm()
        assert line["teacher/divergence"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert line["update/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        assert line["teacher/left_out"] == 2
        assert line["samples/trained"] == 6 * (step + 1)
        assert line["samples/dropped_teacher"] == 2 * (step + 1)
        assert line["waste/no_signal"] > 0
        told.append(float(loss.detach()))
        if average:
            followed(teacher, model_at(cfg, step + 1), weights)
            kept = load_file(checkpoint(cfg, step + 1) / "teacher.self" / "model.safetensors")
            by_hand = dict(teacher.named_parameters())
            assert all(torch.allclose(by_hand[name], kept[name], atol=1e-6) for name in kept)
    assert max(told) > 0.02
    assert len(set(told)) == STEPS


def test_where_the_teacher_stays_the_policy_comes_closer_to_it(tmp_path: Path) -> None:
    cfg = config(
        tmp_path,
        "run",
        "frozen",
        rows=[ROWS[0]],
        run={"steps": 16, "checkpoint_every": 0, "record": "text"},
        data={"train": str(tmp_path / "rows.jsonl"), "prompts_per_step": 8},
    )
    run(cfg)
    found = [line["teacher/divergence"] for line in metric_lines(cfg.run.directory)]
    assert sum(found[-4:]) < 0.5 * sum(found[:4])


# --- Averages.
def merged_at(cfg: Config, step: int) -> dict[str, Tensor]:
    """The weights of a policy with its adapter merged into them, by peft."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(cfg.model.name, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, checkpoint(cfg, step))
    return dict(adapted.merge_and_unload().named_parameters())


def test_an_average_of_a_policy_with_an_adapter_is_one_of_whole_weights(tmp_path: Path) -> None:
    cfg = config(tmp_path, "run", {"ema": 0.25}, lora={"rank": 4}, train={"lr": 3e-2})
    run(cfg)
    average = load_file(tmp_path / "model" / "model.safetensors")
    for step in range(1, STEPS + 1):
        policy = merged_at(cfg, step)
        average = {name: 0.25 * policy[name] + 0.75 * held for name, held in average.items()}
        kept = load_file(checkpoint(cfg, step) / "teacher.self" / "model.safetensors")
        apart = [float((kept[name] - average[name]).abs().max()) for name in kept]
        moved = [float((kept[name] - policy[name]).abs().max()) for name in kept]
        assert max(apart) < 1e-6
        assert max(moved) > 1e-4


def test_an_average_of_a_policy_in_bfloat16_does_not_stand_still(tmp_path: Path) -> None:
    cfg = config(tmp_path, "run", {"ema": 0.01}, model={"dtype": "bfloat16"})
    run(cfg)
    first, second = (
        load_file(checkpoint(cfg, step) / "teacher.self" / "model.safetensors") for step in (0, 1)
    )
    policy = load_file(checkpoint(cfg, 1) / "model.safetensors")
    for name, held in second.items():
        assert held.dtype == torch.float32
        by_hand = 0.01 * policy[name].float() + 0.99 * first[name]
        assert torch.allclose(held, by_hand, atol=1e-7)
    assert any(not torch.equal(second[name], first[name]) for name in second)


def moved_and_followed(cfg: Config, ranks: Ranks) -> dict[str, Tensor]:
    """The weights of a teacher that took in a quarter of a policy whose weights are larger by 0.5."""
    trainers = Assembly(cfg, ranks).trainers()
    policy, teacher = trainers["policy"], trainers["teacher.self"]
    own = {name: weight.clone() for bucket in policy.weights() for name, weight in bucket}
    policy.set_weights((name, weight + 0.5) for name, weight in own.items())
    follow(teacher, policy, Hint("", (), follows=0.25))
    return {name: weight.clone() for bucket in teacher.weights() for name, weight in bucket}


def follow_on_rank(cfg: Config, out: Path) -> None:
    with joined_ranks(torch.device("cpu"), cfg.run.waits) as ranks:
        found = moved_and_followed(cfg, ranks)
    if os.environ["RANK"] == "0":
        torch.save(found, out)


@pytest.mark.parametrize(
    "backend",
    [
        "local",
        pytest.param("fsdp", marks=pytest.mark.full),
        pytest.param("deepspeed", marks=needs_deepspeed),
    ],
)
def test_an_average_that_ranks_share_follows_as_one_of_one_process(
    backend: str, tmp_path: Path
) -> None:
    ranks = {} if backend == "local" else {"training_gpus": 2, "deadline_s": 60}
    stages = {"deepspeed": {"zero_stage": 3}, "deepspeed_ref": {"zero_stage": 3}}
    further: dict[str, Any] = stages if backend == "deepspeed" else {}
    model = {"dtype": "bfloat16"}
    cfg = config(
        tmp_path,
        "run",
        {"ema": 0.25},
        model=model,
        train={"backend": backend},
        run=ranks,
        **further,
    )
    if backend == "local":
        found = moved_and_followed(cfg, ALONE)
    else:
        run_ranks(2, follow_on_rank, cfg, tmp_path / "out")
        found = torch.load(tmp_path / "out")
    start = load_file(tmp_path / "model" / "model.safetensors")
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        policy = (start[name].bfloat16() + 0.5).float()
        assert torch.allclose(weight, start[name].lerp(policy, 0.25), atol=1e-6)


def test_ranks_are_sent_nothing_of_what_is_asked() -> None:
    """The loss is, with every feature of it, in every step."""
    feature = TeacherTop.__new__(TeacherTop)
    feature.teachers = {"self": Teacher(cast("Any", lambda: None), frozenset())}
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(feature.teachers)
    assert not vars(pickle.loads(pickle.dumps(feature)))


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: `make test-scale`")
def test_ray_ranks_learn_from_themselves_what_one_process_learns(tmp_path: Path) -> None:
    alone = config(tmp_path / "alone", "run", {"ema": 0.3})
    ranks: dict[str, Any] = {"run": {"training_gpus": 2}, "inference_engine": {"actors": 1}}
    shared = config(tmp_path / "ray", "run", {"ema": 0.3}, train={"backend": "fsdp"}, **ranks)
    found: list[dict[str, Tensor]] = []
    for cfg in (alone, shared):
        run(cfg)
        found.append(load_file(checkpoint(cfg, STEPS) / "teacher.self" / "model.safetensors"))
    one, two = found
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    lines = [metric_lines(cfg.run.directory) for cfg in (alone, shared)]
    for name in ("teacher/divergence", "teacher/left_out", "update/grad_norm"):
        values = [[line[name] for line in own] for own in lines]
        assert values[0] == pytest.approx(values[1], rel=1e-3)


@pytest.mark.timeout(600)
def test_an_average_is_the_same_after_three_kills_and_its_steps_are_replayed(
    disk_path: Path,
) -> None:
    steps = 15
    sections: dict[str, Any] = {
        "run": {"steps": steps, "checkpoint_every": 2, "record": "tokens"},
        "train": {"teacher_candidates": 8},
    }
    whole, killed = (config(disk_path, name, {"ema": 0.2}, **sections) for name in ("a", "b"))
    uninterrupted(whole)
    assert len(killed_until_done(killed, kills=3, seed=1)) == 3
    check_same(killed.run.directory, whole.run.directory)
    newest = max((whole.run.directory / "checkpoints").glob("step_*"))
    assert (newest / "teacher.self" / "model.safetensors").read_bytes() != (
        newest / "model.safetensors"
    ).read_bytes()
    for step in (3, steps):
        findings = replay(killed.run.directory, step, tolerance=0.0)
        assert findings and all(finding.equal for finding in findings)


# --- Who is shown what.
def rollout(
    text: str, value: float | None, *, sample: int, group: int = 0, reason: str = "", **more: Any
) -> Rollout:
    tokenizer = builtin_tokenizer()
    messages = ({"role": "user", "content": "2+3="},)
    tokens = tuple(tokenizer.encode(text))
    of_each = (-1.0,) * len(tokens)
    segment = Segment(token_ids=tokens, logprobs=of_each, versions=(0,) * len(tokens))
    return Rollout(
        prompt=Prompt(
            uid="row",
            messages=messages,
            token_ids=tuple(written(tokenizer, [*messages])),
            answer="5",
            **more,
        ),
        completion=Completion(segments=(segment,), text=text, finish_reason="stop"),
        score=Score(value=value, status="ok" if value is not None else "invalid", reason=reason),
        group_id=group,
        sample=sample,
        seed=0,
    )


def shown(template: str, reads: tuple[str, ...], rollouts: list[Rollout]) -> list[str | None]:
    """The other prompts of a step, as text."""
    tokenizer = builtin_tokenizer()
    rows = HintedRows("self", Hint(template, reads), tokenizer)
    rows.take(rollouts)
    found = [rows.prompt_of(each) for each in rollouts]
    return [None if tokens is None else str(tokenizer.decode([*tokens])) for tokens in found]


@pytest.mark.parametrize("marks", product((0.0, 0.5, 1.0, None), repeat=3))
def test_a_peer_is_another_answer_of_the_group_that_succeeded(
    marks: tuple[float | None, ...],
) -> None:
    step = [rollout(f"own {place}", mark, sample=place) for place, mark in enumerate(marks)]
    # The same samples of another prompt, all right, in between.
    others = [rollout(f"theirs {place}", 1.0, sample=place, group=4) for place in range(3)]
    mixed = [each for pair in zip(step, others, strict=True) for each in pair]
    texts = shown("{{ peer }} {{ prompt }}", ("peer",), mixed)[::2]
    for place, text in enumerate(texts):
        right = [f"own {other}" for other, mark in enumerate(marks) if mark == 1 and other != place]
        if not right:
            assert text is None
        else:
            assert text == f"<|user|>{right[0]} 2+3=<|end|><|assistant|>"


def test_feedback_is_what_the_environment_said_or_the_reward() -> None:
    step = [
        rollout("a", 0.0, sample=0, reason="too short"),
        rollout("b", 0.0, sample=1),
        rollout("c", 0.0, sample=2, reason="too short"),
    ]
    object.__setattr__(step[2].completion, "reason", "fell down")
    texts = shown("{{ prompt }} {{ feedback }}", ("feedback",), step)
    assert texts[1] is None
    assert [text and text.partition("=")[2] for text in texts[::2]] == [
        " too short<|end|><|assistant|>",
        " fell down<|end|><|assistant|>",
    ]


def test_what_a_hint_says_stays_text() -> None:
    (text,) = shown("{{ prompt }}{{ answer }}<|end|>", ("answer",), [rollout("a", 1, sample=0)])
    assert text is not None
    assert len(builtin_tokenizer().encode("<|end|>")) == 1
    tokens = HintedRows("self", Hint("<|end|>", ()), builtin_tokenizer())
    tokens.take([])
    assert (tokens.prompt_of(rollout("a", 1, sample=0)) or ()).count(1) == 1


def test_an_answer_of_nothing_is_missing_and_one_of_zero_is_not() -> None:
    zero, nothing, empty = (rollout("a", 1, sample=place) for place in range(3))
    for each, answer in ((zero, 0), (nothing, None), (empty, "")):
        object.__setattr__(each.prompt, "answer", answer)
    texts = shown("{{ answer }}", ("answer",), [zero, nothing, empty])
    assert texts == ["<|user|>0<|end|><|assistant|>", None, None]


def test_a_row_that_is_too_long_behind_its_hint_is_left_out_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = rollout("abc", 1, sample=0)
    tokenizer = builtin_tokenizer()
    length = len(written(tokenizer, [{"role": "user", "content": "5 2+3="}])) + 3
    for longest, fits in ((length, True), (length - 1, False)):
        rows = HintedRows("me", Hint("{{ answer }} {{ prompt }}", ("answer",), longest), tokenizer)
        rows.take([one])
        with caplog.at_level(logging.WARNING):
            found = [rows.laid_behind(one) is not None for _ in range(2)]
        assert found == [fits, fits]
    (said,) = caplog.messages
    assert caplog.records[0].name.startswith("oxrl.")  # which run.log is of
    assert "model.teachers.me.prompt" in said
    assert f"{length} tokens, and the model reads {length - 1}" in said


@pytest.mark.parametrize("what", ["other tokens", "images", "what is read anew"])
def test_a_prompt_that_is_not_what_its_messages_say_is_refused(what: str) -> None:
    one = rollout("abc", 1, sample=0)
    if what == "other tokens":
        object.__setattr__(one.prompt, "token_ids", one.prompt.token_ids[1:])
    elif what == "images":
        object.__setattr__(one.prompt, "images", ("a.png",))
    else:
        again = replace(one.completion.segments[0], context=(1, 2))
        object.__setattr__(one.completion, "segments", (*one.completion.segments, again))
    with pytest.raises(DataError, match="row row begins with other tokens than its messages"):
        shown("{{ answer }}", ("answer",), [one])


TALK = """
from oxrl.environments import Step

class Talk:
    def reset(self, prompt, seed):
        return "hm"
    def step(self, text):
        return Step("go on" * len(text))
"""


def test_a_hint_stands_before_all_turns_of_an_episode(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    model_that_stops(tmp_path / "model")
    environment = {"name": f"{tmp_path / 'talk.py'}:Talk", "max_turns": 3}
    rollout = {"max_tokens": 60, "temperature": 1.0}
    # A row without a note is left out as ever.
    template = "{{ note }}: {{ prompt }}"
    cfg = config(
        tmp_path,
        "run",
        template=template,
        reads=("note",),
        environment=environment,
        rollout=rollout,
        run={"steps": 1},
    )
    run(cfg)
    model = model_at(cfg, 0)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    samples = list(map(json.loads, (cfg.run.directory / "samples.jsonl").read_text().splitlines()))
    batch = load_file(cfg.run.directory / "rollouts" / "step_00000000.safetensors")
    turns: list[int] = []
    for place, sample in enumerate(samples):
        *before, last = sample["opening"]
        note = sample["metadata"]["note"]
        mask = batch["response_mask"][place]
        if note is None:
            assert not mask.any()
            continue
        own = written(tokenizer, sample["opening"])
        tokens = batch["tokens"][place][batch["attention_mask"][place].bool()].tolist()
        assert tokens[: len(own)] == own
        changed = [*before, {**last, "content": f"{note}: {last['content']}"}]
        rest = tokens[len(own) :]
        with torch.no_grad():
            prompt = written(tokenizer, changed)
            logits = model(input_ids=torch.tensor([[*prompt, *rest]])).logits[0]
        behind = logits.log_softmax(-1)[len(prompt) - 1 : -1][range(len(rest)), rest]
        sampled = mask[len(own) : len(tokens)]
        assert torch.allclose(batch["teacher_logprobs"][place][mask], behind[sampled], atol=1e-4)
        turns.append(len(sample["turns"]))
    assert len(turns) == 6
    assert max(turns) > 1


# --- What is left out.
def test_a_step_of_which_all_rows_are_left_out_is_an_empty_one(tmp_path: Path) -> None:
    rows = [{**row, "note": None} for row in ROWS]
    cfg = config(tmp_path, "run", {"ema": 0.5}, rows=rows)
    run(cfg)
    for step, line in enumerate(metric_lines(cfg.run.directory), start=1):
        assert (line["data/empty_steps"], line["teacher/left_out"]) == (1, 8)
        assert (line["samples/trained"], line["samples/dropped_teacher"]) == (0, 8 * step)
    first, last = (load_file(checkpoint(cfg, at) / "model.safetensors") for at in (0, STEPS))
    assert all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("row", ["opd", "kdrl"])
def test_a_gap_to_oneself_leaves_rows_out_as_well(row: str, tmp_path: Path) -> None:
    cfg = config(
        tmp_path,
        "run",
        train={"alg_name": row, "lr": 1e-3, "teacher_candidates": None},
        reward={"name": "exact"} if row == "kdrl" else {"name": ""},
    )
    run(cfg)
    for line in metric_lines(cfg.run.directory):
        assert line["teacher/left_out"] == 2
        assert line["teacher/gap_mean"] != 0


# --- Templates.
BAD = {
    "syntax": ("{{ prompt", (), "cannot be written: TemplateSyntaxError"),
    "unknown": ("{{ prompt }} {{ hint }}", (), "reads hint, and is given prompt"),
    "in a branch": ("{% if 0 %}{{ hint }}{% endif %} {{ prompt }}", (), "reads hint"),
    "same": ("{{ prompt }}", (), "writes the prompt as it stands there already"),
    "unread": ("say: {{ prompt }}", ("answer",), "does not read answer"),
    "no such field": ("{{ remark }} {{ prompt }}", ("remark",), "no row that was looked at has"),
    "prompt": ("{{ prompt }}!", ("prompt",), "is given prompt as every template is"),
    "twice": ("{{ answer }}", ("answer", "answer"), "and nothing twice"),
    "arithmetic": ("{{ 1 // 0 }} {{ prompt }}", (), "cannot be written: ZeroDivisionError"),
    "no text": ("{{ prompt + 1 }}", (), "cannot be written: TypeError"),
    "other files": ("{% include 'x' %}", (), "cannot be written: TypeError"),
    "random": ("{{ [1, 2]|random }} {{ prompt }}", (), "No filter named 'random'"),
    "unsafe": ("{{ prompt.__class__.__mro__ }}", (), "cannot be written: SecurityError"),
    "a large range": ("{% for a in range(9**9) %}{% endfor %}", (), "OverflowError"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_cannot_be_used_is_refused_before_a_run(name: str, tmp_path: Path) -> None:
    template, reads, words = BAD[name]
    cfg = config(tmp_path, "run", template=template, reads=reads)
    prepared = Prepared()
    for subject in ("tokenizer", "data"):
        assert examine(cfg, prepared, subject).state == "ok"
    found = examine(cfg, prepared, "teachers")
    assert found.state == "wrong"
    assert words in found.text
    assert "model.teachers.self.prompt" in found.text


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "DEADLINE_S", 1.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "did not end within 1 s" in templates.try_apart(endless, [{"prompt": "x"}]).error
    large = "{% set x = prompt * 99999 %}{% set y = x * 99999 %}{{ y }}"
    assert "memory" in templates.try_apart(large, [{"prompt": "x"}]).error
    assert templates.try_apart("{{ prompt }}!", [{"prompt": "x"}]).texts == ["x!"]


def test_images_are_refused_before_a_run() -> None:
    prompt = replace(rollout("a", 1, sample=0).prompt, images=("a.png",))
    with pytest.raises(ConfigError, match="text alone, and row row shows images"):
        check_template("model.teachers.self.prompt", "hint.jinja", Hint("x", ()), [prompt])


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, "run")
    (tmp_path / "hint.jinja").write_bytes(b"\xff\xfe")
    found = examine(cfg, Prepared(), "teachers")
    assert found.state == "wrong" and "hint.jinja cannot be read" in found.text


@pytest.mark.full
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_wrong_template_ends_with_2_and_no_traceback(command: str, tmp_path: Path) -> None:
    cfg = config(tmp_path, "run", template="{{ prompt }} {{ hint }}", reads=())
    done = oxrl(command, tmp_path / "run.yaml", folder=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 2
    assert "hint.jinja reads hint" in told and "Traceback" not in told
    assert not cfg.run.directory.exists()


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a lone answer has no peer": (
        {"reads": ["peer"]},
        {"rollout": {"n_samples": 1}, "reward": {"name": "exact"}},
        "n_samples: 1",
    ),
    "nobody marks peers": ({"reads": ["peer"]}, {}, "set reward.name"),
    "nobody says anything": ({"reads": ["feedback"]}, {}, "set reward.name"),
    "an average in bfloat16": (
        {"weights": {"ema": 0.1}, "dtype": "bfloat16"},
        {},
        "must be float32",
    ),
    "turns that read less": (
        {},
        {"environment": {"name": "x.py:X"}, "rollout": {"context": "last"}},
        "rollout.context: whole",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_had_is_refused(name: str, tmp_path: Path) -> None:
    asked, sections, words = WRONG[name]
    config(tmp_path, "run")
    teacher = {"prompt": str(tmp_path / "hint.jinja"), **asked}
    with pytest.raises(ConfigError) as error:
        config(tmp_path, "run", model={"teachers": {"self": teacher}}, **sections)
    assert words in str(error.value)


def test_a_name_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    config(tmp_path, "run")
    teacher = {"prompt": str(tmp_path / "hint.jinja")}
    with pytest.raises(ConfigError, match="letters, digits, _ and -"):
        config(tmp_path, "run", model={"teachers": {"../x": teacher}})
