"""Delivery of weights to the sampler, and the proof that it holds and uses exactly those.

After every delivery: (i) a fingerprint of each tensor, taken where it arrived, against the one of
what was sent; (ii) no name missing or extra; (iii) the version, asked of every worker; (iv) a probe
of fixed tokens, scored by both sides. A probe cannot see one small step, so (v) at the first
delivery and every few after it a very different copy is loaded first: the probe must move to where
that copy's own forward pass puts it, then the real weights follow, proved too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from oxrl.engines.sample.base import RolloutEngine
from oxrl.engines.train.base import Bucket, TrainEngine
from oxrl.errors import WeightSyncError
from oxrl.models.network import unpadded
from oxrl.models.weights import buckets, fingerprint
from oxrl.seeds import stable_seed
from oxrl.types import Metrics


class Difference(NamedTuple):
    """|Difference| of a token's log-probability between two sides, in nats."""

    largest: float
    mean: float

    def or_more(self, other: Difference, factor: float = 1.0) -> Difference:
        """Each number, or `factor` times that of `other` where it is larger."""
        return Difference(
            max(self.largest, factor * other.largest), max(self.mean, factor * other.mean)
        )


# At temperature 1, by what the sampler computes in.
TOLERANCES = {
    torch.float32: Difference(largest=1e-4, mean=1e-4),
    torch.bfloat16: Difference(largest=0.1, mean=0.02),
}
PROBE_ROWS = 4
PROBE_LENGTH = 24
# Weight version of the perturbed copy: no sample of it can pass for one of the policy.
PERTURBED = -1
# How far, relative to how far the probe moves, the perturbed copy's log-probabilities may be off.
PERTURBED_TOLERANCE = 0.05


