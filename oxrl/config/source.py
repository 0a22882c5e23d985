"""Plain values that remember where a user wrote them, in YAML or in a program, and what is wrong
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from oxrl.config.field import holds_mapping
from oxrl.config.schema import FIELDS, SECTIONS, Config, FieldValues
from oxrl.errors import ConfigError, is_named_pipe, why_no_file
from oxrl.flat_config import named_in

# Values of problems: none is told, or the one of the configuration.
UNSET: object = object()
AS_IT_IS: object = object()


# Made once: it looks for plug-ins on the disk.
YAML_1_2 = YAML(typ="safe", pure=True)
# The parser takes seconds per hundred kilobytes and per thousand brackets; no configuration comes
# near either.
MOST_CHARACTERS = 100_000
MOST_BRACKETS = 200
# Tags of what has keys.
MAPPINGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:set")
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


Problems = Iterator[Problem]
Check = Callable[[Config], Problems]


def at(path: str, rule: str, *also: str) -> Problem:
    """The problem of a field, told with the value that it has; fields `also` took part."""
    return Problem(path, rule, AS_IT_IS, also=also)


@dataclass
class Source:
    """The values that the user wrote, and where: by dotted path, under names of ours in `values`.

    `foreign` are values of the file under names that are none of ours.
    """

    file: str
    values: FieldValues = field(default_factory=dict)
    foreign: FieldValues = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The place where the run will be; a wrong name of it is found by the checks."""
        place = self.values.get("run.dir")
        return Path(str(place)) if place else Path("runs") / str(self.values.get("run.name"))

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
        raise ConfigError(
            f"{path}:1: the file must hold sections such as `train:`, not a list or a single value"
        )
    take(_entries("", root, source), source)
    return source


def take(given: Mapping[Any, Any], source: Source) -> None:
    """Keep section -> field -> value of what a file or a program says, and what is wrong there."""
    for name, fields in given.items():
        section = str(name)
        place = source.place(section)
        if section not in SECTIONS:
            from oxrl.config.names import homes, meant_by, unknown_section  # most are ours

            if isinstance(fields, Mapping) or not (meant_by(section) or homes(section)):
                source.wrong(section, unknown_section(section), place)
        elif fields in (None, {}):
            continue
        elif not isinstance(fields, Mapping):
            source.wrong(section, "is a section and holds fields, not a value", place)
        for path, value in _fields_in(section, fields):
            try:
                enter(path, _as_written(path, value), source)
            except ValueError as error:
                source.wrong(path, str(error), source.place(path))


