"""Runs of adapters: what they learned, and which of them sampled what."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from oxrl.engines.train.local import LocalTrainer
from oxrl.models.load import load_policy
from oxrl.rollouts.whole_samples import read_step
from support.figures import Learned


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


AHEAD = {
    "max_tokens": 6,
    "n_samples": 4,
    "max_staleness": 3,
    "rounds": 3,
    "force_strict_on_policy": False,
}
# Of every step there is a checkpoint, and all numbers of every sample.
KEPT = {"checkpoint_every": 1, "keep_checkpoints": 9, "record": "tokens"}


def distances_by_version(run_directory: Path) -> dict[tuple[int, int], float]:
    """How far what was noted of samples is from what policies say of them now, at most, in nats.

    Returns:
        (version that a token is said to be of, version asked) -> distance.
    """
    folder = run_directory / "checkpoints"
    policies: dict[int, Any] = {
        int(path.name.removeprefix("step_")): load_policy(str(path))
        for path in folder.glob("step_*")
    }
    found: dict[tuple[int, int], float] = {}
    for path in sorted((run_directory / "rollouts").glob("*.samples.jsonl")):
        rollouts = read_step(path).rollouts
        whole = [
            torch.tensor([*rollout.prompt.token_ids, *rollout.completion.segments[0].token_ids])
            for rollout in rollouts
        ]
        tokens = pad_sequence(whole, batch_first=True)  # what is behind a row changes nothing in it
        for asked, policy in policies.items():
            logprobs = logits(policy, tokens)[:, :-1].log_softmax(-1)
            said = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
            for rollout, row in zip(rollouts, said, strict=True):
                (segment,) = rollout.completion.segments
                own = row[len(rollout.prompt.token_ids) - 1 :][: len(segment.logprobs)]
                off = (own - torch.tensor(segment.logprobs)).abs()
                for version in set(segment.versions):
                    of_it = off[torch.tensor(segment.versions) == version].max().item()
                    found[version, asked] = max(of_it, found.get((version, asked), 0.0))
    return found


def assert_sampled_by_their_versions(run_directory: Path, learned: Learned) -> None:
    """Every token was sampled by the policy whose version it has, and by no other."""
    found = distances_by_version(run_directory)
    assert len({version for version, _ in found}) > 1, "nothing was sampled ahead"
    own = [off for (version, asked), off in found.items() if version == asked]
    others = [off for (version, asked), off in found.items() if version != asked]
    assert max(own) < 1e-4, found
    learned("log10 of what another version says", math.log10(min(others)), at_least=-3)


def learn(policy: LocalTrainer, seed: int, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in policy._masters.items():
            if "lora_B" in name or "magnitude" in name:
                master.add_(torch.randn(master.shape, generator=generator) * size)
                policy._parameters[name].copy_(master)
