"""Muon, AdamW with 8-bit moments, weights without masters: against references of a few lines, over
ranks, and through checkpoints.
"""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oxrl.checkpoint.shares import PieceOfWeight
from oxrl.engines.train.fsdp import FsdpTrainer
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.optimizers import rules_of
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.per_weight_optimizers import PerWeightOptimizers, muon_step
from oxrl.errors import CheckpointError, EngineError, MissingExtraError
from oxrl.models.load import LoadOptions, load_critic, load_policy
from oxrl.models.network import token_model
from oxrl.runs.ranks import ALONE
from oxrl.tables.watch import Deadlines
from support import conformance
from support.figures import SEED, Learned
from support.rank_processes import run_ranks

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: the extra 8bit"
)
KINDS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "no masters": {"master_weights": "none"},
    "muon, no masters": {"optimizer": "muon", "master_weights": "none"},
}
CHOICES = [
    pytest.param(name, marks=needs_bitsandbytes) if "8bit" in name else name for name in KINDS
]
OVER_RANKS = [
    "muon",
    pytest.param("adamw_8bit", marks=[needs_bitsandbytes, pytest.mark.full]),
    pytest.param("no masters", marks=pytest.mark.full),
    pytest.param("muon, no masters", marks=pytest.mark.full),
]
BATCH = conformance.batches(conformance.LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]


def trainer_of(
    name: str, *, engine: str = "local", seed: int = 0, ranks: Any = ALONE, **changed: Any
) -> Any:
    dtype = torch.bfloat16 if "no masters" in name else torch.float32
    model: Any = load_policy("builtin:tiny", LoadOptions(dtype=dtype, seed=seed))
    if "8bit" in name:
        # Rows that two ranks divide into whole blocks.
        model.resize_token_embeddings(264, mean_resizing=False)
    options = {"lr": 1e-2, "weight_decay": 0.1, "decay": "matrices"} | KINDS.get(name, {}) | changed
    return conformance.make_trainer(engine, model, ranks, **options)


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five quintic steps towards the nearest orthogonal matrix, in float64.

    Source: kellerjordan.github.io/posts/muon.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (3, 16, 32)])
