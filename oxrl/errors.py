"""Errors that a user can trigger, their exit codes, and the hints in their messages.

OxrlError 1: ConfigError 2, DataError 2, MissingExtraError 2, RunDirectoryError 2,
    CheckpointError 1 (CheckpointWriteError, NoCheckpointError 2), EngineError 1 (WeightSyncError,
    LostActorError, LostRankError), InvariantError 1, NonFiniteError 1, NothingTrainedError 1,
    RewardError 1 (RewardDefinitionError 2), EnvironmentDefinitionError 2, DeadlineError 1,
    MachineError 1, Interrupted 75 (Stopped)
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from oxrl.redact import masked

T = TypeVar("T")


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest option, or nothing when none is close."""
    close = get_close_matches(name, list(options), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def counted(number: int, unit: str, plural: str = "s") -> str:
    """Write a number of things: "1 row", "2,000 rows".

    Args:
        number: of them.
        unit: one of them.
        plural: what follows its name where they are several.
    """
    return f"{number:,} {unit}{'' if number == 1 else plural}"


def shortened(text: str) -> str:
    """Cut a text that is longer than a line."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def known(value: str, options: Iterable[str]) -> str:
    """Return `value` if it is one of `options`.

    Raises:
        ValueError: it is none; lists them and names the closest.
    """
    options = sorted(options)
    if value in options:
        return value
    listed = ", ".join(options)
    if len(options) > 30:
        listed = f"{len(options)} names, see `oxrl algorithms`"
    raise ValueError(f"must be one of {listed}{did_you_mean(value, options)}")


def is_named_pipe(path: Path) -> bool:
    """True if reading a file may wait for ever; not of the pipes that a shell makes, in /dev."""
    return path.is_fifo() and str(path.parent) not in ("/dev", "/dev/fd")


def why_no_file(path: Path | str) -> str:
    """Explain why `path` is no file, with the closest name in its folder."""
    path = Path(path)
    if path.is_dir():
        return "is a folder; give a file"
    if path.is_symlink():
        return "is a symbolic link that leads to no file"
    if path.exists():
        return "is a pipe or a device; give a file"
    if not path.parent.is_dir():
        return (
            f"no such file: the folder {path.parent} does not exist (relative paths start at "
            f"{Path.cwd()})"
        )
    neighbours = (item.name for item in path.parent.iterdir())
    return f"no such file{did_you_mean(path.name, neighbours)}"


class OxrlError(Exception):
    """Base of every error oxRL raises on purpose. `exit_code` is what the CLI exits with.

    What looks like a secret in its message becomes ***.
    """

    exit_code = 1

    def __init__(self, *message: object) -> None:
        super().__init__(*(masked(part) if isinstance(part, str) else part for part in message))


class ConfigError(OxrlError, ValueError):
    """The configuration is wrong. The message lists every problem found, one block each."""

    exit_code = 2


class DataError(OxrlError, ValueError):
    """An input file is missing, malformed or empty."""

    exit_code = 2


class UnreachableError(DataError):
    """An input lies on the hub, is not in its cache, and the hub does not answer."""


class MissingExtraError(OxrlError, ImportError):
    """An optional dependency is not installed."""

    exit_code = 2


class RunDirectoryError(OxrlError, ValueError):
    """The run directory does not allow what was asked, such as starting where a run already is."""

    exit_code = 2


class CheckpointError(OxrlError, RuntimeError):
    """No usable checkpoint was found, or it does not fit this run."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written.

    Older ones are as they were, so a run may go on and try later.
    """


class NoCheckpointError(CheckpointError):
    """There is no checkpoint to read or to go on from, or not one that is whole."""

    exit_code = 2


class MachineError(OxrlError):
    """The machine has no more of something that a run needs: space on its disk, memory, files."""


class EngineError(OxrlError, RuntimeError):
    """A training or rollout engine broke its contract."""


class WeightSyncError(EngineError):
    """The rollout engine does not hold the weights the trainer sent."""


class LostActorError(EngineError):
    """A process died, or did not answer in time. The message says which and what it was asked."""


class LostRankError(EngineError):
    """A training rank died or stopped answering, and with it the whole group of ranks."""


class InvariantError(OxrlError, AssertionError):
    """An always-on check of the training step failed."""


class NonFiniteError(OxrlError, ArithmeticError):
    """NaN or infinite values: in too many optimizer steps in a row, or in weights to be saved."""


class NothingTrainedError(OxrlError):
    """Too many optimizer steps in a row had nothing to learn from; the run saved a checkpoint."""


class RewardError(OxrlError, RuntimeError):
    """A reward function cannot be loaded, or does not keep the Reward contract."""


class RewardDefinitionError(RewardError, ValueError):
    """A reward that can never work as it is written, found before anything was trained."""

    exit_code = 2


class EnvironmentDefinitionError(OxrlError, ValueError):
    """An environment that can never work as it is written.

    It was found before anything was sampled, or because it does not repeat what it answered.
    """

    exit_code = 2


class DeadlineError(OxrlError, TimeoutError):
    """A wait ran out of time. The message says what was waited for and for how long."""


class Interrupted(OxrlError):
    """A signal asked the run to stop; it saved a checkpoint first."""

    exit_code = 75


class Stopped(Interrupted):
    """A signal cut a piece of work short: what it had found is dropped, nothing is saved yet."""

    def __init__(self) -> None:
        super().__init__("stopped by a signal; --resume continues from the last checkpoint")


def required(value: T | None, what: str = "what was asked for") -> T:
    """`value`, which must be there by our own rules.

    Raises:
        InvariantError: it is None; names `what` is missing.
    """
    if value is None:
        raise InvariantError(f"{what} is missing where it cannot be: report this as a bug")
    return value
