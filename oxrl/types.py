"""The objects that flow through oxRL, in order of flow.

Dimension letters:

    B   rows (sequences)
    T   tokens per row: prompt and response, padded on the right
    P   prompts
    G   samples per prompt
    V   vocabulary
    N   preference pairs

Everything `[B, T]` is token-aligned: entry `[b, t]` belongs to `tokens[b, t]`. `logprobs[b, t]` is
log p(tokens[b, t] | tokens[b, :t]); position 0 is 0.0.

A batch of two rows, prompt lengths 2 and 1, responses "4 6 <end>" and "9" (cut by the token limit):

    tokens            [[11, 12,  4,  6,  2],
                       [13,  9,  0,  0,  0]]
    attention_mask    [[ 1,  1,  1,  1,  1],      real tokens
                       [ 1,  1,  0,  0,  0]]
    response_mask     [[ 0,  0,  1,  1,  1],      sampled by the policy, and trained on
                       [ 0,  1,  0,  0,  0]]

One sample has ten forms on its way from a prompt to the gradient:

    Request        an answer that is asked for: its prompt, how it is sampled, with which seed
    Segment        tokens that the policy or an environment wrote, and what is recorded of each
    Completion     the whole answer: its segments, its text, and why it ended
    Finished       a request and its completion, as the sampler returns them (engines/sample)
    Score          what the reward gave for it, or why it gave nothing
    Rollout        prompt, completion and score: a line of samples.jsonl
    Laid           its rows in lists, with a place for every token (data/batching.py)
    RolloutBatch   the rows of all rollouts of a step, as tensors
    PolicyBatch    the same with advantages, and what every model says before the update
    MicroBatch     those rows that one forward and backward pass reads (engines/train)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

# Reward workers read these types and must start fast: torch is imported where a tensor is touched.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

Metrics = dict[str, float]
TokenIds = tuple[int, ...]
Names = tuple[str, ...]
# With a role and a content.
ChatMessage = Mapping[str, str]
# Who speaks.
ROLES = ("system", "developer", "user", "assistant", "tool")
# What an image is called once it is known: the SHA-256 of its bytes.
IMAGE_NAME = re.compile("[0-9a-f]{64}")
# By name, of any kind: what is only read (nothing is known of a value that is an object), and what
# is being made.
Named = Mapping[str, Any]
Objects = Mapping[str, object]
Values = dict[str, object]
# By name; the second one is only read.
Tensors = dict[str, "Tensor"]
TensorMap = Mapping[str, "Tensor"]
# Of one column, an entry per token: numbers, or bytes where a token has several numbers.
Entries = tuple[Any, ...]
# Of a TokenBatch, the column that is not recorded but chosen before the update.
CANDIDATES = "candidates"
# What the name of a recorded tensor ends with that has the numbers of a ragged column.
OF_LISTS = ".values"
# What is asked of a model: "logprobs", "entropy", "values", "sum_p_squared", "top_k=<K>", and with
# it "rest_logprobs".
Want = frozenset[str]
Batch = TypeVar("Batch", bound="RowBatch")
FinishReason = Literal["stop", "length", "abort"]
# What the rewards of an episode's own turns are called among the parts of its score.
ENVIRONMENT = "environment"
# "left_out" is of parts of a reward: there is a value, and it does not count, because the part
# failed on another response of the group. "none" is of all responses of a run without a reward.
ScoreStatus = Literal["ok", "timeout", "error", "invalid", "left_out", "none"]
# How an episode of several turns ended. The first two are ends of the task itself, the next are
# limits of the run, the last two failures of the environment.
EpisodeEnd = Literal[
    "completed",
    "parse_error",
    "max_turns",
    "max_tokens",
    "max_tool_calls",
    "max_seconds",
    "context",
    "environment_error",
    "timeout",
]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question to the model.

    `uid` is stable across runs and epochs; `token_ids` is the rendered chat template. `plain`: the
    row gave a text, which is the one message, not a list of messages.
    """

    uid: str
    messages: tuple[ChatMessage, ...]
    token_ids: TokenIds
    answer: Any = None
    images: Names = ()
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False

    @property
    def question(self) -> Any:
        """Return what the last message says: a text, or parts of text and images."""
        return self.messages[-1]["content"] if self.messages else ""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation; `trained[t]` says that the assistant wrote `token_ids[t]`, a target.

    "<|user|>1+1<|end|><|assistant|>2<|end|>" has the mask 0 0 0 0 0 0 1 1: the reply and the token
    that stops it. `images` names those in it, in their order. `clipped`: see `ActionHead.clipped`.
    """

    uid: str
    token_ids: TokenIds
    trained: tuple[bool, ...]
    images: Names = ()
    clipped: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of sampling. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: TokenIds = ()


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Tokens in a row, and what is recorded of them: one entry per token.

    `logprobs` are the sampler's, in nats, at the sampling temperature; `versions` say which weights
    sampled a token. `columns`: what else a run records, see `oxrl.tables.columns`.
    """

    token_ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    columns: Mapping[str, Entries] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        counts = {name: len(entries) for name, entries in self.per_token.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"every token needs an entry of everything recorded, got {counts}")

    @property
    def per_token(self) -> dict[str, Entries]:
        """Everything that there is an entry per token of, by name, the tokens included."""
        return {
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "versions": self.versions,
            **self.columns,
        }

    def first(self, count: int) -> Self:
        """So many tokens from the first on."""
        return self._with({name: own[:count] for name, own in self.per_token.items()})

    def then(self, more: TokenRun) -> TokenRun:
        """These tokens and others behind them, of which the same is recorded.

        Args:
            more: those behind.

        Raises:
            ValueError: something is recorded of only one of the two.
        """
        if not self.token_ids:
            return more
        if self.columns.keys() != more.columns.keys():
            raise ValueError(
                f"beside its log-probability {sorted(self.columns)} is recorded of every token, "
                f"and {sorted(more.columns)} of those that follow"
            )
        known = self.per_token
        return self._with({name: known[name] + new for name, new in more.per_token.items()})

    def _with(self, entries: dict[str, Entries]) -> Self:
        """The same run of other tokens; `entries` as of `per_token`."""
        named = {name: entries.pop(name) for name in ("token_ids", "logprobs", "versions")}
        return replace(self, **named, columns=entries)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to sample.

    `draw` is the prompt's global position in the data order, and its group id. `group_seed` is the
    same for all samples of the group: what an environment starts from.
    """

    id: str
    prompt: Prompt
    draw: int
    sample: int
    sampling: Sampling
    seed: int
    prefix: TokenRun = TokenRun()
    group_seed: int = 0


Requests = Sequence[Request]


@dataclass(frozen=True, kw_only=True)
class Segment(TokenRun):
    """Tokens of one origin.

    `turn`: of an episode, from 0. `context`: what stood before, where that is not the prompt and
    the segments before.
    """

    origin: Literal["policy", "environment"] = "policy"
    images: Names = ()
    reward: float | None = None
    turn: int = 0
    context: TokenIds | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of an episode: what the policy wrote, what the environment answered, the reward."""

    text: str
    messages: tuple[ChatMessage, ...] = ()
    reward: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A sampled response, its stop token included: that is trained on like any other.

    In an episode with an environment, `text` and `finish_reason` are those of the last turn; `end`
    and `reason` say how it ended, `opening` how the environment began, in messages.
    """

    segments: tuple[Segment, ...]
    text: str
    finish_reason: FinishReason
    turns: tuple[Turn, ...] = ()
    opening: tuple[ChatMessage, ...] = ()
    end: EpisodeEnd | None = None
    reason: str = ""

    @property
    def token_ids(self) -> TokenIds:
        """Tokens of all segments in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(part.token_ids) for part in self.segments if part.origin == "policy")

    @property
    def bare(self) -> Completion:
        """The same without columns, as rewards and records of text need it."""
        segments = tuple(replace(segment, columns={}) for segment in self.segments)
        return replace(self, segments=segments)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward's verdict on one completion.

    `value` is None unless `status` is ok: a failure is never a number. `parts` are what it is made
    of; `statuses` those of every part of a reward that is asked for in parts (`reward.parts`).

    `steps`: shares of the value that were earned at places of the text, as (characters up to there,
    share); what they leave of the value is earned at the end. `token_rewards`: the same by places
    among the tokens that the policy sampled, from 0, which a run fills in.

    `answer`: what the reward read as the response's answer, which responses can vote with; no
    record keeps it. None: the whole text.
    """

    value: float | None
    status: ScoreStatus = "ok"
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    statuses: Mapping[str, ScoreStatus] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()
    token_rewards: Mapping[int, float] = field(default_factory=dict)
    answer: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.status == "ok"):
            raise ValueError(
                "a score has a value exactly when its status is ok, got "
                f"{self.value!r}, {self.status!r}"
            )

    def counted(self, name: str) -> float:
        """Return the value of a part; NaN where no part has this name, or it does not count.

        Args:
            name: of a part.
        """
        left_out = self.statuses.get(name) == "left_out"
        return math.nan if left_out else self.parts.get(name, math.nan)


Completions = Sequence[Completion]
# A prompt and its completions, which are scored together.
Group = tuple[Prompt, Completions]
# A score for each completion of a group, in their order; and of groups, in theirs.
GroupScores = list[Score]
Scores = list[GroupScores]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A scored completion.

    `group_id` is the request's `draw`: a prompt that is drawn twice makes two groups.
    """

    prompt: Prompt
    completion: Completion
    score: Score
    group_id: int
    sample: int
    seed: int


