"""From hidden states or logits to token-aligned logprobs; all shifts of the code base are here.

A model reads `tokens[b, :t]` and its output at position t - 1 predicts `tokens[b, t]`. Everything
here hands results back token-aligned: entry `[b, t]` belongs to `tokens[b, t]`, and entry `[b, 0]`,
which nothing predicts, is 0.0.

With z = logits / temperature, lse = logsumexp(z), p = softmax(z) (`algorithms.md` 2.1):

    logprob = z_y - lse        d logprob / d logits   = (onehot(y) - p) / temperature
    entropy = lse - sum(p z)   d entropy / d logits_j = -p_j (log p_j + entropy) / temperature
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oxrl.functional.masks import OptionalTensor, at_least_float32
from oxrl.tables.numbers import head_chunk

# The logit of a token that is never sampled: its probability is 0 in every type, and unlike that of
# minus infinity its product with 0 is a number.
NO_CHANCE = -1e30
# exp of less is next to nothing beside 1. It takes MKL thirty times as long where it underflows.
NEXT_TO_NOTHING = -80.0


# As torch.nn.functional.linear: of hidden states [n, K], a weight [N, K] and a bias.
Linear = Callable[[Tensor, Tensor, OptionalTensor], Tensor]
# By name.
Tensors = dict[str, Tensor]


class HeadOutput(NamedTuple):
    """The chunked head's results for N positions; None where one was not asked for."""

    logprobs: Tensor  # [N]
    entropy: OptionalTensor  # [N]
    sum_p_squared: OptionalTensor  # [N]
    top_ids: OptionalTensor  # [N, K]
    top_logprobs: OptionalTensor  # [N, K]
    rest_logprobs: OptionalTensor  # [N]


class Head(NamedTuple):
    """Hidden state h to logits.

    z = h weight^T + bias, times `scale`, then softcap * tanh(z / softcap) if given

    Tokens where `never` is True have no probability: the others share all of it. `linear` computes
    the product, by the library that is the faster one.
    """

    weight: Tensor  # [V, H]
    bias: OptionalTensor = None  # [V]
    softcap: float | None = None
    scale: float = 1.0
    never: OptionalTensor = None  # [V] bool
    linear: Linear = nn.functional.linear


class KeptSets(Protocol):
    """The tokens that may stand at each of N places, where sampling was cut to them.

    Those of place i are `values[row_offsets[i] : row_offsets[i + 1]]`; none means all tokens.
    `row_offsets` [N + 1] int64 are on the CPU.
    """

    @property
    def values(self) -> Tensor:
        """All tokens, place after place."""
        ...

    @property
    def row_offsets(self) -> Tensor:
        """Beginnings of the places in `values`, and the end."""
        ...

    def select(self, rows: Tensor) -> KeptSets:
        """Those of some places only.

        Args:
            rows: int64 indices of the places.
        """
        ...


def logsumexp_of_rows(z: Tensor, *, some_have_none: bool = False) -> Tensor:
    """log(sum(exp(z))) of each row, whatever other rows there are.

    PyTorch cuts the sum of a row among threads where it is wide and alone, and adds up in another
    order then.

    Args:
        z: [n, V].
        some_have_none: many entries have no chance; the result is the same, and comes sooner.

    Returns:
        [n].
    """
    if some_have_none:
        # Beside the largest, which is 1, no bit of the sum tells these from 0.
        z = torch.maximum(z, z.amax(1, keepdim=True) + NEXT_TO_NOTHING)
    if len(z) == 1:
        return z.repeat(2, 1).logsumexp(1)[:1]
    return z.logsumexp(1)


