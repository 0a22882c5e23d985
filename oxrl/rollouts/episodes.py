"""Episodes of several turns: a rollout engine around a rollout engine.

`submit` takes requests for episodes, `poll` returns whole episodes under these requests. In
between, every turn of the policy is a request of its own to the engine inside, and what it wrote
goes to the episode's environment while other episodes are sampled. A turn reads the tokens before
it as they were sampled; only what the environment says is encoded, once. (`oxrl.data.contexts`:
turns that read less than all before.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, NamedTuple

from oxrl.data.actions import Action, ActionHead
from oxrl.data.chat import TemplateError
from oxrl.data.contexts import Contexts, Conversation, Exchange, Reading
from oxrl.data.messages import Message, images_of, texts_of
from oxrl.data.turns import TurnEncoder
from oxrl.engines.sample import Finished, Responses, RolloutEngine
from oxrl.environments.pool import EnvironmentPool, EpisodeProcess, LostEpisode, Opening
from oxrl.errors import DeadlineError, EngineError, InvariantError, required
from oxrl.rollouts.episode_scores import TURNS, counter, nothing_counted
from oxrl.runs.waiting import Patience
from oxrl.seeds import stable_seed
from oxrl.types import (
    ChatMessage,
    Completion,
    EpisodeEnd,
    FinishReason,
    Metrics,
    Names,
    Request,
    Requests,
    Segment,
    TokenIds,
    Turn,
)
from oxrl.usercode.environments import Step
from oxrl.usercode.messages import Json

# Gives the images in messages their names; the messages themselves where there are none.
NameImages = Callable[[list[Message]], list[Message]]

# While an environment works, how long the engine inside samples before its answer is looked for.
SLICE_S = 0.02
# Episodes whose task is done, of environments that say so.
SUCCESS = "episode/success"
# Turns whose tokens stand for no actions, where actions are such that there are any.
UNDECODED = "episode/undecoded"
# Ends that an environment itself may name as the reason of a step.
TERMINATED: tuple[EpisodeEnd, ...] = ("completed", "parse_error")
TRUNCATED: tuple[EpisodeEnd, ...] = (
    "max_turns",
    "max_tokens",
    "max_tool_calls",
    "max_seconds",
    "context",
)


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The limits at which an episode ends although its task goes on.

    max_turns: of the policy. max_tokens: that the policy samples in all turns.
    max_seconds: from its beginning on, infinite for none. context: tokens that the model reads.
    alive: episodes that have a process at the same time.
    overlap: sample other episodes while environments work.
    """

    max_turns: int
    max_tokens: int
    max_seconds: float
    context: int
    alive: int
    overlap: bool = False


NOTHING_SAID = Conversation(opening=(), tools=(), exchanges=())


class Ending(NamedTuple):
    """The end of an episode, and why in words."""

    end: EpisodeEnd
    reason: str


class Asked(NamedTuple):
    """A turn as an environment is asked to answer it: as text and, where it has some, actions.

    last: a limit of the run ends the episode there, whatever the answer.
    """

    text: str
    actions: list[Action] | None
    last: bool


class Played(NamedTuple):
    """A turn as it was sampled, what the environment was asked, and what it answered.

    step: with the names of images; None: it has not answered yet.
    """

    turn: Completion
    asked: Asked
    step: Step | None


