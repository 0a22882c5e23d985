"""Where a reply ends, and what of it is read: a tokenizer whose end token is another than the one
that its chat template puts behind a reply, and special tokens that mean something.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerBase

from oxrl.assembly.assembly import stop_tokens
from oxrl.commands.evaluate import run_generate
from oxrl.commands.export import run_export
from oxrl.commands.train import run
from oxrl.data.chat import ChatEncoder, reply_text
from oxrl.data.conversations import ConversationDataset
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.plan.preflight import Prepared, examine
from support.known_weights import model_that_adds
from support.samplers import make_requests
from support.small_runs import rl_config, sft_config, write_inputs

# Of the built-in tokenizer: <|pad|>, <|end|>, <|user|>.
PAD, END, USER = 0, 1, 2
ASKED = ["2+3=", "4+5=", "7+2=", "3+6="]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model that ends its answers by the template's <|end|>; its files say <|pad|> alone."""
    folder = model_that_adds(tmp_path / "base")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": PAD}))
    return folder


def listed(folder: Path) -> object:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_the_token_behind_a_reply_in_the_template_ends_it(base: Path, tmp_path: Path) -> None:
    policy = load_policy(str(base))
    assert policy.generation_config.eos_token_id == PAD
    assert stop_tokens(load_tokenizer(str(base)), policy) == (PAD, END)
    answered = run_generate(str(base), ASKED, samples=4)
    assert "stop" in {answer["finish_reason"] for answer in answered}
    assert all("<|end|>" not in str(answer["response"]) for answer in answered)
    exported = run_export(base, tmp_path / "exported")
    assert listed(exported) == [PAD, END]


@pytest.mark.parametrize("config", [rl_config, sft_config])
def test_runs_stop_there_and_their_checkpoints_say_so(
    config: Any, base: Path, tmp_path: Path
) -> None:
    cfg = config(tmp_path / "run", "ends", ["run.steps=2"], model={"name": str(base)})
    found = examine(cfg, Prepared(), "tokenizer")
    assert "stop token <|pad|> or <|end|>" in found.text
    run(cfg)
    assert listed(cfg.run.directory / "checkpoints" / "step_00000002") == [PAD, END]
    if config is rl_config:
        lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
        assert "stop" in {json.loads(line)["finish_reason"] for line in lines}


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        # Phi-3 ends a conversation behind the end of the reply.
        ("{{ messages[-1]['content'] }}<|assistant|>\n<|pad|>", [END, 3]),
        ("{{ messages[-1]['content'] }} \n<|system|>\n", [END, 4]),
        ("{{ messages[-1]['content'] }}\n\n", [END]),
        ("{{ raise_exception('no') }}", [END]),
    ],
)
def test_it_is_the_first_token_of_its_own_behind_the_reply(template: str, ends: list[int]) -> None:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = template
    assert ChatEncoder(tokenizer).ends == ends


def test_an_end_that_the_tokenizer_does_not_call_special_is_learned_and_stops(
    tmp_path: Path,
) -> None:
    tokenizer = builtin_tokenizer()
    tokenizer.add_tokens(["<end_of_turn>"])
    new = len(tokenizer) - 1
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<end_of_turn>{% endfor %}"
    assert ChatEncoder(tokenizer).ends == [END, new]
    write_inputs(tmp_path)
    for example in ConversationDataset.load(tmp_path / "chats.jsonl", tokenizer).in_order():
        assert example.token_ids[-1] == new and example.trained[-1]


def test_a_list_of_stops_that_is_whole_stays_as_it_was_read() -> None:
    policy = builtin_policy("builtin:tiny", seed=0)
    policy.generation_config.eos_token_id = [7, END]
    assert stop_tokens(builtin_tokenizer(), policy) == (END, 7)
    assert policy.generation_config.eos_token_id == [7, END]


def test_one_token_that_is_end_and_unknown_is_learned(tmp_path: Path) -> None:
    """As of GPT-2 and Pythia."""
    tokenizer = builtin_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token
    tokenizer.pad_token = tokenizer.eos_token
    write_inputs(tmp_path)
    for example in ConversationDataset.load(tmp_path / "chats.jsonl", tokenizer).in_order():
        assert example.token_ids[-1] == END and example.trained[-1]


@pytest.mark.parametrize("sampler", [LocalSampler, CachedSampler])
def test_special_tokens_inside_a_reply_are_text_and_its_ends_and_padding_are_not(
    sampler: Any,
) -> None:
    tokenizer = builtin_tokenizer()
    engine = sampler(builtin_policy("builtin:tiny", seed=0), tokenizer, max_rows=64)
    # So hot that every token is as likely as any other, whatever the weights.
    requests = make_requests(24, 8, temperature=1e6, stop_token_ids=(END, 9))
    done = generate(engine, requests, deadline_s=600)
    said = [text_of(tokenizer, completion.token_ids, (END, 9)) for completion in done]
    assert [completion.text for completion in done] == said
    assert any("<|user|>" in text for text in said)
    sampled = {token for completion in done for token in completion.token_ids}
    assert {PAD, END, 9, USER} <= sampled
    assert not any("<|pad|>" in text or "<|end|>" in text for text in said)


def text_of(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stops: tuple[int, ...]
) -> str:
    return str(tokenizer.decode([t for t in token_ids if t not in (PAD, *stops)]))


def test_a_call_between_special_tokens_is_read_and_plan_says_so(tmp_path: Path) -> None:
    tokenizer = builtin_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    call = '<tool_call>{"name": "add"}</tool_call>'
    ids = tokenizer.encode(f"{call}<|end|>", add_special_tokens=False)
    assert reply_text(tokenizer, ids, (END,)) == call
    model = builtin_policy("builtin:tiny", seed=0)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    cfg = rl_config(tmp_path / "run", "calls", model={"name": str(tmp_path / "model")})
    found = examine(cfg, Prepared(), "tokenizer")
    assert (
        "special tokens that rewards see as text: <|system|>, <tool_call>, </tool_call>"
        in found.text
    )


def test_settings_of_generation_that_transformers_would_not_write_are_written_as_they_were_read(
    tmp_path: Path,
) -> None:
    folder = model_that_adds(tmp_path / "greedy")
    given = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match="temperature"):
        GenerationConfig.from_pretrained(folder).save_pretrained(tmp_path / "refused")
    cfg = sft_config(tmp_path / "run", "greedy", ["run.steps=1"], model={"name": str(folder)})
    run(cfg)
    checkpoint = cfg.run.directory / "checkpoints" / "step_00000001"
    exported = run_export(checkpoint, tmp_path / "exported")
    read = GenerationConfig.from_pretrained(folder).to_diff_dict()
    assert read["temperature"] == 0.6
    for written in (checkpoint, exported):
        assert GenerationConfig.from_pretrained(written).to_diff_dict() == read
