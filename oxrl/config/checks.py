"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from oxrl.config.dims import context_length, model_context, why_unsupported
from oxrl.config.number_checks import check_numbers
from oxrl.config.own_gate import check_own_gate
from oxrl.config.reads import row_fields
from oxrl.config.schema import CELLS, Config
from oxrl.config.source import Problem
from oxrl.data.hub import SCHEME, SUFFIXES, locate
from oxrl.errors import DataError, RewardError, did_you_mean, why_no_file
from oxrl.models.builtin import BUILTIN_DIMS, is_builtin
from oxrl.models.folder import folder_problems
from oxrl.tables.cells import CRITIC
from oxrl.tables.engines import SAMPLING_ENGINES, TRAINING_ENGINES
from oxrl.tables.numbers import (
    ALPHA,
    CORRECTION_MAX,
    CORRECTION_MIN,
    CRITIC_WARMUP_STEPS,
    KL_COEFF,
    LABEL_NOISE,
    PASS_K,
    REFERENCE_SYNC_STEPS,
    WEIGHT_MAX,
    WEIGHT_MIN,
)
from oxrl.tables.preference import METHODS

ADAPTER = "adapter_config.json"

Check = Callable[[Config], Iterator[Problem]]


def _at(cfg: Config, path: str, rule: str, *also: str) -> Problem:
    return Problem(path, rule, attrgetter(path)(cfg), also=also)


def check_ranks(cfg: Config) -> Iterator[Problem]:
    """Several training ranks where the engine and the recipe have them."""
    engine = TRAINING_ENGINES[cfg.train.backend]
    if cfg.run.training_gpus > 1 and not engine.several_ranks:
        yield _at(
            cfg,
            "run.training_gpus",
            "the local engine is one process: set it to 1, or train.backend to deepspeed or fsdp",
            "train.backend",
        )
    if engine.several_ranks and cfg.train.row.recipe == "rejection":
        yield _at(
            cfg,
            "train.backend",
            (
                "rft samples in one process: "
                "set it to local, or train sft on the kept.jsonl of a run that did"
            ),
            "train.alg_name",
        )


def check_deepspeed(cfg: Config) -> Iterator[Problem]:
    """Sections `deepspeed` and `deepspeed_ref`: what DeepSpeed can do at their stages."""
    if cfg.train.backend != "deepspeed":
        return
    policy = cfg.deepspeed
    reference = cfg.deepspeed_ref
    if policy.zero_stage == 0 and cfg.model.dtype == "bfloat16":
        yield _at(
            cfg,
            "deepspeed.zero_stage",
            (
                "with model.dtype bfloat16 makes DeepSpeed's first AdamW step wrong; "
                "use 1, 2, 3 or float32"
            ),
            "model.dtype",
        )
    offloads = (
        ("deepspeed.offload_optimizer", policy.offload_optimizer, policy.zero_stage, 1),
        ("deepspeed.offload_param", policy.offload_param, policy.zero_stage, 3),
        ("deepspeed_ref.offload_param", reference.offload_param, reference.zero_stage, 3),
    )
    for path, wanted, stage, least in offloads:
        if wanted and stage < least:
            decider = f"{path.partition('.')[0]}.zero_stage"
            yield _at(cfg, path, f"needs {decider} {least} or more, this is {stage}", decider)


def check_samplers(cfg: Config) -> Iterator[Problem]:
    """What samples has the processes and devices that it needs."""
    engine = cfg.inference_engine
    colocated = engine.placement == "colocated"
    if colocated and engine.actors > cfg.run.training_gpus:
        yield _at(
            cfg,
            "inference_engine.actors",
            (
                "each shares the device of a training actor, "
                f"and run.training_gpus is {cfg.run.training_gpus}"
            ),
            "run.training_gpus",
            "inference_engine.placement",
        )
    in_actors = engine.actors and cfg.train.row.recipe == "rl"
    if SAMPLING_ENGINES[engine.name].own_process and not in_actors:
        yield _at(
            cfg,
            "inference_engine.name",
            (
                "runs in Ray actors of reinforcement learning: "
                "set inference_engine.actors to 1 or more, or it to local"
            ),
            "inference_engine.actors",
            "train.alg_name",
        )
    if colocated and engine.tensor_parallel > 1:
        yield _at(
            cfg,
            "inference_engine.tensor_parallel",
            "needs devices of its own: set inference_engine.placement to separate, or this to 1",
            "inference_engine.placement",
        )


