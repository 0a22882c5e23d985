"""Learning from given answers: `python main_sl.py --config config.yaml [section.field=value ...]
[--resume]`.
"""

from __future__ import annotations

from oxrl.cli import door

if __name__ == "__main__":
    door("sl")
