"""The checks that can be made before weights are read, by `oxrl plan` and by a run that begins.

Each check says in words what it found. It raises an `OxrlError` where the run could not work, and
`Unknown` where that cannot be told from here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.filesize import decimal

from oxrl.assembly.assembly import Assembly, longest_prompt
from oxrl.assembly.micro_batch_rules import FIELD as MICRO_BATCH
from oxrl.assembly.reward_pools import build_rewards
from oxrl.assembly.settle import (
    decide_sharing,
    describe_sharing,
    try_adapter,
    try_exact,
    without_idle_actors,
)
from oxrl.config import Config
from oxrl.config.conditions import has_teacher, sharing_is_read
from oxrl.config.field import SAMPLING
from oxrl.config.reads import fields_read
from oxrl.config.sections.reward import asked_rewards
from oxrl.config.sections.rollout import ActionConfig
from oxrl.data.chat import ChatEncoder
from oxrl.data.dataset import Dataset, ReadOptions
from oxrl.data.order import index_at
from oxrl.data.prompts import PromptDataset
from oxrl.data.rows import Record, in_our_words, read_rows
from oxrl.errors import (
    ConfigError,
    DataError,
    Interrupted,
    MissingExtraError,
    OxrlError,
    UnreachableError,
    counted,
)
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.dims import ModelDims, model_dims
from oxrl.modelfiles.folder import (
    adapter_base,
    check_model_folder,
    has_image_processor,
    refuse_missing_folder,
    vision_family,
)
from oxrl.modelfiles.hub import locate
from oxrl.models.load import named_in_errors
from oxrl.rewards.pool_choice import REHEARSED, try_reward
from oxrl.rewards.pools import AskingPool, ScoringPool, SinglePool
from oxrl.runs.device import has_type, lacking
from oxrl.runs.directory import is_begun
from oxrl.runs.files import Json
from oxrl.runs.waiting import Patience, StopRequest
from oxrl.tables.cells import DISCRIMINATOR
from oxrl.tables.engines import SAMPLING_ENGINES
from oxrl.tables.vision import VISION_FAMILIES
from oxrl.tables.watch import TRACKERS
from oxrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Rows of each file that are rendered as the model will see them.
RENDERED = 32
# Rows of each file whose images are opened.
LOOKED_AT = 1000
# A larger file is not read to its end, in bytes: that takes longer than a mistake costs.
MOST_READ = 200_000_000


class Unknown(Exception):
    """Something cannot be told from here; the text says why."""


class Warned(Unknown):
    """Something may go wrong; the text says why, and what to do."""


class Preflight(NamedTuple):
    """The result of one check."""

    subject: str
    state: Literal["ok", "unknown", "warning", "wrong"]
    text: str


@dataclass
class Prepared:
    """Things that checks found on the way, for later ones; closing it ends the reward's workers.

    tokenizer: None where it cannot be had. prompts: the first ones of every training file.
    longest: tokens of their longest row; 0: unknown. pool: a reward that has been tried. patience:
    how long answers are waited for. assembly: the parts that were built last.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)
    longest: int = 0
    pool: ScoringPool | None = None
    patience: Patience = field(default_factory=Patience)
    assembly: Assembly | None = None

    def assembly_of(self, cfg: Config) -> Assembly:
        """The parts of a run, which checks that need some share."""
        if self.assembly is None or self.assembly.cfg is not cfg:
            self.assembly = Assembly(cfg)
        return self.assembly

    def close(self) -> None:
        """End the workers of the reward."""
        if self.pool is not None:
            self.pool.close()


# Empty: the run has nothing of that kind, which needs no word.
Check = Callable[[Config, Prepared], str]


def check_model(cfg: Config, prepared: Prepared) -> str:
    """Check that the model's files are here and whole, and of a kind that transformers has."""
    name = cfg.model.name
    if is_builtin(name):
        return f"{name}, built in"
    folder = _folder_of(name)
    check_model_folder(folder)
    base = adapter_base(str(folder))
    if base is not None:
        below = _folder_of(base)
        check_model_folder(below)
        return f"an adapter on {base}, {_architecture(cfg, below)}"
    return _architecture(cfg, folder)


