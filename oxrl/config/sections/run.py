"""Section `run`: name, length, place and what is kept."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from oxrl.config.conditions import evaluates, has_ray_actors, joins_a_cluster, trains_in_actors
from oxrl.config.field import OFFLINE, RL, Aka, Section, names_in, printable, setting
from oxrl.errors import known
from oxrl.tables.watch import HEALTH_CHECKS, TRACKERS, Deadlines, Phase

# Of any wait, in seconds.
SHORTEST_S = 0.01
LONGEST_S = 604800.0


class RunConfig(Section):
    """The name of the run, its length, the place where it runs and what it keeps."""

    name: str = setting(
        ...,
        "Name of the run: directory and tracker label.",
        min_length=1,
        max_length=200,
        resume="free",
        aka=Aka("run_name", "experiment_name"),
    )
    seed: int = setting(0, "Every random choice is a function of this integer.", ge=0, lt=2**63)
    day: str | None = setting(
        None,
        "Day that a chat template which reads the clock is told, as 2026-11-28; null: the one on "
        "which the run began.",
    )
    dir: str | None = setting(
        None,
        "Run directory; null: runs/<run.name>.",
        min_length=1,
        resume="free",
        aka=Aka("output_dir", "default_local_dir", "save_path"),
    )
    steps: int = setting(
        ...,
        "Optimizer steps in total.",
        ge=1,
        le=1_000_000_000,
        why="more take years at any speed",
        resume="free",
        aka=(
            Aka("max_steps", "num_steps"),
            Aka(
                "num_train_epochs",
                "num_epochs",
                "max_epochs",
                "total_epochs",
                "total_episodes",
                note="a run counts optimizer steps, not passes over the data: their number is "
                "steps of one pass times passes",
            ),
            Aka(
                "total_training_steps",
                note="a run counts optimizer steps: rollout batches times train.epochs times "
                "train.minibatches",
            ),
        ),
    )
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = setting(
        "auto",
        "Where models live: cpu, cuda (NVIDIA), mps (Apple) or xpu (Intel); auto: the device that "
        "PyTorch sees, else cpu.",
        resume="reorders",
    )
    training_gpus: int = setting(
        1,
        "Training ranks: processes, one device each; the local engine has one.",
        ge=1,
        le=65536,
        why="each is a process",
        resume="reorders",
        aka=Aka("n_gpus_per_node", "num_gpus", "num_processes"),
    )
    threads: int | None = setting(
        None,
        "CPU threads of PyTorch; null: PyTorch's choice.",
        ge=1,
        le=1024,
        why="PyTorch starts every one of them, and crashes where it cannot",
        resume="reorders",
    )
    deterministic: bool = setting(
        False,
        "On a GPU use only kernels that give the same bytes every time, which costs time, and "
        "refuse operations that have none; vLLM is told to be batch invariant.",
        resume="reorders",
    )
    exact: bool = setting(
        False,
        "Compute every log-probability alike to the last bit, in samplers and trainer, whatever "
        "else is in a batch: on the CPU, in float32; a step takes longer for it.",
        of=RL,
        resume="reorders",
    )
    checkpoint_every: int = setting(
        50,
        "Optimizer steps between checkpoints; 0: only the first and the last.",
        ge=0,
        resume="free",
        aka=Aka("save_steps", "save_freq"),
    )
    keep_checkpoints: int = setting(
        2,
        "Newest checkpoints kept on disk; older ones are deleted.",
        ge=1,
        resume="free",
        aka=Aka("save_total_limit", "max_actor_ckpt_to_keep"),
    )
    async_checkpoints: bool = setting(
        False,
        "Train on while a checkpoint is written, from a copy of weights and optimizer state in CPU "
        "memory.",
        resume="free",
    )
    first_checkpoint: Literal["whole", "reference"] = setting(
        "whole",
        "whole: the checkpoint before the first step holds the models; reference: it names the "
        "files and the seed that they are built from, with their hashes, and costs no disk.",
        resume="free",
    )
    eval_every: int = setting(
        0,
        "Optimizer steps between evaluations on data.eval; 0: only at the end.",
        ge=0,
        when=evaluates,
        resume="free",
        aka=Aka("eval_steps", "test_freq"),
    )
    keep_best: bool = setting(
        False,
        "Keep the weights of the best evaluation in best/ (not in reinforcement learning).",
        of=OFFLINE,
        when=evaluates,
    )
    stop_at: float | None = setting(
        None,
        "End the run after an evaluation that is this good: eval/reward where answers are scored, "
        "eval/accuracy of judged ones, eval/loss or less of imitated ones; null: only after "
        "run.steps.",
        ge=-(1_000_000),
        le=1_000_000,
        why="no evaluation finds more",
        when=evaluates,
    )
    record: Literal["text", "tokens"] = setting(
        "text",
        "text: samples.jsonl; tokens: also the numbers of every token, rollouts/*.safetensors, and "
        "every sample whole, for rollout.from_samples.",
        of=RL,
        resume="free",
    )
    only: Literal["rollouts"] | None = setting(
        None,
        "rollouts: sample, score and record as the run would, by the weights that it begins with, "
        "and train nothing; null: train.",
        of=RL,
    )
    mlflow: bool = setting(True, "Mirror metrics to mlflow.db in the run directory.", resume="free")
    trackers: str = setting(
        "",
        "Trackers that show the run besides MLflow, with commas: tensorboard, wandb, trackio; each "
        "is a package to install.",
        resume="free",
        aka=(
            Aka(
                "report_to",
                "logger",
                note="a text of names, such as wandb; MLflow is run.mlflow",
                values={"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"},
            ),
            Aka("use_wandb", values={"true": "wandb", "false": ""}),
        ),
    )
    console: Literal["auto", "plain", "verbose", "quiet"] = setting(
        "auto",
        "auto: a live view on a terminal, a plain line per step elsewhere; plain: always plain "
        "lines; verbose: with where the time went, a sample and all log messages; quiet: warnings "
        "and what begins and ends alone. run.log has everything.",
        resume="free",
    )
    health: dict[str, Literal["warn", "stop", "off"]] = setting(
        {},
        "What a health check does when it fails, by its name: {flat-reward: off, "
        "sampler-mismatch: stop}; where nothing is said nothing-trained stops and all others warn.",
        resume="free",
    )
    deadline_s: float = setting(
        600.0,
        "Longest wait in seconds, in each phase that run.deadlines does not name.",
        ge=SHORTEST_S,
        le=LONGEST_S,
        too_low="less is over before anything can answer",
        why="more than a week is no deadline",
        resume="free",
    )
    deadlines: dict[Phase, float] = setting(
        {},
        "Longest waits of single phases in seconds, such as {load: 1800, rollout: 9}. load: until "
        "models are built, or read from a checkpoint (at least 600 where it is not given); sync: "
        "until weights are at the samplers; checkpoint: for the next byte written; rollout: for "
        "the next response or score; step: for a pass over a batch, or for other ranks.",
        resume="free",
    )
    seconds_per_gb: float = setting(
        50.0,
        "What load, sync and checkpoint may take longer for each GB that they move, in seconds: 50 "
        "is a disk or network of 20 MB/s.",
        ge=0.0,
        le=10000,
        why="a device of 100 kB/s is of no use to anybody",
        resume="free",
    )
    ray_address: str | None = setting(
        None,
        "Ray cluster to join, host:port or auto; null: its own.",
        min_length=1,
        of=RL,
        when=has_ray_actors,
        resume="free",
    )
    ray_working_dir: Literal["keep", "ship"] = setting(
        "keep",
        "keep: every node has oxRL installed; ship: it is sent to the nodes when a run starts.",
        of=RL,
        when=(
            has_ray_actors,
            joins_a_cluster,
        ),
        resume="free",
    )
    max_restarts: int = setting(
        0,
        "Times a run whose training actors are lost goes on from its checkpoint.",
        ge=0,
        of=RL,
        when=trains_in_actors,
        resume="free",
    )

    @field_validator("health", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML reads `off` without quotation marks as false."""
        if not isinstance(value, dict):
            return value
        return {name: "off" if found is False else found for name, found in value.items()}

    @field_validator("health", "trackers")
    @classmethod
    def _known_names(cls, value: dict[str, str] | str) -> dict[str, str] | str:
        """Every name is that of a health check, or of a tracker."""
        names = value
        there_are = HEALTH_CHECKS
        if isinstance(value, str):
            names = names_in(value)
            there_are = TRACKERS
        for name in names:
            try:
                known(name, there_are)
            except ValueError as error:
                raise ValueError(f"{name!r} {error}") from None
        return value

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        """The name is a label in logs and the name of a folder."""
        if not value.strip() or value != value.strip() or value in (".", ".."):
            raise ValueError("must be a word or several, without blanks around them")
        if "/" in value:
            raise ValueError("must not lead to another folder; a place is given by run.dir")
        return printable(value)

    @field_validator("day")
    @classmethod
    def _a_day(cls, value: str | None) -> str | None:
        """A day of the calendar."""
        return value and date.fromisoformat(value).isoformat()

    @field_validator("dir")
    @classmethod
    def _own_folder(cls, value: str | None) -> str | None:
        """A run fills its directory, so it cannot be the root of everything."""
        if value is None:
            return None
        if os.path.realpath(printable(value)) == os.sep:
            raise ValueError("must be a directory of the run's own, not the root of all others")
        return value

    @field_validator("deadlines")
    @classmethod
    def _long_enough(cls, value: dict[Phase, float]) -> dict[Phase, float]:
        """Every one is as long as run.deadline_s may be."""
        for phase, seconds in value.items():
            if not SHORTEST_S <= seconds <= LONGEST_S:
                raise ValueError(
                    f"{phase} must be from {SHORTEST_S:g} to {LONGEST_S:g} seconds, got {seconds:g}"
                )
        return value

    @property
    def waits(self) -> Deadlines:
        """The longest time that each phase may keep others waiting."""
        alike = Deadlines.alike(self.deadline_s, self.seconds_per_gb)
        return replace(alike, seconds={**alike.seconds, **self.deadlines})

    @property
    def shown_in(self) -> tuple[str, ...]:
        """Names of all trackers that show the run, each once."""
        return tuple(dict.fromkeys(["mlflow"] * self.mlflow + names_in(self.trackers)))

    @property
    def directory(self) -> Path:
        """Run directory, with the default filled in."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.name
