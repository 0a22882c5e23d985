"""Section `data`: what is read from disk."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Len
from pydantic import ValidationError, ValidatorFunctionWrapHandler, field_validator

from oxrl.config.conditions import evaluates, learns_given_rows, reads_images
from oxrl.config.field import (
    OFFLINE,
    RL,
    SAMPLING,
    SUPERVISED,
    Aka,
    Section,
    names_in,
    refuse_nul,
    setting,
)

BATCH = (
    "prompts of a rollout step in reinforcement learning, rows of an optimizer step otherwise; "
    "memory is bounded by train.micro_batch_tokens"
)
BATCHES = (
    Aka(
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        note=f"{BATCH}; `oxrl config convert FILE` writes such a file as ours",
    ),
    Aka(
        "generation_batch_size", "train_batch_size", "rollout_batch_size", "batch_size", note=BATCH
    ),
)


class DataConfig(Section):
    """The data that is read from disk. Relative paths are relative to the current directory."""

    train: Annotated[str, Len(1)] | Annotated[dict[str, Annotated[float, Gt(0)]], Len(1)] = setting(
        ...,
        "Training rows, .jsonl or .parquet, a path or hf://datasets/OWNER/NAME/FILE; "
        "several: {path: share, ...}.",
        aka=Aka(
            "dataset", "dataset_name", "train_dataset", "train_file", "train_files", "prompt_data"
        ),
    )
    eval: str | None = setting(
        None,
        "Held-out rows, as for train; null: no evaluation.",
        min_length=1,
        aka=Aka("eval_dataset", "eval_file", "val_files", "val_file", "test_files"),
    )
    prompts_per_step: int = setting(
        16,
        "Prompts per rollout step (reinforcement learning).",
        ge=1,
        le=1_000_000,
        why="all of a step's responses are held in memory",
        of=SAMPLING,
        aka=(
            *BATCHES,
            Aka("rl.data.train_batch_size", "rl.rollout_batch_size"),
        ),
    )
    rows_per_step: int = setting(
        64,
        "Rows per optimizer step (not in reinforcement learning).",
        ge=1,
        le=1_000_000,
        why="all rows of a step are held in memory",
        of=OFFLINE,
        aka=(
            *BATCHES,
            Aka("sl.data.train_batch_size", "sl.train_batch_size"),
        ),
    )
    pack_tokens: int | None = setting(
        None,
        "Pack rows of a step to so many tokens (supervised); null: pad.",
        ge=16,
        le=100_000_000,
        too_low="a pack is to hold several rows",
        why="a pack is to fit into memory",
        of=SUPERVISED,
        aka=Aka("packing", "padding_free", note="tokens of a packed row"),
    )
    max_prompt_tokens: int | None = setting(
        None,
        "Longest prompt; null: what rollout.max_tokens leaves.",
        ge=1,
        of=SAMPLING,
        aka=Aka("max_prompt_length", "prompt_max_len"),
    )
    overlong: Literal["drop", "error"] = setting(
        "drop",
        "A row that is too long is dropped, or stops the run.",
        aka=Aka(
            "filter_overlong_prompts",
            "truncation",
            note="dropped or refused, never cut",
            values={"true": "drop"},
        ),
    )
    stream: bool = setting(
        False, "Leave .jsonl rows on disk until they are drawn: for more than fits in memory."
    )
    columns: dict[Annotated[str, Len(1)], Annotated[str, Len(1)]] = setting(
        {},
        "Columns that have other names in the data: {prompt: question, answer: solution}; a.b is "
        "field b inside of a.",
        aka=Aka(
            "prompt_key",
            "input_key",
            "reward_fn_key",
            "dataset_text_field",
            note="ours: theirs, such as {answer: solution}",
        ),
    )
    given_rows: str | None = setting(
        None,
        "Given answers that gkd learns from beside what the policy samples: a path of "
        "conversations, as train is in supervised runs.",
        min_length=1,
        of=RL,
        when=learns_given_rows,
    )
    image_roots: str = setting(
        "",
        "Folders beside the data file's own, and beginnings of URLs, that rows may take images "
        "from, with commas: /data/photos,https://example.org/cats.",
        when=reads_images,
    )
    image_min_side: int = setting(
        8, "Images with a side of fewer pixels are refused.", ge=1, le=1_000_000, when=reads_images
    )
    image_max_side: int = setting(
        8192,
        "Images with a side of more pixels are refused.",
        ge=1,
        le=1_000_000,
        why="one image is to fit into memory",
        when=reads_images,
    )
    image_max_pixels: int | None = setting(
        None,
        "Larger images are made smaller before the model sees them (Qwen families); null: as the "
        "model's own files say.",
        ge=1,
        le=1_000_000_000,
        why="one image is to fit into memory",
        when=reads_images,
    )
    eval_rows: int | None = setting(
        None, "Evaluate on the first so many rows; null: all.", ge=1, when=evaluates
    )

    @field_validator("train", mode="wrap")
    @classmethod
    def _one_or_several(
        cls, value: object, check: ValidatorFunctionWrapHandler
    ) -> str | dict[str, float]:
        refuse_nul(value)
        try:
            return check(value)
        except ValidationError:
            raise ValueError(
                "must be a path, or a mapping of paths to positive shares "
                "such as {a.jsonl: 0.7, b.jsonl: 0.3}"
            ) from None

    @property
    def image_places(self) -> tuple[str, ...]:
        """Every place of `image_roots`."""
        return tuple(names_in(self.image_roots))

    @property
    def train_files(self) -> tuple[str, ...]:
        """Every file of `train`."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train)
