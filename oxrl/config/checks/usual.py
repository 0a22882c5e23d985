"""The usual checks, which every run of reinforcement learning is held to: its model and files of
rows are there, its rewards can be found, prompts and responses fit, and samples can be learned
from. And notices of settings that are allowed and do less than they seem to.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from oxrl.config.conditions import CODE, JUDGE, is_model_folder
from oxrl.config.schema import Config
from oxrl.config.sections.reward import CODE_OPTIONS, AskedReward, asked_rewards
from oxrl.config.source import Problem, Problems, Source, at
from oxrl.entry_points import is_ours
from oxrl.errors import DataError, UnreachableError, did_you_mean, required, why_no_file
from oxrl.modelfiles.builtin import BUILTIN_DIMS, is_builtin
from oxrl.modelfiles.dims import model_context, why_unsupported
from oxrl.modelfiles.folder import ADAPTER_CONFIG, REFERENCE_FILE, folder_problems, is_reward_model
from oxrl.modelfiles.hub import SCHEME, SUFFIXES, locate
from oxrl.rewards.builtin import find_builtin, option_problem
from oxrl.tables.cells import CRITIC, GROUPS
from oxrl.tables.numbers import CRITIC_WARMUP_STEPS, KL_COEFF, NUMBERS, REFERENCE_SYNC_STEPS
from oxrl.tables.user_code import REWARD

# How many times its default a number of the algorithm may be without a word.
FAR_OUT = 1e4


# --- The model and files.
def check_model(cfg: Config) -> Problems:
    """The model is there, as far as that can be seen without the network."""
    name = cfg.model.name
    for rule in named_model_problems(name):
        yield at("model.name", rule)
    limit = cfg.model.max_length
    context = model_context(name)
    if limit is not None and context is not None and limit > context:
        yield at(
            "model.max_length",
            f"exceeds the model's context {context}; lower it",
            "model.name",
        )


def named_model_problems(name: str) -> list[str]:
    """Find what is wrong with the name of a model, as far as that can be seen here.

    Args:
        name: of a causal language model: built in, of a folder, or on the hub.
    """
    found: list[str] = []
    folder = Path(name)
    if is_builtin(name):
        if name not in BUILTIN_DIMS:
            names = ", ".join(sorted(BUILTIN_DIMS))
            found.append(f"must be one of {names}{did_you_mean(name, BUILTIN_DIMS)}")
    elif name.startswith((".", "/", "~")):
        files = ("config.json", ADAPTER_CONFIG, REFERENCE_FILE)
        if not any((folder / file).is_file() for file in files):
            state = "has no config.json" if folder.is_dir() else "is no folder"
            found.append(
                f"{state}; give a folder in Hugging Face format, a hub name or builtin:tiny"
            )
    unsupported = why_unsupported(name)
    if unsupported is not None:
        found.append(unsupported)
    is_reference = (folder / REFERENCE_FILE).is_file()
    if folder.is_dir() and (is_reference or any(folder.glob("[!.]*.safetensors*"))):
        damages = folder_problems(folder)
        if damages:
            found.append("; ".join(damages))
    return found


def check_training_files(cfg: Config) -> Problems:
    """Files of `data.train` exist and can be read."""
    several = not isinstance(cfg.data.train, str)
    for file in cfg.data.train_files:
        yield from _file_problems(cfg, f"data.train.{file}" if several else "data.train", file)


def check_evaluation_file(cfg: Config) -> Problems:
    """The files of `data.eval` and `data.given_rows` exist and can be read."""
    for name in ("eval", "given_rows"):
        file = getattr(cfg.data, name)
        if file is not None:
            yield from _file_problems(cfg, f"data.{name}", file)


def _file_problems(cfg: Config, path: str, file: str) -> Problems:
    """A data file exists, here or on the hub, and has a format that can be read."""
    if file.startswith(SCHEME):
        try:
            locate(file, fetch=False)
        except UnreachableError:
            pass  # it may be there for the run: `oxrl plan` says "unknown", the run fetches or ends
        except DataError as error:
            yield Problem(path, str(error), file)
    elif Path(file).suffix not in SUFFIXES:
        yield Problem(
            path, f"must end in {' or '.join(SUFFIXES)}; `oxrl prepare` writes such files", file
        )
    elif not Path(file).is_file():
        yield Problem(path, why_no_file(file), file)
    if cfg.data.stream and file.endswith(".parquet"):
        yield Problem(
            path, "must end in .jsonl for data.stream, which reads rows by their place", file
        )


# --- The reward.
def check_reward(cfg: Config) -> Problems:
    """Every reward is built in, or a function that its file defines; no code of users is imported.

    An environment may be all that rewards.
    """
    reward = cfg.reward
    if reward.name and reward.parts:
        rule = "say what scores, and so does reward.name: keep one of the two, and remove it here"
        parts = {name: part.model_dump(exclude_unset=True) for name, part in reward.parts.items()}
        yield Problem("reward.parts", rule, parts, also=("reward.name",))
        return
    needed = not cfg.has_no_reward or cfg.data.eval is not None
    if needed and not reward.exists and not cfg.environment.name:
        yield Problem(
            "reward.name",
            "is required: what scores a response; one of math, exact or path.py:function",
            also=("reward.parts",),
        )
        return
    for asked in asked_rewards(reward):
        yield from _check_one(cfg, asked)
    for taken in CODE_OPTIONS:
        if reward.name == CODE and taken in reward.options:
            yield at("reward.options", f"{taken} is a field of its own: reward.{taken}")


def _check_one(cfg: Config, asked: AskedReward) -> Problems:
    """One reward can be found and called with its options, in the time that it has."""
    name = asked.name
    field = f"{asked.field}.name"
    if not name:
        yield Problem(field, "is empty: write a built-in reward or path.py:function", name)
        return
    if not (is_ours(REWARD, name) or is_reward_model(name)):
        from oxrl.usercode.locate import place_of  # what oxRL has is there

        try:
            place_of(REWARD, name)
        except ValueError as error:
            yield Problem(field, str(error), name)
            return
    problem = option_problem(name, asked.options)
    if problem:
        given = cfg.reward.parts[asked.part].options if asked.part else cfg.reward.options
        # Of a judge names alone: a value may be a key in the wrong place.
        shown = list(given) if name == JUDGE else given
        yield Problem(f"{asked.field}.options", problem, shown, also=(field,))
    elif name in (CODE, JUDGE) or is_model_folder(asked.name):
        yield from _check_kind(cfg, asked)


def _check_kind(cfg: Config, asked: AskedReward) -> Problems:
    """The needs of programs that are run, of judges and of trained models."""
    if asked.name == CODE:
        yield from _check_times(asked)
    elif asked.name == JUDGE:
        if asked.options.get("compare") == "group":
            yield from _check_groups(cfg, asked)
    elif cfg.reward.actors or not cfg.train.engine.several_ranks:
        yield from _check_copies(asked)


def _check_copies(asked: AskedReward) -> Problems:
    """A reward model has no workers: it is there once, or as often as `reward.actors` says."""
    if asked.workers > 1:
        yield Problem(
            f"{asked.field}.workers",
            (
                "must be 1: a reward model is loaded once, on the device of the run, and reads "
                "train.micro_batch_tokens tokens at a time; or in each of reward.actors: remove it"
            ),
            asked.workers,
            also=(f"{asked.field}.name",),
        )


def _check_groups(cfg: Config, asked: AskedReward) -> Problems:
    """A judge that compares the responses of a group gets groups of two and more."""
    fields = {
        "rollout.n_samples": cfg.recipe != "supervised",
        "rollout.eval_samples": cfg.data.eval is not None,
    }
    for field, is_read in fields.items():
        if is_read and attrgetter(field)(cfg) < 2:
            yield at(
                field,
                "must be 2 or more: the judge compares responses to one prompt with each other",
                f"{asked.field}.options",
            )


def _check_times(asked: AskedReward) -> Problems:
    """A program's own limit ends it before its worker is killed: the first is a score."""
    wait_s = required(find_builtin(CODE)).wait_s
    needed = float(str(asked.options["program_s"])) + wait_s + 1.0
    if asked.timeout_s < needed:
        yield Problem(
            f"{asked.field}.timeout_s",
            f"must be {needed:g} or more: reward.program_s, {wait_s:g} s of waiting, 1 s to judge",
            asked.timeout_s,
            also=("reward.program_s",),
        )


