"""Conditions under which a field is read, which the lines of fields name, each under the sentence
that a user reads where it does not hold.

A condition has three verdicts: it holds, it does not, or (None) that cannot be told yet; then a
field is read where it is set. Of several that do not hold the first one here is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from oxrl.config.field import COMPARING, SAMPLING, Condition
from oxrl.entry_points import is_ours
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.folder import model_config, vision_family
from oxrl.tables.cells import GIVEN_ROWS, TEACHER, TEACHER_TOP
from oxrl.tables.numbers import GKD_LAMBDA, KL_COEFF
from oxrl.tables.policy import ROWS
from oxrl.tables.user_code import REWARD

if TYPE_CHECKING:
    from oxrl.config.schema import Config

C = TypeVar("C", bound=Condition)

SHARING = "train.share_prefix"
CODE = "code"
JUDGE = "judge"
# By condition, in the order of this file.
SENTENCES: dict[Condition, str] = {}


def otherwise(sentence: str) -> Callable[[C], C]:
    """Say what is wrong where the condition below does not hold.

    Args:
        sentence: goes on after the name of a field; may name values of `cfg` in braces.
    """

    def keep(condition: C) -> C:
        SENTENCES[condition] = sentence
        return condition

    return keep


@otherwise("has no effect without data.eval; remove it, or give held-out rows in data.eval")
def evaluates(cfg: Config) -> bool:
    """There are held-out rows."""
    return cfg.data.eval is not None


@otherwise("is read where model.name is a name on the hub; this one is on disk: remove it")
def on_the_hub(cfg: Config) -> bool:
    """The model is neither built in nor in a folder here."""
    return not (is_builtin(cfg.model.name) or Path(cfg.model.name).is_dir())


@otherwise("is read where the model reads images; this one reads text alone: remove it")
def reads_images(cfg: Config) -> bool | None:
    """The model has a vision tower; None of one on the hub that is not here yet: a run that has
    fetched it finds out.
    """
    name = cfg.model.name
    if vision_family(name) is not None:
        return True
    is_here = is_builtin(name) or model_config(name) is not None
    return False if is_here else None


@otherwise("is read where samples may lag behind, rollout.max_staleness; set that, or remove it")
def samples_ahead(cfg: Config) -> bool:
    """Sampling goes on while a batch trains."""
    return cfg.rollout.max_staleness > 0


@otherwise("is read by rollout.schedule logical; of free the clock decides: remove one of the two")
def counts_rounds(cfg: Config) -> bool:
    """A batch trains for a number of decode rounds."""
    return cfg.rollout.schedule == "logical"


# --- Episodes and actions.
@otherwise("is read with an environment, environment.name; set that, or remove it")
def has_environment(cfg: Config) -> bool:
    """Something answers the policy in episodes."""
    return bool(cfg.environment.name)


@otherwise("is read where turns see earlier turns, and rollout.context is last: remove it")
def reads_history(cfg: Config) -> bool:
    """Turns of an episode read earlier ones."""
    return cfg.rollout.context not in ("last", "window: 1")


@otherwise("is read where turns are actions: action.choices or action.size; remove it")
def has_actions(cfg: Config) -> bool:
    """Turns are actions, not text."""
    return cfg.action.exists


@otherwise("is read of actions that are numbers, action.size; these are choices: remove it")
def has_number_actions(cfg: Config) -> bool:
    """Actions, if there are any, are numbers."""
    return not cfg.action.names


@otherwise("is read of action.code bins, and this is fast: remove it")
def codes_bins(cfg: Config) -> bool:
    """A token stands for a bin."""
    return cfg.action.code == "bins"


@otherwise("is read of action.code fast, and this is bins: remove it")
def codes_fast(cfg: Config) -> bool:
    """A token stands for a piece of a chunk's transform."""
    return cfg.action.code == "fast"


# --- Rewards.
@otherwise(
    "is read by supervised fine-tuning whose evaluations generate answers: set reward.name and "
    "data.eval, or remove it"
)
def answers_prompts(cfg: Config) -> bool:
    """Prompts are answered: by every recipe that samples, by supervised runs in evaluations."""
    return cfg.recipe != "supervised" or generates_answers(cfg)


