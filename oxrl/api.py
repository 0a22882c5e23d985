"""`oxrl.train` and `oxrl.load_run`: the same runs as those of the command line, from Python.

    import oxrl

    def short(prompt, completion):
        return -len(completion) / 100

    run = oxrl.train("config.yaml", reward=short, dataset=[{"prompt": "Say hello."}, ...])
    run.metrics["reward/mean"].plot()

There is one door: `oxrl.train` makes a configuration of what it is given, and from there on nothing
differs from `oxrl train`. What is no text gets a name in it, `python:NAME`; rows are written into
the run directory and read there.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from oxrl.checkpoint.targets import newest_checkpoint
from oxrl.commands.train import run as run_recipe
from oxrl.config import Config, load_source
from oxrl.config.field import fits_a_path
from oxrl.config.given import mapping_source
from oxrl.config.load import read_with_overrides
from oxrl.config.reads import read_values, sections_of, written_values
from oxrl.config.schema import FieldValues, GivenValues
from oxrl.config.source import Source
from oxrl.data.memory import lines_of
from oxrl.errors import ConfigError, RunDirectoryError
from oxrl.flat_config import recorded_config
from oxrl.report.notebook import Curves, live_curves
from oxrl.report.page import write_report
from oxrl.runs.checkpoints import is_run
from oxrl.runs.directory import GIVEN, owning
from oxrl.runs.files import CHAIN_FIELD, Json, clear, read_numbers, read_records, write_atomically
from oxrl.usercode.given import KEPT_HERE, PREFIX, giving, is_given, name_of, packed

if TYPE_CHECKING:
    from pandas import DataFrame

    from oxrl.commands.replay import Mismatch
    from oxrl.types import Metrics

# Argument of `train` -> the field that holds its name.
OBJECTS = {"reward": "reward.name", "environment": "environment.name", "gate": "train.loss"}
FEATURES = "train.features"  # which holds names and their numbers
ROWS = {"dataset": "data.train", "eval_dataset": "data.eval"}
# Field -> the file that rows given for it are kept in.
FILES = {"data.train": "train.jsonl", "data.eval": "eval.jsonl"}


def train(
    config: Mapping[str, Any] | str | Path | Config,
    *,
    reward: object = None,
    environment: object = None,
    gate: object = None,
    feature: object = None,
    dataset: object = None,
    eval_dataset: object = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    accept: Sequence[str] = (),
) -> Run:
    """Train, and wait until it is done; a notebook shows the curves meanwhile.

    Args:
        config: a YAML file, or its sections as a mapping; without what is given beside it.
        reward: a function as of `reward.name: path.py:function`. It runs in worker processes, as
            one from a file does; one that cannot be sent there is called in this process.
        environment: a class as of `environment.name: path.py:Class`, likewise.
        gate: a policy loss as of `train.loss: path.py:function`, called where the policy learns.
        feature: a class as of `train.features`, or several; likewise.
        dataset: rows as of `data.train`: a list of mappings, a data frame, or a file's name.
        eval_dataset: the same for `data.eval`.
        overrides: as on the command line: "train.lr=1e-5", "~data.eval".
        resume: go on from the newest checkpoint, if there is one.
        accept: of a run that is resumed, fields that may stand for something else than they did.

    Returns:
        The run, finished.

    Raises:
        ConfigError, DataError: what is wrong with the configuration or an input; nothing began.
        RunDirectoryError: there is a run already and no `resume`, or it is another one.
        Interrupted: Ctrl-C or a signal; everything is saved, `resume=True` goes on.
        OxrlError: the run failed; says what and where.
    """
    source = _read(config, overrides)
    objects: FieldValues = {}
    texts: dict[str, str] = {}  # of the rows that are given for a field
    _name_objects(source, objects, {"reward": reward, "environment": environment})
    for_workers = dict(objects)  # others are called where the policy learns
    _name_objects(source, objects, {"gate": gate})
    _name_features(source, objects, feature)
    directory = source.directory
    if "\0" in str(directory) or not fits_a_path(str(directory)):
        load_source(source)  # says so, with whatever else is wrong: no file system may be asked
    for argument, rows in (("dataset", dataset), ("eval_dataset", eval_dataset)):
        if rows is not None:
            _name_rows(source, texts, argument, rows, directory)
    if resume and dataset is None:
        _find_rows_of_start(source, directory)
    _say_what_stays_here(for_workers)
    again = "" if resume else "oxrl.train(..., resume=True)"
    first = os.environ.get("RANK", "0") == "0"  # of the ranks that a launcher started: the owner
    with owning(directory, again) if first else nullcontext() as lock:
        rows_there = _rows_in(directory, texts, lock, resume=resume, accept=accept)
        with rows_there, giving(objects), live_curves(directory):
            run_recipe(load_source(source), resume=resume, accept=accept)
    return Run(directory, objects)


def load_run(
    directory: str | Path,
    *,
    reward: object = None,
    environment: object = None,
    gate: object = None,
    feature: object = None,
) -> Run:
    """A run that was started before, finished or not.

    Args:
        directory: of the run; nothing in it is changed.
        reward, environment, gate, feature: as of `train`, where the run was given one: only
            `Run.evaluate` needs the first two, and only `Run.replay` all.

    Returns:
        The run; what it holds is read when it is asked for.

    Raises:
        RunDirectoryError: no run is there.
    """
    path = Path(directory)
    if not is_run(path):
        raise RunDirectoryError(f"{path} is no run directory: it has no config.yaml of a run")
    given = (reward, environment, gate, *_several(feature))
    return Run(path, {name_of(value): value for value in given if value is not None})


class Run:
    """A run directory. `path` is where it is; everything is read anew when it is asked for.

    Args:
        path: its directory.
        objects: what it was given that is no text, by the names in its configuration.
    """

    def __init__(self, path: Path, objects: GivenValues) -> None:
        self.path = path
        self._objects = dict(objects)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """A run that is the last thing in a notebook's cell shows what it came to."""
        return self.plot()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    @property
    def config(self) -> Json:
        """Every field that the run reads, by its dotted name."""
        return deepcopy(recorded_config(self.path))

    @property
    def metrics(self) -> DataFrame:
        """A row per optimizer step, "step" first; what the columns mean is in docs/metrics.md."""
        from pandas import DataFrame

        rows: list[Json] = []
        for record in read_numbers(self.path / "metrics.jsonl"):
            record.pop(CHAIN_FIELD, None)  # of the file, not of the training
            row = {"step": record.pop("step")}
            rows.append(row | {key: float(value) for key, value in record.items()})
        return DataFrame(rows, columns=None if rows else ["step"])

    @property
    def samples(self) -> DataFrame:
        """A row per sampled response; the columns are the fields of docs/run_directory.md."""
        from pandas import DataFrame

        return DataFrame(list(read_records(self.path / "samples.jsonl")))

    @property
    def checkpoint(self) -> Path:
        """The newest whole checkpoint, a folder that transformers loads too.

        Raises:
            CheckpointError: there is none.
        """
        return newest_checkpoint(self.path)

    def evaluate(
        self,
        dataset: object = None,
        *,
        samples: int | None = None,
        temperature: float | None = None,
        overrides: Sequence[str] = (),
    ) -> Metrics:
        """Evaluate the newest checkpoint, as `oxrl eval RUN` does.

        Args:
            dataset: rows instead of `data.eval`, as of `train`; None: those of the configuration.
            samples, temperature: instead of `rollout.eval_samples` and `rollout.eval_temperature`;
                None: these.
            overrides: of the run's configuration.

        Returns:
            `eval/...`: metrics by name, as in docs/metrics.md.

        Raises:
            ConfigError: the run cannot be evaluated, for one because it names no reward.
            CheckpointError: the run has no usable checkpoint.
            DataError: a row cannot be used; names it.
        """
        from oxrl.commands.evaluate import run_eval  # torch

        with tempfile.TemporaryDirectory() as folder, giving(self._objects):
            changes = list(overrides)
            if dataset is not None:
                file = Path(folder) / FILES["data.eval"]
                file.write_text(lines_of(dataset, "dataset"), encoding="utf-8")
                changes.append(f"data.eval={json.dumps(str(file))}")
            return run_eval(self.path, changes, samples=samples, temperature=temperature)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run as one HTML page; see `oxrl report`.

        Args:
            out: the file; None: report.html in the run directory.

        Returns:
            The file.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        return write_report([self.path], out)

    def plot(self, *metrics: str) -> Curves:
        """The curves of some metrics, for a notebook.

        Args:
            metrics: their names; none: what the run came to, its health and its main curves.
        """
        return Curves(self.path, metrics)

    def replay(
        self, step: int, sample: int | None = None, *, tolerance: float | None = None
    ) -> list[Mismatch]:
        """Go through one step again and compare it with the record, as `oxrl replay RUN` does.

        Args:
            step: optimizer step whose update is made again, as in metrics.jsonl and samples.jsonl.
            sample: place of a sample among those of its step.
            tolerance: relative, of numbers that are added up; None: the default.

        Returns:
            What was compared, each with `equal`.

        Raises:
            RunDirectoryError: no such step or sample, or an input of the run has changed.
        """
        from oxrl.commands.replay import replay  # torch

        with giving(self._objects):
            return replay(self.path, step, sample, tolerance=tolerance)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int = 256,
        seed: int = 0,
        images: Sequence[str] = (),
    ) -> list[Json]:
        """Sample from the newest checkpoint.

        Args:
            prompts: one or several questions.
            n: responses to each.
            temperature, top_p, top_k: of the sampling; 0, 1, 0 are greedy, off and off.
            max_tokens: longest response.
            seed: the same seed gives the same responses.
            images: files that every question shows, at its markers `<image>` or before its text.

        Returns:
            One mapping per response: prompt, sample, response, finish_reason, tokens.

        Raises:
            CheckpointError: the run has no usable checkpoint.
            ConfigError: the model reads no images, or they and a prompt do not fit its context.
            DataError: an image cannot be used.
        """
        from oxrl.commands.evaluate import GENERATION, run_generate  # torch

        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = replace(
            GENERATION, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens
        )
        return run_generate(
            str(self.path), asked, samples=n, sampling=sampling, seed=seed, images=images
        )


