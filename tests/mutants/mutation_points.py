"""Where code can be broken, and a seeded sample of that: one function of the source at a time.

A mutant is known by file, function, and the text of its lines before and after: an argument about
it survives anything that happens elsewhere in the file.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import math
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

from mutants.tensor_operators import operators, parse

MODULE = "<module>"


@dataclass(frozen=True)
class Segment:
    """One function, method or constant: whole lines of a file."""

    file: str  # from the root of the repository
    function: str  # qualified name, or <module>
    first: int  # line in the file, from 1
    lines: tuple[str, ...]
    indent: int

    @property
    def source(self) -> str:
        return textwrap.dedent("\n".join(self.lines)) + "\n"


@dataclass(frozen=True)
class Point:
    """One thing that one operator can do in a segment."""

    segment: Segment
    operator: str
    occurrence: int
    line: int  # in the file
    rank: str  # a hash: the sample takes the smallest of each function


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    point: Point
    source: str  # of the whole file
    before: str  # the lines that change
    after: str
    meaning: str  # of the segment: two operators may do the same

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.point.segment.file, self.point.segment.function, self.before, self.after


def segments(root: Path, file: str) -> list[Segment]:
    """Functions, methods and constants of a file."""
    text = (root / file).read_text()
    lines = text.split("\n")
    found: list[Segment] = []

    def add(node: ast.stmt, function: str) -> None:
        last = node.end_lineno or node.lineno
        part = tuple(lines[node.lineno - 1 : last])
        found.append(Segment(file, function, node.lineno, part, node.col_offset))

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                add(node, prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign) and not prefix and is_number(node.value):
                add(node, MODULE)

    visit(ast.parse(text).body, "")
    return found


def is_number(node: ast.expr) -> bool:
    """Whether a constant of a module is a number: a literal, or what `math` makes of one."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).startswith("math.")
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def allowed_lines(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges in which a change may change behaviour: neither annotations nor error messages."""
    ranges = [(start(node), end(node)) for node in tree.body if isinstance(node, ast.Assign)]
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        defaults = [*function.args.defaults, *function.args.kw_defaults]
        ranges += [(start(node), end(node)) for node in defaults if node is not None]
        ranges += [(start(node), end(node)) for node in function.body]
    return ranges


def forbidden_lines(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            found.append((start(node), end(node)))
        elif isinstance(node, ast.AnnAssign):
            found.append((start(node.annotation), end(node.annotation)))
        elif isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            notes = [argument.annotation for argument in arguments] + [node.returns]
            found += [(start(note), end(note)) for note in notes if note is not None]
    return found


def start(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def points(segment: Segment, seed: int) -> list[Point]:
    """Everything that the operators can do in a segment, in the order of the sample."""
    source = segment.source
    tree = ast.parse(source)
    allowed = allowed_lines(tree)
    forbidden = forbidden_lines(tree)
    parsed = parse(source)
    lines = source.split("\n")
    found: list[Point] = []
    for name, operator in operators().items():
        seen: dict[str, int] = {}
        for occurrence, place in enumerate(positions(operator, parsed)):
            inside = any(first <= place <= last for first, last in allowed)
            if not inside or any(first <= place <= last for first, last in forbidden):
                continue
            text = lines[place[0] - 1].strip()
            seen[text] = seen.get(text, 0) + 1
            identity = f"{seed} {segment.file} {segment.function} {name} {text} {seen[text]}"
            rank = hashlib.sha256(identity.encode()).hexdigest()
            line = segment.first + place[0] - 1
            found.append(Point(segment, name, occurrence, line, rank))
    return sorted(found, key=lambda point: point.rank)


def positions(operator: Operator, parsed: object) -> Iterator[tuple[int, int]]:
    for node in ast_nodes(parsed):
        for first, _ in operator.mutation_positions(node):
            yield first


def make(root: Path, point: Point) -> Mutant | None:
    """The mutant of a point; None where nothing changes, or nothing that Python can read."""
    segment = point.segment
    operator = operators()[point.operator]
    changed = mutate_code(segment.source, operator, point.occurrence)
    new_meaning = None if changed is None else meaning(changed)
    if changed is None or new_meaning is None or new_meaning == meaning(segment.source):
        return None
    return changed_file(root, point, changed, new_meaning)


def changed_file(root: Path, point: Point, changed: str, new_meaning: str) -> Mutant:
    """A mutant whose segment reads `changed`."""
    segment = point.segment
    old = segment.source.rstrip("\n").split("\n")
    new = changed.rstrip("\n").split("\n")
    # The lines that follow keep their numbers, by which functions are found.
    padding = [""] * (len(old) - len(new))
    indented = [" " * segment.indent + line if line else line for line in [*new, *padding]]
    lines = (root / segment.file).read_text().split("\n")
    lines[segment.first - 1 : segment.first - 1 + len(old)] = indented
    before: list[str] = []
    after: list[str] = []
    for line in difflib.ndiff(old, new):
        if line.startswith("- "):
            before.append(" ".join(line[2:].split()))
        elif line.startswith("+ "):
            after.append(" ".join(line[2:].split()))
    return Mutant(point, "\n".join(lines), "\n".join(before), "\n".join(after), new_meaning)


def by_hand(root: Path, path: Path) -> list[Mutant]:
    """The mutants of a file of mutants: mistakes that somebody once made or thought of.

    Args:
        root: of the repository.
        path: TOML, tables `mutant` of file, function, before and after: whole lines of the
            function, without its indentation.

    Raises:
        ValueError: the lines do not stand in the function, or what takes their place is no Python.
    """
    made: list[Mutant] = []
    for entry in tomllib.loads(path.read_text())["mutant"]:
        places = [x for x in segments(root, entry["file"]) if x.function == entry["function"]]
        before = textwrap.indent(entry["before"], "    ")
        after = textwrap.indent(entry["after"], "    ")
        if not places or places[0].source.count(before) != 1:
            where = f"{entry['file']} {entry['function']}"
            raise ValueError(f"{path.name}: these lines do not stand once in {where}: {before}")
        segment = places[0]
        changed = segment.source.replace(before, after)
        new_meaning = meaning(changed)
        if new_meaning is None:
            raise ValueError(f"{path.name}: this is no Python: {after}")
        line = segment.first + segment.source[: segment.source.index(before)].count("\n")
        point = Point(segment, "by hand", 0, line, "")
        made.append(changed_file(root, point, changed, new_meaning))
    return made


def drawn(
    root: Path, files: list[str], *, seed: int, size: int | None, only: list[str] | None = None
) -> list[Mutant]:
    """A seeded draw from all that can be done to some files, each thing as likely as any other.

    Args:
        root, files, seed, only: as of `sample`.
        size: at most so many mutants; None for all.
    """
    found: list[Point] = []
    for file in files:
        for segment in segments(root, file):
            if only is None or any(part in f"{file}:{segment.function}" for part in only):
                found += points(segment, seed)
    made: dict[tuple[str, str, str], Mutant] = {}
    for point in sorted(found, key=lambda point: point.rank):
        if len(made) == size:
            break
        mutant = make(root, point)
        if mutant is not None:
            made.setdefault((point.segment.file, point.segment.function, mutant.meaning), mutant)
    return list(made.values())


def meaning(source: str) -> str | None:
    """The syntax tree of a source as text; None where it has none."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return None


def sample(
    root: Path, files: list[str], *, seed: int, size: int | None, only: list[str] | None = None
) -> list[Mutant]:
    """A seeded sample: of every function the same share of what can be done to it, at least one.

    What is chosen in a function depends on the seed and on the function alone.

    Args:
        root: of the repository.
        files: from there.
        seed: of the choice.
        size: at least so many mutants, as far as there are; None for all.
        only: parts of FILE:FUNCTION to which the sample is then narrowed; None for no narrowing.
    """
    by_function = [points(segment, seed) for file in files for segment in segments(root, file)]
    by_function = [found for found in by_function if found]
    total = sum(len(found) for found in by_function)
    share = 1.0 if size is None else min(1.0, size / total)
    chosen: list[Mutant] = []
    for found in by_function:
        place = f"{found[0].segment.file}:{found[0].segment.function}"
        if only is not None and not any(part in place for part in only):
            continue
        wanted = math.ceil(share * len(found))
        made: dict[str, Mutant] = {}
        for point in found:
            mutant = make(root, point)
            if mutant is not None:
                made.setdefault(mutant.meaning, mutant)
            if len(made) == wanted:
                break
        chosen += made.values()
    return chosen
