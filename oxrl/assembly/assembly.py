"""From a config to the objects a recipe works with. Below this file nothing reads a config."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.assembly.micro_batch_rules import by_rule, micro_batch_tokens
from oxrl.config import Config
from oxrl.config.reward_options import (
    JUDGE,
    AskedReward,
    asked_rewards,
    runs_beside_policy,
    runs_in_actors,
)
from oxrl.data.dataset import ReadOptions
from oxrl.data.prompts import PromptDataset
from oxrl.engines.determinism import use_deterministic_kernels
from oxrl.engines.sample.base import RolloutEngine
from oxrl.engines.sample.choice import attends_to_everything, module_sampler
from oxrl.engines.sample.module_sampler import ModuleSampler
from oxrl.engines.train.base import Part as PartOfWeights
from oxrl.engines.train.base import TrainEngine
from oxrl.engines.train.micro_batches import PRICES
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.engines.transport.base import WeightTransport
from oxrl.errors import ConfigError
from oxrl.modelfiles.vision import PROCESSOR, has_image_processor, vision_family
from oxrl.models.load import LoadOptions, load_critic, load_policy, load_tokenizer
from oxrl.models.network import ValueModel, fix_rotations
from oxrl.models.vision_family import banned_tokens
from oxrl.plan.needs import model_bytes
from oxrl.rewards.pool_choice import reward_pool
from oxrl.rewards.pools import ScoringPool, SinglePool
from oxrl.runs.ranks import ALONE, Ranks, launched_world
from oxrl.runs.waiting import Patience, StopAsked
from oxrl.seeds import stable_seed
from oxrl.tables.cells import CRITIC
from oxrl.tables.numbers import CRITIC_LR, KL_COEFF
from oxrl.types import Sampling, TokenIds

if TYPE_CHECKING:
    from oxrl.data.actions import ActionHead
    from oxrl.data.image_store import ImageStore
    from oxrl.engines.ray.cluster import Cluster
    from oxrl.engines.sample.workers import RolloutWorkers
    from oxrl.models.four_bit import FourBit
    from oxrl.models.lora import AdapterOptions
    from oxrl.rewards.model_options import StepsRule
    from oxrl.rewards.reward_model import RewardModel

log = logging.getLogger(__name__)
# Takes what is to be called at the end.
Closing = Callable[[Callable[[], None]], object]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Limits(NamedTuple):
    """What a model and its tokenizer bound.

    longest: prompt, in tokens. stop_token_ids: end a response. context: tokens that the model
    reads. None: unlimited. never: tokens that stand for images.
    """

    longest: int | None
    stop_token_ids: TokenIds
    context: int | None
    never: TokenIds = ()


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Who trains and who samples. `shared`: both use one copy of the policy's weights; `transport`
    moves them where this process is neither.
    """

    trainers: Mapping[str, TrainEngine]
    sampler: RolloutEngine
    limits: Limits
    shared: bool
    transport: WeightTransport | None = None