Rollouts = Sequence[Rollout]


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Values of uneven count per row: row `b` owns `values[row_offsets[b]:row_offsets[b + 1]]`."""

    values: Tensor
    row_offsets: Tensor

    def select(self, rows: Tensor) -> Ragged:
        """Values of `rows` (int64 indices) only."""
        import torch

        rows = rows.to(self.row_offsets.device)
        lengths = self.row_offsets.diff()[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        # How far the values of each row move.
        moved = self.row_offsets[rows] - offsets[:-1]
        places = torch.arange(int(offsets[-1])) + moved.repeat_interleave(lengths)
        values = self.values[places.to(self.values.device)]
        return Ragged(values=values, row_offsets=offsets)

    def to(self, device: torch.device | str) -> Ragged:
        """The same with its values on `device`."""
        return Ragged(values=self.values.to(device), row_offsets=self.row_offsets)


def each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    """A batch field with every tensor, or thing made of tensors, changed; None stays.

    Args:
        value: of a field, or fields by name.
        change: of one tensor, or thing made of tensors.
    """
    if isinstance(value, Mapping):
        return {key: each_tensor(item, change) for key, item in value.items()}
    return None if value is None else change(value)


@dataclass(frozen=True)
class RowBatch:
    """Base of the batches below: rows can be counted and selected, tensors move between devices."""

    def __len__(self: TrainBatch) -> int:
        return len(self.inputs)

    def select(self, rows: Tensor, length: int | None = None) -> Self:
        """New batch of some rows.

        Args:
            rows: int64 indices, in the order in which they are wanted.
            length: the time axis is cut to so many tokens; None: it stays.
        """
        return self._changed(lambda value: _narrow(value, rows, length))

    def to(self, device: torch.device | str) -> Self:
        """The same with every tensor on `device`."""
        return self._changed(lambda value: value.to(device))

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        values = {name: each_tensor(value, change) for name, value in vars(self).items()}
        return type(self)(**values)


def _narrow(value: Any, rows: Tensor, length: int | None) -> Any:
    if isinstance(value, Ragged):
        return value.select(rows)
    if isinstance(value, RowBatch):
        return value.select(rows, length)
    picked = value.index_select(0, rows.to(value.device))
    return picked[:, :length] if picked.ndim >= 2 else picked


@dataclass(frozen=True, kw_only=True)
class TokenBatch(RowBatch):
    """A batch of token rows as a model reads it. Example in the module docstring.

    tokens: [B, T] int64.
    attention_mask: [B, T] bool, real tokens.
    response_mask: [B, T] bool, sampled by the policy and trained on.
    position_ids: [B, T] int64, or None for 0..n-1.
    columns: [B, T] or [B, T, width] by name, what the sampler recorded of every token; CANDIDATES,
        [B, T, K] int64, are ids whose logprobs "top_k=<K>" returns instead of those of the most
        likely tokens. Of a ragged column, how many numbers each token has, which are in `lists`.
    lists: the numbers of ragged columns by name, those of a row's tokens one after the other.
    extras: pixels and the like, sliceable by row.
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    position_ids: Tensor | None = None
    columns: TensorMap = field(default_factory=dict)
    lists: Mapping[str, Ragged] = field(default_factory=dict)
    extras: Mapping[str, Ragged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch

        shape = tuple(self.tokens.shape)
        for name, mask in (("attention", self.attention_mask), ("response", self.response_mask)):
            found = tuple(mask.shape)
            if found != shape or mask.dtype != torch.bool:
                raise ValueError(
                    f"TokenBatch.{name}_mask must be bool of shape {shape}, "
                    f"got {mask.dtype} of shape {found}"
                )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def inputs(self) -> TokenBatch:
        """Itself, so that a bare TokenBatch satisfies TrainBatch."""
        return self

    def said_by(self, forward: Forward, want: Want) -> Output:
        """Return a model's output for these rows. Episodes of several rows have it put together."""
        return forward(self, want)

    def read_by_models(self, of_rows: Tensor) -> tuple[TokenBatch, Tensor]:
        """Return the batch that models read, and `of_rows` [B] by its rows: here both as given."""
        return self, of_rows

    def as_read(self, batch: Batch) -> Batch:
        """`batch`, whose `inputs` these are, by the rows that a model reads: itself."""
        return batch

    def as_given(self, values: Tensor) -> Tensor:
        """[B, T, ...] of the rows that `as_read` gives, by those that are here."""
        return values

    def list_of_tokens(self, name: str) -> Ragged:
        """A ragged column with a row for each of the B * T tokens.

        Args:
            name: of the column.
        """
        import torch

        counts = self.columns[name].flatten().cpu().long()
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return Ragged(values=self.lists[name].values, row_offsets=offsets)

    def named(self) -> Tensors:
        """Its tensors, as they are recorded."""
        columns = {name: values for name, values in self.columns.items() if name != CANDIDATES}
        lists = {f"{name}{OF_LISTS}": ragged.values for name, ragged in self.lists.items()}
        return (
            columns
            | lists
            | {
                "tokens": self.tokens,
                "attention_mask": self.attention_mask,
                "response_mask": self.response_mask,
            }
        )


class ImageSource(Protocol):
    """A source of the pixels of the images in a batch."""

    def attach(self, inputs: TokenBatch, rows: Sequence[tuple[str, Sequence[str]]]) -> TokenBatch:
        """A batch with the pixels of its rows, in `extras`.

        Args:
            inputs: [B, T].
            rows: of each row its uid and the names of its images, in their order.

        Raises:
            InvariantError: a row has not as many image tokens as its images take: names it.
        """
        ...


# Of a run; None where its model is shown none.
Images = ImageSource | None


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(RowBatch):
    """Scored rollouts as tensors, before advantages.

    rollout_logprobs: [B, T] float32 nats, the sampler's.
    rewards: [B] float64.
    token_rewards: [B, T] float64, on the last response token unless a segment carries its own.
    group_ids: [B] int64, rows of one prompt.
    versions: [B, T] int64, weights that sampled the token; -1 where nothing was sampled.
    terminated: [B] bool, ended by a stop token.
    truncated: [B] bool, cut by the token limit.
    valid: [B] bool, has a score.
    part_rewards: name -> [B] float64, of each part of the reward, NaN where a row has none.
    greedy_rewards: [B] float64, of the greedy response to the same prompt; None without one.
    turns: [B, T] int64, the turn of its episode in which a token was sampled, -1 elsewhere; None
        without an environment.
    places: [B] int64, where rows are among all samples of their step; None: not of a step.

    Where turns of an episode read other things than one after the other in one row, a row here is
    an episode, and `inputs` holds the rows that are read: see `oxrl.data.episode_rows`.
    """

    inputs: TokenBatch
    rollout_logprobs: Tensor
    rewards: Tensor
    token_rewards: Tensor
    group_ids: Tensor
    versions: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    part_rewards: TensorMap = field(default_factory=dict)
    greedy_rewards: Tensor | None = None
    turns: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(RowBatch):
    """The batch of one policy-gradient optimizer step: [B, T] float32 where nothing else is said.

    old_logprobs: anchor of the ratio, in nats; None: the current logprobs are their own anchor
        (`train.old_logprobs: current`).
    rollout_logprobs: the sampler's, in nats.
    ref_logprobs: the reference model's, in nats; None: there is none.
    advantages: one per token.
    loss_weights: hold the normalisation over the whole step, so that the loss is a plain sum.
    versions: [B, T] int64, weights that sampled the token.
    group_ids: [B] int64, rows of one prompt.

    Where the algorithm's row needs them:

    likelihood_weights: as `loss_weights`, for the likelihood of right responses.
    ages: [B, T] int64, rollout batches trained on since a token was sampled.
    correction: decided over the whole step.
    old_outcomes: [B, T, K + 1] nats before the update, of the sampler's K likeliest tokens and,
        last, of all others together; None: the current ones are their own anchor, or interpolated.
    signals: what the gate takes by keyword.
    """

    inputs: TokenBatch
    old_logprobs: Tensor | None
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_weights: Tensor
    versions: Tensor
    group_ids: Tensor
    likelihood_weights: Tensor | None = None
    ages: Tensor | None = None
    correction: Tensor | None = None
    old_outcomes: Tensor | None = None
    signals: TensorMap = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ValueBatch(RowBatch):
    """The batch of one critic step: old_values, returns, loss_weights, all [B, T] float32."""

    inputs: TokenBatch
    old_values: Tensor
    returns: Tensor
    loss_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class SupervisedBatch(RowBatch):
    """The batch of one supervised step.

    loss_weights: [B, T] float32, zero on every token that is not a target.
    """

    inputs: TokenBatch
    loss_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class StepBatch(RowBatch):
    """The batch of one process-reward step.

    labels: [B, T] float32, at the last token of each step of a solution.
    loss_weights: [B, T] float32, zero elsewhere.
    """

    inputs: TokenBatch
    labels: Tensor
    loss_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(RowBatch):
    """The batch of one preference or reward-model step: N units, each a pair or a single judged
    completion.

    inputs: the R rows of unit n stand from R * n on (R = 2: chosen, rejected).
    ref_logprobs: [R * N] float32, sums over the trained tokens; None without a reference.
    loss_weights: [N] float32, 1/N over the global batch.
    desirable: [N] bool; None for pairs.
    extras: [N] columns and scalar statistics of the global batch, by name.
    """

    inputs: TokenBatch
    ref_logprobs: Tensor | None
    loss_weights: Tensor
    desirable: Tensor | None = None
    extras: TensorMap = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.loss_weights)

    def select(self, rows: Tensor, length: int | None = None) -> PreferenceBatch:
        """New batch of some units, each with all of its rows of tokens."""
        import torch

        per_unit = len(self.inputs) // max(1, len(self))
        of_units = (rows[:, None] * per_unit + torch.arange(per_unit)).flatten()
        extras = {name: value[rows] if value.ndim else value for name, value in self.extras.items()}
        return PreferenceBatch(
            inputs=self.inputs.select(of_units, length),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[of_units],
            loss_weights=self.loss_weights[rows],
            desirable=None if self.desirable is None else self.desirable[rows],
            extras=extras,
        )


