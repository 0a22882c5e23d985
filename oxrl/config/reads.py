"""Which fields a run reads, by its algorithm's row and the features it switches on, and its YAML,
resolved to those.

A field that is written down but not read is refused: a knob that turns nothing must not look as if
it did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from oxrl.config.field import (
    ANSWERING,
    CELLS,
    COMPARING,
    EVALUATING,
    OFFLINE,
    PREFERENCE,
    RL,
    SAMPLING,
    Section,
    readers,
)
from oxrl.config.reward_options import CODE, CODE_OPTIONS, asked_rewards, is_folder
from oxrl.config.schema import FIELDS, SECTIONS, Config, FieldValues, GivenValues, fields_of
from oxrl.config.sections.train import is_own
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.vision import model_config, vision_family
from oxrl.redact import without_tokens
from oxrl.runs.directory import differences
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.cells import CRITIC
from oxrl.tables.engines import TRAINING_ENGINES
from oxrl.tables.numbers import KL_COEFF, NUMBERS
from oxrl.tables.policy import ROWS, Row

# Recipes that read a field -> why a run of another recipe does not, {} its algorithm.
OF_RECIPES = {
    RL: "is read by reinforcement learning; {} is not: remove it",
    SAMPLING: "is read by reinforcement learning; {} is not: remove it",
    ANSWERING: (
        "is read by reinforcement learning and supervised fine-tuning; {} is neither: remove it"
    ),
    EVALUATING: (
        "is read by reinforcement learning and evaluations of supervised fine-tuning; {} is "
        "neither: remove it"
    ),
    OFFLINE: (
        "is read by supervised and preference algorithms; {} is reinforcement learning: remove it"
    ),
    PREFERENCE: "is read by preference methods; {} is none: remove it",
    COMPARING: (
        "is read by reinforcement learning and preference methods; {} is neither: remove it"
    ),
    ("supervised", "rejection"): "is read by supervised fine-tuning; {} is not: remove it",
}
OF_EVALUATIONS = (
    "run.eval_every",
    "run.keep_best",
    "run.stop_at",
    "data.eval_rows",
    "rollout.eval_samples",
    "rollout.eval_temperature",
)
# Of models that read images.
OF_IMAGES = (
    "data.image_roots",
    "data.image_min_side",
    "data.image_max_side",
    "data.image_max_pixels",
    "model.freeze",
    "train.tower_lr",
)
OF_ADAPTERS = (
    "lora.alpha",
    "lora.targets",
    "lora.rslora",
    "lora.dora",
    "model.load_in_4bit",
)
# Only samplers with weights of their own are sent any.
PROBE = (
    "inference_engine.probe_every",
    "inference_engine.probe_tokens",
    "inference_engine.probe_limit",
)
OF_VLLM = (
    "inference_engine.tensor_parallel",
    "inference_engine.gpu_memory_fraction",
    "inference_engine.kv_cache_gb",
)
NO_EVALUATION = "has no effect without data.eval; remove it, or give held-out rows in data.eval"
NO_ADAPTER = "is read with lora.rank above 0, the rank of the adapters; set that, or remove it"
NO_DELIVERY = (
    "is read with lora.rank where samplers have weights of their own (train.backend deepspeed or "
    "fsdp, inference_engine.actors, or inference_engine.name: vllm): remove it"
)
NO_IMAGES = "is read where the model reads images; this one reads text alone: remove it"
NO_HISTORY = "is read where turns read what was said before; rollout.context=last: remove it"
OF_EPISODES = (
    "rollout.max_episode_tokens",
    "rollout.context",
    "rollout.rewritten_history",
    "train.turn_gamma",
    "train.turn_lambda",
)
NO_ENVIRONMENT = "is read with an environment, environment.name; set that, or remove it"
NO_ACTIONS = "is read where turns are actions: action.choices or action.size; remove it"
NO_BINS = "is read of action.code bins, and this is fast: remove it"
NO_PIECES = "is read of action.code fast, and this is bins: remove it"
NO_NUMBERS = "is read of actions that are numbers, action.size; these are choices: remove it"
NO_REWARD = "is read with a reward, reward.name; set that, or remove it"
OF_REWARDS = ("reward.timeout_s", "reward.workers")
NO_VLLM = "is read with inference_engine.name: vllm; set that, or remove it"
NO_SAMPLERS = (
    "is read where samplers have weights of their own (inference_engine.actors, or "
    "inference_engine.name: vllm): remove it"
)
NOT_ON_THE_HUB = "is read where model.name is a name on the hub; this one is on disk: remove it"
NO_ACTORS = (
    "is read by reinforcement learning with Ray actors (train.backend deepspeed or fsdp: training "
    "actors; inference_engine.actors: rollout actors; reward.actors: reward models; the placement "
    "needs the first two): remove it"
)
NO_CODE = "is read by reward.name: code; set that, or remove it"
NO_REWARD_MODEL = "is read where a reward is the folder of a reward model; remove it"
ONE_REWARD = "is read where it holds parts, PART: {name: ...}, and without reward.name; remove it"
SEVERAL_REWARDS = "is not read: reward.parts say what scores; remove it"
OF_EACH_PART = "is not read: each of reward.parts has {} of its own; remove it here"
OF_ANSWERS = ("reward", "rollout", "inference_engine")
NO_ANSWERS = (
    "is read by supervised fine-tuning whose evaluations generate answers: set reward.name and "
    "data.eval, or remove it"
)
NO_OWN_LOSS = (
    "is read with a policy loss of your own, train.loss: path.py:function; set that, or remove it"
)


# Dotted paths of fields, and why they are not read.
Unread = Iterator[tuple[str, str]]


def row_fields(row: Row) -> frozenset[str]:
    """Dotted `train.*` paths that the cells and features of `row` read."""
    return frozenset(f"train.{name}" for name in row.defaults)


def has_reference_model(cfg: Config) -> bool:
    """Whether a frozen or following copy of the policy is held beside it: a table or a switched-off
    adapter is none.
    """
    row = cfg.train.row
    if row.recipe == "preference":
        return row.moves_reference
    return row.kl != "none" and cfg.train.value(KL_COEFF) > 0 and not cfg.lora.rank


def models_trained(cfg: Config) -> int:
    """Count the models of the policy's size that training builds: with a critic and a reference."""
    return 1 + cfg.train.row.has(CRITIC) + has_reference_model(cfg)


