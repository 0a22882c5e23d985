"""What a sampler that is not the trainer does to expected updates, without any chance.

    python oxrl_proofs/drift.py

Two tables, all sums over everything that may be sampled, float64. `one_place` goes through the
gates and the centering that runs use; `train` takes the steps of a policy of three tokens, whose
updates are written out here, and which `tests/functional/test_drift.py` holds to those gates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.functional.centering import Outcomes, score_centering
from oxrl.functional.corrections import truncate_weights
from oxrl.functional.gates import LossInputs, policy_gradient
from oxrl.functional.masks import LossAndMetrics
from oxrl.tables.numbers import Tail

DRAWS = 2000
VOCABULARY = 7
CAP = 1.5
# Of the policy that is trained.
TOKENS = 5
LENGTH = 3
POLICIES = 10
STEPS = 1500
OFFSET = 0.5
TRAINED_CAP = 2.0


def normal(*shape: int, seed: int) -> Tensor:
    """Standard normal draws of their own seed, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- One place of a response.
class Place(NamedTuple):
    """Logits of the trainer, [D, V], and the distribution of the sampler, D draws of both."""

    trainer: Tensor
    sampler: Tensor


def places(draws: int = DRAWS) -> Place:
    """Draw trainers, and samplers that are off by half a nat.

    Args:
        draws: how many.
    """
    trainer = 1.5 * normal(draws, VOCABULARY, seed=0)
    apart = OFFSET * normal(draws, VOCABULARY, seed=1)
    return Place(trainer, (trainer + apart).softmax(-1))


def plain_loss(tokens: LossInputs) -> LossAndMetrics:
    """The policy gradient."""
    return policy_gradient(
        tokens.logprobs, tokens.old, tokens.advantages, tokens.mask, tokens.loss_weights
    )


def truncated_loss(tokens: LossInputs) -> LossAndMetrics:
    """The policy gradient, each token by its ratio up to CAP."""
    weights = truncate_weights(tokens.old, tokens.sampler, tokens.mask, correction_max=CAP)
    return policy_gradient(
        tokens.logprobs,
        tokens.old,
        tokens.advantages,
        tokens.mask,
        tokens.loss_weights,
        correction=weights,
    )


LOSSES = {"none": plain_loss, "truncate": truncated_loss}


def expected_update(
    place: Place, advantages: Tensor, *, correction: str, top: int, tail: Tail | None
) -> Tensor:
    """The expected step of the trainer's logits, [D, V].

    Args:
        place: D draws.
        advantages: [D, V], of each token that may be sampled.
        correction: of LOSSES.
        top: tokens of the head.
        tail: what a sampled token of the tail is trained as; None: nothing is centered.
    """
    leaf = place.trainer.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    q = place.sampler
    tokens = LossInputs(
        logprobs=log_p,
        old=log_p.detach(),
        sampler=q.log(),
        advantages=advantages,
        mask=torch.ones_like(q, dtype=torch.bool),
        loss_weights=q,
    )
    loss = LOSSES[correction]
    if tail is None:
        found, _ = loss(tokens)
    else:
        ids = q.topk(top).indices
        in_head = torch.zeros_like(tokens.mask).scatter(1, ids, True)
        now = outcomes_of(log_p, ids, in_head)
        known = Outcomes(now, now.detach(), outcomes_of(q.log(), ids, in_head), in_head)
        found, _ = score_centering(loss, tokens, known, center_tail=tail)
    [gradient] = torch.autograd.grad(found, leaf)
    return -gradient


def outcomes_of(log_p: Tensor, ids: Tensor, in_head: Tensor) -> Tensor:
    """Of each token that may be sampled the log-probabilities of head and tail, [D, V, K + 1].

    Args:
        log_p: [D, V].
        ids: [D, K], of the head.
        in_head: [D, V] bool.
    """
    head = log_p.gather(1, ids)
    rest = torch.full_like(log_p[:, 0], -torch.inf)
    if ids.shape[1] < log_p.shape[1]:
        rest = log_p.masked_fill(in_head, -torch.inf).logsumexp(-1)
    known = torch.cat([head, rest[:, None]], 1)
    return known[:, None].expand(-1, log_p.shape[1], -1)