class WeightSync:
    """Hands the policy's weights to the sampler; returns once the delivery is proved.

    Args:
        policy: whose weights are sent.
        sampler: who gets them. An engine of several has `members`, by name: each is asked for its
            version and probe.
        dtype: what the sampler computes in: tensors are cast to it, then fingerprinted, then sent.
        vocabulary: the probe's token ids are below it.
        temperature: of the policy's log-probabilities.
        new_model: a model of the policy's architecture whose weights do not matter; built to score
            the perturbed copy.
        probe_every: deliveries between two perturbed copies; 0: only the first has one.
        shared: the sampler reads the policy's own memory, so that there is nothing to send and
            nothing to prove.
    """

    def __init__(
        self,
        policy: TrainEngine,
        sampler: RolloutEngine,
        *,
        dtype: torch.dtype,
        vocabulary: int,
        temperature: float,
        new_model: Callable[[], nn.Module],
        probe_every: int = 50,
        shared: bool = False,
    ) -> None:
        self.policy = policy
        self.sampler = sampler
        self.rows = probe_rows(vocabulary)
        self._dtype = dtype
        self._temperature = temperature
        self._new_model = new_model
        self._probe_every = probe_every
        self._shared = shared
        # Log-probabilities of a sharper distribution differ by more.
        sharpness = min(1.0, temperature)
        allowed = TOLERANCES[dtype]
        self._tolerance = Difference(allowed.largest / sharpness, allowed.mean / sharpness)
        self._limit = self._tolerance
        self._deliveries = 0
        self._metrics: Metrics = {}

    def deliver(self, version: int) -> None:
        """Load the policy's weights into the sampler.

        Args:
            version: what they are called from now on: optimizer steps taken.

        Raises:
            WeightSyncError: two attempts failed; names what did.
        """
        if self._shared:
            self.sampler.update_weights(self.policy.weights(), version)
            return
        start = time.monotonic()
        expected = self._policy_logprobs()
        retries = 0
        try:
            difference = self._attempt(version, expected)
        except WeightSyncError as first:
            retries = 1
            try:
                difference = self._attempt(version, expected)
            except WeightSyncError as second:
                raise WeightSyncError(
                    f"the sampler does not hold weight version {version}, after two attempts: "
                    f"{first}; then: {second}"
                ) from second
        self._deliveries += 1
        self._record(difference, retries=retries, seconds=time.monotonic() - start)

    def metrics(self) -> Metrics:
        """`sync/...` and `time/sync_s` since the last call; nothing while memory is shared."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _attempt(self, version: int, expected: list[list[float]]) -> Difference:
        if self._perturbed_copy_is_due():
            self._prove_perturbed(expected)
        return self._send(self.policy.weights(), version, expected, self._limit)

    def _perturbed_copy_is_due(self) -> bool:
        if self._deliveries == 0:
            return True
        return self._probe_every > 0 and self._deliveries % self._probe_every == 0

    def _send(
        self,
        weights: Iterator[Bucket],
        version: int,
        expected: list[list[float]],
        limit: Difference,
    ) -> Difference:
        """Load and prove; returns how far the probe is off, at worst of all members."""
        sent: dict[str, str] = {}
        received = self.sampler.update_weights(self._fingerprinted(weights, sent), version)
        check_received(sent, received)
        alone = {"the sampler": self.sampler}
        members: Mapping[str, RolloutEngine] = getattr(self.sampler, "members", alone)
        worst = Difference(0.0, 0.0)
        for name, member in members.items():
            if member.version != version:
                raise WeightSyncError(
                    f"{name} acknowledges weight version {member.version}, not {version}"
                )
            found = differences(member.logprobs(self.rows, self._temperature), expected)
            _check_difference(name, version, found, limit)
            worst = worst.or_more(found)
        return worst

    def _fingerprinted(self, weights: Iterator[Bucket], sent: dict[str, str]) -> Iterator[Bucket]:
        """The weights as the sampler computes with them; notes in `sent` what they look like."""
        for bucket in weights:
            cast_bucket = [(name, tensor.detach().to(self._dtype)) for name, tensor in bucket]
            for name, tensor in cast_bucket:
                sent[name] = fingerprint(tensor)
            yield cast_bucket

    def _prove_perturbed(self, expected: list[list[float]]) -> None:
        """The sampler must follow a copy that differs from the policy by far more than rounding."""
        model = self._new_model()
        with torch.no_grad():
            for bucket in self.policy.weights():
                for name, tensor in bucket:
                    model.get_parameter(name).copy_(perturb(tensor.to(self._dtype)))
        reference = model_logprobs(model, self.rows, self._temperature)
        moved = differences(reference, expected)
        allowed = self._tolerance
        if moved.largest < 2 * allowed.largest:
            raise WeightSyncError(
                f"the perturbed copy moves the probe by only {moved.largest:.3g} nats: it would "
                "prove nothing. Report this model; rollouts cannot be trusted"
            )
        limit = allowed.or_more(moved, PERTURBED_TOLERANCE)
        rounding = self._send(buckets(model.named_parameters()), PERTURBED, reference, limit)
        if self._dtype != torch.float32:
            # Some models round more than others; what they differ by here is known to be nothing
            # but that.
            self._limit = allowed.or_more(rounding, 2)

    def _policy_logprobs(self) -> list[list[float]]:
        """The probe as the trainer scores it."""
        probe = unpadded(torch.tensor(self.rows))
        said = self.policy.forward(probe, frozenset({"logprobs"}))
        return cast(Tensor, said.logprobs).tolist()

    def _record(self, difference: Difference, *, retries: int, seconds: float) -> None:
        kept = self._metrics
        self._metrics = {
            "sync/probe_max": max(kept.get("sync/probe_max", 0.0), difference.largest),
            "sync/probe_mean": max(kept.get("sync/probe_mean", 0.0), difference.mean),
            "sync/retries": kept.get("sync/retries", 0.0) + retries,
            "time/sync_s": kept.get("time/sync_s", 0.0) + seconds,
        }


def probe_rows(vocabulary: int) -> list[list[int]]:
    """The fixed probe: rows of token ids, of which all but the first of each are scored.

    Args:
        vocabulary: the ids are below it.

    Returns:
        PROBE_ROWS rows of PROBE_LENGTH ids.
    """
    return [
        [stable_seed("probe", row, at) % vocabulary for at in range(PROBE_LENGTH)]
        for row in range(PROBE_ROWS)
    ]


def perturb(tensor: Tensor) -> Tensor:
    """Another tensor of the same scale, changed everywhere.

    The rows of a matrix move on by one, a vector grows.
    """
    return tensor.roll(1, 0) if tensor.ndim > 1 else tensor * 2 + 0.05


@torch.inference_mode()
def model_logprobs(
    model: nn.Module, rows: Sequence[Sequence[int]], temperature: float
) -> list[list[float]]:
    """Log-probabilities of rows of equal length by a Hugging Face causal LM.

    Args:
        model: whose whole logits are computed.
        rows: token ids.
        temperature: logits are divided by it.

    Returns:
        Token-aligned, in nats; the first entry of each row is 0.0.
    """
    tokens = torch.tensor(rows, device=next(model.parameters()).device)
    logits = model(input_ids=tokens).logits[:, :-1]
    all_logprobs = (logits.float() / temperature).log_softmax(-1)
    logprobs = all_logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
    return [[0.0, *row] for row in logprobs.tolist()]


def differences(found: list[list[float]], expected: list[list[float]]) -> Difference:
    """How far log-probabilities are apart over the scored tokens; NaN where one of them is."""
    ours = torch.tensor(found, dtype=torch.float64)
    theirs = torch.tensor(expected, dtype=torch.float64)
    by_token = (ours - theirs)[:, 1:].abs()
    return Difference(float(by_token.max()), float(by_token.mean()))


def _check_difference(name: str, version: int, found: Difference, limit: Difference) -> None:
    for what, value, allowed in zip(Difference._fields, found, limit, strict=True):
        if not value <= allowed:  # NaN is not
            raise WeightSyncError(
                f"{name} holds weight version {version} but does not use it: the {what} difference "
                f"of a probe token's log-probability is {value:.3g}, allowed {allowed:.3g} "
                "(a stale copy of some weight?)"
            )


def check_received(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Names and fingerprints of what arrived are those of what was sent.

    Args:
        sent: name -> fingerprint.
        received: name -> fingerprint.

    Raises:
        WeightSyncError: they are not; names the tensors.
    """
    problems: list[str] = []
    _note_names(problems, "never loaded", sent.keys() - received.keys())
    _note_names(problems, "not sent", received.keys() - sent.keys())
    changed = [name for name in sorted(sent) if received.get(name, sent[name]) != sent[name]]
    for name in changed[:3]:
        others = [other for other in sent if other != name and sent[other] == received[name]]
        how = f"with the payload of {others[0]}" if others else "changed"
        problems.append(f"{name} arrived {how}")
    if problems:
        more = f" ({len(changed)} tensors differ in all)" if len(changed) > 3 else ""
        raise WeightSyncError("; ".join(problems) + more)


def _note_names(problems: list[str], what: str, names: set[str]) -> None:
    if names:
        problems.append(f"{len(names)} tensors were {what}: {', '.join(sorted(names)[:3])}")
