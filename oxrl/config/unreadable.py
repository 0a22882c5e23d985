"""Why a file holds no configuration, in words."""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml.error import MarkedYAMLError

from oxrl.errors import why_no_file


def why_no_text(path: Path, error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read as text."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8; save the file as UTF-8"
    return f"cannot be read: {error.strerror}" if path.is_file() else why_no_file(path)


def why_no_yaml(text: str, error: Exception) -> str:
    """Why a text is no YAML: goes on after the name of its file and a colon."""
    if isinstance(error, RecursionError):
        return " not a configuration: nested far too deep"
    if not isinstance(error, MarkedYAMLError):
        return f" not YAML: {str(error).splitlines()[0]}"
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark is not None else 0
    why = error.problem or error.context
    if "\t" in "".join(text.splitlines()[line : line + 1]):
        why = f"{why}; YAML is indented with spaces, this line has a tab"
    return f"{line + 1}: not YAML: {why}"