def one_place(
    *, correction: str = "none", top: int = VOCABULARY, tail: Tail | None = None
) -> tuple[float, float, float]:
    """What is off in an expected update, mean over the draws.

    Args:
        correction: of LOSSES.
        top: tokens of the head.
        tail: as of `expected_update`.

    Returns:
        The length of the update where every token is worth 1; and how far the update is from the
        gradient of the trainer's expected reward, relative to that, with a baseline that is right
        and with one that is off by 1.
    """
    place = places()
    q = place.sampler
    options = {"correction": correction, "top": top, "tail": tail}
    drift = expected_update(place, torch.ones_like(q), **options)
    rewards = normal(*q.shape, seed=2)
    p = place.trainer.softmax(-1)
    true = p * (rewards - (p * rewards).sum(-1, keepdim=True))
    sizes = [float(drift.norm(dim=-1).mean())]
    for shift in (0.0, 1.0):
        advantages = rewards - (q * rewards).sum(-1, keepdim=True) + shift
        update = expected_update(place, advantages, **options)
        distance = (update - true).norm(dim=-1) / true.norm(dim=-1)
        sizes.append(float(distance.mean()))
    return sizes[0], sizes[1], sizes[2]


# --- A policy of three tokens, trained by expected updates alone.
class Policies(NamedTuple):
    """Policies as tables: logits of a token by those before it, [D], then V once more each time.

    logits: of the trainer, one entry for each place of a response. offset: what the sampler's have
    more. rewards: [D, V, V, V], of responses.
    """

    logits: tuple[Tensor, ...]
    offset: tuple[Tensor, ...]
    rewards: Tensor


class Trained(NamedTuple):
    """How a training went, of each of D policies.

    first, last: the trainer's expected reward. largest_first, largest_last: logit, as a size.
    """

    first: Tensor
    last: Tensor
    largest_first: float
    largest_last: float


