"""The inputs of a run besides its configuration, pinned so that a resume goes on with the same
bytes: data, reward, models, templates and losses of the user's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from oxrl.config import Config
from oxrl.config.conditions import is_model_folder
from oxrl.config.sections.model import Teacher
from oxrl.config.sections.reward import asked_rewards
from oxrl.entry_points import all_offers, is_ours
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.chat_templates import template_file
from oxrl.modelfiles.folder import (
    CHAT_TEMPLATES,
    hub_commit,
    hub_source,
    model_files,
    vision_family,
)
from oxrl.modelfiles.hub import identity, locate
from oxrl.runs.code import code_changes, code_of_run
from oxrl.runs.directory import ROLLOUTS, WHOLE_SAMPLES, Review
from oxrl.runs.files import Json
from oxrl.runs.pins import (
    CODE,
    CODE_FILE,
    DATA_FILE,
    DIGITS,
    INPUTS_FILE,
    Input,
    InputChange,
    input_changes,
    pin,
    read_noted,
)
from oxrl.runs.ranks import Ranks
from oxrl.tables.user_code import ENVIRONMENT, FEATURE, GATE, REWARD, Kind

MODEL = "model.name"
Inputs = Iterator[Input]


def with_pinned_inputs(cfg: Config, noted: Json, ranks: Ranks) -> Config:
    """The configuration with files of the hub located, the same bytes at every start of the run.

    Args:
        noted: what the review of the inputs found, on the first rank.
    """
    noted = ranks.agree(noted)
    paths = {name: str(locate(name, commit)) for name, commit in noted[DATA_FILE].items()}
    data = cfg.data
    if isinstance(data.train, str):
        train = paths[data.train]
    else:
        train = {paths[name]: share for name, share in data.train.items()}
    further = {field: paths[name] for field, name in _further_files(cfg)}
    located = data.model_copy(update={"train": train, **further})
    pins = noted[INPUTS_FILE]
    teachers: dict[str, Teacher] = {}
    for key, teacher in cfg.model.teachers.items():
        revision = _pinned_revision(pins, _teacher_field(key), teacher.revision)
        teachers[key] = teacher.model_copy(update={"revision": revision})
    revision = _pinned_revision(pins, MODEL, cfg.model.revision)
    model = cfg.model.model_copy(update={"revision": revision, "teachers": teachers})
    return cfg.model_copy(update={"data": located, "model": model})


def _pinned_revision(pins: Json, field: str, asked: str | None) -> str | None:
    """The commit that is noted of a model on the hub; of any other model what was asked for."""
    commit: str | None = pins.get(field, {}).get("commit")
    return commit or asked


def _teacher_field(key: str) -> str:
    """The field that names a teacher's model, under which it is noted."""
    return f"model.teachers.{key}.name"


def review_inputs(cfg: Config, run: Path) -> Review:
    """Compare every input with what it was when the run in `run` started; nothing is written.

    Raises:
        DataError: two names of training data are one file.
    """
    review = Review()
    _review_data(cfg, run, review)
    known = read_noted(run, INPUTS_FILE)
    pins: Json = {}
    for found in inputs_of(cfg, known):
        then = known.get(found.name)
        now = pin(found, then)
        if found.code and os.path.isabs(found.where):
            places = (os.path.relpath(place, run) for place in found.where.split(", "))
            now["from_run"] = ", ".join(places)
        pins[found.name] = now
        if then is None:
            review.new.append(found.name)
        else:
            review.changes += input_changes(found, then, now)
    review.noted[INPUTS_FILE] = pins
    code = code_of_run()
    review.noted[CODE_FILE] = code
    then = read_noted(run, CODE_FILE)
    if then:
        review.changes += code_changes(then, code)
    else:
        review.new.append(CODE)
    return review


def _review_data(cfg: Config, run: Path, review: Review) -> None:
    """The identity of every data file, compared with the one at the start of the run."""
    known = read_noted(run, DATA_FILE)
    pins: Json = {}
    fields = [("data.train", name) for name in cfg.data.train_files]
    fields += [(f"data.{field}", name) for field, name in _further_files(cfg)]
    paths: list[Path] = []
    for field, name in fields:
        then = known.get(name)
        path = locate(name, then)
        now = identity(name, path)
        if then is None:
            review.new.append(field)
        elif then != now:
            before = f"{name} sha256 {then:.{DIGITS}}"
            review.changes.append(InputChange(field, before, f"sha256 {now:.{DIGITS}}"))
        if field == "data.train":
            paths.append(path)
        pins[name] = now
    if len(set(paths)) < len(paths):
        names = ", ".join(cfg.data.train_files)
        raise DataError(f"data.train: two of {names} are one file; give it one share")
    review.noted[DATA_FILE] = pins