def generates_answers(cfg: Config) -> bool:
    """Whether the evaluations of a supervised run answer prompts."""
    scored = cfg.recipe == "supervised" and cfg.reward.exists
    return scored and cfg.data.eval is not None


def _unread(cfg: Config) -> dict[str, str]:
    """Dotted path -> why training with `cfg` does not read it; without the numbers of rows."""
    found: dict[str, str] = {}
    for path, why in _switched_off(cfg):
        found.setdefault(path, why)
    own = fields_of(cfg.recipe)
    for path in FIELDS:
        if path not in own and path not in found and not _is_number(path):
            section, _, name = path.partition(".")
            whole = Config.model_fields[section]
            of = readers(SECTIONS[section].model_fields[name])
            if cfg.recipe not in readers(whole):
                of = readers(whole)
            found[path] = OF_RECIPES[of].format(cfg.train.alg_name)
    return found


def _switched_off(cfg: Config) -> Unread:
    """(dotted path, reason) of fields that the algorithm could read, and this run does not."""
    row = cfg.train.row
    backend = cfg.train.backend
    if cfg.data.eval is None:
        yield from ((path, NO_EVALUATION) for path in OF_EVALUATIONS)
    if is_builtin(cfg.model.name) or Path(cfg.model.name).is_dir():
        yield "model.revision", NOT_ON_THE_HUB
    yield from _of_episodes(cfg)
    yield from _of_actions(cfg)
    yield from _of_images(cfg)
    if not cfg.lora.rank:
        yield from ((path, NO_ADAPTER) for path in OF_ADAPTERS)
    if not _sends_adapters(cfg):
        yield "lora.delivery", NO_DELIVERY
    if cfg.recipe == "supervised" and not generates_answers(cfg):
        yield from ((path, NO_ANSWERS) for path in FIELDS if path.partition(".")[0] in OF_ANSWERS)
    for name, engine in TRAINING_ENGINES.items():
        if name != backend:
            why = f"is read with train.backend: {name}; this run's is {backend}: remove it"
            sections = (engine.settings, engine.reference_settings)
            yield from ((path, why) for path in FIELDS if path.partition(".")[0] in sections)
    if not has_reference_model(cfg):
        why = (
            "is read where there is a reference model; "
            f"{cfg.train.alg_name} as configured has none: remove it"
        )
        yield from ((path, why) for path in FIELDS if path.startswith("deepspeed_ref."))
    yield from _of_actors(cfg)
    yield from _of_samplers(cfg)
    if row.recipe == "rl" and not is_own(row.gate):
        yield "train.loss_numbers", NO_OWN_LOSS
    yield from _of_rewards(cfg)


