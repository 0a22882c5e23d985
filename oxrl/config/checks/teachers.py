"""Teachers: there is one for a row that learns from it, and what is said of each fits together."""

from __future__ import annotations

import urllib.parse
from collections import Counter
from pathlib import Path

from oxrl.config.schema import Config
from oxrl.config.sections.model import Teacher
from oxrl.config.source import Problem, Problems, at
from oxrl.errors import did_you_mean
from oxrl.modelfiles.builtin import BUILTIN_DIMS, is_builtin
from oxrl.modelfiles.dims import model_context, model_dims, why_unsupported
from oxrl.modelfiles.folder import folder_problems, is_reward_model, vision_family
from oxrl.tables.cells import PROMPTED_SELF, TEACHER_TOP
from oxrl.tables.numbers import DIVERGENCE_ALPHA, TEACHER_CANDIDATES

FIELD = "model.teachers"
CHOSEN = ("train.alg_name", "train.loss", "train.advantage")
# Jensen-Shannon divergences closer to 0 or 1 are nearly multiples of a KL, and jump there.
LEAST_ALPHA = 0.01


def check_teacher(cfg: Config) -> Problems:
    """There are teachers, one for each row, and each can be asked.

    Args:
        cfg: of a run whose row has teachers.
    """
    row = cfg.train.row
    teachers = cfg.model.teachers
    if not teachers:
        yield at(FIELD, f"{row.name} learns from one: write {{NAME: {{name: MODEL}}}}", *CHOSEN)
        return
    if row.has(PROMPTED_SELF) and not any(teacher.prompt for teacher in teachers.values()):
        yield at(
            FIELD,
            f"{row.name} learns from the policy itself under another prompt: write "
            "{self: {prompt: FILE.jinja}}",
            *CHOSEN,
        )
    for name, teacher in teachers.items():
        field = f"{FIELD}.{name}"
        if teacher.prompt:
            yield from _check_self(field, teacher)
        else:
            yield from _check_other(cfg, field, teacher)
    yield from _check_sources(teachers)
    yield from _check_divergence(cfg)
    if not cfg.reward.exists and cfg.data.eval is not None and cfg.has_no_reward:
        yield at(
            "reward.name",
            f"{row.name} reads no reward, and evaluations on data.eval do: name one, or remove "
            "data.eval",
            "data.eval",
        )


def _check_self(field: str, teacher: Teacher) -> Problems:
    """The policy under another prompt."""
    for name in ("name", "url", "key_env", "device", "revision"):
        value = getattr(teacher, name)
        if value and not (name == "device" and teacher.weights != "live"):
            rule = "is of another model; with prompt the policy teaches itself: remove one of them"
            yield Problem(f"{field}.{name}", rule, value, also=(f"{field}.prompt",))
    if teacher.engine != "local":
        yield Problem(
            f"{field}.engine",
            "must be local: with prompt the policy teaches itself",
            teacher.engine,
            also=(f"{field}.prompt",),
        )
    file = Path(teacher.prompt)
    if not file.is_file():
        yield Problem(f"{field}.prompt", "is no file: write a Jinja template", teacher.prompt)


def _check_other(cfg: Config, field: str, teacher: Teacher) -> Problems:
    """Another model."""
    for name in ("reads", "weights"):
        value = getattr(teacher, name)
        if value not in ([], "live"):
            rule = "is read with prompt, where the policy teaches itself: set that, or remove it"
            yield Problem(f"{field}.{name}", rule, value, also=(f"{field}.prompt",))
    if not teacher.name:
        yield Problem(
            f"{field}.name",
            "is required: a model, or with prompt instead the policy itself",
            teacher.name,
            also=(f"{field}.prompt",),
        )
        return
    if teacher.engine == "endpoint":
        yield from _check_url(field, teacher)
    else:
        for name in ("url", "key_env"):
            if getattr(teacher, name):
                yield Problem(
                    f"{field}.{name}",
                    f"is read with engine endpoint, and this is {teacher.engine}: remove it",
                    "",
                    also=(f"{field}.engine",),
                )
        yield from _check_model(cfg, field, teacher)
    if teacher.engine != "local":
        if cfg.rollout.temperature != 1:
            yield at(
                "rollout.temperature",
                f"must be 1 with {field}.engine: {teacher.engine}, which knows no other: the "
                "two would be compared at different ones",
                f"{field}.engine",
            )
        if teacher.device is not None:
            yield Problem(
                f"{field}.device",
                f"is read with engine local, and this is {teacher.engine}: remove it",
                teacher.device,
                also=(f"{field}.engine",),
            )
    elif teacher.device is not None and cfg.train.backend != "local":
        yield Problem(
            f"{field}.device",
            f"is read with train.backend local; ranks of {cfg.train.backend} have theirs",
            teacher.device,
            also=("train.backend",),
        )


