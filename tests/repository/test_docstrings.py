"""Public functions and classes say what they take: docstrings, whose `Args:` are the arguments.

Read from the source: nothing is imported, so that what needs an optional package is held to it too.
A method that a base class or a protocol of the package explains need not be explained again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "oxrl"
BESIDE = ROOT / "packages"
FOLDERS = {
    "functional": sorted((PACKAGE / "functional").rglob("*.py")),
    "rewards": sorted((PACKAGE / "rewards").rglob("*.py")),
    "data": sorted((PACKAGE / "data").rglob("*.py")),
    "environments": sorted((PACKAGE / "environments").rglob("*.py")),
    "engines": [
        *sorted((PACKAGE / "engines").glob("*.py")),
        *sorted((PACKAGE / "engines").glob("*/base.py")),
        *sorted((PACKAGE / "engines").glob("*/__init__.py")),
    ],
    "api": [PACKAGE / "api.py"],
    # A tracker's process is called by the run alone, as a run's own parts are; of a command the
    # docstring is its help, and its options explain themselves.
    "packages": [
        path
        for path in sorted(BESIDE.rglob("*.py"))
        if path.parts[-2] != "oxrl_trackers" and path.name != "commands.py"
    ],
}
# What a policy reads of its built-in tool is this docstring, and `Args:` would change its prompts.
READ_BY_POLICIES = ("calculator",)
Function = ast.FunctionDef | ast.AsyncFunctionDef
SECTION = re.compile(r"(Args|Shapes|Returns|Raises|Yields|Source|Example|Examples):")
# "    name, *other: what they are", at the indentation of a section and no deeper.
ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): \S")


@dataclass
class Class:
    """A class of the package: its methods, and what it is made from."""

    node: ast.ClassDef
    bases: list[str]
    methods: dict[str, Function] = field(default_factory=dict)

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name, without what stands in brackets."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def decorators(function: Function) -> set[str]:
    named = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    return {name_of(node) for node in named}


def read_class(node: ast.ClassDef) -> Class:
    found = Class(node, [name_of(base) for base in node.bases])
    for inside in node.body:
        if isinstance(inside, Function) and not decorators(inside) & {"setter", "overload"}:
            found.methods[inside.name] = inside
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module and every statement in it, however deep; no expressions, which hold none."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            inside = getattr(node, part, None)
            if isinstance(inside, list):
                left += inside


@cache
def classes() -> dict[str, list[Class]]:
    """Every class of the packages by its name; two classes of one name are both asked."""
    found: dict[str, list[Class]] = {}
    for path in (*PACKAGE.rglob("*.py"), *BESIDE.rglob("*.py")):
        for node in statements(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(read_class(node))
    return found


@cache
def protocols() -> list[Class]:
    return [found for same in classes().values() for found in same if found.is_protocol]


def ancestors(found: Class) -> Iterator[Class]:
    """The classes of the package that a class is made from, near and far."""
    for name in found.bases:
        for base in classes().get(name, []):
            if base is not found:
                yield base
                yield from ancestors(base)


def all_methods(found: Class) -> set[str]:
    return {name for each in (found, *ancestors(found)) for name in each.methods}


def explained_elsewhere(found: Class, name: str) -> bool:
    """Whether a method is one that a base class, or a protocol that the class fulfils, explains."""
    own = all_methods(found)
    fulfilled = [each for each in protocols() if each is not found and all_methods(each) <= own]
    for each in (*ancestors(found), *fulfilled):
        method = each.methods.get(name)
        if method is not None and ast.get_docstring(method):
            return True
    return False


def arguments(function: Function, *, is_method: bool) -> list[str]:
    """The names that a caller gives, in order; those with an underscore in front need no words."""
    given = function.args
    named = [*given.posonlyargs, *given.args]
    if is_method and "staticmethod" not in decorators(function):
        named = named[1:]
    names = [each.arg for each in (*named, *given.kwonlyargs)]
    names += [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    return [name for name in names if not name.startswith("_")]


def told_arguments(docstring: str) -> list[str] | None:
    """The names that a docstring's `Args:` explain; None where it has no such section."""
    inside = False
    found: list[str] | None = None
    for line in docstring.splitlines():
        section = SECTION.match(line)
        if section:
            inside = section[1] == "Args"
            if inside:
                found = []
        elif line.strip() and not line.startswith("    "):
            inside = False
        elif inside and found is not None:
            entry = ENTRY.match(line)
            if entry:
                found += [name.lstrip("*") for name in entry[1].split(", ")]
    return found


