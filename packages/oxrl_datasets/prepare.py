"""Datasets in oxRL's JSONL, generated or converted: what `oxrl prepare` writes."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pydantic import ConfigDict, ValidationError, create_model

from oxrl.data.rows import Fields, Json, JsonObject, Record, Rows, file_hash, read_rows
from oxrl.errors import DataError, MissingExtraError
from oxrl.modelfiles.hub import locate
from oxrl.runs.bars import followed
from oxrl.runs.files import write_atomically
from oxrl.seeds import stable_seed
from oxrl_datasets.generated import Arithmetic, Files, Made, ReasoningGym
from oxrl_datasets.published import (
    CONVERTERS,
    FOLDER,
    Converted,
    checked,
)
from oxrl_datasets.split import split_rows
from oxrl_datasets.visual import VisualQuestions

if TYPE_CHECKING:
    from oxrl_robots.demonstrations import Made as MadeActions

Report = JsonObject
# A file or folder, here or on the hub; None for what is generated.
Source = Path | str | None


class Hub(NamedTuple):
    """A dataset on the hub, and the files of it that are wanted."""

    name: str
    subset: str
    splits: tuple[str, ...]


HUB = {"gsm8k": Hub("openai/gsm8k", "main", ("train", "test"))}


class Generator(Protocol):
    """Makes rows from a seed; its fields are the options that a user may set."""

    def make(self, seed: int, limit: int | None) -> Made:
        """Make the rows; the same seed makes the same.

        Args:
            seed: of every random choice.
            limit: at most so many rows in each file; None: as many as the options say.

        Returns:
            Rows by the name of their file without `.jsonl`; and what the report says of them.

        Raises:
            DataError: an option that cannot work.
        """
        ...


GENERATORS: dict[str, Callable[..., Generator]] = {
    "arithmetic": Arithmetic,
    "reasoning-gym": ReasoningGym,
    "visual-questions": VisualQuestions,
}


def prepare(
    name: str,
    source: Source,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    test: float | None = None,
    **options: Json,
) -> Report:
    """Write the data files of one dataset, and report.json, into a folder.

    Args:
        name: of the dataset, a key of GENERATORS or CONVERTERS.
        source: a raw file, here or on the hub (hf://datasets/OWNER/NAME/FILE), or a folder of them;
            None for what is generated, or has a place on the hub of its own.
        out: the folder.
        seed: of every random choice.
        limit: at most so many rows in each file.
        test: put so many rows, or below 1 such a share of them, aside in test.jsonl.
        options: the dataset's own, which may be text.

    Returns:
        The report.

    Raises:
        DataError: a source where none is read or none where one is, an unknown option or one that
            cannot work, or a file of which no row can be used.
        MissingExtraError: a library that is not installed makes the rows, or fetches them.
    """
    origin: Report = {}
    if name in GENERATORS:
        if test is not None:
            raise DataError(f"--test splits rows of a raw file; {name} has options of its own")
        if source is not None:
            raise DataError(f"{name} is generated: it reads no source, got {str(source)!r}")
        chosen = _options(name, GENERATORS[name], options)
        files, facts = GENERATORS[name](**chosen).make(seed, limit)
    else:
        chosen = _options(name, CONVERTERS[name], options)
        paths, raw = _raw_files(name, source)
        rejects: Rows = []
        converter = partial(CONVERTERS[name], **chosen)
        files: Files = {}
        for stem, records in raw.items():
            rows = _converted(name, stem, records, converter, rejects)
            if not rows:
                found = f"{len(rejects)} rejected: {rejects[:1]}"
                raise DataError(f"{paths.get(stem, stem)}: no row can be used; {found}")
            files[stem] = rows
        files, origin = _kept(files, test, seed, limit)
        origin |= {"source": str(source or HUB[name].name), **_hashes(paths)}
        facts = {"rejected": len(rejects), "rejects": rejects}
    # An option of the user's may have the name of a fact: it is told under "options" as well.
    told = {"options": chosen, **chosen, **facts}
    report = {"dataset": name, **origin, "seed": seed, "limit": limit, **told}
    return _write(out, files, report)


def prepare_judged(
    source: Source,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    test: float | None = None,
    **options: Json,
) -> Report:
    """Write preference pairs: which response a judge prefers. See `prepare` and `Judged`.

    Args:
        source: a file of samples, or the directory of a run, whose samples.jsonl is meant.
        out: the folder, which keeps the verdicts too.
        seed: of the split and of which rows a limit keeps.
        limit: at most so many pairs in each file.
        test: put so many pairs, or below 1 such a share of them, aside in test.jsonl.
        options: fields of `Judged`, which may be text.

    Returns:
        The report.

    Raises:
        DataError: see `prepare`; or no response is preferred to another.
        RewardDefinitionError: the judge cannot be asked.
        Interrupted: a signal asked to stop; verdicts are kept in the folder.
    """
    from oxrl_datasets.judged import Judged  # other datasets ask nobody
    from oxrl_graders.judge.options import refuse_secrets

    try:
        refuse_secrets(options)
    except ValueError as error:
        raise DataError(str(error)) from None
    chosen = _options("judged", Judged, options)
    if source is not None and (Path(source) / SAMPLES).is_file():
        source = Path(source) / SAMPLES
    paths, raw = _raw_files("judged", source)
    out.mkdir(parents=True, exist_ok=True)
    judged = Judged(**chosen)
    pool = judged.pool(out)
    files: Files = {}
    facts: Report = {}
    for stem, records in raw.items():
        files[stem], facts[stem] = judged.make(pool, stem, records)
    files, split = _kept(files, test, seed, limit)
    origin: Report = {"source": str(source), "seed": seed, "limit": limit, **_hashes(paths)}
    told = {"dataset": "judged", **origin, "options": chosen, **facts, **split}
    return _write(out, files, told)


def prepare_demonstrations(
    source: Source,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    test: float | None = None,
    **options: Json,
) -> Report:
    """Write what an environment's own expert does. See `prepare` and `Demonstrations`.

    Args:
        source: None; episodes are played.
        out: the folder.
        seed: of where episodes begin.
        limit: at most so many episodes, and rows of eval.
        test: None; rows of eval are made apart.
        options: fields of `Demonstrations`, which may be text.

    Returns:
        The report.

    Raises:
        DataError: see `prepare`; or the environment has no expert, or none that succeeds.
    """
    from oxrl_robots.demonstrations import Demonstrations  # other datasets play nothing

    if source is not None or test is not None:
        given = "--test" if source is None else "--source"
        raise DataError(f"demonstrations are played, with rows of eval apart: leave out {given}")
    chosen = _options("demonstrations", Demonstrations, options)
    made = Demonstrations(**chosen).make(seed, limit)
    if chosen["lerobot"]:
        from oxrl_robots.lerobot import write_episodes
        from oxrl_robots.robot_episodes import as_robot_episode

        episodes = [as_robot_episode(done) for done in made.played]
        write_episodes(out / "lerobot", episodes, robot=str(chosen["environment"]))
    report = {"dataset": "demonstrations", "seed": seed, "limit": limit, "options": chosen}
    return _write_actions(out, made, report)


def prepare_lerobot(
    source: Source,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    test: float | None = None,
    **options: Json,
) -> Report:
    """Write rows to imitate from a LeRobot dataset. See `prepare` and `LeRobotRows`.

    Args:
        source: the folder of the dataset, which holds meta/info.json.
        out: the folder.
        seed: recorded in the report; nothing is drawn.
        limit: at most so many episodes.
        test: None.
        options: fields of `LeRobotRows`, which may be text.

    Returns:
        The report.

    Raises:
        DataError: see `prepare`; or it is no dataset of a version that is read.
    """
    from oxrl_robots.robot_episodes import LeRobotRows  # other datasets have no frames

    if source is None or test is not None:
        rule = "pass --source with the dataset's folder" if source is None else "leave out --test"
        raise DataError(f"lerobot reads episodes of robots: {rule}")
    chosen = _options("lerobot", LeRobotRows, options)
    made = LeRobotRows(**chosen).make(Path(source), limit)
    told = {"source": str(source), "seed": seed, "limit": limit, "options": chosen}
    return _write_actions(out, made, {"dataset": "lerobot", **told})


def prepare_gguf(
    source: Source,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    test: float | None = None,
    **options: Json,
) -> Report:
    """Write the Hugging Face folder of a model out of its GGUF file. See `GgufModel`.

    Args:
        source: the file.
        out: the folder, which is new.
        seed: 0; nothing is drawn.
        limit: None; a model has no rows.
        test: None, likewise.
        options: fields of `GgufModel`, which may be text.

    Returns:
        The report.

    Raises:
        DataError: see `prepare`; or the file is damaged, or says what would get lost.
        MissingExtraError: the package gguf is not installed.
    """
    from oxrl_datasets.gguf import GgufModel  # datasets need no model

    if source is None or seed or limit is not None or test is not None:
        rule = "pass --source FILE.gguf, and no --seed, --limit or --test"
        raise DataError(f"gguf makes a model of one file: {rule}")
    chosen = _options("gguf", GgufModel, options)
    facts = GgufModel(**chosen).write(Path(source), out)
    origin = {"source": str(source), "source_sha256": file_hash(Path(source))}
    return _write(out, {}, {"model": "gguf", **origin, **facts})


def _write_actions(out: Path, made: MadeActions, report: Report) -> Report:
    """Write rows of actions, their statistics where they are numbers, FAST's pieces where they are
    asked for, and the report.
    """
    out.mkdir(parents=True, exist_ok=True)
    if made.statistics is not None:
        write_atomically(out / "statistics.json", json.dumps(made.statistics, indent=2) + "\n")
    if made.code is not None:
        made.code.write(out / "fast.json")
    return _write(out, made.files, {**report, **made.facts})


SAMPLES = "samples.jsonl"
PREPARERS: dict[str, Callable[..., Report]] = {
    **{name: partial(prepare, name) for name in (*GENERATORS, *CONVERTERS)},
    "judged": prepare_judged,
    "demonstrations": prepare_demonstrations,
    "lerobot": prepare_lerobot,
    "gguf": prepare_gguf,
}


def _converted(
    name: str,
    stem: str,
    records: Iterable[Record],
    converter: Callable[[Fields], Converted],
    rejects: Rows,
) -> Rows:
    """The rows made of raw records, with uid and source; adds what was rejected, and why."""
    rows: Rows = []
    for number, record in enumerate(followed(records, f"rows of {stem}")):
        try:
            fields = {**record.fields, FOLDER: record.folder}
            made = [checked(row) for row in converter(fields)]
        except (LookupError, ValueError, TypeError, AttributeError, OSError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            rejects.append({"place": record.place, "reason": reason})
            continue
        for part, row in enumerate(made):
            uid = f"{name}/{stem}/{number:06d}" + (f"/{part}" if len(made) > 1 else "")
            rows.append({"uid": uid, "source": name, **row})
    return rows


def _kept(files: Files, test: float | None, seed: int, limit: int | None) -> tuple[Files, Report]:
    """The rows that are written: those of one file in two where `test` is given, and at most
    `limit` of each, chosen by `seed`, in their original order. And what the report says of it.
    """
    facts: Report = {}
    if test is not None:
        if len(files) > 1:
            raise DataError(f"--test splits one file, and there are {', '.join(files)}")
        (rows,) = files.values()
        files, facts["split"] = split_rows(rows, test, seed)
    for stem, rows in files.items():
        if limit is not None and limit < len(rows):
            chance = random.Random(stable_seed("prepare", seed))
            kept = chance.sample(range(len(rows)), limit)
            files[stem] = [rows[index] for index in sorted(kept)]
    return files, facts


def _hashes(paths: Mapping[str, Path]) -> Report:
    return {"source_sha256": {path.name: file_hash(path) for path in paths.values()}}


def _raw_files(
    name: str, source: Source
) -> tuple[Mapping[str, Path], Mapping[str, Iterable[Record]]]:
    """Paths, where they are local, and records of the raw files, by the stem of what is written."""
    hub = HUB.get(name)
    if source is not None:
        paths = _local_files(locate(str(source)), hub.splits if hub else ())
        return paths, {stem: read_rows(path) for stem, path in paths.items()}
    if hub is None:
        how = "pass --source with a .jsonl or .parquet file, or a folder"
        raise DataError(f"{name} is prepared from raw files: {how}")
    return {}, {split: _hub_rows(hub, split) for split in hub.splits}


def _options(name: str, function: Callable[..., object], given: Fields) -> JsonObject:
    """All options of a dataset, the keyword arguments of `function`: those given, and defaults.

    Raises:
        DataError: an unknown option, or text that is no such type; lists what there is.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    own = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    fields: Json = {option.name: (option.annotation, option.default) for option in own}
    model = create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        return model(**given).model_dump()
    except ValidationError as error:
        found = error.errors()
        wrong = [f"option {e['loc'][0]}={e['input']!r}: {e['msg']}" for e in found]
        listed = ", ".join(f"{option.name}={option.default!r}" for option in own) or "none"
        defaults = f"the options of {name} and their defaults: {listed}"
        raise DataError("; ".join([*wrong, defaults])) from error


def _local_files(source: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """The data files that `source` is or holds, by the stem of what is written.

    Args:
        wanted: the only stems to look for, if there are any.

    Raises:
        DataError: a folder without any, or with two of one name.
    """
    if not source.is_dir():
        stem = source.stem if not wanted or source.stem in wanted else wanted[0]
        return {stem: source}
    found: dict[str, Path] = {}
    for path in sorted(source.iterdir()):
        if path.suffix not in (".jsonl", ".parquet") or (wanted and path.stem not in wanted):
            continue
        other = found.setdefault(path.stem, path)
        if other != path:
            raise DataError(f"{source} holds {path.name} beside {other.name}; pass one of them")
    if not found:
        raise DataError(f"{source} holds no {' or '.join(wanted) or 'file'}, .jsonl or .parquet")
    return {stem: found[stem] for stem in wanted or found if stem in found}


def _hub_rows(hub: Hub, split: str) -> Iterable[Record]:
    instead = "or pass --source with the raw files"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        needs = f"fetching {hub.name} by name needs the datasets library: pip install datasets"
        raise MissingExtraError(f"{needs}; {instead}") from error
    try:
        data = datasets.load_dataset(hub.name, hub.subset, split=split)
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"cannot fetch {hub.name} ({why}); {instead}") from error
    place = f"{hub.name} {split} row"
    return (Record(f"{place} {number}", dict(row)) for number, row in enumerate(data, start=1))


def _write(out: Path, files: Mapping[str, Sequence[Fields]], facts: Report) -> Report:
    """Write the rows of each file, and a report of the facts and of how many rows there are."""
    out.mkdir(parents=True, exist_ok=True)
    for stem, rows in files.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_atomically(out / f"{stem}.jsonl", "".join(lines))
    report = {**facts, "written": {f"{stem}.jsonl": len(rows) for stem, rows in files.items()}}
    write_atomically(out / "report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report
