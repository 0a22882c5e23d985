"""Sections `model` and `lora`: what is trained, who teaches it, and what a model is that is named
by the run that trained it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from oxrl.config.conditions import (
    has_adapter,
    has_teacher,
    on_the_hub,
    reads_images,
    sends_adapters,
)
from oxrl.config.field import Aka, Section, setting
from oxrl.errors import OxrlError
from oxrl.modelfiles.chat_templates import TRAINING_TEMPLATES
from oxrl.modelfiles.dims import model_context, model_dims
from oxrl.runs.checkpoints import is_run, named_run

# Weights of a teacher that follows the policy: its name under `weights`.
EMA = "ema"


def _taken(name: str) -> str:
    """Return what a name stands for: of a run the checkpoint that is taken, else itself."""
    run = named_run(name) if name else None
    if run is None:
        return name
    from oxrl.checkpoint.targets import learned  # most names are not of a run

    try:
        return str(learned(run))
    except (OSError, OxrlError) as error:
        raise ValueError(str(error)) from None


# The name of a model, or the directory of a run that trained one.
Learned = Annotated[str, AfterValidator(_taken)]


def _followed(weights: str | dict[str, float]) -> str | dict[str, float]:
    """Refuse a mapping that does not say how fast a teacher follows the policy."""
    if isinstance(weights, dict) and (set(weights) != {EMA} or not 0 < weights[EMA] <= 1):
        raise ValueError(
            "must be live, frozen or {ema: SHARE}, the share of the policy that its weights take "
            "in after each rollout step, above 0 and at most 1"
        )
    return weights


class Teacher(Section):
    """A model that scores what the policy samples, under `model.teachers`."""

    name: Learned = setting(
        "",
        "Folder, hub name, builtin:<name>, or a run: what it learned; with engine endpoint what "
        "the server calls it. Empty: the policy itself, under another prompt.",
    )
    revision: str | None = setting(None, "As model.revision.", min_length=1)
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "Type of its weights; null: model.dtype."
    )
    device: str | None = setting(
        None,
        "Where a local teacher computes, such as cpu or cuda:1; null: where the policy does.",
        min_length=1,
    )
    engine: Literal["local", "vllm", "endpoint"] = setting(
        "local",
        "What asks it: what trains the policy; vLLM in a process of its own; or a server of vLLM's "
        "at url.",
    )
    url: str = setting("", "Of engine endpoint: http://HOST:PORT/v1.", resume="free")
    key_env: str = setting(
        "", "Environment variable with the key of url, where it wants one.", resume="free"
    )
    sources: list[str] = setting(
        [], "Rows that it scores, by their source; empty: every row that no other teacher names."
    )
    prompt: str = setting(
        "",
        "Jinja file that writes the last message of the prompt as the teacher is to see it, from "
        "`prompt` and what `reads` names.",
    )
    reads: list[str] = setting(
        [],
        "What the template reads beside `prompt`: answer, feedback (what the reward or environment "
        "said), peer (another response to the prompt that succeeded), or fields of the row; a row "
        "that lacks one has no teacher.",
    )
    weights: Annotated[Literal["live", "frozen"] | dict[str, float], AfterValidator(_followed)] = (
        setting(
            "live",
            "The policy's own that teach under another prompt: live: those of the step; frozen: "
            "those of the start; {ema: 0.05}: a moving average, which takes in such a share of "
            "them after each rollout step.",
        )
    )

    @property
    def follows(self) -> float:
        """Share of the policy that its weights take in after a rollout step; 0: none."""
        return self.weights[EMA] if isinstance(self.weights, dict) else 0.0

    @property
    def held_dtype(self) -> str | None:
        """Type of its weights; null: the policy's. In bfloat16 an average would stand still."""
        return "float32" if self.follows else self.dtype

    @property
    def told_weights(self) -> str:
        """Its weights, where they are the policy's, in words."""
        return f"averaged by {self.follows:g}" if self.follows else str(self.weights)

    @property
    def own_weights(self) -> bool:
        """True if it is a model beside the policy, on the engine that trains."""
        return self.engine == "local" and (bool(self.name) or self.weights != "live")


