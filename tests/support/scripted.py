"""Episodes with a sampler that follows a script, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from oxrl.data.chat import ChatEncoder
from oxrl.engines.sample import Finished
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.rollouts.episode_scores import EpisodeScorer
from oxrl.rollouts.episodes import EpisodeEngine
from oxrl.rollouts.sync import make_requests, score_groups
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Prompt, Request, Sampling, Segment

PAD, END, USER, ASSISTANT = 0, 1, 2, 3
FIRST_BYTE = 5
# The tokenizer has a token per byte, in the order of the characters that stand for them.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
STAND_IN = {byte: byte for byte in PRINTABLE}
STAND_IN |= {b: 256 + n for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
BYTE_IDS = {byte: FIRST_BYTE + n for n, byte in enumerate(sorted(STAND_IN, key=STAND_IN.get))}
HOSTILE = """
import random
from oxrl.environments import Step

PIECES = ["<|end|>", "<|user|>", "<|assistant|>", "<|pad|>", " ", "  ", "\\n", "a", "é", "🙂",
          "\\t", "{{ x }}", "{% if %}", "\\u200d", "\\u0301", "'", '"', "\\\\n", "0", "\\ue0000:0\\ue001"]

class Made:
    reusable = True  # a process for many episodes
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        self.turns = self.chance.randint(1, 4)
        return self.text()
    def text(self):
        return "x" + "".join(self.chance.choices(PIECES, k=self.chance.randint(0, 8))) + "y"
    def step(self, text):
        self.turns -= 1
        return Step(self.text(), reward=len(text) / 8, terminated=not self.turns)
"""
PLAIN = """
import os, random, time
from oxrl.environments import Step

class Made:
    def __init__(self, **how):
        self.how, self.turn = how, 0
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        self.turn += 1
        if self.turn == self.how.get("fails_at"):
            raise ValueError("as asked")
        if self.turn == self.how.get("hangs_at"):
            time.sleep(60)
        if self.turn == self.how.get("ends_at"):
            return Step("bye", 1.0, terminated=True, reason=self.how.get("reason", ""))
        if self.turn == self.how.get("cuts_at"):
            return Step("bye", 1.0, truncated=True, reason=self.how.get("reason", ""))
        return Step("go on", 0.25)
"""


class ScriptedSampler:
    """A RolloutEngine whose tokens are a function of the request's seed, in any order of finishing.

    `seen` keeps, per id, what every turn read and what was sampled.
    """

    # Of weights and rest nothing is asked here.
    update_weights: Any = None
    held: Any = None
    logprobs: Any = None
    sleep: Any = None
    wake: Any = None

    version = 4

    def __init__(self, order: int = 0, *, stops: float = 1.0, longest: int = 6) -> None:
        self.seen: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self._order = random.Random(order)
        self._stops = stops
        self._longest = longest
        self._waiting: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def poll(self, deadline_s: float) -> list[Finished]:
        if not self._waiting:
            return []
        self._order.shuffle(self._waiting)
        count = self._order.randint(1, len(self._waiting))
        done, self._waiting = self._waiting[:count], self._waiting[count:]
        return [Finished(request, self._sampled(request)) for request in done]

    def _sampled(self, request: Request) -> Completion:
        chance = random.Random(request.seed)
        most = request.sampling.max_tokens
        stops = chance.random() < self._stops
        count = min(chance.randint(0, self._longest), most - 1) if stops else most
        tokens = tuple(chance.randint(FIRST_BYTE, FIRST_BYTE + 255) for _ in range(count))
        tokens += (END,) * stops
        self.seen.setdefault(request.id, []).append((request.prompt.token_ids, tokens))
        text = "".join(chr(32 + t) for t in tokens if t != END)
        logprobs = tuple(-0.01 * (t % 7) for t in tokens)
        segment = Segment(token_ids=tokens, logprobs=logprobs, versions=(4,) * len(tokens))
        reason = "stop" if stops else "length"
        return Completion(segments=(segment,), text=text, finish_reason=reason)

    def abort(self, ids: Sequence[str]) -> list[Finished]:
        self._waiting = [request for request in self._waiting if request.id not in ids]
        return []

    def metrics(self) -> dict[str, float]:
        return {}


Play = Callable[..., EpisodeEngine]


def prompts(count: int) -> list[tuple[int, Prompt]]:
    encoder = ChatEncoder(builtin_tokenizer())
    found: list[tuple[int, Prompt]] = []
    for draw in range(count):
        messages = ({"role": "user", "content": f"question {draw}"},)
        token_ids = tuple(encoder.encode_prompt(messages))
        found.append((draw, Prompt(uid=str(draw), messages=messages, token_ids=token_ids)))
    return found


def requests(count: int, samples: int = 1, max_tokens: int = 8) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(END,))
    return make_requests(prompts(count), samples=samples, sampling=sampling, run_seed=3)


def scored(asked: list[Request], done: list[Completion], samples: int = 1) -> list[Any]:
    pairs = list(zip(asked, done, strict=True))
    return score_groups(EpisodeScorer(None), pairs, Patience(), samples=samples)


def user_turn(text: str) -> list[int]:
    """What stands between two turns of the policy, by hand: nothing of text is a special token."""
    return [USER, *(BYTE_IDS[byte] for byte in text.encode()), END, ASSISTANT]
