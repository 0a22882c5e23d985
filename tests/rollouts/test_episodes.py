"""Episodes of several turns: which tokens are trained on, how they end, and what changes nothing."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.data.batching import to_rollout_batch
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import DeadlineError, EngineError, EnvironmentDefinitionError
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.models.network import CausalNetwork, read_tokens
from oxrl.types import Completion
from support.scripted import (
    END,
    HOSTILE,
    PAD,
    PLAIN,
    Play,
    ScriptedSampler,
    requests,
    scored,
    user_turn,
)


def test_the_trainer_reads_what_was_sampled_and_what_was_encoded_once_id_by_id(play: Play) -> None:
    sampler = ScriptedSampler(order=1)
    engine = play(HOSTILE, sampler, alive=16)
    asked = requests(250, samples=4)
    done = generate(engine, asked, deadline_s=60)
    batch = to_rollout_batch(scored(asked, done, samples=4), pad_id=PAD)
    turns = 0
    for row, (request, completion) in enumerate(zip(asked, done, strict=True)):
        assert completion.end == "completed"
        seen = sampler.seen[request.id]
        assert len(seen) == len(completion.turns)
        expected = user_turn(completion.opening[0]["content"])
        trained = [False] * len(expected)
        for turn, (read, sampled) in zip(completion.turns, seen, strict=True):
            assert list(read) == expected  # what the sampler read is what the row holds
            expected += sampled
            trained += [True] * len(sampled)
            if turn is not completion.turns[-1]:
                answer = user_turn(turn.messages[0]["content"])
                expected += answer
                trained += [False] * len(answer)
        length = int(batch.inputs.attention_mask[row].sum())
        assert batch.inputs.tokens[row, :length].tolist() == expected
        assert batch.inputs.response_mask[row, :length].tolist() == trained
        turns += len(seen)
    assert turns > 2000  # of 1,000 episodes


def test_the_reward_of_a_turn_lies_on_its_last_token_and_all_add_up_to_the_score(
    play: Play,
) -> None:
    engine = play(HOSTILE, ScriptedSampler())
    asked = requests(20)
    rollouts = scored(asked, generate(engine, asked, deadline_s=60))
    batch = to_rollout_batch(rollouts, pad_id=PAD)
    for row, rollout in enumerate(rollouts):
        given = [turn.reward for turn in rollout.completion.turns]
        mask = batch.inputs.response_mask[row]
        lasts = (mask & ~torch.cat([mask[1:], torch.tensor([False])])).nonzero()[:, 0]
        assert batch.token_rewards[row, lasts].tolist() == pytest.approx(given)
        assert float(batch.token_rewards[row].sum()) == pytest.approx(rollout.score.value)
        assert rollout.score.value == pytest.approx(sum(given))


def test_nothing_depends_on_who_finishes_first_or_on_how_many_are_alive(play: Play) -> None:
    asked = requests(12, samples=2)
    first = generate(play(HOSTILE, ScriptedSampler(order=1), alive=1), asked, deadline_s=60)
    for order, alive, overlap in ((2, 3, False), (3, 24, False), (4, 8, True)):
        sampler = ScriptedSampler(order=order)
        engine = play(HOSTILE, sampler, alive=alive, overlap=overlap)
        again = generate(engine, asked, deadline_s=60)
        assert again == first


def test_the_members_of_a_group_begin_alike_and_other_groups_do_not(play: Play) -> None:
    asked = requests(6, samples=3)
    done = generate(play(HOSTILE, ScriptedSampler()), asked, deadline_s=60)
    openings = [completion.opening[0]["content"] for completion in done]
    assert all(len({*openings[k : k + 3]}) == 1 for k in range(0, 18, 3))
    assert len({*openings}) > 3


@pytest.mark.parametrize(
    ("given", "end", "turns", "status"),
    [
        ({"ends_at": 2}, "completed", 2, "ok"),
        ({"ends_at": 2, "reason": "parse_error"}, "parse_error", 2, "ok"),
        ({"ends_at": 2, "reason": "won"}, "completed", 2, "ok"),
        ({"cuts_at": 2}, "max_turns", 2, "ok"),
        ({"cuts_at": 2, "reason": "max_tool_calls"}, "max_tool_calls", 2, "ok"),
        ({"max_turns": 3}, "max_turns", 3, "ok"),
        ({"max_tokens": 7}, "max_tokens", None, "ok"),
        ({"context": 40}, "context", None, "ok"),
        ({"max_seconds": 0.0}, "max_seconds", 1, "ok"),
        ({"fails_at": 2}, "environment_error", 1, "error"),
        ({"hangs_at": 2, "timeout_s": 0.5}, "timeout", 1, "timeout"),
    ],
)
def test_every_end_of_an_episode_has_its_name(
    play: Play, given: dict[str, Any], end: str, turns: int | None, status: str
) -> None:
    asked = requests(1)
    engine = play(PLAIN, ScriptedSampler(longest=3), **given)
    (rollout,) = scored(asked, generate(engine, asked, deadline_s=60))
    assert rollout.completion.end == end
    assert turns is None or len(rollout.completion.turns) == turns
    assert rollout.score.status == status
    assert (rollout.score.value is None) == (status != "ok")
    batch = to_rollout_batch([rollout], pad_id=PAD)
    over = end in ("completed", "parse_error")
    assert batch.terminated.tolist() == [over]
    assert batch.truncated.tolist() == [not over and status == "ok"]
    assert batch.valid.tolist() == [status == "ok"]


def test_a_turn_that_was_cut_ends_its_episode_and_its_reward_counts(play: Play) -> None:
    asked = requests(3)
    done = generate(play(PLAIN, ScriptedSampler(stops=0.0)), asked, deadline_s=60)
    assert {completion.end for completion in done} == {"max_tokens"}
    assert [rollout.score.value for rollout in scored(asked, done)] == [0.25] * 3


def test_a_cut_episode_ends_with_the_last_answer_untrained_for_the_bootstrap(play: Play) -> None:
    asked = requests(1)
    engine = play(PLAIN, ScriptedSampler(), max_turns=2)
    batch = to_rollout_batch(scored(asked, generate(engine, asked, deadline_s=60)), pad_id=PAD)
    answer = user_turn("go on")
    assert batch.inputs.tokens[0, -len(answer) :].tolist() == answer
    assert not batch.inputs.response_mask[0, -len(answer) :].any()


WORTH = """
from oxrl.environments import Step