class ModelConfig(Section):
    """The policy that is trained."""

    name: Learned = setting(
        ...,
        'Folder, hub name, "builtin:<name>" (needs no files), or a run: what it learned, in best/ '
        "where it keeps that, else in its newest checkpoint. A run keeps the one it began with.",
        min_length=1,
        aka=Aka(
            "model",
            "model_name_or_path",
            "model_name",
            "model_path",
            "model.path",
            "pretrain",
            "base_model",
        ),
    )
    revision: str | None = setting(
        None,
        "Commit, tag or branch of a model on the hub; null: main. A run keeps the commit it began "
        "with.",
        min_length=1,
        when=on_the_hub,
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "Type of the weights; masters and moments are float32.",
        aka=(
            Aka(
                "bf16",
                "torch_dtype",
                "param_dtype",
                values={
                    "true": "bfloat16",
                    "false": "float32",
                    "bf16": "bfloat16",
                    "fp32": "float32",
                },
            ),
            Aka("fp16", note="float32 or bfloat16"),
        ),
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = setting(
        "auto",
        "What computes attention; auto: sdpa where the model has it, else eager. flash_attention_2 "
        "needs a GPU, bfloat16 and the flash-attn package.",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Recompute activations: less memory, a third more time.",
        resume="reorders",
        aka=Aka("enable_gradient_checkpointing"),
    )
    offload_activations: bool = setting(
        False,
        "With gradient_checkpointing: what is kept of each layer waits in CPU memory for the "
        "backward pass, which takes time; without a GPU it saves nothing.",
        resume="free",
    )
    chat_template: str | None = setting(
        None,
        "Jinja file of conversations, or one of oxRL's: "
        f"{', '.join(TRAINING_TEMPLATES)}; null: the tokenizer's own.",
        min_length=1,
    )
    max_length: int | None = setting(
        None,
        "Longest row, prompt and response, in tokens; null: the model's. Rotary positions that "
        "change with the length of rows (dynamic, longrope) are those of such a row in every row.",
        ge=2,
        le=100_000_000,
        why="no model reads longer rows",
        aka=Aka("max_seq_length", "max_seq_len", "max_len", "max_model_len", "cutoff_len"),
    )
    freeze: Literal["none", "vision", "projector", "vision+projector"] = setting(
        "none",
        "Parts of a model that reads images that are not trained: its vision tower, what projects "
        "from there into the language part, or both.",
        when=reads_images,
    )
    load_in_4bit: bool = setting(
        False,
        "QLoRA: with lora.rank, hold the frozen linear layers in four bits (NF4, doubly quantised) "
        "by bitsandbytes; they compute in dtype.",
        when=has_adapter,
        aka=Aka(
            "use_4bit",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
            "bnb_4bit_compute_dtype",
            "use_bnb_nested_quant",
            "quantization_bit",
            note="with lora.rank; NF4, doubly quantised, computing in dtype",
            values={"4": True, "true": True, "nf4": True},
        ),
    )
    trust_remote_code: bool = setting(False, "Run Python code that ships with the model.")
    teachers: dict[str, Teacher] = setting(
        {},
        "Models with the policy's vocabulary that score what it samples, by names of your own.",
        when=has_teacher,
        aka=Aka("teacher_model", "teacher_model_name_or_path", note="a mapping: {NAME: {name: X}}"),
    )

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in `dtype`."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's weights; 0: unknown."""
        dims = model_dims(self.name)
        return 0 if dims is None else dims.parameters * self.weight_bytes

    @property
    def context_length(self) -> int | None:
        """Longest row of a run in tokens: `max_length`, else the model's own; None: not known."""
        return self.max_length or model_context(self.name)


class LoraConfig(Section):
    """Low-rank adapters (peft) on a frozen model; no dropout, with which ratios of equal weights
    would not be 1.
    """

    rank: int = setting(
        0,
        "Rank of the adapters; 0: no adapters, every weight is trained.",
        ge=0,
        le=65536,
        why="no layer is so wide",
        aka=Aka("lora_r", "lora_rank"),
    )
    alpha: float = setting(
        32.0,
        "Adapters are scaled by alpha / rank; with rslora by alpha / sqrt(rank).",
        gt=0,
        le=1_000_000,
        why="adapters of such a scale leave nothing of the model",
        when=has_adapter,
        aka=Aka("lora_alpha"),
    )
    targets: str = setting(
        "all-linear",
        "Layers that get one: all-linear, or names with commas: q_proj,v_proj.",
        when=has_adapter,
        aka=Aka("lora_target", "lora_target_modules", "target_modules"),
    )
    rslora: bool = setting(
        False,
        "rsLoRA: scale by alpha / sqrt(rank); large ranks learn as fast as small ones.",
        when=has_adapter,
        aka=Aka("use_rslora"),
    )
    dora: bool = setting(
        False,
        "DoRA: also train the length of each row of the adapted weights; takes more time.",
        when=has_adapter,
        aka=Aka("use_dora"),
    )
    delivery: Literal["adapter", "merged"] = setting(
        "adapter",
        "What is sent to samplers with weights of their own: the adapter alone, which each of them "
        "merges or computes with; or whole weights, merged by those who train, for samplers "
        "without a second copy of the model in CPU memory.",
        when=sends_adapters,
    )


def told_origin(name: str) -> str:
    """Say that a model lies in the directory of a run; empty where it does not."""
    # A name such as builtin:tiny is in no folder, though a path of that name would be in this one.
    if not (Path(name).exists() and any(map(is_run, Path(name).parents[:2]))):
        return ""
    return f"begins with what a run learned, as it is in {name}"
