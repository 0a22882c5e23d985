"""How folded the code is, with limits; `pytest -s tests/repository/test_house.py` prints the figures.

A node is a node of Python's syntax tree. Lines can be saved by folding meaning together, nodes
cannot: size is counted in nodes, and folding in nodes per statement and per code line (one that is
neither blank, comment nor docstring). A name that stands for a type of a collection, such as
`Fields = Mapping[str, Json]`, counts at each use as what it stands for: to give a type a name is
for the reader, and saves nothing.
"""

from __future__ import annotations

import ast
import math
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "oxrl"
# What is found by entry points: graders, sandbox, environments and others.
BESIDE = ROOT / "packages"
# What proves it, and what a newcomer reads first.
OUTSIDE = ("oxrl_proofs", "one_page")

# What is there at a release, and 3 %, rounded up to 50. They are set anew at the next one, or by a
# change that states what it costs.
MOST_NODES = {
    "the core": 379_200,
    "packages": 100_000,
    ".": 8_050,
    "assembly": 19_500,
    "checkpoint": 10_500,
    "cli": 5_900,
    "commands": 15_450,
    "config": 33_050,
    "data": 32_650,
    "engines": 67_650,
    "environments": 5_900,
    "functional": 30_850,
    "modelfiles": 6_400,
    "models": 23_050,
    "plan": 11_100,
    "recipes": 25_700,
    "report": 3_950,
    "rewards": 14_900,
    "rollouts": 23_650,
    "runs": 22_550,
    "tables": 9_200,
    "usercode": 12_300,
    "oxrl_datasets": 11_500,
    "oxrl_envs": 8_850,
    "oxrl_features": 3_550,
    "oxrl_graders": 21_350,
    "oxrl_robots": 8_000,
    "oxrl_sandbox": 19_350,
    "oxrl_schedules": 1_800,
    "oxrl_teachers": 12_000,
    "oxrl_stats": 12_100,
    "oxrl_trackers": 2_750,
    "oxrl_proofs": 30_600,
    "one_page": 11_750,
}
# Files that a run imports: a default one, and one with the reward for maths, an evaluation and
# checkpoints.
MOST_READ = {"default": 144, "usual": 168}
MOST_NODES_PER_STATEMENT = 11.0
# Of one folder. Maths has long expressions, and a table is one long statement by nature.
MOST_IN_FOLDER = {"functional": 12.5, "tables": float("inf")}
MOST_IN_OTHER_FOLDERS = 12.0
MOST_NODES_PER_LINE = 9.0
# Per 1,000 code lines.
MOST_DENSE = 2.0
MOST_TUPLES = 5.0
MOST_ANY = 10.0
DENSE_NODES = 35  # of a statement on one line
MOST_LINES = 60
MOST_BRANCHES = 8
MOST_ARGUMENTS = 7
# Whole files of what runs one iteration of reinforcement learning, imports and set-up included; the
# aim is 5,500 and 70.
DRIVER = ("rl", "objective", "step", "session")
# The progress of a run, once in a file that was not counted, is among them.
DRIVER_NODES = 8_550
DRIVER_BRANCHES = 75
# The same, of functions that one iteration runs: without imports, set-up and what is not called.
DRIVER_FILES = (*(f"recipes/{name}.py" for name in DRIVER), "recipes/features/", "rollouts/")
ITERATION_NODES = 5_550
ITERATION_BRANCHES = 52
# A reader's way from the request of a prompt to its gradient, every file counted; the aim is 125. A
# sampler that is waited for longer than a moment adds six.
MOST_FILE_CHANGES = 132
# Imports of the core's own modules inside functions, each with its reason behind it.
MOST_INNER_IMPORTS = 129

COLLECTIONS = {
    "Callable",
    "Collection",
    "Iterable",
    "Iterator",
    "Mapping",
    "Sequence",
    "dict",
    "frozenset",
    "list",
    "set",
    "tuple",
    "type",
}
ONE_LINERS = (ast.Assign, ast.Return, ast.Expr, ast.AugAssign, ast.AnnAssign)
BRANCHES = (ast.If, ast.IfExp, ast.While, ast.ExceptHandler)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Figures:
    """Counts of one file, or of several."""

    nodes: int = 0
    hidden: int = 0
    statements: int = 0
    lines: int = 0
    branches: int = 0
    dense: int = 0
    tuples: int = 0
    any: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def per_thousand_lines(self, count: int) -> float:
        return 1000 * count / self.lines