@otherwise("is read with a reward, reward.name; set that, or remove it")
def has_reward(cfg: Config) -> bool:
    """A reward scores; an environment may do without one."""
    return cfg.reward.exists or not cfg.environment.name


@otherwise("is read by reward.name: code; set that, or remove it")
def runs_code(cfg: Config) -> bool:
    """The reward `code` judges programs."""
    return cfg.recipe not in SAMPLING or CODE in cfg.reward.names


@otherwise("is read where a reward is the folder of a reward model; remove it")
def has_reward_model(cfg: Config) -> bool:
    """A trained model scores."""
    return any(map(is_model_folder, cfg.reward.names))


@otherwise("is read where it holds parts, PART: {{name: ...}}, and without reward.name; remove it")
def has_parts(cfg: Config) -> bool:
    """Several rewards are summed."""
    return bool(cfg.reward.parts)


@otherwise("is not read: reward.parts say what scores; remove it")
def has_one_reward(cfg: Config) -> bool:
    """No parts say what scores."""
    return bool(cfg.reward.name) or not cfg.reward.parts


@otherwise("is not read: each of reward.parts has options of its own; remove it here")
def shares_options(cfg: Config) -> bool:
    """No parts have options of their own."""
    return not cfg.reward.parts


@otherwise("is not read: each of reward.parts has timeout_s of its own; remove it here")
def shares_timeout(cfg: Config) -> bool:
    """Some part is as patient as all rewards are."""
    parts = cfg.reward.parts.values()
    return not parts or any(part.timeout_s is None for part in parts)


@otherwise("is not read: each of reward.parts has workers of its own; remove it here")
def shares_workers(cfg: Config) -> bool:
    """Some part has as many workers as all rewards have."""
    parts = cfg.reward.parts.values()
    return not parts or any(part.workers is None for part in parts)


# --- What is trained, and by what.
@otherwise("is read with lora.rank above 0, the rank of the adapters; set that, or remove it")
def has_adapter(cfg: Config) -> bool:
    """Adapters learn, on a model that does not."""
    return cfg.lora.rank > 0


@otherwise(
    "is read with lora.rank where samplers have weights of their own (train.backend deepspeed or "
    "fsdp, inference_engine.actors or processes, or inference_engine.name: vllm): remove it"
)
def sends_adapters(cfg: Config) -> bool:
    """Adapters that learn go to samplers with weights of their own."""
    apart = cfg.train.engine.several_ranks or cfg.samplers > 0
    samples = cfg.recipe == "rl" or generates_answers(cfg)
    return samples and apart and cfg.lora.rank > 0


@otherwise("is read with train.backend: deepspeed; this run's is {cfg.train.backend}: remove it")
def uses_deepspeed(cfg: Config) -> bool:
    """DeepSpeed trains."""
    return cfg.train.backend == "deepspeed"


@otherwise("is read with train.backend: fsdp; this run's is {cfg.train.backend}: remove it")
def uses_fsdp(cfg: Config) -> bool:
    """FSDP2 trains."""
    return cfg.train.backend == "fsdp"


def has_reference_model(cfg: Config) -> bool:
    """A frozen or following copy of the policy is held beside it: a table or a switched-off adapter
    is none.
    """
    row = cfg.train.row
    if row.recipe == "preference":
        return row.moves_reference
    return takes_kl(cfg) and not cfg.lora.rank


@otherwise("is read by rows with a teacher, and {cfg.train.alg_name} has none: remove it")
def has_teacher(cfg: Config) -> bool:
    """Other models, or the policy under another prompt, score what is sampled."""
    return cfg.train.row.has(TEACHER) or cfg.train.row.has(TEACHER_TOP)


@otherwise("is read by train.alg_name: gkd with train.gkd_lambda below 1: remove it")
def learns_given_rows(cfg: Config) -> bool:
    """Some rows of a step are given ones."""
    return cfg.train.row.has(GIVEN_ROWS) and cfg.train.value(GKD_LAMBDA) < 1


@otherwise(
    "is read where there is a reference or a teacher on the engine that trains; "
    "{cfg.train.alg_name} as configured has none: remove it"
)
def has_answering_model(cfg: Config) -> bool:
    """A model that is not trained is held beside the policy."""
    teachers = cfg.model.teachers.values() if has_teacher(cfg) else ()
    return has_reference_model(cfg) or any(teacher.own_weights for teacher in teachers)


