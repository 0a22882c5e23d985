"""On one rank: models whose weights come later beside the same ones loaded whole, and the shares
that ranks write of a checkpoint.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.errors import OxrlError
from oxrl.models.load import LoadOptions, load_critic, load_policy
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.runs.ranks import Ranks
from oxrl.tables.watch import Deadlines
from support import conformance
from support.tiny import batches


class Ledger(TorchDispatchMode):
    """Bytes of all tensors alive that were made inside, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, made)
        return made

    def _note(self, tensor: Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        self._alive[id(storage)] = weakref.ref(storage)
        held = [alive() for alive in self._alive.values()]
        self.peak = max(self.peak, sum(kept.nbytes() for kept in held if kept is not None))


def model_of(kind: str, folder: Path, dtype: str, *, on_meta: bool) -> nn.Module:
    options = LoadOptions(dtype=conformance.DTYPES[dtype], on_meta=on_meta)
    if kind == "critic":
        return load_critic(str(folder), options)
    model = load_policy(str(folder), options)
    if kind in ("adapter", "dora"):
        added = AdapterOptions(rank=2, alpha=4.0, dora=kind == "dora")
        add_adapter(model, added, base=str(folder), seed=3)
    return model


def learned(engine: str, kind: str, model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Weights before and after two steps, as fingerprints, and what the steps reported."""
    trained = kind != "reference"
    trainer = conformance.make_trainer(engine, model, ranks, trained=trained)
    before = trainer.fingerprints(torch.float32)
    lines: list[Any] = []
    if kind in ("policy", "adapter", "dora"):
        rows = batches(conformance.LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]
        lines = conformance.steps(trainer, rows, 2)
    return {"before": before, "after": trainer.fingerprints(torch.float32), "steps": lines}


def compare(engine: str, source: Path, results: Path, kinds: list[tuple[str, str]]) -> None:
    """Both ways of loading, for each kind of model and type of weights."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        found: dict[str, Any] = {}
        for kind, dtype in kinds:
            for on_meta in (False, True):
                model = model_of(kind, source, dtype, on_meta=on_meta)
                meta = sum(parameter.is_meta for parameter in model.parameters())
                said = learned(engine, kind, model, ranks)
                left = sum(parameter.is_meta for parameter in model.parameters())
                found[f"{kind} {on_meta}"] = said | {"meta": meta, "left": left}
        found["ledger"] = ledger(engine, source, ranks)
        found["not finite"] = refused(engine, source.with_name("broken"), ranks)
        (results / f"{engine}_{ranks.rank}.json").write_text(json.dumps(found))


def ledger(engine: str, source: Path, ranks: Ranks) -> dict[str, Any]:
    """What loading a reference takes at most, beside what the model and a weight have."""
    with Ledger() as counted:
        model = model_of("reference", source, "float32", on_meta=True)
        conformance.make_trainer(engine, model, ranks, trained=False)
    sizes = [4 * shape.shape.numel() for shape in load_policy(str(source)).parameters()]
    return {"peak": counted.peak, "model": sum(sizes), "largest": max(sizes)}


def refused(engine: str, source: Path, ranks: Ranks) -> str:
    """What every rank says of weights that are not finite."""
    try:
        model = model_of("policy", source, "float32", on_meta=True)
        conformance.make_trainer(engine, model, ranks)
    except OxrlError as error:
        return str(error)
    return "nothing"


def share(engine: str, source: Path, target: Path) -> None:
    """Load what the local engine saved, and save it."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        model = load_policy("builtin:tiny", LoadOptions(seed=1))
        trainer = conformance.make_trainer(engine, model, ranks)
        read = _read_bytes()
        trainer.load(source)
        read = _read_bytes() - read
        # Rank 0 alone knows where.
        trainer.save(target / "saved" if ranks.first else target / "elsewhere")
        (target / f"read_{ranks.rank}").write_text(str(read))


def _read_bytes() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line]
    return int(line.split()[1])
