"""Rotary positions whose factor follows the longest row of a batch: one factor for every row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from oxrl.assembly.assembly import Assembly
from oxrl.commands import evaluate, play
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.models.network import CausalNetwork, ValueModel, fix_rotations, unpadded
from oxrl.models.self_checks import check_sharing, try_sharing
from oxrl.rewards.reward_model import RewardModel
from oxrl.types import Completion, Prompt, Sampling, TokenBatch
from support.small_runs import rl_config

LIMIT = 16  # tokens up to which a row has the factor that the model was first trained with
LONGEST = 48
PAIRS = 8  # of a head of 16 numbers
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0 + 0.1 * pair for pair in range(PAIRS)],
        "long_factor": [1.5 + pair for pair in range(PAIRS)],
        "original_max_position_embeddings": LIMIT,
    },
    "yarn": {"factor": 3.0, "original_max_position_embeddings": LIMIT},
    "linear": {"factor": 3.0},
}


def model_of(kind: str, vocabulary: int = 64) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Dynamic factors begin behind what the configuration calls the longest row.
        max_position_embeddings=LIMIT if kind == "dynamic" else LONGEST,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]},
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval()


def batch(*lengths: int) -> TokenBatch:
    """Rows of so many tokens; the short ones begin alike, and so do those beyond the limit."""
    tokens = torch.arange(LONGEST).mul(7).remainder(59).add(2).repeat(len(lengths), 1)
    real = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    tokens[torch.tensor(lengths) > LIMIT, 0] = 1
    longest = max(lengths)
    trained = real & (torch.arange(LONGEST) >= 4)
    return TokenBatch(
        tokens=(tokens * real)[:, :longest],
        attention_mask=real[:, :longest],
        response_mask=trained[:, :longest],
    )


def said(trainer: LocalTrainer, *lengths: int) -> Tensor:
    """Log-probabilities of the first row."""
    logprobs = trainer.forward(batch(*lengths), frozenset({"logprobs"})).logprobs
    assert logprobs is not None
    return logprobs[0, : lengths[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_a_row_depends_on_no_other_row(kind: str) -> None:
    """Beside a row beyond the limit, after one, and after a short one again."""
    together = LocalTrainer(model_of(kind), TrainerOptions(lr=1e-3, micro_batch_tokens=10**6))
    alone = said(together, 12)
    for others in ((LONGEST,), (LIMIT + 1, 3), (LIMIT,)):
        assert torch.allclose(said(together, 12, *others), alone, rtol=0, atol=1e-5)
        assert torch.allclose(said(together, 12), alone, rtol=0, atol=1e-5)
    apart = LocalTrainer(model_of(kind), TrainerOptions(lr=1e-3, micro_batch_tokens=1))
    assert torch.allclose(
        said(apart, LONGEST, 12, 3), said(together, LONGEST, 12, 3), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_are_read_once_have_the_factor_of_plain_rows(kind: str) -> None:
    assert try_sharing(model_of(kind).config, torch.float32) < 1e-5
    model = model_of(kind)
    check_sharing(model)
    rows = (LONGEST, 12, 9, 40)
    plain = LocalTrainer(model, TrainerOptions(lr=1e-3, micro_batch_tokens=10**6))
    for budget in (1, 40, 10**6):
        options = TrainerOptions(lr=1e-3, micro_batch_tokens=budget, share_prefix=True)
        shared = LocalTrainer(model_of(kind), options)
        for order in (rows, (12, 9, LONGEST, 40)):
            difference = said(shared, *order) - said(plain, *order)
            assert float(difference.abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_says_of_its_tokens_what_the_trainer_says(kind: str) -> None:
    model = model_of(kind)
    sampler = LocalSampler(model, builtin_tokenizer())
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    tokens = batch(LIMIT).tokens.tolist()
    (found,) = sampler.logprobs(tokens)
    wanted = trainer.forward(unpadded(torch.tensor(tokens)), frozenset({"logprobs"})).logprobs
    assert wanted is not None
    assert torch.allclose(torch.tensor(found), wanted[0], rtol=0, atol=1e-5)


def frequencies(model: torch.nn.Module) -> Tensor:
    (found,) = [part.inv_freq for part in model.modules() if hasattr(part, "rope_type")]
    return found


def test_the_factor_is_that_of_the_longest_row_that_is_read() -> None:
    """LongRoPE: 1 / (factor of the pair * theta^(2 i / 16)), long factors beyond the limit."""
    base = torch.tensor([10_000.0 ** (2 * pair / 16) for pair in range(PAIRS)])
    short, long = (
        1.0 / (torch.tensor(KINDS["longrope"][name]) * base)
        for name in ("short_factor", "long_factor")
    )
    for longest, expected in ((None, long), (LIMIT + 1, long), (LIMIT, short), (8, short)):
        model = model_of("longrope")
        fix_rotations(model, longest)
        assert torch.allclose(frequencies(model), expected)
        # It stays so, whatever is read.
        for tokens in (LONGEST, 3):
            model(input_ids=torch.ones(1, tokens, dtype=torch.int64))
            assert torch.allclose(frequencies(model), expected)
    networks = (lambda m: CausalNetwork(m), lambda m: fix_rotations(ValueModel(m.base_model)))
    for wrap in networks:
        model = model_of("longrope")
        wrap(model)
        assert torch.allclose(frequencies(model), long)


def test_a_run_rotates_by_the_longest_row_that_its_config_lets_it_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model_of("longrope").save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    kinds: list[Tensor] = []
    for longest in (LIMIT, LIMIT + 8):
        cfg = rl_config(tmp_path, "run", [f"model.name={folder}", f"model.max_length={longest}"])
        kinds.append(frequencies(Assembly(cfg).model()))
        kept = Assembly(cfg).model().config.rope_parameters
        assert kept["rope_type"] == "longrope"  # what is saved says what it said
    assert not torch.allclose(kinds[0], kinds[1])


def longrope_factors() -> tuple[Tensor, Tensor]:
    """Frequencies of rows up to the limit, and of rows of which some are longer."""
    short, long = model_of("longrope"), model_of("longrope")
    fix_rotations(short, LIMIT)
    fix_rotations(long, LONGEST)
    return frequencies(short), frequencies(long)


def saved(folder: Path, limit: int | None = None, *, of_a_run: bool = True) -> str:
    """The folder of a model, best/ of a run with that `model.max_length`."""
    best = folder / "best"
    model_of("longrope", vocabulary=261).save_pretrained(best)
    builtin_tokenizer().save_pretrained(best)
    if of_a_run:
        (folder / "starts.jsonl").write_text("{}\n")
        (folder / "config.yaml").write_text(f"model: {{max_length: {limit or 'null'}}}\n")
    return str(best)


def seen_by(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The frequencies of every model that a recipe samples from."""
    found: list[Tensor] = []
    real: Callable[..., Any] = recipe.module_sampler

    def spied(model: Any, *given: Any, **named: Any) -> Any:
        sampler = real(model, *given, **named)
        found.append(frequencies(model).clone())
        return sampler

    monkeypatch.setattr(recipe, "module_sampler", spied)
    return found


