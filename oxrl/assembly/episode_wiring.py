"""Episodes where a config names an environment; imported only then."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from oxrl.assembly.assembly import Assembly, Limits
from oxrl.config import Config
from oxrl.data.chat import ChatEncoder
from oxrl.data.contexts import contexts_of, shown_turns, system_part
from oxrl.data.messages import Message, images_of
from oxrl.data.turns import TurnEncoder
from oxrl.engines.sample import RolloutEngine
from oxrl.environments.pool import EnvironmentPool, Opening
from oxrl.errors import EnvironmentDefinitionError
from oxrl.rewards.pools import GroupScorer
from oxrl.rollouts.episode_scores import EpisodeScorer
from oxrl.rollouts.episodes import EpisodeEngine, EpisodeLimits, NameImages
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore

UNLIMITED = 2**31

log = logging.getLogger(__name__)


def environment_pool(cfg: Config) -> EnvironmentPool:
    """The processes of the environment that a config names."""
    settings = cfg.environment
    return EnvironmentPool(
        settings.name,
        options=settings.options,
        timeout_s=settings.timeout_s,
        memory_mb=settings.memory_mb,
    )


def image_names(name: str, store: ImageStore | None) -> NameImages:
    """Return the function that gives the images of an environment their names.

    Args:
        name: of the environment.
        store: of the run's images; None: its model is shown none.
    """
    return partial(no_images, name) if store is None else store.adopted


def kept_images(store: ImageStore) -> NameImages:
    """Return the same function of a store, which then keeps all images that are shown.

    Episodes that are over may be trained on by a run that goes on with another process.
    """

    def named(messages: list[Message]) -> list[Message]:
        found = store.adopted(messages)
        store.contents(images_of(found))
        return found

    return named


def no_images(name: str, messages: list[Message]) -> list[Message]:
    """Return an environment's messages to a model that reads text alone.

    Raises:
        ValueError: it shows an image.
    """
    if images_of(messages):
        raise ValueError(
            f"environment.name={name} shows images, and the model reads text alone: set "
            "model.name to one that reads images (docs/vision.md)"
        )
    return messages


def begun(name: str, opened: Opening, named: NameImages) -> Opening:
    """Return how an environment began, with the names of the images that it shows.

    Raises:
        EnvironmentDefinitionError: one of them cannot be shown to the model.
    """
    try:
        return opened._replace(messages=named(opened.messages))
    except ValueError as error:
        raise EnvironmentDefinitionError(f"environment.name={name}: {error}") from error


def try_environment(assembly: Assembly, prompt: Prompt, patience: Patience) -> str:
    """Begin an episode, and say what it has.

    Raises:
        EnvironmentDefinitionError: the environment cannot be loaded, or begins no episode.
    """
    cfg = assembly.cfg
    name = cfg.environment.name
    with closing(environment_pool(cfg)) as pool:
        named = image_names(name, assembly.images)
        opened = begun(name, pool.start(prompt, patience), named)
    shown = images_of(opened.messages)
    told = f" and {len(shown)} images" if shown else ""
    return f"{name}, began an episode with {len(opened.tools)} tools{told}"


def check_template(cfg: Config, encoder: TurnEncoder, opened: Opening) -> None:
    """Find out whether the chat template can write conversations of several turns.

    Raises:
        TemplateError: it cannot, or rewrites turns that are over and may not.
    """
    tools_answer = bool(opened.tools)
    if shown_turns(cfg.rollout.context) == 1:
        for role in ("user", "tool") if tools_answer else ("user",):
            answer = {"role": role, "content": "an answer"}
            encoder.opening([*system_part(opened.messages), answer], opened.tools)
    elif cfg.rollout.rewritten_history == "split":
        for what in encoder.rewritten(tools_answer=tools_answer):
            log.info("the chat template rewrites %s; such a turn ends its row", what)
    else:
        for note in encoder.check(tools_answer=tools_answer):
            log.info("the chat template trims %s; the sampled tokens stay as they are", note)


def play_episodes(
    assembly: Assembly,
    sampler: RolloutEngine,
    scorer: GroupScorer | None,
    limits: Limits,
    first: Prompt,
    stack: ExitStack,
) -> tuple[RolloutEngine, GroupScorer]:
    """An engine whose responses are episodes, and what scores them; see `answering`.

    Raises:
        EnvironmentDefinitionError: the environment cannot be loaded, or begins no episode.
        TemplateError: the chat template rewrites turns that are over.
        Stopped: a signal asked to stop.
    """
    cfg = assembly.cfg
    settings = cfg.environment
    store = assembly.images
    tokenizer = assembly.tokenizer
    chat = ChatEncoder(tokenizer) if store is None else store.encoder(tokenizer)
    named = image_names(settings.name, store)
    actions = assembly.actions
    encoder = TurnEncoder(
        chat,
        limits.stop_token_ids,
        tool_role=settings.tool_role,
        open_turns=actions is not None and actions.ends_by is None,
    )
    pool = environment_pool(cfg)
    stack.callback(pool.close)
    began = pool.start(first, Patience(assembly.stop))
    opened = begun(settings.name, began, named)
    if settings.max_turns > 1:
        check_template(cfg, encoder, opened)
    made = EpisodeEngine
    if cfg.rollout.max_staleness:
        from oxrl.rollouts.parked_episodes import ParkedEpisodes  # episodes stay in flight

        made = ParkedEpisodes
        named = named if store is None else kept_images(store)
    engine = made(
        sampler,
        pool,
        encoder,
        EpisodeLimits(
            max_turns=settings.max_turns,
            max_tokens=cfg.longest_response,
            max_seconds=math.inf if settings.max_seconds is None else settings.max_seconds,
            context=limits.context or UNLIMITED,
            alive=settings.alive,
            overlap=settings.overlap,
        ),
        contexts_of(encoder, cfg.rollout.context, splits=cfg.rollout.rewritten_history == "split"),
        named,
        actions=actions,
    )
    stack.callback(engine.close)
    return engine, EpisodeScorer(scorer)
