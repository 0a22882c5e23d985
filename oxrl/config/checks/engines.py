"""Engines that train and that sample: ranks, stages, devices and adapters, and models that are read
or computed otherwise than their own files and PyTorch have it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from oxrl.config.field import EVALUATING
from oxrl.config.schema import Config
from oxrl.config.source import Problem, Problems, at
from oxrl.errors import did_you_mean, why_no_file
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.chat_templates import TRAINING_TEMPLATES, template_file
from oxrl.modelfiles.dims import without_attention
from oxrl.modelfiles.folder import ADAPTER_CONFIG, FLASH, FLASH_INSTALL, vision_family
from oxrl.tables.engines import TRAINING_ENGINES

REMOTE = ("http://", "https://")
# Of `inference_engine.processes` where the device is a GPU.
ON_CPU_ALONE = (
    "sample on the CPU, and run.device is cuda: remove it, and this run's GPU samples too; or set "
    "run.device to cpu; samplers with GPUs of their own are inference_engine.actors (Ray)"
)


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


def check_device(cfg: Config) -> Problems:
    """Check that several processes share a run where they know the device."""
    if cfg.run.device in ("auto", "cpu", "cuda"):
        return
    if cfg.train.engine.several_ranks:
        yield at(
            "run.device",
            (
                "gradients of several ranks are reduced on CPU and CUDA only: "
                "set it to auto, or train.backend to local"
            ),
            "train.backend",
        )
    if cfg.samplers:
        yield at(
            "run.device",
            (
                "samplers with weights of their own run on CPU and CUDA only: set it to auto, "
                "or inference_engine.name to local and its actors and processes to 0"
            ),
            "inference_engine.name",
            "inference_engine.actors",
            "inference_engine.processes",
        )


def check_optimizer(cfg: Config) -> Problems:
    """Check that the engine has the optimizer, and masters of weights that need some."""
    engine = cfg.train.engine
    able = " or ".join(name for name, row in TRAINING_ENGINES.items() if row.without_masters)
    if cfg.train.optimizer not in engine.optimizers:
        yield at(
            "train.optimizer",
            (
                f"{cfg.train.backend} shards flattened weights, which AdamW alone can step: "
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
                "float32 weights are their own master weights: "
                "set it to float32, or model.dtype to bfloat16"
            ),
            "model.dtype",
        )
    if cfg.lora.rank:
        yield at(
            "train.master_weights",
            "adapters are float32, and the weights under them frozen: set it to float32",
            "lora.rank",
        )
    if not engine.without_masters:
        yield at(
            "train.master_weights",
            (
                f"{cfg.train.backend} needs float32 master weights: "
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
    """Training in the process that starts those which sample."""
    if not (cfg.sampling_process and cfg.recipe == "rl" and cfg.train.engine.several_ranks):
        return
    rank = f"{cfg.train.backend} trains in Ray actors, which send weights to others: "
    alone = "without Ray one process trains: train.backend local"
    if cfg.inference_engine.processes:
        yield at(
            "inference_engine.processes",
            f"{rank}remove it and set inference_engine.actors to 1 or more; {alone}",
            "train.backend",
        )
        return
    yield at(
        "inference_engine.actors",
        f"{rank}set it to 1 or more; {alone}",
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
    yield from _processes(cfg)
    if engine.weights != "trained":
        yield from _rounded(cfg)
    reads_text = engine.name == "vllm" and cfg.sampling_process
    if reads_text and vision_family(cfg.model.name) is not None:
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


def _rounded(cfg: Config) -> Problems:
    """Check that weights with few bits are made where they are whole, for a sampler that has its
    own.
    """
    field = "inference_engine.weights"
    engine = cfg.inference_engine.name
    if engine != "local":
        rule = f"is for inference_engine.name: local, this is {engine}: set it to trained"
        yield at(field, rule, "inference_engine.name")
    if cfg.train.engine.several_ranks:
        rule = (
            "rounds rows of whole weights, and ranks hold pieces of rows: set it to trained, or "
            "train.backend to local"
        )
        yield at(field, rule, "train.backend")
    if cfg.lora.rank and cfg.lora.delivery == "adapter":
        rule = (
            "rounds the weights that samplers are sent, and with an adapter that is the adapter "
            "alone: set lora.delivery to merged, or this to trained"
        )
        yield at(field, rule, "lora.delivery", "lora.rank")


def _processes(cfg: Config) -> Problems:
    """Check that samplers in processes of this machine are the only ones, and have a device."""
    engine = cfg.inference_engine
    if not engine.processes:
        return
    if engine.actors:
        yield at(
            "inference_engine.processes",
            (
                "samplers are processes of this machine or Ray actors, and inference_engine.actors "
                f"is {engine.actors}: remove one of the two"
            ),
            "inference_engine.actors",
        )
    if cfg.run.device == "cuda":
        yield at("inference_engine.processes", ON_CPU_ALONE, "run.device")


# --- Adapters.
def check_adapter(cfg: Config) -> Problems:
    """Adapters where they can be trained and sampled, on a model that can be loaded again."""
    if not cfg.lora.rank:
        return
    if cfg.model.dtype == "bfloat16" and not cfg.train.engine.bfloat16_adapters:
        yield at(
            "lora.rank",
            (
                "DeepSpeed rounds adapters to model.dtype, which are float32 elsewhere: "
                "train with fsdp, or in float32"
            ),
            "train.backend",
            "model.dtype",
        )
    if cfg.train.row.moves_reference:
        yield at(
            "lora.rank",
            (
                f"{cfg.train.alg_name} moves its reference by all weights, "
                "of which adapters have none: set it to 0"
            ),
            "train.alg_name",
        )
    yield from _under_adapter(cfg)
    if cfg.model.load_in_4bit:
        yield from _in_four_bits(cfg)
    if cfg.run.exact:
        yield from _exact_adapter(cfg)


def _exact_adapter(cfg: Config) -> Problems:
    """Adapters that samplers compute with as the trainer does, to the last bit."""
    if cfg.lora.dora:
        yield at(
            "lora.dora",
            "no exact form of it exists: set it to false, or run.exact to false",
            "run.exact",
        )
    if cfg.lora.delivery == "merged":
        yield at(
            "lora.delivery",
            (
                "a sampler with merged weights rounds otherwise than a trainer with an adapter: "
                "set it to adapter, or run.exact to false"
            ),
            "run.exact",
        )


def _under_adapter(cfg: Config) -> Problems:
    """A model that is on a disk, and has no adapter itself."""
    if is_builtin(cfg.model.name):
        yield at(
            "model.name",
            (
                "an adapter is stored without the model under it, "
                "and a built-in one is on no disk; "
                "give a folder, for one the checkpoint of an earlier run"
            ),
            "lora.rank",
        )
    elif (Path(cfg.model.name) / ADAPTER_CONFIG).is_file():
        yield at(
            "model.name",
            "holds an adapter; merge it first: oxrl export FOLDER --out FOLDER",
            "lora.rank",
        )


def _in_four_bits(cfg: Config) -> Problems:
    """Nobody needs whole weights."""
    if cfg.train.backend != "local":
        yield at(
            "model.load_in_4bit",
            (
                "4-bit weights stay whole in one process, and ranks shard weights: "
                "set train.backend to local"
            ),
            "train.backend",
            "lora.rank",
        )
    if cfg.recipe in EVALUATING and cfg.samplers and cfg.lora.delivery == "adapter":
        yield at(
            "model.load_in_4bit",
            (
                "samplers that load the model's files have unquantised weights under the adapter: "
                "set lora.delivery to merged, or inference_engine.name to local and its actors and "
                "processes to 0"
            ),
            "lora.delivery",
            "inference_engine",
            "lora.rank",
        )
    if vision_family(cfg.model.name) is not None:
        yield at(
            "model.load_in_4bit",
            "is known for models of text alone, and this one reads images: set it to false",
            "model.name",
            "lora.rank",
        )


# --- Bits.
def check_exact(cfg: Config) -> Problems:
    """Everything that computes has a form whose bits do not depend on what is in a batch."""
    if not cfg.run.exact:
        return
    from oxrl.config.checks.exact import exact_problems  # most runs are as fast as they can be

    yield from exact_problems(cfg)


# --- Models.
def check_template(cfg: Config) -> Problems:
    """The chat template is a file, or one of oxRL's."""
    template = cfg.model.chat_template
    if template is not None and not template_file(template).is_file():
        near = did_you_mean(template, TRAINING_TEMPLATES)
        known = "" if near else f", nor a template of oxRL: {', '.join(TRAINING_TEMPLATES)}"
        yield at("model.chat_template", f"{why_no_file(template)}{near}{known}")