def check_adapter(cfg: Config) -> Iterator[Problem]:
    """Adapters where they can be trained and sampled."""
    if not cfg.lora.rank:
        return
    engine = TRAINING_ENGINES[cfg.train.backend]
    if engine.several_ranks and cfg.train.row.recipe == "rl":
        yield _at(
            cfg,
            "lora.rank",
            (
                "adapters of reinforcement learning train with train.backend: local; "
                "set one of the two"
            ),
            "train.backend",
            "train.alg_name",
        )
    if cfg.model.dtype == "bfloat16" and not engine.bfloat16_adapters:
        yield _at(
            cfg,
            "lora.rank",
            (
                "DeepSpeed rounds adapters to model.dtype, which are float32 elsewhere: "
                "train with fsdp, or in float32"
            ),
            "train.backend",
            "model.dtype",
        )
    if cfg.inference_engine.actors:
        yield _at(
            cfg,
            "inference_engine.actors",
            "adapters are sampled in the process that trains them; set it to 0",
            "lora.rank",
        )
    if cfg.train.row.moves_reference:
        yield _at(
            cfg,
            "lora.rank",
            (
                f"{cfg.train.alg_name} moves its reference by all weights, "
                "of which adapters have none: set it to 0"
            ),
            "train.alg_name",
        )


def check_adapter_model(cfg: Config) -> Iterator[Problem]:
    """Adapters on a model that can be loaded again, and has none itself."""
    if not cfg.lora.rank:
        return
    if is_builtin(cfg.model.name):
        yield _at(
            cfg,
            "model.name",
            (
                "an adapter is stored without the model under it, "
                "and a built-in one is on no disk; "
                "give a folder, for one the checkpoint of an earlier run"
            ),
            "lora.rank",
        )
    elif (Path(cfg.model.name) / ADAPTER).is_file():
        yield _at(
            cfg,
            "model.name",
            "holds an adapter; merge it first: oxrl export FOLDER --out FOLDER",
            "lora.rank",
        )


def check_model(cfg: Config) -> Iterator[Problem]:
    """Model and template are there, as far as that can be seen without the network."""
    name = cfg.model.name
    if is_builtin(name):
        if name not in BUILTIN_DIMS:
            names = ", ".join(sorted(BUILTIN_DIMS))
            yield Problem(
                "model.name", f"must be one of {names}{did_you_mean(name, BUILTIN_DIMS)}", name
            )
    elif name.startswith((".", "/", "~")):
        folder = Path(name)
        if not (folder / "config.json").is_file() and not (folder / ADAPTER).is_file():
            state = "has no config.json" if folder.is_dir() else "is no folder"
            yield Problem(
                "model.name",
                f"{state}; give a folder in Hugging Face format, a hub name or builtin:tiny",
                name,
            )
    template = cfg.model.chat_template
    if template is not None and not Path(template).is_file():
        yield Problem("model.chat_template", why_no_file(template), template)
    limit = cfg.model.max_length
    context = model_context(name)
    if limit is not None and context is not None and limit > context:
        yield _at(
            cfg,
            "model.max_length",
            f"exceeds the model's context {context}; lower it",
            "model.name",
        )


def check_model_files(cfg: Config) -> Iterator[Problem]:
    """The model is a causal language model, and its files are whole where they are here."""
    name = cfg.model.name
    unsupported = why_unsupported(name)
    if unsupported is not None:
        yield Problem("model.name", unsupported, name)
    if Path(name).is_dir() and any(Path(name).glob("*.safetensors*")):
        damages = folder_problems(Path(name))
        if damages:
            yield Problem("model.name", "; ".join(damages), name)


MODEL: tuple[Check, ...] = (check_model, check_model_files)


def check_training_files(cfg: Config) -> Iterator[Problem]:
    """Files of `data.train` exist and can be read."""
    several = not isinstance(cfg.data.train, str)
    for file in cfg.data.train_files:
        yield from _file_problems(cfg, f"data.train.{file}" if several else "data.train", file)


def check_evaluation_file(cfg: Config) -> Iterator[Problem]:
    """The file of `data.eval` exists and can be read."""
    if cfg.data.eval is not None:
        yield from _file_problems(cfg, "data.eval", cfg.data.eval)


