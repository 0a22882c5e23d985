"""Reinforcement learning: `python main_rl.py --config config.yaml [section.field=value ...]
[--resume]`.
"""

from __future__ import annotations

from oxrl.cli import door

if __name__ == "__main__":
    door("rl")
