"""Samples of another run to train on: they are there, and they are what this run would train on."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.checks.base import Problems, at
from oxrl.config.reads import dump_config, resume_rules
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.flat_config import differences, flatten_config, written_config
from oxrl.runs.directory import ROLLOUTS, WHOLE_SAMPLES
from oxrl.runs.files import Json

FIELD = "rollout.from_samples"
# What decides about samples: their prompts, tokens, scores, and how many make up a step.
PINNED = (
    "model.name",
    "model.revision",
    "model.chat_template",
    "data.",
    "reward.",
    "environment.",
    "action.",
    "rollout.",
    "train.epochs",
    "train.minibatches",
)
# Among those, what does not, beside what may change when a run is resumed.
FREE = {
    FIELD,
    "data.eval",
    "data.eval_rows",
    "rollout.eval_samples",
    "rollout.eval_temperature",
}


def check_stored_samples(cfg: Config) -> Problems:
    """The samples of `rollout.from_samples`, and what else asks for samples or for none."""
    stored = cfg.rollout.from_samples
    if stored is None:
        return
    if cfg.run.only is not None:
        rule = f"samples, and {FIELD} (--from-samples) samples nothing: leave one of them out"
        yield at("run.only", rule, FIELD)
    folder = Path(stored)
    try:
        recorded = written_config((folder / "config.yaml").read_bytes())
    except OSError:
        rule = "is no run directory: it has no config.yaml; name that of a run, as runs/my-run"
        yield at(FIELD, rule)
        return
    except ValueError as error:
        yield at(FIELD, f"has a config.yaml that no run wrote: {error}")
        return
    steps = stored_steps(folder)
    if not steps:
        yield at(FIELD, _why_no_samples(recorded))
        return
    yield from _pinned(cfg, recorded)
    most = steps[-1] + cfg.train.updates
    if cfg.run.steps > most:
        rule = f"is more than the samples in {stored} are for: set it to {most} or less"
        yield at("run.steps", rule, FIELD)


def stored_steps(folder: Path) -> list[int]:
    """Optimizer steps that were applied when the samples kept in a run directory were drawn."""
    found: list[int] = []
    for path in (folder / ROLLOUTS).glob("*"):
        match = WHOLE_SAMPLES.fullmatch(path.name)
        if match:
            found.append(int(match[1]))
    return sorted(found)


def _why_no_samples(recorded: Json) -> str:
    """Say why a run has no samples to train on."""
    again = "run it again with run.record=tokens; --rollout-only is enough of it"
    if "rollout.n_samples" not in recorded:
        return "is a run that sampled nothing: name one of reinforcement learning"
    if recorded.get("run.record") != "tokens":
        return f"recorded text, from which the tokens that were sampled cannot be had: {again}"
    return f"holds no samples in {ROLLOUTS}/: {again}"


def _pinned(cfg: Config, recorded: Json) -> Problems:
    """Every field that decides about samples and is not as it was when they were drawn."""
    here = flatten_config(dump_config(cfg))
    free = FREE | resume_rules().keys()
    for path, (then, now) in differences(recorded, here).items():
        if path.startswith(PINNED) and path not in free:
            rule = f"was {then!r} when the samples of {FIELD} were drawn: set it to that"
            yield Problem(path, rule, now, also=(FIELD,))
