"""`train.share_prefix`: rows that begin alike, computed together, are what they are one by one."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from oxrl.commands.train import run
from oxrl.engines.sample.local import FAST
from oxrl.engines.train.fsdp import FsdpTrainer
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.micro_batches import group_micro_batches
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError
from oxrl.models.load import LoadOptions, load_policy
from oxrl.models.network import CausalNetwork
from oxrl.models.self_checks import check_sharing
from oxrl.models.shared_prefix import SharedPrefixNetwork, groups_of, laid_out
from oxrl.tables.watch import Deadlines
from oxrl.types import Output, PreferenceBatch, TokenBatch
from support.architectures import tiny
from support.rank_processes import run_ranks
from support.small_runs import metric_lines, rl_config


def rows_of(
    groups: list[tuple[int, list[int]]], *, seed: int = 0, shuffled: bool = True
) -> TokenBatch:
    """A batch of groups: (tokens of the prompt, tokens of each response)."""
    draw = random.Random(seed)
    rows: list[tuple[list[int], int]] = []
    for prompt_length, responses in groups:
        prompt = [draw.randrange(3, 200) for _ in range(prompt_length)]
        for length in responses:
            rows.append((prompt + [draw.randrange(3, 200) for _ in range(length)], prompt_length))
    if shuffled:
        draw.shuffle(rows)
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    real = torch.zeros_like(tokens, dtype=torch.bool)
    trained = torch.zeros_like(real)
    for row, (values, prompt_length) in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values)
        real[row, : len(values)] = True
        trained[row, prompt_length : len(values)] = True
    return TokenBatch(tokens=tokens, attention_mask=real, response_mask=trained)


GROUPS = [(7, [3, 5, 1, 4]), (4, [2]), (9, [6, 6]), (1, [3, 2, 8])]


def weighted(output: Output, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that weighs every token's numbers differently, by what the token is."""
    weights = (batch.tokens % 7 + 1) * batch.response_mask
    return ((output.logprobs + 0.3 * output.entropy) * weights).sum(), {}


def said_and_gradient(
    model: PreTrainedModel, batch: TokenBatch, *, share: bool, budget: int
) -> tuple[Tensor, Tensor]:
    options = TrainerOptions(lr=1e-3, share_prefix=share, micro_batch_tokens=budget)
    trainer = LocalTrainer(model, options)
    output = trainer.forward_backward(batch, weighted, frozenset({"logprobs", "entropy"}))
    gradient = torch.cat([tensor.flatten() for _, tensor in trainer.gradients()])
    trainer.skip_step()
    return output.logprobs, gradient


# Their layers do not hand on what attention is to know.
REFUSED = ("falcon", "stablelm")
DEFAULT = ("gpt2", "glm4", "llama", "mixtral", "qwen3")
NAMES = [
    pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.full)
    for name in sorted(FAST - {"mistral", *REFUSED})  # the tiny Mistral has a window
]