def _read(config: object, overrides: Sequence[str]) -> Source:
    """Read a configuration, whichever way it was given."""
    if isinstance(config, Config):
        # What is written and not read is refused, as it is in a file.
        config = sections_of(written_values(config) | read_values(config))
    if isinstance(config, str | Path):
        return read_with_overrides(config, overrides)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the configuration is {type(config).__name__}; give a YAML file's name, or a mapping"
        )
    return mapping_source("the configuration", config, overrides)


def _name_objects(source: Source, objects: FieldValues, given: GivenValues) -> None:
    """Have the configuration name what was given, by its argument."""
    for argument, value in given.items():
        if value is not None:
            _set(source, OBJECTS[argument], _named(objects, value), argument)


def _named(objects: FieldValues, value: object) -> str:
    """Add something given to `objects`, and return its name there; a string is a name already.

    Raises:
        ConfigError: something else that was given has the same name.
    """
    if isinstance(value, str):
        return value
    name = name_of(value)
    if name in objects:
        raise ConfigError(f"two things given are called {name.removeprefix(PREFIX)}: rename one")
    objects[name] = value
    return name


def _several(feature: object) -> list[object]:
    """One feature, or a list of them, as a list."""
    if feature is None:
        return []
    return list(feature) if isinstance(feature, list | tuple) else [feature]


