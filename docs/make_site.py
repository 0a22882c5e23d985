"""Build the documentation as a website that opens without a network: `make docs-site`.

    python docs/make_site.py [FOLDER]        default: build/site

Pages lead to files all over the repository, so the pages and all that they link to are laid out as
they are there, and the folder of that is what mkdocs reads; `make_api.py` adds the pages of the API
reference. A link or an anchor that leads nowhere ends the build; so does an address of another host
that the site would fetch from.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
API = "docs/api"
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAV = {
    "Start": [
        "README.md",
        "one_page/README.md",
        "docs/tutorial.md",
        "docs/howto.md",
        "docs/python.md",
        "docs/coming_from.md",
        "docs/peers.md",
    ],
    "Guides": [
        "docs/data.md",
        "docs/rewards.md",
        "docs/preference.md",
        "docs/distillation.md",
        "docs/environments.md",
        "docs/vision.md",
        "docs/action.md",
        "docs/adapters.md",
        "docs/devices.md",
        "docs/exact.md",
        "docs/sampling_ahead.md",
        "docs/cut_sampling.md",
        "docs/report.md",
        "docs/evaluation.md",
        "docs/extend.md",
        "experiments/cluster/README.md",
    ],
    "Algorithms": ["docs/algorithms.md", "docs/comparison.md"],
    "Results": ["docs/benchmarks.md"],
    "Reference": [
        "docs/config.md",
        "docs/run_directory.md",
        "docs/metrics.md",
        "docs/health.md",
        "docs/architectures.md",
        "CHANGELOG.md",
    ],
    "Design": ["docs/code.md", "docs/reading_path.md", "CONTRIBUTING.md"],
    "Help": ["docs/troubleshooting.md", "FAQ.md"],
}


def pages() -> list[Path]:
    """Every page of the repository."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")]
    return sorted([*found, ROOT / "one_page" / "README.md", *ROOT.glob(".github/**/*.md")])


def lay_out(folder: Path) -> None:
    """Copy the pages, and files of the repository that they link to, to where they are there."""
    wanted = set(pages())
    for page in pages():
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            file = (page.parent / urlsplit(target).path).resolve()
            if not urlsplit(target).scheme and file.is_file():
                wanted.add(file)
    for file in wanted:
        # mkdocs leaves out what begins with a dot.
        place = folder / file.relative_to(ROOT).as_posix().removeprefix(".")
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            place.write_text(shown(file), encoding="utf-8")
        else:
            shutil.copyfile(file, place)


def shown(page: Path) -> str:
    """A page for the site, where no name begins with a dot."""
    return page.read_text(encoding="utf-8").replace("](.github/", "](github/")


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as where the repository is hosted."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def build_site(source: Path, site: Path) -> None:
    """Build the site; a warning of mkdocs is an error."""
    from mkdocs.commands.build import build  # pyright: ignore[reportMissingImports]
    from mkdocs.config import load_config  # pyright: ignore[reportMissingImports]

    config = source.parent / "mkdocs.yml"
    config.write_text("site_name: oxRL\n")
    strict = {"not_found": "warn", "anchors": "warn", "absolute_links": "warn"}
    nav = [{title: list(files)} for title, files in NAV.items()]
    told = {file for files in NAV.values() for file in files}
    experiments = sorted(path.relative_to(source) for path in source.glob("experiments/**/*.md"))
    nav.append({"Experiments": [str(path) for path in experiments if str(path) not in told]})
    api = sorted(path.relative_to(source) for path in (source / API).glob("*.md"))
    nav.append({"API": [str(path) for path in api]})
    loaded = load_config(
        config_file=str(config),
        docs_dir=str(source),
        site_dir=str(site),
        strict=True,
        use_directory_urls=False,
        nav=nav,
        not_in_nav="/github/**",
        validation={"links": strict, "nav": {"omitted_files": "warn", "not_found": "warn"}},
        theme={"name": "material", "font": False, "features": ["navigation.indexes"]},
        markdown_extensions=[
            "tables",
            "pymdownx.superfences",
            "pymdownx.highlight",
            {"toc": {"slugify": slug, "permalink": True}},
        ],
        plugins=["search"],
    )
    build(loaded)


class Links(HTMLParser):
    """What a page leads to, what it fetches, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.fetches: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        target = found.get("href") or found.get("src") or ""
        if tag == "a":
            self.leads.append(target)
        elif tag in ("script", "link", "img") and found.get("rel") != "canonical":
            self.fetches.append(target)


def broken(site: Path) -> Iterator[str]:
    """Links that lead nowhere, and files that would come from elsewhere."""
    parsed: dict[Path, Links] = {}
    for page in sorted(site.rglob("*.html")):
        parsed[page] = Links()
        parsed[page].feed(page.read_text(encoding="utf-8"))
    for page, links in parsed.items():
        if page.name == "404.html":  # its addresses are those of a server
            continue
        for target in (*links.leads, *links.fetches):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in links.fetches and parts.scheme != "data":
                    yield f"{page.relative_to(site)} fetches {target}"
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            file = file / "index.html" if file.is_dir() else file
            anchors = parsed[file].anchors if file in parsed else set[str]()
            inside = not parts.fragment or file not in parsed or unquote(parts.fragment) in anchors
            if not file.is_file() or not inside:
                yield f"{page.relative_to(site)} leads to {target}"


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pages"
        lay_out(source)
        runpy.run_path(str(ROOT / "docs" / "make_api.py"))["write_pages"](source / API)
        build_site(source, site)
    found = list(broken(site))
    count = len(list(site.rglob("*.html")))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.write(f"{count} pages in {site}, {len(found)} broken links\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
