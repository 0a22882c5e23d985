"""The plan: sums that can be checked by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oxrl.assembly.reference import reference_text
from oxrl.checkpoint.model_files import save_model
from oxrl.config import load_config
from oxrl.config.conditions import has_reference_model
from oxrl.config.dry_run import dry_run_config
from oxrl.errors import ConfigError
from oxrl.modelfiles.builtin import BUILTIN_DIMS
from oxrl.modelfiles.dims import model_dims
from oxrl.models.load import load_policy
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.plan.memory import (
    ALLOCATED,
    RUNTIME,
    adapter_parameters,
    machine_memory,
    memory,
    memory_needed,
    micro_batch,
    rows_no_longer,
    sampler_bytes,
    sync_bytes,
)
from oxrl.plan.plan import plan_text
from oxrl.tables.cells import CRITIC
from oxrl.tables.policy import ROWS


def test_the_batch_equation_is_told_in_words(write: Callable[..., Path]) -> None:
    """12 prompts x 8 samples = 96 rows; 2 epochs x 3 minibatches = 6 steps; 12 / 6 = 2 rollouts =
    192 responses; 10 rows in the file, 24 prompts drawn.
    """
    text = plan_text(
        load_config(write(), ["train.epochs=2", "train.minibatches=3", "rollout.max_tokens=100"])
    )
    for words in (
        "12 prompts x 8 samples = 96 rows per rollout step",
        "96 rows in 3 minibatches of 32 rows, 2 epochs = 6 optimizer steps per rollout step",
        "12 optimizer steps = 2 rollout steps = 192 responses, at most 19,200 tokens",
        "data/train.jsonl: 10 rows; 24 prompts drawn = 2.40 passes over the data",
    ):
        assert words in text


def test_few_rows_of_many_are_told_as_few_and_not_as_none(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    rows = tmp_path / "many.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 5000)
    text = plan_text(
        load_config(write(), [f"data.train={rows}", "run.steps=1", "data.prompts_per_step=12"])
    )
    assert "12 prompts drawn, less than 0.01 passes over the data" in text


def test_the_plan_says_where_a_limit_comes_from_and_what_it_does(
    write: Callable[..., Path],
) -> None:
    text = plan_text(load_config(write()))
    [limit] = [line for line in text.splitlines() if line.startswith("micro-batch ")]
    assert "tokens (train.micro_batch_tokens: auto, " in limit
    assert limit.endswith("); affects memory, not the gradient")
    assert "timeouts without progress: load" in text


def test_a_supervised_run_counts_rows(write: Callable[..., Path]) -> None:
    text = plan_text(
        load_config(
            write(train={"alg_name": "sft"}, data={"rows_per_step": 5, "eval": "data/test.jsonl"})
        )
    )
    for words in (
        "5 rows per optimizer step",
        "12 optimizer steps = 60 rows",
        "= 6.00 passes",
        "10 rows of data/test.jsonl",
    ):
        assert words in text


@pytest.mark.parametrize("name", BUILTIN_DIMS)
def test_the_parameter_count_of_a_built_in_model_is_exact(name: str) -> None:
    dims = model_dims(name)
    assert dims is not None
    assert dims.parameters == sum(p.numel() for p in load_policy(name).parameters())


def test_the_parameter_count_of_a_published_model_is_exact(folder: Path) -> None:
    """Qwen2.5-0.5B: 494,032,768 parameters with tied embeddings (its model card says 0.49B)."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }
    (folder / "config.json").write_text(json.dumps(config))
    dims = model_dims(".")
    assert dims is not None
    assert (dims.parameters, dims.context) == (494_032_768, 32768)


def test_stored_weights_are_counted_from_their_headers(folder: Path) -> None:
    config = {**BUILTIN_DIMS["builtin:tiny"], "model_type": "unknown"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, folder / "model.safetensors")
    save_file({"a": torch.zeros(3, 5)}, folder / "optimizer_exp_avg-00000.safetensors")
    dims = model_dims(str(folder))
    assert dims is not None and dims.parameters == 22
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    assert model_dims(str(folder)) is None