def _of_samplers(cfg: Config) -> Unread:
    """What is read of samplers with weights of their own, and of vLLM."""
    if not cfg.samplers:
        yield from ((path, NO_SAMPLERS) for path in PROBE)
    if cfg.inference_engine.name != "vllm":
        yield from ((path, NO_VLLM) for path in OF_VLLM)


def _of_rewards(cfg: Config) -> Unread:
    """What is read of the reward `code`, of trained models that reward, and what each part of a
    reward has of its own.
    """
    if cfg.recipe in SAMPLING and CODE not in cfg.reward.names:
        yield from ((f"reward.{field}", NO_CODE) for field in CODE_OPTIONS)
    if not any(map(is_folder, asked_rewards(cfg.reward))):
        yield "reward.actors", NO_REWARD_MODEL
    parts = cfg.reward.parts.values()
    if not parts:
        yield "reward.parts", ONE_REWARD
        return
    if not cfg.reward.name:
        yield "reward.name", SEVERAL_REWARDS
    yield "reward.options", OF_EACH_PART.format("options")
    for name in ("timeout_s", "workers"):
        if all(getattr(part, name) is not None for part in parts):
            yield f"reward.{name}", OF_EACH_PART.format(name)


def _of_episodes(cfg: Config) -> Unread:
    """What is read with an environment only, and of the reward that it may stand for."""
    if not cfg.environment.name:
        yield from ((path, NO_ENVIRONMENT) for path in OF_EPISODES)
        paths = [path for path in FIELDS if path.startswith("environment.")]
        yield from ((path, NO_ENVIRONMENT) for path in paths if path != "environment.name")
        return
    if not cfg.reward.exists:
        yield from ((path, NO_REWARD) for path in OF_REWARDS)
    if cfg.rollout.context in ("last", "window: 1"):
        yield "rollout.rewritten_history", NO_HISTORY


def _of_actions(cfg: Config) -> Unread:
    """What is read where turns are actions, and what then is not."""
    if not cfg.action.exists:
        for name in ("bins", "chunk", "ids", "statistics", "code", "fast"):
            yield f"action.{name}", NO_ACTIONS
        return
    if cfg.action.names:
        for name in ("size", "bins", "statistics", "code", "fast"):
            yield f"action.{name}", NO_NUMBERS
        return
    # What stands for numbers: bins, or pieces.
    yield ("action.bins", NO_BINS) if cfg.action.code == "fast" else ("action.fast", NO_PIECES)


def _of_images(cfg: Config) -> Unread:
    """What is read where the model reads images.

    What a model on the hub reads cannot be told before it is here: what is set for its images then
    counts as read, and a run that has fetched the model finds out.
    """
    name = cfg.model.name
    if vision_family(name) is not None:
        return
    known = is_builtin(name) or model_config(name) is not None
    yield from ((path, NO_IMAGES) for path in OF_IMAGES if known or not _is_set(cfg, path))


def _is_set(cfg: Config, path: str) -> bool:
    """Whether a field has another value than it has by itself."""
    section, _, name = path.partition(".")
    chosen = getattr(cfg, section)
    return getattr(chosen, name) != type(chosen).model_fields[name].default


def _sends_adapters(cfg: Config) -> bool:
    """Whether what learns in adapters goes to samplers with weights of their own."""
    apart = cfg.train.engine.several_ranks or cfg.samplers > 0
    samples = cfg.recipe == "rl" or generates_answers(cfg)
    return samples and apart and cfg.lora.rank > 0


