"""Datasets in oxRL's JSONL, generated or converted: what `oxrl prepare` writes."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ConfigDict, ValidationError, create_model

from oxrl.data.rows import Fields, Json, JsonObject, Record, Rows, read_rows
from oxrl.errors import DataError, MissingExtraError
from oxrl.modelfiles.hub import file_hash, locate
from oxrl.runs.bars import followed
from oxrl.runs.files import pretty_json, write_atomically
from oxrl.seeds import stable_seed
from oxrl_datasets.generated import Arithmetic, Files, ReasoningGym
from oxrl_datasets.published import CONVERTERS, FOLDER, checked
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


# Each makes rows from a seed; its fields are the options that a user may set.
GENERATORS: dict[str, type[Arithmetic | ReasoningGym | VisualQuestions]] = {
    "arithmetic": Arithmetic,
    "reasoning-gym": ReasoningGym,
    "visual-questions": VisualQuestions,
}


class Asked(NamedTuple):
    """A dataset, or a model, that a user asks for.

    name: of the dataset. source: a raw file, here or on the hub (hf://datasets/OWNER/NAME/FILE), or
    a folder of them; None for what is generated, or has a place on the hub of its own. out: the
    folder. seed: of every random choice. limit: at most so many rows in each file. test: put so
    many rows, or below 1 such a share of them, aside in test.jsonl. options: the dataset's own,
    which may be text.
    """

    name: str
    source: Source
    out: Path
    seed: int
    limit: int | None
    test: float | None
    options: Fields

    @property
    def drawn(self) -> Report:
        """The two numbers that rows are chosen by, for the report."""
        return {"seed": self.seed, "limit": self.limit}

    def chosen(self, function: Callable[..., object]) -> JsonObject:
        """All options of the dataset: those given, and defaults.

        Args:
            function: whose keyword arguments they are.

        Raises:
            DataError: an unknown option, or text that is no such type; lists what there is.
        """
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        own = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        fields: Json = {option.name: (option.annotation, option.default) for option in own}
        model = create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)
        try:
            return model(**self.options).model_dump()
        except ValidationError as error:
            found = error.errors()
            wrong = [f"option {e['loc'][0]}={e['input']!r}: {e['msg']}" for e in found]
            listed = ", ".join(f"{option.name}={option.default!r}" for option in own) or "none"
            defaults = f"the options of {self.name} and their defaults: {listed}"
            raise DataError("; ".join([*wrong, defaults])) from error


def prepare(
    name: str,
    source: Source,
    out: Path,
    /,
    *,
    seed: int = 0,
    limit: int | None = None,
    test: float | None = None,
    **options: Json,
) -> Report:
    """Write the data files of one dataset, or a model, and report.json, into a folder.

    Args:
        name: a key of PREPARERS.
        source, out, seed, limit, test: see `Asked`.
        options: the dataset's own, which may be text.

    Returns:
        The report.

    Raises:
        DataError: a source where none is read or none where one is, an unknown option or one that
            cannot work, or a file of which no row can be used.
        MissingExtraError: a library that is not installed makes the rows, or fetches them.
    """
    return WRITERS[name](Asked(name, source, out, seed, limit, test, options))


def _write_generated(asked: Asked) -> Report:
    """Write rows that a generator makes."""
    name = asked.name
    if asked.test is not None:
        raise DataError(f"--test splits rows of a raw file; {name} has options of its own")
    if asked.source is not None:
        raise DataError(f"{name} is generated: it reads no source, got {str(asked.source)!r}")
    chosen = asked.chosen(GENERATORS[name])
    files, facts = GENERATORS[name](**chosen).make(asked.seed, asked.limit)
    # An option of the user's may have the name of a fact: it is told under "options" as well.
    return _write_rows(asked, files, {}, chosen, {**chosen, **facts})


def _write_converted(asked: Asked) -> Report:
    """Write the rows of raw files in oxRL's format."""
    name = asked.name
    chosen = asked.chosen(CONVERTERS[name])
    paths, raw = _raw_files(name, asked.source)
    rejects: Rows = []
    converter = partial(CONVERTERS[name], **chosen)
    files: Files = {}
    for stem, records in raw.items():
        files[stem] = _converted(name, stem, records, converter, rejects)
        if not files[stem]:
            found = f"{len(rejects)} rejected: {rejects[:1]}"
            raise DataError(f"{paths.get(stem, stem)}: no row can be used; {found}")
    files, origin = _kept(files, asked)
    origin |= {"source": str(asked.source or HUB[name].name), **_hashes(paths)}
    facts: Report = {**chosen, "rejected": len(rejects), "rejects": rejects}
    return _write_rows(asked, files, origin, chosen, facts)


def _write_rows(
    asked: Asked, files: Files, origin: Report, chosen: JsonObject, facts: Report
) -> Report:
    """Write rows, and a report of where they are from, how they were chosen, and of the facts."""
    told = {**origin, **asked.drawn, "options": chosen, **facts}
    return _write(asked.out, files, {"dataset": asked.name, **told})


def _write_judged(asked: Asked) -> Report:
    """Write preference pairs: which response a judge prefers. See `Judged`.

    Its source is a file of samples, or the directory of a run, whose samples.jsonl is meant; the
    folder keeps the verdicts too.

    Raises:
        DataError: see `prepare`; or no response is preferred to another.
        RewardDefinitionError: the judge cannot be asked.
        Interrupted: a signal asked to stop; verdicts are kept in the folder.
    """
    from oxrl_datasets.judged import Judged  # other datasets ask nobody
    from oxrl_graders.judge.options import refuse_secrets  # likewise

    try:
        refuse_secrets(asked.options)
    except ValueError as error:
        raise DataError(str(error)) from None
    chosen = asked.chosen(Judged)
    source = asked.source
    if source is not None and (Path(source) / SAMPLES).is_file():
        source = Path(source) / SAMPLES
    paths, raw = _raw_files(asked.name, source)
    asked.out.mkdir(parents=True, exist_ok=True)
    judged = Judged(**chosen)
    pool = judged.pool(asked.out)
    files: Files = {}
    facts: Report = {}
    for stem, records in raw.items():
        files[stem], facts[stem] = judged.make(pool, stem, records)
    files, split = _kept(files, asked)
    origin: Report = {"source": str(source), **asked.drawn, **_hashes(paths)}
    told = {"dataset": asked.name, **origin, "options": chosen, **facts, **split}
    return _write(asked.out, files, told)


def _write_demonstrations(asked: Asked) -> Report:
    """Write what an environment's own expert does in episodes that are played. See
    `Demonstrations`.

    Raises:
        DataError: see `prepare`; or the environment has no expert, or none that succeeds.
    """
    from oxrl_robots.demonstrations import Demonstrations  # other datasets play nothing

    if asked.source is not None or asked.test is not None:
        given = "--test" if asked.source is None else "--source"
        raise DataError(f"demonstrations are played, with rows of eval apart: leave out {given}")
    chosen = asked.chosen(Demonstrations)
    made = Demonstrations(**chosen).make(asked.seed, asked.limit)
    if chosen["lerobot"]:
        from oxrl_robots.lerobot import write_episodes  # pyarrow and frames, where asked for
        from oxrl_robots.robot_episodes import as_robot_episode  # likewise

        episodes = [as_robot_episode(done) for done in made.played]
        write_episodes(asked.out / "lerobot", episodes, robot=str(chosen["environment"]))
    return _write_actions(asked, made, {}, chosen)


def _write_lerobot(asked: Asked) -> Report:
    """Write rows to imitate from the folder of a LeRobot dataset, which holds meta/info.json. See
    `LeRobotRows`.

    Raises:
        DataError: see `prepare`; or it is no dataset of a version that is read.
    """
    from oxrl_robots.robot_episodes import LeRobotRows  # other datasets have no frames

    source = asked.source
    if source is None or asked.test is not None:
        rule = "pass --source with the dataset's folder" if source is None else "leave out --test"
        raise DataError(f"lerobot reads episodes of robots: {rule}")
    chosen = asked.chosen(LeRobotRows)
    made = LeRobotRows(**chosen).make(Path(source), asked.limit)
    return _write_actions(asked, made, {"source": str(source)}, chosen)


def _write_gguf(asked: Asked) -> Report:
    """Write the Hugging Face folder of a model, a new one, out of its GGUF file. See `write_model`.

    Raises:
        DataError: see `prepare`; or the file is damaged, or says what would get lost.
        MissingExtraError: the package gguf is not installed.
    """
    from oxrl_datasets.gguf import write_model  # datasets need no model

    if asked.source is None or asked.seed or asked.limit is not None or asked.test is not None:
        rule = "pass --source FILE.gguf, and no --seed, --limit or --test"
        raise DataError(f"gguf makes a model of one file: {rule}")
    source = Path(asked.source)
    facts = write_model(source, asked.out, **asked.chosen(write_model))
    origin = {"source": str(asked.source), "source_sha256": file_hash(source)}
    return _write(asked.out, {}, {"model": asked.name, **origin, **facts})


def _write_actions(asked: Asked, made: MadeActions, origin: Report, chosen: JsonObject) -> Report:
    """Write rows of actions, their statistics where they are numbers, FAST's pieces where they are
    asked for, and the report.
    """
    out = asked.out
    out.mkdir(parents=True, exist_ok=True)
    if made.statistics is not None:
        write_atomically(out / "statistics.json", pretty_json(made.statistics))
    if made.code is not None:
        made.code.write(out / "fast.json")
    return _write_rows(asked, made.files, origin, chosen, made.facts)


SAMPLES = "samples.jsonl"
WRITERS: dict[str, Callable[[Asked], Report]] = {
    **dict.fromkeys(GENERATORS, _write_generated),
    **dict.fromkeys(CONVERTERS, _write_converted),
    "judged": _write_judged,
    "demonstrations": _write_demonstrations,
    "lerobot": _write_lerobot,
    "gguf": _write_gguf,
}
PREPARERS: dict[str, Callable[..., Report]] = {name: partial(prepare, name) for name in WRITERS}


def _converted(
    name: str,
    stem: str,
    records: Iterable[Record],
    converter: Callable[[Fields], Rows],
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


def _kept(files: Files, asked: Asked) -> tuple[Files, Report]:
    """The rows that are written: those of one file in two where `test` is given, and at most
    `limit` of each, chosen by `seed`, in their original order. And what the report says of it.
    """
    limit = asked.limit
    facts: Report = {}
    if asked.test is not None:
        if len(files) > 1:
            raise DataError(f"--test splits one file, and there are {', '.join(files)}")
        (rows,) = files.values()
        files, facts["split"] = split_rows(rows, asked.test, asked.seed)
    for stem, rows in files.items():
        if limit is not None and limit < len(rows):
            chance = random.Random(stable_seed("prepare", asked.seed))
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
