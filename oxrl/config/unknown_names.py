"""Names that are none of ours: what may have been meant."""

from __future__ import annotations

from oxrl.config.other_names import meant_by
from oxrl.config.schema import FIELDS, SECTIONS
from oxrl.errors import did_you_mean


def unknown_section(name: str) -> str:
    section, _, _ = name.partition(".")
    hint = meant_by(name) or homes(name) or did_you_mean(section, SECTIONS)
    return f"unknown section{hint} (sections, their fields below them: {', '.join(SECTIONS)})"


def homes(name: str) -> str:
    """Return `; did you mean section.name?` for the sections that have a field of this name."""
    found = [path for path in FIELDS if path.endswith(f".{name}")]
    return f"; did you mean {' or '.join(found)}?" if found else ""