def _name_features(source: Source, objects: FieldValues, feature: object) -> None:
    """Have the configuration name features beside those that it names, with its numbers if any."""
    for value in _several(feature):
        name = _named(objects, value)
        named = source.values.setdefault(FEATURES, {})
        if isinstance(named, dict):  # what is none, the checks say
            named.setdefault(name, {})


def _name_rows(
    source: Source, texts: dict[str, str], argument: str, rows: object, directory: Path
) -> None:
    """Have the configuration name the file that rows will be in, or the one that they are in."""
    path = ROWS[argument]
    if isinstance(rows, str | Path):
        _set(source, path, str(rows), argument)
        return
    texts[path] = lines_of(rows, argument)
    _set(source, path, str(directory / GIVEN / FILES[path]), argument)


def _set(source: Source, path: str, value: str, argument: str) -> None:
    """Write a field that must not say something else already.

    Raises:
        ConfigError: it does.
    """
    before = source.values.get(path)
    if before not in (None, "", value) and not is_given(str(before)):
        raise ConfigError(
            f"{path} = {before!r} in {source.file}, and {argument}= was given too: leave one out"
        )
    source.values[path] = value


def _find_rows_of_start(source: Source, directory: Path) -> None:
    """Name the rows that a run was started with, where it goes on and none are given again."""
    for argument, path in ROWS.items():
        written = directory / GIVEN / FILES[path]
        if written.is_file() and not source.values.get(path):
            _set(source, path, str(written), argument)


def _say_what_stays_here(objects: GivenValues) -> None:
    for name, value in objects.items():
        if packed(value) is None:
            warnings.warn(KEPT_HERE.format(name), UserWarning, stacklevel=3)


@contextmanager
def _rows_in(
    directory: Path,
    texts: Mapping[str, str],
    lock: IO[bytes] | None,
    *,
    resume: bool,
    accept: Sequence[str],
) -> Iterator[None]:
    """Keep rows in the run directory, and take them away again where no run came to be.

    Raises:
        RunDirectoryError: of a run that goes on, they are others than those of its start, and that
            was not accepted.
    """
    if not texts:
        yield
        return
    folder = directory / GIVEN
    for field, text in texts.items():
        path = folder / FILES[field]
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if resume and is_run(directory) and path.is_file() and field not in accept:
            raise RunDirectoryError(
                f"{field}: the rows given now are others than those of the start, in "
                f"{path}. Give the same ones, or none; or accept the change: "
                f'accept=["{field}"]'
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {error}") from error
    try:
        yield
    finally:
        if not (lock and lock.closed or is_run(directory)):
            clear(folder)