def policies(count: int = POLICIES, *, rewarded: bool = True) -> Policies:
    """Draw policies, samplers with a lasting offset, and rewards from 0 to 1.

    Args:
        count: how many, D.
        rewarded: False: every response is worth 0.
    """
    shapes = [(TOKENS,) * (place + 1) for place in range(LENGTH)]
    drawn: list[list[Tensor]] = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        own = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
        own.append(torch.rand(*shapes[-1], generator=generator, dtype=torch.float64))
        own += [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
        drawn.append(own)
    stacked = [torch.stack(tables) for tables in zip(*drawn, strict=True)]
    rewards = stacked[LENGTH] if rewarded else torch.zeros_like(stacked[LENGTH])
    offset = [OFFSET * table for table in stacked[LENGTH + 1 :]]
    return Policies(tuple(stacked[:LENGTH]), tuple(offset), rewards)


def responses(tables: list[Tensor]) -> Tensor:
    """Probability of every response, [D, V, V, V], from those of each token by the ones before."""
    first, second, third = tables
    return first[:, :, None, None] * second[:, :, :, None] * third


def updates(
    given: Policies, *, correction: str, centered: bool, baseline_off: float
) -> list[Tensor]:
    """The expected update of every logit.

    Args:
        given: the policies as they are.
        correction: none, truncate (by the token's ratio up to TRAINED_CAP) or full (by all of it).
        centered: the expected score under the sampler is subtracted.
        baseline_off: what the advantage is more than reward minus expected reward.
    """
    p = [table.softmax(-1) for table in given.logits]
    q = [(own + off).softmax(-1) for own, off in zip(given.logits, given.offset, strict=True)]
    chance = responses(q)
    expected = (chance * given.rewards).flatten(1).sum(1)
    advantages = given.rewards - expected[:, None, None, None] + baseline_off
    found: list[Tensor] = []
    for place in range(LENGTH):
        # Q(prefix, token) times the mean advantage of what begins so.
        later = tuple(range(place + 2, LENGTH + 1))
        worth = chance * advantages
        worth = worth.sum(later) if later else worth
        ratio = p[place] / q[place]
        weight = {
            "none": torch.ones_like(ratio),
            "truncate": ratio.clamp(max=TRAINED_CAP),
            "full": ratio,
        }[correction]
        update = scored(worth * weight, p[place])
        if centered:
            of_prefix = worth.sum(-1, keepdim=True)
            update = update - of_prefix * scored(q[place] * weight, p[place])
        found.append(update)
    return found


def scored(counts: Tensor, p: Tensor) -> Tensor:
    """sum_v counts_v (onehot_v - p), over the last axis."""
    return counts - p * counts.sum(-1, keepdim=True)


def train(
    *,
    rewarded: bool,
    baseline_off: float,
    correction: str = "none",
    centered: bool = False,
    steps: int = STEPS,
) -> Trained:
    """Train policies by expected updates, at a learning rate of 1.

    Args:
        rewarded: False: every response is worth the same.
        baseline_off, correction, centered: as of `updates`.
        steps: how many.
    """
    given = policies(rewarded=rewarded)
    first = trainer_reward(given)
    largest = largest_logit(given)
    for _ in range(steps):
        moved = updates(given, correction=correction, centered=centered, baseline_off=baseline_off)
        logits = [own + update for own, update in zip(given.logits, moved, strict=True)]
        given = given._replace(logits=tuple(logits))
    return Trained(first, trainer_reward(given), largest, largest_logit(given))


def trainer_reward(given: Policies) -> Tensor:
    """What the trainer's policies would earn, [D]."""
    chance = responses([table.softmax(-1) for table in given.logits])
    return (chance * given.rewards).flatten(1).sum(1)


def largest_logit(given: Policies) -> float:
    """Size of the largest logit of all policies."""
    return max(float(table.abs().max()) for table in given.logits)


# --- What is printed.
def lines(steps: int = STEPS) -> Iterator[str]:
    """Both tables, line by line.

    Args:
        steps: of the second one.
    """
    yield f"One place, {DRAWS} draws of {VOCABULARY} tokens, truncation at {CAP:g}"
    yield f"{'correction':<11}{'centering':<16}{'drift':>9}  distance, baseline right / off by 1"
    for correction in LOSSES:
        yield placed(correction, "none")
        yield placed(correction, "whole", top=VOCABULARY, tail="event")
        for top in (2, 3, 5):
            yield placed(correction, f"token, K = {top}", top=top, tail="token")
        for top in (2, 3, 5):
            yield placed(correction, f"event, K = {top}", top=top, tail="event")
    yield ""
    yield f"{POLICIES} policies of {LENGTH} tokens of {TOKENS}, {steps} expected updates"
    yield "rewards   baseline  correction centered reward           largest logit"
    for rewarded, off in ((True, 0.0), (True, -0.5), (True, 0.5), (False, -0.5), (False, 0.5)):
        for correction in ("none", "truncate", "full"):
            for centered in (False, True):
                yield learned(rewarded, off, correction, centered=centered, steps=steps)


def placed(correction: str, name: str, *, top: int = VOCABULARY, tail: Tail | None = None) -> str:
    """A line of the first table."""
    drift, right, off = one_place(correction=correction, top=top, tail=tail)
    return f"{correction:<11}{name:<16}{drift:>9.2g}  {right:.2f} / {off:.2f}"


def learned(rewarded: bool, off: float, correction: str, *, centered: bool, steps: int) -> str:
    """A line of the second table."""
    found = train(
        rewarded=rewarded,
        baseline_off=off,
        correction=correction,
        centered=centered,
        steps=steps,
    )
    kind = "differ" if rewarded else "equal"
    way = "yes" if centered else "no"
    reward = f"{float(found.first.mean()):.3f} -> {float(found.last.mean()):.3f}"
    logit = f"{found.largest_first:.2f} -> {found.largest_last:.2f}"
    return f"{kind:<9}{off:>+9.1f}  {correction:<11}{way:<9}{reward:<17}{logit}"


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(f"{line}\n")
