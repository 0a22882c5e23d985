"""`oxrl export`: one whole model in Hugging Face format, in a folder of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from oxrl.assembly.assembly import DTYPES, stop_tokens
from oxrl.checkpoint.model_files import save_model
from oxrl.checkpoint.targets import find_target
from oxrl.errors import CheckpointWriteError, DataError
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.folder import has_image_processor, is_reward_model, vision_family
from oxrl.models.load import load_critic, load_policy, load_tokenizer
from oxrl.runs.checkpoints import is_checkpoint, is_run
from oxrl.runs.files import fsync, pretty_json, read_json

# Says that a folder is an export and nothing else, so that --overwrite may replace it.
MARKER = "oxrl_export.json"
FORMAT = "oxrl-export-1"


def run_export(
    source: str | Path, out: Path, *, dtype: str = "float32", overwrite: bool = False
) -> Path:
    """`oxrl export`: a model or reward model, or a run's newest one, whole and without adapters.

    Adapters are merged in float32, then the weights are rounded to `dtype`. The model is written
    beside `out` and renamed into place: `out` is whole, or as it was.

    Args:
        source: a run, a checkpoint, or a model by folder or name.
        out: folder to write, missing or empty, outside of every run and checkpoint.
        dtype: "float32" or "bfloat16".
        overwrite: `out` may be an earlier export, which is replaced.

    Raises:
        CheckpointError: the run has no usable checkpoint, or the disk refused.
        DataError: there is no model in `source`, or something in `out` that would be lost.
    """
    name = str(source)
    source = Path(source)
    looks_local = name.startswith((".", "~", "/")) or name.count("/") != 1
    if not source.is_dir() and looks_local and not is_builtin(name):
        raise DataError(f"{source} is no folder; give that of a model, of a checkpoint or of a run")
    place = checked_place(out, source, overwrite=overwrite)
    pins = ExitStack()
    found = find_target(name, pins).model

    def write(directory: Path) -> None:
        load = load_critic if is_reward_model(found) else load_policy
        model = cast(nn.Module, load(found)).to(DTYPES[dtype])
        tokenizer = load_tokenizer(found)
        if isinstance(model, PreTrainedModel):
            stop_tokens(tokenizer, model)
        save_model(model, directory)
        tokenizer.save_pretrained(directory)
        if vision_family(found) is not None and has_image_processor(found):
            from oxrl.models.image_features import load_image_processor  # of models that see

            load_image_processor(found).save_pretrained(directory)
        origin = str(Path(found).resolve()) if Path(found).is_dir() else found
        about = {"format": FORMAT, "source": origin, "dtype": dtype, "files": _sizes(directory)}
        (directory / MARKER).write_text(pretty_json(about), encoding="utf-8")

    try:
        # Not before it is known that the export will be wanted, and again when it is there.
        with pins:
            _write_beside(place, write, lambda: checked_place(out, source, overwrite=overwrite))
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteError(
            f"the export {out} could not be written: {error}. Nothing of it was kept, and nothing "
            "that was there is lost; free space on that disk, or choose another --out"
        ) from error
    return out


def checked_place(out: Path, source: Path, *, overwrite: bool) -> Path:
    """Make sure that writing to `out` destroys nothing, and return the path with links followed.

    Raises:
        DataError: it would destroy something; says what is there and what to do.
    """
    try:
        problem = _why_not(out, source, overwrite=overwrite)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"cannot be looked at: {error}"
    if problem:
        raise DataError(f"--out {out}: {problem}")
    return out.resolve()


def _why_not(out: Path, source: Path, *, overwrite: bool) -> str:
    """Say why `out` must not be written; empty if it may be."""
    for part in (out, *out.parents):
        if part.is_symlink() and not part.exists():
            return f"{part} is a symbolic link to nothing; remove it, or give another folder"
    place = out.resolve()
    for part in (place, *place.parents):
        if part.exists() and not part.is_dir():
            return f"{part} is a file; give a folder that is not there yet"
        what = "a run directory" if is_run(part) else "a checkpoint" if is_checkpoint(part) else ""
        if what:
            where = "is" if part == place else f"lies inside {part}, which is"
            return f"{where} {what}: an export there would destroy it; give a folder outside"
    origin = source.resolve()
    if origin == place or origin in place.parents or place in origin.parents:
        return f"is, holds or lies inside {source}, which is exported; give a folder elsewhere"
    return _what_is_lost(place, overwrite=overwrite) if place.is_dir() else ""


def _what_is_lost(place: Path, *, overwrite: bool) -> str:
    """Say what writing over the folder `place` would lose; empty if that is nothing."""
    inside = sorted(place.iterdir())
    if not inside:
        return ""
    for path in inside:
        if path.is_dir() and (is_run(path) or is_checkpoint(path)):
            return f"holds {path.name}, a run or checkpoint; give a folder that is not there yet"
    marker = read_json(place / MARKER)
    if marker is None or marker.get("format") != FORMAT:
        return (
            f"is not empty (it holds {inside[0].name}); give a folder that is not there yet, or "
            "empty this one"
        )
    found = _sizes(place)
    expected = {**(marker.get("files") or {}), MARKER: found[MARKER]}
    changed = sorted(name for name in found if found[name] != expected.get(name))
    if changed:
        return (
            f"is an earlier export to which {changed[0]} was added, or where it was changed; give "
            "a folder that is not there yet, or empty this one"
        )
    if not overwrite:
        return "is an earlier export; add --overwrite to replace it, or give another folder"
    return ""


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of everything in a folder that is no folder itself; a link has none."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            size = -1 if path.is_symlink() else path.stat().st_size
            sizes[path.relative_to(folder).as_posix()] = size
    return sizes


def _write_beside(
    place: Path, write: Callable[[Path], None], check_again: Callable[[], object]
) -> None:
    """Write a folder beside `place`, then put it there, in place of what may be replaced."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    replaced = place.with_name(f".{place.name}.{os.getpid()}.replaced")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        write(partial)
        for path in (*partial.rglob("*"), partial):
            fsync(path)
        check_again()
        if place.exists():
            os.rename(place, replaced)
        try:
            os.rename(partial, place)
        except OSError:
            if replaced.exists():
                os.rename(replaced, place)
            raise
        fsync(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
