"""The features that row, user and configuration add to the loop. Most runs have none."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from oxrl.assembly.assembly import Assembly, Engines
from oxrl.assembly.reward_pools import build_other_reward
from oxrl.config.conditions import has_teacher
from oxrl.data.conversations import ConversationDataset
from oxrl.engines.train import TrainEngine
from oxrl.recipes.features.base import Feature, FeatureInputs, RowsAt
from oxrl.recipes.features.episodes import Episodes
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.features.own_feature import OwnFeature
from oxrl.recipes.features.reward_scale import RewardScale
from oxrl.recipes.features.same_bits import SameBits
from oxrl.recipes.features.token_record import TokenRecord
from oxrl.recipes.supervised import to_supervised_batch
from oxrl.rewards.pools import SinglePool
from oxrl.runs.directory import ROLLOUTS
from oxrl.runs.waiting import Patience
from oxrl.types import Group, Scores, SupervisedBatch

# Fields of conversations.
READ = ("messages", "prompt", "completion", "tools")


def features_of(assembly: Assembly, engines: Engines, stack: ExitStack) -> Iterator[Feature]:
    """Every feature of a run, in the order in which their hooks are called.

    Args:
        stack: closes what they open.
    """
    cfg = assembly.cfg
    train = cfg.train
    given = feature_inputs(assembly, engines.trainers, stack)
    given = replace(given, tokenizer=assembly.tokenizer, directory=cfg.run.directory)
    if has_teacher(cfg):
        from oxrl.assembly.teachers import build_teachers  # most rows have none

        teachers = build_teachers(assembly, engines.trainers, stack)
        given = replace(given, teachers=teachers)
    if cfg.reward.bound is not None:
        yield RewardScale(cfg.reward.normalize, cfg.reward.bound)
    yield from build_features(given)
    for name, numbers in train.features.items():
        own = OwnFeature(name, given, numbers)
        if train.backend != "local":
            pickle.dumps(own)  # it is sent to other processes, so that has to be possible
        yield own
    if cfg.run.record == "tokens":
        yield TokenRecord(cfg.run.directory / ROLLOUTS)
    if cfg.run.exact and cfg.rollout.from_samples is None:
        yield SameBits()
    if cfg.environment.name:
        # Last: what it hands on is cut into rows.
        yield Episodes()


def feature_inputs(
    assembly: Assembly, models: Mapping[str, TrainEngine], stack: ExitStack
) -> FeatureInputs:
    """Collect what features are built from.

    Args:
        assembly: of the run.
        models: engines by role; empty before a run begins.
        stack: closes what they open.
    """
    cfg = assembly.cfg
    return FeatureInputs(
        row=cfg.train.row,
        train=assembly.algorithm,
        max_tokens=cfg.longest_response,
        models=models,
        part_weights=assembly.part_weights,
        compared_parts=assembly.compared_parts,
        seed=cfg.run.seed,
        plays=bool(cfg.environment.name),
        samples=cfg.data.prompts_per_step * cfg.rollout.n_samples // cfg.train.minibatches,
        given_rows=cfg.data.given_rows,
        score=OtherRewards(assembly, stack).score,
        rows=partial(conversations, assembly),
    )


class OtherRewards:
    """Rewards beside that of the run, each loaded when it is asked for first.

    Args:
        assembly: of the run.
        stack: closes them.
    """

    def __init__(self, assembly: Assembly, stack: ExitStack) -> None:
        self._assembly = assembly
        self._stack = stack
        self._pools: dict[str, SinglePool] = {}

    def score(self, name: str, groups: Sequence[Group]) -> Scores:
        """Score responses by the reward of a name.

        Args:
            name: as of `reward.name`.
            groups: prompts with their responses.

        Raises:
            RewardError: it cannot be loaded.
            Stopped: a signal asked to stop.
        """
        patience = Patience(self._assembly.stop, self._assembly.cfg.run.waits.seconds["rollout"])
        if name not in self._pools:
            pool = build_other_reward(self._assembly, name)
            self._stack.callback(pool.close)
            pool.start(patience)
            self._pools[name] = pool
        return self._pools[name].score(groups, patience)


def conversations(assembly: Assembly, path: str) -> RowsAt:
    """Open a file of conversations; its rows are drawn in an order of `run.seed`.

    Args:
        path: of the file.

    Raises:
        DataError: it holds none.
    """
    options = assembly.row_options(held_out=False)
    # Columns that rewards read need not be in it.
    known = {ours: theirs for ours, theirs in options.columns.items() if ours in READ}
    options = replace(options, columns=known)
    rows = ConversationDataset.load(path, assembly.tokenizer, options)

    def at(draws: range) -> SupervisedBatch:
        drawn = [rows.at(draw, seed=assembly.cfg.run.seed) for draw in draws]
        return to_supervised_batch(drawn, assembly.pad_id, images=assembly.images)

    return at
