"""The layers of `oxrl` as a test: imports point down only, and the command line starts without
heavy libraries.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The core, and the packages beside it.
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root in (ROOT, ROOT / "packages")
    for folder in sorted(root.glob("oxrl*/__init__.py"))
    for path in sorted(folder.parent.rglob("*.py"))
    if root != ROOT or folder.parent.name == "oxrl"
}
PARTS = (
    "oxrl.data",
    "oxrl.rewards",
    "oxrl.environments",
    "oxrl.usercode",
    "oxrl.modelfiles",
    "oxrl.models",
    "oxrl.checkpoint",
    "oxrl.engines",
    "oxrl.rollouts",
    "oxrl.runs",
)
# From below: a folder imports only from those before it.
FOLDERS = (
    "redact",
    "errors",
    "seeds",
    "types",
    "flat_config",
    "tables",
    "entry_points",
    "functional",
    "modelfiles",
    "runs",
    "usercode",
    "data",
    "models",
    "checkpoint",
    "engines",
    "rewards",
    "environments",
    "rollouts",
    "config",
    "recipes",
    "assembly",
    "plan",
    "commands",
    "report",
    "cli",
    "api",
    "packages",
)
READS_CONFIG = ("config", "assembly", "plan", "commands", "cli", "api")
# How many imports still point up, from one folder to another. May only be lowered; the aim is none.
UPWARD: dict[tuple[str, str], int] = {}
# Imported for a type alone: a condition is asked of the whole configuration, whose lines name it.
OF_TYPES = {("oxrl.config.conditions", "oxrl.config.schema")}
# Programs and their tests are run there, in processes of a sandbox.
JUDGES = ("oxrl_sandbox.inside.judged", "oxrl_sandbox.inside.grader")
HEAVY = (
    "torch",
    "transformers",
    "mlflow",
    "ray",
    "deepspeed",
    "vllm",
    "numpy",
    "pandas",
    "pyarrow",
    "math_verify",
)
LIGHT = ("oxrl", "oxrl.api", "oxrl.cli", "oxrl.config", "oxrl.tables", "oxrl.errors", "oxrl.seeds")


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@cache
def nodes(module: str) -> list[ast.AST]:
    """The whole syntax tree of a module."""
    return [*ast.walk(ast.parse(MODULES[module].read_text()))]


@cache
def imports(module: str) -> list[str]:
    """Every module that `module` imports, at the top or inside a function."""
    return [*_imports(module)]


def _imports(module: str) -> Iterator[str]:
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{module} line {node.lineno}: relative imports hide the layer; write oxrl.…"
            )
            source = node.module or ""
            names = {alias.name for alias in node.names}
            submodules = {name for name in names if f"{source}.{name}" in MODULES}
            yield from (f"{source}.{name}" for name in submodules)
            if names - submodules:
                yield source


def violations(modules: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {imported}"
        for module in MODULES
        if inside(module, modules)
        for imported in imports(module)
        if inside(imported, forbidden)
    ]


def test_the_maths_and_the_types_import_nothing_but_torch_numbers_and_the_standard_library() -> (
    None
):
    allowed = (*sys.stdlib_module_names, "torch")
    found = [
        f"{module} imports {imported}"
        for module in MODULES
        if inside(module, ("oxrl.functional", "oxrl.types"))
        for imported in imports(module)
        if not inside(imported, (*allowed, "oxrl.functional", "oxrl.types", "oxrl.tables.numbers"))
    ]
    assert not found
    assert not violations(("oxrl.types",), ("oxrl.functional",))


def test_parts_never_import_a_recipe_the_command_line_or_the_config() -> None:
    assert not violations((*PARTS, "oxrl.functional"), ("oxrl.recipes", "oxrl.cli", "oxrl.config"))


def test_only_those_who_assemble_a_run_read_its_configuration() -> None:
    """All others are given objects and numbers."""
    readers = tuple(f"oxrl.{name}" for name in READS_CONFIG)
    found = [
        f"{module} imports {imported}"
        for module in MODULES
        if not inside(module, readers)
        for imported in imports(module)
        if inside(imported, ("oxrl.config",))
    ]
    assert found == []


def folder(module: str) -> str:
    """The part of the core that a module belongs to; all that is beside it is one."""
    if module.startswith("oxrl_"):
        return "packages"
    return module.split(".")[1] if "." in module else "api"


def test_folders_import_from_those_below_them() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for module in MODULES:
        for imported in imports(module):
            known = imported in MODULES and imported != "oxrl" and module != "oxrl.__main__"
            ends = folder(module), folder(imported)
            if known and FOLDERS.index(ends[0]) < FOLDERS.index(ends[1]):
                found[ends] += 1
    assert found == UPWARD


def test_packages_build_on_what_is_open_to_everybody() -> None:
    """The page tells a stranger, and holds for our own."""
    page = (ROOT / "docs" / "extend.md").read_text()
    open_to_all = set(re.findall(r"`(oxrl\.[\w.]+)`", page.partition("# What a package may")[2]))
    assert open_to_all <= MODULES.keys()
    used: dict[str, str] = {}
    for module in MODULES:
        if folder(module) == "packages":
            used |= {name: module for name in imports(module) if inside(name, ("oxrl",))}
    assert {name: used[name] for name in used.keys() - open_to_all} == {}
    # Losses and features are of users alone.
    assert len(open_to_all - used.keys()) <= 2


def test_the_core_names_none_of_its_packages() -> None:
    beside = {module.partition(".")[0] for module in MODULES if folder(module) == "packages"}
    assert len(beside) > 5
    word = re.compile(rf"({'|'.join(beside)})\.\w")
    core = [module for module in MODULES if folder(module) != "packages"]
    assert [module for module in core if word.search(MODULES[module].read_text())] == []


def test_the_foundations_import_no_layer_above_them() -> None:
    above = (*PARTS, "oxrl.functional", "oxrl.types", "oxrl.recipes", "oxrl.cli", "oxrl.config")
    assert not violations(("oxrl.tables", "oxrl.errors", "oxrl.seeds"), above)


def test_modules_do_not_import_each_other_in_circles() -> None:
    below = {
        module: {
            name for name in imports(module) if name in MODULES and (module, name) not in OF_TYPES
        }
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in below[module] - {module}:
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.fixture(scope="module")
def heavy_after() -> dict[str, list[str]]:
    """A fresh interpreter imports one light module after the other: the heavy ones that it has
    after each.
    """
    program = (
        "import json, sys\nfrom importlib import import_module\nfound = {}\n"
        f"for name in {[*LIGHT, 'oxrl.rewards']!r}:\n"
        "    import_module(name)\n"
        f"    found[name] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "print(json.dumps(found))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_no_heavy_library(
    module: str, heavy_after: dict[str, list[str]]
) -> None:
    assert heavy_after[module] == []


def test_a_reward_worker_starts_without_torch(heavy_after: dict[str, list[str]]) -> None:
    assert not {"torch", "transformers"} & set(heavy_after["oxrl.rewards"])


def test_the_help_page_loads_no_heavy_library() -> None:
    program = (
        "import sys\nfrom oxrl.cli import main\nsys.argv = ['oxrl', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_no_module_is_named_after_having_no_idea_of_its_own() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common", "tools"}
    assert not [module for module in MODULES if vague & set(module.split("."))]


def dotted(node: ast.expr) -> str:
    """A name with what it is an attribute of, as it is written; empty if it is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_loads_code_or_pickles_from_files_it_is_given() -> None:
    """Checkpoints are safetensors and JSON; `trust_remote_code` is a user's explicit choice, never
    ours.
    """
    found: list[str] = []
    for module in MODULES:
        if inside(module, JUDGES):
            continue
        for node in nodes(module):
            if not isinstance(node, ast.Call):
                continue
            called = dotted(node.func)
            literals = {
                word.arg: word.value.value
                for word in node.keywords
                if isinstance(word.value, ast.Constant)
            }
            unsafe = (
                called
                in ("pickle.load", "pickle.loads", "pickle.Unpickler", "eval", "exec", "os.system")
                or (called == "torch.load" and literals.get("weights_only") is not True)
                or literals.get("trust_remote_code") is True
                or literals.get("shell") is True
            )
            if unsafe:
                found.append(f"{module} line {node.lineno}: {ast.unparse(node)}")
    assert not found


def test_only_recipes_and_the_command_line_read_secrets_from_the_environment() -> None:
    secret = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")
    found: list[str] = []
    for module, path in MODULES.items():
        if inside(module, ("oxrl.recipes", "oxrl.commands", "oxrl.assembly", "oxrl.cli")):
            continue
        source = path.read_text()
        if "environ" not in source and "getenv" not in source:
            continue
        for node in nodes(module):
            if isinstance(node, ast.Call | ast.Subscript):
                text = ast.unparse(node)
                if ("environ" in text or "getenv" in text) and any(word in text for word in secret):
                    found.append(f"{module} line {node.lineno}: {text}")
    assert not found
