"""The words about a step beside its numbers: a sample, and where its time went."""

from __future__ import annotations

from oxrl.redact import shown
from oxrl.runs.files import Record
from oxrl.types import Metrics

LINE_END = "⏎"
PHASES = {
    "sampling": ("time/rollout_s",),
    "reward": ("time/reward_s",),
    "update": ("time/logprobs_s", "time/update_s"),
}


def sample_text(line: Record) -> str:
    """Put a sample on one line: what was asked, what came, what it earned."""
    reward = line.get("reward")
    earned = f"{reward:.3g}" if isinstance(reward, float | int) else str(line.get("status", ""))
    return f"[{earned}] {_one_line(line.get('prompt'))} → {_one_line(line.get('response'))}"


def _one_line(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return shown(text).replace("\n", LINE_END).replace("\t", " ")


def phase_shares(metrics: Metrics) -> list[str]:
    """List the shares of a step's time, for phases that took a tenth of it or more."""
    total = metrics.get("time/step_s", 0.0)
    found: list[str] = []
    for name, keys in PHASES.items():
        spent = sum(metrics.get(key, 0.0) for key in keys)
        if total and spent >= 0.1 * total:
            found.append(f"{name} {spent / total:.0%}")
    return found


def efficiency(metrics: Metrics) -> list[str]:
    """Say how much of the machine a step used, and how much of that was wasted, if known."""
    found: list[str] = []
    for name, key in (("MFU", "throughput/mfu"), ("wasted", "waste/total")):
        if key in metrics:
            found.append(f"{name} {metrics[key]:.0%}")
    return found