def test_memory_counts_weights_moments_gradients_reference_and_critic(
    write: Callable[..., Path],
) -> None:
    """float32: 4 + 8 held, + 4 for gradients. A reference adds 4 held, a critic doubles. bfloat16:
    2 + 4 + 8, + 4: the gradients of one micro-batch appear as its activations go.
    """
    dims = model_dims("builtin:tiny")
    assert dims is not None

    def per_parameter(*overrides: str) -> float:
        phases = memory(load_config(write(), overrides), dims).phases
        smaller = memory(
            load_config(write(), overrides), dataclasses.replace(dims, parameters=0)
        ).phases
        return (phases["update"] - smaller["update"]) / dims.parameters

    assert per_parameter() == 16
    assert per_parameter("train.kl_coeff=0.1") == 20
    assert per_parameter("train.alg_name=ppo") == 32
    assert per_parameter("model.dtype=bfloat16") == 18
    assert per_parameter("model.dtype=bfloat16", "train.master_weights=none") == 14


def test_ranks_stages_and_offload_divide_the_memory_of_each_rank(
    write: Callable[..., Path], hub: Path
) -> None:
    """bfloat16, 4 ranks: 2 weights + 12 state + 6 gradients = 20 per parameter, each divided by 4
    from its stage on.
    """
    base = model_dims("Qwen/Qwen2.5-7B")
    assert base is not None and base.parameters == 7_615_616_512  # "7.61B" on its card

    def per_parameter(*overrides: str, algorithm: str = "sft") -> float:
        settings = [
            "train.backend=deepspeed",
            "run.training_gpus=4",
            "model.dtype=bfloat16",
            *overrides,
        ]
        cfg = load_config(write(train={"alg_name": algorithm}), settings)
        whole, half = (
            memory(cfg, dataclasses.replace(base, parameters=n, layers=0)).phases
            for n in (80 * 10**9, 40 * 10**9)
        )
        return (whole["update"] - half["update"]) / (40 * 10**9)

    assert per_parameter("deepspeed.zero_stage=1") == 2 + 12 / 4 + 6
    step = 4 / 4  # one float32 copy of a rank's piece, when gradients of micro-batches are gone
    assert per_parameter("deepspeed.zero_stage=2") == 2 + 12 / 4 + 4 / 4 + step
    gathered = (
        2  # all that is outside of layers is whole while it runs, and these models have no layers
    )
    assert per_parameter("deepspeed.zero_stage=3") == 20 / 4 + gathered
    # Pieces are float32: weights and masters in one.
    assert per_parameter("train.backend=fsdp") == 16 / 4 + gathered
    assert per_parameter("train.backend=fsdp", "fsdp.offload_optimizer=true") == gathered
    assert (
        per_parameter("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=true")
        == 8 / 4 + gathered
    )
    assert (
        per_parameter("deepspeed.zero_stage=3", "deepspeed.offload_param=true") == 18 / 4 + gathered
    )
    reference = per_parameter("deepspeed_ref.zero_stage=0", algorithm="tr_dpo")
    assert reference == 20 / 4 + gathered + 2
    assert per_parameter("deepspeed_ref.zero_stage=3", algorithm="tr_dpo") == reference - 2 + 2 / 4


def test_what_is_offloaded_is_told(write: Callable[..., Path], hub: Path) -> None:
    settings = [
        "train.backend=deepspeed",
        "deepspeed.offload_optimizer=true",
        "model.name=Qwen/Qwen2.5-0.5B",
    ]
    cfg = load_config(write(train={"alg_name": "sft"}), settings)
    dims = model_dims(cfg.model.name)
    assert dims is not None
    _, text = memory_needed(cfg, dims)
    assert "and 5.9 GB offloaded to CPU memory" in text  # 494,032,768 x 12, masters too


@pytest.mark.parametrize("dora", [False, True])
def test_what_a_checkpoint_holds_of_an_adapter_is_exact(
    dora: bool, write: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    model = load_policy("builtin:tiny")
    save_model(model, tmp_path / "base")
    add_adapter(model, AdapterOptions(rank=4, alpha=1.0, dora=dora), base="x", seed=0)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    given = [f"model.name={tmp_path / 'base'}", "lora.rank=4", f"lora.dora={dora}"]
    dims = model_dims("builtin:tiny")
    assert dims is not None
    # The weight and two moments, float32 each.
    assert memory(load_config(write(), given), dims).stored == 3 * 4 * trained


@pytest.mark.parametrize("name", ["nobody/nothing-7b", "Qwen/Qwen2.5-3B", "gone/folder/of/mine"])
def test_a_model_that_is_not_on_this_machine_has_unknown_sizes(
    write: Callable[..., Path], hub: Path, name: str
) -> None:
    text = plan_text(load_config(write(), [f"model.name={name}"]))
    assert "model       unknown" in text


def test_a_model_in_the_cache_of_the_hub_has_its_sizes_and_context(
    write: Callable[..., Path], hub: Path
) -> None:
    settings = ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "rollout.max_tokens=30000"]
    text = plan_text(load_config(write(), settings))
    assert "494,032,768 parameters, context 32768" in text
    with pytest.raises(ConfigError, match="no room for a prompt in the model's context 32768"):
        load_config(write(), [*settings, "rollout.max_tokens=32768"])


