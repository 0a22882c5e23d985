"""The objects that flow through oxRL, in order of flow.

Dimension letters: `B` rows (sequences), `T` tokens per row (prompt + response, right-padded), `P`
prompts, `G` samples per prompt, `V` vocabulary, `N` preference pairs.

Everything `[B, T]` is token-aligned: entry `[b, t]` belongs to `tokens[b, t]`. `logprobs[b, t]` is
log p(tokens[b, t] | tokens[b, :t]); position 0 is 0.0.

A batch of two rows, prompt lengths 2 and 1, responses "4 6 <end>" and "9" (cut by the token limit):

    tokens          [[11, 12,  4,  6,  2],    attention_mask [[1, 1, 1, 1, 1],
        response_mask [[0, 0, 1, 1, 1],
                     [13,  9,  0,  0,  0]]                     [1, 1, 0, 0, 0]]
                         [0, 1, 0, 0, 0]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

# Reward workers read these types and must start fast: torch is imported where a tensor is touched,
# not here.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

Metrics = dict[str, float]
FinishReason = Literal["stop", "length", "abort"]
ScoreStatus = Literal["ok", "timeout", "error", "invalid"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. `uid` is stable across runs and epochs; `token_ids` is the rendered chat
    template.
    """

    uid: str
    messages: tuple[Mapping[str, str], ...]
    token_ids: tuple[int, ...]
    answer: Any = None
    images: tuple[str, ...] = ()
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What to sample. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens of a response that were sampled earlier and are continued, with who sampled each of
    them.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to sample. `draw` is the prompt's global position in the data order and its
    group id.
    """

    id: str
    prompt: Prompt
    draw: int
    sample: int
    sampling: Sampling
    seed: int
    prefix: Prefix = Prefix()


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of tokens of one origin. `logprobs` are the sampler's, in nats, at the sampling
    temperature.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    origin: Literal["policy", "environment"] = "policy"
    images: tuple[str, ...] = ()
    reward: float | None = None

    def __post_init__(self) -> None:
        tokens, logprobs, versions = len(self.token_ids), len(self.logprobs), len(self.versions)
        if not tokens == logprobs == versions:
            found = f"{tokens} tokens, {logprobs} logprobs, {versions} versions"
            raise ValueError(f"a segment needs one logprob and one version per token, got {found}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A sampled response. The stop token, when one ended it, is the last token and is trained
    on.
    """

    segments: tuple[Segment, ...]
    text: str
    finish_reason: FinishReason

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a reward says of one completion. `value` is None unless `status` is ok: a failure is
    never a number.
    """

    value: float | None
    status: ScoreStatus = "ok"
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.status == "ok"):
            raise ValueError(
                f"a score has a value exactly when its status is ok, got {self.value!r}, {self.status!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A scored completion. `group_id` is the request's `draw`: a prompt drawn twice makes two
    groups.
    """

    prompt: Prompt
    completion: Completion
    score: Score
    group_id: int
    sample: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Values of uneven count per row: row `b` owns `values[row_offsets[b]:row_offsets[b + 1]]`."""

    values: Tensor
    row_offsets: Tensor

    def select(self, rows: Tensor) -> Ragged:
        import torch

        pieces = [
            self.values[self.row_offsets[row] : self.row_offsets[row + 1]] for row in rows.tolist()
        ]
        lengths = torch.tensor([0] + [len(piece) for piece in pieces])
        return Ragged(
            values=torch.cat(pieces) if pieces else self.values[:0], row_offsets=lengths.cumsum(0)
        )

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(values=self.values.to(device), row_offsets=self.row_offsets)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A batch field with every tensor, or thing made of tensors, changed; None stays."""
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}  # pyright: ignore
    return None if value is None else change(value)


class RowBatch:
    """Selecting rows and moving devices for every batch dataclass below; the dataclasses stay
    frozen.
    """

    def __len__(self: TrainBatch) -> int:
        return len(self.inputs)

    def select(self, rows: Tensor, length: int | None = None) -> Self:
        """New batch of `rows` (int64 indices), its time axis cut to the first `length` tokens."""
        return self._changed(lambda value: _narrow(value, rows, length))

    def to(self, device: torch.device | str) -> Self:
        return self._changed(lambda value: value.to(device))

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        fields = dataclasses.fields(self)  # pyright: ignore
        return type(self)(**{f.name: _each(getattr(self, f.name), change) for f in fields})


def _narrow(value: Any, rows: Tensor, length: int | None) -> Any:
    if isinstance(value, Ragged):
        return value.select(rows)
    if isinstance(value, RowBatch):
        return value.select(rows, length)
    picked = value.index_select(0, rows.to(value.device))
    return picked[:, :length] if length is not None and picked.ndim >= 2 else picked


