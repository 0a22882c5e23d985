"""`train.share_prefix: auto`: whether prompts are read once is settled when a run begins.

What is decided depends on the configuration and on the kind of model alone, not on the machine, so
that two runs decide alike; it is noted, and a run that goes on or is replayed does as noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, PreTrainedConfig

from oxrl.assembly.assembly import DTYPES
from oxrl.config import Config
from oxrl.config.checks.share_prefix import FIELD, obstacles, open_choice
from oxrl.engines.sample.choice import attends_to_everything
from oxrl.modelfiles.builtin import builtin_policy, is_builtin
from oxrl.modelfiles.folder import adapter_base
from oxrl.models.load import named_in_errors
from oxrl.models.shared_prefix import SharingRefused
from oxrl.models.sharing_trial import try_sharing
from oxrl.models.trial_cache import remembered_trial
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.choices import Choice, note_choice, noted_choice

if TYPE_CHECKING:
    from oxrl.recipes.session import Session


def decided(cfg: Config) -> Choice:
    """What `train.share_prefix: auto` comes to, and why.

    Args:
        cfg: of a run that begins.

    Raises:
        DataError: the model's configuration cannot be read.
    """
    for obstacle in obstacles(cfg):
        return Choice(False, f"reading it once {obstacle.why}")
    if cfg.recipe == "rl" and cfg.rollout.n_samples == 1:
        return Choice(False, "a prompt has one response (rollout.n_samples)")
    config = _model_config(cfg.model.name, cfg.model.revision, cfg.model.trust_remote_code)
    if not attends_to_everything(config, cfg.model.max_length):
        kind = config.get_text_config().model_type
        return Choice(False, f"not every layer of {kind} is known to attend to all tokens before")
    try:
        difference = _tried(
            cfg.model.name, cfg.model.revision, cfg.model.trust_remote_code, cfg.model.dtype
        )
    except SharingRefused as refusal:
        return Choice(False, _reason(refusal))
    found = f"a small model of its kind learns the same from it, to {difference:.0e}"
    return Choice(True, found)


@functools.cache
def _model_config(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    base = adapter_base(name)
    if base is not None:
        return _model_config(base, None, trust_remote_code)
    if is_builtin(name):
        return builtin_policy(name, seed=0).config
    with named_in_errors("model", name):
        return AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )


@functools.cache
def _tried(name: str, revision: str | None, trust_remote_code: bool, dtype: str) -> float:
    config = _model_config(name, revision, trust_remote_code)
    if trust_remote_code:
        return try_sharing(config, DTYPES[dtype], trust_remote_code=trust_remote_code)
    return remembered_trial(config, DTYPES[dtype])


def settled(cfg: Config, choice: Choice) -> Config:
    """A configuration whose auto is what was chosen."""
    train = cfg.train.model_copy(update={"share_prefix": bool(choice.value)})
    return cfg.model_copy(update={"train": train})


def as_noted(cfg: Config, run: Path) -> Config:
    """The configuration of a replay: as the run in a directory was carried out."""
    if not open_choice(cfg):
        return cfg
    return settled(cfg, noted_choice(run, FIELD) or Choice(False, "nothing was noted"))


def told(choice: Choice) -> str:
    """A choice in words."""
    how = "once for all of its responses" if choice.value else "anew for each response"
    return f"each prompt is read {how}: {choice.why} ({FIELD}: auto)"


def train_settled(loop: Callable[[Config, Session], None], cfg: Config, session: Session) -> None:
    """Run a loop with prompts read as was noted, or as is decided now, noted and said.

    Where the weights themselves turn out to be no good for it, the loop begins anew without.

    Args:
        loop: of the recipe.
        cfg: of the run.
        session: of the run, on its only process.
    """
    if not open_choice(cfg):
        loop(cfg, session)
        return
    choice = _choice_of(cfg, session)
    try:
        loop(settled(cfg, choice), session)
    except SharingRefused as refusal:
        if list_checkpoints(session.run.checkpoints):
            raise
        # Raised before the first checkpoint: nothing was computed with prompts read once.
        choice = Choice(False, _reason(refusal))
        note_choice(session.run.path, FIELD, choice)
        session.message(told(choice))
        session.pool = None
        loop(settled(cfg, choice), session)


def _reason(refusal: SharingRefused) -> str:
    """Without what to do: auto has done it."""
    return str(refusal).removeprefix(f"{FIELD}: ").removesuffix("; set it to false")


def _choice_of(cfg: Config, session: Session) -> Choice:
    """What was noted, what the run was begun with, or what is decided now."""
    run = session.run
    choice = noted_choice(run.path, FIELD)
    if choice is None:
        if run.resuming and list_checkpoints(run.checkpoints):
            before, _ = run.changes.get(FIELD, (None, None))
            choice = Choice(before is True, "so it was when the run began")
        else:
            choice = decided(cfg)
        note_choice(run.path, FIELD, choice)
        session.message(told(choice))
    return choice
