"""Turns that read less than all before, or what a template makes of it: rows of their own, in which
stands, id by id, what the sampler read and sampled.
"""

from __future__ import annotations

from typing import Any

import pytest

from oxrl.data.batching import to_rollout_batch
from oxrl.data.episode_rows import EpisodeInputs
from oxrl.engines.sample.sampler import generate
from oxrl.types import Completion, Request
from support.scripted import HOSTILE, PAD, PLAIN, Play, ScriptedSampler, requests, scored, user_turn

# A template that drops what stands before a Z from turns that are over.
FORGETS = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "<|assistant|>{{ m.content.split('Z')[-1] }}{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = HOSTILE.replace(
    "return self.text()\n    def text",
    "return [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': self.text()}]\n"
    "    def text",
)


def rows_of(asked: list[Request], done: list[Completion], samples: int = 1) -> EpisodeInputs:
    batch = to_rollout_batch(scored(asked, done, samples=samples), pad_id=PAD)
    assert isinstance(batch.inputs, EpisodeInputs)
    return batch.inputs


def check_rows(inputs: EpisodeInputs, asked: list[Request], sampler: ScriptedSampler) -> int:
    """Every stretch of trained tokens is a turn as sampled, after what the sampler read for it."""
    turns = 0
    for episode, request in enumerate(asked):
        rows = (inputs.episode_ids == episode).nonzero()[:, 0].tolist()
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for row in rows:
            tokens = inputs.rows.tokens[row][inputs.rows.attention_mask[row]].tolist()
            mask = inputs.rows.response_mask[row].tolist()
            starts = [at for at in range(len(tokens)) if mask[at] and not mask[at - 1]]
            for start in starts:
                end = start + (mask[start:] + [False]).index(False)
                found.append((tuple(tokens[:start]), tuple(tokens[start:end])))
        assert found == sampler.seen[request.id]
        turns += len(found)
        line = inputs.tokens[episode][inputs.response_mask[episode]].tolist()
        assert line == [token for _, sampled in found for token in sampled]
    return turns


@pytest.mark.parametrize("reads", ["last", "window: 2", "window: 3"])
def test_the_rows_of_an_episode_hold_what_each_turn_read_and_sampled(
    play: Play, reads: str
) -> None:
    sampler = ScriptedSampler(order=1)
    asked = requests(50, samples=2)
    done = generate(play(SYSTEM, sampler, reads=reads, alive=16), asked, deadline_s=60)
    assert check_rows(rows_of(asked, done, 2), asked, sampler) > 200


def test_a_turn_that_reads_the_last_answer_reads_the_systems_messages_and_nothing_else(
    play: Play,
) -> None:
    sampler = ScriptedSampler()
    asked = requests(1)
    source = PLAIN.replace(
        "return prompt.messages",
        "return [{'role': 'system', 'content': 'brief'}, {'role': 'user', 'content': 'q'}]",
    )
    generate(play(source, sampler, reads="last", max_turns=3), asked, deadline_s=60)
    reads = [list(read) for read, _ in sampler.seen["0/0"]]
    answer = user_turn("go on")
    assert [read[-len(answer) :] for read in reads[1:]] == [answer] * 2
    kept = len(reads[1]) - len(answer)
    assert reads[1][:kept] == reads[0][:kept]
    assert reads[1] == reads[2]


def test_a_window_moves_on_by_whole_turns(play: Play) -> None:
    sampler = ScriptedSampler()
    asked = requests(1)
    generate(play(PLAIN, sampler, reads="window: 2", max_turns=4), asked, deadline_s=60)
    seen = sampler.seen["0/0"]
    answer = user_turn("go on")
    assert [*seen[1][0]] == [*asked[0].prompt.token_ids, *seen[0][1], *answer]
    for turn in (2, 3):
        assert [*seen[turn][0]] == [*answer, *seen[turn - 1][1], *answer]


def test_rewards_flags_and_turns_are_those_of_the_episode(play: Play) -> None:
    asked = requests(20)
    sampler = ScriptedSampler()
    whole = generate(play(HOSTILE, sampler), asked, deadline_s=60)
    last = generate(play(HOSTILE, ScriptedSampler(), reads="last"), asked, deadline_s=60)
    one = to_rollout_batch(scored(asked, whole), pad_id=PAD)
    several = to_rollout_batch(scored(asked, last), pad_id=PAD)
    for name in ("rewards", "group_ids", "terminated", "truncated", "valid"):
        assert getattr(one, name).tolist() == getattr(several, name).tolist()
    assert one.turns is not None and several.turns is not None
    for of_one, of_several in zip(range(20), range(20), strict=True):
        for name in ("rollout_logprobs", "token_rewards", "turns", "versions"):
            mine = getattr(one, name)[of_one][one.inputs.response_mask[of_one]]
            other = getattr(several, name)[of_several][several.inputs.response_mask[of_several]]
            assert mine.tolist() == other.tolist(), name
    assert bool((one.turns[~one.inputs.response_mask] == -1).all())


