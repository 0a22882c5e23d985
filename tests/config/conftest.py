"""Fixtures of configurations in files."""

from __future__ import annotations

from support.config_files import folder, hub, write

__all__ = ["folder", "hub", "write"]