def logprobs_from_logits(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token given the tokens before it.

    Args:
        logits: [B, T, V], entry t predicts token t + 1.
        tokens: [B, T] int64.
        temperature: logits are divided by it.

    Returns:
        [B, T] nats, token-aligned, position 0 is 0.0; float32, or float64 where the logits are.
    """
    scaled = at_least_float32(logits[:, :-1]) / temperature
    targets = tokens[:, 1:, None]
    picked = scaled.gather(-1, targets).squeeze(-1)
    total = logsumexp_of_rows(scaled.flatten(0, 1)).view_as(picked)
    logprobs = picked - total
    return torch.nn.functional.pad(logprobs, (1, 0))


def predicted_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the masked-in tokens and the hidden states that predict them.

    A token at position 0 has no predictor and is left out.

    Args:
        mask: [B, T] bool.

    Returns:
        Flat indices into [B * T], row-major, [N] each: of the tokens and of the hidden states.
    """
    predictable = mask.clone()
    predictable[:, 0] = False
    token_indices = predictable.flatten().nonzero().squeeze(1)
    return token_indices, token_indices - 1


def bootstrap_positions(attention_mask: Tensor) -> Tensor:
    """Find the last real token of each row, whose hidden state has read the whole row.

    Args:
        attention_mask: [B, T] bool.

    Returns:
        Flat indices into [B * T], [B] int64.
    """
    rows, length = attention_mask.shape
    last = attention_mask.sum(1).clamp(min=1) - 1
    return torch.arange(rows, device=attention_mask.device) * length + last


def spread(values: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Put values at their places in a batch; differentiable.

    Args:
        values: [N, ...].
        indices: [N], flat, into [B * T].
        like: [B, T], any tensor of that shape.

    Returns:
        [B, T, ...], zero elsewhere.
    """
    rest = values.shape[1:]
    flat = values.new_zeros(like.numel(), *rest)
    return flat.index_copy(0, indices, values).view(*like.shape, *rest)


def head_of_batch(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    mask: Tensor,
    *,
    temperature: float,
    entropy: bool = False,
    sum_p_squared: bool = False,
    top_k: int = 0,
    candidates: OptionalTensor = None,
    kept: KeptSets | None = None,
    rest: bool = False,
) -> Tensors:
    """Run the head where a token is masked in, and put what it says at that token.

    Args:
        hidden: [B * T, H].
        head: weight [V, H] and what follows the product.
        tokens: [B, T] int64.
        mask: [B, T] bool; the head runs nowhere else.
        temperature, entropy, sum_p_squared, top_k: as of `chunked_head`.
        candidates: [B, T, k] int64, the ids to return logprobs of instead of the most likely.
        kept: of each of the B * T tokens, those that it was sampled from.
        rest: as of `chunked_head`.

    Returns:
        Field of `HeadOutput` -> [B, T] or [B, T, k], 0 where masked; those that were asked for.
    """
    token_at, hidden_at = predicted_positions(mask)
    if candidates is not None:
        candidates = candidates.flatten(0, 1)[token_at]
    if kept is not None:
        kept = kept.select(token_at)
    found = chunked_head(
        hidden[hidden_at],
        head,
        tokens.flatten()[token_at],
        temperature=temperature,
        entropy=entropy,
        sum_p_squared=sum_p_squared,
        candidates=candidates,
        top_k=top_k,
        kept=kept,
        rest=rest,
    )
    aligned: Tensors = {}
    for name, value in found._asdict().items():
        if value is not None:
            aligned[name] = spread(value, token_at, tokens)
    return aligned


def chunked_head(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_p_squared: bool = False,
    top_k: int = 0,
    candidates: OptionalTensor = None,
    kept: KeptSets | None = None,
    rest: bool = False,
    chunk: int | None = None,
) -> HeadOutput:
    """Logprobs (and more) of N positions without ever holding the N x V logits (`algorithms.md`
    2.10).

    The logits of `chunk` positions exist at a time; backward computes them again. Gradients flow
    through logprobs, entropy, top_logprobs and rest_logprobs, not through sum_p_squared.

    Args:
        hidden: [N, H]; matrix products run in its dtype, softmax maths in float32 or, for float64,
            in float64.
        head: weight [V, H] and what follows the product.
        targets: [N] int64, the token each position predicts.
        temperature: logits are divided by it, after the softcap.
        entropy: also return the full-vocabulary entropy in nats.
        sum_p_squared: also return the sum over the vocabulary of p ** 2.
        top_k: also return the ids and logprobs of the k most likely tokens, most likely first.
        candidates: [N, k] int64, the ids to return logprobs of instead of the most likely.
        kept: of N positions, the tokens that share all probability; everything that is returned is
            of them. None: all tokens, everywhere.
        rest: also return the logprob of all other tokens than those k together, from their own
            logits: 1 minus the k probabilities is rounding where little is left. -inf where no
            token is left.
        chunk: positions per chunk; None picks about 2M logits per chunk.

    Returns:
        Logprobs of the targets, and what else was asked for.
    """
    if chunk is None:
        chunk = head_chunk(head.weight.shape[0])
    options = _Options(head, temperature, entropy, sum_p_squared, top_k, rest, chunk, kept)
    found = _ChunkedHead.apply(hidden, head.weight, head.bias, targets, candidates, options)
    return HeadOutput(*found)


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """Logits in softmax precision and before any temperature.

    Args:
        hidden: [n, H].
        head: weight [V, H] and what follows the product.

    Returns:
        [n, V].
    """
    logits, _ = _tempered_logits(hidden, head.weight, head.bias, _Options(head))
    return logits


class _Options(NamedTuple):
    """Everything of `chunked_head` but its tensors with gradients.

    Weight and bias of the head are among those: they are not read from `head`.
    """

    head: Head
    temperature: float = 1.0
    entropy: bool = False
    sum_p_squared: bool = False
    top_k: int = 0
    rest: bool = False
    chunk: int = 1
    kept: KeptSets | None = None

    @property
    def some_have_none(self) -> bool:
        """True if there are tokens without a chance."""
        return self.kept is not None or self.head.never is not None


def _tempered_logits(
    hidden: Tensor, weight: Tensor, bias: OptionalTensor, options: _Options
) -> tuple[Tensor, Tensor]:
    """Logits / temperature [n, V], and the softcap's tanh or an empty tensor; softmax precision."""
    head = options.head
    z = head.linear(hidden, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if head.scale != 1.0:
        z = z * head.scale
    tanh = z.new_empty(0)
    if head.softcap is not None:
        tanh = torch.tanh(z / head.softcap)
        z = tanh * head.softcap
    if options.temperature != 1.0:
        z = z / options.temperature
    if head.never is not None:
        z = z.masked_fill(head.never, NO_CHANCE)
    return z, tanh


def _logits_of_chunk(
    hidden: Tensor, rows: slice, weight: Tensor, bias: OptionalTensor, options: _Options
) -> tuple[Tensor, Tensor]:
    """`_tempered_logits` of some of N positions, each cut to the tokens that it keeps."""
    z, tanh = _tempered_logits(hidden[rows], weight, bias, options)
    if options.kept is not None:
        z.masked_fill_(_left_out(options.kept, rows, z), NO_CHANCE)
    return z, tanh


def _left_out(kept: KeptSets, rows: slice, z: Tensor) -> Tensor:
    """[n, V] bool of the positions `rows`: tokens that none of them may be.

    Another model than the one that sampled may have fewer rows in its head: ids beyond them are
    tokens that it does not know.
    """
    offsets = kept.row_offsets[rows.start : rows.start + len(z) + 1]
    ids = kept.values[offsets[0] : offsets[-1]].long()
    counts = offsets.diff().to(z.device)
    # Where nothing was cut, nothing is left out.
    left_out = (counts > 0)[:, None].repeat(1, z.shape[1])
    position = torch.arange(len(z), device=z.device).repeat_interleave(counts)
    known = ids < z.shape[1]
    left_out[position[known], ids[known]] = False
    return left_out


def _exp(x: Tensor, *, some_have_none: bool) -> Tensor:
    """exp of what is at most 0; exactly 0 where there is no chance."""
    if not some_have_none:
        return x.exp()
    none = x < NEXT_TO_NOTHING
    return x.clamp(min=NEXT_TO_NOTHING).exp_().masked_fill_(none, 0.0)


def _untempered_gradient(dz: Tensor, tanh: Tensor, options: _Options) -> Tensor:
    """Gradient by the plain product hidden @ weight^T, of that by its tempered logits; in place."""
    if options.temperature != 1.0:
        dz /= options.temperature
    if options.head.softcap is not None:
        dz *= 1 - tanh * tanh
    if options.head.scale != 1.0:
        dz *= options.head.scale
    return dz


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a^T b; a running sum stays in its dtype, for a bf16 one would lose small chunks."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    else:
        total += a.t() @ b


def _cast(x: OptionalTensor, dtype: torch.dtype) -> OptionalTensor:
    """`x`, if there is one, in `dtype`."""
    if x is None:
        return None
    return x.to(dtype)


class _ChunkedHead(torch.autograd.Function):
    """Logits of one chunk at a time, forward and again backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: OptionalTensor,
        targets: Tensor,
        candidates: OptionalTensor,
        options: _Options,
    ) -> tuple[OptionalTensor, ...]:
        found: defaultdict[str, list[Tensor]] = defaultdict(list)
        none = options.some_have_none
        for start in range(0, max(len(hidden), 1), options.chunk):
            rows = slice(start, start + options.chunk)
            z, _ = _logits_of_chunk(hidden, rows, weight, bias, options)
            lse = logsumexp_of_rows(z, some_have_none=none)
            found["lse"].append(lse)
            picked = z.gather(1, targets[rows, None])
            found["logprobs"].append(picked.squeeze(1) - lse)
            p = z
            if options.entropy or options.sum_p_squared:
                p = _exp(z - lse[:, None], some_have_none=none)
            if options.entropy:
                found["entropy"].append(lse - torch.linalg.vecdot(p, z))
            if options.sum_p_squared:
                found["sum_p_squared"].append(torch.linalg.vecdot(p, p))
            if options.top_k:
                if candidates is None:
                    top_ids = z.topk(options.top_k, dim=-1).indices
                else:
                    top_ids = candidates[rows]
                found["top_ids"].append(top_ids)
                top = z.gather(1, top_ids)
                found["top_logprobs"].append(top - lse[:, None])
            if options.rest:
                z.scatter_(1, found["top_ids"][-1], -torch.inf)  # the last that is read of them
                rest = logsumexp_of_rows(z, some_have_none=none) - lse
                # Tokens that are never sampled are nothing, as no tokens are.
                found["rest_logprobs"].append(rest.masked_fill(rest < NO_CHANCE / 2, -torch.inf))
        merged = {name: torch.cat(parts) for name, parts in found.items()}
        kept = (
            merged["lse"],
            merged.get("entropy"),
            merged.get("top_ids"),
            merged.get("rest_logprobs"),
        )
        ctx.save_for_backward(hidden, weight, bias, targets, *kept)
        ctx.options = options
        fixed = [merged[name] for name in ("sum_p_squared", "top_ids") if name in merged]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(merged.get(name) for name in HeadOutput._fields)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[OptionalTensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_logprobs, grad_entropy, _, _, grad_top, grad_rest = grads
        hidden, weight, bias, targets, lse, entropy, top_ids, rest = ctx.saved_tensors
        options: _Options = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        grad_bias = None
        none = options.some_have_none
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=lse.dtype)
        if bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=lse.dtype)
        for start in range(0, len(hidden), options.chunk):
            rows = slice(start, start + options.chunk)
            z, tanh = _logits_of_chunk(hidden, rows, weight, bias, options)
            log_p = z.sub_(lse[rows, None])
            p = _exp(log_p, some_have_none=none)
            dz = torch.zeros_like(p)
            pull = torch.zeros_like(lse[rows])
            if grad_logprobs is not None:
                dz.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
                pull += grad_logprobs[rows]
            if grad_top is not None:
                dz.scatter_add_(1, top_ids[rows], grad_top[rows])
                pull += grad_top[rows].sum(1)
            if grad_rest is not None:
                # Shares of the others in what they have together; where nothing is left, none has.
                least = rest[rows, None].clamp(min=NO_CHANCE)
                share = _exp(log_p - least, some_have_none=none).scatter_(1, top_ids[rows], 0.0)
                dz.addcmul_(share, grad_rest[rows, None])
                pull += grad_rest[rows]
                del share
            if grad_entropy is not None:
                log_p += entropy[rows, None]
                log_p *= grad_entropy[rows, None]
                dz.addcmul_(p, log_p, value=-1)
            dz.addcmul_(p, pull[:, None], value=-1)
            dz = _untempered_gradient(dz, tanh, options)
            low = dz.to(hidden.dtype)
            grad_hidden[rows] = options.head.linear(low, weight.t(), None)
            if grad_weight is not None:
                _add_product(grad_weight, low, hidden[rows])
            if grad_bias is not None:
                grad_bias += dz.sum(0)
            # Each is as large as the logits of a chunk: none lives on beside those of the next.
            del z, tanh, log_p, p, dz, low
        grad_weight = _cast(grad_weight, weight.dtype)
        grad_bias = _cast(grad_bias, weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None