@pytest.mark.parametrize("reads", ["last", "window: 2"])
def test_a_cut_episode_ends_with_what_its_next_turn_would_read(play: Play, reads: str) -> None:
    asked = requests(1)
    sampler = ScriptedSampler()
    done = generate(play(PLAIN, sampler, reads=reads, max_turns=3), asked, deadline_s=60)
    assert done[0].end == "max_turns"
    inputs = rows_of(asked, done)
    last = int(inputs.last_rows[0])
    assert not inputs.rows.response_mask[last].any()
    read = inputs.rows.tokens[last][inputs.rows.attention_mask[last]].tolist()
    answer = user_turn("go on")
    before = [*answer, *sampler.seen["0/0"][2][1]] if reads == "window: 2" else []
    assert read == [*before, *answer]


def test_a_template_that_rewrites_history_splits_the_rows_where_it_does(play: Play) -> None:
    sampler = ScriptedSampler(order=2, longest=40)
    asked = requests(40, max_tokens=64)
    engine = play(HOSTILE, sampler, splits=True, template=FORGETS, alive=16)
    done = generate(engine, asked, deadline_s=60)
    inputs = rows_of(asked, done)
    assert check_rows(inputs, asked, sampler) > 80
    rewrites = 0
    for episode, completion in enumerate(done):
        forgotten = ["Z" in turn.text for turn in completion.turns[:-1]]
        rewrites += sum(forgotten)
        assert int((inputs.episode_ids == episode).sum()) == 1 + sum(forgotten)
    assert rewrites > 3


def test_without_rewriting_a_split_episode_is_one_row_with_the_sampled_ids(play: Play) -> None:
    asked = requests(10)
    plain = generate(play(HOSTILE, ScriptedSampler()), asked, deadline_s=60)
    split = generate(play(HOSTILE, ScriptedSampler(), splits=True), asked, deadline_s=60)
    assert plain == split


def test_aborted_and_failed_episodes_have_rows_too(play: Play) -> None:
    given: dict[str, Any] = {"fails_at": 2}
    asked = requests(3)
    engine = play(PLAIN, ScriptedSampler(), reads="last", **given)
    batch = to_rollout_batch(scored(asked, generate(engine, asked, deadline_s=60)), pad_id=PAD)
    assert batch.valid.tolist() == [False] * 3


# Every other turn begins a conversation anew, as an agent with two of them does.
FORKS = """
from oxrl.environments import Step

class Made:
    turn = 0
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        self.turn += 1
        if self.turn % 2:
            return Step("go on", 0.5)
        return Step([{"role": "user", "content": "anew"}, {"role": "assistant", "content": text},
                     {"role": "user", "content": "and now"}], after=-1)
"""


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_a_conversation_that_begins_anew_begins_a_row(play: Play, reads: str) -> None:
    sampler = ScriptedSampler()
    asked = requests(6)
    done = generate(play(FORKS, sampler, reads=reads, max_turns=5), asked, deadline_s=60)
    inputs = rows_of(asked, done)
    assert check_rows(inputs, asked, sampler) == 30
    counts = (inputs.episode_ids == 0).sum(), {completion.end for completion in done}
    assert counts == (3 if reads == "whole" else 6, {"max_turns"})
    assert [len(completion.turns) for completion in done] == [5] * 6


# Goes back to its first turn every time, as an agent that tries again does.
RETRIES = """
from oxrl.environments import Step

class Made:
    turn = 0
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        self.turn += 1
        return Step(f"try {self.turn}", 0.5, after=min(1, self.turn - 1))
"""


def test_a_conversation_that_goes_back_to_a_turn_goes_on_from_its_tokens(play: Play) -> None:
    sampler = ScriptedSampler()
    asked = requests(4)
    done = generate(play(RETRIES, sampler, max_turns=5), asked, deadline_s=60)
    assert check_rows(rows_of(asked, done), asked, sampler) == 20
    for request in asked:
        seen = sampler.seen[request.id]
        first = [*request.prompt.token_ids, *seen[0][1], *user_turn("try 1"), *seen[1][1]]
        for turn in (2, 3, 4):
            assert [*seen[turn][0]] == [*first, *user_turn(f"try {turn}")]


def test_an_answer_to_a_turn_that_was_not_yet_fails_its_episode(play: Play) -> None:
    asked = requests(1)
    source = RETRIES.replace("min(1, self.turn - 1)", "7")
    [done] = generate(play(source, ScriptedSampler()), asked, deadline_s=60)
    assert (done.end, done.reason) == ("environment_error", "step answered turn 7 of 1")
