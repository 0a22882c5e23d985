"""Samples that are drawn otherwise than at once, in one turn and as text: ahead of the update, in
episodes of an environment, as actions, or by another run.
"""

from __future__ import annotations

from pathlib import Path

from oxrl.config.reads import dump_config, resume_rules
from oxrl.config.schema import Config
from oxrl.config.source import Problem, Problems, at
from oxrl.flat_config import differences, flatten_config, written_config
from oxrl.runs.directory import ROLLOUTS, WHOLE_SAMPLES
from oxrl.runs.files import Json
from oxrl.tables.user_code import ENVIRONMENT

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


def check_staleness(cfg: Config) -> Problems:
    """Sampling that goes on while a batch trains: what it takes."""
    if not cfg.rollout.max_staleness:
        return
    from oxrl.config.checks.continuous import continuous_problems  # most runs sample, then train

    yield from continuous_problems(cfg)


# --- Episodes and actions.
def check_environment(cfg: Config) -> Problems:
    """It is built in, or a class that its file defines, and its limits leave room for a turn."""
    name = cfg.environment.name
    if not name:
        return
    from oxrl.usercode.locate import place_of  # few runs have one

    try:
        place_of(ENVIRONMENT, name)
    except ValueError as error:
        yield at(ENVIRONMENT.field, str(error))
    if name == "agent" and not cfg.environment.options.get("command"):
        yield at(
            "environment.options",
            "environment.name=agent needs the program: {command: python my_agent.py}",
            "environment.name",
        )
    most = cfg.rollout.max_episode_tokens
    if most is not None and most < cfg.rollout.max_tokens:
        yield at(
            "rollout.max_episode_tokens",
            f"is less than rollout.max_tokens={cfg.rollout.max_tokens}, which bounds one turn: "
            "lower that, or raise this",
            "rollout.max_tokens",
        )


def check_action(cfg: Config) -> Problems:
    """The actions can be told apart, their numbers have bounds, and there is who answers them."""
    action = cfg.action
    if not action.exists:
        if action.choices:
            yield at("action.choices", "names no action, such as up,down,left,right")
        return
    from oxrl.config.checks.actions import action_problems  # of robots and games

    yield from action_problems(cfg)


# --- Samples of another run.
def check_stored_samples(cfg: Config) -> Problems:
    """The samples of `rollout.from_samples`, and what else asks for samples or for none."""
    stored = cfg.rollout.from_samples
    if stored is None:
        return
    if cfg.run.only is not None:
        yield at(
            "run.only",
            f"samples, and {FIELD} (--from-samples) samples nothing: leave one of them out",
            FIELD,
        )
    folder = Path(stored)
    try:
        recorded = written_config((folder / "config.yaml").read_bytes())
    except OSError:
        yield at(
            FIELD, "is no run directory: it has no config.yaml; name that of a run, as runs/my-run"
        )
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
        yield at(
            "run.steps",
            f"is more than the samples in {stored} are for: set it to {most} or less",
            FIELD,
        )


def stored_steps(folder: Path) -> list[int]:
    """Optimizer steps that were applied when the samples kept in a run directory were drawn."""
    found = [WHOLE_SAMPLES.fullmatch(path.name) for path in (folder / ROLLOUTS).glob("*")]
    return sorted(int(match[1]) for match in found if match)


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
            yield Problem(
                path,
                f"was {then!r} when the samples of {FIELD} were drawn: set it to that",
                now,
                also=(FIELD,),
            )
