"""Evaluation on held-out prompts, and plain generation from any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from oxrl.assembly.answered import sampling_from
from oxrl.assembly.assembly import Assembly, Limits, stop_tokens
from oxrl.assembly.reward_pools import build_other_reward
from oxrl.assembly.sampler_processes import proved_sampler
from oxrl.checkpoint.targets import find_target
from oxrl.config import Config
from oxrl.config.load_evaluation import load_evaluation_config, model_evaluation_config
from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import ConversationDataset
from oxrl.data.messages import Messages, images_of, read_messages
from oxrl.data.rows import Record
from oxrl.data.samples import sample_line
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.local import module_sampler
from oxrl.engines.sample.sampler import generate
from oxrl.entry_points import STATISTICS, own_function
from oxrl.errors import ConfigError, RunDirectoryError
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.folder import has_image_processor, vision_family
from oxrl.modelfiles.hub import locate
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.network import fix_rotations
from oxrl.recipes.scored_answers import (
    evaluation_metrics,
    evaluation_seed,
    in_groups,
    mean,
)
from oxrl.recipes.supervised import evaluate_loss
from oxrl.rollouts.sync import make_requests
from oxrl.runs.bars import Count, bars
from oxrl.runs.checkpoints import longest_row
from oxrl.runs.console import bounds
from oxrl.runs.device import chosen_device
from oxrl.runs.files import encode_line
from oxrl.runs.pins import DATA_FILE, read_noted
from oxrl.tables.engines import SamplingEngineName
from oxrl.types import Metrics, Prompt, Rollout, Sampling, Score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oxrl.data.image_store import ImageStore

# Of `oxrl generate`, where nothing else is asked for.
GENERATION = Sampling(max_tokens=256)
# Longest wait for the next response of it, in seconds.
GENERATION_S = 600.0
# Metrics that stand behind the one of which they are the interval.
ENDS = ("_low", "_high")
# Responses sampled at the same time.
MOST_ROWS = 64


def picked_reward(
    rollouts: Sequence[Rollout], verdicts: Sequence[Score], *, samples: int
) -> Metrics:
    """Best-of-n as it would be used: per prompt the reward of the response that a judge puts first.

    Args:
        rollouts: `samples` in a row per prompt.
        verdicts: what the judge says of each.
    """
    rewards: list[float] = []
    judged = list(zip(rollouts, verdicts, strict=True))
    for group in in_groups(judged, samples):
        known = [(v.value, r.score.value) for r, v in group if v.value is not None]
        if not known:
            continue
        _, reward = max(known, key=lambda pair: pair[0])
        if reward is not None:
            rewards.append(reward)
    return {f"eval/picked@{samples}": mean(rewards), "eval/picked_prompts": float(len(rewards))}


def likelihood(cfg: Config, path: str, sampling: Mapping[str, object]) -> Metrics:
    """Loss and perplexity of the answers in a file, under the model of a supervised config.

    Args:
        sampling: options that only make sense where the model answers; none may be set.

    Raises:
        ConfigError: one is.
    """
    for option, value in sampling.items():
        if value is not None:
            raise ConfigError(
                f"--{option} is for responses that a reward scores, and here answers are given: "
                "add reward.name=NAME, or leave it out"
            )
    # Sharding is for training: whatever trained the weights, one process holds them here.
    train = cfg.train.model_copy(update={"backend": "local"})
    assembly = Assembly(cfg.model_copy(update={"train": train}))
    engine = assembly.trainer(assembly.model(), complete=True, trained=False)
    options = assembly.row_options(held_out=True)
    data = ConversationDataset.load(path, assembly.tokenizer, options)
    batches = data.batches(cfg.data.rows_per_step)
    return evaluate_loss(engine, batches, assembly.pad_id, images=assembly.images)


def run_eval(
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    samples: int | None = None,
    temperature: float | None = None,
    pick: str | None = None,
    out: Path | None = None,
) -> Metrics:
    """`oxrl eval`: score what a model answers, or, of supervised runs, how likely answers are.

    Args:
        target: a config file, run, checkpoint or model; `data.eval` is read, `data.train` without
            one. Without a `reward.name`, a supervised one gives loss and perplexity.
        samples, temperature: instead of `rollout.eval_samples` and `rollout.eval_temperature`.
        pick: another reward (as `reward.name`), whose favorite of each prompt's responses is what
            `picked@n` scores.
        out: write one JSON line per response there.

    Raises:
        ConfigError: the config cannot be evaluated, for one because it names no reward, or an
            option is for rewards and there is none.
        CheckpointError: the run has no usable checkpoint.
    """
    return evaluate_target(
        target, overrides, samples=samples, temperature=temperature, pick=pick, out=out
    ).metrics


class EvaluatedTarget(NamedTuple):
    """The metrics of an evaluation, and the responses that they are of.

    rollouts: `samples` in a row per prompt; none where the likelihood of given answers is measured.
    """

    metrics: Metrics
    rollouts: list[Rollout]
    samples: int


def evaluate_target(
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    samples: int | None = None,
    temperature: float | None = None,
    pick: str | None = None,
    out: Path | None = None,
) -> EvaluatedTarget:
    """As `run_eval`, with the responses."""
    with ExitStack() as pins:
        cfg, run = evaluation_config(target, overrides, pins)
        path = held_out_file(cfg, run)
        if cfg.recipe == "supervised" and not (cfg.reward.exists or cfg.environment.name):
            sampling = {"samples": samples, "temperature": temperature, "pick": pick, "out": out}
            return EvaluatedTarget(likelihood(cfg, path, sampling), [], 0)
        if temperature is None:
            temperature = cfg.rollout.eval_temperature
        if samples is not None:
            check_samples_differ(cfg, samples, temperature)
        samples = samples or cfg.rollout.eval_samples
        assembly = Assembly(cfg)
        seed = evaluation_seed(cfg.run.seed)
        rollouts = answers_to(assembly, path, samples=samples, temperature=temperature, seed=seed)
        metrics = evaluation_metrics(rollouts, samples=samples)
        bounds = own_function(STATISTICS, "evaluation_bounds")
        if bounds is not None:
            metrics |= bounds(rollouts, samples)
        if pick is not None:
            verdicts = judge(assembly, pick, in_groups(rollouts, samples))
            metrics |= picked_reward(rollouts, verdicts, samples=samples)
        if out is not None:
            records = [sample_line(rollout, step=-1, advantage=None) for rollout in rollouts]
            out.write_bytes(b"".join(map(encode_line, records)))
        return EvaluatedTarget(metrics, rollouts, samples)


def check_samples_differ(cfg: Config, samples: int, temperature: float) -> None:
    """Several responses to a prompt are not one response, counted several times.

    Raises:
        ConfigError: they would be.
    """
    # The same words may lead to other episodes: an environment has chance of its own.
    if samples > 1 and temperature == 0 and not cfg.environment.name:
        raise ConfigError(
            f"--samples {samples} at temperature 0: the responses to a prompt are all the same, "
            f"and one would count as {samples}; write --samples 1, or --temperature 1"
        )


def told(found: EvaluatedTarget) -> str:
    """Every metric on a line, with its interval, and behind them advice on how to narrow it."""
    metrics = found.metrics
    lines = [
        f"{name:<24}{value:.6g}{bounds(metrics, name)}"
        for name, value in metrics.items()
        if not name.endswith(ENDS)
    ]
    advice = own_function(STATISTICS, "evaluation_advice")
    if advice is not None and found.rollouts:
        lines.append(advice(found.rollouts, found.samples))
    return "\n".join(lines)


def held_out_file(cfg: Config, run: Path | None) -> str:
    """The path of the prompts that are evaluated on: `data.eval`, `data.train` without one."""
    name = cfg.data.eval or cfg.data.train_files[0]
    noted = {} if run is None else read_noted(run, DATA_FILE)
    return str(locate(name, noted.get(name)))


def answers_to(
    assembly: Assembly, path: str, *, samples: int, temperature: float, seed: int
) -> list[Rollout]:
    """Answer the held-out prompts of a file, and score the answers.

    Args:
        path: of the file.
        samples: per prompt; they are in a row.
        temperature, seed: of all of them.
    """
    with sampling_from(
        assembly, path, held_out=True, samples=samples, temperature=temperature, seed=seed
    ) as (prompts, scored):
        draws = list(enumerate(prompts.in_order()))
        with bars() as tell:
            count = Count(tell, "responses", len(draws) * samples)
            return replace(scored, on_finished=count.one).answer(draws)


def evaluation_config(
    target: str | Path, overrides: Sequence[str], pins: ExitStack
) -> tuple[Config, Path | None]:
    """Load the configuration of an evaluation, and find the run that its target belongs to.

    Args:
        target: a config file; a run, of which the newest checkpoint is meant; a checkpoint; or a
            model by folder or name.
        overrides: as of `load_config`; for a model without a run they are all that there is.
        pins: as of `find_target`.

    Returns:
        The configuration and the run's directory; None where the target belongs to no run.
    """
    if is_config(str(target)):
        return load_evaluation_config(target, overrides), None
    found = find_target(target, pins)
    if found.run is None:
        return model_evaluation_config(found.model, overrides), None
    # An override is YAML: a path may hold ": " or " #".
    own = [f"model.name={json.dumps(found.model)}", *overrides]
    config = found.run / "config.yaml"
    if not config.is_file():  # reading a pipe would wait for whoever writes into it
        raise RunDirectoryError(
            f"{config}, which says how the run evaluates, is gone or no file. Restore it; "
            "`oxrl config show` prints it for the config that the run was started with"
        )
    return load_evaluation_config(config, own), found.run


def is_config(target: str) -> bool:
    """True if the target of an evaluation is the file of a configuration, or meant to be one."""
    model = Path(target).is_dir() or is_builtin(target)
    on_hub = not Path(target).suffix and not Path(target).exists() and target.count("/") == 1
    return not model and not on_hub


def judge(assembly: Assembly, reward: str, groups: Sequence[Sequence[Rollout]]) -> list[Score]:
    """Score the responses to each prompt with another reward; the scores are in their order."""
    asked = [(group[0].prompt, [rollout.completion for rollout in group]) for group in groups]
    with closing(build_other_reward(assembly, reward)) as pool:
        return list(chain.from_iterable(pool.score(asked)))


def check_room(longest: int, most: int, context: int) -> None:
    """The longest prompt and a response fit into the model's context.

    Args:
        longest, most: tokens of the longest prompt, and of a response.
        context: of the model.

    Raises:
        ConfigError: they do not; names the options of `oxrl generate`.
    """
    if longest + most <= context:
        return
    why = (
        f"--max-tokens {most} and a prompt of {longest} tokens are more than the model's context "
        f"of {context}"
    )
    if longest < context:
        raise ConfigError(f"{why}: write --max-tokens {context - longest} or less")
    raise ConfigError(f"{why}: shorten that --prompt")


def images_for(model: str, tokenizer: PreTrainedTokenizerBase) -> ImageStore:
    """The images that a model is asked about.

    Args:
        tokenizer: of the model.

    Raises:
        ConfigError: it reads none.
    """
    if vision_family(model) is None or not has_image_processor(model):
        raise ConfigError(f"--image: {model} reads text alone; leave it out, or name another model")
    from oxrl.assembly.images import model_images  # questions of text do without

    return model_images(model, tokenizer)


def questions(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    store: ImageStore | None,
    images: Sequence[str],
) -> list[tuple[int, Prompt]]:
    """Texts as prompts, numbered.

    Args:
        store: reads the images; None: there are none.
        images: that every text shows.

    Raises:
        DataError: an image cannot be used, or a text has not as many places as there are images.
    """
    encoder = ChatEncoder(tokenizer) if store is None else store.encoder(tokenizer)
    asked: list[tuple[int, Prompt]] = []
    for index, text in enumerate(texts):
        messages: Messages = ({"role": "user", "content": text},)
        if store is not None:
            record = store.prepared(
                Record("--prompt", {"prompt": text, "images": list(images)}, folder=Path.cwd())
            )
            messages = read_messages(record, record.fields["prompt"], what="prompt")
        prompt = Prompt(
            uid=str(index),
            messages=messages,
            token_ids=tuple(encoder.encode_prompt(messages)),
            images=images_of(messages),
        )
        asked.append((index, prompt))
    return asked


def _generation_config(model: str, engine: SamplingEngineName, seed: int, longest: int) -> Config:
    """The configuration of a sampler by itself, for rows of at most `longest` tokens."""
    return Config.model_validate(
        {
            "run": {"name": "generate", "steps": 1, "seed": seed},
            "model": {"name": model, "dtype": "float32", "max_length": longest},
            "data": {"train": "none.jsonl"},
            "train": {"alg_name": "sgrpo"},
            "inference_engine": {"name": engine, "max_rows": MOST_ROWS},
        }
    )


def _rotate(policy: PreTrainedModel, model: str, asked: int) -> int:
    """Rotate as in training, if nothing longer is asked for; tokens by which vLLM does the same."""
    trained = longest_row(model, asked)
    longest = max(asked, trained or 0)
    fix_rotations(policy, trained and longest)
    return longest


def run_generate(
    model: str,
    prompts: Sequence[str],
    *,
    samples: int = 1,
    sampling: Sampling = GENERATION,
    seed: int = 0,
    images: Sequence[str] = (),
    engine: SamplingEngineName = "local",
) -> list[dict[str, object]]:
    """`oxrl generate`: answer each prompt with any model or checkpoint.

    Args:
        model: as `model.name`, or a run, of which the newest checkpoint is meant.
        prompts: one user message each.
        samples: responses per prompt.
        sampling: temperature and limits; the model's stop tokens are added.
        seed: of the responses, and of a model that is made, not loaded.
        images: files that every prompt shows, at its markers `<image>` or before its text.
        engine: as `inference_engine.name`; vllm has a process of its own, which reads text alone.

    Returns:
        One record per response, `samples` in a row per prompt: prompt, sample, response,
            finish_reason, tokens.

    Raises:
        ConfigError: the model reads no images, or they and a prompt do not fit its context.
        DataError: an image cannot be used, or a prompt has not as many places as there are images.
    """
    with ExitStack() as stack:
        model = find_target(model, stack).model
        tokenizer = load_tokenizer(model)
        policy = load_policy(model, LoadOptions(device=chosen_device(), seed=seed))
        store = images_for(model, tokenizer) if images else None
        asked = questions(prompts, tokenizer, store, images)
        sampling = replace(sampling, stop_token_ids=stop_tokens(tokenizer, policy))
        requests = make_requests(asked, samples=samples, sampling=sampling, run_seed=seed)
        longest = max(len(prompt.token_ids) for _, prompt in asked)
        room = _rotate(policy, model, longest + sampling.max_tokens)
        local = module_sampler(policy, tokenizer, max_rows=MOST_ROWS, images=store)
        check_room(longest, sampling.max_tokens, local.context)
        sampler: RolloutEngine = local
        if engine != "local":
            assembly = Assembly(_generation_config(model, engine, seed, room))
            limits = Limits(None, sampling.stop_token_ids, room)
            sampler = proved_sampler(assembly, policy, limits, stack)
        stack.callback(sampler.close)
        completions = generate(sampler, requests, deadline_s=GENERATION_S)
    return [
        {
            "prompt": prompts[request.draw],
            "sample": request.sample,
            "response": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": completion.sampled,
        }
        for request, completion in zip(requests, completions, strict=True)
    ]
