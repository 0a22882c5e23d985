"""The files of a model: which of a folder are read, and what is wrong with them, before loading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.errors import DataError, did_you_mean
from oxrl.modelfiles.builtin import BUILTIN_VISION, is_builtin
from oxrl.modelfiles.hub_status import hub_or_cache
from oxrl.tables.vision import VISION_FAMILIES, VisionFamily

ADAPTER_CONFIG = "adapter_config.json"
# Instead of a model's files: what a run's models were built from.
REFERENCE_FILE = "reference.json"
BASE = "base_model_name_or_path"
# Beside the backbone's files in the folder of a critic, or of a reward model.
VALUE_HEAD_FILE = "value_head.safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# peft's own file name: whatever reads adapters reads this.
ADAPTER_FILE = "adapter_model.safetensors"
# How the names of output heads end, which a model that is tied takes from its embeddings.
HEADS = ("lm_head.weight", "embed_out.weight")
# Files that are not hidden: macOS puts a `._name` beside each that it copies.
NOT_HIDDEN = "[!.]*"
PICKLES = ("pytorch_model*.bin", "adapter_model*.bin", "[!.]*.pt", "[!.]*.pth", "[!.]*.ckpt")
FLOATS = ("F64", "F32", "F16", "BF16")
# What a tokenizer is read from, in any of its forms.
TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "[!.]*.model", "[!.]*.tiktoken", "tekken*")
# Beside weights: configuration, tokenizer, templates and code.
TEXTS = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".py")
# What training leaves beside a model, and nothing that loads the model reads.
OF_TRAINING = (
    "manifest.json",
    "state.json",
    "trainer_state.json",
    "parts.json",
    "oxrl_export.json",
)
OF_TRAINERS = ("optimizer", "scheduler", "rng_state", "training_args")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
# Computes attention for `model.attention: flash_attention_2`; it is compiled against PyTorch.
FLASH = "flash_attn"
FLASH_INSTALL = "pip install flash-attn --no-build-isolation"
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
# Of built-in models that read images.
BUILTIN_FAMILY = VISION_FAMILIES["qwen3_vl"]

Names = Mapping[str, str]


def check_model_folder(folder: Path) -> None:
    """Make sure that a model can be loaded from `folder`, as far as its files tell.

    Args:
        folder: a directory in Hugging Face format.

    Raises:
        DataError: a line for everything that is wrong with it.
    """
    problems = [f"    {problem}" for problem in folder_problems(folder)]
    if problems:
        listed = "\n".join(problems)
        raise DataError(f"model.name: {str(folder)!r} cannot be loaded:\n{listed}")


def folder_problems(folder: Path) -> list[str]:
    """Everything that is wrong with the files of a model, one phrase each."""
    if (folder / ADAPTER_CONFIG).is_file():
        return list(_adapter_problems(folder))
    if (folder / REFERENCE_FILE).is_file():
        return [_why_reference(folder)]
    values, wrong = _read_object(folder / "config.json")
    if not wrong and values.keys().isdisjoint(("model_type", "auto_map")):
        wrong = ["config.json names no model_type: it is not the configuration of a model"]
    return [*wrong, *_weight_problems(folder, SINGLE)]


def _why_reference(folder: Path) -> str:
    values, wrong = _read_object(folder / REFERENCE_FILE)
    named = wrong[0] if wrong else f"{values.get('model')!r}; give that"
    return (
        f"it is the first checkpoint of a run with run.first_checkpoint: reference, and only names "
        f"its model: {named}"
    )


def is_reward_model(name: str) -> bool:
    """True if a reward's name is the folder of a reward model; nothing of it is loaded.

    Args:
        name: `reward.name` of a config.
    """
    return (Path(name) / VALUE_HEAD_FILE).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Find the files that hold the weights of the model in `folder`, whatever else lies there.

    They are those that transformers reads: the single file, else those of the index.

    Args:
        folder: of a whole model; an adapter's weights are in a file of another name.

    Returns:
        Those that are there, in the order in which they are read: a tensor of two files is that of
        the later one.
    """
    single = folder / SINGLE
    if single.is_file():
        return [single]
    listed = {folder / str(name) for name in _listed(folder / INDEX).values()}
    # What lies elsewhere is not part of the model.
    return sorted(file for file in listed if file.parent == folder and file.is_file())


def _listed(index: Path) -> Names:
    """The file of every tensor that an index names; empty where it is damaged."""
    values, _ = _read_object(index)
    listed = values.get("weight_map")
    return listed if isinstance(listed, dict) else {}


class TensorKind(NamedTuple):
    """A tensor in a file: its name there, shape, and type as safetensors calls it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, dtype: Any = None) -> Any:
        """The tensor itself, as PyTorch's, of `dtype`."""
        from safetensors import safe_open  # rewards and programs are judged without it

        return safe_open(self.file, "pt").get_tensor(self.name).to(dtype=dtype)


def stored_kinds(folder: Path) -> list[TensorKind]:
    """Every tensor in the files of a model's weights, see `weight_files`."""
    return [kind for file in weight_files(folder) for kind in _kinds(file)]


