"""Checks across sections, all run before anything heavy is imported. Each yields every problem it finds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from oxrl.config.dims import context_length
from oxrl.config.reads import row_fields
from oxrl.config.schema import CELLS, Config, did_you_mean
from oxrl.config.source import Problem
from oxrl.models.builtin import BUILTIN_DIMS, is_builtin

BUILT_IN_REWARDS = ("math", "exact", "reasoning-gym")
DATA_SUFFIXES = (".jsonl", ".parquet")


def check_scale(cfg: Config) -> Iterator[Problem]:
    """Engines of the scale-out extras, which the local engine cannot stand in for."""
    later = "arrives with the scale-out engines; this version trains and samples with the local engine"
    if cfg.run.training_gpus > 1:
        yield Problem("run.training_gpus", f"training on several devices {later}: set it to 1", cfg.run.training_gpus)
    if cfg.inference_engine.name != "local":
        yield Problem("inference_engine.name", f"{later}: set it to local", cfg.inference_engine.name)
    if cfg.deepspeed is not None:
        yield Problem("deepspeed", f"DeepSpeed {later}: remove the section")
    if cfg.deepspeed_ref is not None:
        reason = "" if cfg.train.kl_coeff > 0 else "there is no reference model (train.kl_coeff is 0), and "
        yield Problem("deepspeed_ref", f"{reason}DeepSpeed {later}: remove the section", also=("train.kl_coeff",))


def check_model(cfg: Config) -> Iterator[Problem]:
    """Model and template are there, as far as that can be seen without the network."""
    name = cfg.model.name
    if is_builtin(name):
        if name not in BUILTIN_DIMS:
            rule = f"must be one of {', '.join(sorted(BUILTIN_DIMS))}{did_you_mean(name, BUILTIN_DIMS)}"
            yield Problem("model.name", rule, name)
    elif name.startswith((".", "/", "~")) and not (Path(name) / "config.json").is_file():
        state = "has no config.json" if Path(name).is_dir() else "is no folder"
        rule = f"{state}; give a folder in Hugging Face format, a hub name or builtin:tiny"
        yield Problem("model.name", rule, name)
    if cfg.model.chat_template is not None and not Path(cfg.model.chat_template).is_file():
        yield Problem("model.chat_template", _no_file(cfg.model.chat_template), cfg.model.chat_template)


def check_files(cfg: Config) -> Iterator[Problem]:
    """Data files exist and have a format that can be read."""
    for path, value in (*(("data.train", file) for file in cfg.data.train_files), ("data.eval", cfg.data.eval)):
        if value is None:
            continue
        if Path(value).suffix not in DATA_SUFFIXES:
            yield Problem(path, f"must end in {' or '.join(DATA_SUFFIXES)}; `oxrl prepare` writes such files", value)
        elif not Path(value).is_file():
            yield Problem(path, _no_file(value), value)


def _no_file(value: str) -> str:
    """Explain a missing file, with the closest name in its folder."""
    folder = Path(value).parent
    if Path(value).is_dir():
        return "is a folder; give a file"
    if not folder.is_dir():
        return f"no such file: the folder {folder} does not exist (relative paths start at {Path.cwd()})"
    return f"no such file{did_you_mean(Path(value).name, [item.name for item in folder.iterdir()])}"


def check_reward(cfg: Config) -> Iterator[Problem]:
    """The reward is built in, or a function that its file defines; nothing is imported."""
    name = cfg.reward.name
    file, colon, function = name.rpartition(":")
    if not name:
        rule = "is required: what scores a response; one of math, exact or path.py:function"
        yield Problem("reward.name", rule)
    elif not colon:
        if name not in BUILT_IN_REWARDS:
            rule = f"must be {', '.join(BUILT_IN_REWARDS)} or path.py:function{did_you_mean(name, BUILT_IN_REWARDS)}"
            yield Problem("reward.name", rule, name)
    elif not Path(file).is_file():
        yield Problem("reward.name", f"{file}: {_no_file(file)}", name)
    else:
        yield from _check_reward_file(file, function, name)


def _check_reward_file(file: str, function: str, name: str) -> Iterator[Problem]:
    try:
        tree = ast.parse(Path(file).read_bytes(), filename=file)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        yield Problem("reward.name", f"{file}{f':{line}' if line else ''} is not Python: {error.args[0]}", name)
        return
    # Names that are imported or assigned count too: only a name found nowhere is surely wrong.
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    if function not in names:
        yield Problem("reward.name", f"{file} defines no '{function}'{did_you_mean(function, names)}", name)


def check_batch(cfg: Config) -> Iterator[Problem]:
    """Batch equation: whole groups per minibatch, whole rollout steps per run."""
    prompts, minibatches, epochs = cfg.data.prompts_per_step, cfg.train.minibatches, cfg.train.epochs
    if prompts % minibatches:
        divisors = _nearest([n for n in range(1, prompts + 1) if prompts % n == 0], minibatches)
        multiples = _nearest(
            [minibatches * n for n in (prompts // minibatches, prompts // minibatches + 1) if n], prompts
        )
        rule = (
            f"must divide data.prompts_per_step={prompts}, so that each minibatch holds whole groups; nearest valid: "
            f"train.minibatches {divisors}, or data.prompts_per_step {multiples}"
        )
        yield Problem("train.minibatches", rule, minibatches, also=("data.prompts_per_step",))
    per_rollout = epochs * minibatches
    if cfg.run.steps % per_rollout:
        below, above = cfg.run.steps // per_rollout * per_rollout, -(-cfg.run.steps // per_rollout) * per_rollout
        valid = _nearest([n for n in (below, above) if n], cfg.run.steps)
        rule = (
            f"must be a multiple of {per_rollout} = train.epochs {epochs} x train.minibatches {minibatches}, the "
            f"optimizer steps of one rollout step; nearest valid: {valid}"
        )
        yield Problem("run.steps", rule, cfg.run.steps, also=("train.epochs", "train.minibatches"))
    if cfg.train.old_logprobs == "current" and per_rollout > 1:
        rule = (
            f"needs one optimizer step per rollout batch, this run has {per_rollout} = train.epochs {epochs} x "
            f"train.minibatches {minibatches}; set it to recompute or auto"
        )
        yield Problem("train.old_logprobs", rule, "current", also=("train.epochs", "train.minibatches"))


def _nearest(candidates: list[int], value: int) -> str:
    return " or ".join(str(n) for n in sorted(sorted(candidates, key=lambda n: abs(n - value))[:2]))


def check_sampling(cfg: Config) -> Iterator[Problem]:
    """Sampling that training can learn from."""
    rollout, row = cfg.rollout, cfg.train.row
    grouped = "groups" in row.needs
    cells = ("train.alg_name", "train.advantage")
    if rollout.temperature == 0:
        same = ": all samples of a prompt are identical and every advantage is 0" if grouped else ""
        rule = f"training cannot sample greedily{same}; set it above 0 (rollout.eval_temperature may be 0)"
        yield Problem("rollout.temperature", rule, rollout.temperature, also=cells)
    if rollout.top_p < 1:
        rule = "training needs 1: a cut distribution is not the policy that is trained; `oxrl eval` may cut"
        yield Problem("rollout.top_p", rule, rollout.top_p)
    if rollout.top_k > 0:
        rule = "training needs 0: a cut distribution is not the policy that is trained; `oxrl eval` may cut"
        yield Problem("rollout.top_k", rule, rollout.top_k)
    if grouped and rollout.n_samples < 2:
        rule = f"{row.advantage} compares the samples of one prompt: set it to 2 or more"
        yield Problem("rollout.n_samples", rule, rollout.n_samples, also=cells)
    if row.advantage == "pass_at_k" and cfg.train.pass_k > rollout.n_samples:
        rule = f"cannot exceed rollout.n_samples {rollout.n_samples}: lower it, or sample more"
        yield Problem("train.pass_k", rule, cfg.train.pass_k, also=("rollout.n_samples",))
    if rollout.max_staleness > 0:
        rule = "sampling while training arrives with the scale-out engines; set it to 0"
        yield Problem("rollout.max_staleness", rule, rollout.max_staleness)


def check_context(cfg: Config) -> Iterator[Problem]:
    """Prompt and response fit into the model's context."""
    context = context_length(cfg)
    origin = "model.max_length" if cfg.model.max_length is not None else "the model's context"
    also = ("model.max_length", "model.name", "data.max_prompt_tokens")
    if cfg.model.max_length is not None:
        known = context_length(cfg.model_copy(update={"model": cfg.model.model_copy(update={"max_length": None})}))
        if known is not None and cfg.model.max_length > known:
            rule = f"exceeds the model's context {known}; lower it"
            yield Problem("model.max_length", rule, cfg.model.max_length, also=("model.name",))
    if context is None or cfg.train.row.recipe != "rl":
        return
    prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_tokens
    if prompt is not None and prompt + response > context:
        rule = (
            f"{response} + data.max_prompt_tokens {prompt} = {prompt + response} exceeds {origin} {context}; lower one"
        )
        yield Problem("rollout.max_tokens", rule, response, also=also)
    elif response >= context:
        rule = f"leaves no room for a prompt in {origin} {context}; set it below {context}"
        yield Problem("rollout.max_tokens", rule, response, also=also)