def _folder_of(name: str) -> Path:
    """Find the folder with the files of a model: its own, or its snapshot in the hub's cache.

    Raises:
        Unknown: it is on the hub, and not in the cache.
        DataError: it can be no name on the hub.
    """
    if Path(name).is_dir():
        return Path(name)
    refuse_missing_folder(name)
    # Imported here: a fifth of a second that only names on the hub cost.
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise DataError(
            f"model.name: {name!r} is no folder, and no name on the hub: {error}"
        ) from None
    if not isinstance(cached, str):
        raise Unknown(f"{name} is not in the hub's cache on this machine; a run fetches it")
    return Path(cached).parent


def _architecture(cfg: Config, folder: Path) -> str:
    """Return the class that a model's config.json asks for.

    Raises:
        DataError: transformers has no causal language model of that family.
    """
    # Imported here: built-in models do without them.
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    own_code = cfg.model.trust_remote_code
    with named_in_errors("model", str(folder)):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    family = str(config.model_type)
    if family in VISION_FAMILIES:
        sees = "shows it images" if has_image_processor(str(folder)) else "lacks an image processor"
        return f"{MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]} in {folder}, which {sees}"
    if family in known:
        return f"{known[family]} in {folder}"
    brings = getattr(config, "auto_map", None) or {}
    if own_code and "AutoModelForCausalLM" in brings:
        return f"{family} in {folder}, by code of its own"
    raise DataError(
        f"model.name: {str(folder)!r} is of the family {family}, of which transformers has no "
        "causal language model"
    )


def check_prompts_read(cfg: Config, prepared: Prepared) -> str:
    """Check if prompts can be read once; auto does without where they cannot."""
    if not sharing_is_read(cfg):
        return ""
    if cfg.train.share_prefix != "auto":
        return f"share_prefix: {'on' if cfg.train.share_prefix else 'off'}, as configured"
    return describe_sharing(decide_sharing(_as_it_is_here(cfg)))


def _as_it_is_here(cfg: Config) -> Config:
    """Return the configuration with the model's folder, so that the hub need not be asked."""
    name = cfg.model.name
    if is_builtin(name):
        return cfg
    own = cfg.model.model_copy(update={"name": str(_folder_of(name)), "revision": None})
    return cfg.model_copy(update={"model": own})


def check_adapter(cfg: Config, prepared: Prepared) -> str:
    """Check that the model has the layers that an adapter goes on; those that see have them."""
    if cfg.lora.rank and vision_family(cfg.model.name) is None:
        try_adapter(_as_it_is_here(cfg))
    return ""


def check_exact(cfg: Config, prepared: Prepared) -> str:
    """Check that all of the model has an exact form, and that sampler and trainer agree, both on a
    small model of its kind.
    """
    here = _as_it_is_here(cfg) if cfg.run.exact else cfg
    contract = Assembly(here).contract
    if contract is None:
        return ""
    try_exact(here)
    return (
        f"sampler and trainer agree to the last bit on a small model of this kind; {contract.line}"
    )


def check_device(cfg: Config, prepared: Prepared) -> str:
    """Check that the device that was asked for is here, and knows the type of the weights; with Ray
    other machines have it.
    """
    try:
        device = prepared.assembly_of(cfg).device
    except ConfigError:
        if "run.ray_address" not in fields_read(cfg):
            raise
        raise Unknown("none is on this machine; a run asks the Ray cluster for one") from None
    if device.type == "cpu":
        return ""
    if not has_type(device, prepared.assembly_of(cfg).dtype):
        raise ConfigError(
            f"model.dtype is {cfg.model.dtype}, which {device} does not have; use "
            "model.dtype=float32, or run.device=cpu"
        )
    lacks = lacking(device)
    return f"{device}; {lacks}" if lacks else str(device)


