"""Reinforcement learning: `python main_rl.py --config FILE [section.field=value ...]`."""

from __future__ import annotations

from oxrl.cli.scripts import script

if __name__ == "__main__":
    script("rl")
