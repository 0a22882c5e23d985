"""Samples that are kept whole, and a source that hands them over again instead of sampling.

`rollouts/step_<8 digits>.samples.jsonl`, with `run.record: tokens`: what a rollout step handed to
training after so many optimizer steps, nothing left out. The first line says of the step what is
not in its samples; every other one is a prompt with the responses to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from oxrl.errors import RunDirectoryError
from oxrl.rollouts.episode_scores import TURNS, counter, nothing_counted
from oxrl.rollouts.rounds import choose_groups
from oxrl.rollouts.sync import RolloutParts, RolloutSource, RolloutStep, SyncRollouts
from oxrl.runs.files import make_folder, write_atomically
from oxrl.tables.columns import NOTHING_MORE, Columns
from oxrl.types import Metrics, Rollout, Rollouts, Score
from oxrl.usercode.messages import Json, completion_of, decode, encode, prompt_of


def whole_samples(folder: Path, step: int) -> Path:
    """The file of what was drawn after `step` optimizer steps."""
    return folder / f"step_{step:08d}.samples.jsonl"


class KeepingSource:
    """A RolloutSource that keeps everything that another one hands over.

    Args:
        source: the other one.
        folder: where the files go.
    """

    def __init__(self, source: RolloutSource, folder: Path) -> None:
        self._source = source
        self._folder = folder

    @property
    def in_flight(self) -> int:
        return self._source.in_flight

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource."""
        found = self._source.next(draw, step=step)
        make_folder(self._folder)
        content = b"".join(map(encode, written(found)))
        write_atomically(whole_samples(self._folder, step), content)
        return found

    def lend(self, step: int) -> None:
        self._source.lend(step)

    def close(self) -> None:
        self._source.close()


class StoredRollouts(SyncRollouts):
    """A RolloutSource that reads what another run kept, and has nothing sampled.

    Args:
        folder: `rollouts` of that run.
        parts: of this run; which groups are trained on is for its algorithm to say.
    """

    def __init__(self, folder: Path, parts: RolloutParts) -> None:
        super().__init__(parts)
        self._folder = folder

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource; nothing is delivered, as nobody asks the sampler.

        Raises:
            RunDirectoryError: the samples of the step are not there, or not what was written, or
                a column that this run records is not there.
        """
        path = whole_samples(self._folder, step)
        with self.parts.clock.phase("time/rollout_s"):
            found = read_step(path, self.parts.columns)
        found.dispatched = len(found.rollouts) + len(found.baselines)
        found.sampler = episode_counts([*found.rollouts, *found.baselines])
        found.compared_parts = self.parts.compared_parts
        requests = self.parts.requests
        if requests.per_prompt > requests.samples and not found.baselines:
            raise RunDirectoryError(
                f"{path} has no greedy response to any prompt, and train.alg_name compares with "
                "one: record samples with that algorithm (--rollout-only run.record=tokens)"
            )
        choose_groups(found, self.parts)
        # An evaluation may have had weights delivered.
        found.delivered = self.parts.delivery.remember(found.rollouts)
        return found


def episode_counts(rollouts: Rollouts) -> Metrics:
    """Count of episodes, from their ends, what is counted when they are played."""
    episodes = [rollout.completion for rollout in rollouts if rollout.completion.end is not None]
    if not episodes:
        return {}
    found = nothing_counted()
    for episode in episodes:
        found[counter(str(episode.end))] += 1
    found[TURNS] = float(sum(len(episode.turns) for episode in episodes))
    return found


def written(step: RolloutStep) -> Iterator[Json]:
    """The lines of a file."""
    yield {"step": step.step, "start": step.start, "end": step.end, "rounds": step.rounds}
    for baseline, rollouts in ((False, step.rollouts), (True, step.baselines)):
        for draw, group in groupby(rollouts, key=_draw):
            responses = list(group)
            yield {
                "draw": draw,
                "baseline": baseline,
                "prompt": responses[0].prompt,
                "responses": [_response(rollout) for rollout in responses],
            }


def _draw(rollout: Rollout) -> int:
    return rollout.group_id


def _response(rollout: Rollout) -> Json:
    return {
        "sample": rollout.sample,
        "seed": rollout.seed,
        "completion": rollout.completion,
        "score": {name: value for name, value in vars(rollout.score).items() if name != "answer"},
    }


def read_step(path: Path, columns: Columns = NOTHING_MORE) -> RolloutStep:
    """Read what `written` gave; which groups are trained on is left open.

    Args:
        path: of the file.
        columns: that have to be there of every token that was sampled.

    Raises:
        RunDirectoryError: it is not there, or not what was written.
    """
    number = 1
    try:
        lines = path.read_bytes().splitlines()
        step = RolloutStep(**decode(lines[0]))
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 - for messages
            group = decode(line)
            place = step.baselines if group["baseline"] else step.rollouts
            place += rollouts_of(group, columns)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        what = f"{path}, line {number}: not samples as runs write them ({problem})"
        raise RunDirectoryError(what) from error
    return step


def rollouts_of(group: Json, columns: Columns) -> Iterator[Rollout]:
    """The responses to one prompt, from its line as `written` gives it.

    Args:
        group: the line's fields.
        columns: that have to be there of every token that was sampled.
    """
    prompt = prompt_of(group["prompt"])
    for response in group["responses"]:
        yield Rollout(
            prompt=prompt,
            completion=completion_of(response["completion"], columns),
            score=score_of(response["score"]),
            group_id=group["draw"],
            sample=response["sample"],
            seed=response["seed"],
        )


def score_of(fields: Json) -> Score:
    """A score, from its fields as JSON has them."""
    steps = [(end, share) for end, share in fields["steps"]]
    places = {int(place): reward for place, reward in fields["token_rewards"].items()}
    return Score(**{**fields, "steps": tuple(steps), "token_rewards": places})
