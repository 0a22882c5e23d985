"""`oxrl plan`: what a run will do, in words and numbers, from the configuration and files alone."""

from __future__ import annotations

from rich.filesize import decimal

from oxrl.assembly.micro_batch_rules import FIELD, read_at_once, tokens_by_rule
from oxrl.assembly.reference import reference_text
from oxrl.config.conditions import generates_answers, has_teacher
from oxrl.config.roles import roles_of
from oxrl.config.schema import Config
from oxrl.config.sections.model import told_origin
from oxrl.errors import DataError, UnreachableError, counted
from oxrl.modelfiles.dims import ModelDims, model_dims
from oxrl.modelfiles.hub import locate
from oxrl.plan.memory import disk_needed, memory, on_cpu, sync_bytes
from oxrl.tables.engines import EXACT, KEPT_CACHES
from oxrl.tables.watch import PHASES, Phase

# Texts by their labels; an empty one is not shown.
Lines = dict[str, str]


def plan_text(cfg: Config) -> str:
    """Describe what a run will do, one `label text` line each.

    Returns:
        Batch equation, totals, data, the reference if there is one, memory per phase and disk.

    Raises:
        DataError: a file on the hub can neither be found in the cache nor fetched.
    """
    row = cfg.train.row
    held = ", frozen linear layers in four bits" if cfg.model.load_in_4bit else ""
    batch = {"rl": _rl_batch, "rejection": _rejection_batch}.get(row.recipe, _supervised_batch)
    run = (
        f"{cfg.run.name}: {row.name} ({row.summary}) on {cfg.model.name}, "
        f"{cfg.model.dtype}{held}, device {cfg.run.device}, into {cfg.run.directory}"
    )
    lines = {"run": run} | batch(cfg) | _evaluation(cfg)
    lines["policy"] = told_origin(cfg.model.name)
    lines["reference"] = reference_text(cfg)
    lines["teachers"] = teachers_text(cfg)
    lines |= _sizes(cfg)
    lines["micro-batch"] = _micro_batches(cfg)
    lines["exact"] = EXACT if cfg.run.exact else ""
    lines["deadlines"] = _waits(cfg)
    return "\n".join(f"{label:<12}{text}" for label, text in lines.items() if text)


def _rl_batch(cfg: Config) -> Lines:
    prompts = cfg.data.prompts_per_step
    samples = cfg.rollout.n_samples
    longest = cfg.rollout.max_tokens
    minibatches = cfg.train.minibatches
    updates = cfg.train.updates
    steps = cfg.run.steps
    rows = prompts * samples
    rollouts = steps // updates
    responses = rollouts * rows
    all_rows = counted(rows, "row")
    group = f"{counted(prompts, 'prompt')} x {counted(samples, 'sample')} = {all_rows}"
    share = f"{counted(minibatches, 'minibatch', 'es')} of {counted(rows // minibatches, 'row')}"
    passes = f"{counted(cfg.train.epochs, 'epoch')} = {counted(updates, 'optimizer step')}"
    total = f"{counted(steps, 'optimizer step')} = {counted(rollouts, 'rollout step')}"
    lag = ""
    if cfg.ahead:
        lag = (
            f"; {counted(cfg.ahead, 'batch', 'es')} ahead of training, a token lags at most "
            f"{counted(cfg.rollout.max_staleness, 'weight version')}"
        )
    if cfg.rollout.swap == "keep":
        lag += f"; {KEPT_CACHES}"
    return {
        "rollout": f"{group} per rollout step, up to {longest:,} response tokens each{lag}",
        "update": f"{all_rows} in {share}, {passes} per rollout step",
        "total": f"{total} = {responses:,} responses, at most {responses * longest:,} tokens",
        "data": _passes(cfg, rollouts * prompts, "prompts"),
    }


def _supervised_batch(cfg: Config) -> Lines:
    rows = cfg.data.rows_per_step
    steps = cfg.run.steps
    return {
        "update": f"{counted(rows, 'row')} per optimizer step",
        "total": f"{counted(steps, 'optimizer step')} = {counted(steps * rows, 'row')}",
        "data": _passes(cfg, steps * rows, "rows"),
    }


def _rejection_batch(cfg: Config) -> Lines:
    samples = cfg.rollout.n_samples
    try:
        prompts = count_rows(cfg.data.train_files[0])
    except UnreachableError:
        return _supervised_batch(cfg)
    asked = (
        f"{counted(prompts, 'prompt')} x {counted(samples, 'sample')}"
        f" = {prompts * samples:,} responses; rows are those that are kept"
    )
    return _supervised_batch(cfg) | {"data": f"{cfg.data.train}: {asked}"}


