"""YAML and `key=value` overrides as plain values that remember where they were written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from oxrl.config.other_names import meant_by
from oxrl.config.schema import FIELDS, SECTIONS
from oxrl.errors import ConfigError, did_you_mean, why_no_file

Values = dict[str, dict[str, object]]

UNSET: object = object()
# Fields that hold a mapping; every other one holds a single value.
MAPPINGS = (
    "run.health",
    "run.deadlines",
    "environment.options",
    "rollout.context",
    "data.columns",
    "data.train",
    "reward.options",
    "train.mix",
    "train.loss_numbers",
    "train.features",
)
# A mapping of mappings: part -> field -> value.
PARTS = "reward.parts"
# The parser takes seconds per hundred kilobytes and per thousand brackets; no configuration comes
# near either.
MOST_CHARACTERS = 100_000
MOST_BRACKETS = 200
MOST_FIELDS = 10_000  # of names that are none of ours


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
        path: dotted name of the field.
        rule: what is wrong, and what would be right.
        value: what the field holds.
        where: the place where it was written, if it is not that of `path`.
        also: other fields that took part: a problem there hides this one.
    """

    path: str
    rule: str
    value: object = UNSET
    where: str = ""
    also: tuple[str, ...] = ()


@dataclass
class Source:
    """What the user wrote: section -> field -> value, and where each dotted path was written.

    `taken_back` are fields that the file sets, and an override takes back; `foreign` are values of
    the file under names that are none of ours.
    """

    file: str
    values: Values = field(default_factory=Values)
    foreign: dict[str, object] = field(default_factory=dict[str, object])
    taken_back: set[str] = field(default_factory=set[str])
    where: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def directory(self) -> Path:
        """Where the run will be; a wrong name of it is found by the checks."""
        section = self.values.get("run", {})
        place = section.get("dir")
        return Path(str(place)) if place else Path("runs") / str(section.get("name"))

    def written(self, path: str) -> bool:
        """Whether the field of this dotted name was given a value."""
        section, _, name = path.partition(".")
        return path in self.foreign or name in self.values.get(section, {})

    def switched_off(self, path: str) -> bool:
        """Whether the field of this dotted name is null by name, or was taken back."""
        section, _, name = path.partition(".")
        null = self.written(path) and self.values[section][name] is None
        return null or (path in self.taken_back and not self.written(path))

    def wrong(self, path: str, rule: str, place: str) -> None:
        """Add a problem that was found at `place`."""
        self.problems.append(Problem(path, rule, where=place))


def read_source(path: Path | str, overrides: Sequence[str]) -> Source:
    """Read a file and apply overrides in order.

    Args:
        path: YAML file.
        overrides: `section.field=value` or `~section.field`.

    Returns:
        What was written, with the problems found on the way.

    Raises:
        ConfigError: the file cannot be read, or is no YAML: nothing else can be checked then.
    """
    source = Source(file=str(path))
    root = _compose(_read_text(Path(path)), source.file)
    if root is None:
        rule = f"{path} is empty; it needs at least run, model, data and train"
        source.problems.append(Problem("", rule))
    elif not isinstance(root, MappingNode):
        rule = "the file must hold sections such as `train:`, not a list or a single value"
        raise ConfigError(f"{path}:1: {rule}")
    else:
        _read_sections(root, source)
    apply_overrides(source, overrides)
    return source


def given_source(name: str, values: Values, overrides: Sequence[str]) -> Source:
    """As `read_source`, of values that no file holds.

    Args:
        name: where they come from, for errors.
        values: section -> field -> value.
        overrides: as of `read_source`.
    """
    source = Source(file=name, values=values)
    apply_overrides(source, overrides)
    return source


def mapping_source(name: str, given: Mapping[Any, Any], overrides: Sequence[str]) -> Source:
    """As `read_source`, of sections and fields that a program holds as mappings.

    Args:
        name: where they come from, for errors.
        given: section -> field -> value, as a file would say it.
        overrides: as of `read_source`.
    """
    source = Source(file=name)
    for section, fields in given.items():
        if section not in SECTIONS:
            source.wrong(str(section), _unknown_section(str(section)), name)
        elif isinstance(fields, Mapping):
            values = cast(Mapping[object, object], fields)
            for field_name, value in values.items():
                _take(f"{section}.{field_name}", value, source)
        elif fields is not None:
            source.wrong(section, "is a section and holds fields, not a value", name)
    apply_overrides(source, overrides)
    return source