def test_muon_orthogonalises_the_momentum_of_each_matrix(shape: tuple[int, ...]) -> None:
    """Within 2 % of the step: the library multiplies in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    expected = weight.double().numpy().copy()
    momentum = torch.zeros(shape)
    kept = np.zeros(shape)
    group = {"lr": 0.02, "weight_decay": 0.1}
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        before = weight.clone()
        muon_step(weight, gradient, momentum, group)
        kept = 0.95 * kept + 0.05 * gradient.double().numpy()
        ahead = 0.05 * gradient.double().numpy() + 0.95 * kept
        matrices = ahead.reshape(-1, *shape[-2:])
        steps = np.stack([newton_schulz(matrix) for matrix in matrices]).reshape(shape)
        far = 0.02 * 0.2 * max(shape[-2:]) ** 0.5
        expected = (1 - 0.02 * 0.1) * before.double().numpy() - far * steps
        off = np.linalg.norm(weight.double().numpy() - expected)
        assert off < 0.02 * np.linalg.norm(far * steps)
        assert np.allclose(momentum.numpy(), kept, atol=1e-6)


def test_muon_steps_matrices_between_hidden_layers_alone() -> None:
    model = load_policy("builtin:tiny")
    rules = rules_of(model, token_model(model).head.weight, "muon")
    of_muon = {name for name, rule in rules.items() if rule == "muon"}
    assert of_muon == {name for name in rules if "proj" in name}
    assert rules["model.embed_tokens.weight"] == rules["model.norm.weight"] == "adamw"
    critic = load_critic("builtin:tiny")
    head = token_model(critic).head.weight
    rules = rules_of(critic, head, "muon")
    [of_head] = [name for name, p in critic.named_parameters() if p is head]
    assert rules[of_head] == "adamw" and head.ndim == 2


def test_experts_in_one_tensor_are_matrices_each() -> None:
    class SomeExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 6))

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 8, 6))

    model = nn.Sequential(SomeExperts(), Patches(), nn.Linear(3, 2), nn.Embedding(3, 2))
    rules = rules_of(model, torch.zeros(2, 3), "muon")
    assert {name for name, rule in rules.items() if rule == "muon"} == {
        "0.gate_up_proj",
        "2.weight",
    }


@needs_bitsandbytes
def test_moments_of_eight_bits_lead_where_those_of_float32_do() -> None:
    """Within 5 % of the way after ten steps, each weight."""
    trainers = [trainer_of("adamw_8bit", lr=1e-3), trainer_of("8bit, but not", lr=1e-3)]
    for name, theirs in trainers[1].model.named_parameters():
        theirs.data.copy_(trainers[0].model.get_parameter(name))
    begun = {name: p.detach().clone() for name, p in trainers[0].model.named_parameters()}
    for trainer in trainers:
        conformance.steps(trainer, BATCH, 10)
    for name, ours in trainers[0].model.named_parameters():
        theirs = trainers[1].model.get_parameter(name)
        off = (ours - theirs).norm() / (theirs - begun[name]).norm()
        assert off < 0.05, name
    held = trainers[0]._adam.state[trainers[0].model.model.layers[0].mlp.up_proj.weight]
    assert held["exp_avg_code"].dtype == torch.uint8


def test_an_optimizer_of_many_weights_is_made_in_no_time() -> None:
    named = {f"w{i}": nn.Parameter(torch.zeros(1, 1)) for i in range(20_000)}
    rules = dict.fromkeys(named, "muon")
    decays = dict.fromkeys(named, 0.1)
    options = TrainerOptions(lr=1e-2, rates={"w7": 0.5})
    began = time.monotonic()
    made = PerWeightOptimizers(
        named, rules, decays, options, place=PieceOfWeight, whole=torch.clone
    )
    assert time.monotonic() - began < 20  # half a second; minutes where each looks at all others
    assert [group["rate"] for group in made.param_groups[6:9]] == [1.0, 0.5, 1.0]


def test_adamw_on_one_weight_at_a_time_is_adamw() -> None:
    """The rule of what Muon and 8 bits leave out, with decay and another rate."""
    start = {f"w{i}": torch.randn(size, dtype=torch.float32) for i, size in enumerate((7, 300))}
    ours = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    options = TrainerOptions(lr=1e-2, rates={"w0": 0.5})
    one_by_one = PerWeightOptimizers(
        ours,
        dict.fromkeys(ours, "adamw"),
        {"w0": 0.0, "w1": 0.1},
        options,
        place=lambda name, held: PieceOfWeight(name, 0, held.detach().view(-1)),
        whole=lambda held: held,
    )
    groups = [
        {"params": [theirs["w0"]], "lr": 0.5e-2, "weight_decay": 0.0},
        {"params": [theirs["w1"]], "lr": 1e-2, "weight_decay": 0.1},
    ]
    expected = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        for name in start:
            gradient = torch.randn(start[name].shape)
            ours[name].grad = gradient.clone()
            theirs[name].grad = gradient.clone()
        for group in one_by_one.param_groups:
            group["lr"] = options.lr * group["rate"]
        before = {name: value.detach().clone() for name, value in ours.items()}
        one_by_one.step()
        expected.step()
        for name, value in ours.items():
            assert torch.allclose(value, theirs[name], rtol=1e-6, atol=1e-8)
            went = (value.detach() - before[name]).double().norm()
            assert one_by_one.changes[value].item() == pytest.approx(went.item(), rel=1e-5)


@pytest.mark.parametrize("name", CHOICES)
def test_a_checkpoint_holds_what_is_held_and_goes_on_from_it(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(name)
    conformance.steps(trainer, BATCH, 1)
    trainer.save(tmp_path / "saved")
    said = json.loads((tmp_path / "saved" / "trainer_state.json").read_text())
    assert said.get("optimizer", "adamw") == KINDS[name].get("optimizer", "adamw")
    assert said.get("master_weights", "float32") == KINDS[name].get("master_weights", "float32")
    files = {path.name.split("-")[0] for path in (tmp_path / "saved").glob("optimizer_*")}
    assert "optimizer_master" not in files
    if "muon" in name:
        momenta = load_file(tmp_path / "saved" / "optimizer_momentum_buffer-00000.safetensors")
        assert all("proj" in weight for weight in momenta)
    if "8bit" in name:
        codes = load_file(tmp_path / "saved" / "optimizer_exp_avg_code-00000.safetensors")
        up = trainer.model.model.layers[0].mlp.up_proj.weight
        held = trainer._adam.state[up]["exp_avg_code"]
        assert torch.equal(codes["model.layers.0.mlp.up_proj.weight"], held)
    other = trainer_of(name, seed=1)
    other.load(tmp_path / "saved")
    other.save(tmp_path / "again")
    for path in (tmp_path / "saved").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    lines = [conformance.steps(each, BATCH, 1) for each in (trainer, other)]
    assert lines[0] == lines[1]
    for ours, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("muon", "", "train.optimizer: muon, and this run has adamw"),
        ("", "muon", "train.optimizer: adamw, and this run has muon"),
        ("no masters", "bf16", "train.master_weights: none, and this run has float32"),
    ],
)
def test_what_another_optimizer_kept_is_refused(
    name: str, other: str, said: str, tmp_path: Path
) -> None:
    trainer = trainer_of(name)
    conformance.steps(trainer, BATCH, 1)
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        trainer_of(other).load(tmp_path)


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of("muon")
    conformance.steps(trainer, BATCH, 1)
    trainer.save(tmp_path)
    file = tmp_path / "optimizer_momentum_buffer-00000.safetensors"
    momenta = load_file(file)
    name = next(iter(momenta))
    momenta[name] = momenta[name].reshape(-1)
    save_file(momenta, file)
    with pytest.raises(CheckpointError, match=f"incomplete optimizer state for '{name}'"):
        trainer_of("muon").load(tmp_path)


class TestWithoutMasters:
    """Weights in bfloat16, stepped themselves."""

    def train(self, lr: float, steps: int, **changed: Any) -> tuple[list[float], dict[str, Tensor]]:
        model = load_policy("builtin:tiny", LoadOptions(dtype=torch.bfloat16, seed=SEED))
        trainer = LocalTrainer(model, TrainerOptions(lr=lr, **changed))
        losses = [line["loss"] for line in conformance.steps(trainer, BATCH, steps)]
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    def test_steps_too_small_to_see_are_not_lost(self, learned: Learned) -> None:
        """Rounded to nearest, steps of 1e-5 leave nearly every weight of about 0.02 and more where
        it is; stochastically, the loss falls as with masters.
        """
        steps, lr = 12, 1e-5
        with_masters, _ = self.train(lr, steps)
        without, _ = self.train(lr, steps, master_weights="none")
        fell = with_masters[0] - with_masters[-1]
        learned("fall with masters", fell, at_least=0.04)
        share = (without[0] - without[-1]) / fell
        learned("share of it without", share, at_least=0.75, at_most=1.25)
        model = load_policy("builtin:tiny", LoadOptions(dtype=torch.bfloat16, seed=SEED))
        nearest = LocalTrainer(model, TrainerOptions(lr=lr, master_weights="none"))
        nearest._adam._rounded = lambda name, weight, own, stepped, index: stepped.bfloat16()
        losses = [line["loss"] for line in conformance.steps(nearest, BATCH, steps)]
        learned("share of it to nearest", (losses[0] - losses[-1]) / fell, at_most=0.5)

    def test_the_seed_decides_every_byte(self) -> None:
        first = self.train(1e-4, 2, master_weights="none", seed=5)[1]
        again = self.train(1e-4, 2, master_weights="none", seed=5)[1]
        other = self.train(1e-4, 2, master_weights="none", seed=6)[1]
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)

    def test_gradients_are_summed_in_float32(self) -> None:
        trainer = trainer_of("no masters", micro_batch_tokens=1)
        trainer.forward_backward(BATCH, conformance.supervised, conformance.LOGPROBS)
        assert {gradient.dtype for _, gradient in trainer.gradients()} == {torch.float32}

    def test_a_piece_is_rounded_as_its_place_in_the_whole(self) -> None:
        """Random numbers are those of the place, whoever holds it; across blocks too."""
        size = (1 << 20) + 1000
        weight = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
        stepped = torch.rand(size)

        def rounded(start: int, end: int) -> Tensor:
            optimizer = PerWeightOptimizers(
                {"w": weight},
                {"w": "adamw"},
                {"w": 0.0},
                TrainerOptions(lr=1.0),
                place=lambda name, held: PieceOfWeight(name, 0, held.detach()),
                whole=lambda held: held,
            )
            piece = PieceOfWeight("w", start, weight.detach()[start:end])
            return optimizer._rounded("w", weight, piece, stepped[start:end], 3)

        whole = rounded(0, size)
        for start, end in ((0, 700), (700, (1 << 20) + 10), ((1 << 20) + 10, size)):
            assert torch.equal(rounded(start, end), whole[start:end])


def sharded(name: str, folder: Path, source: Path) -> None:
    """On one rank: two steps, saved; and what one process saved, loaded and saved again."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        trainer = trainer_of(name, engine="fsdp", ranks=ranks, lr=1e-3)
        lines = conformance.steps(trainer, BATCH, 2)
        trainer.save(folder / f"saved_{ranks.world}")
        other = trainer_of(name, engine="fsdp", ranks=ranks, seed=1, lr=1e-3)
        other.load(source)
        other.save(folder / f"copied_{ranks.world}")
        if ranks.first:
            (folder / f"lines_{ranks.world}.json").write_text(json.dumps(lines))