def public_functions(path: Path) -> Iterator[tuple[str, Function, Class | None]]:
    for node in parsed(path).body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            if "overload" not in decorators(node):
                yield node.name, node, None
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found = read_class(node)
            for name, method in found.methods.items():
                if not name.startswith("_") or name == "__call__":
                    yield f"{node.name}.{name}", method, found


def problem(function: Function, owner: Class | None) -> str:
    """What a docstring lacks; empty if nothing."""
    docstring = ast.get_docstring(function)
    if not docstring:
        return "has no docstring"
    told = told_arguments(docstring)
    taken = arguments(function, is_method=owner is not None)
    if told is None:
        if not taken or function.name in READ_BY_POLICIES:
            return ""
        if owner is not None and explained_elsewhere(owner, function.name):
            return ""
        return f"has no Args: for {', '.join(taken)}"
    return difference(told, taken, taken)


def class_problem(owner: Class) -> str:
    """What a class's docstring lacks: of its own `__init__` all arguments, of fields what it says.

    A class of fields may explain them without `Args:`, or beside them.
    """
    docstring = ast.get_docstring(owner.node)
    if not docstring:
        return "has no docstring"
    told = told_arguments(docstring)
    made = owner.methods.get("__init__")
    taken = arguments(made, is_method=True) if made is not None else fields_of(owner)
    if told is None:
        wordless = made is not None and taken
        return f"has no Args: for {', '.join(taken)}" if wordless else ""
    inherited = [] if made else [name for each in ancestors(owner) for name in fields_of(each)]
    return difference(told, taken, [*taken, *inherited])


def fields_of(owner: Class) -> list[str]:
    """The fields of a data class or named tuple."""
    fields = [node for node in owner.node.body if isinstance(node, ast.AnnAssign)]
    return [name_of(field.target) for field in fields if name_of(field.annotation) != "ClassVar"]


def difference(told: list[str], needed: list[str], known: list[str]) -> str:
    """What is not told of what is needed, or told of what is not known; empty if nothing."""
    missing = [name for name in needed if name not in told]
    if missing:
        return f"does not explain {', '.join(missing)}"
    stale = [name for name in told if name not in known]
    if stale:
        return f"explains {', '.join(stale)}, which it does not take"
    return "explains an argument twice" if len(set(told)) < len(told) else ""


def untold(paths: list[Path]) -> list[str]:
    """What is wrong in files, one line for each function."""
    found: list[str] = []
    for path in paths:
        wrong = {name: problem(function, owner) for name, function, owner in public_functions(path)}
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                wrong[node.name] = class_problem(read_class(node))
        place = path.relative_to(ROOT)
        found += [f"{place} {name} {why}" for name, why in wrong.items() if why]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_functions_explain_exactly_their_arguments(folder: str) -> None:
    assert untold(FOLDERS[folder]) == []


SOURCE = '''
class Base(Protocol):
    def told(self, x):
        """Words."""

class Made:
    """Words.

    Args:
        {named}: words.
    """
    def __init__(self, size): ...
    def told(self, x): ...

def function(first, *rest, _unused=0, **more):
    """Words.

    Args:
        first: words
            : that go on.
        {named}: words.

    Returns:
        other: no argument.
    """
'''


@pytest.mark.parametrize(
    ("named", "of_class", "of_function"),
    [
        ("rest, more", "does not explain size", ""),
        ("size", "", "does not explain rest, more"),
        ("size, rest, more, old", "explains rest, more, old", "explains size, old, which it does"),
        ("rest, more, rest, size", "explains rest, more, rest", "explains size"),
    ],
)
def test_a_missing_and_a_stale_name_are_found(named: str, of_class: str, of_function: str) -> None:
    base, made, function = ast.parse(SOURCE.format(named=named)).body
    assert isinstance(base, ast.ClassDef)
    assert isinstance(made, ast.ClassDef)
    assert isinstance(function, ast.FunctionDef)
    assert class_problem(read_class(made)).startswith(of_class)
    assert problem(function, None).startswith(of_function)
    assert bool(of_class) == bool(class_problem(read_class(made)))
    assert bool(of_function) == bool(problem(function, None))
    assert problem(read_class(made).methods["told"], read_class(made)) == "has no docstring"


# A first sentence says what a thing does or is, as one would say it to a colleague.
RIDDLE = re.compile(r"(What|Whether|How|Where|Of|Why|Which|That|When)\b")


def test_no_docstring_opens_with_a_riddle() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: list[str] = []
    for path in (*sorted(PACKAGE.rglob("*.py")), *sorted(BESIDE.rglob("*.py"))):
        for node in statements(parsed(path)):
            if isinstance(node, documented) and RIDDLE.match(ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)} {getattr(node, 'name', '')}")
    assert found == []
