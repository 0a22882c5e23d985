"""`play`: an engine of episodes with an environment that is written in the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from oxrl.data.actions import ActionHead
from oxrl.data.chat import ChatEncoder
from oxrl.data.contexts import contexts_of
from oxrl.data.image_store import ImageStore
from oxrl.data.turns import TurnEncoder
from oxrl.environments.pool import EnvironmentPool
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.modelfiles.builtin_vision import vision_tokenizer
from oxrl.rollouts.episodes import EpisodeEngine, EpisodeLimits
from oxrl.rollouts.parked_episodes import ParkedEpisodes
from support.scripted import END, Play


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """`play(source, sampler, ...)` is an engine of episodes with the class `Made` of the source.

    images: of a model that reads some. actions: that turns are.

    parks: whether they can be parked. reads, splits: as of `contexts_of`. template: instead of the tokenizer's own. words: that are
    tokens as well.
    """
    monkeypatch.chdir(tmp_path)
    engines: list[EpisodeEngine] = []

    def play_(
        source: str,
        sampler: Any,
        *,
        alive: int = 8,
        reads: str = "whole",
        splits: bool = False,
        template: str | None = None,
        words: Sequence[str] = (),
        images: ImageStore | None = None,
        actions: ActionHead | None = None,
        parks: bool = False,
        **given: Any,
    ) -> EpisodeEngine:
        (tmp_path / "mine.py").write_text(source)
        limits: dict[str, Any] = {"max_turns": 5, "max_tokens": 1000, "max_seconds": 600.0}
        limits |= {"context": 2048, "overlap": False}
        limits |= {name: given.pop(name) for name in list(given) if name in limits}
        timeout_s = given.pop("timeout_s", 20.0)
        pool = EnvironmentPool("mine.py:Made", options=given, timeout_s=timeout_s, memory_mb=0)
        tokenizer = builtin_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.add_tokens(list(words))
        chat = ChatEncoder(tokenizer) if images is None else images.encoder(vision_tokenizer())
        encoder = TurnEncoder(
            chat, (END,), open_turns=actions is not None and actions.ends_by is None
        )
        contexts = contexts_of(encoder, reads, splits=splits)
        limited = EpisodeLimits(alive=alive, **limits)
        named: Any = list if images is None else images.adopted
        made = ParkedEpisodes if parks else EpisodeEngine
        engine = made(sampler, pool, encoder, limited, contexts, named, actions=actions)
        engines.append(engine)
        return engine

    yield play_
    for engine in engines:
        engine.close()
