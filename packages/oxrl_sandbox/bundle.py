"""The code that runs inside a sandbox, as one text for a bare Python that has no oxRL."""

from __future__ import annotations

import functools
from pathlib import Path

from oxrl.usercode import descendants

# Without site packages and the current folder, with UTF-8.
OPTIONS = ("-P", "-s", "-S", "-X", "utf8")
PACKAGE = "oxrl_sandbox.inside"
# Reads the modules from the first line of its input, and makes them importable by their names.
BOOT = """
import importlib.abc, importlib.machinery, json, os, sys
control = os.dup(0); results = os.dup(1)
length = int.from_bytes(os.read(control, 4), "big")
text = b""
while len(text) < length:
    text += os.read(control, length - len(text))
sources = json.loads(text)
class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        folder = any(known.startswith(name + ".") for known in sources)
        if folder or name in sources:
            return importlib.machinery.ModuleSpec(name, self, is_package=folder)
    def exec_module(self, module):
        if module.__name__ in sources:
            exec(compile(sources[module.__name__], module.__name__, "exec"), vars(module))
sys.meta_path.insert(0, Sources())
from oxrl_sandbox.inside import unit
sys.exit(unit.main(control, results))
"""


@functools.cache
def sources() -> dict[str, str]:
    """The modules of `inside`, and one that they share with others, by name: the message that BOOT
    reads first.
    """
    folder = Path(__file__).parent / "inside"
    modules = {
        f"{PACKAGE}.{path.stem}": path.read_text()
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__"
    }
    modules[descendants.__name__] = Path(descendants.__file__).read_text()
    return modules


def command(python: str) -> list[str]:
    """Write the command that starts a Python as a unit of the sandbox.

    Args:
        python: path of an interpreter; it needs nothing installed.

    Returns:
        A command line; the started process reads its own sources first.
    """
    return [python, *OPTIONS, "-c", BOOT]