def check_tokenizer(cfg: Config, prepared: Prepared) -> str:
    """Check that the tokenizer can be loaded and has a chat template."""
    tokenizer = Assembly(_as_it_is_here(cfg)).tokenizer
    encoder = ChatEncoder(tokenizer)
    prepared.tokenizer = tokenizer
    template = cfg.model.chat_template or "its own chat template"
    ends = encoder.ends
    named = tokenizer.convert_ids_to_tokens
    text = f"{len(tokenizer):,} tokens, {template}, stop token {' or '.join(named(ends))}"
    inside = sorted(encoder.special_ids.difference(ends, [tokenizer.pad_token_id]))
    if inside and cfg.recipe in SAMPLING:
        text += f"; special tokens that rewards see as text: {', '.join(named(inside[-3:]))}"
    return text


def check_data(cfg: Config, prepared: Prepared) -> str:
    """Check that every data file can be read, and the model sees something in its first rows."""
    told: list[str] = []
    unreached: list[str] = []
    files = [(name, False) for name in cfg.data.train_files]
    if cfg.data.eval is not None:
        files.append((cfg.data.eval, True))
    for name, held_out in files:
        try:
            told.append(_file_text(cfg, prepared, name, held_out=held_out))
        except UnreachableError as error:
            unreached.append(str(error))
    if unreached:
        raise UnreachableError("; ".join(unreached + told))
    return "; ".join(told)


def _file_text(cfg: Config, prepared: Prepared, name: str, *, held_out: bool) -> str:
    path = locate(name)
    if prepared.tokenizer is None:
        # Which tokens stand for actions follows from the tokenizer, which the hub may be asked for.
        cfg = cfg.model_copy(update={"action": ActionConfig()})
    dataset, options = _rows_of(prepared.assembly_of(cfg), held_out=held_out)
    rows, wordiest = _read_all(path, dataset, options)
    if prepared.tokenizer is None:
        return f"{rows} of {name} can be read; without the tokenizer they cannot be rendered"
    first, longest = dataset.first(path, prepared.tokenizer, options, RENDERED, wordiest)
    if not held_out:
        prepared.longest = max(prepared.longest, longest)
    if not held_out and cfg.recipe in SAMPLING:
        units = [unit for made in first for unit in made]
        # In the order of the run: neighbours in a file are often of one kind.
        draws = range(min(REHEARSED, len(units)))
        prepared.prompts[name] = [units[index_at(draw, len(units), cfg.run.seed)] for draw in draws]
    return f"{rows} of {name}, with up to {longest:,} tokens"


def _rows_of(assembly: Assembly, *, held_out: bool) -> tuple[type[Dataset[Any]], ReadOptions]:
    """Return the dataset that the recipe of a run reads a data file as, and its options."""
    cfg = assembly.cfg
    if cfg.recipe == "rl" or (cfg.recipe == "rejection" and not held_out):
        options = assembly.row_options(held_out=held_out, max_tokens=longest_prompt(cfg))
        return PromptDataset, options
    from oxrl.assembly.given_rows import given_rows  # others have answers

    return given_rows(assembly, held_out=held_out)


def _read_all(
    path: Path, dataset: type[Dataset[Any]], options: ReadOptions
) -> tuple[str, list[Record]]:
    """Read every row, without rendering it; say how many there are, and which have most text."""
    if path.stat().st_size > MOST_READ:
        return f"the first {RENDERED} rows (there are too many to read all now)", []
    first = None
    count = 0
    wordiest: list[tuple[int, int, Record]] = []
    for row in read_rows(path):
        if count == options.limit:
            break
        record = in_our_words(row, options.columns)
        first = first or record
        dataset.check(record, first)
        if options.images is not None and count < LOOKED_AT:
            options.images.prepared(record)
        heappush(wordiest, (len(str(row.fields)), count, row))
        if count >= RENDERED:
            heappop(wordiest)
        count += 1
    if not count:
        raise DataError(f"{path}: the file has no rows")
    # Of a small file they are all of its rows, which are rendered anyway.
    return counted(count, "row"), [row for _, _, row in wordiest if count > RENDERED]