@pytest.mark.parametrize("budget", [1, 20, 10**6])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_plain_rows(name: str, budget: int) -> None:
    model = tiny(name)
    check_sharing(model)
    batch = rows_of(GROUPS)
    plain, expected = said_and_gradient(model, batch, share=False, budget=10**6)
    shared, found = said_and_gradient(model, batch, share=True, budget=budget)
    assert torch.allclose(shared, plain, rtol=0, atol=1e-5)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def preferring(output: Output, batch: PreferenceBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO's loss, each pair with a weight of its own."""
    assert output.logprobs is not None
    sums = output.logprobs.sum(1)
    margins = sums[0::2] - sums[1::2]
    return -(logsigmoid(0.5 * margins) * batch.loss_weights).sum(), {}


@pytest.mark.parametrize("budget", [1, 30, 10**6])
def test_the_gradient_of_pairs_is_that_of_plain_rows(budget: int) -> None:
    """Two pairs have one prompt, and the rows of another have nothing in common."""
    groups = [(7, [3, 5]), (4, [2, 9]), (4, [6, 1]), (1, [3, 8]), (9, [2, 2])]
    inputs = rows_of(groups, shuffled=False)
    same = slice(2, 4), slice(4, 6)
    inputs.tokens[same[1], :4] = inputs.tokens[same[0], :4]
    inputs.tokens[7, 0] += 1
    weights = torch.linspace(0.1, 0.5, len(groups))
    batch = PreferenceBatch(inputs=inputs, ref_logprobs=None, loss_weights=weights)
    found: list[Tensor] = []
    said: list[Tensor] = []
    for share in (False, True):
        options = TrainerOptions(
            lr=1e-3, share_prefix=share, micro_batch_tokens=budget if share else 10**6
        )
        trainer = LocalTrainer(tiny("qwen3"), options)
        output = trainer.forward_backward(batch, preferring, frozenset({"logprobs"}))
        assert output.logprobs is not None
        said.append(output.logprobs)
        found.append(torch.cat([tensor.flatten() for _, tensor in trainer.gradients()]))
    assert torch.allclose(said[1], said[0], rtol=0, atol=1e-5)
    assert float((found[1] - found[0]).abs().max() / found[0].abs().max()) < 1e-5


def test_pairs_are_cut_by_what_is_read_of_them() -> None:
    """A prompt counts once in each pair, and no pair is lost or read twice."""
    inputs = rows_of([(10, [4, 6]), (10, [1, 1]), (10, [9, 2])], shuffled=False)
    batch = PreferenceBatch(inputs=inputs, ref_logprobs=None, loss_weights=torch.full((3,), 1 / 3))
    [cut] = group_micro_batches(batch, budget=33)
    assert [micro.units.tolist() for micro in cut] == [[2], [0, 1]]
    assert [micro.length for micro in cut] == [19, 16]
    one, other = group_micro_batches(batch, budget=10**6, ranks=2)
    units = [unit for micro in (*one, *other) for unit in micro.units.tolist()]
    assert sorted(units) == [0, 1, 2]


def test_layers_that_are_computed_again_share_prompts_too() -> None:
    batch = rows_of(GROUPS)
    _, expected = said_and_gradient(tiny("qwen3"), batch, share=False, budget=10**6)
    model = tiny("qwen3")
    options = TrainerOptions(lr=1e-3, share_prefix=True, gradient_checkpointing=True)
    trainer = LocalTrainer(model, options)
    trainer.forward_backward(batch, weighted, frozenset({"logprobs", "entropy"}))
    found = torch.cat([tensor.flatten() for _, tensor in trainer.gradients()])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("block", [0, 2**17])
@pytest.mark.parametrize("side_by_side", [0, 10**6])
def test_long_rows_attend_group_by_group_and_unlike_rows_apart(
    monkeypatch: pytest.MonkeyPatch, side_by_side: int, block: int
) -> None:
    monkeypatch.setattr("oxrl.models.shared_prefix.SIDE_BY_SIDE", side_by_side)
    monkeypatch.setattr("oxrl.models.shared_prefix.BLOCK", block)
    batch = rows_of([*GROUPS, (0, [2, 4])])
    layout = laid_out(batch, groups_of(batch))
    if block:
        assert len(layout.blocks) == (1 if side_by_side else len(GROUPS) + 1)
    elif side_by_side:
        assert len(layout.blocks) == len({*batch.attention_mask.sum(1).tolist()})
    else:
        assert len(layout.blocks) > len(GROUPS) + 1
    assert len(layout.answers) == layout.tokens.numel()
    model = tiny("qwen3")
    plain, expected = said_and_gradient(model, batch, share=False, budget=10**6)
    shared, found = said_and_gradient(model, batch, share=True, budget=10**6)
    assert torch.allclose(shared, plain, rtol=0, atol=1e-5)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def gradients_of_ranks() -> None:
    """On every rank: what FSDP2 computes with and without, compared where it is whole."""
    batch = rows_of(GROUPS)
    found: list[Tensor] = []
    with joined_ranks(torch.device("cpu"), Deadlines.alike(60)) as ranks:
        for share in (False, True):
            model = load_policy("builtin:tiny", LoadOptions(seed=0))
            options = TrainerOptions(lr=1e-3, share_prefix=share, micro_batch_tokens=40)
            trainer = FsdpTrainer(model, options, ranks=ranks)
            trainer.checked(partial(check_sharing, model))
            trainer.forward_backward(batch, weighted, frozenset({"logprobs", "entropy"}))
            found.append(torch.cat([tensor.flatten() for _, tensor in trainer.gradients()]))
            trainer.skip_step()
    plain, shared = found
    assert float((plain - shared).abs().max() / plain.abs().max()) < 1e-5


def test_ranks_share_prompts_too() -> None:
    run_ranks(2, gradients_of_ranks)


def test_a_prompt_is_read_once_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_policy("builtin:tiny", LoadOptions(seed=0))
    network = SharedPrefixNetwork(model)
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, result: read.append(given[0].numel())
    )
    network.backbone(rows_of(GROUPS))
    # Each prompt once, and every response without padding; 10 rows of 15 one by one.
    assert read == [(7 + 13) + (4 + 2) + (9 + 12) + (1 + 13)]
    read.clear()
    network.backbone(rows_of([(3, [2]), (4, [2])]))  # nothing in common
    network.backbone(rows_of([(1, [9, 9])]))  # nearly nothing
    assert read == [2 * 6, 2 * 10]