# --- Samples.
def check_context(cfg: Config) -> Problems:
    """Prompt and response fit into the model's context."""
    limit = cfg.model.max_length
    context = cfg.model.context_length
    if context is None:
        return
    bound = f"the model's context {context}" if limit is None else f"model.max_length {limit}"
    prompt = cfg.data.max_prompt_tokens
    response = cfg.rollout.max_tokens
    if prompt is not None and prompt + response > context:
        rule = (
            f"{response} + data.max_prompt_tokens {prompt} = {prompt + response} "
            f"exceeds {bound}; lower one"
        )
    elif response >= context:
        rule = f"leaves no room for a prompt in {bound}; set it below {context}"
    else:
        return
    yield at("rollout.max_tokens", rule, "model.max_length", "model.name", "data.max_prompt_tokens")


def check_sampling(cfg: Config) -> Problems:
    """Sampling that training can learn from."""
    rollout = cfg.rollout
    if rollout.temperature == 0:
        rule = "training cannot sample greedily"
        if cfg.train.row.compares_samples:
            rule += ": all samples of a prompt are identical and every advantage is 0"
        rule += "; set it above 0 (rollout.eval_temperature may be 0)"
        yield at("rollout.temperature", rule, "train.advantage")
    if rollout.cuts:
        from oxrl.config.checks.kept_sets import kept_set_problems  # most runs cut nothing

        yield from kept_set_problems(cfg)