def check_reward(cfg: Config, prepared: Prepared) -> str:
    """Check that the reward can be loaded, and scores prompts of the data."""
    if cfg.recipe not in SAMPLING:
        return "none: this algorithm learns from given answers"
    if cfg.has_no_reward:
        return f"none: {cfg.train.row.name} reads none"
    if cfg.scores_nothing:
        return "none: rollout.from_samples has the scores"
    if not cfg.reward.exists:
        return "none: the environment gives the rewards"
    prepared.pool = build_rewards(prepared.assembly_of(without_idle_actors(cfg)))
    told: list[str] = []
    known = True
    for asked, pool in zip(asked_rewards(cfg.reward), prepared.pool.pools, strict=True):
        try:
            text = _try_one(pool, prepared)
        except Unknown as error:
            known = False
            text = str(error)
        told.append(f"{asked.part}: {text}" if asked.part else text)
    if not known:
        raise Unknown("; ".join(told))
    return "; ".join(told)


def _try_one(pool: SinglePool, prepared: Prepared) -> str:
    """Load one reward, and have it score prompts of the data."""
    if Path(pool.name).is_dir():
        check_model_folder(Path(pool.name))
        return f"{pool.name}, a reward model, which is loaded when a run starts"
    pool.start(prepared.patience)
    if isinstance(pool, AskingPool):
        problem = pool.unreachable()
        if problem:  # a run may do without: verdicts are kept
            raise Unknown(f"the judge does not answer now: {problem}")
        return f"{pool.name} answers; no verdict is asked for before a run"
    if not prepared.prompts:
        return f"{pool.name} can be loaded; without tokenizer or rows it is not tried on data"
    for prompts in prepared.prompts.values():
        try_reward(pool, prompts, prepared.patience)
    tried = sum(map(len, prepared.prompts.values()))
    return f"{pool.name}, tried on {tried} prompts of the data"


def check_environment(cfg: Config, prepared: Prepared) -> str:
    """Check that the environment can be loaded, and begins an episode on a prompt of the data."""
    name = cfg.environment.name
    if not name:
        return ""
    if cfg.scores_nothing:
        return f"{name}, of which rollout.from_samples has the episodes"
    prompts = [prompt for found in prepared.prompts.values() for prompt in found]
    if not prompts:
        raise Unknown("without prompts of the data no episode can begin")
    from oxrl.assembly.episode_wiring import try_environment  # single turns do without

    return try_environment(prepared.assembly_of(cfg), prompts[0], prepared.patience)


def check_teachers(cfg: Config, prepared: Prepared) -> str:
    """Check that teachers are here, have the policy's tokens, and one is there for each row."""
    texts = cfg.train.row.has(DISCRIMINATOR)
    if not has_teacher(cfg) and not texts:
        return ""
    from oxrl.assembly.teachers import beside, check_rows, check_vocabularies  # most have none

    rows = [prompt for found in prepared.prompts.values() for prompt in found]
    if texts:
        beside("texts")(rows)
        return "its texts in the data"
    check_rows(cfg.model.teachers, rows)
    if cfg.data.given_rows is not None:
        from oxrl.assembly.features import conversations  # as above

        conversations(prepared.assembly_of(cfg), str(locate(cfg.data.given_rows)))
    for name, asked in cfg.model.teachers.items():
        if asked.name and asked.engine != "endpoint" and not is_builtin(asked.name):
            check_model_folder(_folder_of(asked.name))
        if asked.engine == "vllm" and find_spec("vllm") is None:
            raise MissingExtraError(
                f"model.teachers.{name}.engine: vllm is not installed: `make env-scale` on a CPU "
                "machine, pip install -e '.[vllm]' for CUDA; or set it to local"
            )
    check_vocabularies(Assembly(_as_it_is_here(cfg)))
    return ", ".join(cfg.model.teachers)


def check_loss(cfg: Config, prepared: Prepared) -> str:
    """Check that a policy loss of the user's own can be called, and is a loss."""
    if not cfg.train.row.has_own_loss:
        return ""
    from oxrl.usercode.gates import tried_gate  # those of the table do without

    return tried_gate(cfg.train.row.gate, cfg.train.loss_numbers, sent=cfg.train.backend != "local")