# Of one episode there is one object, told apart from others by itself.
@dataclass(kw_only=True, eq=False)
class Episode:
    """One episode on its way.

    tokens, images: all that the next turn reads. begins_row: they are not in the segments so far.
    conversation: the present one. branches: what it was when each turn was sampled.
    played: every turn so far, also the one that the environment is answering.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    images: tuple[str, ...] = ()
    begins_row: bool = True
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    opening: tuple[ChatMessage, ...] = ()
    conversation: Conversation = NOTHING_SAID
    branches: list[Conversation] = field(default_factory=list)
    sampled: int = 0
    process: EpisodeProcess | None = None
    began: float = field(default_factory=monotonic)
    wanted: bool = True
    played: list[Played] = field(default_factory=list)
    # The same as JSON has it, as far as it was asked for.
    lines: list[Json] = field(default_factory=list)
    # The turn that the environment is answering, and the limit that cut it, if one did.
    turn: Completion | None = None
    cut_by: EpisodeEnd | None = None


class EpisodeEngine:
    """A RolloutEngine whose responses are episodes with an environment.

    Args:
        engine: samples turns.
        pool: of the environment.
        encoder: of openings and answers.
        limits: where episodes end.
        contexts: what a turn reads.
        named: gives images in messages of the environment their names.
        actions: that turns are; None: turns are text.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: EnvironmentPool,
        encoder: TurnEncoder,
        limits: EpisodeLimits,
        contexts: Contexts,
        named: NameImages,
        *,
        actions: ActionHead | None,
    ) -> None:
        self._engine = engine
        # Weights are the engine's affair, and so is its rest.
        self.update_weights = engine.update_weights
        self.held = engine.held
        self.logprobs = engine.logprobs
        self.sleep = engine.sleep
        self.wake = engine.wake
        self._pool = pool
        self._encoder = encoder
        self._contexts = contexts
        self._limits = limits
        self._named = named
        self._actions = actions
        # That are sampled in any turn, however little room is left.
        self._fewest = 1 if actions is None else actions.tokens
        # Whether a turn has no token that ends it, and is over all the same.
        self._open_turns = actions is not None and actions.ends_by is None
        self._waiting: deque[Episode] = deque()
        self._alive: dict[str, Episode] = {}
        # Of environments at work: what becomes of their episode when they have answered.
        self._working: dict[Future[Any], Episode] = {}
        self._sampling: set[str] = set()
        self._counted = nothing_counted()
        self._finished: Responses = []
        self._threads = ThreadPoolExecutor(limits.alive, "environment")

    @property
    def version(self) -> int:
        return self._engine.version

    def submit(self, requests: Requests) -> None:
        """See RolloutEngine. An interrupted episode cannot go on: it begins anew.

        Raises:
            EngineError: an id that is in flight, or a request with a prefix.
        """
        here = {episode.request.id for episode in self._waiting} | self._alive.keys()
        for request in requests:
            if request.id in here or request.prefix.token_ids:
                why = "is in flight already" if request.id in here else "begins in the middle"
                raise EngineError(f"the request for episode {request.id!r} {why}")
            here.add(request.id)
            self._waiting.append(Episode(request=request))

    def poll(self, deadline_s: float) -> Responses:
        """See RolloutEngine."""
        end = monotonic() + deadline_s
        while self._goes_on():
            self._admit()
            worked = self._work(max(0.0, end - monotonic()))
            if not worked and monotonic() >= end and self._goes_on():
                raise DeadlineError(
                    f"waited {deadline_s:g} s for an episode: {len(self._working)} environments "
                    f"are at work, {len(self._alive)} episodes are alive, {len(self._waiting)} "
                    "wait. Raise run.deadlines.rollout or lower environment.max_turns"
                )
        finished = self._finished
        self._finished = []
        return finished

    def abort(self, ids: Sequence[str]) -> Responses:
        """See RolloutEngine. What comes back is the part of the episode that was over."""
        wanted = set(ids)
        finished = [item for item in self._finished if item.request.id in wanted]
        self._finished = [item for item in self._finished if item.request.id not in wanted]
        stopped = [episode for episode in self._waiting if episode.request.id in wanted]
        self._waiting = deque(e for e in self._waiting if e.request.id not in wanted)
        alive = [episode for id, episode in self._alive.items() if id in wanted]
        self._engine.abort(list(self._sampling & wanted))
        self._sampling -= wanted
        self._let_go(alive)
        for episode in (*stopped, *alive):
            finished.append(Finished(episode.request, self._completion(episode, "abort", None)))
        return finished

    def _let_go(self, episodes: Sequence[Episode]) -> None:
        """Forget episodes that have begun, and end their processes."""
        at_work = set(self._working.values())
        for episode in episodes:
            episode.wanted = False
            del self._alive[episode.request.id]
            # Where its environment is at work, its answer ends the process.
            if episode not in at_work and episode.process is not None:
                episode.process.end()

    def metrics(self) -> Metrics:
        """See RolloutEngine; and how many episodes ended in which way, after how many turns."""
        counted = self._counted
        self._counted = nothing_counted()
        return {**self._engine.metrics(), **counted}

    def close(self) -> None:
        """Drop every episode and end the processes of the environment; the engine inside stays."""
        for episode in self._alive.values():
            episode.wanted = False
        self._engine.abort(list(self._sampling))
        self._sampling.clear()
        self._alive.clear()
        self._waiting.clear()
        self._threads.shutdown(cancel_futures=True)
        self._pool.close()

    # One piece of work.

    def _admit(self) -> None:
        """Begin waiting episodes where there is room for a process."""
        while self._waiting and len(self._alive) < self._limits.alive:
            episode = self._waiting.popleft()
            self._alive[episode.request.id] = episode
            self._ask(episode)

    def _ask(self, episode: Episode) -> None:
        """Have the environment begin, or answer the last turn."""
        answer = self._threads.submit(self._answer if episode.played else self._begin, episode)
        self._working[answer] = episode

    def _begin(self, episode: Episode) -> Opening:
        patience = Patience(lambda: not episode.wanted)
        episode.began = monotonic()
        episode.process = self._pool.open(patience)
        request = episode.request
        return episode.process.reset(request.prompt, request.group_seed, patience)

    def _answer(self, episode: Episode) -> Step:
        process = required(episode.process, "the process of an episode")
        asked = episode.played[-1].asked
        patience = Patience(lambda: not episode.wanted)
        return process.step(asked.text, patience, last=asked.last, actions=asked.actions)

    def _goes_on(self) -> bool:
        """True while there may be more work before `poll` returns."""
        return not self._finished and bool(self._waiting or self._alive)

    def _work(self, limit_s: float) -> bool:
        """Let the engine sample, or wait for environments, for `limit_s` seconds at most.

        Returns:
            Whether a turn or an environment's answer has come.
        """
        answered = self._answers(limit_s)
        for future in answered:
            self._take_answer(self._working.pop(future), future)
        if answered or not self._sampling or (self._working and not self._limits.overlap):
            return bool(answered)
        try:
            turns = self._next_turns(min(limit_s, SLICE_S) if self._working else limit_s)
        except DeadlineError:
            return False
        for finished in turns:
            self._sampling.remove(finished.request.id)
            self._check(finished)
            self._take_turn(self._alive[finished.request.id], finished.completion)
        return bool(turns)

    def _next_turns(self, limit_s: float) -> Responses:
        """Let the engine sample until turns end."""
        return self._engine.poll(limit_s)

    def _answers(self, limit_s: float) -> list[Future[Any]]:
        """The environments that have answered, once there is nothing better to do than to wait.

        Without overlap these are all or none, in the order in which they were asked: what is
        sampled together then never depends on how long anything took, and neither does rounding.
        """
        working = list(self._working)
        if not self._limits.overlap:
            return [] if wait(working, limit_s).not_done else working
        if not self._sampling:
            wait(working, limit_s, FIRST_COMPLETED)
        return [future for future in working if future.done()]

    def _take_answer(self, episode: Episode, future: Future[Any]) -> None:
        if not episode.wanted:
            if episode.process is not None:
                episode.process.end()
            return
        try:
            answer = future.result()
            over = None
            if isinstance(answer, Opening):
                self._open(episode, answer)
            else:
                over = self._take_step(episode, answer)
        except LostEpisode as error:
            over = Ending(error.end, str(error))
        # The environment says what the template cannot write.
        except (TemplateError, RecursionError) as error:
            over = Ending("environment_error", str(error))
        if over is None:
            self._sample_turn(episode)
        else:
            self._end(episode, *over)

    def _open(self, episode: Episode, opening: Opening) -> None:
        """The environment has begun: what it says is what the first turn reads."""
        episode.opening = tuple(self._names(opening.messages))
        context = self._limits.context
        if self._too_long([*episode.opening, *opening.tools]):
            raise LostEpisode("environment_error", f"its opening is longer than {context} tokens")
        prompt = episode.request.prompt
        if episode.opening == tuple(map(dict, prompt.messages)) and not opening.tools:
            episode.tokens = list(prompt.token_ids)
        else:
            episode.tokens = list(self._encoder.opening(episode.opening, opening.tools))
        episode.images = images_of(episode.opening)
        episode.conversation = replace(NOTHING_SAID, opening=episode.opening, tools=opening.tools)
        # What the prompt says need not be said again.
        said = (prompt.token_ids, prompt.images)
        episode.begins_row = (tuple(episode.tokens), episode.images) != said
        if len(episode.tokens) + self._fewest > context:
            found = f"its opening has {len(episode.tokens)} tokens"
            reason = f"{found}, and the model's context is {context}"
            raise LostEpisode("environment_error", reason)

    def _names(self, messages: Sequence[Message]) -> list[Message]:
        """Return the environment's messages, with the names of their images.

        Raises:
            LostEpisode: it shows an image that cannot be used.
        """
        try:
            return self._named([dict(message) for message in messages])
        except ValueError as error:
            raise LostEpisode("environment_error", str(error)) from error

    def _too_long(self, said: Sequence[Message]) -> bool:
        """True if the model cannot read all that, so that nobody need encode it."""
        most = self._limits.context * self._encoder.longest
        return sum(map(len, texts_of(said))) > most

    def _sample_turn(self, episode: Episode) -> None:
        self._engine.submit([self._turn_request(episode)])
        self._sampling.add(episode.request.id)

    def _turn_request(self, episode: Episode) -> Request:
        """The request for the next turn, which reads all that is there."""
        request = episode.request
        turn = len(episode.turns)
        left = min(request.sampling.max_tokens, self._limits.max_tokens - episode.sampled)
        room = self._limits.context - len(episode.tokens)
        episode.cut_by = "max_tokens" if left <= room else "context"
        seed = request.seed if turn == 0 else stable_seed("turn", request.seed, turn)
        return replace(
            request,
            prompt=replace(request.prompt, token_ids=tuple(episode.tokens), images=episode.images),
            sampling=replace(request.sampling, max_tokens=min(left, room)),
            seed=seed,
        )

    def _check(self, finished: Finished) -> None:
        """Refuse a turn whose tokens do not agree with how it ended.

        Raises:
            InvariantError: that is so.
        """
        sampling = finished.request.sampling
        token_ids = finished.completion.token_ids
        reason = finished.completion.finish_reason
        stopped = bool(token_ids) and token_ids[-1] in sampling.stop_token_ids
        if (reason == "stop") != stopped or (
            reason == "length" and len(token_ids) != sampling.max_tokens
        ):
            raise InvariantError(
                f"a turn of {finished.request.id!r} ended by {reason!r} with {len(token_ids)} of "
                f"{sampling.max_tokens} tokens, the last of them {token_ids[-1:]}"
            )

    def _take_turn(self, episode: Episode, turn: Completion) -> None:
        """The policy has written a turn: its environment answers."""
        self._write(episode, turn)
        self._ask(episode)

    def _write(self, episode: Episode, turn: Completion) -> None:
        """Append a turn, and note what its environment is asked."""
        sampled = turn
        context = tuple(episode.tokens)
        for segment in turn.segments:
            own = context if episode.begins_row else None
            episode.begins_row = False
            images = segment.images if own is None else episode.images
            kept = replace(segment, turn=len(episode.turns), context=own, images=images)
            episode.segments.append(kept)
            episode.tokens += segment.token_ids
            episode.sampled += len(segment.token_ids)
        episode.branches.append(episode.conversation)
        head = self._actions
        actions = None
        if head is not None:
            actions = head.decode(turn.token_ids)
            if not self._open_turns:
                self._counted[UNDECODED] += not head.decodes(turn.token_ids)
            turn = replace(turn, text=head.text(actions))
        episode.turn = turn
        limits = self._limits
        used = episode.sampled + self._fewest > limits.max_tokens
        spent = used or len(episode.turns) + 1 >= limits.max_turns
        last = spent or (turn.finish_reason == "length" and not self._open_turns)
        episode.played.append(Played(sampled, Asked(turn.text, actions, last), None))

    def _take_step(self, episode: Episode, step: Step) -> Ending | None:
        """The environment has answered: the episode goes on, or has ended in the way returned."""
        turn = episode.turn
        assert turn is not None
        if step.executed is not None:
            self._forget_undone(episode, step.executed)
        if step.success is not None:
            self._counted[SUCCESS] += step.success
        last = episode.segments[-1]
        episode.segments[-1] = replace(last, reward=step.reward)
        messages = tuple(self._names(step.messages))  # pyright: ignore
        said = Turn(text=turn.text, messages=messages, reward=step.reward, reason=step.reason)
        episode.turns.append(said)
        episode.played[-1] = episode.played[-1]._replace(step=replace(step, messages=messages))
        if turn.finish_reason == "length" and not self._open_turns:
            # There is no stop token, so the answer has no place.
            return Ending(episode.cut_by or "max_tokens", step.reason)
        if step.terminated:
            named = step.reason in TERMINATED
            return Ending(step.reason if named else "completed", step.reason)  # pyright: ignore
        return self._go_on(episode, step, messages)

    def _forget_undone(self, episode: Episode, executed: int) -> None:
        """Take the actions of the last turn that were not done out of what is trained on.

        Raises:
            LostEpisode: turns are no actions, or fewer were sampled than were done.
        """
        head = self._actions
        if head is None or executed > head.chunk:
            most = 0 if head is None else head.chunk
            reason = f"step said that {executed} actions were done, of {most} in a turn"
            raise LostEpisode("environment_error", reason)
        last = episode.segments[-1]
        left = head.kept(last.token_ids, executed)
        undone = len(last.token_ids) - left
        episode.segments[-1] = last.first(left)
        del episode.tokens[len(episode.tokens) - undone :]
        episode.sampled -= undone

    def _go_on(
        self, episode: Episode, step: Step, messages: Sequence[ChatMessage]
    ) -> Ending | None:
        """Append the answer, for the next turn to read; the ending if a limit is reached."""
        if self._too_long(messages):
            return Ending(self._limit(episode, step) or "context", step.reason)
        reading = self._next_reading(episode, step, messages)
        if reading is None:
            # It ended with a token after which the template puts nothing.
            return Ending("completed", step.reason)
        there = 0 if reading.new else len(episode.tokens)
        fits = there + len(reading.token_ids) + self._fewest <= self._limits.context
        if fits:
            self._read(episode, reading)
        end = self._limit(episode, step) or (None if fits else "context")
        if end is None:
            return None
        if episode.begins_row:
            # What the next turn would read, for the value of what is cut off.
            end_of_all = _read_segment(episode, (), episode.images, tuple(episode.tokens))
            episode.segments.append(end_of_all)
        return Ending(end, step.reason)

    def _next_reading(
        self, episode: Episode, step: Step, messages: Sequence[ChatMessage]
    ) -> Reading | None:
        """Return what the next turn reads; None: the policy said that it writes no more."""
        last = len(episode.turns) - 1
        answered = last if step.after is None else step.after
        if answered > last:
            raise LostEpisode("environment_error", f"step answered turn {answered} of {last + 1}")
        if answered < 0:
            episode.conversation = replace(episode.conversation, opening=messages, exchanges=())
            token_ids = self._encoder.opening(messages, episode.conversation.tools)
            return Reading(token_ids, new=True, images=images_of(messages))
        if answered < last:
            episode.conversation = episode.branches[answered]
            episode.tokens, episode.images = read_through(episode, answered)
        sampled = sampled_in(episode, answered)
        said = Exchange(sampled, episode.turns[answered].text, messages)
        exchanges = (*episode.conversation.exchanges, said)
        episode.conversation = replace(episode.conversation, exchanges=exchanges)
        reading = self._contexts(episode.conversation)
        if reading is None or reading.new or answered == last:
            return reading
        tokens = (*episode.tokens, *reading.token_ids)
        return Reading(tokens, new=True, images=(*episode.images, *reading.images))

    def _read(self, episode: Episode, reading: Reading) -> None:
        """Let the next turn read that."""
        episode.begins_row = reading.new
        if reading.new:
            episode.images = reading.images
            episode.tokens = list(reading.token_ids)
            return
        episode.segments.append(_read_segment(episode, reading.token_ids, reading.images))
        episode.tokens += reading.token_ids
        episode.images += reading.images

    def _limit(self, episode: Episode, step: Step) -> EpisodeEnd | None:
        """Return the limit that cuts the episode here, if one does."""
        if step.truncated:
            return step.reason if step.reason in TRUNCATED else "max_turns"  # pyright: ignore
        if len(episode.turns) >= self._limits.max_turns:
            return "max_turns"
        if episode.sampled + self._fewest > self._limits.max_tokens:
            return "max_tokens"
        if monotonic() - episode.began > self._limits.max_seconds:
            return "max_seconds"
        return None

    # The end of an episode.

    def _end(self, episode: Episode, end: EpisodeEnd, reason: str) -> None:
        finish: FinishReason = "stop" if episode.turn is None else episode.turn.finish_reason
        del self._alive[episode.request.id]
        self._counted[TURNS] += len(episode.turns)
        self._counted[counter(end)] += 1
        if episode.process is not None:
            failed = end in ("timeout", "environment_error")
            if episode.process.reusable and not failed:
                self._pool.keep(episode.process)
            elif episode.process.closes and not failed:
                self._threads.submit(episode.process.finish)
            else:
                episode.process.end()
        completion = self._completion(episode, finish, end, reason)
        self._finished.append(Finished(episode.request, completion))

    def _completion(
        self, episode: Episode, finish: FinishReason, end: EpisodeEnd | None, reason: str = ""
    ) -> Completion:
        return Completion(
            segments=tuple(episode.segments),
            text=episode.turns[-1].text if episode.turns else "",
            finish_reason=finish,
            turns=tuple(episode.turns),
            opening=episode.opening,
            end=end,
            reason=reason,
        )