@pytest.mark.parametrize("name", OVER_RANKS)
def test_ranks_step_as_one_process_does(name: str, tmp_path: Path) -> None:
    """Muon reads whole matrices; 8-bit blocks are whole; rounding goes by the place."""
    alone = trainer_of(name, lr=1e-3)
    expected = conformance.steps(alone, BATCH, 2)
    alone.save(tmp_path / "saved")
    world = 2
    run_ranks(world, sharded, name, tmp_path, tmp_path / "saved")
    lines = json.loads((tmp_path / f"lines_{world}.json").read_text())
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=5e-3)
    for path in (tmp_path / "saved").glob("*.safetensors"):
        copied = tmp_path / f"copied_{world}" / path.name
        assert copied.read_bytes() == path.read_bytes(), path.name
        ours = load_file(tmp_path / f"saved_{world}" / path.name)
        theirs = load_file(path)
        assert ours.keys() == theirs.keys()
        if "code" in path.name:
            continue
        off = sum(float((ours[key].double() - theirs[key].double()).square().sum()) for key in ours)
        norm = sum(float(theirs[key].double().square().sum()) for key in ours)
        # In bfloat16 the gradient of each micro-batch is rounded; of eight bits, one code may differ.
        limit = 2e-2 if "no masters" in name else 5e-2 if "8bit" in name else 5e-3
        assert (off / norm) ** 0.5 < limit, path.name


