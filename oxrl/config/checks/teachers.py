"""Teachers: there is one for a row that learns from it, and what is said of each fits together."""

from __future__ import annotations

import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from oxrl.config.checks.usual import named_model_problems
from oxrl.config.conditions import learns_given_rows
from oxrl.config.schema import Config
from oxrl.config.sections.model import Teacher
from oxrl.config.source import Problem, Problems, at
from oxrl.modelfiles.dims import model_context, model_dims
from oxrl.modelfiles.folder import is_reward_model, vision_family
from oxrl.tables.cells import DISCRIMINATOR, PROMPTED_SELF, TEACHER_TOP
from oxrl.tables.numbers import DIVERGENCE_ALPHA, LEAST_ALPHA, TEACHER_CANDIDATES

FIELD = "model.teachers"
# Names of environment variables: so that a key that was put there by mistake is no name.
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
SERVERS = "such as http://localhost:8000/v1"


class Condition(NamedTuple):
    """The condition under which fields of a teacher are read, as the end of a sentence."""

    fields: tuple[str, ...]
    holds: Callable[[Teacher], bool]
    told: str


CONDITIONS = (
    Condition(("reads",), lambda teacher: bool(teacher.prompt), "with prompt"),
    Condition(
        ("weights",), lambda teacher: not teacher.name, "of the policy itself, without a name"
    ),
    Condition(
        ("url", "key_env"), lambda teacher: teacher.engine == "endpoint", "with engine endpoint"
    ),
    Condition(
        ("dtype", "device"), lambda teacher: teacher.own_weights, "of weights that this run loads"
    ),
    Condition(
        ("revision",),
        lambda teacher: bool(teacher.name) and teacher.engine != "endpoint",
        "of a model on the hub",
    ),
)


def check_teachers(cfg: Config) -> Problems:
    """There are teachers, one for each row, and each can be asked.

    Args:
        cfg: of a run whose row has teachers.
    """
    row = cfg.train.row
    teachers = cfg.model.teachers
    if not teachers:
        rule = f"{row.name} learns from one: write {{NAME: {{name: MODEL}}}}"
        yield Problem(FIELD, rule, {}, also=("train.alg_name", "train.loss", "train.advantage"))
    elif row.has(PROMPTED_SELF) and all(teacher.name for teacher in teachers.values()):
        rule = f"{row.name} needs the policy itself as one: write {{self: {{prompt: FILE.jinja}}}}"
        yield Problem(FIELD, rule, list(teachers), also=("train.alg_name",))
    for name, teacher in teachers.items():
        if not re.fullmatch(r"[\w-]+", name):
            yield Problem(FIELD, "have names of letters, digits, _ and -", name)
        for path, rule, value in _of_one(cfg, teacher):
            field = f"{FIELD}.{name}"
            yield Problem(f"{field}.{path}", rule, value, also=(f"{field}.name",))
        if teacher.engine != "local" and cfg.rollout.temperature != 1:
            yield at(
                "rollout.temperature",
                f"must be 1 with {FIELD}.{name}.engine: {teacher.engine}, which knows no other",
                f"{FIELD}.{name}.engine",
            )
    yield from _sources(teachers)
    yield from _divergence(cfg)
    yield from _given_rows(cfg)


def check_text_alone(cfg: Config) -> Problems:
    """Given answers are texts, and one for a prompt.

    Args:
        cfg: of a run with a discriminator, or with given rows.
    """
    if vision_family(cfg.model.name) is not None:
        yield at("model.name", "sees images; given answers are text alone", "train.alg_name")
    if cfg.environment.name and cfg.train.row.has(DISCRIMINATOR):
        rule = "answers responses, which are compared with one text each: remove it"
        yield at("environment.name", rule, "train.alg_name")


# What is wrong with a teacher: its field, what is right, what was seen.
Wrong = tuple[str, str, object]


def _of_one(cfg: Config, teacher: Teacher) -> list[Wrong]:
    """Look at one teacher by itself, and beside the policy."""
    wrong: list[Wrong] = []
    for condition in CONDITIONS:
        for field in condition.fields:
            value = getattr(teacher, field)
            if not condition.holds(teacher) and value != Teacher.model_fields[field].default:
                shown = "(not shown)" if field in ("url", "key_env") else value
                wrong.append((field, f"is read {condition.told}: remove it", shown))
    if teacher.device is not None and cfg.train.backend != "local":
        rule = f"is read with train.backend local; ranks of {cfg.train.backend} have theirs"
        wrong.append(("device", rule, teacher.device))
    if teacher.engine != "local" and vision_family(cfg.model.name) is not None:
        rule = "must be local where the policy reads images: others are shown text alone"
        wrong.append(("engine", rule, teacher.engine))
    if teacher.prompt and not Path(teacher.prompt).is_file():
        wrong.append(("prompt", "is no file: write a Jinja template", teacher.prompt))
    if teacher.prompt:
        wrong += _of_self(cfg, teacher)
    return wrong or list(_of_place(cfg, teacher))