class Made:
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        return Step("go on", 0.25)
    def worth_when_cut(self):
        return 100
"""


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({"max_turns": 3}, "max_turns"),
        ({"max_turns": 99, "max_tokens": 40}, "max_tokens"),
    ],
)
def test_what_was_reached_counts_in_the_last_turn_that_the_limits_allow_alone(
    play: Play, given: dict[str, Any], end: str
) -> None:
    engine = play(WORTH, ScriptedSampler(longest=5), **given)
    for done in generate(engine, requests(8), deadline_s=60):
        rewards = [turn.reward for turn in done.turns]
        assert done.end == end and len(rewards) > 2
        assert rewards == [0.25] * (len(rewards) - 1) + [100.25]


LONG_WORDS = """
from oxrl.environments import Step

class Made:
    def __init__(self, count):
        self.count = count
    def reset(self, prompt, seed):
        return "pears" * self.count
    def step(self, text):
        return Step("pears" * self.count, 1.0)
"""


def test_what_an_environment_says_is_measured_in_tokens_and_not_in_characters(play: Play) -> None:
    # 100 characters in 20 tokens, with three more around them.
    sampler = ScriptedSampler(longest=0)
    engine = play(LONG_WORDS, sampler, words=["pears"], count=20, context=50)
    [done] = generate(engine, requests(1), deadline_s=60)
    # Then a turn of one token, and as many again.
    assert [len(read) for read, _ in sampler.seen["0/0"]] == [23, 47]
    assert (done.end, len(done.turns)) == ("context", 2)
    engine = play(LONG_WORDS, ScriptedSampler(), words=["pears"], count=60, context=50)
    [done] = generate(engine, requests(1), deadline_s=60)
    assert (done.end, len(done.turns)) == ("environment_error", 0)
    assert "its opening has 63 tokens, and the model's context is 50" in done.reason


def test_with_overlap_a_slow_environment_holds_up_no_other_episode(play: Play) -> None:
    source = HOSTILE.replace("self.turns -= 1", "self.turns -= 1; self.slow and time.sleep(60)")
    source = "import time\n" + source.replace(
        "self.chance = random.Random(seed)",
        "self.chance = random.Random(seed); self.slow = prompt.uid == '0'",
    )
    engine = play(source, ScriptedSampler(), overlap=True)
    engine.submit(requests(6))
    fast: list[str] = []
    while len(fast) < 5:
        fast += [item.request.id for item in engine.poll(20)]
    assert "0/0" not in fast


def test_what_is_aborted_comes_back_and_leaves_no_process(play: Play) -> None:
    engine = play(PLAIN, ScriptedSampler(), hangs_at=1)
    asked = requests(4)
    engine.submit(asked)
    with pytest.raises(DeadlineError, match="environments are at work"):
        engine.poll(0.5)
    back = engine.abort([request.id for request in asked])
    assert sorted(item.request.id for item in back) == sorted(request.id for request in asked)
    assert {item.completion.finish_reason for item in back} == {"abort"}
    assert engine.poll(1.0) == []
    engine.submit(asked[:1])  # it can be asked for again


def test_an_environment_that_can_no_more_be_loaded_ends_the_run_and_not_each_episode(
    play: Play, tmp_path: Path
) -> None:
    engine = play(PLAIN, ScriptedSampler())
    (tmp_path / "mine.py").write_text("class Made: ...\nraise OSError('gone')\n")
    engine.submit(requests(2))
    with pytest.raises(EnvironmentDefinitionError, match="OSError: gone"):
        engine.poll(20)


def test_an_id_in_flight_and_a_prefix_are_refused(play: Play) -> None:
    engine = play(PLAIN, ScriptedSampler())
    (asked,) = requests(1)
    engine.submit([asked])
    with pytest.raises(EngineError, match="in flight already"):
        engine.submit([asked])
    prefix = dataclasses.replace(asked.prefix, token_ids=(9,), logprobs=(0.0,), versions=(0,))
    with pytest.raises(EngineError, match="begins in the middle"):
        engine.submit([dataclasses.replace(asked, id="other", prefix=prefix)])


def test_what_is_sampled_together_does_not_depend_on_how_long_environments_take(
    play: Play,
) -> None:
    source = "import time\n" + HOSTILE.replace(
        "self.turns -= 1", "self.turns -= 1; time.sleep(random.SystemRandom().random() / 50)"
    )
    asked = requests(12, max_tokens=32)
    found: list[list[Completion]] = []
    for _ in range(2):
        sampler = LocalSampler(stopping_model(), builtin_tokenizer(), max_rows=8)
        found.append(generate(play(source, sampler), asked, deadline_s=120))
    assert found[0] == found[1]  # to the last digit of every log-probability


def stopping_model() -> Any:
    """A random model that ends a turn after a few tokens."""
    model = builtin_policy("builtin:tiny", seed=0)
    hidden: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda *call: hidden.append(call[2]))
    with torch.no_grad():
        seeded = torch.Generator().manual_seed(0)
        model(input_ids=torch.randint(0, 261, (4, 64), generator=seeded))
        direction = hidden[0].reshape(-1, 64).mean(0)
        model.lm_head.weight[END] = direction * (4.0 / direction.norm() ** 2)
    model.model.norm._forward_hooks.clear()
    return model


@pytest.mark.parametrize("reads", ["whole", "last", "window: 2"])
def test_log_probabilities_of_every_turn_are_the_trainers(play: Play, reads: str) -> None:
    model = stopping_model()
    sampler: RolloutEngine = LocalSampler(model, builtin_tokenizer(), max_rows=8)
    asked = requests(12, samples=2, max_tokens=32)
    done = generate(play(HOSTILE, sampler, reads=reads), asked, deadline_s=120)
    assert sum(len(completion.turns) for completion in done) > 40
    batch = to_rollout_batch(scored(asked, done, samples=2), pad_id=PAD)
    network = CausalNetwork(model)
    with torch.no_grad():
        said = batch.inputs.said_by(
            partial(read_tokens, network, temperature=1.0), frozenset({"logprobs"})
        )
    assert said.logprobs is not None
    off = (said.logprobs - batch.rollout_logprobs)[batch.inputs.response_mask]
    assert float(off.abs().max()) < 1e-4