def _fields_in(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield every field by its dotted path; below a name that is none of ours, all there is."""
    of_section = path in SECTIONS or path.partition(".")[0] not in SECTIONS
    if of_section and isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _fields_in(f"{path}.{name}", inner)
    else:
        yield path, value


def _as_written(path: str, value: object) -> object:
    """A value of a program as a file has it: paths and names are text."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping) and _holds_names(path):
        return {str(name): _as_written(f"{path}.{name}", inner) for name, inner in value.items()}
    repr(value)  # refuses a number of too many digits, as `plain` does
    return value


def enter(path: str, value: object, source: Source) -> None:
    """Keep the value of a field, whether it is one of ours or not.

    Raises:
        ValueError: it holds several values, and the field takes one.
    """
    if path not in FIELDS:
        source.foreign[path] = value
    elif isinstance(value, list | tuple | set) or (
        isinstance(value, dict) and not holds_mapping(FIELDS[path])
    ):
        raise ValueError("takes a single value, not a list or nested fields")
    else:
        source.values[path] = value


def _read_text(path: Path) -> str:
    if is_named_pipe(path):
        raise ConfigError(f"{path}: {why_no_file(path)}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8; save the file as UTF-8"
    except OSError as error:
        why = f"cannot be read: {error.strerror}" if path.is_file() else why_no_file(path)
    except ValueError:
        why = "no such file: a name cannot hold the control character NUL"
    raise ConfigError(f"{path}: {why}")


def compose(text: str, name: str) -> Node | None:
    """Parse a text that is no larger than a configuration may be; None where it is empty."""
    brackets = text.count("[") + text.count("{")
    if len(text) > MOST_CHARACTERS or brackets > MOST_BRACKETS:
        raise ConfigError(
            f"{name}: not a configuration: more than {MOST_CHARACTERS} characters or "
            f"{MOST_BRACKETS} brackets"
        )
    try:
        root = YAML(typ="safe", pure=True).compose(text)  # else marks of comments stand in text
    except RecursionError:
        raise ConfigError(f"{name}: not a configuration: nested far too deep") from None
    except MarkedYAMLError as error:
        raise ConfigError(f"{name}:{_why_no_yaml(text, error)}") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None
    found = [root]
    for node in found:  # of a mapping, pairs of nodes
        if isinstance(node, MappingNode) and str(node.tag) not in MAPPINGS:
            line = node.start_mark.line + 1
            raise ConfigError(
                f"{name}:{line}: what has keys is tagged {node.tag}: leave the tag out"
            )
        inside = getattr(node, "value", node)
        if isinstance(inside, list | tuple):
            found += inside
        if len(found) > MOST_VALUES:
            raise ConfigError(
                f"{name}: not a configuration: more than {MOST_VALUES} values, with those that it "
                "repeats"
            )
    return root


def _why_no_yaml(text: str, error: MarkedYAMLError) -> str:
    """The line, and why it is no YAML."""
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark is not None else 0
    why = error.problem or error.context
    if "\t" in "".join(text.splitlines()[line : line + 1]):
        why = f"{why}; YAML is indented with spaces, this line has a tab"
    return f"{line + 1}: not YAML: {why}"


def value_of(path: str, node: Node, source: Source, override: str) -> object:
    """The value that a node gives a field, or what is not one of ours.

    Args:
        override: the place of all in it; empty where that is a file.
    """
    if isinstance(node, MappingNode) and _holds_names(path):
        return _entries(path, node, source, override)
    return plain(node)


def _holds_names(path: str) -> bool:
    """True if keys at a path are names, which are text and have places: those of fields and of what
    a field holds, and all that stand in no section of ours.
    """
    if path in SECTIONS or path.partition(".")[0] not in SECTIONS:
        return True
    if named_in(path):
        return path.count(".") < 4
    return path in FIELDS and holds_mapping(FIELDS[path])


def _entries(path: str, node: MappingNode, source: Source, override: str = "") -> FieldValues:
    """The values of a mapping by its keys.

    A key that is no text or comes twice, and a value that is no plain one, becomes a problem.
    """
    found: FieldValues = {}
    first: dict[str, str] = {}
    for key, inner in node.value:
        place = override or f"{source.file}:{key.start_mark.line + 1}"
        if not isinstance(key, ScalarNode):
            source.wrong(path, "a field name must be a word", place)
            continue
        name = key.value
        below = f"{path}.{name}" if path else name
        if name in first:
            source.wrong(below, f"written twice, first at {first[name]}; keep one of them", place)
            continue
        first[name] = place
        source.where[below] = place
        try:
            found[name] = value_of(below, inner, source, override)
        except ValueError as error:
            source.wrong(below, str(error), place)
    return found


def plain(node: Node) -> object:
    """Python value of a YAML 1.2 node; dates stay text.

    Raises:
        ValueError: it has none, or too many digits.
    """
    if str(node.tag).endswith(":timestamp"):
        return node.value
    try:
        value = SafeConstructor(loader=YAML_1_2).construct_object(node, deep=True)
        repr(value)  # refuses a number of too many digits, which may have been hexadecimal
        return value
    except MarkedYAMLError as error:
        raise ValueError(f"needs a plain value: {error.problem}") from None