def _check_model(cfg: Config, field: str, teacher: Teacher) -> Problems:
    """A model that can be loaded, says how likely tokens are, and reads what the policy writes."""
    name = teacher.name
    path = f"{field}.name"
    folder = Path(name)
    if is_builtin(name):
        if name not in BUILTIN_DIMS:
            names = ", ".join(sorted(BUILTIN_DIMS))
            hint = did_you_mean(name, BUILTIN_DIMS)
            yield Problem(path, f"must be one of {names}{hint}", name)
            return
    elif name.startswith((".", "/", "~")) and not (folder / "config.json").is_file():
        state = "has no config.json" if folder.is_dir() else "is no folder"
        yield Problem(path, f"{state}; give a folder in Hugging Face format, or a hub name", name)
        return
    elif is_reward_model(name):
        yield Problem(path, "is a reward model, which says nothing of tokens", name)
        return
    elif folder.is_dir():
        damages = folder_problems(folder)
        if damages:
            yield Problem(path, "; ".join(damages), name)
    unsupported = why_unsupported(name)
    if unsupported is not None:
        yield Problem(path, unsupported, name)
    if name == cfg.model.name and teacher.revision == cfg.model.revision and not is_builtin(name):
        yield Problem(
            path,
            "is the policy itself under the same prompt, from which there is nothing to learn: "
            "name another model, or set prompt",
            name,
            also=("model.name",),
        )
    if (vision_family(name) is None) != (vision_family(cfg.model.name) is None):
        kinds = ("images", "text alone") if vision_family(name) else ("text alone", "images too")
        rule = f"reads {kinds[0]}, and the policy reads {kinds[1]}: take one that reads the same"
        yield Problem(path, rule, name, also=("model.name",))
    context = model_context(name)
    longest = cfg.model.context_length
    if context is not None and longest is not None and context < longest:
        prompt = cfg.data.max_prompt_tokens
        needed = longest if prompt is None else prompt + cfg.rollout.max_tokens
        if needed > context:
            yield Problem(
                path,
                f"reads rows of {context} tokens, and prompt and response may have {needed}: set "
                "data.max_prompt_tokens and rollout.max_tokens to fit, or model.max_length",
                name,
                also=("rollout.max_tokens", "data.max_prompt_tokens", "model.max_length"),
            )


def _check_url(field: str, teacher: Teacher) -> Problems:
    """A place alone: what stands in it is recorded."""
    example = "such as http://localhost:8000/v1"
    parts = urllib.parse.urlsplit(teacher.url)
    path = f"{field}.url"
    if not teacher.url:
        yield Problem(path, f"is required with engine endpoint, {example}", "")
    elif "@" in parts.netloc or parts.query or parts.fragment:
        rule = "holds more than a place, and is recorded: a key belongs in the environment, key_env"
        yield Problem(path, rule, "(not shown)")
    elif parts.scheme not in ("http", "https") or not parts.hostname:
        yield Problem(path, f"must begin with http:// or https:// and a host, {example}", "")
    elif parts.hostname == "api.openai.com":
        yield Problem(
            path,
            "does not say how likely given tokens are (prompt_logprobs): take a server of vLLM's",
            teacher.url,
        )


def _check_sources(teachers: dict[str, Teacher]) -> Problems:
    """No row has two teachers."""
    named = Counter(source for teacher in teachers.values() for source in set(teacher.sources))
    twice = [source for source, count in named.items() if count > 1]
    if twice:
        yield at(FIELD, f"two teachers name the source {twice[0]!r}: keep it in one of them")
    others = [name for name, teacher in teachers.items() if not teacher.sources]
    if len(others) > 1:
        yield at(
            FIELD,
            f"{others[0]} and {others[1]} both have every row that no other teacher names: write "
            "sources",
        )


def _check_divergence(cfg: Config) -> Problems:
    """A divergence that is one, over candidates that there are."""
    if not cfg.train.row.has(TEACHER_TOP):
        return
    alpha = cfg.train.value(DIVERGENCE_ALPHA)
    if 0 < alpha < LEAST_ALPHA or 1 - LEAST_ALPHA < alpha < 1:
        yield at(
            "train.divergence_alpha",
            f"is 0 for KL(teacher || policy), 1 for KL(policy || teacher), or from {LEAST_ALPHA} "
            f"to {1 - LEAST_ALPHA}: closer to 0 and 1 the divergence itself goes to 0",
        )
    dims = model_dims(cfg.model.name)
    count = cfg.train.value(TEACHER_CANDIDATES)
    if dims is not None and count > dims.vocabulary:
        yield at(
            "train.teacher_candidates",
            f"must be at most the {dims.vocabulary} tokens of the vocabulary",
            "model.name",
        )