def _file_problems(cfg: Config, path: str, file: str) -> Iterator[Problem]:
    """A data file exists, here or on the hub, and has a format that can be read."""
    if file.startswith(SCHEME):
        try:
            locate(file, fetch=False)
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


def check_reward(cfg: Config) -> Iterator[Problem]:
    """The reward is built in, or a function that its file defines; no code of users is imported."""
    # Only where a reward is read: it is a quarter of the time to start.
    from oxrl.rewards.base import locate

    name = cfg.reward.name
    if not name:
        yield Problem(
            "reward.name",
            "is required: what scores a response; one of math, exact or path.py:function",
        )
        return
    try:
        locate(name)
    except RewardError as error:
        yield _at(cfg, "reward.name", str(error).removeprefix(f"reward.name={name}: "))


def check_batch(cfg: Config) -> Iterator[Problem]:
    """Batch equation: whole groups per minibatch, whole rollout steps per run."""
    prompts = cfg.data.prompts_per_step
    minibatches = cfg.train.minibatches
    updates = cfg.train.updates
    steps = cfg.run.steps
    passes = ("train.epochs", "train.minibatches")
    equation = f"{updates} = train.epochs {cfg.train.epochs} x train.minibatches {minibatches}"
    if prompts % minibatches:
        divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
        yield _at(
            cfg,
            "train.minibatches",
            (
                f"must divide data.prompts_per_step={prompts}, "
                "so that each minibatch holds whole groups; nearest valid: "
                f"train.minibatches {_nearest(divisors, minibatches)}, "
                f"or data.prompts_per_step {_multiples(minibatches, prompts)}"
            ),
            "data.prompts_per_step",
        )
    if steps % updates:
        yield _at(
            cfg,
            "run.steps",
            (
                f"must be a multiple of {equation}, the optimizer steps of one rollout step; "
                f"nearest valid: {_multiples(updates, steps)}"
            ),
            *passes,
        )
    if cfg.train.row.gate == "policy_gradient" and updates > 1:
        yield _at(
            cfg,
            passes[0] if cfg.train.epochs > 1 else passes[1],
            (
                f"{cfg.train.row.name} has no importance ratio, so of the updates on a rollout "
                f"batch, {equation}, only the first would follow its gradient: the others learn "
                "from samples of older weights as if the policy had just drawn them; set "
                "train.epochs and train.minibatches to 1, or train.loss: ppo_clip with "
                "train.ratio: token"
            ),
            *passes,
            "train.loss",
        )
    if cfg.train.old_logprobs == "current" and updates > 1:
        yield _at(
            cfg,
            "train.old_logprobs",
            (
                f"needs one optimizer step per rollout batch, this run has {equation}; "
                "set it to recompute or auto"
            ),
            *passes,
        )


def _multiples(unit: int, value: int) -> str:
    below = value - value % unit
    return _nearest([number for number in (below, below + unit) if number], value)


def _nearest(candidates: list[int], value: int) -> str:
    closest = sorted(candidates, key=lambda candidate: abs(candidate - value))[:2]
    return " or ".join(str(number) for number in sorted(closest))


def check_sampling(cfg: Config) -> Iterator[Problem]:
    """Sampling that training can learn from."""
    rollout = cfg.rollout
    row = cfg.train.row
    cut = "a cut distribution is not the policy that is trained; `oxrl eval` may cut"
    if rollout.temperature == 0:
        rule = "training cannot sample greedily"
        if row.compares_samples:
            rule += ": all samples of a prompt are identical and every advantage is 0"
        rule += "; set it above 0 (rollout.eval_temperature may be 0)"
        yield _at(cfg, "rollout.temperature", rule, "train.advantage")
    if rollout.top_p < 1:
        yield _at(cfg, "rollout.top_p", f"training needs 1: {cut}")
    if rollout.top_k > 0:
        yield _at(cfg, "rollout.top_k", f"training needs 0: {cut}")