def test_parquet_rows_are_counted(write: Callable[..., Path], folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["a", "b", "c"]}), folder / "data" / "train.parquet"
    )
    assert "train.parquet: 3 rows" in plan_text(
        load_config(write(), ["data.train=data/train.parquet"])
    )


def test_a_dry_run_is_one_step_of_a_tiny_model(write: Callable[..., Path], folder: Path) -> None:
    cfg = load_config(
        write(), ["model.name=nobody/nothing-7b", "train.epochs=2", "train.minibatches=3"]
    )
    tiny = dry_run_config(cfg, folder / "dry", "builtin:tiny")
    assert (tiny.run.steps, tiny.model.name, tiny.data.prompts_per_step) == (6, "builtin:tiny", 3)
    assert tiny.train == cfg.train
    vllm = ["inference_engine.name=vllm", "train.correction=null"]
    uncorrected = load_config(write(), vllm)
    tiny = dry_run_config(uncorrected, folder / "dry", "builtin:tiny")
    assert tiny.train.row.correction == uncorrected.train.row.correction == "none"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.alg_name=grpo"], "a second copy of the policy, 592.6 kB"),
        (
            ["train.alg_name=grpo"],
            "for train.kl_coeff = 0.04, the default of grpo; train.kl_coeff=0",
        ),
        (["train.kl_coeff=0.1"], "for train.kl_coeff = 0.1, as configured; train.kl_coeff=0 does"),
        (
            ["train.alg_name=rloo", "lora.rank=4", "model.name=a/b"],
            "its adapter switched off (no memory of its own)",
        ),
    ],
)
def test_a_reference_is_announced_with_its_cost_its_reason_and_how_to_do_without(
    write: Callable[..., Path], overrides: list[str], words: str
) -> None:
    (line,) = [
        line
        for line in plan_text(load_config(write(), overrides)).splitlines()
        if line.startswith("reference ")
    ]
    assert words in line


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("dpo", "dpo needs log-probabilities of the policy before training: computed once per row"),
        ("tr_dpo", "which follows it: tr_dpo asks for it"),
        ("simpo", ""),
        ("sft", ""),
    ],
)
def test_the_reference_of_a_preference_method_is_announced(
    write: Callable[..., Path], algorithm: str, words: str
) -> None:
    told = reference_text(load_config(write(train={"alg_name": algorithm})))
    assert words in told and bool(told) == bool(words)


def test_every_row_whose_defaults_load_a_reference_says_so(write: Callable[..., Path]) -> None:
    for name, row in ROWS.items():
        if row.recipe == "rl" and not row.unsupported:
            overrides = [f"train.alg_name={name}"]
            if row.has(CRITIC):
                overrides.append("train.critic_warmup_steps=0")
            cfg = load_config(write(train={"alg_name": name}), overrides)
            assert bool(reference_text(cfg)) == has_reference_model(cfg), name
            assert has_reference_model(cfg) == bool(row.defaults.get("kl_coeff")), name


def test_what_each_optimizer_keeps_is_counted(write: Callable[..., Path]) -> None:
    """A checkpoint in float32: the weight and what is kept of it. Muon keeps 4 bytes of a matrix
    between hidden layers instead of 8; eight bits keep 2 and a thirty-second of every matrix.
    """
    model = load_policy("builtin:small")
    dims = model_dims("builtin:small")
    assert dims is not None
    inside = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)

    def stored(*overrides: str) -> int:
        return memory(load_config(write(), ["model.name=builtin:small", *overrides]), dims).stored

    assert stored() == 12 * dims.parameters
    assert stored("train.optimizer=muon") == pytest.approx(12 * dims.parameters - 4 * inside)
    eight_bit = 12 * dims.parameters - (8 - 2 - 1 / 32) * matrices
    assert stored("train.optimizer=adamw_8bit") == pytest.approx(eight_bit)
    assert stored("model.dtype=bfloat16") == 14 * dims.parameters
    without = stored("model.dtype=bfloat16", "train.master_weights=none")
    assert without == 10 * dims.parameters


