"""What the checkpoints of a run say of the tokens that it sampled, asked of transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM


class Response(NamedTuple):
    """A sampled response as a run wrote it down; temperature: at which it was sampled."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    temperature: float


def responses_of(run: Path, temperature: float) -> list[Response]:
    """Everything that a run with `run.record: tokens` sampled at a temperature."""
    found: list[Response] = []
    for path in sorted((run / "rollouts").glob("step_*.samples.jsonl")):
        for line in path.read_text().splitlines()[1:]:
            group = json.loads(line)
            for response in group["responses"]:
                [segment] = response["completion"]["segments"]
                found.append(
                    Response(
                        group["prompt"]["token_ids"],
                        segment["token_ids"],
                        segment["logprobs"],
                        segment["versions"],
                        # Greedy tokens have the log-probabilities of temperature 1.
                        1.0 if group["baseline"] else temperature,
                    )
                )
    return found


@torch.no_grad()
def distances(run: Path, responses: list[Response]) -> list[float]:
    """How far the log-probability of each token is from that of the weights of its version.

    Returns:
        Nats, of all tokens.
    """
    found: list[float] = []
    for version in sorted({version for one in responses for version in one.versions}):
        # Version v is what v optimizer steps made: there is a checkpoint of each.
        folder = run / "checkpoints" / f"step_{version:08d}"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for one in responses:
            if version not in one.versions:
                continue
            row = torch.tensor([[*one.prompt, *one.tokens]])
            logits = model(input_ids=row, use_cache=False).logits[0, len(one.prompt) - 1 : -1]
            scores = (logits / one.temperature).log_softmax(-1)
            for at, token in enumerate(one.tokens):
                if one.versions[at] == version:
                    found.append(abs(float(scores[at, token]) - one.logprobs[at]))
    return found


def assert_every_token_is_of_its_version(run: Path, temperature: float) -> None:
    """Check a run that keeps a checkpoint of every version; a third of its samples has several."""
    responses = responses_of(run, temperature)
    mixed = [one for one in responses if len(set(one.versions)) > 1]
    assert 3 * len(mixed) >= len(responses) > 0, (len(mixed), len(responses))
    off = distances(run, responses)
    assert len(off) == sum(len(one.tokens) for one in responses)
    wrong = [one for one in off if not one < 1e-4]
    assert not wrong, f"{len(wrong)} of {len(off)} tokens are up to {max(wrong):.3g} nats off"