def check_groups(cfg: Config) -> Problems:
    """Samples of one prompt that can be compared, where the row compares them."""
    if cfg.train.row.has(GROUPS):
        yield from several_samples(cfg, cfg.train.row.advantage)


def several_samples(cfg: Config, comparer: str) -> Problems:
    """Groups of two samples or more, for what compares them."""
    if cfg.rollout.n_samples < 2:
        yield at(
            "rollout.n_samples",
            f"{comparer} compares the samples of one prompt: set it to 2 or more",
            "train.advantage",
        )


# --- Notices.
def notices(cfg: Config, source: Source) -> Iterator[str]:
    """Settings that are allowed and do less than they seem to, or something else."""
    yield from _number_notices(cfg, source)
    train = cfg.train
    row = train.row
    steps = cfg.run.steps
    if train.kl is not None and row.kl != "none" and train.value(KL_COEFF) == 0:
        yield f"train.kl = {row.kl} has no effect while train.kl_coeff is 0"
    if train.warmup_steps >= steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps} is not over when the run ends at "
            f"run.steps = {steps}"
        )
    if row.has(CRITIC) and train.value(CRITIC_WARMUP_STEPS) >= steps:
        yield (
            f"train.critic_warmup_steps = {train.value(CRITIC_WARMUP_STEPS)} leaves none of "
            f"{steps} steps to the policy"
        )
    if REFERENCE_SYNC_STEPS.key in row.defaults:
        every = train.value(REFERENCE_SYNC_STEPS)
        if every > steps:
            yield f"train.reference_sync_steps = {every} never happens in run.steps = {steps}"
    if train.lr == 0:
        yield "train.lr = 0 trains nothing: the policy stays what it is"
    if cfg.data.eval in cfg.data.train_files:
        yield f"data.eval is trained on: {cfg.data.eval} is in data.train too"
    if cfg.run.device == "cpu" and cfg.model.dtype == "bfloat16":
        yield "model.dtype = bfloat16 on run.device = cpu is slower and less exact than float32"


def _number_notices(cfg: Config, source: Source) -> Iterator[str]:
    """Say what numbers that were written down do otherwise than they seem to."""
    signs: list[str] = []
    for path, value in source.values.items():
        if path in ("train.clip_low", "train.clip_high") and float(str(value)) < 0:
            signs.append(
                f"{path} = {value} is stored as {attrgetter(path)(cfg)} ({source.place(path)})"
            )
    if signs:
        yield "clip bounds are magnitudes, the sign is dropped: " + "; ".join(signs)
    # So large that what they bound or weigh is hardly there.
    for name in sorted(cfg.train.row.defaults):
        number = NUMBERS[name]
        value = cfg.train.value(number)
        if isinstance(value, int | str | None):
            continue
        default = number.default
        usual = abs(default) if isinstance(default, int | float) and default else 1.0
        if abs(value) > FAR_OUT * usual:
            yield (
                f"train.{name} = {value:g} is {abs(value) / usual:.0e} times what is usual "
                f"({usual:g}): {number.meaning}"
            )
