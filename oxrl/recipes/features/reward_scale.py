"""Rewards on one scale before anything is computed from them: `reward.normalize`, `reward.clip`.

Built where a config asks for it, whatever the row of the table needs. Penalties of the row and a KL
in the reward are added to what comes out, so their coefficients mean the same for every reward.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from oxrl.checkpoint import Saved
from oxrl.functional.shaping import Moments, move_to_scale, scale_rewards
from oxrl.recipes.features.base import Feature
from oxrl.recipes.session import RolloutProgress
from oxrl.types import Metrics, PolicyBatch, RolloutBatch

log = logging.getLogger(__name__)

FILE = "moments.json"
How = Literal["none", "running", "batch"]


class RewardScale(Feature):
    """See the module. A checkpoint holds what is known of the rewards so far.

    Args:
        how: "running": by all rewards of rows trained on so far, this batch included; "batch": by
            those of this rollout batch; "none": only bounded.
        clip: largest absolute value of a reward; None: any.
    """

    def __init__(self, how: How, clip: float | None) -> None:
        self._how: How = how
        self._clip = clip
        self._seen = Moments()
        self._metrics: Metrics = {}

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace the rewards of rows, of their tokens and of greedy responses."""
        moments = self._moments(batch.rewards)
        scaled = scale_rewards(batch.rewards, moments, clip=self._clip)
        self._note(batch.rewards, scaled, moments)
        mask = batch.inputs.response_mask
        token_rewards = move_to_scale(
            batch.token_rewards, mask, batch.rewards, scaled, moments=moments
        )
        greedy = batch.greedy_rewards
        if greedy is not None:
            greedy = scale_rewards(greedy, moments, clip=self._clip)
        return replace(batch, rewards=scaled, token_rewards=token_rewards, greedy_rewards=greedy)

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Nothing is moved; it is told what the rewards were normalised by."""
        return self._metrics

    def saved(self) -> dict[str, Saved]:
        """See Feature."""
        return {"rewards": self}

    def save(self, directory: Path) -> None:
        """Write what is known of the rewards so far."""
        content = json.dumps(asdict(self._seen))
        (directory / FILE).write_text(content, encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        path = directory / FILE
        if not path.exists():
            log.info("%s: no rewards were normalised before; this begins now", directory)
            return
        self._seen = Moments(**json.loads(path.read_text(encoding="utf-8")))

    def _moments(self, rewards: Tensor) -> Moments | None:
        if self._how == "none":
            return None
        if self._how == "batch":
            return Moments().with_values(rewards)
        self._seen = self._seen.with_values(rewards)
        return self._seen

    def _note(self, rewards: Tensor, scaled: Tensor, moments: Moments | None) -> None:
        free = scale_rewards(rewards, moments, clip=None)
        clipped = float((free != scaled).sum()) / max(1, len(rewards))
        self._metrics = {"reward/clipped_frac": clipped}
        if moments is not None:
            self._metrics["reward/normal_mean"] = moments.mean
            self._metrics["reward/normal_std"] = moments.std
