"""The probe of a weight delivery: the rows that trainer and sampler both score, and the limits on
how far their scores may differ.

Two right implementations differ by rounding. How much that is depends on the model, its weights,
the tokens and the dtype, so it is measured: the very weights that are delivered read the very
tokens of the probe twice, in the sampler's dtype and in a higher one. The limits are a multiple of
that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from oxrl.engines.sample import RowLogprobs
from oxrl.engines.sample.rows import batch_of, pad_rows
from oxrl.engines.train import Buckets
from oxrl.functional.logprobs import head_logits
from oxrl.functional.masks import at_least_float32
from oxrl.modelfiles.folder import family_of
from oxrl.models.network import CausalNetwork
from oxrl.models.token_mask import is_restricted
from oxrl.models.weights import has_adapter
from oxrl.seeds import stable_seed
from oxrl.types import Images, Metrics, Rollout, Rollouts, TokenBatch

HIGHER = {
    torch.float64: torch.float64,
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
FIXED_TOKENS = 24
# The end of a sample, which is where the response is; more would cost more than it shows.
ROW_TOKENS = 64
ROWS_AT_ONCE = 8
# What a float32 log-probability can tell apart, in nats; limits are never a multiple of less.
RESOLUTION = 1e-6
# Of a single token and of the mean of all, which vary more than the mean of absolute differences.
LOOSER = 2.0
HIGH_QUANTILE = 0.9

Rows = list[list[int]]
# Of each row the images that it shows, by name; empty: no row shows any.
Shown = list[tuple[str, ...]]


class Probe(NamedTuple):
    """Rows of token ids to be scored, at a temperature, and the images that each shows."""

    rows: Rows
    temperature: float
    shown: Shown

    def batch(self, images: Images) -> TokenBatch:
        """Return the rows as a batch on the CPU, with the images that they show.

        Args:
            images: where these are; None: there are none.
        """
        inputs = batch_of(self.rows, torch.device("cpu"))
        if images is None or not self.shown:
            return inputs
        named = [(f"row {at} of the probe", names) for at, names in enumerate(self.shown)]
        return images.attach(inputs, named)


class Distance(NamedTuple):
    """Statistics of the differences of log-probabilities over the tokens of a probe, in nats.

    mean, high, largest: of absolute differences, the second their 90 % quantile. bias: |mean| of
    the signed ones.
    """

    mean: float
    high: float
    largest: float
    bias: float

    def shares_of(self, limits: Distance) -> Metrics:
        """Divide each statistic by its limit: 1 and less is within; NaN is not.

        Args:
            limits: of the same statistics, in nats, each above 0.

        Returns:
            mean, high, largest and bias -> share.
        """
        pairs = zip(self._fields, self, limits, strict=True)
        return {name: value / limit for name, value, limit in pairs}


class Compared(NamedTuple):
    """The choice of tokens of a probe that are compared.

    image_ids: ids that stand for images; up to the last one of a row nothing is compared.
    only: ids that may be sampled, where that is not all of them; no other has a probability.
    """

    image_ids: Collection[int] = ()
    only: Collection[int] = ()

    def ids(self, vocabulary: int) -> Sequence[int]:
        """Return the token ids that fixed rows are made of.

        Args:
            vocabulary: how many ids there are.

        Returns:
            Ids in ascending order, at least one.
        """
        if self.only:
            return sorted(self.only)
        return [token for token in range(vocabulary) if token not in self.image_ids]

    def text_of(self, row: Sequence[int]) -> int:
        """Find the place where the text after a row's last image begins; 0 where it has no image.

        Args:
            row: token ids.

        Returns:
            A position in the row; its length where an image comes last.
        """
        places = [at for at, token in enumerate(row) if token in self.image_ids]
        return places[-1] + 1 if places else 0

    def places(self, row: Sequence[int]) -> list[int]:
        """List the tokens of a row that are compared; the first of a row never is.

        Args:
            row: token ids.

        Returns:
            Positions in ascending order, perhaps none.
        """
        first = max(1, self.text_of(row))
        places = range(first, len(row))
        if not self.only:
            return [*places]
        return [at for at in places if row[at] in self.only]


EVERYTHING = Compared()


class Forwards(NamedTuple):
    """The same weights' scores of the probe, in the sampler's dtype and in a higher one."""

    low: RowLogprobs
    high: RowLogprobs


def fixed_rows(vocabulary: int, tokens: int, compared: Compared = EVERYTHING) -> Rows:
    """Make rows of token ids that are always the same.

    Args:
        vocabulary: the ids are below it.
        tokens: at least so many are scored; the first of each row is not.
        compared: what may stand in them.

    Returns:
        Rows of FIXED_TOKENS ids each.
    """
    count = ceil(tokens / (FIXED_TOKENS - 1))
    ids = compared.ids(vocabulary)
    return [
        [ids[stable_seed("probe", row, at) % len(ids)] for at in range(FIXED_TOKENS)]
        for row in range(count)
    ]


class SampledRows(NamedTuple):
    """Rows of samples, and of each the images that it shows."""

    rows: Rows
    shown: Shown


def sampled_rows(rollouts: Rollouts, tokens: int, compared: Compared = EVERYTHING) -> SampledRows:
    """Take the ends of samples, from all over them, until `tokens` are scored or there are no more.

    Those with images are taken whole.

    Args:
        rollouts: the newest, in any number.
        tokens: how many compared ones are enough.
        compared: which tokens count.

    Returns:
        Rows of token ids, and names of the images of each.
    """
    rows: Rows = []
    shown: Shown = []
    scored = 0
    stride = max(1, len(rollouts) * FIXED_TOKENS // tokens)
    for first in range(stride):
        for rollout in rollouts[first::stride]:
            read = [*rollout.prompt.token_ids, *rollout.completion.token_ids]
            images = _images_of(rollout)
            row = read[:-1]  # engines score rows that are shorter than the context
            if not images:
                row = read[-min(ROW_TOKENS, len(read) - 1) :]
                row = row[compared.text_of(row) :]
            found = len(compared.places(row))
            if not found:
                continue
            rows.append(row)
            shown.append(images)
            scored += found
            if scored >= tokens:
                return SampledRows(rows, shown)
    return SampledRows(rows, shown)


def _images_of(rollout: Rollout) -> tuple[str, ...]:
    """Return the images of a sample that is one row, in their order."""
    segments = rollout.completion.segments
    if any(segment.context is not None for segment in segments):
        return ()
    return rollout.prompt.images + tuple(name for segment in segments for name in segment.images)


def compared_scores(scores: RowLogprobs, rows: Rows, compared: Compared) -> RowLogprobs:
    """Leave out scores that are not compared, such as of tokens that nobody samples.

    Args:
        scores: token-aligned, of each row.
        rows: what was scored.
        compared: which tokens are.

    Returns:
        For each row 0.0, for its first token, and the scores of those that are compared, in order.
    """
    found: RowLogprobs = []
    for said, row in zip(scores, rows, strict=True):
        found.append([0.0, *[said[at] for at in compared.places(row)]])
    return found


def count_scored(rows: Rows, compared: Compared = EVERYTHING) -> int:
    """Count the tokens of rows that are compared.

    Args:
        rows: token ids.
        compared: which tokens are.
    """
    return sum(len(compared.places(row)) for row in rows)


def differences(found: RowLogprobs, expected: RowLogprobs) -> Tensor:
    """Subtract `expected` from `found`, over all scored tokens; the first of a row is not scored.

    Args:
        found, expected: log-probabilities in nats, of the same rows.

    Returns:
        [n] float64, in nats; NaN where one of the two is.
    """
    return _scored(found) - _scored(expected)


def _scored(scores: RowLogprobs) -> Tensor:
    values = [value for row in scores for value in row[1:]]
    return torch.tensor(values, dtype=torch.float64)


def distance(found: RowLogprobs, expected: RowLogprobs) -> Distance:
    """Measure how far two scores of the same rows are apart.

    Args:
        found, expected: log-probabilities in nats, of the same rows, with at least one scored
            token.

    Returns:
        In nats; NaN where one of the scores is.
    """
    signed = differences(found, expected)
    absolute = signed.abs()
    return Distance(
        mean=float(absolute.mean()),
        high=float(absolute.quantile(HIGH_QUANTILE)),
        largest=float(absolute.max()),
        bias=float(signed.mean().abs()),
    )


def limits(forwards: Forwards, *, multiple: float, temperature: float) -> Distance:
    """Compute the largest distance that a right sampler may have from a right trainer.

    Args:
        forwards: of the weights that both have.
        multiple: of the rounding that is seen there.
        temperature: of the log-probabilities; those of a sharper distribution differ by more.

    Returns:
        In nats, each above 0.
    """
    rounding = differences(forwards.low, forwards.high)
    about = distance(forwards.low, forwards.high)
    smallest = RESOLUTION / min(1.0, temperature)
    root_mean_square = float(rounding.square().mean().sqrt())
    return Distance(
        mean=multiple * max(about.mean, smallest),
        high=multiple * max(about.high, smallest),
        largest=LOOSER * multiple * max(about.largest, smallest),
        # What all tokens share, such as the largest logit of a sharp policy, is rounded once: the
        # signs of rounding may all be the same.
        bias=multiple / LOOSER * max(root_mean_square, smallest),
    )


@torch.no_grad()
def two_forwards(
    model: Module, weights: Buckets, probe: Probe, dtype: torch.dtype, images: Images
) -> Forwards:
    """Give a model these weights and score a probe in two precisions.

    Args:
        model: a Hugging Face causal LM, whose weights do not matter; left with these, rounded to
            `dtype`.
        weights: of every parameter; of a model with an adapter the adapter's, as they are.
        probe: the rows that it reads.
        dtype: the sampler's.
        images: where those that rows show are; None: there are none.

    Returns:
        The scores of the rows in `dtype`, and in a higher one.
    """
    adapted = has_adapter(model)
    for bucket in weights:
        for name, tensor in bucket:
            parameter = model.get_parameter(name)
            own = parameter.dtype if adapted else dtype
            parameter.data = tensor.detach().to(parameter.device, own)
    low = model_logprobs(model, probe, images)
    # Parameters only: rotary frequencies are not weights, and have a dtype of their own.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(HIGHER[dtype])
    config: Any = getattr(model, "config", None)
    if hasattr(config, "_experts_implementation"):
        # The fast products of experts know no float64.
        config._experts_implementation = "eager"
    return Forwards(low, model_logprobs(model, probe, images))


@torch.inference_mode()
def model_logprobs(model: Module, probe: Probe, images: Images) -> RowLogprobs:
    """Log-probabilities of rows by a Hugging Face causal LM, from its whole logits.

    Args:
        model: whose logits are taken as they are.
        probe: rows of any lengths.
        images: where those that rows show are; None: there are none.

    Returns:
        Token-aligned, in nats; the first entry of each row is 0.0.
    """
    device = next(model.parameters()).device
    scores: RowLogprobs = []
    for start in range(0, len(probe.rows), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        some = probe.rows[here]
        tokens, _ = pad_rows(some, device)
        if not isinstance(model, PreTrainedModel) or _says_all(model):
            logits = at_least_float32(model(input_ids=tokens).logits[:, :-1])
        else:
            inputs = probe._replace(rows=some, shown=probe.shown[here]).batch(images)
            logits = _logits_it_may_sample(model, inputs.to(device))
        all_logprobs = (logits / probe.temperature).log_softmax(-1)
        logprobs = all_logprobs.gather(2, tokens[:, 1:, None]).squeeze(2).tolist()
        for said, row in zip(logprobs, some, strict=True):
            scores.append([0.0, *said[: len(row) - 1]])
    return scores


def _says_all(model: PreTrainedModel) -> bool:
    """True if a model reads text alone, and may sample every token."""
    return family_of(model) is None and not is_restricted(model)


def _logits_it_may_sample(model: PreTrainedModel, inputs: TokenBatch) -> Tensor:
    """Return logits [B, T - 1, V] of a model that may sample some tokens only: others get none."""
    network = CausalNetwork(model)
    hidden = network.backbone(inputs)
    return head_logits(hidden[:, :-1], network.head)


def perturb(tensor: Tensor, strength: float = 1.0) -> Tensor:
    """Another tensor of the same scale, changed everywhere.

    The rows of a matrix move on by one; a vector grows, and a matrix of equal rows, such as one of
    zeros. `strength` is the share of it that is new.

    Args:
        tensor: a weight; not changed.
        strength: above 0; 1: all of it is new; more: as much further away.

    Returns:
        A tensor of the same shape, dtype and device.
    """
    other = tensor.roll(1, 0)
    if tensor.ndim < 2 or torch.equal(other, tensor):
        other = tensor * 2 + 0.05
    return other if strength == 1 else tensor.lerp(other, strength)
