"""`load_config`: YAML and overrides in, one checked `Config` out, or one error that lists
everything wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from oxrl.config.checks import evaluation_problems, notices, training_problems
from oxrl.config.reads import fields_read, row_fields, why_unread
from oxrl.config.schema import CELLS, FIELDS, SECTIONS, Config, compose_row
from oxrl.config.source import UNSET, Problem, Source, homes, read_source
from oxrl.errors import ConfigError, did_you_mean
from oxrl.tables.policy import PARAMETERS, ROWS

# Stand in for required fields that are missing or wrong, so that the other checks can still run.
_PLACEHOLDERS: dict[str, Any] = {
    "run.name": "unnamed",
    "run.steps": 1,
    "model.name": "unnamed",
    "data.train": "unnamed.jsonl",
    "train.alg_name": "sgrpo",
}
# Adapters learn best at about ten times the rate of full tuning (Schulman et al., "LoRA Without
# Regret", 2025).
ADAPTER_RATES = {"lr": 1e-5, "critic_lr": 1e-4}
# Sections that an evaluation may set whatever the training algorithm reads.
_EVALUATION = ("run.", "model.", "data.", "reward.", "rollout.", "inference_engine.")


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read, check and freeze the configuration of a training run.

    Args:
        path: YAML file with the sections run, model, data, train and, where read, reward, rollout,
            inference_engine.
        overrides: `section.field=value` sets a field, `~section.field` takes back one that the file
            sets; in order.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
    return _load(path, overrides, training_problems, ())


def load_evaluation_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, to evaluate with: reward and rollout are read even for `sft`.

    Rules about training data and training samples do not apply, so `rollout.top_p` and `top_k` may
    be set.
    """
    return _load(path, overrides, evaluation_problems, _EVALUATION)


def _load(
    path: Path | str,
    overrides: Sequence[str],
    check: Callable[[Config], Iterable[Problem]],
    free: tuple[str, ...],
) -> Config:
    """Fields under `free` may be set whether the algorithm reads them or not."""
    source = read_source(path, overrides)
    cfg, problems = _validate(source)
    problems += _new(
        (problem for problem in _unread(cfg, source) if not problem.path.startswith(free)), problems
    )
    problems += _new(check(cfg), problems)
    if problems:
        raise ConfigError(_report(problems, source))
    signs = [
        f"train.{name} = {value} is stored as {getattr(cfg.train, name)} ({source.where[f'train.{name}']})"
        for name, value in source.values.get("train", {}).items()
        if name in ("clip_low", "clip_high") and float(value) < 0
    ]
    dropped = (
        ["clip bounds are magnitudes, the sign is dropped: " + "; ".join(signs)] if signs else []
    )
    for notice in (*dropped, *notices(cfg)):
        warnings.warn(notice, UserWarning, stacklevel=3)
    return cfg


def _validate(source: Source) -> tuple[Config, list[Problem]]:
    """Check every field on its own. Wrong fields are replaced by defaults in the Config that comes
    back.
    """
    values = {section: dict(source.values.get(section, {})) for section in SECTIONS}
    values["train"] = {**_train_defaults(values), **values["train"]}
    problems = list(source.problems)
    try:
        return Config.model_validate(values), problems
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems += [_field_problem(detail) for detail in details if detail["type"] != "missing"]
    problems += _new(
        (_field_problem(detail) for detail in details if detail["type"] == "missing"), problems
    )
    for detail in details:
        section, name = (str(part) for part in detail["loc"][:2])
        values[section].pop(name, None)
        if (path := f"{section}.{name}") in _PLACEHOLDERS:
            values[section][name] = _PLACEHOLDERS[path]
    return Config.model_validate(values), problems