@dataclass(frozen=True, kw_only=True)
class Output(RowBatch):
    """A model's output for a TokenBatch; a field is None when it was not asked for by `want`.

    Token-aligned and at least float32, logprobs and entropy in nats:

    logprobs, entropy: [B, T].
    values: [B, T], values[b, t] = V(tokens[b, :t]).
    bootstrap: [B], value after the last real token.
    top_ids, top_logprobs: [B, T, K], most likely first.
    rest_logprobs: [B, T], of all other tokens together; -inf where there are none.
    sum_p_squared: [B, T], sum over the vocabulary of p**2.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    rest_logprobs: Tensor | None = None
    sum_p_squared: Tensor | None = None


class TrainBatch(Protocol):
    """Any batch above: rows can be counted and selected, and `inputs` is what the model reads.

    `len(batch)` counts units (rows; pairs for preferences), `select` takes unit indices, `inputs`
    may hold more rows than units as long as it keeps units whole.
    """

    @property
    def inputs(self) -> TokenBatch: ...
    def __len__(self) -> int: ...
    def select(self, rows: Tensor, length: int | None = None) -> Self: ...
    def to(self, device: torch.device | str) -> Self: ...


# A model's answer to a TokenBatch: which fields of Output are wanted.
Forward = Callable[[TokenBatch, Want], Output]
# A loss is a pure function of what the model said and the batch.
# It returns the scalar to minimise and detached scalar metrics.
LossFn = Callable[[Output, Any], "tuple[Tensor, dict[str, Tensor]]"]