def check_staleness(cfg: Config) -> Iterator[Problem]:
    """What sampling ahead of the update takes."""
    path = "rollout.max_staleness"
    least = cfg.train.updates
    if cfg.rollout.max_staleness == 0:
        return
    if cfg.rollout.max_staleness < least:
        yield _at(
            cfg,
            path,
            (
                "a batch sampled while another trains lags "
                f"train.epochs x train.minibatches = {least} versions: "
                f"set it to {least} or more, or to 0"
            ),
            "train.epochs",
            "train.minibatches",
        )
    if cfg.rollout.force_strict_on_policy:
        yield _at(
            cfg,
            "rollout.force_strict_on_policy",
            f"refuses every sample of earlier weights, which {path} asks for: set it to false",
            path,
        )
    if cfg.inference_engine.placement == "colocated":
        yield _at(
            cfg,
            "inference_engine.placement",
            "takes turns on one device, and cannot sample while training: set it to separate",
            path,
        )


def check_rejection(cfg: Config) -> Iterator[Problem]:
    """Sampling of which something different can be kept."""
    if cfg.rollout.temperature == 0 and cfg.rollout.n_samples > 1:
        yield _at(
            cfg,
            "rollout.temperature",
            "all samples of a prompt are identical; set it above 0, or rollout.n_samples to 1",
            "rollout.n_samples",
        )
    if not isinstance(cfg.data.train, str):
        yield _at(
            cfg, "data.train", "rft asks every prompt of one file; give a path without shares"
        )


def check_preference(cfg: Config) -> Iterator[Problem]:
    """Numbers at which a formula has no value, and sums of losses that read different things."""
    algorithm = cfg.train.alg_name
    addable = [name for name, method in METHODS.items() if method.addable]
    for name in cfg.train.mix:
        if name in addable:
            if why := _why_not_added(name, algorithm):
                yield _at(
                    cfg,
                    "train.mix",
                    f"{name} {why}, and cannot be added to {algorithm}",
                    "train.alg_name",
                )
        else:
            why = "is no preference loss"
            if name in METHODS:
                why = "takes more than a pair, or is a sum itself"
            yield _at(cfg, "train.mix", f"{name} {why}{did_you_mean(name, addable)}")
    if algorithm == "exo" and cfg.train.value(LABEL_NOISE) == 0:
        yield _at(
            cfg, "train.label_noise", "exo takes its logarithm: set it above 0; 0.001 is usual"
        )
    if algorithm == "f_dpo_alpha" and cfg.train.value(ALPHA) == 1:
        yield _at(
            cfg, "train.preference_alpha", "at 1 the alpha divergence is the reverse KL: use dpo"
        )


def _why_not_added(name: str, algorithm: str) -> str:
    """Why the addable loss `name` cannot be added to `algorithm`; empty where it can."""
    method = METHODS[algorithm]
    if method.unpaired:
        return "is a loss of pairs"
    if name == algorithm or name in method.parts:
        return "is in it already"
    if METHODS[name].reference and not method.reference:
        return "needs a reference"
    return ""


def check_context(cfg: Config) -> Iterator[Problem]:
    """Prompt and response fit into the model's context."""
    limit = cfg.model.max_length
    context = context_length(cfg)
    if context is None:
        return
    bound = f"the model's context {context}" if limit is None else f"model.max_length {limit}"
    prompt = cfg.data.max_prompt_tokens
    response = cfg.rollout.max_tokens
    also = ("model.max_length", "model.name", "data.max_prompt_tokens")
    if prompt is not None and prompt + response > context:
        yield _at(
            cfg,
            "rollout.max_tokens",
            (
                f"{response} + data.max_prompt_tokens {prompt} = {prompt + response} "
                f"exceeds {bound}; lower one"
            ),
            *also,
        )
    elif response >= context:
        yield _at(
            cfg,
            "rollout.max_tokens",
            f"leaves no room for a prompt in {bound}; set it below {context}",
            *also,
        )


# Corrections that are ratios themselves; the others keep a token or drop it.
WEIGHTING = ("truncate", "mask")


def check_correction(cfg: Config) -> Iterator[Problem]:
    """Old logprobs, correction and denominator: the sampler's mismatch is corrected once."""
    row = cfg.train.row
    also = ("train.correction", "train.denominator")
    if row.correction == "none":
        return
    if cfg.train.old_logprobs == "bypass":
        yield _at(
            cfg,
            "train.old_logprobs",
            (
                "puts the sampler's logprobs into the ratio, "
                f"and correction {row.correction} would count them twice; "
                "set train.correction: none or recompute"
            ),
            *also,
        )
    if row.denominator == "rollout" and row.correction in WEIGHTING:
        yield _at(
            cfg,
            "train.correction",
            (
                f"a ratio against the rollout policy and correction {row.correction} "
                "count the mismatch twice; set train.correction: none or train.denominator: old"
            ),
            *also,
        )


