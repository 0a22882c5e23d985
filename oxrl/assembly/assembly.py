"""From a configuration to the objects that a run works with, each of which is built once.

An `Assembly` reads a configuration; what it hands out does not. A process that another one starts,
a training rank or a sampler, makes an assembly of its own from the same configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.assembly.micro_batch_rules import by_rule, micro_batch_tokens
from oxrl.config import Config
from oxrl.config.roles import policy_role, roles_of
from oxrl.data.chat import ChatEncoder
from oxrl.data.dataset import ReadOptions
from oxrl.data.prompts import PromptDataset
from oxrl.engines.determinism import use_deterministic_kernels
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.local import attends_to_everything, module_sampler
from oxrl.engines.sample.rows import NOTHING, Recorded, Recording
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.engines.train import Models, TrainEngine
from oxrl.engines.train import Part as PartOfWeights
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.micro_batches import PRICES
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import ConfigError
from oxrl.modelfiles.folder import PROCESSOR, has_image_processor, vision_family
from oxrl.models import self_checks, shared_prefix
from oxrl.models.load import (
    LoadOptions,
    config_of_model,
    load_critic,
    load_policy,
    load_tokenizer,
    named_in_errors,
)
from oxrl.models.network import ValueModel, fix_rotations
from oxrl.models.token_mask import banned_tokens, sample_only
from oxrl.runs.clock import MachineSpeed, machine_speed
from oxrl.runs.device import chosen_device
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.runs.waiting import StopAsked, no_stop
from oxrl.seeds import stable_seed
from oxrl.tables.cells import REWARD_PARTS, SAMPLER_TOP
from oxrl.tables.columns import Columns
from oxrl.tables.engines import TrainingEngineName
from oxrl.tables.numbers import CENTER_TOP, NUMBERS
from oxrl.tables.policy import Algorithm
from oxrl.tables.roles import POLICY, REFERENCE, Role
from oxrl.types import ENVIRONMENT, Sampling, TokenIds

if TYPE_CHECKING:
    from oxrl.data.actions import ActionHead
    from oxrl.data.image_store import ImageStore
    from oxrl.engines.delivery import Delivery
    from oxrl.models.exact_contract import Contract
    from oxrl.rollouts.sync import RolloutParts, RolloutSource

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of log-probabilities, in nats, by the same weights and the same code: only padding widths differ
# between the two passes.
FIRST_RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


class Limits(NamedTuple):
    """The limits that a model and its tokenizer set.

    longest: prompt, in tokens. stop_token_ids: end a response. context: tokens that the model
    reads. None: unlimited. image_ids: tokens that stand for images. vocabulary: tokens that the
    model can tell apart; None: not known.
    """

    longest: int | None
    stop_token_ids: TokenIds
    context: int | None
    image_ids: TokenIds = ()
    vocabulary: int | None = None


class Engines(NamedTuple):
    """Who trains and who samples, and how the policy's weights get from one to the other."""

    trainers: Mapping[str, TrainEngine]
    sampler: RolloutEngine
    limits: Limits
    delivery: Delivery


def trainer_class(backend: TrainingEngineName) -> Callable[..., Trainer]:
    """Return the class of a training engine, imported where it is chosen."""
    if backend == "fsdp":
        from oxrl.engines.train.fsdp import FsdpTrainer  # PyTorch's sharding takes a second

        return FsdpTrainer
    if backend == "deepspeed":
        from oxrl.engines.train.zero import DeepSpeedTrainer  # an extra

        return DeepSpeedTrainer
    return LocalTrainer