def takes_kl(cfg: Config) -> bool:
    """There is a reference: its log-probabilities reach the loss or the reward."""
    return cfg.train.row.kl != "none" and cfg.train.value(KL_COEFF) > 0


@otherwise(
    "is read with a policy loss of your own, train.loss: path.py:function; set that, or remove it"
)
def has_own_loss(cfg: Config) -> bool:
    """The policy loss, where there is one, is a function of the user's."""
    return cfg.recipe != "rl" or cfg.train.row.has_own_loss


# --- Samplers and actors.
@otherwise("is read with inference_engine.name: vllm; set that, or remove it")
def uses_vllm(cfg: Config) -> bool:
    """The vLLM engine samples."""
    return cfg.inference_engine.name == "vllm"


@otherwise(
    "is read where samplers have weights of their own (inference_engine.actors or processes, or "
    "inference_engine.name: vllm): remove it"
)
def has_own_samplers(cfg: Config) -> bool:
    """Weights are sent to who samples."""
    return cfg.samplers > 0


NO_ACTORS = (
    "is read by reinforcement learning with Ray actors (train.backend deepspeed or fsdp: training "
    "actors; inference_engine.actors: rollout actors; reward.actors: reward models; the placement "
    "needs the first two): remove it"
)


@otherwise(NO_ACTORS)
def trains_in_actors(cfg: Config) -> bool:
    """Ranks of reinforcement learning are Ray actors."""
    return cfg.recipe == "rl" and cfg.train.engine.several_ranks


@otherwise(NO_ACTORS)
def samples_in_actors(cfg: Config) -> bool:
    """Ray actors sample."""
    return cfg.recipe == "rl" and cfg.inference_engine.actors > 0


@otherwise(NO_ACTORS)
def has_ray_actors(cfg: Config) -> bool:
    """Ray actors train, sample or score."""
    scores = cfg.recipe == "rl" and cfg.reward.actors > 0
    return trains_in_actors(cfg) or samples_in_actors(cfg) or scores


@otherwise(NO_ACTORS)
def joins_a_cluster(cfg: Config) -> bool:
    """Ray runs already, somewhere."""
    return cfg.run.ray_address is not None


def is_model_folder(reward: str) -> bool:
    """True if a reward of this name is a trained model."""
    # A name of oxRL's is no folder, whatever else lies beside the run.
    return reward != "" and not is_ours(REWARD, reward) and Path(reward).is_dir()


def generates_answers(cfg: Config) -> bool:
    """True if the evaluations of a supervised run answer prompts."""
    return cfg.recipe == "supervised" and cfg.reward.exists and evaluates(cfg)


# --- A prompt that is read once.
def sharing_is_read(cfg: Config) -> bool:
    """True if the recipe has rows of one prompt."""
    return cfg.recipe in COMPARING


def open_choice(cfg: Config) -> bool:
    """True if there is anything to choose: another recipe does not have the field."""
    return sharing_is_read(cfg) and cfg.train.share_prefix == "auto"


def obstacles(cfg: Config) -> Iterator[tuple[str, str, str]]:
    """Attention is PyTorch's, the engine was compared with plain rows, the model reads text.

    Yields:
        Each reason why prompts cannot be read once, what else than giving it up would help, and the
        field that says so.
    """
    if cfg.model.attention not in ("auto", "sdpa"):
        yield (
            f"needs model.attention sdpa, and it is {cfg.model.attention}",
            ", or the attention to auto",
            "model.attention",
        )
    if cfg.train.backend == "deepspeed":
        yield (
            "was not verified against unshared rows on DeepSpeed",
            ", or train.backend to local or fsdp",
            "train.backend",
        )
    if vision_family(cfg.model.name) is not None:
        yield "does not work with models that see images", "", "model.name"
    if cfg.recipe == "rl":
        return
    if cfg.train.backend != "local":
        yield (
            "was not verified against unshared rows of pairs on several ranks",
            ", or train.backend to local",
            "train.backend",
        )
    if ROWS.methods[cfg.train.alg_name].unpaired:
        yield "needs pairs, and this method reads single completions", "", SHARING