def check_cells(cfg: Config) -> Iterator[Problem]:
    """Cells and numbers that do not fit together."""
    row = cfg.train.row
    if row.unsupported:
        yield _at(cfg, "train.alg_name", row.unsupported, *(f"train.{name}" for name in CELLS))
    if row.gate == "policy_gradient":
        rule = f"has no effect: {row.gate} reads no importance ratio; remove it, or set train.loss"
        if cfg.train.ratio not in (None, "none"):
            yield _at(cfg, "train.ratio", rule, "train.loss")
        if cfg.train.denominator is not None:
            yield _at(cfg, "train.denominator", rule, "train.loss")
    elif row.ratio == "none":
        yield Problem(
            "train.ratio",
            (
                f"{row.gate} needs an importance ratio: "
                "set train.ratio, or train.loss: policy_gradient"
            ),
            row.ratio,
            also=("train.loss",),
        )
    samples = cfg.rollout.n_samples
    if row.advantage == "pass_at_k" and cfg.train.value(PASS_K) > samples:
        yield _at(
            cfg,
            "train.pass_k",
            f"cannot exceed rollout.n_samples {samples}: lower it, or sample more",
            "rollout.n_samples",
        )
    read = row_fields(row)
    for low, high in ((WEIGHT_MIN, WEIGHT_MAX), (CORRECTION_MIN, CORRECTION_MAX)):
        path = f"train.{low.key}"
        above = f"train.{high.key}"
        upper = cfg.train.value(high)
        if path in read and above in read and cfg.train.value(low) >= upper:
            yield _at(cfg, path, f"must be below {above}={upper}", above)


def _several_samples(cfg: Config, comparer: str) -> Iterator[Problem]:
    if cfg.rollout.n_samples < 2:
        rule = f"{comparer} compares the samples of one prompt: set it to 2 or more"
        yield _at(cfg, "rollout.n_samples", rule, "train.advantage")


def check_groups(cfg: Config) -> Iterator[Problem]:
    """Samples of one prompt that can be compared."""
    yield from _several_samples(cfg, cfg.train.row.advantage)


def check_dynamic_sampling(cfg: Config) -> Iterator[Problem]:
    """Samples of one prompt that can differ, and no second batch sampled ahead."""
    yield from _several_samples(cfg, cfg.train.row.name)
    if cfg.sampling_block > 1:
        most = 3 * cfg.train.updates - 1
        yield _at(
            cfg,
            "rollout.max_staleness",
            f"dynamic sampling decides batch by batch what to draw next: at most {most}",
        )


def check_overlong_penalty(cfg: Config) -> Iterator[Problem]:
    """Responses that are punished are trained on."""
    # A row that is not trained on cannot be taught; its penalty would only move the baseline of the
    # others.
    if cfg.train.mask_truncated:
        yield _at(
            cfg,
            "train.mask_truncated",
            f"{cfg.train.row.name} punishes the responses that this leaves out: set it to false",
        )


def check_interpolated_anchor(cfg: Config) -> Iterator[Problem]:
    """Old logprobs that can be interpolated, and weights from there to the sampler."""
    row = cfg.train.row
    if cfg.train.old_logprobs != "auto":
        yield _at(cfg, "train.old_logprobs", f"{row.name} interpolates them: set it to auto")
    if row.correction == "none":
        rule = f"{row.name} weighs its interpolated policy against the sampler: set it to truncate"
        yield _at(cfg, "train.correction", rule)


def _kl_needed(cfg: Config) -> Iterator[Problem]:
    row = cfg.train.row
    if row.kl == "none" or cfg.train.value(KL_COEFF) == 0:
        yield _at(
            cfg,
            "train.alg_name",
            "needs a KL term: set train.kl and train.kl_coeff",
            "train.kl",
            "train.kl_coeff",
        )


