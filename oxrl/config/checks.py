"""Checks across sections, all run before anything heavy is imported. Each yields every problem it
finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from oxrl.config.dims import context_length, model_dims
from oxrl.config.reads import row_fields
from oxrl.config.schema import CELLS, Config
from oxrl.config.source import Problem
from oxrl.data.hub import SCHEME, SUFFIXES, locate
from oxrl.errors import DataError, RewardError, did_you_mean, why_no_file
from oxrl.models.builtin import BUILTIN_DIMS, is_builtin
from oxrl.tables.preference import METHODS

ADAPTER = "adapter_config.json"
MODEL_FILES = ("config.json", ADAPTER)


def _at(cfg: Config, path: str, rule: str, *also: str) -> Problem:
    section, _, name = path.partition(".")
    return Problem(path, rule, getattr(getattr(cfg, section), name), also=also)


def check_scale(cfg: Config) -> Iterator[Problem]:
    """Engines of the scale-out extras, which the local engine cannot stand in for."""
    backend, zero = cfg.train.backend, cfg.deepspeed
    if cfg.run.training_gpus > 1 and backend == "local":
        rule = "the local engine is one process: set it to 1, or train.backend to deepspeed or fsdp"
        yield _at(cfg, "run.training_gpus", rule, "train.backend")
    if backend != "local" and cfg.train.row.recipe == "rejection":
        rule = "rft samples in one process: set it to local, or train sft on the kept.jsonl of a run that did"
        yield _at(cfg, "train.backend", rule, "train.alg_name")
    if backend == "deepspeed":
        if zero.zero_stage == 0 and cfg.model.dtype == "bfloat16":
            rule = "with model.dtype bfloat16 makes DeepSpeed's first AdamW step wrong; use 1, 2, 3 or float32"
            yield _at(cfg, "deepspeed.zero_stage", rule, "model.dtype")
        needs = {
            "deepspeed.offload_optimizer": 1,
            "deepspeed.offload_param": 3,
            "deepspeed_ref.offload_param": 3,
        }
        for path, least in needs.items():
            section, _, name = path.partition(".")
            given = getattr(cfg, section)
            if getattr(given, name) and given.zero_stage < least:
                rule = f"needs {section}.zero_stage {least} or more, this is {given.zero_stage}"
                yield _at(cfg, path, rule, f"{section}.zero_stage")
    sampling = cfg.inference_engine
    if sampling.placement == "colocated" and sampling.actors > cfg.run.training_gpus:
        rule = f"each shares the device of a training actor, and run.training_gpus is {cfg.run.training_gpus}"
        yield _at(
            cfg, "inference_engine.actors", rule, "run.training_gpus", "inference_engine.placement"
        )
    if sampling.name == "vllm" and not (sampling.actors and cfg.train.row.recipe == "rl"):
        rule = "runs in Ray actors of reinforcement learning: set inference_engine.actors to 1 or more, or it to local"
        yield _at(cfg, "inference_engine.name", rule, "inference_engine.actors", "train.alg_name")
    if sampling.placement == "colocated" and sampling.tensor_parallel > 1:
        rule = "needs devices of its own: set inference_engine.placement to separate, or this to 1"
        yield _at(cfg, "inference_engine.tensor_parallel", rule, "inference_engine.placement")


def check_adapter(cfg: Config) -> Iterator[Problem]:
    """Adapters where they can be trained, on a model that can be loaded again."""
    if not cfg.lora.rank:
        return
    if cfg.train.backend != "local" and cfg.train.row.recipe == "rl":
        rule = (
            "adapters of reinforcement learning train with train.backend: local; set one of the two"
        )
        yield _at(cfg, "lora.rank", rule, "train.backend", "train.alg_name")
    if cfg.train.backend == "deepspeed" and cfg.model.dtype == "bfloat16":
        rule = "DeepSpeed rounds adapters to model.dtype, which are float32 elsewhere: train with fsdp, or in float32"
        yield _at(cfg, "lora.rank", rule, "train.backend", "model.dtype")
    if cfg.inference_engine.actors:
        rule = "adapters are sampled in the process that trains them; set it to 0"
        yield _at(cfg, "inference_engine.actors", rule, "lora.rank")
    if "reference_sync_rate" in cfg.train.row.numbers:
        rule = f"{cfg.train.alg_name} moves its reference by all weights, of which adapters have none: set it to 0"
        yield _at(cfg, "lora.rank", rule, "train.alg_name")
    if is_builtin(cfg.model.name):
        rule = "an adapter is stored without the model under it, and a built-in one is on no disk; give a folder"
        yield _at(
            cfg, "model.name", f"{rule}, for one the checkpoint of an earlier run", "lora.rank"
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
    name, template = cfg.model.name, cfg.model.chat_template
    if is_builtin(name):
        if name not in BUILTIN_DIMS:
            rule = f"must be one of {', '.join(sorted(BUILTIN_DIMS))}{did_you_mean(name, BUILTIN_DIMS)}"
            yield Problem("model.name", rule, name)
    elif name.startswith((".", "/", "~")) and not any(
        (Path(name) / file).is_file() for file in MODEL_FILES
    ):
        state = "has no config.json" if Path(name).is_dir() else "is no folder"
        rule = f"{state}; give a folder in Hugging Face format, a hub name or builtin:tiny"
        yield Problem("model.name", rule, name)
    if template is not None and not Path(template).is_file():
        yield Problem("model.chat_template", why_no_file(template), template)
    limit, dims = cfg.model.max_length, model_dims(name)
    if limit is not None and dims is not None and dims.context is not None and limit > dims.context:
        yield _at(
            cfg,
            "model.max_length",
            f"exceeds the model's context {dims.context}; lower it",
            "model.name",
        )


def check_files(cfg: Config) -> Iterator[Problem]:
    """Data files exist, here or on the hub, and have a format that can be read."""
    train = cfg.data.train
    paths = (
        {"data.train": train}
        if isinstance(train, str)
        else {f"data.train.{file}": file for file in train}
    )
    for path, value in {
        **paths,
        **({"data.eval": cfg.data.eval} if cfg.data.eval is not None else {}),
    }.items():
        if value.startswith(SCHEME):
            try:
                locate(value, fetch=False)
            except DataError as error:
                yield Problem(path, str(error), value)
        elif Path(value).suffix not in SUFFIXES:
            yield Problem(
                path,
                f"must end in {' or '.join(SUFFIXES)}; `oxrl prepare` writes such files",
                value,
            )
        elif not Path(value).is_file():
            yield Problem(path, why_no_file(value), value)
        if cfg.data.stream and value.endswith(".parquet"):
            yield Problem(
                path, "must end in .jsonl for data.stream, which reads rows by their place", value
            )


def check_reward(cfg: Config) -> Iterator[Problem]:
    """The reward is built in, or a function that its file defines; nothing of the user's is
    imported.
    """
    from oxrl.rewards.base import (
        locate,  # only where a reward is read: it is a quarter of the time to start
    )

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
    prompts, minibatches, epochs = (
        cfg.data.prompts_per_step,
        cfg.train.minibatches,
        cfg.train.epochs,
    )
    each, passes = epochs * minibatches, ("train.epochs", "train.minibatches")
    equation = f"{each} = train.epochs {epochs} x train.minibatches {minibatches}"
    if prompts % minibatches:
        divisors = _nearest([n for n in range(1, prompts + 1) if prompts % n == 0], minibatches)
        rule = (
            f"must divide data.prompts_per_step={prompts}, so that each minibatch holds whole groups; nearest valid: "
            f"train.minibatches {divisors}, or data.prompts_per_step {_multiples(minibatches, prompts)}"
        )
        yield _at(cfg, "train.minibatches", rule, "data.prompts_per_step")
    if cfg.run.steps % each:
        rule = f"must be a multiple of {equation}, the optimizer steps of one rollout step; nearest valid: "
        yield _at(cfg, "run.steps", rule + _multiples(each, cfg.run.steps), *passes)
    if cfg.train.old_logprobs == "current" and each > 1:
        rule = f"needs one optimizer step per rollout batch, this run has {equation}; set it to recompute or auto"
        yield _at(cfg, "train.old_logprobs", rule, *passes)


def _multiples(unit: int, value: int) -> str:
    return _nearest([unit * n for n in (value // unit, -(-value // unit)) if n], value)


def _nearest(candidates: list[int], value: int) -> str:
    return " or ".join(str(n) for n in sorted(sorted(candidates, key=lambda n: abs(n - value))[:2]))


def check_sampling(cfg: Config) -> Iterator[Problem]:
    """Sampling that training can learn from."""
    rollout, row = cfg.rollout, cfg.train.row
    grouped = not {"groups", "dynamic_sampling"}.isdisjoint(row.needs)
    cut = ": a cut distribution is not the policy that is trained; `oxrl eval` may cut"
    if rollout.temperature == 0:
        same = ": all samples of a prompt are identical and every advantage is 0" if grouped else ""
        rule = f"training cannot sample greedily{same}; set it above 0 (rollout.eval_temperature may be 0)"
        yield _at(cfg, "rollout.temperature", rule, "train.advantage")
    if rollout.top_p < 1:
        yield _at(cfg, "rollout.top_p", "training needs 1" + cut)
    if rollout.top_k > 0:
        yield _at(cfg, "rollout.top_k", "training needs 0" + cut)
    if grouped and rollout.n_samples < 2:
        who = row.advantage if "groups" in row.needs else row.name
        rule = f"{who} compares the samples of one prompt: set it to 2 or more"
        yield _at(cfg, "rollout.n_samples", rule, "train.advantage")
    if row.advantage == "pass_at_k" and cfg.train.pass_k > rollout.n_samples:
        rule = f"cannot exceed rollout.n_samples {rollout.n_samples}: lower it, or sample more"
        yield _at(cfg, "train.pass_k", rule, "rollout.n_samples")
    if cfg.train.mask_truncated and "overlong_penalty" in row.needs:
        # A row that is not trained on cannot be taught; its penalty would only move the baseline of
        # the others.
        rule = f"{row.name} punishes the responses that this leaves out: set it to false"
        yield _at(cfg, "train.mask_truncated", rule)


def check_staleness(cfg: Config) -> Iterator[Problem]:
    """What sampling ahead of the update takes."""
    least, path = cfg.train.updates, "rollout.max_staleness"
    if cfg.rollout.max_staleness == 0:
        return
    if cfg.rollout.max_staleness < least:
        rule = f"a batch sampled while another trains lags train.epochs x train.minibatches = {least} versions"
        yield _at(
            cfg,
            path,
            f"{rule}: set it to {least} or more, or to 0",
            "train.epochs",
            "train.minibatches",
        )
    if cfg.rollout.force_strict_on_policy:
        rule = "refuses every sample of earlier weights, which rollout.max_staleness asks for: set it to false"
        yield _at(cfg, "rollout.force_strict_on_policy", rule, path)
    if "dynamic_sampling" in cfg.train.row.needs and cfg.wave > 1:
        rule = f"dynamic sampling decides batch by batch what to draw next: at most {3 * least - 1}"
        yield _at(cfg, path, rule)
    if cfg.inference_engine.placement == "colocated":
        rule = "takes turns on one device, and cannot sample while training: set it to separate"
        yield _at(cfg, "inference_engine.placement", rule, path)


def check_rejection(cfg: Config) -> Iterator[Problem]:
    """Sampling of which something different can be kept."""
    if cfg.rollout.temperature == 0 and cfg.rollout.n_samples > 1:
        rule = "all samples of a prompt are identical; set it above 0, or rollout.n_samples to 1"
        yield _at(cfg, "rollout.temperature", rule, "rollout.n_samples")
    if not isinstance(cfg.data.train, str):
        yield _at(
            cfg, "data.train", "rft asks every prompt of one file; give a path without shares"
        )


def check_preference(cfg: Config) -> Iterator[Problem]:
    """Numbers at which a formula has no value, and sums of losses that read different things."""
    row, rows = (
        METHODS[cfg.train.alg_name],
        {name: method for name, method in METHODS.items() if method.addable},
    )
    for name in cfg.train.mix:
        if name not in rows:
            why = (
                "takes more than a pair, or is a sum itself"
                if name in METHODS
                else "is no preference loss"
            )
            yield _at(cfg, "train.mix", f"{name} {why}{did_you_mean(name, rows)}")
        elif why := (
            ("is a loss of pairs" if row.unpaired else "")
            or ("is in it already" if name in (cfg.train.alg_name, *row.parts) else "")
            or ("needs a reference" if rows[name].reference and not row.reference else "")
        ):
            yield _at(
                cfg,
                "train.mix",
                f"{name} {why}, and cannot be added to {cfg.train.alg_name}",
                "train.alg_name",
            )
    if cfg.train.alg_name == "exo" and cfg.train.label_noise == 0:
        yield _at(
            cfg, "train.label_noise", "exo takes its logarithm: set it above 0; 0.001 is usual"
        )
    if cfg.train.alg_name == "f_dpo_alpha" and cfg.train.preference_alpha == 1:
        yield _at(
            cfg, "train.preference_alpha", "at 1 the alpha divergence is the reverse KL: use dpo"
        )


def check_context(cfg: Config) -> Iterator[Problem]:
    """Prompt and response fit into the model's context."""
    limit, context = cfg.model.max_length, context_length(cfg)
    if context is None:
        return
    bound = f"the model's context {context}" if limit is None else f"model.max_length {limit}"
    prompt, response, rule = cfg.data.max_prompt_tokens or 0, cfg.rollout.max_tokens, ""
    if prompt and prompt + response > context:
        rule = f"{response} + data.max_prompt_tokens {prompt} = {prompt + response} exceeds {bound}; lower one"
    elif response >= context:
        rule = f"leaves no room for a prompt in {bound}; set it below {context}"
    if rule:
        yield _at(
            cfg,
            "rollout.max_tokens",
            rule,
            "model.max_length",
            "model.name",
            "data.max_prompt_tokens",
        )


