from __future__ import annotations

import math

import pytest
import torch

from oxrl.engines.sample import gumbel
from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys, restrict, sample_tokens


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([3, 3, 2**62 + 5]), torch.tensor([0, 1, 0])
    keys = noise_keys(seeds, positions)
    together = gumbel_noise(keys, 50)
    for row in range(3):
        assert torch.equal(gumbel_noise(keys[row : row + 1], 50)[0], together[row])
    assert torch.equal(gumbel_noise(keys, 20), together[:, :20])
    assert together.unique().numel() == together.numel()


def test_noise_is_standard_gumbel_and_uncorrelated_between_neighbours() -> None:
    seeds = torch.arange(400)
    noise = gumbel_noise(noise_keys(seeds, torch.zeros_like(seeds)), 500).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    centred = noise - noise.mean()
    for left, right in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((left * right).mean().item()) < 0.01
    next_position = gumbel_noise(noise_keys(seeds, torch.ones_like(seeds)), 500).double()
    assert abs((centred * (next_position - next_position.mean())).mean().item()) < 0.01


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    count, temperature = 40_000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])
    tokens, logprobs = sample_tokens(
        logits.expand(count, -1),
        torch.full((count,), 11),
        torch.arange(count),
        temperature=torch.full((count,), temperature),
        stochastic=None,
    )
    expected = torch.softmax(logits / temperature, 0)
    assert torch.allclose(tokens.bincount(minlength=5) / count, expected, atol=0.008)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-5)


def test_a_greedy_row_takes_the_largest_logit_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.0]]).expand(200, -1)
    stochastic = torch.arange(200) % 2.0
    tokens, _ = sample_tokens(
        logits,
        torch.arange(200),
        torch.zeros(200).long(),
        temperature=torch.ones(200),
        stochastic=stochastic,
    )
    assert tokens[::2].eq(1).all()
    assert tokens[1::2].unique().numel() == 3


def test_top_k_and_top_p_keep_the_fewest_most_likely_tokens() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.3, 0.1]])).expand(4, -1)
    kept = restrict(
        logits,
        temperature=torch.ones(4),
        top_k=torch.tensor([0, 2, 0, 1]),
        top_p=torch.tensor([1.0, 1.0, 0.6, 0.01]),
    ).isfinite()
    assert kept.tolist() == [
        [True] * 4,
        [False, True, True, False],
        [False, True, True, False],
        [False, True, False, False],
    ]


def test_top_p_is_taken_after_top_k_and_at_the_temperature() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    one, k, p = torch.ones(1), torch.tensor([2]), torch.tensor([0.55])
    # Of the two kept tokens the first has 4/7 = 0.571 >= 0.55.
    assert restrict(logits, temperature=one, top_k=k, top_p=p).isfinite().tolist() == [
        [True, False, False, False]
    ]
    # At temperature 2 the first has sqrt(.4) / (sqrt(.4) + sqrt(.3)) = 0.536 < 0.55.
    assert restrict(logits, temperature=2 * one, top_k=k, top_p=p).isfinite().tolist() == [
        [True, True, False, False]
    ]


def test_the_likeliest_token_stays_where_top_p_is_0_in_float32() -> None:
    logits, one = torch.tensor([[0.0, 2.0, 1.0]]), torch.ones(1)
    none, p = torch.zeros(1, dtype=torch.int64), torch.tensor([1e-60])
    kept = restrict(logits, temperature=one, top_k=none, top_p=p)
    assert kept.isfinite().tolist() == [[False, True, False]]


# --- What few tokens are kept of many.
def kept_by_definition(
    row: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens that a row keeps, from the definition of each cut."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    share = {token: math.exp((row[token] - row[ranked[0]]) / temperature) for token in ranked}
    kept = [token for token in ranked if share[token] >= min_p]
    if top_k:
        kept = kept[:top_k]
    total = math.fsum(share[token] for token in kept)
    reached = 0.0
    chosen: set[int] = set()
    for token in kept:
        if top_p < 1 and reached >= top_p * total:
            break
        chosen.add(token)
        reached += share[token]
    return chosen


@pytest.mark.parametrize("step", [0.0, 0.25])  # logits that are nearly all apart, or often alike
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("candidates", [1, 7, 70])
@pytest.mark.parametrize("counts", [(1, 5, 40, 299), (1,), (5,), (40,), (0,), (0, 5)], ids=str)
def test_cuts_are_as_defined_and_the_same_beside_a_row_that_keeps_all(
    step: float,
    beside: bool,
    counts: tuple[int, ...],
    candidates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gumbel, "CANDIDATES", candidates)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 300, generator=generator) * 2
    if step:
        logits = (logits / step).round() * step
    options = [(k, p, m) for k in counts for p in (1.0, 0.8) for m in (0.0, 0.07)]
    cases = [options[row % len(options)] for row in range(40)]
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cases, strict=True))
    if beside:
        logits = torch.cat([logits, logits[:1]])
        top_k = torch.cat([top_k, torch.zeros(1, dtype=torch.int64)])
        top_p = torch.cat([top_p, torch.ones(1)])
        min_p = torch.cat([min_p, torch.zeros(1)])
    temperature = torch.full((len(logits),), 0.7)
    kept = restrict(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, (k, p, m) in enumerate(cases):
        wanted = kept_by_definition(
            logits[row].tolist(), temperature=0.7, top_k=k, top_p=p, min_p=m
        )
        found = set(kept[row].isfinite().nonzero().flatten().tolist())
        assert found == wanted, (row, k, p, m)
    if beside:
        assert torch.equal(kept[-1], logits[-1])


@pytest.mark.parametrize("uncounted", [0, 1, 20, 60])
def test_a_cut_row_keeps_the_same_tokens_in_any_batch(uncounted: int) -> None:
    """Whether few tokens are looked at or all, and with whatever other rows ask for: some reach
    their share within the first candidates, and some do not.
    """
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(60, 2000, generator=generator) * torch.linspace(0.2, 4, 60)[:, None]
    top_k = torch.randint(1, 200, (60,), generator=generator)
    top_k[:uncounted] = 0
    top_p = 0.5 + 0.5 * torch.rand(60, generator=generator)
    one = torch.ones(60)
    together = restrict(logits, temperature=one, top_k=top_k, top_p=top_p)
    for row in range(60):
        at = slice(row, row + 1)
        alone = restrict(logits[at], temperature=one[at], top_k=top_k[at], top_p=top_p[at])
        assert torch.equal(alone[0], together[row])
    everything = torch.zeros(61, dtype=torch.int64)
    everything[:60] = top_k
    beside = restrict(
        torch.cat([logits, logits[:1]]),
        temperature=torch.ones(61),
        top_k=everything,
        top_p=torch.cat([top_p, one[:1]]),
    )
    assert torch.equal(beside[:60], together)
