"""Sections and fields of the configuration. The line of a field says everything of it: default,
meaning, bounds and their reasons, which recipes read it and when, what becomes of a run that is
resumed with another value, and what other libraries call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, Unpack, cast, get_args, get_origin

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from oxrl.tables.numbers import AnyNumber, Number, T
from oxrl.types import Objects

Recipes = tuple[str, ...]
# Recipes that read a field, where not all do.
RL = ("rl",)
SAMPLING = ("rl", "rejection")
# Recipes whose prompts are answered and the answers scored, in evaluations at least.
ANSWERING = (*SAMPLING, "supervised")
EVALUATING = (*RL, "supervised")
SUPERVISED = ("supervised", "rejection")
OFFLINE = (*SUPERVISED, "preference", "reward_model")
PREFERENCE = ("preference",)
# Several responses to one prompt.
COMPARING = (*RL, *PREFERENCE)
ALL = ("rl", *OFFLINE)

# A function of `conditions.py`: whether a configuration reads a field. None: that cannot be told
# yet, and the field is read where it is set.
Condition = Callable[..., bool | None]
# What becomes of a run that is resumed with another value. fixed: it would be another run, and is
# refused. free: it is the same run. reorders: it is the same but for rounding, as sums are added in
# another order. settled: as reorders, but its auto is settled when a run begins, and stays.
Resume = Literal["fixed", "free", "reorders", "settled"]

# Of a file and of a path, in bytes: what Linux takes.
LONGEST_NAME = 255
LONGEST_PATH = 4000
LARGEST = 3.4e38


class Aka:
    """Names of other libraries that stand for a field.

    Args:
        names: as they are written there; with dots where the last word alone is not enough. A name
            may begin with the kind of training, as rl.beta; sl is what learns from data.
        note: what is different about them: another name alone does not do.
        values: theirs -> ours, where these are called otherwise.
    """

    def __init__(self, *names: str, note: str = "", values: Objects = MappingProxyType({})) -> None:
        self.names = names
        self.note = note
        self.values = values


Akas = Aka | tuple[Aka, ...]


class Bounds(TypedDict, total=False):
    """The bounds that a field's values are held to."""

    ge: float
    gt: float
    le: float
    lt: float
    min_length: int
    max_length: int


class Facts(Bounds, total=False):
    """Anything else that a line may say: see `About`, whose `names` are `aka` here."""

    when: Condition | tuple[Condition, ...]
    resume: Resume
    aka: Akas
    why: str
    too_low: str
    takes_mapping: bool
    number: AnyNumber


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts of a field or a section beside its type, default, bounds and meaning.

    Args:
        of: recipes that can read it.
        when: what else has to hold for it to be read; the first that does not is told.
        resume: what becomes of a run that is resumed with another value.
        names: what it is called elsewhere.
        why: there are no higher values.
        too_low: why there are no lower ones.
        takes_mapping: it is text, and may be written as a mapping.
        number: of the tables that it is: rows read it whose cells or features name it.
    """

    of: Recipes = ALL
    when: tuple[Condition, ...] = ()
    resume: Resume = "fixed"
    names: tuple[Aka, ...] = ()
    why: str = ""
    too_low: str = ""
    takes_mapping: bool = False
    number: AnyNumber | None = None


def setting(
    default: object,
    meaning: str = "",
    *,
    of: Recipes = ALL,
    enum: tuple[str, ...] = (),
    **facts: Unpack[Facts],
) -> Any:
    """Declare a field, or a section of the configuration.

    Args:
        default: its value where nobody sets it; `...`: it has to be set.
        meaning: one or two sentences for who writes the YAML.
        of: recipes that can read it.
        enum: names that editors propose.
        facts: bounds, and what `About` says.
    """
    when = facts.pop("when", ())
    names = facts.pop("aka", ())
    about = About(
        of=of,
        when=when if isinstance(when, tuple) else (when,),
        resume=facts.pop("resume", "fixed"),
        names=names if isinstance(names, tuple) else (names,),
        why=facts.pop("why", ""),
        too_low=facts.pop("too_low", ""),
        takes_mapping=facts.pop("takes_mapping", False),
        number=facts.pop("number", None),
    )
    extra: JsonDict = {}
    if enum:
        extra["enum"] = [*enum, None] if default is None else [*enum]
    if of != ALL:
        extra["recipes"] = [*of]
    for name in ("why", "too_low"):
        if reason := getattr(about, name):
            extra[name] = reason
    field: Any = Field(
        default,
        description=meaning or None,
        json_schema_extra=extra or None,
        **cast(Bounds, facts),
    )
    field.metadata.append(about)
    return field


def number(
    declared: Number[T], names: Akas = (), when: Condition | tuple[()] = (), why: str = ""
) -> T:
    """Declare a field of `train` that is a number of the tables."""
    bounds = {name: getattr(declared, name) for name in ("ge", "gt", "le", "lt")}
    return setting(
        declared.default,
        declared.meaning,
        aka=names,
        when=when,
        why=why,
        number=declared,
        **cast(Bounds, bounds),
    )


def about(field: FieldInfo) -> About:
    """Return what the line of a field says beside what pydantic knows."""
    return next((item for item in field.metadata if isinstance(item, About)), About())


def holds_mapping(field: FieldInfo) -> bool:
    """True if a field may be written as a mapping; every other one is a single value."""
    kinds = (field.annotation, *get_args(field.annotation))
    plain = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    return about(field).takes_mapping or dict in map(get_origin, plain)


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
        kinds = get_args(field.annotation) or (field.annotation,)
        boolean = bool in kinds
        words = [word for kind in kinds for word in get_args(kind)]  # taken beside true and false
        if isinstance(value, bool):
            if not boolean:
                raise ValueError(
                    "must not be true or false here; write a number, or quote the word if it is "
                    "text"
                )
        elif boolean and value not in words:
            *allowed, last = ("true", "false", *words)
            raise ValueError(
                f"must be {', '.join(allowed)} or {last} "
                "(yes, no, on, off, 0 and 1 are not booleans here)"
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
    def _can_be_used(cls, value: object) -> object:
        """Any text may be asked of a file system, and numbers are calculated with in tensors of 32
        bits.
        """
        refuse_nul(value)
        if isinstance(value, float) and abs(value) > LARGEST:
            raise ValueError(f"must be at most {LARGEST:g}, the largest number of 32 bits")
        return value


def names_in(text: str) -> list[str]:
    """The names in a text with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def fits_a_path(text: str) -> bool:
    """True if a file system may be asked about `text`, as it is about most words of a config."""
    encoded = text.encode("utf-8", "surrogatepass")
    longest = max(map(len, encoded.split(b"/")))
    return longest <= LONGEST_NAME and len(encoded) <= LONGEST_PATH


def refuse_nul(value: object) -> None:
    """Refuse NUL in any text of a value: asked for a file of such a name, Python finds none or
    raises an error, which differs between its versions and their functions.

    Raises:
        ValueError: there is one, at any depth.
    """
    if isinstance(value, str) and "\0" in value:
        raise ValueError(
            "must not hold the control character NUL: no name of a file, model or function does"
        )
    if isinstance(value, dict):
        value = [*value, *value.values()]
    for inner in value if isinstance(value, list) else ():
        refuse_nul(inner)


def printable(text: str) -> str:
    """`text`, if it can be shown and written to a file system.

    Raises:
        ValueError: it holds control characters.
    """
    if not text.isprintable():
        raise ValueError("must not hold control characters (line breaks, escape codes, NUL)")
    return text