def astuple(figures: Figures) -> tuple[int, ...]:
    return tuple(vars(figures).values())


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def size(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


def is_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def code_lines(text: str, nodes: list[ast.AST]) -> int:
    documented: set[int] = set()
    for node in nodes:
        if is_docstring(node):
            documented.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        count += bool(stripped) and not stripped.startswith("#") and number not in documented
    return count


PLACES = {
    path.relative_to(root): path
    for root in (PACKAGE, BESIDE)
    for path in sorted(root.rglob("*.py"))
}
FOLDERS = sorted({path.parts[0] if len(path.parts) > 1 else "." for path in PLACES})


# Read when a test asks: every process of tests imports this file, and few run its tests.
@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(PLACES[path].read_text(encoding="utf-8")))]


@cache
def aliases_of(path: Path) -> dict[str, int]:
    """Name -> nodes, of what stands for a type of a collection in a file: `Json = dict[str, Any]`."""
    found: dict[str, int] = {}
    for node in nodes_of(path):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id=of))
            ):
                if of in COLLECTIONS:
                    found[name] = size(node.value)
            case _:
                pass
    return found


@cache
def known_aliases(path: Path) -> dict[str, int]:
    """Those that a file has itself, or imports from the file that has them."""
    found = dict(aliases_of(path))
    for node in nodes_of(path):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        # Files of the core are known without `oxrl/`, those of packages with their package.
        origin = Path(f"{node.module.removeprefix('oxrl.').replace('.', '/')}.py")
        theirs = aliases_of(origin) if origin in PLACES else {}
        used = [name for name in node.names if name.name in theirs]
        found |= {name.asname or name.name: theirs[name.name] for name in used}
    return found


def hidden_nodes(path: Path) -> int:
    """Nodes that aliases save where they are used."""
    sizes = known_aliases(path)
    uses = [node for node in nodes_of(path) if isinstance(node, ast.Name) and node.id in sizes]
    return sum(sizes[use.id] - 1 for use in uses if isinstance(use.ctx, ast.Load))


@cache
def figures(path: Path) -> Figures:
    nodes = nodes_of(path)
    text = PLACES[path].read_text(encoding="utf-8")
    found = Figures(nodes=len(nodes), hidden=hidden_nodes(path), lines=code_lines(text, nodes))
    for node in nodes:
        if isinstance(node, ast.Name):
            found.any += node.id == "Any"
            continue
        found.statements += isinstance(node, ast.stmt)
        found.branches += isinstance(node, BRANCHES)
        if isinstance(node, ONE_LINERS) and node.lineno == node.end_lineno:
            found.dense += size(node) > DENSE_NODES
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found.tuples += isinstance(node.targets[0], ast.Tuple)
    return found


def folder(name: str) -> Figures:
    inside = Figures()
    for path in PLACES:
        if name == (path.parts[0] if len(path.parts) > 1 else "."):
            inside += figures(path)
    return inside


def nodes_per_statement(found: Figures) -> float:
    return found.nodes / found.statements


def sizes() -> dict[str, int]:
    """Nodes of every part, and what they are together."""
    found: dict[str, int] = {}
    for path in PLACES:
        part = path.parts[0] if len(path.parts) > 1 else "."
        whole = "packages" if part.startswith("oxrl_") else "the core"
        nodes = figures(path).nodes + figures(path).hidden
        for name in (part, whole):
            found[name] = found.get(name, 0) + nodes
    for name in OUTSIDE:
        trees = [
            ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / name).rglob("*.py")
        ]
        found[name] = sum(map(size, trees))
    return found


def test_no_part_has_more_nodes_than_it_may() -> None:
    found = sizes()
    for name, nodes in found.items():
        bound = math.ceil(1.03 * nodes / 50) * 50
        say(f"{name:14} {nodes:7} nodes, at most {MOST_NODES.get(name)}; 3 % more: {bound}")
    assert found.keys() == MOST_NODES.keys()
    assert [name for name, nodes in found.items() if nodes > MOST_NODES[name]] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_folds_its_statements(name: str) -> None:
    found = nodes_per_statement(folder(name))
    assert found <= MOST_IN_FOLDER.get(name, MOST_IN_OTHER_FOLDERS)


