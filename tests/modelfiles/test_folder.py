"""A damaged model folder is named, whatever is wrong with it, and nothing outside it is read."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import DataError
from oxrl.modelfiles.dims import model_dims
from oxrl.modelfiles.folder import (
    PROCESSOR,
    REFERENCE_FILE,
    has_image_processor,
    has_own_head,
    model_files,
    stored_kinds,
    weight_files,
)
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.meta_init import awaited
from oxrl.models.network import unpadded
from support.samplers import TOKENIZER, make_requests

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
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
    (folder / "weights.pt").write_bytes(b"")
    (folder / WEIGHTS).unlink()


def without(*names: str) -> Damage:
    """An index of all tensors, and a part that lacks some of them."""

    def damage(folder: Path) -> None:
        index("part.safetensors")(folder)
        tensors = load_file(folder / "part.safetensors")
        for name in names:
            tensors.pop(name)
        save_file(tensors, folder / "part.safetensors", metadata={"format": "pt"})

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "shape": (weights(lambda t: t.update({EMBEDDING: torch.zeros(3, 3)})), r"\(3, 3\), not \(261"),
    "shape, named as in a bare model": (
        weights(lambda t: t.update({EMBEDDING.removeprefix("model."): torch.zeros(3, 3)})),
        r"\(3, 3\), not \(261",
    ),
    "code of its own": (
        lambda f: (
            edit("model_type", "odd")(f),
            edit("auto_map", {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})(f),
        ),
        "no model can be read .*model.trust_remote_code: true runs the code",
    ),
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
    "types": (
        weights(lambda t: t.update({EMBEDDING: t[EMBEDDING].long(), NORM: t[NORM].int()})),
        rf"2 tensors in a type that is not trained, such as '{EMBEDDING}' as I64",
    ),
    "pickle": (pickled, "pytorch_model.bin is a pickle"),
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
    "index of a part that lacks some": (
        without(EMBEDDING, NORM),
        rf"part.safetensors lacks '{EMBEDDING}', which",
    ),
    "index of no tensors": (
        lambda f: (index("part.safetensors")(f), write(INDEX, '{"weight_map": {}}')(f)),
        "weight_map names no tensors",
    ),
    "index a list": (lambda f: (index("part.safetensors")(f), write(INDEX, "[1]")(f)), "a list"),
    "a reference": (
        lambda f: [(f / WEIGHTS).unlink(), write(REFERENCE_FILE, '{"model": "theirs"}')(f)],
        "only names its model: 'theirs'; give that",
    ),
    "a reference no JSON": (
        lambda f: [(f / WEIGHTS).unlink(), write(REFERENCE_FILE, "{")(f)],
        "only names its model: .* is no JSON",
    ),
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


def tensors_of(folder: Path, *, on_meta: bool) -> dict[str, torch.Tensor]:
    """The weights of the policy in a folder, as one process reads them, or as ranks do."""
    model = load_policy(str(folder), LoadOptions(on_meta=on_meta))
    waiting = awaited(model)
    assert bool(waiting) == on_meta
    found = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, stored in waiting.items():
        flat = torch.empty(stored.shape.numel())
        stored.fill(flat)
        found[name] = flat.view(stored.shape)
    return found


def older_shards(folder: Path) -> None:
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    listed = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def second_file(folder: Path) -> None:
    index("part.safetensors")(folder)
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / "part.safetensors").items()}
    save_file(tensors, folder / "model_old.safetensors")


def noise(folder: Path) -> None:
    (folder / "._model.safetensors").write_bytes(b"\0\5\x16\7 of macOS")
    (folder / "._tokenizer.model").write_bytes(b"\0\5\x16\7 of macOS")
    (folder / "adapter_model.safetensors").write_bytes(b"of another model")
    (folder / "model.safetensors.bak").write_bytes(b"of another day")
    (folder / "zzz.safetensors").write_bytes(b"no weights")


@pytest.mark.parametrize("beside", [older_shards, second_file, noise])
@pytest.mark.parametrize("on_meta", [False, True])
def test_weights_are_those_of_the_single_file_or_index_whatever_lies_beside_them(
    beside: Damage, on_meta: bool, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    before = set(model_files(folder))
    expected = tensors_of(folder, on_meta=on_meta)
    dims = model_dims(str(folder))
    beside(folder)
    found = tensors_of(folder, on_meta=on_meta)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert model_dims(str(folder)) == dims
    if beside is noise:
        assert set(model_files(folder)) == before


def test_the_weights_of_a_file_that_config_json_names_are_left_to_transformers_the_file_of_weights(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / "chosen.safetensors", metadata={"format": "pt"})
    edit("transformers_weights", "chosen.safetensors")(folder)
    for on_meta in (False, True):
        model = load_policy(str(folder), LoadOptions(on_meta=on_meta))
        assert torch.equal(model.get_parameter(EMBEDDING), tensors[EMBEDDING])


def test_what_an_index_names_elsewhere_is_no_file_of_the_model(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    index("{parent}/outside.safetensors")(folder)
    assert (tmp_path / "outside.safetensors").is_file()
    assert weight_files(folder) == []


def test_a_model_reads_images_where_its_processor_is(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    assert not has_image_processor(str(folder))
    (folder / PROCESSOR).write_text("{}")
    assert has_image_processor(str(folder)) and has_image_processor("builtin:tiny-vl")


def test_a_head_is_compared_with_every_tensor_of_its_shape(whole: Path, tmp_path: Path) -> None:
    """Which of them are the embeddings, each family names in another way."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["another"] = tensors[EMBEDDING] + 1
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert has_own_head(stored_kinds(folder)) is False


