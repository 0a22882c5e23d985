"""Learning from given answers: `python main_sl.py --config FILE [section.field=value ...]`."""

from __future__ import annotations

from oxrl.cli.scripts import script

if __name__ == "__main__":
    script("sl")
