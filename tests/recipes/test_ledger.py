"""The ledger of waste and the floors of phases, with numbers worked out by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from oxrl.assembly.assembly import Assembly
from oxrl.modelfiles.builtin import builtin_policy
from oxrl.modelfiles.dims import ModelDims, model_dims
from oxrl.recipes.compute_accounting import ComputeAccounting, ModelWork, Rows, model_work
from oxrl.rollouts.sync import RolloutStep
from oxrl.runs.clock import Clock, MachineSpeed, machine_speed, note_speed
from oxrl.types import (
    Completion,
    PolicyBatch,
    Prompt,
    Rollout,
    RolloutBatch,
    Score,
    Segment,
    TokenBatch,
)
from support.small_runs import rl_config

# A row of n tokens, r of them predicted, takes 10 n + 4 r + n (n + 1) operations.
WORK = ModelWork(body=10.0, head=4.0, attention=2.0, weight_bytes=100.0, parameters=5.0)
# Prompt and response of every row: two of either group.
ROWS = [(2, 2), (2, 1), (1, 1), (1, 3)]
GROUPS = [7, 7, 9, 9]
ADVANTAGES = [1.0, -1.0, 0.0, 0.0]
# own: 68, 46, 30, 72; prompts 26, 26, 12, 12. Micro-batches of 8 tokens: rows 0 and 3 of 4 tokens,
# rows 1 and 2 of 3 tokens, so row 2 has one token of padding: 42 - 26 = 16.
OWN, PADDING, AGAIN, NO_SIGNAL = 216, 16, 26 + 12, 30 + 60


def ledger(**changes: object) -> ComputeAccounting:
    given = {
        "work": WORK,
        "speed": None,
        "budget": 8,
        "ranks": 1,
        "share_prefix": False,
        "asked_before": True,
        "old_known": True,
        "all_learn": False,
    }
    return ComputeAccounting(**{**given, **changes})  # pyright: ignore[reportArgumentType]


def inputs() -> TokenBatch:
    places = torch.arange(4).expand(4, 4)
    prompts = torch.tensor([[prompt] for prompt, _ in ROWS])
    lengths = torch.tensor([[sum(row)] for row in ROWS])
    real = places < lengths
    return TokenBatch(
        tokens=torch.ones(4, 4, dtype=torch.int64),
        attention_mask=real,
        response_mask=real & (places >= prompts),
    )


def batches(*, reference: bool) -> tuple[PolicyBatch, RolloutBatch]:
    zeros = torch.zeros(4, 4)
    groups = torch.tensor(GROUPS)
    versions = torch.zeros(4, 4, dtype=torch.int64)
    rollouts = RolloutBatch(
        inputs=inputs(),
        rollout_logprobs=zeros,
        rewards=torch.zeros(4),
        token_rewards=zeros,
        group_ids=groups,
        versions=versions,
        terminated=torch.ones(4, dtype=torch.bool),
        truncated=torch.zeros(4, dtype=torch.bool),
        valid=torch.ones(4, dtype=torch.bool),
    )
    policy = PolicyBatch(
        inputs=inputs(),
        old_logprobs=None,
        rollout_logprobs=zeros,
        ref_logprobs=zeros if reference else None,
        advantages=torch.tensor(ADVANTAGES)[:, None].expand(4, 4),
        loss_weights=zeros,
        versions=versions,
        group_ids=groups,
    )
    return policy, rollouts


def sampled(
    rows: Sequence[tuple[int, int]], groups: Sequence[int], read: float, applied: int = 0
) -> RolloutStep:
    rollouts: list[Rollout] = []
    for (prompt, response), group in zip(rows, groups, strict=True):
        numbers = (0,) * response
        segment = Segment(token_ids=numbers, logprobs=(0.0,) * response, versions=numbers)
        rollouts.append(
            Rollout(
                prompt=Prompt(uid=str(group), messages=(), token_ids=(1,) * prompt),
                completion=Completion(segments=(segment,), text="", finish_reason="stop"),
                score=Score(value=1.0),
                group_id=group,
                sample=0,
                seed=0,
            )
        )
    counters = {"rollout/prefill_tokens": read}
    return RolloutStep(step=applied, start=0, end=2, rollouts=rollouts, sampler=counters)


def test_every_cause_of_waste_is_what_it_is_by_hand() -> None:
    watched = ledger()
    policy, rollouts = batches(reference=True)
    # A third sample of group 9 has no score; prompts of 3 tokens were read as 6.
    step = sampled([*ROWS, (1, 1)], [*GROUPS, 9], read=6.0)
    watched.count_before_update(step, rollouts, policy)
    metrics = watched.count_update(policy)

    decoded = (68 - 26) + (46 - 26) + (30 - 12) + (72 - 12) + (30 - 12)
    prefilled = 26 + 12 + 3 * 10
    total = prefilled + decoded + (2 + 3) * (OWN + PADDING)
    dropped = (18 + 60 + 18) / 3  # one of three, at the mean of its group
    passes = OWN - AGAIN
    expected = {
        "waste/padding": (2 + 3) * PADDING,
        "waste/prompts_again": 3 * 10 + (2 + 3) * AGAIN,
        "waste/no_signal": 3 * NO_SIGNAL,
        "waste/old_pass": passes,
        "waste/reference_pass": passes,
        "waste/dropped": dropped,
    }
    expected["waste/total"] = sum(expected.values())
    shares = {name: value / total for name, value in expected.items()}
    assert metrics == pytest.approx({**shares, "work/tflop": total / 1e12})
    # What came before the first minibatch is told once.
    later = watched.count_update(policy)
    assert later["work/tflop"] * 1e12 == pytest.approx(3 * (OWN + PADDING))


def heard(count: int) -> Segment:
    """What an environment said, `count` tokens."""
    return Segment(
        token_ids=(3,) * count,
        logprobs=(0.0,) * count,
        versions=(-1,) * count,
        origin="environment",
    )


def written(count: int, context: tuple[int, ...] | None = None) -> Segment:
    """What the policy sampled in a turn, `count` tokens."""
    numbers = (0,) * count
    return Segment(token_ids=numbers, logprobs=(0.0,) * count, versions=numbers, context=context)


def episode(group: int, *segments: Segment) -> Rollout:
    return Rollout(
        prompt=Prompt(uid=str(group), messages=(), token_ids=(1, 1)),
        completion=Completion(segments=segments, text="", finish_reason="stop"),
        score=Score(value=1.0),
        group_id=group,
        sample=0,
        seed=0,
    )


def sampling_of(
    watched: ComputeAccounting, rollouts: list[Rollout], read: float
) -> tuple[float, float]:
    """Operations of sampling, and those of reading again."""
    counters = {"rollout/prefill_tokens": read}
    watched.count_sampling(RolloutStep(step=1, start=0, end=1, rollouts=rollouts, sampler=counters))
    policy, _ = batches(reference=False)
    metrics = watched.count_update(policy)
    total = metrics["work/tflop"] * 1e12
    padded = 3 * PADDING / total
    again = (metrics["waste/prompts_again"] - 3 * AGAIN / total) * total
    assert metrics["waste/padding"] == pytest.approx(padded)
    return total - 3 * (OWN + PADDING), again


def test_a_prompt_that_packed_micro_batches_share_is_read_again_in_each_but_the_first() -> None:
    # Four rows of one group, prompt of 4 and response of 1: two of them are 6 tokens, packed.
    tokens = torch.tensor([[1, 1, 1, 1, row] for row in range(4)])
    everywhere = torch.ones(4, 5, dtype=torch.bool)
    rows = TokenBatch(
        tokens=tokens,
        attention_mask=everywhere,
        response_mask=everywhere & (torch.arange(5) == 4),
    )
    found = Rows(rows, torch.zeros(4), ledger(share_prefix=True, budget=6))
    prompt = 10 * 4 + 4 * 5
    response = (10 * 5 + 4 + 5 * 6) - prompt
    assert found.own.tolist() == [prompt + response, response, prompt + response, response]
    assert found.again.tolist() == [0.0, 0.0, prompt, 0.0]
    assert not found.padding.any()


def test_a_run_of_one_process_notes_how_fast_its_machine_is(tmp_path: Path) -> None:
    for backend, noted in (("local", True), ("fsdp", False)):
        cfg = rl_config(tmp_path / backend, backend)
        train = cfg.train.model_copy(update={"backend": backend})
        cfg = cfg.model_copy(update={"train": train})
        folder = cfg.run.directory
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "environment.json").write_text("{}")
        speed = Assembly(cfg).speed
        if speed is not None:
            note_speed(folder, speed)
        assert (json.loads((folder / "environment.json").read_text()) != {}) == noted


def test_what_an_environment_said_is_read_once_and_never_decoded() -> None:
    # Three turns of 2, 1 and 2 tokens, answers of 3 and 2; one of 4 that no turn read.
    talk = episode(7, written(2), heard(3), written(1), heard(2), written(2), heard(4))
    # A sampler without a cache reads 2, then 2 + 2 + 3, then 7 + 1 + 2 tokens: 7 of them are new.
    total, again = sampling_of(ledger(), [talk], read=19.0)
    # 12 tokens, of which 5 are predicted: 10 * 12 + 4 * 5 + 12 * 13.
    assert again == pytest.approx(12 * 10)
    assert total == pytest.approx(296 + 12 * 10)
    # One that keeps what it has read reads 2, 3 and 2.
    total, again = sampling_of(ledger(), [talk], read=7.0)
    assert again == pytest.approx(0.0, abs=1e-6)
    assert total == pytest.approx(296)


def test_every_context_of_an_episode_is_a_beginning_of_its_own() -> None:
    # Two episodes of a group: both begin with the prompt, and then read other contexts.
    one = episode(7, written(2), written(1, context=(9, 8, 7)))
    other = episode(7, written(1), written(1, context=(9, 8)), written(0, context=(5,) * 4))
    total, again = sampling_of(ledger(), [one, other], read=7.0)
    prompt, three, two = 26, 10 * 3 + 12, 10 * 2 + 6
    # Rows of 4, 4, 3 and 3 tokens; the context that no turn read is none.
    rows = (68 - prompt) + (10 * 4 + 4 + 20 - three) + (46 - prompt) + (46 - two)
    assert again == pytest.approx(0.0, abs=1e-6)
    assert total == pytest.approx(prompt + three + two + rows)


def test_rows_of_a_group_that_begin_otherwise_are_not_read_again() -> None:
    policy, _ = batches(reference=False)
    policy.inputs.tokens[1, :2] = 5
    for shared in (False, True):
        metrics = ledger(share_prefix=shared, budget=4).count_update(policy)
        # Of the four rows only the last begins like one before it.
        total = metrics["work/tflop"] * 1e12
        assert metrics["waste/prompts_again"] * total == pytest.approx(3 * 12)


def test_what_is_needed_is_no_waste() -> None:
    watched = ledger(old_known=False, all_learn=True, budget=1)
    policy, rollouts = batches(reference=True)
    step = sampled(ROWS, GROUPS, read=3.0, applied=1)
    watched.count_before_update(step, rollouts, policy)
    metrics = watched.count_update(policy)
    again = metrics.pop("waste/prompts_again")
    assert metrics.pop("waste/total") == again > 0
    assert metrics.pop("work/tflop") > 0
    assert set(metrics.values()) == {0.0}


def test_prompts_that_are_read_once_are_counted_once() -> None:
    watched = ledger(share_prefix=True)
    policy, _ = batches(reference=False)
    metrics = watched.count_update(policy)
    # The first row of a group has its prompt; the other one is its response, and nothing is padded.
    own = 68 + (46 - 26) + 72 + (30 - 12)
    assert metrics["work/tflop"] * 1e12 == pytest.approx(3 * own)
    assert metrics["waste/padding"] == 0.0
    assert metrics["waste/no_signal"] == pytest.approx((72 + 18) / own)
    assert metrics["waste/total"] == metrics["waste/no_signal"]
    for nothing in ("old_pass", "reference_pass", "dropped"):
        assert metrics[f"waste/{nothing}"] == 0.0
    assert metrics["waste/prompts_again"] == 0.0
    # A budget that parts the groups has prompts read again: those of 26 and 12.
    parted = ledger(share_prefix=True, budget=4).count_update(policy)
    assert parted["waste/prompts_again"] == pytest.approx((26 + 12) / OWN)


def test_without_sizes_of_the_model_shares_are_of_tokens() -> None:
    watched = ledger(work=None)
    policy, _ = batches(reference=False)
    metrics = watched.count_update(policy)
    tokens, padding, prompts, no_signal = 13, 1, 3, 2 + 3
    assert metrics["waste/padding"] == pytest.approx(padding / (tokens + padding))
    assert metrics["waste/prompts_again"] == pytest.approx(prompts / (tokens + padding))
    assert metrics["waste/no_signal"] == pytest.approx(no_signal / (tokens + padding))
    assert "work/tflop" not in metrics


def test_floors_are_what_the_machine_needs_at_best() -> None:
    watched = ledger(speed=MachineSpeed(flops=1000.0, bandwidth=50.0))
    policy, rollouts = batches(reference=False)
    step = sampled(ROWS, GROUPS, read=3.0, applied=1)
    watched.count_before_update(step, rollouts, policy)
    watched.count_update(policy)
    # Three decode steps, each of which reads 100 bytes of weights.
    rollout = (26 + 12) / 1000 + 3 * 100 / 50
    logprobs = OWN / 1000
    update = 3 * OWN / 1000 + 5 * 28 / 50
    seconds = {
        "time/rollout_s": 2 * rollout,
        "time/logprobs_s": logprobs,
        "time/update_s": 4 * update,
        "time/step_s": 100.0,
    }
    useful = 26 + 12 + 42 + 20 + 18 + 60 + OWN + 3 * OWN
    assert watched.against_floor(seconds) == pytest.approx(
        {
            "throughput/rollout_over_floor": 2.0,
            "throughput/logprobs_over_floor": 1.0,
            "throughput/update_over_floor": 4.0,
            "throughput/mfu": useful / (1000.0 * 100.0),
        }
    )
    assert watched.against_floor(seconds) == {}  # of the next line nothing is known yet


def test_decoding_is_bound_by_operations_or_by_bytes_whichever_is_slower() -> None:
    work = ModelWork(body=10.0, attention=1.0, weight_bytes=100.0, kv_bytes=2.0)
    prompts, responses = torch.tensor([3, 1]), torch.tensor([1, 2])
    # Step 0: two rows over 3 + 1 tokens; step 1: one row over 1 + 1.
    moved = (100 + 2 * 4) + (100 + 2 * 2)
    computed = (2 * 10 + 4) + (10 + 2)
    slow = work.decode_floor(prompts, responses, MachineSpeed(flops=1e9, bandwidth=1.0))
    fast = work.decode_floor(prompts, responses, MachineSpeed(flops=1.0, bandwidth=1e9))
    assert slow == pytest.approx(moved)
    assert fast == pytest.approx(computed)


def test_the_operations_of_a_model_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    work = model_work(model_dims("builtin:tiny"), dtype="float32")
    assert work is not None
    model = builtin_policy("builtin:tiny", seed=0)
    model.set_attn_implementation("eager")  # whole squares of scores, not their lower half
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.ones(1, 32, dtype=torch.int64), use_cache=False)
    whole_squares = work.body * 32 + work.head * 32 + work.attention * 32 * 32
    assert counter.get_total_flops() == pytest.approx(whole_squares, rel=0.01)


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 4), (True, 1), (False, 4), (False, 2)])
def test_heads_that_are_not_tied_and_grouped_keys_are_counted_as_they_are(
    tied: bool, kv_heads: int
) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, vocabulary, layers, heads, head_dim, inner = 32, 50, 3, 4, 8, 48
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    dims = ModelDims(
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=None,
        vocabulary=vocabulary,
        heads=heads,
        tied=tied,
        routed=False,
        normed_heads=False,
    )
    work = model_work(dims, dtype="float32")
    assert work is not None
    head = vocabulary * hidden
    assert work.head == 2 * head
    assert work.parameters == parameters
    body = parameters - head * (1 if tied else 2)
    assert work.body == 2 * body
    # The embeddings are looked up; what is read of weights is the body and the head.
    assert work.weight_bytes == 4 * (body + head)
    assert work.kv_bytes == 2 * 4 * layers * kv_heads * head_dim
    assert work.attention == 4 * layers * heads * head_dim
    half = model_work(dims, dtype="bfloat16")
    assert half is not None and half.weight_bytes == 2 * (body + head)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.ones(1, 16, dtype=torch.int64), use_cache=False)
    # Scores are whole squares here; norms, of which torch counts no operations, are in the body.
    norms = 2 * hidden * (2 * layers + 1)
    expected = (work.body - norms) * 16 + work.head * 16 + work.attention * 16 * 16
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_experts_are_not_counted_as_if_all_of_them_read_every_token() -> None:
    dims = model_dims("builtin:tiny")
    assert dims is not None
    import dataclasses

    assert model_work(dataclasses.replace(dims, routed=True), dtype="float32") is None


def test_every_second_of_a_step_has_a_name() -> None:
    clock = Clock()
    time.sleep(0.02)
    with clock.phase("time/rollout_s"):
        time.sleep(0.005)
    time.sleep(0.01)
    with clock.phase("time/logprobs_s"), clock.phase("time/inner_s"):
        time.sleep(0.005)
    time.sleep(0.01)
    with clock.phase("time/update_s"):
        pass
    first = clock.take()
    whole = first.pop("time/step_s")
    assert first.pop("time/inner_s") <= first["time/logprobs_s"]
    assert sum(first.values()) == pytest.approx(whole, abs=1e-3)
    assert first["time/setup_s"] >= 0.02
    assert first["time/rows_s"] >= 0.01
    assert first["time/samples_s"] >= 0.01

    time.sleep(0.01)  # rows of data are read
    with clock.phase("time/update_s"):
        pass
    second = clock.take()
    assert second["time/rows_s"] >= 0.01
    assert "time/setup_s" not in second


def test_the_machine_is_tried_in_a_moment() -> None:
    speed = machine_speed(torch.device("cpu"), torch.float32)
    assert speed.flops > 1e8
    assert speed.bandwidth > 1e8
    assert machine_speed(torch.device("cpu"), torch.float32) is speed