class Assembly:
    """The parts of a run: device, tokenizer, models, engines and data.

    Args:
        cfg: of the run, as `settle` left it; of an evaluation or a look ahead as it was loaded.
        ranks: this process's place among those that train.
        stop: whether the run was asked to stop; looked at in every wait.
        say: tells the user something.
    """

    def __init__(
        self,
        cfg: Config,
        ranks: Ranks = ALONE,
        stop: StopAsked = no_stop,
        say: Callable[[str], object] = str,
    ) -> None:
        self.cfg = cfg
        self.ranks = ranks
        self.stop = stop
        self.say = say
        # Builds another source of rollouts than the configuration's: a replay has one.
        self.source: Callable[[RolloutParts], RolloutSource] | None = None

    # --- There once, for everybody.
    @cached_property
    def device(self) -> torch.device:
        """`run.device` as a torch device; `run.threads` and `run.deterministic` are applied.

        Raises:
            ConfigError: PyTorch sees no device of the kind that was asked for.
        """
        run = self.cfg.run
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        if run.deterministic:
            use_deterministic_kernels()
        several = self.cfg.train.engine.several_ranks or self.cfg.samplers
        return chosen_device(run.device, alone=not several)

    @property
    def device_type(self) -> str:
        """The kind of device that was asked for, such as "cuda", whether or not it is here.

        The driver of a cluster may have no GPU while its training ranks have some.
        """
        asked = self.cfg.run.device
        return self.device.type if asked == "auto" else asked

    @cached_property
    def speed(self) -> MachineSpeed | None:
        """The speed of the device; None where a run has several, or its operations are not
        counted.
        """
        cfg = self.cfg
        if cfg.recipe != "rl" or cfg.train.backend != "local" or cfg.samplers:
            return None
        return machine_speed(self.device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the policy's weights."""
        return DTYPES[self.cfg.model.dtype]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, with the chat template of the run."""
        model = self.cfg.model
        return load_tokenizer(
            model.name,
            chat_template=model.chat_template,
            day=self.cfg.run.day,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
        )

    @property
    def pad_id(self) -> int:
        """The token that rows are padded with."""
        return int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]

    @cached_property
    def images(self) -> ImageStore | None:
        """The images of a run; None where its model is shown none."""
        name = self.cfg.model.name
        if vision_family(name) is None or not has_image_processor(name):
            return None
        from oxrl.assembly.images import image_store  # a run of text alone pays nothing for images

        return image_store(self.cfg, lambda: self.tokenizer)

    @cached_property
    def actions(self) -> ActionHead | None:
        """The actions that turns are; None where they are text."""
        if not self.cfg.action.exists:
            return None
        from oxrl.assembly.actions import action_head  # most policies write text

        return action_head(self.cfg, self.tokenizer)

    @property
    def sampled_alone(self) -> frozenset[int]:
        """The tokens that share all probability, where turns are actions; else none."""
        return frozenset() if self.actions is None else frozenset(self.actions.support)

    @property
    def tokens_at_once(self) -> int:
        """`train.micro_batch_tokens` as a number, also where no run has settled it."""
        return micro_batch_tokens(self.cfg, on_cpu=self.device_type == "cpu")

    @property
    def price_of_a_cut(self) -> int | None:
        """A micro-batch's cost beside its tokens, in tokens; None where each is to be filled.

        A number in the configuration is a promise of how rows are cut, which a run that resumes
        keeps.
        """
        return PRICES.get(self.device_type) if by_rule(self.cfg) else None

    @property
    def part_sent(self) -> PartOfWeights:
        """The weights that samplers with weights of their own are sent."""
        return self.cfg.lora.delivery if self.cfg.lora.rank else "all"

    @cached_property
    def algorithm(self) -> Algorithm:
        """The row of the table with the numbers of the run."""
        train = self.cfg.train
        return Algorithm(
            row=train.row,
            values=train.model_dump(include=set(NUMBERS)),
            loss_numbers=train.loss_numbers,
            steps=self.cfg.run.steps,
            updates=train.updates,
            old_logprobs=train.old_logprobs,
            mask_truncated=train.mask_truncated,
            entropy_coeff=train.entropy_coeff,
        )

    @property
    def part_weights(self) -> dict[str, float]:
        """Name -> weight of every part of the reward; in episodes their own rewards are one too.

        Empty of a reward that is not asked for in parts.
        """
        weights = {name: part.weight for name, part in self.cfg.reward.parts.items()}
        if weights and self.cfg.environment.name:
            weights[ENVIRONMENT] = 1.0
        return weights

    @property
    def compared_parts(self) -> tuple[str, ...]:
        """Parts of the reward that the row compares one by one; empty: it compares their sum."""
        if not self.cfg.train.row.has(REWARD_PARTS):
            return ()
        return tuple(name for name, weight in self.part_weights.items() if weight)

    # --- Models.
    def model(
        self,
        load: Callable[..., Any] = load_policy,
        *,
        role: Role | None = None,
        device: torch.device | None = None,
        on_meta: bool = False,
        trained: bool = False,
    ) -> PreTrainedModel:
        """The model as it is on disk, or with random weights of `run.seed`.

        Args:
            load: of a policy, or of a critic.
            role: whose weights; None: those of `model.name`.
            device: None: the run's.
            on_meta: leave its weights to the engine that it is for.
            trained: hold linear layers under an adapter in four bits, where that is asked for.
        """
        asked = self.cfg.model
        role = role or policy_role(self.cfg)
        name = role.model
        options = LoadOptions(
            dtype=DTYPES[role.dtype or asked.dtype],
            attention=asked.attention,
            device=role.device or device or self.device,
            seed=stable_seed(role.seed, self.cfg.run.seed),
            trust_remote_code=asked.trust_remote_code,
            revision=role.revision,
            on_meta=on_meta,
            four_bit="held" if trained and asked.load_in_4bit else "no",
            exact=self.cfg.run.exact and role.name in (POLICY, REFERENCE),
        )
        model = load(name, options)
        fix_rotations(model, asked.max_length)
        host = getattr(model, "decoder", model)
        computes = getattr(host.config, "_attn_implementation", None)
        log.info("%s: attention is computed by %s (model.attention)", name, computes)
        if self.actions is not None and load is load_policy:
            sample_only(model, self.actions.support)
        return model

    def policy_to_train(
        self, device: torch.device | None = None, *, on_meta: bool = False
    ) -> PreTrainedModel:
        """The policy, with the adapter that `lora` asks for, and without what `model.freeze` names.

        Args:
            device: None: the run's.
            on_meta: leave its weights to the engine that it is for.
        """
        model = self.model(device=device, on_meta=on_meta, trained=True)
        if self.cfg.model.freeze != "none":
            from oxrl.models.vision_network import freeze  # most models read text alone

            freeze(model, self.cfg.model.freeze)
        stop_tokens(self.tokenizer, model)  # its checkpoints say them
        self.adapted(model)
        if self.cfg.run.exact and self.cfg.lora.rank:
            from oxrl.models.exact import make_exact  # most runs are as fast as they can be

            make_exact(model)  # the adapter's layers as well
        return model

    def critic_to_train(self) -> ValueModel:
        """A value model on the policy's backbone, with the adapter that `lora` asks for."""
        critic: Any = self.model(load_critic, on_meta=self.cuts_weights(), trained=True)
        self.adapted(critic.decoder)
        return critic

    def copy_of_policy(self) -> PreTrainedModel:
        """A model like the policy, on the CPU, wherever it is called."""
        cpu = torch.device("cpu")
        return self.policy_to_train(cpu) if self.part_sent == "adapter" else self.model(device=cpu)

    def cuts_weights(self, *, trained: bool = True) -> bool:
        """True if the training engine cuts every weight up over its ranks.

        Each rank then reads its own pieces of the model's files.
        """
        engine = self.cfg.train.engine
        section = engine.settings if trained else engine.reference_settings
        stage = engine.zero_stage
        if stage is None and section is not None:
            stage = getattr(self.cfg, section).zero_stage
        return stage == 3

    def adapted(self, model: PreTrainedModel) -> PreTrainedModel:
        """The same model, with the adapter that `lora` asks for put on it."""
        if self.cfg.lora.rank:
            from oxrl.models.lora import AdapterOptions, add_adapter  # most train all weights

            add_adapter(
                model,
                AdapterOptions(**self.cfg.lora.model_dump(exclude={"delivery"})),
                base=self.cfg.model.name,
                revision=self.cfg.model.revision,
                seed=stable_seed("adapter", self.cfg.run.seed),
            )
        return model

    # --- Engines that train.
    def trainer(
        self,
        model: torch.nn.Module,
        *,
        complete: bool = False,
        lr: float | None = None,
        temperature: float = 1.0,
        trained: bool = True,
        stays: bool = False,
    ) -> Trainer:
        """A training engine of `train.backend` on this process's device, with the optimizer of
        `train.*`.

        DeepSpeed keeps no optimizer for a model that is not `trained`, and always cuts its weights
        up over the ranks.

        Args:
            complete: what it saves has tokenizer, image processor and actions beside the weights.
            lr: instead of `train.lr`.
            stays: the weights stay as they are loaded.
        """
        train = self.cfg.train
        images = self.images if complete else None
        options = TrainerOptions(
            lr=train.lr if lr is None else lr,
            lr_schedule=train.lr_schedule,
            warmup_steps=train.warmup_steps,
            total_steps=self.cfg.run.steps,
            optimizer=train.optimizer,
            master_weights=train.master_weights,
            seed=self.cfg.run.seed,
            weight_decay=train.weight_decay,
            decay=train.decay,
            adam_betas=(train.adam_beta1, train.adam_beta2),
            adam_eps=train.adam_eps,
            rates=self._tower_rates(model) if lr is None else {},
            max_grad_norm=train.max_grad_norm,
            micro_batch_tokens=self.tokens_at_once,
            price=self.price_of_a_cut,
            share_prefix=train.share_prefix is True,
            temperature=temperature,
            gradient_checkpointing=self.cfg.model.gradient_checkpointing,
            offload_activations=self.cfg.model.offload_activations,
            trained=trained,
            stays=stays,
            tokenizer=self.tokenizer if complete else None,
            image_processor=None if images is None else images.reader.processor,
            actions=self.actions if complete else None,
        )
        return self._built(model, options)

    def _built(self, model: torch.nn.Module, options: TrainerOptions) -> Trainer:
        engine = self.cfg.train.engine
        section = engine.settings if options.trained else engine.reference_settings
        settings: dict[str, Any] = getattr(self.cfg, section).model_dump() if section else {}
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        with self.ranks.within(self.cfg.run.waits.of("load", nbytes), "models to be built"):
            build = trainer_class(self.cfg.train.backend)
            trainer = build(model, options, ranks=self.ranks, **settings)
        if options.share_prefix and isinstance(model, PreTrainedModel):
            check_sharing(model, trainer, self.cfg.model.max_length)
        return trainer

    def _tower_rates(self, model: torch.nn.Module) -> dict[str, float]:
        """Weights whose learning rate is another multiple of `train.lr`: those of a vision
        tower.
        """
        tower_lr = self.cfg.train.tower_lr
        if tower_lr is None:
            return {}
        from oxrl.models.vision_network import part_of  # most models read text alone

        rate = tower_lr / self.cfg.train.lr
        parts = part_of(cast(PreTrainedModel, model))
        return {name: rate for name, part in parts.items() if part == "vision"}

    def scorer(self, role: Role | None = None) -> Trainer:
        """An engine that only answers; with DeepSpeed as `deepspeed_ref` says.

        Args:
            role: whose weights; None: those of `model.name`.
        """
        temperature = 1.0 if role is None else role.temperature
        stays = role is not None and role.saved is None
        model = self.model(role=role, on_meta=self.cuts_weights(trained=False))
        return self.trainer(model, lr=0.0, temperature=temperature, trained=False, stays=stays)

    def trainers(self) -> Models[Trainer]:
        """The models of an RL run that are trained or only read, on this process's device."""
        return Models((role.name, self.trainer_of(role)) for role in roles_of(self.cfg))

    def trainer_of(self, role: Role) -> Trainer:
        """The engine of a model of an RL run."""
        if not role.trained:
            return self.scorer(role)
        if role.head == "values":
            return self.trainer(self.critic_to_train(), lr=role.lr)
        policy = self.policy_to_train(on_meta=self.cuts_weights())
        return self.trainer(policy, complete=True, temperature=role.temperature)

    # --- What samples, and what is asked of it.
    @cached_property
    def contract(self) -> Contract | None:
        """The contract of `run.exact`, as this process can keep it; None where nothing is promised.

        Raises:
            ConfigError: this is not the CPU, or some part of the model has no exact form.
            DataError: the model's configuration cannot be read.
        """
        if not self.cfg.run.exact:
            return None
        from oxrl.models.exact_contract import find_contract  # most runs promise nothing

        if self.device.type != "cpu":
            raise ConfigError(
                f"run.exact: run.device {self.cfg.run.device} is {self.device} here, and no exact "
                "form of what it computes exists: set run.device to cpu, or run.exact to false"
            )
        model = self.cfg.model
        config = config_of_model(model.name, model.revision, model.trust_remote_code)
        with named_in_errors("model", model.name):
            return find_contract(config, trust_remote_code=model.trust_remote_code)

    @cached_property
    def recorded(self) -> Recorded:
        """The columns that are recorded of every sampled token, each with its recorder."""
        cfg = self.cfg
        if cfg.recipe != "rl":
            return NOTHING
        found: dict[str, Recording] = {}
        if cfg.rollout.cuts:
            from oxrl.engines.sample.kept import KEPT_SETS  # most runs sample from all tokens

            found |= KEPT_SETS
        if cfg.train.row.has(SAMPLER_TOP):
            from oxrl.engines.sample.likeliest import LikeliestRecorder  # few rows read them

            found |= LikeliestRecorder(cfg.train.value(CENTER_TOP)).columns()
        return found or NOTHING

    @property
    def columns(self) -> Columns:
        """The columns of what is recorded."""
        return {name: recording.column for name, recording in self.recorded.items()}

    def local_sampler(self, model: PreTrainedModel) -> ModuleSampler:
        """A sampler on a model of this process, as many rows at a time as the config says."""
        return module_sampler(
            model,
            self.tokenizer,
            max_rows=self.cfg.inference_engine.max_rows,
            longest=self.cfg.model.max_length,
            images=self.images,
            recorded=self.recorded,
        )

    # --- Data.
    def limits(self, model: PreTrainedModel) -> Limits:
        """`data.max_prompt_tokens`, or what `rollout.max_tokens` leaves of the model's context; and
        the stop tokens.

        Raises:
            ConfigError: the two together do not fit the model.
        """
        most = self.cfg.rollout.max_tokens
        context = self.cfg.model.max_length or getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        asked = self.cfg.data.max_prompt_tokens
        stop_token_ids = stop_tokens(self.tokenizer, model)
        image_ids = banned_tokens(model.config)
        vocabulary = model.config.get_text_config().vocab_size
        if context is None:
            return Limits(asked, stop_token_ids, None, image_ids, vocabulary)
        room = context - most
        if room < 1 or (asked is not None and asked > room):
            raise ConfigError(
                f"rollout.max_tokens={most} plus data.max_prompt_tokens={asked} do not fit the "
                f"model's context of {context} tokens; lower one of them"
            )
        longest = room if asked is None else asked
        return Limits(longest, stop_token_ids, int(context), image_ids, vocabulary)

    def sampling(self, stop_token_ids: TokenIds, temperature: float | None = None) -> Sampling:
        """The way that `rollout` samples, at another temperature if there is one."""
        rollout = self.cfg.rollout
        if self.actions is not None:
            # A turn has a fixed number of tokens and none that ends it, or one that does.
            ends_by = self.actions.ends_by
            stop_token_ids = () if ends_by is None else (ends_by,)
        return Sampling(
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            max_tokens=rollout.max_tokens,
            stop_token_ids=stop_token_ids,
        )

    def row_options(self, *, held_out: bool, max_tokens: int | None = None) -> ReadOptions:
        """The way that the rows of a data file, or of data.eval, are read."""
        data = self.cfg.data
        sees = vision_family(self.cfg.model.name) is not None
        lacks = f"the model cannot be shown: its files lack {PROCESSOR}"
        return ReadOptions(
            max_tokens=max_tokens or self.cfg.model.max_length,
            overlong=data.overlong,
            limit=data.eval_rows if held_out else None,
            stream=data.stream,
            columns=data.columns,
            images=self.images,
            no_images=lacks if sees else "this model cannot read",
            actions=self.actions,
        )

    def prompts(self, path: str, longest: int | None, *, held_out: bool = False) -> PromptDataset:
        """The prompts of a data file, or of data.eval, of at most `longest` tokens."""
        options = self.row_options(held_out=held_out, max_tokens=longest)
        return PromptDataset.load(path, self.tokenizer, options)


def longest_prompt(cfg: Config) -> int | None:
    """Tokens of the longest prompt that leaves room for a response, where that is known."""
    if cfg.data.max_prompt_tokens is not None:
        return cfg.data.max_prompt_tokens
    context = cfg.model.context_length
    return None if context is None else context - cfg.rollout.max_tokens


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> TokenIds:
    """The tokens that end a reply, which the model's generation config lists from now on.

    They are the tokenizer's end token, what the chat template puts behind a reply, and whatever
    else the generation config ends on. Whoever reads what is written of the model ends there too.
    """
    said = model.generation_config
    listed = getattr(said, "eos_token_id", None)
    ends = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
    found = ends.union(ChatEncoder(tokenizer).ends if tokenizer.chat_template else ())
    found.add(int(tokenizer.eos_token_id))  # pyright: ignore
    if said and found != ends:
        said.eos_token_id = sorted(found)
    return tuple(sorted(found))


def check_sharing(model: PreTrainedModel, trainer: Trainer, longest: int | None) -> None:
    """Make sure that the model may read the prompt of a group once; collective.

    Args:
        longest: row that the model is given, in tokens; None: any.

    Raises:
        SharingRefused: it may not; says why.
    """
    if not attends_to_everything(model.config, longest):
        raise shared_prefix.SharingRefused(
            f"train.share_prefix: not every layer of {type(model).__name__} is known to have "
            "full attention; set it to false"
        )
    trainer.checked(partial(self_checks.check_sharing, model))
