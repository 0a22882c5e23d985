"""Ranks that cut weights up read their own pieces of a model, and write their own of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.checkpoint.format import read_parts
from oxrl.checkpoint.model_files import save_model
from oxrl.checkpoint.verify import part_problems, verify_checkpoint
from oxrl.models.load import load_policy
from oxrl.models.stored import GivenTensor, stored_in
from oxrl.runs.ranks import ALONE
from support import conformance, later_ranks
from support.conformance import needs_deepspeed
from support.rank_processes import run_ranks
from support.tiny import batches
from support.whole_checkpoints import save_checkpoint

KINDS = [("policy", "bfloat16"), ("critic", "float32"), ("adapter", "float32"), ("dora", "float32")]
ENGINES = [("fsdp", 2), pytest.param("zero3", 2, marks=needs_deepspeed)]
FULL = [
    pytest.param(engine, 3, marks=[pytest.mark.full, needs_deepspeed])
    for engine in ("zero1", "zero2", "zero3")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    # Larger than the small one that stands in for it when its head is checked.
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=261,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    save_model(model, folder / "whole")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[-1] = float("nan")
    save_model(model, folder / "broken")
    return folder


@pytest.mark.parametrize(("engine", "world"), ENGINES)
def test_a_model_read_in_pieces_learns_as_one_that_was_whole(
    engine: str, world: int, models: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    run_ranks(world, later_ranks.compare, engine, models / "whole", tmp_path, KINDS)
    for rank in range(world):
        said: dict[str, Any] = json.loads((tmp_path / f"{engine}_{rank}.json").read_text())
        for kind, _ in KINDS:
            whole, pieces = said[f"{kind} False"], said[f"{kind} True"]
            assert whole.pop("meta") == 0
            assert pieces.pop("meta") == 24
            assert pieces == whole
        counted = said["ledger"]
        most = counted["model"] * (1 / world + 0.1) + counted["largest"]
        if (
            engine == "fsdp"
        ):  # DeepSpeed keeps weights of up to 100,000 numbers whole, as all of these
            assert counted["peak"] <= most
        assert "NaN or infinite numbers in 'model.norm.weight'" in said["not finite"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the local engine saves after two steps."""
    folder = tmp_path_factory.mktemp("local") / "saved"
    trainer = conformance.make_trainer("local", load_policy("builtin:tiny"), ALONE)
    rows = batches(conformance.LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]
    conformance.steps(trainer, rows, 2)
    trainer.save(folder)
    return folder


def test_a_file_is_that_of_the_safetensors_library_to_the_last_byte(
    checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.glob("*.safetensors"):
        save_file(load_file(file), tmp_path / file.name, metadata={"format": "pt"})
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


@pytest.mark.parametrize(("engine", "world"), [*ENGINES, *FULL])
def test_ranks_write_their_shares_of_the_same_checkpoint(
    engine: str, world: int, checkpoint: Path, tmp_path: Path
) -> None:
    run_ranks(world, later_ranks.share, engine, checkpoint, tmp_path)
    saved = tmp_path / "saved"
    assert not (tmp_path / "elsewhere").exists()
    for file in checkpoint.iterdir():
        if file.name != "parts.json":
            assert (saved / file.name).read_bytes() == file.read_bytes()
    sizes = {file: (saved / file).stat().st_size for file in read_parts(saved)}
    total = sum(sizes.values())
    for rank in range(world):
        ranges = [parts[rank]["ranges"] for parts in read_parts(saved).values()]
        written = sum(end - begin for of_file in ranges for begin, end in of_file)
        assert abs(written - total / world) < 0.1 * total / world
        assert int((tmp_path / f"read_{rank}").read_text()) < 1.2 * total / world + 2**20
    assert list(part_problems(saved)) == []


def test_a_byte_of_any_part_is_missed(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    size = file.stat().st_size

    def in_two_parts(folder: Path) -> None:
        import hashlib

        data = file.read_bytes()
        (folder / file.name).write_bytes(data)
        cuts = [[[0, 100], [200, size]], [[100, 200]]]
        parts = [
            {
                "sha256": hashlib.sha256(b"".join(data[a:b] for a, b in cut)).hexdigest(),
                "ranges": cut,
            }
            for cut in cuts
        ]
        (folder / "parts.json").write_text(json.dumps({file.name: parts}))

    path = save_checkpoint(tmp_path, 1, in_two_parts, state={}, offsets={}, keep=1)
    assert verify_checkpoint(path) == []
    whole = (path / file.name).read_bytes()
    for at in (0, 150, size - 1):
        broken = bytearray(whole)
        broken[at] ^= 1
        (path / file.name).write_bytes(broken)
        assert "other contents than were written" in verify_checkpoint(path)[0]
    (path / file.name).write_bytes(whole)
    assert verify_checkpoint(path) == []
    (path / "parts.json").unlink()
    assert verify_checkpoint(path) == ["parts.json is missing"]


def test_one_writer_needs_no_parts(checkpoint: Path, tmp_path: Path) -> None:
    def copied(folder: Path) -> None:
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    path = save_checkpoint(tmp_path, 1, copied, state={}, offsets={}, keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "oxrl-checkpoint-1"
    assert all("sha256" in entry for entry in manifest["files"].values())
    assert "parts.json" not in manifest["files"]
    assert verify_checkpoint(path) == []


def test_a_piece_is_read_from_a_file_as_from_memory(tmp_path: Path) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    save_file({"w": whole}, tmp_path / "a.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for start, count in ((0, 35), (3, 11), (34, 1), (35, 0)):
            read, given = torch.empty(2, count, dtype=dtype)
            stored_in(tmp_path / "a.safetensors")["w"].fill(read, start, torch.bfloat16)
            GivenTensor(whole).fill(given, start, torch.bfloat16)
            expected = whole.flatten()[start : start + count].bfloat16().to(dtype)
            assert torch.equal(read, expected)
            assert torch.equal(given, expected)
