"""Errors a user can trigger, and the exit code each one ends the program with.

OxrlError                    1   anything oxRL raises on purpose
  ConfigError (ValueError)   2   the YAML or an override is wrong; lists every problem at once
  DataError (ValueError)     2   an input file is missing, malformed or empty; names file and line
  MissingExtraError          2   an optional dependency is needed; names the pip command
  RunDirectoryError          2   the run directory is in the wrong state for what was asked
  CheckpointError            1   no usable checkpoint, or one that does not fit this run
    CheckpointWriteError     1   the disk refused a checkpoint; older ones are intact
  EngineError                1   a trainer or sampler broke its contract
    WeightSyncError          1   the sampler does not hold the weights that were just trained
    LostRankError            1   a training rank died or stopped answering; start again from the checkpoint
  InvariantError             1   an always-on check failed (padding hole, wrong policy version, ...)
  NonFiniteError             1   too many optimizer steps in a row had NaN or infinite values
  RewardError                1   a reward function cannot be loaded or broke its signature
  DeadlineError (TimeoutError) 1 a wait ran out; says what it waited for
  Interrupted                75  a signal stopped the run after it saved; start again with --resume
"""

from __future__ import annotations


class OxrlError(Exception):
    """Base of every error oxRL raises on purpose. `exit_code` is what the CLI exits with."""

    exit_code = 1


class ConfigError(OxrlError, ValueError):
    """The configuration is wrong. The message lists every problem found, one block each."""

    exit_code = 2


class DataError(OxrlError, ValueError):
    """An input file is missing, malformed or empty."""

    exit_code = 2


class MissingExtraError(OxrlError, ImportError):
    """An optional dependency is not installed."""

    exit_code = 2


class RunDirectoryError(OxrlError, ValueError):
    """The run directory does not allow what was asked, such as starting where a run already is."""

    exit_code = 2


class CheckpointError(OxrlError, RuntimeError):
    """No usable checkpoint was found, or it does not fit this run."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; older ones are as they were, so a run may go on and try later."""


class EngineError(OxrlError, RuntimeError):
    """A training or rollout engine broke its contract."""


class WeightSyncError(EngineError):
    """The rollout engine does not hold the weights the trainer sent."""


class LostRankError(EngineError):
    """A training rank died or stopped answering, and with it the whole group of ranks."""


class InvariantError(OxrlError, AssertionError):
    """An always-on check of the training step failed."""


class NonFiniteError(OxrlError, ArithmeticError):
    """Too many optimizer steps in a row were refused because of NaN or infinite values."""


class RewardError(OxrlError, RuntimeError):
    """A reward function cannot be loaded, or does not keep the Reward contract."""


class DeadlineError(OxrlError, TimeoutError):
    """A wait ran out of time. The message says what was waited for and for how long."""


class Interrupted(OxrlError):
    """A signal asked the run to stop; it saved a checkpoint first."""

    exit_code = 75
