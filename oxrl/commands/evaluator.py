"""A model as a run evaluates it: what commands of packages ask it with, and measure it by.

They see no configuration: what they need of one has a name here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from oxrl.assembly.answered import sampling_from
from oxrl.assembly.assembly import Assembly
from oxrl.checkpoint.targets import find_target
from oxrl.commands.evaluate import (
    answers_to,
    check_samples_differ,
    evaluation_config,
    held_out_file,
    is_config,
)
from oxrl.config import Config
from oxrl.config.load_evaluation import load_evaluation_config
from oxrl.data.chat import reply_text
from oxrl.data.rows import Record, in_our_words, read_rows
from oxrl.engines.sample.sampler import generate
from oxrl.errors import ConfigError
from oxrl.modelfiles.hub import locate
from oxrl.recipes.scored_answers import evaluation_seed
from oxrl.rollouts.sync import make_requests, score_groups
from oxrl.runs.checkpoints import is_run
from oxrl.runs.pins import DATA_FILE, read_noted
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Request, Rollout

# Fields that two models must have alike for their rewards to measure the same.
MEASURED = {
    "reward": ("name", "parts", "options"),
    "environment": ("name", "options", "max_turns", "tool_role"),
    "rollout": ("max_tokens", "top_p", "top_k", "min_p", "context"),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings with which a file of prompts is asked.

    path: of the file. samples: responses per prompt. temperature, seed: of all of them; evaluations
    with the same seed draw with the same noise.
    """

    path: str
    samples: int
    temperature: float
    seed: int


class Evaluator:
    """A model, and how it is evaluated.

    Args:
        name: by which it was asked for.
        cfg: of the evaluation.
        run: that the model belongs to.
    """

    def __init__(self, name: str, cfg: Config, run: Path | None) -> None:
        self.name = name
        self._cfg = cfg
        self._run = run

    @property
    def is_scored(self) -> bool:
        """True if a reward or an environment scores what it answers."""
        return self._cfg.reward.exists or self.plays

    @property
    def plays(self) -> bool:
        """True if it answers in episodes of an environment."""
        return bool(self._cfg.environment.name)

    @property
    def measured(self) -> Mapping[str, object]:
        """The fields that say what its rewards measure, by their names."""
        found: dict[str, object] = {}
        for section, names in MEASURED.items():
            values = getattr(self._cfg, section).model_dump()
            found |= {f"{section}.{name}": values[name] for name in names}
        return found

    def asked(self, *, samples: int | None = None, temperature: float | None = None) -> Asked:
        """Its own held-out prompts, as its run asks them.

        Args:
            samples, temperature: in place of the run's.

        Raises:
            ConfigError: samples of one prompt would all be the same one.
        """
        rollout = self._cfg.rollout
        asked = Asked(
            path=held_out_file(self._cfg, self._run),
            samples=samples or rollout.eval_samples,
            temperature=rollout.eval_temperature if temperature is None else temperature,
            seed=self._cfg.run.seed,
        )
        check_samples_differ(self._cfg, asked.samples, asked.temperature)
        return asked

    def answer(self, asked: Asked) -> list[Rollout]:
        """Answer the prompts of a file; `asked.samples` scored ones per prompt are in a row."""
        return answers_to(
            Assembly(self._cfg),
            asked.path,
            samples=asked.samples,
            temperature=asked.temperature,
            seed=evaluation_seed(asked.seed),
        )

    def answer_within(self, asked: Asked, limits: Sequence[int]) -> dict[int, list[Rollout]]:
        """Answer the prompts of a file once, and score the answers as they are within each limit.

        Args:
            asked: how.
            limits: most tokens of a response; the run's own `rollout.max_tokens` is no less.

        Returns:
            Scored responses by limit, `asked.samples` in a row per prompt.
        """
        assembly = Assembly(self._cfg)
        with sampling_from(
            assembly,
            asked.path,
            held_out=True,
            samples=asked.samples,
            temperature=asked.temperature,
            seed=evaluation_seed(asked.seed),
        ) as (prompts, scored):
            requests = make_requests(
                list(enumerate(prompts.in_order())),
                samples=asked.samples,
                sampling=scored.sampling,
                run_seed=scored.seed,
            )
            completions = generate(
                scored.sampler, requests, deadline_s=scored.deadline_s, stop=scored.stop
            )
            answers = list(zip(requests, completions, strict=True))
            found: dict[int, list[Rollout]] = {}
            for limit in limits:
                within = [
                    (request, _cut(assembly, request, one, limit)) for request, one in answers
                ]
                patience = Patience(scored.stop, scored.deadline_s)
                found[limit] = score_groups(scored.scorer, within, patience, samples=asked.samples)
        return found

    @property
    def training_files(self) -> Sequence[str]:
        """The files that the run trains on."""
        return self._cfg.data.train_files

    @property
    def held_out(self) -> str | None:
        """`data.eval`."""
        return self._cfg.data.eval

    def rows(self, names: Iterable[str]) -> Iterator[Record]:
        """The rows of files, as the run found them, under our names.

        Args:
            names: of the files.
        """
        noted = {} if self._run is None else read_noted(self._run, DATA_FILE)
        for name in names:
            for record in read_rows(locate(name, noted.get(name))):
                yield in_our_words(record, self._cfg.data.columns)


def _cut(assembly: Assembly, request: Request, completion: Completion, limit: int) -> Completion:
    """A response as it would be if at most `limit` tokens had been allowed."""
    [segment] = completion.segments
    if len(segment.token_ids) <= limit:
        return completion
    kept = replace(segment, **vars(segment.first(limit)))
    text = reply_text(assembly.tokenizer, kept.token_ids, request.sampling.stop_token_ids)
    return replace(completion, segments=(kept,), text=text, finish_reason="length")


def open_evaluators(
    names: Sequence[str], fields: Sequence[str], pins: ExitStack
) -> list[Evaluator]:
    """Models, each as its run evaluates it.

    A model of no run, and one of a run that has no reward, is evaluated as the first one that has.

    Args:
        names: runs, checkpoints, models or configurations.
        fields: that are set in every configuration, "section.field=value".
        pins: until it is closed, runs that go on do not remove the checkpoints.

    Raises:
        ConfigError: nothing scores what they answer, or a configuration cannot be evaluated.
    """
    found: dict[str, Evaluator] = {}
    for name in names:
        if is_config(name) or find_target(name, pins).run is not None:
            one = Evaluator(name, *evaluation_config(name, fields, pins))
            if one.is_scored:
                found[name] = one
    first = next(iter(found), None)
    for name in names:
        if name in found:
            continue
        own = () if first is None else (f"model.name={json.dumps(find_target(name, pins).model)}",)
        found[name] = Evaluator(name, *evaluation_config(first or name, (*own, *fields), pins))
        if not found[name].is_scored:
            raise ConfigError(
                f"reward.name: nothing scores what {name} answers; write reward.name=NAME, or name "
                "a run that has a reward beside it"
            )
    return [found[name] for name in names]


def open_configured(target: str | Path, fields: Sequence[str]) -> Evaluator:
    """A run, or the file of a configuration, without any of its checkpoints.

    Args:
        target: of the two.
        fields: that are set, "section.field=value".

    Raises:
        ConfigError: it is none of the two.
    """
    folder = Path(target)
    run = folder if is_run(folder) else None
    config = folder if run is None else folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{target} is no run and no configuration: name one whose data are read")
    return Evaluator(str(target), load_evaluation_config(config, fields), run)