def check_anchor(cfg: Config) -> Iterator[Problem]:
    """Old logprobs, correction and denominator: the sampler's mismatch may be corrected once."""
    row = cfg.train.row
    if row.correction == "none":
        return
    also = ("train.alg_name", "train.correction", "train.denominator")
    if cfg.train.old_logprobs == "bypass":
        rule = f"puts the sampler's logprobs into the ratio, and correction {row.correction} would count them twice"
        yield Problem("train.old_logprobs", f"{rule}; set train.correction: none or recompute", "bypass", also=also)
    if row.denominator == "rollout":
        rule = f"a ratio against the rollout policy and correction {row.correction} count the mismatch twice"
        yield Problem("train.correction", f"{rule}; set train.correction: none or train.denominator: old", also=also)


def check_cells(cfg: Config) -> Iterator[Problem]:
    """Cells chosen by hand that do not fit together."""
    row = cfg.train.row
    cells = ("train.alg_name", "train.ratio", "train.loss")
    if row.unsupported:
        yield Problem("train.alg_name", row.unsupported, cfg.train.alg_name, also=tuple(f"train.{c}" for c in CELLS))
    if row.ratio == "none" and row.gate != "policy_gradient":
        rule = f"{row.gate} needs an importance ratio: set train.ratio, or train.loss: policy_gradient"
        yield Problem("train.ratio", rule, row.ratio, also=cells)
    if row.gate == "policy_gradient":
        for name in ("ratio", "denominator"):
            if getattr(cfg.train, name) not in (None, "none"):
                rule = f"has no effect: {row.gate} reads no importance ratio; remove it, or set train.loss"
                yield Problem(f"train.{name}", rule, getattr(cfg.train, name), also=("train.alg_name", "train.loss"))


