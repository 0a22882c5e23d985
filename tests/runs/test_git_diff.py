"""What a run records of changed files of its own repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from oxrl.runs import environment


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A repository of one file, which was changed after its commit."""
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "a.py"], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=60)
    file.write_text("x = 2\n")
    return tmp_path


def test_what_differs_is_recorded_and_what_cannot_be_is_said(
    changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = environment.git_diff(changed)
    assert "-x = 1\n+x = 2\n" in said
    monkeypatch.setattr(environment, "MOST_DIFF", 20)
    assert environment.git_diff(changed) == (
        f"not recorded: {len(said)} characters, at most 20 are kept\n"
    )

    def late(*_: object, **__: object) -> str:
        raise subprocess.TimeoutExpired("git", 10)

    monkeypatch.setattr(subprocess, "check_output", late)
    assert environment.git_diff(changed) == "not recorded: git diff ended with TimeoutExpired\n"