def check_adaptive_kl(cfg: Config) -> Iterator[Problem]:
    """A KL term in the reward, which can be steered."""
    yield from _kl_needed(cfg)
    row = cfg.train.row
    if row.kl.startswith("loss_"):
        yield Problem(
            "train.kl",
            f"{row.name} steers a KL in the reward: set it to reward_k1",
            row.kl,
            also=("train.kl_coeff",),
        )


def check_reference_reset(cfg: Config) -> Iterator[Problem]:
    """A KL term, to a reference that can be replaced."""
    yield from _kl_needed(cfg)
    if cfg.lora.rank:
        yield _at(
            cfg,
            "lora.rank",
            (
                f"{cfg.train.row.name} resets the reference, "
                "which an adapter's base cannot be: set it to 0"
            ),
        )


OF_FEATURE: Mapping[str, Check] = {
    "groups": check_groups,
    "dynamic_sampling": check_dynamic_sampling,
    "overlong_penalty": check_overlong_penalty,
    "interpolated_anchor": check_interpolated_anchor,
    "adaptive_kl": check_adaptive_kl,
    "reference_reset": check_reference_reset,
}


def check_features(cfg: Config) -> Iterator[Problem]:
    """What the row adds to its cells has what it needs."""
    for need in cfg.train.row.needs:
        if need in OF_FEATURE:
            yield from OF_FEATURE[need](cfg)


OF_ALL: tuple[Check, ...] = (
    check_ranks,
    check_deepspeed,
    check_samplers,
    check_adapter,
    check_adapter_model,
    *MODEL,
    check_training_files,
    check_evaluation_file,
)
OF_RECIPE: Mapping[str, tuple[Check, ...]] = {
    "rl": (
        check_reward,
        check_batch,
        check_sampling,
        check_staleness,
        check_features,
        check_correction,
        check_cells,
        check_own_gate,
        check_numbers,
        check_context,
    ),
    "rejection": (check_reward, check_rejection, check_context),
    "preference": (check_preference, check_numbers),
}


def training_problems(cfg: Config) -> Iterator[Problem]:
    """Every cross-section problem of a training run."""
    for check in OF_ALL:
        yield from check(cfg)
    for check in OF_RECIPE.get(cfg.train.row.recipe, ()):
        for problem in check(cfg):
            # While the algorithm is in doubt, so is what it asks for.
            yield replace(problem, also=(*problem.also, "train.alg_name"))


def evaluation_problems(cfg: Config) -> Iterator[Problem]:
    """Problems that matter when a configuration is only evaluated."""
    for check in (check_ranks, check_deepspeed, check_samplers, *MODEL, check_reward):
        yield from check(cfg)
    if cfg.data.eval is not None:
        yield from check_evaluation_file(cfg)
        return
    if len(cfg.data.train_files) > 1:
        yield _at(
            cfg,
            "data.eval",
            "is needed: data.train is several files; name the one to evaluate on",
            "data.train",
        )
    yield from check_training_files(cfg)


def notices(cfg: Config) -> Iterator[str]:
    """Settings that are allowed and do less than they seem to."""
    train = cfg.train
    row = train.row
    steps = cfg.run.steps
    if train.kl is not None and row.kl != "none" and train.value(KL_COEFF) == 0:
        yield f"train.kl = {row.kl} has no effect while train.kl_coeff is 0"
    if train.warmup_steps >= steps:
        warmup = f"train.warmup_steps = {train.warmup_steps}"
        yield f"{warmup} is not over when the run ends at run.steps = {steps}"
    if row.has(CRITIC) and train.value(CRITIC_WARMUP_STEPS) >= steps:
        warmup = f"train.critic_warmup_steps = {train.value(CRITIC_WARMUP_STEPS)}"
        yield f"{warmup} leaves none of {steps} steps to the policy"
    if "train.reference_sync_steps" in row_fields(row):
        every = train.value(REFERENCE_SYNC_STEPS)
        if every > steps:
            yield f"train.reference_sync_steps = {every} never happens in run.steps = {steps}"
    if train.lr == 0:
        yield "train.lr = 0 trains nothing: the policy stays what it is"
    if cfg.data.eval in cfg.data.train_files:
        yield f"data.eval is trained on: {cfg.data.eval} is in data.train too"
    if cfg.run.device == "cpu" and cfg.model.dtype == "bfloat16":
        yield "model.dtype = bfloat16 on run.device = cpu is slower and less exact than float32"