def _kinds(file: Path) -> Iterator[TensorKind]:
    """Every tensor of a safetensors file."""
    from safetensors import safe_open  # as above

    with safe_open(file, framework="np") as opened:
        for name in opened.keys():
            tensor = opened.get_slice(name)
            yield TensorKind(file, name, tuple(tensor.get_shape()), tensor.get_dtype())


def has_own_head(kinds: Sequence[TensorKind], dtype: Any = None) -> bool | None:
    """Tell if the output head in a model's files is no copy of its embeddings.

    Transformers ties no model whose files hold both with other values.

    Args:
        kinds: of all that the files hold.
        dtype: of PyTorch, that values are compared in; None: as they are stored.

    Returns:
        None: they hold no head.
    """
    for head in kinds:
        if head.name.endswith(HEADS):
            others = [kind for kind in kinds if kind != head and kind[2:] == head[2:]]
            return not any(head.read(dtype).equal(kind.read(dtype)) for kind in others)
    return None


def has_tokenizer(folder: Path) -> bool:
    """True if any file of a tokenizer is in `folder`."""
    return any(True for pattern in TOKENIZERS for _ in folder.glob(pattern))


def adapter_base(name: str) -> str | None:
    """Find the frozen weights under the adapter in folder `name`; None without an adapter.

    Raises:
        DataError: the adapter's files are damaged, or it is its own base.
    """
    folder = Path(name)
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    check_model_folder(folder)
    return _noted(folder, BASE)


def adapter_revision(name: str) -> str | None:
    """The commit on the hub of what is under the adapter in folder `name`; None: not noted."""
    return _noted(Path(name), "revision")


def _noted(folder: Path, key: str) -> str | None:
    """A text that the adapter in `folder` notes; None where it does not, or there is none."""
    values, _ = _read_object(folder / ADAPTER_CONFIG)
    value = values.get(key)
    return value if isinstance(value, str) else None


def _adapter_problems(folder: Path) -> Iterator[str]:
    values, wrong = _read_object(folder / ADAPTER_CONFIG)
    if wrong:
        yield from wrong
        return
    base = values.get(BASE)
    if not isinstance(base, str) or not base:
        yield f"{ADAPTER_CONFIG}: {BASE} does not say which model the adapter belongs to"
    elif _leads_back(folder):
        yield f"{ADAPTER_CONFIG}: {BASE} = {base!r} leads back to this adapter"
    yield from _weight_problems(folder, ADAPTER_FILE)


def _leads_back(folder: Path) -> bool:
    """True if the bases of adapters, followed one by one, lead back to an earlier one."""
    seen: set[Path] = set()
    here = folder.resolve()
    while here not in seen:
        seen.add(here)
        base = _noted(here, BASE)
        if base is None or not (Path(base) / ADAPTER_CONFIG).is_file():
            return False
        here = Path(base).resolve()
    return True


def _weight_problems(folder: Path, single: str) -> Iterator[str]:
    """List the faults of weights; `single`: the name of their file, where they are in one."""
    index = folder / INDEX
    if (folder / single).is_file():
        _, wrong = _tensors(folder / single)
        yield from wrong
    elif single == SINGLE and index.is_file():
        yield from _index_problems(index)
    else:
        pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
        if pickles:
            yield (
                f"{pickles[0]} is a pickle, which can run code when it is read: convert it to "
                "safetensors (load it where you trust it, then save_pretrained)"
            )
        else:
            yield f"has no weights: neither {single} nor {INDEX}"


def _index_problems(index: Path) -> Iterator[str]:
    _, wrong = _read_object(index)
    yield from wrong
    files = _listed(index)
    if not files and not wrong:
        yield f"{INDEX}: weight_map names no tensors"
    listed: dict[str, list[str]] = {}
    for tensor, file in files.items():
        listed.setdefault(str(file), []).append(tensor)
    for file, tensors in listed.items():
        # An index may name its neighbours only: what lies elsewhere is not part of the model.
        if Path(file).name != file or file in ("", ".", ".."):
            yield f"{INDEX} names {file!r}, which is no file name in this folder"
        elif not (index.parent / file).is_file():
            yield f"{INDEX} names {file!r}, which is not there"
        else:
            found, damaged = _tensors(index.parent / file)
            yield from damaged
            missing = [tensor for tensor in tensors if tensor not in found]
            if missing and not damaged:
                yield f"{file} lacks {missing[0]!r}, which {INDEX} says it holds"


def _tensors(file: Path) -> tuple[Names, list[str]]:
    """Name and type of every tensor of a file; what is wrong with it."""
    from safetensors import SafetensorError  # as above

    try:
        found = {kind.name: kind.dtype for kind in _kinds(file)}
    except (SafetensorError, OSError, ValueError) as error:
        return {}, [f"{file.name} is damaged or cut off: {error}"]
    whole = [f"{name!r} as {kind}" for name, kind in found.items() if kind not in FLOATS]
    if whole:
        count = f"{len(whole)} tensors" if len(whole) > 1 else "1 tensor"
        return found, [
            f"{file.name} stores {count} in a type that is not trained, such as {whole[0]}; "
            f"there are {', '.join(FLOATS)}"
        ]
    return found, []