def choose_device(cfg: Config) -> torch.device:
    """`run.device` as a torch device; `run.threads` and `run.deterministic` applied.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if cfg.run.threads is not None:
        torch.set_num_threads(cfg.run.threads)
    if cfg.run.deterministic:
        use_deterministic_kernels()
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.run.device == "cuda" and best == "cpu":
        raise ConfigError(
            "run.device is cuda but PyTorch sees no CUDA device; use run.device=cpu or auto"
        )
    return torch.device(best if cfg.run.device == "auto" else cfg.run.device)


def device_type(cfg: Config) -> str:
    """The device that was asked for, "cpu" or "cuda", whether or not it is here.

    The driver of a cluster may have no GPU while its training ranks have some.
    """
    return choose_device(cfg).type if cfg.run.device == "auto" else cfg.run.device


def tokens_at_once(cfg: Config) -> int:
    """`train.micro_batch_tokens` as a number, also where no run has settled it."""
    return micro_batch_tokens(cfg, on_cpu=device_type(cfg) == "cpu")


def price_of_a_cut(cfg: Config) -> int | None:
    """What a micro-batch costs beside its tokens, in tokens; None where each is to be filled.

    A number in the configuration is a promise of how rows are cut, which a run that resumes keeps.
    """
    return PRICES.get(device_type(cfg)) if by_rule(cfg) else None


def build_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    return load_tokenizer(
        cfg.model.name,
        chat_template=cfg.model.chat_template,
        trust_remote_code=cfg.model.trust_remote_code,
        revision=cfg.model.revision,
    )


def reads_images(cfg: Config) -> bool:
    """Whether this run may show images to its model."""
    name = cfg.model.name
    return vision_family(name) is not None and has_image_processor(name)


def build_images(cfg: Config) -> ImageStore | None:
    """The images of a run; None where its model is shown none."""
    if not reads_images(cfg):
        return None
    # A run of text alone pays nothing for images.
    from oxrl.assembly.images import image_store

    return image_store(cfg)


def build_actions(cfg: Config) -> ActionHead | None:
    """The actions that turns are; None where they are text."""
    if not cfg.action.exists:
        return None
    from oxrl.assembly.actions import action_head  # most policies write text

    return action_head(cfg, build_tokenizer(cfg))


def sampled_alone(cfg: Config) -> frozenset[int]:
    """The tokens that share all probability, where turns are actions; else none."""
    actions = build_actions(cfg)
    return frozenset() if actions is None else frozenset(actions.support)


def _why_no_images(cfg: Config) -> str:
    """Why rows with images are refused, after "images, which"."""
    if vision_family(cfg.model.name) is None:
        return "models here do not see"
    return f"the model cannot be shown: its files lack {PROCESSOR}"


def row_options(
    cfg: Config, held_out: bool, max_tokens: int | None = None, *, unpaired: bool = False
) -> ReadOptions:
    """How the rows of a data file, or of data.eval, are read."""
    return ReadOptions(
        max_tokens=max_tokens or cfg.model.max_length,
        overlong=cfg.data.overlong,
        limit=cfg.data.eval_rows if held_out else None,
        stream=cfg.data.stream,
        unpaired=unpaired,
        columns=cfg.data.columns,
        images=build_images(cfg),
        no_images=_why_no_images(cfg),
        actions=build_actions(cfg),
    )


def load_model(
    cfg: Config,
    device: torch.device | None = None,
    load: Callable[..., Any] = load_policy,
    *,
    later: bool = False,
    four_bit: FourBit = "no",
) -> PreTrainedModel:
    """The model as it is on disk, or with random weights of `run.seed`; on the run's device, or on
    another.
    """
    model = load(
        cfg.model.name,
        LoadOptions(
            dtype=DTYPES[cfg.model.dtype],
            attention=cfg.model.attention,
            device=choose_device(cfg) if device is None else device,
            seed=stable_seed("model", cfg.run.seed),
            trust_remote_code=cfg.model.trust_remote_code,
            revision=cfg.model.revision,
            later=later,
            four_bit=four_bit,
        ),
    )
    fix_rotations(model, cfg.model.max_length)
    host = getattr(model, "decoder", model)
    computes = getattr(host.config, "_attn_implementation", None)
    log.info("%s: attention is computed by %s (model.attention)", cfg.model.name, computes)
    actions = build_actions(cfg)
    if actions is not None and load is load_policy:
        from oxrl.models.token_mask import sample_only

        sample_only(model, actions.support)
    return model


def cuts_weights(cfg: Config, *, trained: bool = True) -> bool:
    """Whether the training engine cuts every weight up over its ranks.

    Each rank then reads its own pieces of the model's files.
    """
    engine = cfg.train.engine
    section = engine.settings if trained else engine.reference_settings
    stage = engine.zero_stage
    if stage is None and section is not None:
        stage = getattr(cfg, section).zero_stage
    return stage == 3


def load_policy_to_train(
    cfg: Config, device: torch.device | None = None, *, later: bool = False
) -> PreTrainedModel:
    """The policy, with the adapter that `lora` asks for, and without what `model.freeze` names.

    Args:
        device: None: the run's.
        later: leave its weights to the engine that it is for.
    """
    model = load_model(cfg, device, later=later, four_bit=four_bit_of(cfg))
    if cfg.model.freeze != "none":
        from oxrl.models.vision_parts import freeze

        freeze(model, cfg.model.freeze)
    return _adapted(cfg, model)


def load_critic_to_train(cfg: Config) -> ValueModel:
    """A value model on the policy's backbone, with the adapter that `lora` asks for."""
    later = cuts_weights(cfg)
    critic: Any = load_model(cfg, None, load_critic, later=later, four_bit=four_bit_of(cfg))
    _adapted(cfg, critic.decoder)
    return critic


