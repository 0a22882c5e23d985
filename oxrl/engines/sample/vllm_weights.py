"""The weights that vLLM's model computes with, read back under the names of the delivered ones.

vLLM fuses weights (q, k and v into one) and cuts them up over workers. A fused weight is cut where
its parts meet. Where a layer on a CPU computes with a packed copy (`vllm_plain` keeps it from that)
it is read through the layer: the rows of a unit matrix, multiplied by it, are its columns, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from oxrl.models.fingerprints import HeldPieces, Piece, piece_of

# How the names of what has no Hugging Face name begin.
OWN = "vllm/"
# Where a layer says how many inputs its weight has on this worker.
INPUT_SIZES = ("input_size_per_partition", "input_size", "embedding_dim")


class Part(NamedTuple):
    """A part of a Hugging Face weight as one parameter of vLLM's holds it.

    start: where it begins in the weight, and `offset` in the parameter, along `dim`; size: how far
    it reaches.
    """

    name: str
    dim: int
    start: int
    offset: int
    size: int


def held_pieces(model: Any, delivered: Mapping[str, torch.Size], dtype: torch.dtype) -> HeldPieces:
    """Return every weight of one worker's model, as pieces of delivered weights as far as known.

    Args:
        model: vLLM's.
        delivered: name -> shape of what was delivered.
        dtype: of what was delivered; layers keep some of it in higher precision.

    Returns:
        Name of a delivered weight -> the pieces that this worker holds of it, a tied output head
        being a second copy of the embedding. What matches no delivered weight has vLLM's name,
        behind `vllm/`.
    """
    found: HeldPieces = {}
    fused = getattr(model, "packed_modules_mapping", {})
    given = _given_names(model, delivered)
    # A tied head has a module of its own, and the embedding's parameter.
    first_path: dict[int, str] = {}
    for place, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            # What is one and the same memory is read once.
            new = id(parameter) not in first_path
            path = first_path.setdefault(id(parameter), place)
            for copy in _copies(module, leaf, parameter, plain=new):
                values = copy.to(dtype)
                named = _parts(path, leaf, module, values, fused)
                parts = [part._replace(name=given.get(part.name, part.name)) for part in named]
                pieces = [_piece(part, values) for part in parts]
                fits = map(_fits, parts, pieces, [delivered.get(part.name) for part in parts])
                if not parts or not all(fits):
                    own = f"{OWN}{path}.{leaf}"
                    found.setdefault(own, []).append(piece_of(values))
                    continue
                for part, piece in zip(parts, pieces, strict=True):
                    found.setdefault(part.name, []).append(piece)
    return found


def _given_names(model: Module, delivered: Iterable[str]) -> dict[str, str]:
    """vLLM's name of a weight -> the name that it was delivered under.

    Models that read images call the parts of the model otherwise.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    # The mapper has None for what vLLM's model is without.
    return {mapper.map_name(name): name for name in delivered}


def _copies(module: Any, leaf: str, parameter: Tensor, *, plain: bool) -> Iterator[Tensor]:
    """Yield the parameter, unless it is gone or not asked for, and a packed copy, if any."""
    if plain and parameter.numel():
        yield parameter
    multiply = getattr(module, "cpu_linear", torch.nn.functional.linear)
    if leaf == "weight" and multiply is not torch.nn.functional.linear:
        sizes = [getattr(module, name, None) for name in INPUT_SIZES]
        inputs = next(size for size in sizes if size is not None)
        unit = torch.eye(inputs, dtype=parameter.dtype, device=parameter.device)
        yield multiply(unit, parameter, None).t()


def _parts(
    path: str, leaf: str, module: Any, values: Tensor, fused: Mapping[str, list[str]]
) -> list[Part]:
    """List the parts of weights that `values` holds; empty where that is not known."""
    linear = import_module("vllm.model_executor.layers.linear")
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    whole = f"{path}.{leaf}"
    if isinstance(module, embedding.VocabParallelEmbedding):
        vocabulary = module.shard_indices
        start = vocabulary.org_vocab_start_index
        return [Part(whole, 0, start, 0, vocabulary.org_vocab_end_index - start)]
    if isinstance(module, linear.RowParallelLinear) and leaf == "weight":
        size = values.shape[1]
        return [Part(whole, 1, module.tp_rank * size, 0, size)]
    if isinstance(module, linear.ColumnParallelLinear):
        return _fused_parts(path, leaf, module, fused)
    return [Part(whole, 0, 0, 0, values.shape[0])] if values.ndim else []


def _fused_parts(path: str, leaf: str, module: Any, fused: Mapping[str, list[str]]) -> list[Part]:
    """List the weights that lie one after the other in a layer whose outputs are cut up."""
    parent, _, own_name = path.rpartition(".")
    sizes: list[int] = module.output_partition_sizes
    names = fused.get(own_name, [own_name])
    if len(names) == 1 < len(sizes):
        return _fused_already(f"{path}.{leaf}", module.tp_rank, module.tp_size, sizes)
    if len(names) != len(sizes):
        return []
    # Several workers may hold the same keys and values.
    sharing = getattr(module, "num_kv_head_replicas", 1)
    parts: list[Part] = []
    offset = 0
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        rank = module.tp_rank // sharing if index else module.tp_rank
        parts.append(Part(f"{parent}.{name}.{leaf}", 0, rank * size, offset, size))
        offset += size
    return parts


def _fused_already(name: str, rank: int, ranks: int, sizes: Sequence[int]) -> list[Part]:
    """List the parts of a weight that is stored as one, and of which a worker has some of each."""
    parts: list[Part] = []
    offset = 0
    before = 0
    for size in sizes:
        parts.append(Part(name, 0, before + rank * size, offset, size))
        offset += size
        before += size * ranks
    return parts


def _piece(part: Part, values: Tensor) -> Piece:
    along_rows = part.dim == 0 and values.ndim > 1
    return piece_of(
        values.narrow(part.dim, part.offset, part.size),
        row=part.start if along_rows else 0,
        column=0 if along_rows else part.start,
    )


def _fits(part: Part, piece: Piece, whole: torch.Size | None) -> bool:
    """True if a weight of the shape `whole` can have such a part."""
    if whole is None or not whole:
        return False
    rows = whole.numel() // whole[-1]
    columns = whole[-1]
    rows_fit = piece.row + piece.rows <= rows
    columns_fit = piece.column + piece.columns <= columns
    # It is cut along one side only.
    one_side = piece.columns == columns or piece.rows == rows
    return rows_fit and columns_fit and one_side
