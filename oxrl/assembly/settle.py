"""The decisions that a configuration leaves open, taken and noted when a run begins.

Inputs are pinned, and what says auto is decided: how many tokens are read at once, and whether the
prompt of a group is read once. Both depend on the configuration and on the kind of model alone, not
on how fast the machine is, so that two runs decide alike. After `settle` nobody changes a
configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from oxrl.assembly import micro_batch_rules
from oxrl.assembly.assembly import DTYPES, Assembly
from oxrl.assembly.micro_batch_rules import ByRule, read_at_once, tokens_by_rule
from oxrl.assembly.pins import with_pinned_inputs
from oxrl.config import Config
from oxrl.config.conditions import SHARING, obstacles, open_choice
from oxrl.engines.sample.local import attends_to_everything
from oxrl.models.load import config_of_model
from oxrl.models.self_checks import remembered_trial, try_sharing
from oxrl.models.shared_prefix import SharingRefused
from oxrl.recipes.session import Session
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.files import Json
from oxrl.runs.pins import Choice, note_choice, noted_choice
from oxrl.runs.ranks import Ranks

# Why something was noted of a run that did not begin with auto.
AS_BEFORE = "so it was when the run began"
ROUNDS = "rollout.rounds"
# On a rank that is told what the first one chose.
NOT_SAID = Choice(0, "")


def settle(cfg: Config, session: Session) -> Config:
    """The configuration of a run with nothing left open: as was noted, or as is decided now.

    Args:
        cfg: of a run that begins or goes on.
        session: of the run; what it has noted is looked at on the first rank, the others do alike.
    """
    ranks = session.ranks
    cfg = with_pinned_inputs(cfg, session.run.noted if ranks.first else {}, ranks)
    if cfg.train.micro_batch_tokens == "auto":
        cut = NOT_SAID
        if ranks.first:
            cut = _choose(
                session, cfg, micro_batch_rules.FIELD, decide_micro_batch, describe_micro_batch
            )
        cfg = _with_micro_batch(cfg, ranks.agree(cut))
    if ranks.first and open_choice(cfg):
        sharing = _choose(session, cfg, SHARING, decide_sharing, describe_sharing)
        cfg = _with_train(cfg, share_prefix=bool(sharing.value))
    if ranks.first:
        cfg = with_noted_rounds(cfg, session.run.path)
        if cfg.run.exact:
            try_exact(cfg)
    return without_idle_actors(cfg)


def settle_as_noted(cfg: Config, noted: Json, ranks: Ranks, run: Path) -> Config:
    """The configuration of a replay: as the run in a directory was carried out.

    Args:
        noted: what the review of the inputs found.
        ranks: that train.
        run: the directory.
    """
    cfg = with_pinned_inputs(cfg, noted, ranks)
    if open_choice(cfg):
        sharing = noted_choice(run, SHARING) or Choice(False, "nothing was noted")
        cfg = _with_train(cfg, share_prefix=bool(sharing.value))
    cut = noted_choice(run, micro_batch_rules.FIELD)
    if cfg.train.micro_batch_tokens == "auto" and cut is not None:
        cfg = _with_micro_batch(cfg, cut)
    return without_idle_actors(with_noted_rounds(cfg, run))


def with_noted_rounds(cfg: Config, run: Path) -> Config:
    """The configuration with the rounds that an earlier start of the run in a directory found."""
    if not cfg.rollout.max_staleness or cfg.rollout.rounds != "auto":
        return cfg
    found = noted_choice(run, ROUNDS)
    if found is None:
        return cfg
    rollout = cfg.rollout.model_copy(update={"rounds": found.value})
    return cfg.model_copy(update={"rollout": rollout})


def without_sharing(cfg: Config, session: Session, refusal: SharingRefused) -> Config:
    """The configuration of a run whose weights turned out to be no good for prompts read once.

    Args:
        cfg: settled.
        session: of the run, which notes it.
        refusal: says why.

    Raises:
        SharingRefused: something was computed with prompts read once.
    """
    if list_checkpoints(session.run.checkpoints):
        raise refusal
    choice = Choice(False, _reason(refusal))
    note_choice(session.run.path, SHARING, choice)
    session.message(describe_sharing(choice))
    session.pool = None
    return _with_train(cfg, share_prefix=False)


def without_idle_actors(cfg: Config) -> Config:
    """A configuration without the actors that a run does without: of stored samples those that
    sample, of `run.only: rollouts` those that train.
    """
    if cfg.run.only is not None:
        return _with_train(cfg, backend="local")
    if cfg.rollout.from_samples is None:
        return cfg
    sampling = cfg.inference_engine.model_copy(
        update={"name": "local", "actors": 0, "placement": "separate"}
    )
    return cfg.model_copy(update={"inference_engine": sampling})


def _choose(
    session: Session,
    cfg: Config,
    field: str,
    decide: Callable[[Config], Choice],
    describe: Callable[[Choice], str],
) -> Choice:
    # What was noted, what the run was begun with, or what is decided now.
    run = session.run
    choice = noted_choice(run.path, field)
    if choice is not None:
        return choice
    before, _ = run.changes.get(field, ("auto", "auto"))
    if field == SHARING and before is None:  # it began when every prompt was read anew
        before = False
    if isinstance(before, int) and run.resuming and list_checkpoints(run.checkpoints):
        choice = Choice(before, AS_BEFORE)
    else:
        choice = decide(cfg)
    note_choice(run.path, field, choice)
    session.message(describe(choice))
    return choice


def _with_train(cfg: Config, **changed: object) -> Config:
    return cfg.model_copy(update={"train": cfg.train.model_copy(update=changed)})


def _with_micro_batch(cfg: Config, choice: Choice) -> Config:
    # A run that began with a number is cut as it was then.
    number = choice.value if choice.why == AS_BEFORE else ByRule(choice.value)
    return _with_train(cfg, micro_batch_tokens=number)


def decide_micro_batch(cfg: Config) -> Choice:
    """Decide the value of `train.micro_batch_tokens: auto`, and why."""
    return Choice(*tokens_by_rule(cfg, on_cpu=Assembly(cfg).device_type == "cpu"))


def describe_micro_batch(choice: Choice) -> str:
    """A choice in words."""
    origin = f"{micro_batch_rules.FIELD}: auto, {choice.why}"
    return f"micro-batch: {read_at_once(choice.value, origin)}"


def decide_sharing(cfg: Config) -> Choice:
    """Decide the value of `train.share_prefix: auto`, and why.

    Args:
        cfg: of a run that begins.

    Raises:
        DataError: the model's configuration cannot be read.
    """
    for why, _, _ in obstacles(cfg):
        return Choice(False, f"sharing {why}")
    if cfg.recipe == "rl" and cfg.rollout.n_samples == 1:
        return Choice(False, "each prompt has one response (rollout.n_samples)")
    config = config_of_model(cfg.model.name, cfg.model.revision, cfg.model.trust_remote_code)
    if not attends_to_everything(config, cfg.model.max_length):
        kind = config.get_text_config().model_type
        return Choice(False, f"not every layer of {kind} is known to have full attention")
    try:
        difference = _tried(
            cfg.model.name, cfg.model.revision, cfg.model.trust_remote_code, cfg.model.dtype
        )
    except SharingRefused as refusal:
        return Choice(False, _reason(refusal))
    return Choice(True, f"on a tiny copy of this model gradients differ by {difference:.0e}")


def try_exact(cfg: Config) -> None:
    """Have a small model of the run's kind sampled from and scored, with the run's threads.

    Args:
        cfg: of a run that begins or goes on.

    Raises:
        ConfigError: sampler and trainer differ in a bit, or part of the model has no exact form.
        DataError: the model's configuration cannot be read.
    """
    _ = Assembly(cfg).device  # sets the threads; it is the CPU, or there would be no contract
    asked = cfg.model
    temperature = cfg.rollout.temperature
    share = decide_sharing(cfg).value if open_choice(cfg) else cfg.train.share_prefix
    _tried_exact(asked.name, asked.revision, asked.trust_remote_code, bool(share), temperature)


@functools.cache
def _tried_exact(
    name: str, revision: str | None, trust_remote_code: bool, share_prefix: bool, temperature: float
) -> None:
    from oxrl.engines.exact_check import check_exact  # most runs are as fast as they can be

    check_exact(
        config_of_model(name, revision, trust_remote_code),
        temperature=temperature,
        share_prefix=share_prefix,
        trust_remote_code=trust_remote_code,
    )


def try_adapter(cfg: Config) -> None:
    """Put the adapter of a run on a model of text without weights.

    Raises:
        ConfigError: the model has no layers for it.
        DataError: the model's configuration cannot be read.
    """
    asked = cfg.model
    config = config_of_model(asked.name, asked.revision, asked.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=asked.trust_remote_code)
    Assembly(cfg).adapted(model)


@functools.cache
def _tried(name: str, revision: str | None, trust_remote_code: bool, dtype: str) -> float:
    config = config_of_model(name, revision, trust_remote_code)
    if trust_remote_code:
        return try_sharing(config, DTYPES[dtype], trust_remote_code=trust_remote_code)
    return remembered_trial(config, DTYPES[dtype])


def describe_sharing(choice: Choice) -> str:
    """A choice in words."""
    return f"share_prefix: {'on' if choice.value else 'off'} (auto); {choice.why}"


def _reason(refusal: SharingRefused) -> str:
    """Without what to do: auto has done it."""
    return str(refusal).removeprefix(f"{SHARING}: ").removesuffix("; set it to false")