def check_features(cfg: Config, prepared: Prepared) -> str:
    """Check that features can be found, and that those that can be made without a model are."""
    if not cfg.train.features:
        return ""
    from oxrl.assembly.features import feature_inputs  # most runs have none
    from oxrl.recipes.features.base import Planned  # as above
    from oxrl.recipes.features.own_feature import tried_features  # as above

    assembly = prepared.assembly_of(without_idle_actors(cfg))

    def prompts(path: str) -> int:
        return len(assembly.prompts(path, longest_prompt(cfg), held_out=True))

    with ExitStack() as stack:
        given = feature_inputs(assembly, {}, stack)
        samples = cfg.rollout.eval_samples
        run = Planned(cfg.run.steps, cfg.train.updates, samples, given, prompts)
        return tried_features(cfg.train.features, run)


def check_trackers(cfg: Config, prepared: Prepared) -> str:
    """Check that the packages of all trackers are installed.

    Raises:
        MissingExtraError: one is not; says what installs it.
    """
    for name in cfg.run.shown_in:
        row = TRACKERS[name]
        if find_spec(name) is None:
            raise MissingExtraError(
                f"run.trackers: {row.title} needs the package {name}, which is not "
                f"installed: {row.install} does it, or leave the tracker out"
            )
    if not cfg.run.trackers:
        return ""
    return ", ".join(TRACKERS[name].title for name in cfg.run.shown_in)


def check_sampler(cfg: Config, prepared: Prepared) -> str:
    """Check that the package that samples on this machine is installed.

    Raises:
        MissingExtraError: it is not; says what installs it.
    """
    if not cfg.sampling_process:
        return ""
    name = cfg.inference_engine.name
    package = SAMPLING_ENGINES[name].package
    if package is not None and find_spec(package) is None:
        raise MissingExtraError(
            f"inference_engine.name: {name} is not installed: `make env-scale` on a CPU machine, "
            f"pip install -e '.[{name}]' for CUDA; or set it to local"
        )
    return name


def check_optimizer(cfg: Config, prepared: Prepared) -> str:
    """Check that the library of the optimizer, and of weights in four bits, is installed.

    Raises:
        MissingExtraError: it is not; says what installs it.
    """
    name = cfg.train.optimizer
    if name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            "train.optimizer: adamw_8bit needs bitsandbytes, which is not installed: "
            "pip install -e '.[8bit]', or use train.optimizer: adamw"
        )
    if cfg.model.load_in_4bit and find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            "model.load_in_4bit needs bitsandbytes, which is not installed: "
            "pip install -e '.[qlora]', or set it to false"
        )
    if cfg.model.load_in_4bit:
        return f"{name}, frozen weights in four bits"
    return "" if name == "adamw" else name


def check_memory(cfg: Config, prepared: Prepared) -> str:
    """Check that the machine has the memory that rows as long as those of the data take."""
    if cfg.environment.name:
        raise Unknown("the environment decides how long rows get")
    if not prepared.longest:
        raise Unknown("the length of the rows is not known here")
    from oxrl.plan.memory import rows_no_longer  # not for a run of a built-in model

    tokens = prepared.longest
    if cfg.recipe in SAMPLING:
        tokens += cfg.rollout.max_tokens
    when = f"with the rows of the data, at most {tokens:,} tokens each"
    return _memory_text(rows_no_longer(cfg, tokens), when)


def check_limit(cfg: Config, prepared: Prepared) -> str:
    """Check that the machine has the memory for rows as long as the configuration allows."""
    when = "with rows that fill the context"
    longest = cfg.model.context_length
    if longest is not None:
        when += f", {longest:,} tokens"
    return _memory_text(cfg, when)


def _memory_text(cfg: Config, when: str) -> str:
    """Describe the memory that a run takes, by phase.

    Raises:
        Warned: that is more than there is.
    """
    from oxrl.plan.memory import machine_memory, memory_needed, on_cpu  # as above

    needed, text = memory_needed(cfg, _dims(cfg))
    text += f" {when}"
    there = machine_memory()
    if needed <= there or not on_cpu(cfg):
        return text
    raise Warned(
        f"{text}: out of memory is likely, {decimal(needed)} are needed and {decimal(there)} are "
        f"here. Lower model.max_length, {MICRO_BATCH} or inference_engine.max_rows, or use "
        "model.gradient_checkpointing"
    )


