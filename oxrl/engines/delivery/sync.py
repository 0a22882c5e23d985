"""Delivery of weights to the sampler, and the proof that it holds and uses exactly those.

What the optimizer holds is fingerprinted first, then the copies on the way to a token: (i) what
arrives at the sampler; (ii) where that is something else, what was sent, so that it is known on
which side the fault is; (iii) what the sampler computes with, read back after it has loaded, and
again before the next delivery: what was sampled in between was sampled with that. Then (iv) the
version is asked of every worker, and (v) a probe, rows of the policy's own samples, is scored by
both sides: `proof.py` says how far apart they may be. A probe cannot see one small step, so (vi) at
the first delivery and every few after it a very different copy is loaded first: the probe must move
to where that copy's own forward pass puts it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module

from oxrl.engines.delivery.proof import (
    EVERYTHING,
    Compared,
    Distance,
    Forwards,
    Probe,
    Rows,
    SampledRows,
    Shown,
    compared_scores,
    count_scored,
    distance,
    fixed_rows,
    limits,
    sampled_rows,
)
from oxrl.engines.sample import RolloutEngine, RowLogprobs
from oxrl.engines.train import Part, TrainEngine
from oxrl.engines.transport.base import (
    Arrived,
    Copy,
    Fingerprints,
    WeightTransport,
)
from oxrl.engines.transport.direct import Direct
from oxrl.errors import WeightSyncError
from oxrl.models.rounded import round_rows
from oxrl.models.weights import plain_name
from oxrl.types import Images, Metrics, Rollouts

# Weight version of the perturbed copy: no sample of it can pass for one of the policy.
PERTURBED = -1
# How much of the perturbed copy is new. Less, where rounding alone moves the whole copy about; at
# last more than all of it, where that is lost in rounding, as a new adapter's small term may be.
STRENGTHS = (1.0, 0.3, 0.1, 3.0, 30.0)
# How much further than its limit the perturbed copy has to move the probe.
CLEARLY = 2.0
# Deliveries after which the probe gets newer samples and limits of newer weights.
REFRESH = 50
# Where a checkpoint keeps the probe.
FILE = "probe.json"


class Stage(NamedTuple):
    """The words of a message about a faulty copy: tensors were never `done`, were not `given`, or
    one `came` changed.
    """

    done: str
    given: str
    came: str


UNDER = Stage("kept under the adapter", "the policy's", "is under the adapter")
YIELDED = Stage(
    "yielded by policy.weights()", "trained", "is not what the optimizer holds: weights() yields it"
)
ARRIVED = Stage("loaded", "sent", "arrived")
HELD = Stage("kept", "sent", "is kept")


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """The options of a delivery of weights and of its proof.

    dtype: what the sampler computes in: tensors are cast to it, then fingerprinted, then sent.
    vocabulary: the fixed probe's token ids are below it.
    temperature: of the policy's log-probabilities.
    probe_every: deliveries between two perturbed copies; 0: only the first has one.
    probe_tokens: tokens that the probe scores.
    probe_limit: how many times the rounding of the real weights sampler and trainer may be apart.
    compared: tokens that are compared; in the fixed probe there are no others.
    part: of a policy with an adapter, what is delivered: the adapter alone, and the model under it
        is proved once to be the one that the sampler has already; or both, merged into the weights
        of a model without adapter.
    bits: of a weight in the sampler, where it is rounded: everything is proved by the rounded
        weights then. None: it has the policy's.
    """

    dtype: torch.dtype
    vocabulary: int
    temperature: float
    probe_every: int = 50
    probe_tokens: int = 512
    probe_limit: float = 4.0
    compared: Compared = EVERYTHING
    part: Part = "all"
    bits: int | None = None

    def copy(self, strength: float = 0.0) -> Copy:
        """Describe the copy that is delivered, or a perturbed one.

        Args:
            strength: how much it is perturbed; 0: not at all, else one of `STRENGTHS`.

        Returns:
            What to ask the transport for: in the sampler's dtype, of the part of the policy that
            is delivered.
        """
        return Copy(self.dtype, strength, self.part, self.bits)


class WeightSync:
    """Hands the policy's weights to the sampler; returns once the delivery is proved.

    Args:
        policy: whose weights are sent.
        sampler: who gets them. An engine of several has `members`, by name: each is asked for its
            version, weights and probe.
        options: see SyncOptions.
        new_model: a model of the policy's architecture whose weights do not matter; built to score
            the perturbed copy, and to measure rounding.
        images: those of the samples; None: they have none.
        transport: moves and scores copies of the weights; None: they pass through this process.
    """

    def __init__(
        self,
        policy: TrainEngine,
        sampler: RolloutEngine,
        options: SyncOptions,
        new_model: Callable[[], Module],
        images: Images = None,
        transport: WeightTransport | None = None,
    ) -> None:
        self.policy = policy
        self.sampler = sampler
        self.options = options
        self.rows = fixed_rows(options.vocabulary, options.probe_tokens, options.compared)
        # The images of each row, where some row shows any.
        self.shown: Shown = []
        self._images = images
        self._transport = transport or Direct(policy, sampler, new_model, images)
        # Whether policy and sampler are processes of their own, which work at the same time.
        self._apart = transport is not None
        # Of the newest samples: what the probe is made of when it is made next.
        self._newest = SampledRows([], [])
        self._on_samples = False
        # None: the rows are new, or the weights have moved on since.
        self._limits: Distance | None = None
        self._calibrated = 0
        self._deliveries = 0
        self._perturbed_once = False
        self._version = PERTURBED
        self._unread = 0
        # What each member computed with after the last delivery.
        self._held: dict[str, Fingerprints] = {}
        # Of the weights under an adapter, by their names in the policy; empty: not asked yet.
        self._base: Fingerprints = {}
        self._metrics: Metrics = {}

    def remember(self, rollouts: Rollouts) -> Metrics:
        """Take the newest samples for the next probe.

        Args:
            rollouts: of the step that is over.

        Returns:
            What it cost to deliver the weights that they were sampled with; see `metrics`.
        """
        options = self.options
        self._newest = sampled_rows(rollouts, options.probe_tokens, options.compared)
        return self.metrics()

    def save(self, directory: Path) -> None:
        """Write what the probe is, so that a resumed run is proved by the same."""
        state = {
            "rows": self.rows,
            "newest": self._newest.rows,
            "on_samples": self._on_samples,
            "limits": self._limits,
            "calibrated": self._calibrated,
            "deliveries": self._deliveries,
            "version": self._version,
        }
        if self.options.compared.image_ids:
            state |= {"shown": self.shown, "newest_shown": self._newest.shown}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; checkpoints from before it have nothing of it."""
        path = directory / FILE
        if not path.exists():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        self.rows = state["rows"]
        newest: Rows = state["newest"]
        images = state.get("newest_shown") or [()] * len(newest)
        self._newest = SampledRows(newest, [tuple(names) for names in images])
        self.shown = [tuple(names) for names in state.get("shown", ())]
        self._on_samples = state["on_samples"]
        self._limits = None if state["limits"] is None else Distance(*state["limits"])
        self._calibrated = state["calibrated"]
        self._deliveries = state["deliveries"]
        self._version = state.get("version", PERTURBED)

    def deliver(self, version: int) -> None:
        """Load the policy's weights into the sampler.

        Args:
            version: what they are called from now on: optimizer steps taken.

        Raises:
            WeightSyncError: the sampler's weights have changed since the last delivery, or two
                attempts failed; names what did.
        """
        start = monotonic()
        self._refresh_probe()
        expected, masters = self._before()
        retries = 0
        try:
            proved = self._attempt(version, expected, masters)
        except WeightSyncError as first:
            retries = 1
            try:
                proved = self._attempt(version, expected, self._masters())
            except WeightSyncError as second:
                raise WeightSyncError(
                    f"the sampler does not hold weight version {version}, after two attempts: "
                    f"{first}; then: {second}"
                ) from second
        if version != self._version:  # one that a signal cut off is delivered again after a resume
            self._deliveries += 1
        self._perturbed_once = True
        self._version = version
        self._record(*proved, retries=retries, seconds=monotonic() - start)

    def metrics(self) -> Metrics:
        """`sync/...` and `time/sync_s` since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _before(self) -> tuple[RowLogprobs, Fingerprints]:
        """Return the policy's scores of the probe, and the fingerprints of its optimizer's weights.

        Samplers show at the same time that they hold what they did, unless this process has both.
        """
        if not self._apart:
            self._check_still_held()
            return self._expected(), self._masters()
        with ThreadPoolExecutor(1, "read-back") as thread:
            checking = thread.submit(self._check_still_held)
            expected = self._expected()
            masters = self._masters()
            checking.result()
        return expected, masters

    def _members(self) -> Mapping[str, RolloutEngine]:
        alone = {"the sampler": self.sampler}
        return getattr(self.sampler, "members", alone)

    def _check_still_held(self) -> None:
        """Check that samples since the last delivery came from the weights delivered then."""
        for name, member in self._members().items():
            if name not in self._held:
                continue
            before = self._held[name]
            now = member.held()
            names = sorted(before.keys() | now.keys())
            changed = [weight for weight in names if before.get(weight) != now.get(weight)]
            if changed:
                raise WeightSyncError(
                    f"{name} no longer computes with weight version {self._version} as it was "
                    f"delivered: {_some(changed)} changed since. What it sampled in between is not "
                    "of that version, and steps were taken on it: go on from a checkpoint of "
                    f"version {self._version} or before"
                )

    def _refresh_probe(self) -> None:
        """Take newer samples for the probe, and newer limits, every few deliveries."""
        aged = self._deliveries - self._calibrated >= REFRESH
        newer = bool(self._newest.rows) and not self._on_samples
        if not (newer or aged):
            return
        options = self.options
        rows = list(self._newest.rows)
        shown = list(self._newest.shown)
        missing = options.probe_tokens - count_scored(rows, options.compared)
        if missing > 0:
            rows += fixed_rows(options.vocabulary, missing, options.compared)
            shown += [()] * (len(rows) - len(shown))
        self.rows = rows
        self.shown = shown if any(shown) else []
        self._on_samples = bool(self._newest.rows)
        self._limits = None

    def _perturbed_copy_is_due(self) -> bool:
        if not self._perturbed_once:
            return True
        every = self.options.probe_every
        return every > 0 and self._deliveries % every == 0

    def _attempt(
        self, version: int, expected: RowLogprobs, masters: Fingerprints
    ) -> tuple[Distance, Distance]:
        """Deliver once; return the distances of the members, at worst, and their limits."""
        if self._perturbed_copy_is_due():
            self._prove_perturbed(expected)
        held = self._load(version, 0.0, masters)
        allowed = self._limits or self._calibrate()
        distances = self._distances(version, expected)
        if self._calibrated < self._deliveries and _beyond(distances, allowed):
            # The weights that the limits were measured with may be long gone.
            allowed = self._calibrate()
        worst = _check_distances(distances, allowed)
        self._held = held
        return worst, allowed

    def _masters(self) -> Fingerprints:
        """Fingerprint what the optimizer holds, as it has to be delivered."""
        if self.options.part != "adapter":
            options = self.options
            rounded = partial(round_rows, bits=options.bits) if options.bits else None
            return self.policy.fingerprints(options.dtype, options.part, rounded)
        adapter = self.policy.fingerprints(self.options.copy().sent_as, "adapter")
        if not self._base:
            whole = self.policy.fingerprints(self.options.dtype)
            self._base = {name: own for name, own in whole.items() if name not in adapter}
        return adapter

    def _load(
        self, version: int, strength: float, masters: Fingerprints | None = None
    ) -> dict[str, Fingerprints]:
        """Load a copy; prove what was sent, what arrived, and what each member holds."""
        answered = self._transport.deliver(version, self.options.copy(strength))
        arrived = Arrived.of(answered)
        sent = self._sent(masters, arrived.tensors)
        if self.options.part == "adapter":
            sent = self._with_base(sent, arrived)
        held: dict[str, Fingerprints] = {}
        self._unread = 0
        for name, member in self._members().items():
            if member.version != version:
                raise WeightSyncError(
                    f"{name} acknowledges weight version {member.version}, not {version}"
                )
            held[name] = member.held()
            # What the sampler keeps in a way of its own is only watched for changes.
            known = {n: found for n, found in held[name].items() if n in sent}
            self._unread = max(self._unread, len(sent) - len(known))
            try:
                check_same(sent, {**sent, **known}, HELD)
            except WeightSyncError as error:
                raise WeightSyncError(
                    f"{name} was sent weight version {version} and holds something else: {error}"
                ) from error
        return held

    def _sent(self, masters: Fingerprints | None, arrived: Fingerprints) -> Fingerprints:
        """Return the fingerprints of what was sent, once it is proved to be the optimizer's and to
        have arrived.

        Where what the optimizer holds has arrived, what was sent in between was that. Only else,
        and of a perturbed copy, is it read itself: then it says on which side the fault is.
        """
        if masters is not None and dict(masters) == dict(arrived):
            return masters
        sent = self._transport.sent()
        if masters is not None:
            check_same(masters, sent, YIELDED)
        check_same(sent, arrived, ARRIVED)
        return sent

    def _with_base(self, sent: Fingerprints, arrived: Arrived) -> Fingerprints:
        """Return the fingerprints that a sampler has to hold after it was sent an adapter, under
        the names that it may use.

        One that computes with adapters holds them as they are, beside the weights under them; one
        that adds them to its weights holds what it says that it made of the two.
        """
        if not arrived.made:
            return {**self._base, **sent}
        base = {plain_name(name): own for name, own in self._base.items()}
        check_same(base, arrived.base, UNDER)
        return {**base, **arrived.made}

    def _prove_perturbed(self, expected: RowLogprobs) -> None:
        """Prove that the sampler follows a copy which differs from the policy clearly."""
        strength, forwards = self._perturb(expected)
        self._load(PERTURBED, strength)
        distances = self._distances(PERTURBED, forwards.low)
        _check_distances(distances, self._allowed(forwards))

    def _perturb(self, expected: RowLogprobs) -> tuple[float, Forwards]:
        """Find the strength of a copy that can be told from the policy; score the probe with it."""
        tried: list[str] = []
        for strength in STRENGTHS:
            forwards = self._two_forwards(strength)
            allowed = self._allowed(forwards)
            moved = distance(forwards.low, expected)
            if moved.mean >= CLEARLY * allowed.mean:
                return strength, forwards
            tried.append(f"{moved.mean:.3g} nats, where rounding may be {allowed.mean:.3g}")
        raise WeightSyncError(
            "perturbed weights change the probe's log-probabilities on average by only "
            f"{', '.join(tried)}: the proof of delivery would prove nothing. Report this model; "
            "rollouts cannot be trusted"
        )

    def _calibrate(self) -> Distance:
        """Compute the limits for the real weights as they are now."""
        found = self._allowed(self._two_forwards(0.0))
        self._limits = found
        self._calibrated = self._deliveries
        return found

    def _two_forwards(self, strength: float) -> Forwards:
        found = self._transport.score(self._asked(), self.options.copy(strength))
        return Forwards(self._compared(found.low), self._compared(found.high))

    def _asked(self) -> Probe:
        return Probe(self.rows, self.options.temperature, self.shown)

    def _compared(self, scores: RowLogprobs) -> RowLogprobs:
        return compared_scores(scores, self.rows, self.options.compared)

    def _allowed(self, forwards: Forwards) -> Distance:
        options = self.options
        return limits(forwards, multiple=options.probe_limit, temperature=options.temperature)

    def _distances(self, version: int, expected: RowLogprobs) -> dict[str, Distance]:
        """Measure how far each member's scores of the probe are from the expected ones."""
        found: dict[str, Distance] = {}
        for name, member in self._members().items():
            # Engines of text know nothing of images.
            images = (self.shown,) if self.shown else ()
            scores = member.logprobs(self.rows, self.options.temperature, *images)
            holder = f"{name} holds weight version {version}"
            found[holder] = distance(self._compared(scores), expected)
        return found

    def _expected(self) -> RowLogprobs:
        """Score the probe as the sampler has to: like the trainer, or by the rounded weights."""
        if self.options.bits:
            return self._two_forwards(0.0).low
        return self._policy_logprobs()

    def _policy_logprobs(self) -> RowLogprobs:
        """Score the probe as the trainer does."""
        said = self.policy.forward(self._asked().batch(self._images), frozenset({"logprobs"}))
        aligned = cast(Tensor, said.logprobs).tolist()
        scores = [row[: len(ids)] for row, ids in zip(aligned, self.rows, strict=True)]
        return self._compared(scores)

    def _record(self, found: Distance, allowed: Distance, *, retries: int, seconds: float) -> None:
        kept = self._metrics
        share = max(found.shares_of(allowed).values())
        self._metrics = self._transport.metrics() | {
            "sync/probe_max": max(kept.get("sync/probe_max", 0.0), found.largest),
            "sync/probe_mean": max(kept.get("sync/probe_mean", 0.0), found.mean),
            "sync/probe_limit_share": max(kept.get("sync/probe_limit_share", 0.0), share),
            "sync/unread": float(self._unread),
            "sync/retries": kept.get("sync/retries", 0.0) + retries,
            "time/sync_s": kept.get("time/sync_s", 0.0) + seconds,
        }