def _of_actors(cfg: Config) -> Unread:
    """What is read by runs with more Ray actors than this one has."""
    reinforces = cfg.recipe == "rl"
    training = reinforces and cfg.train.engine.several_ranks
    sampling = reinforces and cfg.inference_engine.actors > 0
    scoring = reinforces and cfg.reward.actors > 0
    alone = not (training or sampling or scoring)
    if alone:
        yield "run.ray_address", NO_ACTORS
    if alone or cfg.run.ray_address is None:
        yield "run.ray_working_dir", NO_ACTORS
    if not training:
        yield "run.max_restarts", NO_ACTORS
    if not (training and sampling):
        yield "inference_engine.placement", NO_ACTORS


def _is_number(path: str) -> bool:
    """Whether `path` is a number of the tables, which only some rows read."""
    section, _, name = path.partition(".")
    return section == "train" and name in NUMBERS


def fields_read(cfg: Config) -> frozenset[str]:
    """Dotted paths that training with `cfg` reads."""
    plain = frozenset(path for path in FIELDS if not _is_number(path))
    return (plain | row_fields(cfg.train.row)).difference(_unread(cfg))


def why_unread(path: str, cfg: Config) -> str:
    """Say what reads `path`, and so why this run does not.

    Args:
        path: dotted, of a field that this run does not read.
        cfg: of the run.
    """
    why = _unread(cfg).get(path)
    if why is not None:
        return why
    name = path.partition(".")[2]
    algorithms = [row.name for row in ROWS.values() if name in row.defaults]
    fields = {kind: field for field, kind in CELLS.items() if kind != "ratio"}
    choices: list[str] = []
    for (kind, cell), found in TABLE.items():
        if kind in fields and name in [number.key for number in found.numbers]:
            choices.append(f"train.{fields[kind]}: {cell}")
    known = [f"algorithms: {', '.join(algorithms)}"] if algorithms else []
    if choices:
        known.append(", ".join(choices))
    hint = ""
    if name == "beta" and cfg.recipe == "rl":
        hint = "; the weight of a KL term is train.kl_coeff here"
    return (
        f"is not read by {cfg.train.alg_name} as configured (read by {'; '.join(known)}); "
        f"remove it, or choose one of those{hint}"
    )


def read_values(cfg: Config) -> FieldValues:
    """Dotted path -> value of every field that is read, in the order of the schema; unset cells are
    left out.
    """
    read = fields_read(cfg)
    found: FieldValues = {}
    for path in FIELDS:
        section, _, name = path.partition(".")
        if path not in read:
            continue
        value = getattr(getattr(cfg, section), name)
        unset = section == "train" and name in CELLS and value is None
        if not unset:
            found[path] = _plain(value)
    return found


def sections_of(values: GivenValues) -> dict[str, FieldValues]:
    """Values by dotted path as YAML has them: section -> field -> value."""
    sections: dict[str, FieldValues] = {}
    for path, value in values.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def _plain(value: object) -> object:
    """A value as YAML has it: the parts of a reward as mappings, without what they leave open."""
    if not isinstance(value, dict):
        return value
    parts = cast(FieldValues, value)
    return {
        name: part.model_dump(exclude_none=True) if isinstance(part, Section) else part
        for name, part in parts.items()
    }


def dump_config(cfg: Config) -> str:
    """YAML text of the resolved configuration; loading it gives an equal object.

    Only what looks like a secret in a value becomes ***: the text is shown and kept.
    """
    lines: list[str] = []
    started = ""
    for path, value in read_values(cfg).items():
        section, _, name = path.partition(".")
        if section != started:
            lines.append(f"{section}:\n")
            started = section
        lines.append(f"  {name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    """One YAML value that YAML 1.1 and 1.2 readers agree on."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    # JSON is YAML, apart from characters in strings that YAML wants escaped and JSON does not.
    text = without_tokens(json.dumps(value, ensure_ascii=False))
    return re.sub(
        "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text
    )


def config_diff(a: Config, b: Config) -> dict[str, tuple[object, object]]:
    """Dotted path -> (value in `a`, value in `b`) where they differ; `(not read)` where only one
    reads the field.
    """
    return differences(read_values(a), read_values(b), absent="(not read)")