def check_anchor(cfg: Config) -> Iterator[Problem]:
    """Old logprobs, correction and denominator: the sampler's mismatch may be corrected once."""
    row, also = cfg.train.row, ("train.correction", "train.denominator")
    if "interpolated_anchor" in row.needs and cfg.train.old_logprobs != "auto":
        yield _at(cfg, "train.old_logprobs", f"{row.name} interpolates them: set it to auto")
    if row.correction == "none":
        return
    if cfg.train.old_logprobs == "bypass":
        rule = f"puts the sampler's logprobs into the ratio, and correction {row.correction} would count them twice"
        yield _at(
            cfg, "train.old_logprobs", f"{rule}; set train.correction: none or recompute", *also
        )
    if row.denominator == "rollout":
        rule = f"a ratio against the rollout policy and correction {row.correction} count the mismatch twice"
        yield _at(
            cfg,
            "train.correction",
            f"{rule}; set train.correction: none or train.denominator: old",
            *also,
        )


def check_reference(cfg: Config) -> Iterator[Problem]:
    """Rows that steer or reset their reference have one of the kind that can be."""
    row, also = cfg.train.row, ("train.kl", "train.kl_coeff")
    moved = not {"adaptive_kl", "reference_reset"}.isdisjoint(row.needs)
    if moved and (row.kl == "none" or cfg.train.kl_coeff == 0):
        yield Problem(
            "train.alg_name",
            "needs a KL term: set train.kl and train.kl_coeff",
            row.name,
            also=also,
        )
    if "adaptive_kl" in row.needs and row.kl.startswith("loss_"):
        yield Problem(
            "train.kl",
            f"{row.name} steers a KL in the reward: set it to reward_k1",
            row.kl,
            also=also,
        )
    if "reference_reset" in row.needs and cfg.lora.rank:
        yield _at(
            cfg,
            "lora.rank",
            f"{row.name} resets the reference, which an adapter's base cannot be: set it to 0",
        )