def _evaluation(cfg: Config) -> Lines:
    if cfg.data.eval is None:
        return {}
    try:
        rows = count_rows(cfg.data.eval)
    except UnreachableError:
        return {"eval": f"{cfg.data.eval}: unknown rows"}
    if cfg.data.eval_rows is not None:
        rows = min(rows, cfg.data.eval_rows)
    text = f"{counted(rows, 'row')} of {cfg.data.eval}"
    if cfg.recipe == "rl" or generates_answers(cfg):
        text += f" x {counted(cfg.rollout.eval_samples, 'sample')}"
    text += ", "
    if cfg.run.eval_every:
        text += f"every {counted(cfg.run.eval_every, 'optimizer step')} and "
    return {"eval": f"{text}at the end"}


def _passes(cfg: Config, drawn: int, unit: str) -> str:
    files = cfg.data.train_files
    try:
        rows = sum(count_rows(file) for file in files)
    except UnreachableError:
        return f"{', '.join(files)}: unknown rows; {drawn:,} {unit} drawn"
    share = drawn / max(rows, 1)
    passes = f" = {share:.2f} passes over the data" if rows else ""
    if 0 < share < 0.01:
        passes = ", less than 0.01 passes over the data"
    return f"{', '.join(files)}: {counted(rows, 'row')}; {drawn:,} {unit} drawn{passes}"


def count_rows(path: str) -> int:
    """Count the rows of a JSONL (lines that are not blank) or Parquet file.

    Args:
        path: a file, or one on the hub, which is fetched as the run will.

    Raises:
        DataError: a Parquet file is none.
        UnreachableError: a file on the hub can neither be found in the cache nor fetched.
    """
    file = locate(path)
    if file.suffix == ".parquet":
        # Imported here: pyarrow is heavy, and only Parquet files need it.
        import pyarrow
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _micro_batches(cfg: Config) -> str:
    tokens = cfg.train.micro_batch_tokens
    if tokens != "auto":
        return read_at_once(tokens, FIELD)
    found, why = tokens_by_rule(cfg, on_cpu=on_cpu(cfg))
    return read_at_once(found, f"{FIELD}: auto, {why}")


def teachers_text(cfg: Config) -> str:
    """Say who scores what is sampled, by what, and which rows; empty where nobody does.

    Args:
        cfg: of the run.
    """
    told: list[str] = []
    asked = cfg.model.teachers if has_teacher(cfg) else {}
    for name, teacher in asked.items():
        who = teacher.name or f"the policy ({teacher.told_weights})"
        if teacher.prompt:
            who += f" behind {teacher.prompt}"
        dtype = teacher.held_dtype or cfg.model.dtype
        by = {"local": f"as a model of this run, {dtype}", "vllm": f"by vLLM, {dtype}"}
        how = by.get(teacher.engine, f"by the server at {teacher.url}")
        others = "every row" if len(asked) == 1 else "every other row"
        rows = f"rows of {', '.join(teacher.sources)}" if teacher.sources else others
        told.append(f"{name}: {who}, {how}, {rows}")
    return "; ".join(told)


def _sizes(cfg: Config) -> Lines:
    dims = model_dims(cfg.model.name)
    if dims is None:
        return {"model": f"unknown size: {cfg.model.name} is not on disk, or its files do not tell"}
    stored = memory(cfg, dims).stored
    kept = cfg.run.keep_checkpoints
    needed, _ = disk_needed(cfg, dims)
    return {
        "sync": sync_text(cfg, dims),
        "model": f"{dims.parameters:,} parameters, context {cfg.model.context_length or 'unknown'}",
        "disk": (
            f"{decimal(stored)} per checkpoint, {decimal(needed)} with {kept} kept and one being "
            "written"
        ),
    }


def sync_text(cfg: Config, dims: ModelDims) -> str:
    """Describe one delivery of weights: its bytes and its route; empty where nothing is sent."""
    samplers = cfg.samplers
    if not samplers or cfg.recipe != "rl":
        return ""
    what = "adapter" if cfg.lora.rank and cfg.lora.delivery == "adapter" else "weights"
    if cfg.inference_engine.weights != "trained":
        what += f", rounded to {cfg.inference_engine.weights},"
    source = "this process"
    if cfg.train.engine.several_ranks:
        source = "the training ranks, none through this process"
    to = f"to each of {samplers} samplers" if samplers > 1 else "to the sampler"
    return f"{decimal(sync_bytes(cfg, dims))} of {what} per delivery {to}, from {source}"


def _waits(cfg: Config) -> str:
    """Describe the longest wait of each phase, with the bytes of this model."""
    weights = cfg.model.nbytes
    sizes: dict[Phase, int] = {"load": len(roles_of(cfg)) * weights, "sync": weights}
    waits = [cfg.run.waits.of(phase, sizes.get(phase, 0)) for phase in PHASES]
    shown = ", ".join(f"{wait.phase} {wait.seconds:.4g} s" for wait in waits)
    return (
        f"timeouts without progress: {shown} (checkpoint: per byte written; rollout: per response "
        "or score)"
    )
