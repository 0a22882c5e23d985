"""What a section and a field of the configuration are: defaults, bounds with their reasons, and who
reads them.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, cast, get_args

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from oxrl.tables.cells import CELLS as TABLE

# Recipes that read a field, where not all do.
RL = ("rl",)
SAMPLING = ("rl", "rejection")
# Recipes whose prompts are answered and the answers scored, in evaluations at least.
ANSWERING = (*SAMPLING, "supervised")
EVALUATING = (*RL, "supervised")
OFFLINE = ("supervised", "rejection", "preference", "reward_model")
PREFERENCE = ("preference",)
# Several responses to one prompt.
COMPARING = (*RL, *PREFERENCE)
ALL = ("rl", *OFFLINE)

# YAML field -> kind of cell in the table.
CELLS = {
    name: name for name in ("advantage", "ratio", "denominator", "correction", "kl", "weights")
} | {"loss": "gate"}


def cell_names(kind: str) -> tuple[str, ...]:
    """Names that a cell of this kind may hold."""
    return tuple(name for found, name in TABLE if found == kind)


# Of a file and of a path, in bytes: what Linux takes.
LONGEST_NAME = 255
LONGEST_PATH = 4000
LARGEST = 3.4e38


class Bounds(TypedDict, total=False):
    """What a field's values are held to."""

    ge: float
    gt: float
    le: float
    lt: float
    min_length: int
    max_length: int


def setting(
    default: object,
    meaning: str,
    *,
    of: tuple[str, ...] = ALL,
    why: str = "",
    too_low: str = "",
    **bounds: Unpack[Bounds],
) -> Any:
    """A field that the recipes `of` read; `why` there are no higher values, and no lower ones."""
    extra: JsonDict = {}
    if of != ALL:
        extra["recipes"] = [*of]
    if why:
        extra["why"] = why
    if too_low:
        extra["too_low"] = too_low
    return Field(default, description=meaning, json_schema_extra=extra or None, **bounds)


def cell_setting(kind: str, meaning: str) -> str | None:
    """Field of an optional cell override; its names come from the table."""
    extra: JsonDict = {"enum": [*cell_names(kind), None], "recipes": [*RL]}
    return Field(None, description=meaning, json_schema_extra=extra)


class Section(BaseModel):
    """Base of every section: unknown fields are refused, values cannot change, infinity and NaN are
    no settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_lookalikes(cls, value: object, info: ValidationInfo) -> object:
        """Stop `true` from becoming 1 and `no`, `on`, `1` from becoming a boolean."""
        field = cls.model_fields[cast(str, info.field_name)]
        boolean, words = _boolean_and_words(field)
        if isinstance(value, bool) and not boolean:
            raise ValueError(
                "must not be true or false here; write a number, or quote the word if it is text"
            )
        if boolean and not isinstance(value, bool) and value not in words:
            allowed = ", ".join(["true", "false", *words][:-1])
            last = ["true", "false", *words][-1]
            raise ValueError(
                f"must be {allowed} or {last} (yes, no, on, off, 0 and 1 are not booleans here)"
            )
        bounded = any(isinstance(rule, MaxLen) for rule in field.metadata)
        for text in value if isinstance(value, dict) else (value,):
            if isinstance(text, str) and not bounded and not fits_a_path(text):
                raise ValueError(
                    f"has {len(text):,} characters; no name of a file, model or function is so long"
                )
        return value

    @field_validator("*")
    @classmethod
    def _fits_a_tensor(cls, value: object) -> object:
        """Numbers are calculated with in tensors of 32 bits."""
        if isinstance(value, float) and abs(value) > LARGEST:
            raise ValueError(f"must be at most {LARGEST:g}, the largest number of 32 bits")
        return value


def _boolean_and_words(field: FieldInfo) -> tuple[bool, tuple[str, ...]]:
    """Whether a field takes true and false, and which words beside them."""
    parts = get_args(field.annotation) or (field.annotation,)
    if bool not in parts:
        return False, ()
    return True, tuple(word for part in parts for word in get_args(part))


def fits_a_path(text: str) -> bool:
    """Whether a file system may be asked about `text`, as it is about most words of a config."""
    encoded = text.encode("utf-8", "surrogatepass")
    longest = max(map(len, encoded.split(b"/")))
    return longest <= LONGEST_NAME and len(encoded) <= LONGEST_PATH


def printable(text: str) -> str:
    """`text`, if it can be shown and written to a file system.

    Raises:
        ValueError: it holds control characters.
    """
    if not text.isprintable():
        raise ValueError("must not hold control characters (line breaks, escape codes, NUL)")
    return text


def readers(field: FieldInfo) -> tuple[str, ...]:
    """Recipes that can read a field or section."""
    extra = field.json_schema_extra
    named = extra.get("recipes") if isinstance(extra, dict) else None
    return ALL if named is None else tuple(cast(list[str], named))


def why_bounded(field: FieldInfo, *, below: bool) -> str:
    """Why the bound that was crossed is there, as the end of a sentence; empty where plain.

    Args:
        below: it is the lower one.
    """
    extra = field.json_schema_extra
    why = extra.get("too_low" if below else "why") if isinstance(extra, dict) else None
    return f", because {why}" if why else ""
