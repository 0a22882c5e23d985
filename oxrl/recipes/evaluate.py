"""Evaluation on held-out prompts, and plain generation from any checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from oxrl.config import Config, load_evaluation_config
from oxrl.data.chat import ChatEncoder
from oxrl.data.hub import locate
from oxrl.data.prompts import PromptDataset
from oxrl.engines.sample.base import RolloutEngine, generate
from oxrl.engines.sample.local import LocalSampler
from oxrl.errors import CheckpointError
from oxrl.functional.shaping import best_at_k, pass_at_k
from oxrl.models.load import VALUE_HEAD_FILE, LoadOptions, load_critic, load_policy, load_tokenizer
from oxrl.models.weights import save_model
from oxrl.recipes import build
from oxrl.recipes.inputs import read_pins
from oxrl.recipes.setup import RLSetup
from oxrl.rewards.workers import RewardPool
from oxrl.rollouts.record import sample_record
from oxrl.rollouts.requests import make_requests
from oxrl.rollouts.scoring import score_groups
from oxrl.runs.checkpoint import latest_checkpoint
from oxrl.runs.files import encode_line
from oxrl.seeds import stable_seed
from oxrl.types import Metrics, Prompt, Rollout, Sampling, Score


def evaluation_metrics(rollouts: Sequence[Rollout], *, samples: int) -> Metrics:
    """Means over scored responses (`eval/errors` are not; NaN where none is); pass@k and best@k for
    k = 1, 2, 4 ... of scored prompts.
    """
    values = [rollout.score.value for rollout in rollouts if rollout.score.value is not None]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    metrics: Metrics = {
        "eval/reward": sum(values) / len(values) if values else math.nan,
        "eval/responses": float(len(rollouts)),
        "eval/errors": float(len(rollouts) - len(values)),
        "eval/length_mean": sum(lengths) / max(len(lengths), 1),
        "eval/truncated_frac": sum(r.completion.finish_reason == "length" for r in rollouts)
        / max(len(rollouts), 1),
    }
    groups = [
        [r.score.value for r in rollouts[i : i + samples]] for i in range(0, len(rollouts), samples)
    ]
    scored = [group for group in groups if None not in group]
    k = 1
    while k <= samples and scored:
        rewards = torch.tensor(scored, dtype=torch.float64)
        total, correct = torch.full((len(scored),), samples), (rewards > 0.5).sum(1)
        metrics[f"eval/pass@{k}"] = float(pass_at_k(total, correct, k=k).mean())
        metrics[f"eval/best@{k}"] = float(best_at_k(rewards, k=k).mean())
        k *= 2
    return metrics


def picked_reward(
    rollouts: Sequence[Rollout], verdicts: Sequence[Score], *, samples: int
) -> Metrics:
    """Best-of-n as it would be used: per prompt the reward of the response that the verdicts put
    first.
    """
    picks: list[float] = []
    for start in range(0, len(rollouts), samples):
        group = zip(
            rollouts[start : start + samples], verdicts[start : start + samples], strict=True
        )
        known = [
            (verdict.value, r.score.value) for r, verdict in group if verdict.value is not None
        ]
        best = max(known, key=lambda pair: pair[0], default=(0.0, None))[1]
        picks += [] if best is None else [best]
    mean = sum(picks) / len(picks) if picks else math.nan
    return {f"eval/picked@{samples}": mean, "eval/picked_prompts": float(len(picks))}


def sample_and_score(
    cfg: Config,
    sampler: RolloutEngine,
    pool: RewardPool,
    stop_token_ids: tuple[int, ...],
    asked: Sequence[tuple[int, Prompt]],
    *,
    samples: int,
    temperature: float,
    seed: int,
) -> list[Rollout]:
    """`samples` scored responses in a row for every (position, prompt) of `asked`."""
    sampling = build.training_sampling(cfg, stop_token_ids, temperature)
    requests = make_requests(asked, samples=samples, sampling=sampling, run_seed=seed)
    completions = generate(sampler, requests, deadline_s=cfg.run.deadline_s)
    return score_groups(pool, list(zip(requests, completions, strict=True)), samples=samples)


def evaluate_held_out(cfg: Config, setup: RLSetup) -> Metrics:
    """The evaluation inside a training run: `data.eval` under `rollout.eval_*`, the same seeds
    every time.
    """
    if setup.held_out is None:
        return {}
    asked, samples, seed = (
        enumerate(setup.held_out.in_order()),
        cfg.rollout.eval_samples,
        evaluation_seed(cfg),
    )
    sample = partial(sample_and_score, cfg, setup.sampler, setup.pool, setup.stop_token_ids)
    rollouts = sample(
        list(asked), samples=samples, temperature=cfg.rollout.eval_temperature, seed=seed
    )
    return evaluation_metrics(rollouts, samples=samples)


def evaluation_seed(cfg: Config) -> int:
    return stable_seed("evaluation", cfg.run.seed)


@contextmanager
def sampling_from(
    cfg: Config, path: str, held_out: bool
) -> Generator[tuple[PromptDataset, Callable[..., list[Rollout]]]]:
    """The prompts of `path`, and `sample_and_score` on the config's model, to be called with the
    arguments left.
    """
    tokenizer, model = build.build_tokenizer(cfg), build.load_model(cfg)
    longest, stop_token_ids = build.prompt_limits(cfg, model, tokenizer)
    prompts = build.load_prompts(cfg, tokenizer, longest, held_out, path)
    sampler = LocalSampler(model, tokenizer, max_rows=cfg.inference_engine.max_rows)
    with closing(sampler), closing(build.build_rewards(cfg)) as pool:
        yield prompts, partial(sample_and_score, cfg, sampler, pool, stop_token_ids)


def run_eval(
    target: Path,
    overrides: Sequence[str] = (),
    *,
    samples: int | None = None,
    temperature: float | None = None,
    pick: str | None = None,
    out: Path | None = None,
) -> Metrics:
    """`oxrl eval`: score a config's model, or a run's newest checkpoint, on `data.eval`
    (`data.train` without one).

    Args:
        target: a config file or a run directory.
        samples, temperature: instead of `rollout.eval_samples` and `rollout.eval_temperature`.
        pick: another reward (as `reward.name`), whose favorite of each prompt's responses is what
            `picked@n` scores.
        out: write one JSON line per response there.

    Raises:
        ConfigError: the config cannot be evaluated, for one because it names no reward.
        CheckpointError: the run has no usable checkpoint.
    """
    if target.is_dir():
        newest = json.dumps(
            str(newest_checkpoint(target))
        )  # an override is YAML: a path may hold ": " or " #"
        cfg = load_evaluation_config(target / "config.yaml", [f"model.name={newest}", *overrides])
    else:
        cfg = load_evaluation_config(target, overrides)
    samples = samples or cfg.rollout.eval_samples
    path = cfg.data.eval or cfg.data.train_files[0]
    path = str(locate(path, read_pins(target).get(path)))
    with sampling_from(cfg, path, True) as (prompts, sample):
        rollouts = sample(
            list(enumerate(prompts.in_order())),
            samples=samples,
            temperature=cfg.rollout.eval_temperature if temperature is None else temperature,
            seed=evaluation_seed(cfg),
        )
    metrics = evaluation_metrics(rollouts, samples=samples)
    if pick is not None:
        groups = [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]
        with closing(build.build_rewards(cfg, pick)) as pool:
            scores = pool.score(
                [(group[0].prompt, [rollout.completion for rollout in group]) for group in groups]
            )
        metrics |= picked_reward(
            rollouts, [score for group in scores for score in group], samples=samples
        )
    if out is not None:
        out.write_bytes(
            b"".join(encode_line(sample_record(r, step=-1, advantage=None)) for r in rollouts)
        )
    return metrics


def run_export(source: Path, out: Path, *, dtype: str = "float32") -> Path:
    """`oxrl export`: the model or reward model in `source`, or a run's newest one, whole and
    without adapters.

    Adapters are merged in float32, then the weights are rounded to `dtype`.

    Raises:
        CheckpointError: the run has no usable checkpoint.
        DataError: there is no model in the folder.
    """
    folder = str(newest_checkpoint(source) if (source / "checkpoints").is_dir() else source)
    model = (load_critic if (Path(folder) / VALUE_HEAD_FILE).is_file() else load_policy)(folder)
    save_model(cast(nn.Module, model).to(build.DTYPES[dtype]), out)
    load_tokenizer(folder).save_pretrained(out)
    return out


def newest_checkpoint(run: Path) -> Path:
    checkpoint = latest_checkpoint(run / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint")
    return checkpoint.path


def run_generate(
    model: str,
    prompts: Sequence[str],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 256,
    seed: int = 0,
    max_rows: int = 64,
    deadline_s: float = 600.0,
) -> list[dict[str, object]]:
    """`oxrl generate`: answer each prompt (one user message) `samples` times with any model or
    checkpoint.

    Returns:
        One record per response, `samples` in a row per prompt: prompt, sample, response,
            finish_reason, tokens.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, policy = (
        load_tokenizer(model),
        load_policy(model, LoadOptions(device=device, seed=seed)),
    )
    encoder, asked = ChatEncoder(tokenizer), list[tuple[int, Prompt]]()
    for index, text in enumerate(prompts):
        messages = ({"role": "user", "content": text},)
        prompt = Prompt(
            uid=str(index), messages=messages, token_ids=tuple(encoder.encode_prompt(messages))
        )
        asked.append((index, prompt))
    stop_token_ids, cut = build.stop_tokens(tokenizer, policy), {"top_p": top_p, "top_k": top_k}
    sampling = Sampling(
        temperature=temperature, **cut, max_tokens=max_tokens, stop_token_ids=stop_token_ids
    )
    requests = make_requests(asked, samples=samples, sampling=sampling, run_seed=seed)
    with closing(LocalSampler(policy, tokenizer, max_rows=max_rows)) as sampler:
        completions = generate(sampler, requests, deadline_s=deadline_s)
    return [
        {
            "prompt": prompts[request.draw],
            "sample": request.sample,
            "response": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
        }
        for request, completion in zip(requests, completions, strict=True)
    ]