@pytest.mark.parametrize(
    ("algorithm", "rows", "longest", "tokens"),
    [
        ("sft", 4, 30, 4 * 30),  # all of a step's rows, where they fit
        ("sft", 64, 30, 512),  # as many as fit
        ("sft", 4, 700, 700),  # one that does not fit goes alone
        ("dpo", 2, 30, 2 * 2 * 30),
        ("dpo", 64, 30, 512),
        ("dpo", 4, 700, 2 * 700),  # a pair stays together
    ],
)
def test_rows_that_are_given_are_read_as_they_fit(
    write: Callable[..., Path], algorithm: str, rows: int, longest: int, tokens: int
) -> None:
    given = ["train.micro_batch_tokens=512"]
    path = write(train={"alg_name": algorithm}, data={"rows_per_step": rows})
    cfg = rows_no_longer(load_config(path, given), longest)
    assert micro_batch(cfg).tokens == tokens


def test_what_the_machine_has_is_what_its_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("oxrl.plan.memory.MEMORY_LIMIT", limit)
    whole = machine_memory()
    assert whole > 10**8
    for text, there in (("max\n", whole), ("12345678\n", 12345678), (f"{10**18}\n", whole)):
        limit.write_text(text)
        assert machine_memory() == there


# Case -> width of the model. Products in bfloat16 take a processor without them long.
PLANNED = {
    "sft, bfloat16, checkpointing": 64,
    "sft, lora": 128,
    "rl, reference": 128,
    "rl, reference, bfloat16": 128,
}


@pytest.mark.filterwarnings("ignore:model.dtype = bfloat16 on run.device = cpu")
@pytest.mark.parametrize("case", PLANNED)
def test_the_plan_is_what_the_tensors_of_a_run_take(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State within 2 %, the peak of a step within 10 %; all cases in benchmarks/plan_memory.py."""
    folder = Path(__file__).resolve().parent.parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("plan_memory", folder / "plan_memory.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.write_models(tmp_path, PLANNED[case], case)
    # Sampled by the model as it was written, in both steps: how long responses are is known.
    still = ["train.lr=1e-9"] if case.startswith("rl") else []
    found = bench.compare(tmp_path, [*bench.CASES[case], *still])
    assert abs(found["state_off"]) <= 0.02, found
    assert abs(found["peak_off"]) <= 0.10, found
    assert abs(found["stored_off"]) <= 0.02, found


def test_adapters_of_a_model_in_bfloat16_are_planned_with_their_masters(
    write: Callable[..., Path], hub: Path
) -> None:
    """bfloat16 beside a master and two moments in float32; with magnitudes all of it is float32."""
    dims = model_dims("Qwen/Qwen2.5-0.5B")
    assert dims is not None
    given = ["model.name=Qwen/Qwen2.5-0.5B", "lora.rank=4", "model.dtype=bfloat16"]
    cfg = load_config(write(), given)
    assert memory(cfg, dims).stored == 14 * adapter_parameters(cfg, dims)
    assert sync_bytes(cfg, dims) == 2 * adapter_parameters(cfg, dims)
    cfg = load_config(write(), [*given, "lora.dora=true"])
    assert memory(cfg, dims).stored == 12 * adapter_parameters(cfg, dims)


def test_memory_of_sampling_processes_is_counted_in_every_phase(write: Callable[..., Path]) -> None:
    """Each has weights, slots and a Python of its own, all of the time."""
    dims = model_dims("builtin:tiny")
    assert dims is not None
    cfgs = [load_config(write(), [f"inference_engine.processes={n}"]) for n in range(4)]
    zero, one, two, three = (memory(cfg, dims) for cfg in cfgs)
    each = sampler_bytes(cfgs[1], dims)
    weights = dims.parameters * 4
    assert each == sampler_bytes(cfgs[0], dims) + weights
    assert one.held == zero.held + weights
    for phase, size in one.phases.items():
        assert two.phases[phase] - size == three.phases[phase] - two.phases[phase] == each
    needed = [memory_needed(cfg, dims)[0] for cfg in cfgs]
    assert needed[2] - needed[1] == pytest.approx(RUNTIME + ALLOCATED * each, abs=2)
    assert needed[1] - needed[0] == pytest.approx(RUNTIME + ALLOCATED * weights, abs=2)


def test_what_a_delivery_sends_is_told(write: Callable[..., Path]) -> None:
    """builtin:tiny has 148,160 parameters: 592.6 kB in float32."""
    here = ["inference_engine.actors=2"]
    text = plan_text(load_config(write(), here))
    assert "592.6 kB of weights per delivery to each of 2 samplers, from this process" in text
    text = plan_text(load_config(write(), [*here, "train.backend=fsdp"]))
    assert "from the training ranks, none through this process" in text
    assert "per delivery" not in plan_text(load_config(write()))