def _dims(cfg: Config) -> ModelDims:
    """Return the sizes of the model.

    Raises:
        Unknown: its files do not tell, or are not here.
    """
    dims = model_dims(cfg.model.name)
    if dims is None:
        raise Unknown("the size of the model is not known here")
    return dims


def check_disk(cfg: Config, prepared: Prepared) -> str:
    """Check that the disk has room for the checkpoints that will be on it at once."""
    from oxrl.plan.memory import disk_needed  # as above

    needed, checkpoints = disk_needed(cfg, _dims(cfg))
    place = cfg.run.directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{decimal(needed)} for {checkpoints} checkpoints, {decimal(free)} are free at {place}"
    if needed > free:
        raise ConfigError(
            f"run.dir: {text}: lower run.keep_checkpoints, or choose a larger disk with run.dir"
        )
    return text


# In this order: later ones use what earlier ones found.
CHECKS: Mapping[str, Check] = {
    "model": check_model,
    "adapter": check_adapter,
    "device": check_device,
    "prompts": check_prompts_read,
    "exact": check_exact,
    "tokenizer": check_tokenizer,
    "data": check_data,
    "teachers": check_teachers,
    "loss": check_loss,
    "features": check_features,
    "reward": check_reward,
    "environment": check_environment,
    "trackers": check_trackers,
    "sampler": check_sampler,
    "optimizer": check_optimizer,
    "memory": check_memory,
    "limit": check_limit,
    "disk": check_disk,
}
# What a built-in model with a few checkpoints takes is there: a run of one begins without these.
OF_SIZE = ("memory", "limit", "disk")
FEW_CHECKPOINTS = 100


def examine(cfg: Config, prepared: Prepared, subject: str) -> Preflight:
    """Make one of the CHECKS, and return what it finds; nothing is raised."""
    try:
        return Preflight(subject, "ok", CHECKS[subject](cfg, prepared))
    except Warned as warned:
        return Preflight(subject, "warning", str(warned))
    except (Unknown, UnreachableError) as unknown:
        return Preflight(subject, "unknown", str(unknown))
    except OxrlError as error:
        if error.exit_code != ConfigError.exit_code:
            raise
        return Preflight(subject, "wrong", str(error))


def reply(prepared: Prepared, request: Json) -> Json:
    """Make the check that `examine_apart` asks for, and return what it finds."""
    cfg = Config.model_validate(request["config"])
    prepared.patience = Patience()  # the last check may have cancelled its own
    try:
        return examine(cfg, prepared, request["subject"])._asdict()
    except OxrlError as error:
        return {"state": "failed", "text": str(error)}


def prepare_to_begin(cfg: Config) -> Prepared:
    """Make every check before a run begins; what is unknown here, the run finds out.

    A run that goes on has passed them when it began.

    Returns:
        What was prepared, to be closed; nothing where the run directory is there already.

    Raises:
        OxrlError: what is wrong.
        Interrupted: a signal asked to stop.
    """
    prepared = Prepared()
    place = cfg.run.directory
    if place.exists() and not place.is_dir():
        return prepared
    if is_begun(place):
        return prepared
    try:
        with StopRequest() as stop:
            prepared.patience = Patience(partial(bool, stop))
            small = is_builtin(cfg.model.name) and cfg.run.keep_checkpoints < FEW_CHECKPOINTS
            for subject, check in CHECKS.items():
                if small and subject in OF_SIZE:
                    continue
                with suppress(Unknown):
                    check(cfg, prepared)
                if stop:
                    raise Interrupted(
                        f"stopped by {stop.requested} before the run began; nothing was written"
                    )
    except BaseException:
        prepared.close()
        raise
    prepared.assembly = None  # the run builds its own, and pixels that were looked at take memory
    return prepared
