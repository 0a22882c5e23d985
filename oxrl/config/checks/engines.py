"""Checks of the engines that train and that sample: ranks, stages and devices."""

from __future__ import annotations

from oxrl.config.checks.base import Check, Problems, at
from oxrl.config.schema import Config
from oxrl.modelfiles.vision import vision_family
from oxrl.tables.engines import TRAINING_ENGINES


def check_ranks(cfg: Config) -> Problems:
    """Several training ranks where the engine and the recipe have them."""
    engine = cfg.train.engine
    if cfg.run.training_gpus > 1 and not engine.several_ranks:
        yield at(
            "run.training_gpus",
            "the local engine is one process: set it to 1, or train.backend to deepspeed or fsdp",
            "train.backend",
        )
    if engine.several_ranks and cfg.recipe == "rejection":
        yield at(
            "train.backend",
            (
                "rft samples in one process: "
                "set it to local, or train sft on the kept.jsonl of a run that did"
            ),
            "train.alg_name",
        )


def check_optimizer(cfg: Config) -> Problems:
    """Check that the engine has the optimizer, and masters of weights that need some."""
    engine = cfg.train.engine
    able = " or ".join(name for name, row in TRAINING_ENGINES.items() if row.without_masters)
    if cfg.train.optimizer not in engine.optimizers:
        yield at(
            "train.optimizer",
            (
                f"{cfg.train.backend} steps flat pieces of many weights with AdamW: "
                f"set it to adamw, or train.backend to {able}"
            ),
            "train.backend",
        )
    if cfg.train.master_weights == "float32":
        return
    if cfg.model.dtype == "float32":
        yield at(
            "train.master_weights",
            (
                "weights in float32 are stepped themselves, without copies: "
                "set it to float32, or model.dtype to bfloat16"
            ),
            "model.dtype",
        )
    if cfg.lora.rank:
        yield at(
            "train.master_weights",
            "adapters are float32 beside weights that nothing steps: set it to float32",
            "lora.rank",
        )
    if not engine.without_masters:
        yield at(
            "train.master_weights",
            (
                f"{cfg.train.backend} steps float32 copies: "
                f"set it to float32, or train.backend to {able}"
            ),
            "train.backend",
        )


def check_deepspeed(cfg: Config) -> Problems:
    """Sections `deepspeed` and `deepspeed_ref`: what DeepSpeed can do at their stages."""
    if cfg.train.backend != "deepspeed":
        return
    policy = cfg.deepspeed
    reference = cfg.deepspeed_ref
    if policy.zero_stage == 0 and cfg.model.dtype == "bfloat16":
        yield at(
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
            yield at(path, f"needs {decider} {least} or more, this is {stage}", decider)


def check_sampling_process(cfg: Config) -> Problems:
    """Training in the process that starts the one which samples."""
    if cfg.sampling_process and cfg.recipe == "rl" and cfg.train.engine.several_ranks:
        yield at(
            "inference_engine.actors",
            (
                f"{cfg.train.backend} trains in Ray actors, which send weights to others: set it "
                "to 1 or more; without Ray one process trains: train.backend local"
            ),
            "train.backend",
            "inference_engine.name",
        )


def check_samplers(cfg: Config) -> Problems:
    """Check that samplers have the processes and devices that they need."""
    engine = cfg.inference_engine
    colocated = engine.placement == "colocated"
    if colocated and engine.actors > cfg.run.training_gpus:
        yield at(
            "inference_engine.actors",
            (
                "each shares the device of a training actor, "
                f"and run.training_gpus is {cfg.run.training_gpus}"
            ),
            "run.training_gpus",
            "inference_engine.placement",
        )
    if cfg.sampling_process and vision_family(cfg.model.name) is not None:
        yield at(
            "inference_engine.name",
            (
                "reads images in Ray actors alone: set inference_engine.actors to 1 or more "
                "(reinforcement learning), or it to local"
            ),
            "inference_engine.actors",
            "model.name",
        )
    if colocated and engine.tensor_parallel > 1:
        yield at(
            "inference_engine.tensor_parallel",
            "needs devices of its own: set inference_engine.placement to separate, or this to 1",
            "inference_engine.placement",
        )


ENGINES: tuple[Check, ...] = (
    check_ranks,
    check_deepspeed,
    check_optimizer,
    check_samplers,
    check_sampling_process,
)