def test_every_token_of_every_row_has_its_place() -> None:
    batch = rows_of(GROUPS, seed=3)
    layout = laid_out(batch, groups_of(batch))
    there = layout.tokens[0][layout.places]
    assert torch.equal(there[batch.attention_mask], batch.tokens[batch.attention_mask])
    positions = layout.position_ids[0][layout.places]
    expected = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    assert torch.equal(positions[batch.attention_mask], expected[batch.attention_mask])
    assert sorted(row for group in layout.groups for row in group.rows) == list(range(len(batch)))


def test_rows_without_a_trained_token_and_without_a_prompt_are_read_too() -> None:
    batch = rows_of([(4, [3, 3]), (0, [5, 2])])
    batch.response_mask[batch.tokens[:, 0] == batch.tokens[0, 0]] = False
    model = load_policy("builtin:tiny", LoadOptions(seed=0))
    plain, expected = said_and_gradient(model, batch, share=False, budget=10**6)
    shared, found = said_and_gradient(model, batch, share=True, budget=10**6)
    assert torch.allclose(shared, plain, rtol=0, atol=1e-5)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_packed_rows_keep_their_positions_and_are_not_packed_again() -> None:
    """Rows that begin alike, in each of which an example ends and another one begins."""
    batch = rows_of([(6, [6, 6, 6])], shuffled=False)
    positions = torch.tensor([[*range(7), *range(5)]] * 3)
    packed = dataclasses.replace(batch, position_ids=positions)
    model = load_policy("builtin:tiny", LoadOptions(seed=0))
    with torch.no_grad():
        plain = CausalNetwork(model).backbone(packed)
        shared = SharedPrefixNetwork(model).backbone(packed)
        unpacked = SharedPrefixNetwork(model).backbone(batch)
    assert torch.allclose(shared, plain, rtol=0, atol=1e-5)
    # Positions say that what follows place 7 sees nothing before it.
    assert float((unpacked - plain).abs().max()) > 1e-2


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 18, 40, 10**6])
def test_the_rows_of_a_prompt_stay_together_as_far_as_they_fit(budget: int, ranks: int) -> None:
    batch = rows_of(GROUPS, seed=1)
    shares = group_micro_batches(batch, budget=budget, ranks=ranks)
    assert len(shares) == ranks
    cut = [part for share in shares for part in share]
    assert sorted(row for part in cut for row in part.units.tolist()) == list(range(len(batch)))
    for part in cut:
        inside = batch.select(part.units)
        tokens = sum(group.tokens for group in groups_of(inside))
        assert tokens <= budget or len(part.units) == 1
        assert part.length == int(inside.attention_mask.sum(1).max())
    if budget == 10**6:
        prompts = [len(groups_of(batch.select(part.units))) for part in cut]
        assert sum(prompts) == len(GROUPS)


def test_a_model_that_looks_past_the_prompt_in_another_way_is_refused() -> None:
    for name in (*REFUSED, "gemma2", "mamba"):
        with pytest.raises(ConfigError, match=r"train\.share_prefix: .*; set it to false"):
            check_sharing(tiny(name))


def test_a_run_learns_the_same_with_prompts_read_once(tmp_path: Path) -> None:
    """On the samples of the run that reads each prompt for each response: two that sampled for
    themselves might differ by a token.
    """
    # A gradient that is rounding noise is not to move a weight.
    given = ["train.epochs=2", "train.adam_eps=1e-3"]
    short = {"steps": 4, "record": "tokens"}
    plain = rl_config(tmp_path, "plain", given, run=short)
    run(plain)
    given += ["train.share_prefix=true", f"rollout.from_samples={plain.run.directory}"]
    shared = rl_config(tmp_path, "shared", given, run=short)
    run(shared)
    one = metric_lines(plain.run.directory)
    other = metric_lines(shared.run.directory)
    assert len(one) == len(other) == 4
    for left, right in zip(one, other, strict=True):
        for key in ("reward/mean", "data/tokens", "update/grad_norm", "policy/entropy"):
            assert right[key] == pytest.approx(left[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("model.attention=eager", "needs model.attention sdpa"),
    ],
)
def test_what_it_does_not_go_together_with_is_said(
    tmp_path: Path, override: str, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        rl_config(tmp_path, "refused", ["train.share_prefix=true", override])