def test_generating_rotates_as_the_run_of_the_model_did_else_by_the_longest_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = longrope_factors()
    seen = seen_by(evaluate, monkeypatch)
    few = Sampling(max_tokens=2)
    for name, model, sampling, expected in (
        ("limited", saved(tmp_path / "limited", LIMIT), few, short),
        ("longer", saved(tmp_path / "longer", LONGEST), few, long),
        ("no run", saved(tmp_path / "none", of_a_run=False), few, short),
        ("unlimited", saved(tmp_path / "unlimited"), few, long),
        ("asked", saved(tmp_path / "asked", 4), Sampling(max_tokens=LIMIT), long),
    ):
        evaluate.run_generate(model, ["a"], sampling=sampling)
        assert torch.allclose(seen.pop(), expected), name


@pytest.mark.parametrize("limit", [LIMIT, LONGEST])
def test_a_sampler_in_another_process_is_told_the_length_that_the_rotations_are_of(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses a factor of its own by that length."""
    told: list[int] = []

    def hosted(assembly: Any, policy: Any, *_: Any) -> LocalSampler:
        told.append(assembly.cfg.model.max_length)
        return LocalSampler(policy, builtin_tokenizer())

    monkeypatch.setattr(evaluate, "proved_sampler", hosted)
    model = saved(tmp_path, limit)
    evaluate.run_generate(model, ["a"], sampling=Sampling(max_tokens=2), engine="vllm")
    assert told == [limit]


TALK = """
from oxrl.environments import Step

class Talk:
    def reset(self, prompt, seed):
        return "a"
    def step(self, text):
        return Step("", 0.5, terminated=True)
"""


def test_an_episode_is_played_with_the_rotations_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    short, long = longrope_factors()
    seen = seen_by(play, monkeypatch)
    for name, limit, expected in (("limited", LIMIT, short), ("unlimited", None, long)):
        model = saved(tmp_path / name, limit)
        few = ["rollout.max_tokens=2"]
        talk = f"{tmp_path / 'talk.py'}:Talk"
        play.run_play(model, talk, ["x"], few, sampling=Sampling(max_tokens=2))
        assert torch.allclose(seen.pop(), expected), name


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_score_of_a_reward_model_depends_on_no_other_completion(
    kind: str, tmp_path: Path
) -> None:
    critic = ValueModel(model_of(kind, vocabulary=261).base_model)
    torch.nn.init.normal_(critic.value_head.weight)
    options = TrainerOptions(lr=0.0, tokenizer=builtin_tokenizer())
    LocalTrainer(critic, options).save(tmp_path / "rm")
    reward = RewardModel(tmp_path / "rm")
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "a"},), token_ids=(2, 54, 3))
    completions = [
        Completion(segments=(), text=text, finish_reason="stop") for text in ("b", "b" * LIMIT * 2)
    ]
    (alone,) = reward(prompt, completions[:1])
    together = reward(prompt, completions)
    assert alone.value is not None
    assert together[0].value == pytest.approx(alone.value, abs=1e-5)
    assert reward(prompt, completions[:1])[0].value == pytest.approx(alone.value, abs=1e-5)


def test_a_reward_model_rotates_as_the_run_that_trained_it_did(tmp_path: Path) -> None:
    critic = ValueModel(model_of("longrope", vocabulary=261).base_model)
    options = TrainerOptions(lr=0.0, tokenizer=builtin_tokenizer())
    saved(tmp_path, LIMIT)
    LocalTrainer(critic, options).save(tmp_path / "checkpoints" / "step_00000001")
    reward = RewardModel(tmp_path / "checkpoints" / "step_00000001")
    assert torch.allclose(frequencies(reward._model), longrope_factors()[0])
