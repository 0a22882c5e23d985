"""Delivery of weights to the sampler, and the proof that it holds and uses exactly the weights just
trained.

After every sync: (i) a fingerprint of each tensor, taken where it arrived, against the one of what
was sent; (ii) no name missing or extra; (iii) the version, asked of every worker; (iv) a probe of
fixed tokens, scored by both sides. A probe cannot see one small step, so (v) at the first sync and
every few after it a very different copy is loaded
first: the probe must move to where that copy's own forward pass puts it, then the real weights
follow, proved too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from oxrl.engines.sample.base import RolloutEngine
from oxrl.engines.train.base import Bucket, TrainEngine
from oxrl.errors import WeightSyncError
from oxrl.models.weights import buckets, fingerprint
from oxrl.seeds import stable_seed
from oxrl.types import Metrics, TokenBatch

Rows = list[list[int]]
Scores = list[list[float]]

# (largest, mean) |difference| of a log-probability between trainer and sampler, in nats at
# temperature 1.
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.1, 0.02)}
PROBE_ROWS, PROBE_LENGTH = 4, 24
# Weight version of the perturbed copy: no sample of it can pass for one of the policy.
PERTURBED = -1
# How far, relative to how far the probe moves, the perturbed copy's scores may be off.
PERTURBED_TOLERANCE = 0.05


class WeightSync:
    """Hands the policy's weights to the sampler and does not return before the delivery is proved.

    Args:
        policy: whose weights are sent.
        sampler: who gets them. An engine of several has `members`, by name: each is asked for its
            version and probe.
        dtype: what the sampler computes in: tensors are cast to it, then fingerprinted, then sent.
        vocabulary: the probe's token ids are below it.
        temperature: of the policy's log-probabilities.
        new_model: a model of the policy's architecture whose weights do not matter; built to score
            the perturbed copy.
        probe_every: syncs between two perturbed copies; 0: only the first sync has one.
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
        self.policy, self.sampler = policy, sampler
        self.rows = probe_rows(vocabulary)
        self._dtype, self._temperature, self._new_model = dtype, temperature, new_model
        self._probe_every, self._shared = probe_every, shared
        # Log-probabilities of a sharper distribution differ by more.
        self._tolerances = [limit / min(1.0, temperature) for limit in TOLERANCES[dtype]]
        self._limits = self._tolerances
        self._syncs = 0
        self._metrics: Metrics = {}

    def deliver(self, version: int) -> None:
        """Load the policy's weights, now `version`, into the sampler.

        Raises:
            WeightSyncError: two attempts failed; names what did.
        """
        if self._shared:
            self.sampler.update_weights(self.policy.weights(), version)
            return
        start = time.monotonic()
        perturb = self._syncs == 0 or (self._probe_every and self._syncs % self._probe_every == 0)
        expected = self._policy_scores()
        failures: list[WeightSyncError] = []
        while len(failures) < 2:
            try:
                if perturb:
                    self._prove_perturbed(expected)
                probe = self._send(self.policy.weights(), version, expected, self._limits)
                break
            except WeightSyncError as error:
                failures.append(error)
        else:
            raise WeightSyncError(
                f"the sampler does not hold weight version {version}, after two attempts: {failures[0]}; "
                f"then: {failures[1]}"
            )
        self._syncs += 1
        self._note(probe, retries=len(failures), seconds=time.monotonic() - start)

    def metrics(self) -> Metrics:
        """`sync/...` and `time/sync_s` since the last call; nothing while memory is shared."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _send(
        self, weights: Iterator[Bucket], version: int, expected: Scores, limits: Sequence[float]
    ) -> tuple[float, float]:
        """Load and prove; returns (largest, mean) difference of the probe."""
        sent: dict[str, str] = {}
        received = self.sampler.update_weights(self._outgoing(weights, sent), version)
        check_received(sent, received)
        worst = (0.0, 0.0)
        members: Mapping[str, RolloutEngine] = getattr(
            self.sampler, "members", {"the sampler": self.sampler}
        )
        for name, member in members.items():
            if member.version != version:
                raise WeightSyncError(
                    f"{name} acknowledges weight version {member.version}, not {version}"
                )
            found = differences(member.logprobs(self.rows, self._temperature), expected)
            for what, value, limit in zip(("largest", "mean"), found, limits, strict=True):
                if not value <= limit:
                    raise WeightSyncError(
                        f"{name} holds weight version {version} but does not use it: the {what} difference of a probe "
                        f"token's log-probability is {value:.3g}, allowed {limit:.3g} (a stale copy of some weight?)"
                    )
            worst = cast(tuple[float, float], tuple(map(max, worst, found)))
        return worst

    def _outgoing(self, weights: Iterator[Bucket], sent: dict[str, str]) -> Iterator[Bucket]:
        for bucket in weights:
            cast_bucket = [(name, tensor.detach().to(self._dtype)) for name, tensor in bucket]
            sent.update((name, fingerprint(tensor)) for name, tensor in cast_bucket)
            yield cast_bucket

    def _prove_perturbed(self, expected: Scores) -> None:
        """The sampler must follow a copy whose scores differ from the policy's by far more than the
        tolerance.
        """
        model = self._new_model()
        with torch.no_grad():
            for bucket in self.policy.weights():
                for name, tensor in bucket:
                    model.get_parameter(name).copy_(perturb(tensor.to(self._dtype)))
        reference = scores(model, self.rows, self._temperature)
        moved = differences(reference, expected)
        if moved[0] < 2 * self._tolerances[0]:
            raise WeightSyncError(
                f"the perturbed copy moves the probe by only {moved[0]:.3g} nats: it would prove nothing. "
                "Report this model; rollouts cannot be trusted"
            )
        limits = [
            max(limit, PERTURBED_TOLERANCE * far)
            for limit, far in zip(self._tolerances, moved, strict=True)
        ]
        rounding = self._send(buckets(model.named_parameters()), PERTURBED, reference, limits)
        if self._dtype != torch.float32:
            # Some models round more than others; what they differ by here is known to be nothing
            # but that.
            self._limits = [
                max(limit, 2 * found)
                for limit, found in zip(self._tolerances, rounding, strict=True)
            ]

    def _policy_scores(self) -> Scores:
        """The probe as the trainer scores it."""
        tokens = torch.tensor(self.rows)
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        batch = TokenBatch(tokens=tokens, attention_mask=everywhere, response_mask=everywhere)
        return cast(Tensor, self.policy.forward(batch, frozenset({"logprobs"})).logprobs).tolist()

    def _note(self, probe: tuple[float, float], *, retries: int, seconds: float) -> None:
        kept = defaultdict[str, float](float, self._metrics)
        self._metrics = {
            "sync/probe_max": max(kept["sync/probe_max"], probe[0]),
            "sync/probe_mean": max(kept["sync/probe_mean"], probe[1]),
            "sync/retries": kept["sync/retries"] + retries,
            "time/sync_s": kept["time/sync_s"] + seconds,
        }


def probe_rows(vocabulary: int) -> Rows:
    """The fixed probe: PROBE_ROWS rows of PROBE_LENGTH token ids; all but the first of each are
    scored.
    """
    return [
        [stable_seed("probe", row, at) % vocabulary for at in range(PROBE_LENGTH)]
        for row in range(PROBE_ROWS)
    ]


def perturb(tensor: Tensor) -> Tensor:
    """Another tensor of the same scale, changed everywhere: matrices with their rows moved on by
    one, vectors grown.
    """
    return tensor.roll(1, 0) if tensor.ndim > 1 else tensor * 2 + 0.05


@torch.inference_mode()
def scores(model: nn.Module, rows: Rows, temperature: float) -> Scores:
    """Token-aligned logprobs of `rows` by a Hugging Face causal LM, first entry 0.0."""
    tokens = torch.tensor(rows, device=next(model.parameters()).device)
    logprobs = (model(input_ids=tokens).logits[:, :-1].float() / temperature).log_softmax(-1)
    return [[0.0, *row] for row in logprobs.gather(2, tokens[:, 1:, None]).squeeze(2).tolist()]


def differences(found: Scores, expected: Scores) -> tuple[float, float]:
    """(largest, mean) |difference| over the scored tokens; NaN where a score is NaN."""
    by_token = (
        torch.tensor(found, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
    )[:, 1:].abs()
    return float(by_token.max()), float(by_token.mean())


def check_received(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Names and fingerprints of what arrived are those of what was sent.

    Raises:
        WeightSyncError: they are not; names the tensors.
    """
    problems: list[str] = []
    for what, names in (
        ("never loaded", sent.keys() - received.keys()),
        ("not sent", received.keys() - sent.keys()),
    ):
        if names:
            problems.append(f"{len(names)} tensors were {what}: {', '.join(sorted(names)[:3])}")
    wrong = {name for name in sent.keys() & received.keys() if sent[name] != received[name]}
    for name in sorted(wrong)[:3]:
        others = [other for other in sent if other != name and sent[other] == received[name]]
        problems.append(
            f"{name} arrived {f'with the payload of {others[0]}' if others else 'changed'}"
        )
    if problems:
        more = f" ({len(wrong)} tensors differ in all)" if len(wrong) > 3 else ""
        raise WeightSyncError("; ".join(problems) + more)