def four_bit_of(cfg: Config) -> FourBit:
    """How linear layers under an adapter that is trained are held."""
    return "held" if cfg.model.load_in_4bit else "no"


def _adapted(cfg: Config, model: PreTrainedModel) -> PreTrainedModel:
    if cfg.lora.rank:
        from oxrl.models.lora import add_adapter  # most runs train all weights

        add_adapter(
            model,
            adapter_options(cfg),
            base=cfg.model.name,
            revision=cfg.model.revision,
            seed=stable_seed("adapter", cfg.run.seed),
        )
    return model


def adapter_options(cfg: Config) -> AdapterOptions:
    """The adapter that `lora` asks for."""
    from oxrl.models.lora import AdapterOptions  # as above

    return AdapterOptions(**cfg.lora.model_dump(exclude={"delivery"}))


def new_model_of(cfg: Config) -> Callable[[], PreTrainedModel]:
    """What makes a model like the policy, on the CPU, wherever it is called."""
    load = load_policy_to_train if part_sent(cfg) == "adapter" else load_model
    return partial(load, cfg, torch.device("cpu"))


def part_sent(cfg: Config) -> PartOfWeights:
    """What samplers with weights of their own are sent."""
    return cfg.lora.delivery if cfg.lora.rank else "all"


def training_ranks(cfg: Config) -> AbstractContextManager[Ranks]:
    """This process's place among `run.training_gpus` ranks; joins the others that the launcher
    started.

    Raises:
        ConfigError: the launcher started another number of processes than the configuration says.
    """
    world, asked = launched_world(), cfg.run.training_gpus
    if cfg.recipe == "rl":
        if world > 1:
            raise ConfigError(
                "start reinforcement learning once, not with torchrun: its ranks are Ray actors"
            )
        return nullcontext(ALONE)
    if world != asked:
        hint = (
            "set run.training_gpus, or start with"
            if cfg.train.backend != "local"
            else "train.backend is local:"
        )
        raise ConfigError(
            f"run.training_gpus is {asked} and the launcher started {world} processes "
            f"(WORLD_SIZE); {hint} "
            f"torchrun --nproc-per-node {asked} main_sl.py --config ..."
        )
    if cfg.train.backend == "local":
        return nullcontext(ALONE)
    from oxrl.engines.train.joined_ranks import joined_ranks  # several processes

    return joined_ranks(choose_device(cfg), cfg.run.waits)


def build_trainer(
    cfg: Config,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    lr: float | None = None,
    temperature: float = 1.0,
    ranks: Ranks = ALONE,
    trained: bool = True,
) -> Trainer:
    """A training engine of `train.backend` on this process's device, with the optimizer of
    `train.*`.

    DeepSpeed keeps no optimizer for a model that is not `trained`, and always cuts its weights up
    over the ranks.

    Args:
        tokenizer: saved beside the weights, if there is one.
        lr: instead of `train.lr`.
    """
    train = cfg.train
    options = TrainerOptions(
        lr=train.lr if lr is None else lr,
        lr_schedule=train.lr_schedule,
        warmup_steps=train.warmup_steps,
        total_steps=cfg.run.steps,
        optimizer=train.optimizer,
        master_weights=train.master_weights,
        seed=cfg.run.seed,
        weight_decay=train.weight_decay,
        decay=train.decay,
        adam_betas=(train.adam_beta1, train.adam_beta2),
        adam_eps=train.adam_eps,
        rates=_rates(cfg, model) if lr is None else {},
        max_grad_norm=train.max_grad_norm,
        micro_batch_tokens=tokens_at_once(cfg),
        price=price_of_a_cut(cfg),
        share_prefix=train.share_prefix is True,
        temperature=temperature,
        gradient_checkpointing=cfg.model.gradient_checkpointing,
        offload_activations=cfg.model.offload_activations,
        trained=trained,
        tokenizer=tokenizer,
        image_processor=_image_processor(cfg) if tokenizer is not None else None,
        actions=build_actions(cfg) if tokenizer is not None else None,
    )
    # Imported where it is chosen: PyTorch's sharding takes a second, DeepSpeed is an extra.
    engine = train.engine
    section = engine.settings if trained else engine.reference_settings
    settings: dict[str, Any] = getattr(cfg, section).model_dump() if section else {}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with ranks.within(cfg.run.waits.of("load", nbytes), "models to be built"):
        trainer: Trainer = engine.load()(model, options, ranks=ranks, **settings)
    if train.share_prefix is True and isinstance(model, PreTrainedModel):
        _check_sharing(cfg, model, trainer)
    return trainer


