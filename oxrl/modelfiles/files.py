"""The files that a model is read from, and its source on the hub: a run pins them."""

from __future__ import annotations

from pathlib import Path

from oxrl.errors import DataError, did_you_mean
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.folder import adapter_base, adapter_revision
from oxrl.modelfiles.hub_status import hub_or_cache

SAFE = ".safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth")
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


def model_files(folder: Path) -> dict[str, Path]:
    """List what loading the model in `folder` can read: weights, configuration, tokenizer, code.

    Returns:
        Name in the folder -> file, sorted; without chat templates that are files of their own. For
        an adapter also the files of the folder below it, under `base/`.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    kinds = (*TEXTS, SAFE)
    if not any(name.endswith(SAFE) for name in names):
        kinds = (*kinds, *OTHER_WEIGHTS)
    found: dict[str, Path] = {}
    for name in names:
        training = name in OF_TRAINING or name.startswith(OF_TRAINERS)
        if name.endswith(kinds) and name not in CHAT_TEMPLATES and not training:
            found[name] = folder / name
    base = adapter_base(str(folder))
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
