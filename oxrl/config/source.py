"""YAML as plain values that remember where they were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from oxrl.config.field import holds_mapping
from oxrl.config.schema import FIELDS, SECTIONS, FieldValues
from oxrl.errors import ConfigError
from oxrl.flat_config import PARTS

Values = dict[str, FieldValues]

# Values of problems: none is told, or the one of the configuration.
UNSET: object = object()
AS_IT_IS: object = object()


# The parser takes seconds per hundred kilobytes and per thousand brackets; no configuration comes
# near either.
MOST_CHARACTERS = 100_000
MOST_BRACKETS = 200
MOST_VALUES = 30_000  # and keys, counted as often as an alias repeats them


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
    """The values that the user wrote: section -> field -> value, and the place of each dotted path.

    `taken_back` are fields that the file sets, and an override takes back; `foreign` are values of
    the file under names that are none of ours.
    """

    file: str
    values: Values = field(default_factory=Values)
    foreign: FieldValues = field(default_factory=FieldValues)
    taken_back: set[str] = field(default_factory=set[str])
    where: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def directory(self) -> Path:
        """The place where the run will be; a wrong name of it is found by the checks."""
        section = self.values.get("run", {})
        place = section.get("dir")
        return Path(str(place)) if place else Path("runs") / str(section.get("name"))

    def written(self, path: str) -> bool:
        """True if the field of this dotted name was given a value, under names of ours."""
        section, _, name = path.partition(".")
        return name in self.values.get(section, {})

    def switched_off(self, path: str) -> bool:
        """True if the field of this dotted name is null by name, or was taken back."""
        section, _, name = path.partition(".")
        unwritten = None if path in self.taken_back else UNSET
        return self.values.get(section, {}).get(name, unwritten) is None

    def place(self, path: str) -> str:
        """Return the place where a field was written, or else where it would stand."""
        while path and path not in self.where:
            path = path.rpartition(".")[0]
        return self.where.get(path, self.file)

    def wrong(self, path: str, rule: str, place: str) -> None:
        """Add a problem that was found at `place`."""
        self.problems.append(Problem(path, rule, where=place))


def read_source(path: Path | str) -> Source:
    """Read a YAML file.

    Returns:
        What was written, with the problems found on the way.

    Raises:
        ConfigError: the file cannot be read, is empty or no YAML: nothing else can be checked then.
    """
    source = Source(file=str(path))
    root = compose(_read_text(Path(path)), source.file)
    if root is None:
        raise ConfigError(f"{path} is empty; it needs at least run, model, data and train")
    if not isinstance(root, MappingNode):
        rule = "the file must hold sections such as `train:`, not a list or a single value"
        raise ConfigError(f"{path}:1: {rule}")
    _read_sections(root, source)
    return source


def enter(path: str, value: object, source: Source) -> None:
    """Keep the value of a field, whether it is one of ours or not.

    Raises:
        ValueError: it holds several values, and the field takes one.
    """
    section, _, name = path.partition(".")
    if path not in FIELDS:
        source.foreign[path] = value
    elif isinstance(value, list | tuple | set) or (
        isinstance(value, dict) and not holds_mapping(FIELDS[path])
    ):
        raise ValueError("takes a single value, not a list or nested fields")
    else:
        source.values.setdefault(section, {})[name] = value


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        from oxrl.config.unreadable import why_no_text  # most files are there

        raise ConfigError(f"{path}: {why_no_text(path, error)}") from None


def compose(text: str, name: str) -> Node | None:
    brackets = text.count("[") + text.count("{")
    if len(text) > MOST_CHARACTERS or brackets > MOST_BRACKETS:
        limits = f"more than {MOST_CHARACTERS} characters or {MOST_BRACKETS} brackets"
        raise ConfigError(f"{name}: not a configuration: {limits}")
    try:
        root = YAML(pure=True).compose(text)
    except (YAMLError, RecursionError) as error:
        from oxrl.config.unreadable import why_no_yaml  # most files are YAML

        raise ConfigError(f"{name}:{why_no_yaml(text, error)}") from None
    found = [root]
    for node in found:  # of a mapping, pairs of nodes
        inside = getattr(node, "value", node)
        if isinstance(inside, list | tuple):
            found += inside
        if len(found) > MOST_VALUES:
            why = f"more than {MOST_VALUES} values, with those that it repeats"
            raise ConfigError(f"{name}: not a configuration: {why}")
    return root


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
            # Most files have sections of ours alone.
            from oxrl.config.names import homes, meant_by, unknown_section

            if isinstance(node, MappingNode) or not (meant_by(section) or homes(section)):
                source.wrong(section, unknown_section(section), place)
            _foreign(section, node, source)
        elif isinstance(node, MappingNode):
            for path, value, _ in _entries(node, f"{section}.", source):
                _store(path, value, source)
        elif node.value not in ("", "~", "null"):
            source.wrong(section, "is a section and holds fields, not a value", place)
            _foreign(section, node, source)


def _foreign(path: str, node: Node, source: Source) -> None:
    """Keep what is written under a name that is none of ours, value by value."""
    if isinstance(node, MappingNode) and node.value:
        for inner, value, _ in _entries(node, f"{path}.", source):
            _foreign(inner, value, source)
    else:
        _store(path, node, source)


def _store(path: str, node: Node, source: Source) -> None:
    """One field as a file says it; what is wrong with it becomes a problem."""
    try:
        enter(path, value_of(path, node, source), source)
    except ValueError as error:
        source.wrong(path, str(error), source.where[path])


def value_of(path: str, node: Node, source: Source) -> object:
    """What a field is given; keys of a mapping have places of their own."""
    known = FIELDS.get(path)
    if known is not None and holds_mapping(known) and isinstance(node, MappingNode):
        return mapping(path, node, source, depth=1 + (path == PARTS))
    return plain(node)


def mapping(path: str, node: MappingNode, source: Source, *, depth: int) -> object:
    """The entries of a mapping by their keys, and those inside of them where it is that deep."""
    prefix = f"{path}."
    place = source.where[path]
    override = place if place.startswith("override") else ""
    found: FieldValues = {}
    for key, item, _ in _entries(node, prefix, source, override):
        name = key.removeprefix(prefix)
        if depth > 1 and isinstance(item, MappingNode):
            found[name] = mapping(key, item, source, depth=1)
        else:
            found[name] = plain(item)
    return found


def plain(node: Node) -> object:
    """Python value of a YAML 1.2 node; dates stay text."""
    if str(node.tag).endswith(":timestamp"):
        return node.value
    try:
        value = YAML(typ="safe", pure=True).constructor.construct_object(node, deep=True)
        repr(value)  # refuses a number of too many digits, which may have been hexadecimal
        return value
    except MarkedYAMLError as error:
        raise ValueError(f"needs a plain value: {error.problem}") from None