def _take(path: str, value: object, source: Source) -> None:
    """One field as a program says it: of the kinds that a file could say."""
    section, _, name = path.partition(".")
    if isinstance(value, PurePath):
        value = str(value)
    many = isinstance(value, list | tuple | set)
    if many or (isinstance(value, Mapping) and path not in (*MAPPINGS, PARTS)):
        source.wrong(path, "takes a single value, not a list or nested fields", source.file)
        return
    if isinstance(value, Mapping):
        value = _plain_mapping(cast(Mapping[object, object], value), depth=1 + (path == PARTS))
    if path in FIELDS:
        source.values.setdefault(section, {})[name] = value
    else:
        source.foreign[path] = value


def _plain_mapping(given: Mapping[object, object], *, depth: int) -> dict[str, object]:
    """A mapping of a program by its keys as text, and those inside of it where it is that deep."""
    found: dict[str, object] = {}
    for key, item in given.items():
        if depth > 1 and isinstance(item, Mapping):
            inner = cast(Mapping[object, object], item)
            item = _plain_mapping(inner, depth=depth - 1)
        elif isinstance(item, PurePath):
            item = str(item)
        found[str(key)] = item
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8; save the file as UTF-8"
        raise ConfigError(f"{path}: {why}") from None
    except OSError as error:
        why = f"cannot be read: {error.strerror}" if path.is_file() else why_no_file(path)
        raise ConfigError(f"{path}: {why}") from None


