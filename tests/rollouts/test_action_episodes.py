"""Turns that are actions: their number of tokens is fixed, the environment gets what they stand for,
and what was not done is not trained on.
"""

from __future__ import annotations

import random

import pytest

from oxrl.data.action_heads import FastHead
from oxrl.data.actions import ActionHead
from oxrl.data.batching import to_rollout_batch
from oxrl.data.episode_rows import EpisodeInputs
from oxrl.data.fast import FastCode
from oxrl.engines.sample.sampler import generate
from oxrl.rollouts.episodes import SUCCESS, UNDECODED
from oxrl.types import Completion, Request, Segment
from support.scripted import END, PAD, Play, ScriptedSampler, requests, scored, user_turn

HEAD = ActionHead(token_ids=tuple(range(200, 216)), chunk=2, low=(-1.0, 0.0), high=(1.0, 4.0))
ACTS = """
from oxrl.environments import Step

class Made:
    def __init__(self, **how):
        self.how, self.turn, self.got = how, 0, []
    def reset(self, prompt, seed):
        return prompt.messages
    def act(self, actions):
        self.turn += 1
        assert [len(action) for action in actions] == [2, 2]
        if self.turn == self.how.get("ends_at"):
            done = self.how.get("executed")
            return Step("bye", 1.0, terminated=True, executed=done, success=True)
        done = self.how.get("always_executed")
        return Step("go on", sum(map(sum, actions)), executed=done)
"""


# Of chunks of two actions, two numbers each: a piece per coefficient from -20 to 20.
PIECES = FastCode(chunk=2, size=2, scale=10.0, least=-20, most=20)
FAST = FastHead(
    token_ids=tuple(range(200, 241)),
    chunk=2,
    low=(-1.0, 0.0),
    high=(1.0, 4.0),
    code=PIECES,
    end=END,
)


class SamplesActions(ScriptedSampler):
    """Tokens of actions, a whole turn of them; `seen` keeps what every turn read and sampled."""

    def _sampled(self, request: Request) -> Completion:
        chance = random.Random(request.seed)
        most = request.sampling.max_tokens
        tokens = tuple(chance.choices(HEAD.token_ids, k=most))
        self.seen.setdefault(request.id, []).append((request.prompt.token_ids, tokens))
        logprobs = tuple(-0.01 * (token % 7) for token in tokens)
        segment = Segment(token_ids=tokens, logprobs=logprobs, versions=(4,) * most)
        return Completion(segments=(segment,), text="", finish_reason="length")


class SamplesPieces(ScriptedSampler):
    """Turns of FAST's tokens: a chunk, too few pieces, and one that does not end, in turn."""

    def _sampled(self, request: Request) -> Completion:
        seen = self.seen.setdefault(request.id, [])
        whole = FAST.encode([[0.5, 1.0], [0.25, 3.0]])
        turn = [whole, (*whole[:-2], END), whole[:-1] + (200,)][len(seen)]
        seen.append((request.prompt.token_ids, turn))
        logprobs = (-0.1,) * len(turn)
        segment = Segment(token_ids=turn, logprobs=logprobs, versions=(4,) * len(turn))
        reason = "stop" if turn[-1] == END else "length"
        return Completion(segments=(segment,), text="", finish_reason=reason)


