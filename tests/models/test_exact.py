"""Exact mode: what a sampler says of a token and what a trainer says of it agree to the last bit,
whatever else is in either's batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oxrl.functional.logprobs
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.exact_check import check_exact, first_apart
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import ModuleSampler, generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.models.exact import ExactLinear, ExactSilu, ExactTanhGelu, make_exact
from oxrl.models.load import LoadOptions, load_critic, load_policy
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.models.network import unpadded
from oxrl.plan.preflight import Prepared, examine
from oxrl.types import Prompt, Request, Sampling, TokenBatch
from oxrl.usercode import worker
from support.architectures import FAMILIES, tiny
from support.exact_operations import operations
from support.exact_ranks import score_on_ranks
from support.known_weights import model_that_adds
from support.rank_processes import run_ranks
from support.sampling_processes import FORKING
from support.small_runs import metric_lines, rl_config

WANT = frozenset({"logprobs"})
HERE = Path(__file__).resolve().parents[1]
# Instruction sets that this processor can be told to do with.
INSTRUCTIONS = {
    "AVX2": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "SSE": {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "padded": {},
    "padded to 700": {"micro_batch_tokens": 700},
    "one row at a time": {"micro_batch_tokens": 1},
    "prompts once": {"share_prefix": True},
    "prompts once, 500": {"share_prefix": True, "micro_batch_tokens": 500},
}


def in_full(*values: Any) -> list[Any]:
    """Parameters of the runs that take their time."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        for value in values
    ]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def exact_model(name: str, *, sharper: float = 3.0) -> PreTrainedModel:
    """A built-in model in exact mode, with larger weights: a random one says the same of all."""
    model = load_policy(name, LoadOptions(seed=1, exact=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(sharper)
    return model


@dataclass
class Rows:
    """Sampled rows: as a batch, and what the sampler said of their tokens."""

    batch: TokenBatch
    said: Tensor


def sampled(
    sampler: ModuleSampler,
    *,
    groups: int,
    most: int,
    temperature: float = 1.0,
    prompts: tuple[int, ...] = (1, 2, 5, 17, 31, 32, 33, 60, 100),
    vocabulary: int = 261,
) -> Rows:
    """Groups of four samples of up to `most` tokens, of prompts of several lengths."""
    random = Random(0)
    requests: list[Request] = []
    for group in range(groups):
        length = prompts[group % len(prompts)]
        tokens = tuple(random.randrange(3, vocabulary) for _ in range(length))
        for sample in range(4):
            request = Request(
                id=f"{group}.{sample}",
                prompt=Prompt(uid=str(group), messages=(), token_ids=tokens),
                draw=group,
                sample=sample,
                sampling=Sampling(
                    temperature=temperature, max_tokens=random.randrange(most // 2, most + 1)
                ),
                seed=random.randrange(2**40),
            )
            requests.append(request)
    done = generate(sampler, requests, deadline_s=600)
    rows = [
        (*request.prompt.token_ids, *completion.token_ids)
        for request, completion in zip(requests, done, strict=True)
    ]
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    trained = real.clone()
    said = torch.zeros(len(rows), longest)
    for index, row in enumerate(rows):
        start = len(requests[index].prompt.token_ids)
        tokens[index, : len(row)] = torch.tensor(row)
        real[index, : len(row)] = True
        trained[index, start : len(row)] = True
        numbers = [number for run in done[index].segments for number in run.logprobs]
        said[index, start : len(row)] = torch.tensor(numbers)
    return Rows(TokenBatch(tokens=tokens, attention_mask=real, response_mask=trained), said)


def part(batch: TokenBatch, rows: slice) -> TokenBatch:
    return TokenBatch(
        tokens=batch.tokens[rows],
        attention_mask=batch.attention_mask[rows],
        response_mask=batch.response_mask[rows],
    )


def scored(model: PreTrainedModel, batch: TokenBatch, temperature: float = 1.0, **how: Any) -> Any:
    options = TrainerOptions(lr=0.0, temperature=temperature, trained=False, **how)
    return LocalTrainer(model, options).forward(batch, WANT).logprobs


def summed(output: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose gradient is of every token alike, and of its place."""
    weights = torch.arange(1, output.logprobs.shape[1] + 1)
    return (output.logprobs * weights).sum(), {}


def trained_on(model: PreTrainedModel, batch: TokenBatch, **how: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities on the way to a gradient, and the gradient."""
    trainer = LocalTrainer(model, TrainerOptions(lr=0.0, **how))
    found: Any = trainer.forward_backward(batch, summed, WANT | {"entropy"})
    gradient = torch.cat([piece.flatten().double() for _, piece in trainer.gradients()])
    trainer.skip_step()
    return found.logprobs.detach(), gradient


def bits_apart(found: Tensor, rows: Rows) -> int:
    """Trained tokens of which a trainer and the sampler do not say the same bits."""
    differ = found.contiguous().view(torch.int32) != rows.said.view(torch.int32)
    return int((differ & rows.batch.response_mask).sum())


def every_layout(
    model: PreTrainedModel, rows: Rows, temperature: float, patch: pytest.MonkeyPatch
) -> dict[str, int]:
    """Layout of a trainer -> tokens whose bits differ from the sampler's."""
    batch = rows.batch
    found = {
        name: scored(model, batch, temperature, **options) for name, options in LAYOUTS.items()
    }
    recomputed, _ = trained_on(
        model, batch, temperature=temperature, gradient_checkpointing=True, share_prefix=True
    )
    found["with a gradient, activations recomputed"] = recomputed
    half = len(batch.tokens) // 2
    halves = [
        scored(model, part(batch, rows), temperature) for rows in (slice(half), slice(half, None))
    ]
    found["two minibatches"] = torch.cat(halves)
    with patch.context() as inside:
        inside.setattr(oxrl.functional.logprobs, "head_chunk", lambda vocabulary: 7)
        found["head in chunks of 7"] = scored(model, batch, temperature)
    return {name: bits_apart(logprobs, rows) for name, logprobs in found.items()}


def nothing_apart(found: Mapping[str, int]) -> bool:
    return set(found.values()) == {0}


# --- Sampler and trainer.
@pytest.mark.parametrize(
    ("name", "threads", "max_rows", "temperature", "most"),
    [
        ("builtin:tiny", 1, 7, 1.0, 40),
        ("builtin:tiny", 3, 48, 0.7, 40),
        ("builtin:tiny", 2, 1, 1.0, 12),
        ("builtin:small", 2, 48, 0.7, 16),
        *in_full(("builtin:small", 1, 7, 1.0, 40)),
    ],
    indirect=["threads"],
)
def test_every_layout_of_a_trainer_says_the_bits_of_the_sampler(
    name: str,
    threads: int,
    max_rows: int,
    temperature: float,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = exact_model(name)
    sampler = LocalSampler(model, builtin_tokenizer(), max_rows=max_rows)
    rows = sampled(sampler, groups=9, most=most, temperature=temperature)
    assert rows.batch.response_mask.sum() > 36 * most // 2 - 1
    found = every_layout(model, rows, temperature, monkeypatch)
    assert len(found) == 8
    assert nothing_apart(found), found


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_rows_of_seven_hundred_tokens_agree(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact_model("builtin:tiny")
    sampler = LocalSampler(model, builtin_tokenizer(), max_rows=5)
    rows = sampled(sampler, groups=3, most=30, prompts=(250, 500, 670))
    assert rows.batch.tokens.shape[1] > 680
    found = every_layout(model, rows, 1.0, monkeypatch)
    assert nothing_apart(found), found


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("name", "threads", "max_rows", "temperature", "groups", "most"),
    [
        ("builtin:tiny", 1, 48, 1.0, 90, 120),
        ("builtin:tiny", 3, 7, 0.7, 45, 60),
        ("builtin:small", 2, 48, 0.7, 18, 600),
        ("builtin:small", 1, 48, 1.0, 18, 600),
    ],
    indirect=["threads"],
)
def test_many_tokens_agree_in_every_layout(
    name: str,
    threads: int,
    max_rows: int,
    temperature: float,
    groups: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = exact_model(name)
    sampler = LocalSampler(model, builtin_tokenizer(), max_rows=max_rows)
    rows = sampled(sampler, groups=groups, most=most, temperature=temperature)
    found = every_layout(model, rows, temperature, monkeypatch)
    assert nothing_apart(found), found


@pytest.mark.parametrize("name", ["builtin:tiny", *in_full("builtin:small")])
def test_the_sampler_for_any_model_agrees_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact_model(name)
    sampler = CachedSampler(model, builtin_tokenizer(), max_rows=7)
    rows = sampled(sampler, groups=6, most=40, prompts=(1, 17, 31, 60, 240))
    found = every_layout(model, rows, 1.0, monkeypatch)
    assert nothing_apart(found), found


@pytest.mark.parametrize(
    "family", ["qwen2", "gpt_neox", *in_full("llama", "phi3", "olmo2", "starcoder2")]
)
def test_other_families_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    make_exact(model)
    sampler = LocalSampler(model, builtin_tokenizer(), max_rows=5)
    rows = sampled(
        sampler, groups=3, most=30, prompts=(1, 5, 33), vocabulary=model.config.vocab_size
    )
    found = every_layout(model, rows, 1.0, monkeypatch)
    assert nothing_apart(found), found


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_agrees_and_its_layers_are_exact(
    rslora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exact_model("builtin:tiny")
    options = AdapterOptions(rank=4, alpha=8.0, rslora=rslora)
    add_adapter(model, options, base="builtin:tiny", seed=1)
    make_exact(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # it begins at 0
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert {type(module) for module in linears} == {ExactLinear}
    rows = sampled(LocalSampler(model, builtin_tokenizer(), max_rows=5), groups=4, most=30)
    found = every_layout(model, rows, 1.0, monkeypatch)
    assert nothing_apart(found), found


@pytest.mark.parametrize("on_meta", [False, True])
def test_two_ranks_with_pieces_of_the_weights_agree(tmp_path: Path, on_meta: bool) -> None:
    """FSDP over gloo; the sampler has all weights."""
    model = exact_model("builtin:tiny")
    model.save_pretrained(tmp_path / "model")
    rows = sampled(LocalSampler(model, builtin_tokenizer(), max_rows=7), groups=5, most=20)
    torch.save(vars(rows.batch), tmp_path / "batch.pt")
    run_ranks(2, score_on_ranks, tmp_path, on_meta)
    for rank in range(2):
        found = torch.load(tmp_path / f"logprobs_{rank}.pt")
        assert len(found) == 3
        assert nothing_apart({name: bits_apart(said, rows) for name, said in found.items()})


# --- Runs.
def exact_run(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    """A run of 4 steps of two minibatches from a model that answers sums, its samples at hand."""
    if not (folder / "model").is_dir():
        model_that_adds(folder / "model")
    return rl_config(
        folder,
        name,
        model={"name": str(folder / "model")} | sections.pop("model", {}),
        run={"steps": 4, "exact": True} | sections.pop("run", {}),
        rollout={"max_tokens": 12, "n_samples": 4, "temperature": 0.8},
        train={"alg_name": "sgrpo", "lr": 1e-2} | sections.pop("train", {}),
        **sections,
    )


def worst_difference(cfg: Config) -> list[float]:
    """Of each step, the largest difference of the sampler's and the trainer's numbers."""
    return [line["mismatch/abs_logdiff_max"] for line in metric_lines(cfg.run.directory)]


ADAPTER = {"lora": {"rank": 4, "alpha": 8}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"run": {"threads": 3}, "inference_engine": {"max_rows": 5}},
        {"inference_engine": {"processes": 1}},
        ADAPTER,
        {**ADAPTER, "inference_engine": {"processes": 1}},
        *in_full({"train": {"share_prefix": False, "micro_batch_tokens": 100}}),
        *in_full({"train": {"alg_name": "ppo"}}, {"model": {"gradient_checkpointing": True}}),
    ],
)
def test_a_run_says_that_sampler_and_trainer_do_not_differ(
    tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "subprocess", FORKING)
    before = torch.get_num_threads()
    cfg = exact_run(tmp_path, "run", **{name: dict(given) for name, given in sections.items()})
    run(cfg)
    torch.set_num_threads(before)
    assert worst_difference(cfg) == [0.0] * 4


@pytest.mark.parametrize(
    ("given", "field"),
    [("dora", "lora.dora"), ("delivery", "lora.delivery")],
)
def test_adapters_that_cannot_agree_are_refused(tmp_path: Path, given: str, field: str) -> None:
    value = {"dora": True, "delivery": "merged"}[given]
    engine = {"inference_engine": {"processes": 1}} if given == "delivery" else {}
    lora = {"lora": {"rank": 4, "alpha": 8, given: value}}
    with pytest.raises(ConfigError, match=rf"(?s){field}.*or run.exact to false"):
        exact_run(tmp_path, "run", **lora, **engine)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_plan_tells_whether_a_family_has_an_exact_form(tmp_path: Path, family: str) -> None:
    tiny(family).save_pretrained(tmp_path / "own")
    builtin_tokenizer().save_pretrained(tmp_path / "own")
    cfg = exact_run(tmp_path, "run", model={"name": str(tmp_path / "own")})
    found = examine(cfg, Prepared(), "exact")
    if family in REFUSED:
        assert found.state == "wrong" and REFUSED[family] in found.text
    else:
        assert found.state == "ok" and "agree to the last bit" in found.text
    usual = cfg.model_copy(update={"run": cfg.run.model_copy(update={"exact": False})})
    assert examine(usual, Prepared(), "exact").text == ""


# --- Operations.
@pytest.mark.parametrize("threads", [*in_full(1, 2), 3, *in_full(4)], indirect=True)
def test_no_operation_depends_on_the_rows_beside_a_row(threads: int) -> None:
    found = operations(threads)
    assert len(found) > 45
    assert {name: trials for name, trials in found.items() if trials} == {}


@pytest.mark.parametrize(
    ("instructions", "kind", "threads"),
    [
        ("AVX2", "attention", [1]),
        *in_full(("AVX2", "all", [1, 2, 3, 4]), ("SSE", "all", [1, 2, 3, 4])),
    ],
)
@pytest.mark.timeout(1800)
def test_no_operation_does_so_with_other_instructions(
    instructions: str, kind: str, threads: list[int]
) -> None:
    """Blocks of 64 queries, for one, differ by AVX2 alone."""
    asked = [kind, *map(str, threads)]
    done = with_instructions(instructions, ["-m", "support.exact_operations", *asked])
    found = json.loads(done)["differ"]
    assert len(found) == len(threads)
    for trials in found.values():
        assert trials
        assert {name: count for name, count in trials.items() if count} == {}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("instructions", ["AVX2", "SSE"])
def test_samplers_and_trainers_agree_with_other_instructions(instructions: str) -> None:
    """The tests above, and the trial of both built-in models, in another process."""
    chosen = "every_layout or seven_hundred or any_model or trial_of_a_family"
    tests = ["-m", "pytest", __file__, "-k", chosen, "-m", "not full", "-p", "no:cacheprovider"]
    told = with_instructions(instructions, [*tests, "--rootdir", str(HERE.parent)])
    assert " passed" in told and "failed" not in told


def with_instructions(instructions: str, arguments: list[str]) -> str:
    """What Python prints in a process with other instructions, which ends well."""
    paths = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **INSTRUCTIONS[instructions], "PYTHONPATH": paths},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# --- Gradients.
@pytest.mark.parametrize("name", ["builtin:tiny", "builtin:small"])
@pytest.mark.parametrize("share", [False, True])
def test_the_gradient_is_the_usual_one_but_for_rounding(name: str, share: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 200, (12, 70), generator=noise)
    tokens[:, :30] = tokens[:1, :30]
    rows = unpadded(tokens)
    rows = TokenBatch(
        tokens=tokens,
        attention_mask=rows.attention_mask,
        response_mask=(torch.arange(70) >= 30).expand(12, -1),
    )
    gradients = []
    for exact in (False, True):
        model = load_policy(name, LoadOptions(seed=1, exact=exact))
        _, gradient = trained_on(model, rows, share_prefix=share)
        gradients.append(gradient)
    usual, found = gradients
    assert (found - usual).norm() <= 1e-6 * usual.norm()
    assert usual.norm() > 0


@pytest.mark.parametrize("kind", ["SiLU", "GELU"])
def test_activations_have_the_values_and_gradients_of_pytorch(kind: str) -> None:
    x = torch.linspace(-30, 30, 1001, requires_grad=True)
    ours, theirs = {
        "SiLU": (ExactSilu(), torch.nn.SiLU()),
        "GELU": (ExactTanhGelu(), torch.nn.GELU(approximate="tanh")),
    }[kind]
    torch.testing.assert_close(ours(x), theirs(x))
    (mine,) = torch.autograd.grad(ours(x).sum(), x)
    (wanted,) = torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(mine, wanted, rtol=0, atol=0)
    extremes = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4])
    torch.testing.assert_close(ours(extremes), theirs(extremes))


# --- What has no exact form.
# What is told of the families that are refused; all others are exact.
REFUSED = {
    "qwen2_moe": "no exact form of Qwen2MoeTopKRouter",
    "qwen3_moe": "no exact form of Qwen3MoeExperts",
    "qwen3_next": "no exact form of Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "no exact form of Qwen3_5GatedDeltaNet",
    "mistral": "attention with sliding_window",
    "mixtral": "no exact form of MixtralTopKRouter",
    "gemma2": "attention with softcap, sliding_window",
    "gemma3_text": "attention with sliding_window",
    "gemma3": "no exact form of Conv2d",
    "gpt2": "no exact form of Conv1D",
    "gpt_oss": "no exact form of GptOssAttention",
    "olmo3": "attention with sliding_window",
    "cohere2": "attention with sliding_window",
    "lfm2": "no exact form of Conv1d",
    "bloom": "computes its attention in code of its own",
    "falcon": "no exact form of FalconLinear",
    "deepseek_v3": "no exact form of DeepseekV3Experts",
    "mamba": "no exact form of MambaMixer",
    "mamba2": "no exact form of Mamba2Mixer",
}


@pytest.mark.parametrize("family", ["llama", "gemma", "phi"])
def test_a_trial_of_other_families_passes(family: str) -> None:
    check_exact(tiny(family).config, temperature=1.0, share_prefix=True)


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_a_trial_of_every_other_family_passes(family: str) -> None:
    shares = family != "stablelm"  # passes no layout on to its attention
    check_exact(tiny(family).config, temperature=1.0, share_prefix=shares)


@pytest.mark.parametrize(("family", "told"), REFUSED.items())
def test_a_family_without_an_exact_form_is_refused(family: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.exact: .*{told}.*; set run.exact: false"):
        check_exact(tiny(family).config, temperature=1.0, share_prefix=False)


@pytest.mark.parametrize(
    ("activation", "named"),
    [("quick_gelu", "QuickGELUActivation"), ("mish", "MishActivation"), ("tanh", "Tanh")],
)
def test_an_activation_without_an_exact_form_is_refused(activation: str, named: str) -> None:
    config = tiny("llama").config
    config.hidden_act = activation
    told = rf"no exact form of {named} \(model.layers.0.mlp.act_fn\) exists"
    with pytest.raises(ConfigError, match=told):
        check_exact(config, temperature=1.0, share_prefix=False)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu_new", "gelu", "relu", "relu2"])
def test_other_activations_agree(activation: str) -> None:
    config = tiny("llama").config
    config.hidden_act = activation
    check_exact(config, temperature=1.0, share_prefix=True)


def test_without_onednn_there_is_no_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="oneDNN.*set run.exact: false"):
        load_policy("builtin:tiny", LoadOptions(exact=True))


def test_a_critic_and_a_run_without_exact_mode_have_nothing_of_it() -> None:
    critic = load_critic("builtin:tiny", LoadOptions(exact=True))
    policy = load_policy("builtin:tiny", LoadOptions())
    for model in (critic, policy):
        kinds = {type(module) for module in model.modules()}
        assert not kinds & {ExactLinear, ExactSilu}
    assert policy.config._attn_implementation == "sdpa"


# --- The trial before the first step.
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("name", ["builtin:tiny", "builtin:small"])
def test_a_trial_of_a_family_that_is_exact_passes(name: str, threads: int) -> None:
    check_exact(builtin_policy(name, seed=0).config, temperature=0.7, share_prefix=True)


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_trial_has_the_vocabulary_of_the_run(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads share the sum of a row alone only where it is wide."""
    config = builtin_policy("builtin:tiny", seed=0).config
    config.vocab_size = 49_157
    widths: set[int] = set()
    plain = oxrl.functional.logprobs.logsumexp_of_rows

    def noted(z: Tensor, **how: bool) -> Tensor:
        widths.add(z.shape[1])
        lone.add(len(z) == 1)
        return plain(z, **how)

    lone: set[bool] = set()
    monkeypatch.setattr(oxrl.functional.logprobs, "logsumexp_of_rows", noted)
    check_exact(config, temperature=0.7, share_prefix=True)
    assert widths == {49_157} and lone == {True, False}


@pytest.mark.parametrize(
    "module", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj", "model.norm"]
)
def test_a_trial_names_the_first_module_that_depends_on_the_batch(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact_but_for_one(model: PreTrainedModel) -> None:
        make_exact(model)

        def count(module: Any, given: Any, output: Tensor) -> Tensor:
            return output + 1e-3 * output.shape[0] * output.shape[1]

        model.get_submodule(module).register_forward_hook(count)

    monkeypatch.setattr("oxrl.models.exact_contract.make_exact", exact_but_for_one)
    cfg = exact_run(tmp_path, "run", model={"name": "builtin:tiny"})
    with pytest.raises(ConfigError) as refused:
        run(cfg)
    assert not (cfg.run.directory / "metrics.jsonl").is_file()
    told = str(refused.value)
    assert f"depends on the batch is {module};" in told
    assert "row " in told and "set run.exact: false" in told


@pytest.mark.parametrize("row", [0, 2])
def test_where_no_module_differs_none_is_named(row: int) -> None:
    model = exact_model("builtin:tiny")
    batch = unpadded(torch.arange(3, 3 + 120).view(3, 40))
    assert first_apart(model, batch, row, 39) == "the output head"
