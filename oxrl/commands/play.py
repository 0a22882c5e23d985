"""`oxrl generate --env`: episodes of any model with an environment, to be looked at."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from oxrl.assembly.assemble import answering
from oxrl.assembly.assembly import Assembly, Limits, stop_tokens
from oxrl.assembly.reward_pools import build_rewards
from oxrl.checkpoint.targets import find_target
from oxrl.config import Config
from oxrl.config.load_evaluation import load_evaluation_config, model_evaluation_config
from oxrl.data.prompts import PromptDataset
from oxrl.engines.sample.local import module_sampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import ConfigError
from oxrl.models.load import LoadOptions, load_policy
from oxrl.models.network import fix_rotations
from oxrl.recipes.scored_answers import in_groups
from oxrl.rollouts.sync import make_requests
from oxrl.runs.checkpoints import longest_row
from oxrl.runs.device import chosen_device
from oxrl.runs.files import Json, encode_line
from oxrl.types import Completion, Request, Sampling, Score

# What an environment that opens by itself is given, where no prompt is.
NO_PROMPT = "Begin."
# Turns sampled at the same time.
MOST_ROWS = 64


def run_play(
    model: str,
    environment: str,
    prompts: Sequence[str] | Path,
    overrides: Sequence[str],
    *,
    samples: int = 1,
    sampling: Sampling,
    seed: int = 0,
) -> list[Json]:
    """Play episodes with any model or checkpoint.

    Args:
        model: as `model.name`, or a run, of which the newest checkpoint is meant.
        environment: as `environment.name`; or a config or a run, whose environment, turns and
            reward are meant.
        prompts: one user message each, or a file of rows.
        overrides: of the config: options, turns, tokens of a turn.
        samples: episodes per prompt.
        sampling: temperature, top_p and top_k.
        seed: of environments and responses, and of a model that is made, not loaded.

    Returns:
        One record per episode, `samples` in a row per prompt: prompt, sample, opening, turns, end,
            reason, score, parts, tokens.

    Raises:
        ConfigError: no environment, or one that cannot be had.
        EnvironmentDefinitionError: it cannot be loaded, or begins no episode.
    """
    with ExitStack() as stack:
        found = find_target(model, stack).model
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = prompts if isinstance(prompts, Path) else written(folder, prompts)
        cfg = config_of(environment, found, rows, overrides)
        policy = load_policy(found, LoadOptions(device=chosen_device(), seed=seed))
        # As in training: before a sampler fixes them by what the model's configuration allows.
        fix_rotations(policy, longest_row(found, cfg.model.max_length))
        assembly = Assembly(cfg)
        tokenizer = assembly.tokenizer
        options = assembly.row_options(held_out=True)
        asked = list(enumerate(PromptDataset.load(rows, tokenizer, options).in_order()))
        sampler = stack.enter_context(
            closing(module_sampler(policy, tokenizer, max_rows=MOST_ROWS, images=assembly.images))
        )
        scorer = None
        if cfg.reward.exists:
            scorer = stack.enter_context(closing(build_rewards(assembly)))
        stops = stop_tokens(tokenizer, policy)
        limits = Limits(None, stops, sampler.context)
        engine, judge = answering(assembly, sampler, scorer, limits, asked[0][1], stack)
        wanted = assembly.sampling(stops, sampling.temperature)
        cuts = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        wanted = replace(wanted, **cuts)
        requests = make_requests(asked, samples=samples, sampling=wanted, run_seed=seed)
        completions = generate(engine, requests, deadline_s=cfg.run.waits.seconds["rollout"])
        episodes = zip(asked, in_groups(completions, samples), strict=True)
        groups = [(prompt, group) for (_, prompt), group in episodes]
        scores = [score for group in judge.score(groups) for score in group]
    return list(map(record, requests, completions, scores))


def written(folder: Path, prompts: Sequence[str]) -> Path:
    """A data file of prompts, where a config wants one."""
    path = folder / "prompts.jsonl"
    rows = (encode_line({"prompt": prompt}) for prompt in prompts or [NO_PROMPT])
    path.write_bytes(b"".join(rows))
    return path


def config_of(environment: str, model: str, rows: Path, overrides: Sequence[str]) -> Config:
    """The config whose environment is meant, with other data and another model.

    Raises:
        ConfigError: it is wrong, or has no environment.
    """
    data = f"data.train={json.dumps(str(rows))}"
    path = Path(environment)
    source = path / "config.yaml" if path.is_dir() else path
    if source.suffix in (".yaml", ".yml"):
        cfg = load_evaluation_config(
            source, [f"model.name={json.dumps(model)}", data, "data.eval=null", *overrides]
        )
        if not cfg.environment.name:
            raise ConfigError(f"--env {environment}: {source} has no environment.name")
        return cfg
    return model_evaluation_config(
        model, [data, f"environment.name={json.dumps(environment)}", *overrides]
    )


def option_overrides(
    options: Sequence[str], limits: Mapping[str, int | None] = MappingProxyType({})
) -> list[str]:
    """`--env-option NAME=VALUE` as the one override that sets environment.options, and limits.

    Args:
        options: as they were written.
        limits: field -> its value; None: as the config has it.

    Raises:
        ConfigError: one has no such form.
    """
    values: Json = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(f"--env-option {option}: write NAME=VALUE, such as id=FrozenLake-v1")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--env-option {option}: {text!r} is no YAML: {error}") from error
    found = [f"{path}={value}" for path, value in limits.items() if value is not None]
    return [*found, f"environment.options={json.dumps(values)}"] if values else found


def record(request: Request, completion: Completion, score: Score) -> Json:
    """Collect what there is to see of an episode."""
    return {
        "prompt": request.prompt.question,
        "sample": request.sample,
        "opening": [dict(message) for message in completion.opening],
        "turns": [vars(turn) for turn in completion.turns],
        "end": completion.end,
        "reason": completion.reason,
        "score": score.value,
        "status": score.status,
        "parts": dict(score.parts),
        "tokens": sum(len(s.token_ids) for s in completion.segments if s.origin == "policy"),
    }


def transcript(episode: Mapping[str, Any]) -> str:
    """An episode to be read: who says what, the reward of each turn, and how it ended."""
    lines = [told(message) for message in episode["opening"]]
    for number, turn in enumerate(episode["turns"], start=1):
        note = f", {turn['reason']}" if turn["reason"] else ""
        lines.append(f"assistant (turn {number}, reward {turn['reward']:g}{note}): {turn['text']}")
        lines += [told(message) for message in turn["messages"]]
    count = len(episode["turns"])
    score = f"no score: {episode['reason']}"
    if episode["score"] is not None:
        score = f"score {episode['score']:g}"
    turns = "1 turn" if count == 1 else f"{count} turns"
    lines.append(f"[{episode['end']}, {turns}, {episode['tokens']} tokens, {score}]")
    return "\n".join(lines)


def told(message: Mapping[str, Any]) -> str:
    """One message."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "<image>") for part in content)
    return f"{message['role']}: {content}"
