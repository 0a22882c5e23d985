"""Sections `rollout`, `environment` and `action`: what is sampled, and what the turns of it are."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import field_validator

from oxrl.config.conditions import (
    codes_bins,
    codes_fast,
    counts_rounds,
    evaluates,
    has_actions,
    has_environment,
    has_number_actions,
    reads_history,
    samples_ahead,
)
from oxrl.config.field import EVALUATING, RL, SAMPLING, Aka, Section, names_in, setting

# Why bounds are where they are.
TEMPERATURE = (
    "samples at more are noise; 0.01 and less but 0 leaves one token, which is what 0 says"
)


class RolloutConfig(Section):
    """The sampling for training, and for evaluation where the name says so."""

    temperature: float = setting(
        1.0,
        "Sampling temperature; 0 is greedy (not for training).",
        ge=0,
        le=10,
        why=TEMPERATURE,
        of=SAMPLING,
    )
    top_p: float = setting(
        1.0,
        "Nucleus mass, of what min_p and top_k keep; 1: off. What is kept is recorded, and is all "
        "that the policy is in training.",
        gt=0,
        le=1,
        of=SAMPLING,
    )
    top_k: int = setting(
        0, "Keep the k most likely tokens, and train on those; 0: off.", ge=0, of=SAMPLING
    )
    min_p: float = setting(
        0.0,
        "Keep tokens that are at least this times as likely as the likeliest one, and train on "
        "those; 0: off.",
        ge=0,
        le=1,
        of=SAMPLING,
    )
    max_tokens: int = setting(
        512,
        "Longest response in tokens; with an environment, of one turn.",
        ge=1,
        le=100_000_000,
        why="no model reads longer rows",
        aka=Aka(
            "max_completion_length",
            "max_new_tokens",
            "max_response_length",
            "response_length",
            "generate_max_len",
        ),
    )
    max_episode_tokens: int | None = setting(
        None,
        "Tokens that the policy samples in all turns of an episode; null: as many as its turns may "
        "have.",
        ge=1,
        le=100_000_000,
        why="no model reads longer rows",
        of=RL,
        when=has_environment,
    )
    context: str = setting(
        "whole",
        "What a turn of an episode reads. whole: all before it. last: the system's messages and "
        "the environment's last answer. window: k (in YAML {window: k}): those and the last k "
        "answers with the turns between. Turns that do not read all before are rows of their own.",
        of=RL,
        takes_mapping=True,
        when=has_environment,
    )
    rewritten_history: Literal["refuse", "split"] = setting(
        "refuse",
        "A chat template that writes earlier turns otherwise than they were read and sampled is "
        "refused, or (split) the next turn reads what the template makes of them, in a new row.",
        of=RL,
        when=(
            has_environment,
            reads_history,
        ),
    )
    n_samples: int = setting(
        8,
        "Responses per prompt: the group of group-relative advantages.",
        ge=1,
        le=65536,
        why="all of a step's responses are held in memory",
        of=SAMPLING,
        aka=Aka(
            "num_generations",
            "n",
            "n_samples_per_prompt",
            "num_return_sequences",
            "group_size",
            "rloo_k",
        ),
    )
    force_strict_on_policy: bool = setting(
        True, "Refuse any token not sampled by the current weights.", of=RL
    )
    max_staleness: int = setting(
        0,
        "Weight versions that a sample's oldest token may lag behind. 0: rollout, then train. A "
        "multiple of epochs x minibatches: so many rollout batches are sampled ahead while one "
        "trains, at the same time with inference_engine.actors or processes.",
        ge=0,
        le=1000,
        why="samples of so old weights say nothing of the present ones",
        of=RL,
    )
    schedule: Literal["logical", "free"] = setting(
        "logical",
        "What decides which weights sample which token. logical: decode rounds are counted, and "
        "the same run gives the same bytes. free: the clock, and schedule.jsonl says what it did.",
        of=RL,
        when=samples_ahead,
    )
    rounds: Annotated[int, Ge(1), Le(1_000_000)] | Literal["auto"] = setting(
        "auto",
        "Decode rounds that a batch trains for. auto: what the first two batches show, noted in "
        "choices.json; the number noted there, written here, repeats the run.",
        of=RL,
        when=(samples_ahead, counts_rounds),
    )
    swap: Literal["recompute", "keep"] = setting(
        "recompute",
        "What becomes of keys and values of responses that are being sampled when new weights "
        "come. recompute: they are computed anew. keep: they stay, for vLLM and schedule free "
        "alone; no proof says then by which weights a log-probability is.",
        of=RL,
        when=samples_ahead,
    )
    from_samples: str | None = setting(
        None,
        "Train on the samples of this run directory, recorded with run.record: tokens, and sample "
        "none; null: sample. What decides about samples must be as it was there.",
        min_length=1,
        of=RL,
    )
    eval_samples: int = setting(
        1,
        "Responses per held-out prompt.",
        ge=1,
        le=65536,
        why="all of a prompt's responses are held in memory",
        of=EVALUATING,
        when=evaluates,
        aka=Aka("val_kwargs.n", "num_generations_eval"),
    )
    eval_temperature: float = setting(
        1.0,
        "Evaluation temperature; 0 is greedy.",
        ge=0,
        le=10,
        why=TEMPERATURE,
        of=EVALUATING,
        when=evaluates,
        aka=Aka("val_kwargs.temperature"),
    )

    @field_validator("context", mode="before")
    @classmethod
    def _context_by_name(cls, value: object) -> object:
        """`{window: 3}` and `window: 3` are one; others are as they should be, or refused."""
        if isinstance(value, dict) and [*value] == ["window"]:
            value = f"window: {value['window']}"
        found = re.fullmatch(r"window\s*:\s*([1-9][0-9]{0,4})", str(value))
        if found is None and value not in ("whole", "last"):
            raise ValueError(
                "must be whole, last or {window: k} with k from 1 to 99999, the answers that are "
                "read"
            )
        return value if found is None else f"window: {found[1]}"

    @field_validator("temperature", "eval_temperature")
    @classmethod
    def _greedy_or_warm(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise ValueError(f"must be 0 (greedy), or from 0.01 to 10, because {TEMPERATURE}")
        return value

    @property
    def cuts(self) -> bool:
        """True if some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class EnvironmentConfig(Section):
    """The environment that answers the policy; without a name there is none, and one turn."""

    name: str = setting(
        "",
        "tools, agent (a program at a chat endpoint), gymnasium, reasoning-gym, textarena, "
        "openenv, or path.py:Class, a class with reset(prompt, seed) and step(text); empty: none.",
        aka=Aka("tools", "environment_factory", "multi_turn", note="tools, or path.py:Class"),
    )
    options: dict[str, Any] = setting(
        {}, "Keyword arguments of the environment's class.", when=has_environment
    )
    max_turns: int = setting(
        8,
        "Turns of the policy, after which an episode is cut.",
        ge=1,
        le=100_000,
        why="no context holds more turns",
        when=has_environment,
    )
    max_seconds: float | None = setting(
        None,
        "Seconds after which an episode is cut at its next turn; null: no limit. What is cut then "
        "depends on the machine.",
        ge=0.1,
        le=1_000_000,
        too_low="less is over before a turn",
        why="more than eleven days is no limit",
        when=has_environment,
    )
    timeout_s: float = setting(
        10.0,
        "Seconds that reset, and each step, may take before the episode's process is killed.",
        ge=0.01,
        le=86400,
        too_low="less is over before a process can answer",
        why="more than a day is no limit",
        when=has_environment,
    )
    overlap: bool = setting(
        False,
        "Sample other episodes while environments work. What is sampled together then depends on "
        "how long they take, and with it the last digits; false: the same bytes every time.",
        when=has_environment,
    )
    alive: int = setting(
        256,
        "Episodes that have a process at the same time; the others wait.",
        ge=1,
        le=4096,
        why="each is a process",
        when=has_environment,
    )
    memory_mb: int = setting(
        4096,
        "Address space in MB that an episode's process may take beyond what loading the "
        "environment took; 0: no limit.",
        ge=0,
        le=100_000_000,
        why="no machine has more",
        when=has_environment,
    )
    tool_role: Literal["tool", "user"] = setting(
        "tool",
        "Role under which answers of tools reach the chat template: user where it drops tool.",
        when=has_environment,
    )