def check_bounds(cfg: Config) -> Iterator[Problem]:
    """Pairs of numbers that only make sense in order, where the algorithm reads both."""
    read = row_fields(cfg.train.row)
    for low, high in (("weight_min", "weight_max"), ("correction_min", "correction_max")):
        lower, upper = getattr(cfg.train, low), getattr(cfg.train, high)
        if {f"train.{low}", f"train.{high}"} <= read and lower >= upper:
            yield Problem(f"train.{low}", f"must be below train.{high}={upper}", lower, also=(f"train.{high}",))


def training_problems(cfg: Config) -> Iterator[Problem]:
    """Every cross-section problem of a training run."""
    for check in (check_scale, check_model, check_files, check_context):
        yield from check(cfg)
    if cfg.train.row.recipe == "rl":
        for check in (check_reward, check_batch, check_sampling, check_anchor, check_cells, check_bounds):
            yield from check(cfg)


def evaluation_problems(cfg: Config) -> Iterator[Problem]:
    """Problems that matter when a configuration is only evaluated."""
    for check in (check_scale, check_model, check_reward):
        yield from check(cfg)
    evaluated = "data.train" if cfg.data.eval is None else "data.eval"
    yield from (problem for problem in check_files(cfg) if problem.path == evaluated)


def notices(cfg: Config) -> Iterator[str]:
    """Settings that are allowed and do less than they seem to."""
    row, train, steps = cfg.train.row, cfg.train, cfg.run.steps
    if train.kl is not None and row.kl != "none" and train.kl_coeff == 0:
        yield f"train.kl = {row.kl} has no effect while train.kl_coeff is 0"
    if train.warmup_steps >= steps:
        yield f"train.warmup_steps = {train.warmup_steps} is not over when the run ends at run.steps = {steps}"
    if "critic" in row.extras and train.critic_warmup_steps >= steps:
        yield f"train.critic_warmup_steps = {train.critic_warmup_steps} leaves none of {steps} steps to the policy"
    if cfg.run.device == "cpu" and cfg.model.dtype == "bfloat16":
        yield "model.dtype = bfloat16 on run.device = cpu is slower and less exact than float32"