def _read_segment(
    episode: Episode,
    token_ids: TokenIds,
    images: tuple[str, ...],
    context: TokenIds | None = None,
) -> Segment:
    """Make the segment that the policy reads after its last turn."""
    count = len(token_ids)
    return Segment(
        token_ids=token_ids,
        logprobs=(0.0,) * count,
        versions=(-1,) * count,
        origin="environment",
        images=images,
        turn=len(episode.turns) - 1,
        context=context,
    )


def sampled_in(episode: Episode, turn: int) -> TokenIds:
    """The tokens that the policy sampled in a turn."""
    found: list[int] = []
    for segment in episode.segments:
        if segment.turn == turn and segment.origin == "policy":
            found += segment.token_ids
    return tuple(found)


def read_through(episode: Episode, turn: int) -> tuple[list[int], Names]:
    """All that was read and sampled up to the end of a turn, in its row, and images shown there."""
    tokens = [*episode.request.prompt.token_ids]
    images = episode.request.prompt.images
    for segment in episode.segments:
        answers_it = segment.turn == turn and segment.origin == "environment"
        if segment.turn > turn or answers_it:
            break
        if segment.context is not None:
            tokens = [*segment.context]
            images = ()
        tokens += segment.token_ids
        images += segment.images
    return tokens, images