class ActionConfig(Section):
    """Tokens that stand for actions; without choices and size turns are text."""

    choices: str = setting(
        "",
        "Names of the actions of a discrete space, with commas: up,down,left,right. A token each.",
    )
    size: int = setting(
        0,
        "Numbers of one action of a continuous space, each a token of its own; 0: none.",
        ge=0,
        le=1024,
        why="no robot has more joints",
        when=has_number_actions,
    )
    bins: int = setting(
        256,
        "Uniform bins that a number falls into, between its 1 % and its 99 % quantile.",
        ge=2,
        le=65536,
        why="each is a token",
        when=(
            has_actions,
            has_number_actions,
            codes_bins,
        ),
    )
    chunk: int = setting(
        1,
        "Actions of one turn, done one after the other before the policy sees the next image.",
        ge=1,
        le=1024,
        why="each takes tokens of the turn",
        when=has_actions,
    )
    code: Literal["bins", "fast"] = setting(
        "bins",
        "What the tokens of numbers are. bins: one per number. fast: pieces of a chunk's cosine "
        "transform, fewer of them, of which not every row stands for actions.",
        when=(
            has_actions,
            has_number_actions,
        ),
    )
    fast: str | None = setting(
        None,
        "JSON file with the pieces of code fast, as `oxrl prepare demonstrations fast=1024` writes "
        "it; null: those that the model was trained with.",
        min_length=1,
        when=(
            has_actions,
            has_number_actions,
            codes_fast,
        ),
    )
    ids: Literal["tail", "reserved"] = setting(
        "tail",
        "Tokens that stand for actions. tail: the last ones of the tokenizer that are no special "
        "ones, as in OpenVLA. reserved: rows of the embedding that the tokenizer has no token for.",
        when=has_actions,
    )
    statistics: str | None = setting(
        None,
        "JSON file with the quantiles q01 and q99 of the numbers, as `oxrl prepare demonstrations` "
        "and LeRobot (stats.json) write it; null: those that the model was trained with.",
        min_length=1,
        when=(
            has_actions,
            has_number_actions,
        ),
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the actions of a discrete space."""
        return tuple(names_in(self.choices))

    @property
    def exists(self) -> bool:
        """True if turns are actions."""
        return bool(self.names) or self.size > 0

    @property
    def tokens(self) -> int:
        """Tokens of a turn; of code fast most of them, and the one that ends it."""
        if self.names:
            return self.chunk
        return self.chunk * self.size + (self.code == "fast")