def offloaded(name: str, folder: Path) -> None:
    """On one rank: two steps with pieces on the device, then the same with them in CPU memory."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        for offloads in (False, True):
            dtype = torch.bfloat16 if "no masters" in name else torch.float32
            model = load_policy("builtin:tiny", LoadOptions(dtype=dtype, seed=0))
            options = TrainerOptions(lr=1e-3, **KINDS.get(name, {}))
            trainer = FsdpTrainer(model, options, ranks=ranks, offload_optimizer=offloads)
            conformance.steps(trainer, BATCH, 2)
            trainer.save(folder / str(offloads))


@pytest.mark.parametrize("name", ["", pytest.param("muon, no masters", marks=pytest.mark.full)])
def test_offloaded_pieces_are_stepped_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    run_ranks(2, offloaded, name, tmp_path)
    files = sorted(path.name for path in (tmp_path / "False").iterdir())
    assert any(file.startswith("optimizer_") for file in files)
    for file in files:
        ours = (tmp_path / "True" / file).read_bytes()
        assert ours == (tmp_path / "False" / file).read_bytes(), file


@pytest.mark.gpu
def test_offloaded_pieces_take_no_memory_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    held: list[int] = []
    with joined_ranks(torch.device("cuda"), Deadlines.alike(120)) as ranks:
        for offloads in (False, True):
            before = torch.cuda.memory_allocated()
            model = load_policy("builtin:small", LoadOptions(device=torch.device("cuda")))
            options = TrainerOptions(lr=1e-3)
            trainer = FsdpTrainer(model, options, ranks=ranks, offload_optimizer=offloads)
            conformance.steps(trainer, BATCH, 2)
            held.append(torch.cuda.memory_allocated() - before)
            assert all(p.is_cpu == offloads for p in model.parameters())
            trainer.save(tmp_path / str(offloads))
            del trainer, model
    assert held[1] < 0.5 * held[0]


def misaligned(folder: Path) -> None:
    """On one rank of three: what building the engine ends with."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(100, 63))
        try:
            from oxrl.engines.train.per_weight_optimizers import require_whole_blocks

            place = PieceOfWeight("weight", 34 * 63 * ranks.rank, torch.zeros(1))
            require_whole_blocks(
                {"weight": model.weight}, {"weight": "adamw_8bit"}, lambda *_: place, ranks
            )
        except EngineError as error:
            (folder / f"rank_{ranks.rank}").write_text(str(error))


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    run_ranks(2, misaligned, tmp_path)
    for rank in range(2):
        assert "2 ranks cut weight of shape (100, 63)" in (tmp_path / f"rank_{rank}").read_text()


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_eight_bits_without_the_library_say_what_installs_it() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[8bit\]'"):
        trainer_of("adamw_8bit")
