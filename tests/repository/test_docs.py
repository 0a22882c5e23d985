"""The documentation keeps its promises: links lead somewhere, YAML loads, commands exist, the
README stays short.
"""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("experiments/**/*.md"),
        ROOT / "one_page" / "README.md",
    ]
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def heading_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in heading_anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_complete_config_in_the_documentation_loads(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(
        r"^```yaml\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
    ):
        if all(f"\n{section}:" in f"\n{block}" for section in ("run", "model", "data", "train")):
            for file in re.findall(r"(?:train|eval): ([^\s,}]+\.jsonl)", block):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).touch()
            for file, function in re.findall(r"name: (\S+\.py):(\w+)", block):
                Path(file).write_text(f"def {function}(prompt, completion): ...")
            Path("config.yaml").write_text(block)
            load_config("config.yaml", [])


def fragments() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)


@cache
def texts_of_oxrl() -> list[str]:
    """Every text that stands in the package."""
    return [
        node.value
        for folder in ("oxrl", "packages")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("fragment", fragments())
def test_every_message_under_troubleshooting_is_one_that_oxrl_writes(fragment: str) -> None:
    assert any(fragment in text for text in texts_of_oxrl())


def test_every_oxrl_command_in_the_documentation_exists() -> None:
    commands = {
        command
        for page in PAGES
        for command in re.findall(r"(?:^|[`\s/])oxrl ([a-z]+)\b", page.read_text(), re.MULTILINE)
    }
    for command in sorted(commands):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0, f"the documentation names `oxrl {command}`: {result.output}"


def test_the_config_reference_is_the_schema() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "make_config_reference.py"))
    assert (ROOT / "docs" / "config.md").read_text() == generator["reference"](), "run `make docs`"


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_make_knows_every_target_the_documentation_names() -> None:
    targets = set(
        re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    )
    shown = r"(?:^ {4}|^|`)make ([a-z][a-z-]*)"
    named = {name for page in PAGES for name in re.findall(shown, page.read_text(), re.MULTILINE)}
    assert named <= targets