def check_cells(cfg: Config) -> Iterator[Problem]:
    """Cells and numbers that do not fit together."""
    row, read = cfg.train.row, row_fields(cfg.train.row)
    if row.unsupported:
        yield _at(cfg, "train.alg_name", row.unsupported, *(f"train.{name}" for name in CELLS))
    if row.ratio == "none" and row.gate != "policy_gradient":
        rule = (
            f"{row.gate} needs an importance ratio: set train.ratio, or train.loss: policy_gradient"
        )
        yield Problem("train.ratio", rule, row.ratio, also=("train.loss",))
    for name in ("ratio", "denominator") if row.gate == "policy_gradient" else ():
        if getattr(cfg.train, name) not in (None, "none"):
            rule = (
                f"has no effect: {row.gate} reads no importance ratio; remove it, or set train.loss"
            )
            yield _at(cfg, f"train.{name}", rule, "train.loss")
    for low, high in (("weight_min", "weight_max"), ("correction_min", "correction_max")):
        lower, upper = getattr(cfg.train, low), getattr(cfg.train, high)
        if {f"train.{low}", f"train.{high}"} <= read and lower >= upper:
            yield _at(cfg, f"train.{low}", f"must be below train.{high}={upper}", f"train.{high}")


OF_RL = (
    check_reward,
    check_batch,
    check_sampling,
    check_staleness,
    check_anchor,
    check_reference,
    check_cells,
)
OF_RECIPE = {
    "rl": (*OF_RL, check_context),
    "rejection": (check_reward, check_rejection, check_context),
    "preference": (check_preference,),
}