def _check_sharing(cfg: Config, model: PreTrainedModel, trainer: Trainer) -> None:
    """Make sure that the model may read the prompt of a group once; collective.

    Raises:
        SharingRefused: it may not; says why.
    """
    from oxrl.models.shared_prefix import SharingRefused, check_sharing

    if not attends_to_everything(model.config, cfg.model.max_length):
        raise SharingRefused(
            f"train.share_prefix: not every layer of {type(model).__name__} is known to attend to "
            "all tokens before; set it to false"
        )
    trainer.checked(partial(check_sharing, model))


def _rates(cfg: Config, model: torch.nn.Module) -> dict[str, float]:
    """Weights whose learning rate is another multiple of `train.lr`: those of a vision tower."""
    tower_lr = cfg.train.tower_lr
    if tower_lr is None:
        return {}
    from oxrl.models.vision_parts import part_of

    rate = tower_lr / cfg.train.lr
    parts = part_of(cast(PreTrainedModel, model))
    return {name: rate for name, part in parts.items() if part == "vision"}


def _image_processor(cfg: Config) -> Any:
    """What is saved beside the tokenizer of a model that is shown images; None of others."""
    images = build_images(cfg)
    return None if images is None else images.reader.processor


def build_reference(cfg: Config, *, temperature: float = 1.0, ranks: Ranks = ALONE) -> Trainer:
    """An engine that only answers; with DeepSpeed as `deepspeed_ref` says."""
    model = load_model(cfg, later=cuts_weights(cfg, trained=False))
    return build_trainer(cfg, model, lr=0.0, temperature=temperature, ranks=ranks, trained=False)


def build_trainers(cfg: Config, ranks: Ranks = ALONE) -> dict[str, Trainer]:
    """The models of an RL run that are trained or only read, on this process's device: policy,
    reference, critic.
    """
    shared: dict[str, Any] = {"temperature": cfg.rollout.temperature, "ranks": ranks}
    policy = load_policy_to_train(cfg, later=cuts_weights(cfg))
    trainers = {"policy": build_trainer(cfg, policy, build_tokenizer(cfg), **shared)}
    if cfg.train.row.has(CRITIC):
        trainers["critic"] = build_trainer(
            cfg, load_critic_to_train(cfg), lr=cfg.train.value(CRITIC_LR), ranks=ranks
        )
    if needs_reference(cfg) and not cfg.lora.rank:
        trainers["reference"] = build_reference(cfg, **shared)
    return trainers


