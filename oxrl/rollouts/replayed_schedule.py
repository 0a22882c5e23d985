"""Samples of a free run, sampled again without its clock.

Every token says which weights sampled it. So for each version in turn every recorded response goes
on, from where it stood, for as many tokens as it got from that version; then the recorded batch is
handed over. A token depends on weights, prompt, the tokens before it and its own seed alone, so it
does not matter that other rows stood beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import NamedTuple

import torch

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys
from oxrl.engines.sample.sampler import generate
from oxrl.errors import RunDirectoryError
from oxrl.rollouts.schedule import RecordedBatch
from oxrl.rollouts.sync import RolloutParts, RolloutStep
from oxrl.rollouts.whole_samples import StoredRollouts, read_step, whole_samples
from oxrl.types import Completion, Request, Rollout, Segment, TokenRun

# Two tokens are a near tie where what decides between them is so many times as close as the
# log-probabilities of both may be apart.
NEAR_TIE = 4


class Differs(NamedTuple):
    """A thing that was recorded as something else than it is now; `equal`: by rounding alone."""

    what: str
    recorded: str
    now: str
    equal: bool = False


class Piece(NamedTuple):
    """Tokens [first, end) of a recorded response, which one version sampled.

    request: asks for them, with what stood before as its prefix.
    """

    name: str
    recorded: Segment
    request: Request
    first: int
    end: int


class ReplayedSchedule(StoredRollouts):
    """A RolloutSource that samples what another run recorded, and hands over what that did.

    Args:
        folder: `rollouts` of that run.
        parts: of this run.
        steps: after which that run sampled, ascending.
        lag: versions that a token may be older than the update that begins with it.
        tolerance: of log-probabilities, in nats.
    """

    def __init__(
        self,
        folder: Path,
        parts: RolloutParts,
        *,
        steps: Sequence[int],
        lag: int,
        tolerance: float,
    ) -> None:
        super().__init__(folder, parts)
        self._steps = steps
        self._lag = lag
        self._tolerance = tolerance
        # By their steps: batches with tokens of versions to come.
        self._read: dict[int, RolloutStep] = {}
        self.found: list[Differs] = []
        self.batches: list[RecordedBatch] = []
        self.tokens = 0
        self.apart = 0.0

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource: sample what the record has of this version, hand over its batch.

        Raises:
            RunDirectoryError: the samples of a step are not there, or not what a run writes.
        """
        self._sample_again(step)
        found = super().next(draw, step=step)
        self._read.pop(step, None)
        if (found.step, found.start) != (step, draw):
            recorded = f"after step {found.step} from draw {found.start} on"
            now = f"after step {step} from draw {draw} on"
            self.found.append(Differs(f"batch of step {step}", recorded, now))
        self.batches.append(RecordedBatch(step, found.start, found.next_draw))
        return found

    def _sample_again(self, version: int) -> None:
        """Sample what the record has of a version, and compare it."""
        parts = self.parts
        with parts.clock.phase("time/rollout_s"):
            parts.delivery.deliver(version)
        self._read_on(version)
        pieces = [piece for batch in self._read.values() for piece in self._pieces(batch, version)]
        with parts.clock.phase("time/rollout_s"):
            completions = generate(
                parts.sampler,
                [piece.request for piece in pieces],
                deadline_s=parts.deadline_s,
                stop=parts.stop,
            )
        for piece, completion in zip(pieces, completions, strict=True):
            self._compare(piece, completion)

    def _read_on(self, version: int) -> None:
        """Read the batches that may have tokens of a version, and check the versions in them."""
        for step in self._steps:
            if version <= step <= version + self._lag and step not in self._read:
                batch = read_step(whole_samples(self._folder, step), self.parts.columns)
                self._read[step] = batch
                for rollout in (*batch.rollouts, *batch.baselines):
                    self._check_versions(step, rollout)

    def _check_versions(self, step: int, rollout: Rollout) -> None:
        """Note versions that no token of a batch can have: those would never be sampled here."""
        versions = self._segment_of(step, rollout).versions
        delivered = [one for one in self._steps if step - self._lag <= one <= step]
        if list(versions) != sorted(versions) or not delivered or {*versions} - {*delivered}:
            spans = list(dict.fromkeys(versions))
            what = f"versions of {_name(step, rollout)}"
            self.found.append(Differs(what, f"{spans}", f"ascending, of {delivered}"))

    def _segment_of(self, step: int, rollout: Rollout) -> Segment:
        segments = rollout.completion.segments
        if len(segments) != 1:
            raise RunDirectoryError(
                f"{whole_samples(self._folder, step)}: {_name(step, rollout)} has {len(segments)} "
                "segments: a schedule is replayed of responses, not of episodes with an environment"
            )
        return segments[0]

    def _pieces(self, batch: RolloutStep, version: int) -> Iterator[Piece]:
        """Yield what a batch has of a version."""
        rollouts = [*batch.rollouts, *batch.baselines]
        draws = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
        asked = {(one.draw, one.sample): one for one in self.parts.requests.at(draws)}
        for rollout in rollouts:
            segment = self._segment_of(batch.step, rollout)
            count = segment.versions.count(version)
            request = asked.get((rollout.group_id, rollout.sample))
            if not count or not self._is_asked(batch.step, rollout, request) or request is None:
                continue
            first = segment.versions.index(version)
            before = segment.first(first)
            prefix = TokenRun(
                token_ids=before.token_ids,
                logprobs=before.logprobs,
                versions=before.versions,
                columns=before.columns,
            )
            sampling = replace(request.sampling, max_tokens=first + count)
            name = f"{batch.step}/{request.id}"
            asking = replace(request, id=name, prefix=prefix, sampling=sampling)
            yield Piece(_name(batch.step, rollout), segment, asking, first, first + count)

    def _is_asked(self, step: int, rollout: Rollout, request: Request | None) -> bool:
        """Return whether this run asks for a recorded response too; if not, that is noted."""
        now = None if request is None else (request.prompt.token_ids, request.seed)
        if now == (rollout.prompt.token_ids, rollout.seed):
            return True
        what = f"prompt and seed of {_name(step, rollout)}"
        said = "no such request" if now is None else f"seed {now[1]}, {len(now[0])} prompt tokens"
        count = len(rollout.prompt.token_ids)
        self.found.append(Differs(what, f"seed {rollout.seed}, {count} prompt tokens", said))
        return False

    def _compare(self, piece: Piece, completion: Completion) -> None:
        """Note the first token of a piece that is another one, or has another log-probability."""
        now = completion.segments[0]
        recorded = piece.recorded
        version = recorded.versions[piece.first]
        for place in range(piece.first, piece.end):
            where = f"token {place} of {piece.name}, sampled by version {version}"
            token = recorded.token_ids[place]
            if place >= len(now.token_ids):
                self.found.append(Differs(where, f"{token}", "ended before"))
                return
            if now.token_ids[place] != token:
                self.found.append(self._other_token(where, piece, now, place))
                return
            one = recorded.logprobs[place]
            other = now.logprobs[place]
            self.tokens += 1
            self.apart = max(self.apart, abs(one - other))
            if not isclose(one, other, rel_tol=self._tolerance, abs_tol=self._tolerance):
                what = f"log-probability of {where}"
                self.found.append(Differs(what, f"{one:.9g}", f"{other:.9g}"))
                return

    def _other_token(self, where: str, piece: Piece, now: Segment, place: int) -> Differs:
        """Say that another token was sampled, and whether the two were a near tie."""
        before = piece.recorded.token_ids[place]
        after = now.token_ids[place]
        noise = torch.zeros(max(before, after) + 1)
        if piece.request.sampling.temperature > 0:
            seeds = torch.tensor([piece.request.seed])
            noise = gumbel_noise(noise_keys(seeds, torch.tensor([place])), len(noise))[0]
        ahead = float(now.logprobs[place] + noise[after])
        behind = float(piece.recorded.logprobs[place] + noise[before])
        if abs(ahead - behind) <= NEAR_TIE * self._tolerance:
            tie = (
                f"near tie, {where}: {before} and {after} are {abs(ahead - behind):.2g} nats apart"
            )
            return Differs(tie, f"{before}", f"{after}", equal=True)
        return Differs(where, f"{before}", f"{after}")


def _name(step: int, rollout: Rollout) -> str:
    return f"sample {rollout.sample} of draw {rollout.group_id} in the batch of step {step}"