@dataclass(frozen=True, kw_only=True)
class TokenBatch(RowBatch):
    """What a model reads. Example in the module docstring.

    tokens [B, T] int64; attention_mask [B, T] bool, real tokens; response_mask [B, T] bool, sampled
    by the policy and trained on; position_ids [B, T] int64 or None for 0..n-1; candidates [B, T, K]
    int64: ids whose logprobs "top_k=<K>" returns instead of those of the most likely tokens;
    extras: pixels and the like, sliceable by row.
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    position_ids: Tensor | None = None
    candidates: Tensor | None = None
    extras: Mapping[str, Ragged] = field(default_factory=dict[str, Ragged])

    def __post_init__(self) -> None:
        import torch

        for name in ("attention_mask", "response_mask"):
            mask = getattr(self, name)
            if mask.shape != self.tokens.shape or mask.dtype != torch.bool:
                found = f"{mask.dtype} of shape {tuple(mask.shape)}"
                raise ValueError(
                    f"TokenBatch.{name} must be bool of shape {tuple(self.tokens.shape)}, got {found}"
                )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def inputs(self) -> TokenBatch:
        """Itself, so that a bare TokenBatch satisfies TrainBatch."""
        return self

    def lengths(self) -> list[int]:
        """Real tokens per row."""
        return self.attention_mask.sum(1).tolist()


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(RowBatch):
    """Scored rollouts as tensors, before advantages.

    rollout_logprobs [B, T] float32 nats, the sampler's; rewards [B] float64; token_rewards [B, T]
    float64, placed on the last response token unless a segment carries its own; group_ids [B]
    int64; versions [B, T] int64, -1 where nothing was sampled; terminated [B] bool, ended by a stop
    token; truncated [B] bool, cut by the token limit; valid [B] bool, has a score; greedy_rewards
    [B] float64, of the greedy response to the same prompt.
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
    greedy_rewards: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(RowBatch):
    """What one policy-gradient optimizer step reads. All [B, T] float32 but `versions` (int64) and
    `group_ids` [B].

    `old_logprobs` None means the current logprobs are their own anchor (`train.old_logprobs:
    current`); `ref_logprobs` None means no reference model. `loss_weights` already hold the global
    normalisation, so the loss is a plain sum. Where the row needs them: `likelihood_weights` [B,
    T], the same for the likelihood of right responses; `lags` [B, T] int64, optimizer steps since a
    token was sampled; `correction` [B, T], decided over the whole step; `signals`, what the gate
    takes by keyword.
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
    lags: Tensor | None = None
    correction: Tensor | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])


@dataclass(frozen=True, kw_only=True)
class ValueBatch(RowBatch):
    """What one critic step reads: old_values, returns, loss_weights, all [B, T] float32."""

    inputs: TokenBatch
    old_values: Tensor
    returns: Tensor
    loss_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class SupervisedBatch(RowBatch):
    """What one supervised step reads: loss_weights [B, T] float32, zero on every token that is not
    a target.
    """

    inputs: TokenBatch
    loss_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class StepBatch(RowBatch):
    """What one process-reward step reads, [B, T] float32: labels after each step, loss_weights,
    zero elsewhere.
    """

    inputs: TokenBatch
    labels: Tensor
    loss_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(RowBatch):
    """What one preference or reward-model step reads: N units, each a pair or a single judged
    completion.

    `inputs` holds the R rows of unit n from R * n on (R = 2: chosen, rejected). ref_logprobs [R *
    N] float32, sums over the trained tokens, None without a reference; loss_weights [N] float32,
    1/N over the global batch; desirable [N] bool, None for pairs; extras: [N] columns and scalar
    statistics of the global batch, by name.
    """

    inputs: TokenBatch
    ref_logprobs: Tensor | None
    loss_weights: Tensor
    desirable: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])

    def __len__(self) -> int:
        return len(self.loss_weights)

    def select(self, rows: Tensor, length: int | None = None) -> PreferenceBatch:
        import torch

        per_unit = len(self.inputs) // max(1, len(self))
        of_units = (rows[:, None] * per_unit + torch.arange(per_unit)).flatten()
        return PreferenceBatch(
            inputs=self.inputs.select(of_units, length),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[of_units],
            loss_weights=self.loss_weights[rows],
            desirable=None if self.desirable is None else self.desirable[rows],
            extras={
                name: extra[rows] if extra.ndim else extra for name, extra in self.extras.items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class Output(RowBatch):
    """What a model says of a TokenBatch; a field is None when it was not asked for by `want`.

    logprobs, entropy, values: [B, T] token-aligned, at least float32; values[b, t] = V(tokens[b,
    :t]).
    bootstrap: [B], value after the last real token. top_ids, top_logprobs: [B, T, K], most likely
    first.
    sum_p_squared: [B, T], sum over the vocabulary of p**2.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
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


# A loss is a pure function of what the model said and the batch: (scalar to minimise, detached
# scalar metrics).
LossFn = Callable[[Output, Any], "tuple[Tensor, dict[str, Tensor]]"]