def _beyond(distances: Mapping[str, Distance], allowed: Distance) -> bool:
    shares = [found.shares_of(allowed) for found in distances.values()]
    return any(not share <= 1 for named in shares for share in named.values())  # NaN is not


def _check_distances(distances: Mapping[str, Distance], allowed: Distance) -> Distance:
    """Check the members' distances; return each statistic at its worst.

    Raises:
        WeightSyncError: one of a member's is beyond its limit.
    """
    for who, found in distances.items():
        for what, share in found.shares_of(allowed).items():
            if not share <= 1:  # NaN is not
                raise WeightSyncError(
                    f"{who} but does not use it: the {what} difference of the probe's "
                    f"log-probabilities is {getattr(found, what):.3g} nats, allowed "
                    f"{getattr(allowed, what):.3g} (a stale copy of some weight? If not, "
                    "inference_engine.probe_limit is how much is allowed)"
                )
    return Distance(*map(max, zip(*distances.values(), strict=True)))


def check_same(expected: Fingerprints, found: Fingerprints, stage: Stage) -> None:
    """Check that a copy has the names and fingerprints of what it was made from.

    Args:
        expected: name -> fingerprint.
        found: name -> fingerprint, of the copy.
        stage: what kind of copy it is, for the message.

    Raises:
        WeightSyncError: they are not; names the tensors.
    """
    problems: list[str] = []
    names = {
        f"never {stage.done}": expected.keys() - found.keys(),
        f"not {stage.given}": found.keys() - expected.keys(),
    }
    for what, wrong in names.items():
        if wrong:
            problems.append(f"{len(wrong)} tensors were {what}: {_some(sorted(wrong))}")
    changed = [
        name for name in sorted(expected) if found.get(name, expected[name]) != expected[name]
    ]
    for name in changed[:3]:
        others = [other for other in expected if other != name and expected[other] == found[name]]
        how = f"with the payload of {others[0]}" if others else "changed"
        problems.append(f"{name} {stage.came} {how}")
    if problems:
        more = f" ({len(changed)} tensors differ in all)" if len(changed) > 3 else ""
        raise WeightSyncError("; ".join(problems) + more)


def _some(names: Sequence[str]) -> str:
    """Name the first few, and say how many there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