def _train_defaults(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train fields that the algorithm and what surrounds it set, unless they are written down."""
    train, found = values["train"], dict[str, Any]()
    row = ROWS.get(str(train.get("alg_name")))
    if row is not None:
        row = compose_row(row, {kind: train.get(name) for name, kind in CELLS.items()})
        unread = {
            name
            for names in PARAMETERS.values()
            for name in names
            if f"train.{name}" not in row_fields(row)
        }
        found = {name: value for name, value in row.defaults.items() if name not in unread}
        # Samples of other kernels or earlier weights: a row whose ratio does not know the sampler
        # gets capped weights.
        elsewhere = values["rollout"].get("max_staleness", 0) not in (0, "0")
        elsewhere |= values["inference_engine"].get("name") == "vllm"
        knows = (
            row.correction != "none"
            or row.denominator == "rollout"
            or "interpolated_anchor" in row.needs
        )
        if elsewhere and row.recipe == "rl" and not knows and train.get("old_logprobs") != "bypass":
            found["correction"] = "truncate"
    return found | (ADAPTER_RATES if values["lora"].get("rank") else {})


def _field_problem(detail: ErrorDetails) -> Problem:
    path, value, context = (
        ".".join(str(part) for part in detail["loc"]),
        detail["input"],
        detail.get("ctx", {}),
    )
    section, _, name = path.partition(".")
    if detail["type"] == "extra_forbidden":
        fields = SECTIONS[section].model_fields
        elsewhere = get_close_matches(
            name, {field.partition(".")[2]: field for field in FIELDS}, n=1
        )
        hint = (
            homes(name) or did_you_mean(name, fields) or (homes(elsewhere[0]) if elsewhere else "")
        )
        return Problem(path, f"unknown field{hint}", value)
    if detail["type"] == "value_error":
        return Problem(path, str(context["error"]), value)
    meaning = SECTIONS[section].model_fields[name.partition(".")[0]].description or ""
    if detail["type"] == "missing":
        return Problem(path, f"is required: {meaning[0].lower()}{meaning[1:]}", also=(section,))
    if value is None:
        return Problem(path, "is empty; write a value or remove the line", value)
    rule = detail["msg"].replace("Input should be", "must be").replace("String should", "must")
    if detail["type"] == "literal_error":
        rule += did_you_mean(
            str(value), context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        )
    if detail["type"] == "string_type" and isinstance(value, int | float):
        rule += f"; quote it if it is meant as text: '{value}'"
    return Problem(path, f"{rule} ({meaning})", value)


def _meant(path: str) -> str:
    """Known section or field closest to `path`; `path` itself when it is known or nothing is
    close.
    """
    section, dot, name = path.partition(".")
    if section not in SECTIONS:
        return next(iter(get_close_matches(section, SECTIONS, n=1)), path)
    close = get_close_matches(name, SECTIONS[section].model_fields, n=1) if dot else []
    return f"{section}.{close[0]}" if close else path


def _unread(cfg: Config, source: Source) -> Iterator[Problem]:
    """Fields that are written down and that this run does not read."""
    read = fields_read(cfg)
    cells = ("train.alg_name", *(f"train.{name}" for name in CELLS))
    for path in FIELDS:
        if source.written(path) and path not in read:
            section, _, name = path.partition(".")
            yield Problem(path, why_unread(path, cfg), source.values[section][name], also=cells)


def _new(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Drop problems that only follow from fields which already have one, under their own name or
    misspelt.
    """
    wrong = {path for problem in known for path in (problem.path, _meant(problem.path))}
    kept: list[Problem] = []
    for problem in found:
        if wrong.isdisjoint((problem.path, *problem.also)):
            kept.append(problem)
            wrong.add(problem.path)
    return kept


def _report(problems: list[Problem], source: Source) -> str:
    """Every problem with its place: those of the file in the order of its lines, then those of
    overrides.
    """
    blocks: list[tuple[float, str]] = []
    for problem in problems:
        section = problem.path.partition(".")[0]
        place = (
            problem.where
            or source.where.get(problem.path)
            or source.where.get(section, source.file)
        )
        line = place.rpartition(":")[2]
        shown = "" if problem.value is UNSET else f" = {_shorten(problem.value)}"
        block = f"{place}: {problem.path}{shown}\n    {problem.rule}"
        blocks.append((int(line) if line.isdigit() else float("inf"), block))
    count = "1 problem" if len(blocks) == 1 else f"{len(blocks)} problems"
    return f"{count} in {source.file}\n\n" + "\n".join(
        block for _, block in sorted(blocks, key=lambda pair: pair[0])
    )


def _shorten(value: Any) -> str:
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