@pytest.fixture
def act(play: Play) -> Play:
    def act_(source: str, sampler: ScriptedSampler, **given: object) -> object:
        return play(source, sampler, actions=HEAD, **given)

    return act_  # pyright: ignore


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_turns_follow_one_another_without_a_token_that_ends_them(act: Play, reads: str) -> None:
    sampler = SamplesActions()
    asked = requests(3, samples=2, max_tokens=HEAD.tokens)
    done = generate(act(ACTS, sampler, reads=reads, ends_at=3), asked, deadline_s=60)
    batch = to_rollout_batch(scored(asked, done, 2), pad_id=PAD)
    for row, request in enumerate(asked):
        seen = sampler.seen[request.id]
        assert len(seen) == 3 and done[row].end == "completed"
        if reads == "whole":
            [first, *others] = seen
            expected = [*first[0], *first[1]]
            for _, tokens in others:
                expected += [END, *user_turn("go on"), *tokens]
            assert batch.inputs.tokens[row, : len(expected)].tolist() == expected
        values = [HEAD.decode(tokens) for _, tokens in seen]
        turns = done[row].turns
        assert [turn.text for turn in turns] == [HEAD.text(value) for value in values]
        assert turns[0].reward == pytest.approx(sum(map(sum, values[0])))  # pyright: ignore
    trained = batch.inputs.response_mask
    assert trained.sum(1).tolist() == [3 * HEAD.tokens] * 6
    assert bool(batch.terminated.all()) and not bool(batch.truncated.any())


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_actions_behind_the_last_one_that_was_done_are_not_trained_on(
    act: Play, reads: str
) -> None:
    sampler = SamplesActions()
    asked = requests(2, max_tokens=HEAD.tokens)
    engine = act(ACTS, sampler, reads=reads, ends_at=2, executed=1)
    done = generate(engine, asked, deadline_s=60)
    batch = to_rollout_batch(scored(asked, done), pad_id=PAD)
    for row, request in enumerate(asked):
        [first, second] = [tokens for _, tokens in sampler.seen[request.id]]
        mask = batch.inputs.response_mask[row]
        assert batch.inputs.tokens[row][mask].tolist() == [*first, *second[:2]]
        rewards = batch.token_rewards[row][mask].tolist()
        assert rewards[-1] == 1.0 and rewards[:-1].count(0.0) == 4  # the last one that was done
    assert engine.metrics()[SUCCESS] == 2
    assert SUCCESS not in engine.metrics()  # an environment that tells nothing counts nothing


def test_the_next_turn_reads_the_actions_that_were_done_alone(act: Play) -> None:
    sampler = SamplesActions()
    asked = requests(2, max_tokens=HEAD.tokens)
    generate(act(ACTS, sampler, ends_at=3, always_executed=1), asked, deadline_s=60)
    for request in asked:
        [first, second, third] = sampler.seen[request.id]
        # Of the four tokens of a turn those of the first of its two actions.
        expected = (*first[0], *first[1][:2], END, *user_turn("go on"))
        assert second[0] == expected
        assert third[0] == (*expected, *second[1][:2], END, *user_turn("go on"))


def test_a_cut_episode_ends_where_the_next_turn_would_begin_and_a_terminated_one_does_not(
    act: Play,
) -> None:
    asked = requests(1, max_tokens=HEAD.tokens)
    [cut] = generate(act(ACTS, SamplesActions(), reads="last", max_turns=2), asked, deadline_s=60)
    inputs = to_rollout_batch(scored(asked, [cut]), pad_id=PAD).inputs
    assert isinstance(inputs, EpisodeInputs) and cut.end == "max_turns"
    assert inputs.rows.response_mask.any(1).tolist() == [True, True, False]
    [over] = generate(act(ACTS, SamplesActions(), reads="last", ends_at=2), asked, deadline_s=60)
    inputs = to_rollout_batch(scored(asked, [over]), pad_id=PAD).inputs
    assert isinstance(inputs, EpisodeInputs)
    assert inputs.rows.response_mask.any(1).tolist() == [True, True]


def test_a_turn_for_which_no_room_is_left_is_not_begun(act: Play) -> None:
    asked = requests(1, max_tokens=HEAD.tokens)
    engine = act(ACTS, SamplesActions(), max_tokens=2 * HEAD.tokens + 1)
    [done] = generate(engine, asked, deadline_s=60)
    assert (done.end, done.sampled, len(done.turns)) == ("max_tokens", 2 * HEAD.tokens, 2)
    room = len(asked[0].prompt.token_ids) + HEAD.tokens + 2
    [done] = generate(act(ACTS, SamplesActions(), context=room), asked, deadline_s=60)
    assert (done.end, len(done.turns)) == ("context", 1)


