"""Parked episodes: the turns of those in flight as JSON, and how they come back.

A state holds what was sampled in every turn and what the environment was asked and answered, never
the environment itself. An episode that comes back has a new process of its environment, which is
told the same turns again and has to answer the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from math import inf
from os.path import commonprefix
from typing import NamedTuple, cast

from oxrl.data.chat import TemplateError
from oxrl.data.messages import Message
from oxrl.engines.sample import Responses
from oxrl.engines.sample.parked import ParkingEngine
from oxrl.environments.pool import EnvironmentPool, EpisodeProcess, LostEpisode, Opening
from oxrl.errors import EngineError, EnvironmentDefinitionError
from oxrl.rollouts.episode_scores import nothing_counted
from oxrl.rollouts.episodes import Asked, Episode, EpisodeEngine, Played
from oxrl.runs.waiting import Patience
from oxrl.types import Request
from oxrl.usercode.environments import Step
from oxrl.usercode.messages import Json, completion_of, decode_json, encode_json, fields_of

# Characters of an answer that an error shows, and of these before the first that differs.
SHOWN = 400
SHOWN_BEFORE = 80


class Play(NamedTuple):
    """An episode whose environment has begun: how it began, and the turns so far."""

    opening: Opening
    turns: Sequence[Played]


class Parked(NamedTuple):
    """A state that was read, all by the ids of requests.

    begun: episodes that have a process, in their order. plays: those of them whose environment has
    begun. working: whose environment is asked something, in the order of asking. waiting: that
    have no process yet.
    """

    begun: Sequence[str]
    plays: Mapping[str, Play]
    working: Sequence[str]
    waiting: Sequence[str]


class PlayedAgain(NamedTuple):
    """Answers of a new process of an environment to the turns of a parked episode.

    process: None where none could be started. opening: None where it did not begin. lost: why
    there are no further answers; None: all are there.
    """

    process: EpisodeProcess | None
    opening: Opening | None
    steps: Sequence[Step]
    lost: str | None


class ParkedEpisodes(EpisodeEngine):
    """A ParkingEngine whose responses are episodes; see EpisodeEngine. The engine inside is one."""

    # The round at which the present poll ends, and turns that ended in a round that is not over.
    _until: float = inf
    _ended_turns: Responses = []

    @property
    def _parking(self) -> ParkingEngine:
        return cast(ParkingEngine, self._engine)

    @property
    def round(self) -> int:
        """See ParkingEngine: of the engine inside."""
        return self._parking.round

    @round.setter
    def round(self, value: int) -> None:
        self._parking.round = value

    def poll(self, deadline_s: float, until: float = inf) -> Responses:
        """See ParkingEngine. Environments that are asked in the last round are answered after it:
        what is in flight at a round does not depend on how long they take.
        """
        self._until = until
        return super().poll(deadline_s)

    def _goes_on(self) -> bool:
        return super()._goes_on() and (self._until == inf or self.round < self._until)

    def _next_turns(self, limit_s: float) -> Responses:
        """Let the engine sample; where rounds count, one round, and all turns that end in it.

        What goes in next, and when, so does not depend on which of several samplers is quicker.
        """
        if self._until == inf:
            return super()._next_turns(limit_s)
        end = self.round + 1
        while self.round < end and (found := self._parking.poll(limit_s, end)):
            self._ended_turns = self._ended_turns + found
        turns = self._ended_turns
        self._ended_turns = []
        if len(getattr(self._engine, "members", ())) > 1:
            places = {id: place for place, id in enumerate(self._alive)}
            turns.sort(key=lambda item: places[item.request.id])
        return turns

    def abort(self, ids: Sequence[str]) -> Responses:
        """See EpisodeEngine."""
        gone = set(ids)
        kept = [item for item in self._ended_turns if item.request.id not in gone]
        self._ended_turns = kept
        return super().abort(ids)

    def state(self) -> Json:
        """See ParkingEngine: every turn of the episodes in flight, and what it was answered."""
        over = [*self._finished, *self._ended_turns]
        working = [episode for episode in self._working.values() if episode.wanted]
        found = state_of(over, list(self._alive.values()), working, self._waiting)
        return {**found, "engine": self._parking.state()}

    def restore(self, state: Json, requests: Mapping[str, Request]) -> None:
        """See ParkingEngine. Environments begin anew, and are asked again what they were asked.

        Raises:
            EngineError: as there, or an environment fails.
            EnvironmentDefinitionError: an environment answers otherwise than it did.
        """
        parked = parked_of(state, requests)
        episodes = {id: Episode(request=requests[id]) for id in parked.begun}
        patience = Patience()
        plays = {
            id: self._threads.submit(play_again, self._pool, requests[id], play, patience)
            for id, play in parked.plays.items()
        }
        counted = self._counted
        self._counted = nothing_counted()  # what is gone through again was counted then
        try:
            for id, play in plays.items():
                self._go_through(episodes[id], parked.plays[id], play.result())
            sampling = [id for id in plays if id not in parked.working]
            turns = {id: self._turn_request(episodes[id]) for id in sampling}
            self._parking.restore(state["engine"], turns)
        except BaseException:
            patience.cancel()
            for play in plays.values():
                _end_process(play)
            raise
        finally:
            self._counted = counted
        self._let_go(list(self._alive.values()))
        self._finished = []
        self._ended_turns = []
        self._alive = episodes
        self._sampling = set(turns)
        self._waiting = deque(Episode(request=requests[id]) for id in parked.waiting)
        for id in parked.working:
            self._ask(episodes[id])

    def _go_through(self, episode: Episode, play: Play, again: PlayedAgain) -> None:
        """Bring a new episode to where another one was parked, with an environment that was told
        the same.

        Raises:
            EngineError, EnvironmentDefinitionError: as of `restore`.
        """
        check_same(episode.request, play, again, self._pool.name, self._names)
        episode.process = again.process
        over = None
        try:
            self._open(episode, play.opening)
            for played in play.turns:
                self._write(episode, played.turn)
                if played.step is not None:
                    over = over or self._take_step(episode, played.step)
        except (LostEpisode, TemplateError) as error:
            raise _ended_early(episode.request, str(error)) from error
        if over is not None:
            raise _ended_early(episode.request, over.end)


def _end_process(play: Future[PlayedAgain]) -> None:
    """End the process of an episode that was played again for nothing."""
    if play.exception() is None:  # waits until it is known
        process = play.result().process
        if process is not None:
            process.end()


def _ended_early(request: Request, why: str) -> EngineError:
    """Make the error of a parked episode that is over by the rules of this run."""
    return EngineError(
        f"episode {request.id!r} was parked in the middle, and by the limits of this run it is "
        f"over ({why}): set them to what they were"
    )


def state_of(
    over: Responses,
    begun: Sequence[Episode],
    working: Iterable[Episode],
    waiting: Iterable[Episode],
) -> Json:
    """Return the episodes in flight as JSON has them.

    Args:
        over: what was not polled, for which a state has no room.
        begun: episodes that have a process, or are getting one.
        working: those of them whose environment is asked something, in the order of asking.
        waiting: episodes without a process, in their order.

    Raises:
        EngineError: something is over that was not polled.
    """
    if over:
        raise EngineError(
            f"{len(over)} episodes or turns have finished and were not polled, such as "
            f"{over[0].request.id!r}: poll them before the state is asked for"
        )
    return {
        "episodes": [_line_of(episode) for episode in begun],
        "working": [episode.request.id for episode in working],
        "waiting": [episode.request.id for episode in waiting],
    }


def _line_of(episode: Episode) -> Json:
    """Return an episode that has a process; without an opening it has not begun there."""
    line: Json = {"id": episode.request.id, "opening": None, "turns": []}
    if not episode.tokens:
        return line
    tools = [*episode.conversation.tools]
    line["opening"] = {"messages": [*episode.opening], "tools": tools}
    # A turn that is over never changes, so it is written once.
    known = episode.lines
    known += [_turn_line(one) for one in episode.played[len(known) :] if one.step is not None]
    line["turns"] = [*known, *map(_turn_line, episode.played[len(known) :])]
    return line


def _turn_line(played: Played) -> Json:
    turn = played.turn
    return {
        "segments": [fields_of(segment) for segment in turn.segments],
        "text": turn.text,
        "finish_reason": turn.finish_reason,
        "asked": played.asked._asdict(),
        "step": None if played.step is None else {**vars(played.step)},
    }


def parked_of(state: Json, requests: Mapping[str, Request]) -> Parked:
    """Read a state.

    Args:
        state: as `state_of` returned it, or as JSON brought it back.
        requests: by their ids.

    Raises:
        EngineError: it has episodes that are not in `requests`, or columns that cannot be read.
    """
    lines: list[Json] = state["episodes"]
    begun = [line["id"] for line in lines]
    unknown = [id for id in (*begun, *state["waiting"]) if id not in requests]
    if unknown:
        raise EngineError(
            f"the state of episodes has {len(unknown)} requests that it is not restored with, "
            f"such as {unknown[0]!r}"
        )
    plays: dict[str, Play] = {}
    for line in lines:
        opening = line["opening"]
        if opening is None:
            continue
        try:
            turns = [_played_of(turn) for turn in line["turns"]]
        except ValueError as error:
            raise EngineError(f"the state of episode {line['id']!r}: {error}") from error
        plays[line["id"]] = Play(Opening(opening["messages"], tuple(opening["tools"])), turns)
    return Parked(begun, plays, state["working"], state["waiting"])


def _played_of(line: Json) -> Played:
    fields = dict(line)
    asked = Asked(**fields.pop("asked"))
    step = fields.pop("step")
    turn = completion_of(fields)
    return Played(turn, asked, None if step is None else Step(**step))


def play_again(
    pool: EnvironmentPool, request: Request, play: Play, patience: Patience
) -> PlayedAgain:
    """Begin an episode in a new process, and ask again what its environment has answered.

    Args:
        pool: of the environment.
        request: for the episode.
        play: the episode as it was parked.
        patience: how long to wait, and whom to ask whether to stop.

    Returns:
        What was answered, up to where the environment failed.

    Raises:
        Stopped: the answers are not wanted any more.
    """
    process = None
    opening = None
    lost = None
    steps: list[Step] = []
    try:
        process = pool.open(patience)
        opening = process.reset(request.prompt, request.group_seed, patience)
        for asked in (one.asked for one in play.turns if one.step is not None):
            step = process.step(asked.text, patience, last=asked.last, actions=asked.actions)
            steps.append(step)
    except LostEpisode as error:
        lost = str(error)
    except BaseException:
        if process is not None:
            process.end()
        raise
    return PlayedAgain(process, opening, steps, lost)


def check_same(
    request: Request,
    play: Play,
    again: PlayedAgain,
    environment: str,
    named: Callable[[Sequence[Message]], list[Message]],
) -> None:
    """Make sure that an environment answered as it did before.

    Args:
        request: for the episode.
        play: the episode as it was parked.
        again: what was answered now.
        environment: its name.
        named: gives the images that it shows their names, by which they are compared.

    Raises:
        EnvironmentDefinitionError: it answered otherwise; says where, and both answers.
        EngineError: it failed.
    """
    place = f"draw {request.draw}, sample {request.sample}"
    where = f"environment.name={environment}: episode {request.id!r} ({place}) was parked, and a "
    where += "new process was told its turns again. "
    answers = [one.step for one in play.turns if one.step is not None]
    try:
        if again.opening is not None:
            now = again.opening._replace(messages=named(again.opening.messages))
            _check_answer(f"{where}It began otherwise", play.opening._asdict(), now._asdict())
        for turn, (then, step) in enumerate(zip(answers, again.steps, strict=False), start=1):
            now = {**vars(step), "messages": named(step.messages)}  # pyright: ignore
            _check_answer(f"{where}It answered turn {turn} otherwise", vars(then), now)
    except LostEpisode as error:
        raise EngineError(f"{where}It failed: {error}") from error
    if again.lost is not None:
        failed = f"its turn {len(again.steps) + 1}, which it had answered"
        at = failed if again.opening is not None else "the beginning"
        raise EngineError(f"{where}At {at}, it failed: {again.lost}")


def _check_answer(what: str, then: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Compare two answers as JSON has them."""
    for name, value in then.items():
        before = encode_json(value)
        after = encode_json(now[name])
        if decode_json(before) == decode_json(after):
            continue
        first = len(commonprefix([before, after]))
        raise EnvironmentDefinitionError(
            f"{what}: {name} was {_around(before, first)} and is {_around(after, first)}. At "
            "rollout.max_staleness above 0 what an environment answers may follow from its seed "
            "and the turns alone: make it so, or set rollout.max_staleness=0"
        )


def _around(text: str, place: int) -> str:
    """Cut a long text to what is around a place."""
    begin = max(0, place - SHOWN_BEFORE)
    end = begin + SHOWN
    before = "..." if begin else ""
    after = "..." if end < len(text) else ""
    return f"{before}{text[begin:end]}{after}"
