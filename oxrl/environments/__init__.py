"""What answers a policy in an episode of several turns; what users write one from."""

from oxrl.usercode.environments import Environment, Step, ToolUnavailable, tool

__all__ = ["Environment", "Step", "ToolUnavailable", "tool"]