def _read_object(file: Path) -> tuple[dict[str, Any], list[str]]:
    """A JSON object; what is wrong with its file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, [f"has no {file.name}"]
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{file.name} is no JSON: {error}"]
    if not isinstance(values, dict):
        return {}, [f"{file.name} is a {type(values).__name__}, not a JSON object"]
    return values, []


def model_files(folder: Path) -> dict[str, Path]:
    """List what loading the model in `folder` can read: weights, configuration, tokenizer, code.

    Returns:
        Name in the folder -> file, sorted; without chat templates that are files of their own. For
        an adapter also the files of the folder below it, under `base/`.
    """
    base = adapter_base(str(folder))
    weights = weight_files(folder) if base is None else [folder / ADAPTER_FILE]
    read = {file.name for file in (*weights, folder / VALUE_HEAD_FILE)}
    found: dict[str, Path] = {}
    for name in sorted(path.name for path in folder.glob(NOT_HIDDEN) if path.is_file()):
        said = name.endswith(TEXTS) and name not in (*OF_TRAINING, *CHAT_TEMPLATES)
        if name in read or (said and not name.startswith(OF_TRAINERS)):
            found[name] = folder / name
    if base is not None and Path(base).is_dir():
        for name, path in model_files(Path(base)).items():
            found[f"base/{name}"] = path
    return found


def hub_source(model: str, revision: str | None) -> tuple[str, str | None] | None:
    """Find what is read from the hub for `model`: itself, or the base of the adapter in its folder.

    Args:
        model: as `model.name`.
        revision: as `model.revision`; goes before what an adapter notes.

    Returns:
        (name, revision); None where everything is on disk or built in.
    """
    if is_builtin(model):
        return None
    if not Path(model).is_dir():
        return model, revision
    base = adapter_base(model)
    return None if base is None else hub_source(base, revision or adapter_revision(model))


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit that loading `name` from the hub, or from its cache, would read.

    Args:
        name: on the hub.
        revision: a branch, tag or commit; None: the main branch.

    Returns:
        None where it cannot be told: loading the model says why.
    """
    # Imported here: a fifth of a second that only names on the hub cost.
    from huggingface_hub import errors, hf_hub_download

    try:
        with hub_or_cache():
            path = Path(hf_hub_download(name, "config.json", revision=revision))
    except (errors.HTTPError, OSError, ValueError):
        return None
    return path.parts[path.parts.index("snapshots") + 1]


def refuse_missing_folder(name: str, what: str = "model.name: no folder") -> None:
    """Tell a folder that is not there from a name on the hub, as far as the name shows it.

    Args:
        name: of a model, or of something else that a command is pointed at.
        what: begins the error.

    Raises:
        DataError: `name` can be no name on the hub, or begins like a folder here.
    """
    if Path(name).is_dir():
        return
    first, _, rest = name.partition("/")
    local = first == "runs" or (Path(first).is_dir() and not (Path(first) / ".git").exists())
    if not (name.startswith((".", "~", "/")) or "/" in rest or (rest and local)):
        return
    neighbours: list[str] = []
    if Path(name).parent.is_dir():
        neighbours = [path.name for path in Path(name).parent.iterdir()]
    hint = did_you_mean(Path(name).name, neighbours)
    raise DataError(f"{what} {name!r}{hint}")


def model_config(name: str) -> dict[str, Any] | None:
    """Read config.json of a model; None where it is not here.

    Args:
        name: a folder, or a hub name, of which the local cache is read.
    """
    values, wrong = _read_object(config_file(name))
    return None if wrong else values


def config_file(name: str) -> Path:
    """Find where the model's config.json is, or would be: its folder, or the hub's cache."""
    local = Path(name) / CONFIG
    if local.is_file():
        return local
    # Imported here: a fifth of a second that only names on the hub cost.
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except ValueError:  # no name that the hub would give
        return local
    return Path(cached) if isinstance(cached, str) else local


def vision_family(name: str) -> VisionFamily | None:
    """The family of a model that reads images; None of others, and where it cannot be told.

    Args:
        name: as `model.name`; of an adapter's folder, what is below it counts.
    """
    if is_builtin(name):
        return BUILTIN_FAMILY if name in BUILTIN_VISION else None
    base = _noted(Path(name), BASE)
    if base is not None and base != name:
        return vision_family(base)
    values = model_config(name)
    family = None if values is None else values.get("model_type")
    return VISION_FAMILIES.get(family) if isinstance(family, str) else None


def family_of(decoder: object) -> VisionFamily | None:
    """The family of a model that reads images, by its config."""
    config = getattr(decoder, "config", None)
    return VISION_FAMILIES.get(str(getattr(config, "model_type", "")))


def has_image_processor(name: str) -> bool:
    """True if the model comes with what turns an image into its input."""
    return is_builtin(name) or (config_file(name).parent / PROCESSOR).is_file()
