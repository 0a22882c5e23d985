"""Environments that answer a policy in episodes of several turns, and the base of users' own."""

from oxrl.usercode.environments import Environment, Step, ToolUnavailable, tool

__all__ = ["Environment", "Step", "ToolUnavailable", "tool"]
