"""The pages of the API reference, from signatures and docstrings; `make docs-site` puts them on the
site, nothing is kept in the repository.

    python docs/make_api.py FOLDER
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

# Module -> title and names; None: all that it, or a file of its folder, defines without an
# underscore in front.
MODULES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "oxrl": ("A run from Python", ("train", "load_run", "Run")),
    "oxrl.functional": ("Losses, advantages and other maths", None),
    "oxrl.types": ("Objects that flow through a run", None),
    "oxrl.rewards": ("What a reward is", None),
    "oxrl.environments": (
        "What an environment is",
        ("Environment", "Step", "ToolUnavailable", "tool"),
    ),
    "oxrl.engines.train": ("What a training engine promises", None),
    "oxrl.engines.sample": ("What a sampler promises", None),
    "oxrl.recipes.features.base": ("What a feature of a row can do", None),
    "oxrl.config": ("Configurations", None),
    "oxrl.errors": ("Errors and exit codes", None),
}
SECTION = re.compile(r"(Args|Shapes|Returns|Raises|Yields|Source|Example|Examples):(?: (.*))?")
SPECIAL = re.compile(r"([\\*<\[\]])")


def names_of(module: Any, names: tuple[str, ...] | None) -> list[str]:
    """What a page tells of a module."""
    if names is not None:
        return list(names)
    found: list[str] = []
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name)
        # A folder's names are those of its files.
        place = f"{getattr(value, '__module__', '')}."
        own = place.startswith(f"{module.__name__}.")
        if own and not name.startswith("_") and (inspect.isclass(value) or callable(value)):
            found.append(name)
    return found


def escaped(text: str) -> str:
    """Words that Markdown takes as words; what stands in backticks stays."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        parts[place] = SPECIAL.sub(r"\\\1", parts[place])
    return "`".join(parts)


def told(docstring: str) -> Iterator[str]:
    """A docstring in Markdown: paragraphs, and a list under each of its sections."""
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        section = SECTION.fullmatch(line)
        indented = line.startswith("    ")
        if section:
            inside = section[1] not in ("Example", "Examples")
            yield f"\n**{section[1]}** {escaped(section[2] or '')}\n"
        elif inside and indented:
            deeper = line.startswith("     ")
            yield f"    {escaped(line.strip())}" if deeper else f"- {escaped(line.strip())}"
        elif indented:  # an example, or an equation: shown as it stands
            yield line
        else:
            inside = False
            yield escaped(line)


def unquoted(parameter: str) -> str:
    """A parameter without the quotes of an annotation that was not evaluated."""
    return re.sub(r": '(.*?)'( = |$)", r": \1\2", parameter)


def signature_of(name: str, value: Any) -> str:
    """How something is called; nothing where that says nothing."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown = [unquoted(str(parameter)) for parameter in signature.parameters.values()]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {result}"
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) > 90:
        line = f"{name}(\n    " + ",\n    ".join(shown) + f",\n){arrow}"
    return line


def entry(name: str, value: Any, level: int) -> Iterator[str]:
    """One function or class, and the methods that a class has of its own."""
    yield f"{'#' * level} `{name}`\n"
    if not inspect.isclass(value) or "__init__" in vars(value):
        line = signature_of(name.rpartition(".")[2], value)
        if line:
            yield f"```text\n{line}\n```\n"
    docstring = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    if docstring and not docstring.startswith(f"{name}("):  # a data class makes one of its fields
        yield from told(docstring)
    yield ""
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if isinstance(function, property):
                function = function.fget
            public = not method.startswith("_")
            if public and inspect.isfunction(function) and function.__doc__:
                yield from entry(f"{name}.{method}", function, level + 1)


def page(module: str) -> str:
    """The page of a module."""
    title, names = MODULES[module]
    found = import_module(module)
    lines = [f"# {title}: `{module}`\n"]
    if module != "oxrl" and found.__doc__:
        lines += told(found.__doc__)
        lines.append("")
    for name in names_of(found, names):
        lines += entry(name, getattr(found, name), 2)
    return "\n".join(lines) + "\n"


def write_pages(folder: Path) -> list[Path]:
    """Write every page; says which."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for module in MODULES:
        path = folder / f"{module}.md"
        path.write_text(page(module), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")