def build_sampler(cfg: Config, model: PreTrainedModel | None = None) -> RolloutEngine:
    """The rollout engine of this process; on `model`, or on one of its own."""
    if cfg.inference_engine.name == "vllm":
        from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

        sampling = cfg.inference_engine
        folder = cfg.run.directory
        if not folder.is_dir():  # an evaluation makes none
            folder = Path(gettempdir())
        options = VllmOptions(
            log_file=str(folder / f"vllm_{os.getpid()}.log"),
            dtype=cfg.model.dtype,
            max_rows=sampling.max_rows,
            tensor_parallel=sampling.tensor_parallel,
            gpu_memory_fraction=sampling.gpu_memory_fraction,
            kv_cache_gb=sampling.kv_cache_gb,
            max_model_len=cfg.model.max_length,
            trust_remote_code=cfg.model.trust_remote_code,
            revision=cfg.model.revision,
            batch_invariant=cfg.run.deterministic,
            adapter_scale=adapter_options(cfg).scale if part_sent(cfg) == "adapter" else None,
        )
        return VllmEngine(
            cfg.model.name, options, images=build_images(cfg), only=sampled_alone(cfg)
        )
    if model is None:
        model = load_model(cfg) if part_sent(cfg) == "merged" else load_policy_to_train(cfg)
    return local_sampler(cfg, model, build_tokenizer(cfg))


def hosted_sampler(cfg: Config, closing: Closing) -> RolloutWorkers:
    """The rollout engine of the config in a process of its own on this machine.

    On a GPU, which it shares with this process, it sleeps while it has nothing to sample.

    Args:
        closing: is told what ends the process.
    """
    # Imported where they are chosen: a default run samples in its own process.
    from oxrl.engines.sample.hosted import ThisMachine
    from oxrl.engines.sample.workers import RolloutWorkers

    machine = ThisMachine(cfg.run.threads or os.cpu_count() or 1)
    closing(machine.close)
    shares = device_type(cfg) == "cuda"
    return RolloutWorkers(
        machine,
        [None],
        partial(build_sampler, cfg),
        cfg.run.waits,
        nbytes=model_bytes(cfg),
        before_wake=torch.cuda.empty_cache if shares else None,
    )


