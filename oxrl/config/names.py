"""Names that no section or field has, and what may have been meant: by one of another library, or
by one of ours in another place.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from oxrl.config.field import about
from oxrl.config.schema import FIELDS, SECTIONS, GivenValues
from oxrl.errors import did_you_mean

# How others write that something is not set.
NOTHING = (None, "", -1, "none")
VERL = "`oxrl config convert FILE` writes such a file as ours"
RECORDED = "every step and every sample is recorded: there is nothing to set"
REPLIES = "replies of the assistant are learned, prompts are not: there is nothing to set"
RESUMES = "--resume on the command line, never by itself"
BESIDE = "of the critic, the reference, the reward model or evaluations alone: no such field here"
# Names of other libraries that no field has, and why. One as critic.* is every name right below
# critic, or deeper, that is not known by itself: training has the same names for something else.
WITHOUT_FIELD = {
    "logging_steps": RECORDED,
    "log_completions": RECORDED,
    "rollout_data_dir": RECORDED,
    "log_val_generations": RECORDED,
    "completion_only_loss": REPLIES,
    "assistant_only_loss": REPLIES,
    "precompute_ref_log_probs": (
        "the reference is asked once per row, before training: there is nothing to set"
    ),
    "resume_mode": RESUMES,
    "resume_from_checkpoint": RESUMES,
    "nnodes": "run.training_gpus counts those of all nodes",
    "actor_rollout_ref": (
        "a section of verl: its fields are those of train, rollout, model and inference_engine "
        f"here; {VERL}"
    ),
    "trainer": f"a section of verl: its fields are those of run here; {VERL}",
    "critic": f"a section of verl: its fields are those of train here; {VERL}",
    "critic.*": BESIDE,
    "ref.*": BESIDE,
    "reward_model.*": BESIDE,
    "val_kwargs.*": BESIDE,
    "rollout.dtype": "of the sampler alone: it computes in model.dtype",
}


class Meant(NamedTuple):
    """The fields that a name of another library stands for; see `Aka`.

    fields: ours; several where the kind of training decides, none where there is nothing to set.
    """

    fields: tuple[str, ...]
    note: str = ""
    values: GivenValues = {}


@cache
def other_names() -> dict[str, Meant]:
    """Everything that a name of another library is known to stand for, by that name."""
    found = {name: Meant((), note) for name, note in WITHOUT_FIELD.items()}
    for path, field in FIELDS.items():
        for known in about(field).names:
            for name in known.names:
                fields, note, values = found.get(name, Meant(()))
                found[name] = Meant((*fields, path), known.note or note, {**known.values, **values})
    return found


def meaning(path: str) -> Meant | None:
    """Find what a name of another library stands for here; None where it is not known.

    Args:
        path: as it is written there; of several dotted names as many of the last words as are
            known together, or all that are below a name with its own meaning.
    """
    words = path.lower().split(".")
    names = other_names()
    for first in range(len(words)):
        below = names.get(f"{words[first]}.*")
        meant = names.get(".".join(words[first:]), below)
        if meant is not None:
            return meant
    return None


def translated(path: str, value: object) -> tuple[list[str], object]:
    """The fields of ours that a value of another library belongs to, and the value there.

    Args:
        path: its name there, or one of ours in another section.

    Returns:
        No field where that is not known, where nothing is set, or where more than another name is
        needed.
    """
    known = meaning(path)
    meant = known or Meant(fields_named(path.rpartition(".")[2]))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    mapped = meant.values.get(str(value).lower())
    if mapped is not None:
        return [meant.fields[0]], mapped
    unclear = meant.note or (known is None and len(meant.fields) > 1)
    if unclear or value in NOTHING or isinstance(value, list):
        return [], value
    return [*meant.fields], value


def meant_by(name: str) -> str:
    """Tell what a name of another library is here, at the end of an error; empty where none is.

    Args:
        name: with its sections or without them.
    """
    meant = meaning(name)
    if meant is None:
        return ""
    fields = " or ".join(meant.fields)
    parts = [f"that is {fields} here"] if fields else []
    if meant.note:
        parts.append(meant.note)
    return f"; {': '.join(parts)}"


def unknown_section(name: str) -> str:
    section, _, _ = name.partition(".")
    hint = meant_by(name) or homes(name) or did_you_mean(section, SECTIONS)
    return f"unknown section{hint} (sections, their fields below them: {', '.join(SECTIONS)})"


def homes(name: str) -> str:
    """Return `; did you mean section.name?` for the sections that have a field of this name."""
    found = fields_named(name)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def fields_named(name: str) -> tuple[str, ...]:
    """Dotted paths of the fields of this name, in any section."""
    return tuple(path for path in FIELDS if path.endswith(f".{name}"))