def _further_files(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the field of `data` and the name of every file beside the training data."""
    for field in ("eval", "given_rows"):
        name = getattr(cfg.data, field)
        if name is not None:
            yield field, name


def inputs_of(cfg: Config, known: Json) -> Inputs:
    """Everything that a run reads besides its data, as it is now.

    Args:
        known: pins of the run's start: a model on the hub stays at the commit noted there.
    """
    yield from _model_inputs(cfg, known)
    if vision_family(cfg.model.name) is not None:
        yield from _image_inputs(cfg)
    named = {"action.statistics": cfg.action.statistics, "action.fast": cfg.action.fast}
    for name, path in named.items():
        if path is not None:
            file = Path(path)
            yield Input(name=name, where=str(file.resolve()), files={file.name: file})
    if cfg.recipe == "rl" and cfg.rollout.from_samples is not None:
        yield _stored_samples(Path(cfg.rollout.from_samples))
    for asked in asked_rewards(cfg.reward):
        if is_model_folder(asked.name):
            # Its worker loads whatever commit of a base the hub has now: nothing noted holds it.
            yield from _model_input(f"{asked.field}.name", asked.name, None, {})
    own = list(_own_code(cfg))
    if own or cfg.environment.name:
        from oxrl.usercode.code_pins import code_inputs, option_files  # most runs have none

        for kind, field, names in own:
            yield from code_inputs(kind, names, field)
        yield from option_files("environment.options", cfg.environment.options)
        yield from option_files("train.features.numbers", cfg.train.features)


def _own_code(cfg: Config) -> Iterator[tuple[Kind, str, list[str]]]:
    """Yield what may be of the user's own: its kind, field and names."""
    for asked in asked_rewards(cfg.reward):
        if not is_model_folder(asked.name) and not is_ours(REWARD, asked.name):
            yield REWARD, f"{asked.field}.name", [asked.name]
    if cfg.environment.name:
        yield ENVIRONMENT, ENVIRONMENT.field, [cfg.environment.name]
    if cfg.recipe == "rl":
        if cfg.train.row.has_own_loss:
            yield GATE, GATE.field, [cfg.train.row.gate]
        if cfg.train.features:
            yield FEATURE, FEATURE.field, list(cfg.train.features)


def packages_named(cfg: Config) -> Iterator[str]:
    """Yield the installed packages of others of which the run names something."""
    for kind, _, names in _own_code(cfg):
        for name in names:
            if not is_ours(kind, name):
                yield from (there.package for there in all_offers(kind.group) if there.name == name)


def _stored_samples(run: Path) -> Input:
    """The samples of another run, as far as they are whole."""
    folder = run / ROLLOUTS
    paths = [path for path in folder.iterdir() if WHOLE_SAMPLES.fullmatch(path.name)]
    files = {path.name: path for path in sorted(paths)}
    return Input(name="rollout.from_samples", where=str(run.resolve()), files=files)


def _image_inputs(cfg: Config) -> Inputs:
    """Files of images that the rows of data files name."""
    from oxrl.assembly.images import image_files  # a run of text alone has none

    held_out = [] if cfg.data.eval is None else [cfg.data.eval]
    for field, names in (("data.train", cfg.data.train_files), ("data.eval", held_out)):
        found: dict[str, Path] = {}
        for name in names:
            found |= image_files(cfg, name)
        if found:
            yield Input(name=field, where="its images", files=found)


def _model_inputs(cfg: Config, known: Json) -> Inputs:
    """Weights, also those under an adapter and of the reference; tokenizer, and chat template."""
    name = cfg.model.name
    yield from _model_input(MODEL, name, cfg.model.revision, known)
    for key, teacher in cfg.model.teachers.items():
        field = f"model.teachers.{key}"
        if teacher.name and teacher.engine != "endpoint":
            yield from _model_input(_teacher_field(key), teacher.name, teacher.revision, known)
        if teacher.prompt:
            file = Path(teacher.prompt)
            where = str(file.resolve())
            yield Input(name=f"{field}.prompt", where=where, files={file.name: file})
    template = cfg.model.chat_template
    if template is not None:
        path = template_file(template)
        files = {path.name: path}
        yield Input(name="model.chat_template", where=str(path.resolve()), files=files)
    elif Path(name).is_dir() and not is_builtin(name):
        folder = Path(name)
        files = {file: folder / file for file in CHAT_TEMPLATES if (folder / file).is_file()}
        yield Input(name="model.chat_template", where=str(folder.resolve()), files=files)


def _model_input(field: str, name: str, revision: str | None, noted: Json) -> Inputs:
    """The model of a name, if it is not built in, with all that it is loaded from.

    Args:
        noted: pins of the run's start; a model on the hub stays at the commit noted there.
    """
    if is_builtin(name):
        return
    folder = Path(name)
    on_disk = folder.is_dir()
    where = str(folder.resolve()) if on_disk else name
    if revision is not None:
        where = f"{where}@{revision}"
    commit = None
    source = hub_source(name, revision)
    if source is not None:
        then = noted.get(field, {})
        commit = then.get("commit") if then.get("where") == where else None
        commit = commit or hub_commit(*source)
    files = model_files(folder) if on_disk else {}
    yield Input(name=field, where=where, files=files, commit=commit)
