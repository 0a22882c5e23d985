"""Log messages of a run are kept in its directory, and the ones that matter reach the terminal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from oxrl.runs.logs import run_logging


def test_everything_is_kept_and_only_warnings_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("oxrl.somewhere")
    for text in ("first start", "second start"):
        with run_logging(tmp_path / "run.log"):
            logger.info("%s: detail \ud800", text)
            logger.warning("%s: attention", text)
    logger.warning("after the run")
    kept = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert kept.count("detail") == 2 and kept.count("attention") == 2 and "after" not in kept
    shown = capsys.readouterr().err
    assert "detail" not in shown and shown.count("WARNING: ") == 2
    assert logging.getLogger("oxrl").handlers == []