def test_an_environment_of_text_gets_actions_as_text(play: Play) -> None:
    source = ACTS.replace("def act(self, actions)", "def step(self, text)").replace(
        "assert [len(action) for action in actions] == [2, 2]",
        "import json; actions = json.loads(text); assert len(actions) == 2",
    )
    asked = requests(1, max_tokens=HEAD.tokens)
    engine = play(source, SamplesActions(), actions=HEAD, ends_at=2)
    [done] = generate(engine, asked, deadline_s=60)
    assert done.end == "completed"


def test_a_step_that_did_more_than_there_was_has_no_score(act: Play) -> None:
    asked = requests(1, max_tokens=HEAD.tokens)
    engine = act(ACTS, SamplesActions(), ends_at=1, executed=3)
    [done] = generate(engine, asked, deadline_s=60)
    assert done.end == "environment_error" and "3 actions were done, of 2" in done.reason


COUNTS = """
import os
from oxrl.environments import Step

class Made:
    reusable = {reusable}
    begun = 0
    def reset(self, prompt, seed):
        self.begun += 1
        return prompt.messages
    def act(self, actions):
        if self.begun == 3:
            raise ValueError("as asked")
        return Step(reason=f"{{os.getpid()}} {{self.begun}}", terminated=True)
"""


@pytest.mark.parametrize("reusable", [True, False])
def test_a_process_serves_further_episodes_where_its_class_says_so(
    act: Play, reusable: bool
) -> None:
    asked = requests(6, max_tokens=HEAD.tokens)
    engine = act(COUNTS.format(reusable=reusable), SamplesActions(), alive=1)
    done = generate(engine, asked, deadline_s=60)
    told = [completion.reason.split() for completion in done]
    if not reusable:
        assert len({pid for pid, _ in told}) == 6 and {count for _, count in told} == {"1"}
        return
    # The third episode of a process fails, which ends the process; the next one begins anew.
    assert [told[n][1] for n in (0, 1, 3, 4)] == ["1", "2", "1", "2"]
    assert [done[n].end for n in (2, 5)] == ["environment_error"] * 2
    assert told[0][0] == told[1][0] != told[3][0] == told[4][0]


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_of_fasts_tokens_those_that_stand_for_no_actions_are_counted_and_trained_on(
    play: Play, reads: str
) -> None:
    sampler = SamplesPieces()
    asked = requests(2, max_tokens=FAST.tokens)
    given: dict[str, object] = {"actions": FAST, "reads": reads, "max_turns": 5}
    engine = play(ACTS, sampler, **given)
    done = generate(engine, asked, deadline_s=60)
    metrics = engine.metrics()
    # Of each episode the second turn has too few pieces, and the third ends it: it has no end.
    assert type(metrics) is dict  # asked for one that is not there, it makes none
    assert metrics[UNDECODED] == 4 and UNDECODED not in engine.metrics()
    batch = to_rollout_batch(scored(asked, done), pad_id=PAD)
    middle = FAST.text([[0.0, 2.0]] * 2)
    for row, request in enumerate(asked):
        seen = sampler.seen[request.id]
        assert len(seen) == 3 and done[row].end == "max_tokens"
        assert [turn.text for turn in done[row].turns[1:]] == [middle, middle]
        first = FAST.decode(seen[0][1])
        assert done[row].turns[0].reward == pytest.approx(sum(map(sum, first)))  # pyright: ignore
        mask = batch.inputs.response_mask[row]
        trained = batch.inputs.tokens[row][mask].tolist()
        assert trained == [token for _, turn in seen for token in turn]
        if reads == "whole":
            assert seen[1][0] == (*seen[0][0], *seen[0][1], *user_turn("go on"))
    assert bool(batch.truncated.all())
