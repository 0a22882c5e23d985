"""A damaged model folder is named, whatever is wrong with it, and nothing outside it is read."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samplers import TOKENIZER, make_requests

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import DataError
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.models.network import unpadded

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    save_model(load_policy("builtin:tiny"), folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def edit(name: str, value: object) -> Damage:
    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, name: value}))

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def content(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def rewrite(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        values = json.loads(data[8 : 8 + size])
        change(values)
        text = json.dumps(values).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return content(rewrite)


def index(name: str) -> Damage:
    def damage(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        shutil.copy(folder / WEIGHTS, folder.parent / "outside.safetensors")
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        file = name.replace("{parent}", str(folder.parent))
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)})
        )

    return damage


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def adapter(base: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
        named = {"base_model_name_or_path": base.replace("{self}", str(folder)), "r": 4}
        (folder / "adapter_config.json").write_text(json.dumps(named))

    return damage


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "shape": (weights(lambda t: t.update({EMBEDDING: torch.zeros(3, 3)})), r"\(3, 3\), not \(261"),
    "type": (weights(lambda t: t.update({EMBEDDING: t[EMBEDDING].long()})), "I64"),
    "missing": (weights(lambda t: t.pop(EMBEDDING)), "lacks"),
    "nan": (weights(lambda t: t[EMBEDDING].fill_(float("nan"))), "NaN"),
    "cut off": (content(lambda data: data[:-100]), "cut off"),
    "cut in its header": (content(lambda data: data[:50]), "cut off"),
    "empty": (content(lambda data: b""), "damaged"),
    "length of header": (content(lambda data: b"\xff" * 8 + data[8:]), "damaged"),
    "offsets": (header(lambda h: h[EMBEDDING].update(data_offsets=[0, 10**12])), "damaged"),
    "noise": (content(lambda data: b"noise" * 99), "damaged"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no weights"),
    "pickle": (pickled, "pickle"),
    "config no JSON": (write("config.json", "{"), "no JSON"),
    "config a list": (write("config.json", "[]"), "a list"),
    "config empty": (write("config.json", "{}"), "names no model_type"),
    "unknown type": (edit("model_type", "no such"), "no such"),
    "huge": (edit("hidden_size", 10**9), "other shapes"),
    "negative": (edit("num_hidden_layers", -1), "-1"),
    "text for a number": (edit("hidden_size", "a"), "hidden_size"),
    "no heads": (edit("num_attention_heads", 0), "ZeroDivision"),
    "index leads up": (index("../outside.safetensors"), "no file name"),
    "index is absolute": (index("{parent}/outside.safetensors"), "no file name"),
    "index of nothing": (index("gone.safetensors"), "not there"),
    "index a list": (lambda f: (index("part.safetensors")(f), write(INDEX, "[1]")(f)), "a list"),
    "adapter of itself": (adapter("{self}"), "leads back"),
    "adapter no JSON": (write("adapter_config.json", "{"), "no JSON"),
    "adapter of nothing": (adapter(""), "which model"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_and_the_damage_named(
    name: str, whole: Path, tmp_path: Path
) -> None:
    damage, words = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    damage(folder)
    with pytest.raises(DataError, match=rf"(?s)model.*{words}"):
        load_policy(str(folder))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer"),
        (write("tokenizer.json", "{"), "tokenizer"),
        (write("tokenizer.json", "{}"), "tokenizer"),
        (write("config.json", "[]"), "tokenizer"),
    ],
)
def test_a_folder_without_a_whole_tokenizer_is_refused(
    damage: Damage, words: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    damage(folder)
    with pytest.raises(DataError, match=words):
        load_tokenizer(str(folder))


def test_weights_in_parts_are_read(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    index("part.safetensors")(folder)
    expected = load_policy(str(whole)).state_dict()
    for name, tensor in load_policy(str(folder)).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_a_token_without_an_embedding_is_named_before_it_is_read() -> None:
    model = load_policy("builtin:tiny")
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    with pytest.raises(DataError, match="token id 261 has no embedding: the model has 261"):
        trainer.forward(unpadded(torch.tensor([[1, 261]])), frozenset({"logprobs"}))
    [request] = make_requests(1)
    object.__setattr__(request.prompt, "token_ids", (5, 300))
    with pytest.raises(DataError, match="token id 300"):
        LocalSampler(model, TOKENIZER).submit([request])
