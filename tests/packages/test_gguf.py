"""Models out of GGUF files: the same logits, the same tokens, and no file that loses something."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from oxrl.cli import app
from oxrl.errors import DataError
from oxrl_datasets.prepare import PREPARERS
from support.small_gguf import MERGES, TOKENS, gguf, llama, small, spelled, write

regex = pytest.importorskip("regex")

PREPARE = PREPARERS["gguf"]
# GPT-2's rule, and what stands before it: single digits, or LLaMA 3's own.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {"gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "llama-bpe": [LLAMA3]}


def encode(text: str, cuts: list[str], tokens: list[str], merges: list[str]) -> list[int]:
    """Byte-pair encoding, straight from its definition: cut, spell in bytes, merge the best pair."""
    pieces = [text]
    for cut in cuts:
        pieces = [part for piece in pieces for part in split(piece, cut)]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    numbers = {token: number for number, token in enumerate(tokens)}
    found: list[int] = []
    for piece in pieces:
        parts = [*spelled(piece)]
        while True:
            neighbours = list(zip(parts, parts[1:], strict=False))
            best = min(neighbours, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
            if best is None or best not in ranks:
                break
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == best:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        found += [numbers[part] for part in parts]
    return found


def split(text: str, cut: str) -> list[str]:
    """The matches of a rule, and what lies between them."""
    parts: list[str] = []
    end = 0
    for match in regex.finditer(cut, text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("blocks", [None, "Q8_0", "Q4_1", "F16"])
def test_the_model_has_the_weights_of_the_file(
    tmp_path: Path, tied: bool, blocks: str | None
) -> None:
    model = llama(tied=tied, seed=3)
    file = write(tmp_path / "small.gguf", model, blocks=blocks)
    if blocks is not None:  # what the blocks stand for is what the model has
        kind = gguf.GGMLQuantizationType[blocks]
        for weight in model.parameters():
            if weight.ndim == 2:
                stored = gguf.quants.quantize(weight.detach().numpy(), kind)
                weight.data = torch.tensor(np.array(gguf.quants.dequantize(stored, kind)))
    report = PREPARE(file, tmp_path / "out")
    assert report["parameters"] == model.num_parameters()
    assert (report["license"], report["pre"]) == ("apache-2.0", "smollm")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert read.dtype == torch.float32
    assert read.config.tie_word_embeddings is tied
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    mine, found = model.state_dict(), read.state_dict()
    for name, weight in mine.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(("config_class", "width"), [(Qwen2Config, 16), (Qwen3Config, 128)])
def test_families_with_biases_and_norms_of_heads_are_read_too(
    tmp_path: Path, config_class: type[PreTrainedConfig], width: int
) -> None:
    model = small(config_class, tied=False, seed=1, head_dim=width)
    PREPARE(write(tmp_path / "small.gguf", model, rule="qwen2"), tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert read.config.model_type == config_class.model_type
    found = read.state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "llama-bpe"])
def test_a_thousand_texts_have_the_tokens_of_a_plain_encoder(tmp_path: Path, rule: str) -> None:
    PREPARE(write(tmp_path / "small.gguf", llama(), rule=rule), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == len(TOKENS)
    draw = random.Random(rule)
    pieces = [
        "  ",
        " ",
        "\n",
        "12",
        "123",
        "the",
        " the",
        "a1",
        "0",
        "00",
        "٣",
        "é",
        "'s",
        "½",
        "2.",
    ]
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(1_000)]
    for text in texts:
        assert tokenizer.encode(text) == encode(text, CUTS[rule], TOKENS, MERGES), repr(text)
    others = [encode(text, CUTS["gpt-2"], TOKENS, MERGES) for text in texts]
    same = sum(other == tokenizer.encode(text) for text, other in zip(texts, others, strict=True))
    # With GPT-2's rule most of them would have had other tokens: the comparison can fail.
    assert (same == 1_000) is (rule == "gpt-2")


def test_the_folder_has_template_end_of_turn_and_context(tmp_path: Path) -> None:
    file = write(tmp_path / "small.gguf", llama(), add_eot_token_id=2)
    PREPARE(file, tmp_path / "out", dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "<s>user hi<e>"
    assert tokenizer.encode(said)[0] == 0 and tokenizer.encode(said)[-1] == 1
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<e>", 128)
    settings = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 2]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out/report.json").read_text())["dtype"] == "bfloat16"


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    model = llama()
    nan = llama()
    nan.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    yarn = gguf.RopeScalingType.YARN
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    cases = [
        ({"rule": "hunyuan-x"}, model, "cuts text by the rule 'hunyuan-x'"),
        ({"rule": None}, model, "cuts text by the rule None"),
        ({"drop": "blk.1.ffn_up.weight"}, model, "missing_keys"),
        ({"extra": factors}, model, "rope_freqs.weight, which scales positions"),
        ({"add_rope_scaling_type": yarn}, model, "rope.scaling.type = 'yarn'"),
        ({"add_uint16": ("split.count", 3)}, model, "one of 3 parts"),
        # transformers reads no width of heads from files of Qwen3, whose own is 128.
        ({"rule": "qwen2"}, small(Qwen3Config, tied=True, seed=0), r"q_proj\.weight as \[64, 64\]"),
        ({}, nan, "up_proj.weight has values that are NaN"),
    ]
    for number, (changes, source, message) in enumerate(cases):
        file = write(tmp_path / f"{number}.gguf", source, **changes)
        with pytest.raises(DataError, match=message) as refused:
            PREPARE(file, tmp_path / "out")
        assert file.name in str(refused.value)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".out*"))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", llama()).read_bytes()
    header = whole.index(b"tokenizer.ggml.merges")
    damaged = [whole[:length] for length in (0, 3, 4, 20, 500, header + 9, len(whole) - 4_000)]
    damaged.append(b"GGML" + whole[4:])
    # An array said to be 2 ** 60 long, and 2 ** 40 layers.
    merges = whole.index(b"tokenizer.ggml.merges") + len("tokenizer.ggml.merges") + 8
    damaged.append(whole[:merges] + struct.pack("<Q", 2**60) + whole[merges + 8 :])
    layers = whole.index(b"llama.block_count") + len("llama.block_count") + 4
    damaged.append(whole[:layers] + struct.pack("<I", 2**31) + whole[layers + 4 :])
    for number, content in enumerate(damaged):
        file = tmp_path / f"damaged{number}.gguf"
        file.write_bytes(content)
        with pytest.raises(DataError, match=file.name):
            PREPARE(file, tmp_path / "out")
    with pytest.raises(DataError, match=r"nothing\.gguf: there is no such file"):
        PREPARE(tmp_path / "nothing.gguf", tmp_path / "out")


def test_bytes_that_flip_end_in_a_model_or_in_an_error_that_names_the_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", llama()).read_bytes()
    header = whole.index(b"token_embd.weight") + 2_000
    draw = random.Random(0)
    for number in range(40):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 1, 8])):
            content[draw.randrange(header)] = draw.randrange(256)
        file = tmp_path / f"flipped{number}.gguf"
        file.write_bytes(bytes(content))
        try:
            PREPARE(file, tmp_path / f"out{number}")
        except DataError as error:
            assert file.name in str(error), number


def test_it_is_a_command_like_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "small.gguf", llama())
    arguments = ["prepare", "gguf", "--source", str(file), "--out", str(tmp_path / "out")]
    app(arguments, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["parameters"] == llama().num_parameters()
    with pytest.raises(DataError, match="is a file or holds some"):
        app(arguments, standalone_mode=False)
    with pytest.raises(DataError, match="is a file or holds some"):
        app([*arguments[:-1], str(file)], standalone_mode=False)
    for wrong in (["--seed", "1"], ["--limit", "2"], ["--test", "0.1"]):
        with pytest.raises(DataError, match="no --seed, --limit or --test"):
            app([*arguments[:-1], str(tmp_path / "new"), *wrong], standalone_mode=False)
    with pytest.raises(DataError, match="dtype='int8'"):
        app([*arguments[:-1], str(tmp_path / "new"), "dtype=int8"], standalone_mode=False)


@pytest.mark.full
def test_smollm2_has_its_weights_and_the_tokens_of_a_plain_encoder(tmp_path: Path) -> None:
    found = os.environ.get("OXRL_TEST_GGUF")
    if found is None:
        pytest.skip("OXRL_TEST_GGUF names no file; `make smollm` says where SmolLM2's is")
    data = Path(os.environ.get("OXRL_TEST_DATA", "../shared/data")) / "gsm8k/train.jsonl"
    if not data.is_file():
        pytest.skip(f"{data} is not there")
    assert PREPARE(Path(found), tmp_path / "out")["parameters"] == 134_515_008
    reader = gguf.GGUFReader(found)

    def strings(name: str) -> list[str]:
        field = reader.fields[name]
        return [bytes(field.parts[part]).decode() for part in field.data]

    tokens, merges = strings("tokenizer.ggml.tokens"), strings("tokenizer.ggml.merges")
    assert strings("tokenizer.ggml.pre") == ["smollm"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    draw = random.Random(0)
    for line in data.read_text().split("\n")[:500]:
        row = json.loads(line)
        for text in (row["question"], row["answer"].replace(" ", " " * draw.randint(1, 3))):
            assert tokenizer.encode(text) == encode(text, CUTS["smollm"], tokens, merges)
