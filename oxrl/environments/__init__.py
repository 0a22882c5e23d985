"""Environments that answer a policy in episodes of several turns, and the base of users' own."""

from oxrl.usercode.environments import Environment, Message, Step, ToolUnavailable, tool

__all__ = ["Environment", "Message", "Step", "ToolUnavailable", "tool"]