def test_the_files_of_an_adapter_are_its_own_and_those_of_its_base(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(whole / WEIGHTS, folder)
    adapter(str(whole))(folder)
    found = model_files(folder)
    own = {name for name in found if not name.startswith("base/")}
    assert own == {"adapter_model.safetensors", "adapter_config.json"}
    assert {f"base/{name}" for name in model_files(whole)} == found.keys() - own


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_in_the_files_is_a_weight_of_its_own_where_it_differs(
    differs: bool, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    tied = model_dims(str(folder))
    assert tied is not None and tied.tied
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    tensors["lm_head.weight"][-1, -1] += 1.0 * differs
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for on_meta in (False, True):
        found = tensors_of(folder, on_meta=on_meta)
        assert ("lm_head.weight" in found) == differs
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
        # Whoever reads the configuration alone learns it, and what is written is read so again.
        model = load_policy(str(folder), LoadOptions(on_meta=on_meta))
        assert model.config.tie_word_embeddings != differs
    dims = model_dims(str(folder))
    head = tied.hidden * tied.vocabulary
    assert dims == replace(tied, tied=not differs, parameters=tied.parameters + head * differs)
    save_model(load_policy(str(folder)), tmp_path / "again")
    again = tensors_of(tmp_path / "again", on_meta=True)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.items())
    assert ("lm_head.weight" in again) == differs


def test_values_that_are_equal_in_the_type_that_is_read_are_tied(
    whole: Path, tmp_path: Path
) -> None:
    """Transformers compares what it has read, in the type of the model."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / WEIGHTS)
    tensors[EMBEDDING].fill_(1.0)
    tensors["lm_head.weight"] = tensors[EMBEDDING] + 1e-6
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for dtype, count in ((torch.float32, 2), (torch.bfloat16, 1)):
        for on_meta in (False, True):
            model = load_policy(str(folder), LoadOptions(dtype=dtype, on_meta=on_meta))
            shape = tensors[EMBEDDING].shape
            assert [weight.shape for weight in model.parameters()].count(shape) == count


def test_a_token_without_an_embedding_is_named_before_it_is_read() -> None:
    model = load_policy("builtin:tiny")
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    with pytest.raises(DataError, match="token id 261 has no embedding: the model has 261"):
        trainer.forward(unpadded(torch.tensor([[1, 261]])), frozenset({"logprobs"}))
    [request] = make_requests(1)
    object.__setattr__(request.prompt, "token_ids", (5, 300))
    with pytest.raises(DataError, match="token id 300"):
        LocalSampler(model, TOKENIZER).submit([request])
