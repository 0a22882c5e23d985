"""The teachers of a run: who is asked, whether they have the policy's tokens, and agree with
themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from oxrl.assembly.assembly import FIRST_RATIO_TOLERANCE, Assembly
from oxrl.config.sections.model import Teacher as Asked
from oxrl.engines.train import Part, Scorer
from oxrl.entry_points import TEACHER_ENGINES, own_function
from oxrl.errors import ConfigError, DataError
from oxrl.flat_config import TEACHERS
from oxrl.modelfiles.dims import model_context
from oxrl.models.load import load_tokenizer
from oxrl.recipes.features.base import Hint, Teacher
from oxrl.tables.cells import TEACHER_TOP
from oxrl.tables.numbers import TEACHER_CANDIDATES
from oxrl.tables.roles import POLICY, TEACHER
from oxrl.types import Prompt

# What may change without another teacher.
MOVES = {"url", "key_env", "sources"}


def build_teachers(
    assembly: Assembly, models: Mapping[str, Scorer], stack: ExitStack
) -> dict[str, Teacher]:
    """Build everything that scores what the policy samples, and try it.

    Args:
        assembly: of the run.
        models: by role; of those teachers that are engines of the run.
        stack: closes what is started for the others.

    Raises:
        ConfigError: a teacher has other tokens than the policy.
        EngineError: it does not agree with itself.
    """
    check_vocabularies(assembly)
    tokenizer = assembly.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    usual = assembly.sampled_alone or {*range(len(tokenizer))} - special
    cfg = assembly.cfg
    part: Part = "merged" if cfg.lora.rank else "all"
    found: dict[str, Teacher] = {}
    for name, asked in cfg.model.teachers.items():
        field = f"{TEACHERS}.{name}"
        if asked.own_weights:
            scorer = models[f"{TEACHER}{name}"]
        elif not asked.name:
            scorer = models[POLICY]
        else:
            scorer = _engine_beside(assembly, field, asked, stack)
        if asked.name:
            bound = FIRST_RATIO_TOLERANCE[asked.dtype or cfg.model.dtype]
            beside("trial")(field, scorer, sorted(usual), assembly.pad_id, bound)
        about = f"{asked.model_dump_json(exclude=MOVES)} {cfg.rollout.temperature}"
        hint = hint_of(asked, cfg.model.context_length, part)
        found[name] = Teacher(scorer, frozenset(asked.sources), hint, about)
    return found


def beside(name: str) -> Callable[..., Any]:
    """Return what packages/oxrl_teachers has under a name.

    Args:
        name: of an entry point.

    Raises:
        ConfigError: the package is not installed.
    """
    function = own_function(TEACHER_ENGINES, name)
    if function is None:
        raise ConfigError(f"{TEACHERS}: {name} is of packages beside oxRL: install it with pip")
    return function


def hint_of(asked: Asked, longest: int | None = None, part: Part = "all") -> Hint | None:
    """Read the template of a teacher that is the policy under another prompt; None of others.

    Args:
        asked: of `model.teachers`.
        longest, part: as of `Hint`.

    Raises:
        ConfigError: the template cannot be read.
    """
    if not asked.prompt:
        return None
    try:
        text = Path(asked.prompt).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{TEACHERS}: {asked.prompt} cannot be read: {error}") from error
    return Hint(text, tuple(asked.reads), longest, asked.follows, part)


def _engine_beside(assembly: Assembly, field: str, asked: Asked, stack: ExitStack) -> Scorer:
    """Build what asks a model of another process."""
    cfg = assembly.cfg
    top = cfg.train.row.has(TEACHER_TOP)
    contexts: list[int | None] = []
    if asked.engine == "vllm":
        longest = cfg.model.context_length
        # A token is sampled behind each row.
        contexts = [model_context(asked.name), longest and longest + 1]
    of_run = {
        "dtype": asked.dtype or cfg.model.dtype,
        "candidates": cfg.train.value(TEACHER_CANDIDATES) if top else 0,
        "only": sorted(assembly.sampled_alone),
        "max_model_len": min(filter(None, contexts), default=None),
        "trust_remote_code": cfg.model.trust_remote_code,
        "threads": cfg.run.threads or os.cpu_count() or 1,
        "directory": cfg.run.directory,
    }
    return beside(asked.engine)(
        field,
        asked.model_dump() | of_run,
        tokenizer=assembly.tokenizer,
        waits=cfg.run.waits,
        stop=assembly.stop,
        closing=stack.callback,
    )


def check_rows(teachers: Mapping[str, Asked], prompts: Sequence[Prompt]) -> None:
    """Make sure that rows have a teacher, by their source, and that templates can be written.

    Args:
        teachers: of `model.teachers`.
        prompts: of the data, some or all.

    Raises:
        DataError: a row has none.
        ConfigError: a template cannot be written, or writes what stands there already.
    """
    named = {source for asked in teachers.values() for source in asked.sources}
    missing = {prompt.source for prompt in prompts} - named
    if missing and all(asked.sources for asked in teachers.values()):
        raise DataError(
            f"{TEACHERS}: no teacher names the source {min(missing)!r} of rows of the data; they "
            f"name {', '.join(sorted(named))}. Add it to one, or leave sources out of one, which "
            "then has all others"
        )
    for name, asked in teachers.items():
        hint = hint_of(asked)
        own = [prompt for prompt in prompts if not asked.sources or prompt.source in asked.sources]
        if hint is not None:
            beside("template")(f"{TEACHERS}.{name}.prompt", asked.prompt, hint, own)


def check_vocabularies(assembly: Assembly) -> None:
    """Make sure that every id of the policy's tokenizer stands for the same token in each teacher.

    Args:
        assembly: of the run.

    Raises:
        ConfigError: one does not; names the first.
    """
    model = assembly.cfg.model
    for name, asked in model.teachers.items():
        if not asked.name or asked.engine == "endpoint":
            continue  # itself; of a server nothing is known but what it answers
        theirs = load_tokenizer(
            asked.name, trust_remote_code=model.trust_remote_code, revision=asked.revision
        )
        problem = beside("vocabulary")(assembly.tokenizer, theirs)
        if problem:
            raise ConfigError(f"{TEACHERS}.{name}.name: {asked.name} {problem}")
