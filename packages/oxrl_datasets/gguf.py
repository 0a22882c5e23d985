"""Models out of GGUF files, written as the Hugging Face folders that everything else takes.

transformers reads the weights. It leaves out some of what such a file may say, without a word; what
would then compute something else than the file's own model is refused here.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata
from transformers.utils.logging import disable_progress_bar

from oxrl.errors import DataError, MissingExtraError
from oxrl.runs.files import clear

Metadata = dict[str, Any]
# Rules by which a byte-level vocabulary cuts text before it merges bytes (`tokenizer.ggml.pre`).
# transformers takes these for GPT-2's and would find other tokens: here every digit stands alone.
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "trillion", "exaone4")
# What a reader of a damaged file may stumble over.
DAMAGE = (ValueError, LookupError, TypeError, OverflowError, struct.error, RuntimeError, OSError)


def write_model(
    source: Path, out: Path, *, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> Metadata:
    """Write the model of a GGUF file, its tokenizer and its settings into a Hugging Face folder.

    Args:
        source: the GGUF file.
        out: the folder; must not be there yet, or be empty.
        dtype: of the weights that are written: float32 keeps what quantised blocks stand for, the
            others round it.

    Returns:
        The file's name, licence and architecture, its rule for cutting text, and how many weights
        the model has.

    Raises:
        DataError: the file is damaged, incomplete, or says something that would get lost.
        MissingExtraError: the package gguf is not installed.
    """
    try:
        import_module("gguf")
    except ImportError as error:
        need = "pip install gguf, or oxrl's extra smollm"
        raise MissingExtraError(f"reading a GGUF file needs the package gguf: {need}") from error
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} is a file or holds some: name a new folder")
    with _named(source):
        metadata, _ = read_gguf_metadata(str(source))
        header = GgufHeader.from_file(str(source))
    _check_header(source, metadata, header)
    scratch = out.parent / f".{out.name}.part"
    clear(scratch)  # of one that was killed
    made = scratch / "model"
    try:
        # transformers would read other files beside the source.
        file = scratch / "file" / source.name
        file.parent.mkdir(parents=True)
        file.symlink_to(source.resolve())
        model = _read_model(file, header, getattr(torch, dtype))
        tokenizer = _read_tokenizer(file, metadata)
        _tell_end_of_turn(model, metadata)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        _keep_vocabulary(made / "tokenizer.json", metadata)
        os.replace(made, out)
    finally:
        clear(scratch)
    names = ("general.name", "general.license", "general.architecture", "tokenizer.ggml.pre")
    told = {name.rpartition(".")[2]: metadata.get(name) for name in names}
    return {**told, "parameters": model.num_parameters(), "dtype": dtype}


@contextmanager
def _named(source: Path) -> Iterator[None]:
    """Turn whatever a reader says of a damaged file into an error that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"--source {source}: there is no such file") from error
    except DAMAGE as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{source} cannot be read as a GGUF file ({why})") from error


def _check_header(source: Path, metadata: Metadata, header: GgufHeader) -> None:
    """Refuse a file that is cut off, one of several, or whose positions would be read otherwise."""
    layers = metadata.get(f"{header.architecture}.block_count", 0)
    if not header.tensors or layers > len(header.tensors):
        raise DataError(f"{source} is damaged: {len(header.tensors)} tensors for {layers} layers")
    size = source.stat().st_size
    ends = (header.data_start + info.offset + info.nbytes for info in header.tensors)
    needed = max(ends, default=0)
    if needed > size:
        raise DataError(
            f"{source} is cut off: its tensors end at byte {needed:,}, the file at {size:,}"
        )
    if metadata.get("split.count", 0) > 1:
        raise DataError(
            f"{source} is one of {metadata['split.count']} parts of a model: merge them first "
            "(llama-gguf-split --merge)"
        )
    scaling = metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" and header.architecture != "gpt-oss":
        raise DataError(
            f"{source} scales its positions (rope.scaling.type = {scaling!r}), which transformers "
            "does not read from a GGUF file: take the model's Hugging Face folder"
        )


def _read_model(file: Path, header: GgufHeader, dtype: torch.dtype) -> PreTrainedModel:
    """The model with every weight of the file, and no others."""
    disable_progress_bar()
    read: Any = AutoModelForCausalLM.from_pretrained
    with _named(file):
        model, found = read(
            file.parent,
            gguf_file=file.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            listed = ", ".join(sorted(map(str, found[kind]))[:3])
            raise DataError(f"{file.name} does not hold the weights of its model: {kind} {listed}")
    _check_weights(file, header, model)
    return model


def _check_weights(file: Path, header: GgufHeader, model: PreTrainedModel) -> None:
    """Refuse a model that lacks something of the file, or whose weights are not finite."""
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(model.config)
    shapes = {name: weight.shape for name, weight in planned.named_parameters()}
    for name, weight in model.named_parameters():
        if weight.shape != shapes[name]:
            raise DataError(
                f"{file.name} holds {name} as {[*weight.shape]}, but its settings, as "
                f"transformers reads them, say {[*shapes[name]]}: take its Hugging Face folder"
            )
    stored = {info.name: prod(info.shape) for info in header.tensors}
    if model.config.tie_word_embeddings:
        stored.pop("output.weight", None)
    kept = sum(weight.numel() for weight in model.parameters())
    if sum(stored.values()) != kept:
        extra = " (its rope_freqs.weight, which scales positions)" * ("rope_freqs.weight" in stored)
        raise DataError(
            f"{file.name} holds {sum(stored.values()):,} weights and transformers makes a model of "
            f"{kept:,} of them: something of the file is lost{extra}"
        )
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise DataError(f"{file.name} is damaged: {name} has values that are NaN or infinite")


def _read_tokenizer(file: Path, metadata: Metadata) -> PreTrainedTokenizerBase:
    """The tokenizer, which cuts text by the rule that the file names."""
    with _named(file):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rule = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        if rule in SINGLE_DIGITS:
            cut = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(cut)
        elif rule not in LIKE_GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
            raise DataError(
                f"{file.name} cuts text by the rule {rule!r} (tokenizer.ggml.pre), which is not "
                "known here: its tokens would be others. Take the model's Hugging Face folder"
            )
    context = metadata.get(f"{metadata['general.architecture']}.context_length")
    if context is not None:
        tokenizer.model_max_length = context
    return tokenizer


def _keep_vocabulary(file: Path, metadata: Metadata) -> None:
    """Take out what transformers adds of its own: tokens for which the model has no embedding."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    count = metadata["tokenizer.ggml.tokens"]
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["id"] < count]
    file.write_text(json.dumps(stored, ensure_ascii=False), encoding="utf-8")


def _tell_end_of_turn(model: PreTrainedModel, metadata: Metadata) -> None:
    """Have generation stop at the end of a turn, where that is not the end of a text."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    listed = sorted({end for end in ends if end is not None})
    if len(listed) > 1:
        model.generation_config.eos_token_id = listed