def training_problems(cfg: Config) -> Iterator[Problem]:
    """Every cross-section problem of a training run."""
    for check in (check_scale, check_adapter, check_model, check_files):
        yield from check(cfg)
    for check in OF_RECIPE.get(cfg.train.row.recipe, ()):
        # While the algorithm is in doubt, so is what it asks for.
        yield from (
            replace(problem, also=(*problem.also, "train.alg_name")) for problem in check(cfg)
        )


def evaluation_problems(cfg: Config) -> Iterator[Problem]:
    """Problems that matter when a configuration is only evaluated."""
    for check in (check_scale, check_model, check_reward):
        yield from check(cfg)
    if cfg.data.eval is None and len(cfg.data.train_files) > 1:
        yield _at(
            cfg,
            "data.eval",
            "is needed: data.train is several files; name the one to evaluate on",
            "data.train",
        )
    evaluated = "data.train" if cfg.data.eval is None else "data.eval"
    yield from (problem for problem in check_files(cfg) if problem.path.startswith(evaluated))


def notices(cfg: Config) -> Iterator[str]:
    """Settings that are allowed and do less than they seem to."""
    row, train, steps = cfg.train.row, cfg.train, cfg.run.steps
    if train.kl is not None and row.kl != "none" and train.kl_coeff == 0:
        yield f"train.kl = {row.kl} has no effect while train.kl_coeff is 0"
    if train.warmup_steps >= steps:
        yield f"train.warmup_steps = {train.warmup_steps} is not over when the run ends at run.steps = {steps}"
    if "critic" in row.needs and train.critic_warmup_steps >= steps:
        yield f"train.critic_warmup_steps = {train.critic_warmup_steps} leaves none of {steps} steps to the policy"
    if cfg.run.device == "cpu" and cfg.model.dtype == "bfloat16":
        yield "model.dtype = bfloat16 on run.device = cpu is slower and less exact than float32"
