"""Whole steps of runs that learn from teachers, computed again by hand from what they recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.types import Output, TokenBatch
from support.samplers import lively
from support.small_runs import metric_lines, rl_config

K = 5
TEMPERATURE = 0.7
SOURCES = ("sums", "products")


def model(folder: Path, seed: int = 0) -> str:
    """The policy, or with a seed something that resembles it and is a teacher."""
    made = lively("builtin:tiny", seed=7)
    noise = torch.Generator().manual_seed(seed)
    if seed:
        with torch.no_grad():
            for weight in made.parameters():
                weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=noise)
    made.save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    return str(folder)


def two_sources(folder: Path) -> str:
    rows = [{"prompt": f"{i}+{'1' * (i % 4)}=", "source": SOURCES[i % 2]} for i in range(24)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(folder: Path, algorithm: str, **sections: Any) -> Config:
    """Two steps, every one of them kept, of a policy that ends some of its responses early."""
    folder.mkdir(parents=True, exist_ok=True)
    teachers = {
        "first": {"name": model(folder / "first", 5), "sources": ["sums"]},
        "second": {"name": model(folder / "second", 6)},
    }
    train = {"alg_name": algorithm, "lr": 1e-2} | sections.pop("train", {})
    run_section = {"steps": 2, "checkpoint_every": 1, "record": "tokens", "keep_checkpoints": 9}
    policy = {"name": model(folder / "policy"), "teachers": teachers}
    return rl_config(
        folder,
        "run",
        [] if algorithm == "kdrl" else ["~reward.name"],
        run=run_section | sections.pop("run", {}),
        model=policy | sections.pop("model", {}),
        data={"train": two_sources(folder), "prompts_per_step": 4},
        rollout={"max_tokens": 6, "n_samples": 2, "temperature": TEMPERATURE},
        train=train,
        **sections,
    )


def told(network: Any, batch: dict[str, Tensor]) -> Tensor:
    """[B, T, V]: log-probabilities of the token at each place, by those before it."""
    logits = network(input_ids=batch["tokens"], attention_mask=batch["attention_mask"]).logits
    of_next = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    return torch.cat([torch.zeros_like(of_next[:, :1]), of_next[:, :-1]], dim=1)


def loaded(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def samples_of(cfg: Config, step: int) -> list[dict[str, Any]]:
    lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"] == step]


def said_by_own_teachers(cfg: Config, batch: dict[str, Tensor], step: int) -> Tensor:
    """[B, T, V] of every row by the teacher of its source."""
    models = {name: loaded(asked.name) for name, asked in cfg.model.teachers.items()}
    with torch.no_grad():
        found = {name: told(network, batch) for name, network in models.items()}
    sources = [sample["source"] for sample in samples_of(cfg, step)]
    assert set(sources) == set(SOURCES)
    names = ["first" if source == "sums" else "second" for source in sources]
    return torch.stack([found[name][row] for row, name in enumerate(names)])


def at(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(2, tokens[..., None])[..., 0]


def reverse(own: float, theirs: float) -> tuple[float, float]:
    return math.exp(own) * (own - theirs), own - theirs


def forward(own: float, theirs: float) -> tuple[float, float]:
    return math.exp(theirs) * (theirs - own), 1 - math.exp(theirs - own)


def middle(own: float, theirs: float) -> tuple[float, float]:
    mixed = math.log(0.5 * math.exp(own) + 0.5 * math.exp(theirs))
    value = 0.5 * math.exp(theirs) * (theirs - mixed) + 0.5 * math.exp(own) * (own - mixed)
    return value, 0.5 * (own - mixed)


RULES: dict[float, Callable[[float, float], tuple[float, float]]] = {
    1.0: reverse,
    0.0: forward,
    0.5: middle,
}


@pytest.mark.parametrize("alpha", [1.0, 0.0, 0.5])
def test_a_step_of_opd_topk_is_what_its_formula_says(alpha: float, tmp_path: Path) -> None:
    numbers = {"teacher_candidates": K, "divergence_alpha": alpha, "max_grad_norm": 1e9}
    cfg = config(tmp_path, "opd_topk", train=numbers)
    run(cfg)
    rule = RULES[alpha]
    outside = tokens = 0
    for step, line in enumerate(metric_lines(cfg.run.directory)):
        batch = load_file(cfg.run.directory / f"rollouts/step_{step:08d}.safetensors")
        mask = batch["response_mask"]
        theirs = said_by_own_teachers(cfg, batch, step + 1)
        recorded = batch["teacher_logprobs"]
        sampled = at(theirs, batch["tokens"])
        torch.testing.assert_close(recorded[mask], sampled[mask], rtol=0, atol=1e-5)
        policy = loaded(cfg.run.directory / f"checkpoints/step_{step:08d}")
        ours = told(policy, batch)
        loss = torch.zeros(())
        values: list[float] = []
        masses: list[float] = []
        for row, place in mask.nonzero().tolist():
            token = int(batch["tokens"][row, place])
            candidates = theirs[row, place].topk(K).indices.tolist()
            known = ours.detach()
            mass = sum(math.exp(float(known[row, place, v])) for v in candidates)
            value = 0.0
            for v in candidates:
                own = ours[row, place, v]
                share, weight = rule(float(known[row, place, v]), float(theirs[row, place, v]))
                value += share
                loss = loss + own.exp() * weight
            if token not in candidates:
                outside += 1
                own = ours[row, place, token]
                by_sampler = float(batch["rollout_logprobs"][row, place])
                share, weight = rule(
                    float(known[row, place, token]), float(theirs[row, place, token])
                )
                value += share / math.exp(by_sampler)
                loss = loss + (own - by_sampler).exp() * weight
            values.append(value)
            masses.append(mass)
        (loss / len(values)).backward()
        norm = math.sqrt(sum(float(w.grad.square().sum()) for w in policy.parameters()))
        tokens += len(values)
        mean = sum(values) / len(values)
        assert line["update/loss"] == pytest.approx(mean, rel=1e-3, abs=1e-5)
        assert line["teacher/divergence"] == pytest.approx(mean, rel=1e-3, abs=1e-5)
        assert line["teacher/mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-4)
        assert line["update/grad_norm"] == pytest.approx(norm, rel=1e-3)
        gap = (sampled - batch["rollout_logprobs"])[mask]
        assert line["teacher/gap_mean"] == pytest.approx(float(gap.mean()), rel=1e-3, abs=1e-5)
        assert line["teacher/left_out"] == 0
        assert not any(name.startswith("reward/mean") for name in line)
    assert 0 < outside < tokens


@pytest.mark.parametrize("algorithm", ["opd", "minillm", "iw_opd"])
def test_a_step_by_the_gap_is_a_policy_gradient_of_it(algorithm: str, tmp_path: Path) -> None:
    cfg = config(tmp_path, algorithm, train={"max_grad_norm": 1e9})
    run(cfg)
    for step, line in enumerate(metric_lines(cfg.run.directory)):
        batch = load_file(cfg.run.directory / f"rollouts/step_{step:08d}.safetensors")
        mask = batch["response_mask"]
        sampled = at(said_by_own_teachers(cfg, batch, step + 1), batch["tokens"])
        torch.testing.assert_close(
            batch["teacher_logprobs"][mask], sampled[mask], rtol=0, atol=1e-5
        )
        gap = (sampled - batch["rollout_logprobs"]).clamp(-10, 10)
        policy = loaded(cfg.run.directory / f"checkpoints/step_{step:08d}")
        ours = at(told(policy, batch), batch["tokens"])
        loss = torch.zeros(())
        for row in range(len(mask)):
            places = mask[row].nonzero()[:, 0].tolist()
            gaps = [float(gap[row, place]) for place in places]
            for number, place in enumerate(places):
                advantage = gaps[number]
                if algorithm == "minillm":
                    advantage = sum(gaps[number:])
                if algorithm == "iw_opd":
                    before = sum(map(abs, gaps[:number])) / sum(map(abs, gaps))
                    advantage *= 1 + 0.5 * (1 - before)
                assert float(batch["advantages"][row, place]) == pytest.approx(
                    advantage, rel=1e-3, abs=1e-4
                )
                loss = loss - advantage * ours[row, place]
        (loss / int(mask.sum())).backward()
        norm = math.sqrt(sum(float(w.grad.square().sum()) for w in policy.parameters()))
        assert line["update/grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_kdrl_adds_the_gap_with_a_weight_that_moves(tmp_path: Path) -> None:
    train = {"teacher_coeff": 0.5, "teacher_coeff_end": 0.1, "max_grad_norm": 1e9}
    cfg = config(tmp_path, "kdrl", train=train)
    run(cfg)
    for step in range(2):
        batch = load_file(cfg.run.directory / f"rollouts/step_{step:08d}.safetensors")
        mask = batch["response_mask"]
        gap = batch["teacher_logprobs"] - batch["rollout_logprobs"]
        samples = samples_of(cfg, step + 1)
        for row, sample in enumerate(samples):
            group = [one["reward"] for one in samples if one["draw"] == sample["draw"]]
            mean = sum(group) / len(group)
            spread = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
            outcome = (sample["reward"] - mean) / (spread + 1e-6) if spread else 0.0
            coeff = 0.5 + (0.1 - 0.5) * step / 2
            expected = outcome + coeff * gap[row][mask[row]].clamp(-10, 10)
            found = batch["advantages"][row][mask[row]]
            torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-4)


def test_the_teachers_of_a_step_may_be_of_another_type(tmp_path: Path) -> None:
    cfg = config(tmp_path, "opd")
    teachers = {
        name: asked.model_copy(update={"dtype": "bfloat16"})
        for name, asked in cfg.model.teachers.items()
    }
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"teachers": teachers})})
    run(cfg)
    batch = load_file(cfg.run.directory / "rollouts/step_00000000.safetensors")
    mask = batch["response_mask"]
    exact = at(said_by_own_teachers(cfg, batch, 1), batch["tokens"])
    apart = (batch["teacher_logprobs"] - exact)[mask].abs()
    assert 1e-4 < float(apart.max()) < 0.2


def test_an_adapter_learns_from_a_whole_model(tmp_path: Path) -> None:
    cfg = config(tmp_path, "opd_topk", lora={"rank": 2, "alpha": 4})
    run(cfg)
    batch = load_file(cfg.run.directory / "rollouts/step_00000001.safetensors")
    mask = batch["response_mask"]
    exact = at(said_by_own_teachers(cfg, batch, 2), batch["tokens"])
    torch.testing.assert_close(batch["teacher_logprobs"][mask], exact[mask], rtol=0, atol=1e-5)
    first, last = metric_lines(cfg.run.directory)
    assert first["update/grad_norm"] > 0 < last["update/grad_norm"]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for found in made if isinstance(made, tuple | list) else (made,):
            if isinstance(found, Tensor):
                self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return made


def test_no_tensor_holds_the_vocabulary_for_every_token() -> None:
    vocabulary, rows, length, k = 151_936, 4, 96, 64
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    network: Any = Qwen3ForCausalLM(config)
    engine = LocalTrainer(network, TrainerOptions(lr=1e-3))
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (rows, length), generator=chance)
    there = torch.ones(rows, length, dtype=torch.bool)
    inputs = TokenBatch(tokens=tokens, attention_mask=there, response_mask=there.clone())
    inputs.response_mask[:, 0] = False
    want = frozenset({"logprobs", f"top_k={k}"})
    with Largest() as asked:
        said = engine.forward(inputs, want)
    assert said.top_ids is not None and said.top_ids.shape == (rows, length, k)
    candidates = replace(inputs, columns={"candidates": said.top_ids})

    def loss(output: Output, batch: TokenBatch) -> Any:
        assert output.top_logprobs is not None and output.logprobs is not None
        return (output.top_logprobs.exp().sum(-1) + output.logprobs).sum(), {}

    with Largest() as trained:
        engine.forward_backward(candidates, loss, want)
    whole = 4 * rows * length * vocabulary
    chunk = 4 * 64 * vocabulary
    assert asked.nbytes <= chunk < whole / 5
    assert trained.nbytes <= chunk