def _compose(text: str, name: str) -> Node | None:
    brackets = text.count("[") + text.count("{")
    if len(text) > MOST_CHARACTERS or brackets > MOST_BRACKETS:
        limits = f"more than {MOST_CHARACTERS} characters or {MOST_BRACKETS} brackets"
        raise ConfigError(f"{name}: not a configuration: {limits}")
    try:
        return YAML(pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark is not None else 0
        why = error.problem or error.context
        if "\t" in "".join(text.splitlines()[line : line + 1]):
            why = f"{why}; YAML is indented with spaces, this line has a tab"
        raise ConfigError(f"{name}:{line + 1}: not YAML: {why}") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not a configuration: nested far too deep") from None


def _entries(
    node: MappingNode, prefix: str, source: Source, override: str = ""
) -> Iterator[tuple[str, Node, str]]:
    """Yield (dotted path, value node, place) of each key.

    A key that is no text, or comes twice, becomes a problem. `override` is the place of everything
    that an override says.
    """
    first: dict[str, str] = {}
    for key, value in node.value:
        place = override or f"{source.file}:{key.start_mark.line + 1}"
        if not isinstance(key, ScalarNode):
            source.wrong(prefix.rstrip("."), "a field name must be a word", place)
            continue
        path = prefix + key.value
        if path in first:
            source.wrong(path, f"written twice, first at {first[path]}; keep one of them", place)
            continue
        first[path] = place
        source.where[path] = place
        yield path, value, place


def _read_sections(root: MappingNode, source: Source) -> None:
    for section, node, place in _entries(root, "", source):
        if section not in SECTIONS:
            if isinstance(node, MappingNode) or not (meant_by(section) or homes(section)):
                source.wrong(section, _unknown_section(section), place)
            _foreign(section, node, source)
        elif isinstance(node, MappingNode):
            for path, value, at in _entries(node, f"{section}.", source):
                _store(path, value, at, source)
        elif not (isinstance(node, ScalarNode) and node.value in ("", "~", "null")):
            source.wrong(section, "is a section and holds fields, not a value", place)


def _foreign(path: str, node: Node, source: Source) -> None:
    """Keep what is written under a name that is none of ours, value by value.

    Raises:
        ConfigError: it names more than a configuration has, by repeating parts of itself.
    """
    if len(source.where) > MOST_FIELDS:
        raise ConfigError(f"{source.file}: not a configuration: more than {MOST_FIELDS} fields")
    if isinstance(node, MappingNode):
        for inner, value, _ in _entries(node, f"{path}.", source):
            _foreign(inner, value, source)
        return
    try:
        source.foreign[path] = _plain(node)
    except ValueError as error:
        source.wrong(path, str(error), source.where[path])


def _unknown_section(name: str) -> str:
    section, _, _ = name.partition(".")
    hint = meant_by(name) or homes(section) or did_you_mean(section, SECTIONS)
    return f"unknown section{hint} (sections: {', '.join(SECTIONS)})"


def homes(name: str) -> str:
    """Return `; did you mean section.name?` for the sections that have a field of this name."""
    found = [path for path in FIELDS if path.endswith(f".{name}")]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _store(path: str, node: Node, place: str, source: Source) -> None:
    section, _, name = path.partition(".")
    values = source.values.setdefault(section, {})
    try:
        if path not in FIELDS:
            _foreign(path, node, source)
        elif isinstance(node, ScalarNode):
            values[name] = _plain(node)
        elif path in (*MAPPINGS, PARTS) and isinstance(node, MappingNode):
            values[name] = _mapping(path, node, place, source, depth=1 + (path == PARTS))
        else:
            raise ValueError("takes a single value, not a list or nested fields")
    except ValueError as error:
        source.wrong(path, str(error), place)


def _mapping(path: str, node: MappingNode, place: str, source: Source, *, depth: int) -> object:
    """The entries of a mapping by their keys, and those inside of them where it is that deep."""
    prefix = f"{path}."
    override = place if place.startswith("override") else ""
    found: dict[str, object] = {}
    for key, item, _ in _entries(node, prefix, source, override):
        name = key.removeprefix(prefix)
        if depth > 1 and isinstance(item, MappingNode):
            found[name] = _mapping(key, item, place, source, depth=1)
        else:
            found[name] = _plain(item)
    return found


def _plain(node: Node) -> object:
    """Python value of a YAML 1.2 node; dates stay text."""
    if str(node.tag).endswith(":timestamp"):
        return node.value
    try:
        value = YAML(typ="safe", pure=True).constructor.construct_object(node, deep=True)
        repr(value)  # refuses a number of too many digits, which may have been hexadecimal
        return value
    except ConstructorError:
        raise ValueError(f"the YAML tag {node.tag} is not supported; write a plain value") from None


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Enter overrides, in order; what is wrong with one becomes a problem of the source."""
    for override in overrides:
        _apply_override(override, source)


def _apply_override(override: str, source: Source) -> None:
    """`section.field=value` sets, `~section.field` takes back what the file says."""
    key, equals, text = override.partition("=")
    path = key.strip().removeprefix("~")
    section, dot, name = path.partition(".")
    place = f"override '{override}'"
    if path.startswith(f"{PARTS}."):
        _override_part(override, path, text, source)
    elif override.startswith("~"):
        if equals or not source.written(path):
            rule = (
                "takes back a field that the file sets: "
                "write ~section.field, naming one that is there"
            )
            source.wrong(path, rule, place)
        else:
            source.foreign.pop(path, None)
            source.values.get(section, {}).pop(name, None)
            source.taken_back.add(path)
    elif not equals or (section in SECTIONS and not dot):
        source.wrong(path, "an override is written section.field=value", place)
    elif section not in SECTIONS:
        source.wrong(path, _unknown_section(path), place)
    else:
        source.where[path] = place
        node = _override_node(path, text, place, source)
        if node is not None:
            _store(path, node, place, source)


def _override_node(path: str, text: str, place: str, source: Source) -> Node | None:
    """What an override gives a field; None where it is no YAML, which becomes a problem."""
    try:
        return _compose(text, "") or ScalarNode("tag:yaml.org,2002:null", "")
    except ConfigError as error:
        source.wrong(path, f"{str(error).lstrip(':1 ')}; quote the value if it is text", place)
        return None


def _override_part(override: str, path: str, text: str, source: Source) -> None:
    """`reward.parts.part.field=value`, `reward.parts.part={...}`, or `~` and one of these paths."""
    place = f"override '{override}'"
    parts = source.values.setdefault("reward", {}).setdefault("parts", {})
    part, _, name = path.removeprefix(f"{PARTS}.").partition(".")
    holder = parts
    if name and isinstance(parts, dict):
        holder = parts.get(part)
    key = name or part
    if not isinstance(holder, dict) or not key:
        rule = "reward.parts has no such part: write reward.parts.PART={name: math}, or its fields"
        source.wrong(PARTS, rule, place)
    elif not override.startswith("~"):
        _set_in_part(holder, key, path, _override_node(path, text, place, source), place, source)
    elif key in holder:
        del holder[key]
    else:
        source.wrong(path, "takes back what the file sets: name a part or field there", place)


def _set_in_part(
    holder: dict[str, object], key: str, path: str, node: Node | None, place: str, source: Source
) -> None:
    """Give a part, or a field of one, the value of a node; what it cannot be becomes a problem."""
    if node is None:
        return
    source.where[path] = place
    try:
        if isinstance(node, MappingNode):
            holder[key] = _mapping(path, node, place, source, depth=1)
        else:
            holder[key] = _plain(node)
    except ValueError as error:
        source.wrong(path, str(error), place)