def test_the_package_reads_one_thought_per_line() -> None:
    total = sum((folder(name) for name in FOLDERS if name != "tables"), Figures())
    found = {
        "nodes per statement": (nodes_per_statement(total), MOST_NODES_PER_STATEMENT),
        "nodes per code line": (total.nodes / total.lines, MOST_NODES_PER_LINE),
        "dense lines per 1,000": (total.per_thousand_lines(total.dense), MOST_DENSE),
        "tuple assignments per 1,000": (total.per_thousand_lines(total.tuples), MOST_TUPLES),
        "Any per 1,000": (total.per_thousand_lines(total.any), MOST_ANY),
    }
    for what, (value, most) in found.items():
        say(f"{what} {value:.1f}, at most {most:g}")
    assert [what for what, (value, most) in found.items() if value > most] == []


def inner_imports() -> Iterator[tuple[Path, int]]:
    """Lines inside functions on which the core imports modules of its own."""
    for path in PLACES:
        if PLACES[path].is_relative_to(BESIDE):
            continue
        found: set[int] = set()
        for function in nodes_of(path):
            if isinstance(function, FUNCTIONS):
                inside = [node for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
                own = [node for node in inside if (node.module or "").startswith("oxrl")]
                found.update(node.lineno for node in own)
        yield from ((path, line) for line in sorted(found))


def test_few_imports_stand_inside_functions_and_each_says_why() -> None:
    found = list(inner_imports())
    say(f"{len(found)} imports of own modules inside functions, at most {MOST_INNER_IMPORTS}")
    texts = {path: PLACES[path].read_text(encoding="utf-8").splitlines() for path, _ in found}
    assert [f"{path}:{line}" for path, line in found if "#" not in texts[path][line - 1]] == []
    assert len(found) <= MOST_INNER_IMPORTS


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in PLACES:
        for node in nodes_of(path):
            if isinstance(node, FUNCTIONS):
                yield path, node


def argument_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    packed = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
    return len([argument for argument in named if argument.arg not in ("self", "cls")] + packed)


def test_no_function_is_long_or_has_many_branches_or_arguments() -> None:
    found: list[str] = []
    for path, function in functions():
        lines = (function.end_lineno or 0) - function.lineno + 1
        branches = sum(isinstance(node, BRANCHES) for node in ast.walk(function))
        arguments = argument_count(function)
        where = f"{path}:{function.lineno} {function.name}"
        if lines > MOST_LINES:
            found.append(f"{where} has {lines} lines, at most {MOST_LINES}")
        if branches > MOST_BRANCHES:
            found.append(f"{where} has {branches} branches, at most {MOST_BRANCHES}")
        # Signatures of maths list tensors and numbers, commands their options.
        of_command = path.parts[0] == "cli" or path.name == "commands.py"
        exempt = of_command or path.parts[0] in ("functional", "api.py")
        if arguments > MOST_ARGUMENTS and not exempt:
            found.append(f"{where} has {arguments} arguments, at most {MOST_ARGUMENTS}")
    assert found == []


def test_maths_and_tables_name_their_functions() -> None:
    """Go-to-definition works from a table's cell to the formula: nothing there is a lambda."""
    found: list[str] = []
    for path in PLACES:
        if path.parts[0] in ("functional", "tables"):
            lambdas = [node for node in nodes_of(path) if isinstance(node, ast.Lambda)]
            found += [f"{path}:{node.lineno}" for node in lambdas]
    assert found == []


# The same with what most runs have.
USUAL = {
    "name: exact": "name: math",
    "prompts_per_step: 2": "prompts_per_step: 2, eval: {folder}/prompts.jsonl",
    "mlflow: false": "mlflow: false, checkpoint_every: 1",
}
# Of features that this run does not use.
UNUSED = (
    "peft",
    "ray",
    "oxrl.data.contexts",
    "oxrl.data.episode",
    "oxrl.data.image",
    "oxrl.data.turns",
    "oxrl.tables.preference",
    "oxrl.engines.sample.host",
    "oxrl.engines.sample.workers",
    "oxrl.environments",
    "oxrl.assembly.episode_wiring",
    "oxrl.recipes.features.episode",
    "oxrl.rollouts.episode",
)


@cache
def page_of_the_path() -> dict[str, Any]:
    """The script that writes docs/reading_path.md: it makes a run and follows its calls."""
    return runpy.run_path(str(ROOT / "docs/make_reading_path.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    maker = page_of_the_path()
    usual = maker["CONFIG"]
    for before, after in USUAL.items():
        assert before in usual
        usual = usual.replace(before, after)
    found = maker["recorded_runs"](tmp_path_factory.mktemp("runs"), maker["CONFIG"], usual)
    return dict(zip(("default", "usual"), found, strict=True))


@pytest.fixture
def default_run(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return runs["default"]


def test_a_default_run_imports_a_small_driver_and_no_feature_that_it_does_not_use(
    default_run: dict[str, Any],
) -> None:
    imported = default_run["imported"]
    assert [name for name in imported if name.startswith(UNUSED)] == []
    folders = ("oxrl.rollouts", "oxrl.recipes.features")
    used = [Path(file) for name, file in imported.items() if name.startswith(folders)]
    inside = {path.relative_to(PACKAGE) for path in used}
    driver = sorted({*inside, *(Path("recipes") / f"{name}.py" for name in DRIVER)})
    total = sum(map(figures, driver), Figures())
    for path in driver:
        found = figures(path)
        say(f"{path!s:32} {found.nodes:5} nodes, {found.branches:3} branches")
    say(f"{'the driver':32} {total.nodes:5} nodes, {total.branches:3} branches")
    assert total.nodes <= DRIVER_NODES
    assert total.branches <= DRIVER_BRANCHES


def files_read(run: dict[str, Any]) -> list[Figures]:
    """Figures of the files that a run imported."""
    known = {place: path for path, place in PLACES.items()}
    inside = [Path(file) for file in run["imported"].values() if file]
    return [figures(known[place]) for place in inside if place in known]


@pytest.mark.parametrize("kind", MOST_READ)
def test_a_run_reads_few_files(kind: str, runs: dict[str, dict[str, Any]]) -> None:
    read = files_read(runs[kind])
    total = sum((found.nodes for found in read), 0)
    say(f"a {kind} run imports {len(read)} files of {total} nodes")
    assert len(read) <= MOST_READ[kind]


def test_one_iteration_runs_few_functions_of_the_driver(default_run: dict[str, Any]) -> None:
    """The same files, of which only functions count that one iteration runs."""
    calls = default_run["calls"]
    names = [name for _, _, name, _ in calls]
    # What the end of the run saves and closes is not of the iteration.
    end = names.index("Session.boundary") + 1
    ran = {(file, line) for _, file, _, line in calls[:end]}
    nodes = 0
    branches = 0
    for path, function in functions():
        decorated = [decorator.lineno for decorator in function.decorator_list]
        first = min([function.lineno, *decorated])
        called = (str(path), first) in ran or function.name == "train"
        if called and path.as_posix().startswith(DRIVER_FILES):
            nodes += size(function)
            branches += sum(isinstance(node, BRANCHES) for node in ast.walk(function))
    say(f"functions of one iteration: {nodes} nodes, {branches} branches")
    assert nodes <= ITERATION_NODES
    assert branches <= ITERATION_BRANCHES


def test_a_reader_changes_files_seldom_from_prompt_to_gradient(
    default_run: dict[str, Any],
) -> None:
    """Entering a file and returning from it; a function is read once, and no file is left out."""
    maker = page_of_the_path()
    opened = maker["reading_path"](default_run["calls"])
    page = maker["page"](opened)
    say(page)
    assert 2 * len(opened) <= MOST_FILE_CHANGES
    # What a wait calls depends on how long it lasts: the files are compared, not every call.
    written = (ROOT / "docs/reading_path.md").read_text(encoding="utf-8")
    found, told = (
        re.findall(r"^ *([\w/]+\.py)  ", text, flags=re.MULTILINE) for text in (page, written)
    )
    assert set(found) == set(told), "make docs writes it anew"


def test_the_page_of_the_code_says_how_large_the_core_is(default_run: dict[str, Any]) -> None:
    text = (ROOT / "docs/code.md").read_text(encoding="utf-8")
    line = text[text.index("The core, `oxrl/`,") :].partition("\n\n")[0]
    core, read = (int(number.replace(",", "")) for number in re.findall(r"\d+,000", line))
    shares = [int(number) for number in re.findall(r"(\d+)\s%", line)]
    sizes = {name: folder(name).nodes for name in FOLDERS if not name.startswith("oxrl_")}
    total = sum(sizes.values())
    told = ("engines", "data", "config", "functional")
    assert core == round(total, -3)
    assert shares == [round(100 * sizes[name] / total) for name in told]
    assert read == round(sum(found.nodes for found in files_read(default_run)), -3)