def local_sampler(
    cfg: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> ModuleSampler:
    """What samples from a model of this process, as many rows at a time as the config says."""
    return module_sampler(
        model,
        tokenizer,
        max_rows=cfg.inference_engine.max_rows,
        longest=cfg.model.max_length,
        images=build_images(cfg),
    )


def build_rewards(cfg: Config) -> ScoringPool:
    """The pool of the reward, or those of its parts."""
    asked = asked_rewards(cfg.reward)
    if not cfg.reward.parts:
        return _reward_pool(cfg, asked[0])
    from oxrl.rewards.parts import Part, PartsPool  # one reward does without

    parts: dict[str, Part] = {}
    for one in asked:
        pool = _reward_pool(cfg, one)
        parts[one.part] = Part(pool=pool, weight=one.weight, optional=one.optional)
    return PartsPool(parts)


def build_other_reward(cfg: Config, name: str) -> SinglePool:
    """The pool of another reward under the limits of `reward`, to choose between responses by.

    A process reward model chooses by the worst step, Math-Shepherd, arXiv:2312.08935.
    """
    from oxrl.rewards.model_options import STEPS, is_model, kind_of

    by_steps = is_model(name) and kind_of(Path(name)) == "process"
    options = {STEPS: "worst"} if by_steps else {}
    changed = {"name": name, "parts": {}, "options": options}
    reward = cfg.reward.model_copy(update=changed)
    return _reward_pool(cfg, asked_rewards(reward)[0])


def _reward_pool(cfg: Config, asked: AskedReward) -> SinglePool:
    if asked.name == JUDGE:
        from oxrl_graders.judge.pool import JudgePool  # other rewards ask nobody
        from oxrl_graders.judge.record import FILE

        return JudgePool(
            asked.options,
            requests=asked.workers,
            timeout_s=asked.timeout_s,
            record=cfg.run.directory / FILE,
            field=asked.field,
        )
    if runs_in_actors(cfg, asked):
        return _actor_pool(cfg, asked)
    if runs_beside_policy(cfg, asked):
        from oxrl.rewards.model_pool import ModelPool  # other rewards read no model

        return ModelPool(
            asked.name,
            device=choose_device(cfg),
            budget=tokens_at_once(cfg),
            timeout_s=asked.timeout_s,
            field=asked.field,
            steps=steps_rule(asked),
        )
    return reward_pool(
        asked.name,
        workers=asked.workers,
        timeout_s=asked.timeout_s,
        options=asked.options,
        field=asked.field,
    )


def _actor_pool(cfg: Config, asked: AskedReward) -> SinglePool:
    """A reward model in Ray actors."""
    # Ray is an extra.
    from oxrl.assembly.ray_cluster import gpus_per_actor, open_cluster
    from oxrl.engines.ray.reward_models import ModelActorPool

    def gpus(cluster: Cluster) -> int:
        return gpus_per_actor(cfg, cluster.gpus())

    return ModelActorPool(
        asked.name,
        partial(reward_model_of_actor, cfg, asked),
        cluster=partial(open_cluster, cfg),
        actors=cfg.reward.actors,
        gpus=gpus,
        timeout_s=asked.timeout_s,
        field=asked.field,
    )


def reward_model_of_actor(cfg: Config, asked: AskedReward) -> RewardModel:
    """What a reward model's actor builds, on the device that it has."""
    from oxrl.rewards.reward_model import RewardModel

    return RewardModel(
        Path(asked.name),
        device=choose_device(cfg),
        budget=tokens_at_once(cfg),
        steps=steps_rule(asked),
    )


def steps_rule(asked: AskedReward) -> StepsRule:
    """What a process reward model makes of its steps; the config's checks have looked at it."""
    from oxrl.rewards.model_options import DEFAULT_STEPS, STEPS

    return cast("StepsRule", asked.options.get(STEPS, DEFAULT_STEPS))


def start_rewards(
    cfg: Config, stack: ExitStack, stop: StopAsked, pool: ScoringPool | None = None
) -> ScoringPool | None:
    """The reward's pool, proved to load; None where an environment is all that rewards, or nothing
    is scored.

    Args:
        stack: closes it.
        pool: one that is there already.
    """
    if not cfg.reward.exists or cfg.scores_nothing:
        return None
    pool = pool or build_rewards(cfg)
    stack.callback(pool.close)
    pool.start(Patience(stop))
    return pool


def limits_of(trainer: Trainer, cfg: Config) -> Limits:
    """`prompt_limits` of a trainer's model, wherever it is."""
    return prompt_limits(cfg, cast(PreTrainedModel, trainer.model), build_tokenizer(cfg))


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> TokenIds:
    """The tokenizer's end token and whatever else the model's generation config ends on."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    extra = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(sorted({int(tokenizer.eos_token_id), *(int(token) for token in extra)}))  # pyright: ignore


def prompt_limits(
    cfg: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Limits:
    """`data.max_prompt_tokens`, or what `rollout.max_tokens` leaves of the model's context; and the
    stop tokens.

    Raises:
        ConfigError: the two together do not fit the model.
    """
    context = cfg.model.max_length or getattr(
        model.config.get_text_config(), "max_position_embeddings", None
    )
    asked, stop_token_ids = cfg.data.max_prompt_tokens, stop_tokens(tokenizer, model)
    never = banned_tokens(model.config)
    if context is None:
        return Limits(asked, stop_token_ids, None, never)
    room = context - cfg.rollout.max_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ConfigError(
            f"rollout.max_tokens={cfg.rollout.max_tokens} plus data.max_prompt_tokens={asked} do "
            "not fit the model's "
            f"context of {context} tokens; lower one of them"
        )
    return Limits(room if asked is None else asked, stop_token_ids, int(context), never)


def training_sampling(
    cfg: Config, stop_token_ids: TokenIds, temperature: float | None = None
) -> Sampling:
    """What `rollout` says, at another temperature if there is one; training has no top_p or top_k
    (see the checks).
    """
    rollout = cfg.rollout
    actions = build_actions(cfg)
    if actions is not None:
        # A turn has a fixed number of tokens and none that ends it, or one that does.
        stop_token_ids = () if actions.ends_by is None else (actions.ends_by,)
    return Sampling(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop_token_ids=stop_token_ids,
    )


def load_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, longest: int | None, held_out: bool, path: str
) -> PromptDataset:
    return PromptDataset.load(path, tokenizer, row_options(cfg, held_out, longest))


def needs_reference(cfg: Config) -> bool:
    """A reference model is loaded only when its log-probabilities reach the loss or the reward."""
    return cfg.train.row.kl != "none" and cfg.train.value(KL_COEFF) > 0