def check_attention(cfg: Config) -> Problems:
    """The kernels of attention are installed, and can do what the model and the run ask for."""
    wanted = cfg.model.attention
    flash = wanted == "flash_attention_2"
    rules: list[str] = []
    lacking = without_attention(cfg.model.name, wanted)
    if lacking is not None:
        rules.append(f"{lacking}: set it to auto")
    if flash and find_spec(FLASH) is None:
        rules.append(f"needs the flash-attn package, which is not installed: {FLASH_INSTALL}")
    if flash and cfg.run.device == "cpu":
        rules.append("needs a GPU, and run.device is cpu: set it to sdpa")
    if flash and cfg.model.dtype != "bfloat16":
        rules.append("computes in bfloat16 only: set model.dtype to bfloat16, or it to sdpa")
    if rules:
        yield at("model.attention", "; ".join(rules), "model.name")


def check_offload(cfg: Config) -> Problems:
    """Activations are offloaded where few of them are kept."""
    if cfg.model.offload_activations and not cfg.model.gradient_checkpointing:
        yield at(
            "model.offload_activations",
            "offloads the activations that gradient checkpointing keeps, and it is off: "
            "add model.gradient_checkpointing: true, or remove this",
            "model.gradient_checkpointing",
        )


def check_images(cfg: Config) -> Problems:
    """Check where images come from, how large they are, and what of their model is frozen."""
    family = vision_family(cfg.model.name)
    if family is None:
        return
    for root in cfg.data.image_places:
        if not root.startswith(REMOTE) and not Path(root).is_dir():
            yield Problem(
                "data.image_roots",
                f"{root!r} is neither a folder here nor a URL of http or https",
                root,
            )
    if cfg.data.image_min_side > cfg.data.image_max_side:
        yield at(
            "data.image_min_side",
            f"exceeds data.image_max_side {cfg.data.image_max_side}",
            "data.image_max_side",
        )
    if cfg.data.image_max_pixels is not None and family.layout != "patches":
        yield at(
            "data.image_max_pixels",
            f"{family.name} shows every image at a size that its own files fix: leave it out",
            "model.name",
        )
    still = cfg.lora.rank or "vision" in cfg.model.freeze
    if cfg.train.tower_lr is not None and (still or cfg.train.lr == 0):
        yield at(
            "train.tower_lr",
            "the vision tower is not trained (lora.rank, model.freeze or train.lr): leave it out",
            "lora.rank",
            "model.freeze",
            "train.lr",
        )
    if cfg.train.tower_lr is not None and cfg.train.backend == "deepspeed":
        yield at(
            "train.tower_lr",
            "DeepSpeed trains all weights at one rate: leave it out, or set train.backend: fsdp",
            "train.backend",
        )
    if cfg.model.freeze != "none" and cfg.lora.rank:
        yield at(
            "model.freeze", "adapters freeze all of the model already: leave it out", "lora.rank"
        )
