"""The base of features: what a row of the table can add to the training loop beyond its cells.

A feature overrides only the hooks it needs; the loop calls every hook of every feature of the row,
in the order in which the hooks stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from oxrl.checkpoint import Saved
from oxrl.engines.train import Part, Scorer, TrainEngine
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.session import RolloutProgress
from oxrl.rollouts.sync import GroupChoice
from oxrl.tables.policy import Algorithm, Row
from oxrl.tables.roles import CRITIC, POLICY, REFERENCE
from oxrl.types import (
    Group,
    Metrics,
    Output,
    PolicyBatch,
    RolloutBatch,
    Rollouts,
    Scores,
    SupervisedBatch,
    Want,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oxrl.engines.sample.sampler import OnFinished

# Name of a reward and groups -> what it gives for each of their responses.
ScoreBy = Callable[[str, Sequence[Group]], Scores]
# Places in the order of a file's rows -> those conversations, as they are learned from.
RowsAt = Callable[[range], SupervisedBatch]
# Optimizer steps done -> what the policy answers to the prompts of a file then, scored by the
# reward of the run: as many answers in a row per prompt as `rollout.eval_samples` says.
AnswersAt = Callable[[int], Rollouts]


class Hint(NamedTuple):
    """Another prompt, which the policy sees when it teaches itself.

    template: Jinja text of its last message. reads: names that the template is given beside
    `prompt`. longest: tokens of a row; None: not known. follows: share of the policy that the
    teacher's weights take in after a rollout step; 0: none. part: which weights of the policy.
    """

    template: str
    reads: tuple[str, ...]
    longest: int | None = None
    follows: float = 0.0
    part: Part = "all"


class Teacher(NamedTuple):
    """Who scores what the policy samples.

    scorer: who is asked. sources: of rows that it scores; empty: those that no other teacher names.
    hint: None of another model. about: what its answers depend on beside its weights.
    """

    scorer: Scorer
    sources: frozenset[str]
    hint: Hint | None = None
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class FeatureInputs:
    """The inputs that a feature is built from.

    row: of the table. train: its numbers. max_tokens: longest response.
    models: engines by role, of every model that has weights of its own. part_weights: of the parts
    of the reward, by name. compared_parts: those that the row compares one by one; empty: it
    compares their sum. seed: of the run. plays: an environment answers the policy.
    teachers: of `model.teachers`, by name. tokenizer: of the policy.

    samples: that an optimizer step learns from, where none is dropped. directory: of the run; None
    before it begins. given_rows: a file of conversations; None: there is none.

    score: by another reward, `score(name, groups)`, loaded when it is asked for first.
    rows: opens a file of conversations; None: features get none.
    """

    row: Row
    train: Algorithm
    max_tokens: int
    models: Mapping[str, TrainEngine]
    part_weights: Mapping[str, float] = field(default_factory=dict)
    compared_parts: tuple[str, ...] = ()
    seed: int = 0
    plays: bool = False
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    samples: int = 0
    directory: Path | None = None
    given_rows: str | None = None
    score: ScoreBy | None = None
    rows: Callable[[str], RowsAt] | None = None

    @property
    def policy(self) -> TrainEngine:
        """The model that learns."""
        return self.models[POLICY]

    @property
    def critic(self) -> TrainEngine | None:
        """A value model; None where the row asks for none."""
        return self.models.get(CRITIC)

    @property
    def reference(self) -> TrainEngine | None:
        """The policy as it was, whose weights can be set; None without one, and with an adapter."""
        return self.models.get(REFERENCE)


class Planned(NamedTuple):
    """The facts known of a run before it begins.

    steps: optimizer steps. updates: of them, on each rollout batch. samples: answers to each
    held-out prompt. given: what features are built from, but for models: none is loaded yet.
    prompts: how many a file has, read as that of `data.eval` is.
    """

    steps: int
    updates: int
    samples: int
    given: FeatureInputs
    prompts: Callable[[str], int]


class Prepared(NamedTuple):
    """The facts known of a rollout batch when its policy batch has been prepared.

    before: said by the policy before the update, as far as it was asked. returns: [B, T] for a
    critic. seed: of random choices over the whole batch. version: of the weights before the update.
    """

    rollouts: RolloutBatch
    before: Output
    returns: Tensor | None
    seed: int
    version: int


class Feature:
    """Does nothing; every hook can be overridden."""

    # Which groups a rollout step trains on; None: all.
    choice: GroupChoice | None = None
    # Is told of every response as soon as it is finished, while others are sampled; None: nothing.
    heard: OnFinished | None = None
    # One greedy response per prompt is sampled as well, as a baseline.
    greedy_baseline: bool = False
    # The reference changes during the run, so checkpoints hold it.
    moves_reference: bool = False
    # What the policy is asked before the update, and in the update, beside logprobs and entropy.
    want_before: Want = frozenset()
    want: Want = frozenset()
    # What the policy is asked before the update as well, where its logprobs are recorded then.
    want_old: Want = frozenset()
    # Where the ratio's denominator comes from, when not from `train.old_logprobs`.
    old_logprobs: str | None = None
    # The correction is computed once per rollout batch, or from the current policy in every update.
    corrects_whole_step: bool = False
    corrects_current_policy: bool = False

    def __init__(self, given: FeatureInputs) -> None: ...

    @classmethod
    def planned(cls, run: Planned, numbers: Mapping[str, object]) -> str:
        """Look at its numbers before a run begins, for `oxrl plan` too; say what it costs.

        Args:
            run: what is known of it.
            numbers: of `train.features`.

        Returns:
            What it does beside training, in words; empty: it costs nothing.

        Raises:
            ConfigError: what is wrong with a number.
        """
        return ""

    def on_assembled(self, answers: Callable[[str], AnswersAt]) -> None:
        """The run is put together: open the files of prompts that are to be answered during it."""

    def on_sampled(self, rollouts: Rollouts) -> None:
        """Look at all that a step sampled, scored, before any row of it is laid out."""

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        """Change rewards before anything is computed from them."""
        return batch

    def on_advantage_inputs(
        self, inputs: AdvantageInputs, rollouts: RolloutBatch
    ) -> AdvantageInputs:
        """Add what the advantage reads."""
        return inputs

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Decide about tokens over the whole rollout batch, before the update."""
        return batch

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Move a number of the run by what this rollout batch says."""
        return {}

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Complete a minibatch."""
        return batch

    def loss(self, output: Output, batch: PolicyBatch) -> LossAndMetrics | None:
        """A term that is added to the policy's loss, and its metrics."""
        return None

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the gradient of a further model on `rows`; None when it is not finite."""
        return {}

    def holds_policy(self, step: int) -> bool:
        """True if the policy stays as it is in optimizer step `step`."""
        return False

    def optim_step(self, *, skip: bool) -> Metrics:
        """Step a further model, or refuse its step."""
        return {}

    def saved(self) -> dict[str, Saved]:
        """Return what a checkpoint holds of it: subdirectory -> what is stored there."""
        return {}

    def after_updates(self, before: int, step: int) -> None:
        """The updates of a rollout step are done: they led from step `before` to `step`."""

    def measure(self, before: int, step: int) -> Metrics:
        """Measure the policy where it may be evaluated, after `after_updates`; returns metrics.

        What a signal cuts short is asked again after a resume.
        """
        return {}