def _of_place(cfg: Config, teacher: Teacher) -> Iterator[Wrong]:
    """Find what is wrong with where a teacher is."""
    if teacher.name and teacher.engine == "endpoint":
        why = why_no_place(teacher.url)
        if why:
            yield "url", why, "(not shown)"
        if teacher.key_env and not VARIABLE.fullmatch(teacher.key_env):
            yield "key_env", "is the name of an environment variable, in upper case", "(not shown)"
    elif teacher.name:
        yield from (("name", rule, teacher.name) for rule in _of_model(cfg, teacher))
    elif not teacher.prompt:
        yield "name", "is required: a model; or prompt, for the policy itself", ""
    elif teacher.engine != "local":
        yield "engine", "must be local where the policy teaches", teacher.engine


def _of_self(cfg: Config, teacher: Teacher) -> list[Wrong]:
    """Look at what the policy is to see when it teaches itself."""
    wrong: list[Wrong] = []
    if "peer" in teacher.reads and cfg.rollout.n_samples == 1:
        wrong.append(("reads", "has peer, of which rollout.n_samples: 1 has none", teacher.reads))
    if cfg.has_no_reward and {"peer", "feedback"} & {*teacher.reads}:
        rule = "has what only a reward or an environment says: set reward.name"
        wrong.append(("reads", rule, teacher.reads))
    if cfg.environment.name and cfg.rollout.context != "whole":
        wrong.append(("prompt", "needs rollout.context: whole, a hint before all turns", ""))
    if teacher.follows and teacher.dtype == "bfloat16":
        rule = "must be float32 with weights: {ema: ...}, a small share is lost in bfloat16"
        wrong.append(("dtype", rule, teacher.dtype))
    return wrong


def _of_model(cfg: Config, teacher: Teacher) -> list[str]:
    """A model that can be loaded, says how likely tokens are, and reads what the policy writes."""
    name = teacher.name
    if is_reward_model(name):
        return ["is a reward model, which says nothing of tokens"]
    wrong = named_model_problems(name)
    same = (name, teacher.revision) == (cfg.model.name, cfg.model.revision)
    if same and not teacher.prompt and not name.startswith("builtin:"):
        wrong.append("is the policy itself, from which there is nothing to learn: or set prompt")
    if (vision_family(name) is None) != (vision_family(cfg.model.name) is None):
        wrong.append("reads images and the policy does not, or the other way round")
    context = model_context(name)
    longest = cfg.model.context_length
    prompt = cfg.data.max_prompt_tokens
    needed = longest if prompt is None else prompt + cfg.rollout.max_tokens
    if context is not None and needed is not None and context < needed:
        wrong.append(
            f"reads rows of {context} tokens, and prompt with response may have {needed}: lower "
            "data.max_prompt_tokens, rollout.max_tokens or model.max_length"
        )
    return wrong


def why_no_place(url: str) -> str:
    """Say why a server cannot be asked there; empty if it may be. What stands in it is recorded.

    Args:
        url: of the config.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError:
        return f"is none: it must be {SERVERS}"
    if not url:
        return f"is required with engine endpoint, {SERVERS}"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return "holds more than a place, and is recorded: a key belongs into a variable, key_env"
    if parts.scheme not in ("http", "https") or not host or port == 0:
        return f"must begin with http:// or https:// and a host, {SERVERS}"
    if host == "api.openai.com":
        return "is a server that does not score given tokens (prompt_logprobs): take one of vLLM's"
    return ""


def _sources(teachers: dict[str, Teacher]) -> Problems:
    """No row has two teachers."""
    named = Counter(source for teacher in teachers.values() for source in set(teacher.sources))
    twice = [source for source, count in named.items() if count > 1]
    others = [name for name, teacher in teachers.items() if not teacher.sources]
    if twice:
        yield Problem(FIELD, "a source belongs to one teacher: name it once", twice)
    if len(others) > 1:
        yield Problem(FIELD, "have the same rows, all that no other names: write sources", others)


def _given_rows(cfg: Config) -> Problems:
    """There are given answers for a row that learns from them, and one model to ask about them."""
    if not learns_given_rows(cfg):
        return
    yield from check_text_alone(cfg)
    if cfg.data.given_rows is None:
        rule = f"is required by {cfg.train.row.name}: a file of answers; or set train.gkd_lambda=1"
        yield at("data.given_rows", rule, "train.gkd_lambda", "train.alg_name")
    teachers = cfg.model.teachers
    if len(teachers) > 1 or any(teacher.prompt for teacher in teachers.values()):
        rule = "must be one that sees rows as they are, to be asked about data.given_rows"
        yield Problem(FIELD, rule, list(teachers), also=("data.given_rows", "train.gkd_lambda"))


def _divergence(cfg: Config) -> Problems:
    """A divergence that is one, over candidates that there are."""
    if not cfg.train.row.has(TEACHER_TOP):
        return
    alpha = cfg.train.value(DIVERGENCE_ALPHA)
    if 0 < alpha < LEAST_ALPHA or 1 - LEAST_ALPHA < alpha < 1:
        yield at(
            "train.divergence_alpha",
            f"is 0, 1, or from {LEAST_ALPHA} to {1 - LEAST_ALPHA}: closer to its ends the "
            "Jensen-Shannon divergence itself goes to 0, and is no KL there",
        )
    dims = model_dims(cfg.model.name)
    if dims is not None and cfg.train.value(TEACHER_CANDIDATES) > dims.vocabulary:
        rule = f"must be at most the {dims.vocabulary} tokens of the vocabulary"
        yield at("train.teacher_candidates", rule, "model.name")
