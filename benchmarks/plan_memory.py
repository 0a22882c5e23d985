"""What `oxrl plan` predicts of the memory of an update, beside what tensors really take.

    python benchmarks/plan_memory.py [--widths 128 256] [--cases sft muon ...] [--models NAME ...]

Measured: bytes behind every tensor that is alive at a time, at their peak while gradients are
computed and weights stepped, in a whole run of two optimizer steps by `oxrl.train`, less what was
alive before it. Rollout: the same while responses are sampled and scored. State: the same at the
end of the last step, when activations and gradients are gone. Predicted: `memory` of
oxrl/plan/memory.py, from the configuration and config.json of the model alone. Stored: files of
tensors of the last checkpoint. Random models of four layers in micro-batches of 512 tokens, or
models that are named (a teacher is then another one of the same name); cases of ranks are processes
over gloo, the most that one held.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
LENGTH = 64  # tokens of the rows of data
LAYERS = 4
SFT = ["train.alg_name=sft"]
DPO = ["train.alg_name=dpo"]
BF16 = "model.dtype=bfloat16"
CHECKPOINTING = "model.gradient_checkpointing=true"
CASES: dict[str, list[str]] = {
    "sft": SFT,
    "sft, checkpointing": [*SFT, CHECKPOINTING],
    "sft, checkpointing, offloaded": [*SFT, CHECKPOINTING, "model.offload_activations=true"],
    "sft, bfloat16": [*SFT, BF16],
    "sft, bfloat16, checkpointing": [*SFT, BF16, CHECKPOINTING],
    "sft, bfloat16, no masters": [*SFT, BF16, "train.master_weights=none"],
    "sft, muon": [*SFT, "train.optimizer=muon"],
    "sft, adamw_8bit": [*SFT, "train.optimizer=adamw_8bit"],
    "sft, lora": [*SFT, "lora.rank=8"],
    "sft, lora, bfloat16": [*SFT, "lora.rank=8", BF16],
    "sft, micro-batches of 128": [*SFT, "train.micro_batch_tokens=128"],
    "sft, micro-batches of 2048": [*SFT, "train.micro_batch_tokens=2048", "data.rows_per_step=64"],
    "sft, vocabulary 8192": SFT,
    "sft, llama": SFT,
    "sft, llama, bfloat16": [*SFT, BF16],
    "dpo": DPO,
    "dpo, moving reference": ["train.alg_name=tr_dpo"],
    "reward model": ["train.alg_name=reward_model"],
    "rl": ["train.alg_name=sgrpo"],
    "rl, prompts read per row": ["train.alg_name=sgrpo", "train.share_prefix=false"],
    "rl, reference": ["train.alg_name=grpo"],
    "rl, reference, bfloat16": ["train.alg_name=grpo", BF16],
    "rl, critic": ["train.alg_name=ppo"],
    "rl, teacher": ["train.alg_name=opd_topk"],
    "rl, teacher, bfloat16": ["train.alg_name=opd_topk", BF16],
    "rl, lora, reference": ["train.alg_name=grpo", "lora.rank=8"],
    "rl, bfloat16": ["train.alg_name=sgrpo", BF16],
    "rl, several steps per rollout": ["train.alg_name=sgrpo", "train.minibatches=2"],
}

FSDP = [*SFT, "train.backend=fsdp"]
ZERO = [*SFT, "train.backend=deepspeed"]
ON_RANKS: dict[str, list[str]] = {
    "fsdp x 2": FSDP,
    "fsdp x 2, checkpointing": [*FSDP, CHECKPOINTING],
    "fsdp x 2, bfloat16": [*FSDP, BF16],
    "fsdp x 2, bfloat16, no masters": [*FSDP, BF16, "train.master_weights=none"],
    "fsdp x 2, lora": [*FSDP, "lora.rank=8"],
    "fsdp x 2, offloaded": [*FSDP, "fsdp.offload_optimizer=true"],
    "fsdp x 2, reference": ["train.alg_name=tr_dpo", "train.backend=fsdp"],
    "fsdp x 2, vocabulary 8192": FSDP,
    "zero1 x 2": [*ZERO, "deepspeed.zero_stage=1"],
    "zero2 x 2": [*ZERO, "deepspeed.zero_stage=2"],
    "zero3 x 2": [*ZERO, "deepspeed.zero_stage=3"],
    "zero3 x 2, bfloat16": [*ZERO, "deepspeed.zero_stage=3", BF16],
    "zero3 x 2, reference": ["train.alg_name=tr_dpo", "train.backend=deepspeed"],
}
RANK_ROWS = 8  # of a micro-batch


def write_model(folder: Path, width: int, case: str = "") -> None:
    """A random model and its tokenizer, as large as a case asks for."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    from oxrl.models.load import load_tokenizer

    classes: dict[bool, Any] = {False: Qwen3Config, True: LlamaConfig}
    config = classes["llama" in case](
        vocab_size=8192 if "vocabulary" in case else 261,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=2048,
        tie_word_embeddings="llama" not in case,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("builtin:small").save_pretrained(folder)


def write_models(folder: Path, width: int, case: str) -> None:
    """The model of a case, and its teacher of the same size where it has one."""
    write_model(folder / "model", width, case)
    if "teacher" in case:
        write_model(folder / "teacher", width, case)


def write_config(folder: Path, overrides: list[str], model: str = "") -> Path:
    """The configuration of a run of two optimizer steps on a model, or that in `folder`/model."""
    recipe = next(text for text in overrides if text.startswith("train.alg_name="))
    data: dict[str, Any] = {"train": str(folder / "rows.jsonl"), "rows_per_step": 16}
    sections: dict[str, Any] = {
        "run": {"name": "plan", "dir": str(folder / "run"), "steps": 2, "device": "cpu"},
        "model": {"name": model or str(folder / "model")},
        "data": data,
        "train": {"alg_name": "sft", "lr": 1e-4, "micro_batch_tokens": 8 * LENGTH},
    }
    sections["run"] |= {"mlflow": False, "checkpoint_every": 0, "console": "quiet"}
    sections["model"]["max_length"] = LENGTH
    answer = "2" * (LENGTH - 9)  # and a prompt of five characters and four marks
    row: dict[str, Any] = {"prompt": "1+1=", "completion": answer}
    if any(name in recipe for name in ("grpo", "ppo", "opd")):
        del data["rows_per_step"]
        # The chat template of a model in a folder has tokens of its own.
        in_folder = bool(model) and Path(model).is_dir()
        asked = LENGTH if in_folder else LENGTH // 2
        sections["model"]["max_length"] = asked + LENGTH // 2
        data |= {"prompts_per_step": 8, "max_prompt_tokens": asked}
        row = {"prompt": "1" * (LENGTH // 2 - 4), "answer": "2"}
        sections["reward"] = {"name": "exact"}
        sections["rollout"] = {"n_samples": 4, "max_tokens": LENGTH // 2}
        if "opd" in recipe:
            if in_folder:
                shutil.copytree(model, folder / "teacher")
            named = str(folder / "teacher") if (folder / "teacher").is_dir() else model
            sections["model"]["teachers"] = {"big": {"name": named}}
        if "ppo" in recipe:
            sections["train"]["critic_warmup_steps"] = 0
    elif "sft" not in recipe:
        row = {"prompt": "1+1=", "chosen": answer, "rejected": answer[:-1] + "3"}
    lines = [json.dumps(row | {"prompt": f"{index % 10}{row['prompt']}"}) for index in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "plan.yaml"
    path.write_text(json.dumps(sections))
    return path


def predicted(path: Path, overrides: list[str]) -> dict[str, int]:
    """Bytes of the state, at the peak of an update, and of a checkpoint, wherever they are."""
    from oxrl.config import load_config
    from oxrl.modelfiles.dims import model_dims
    from oxrl.plan.activations import activation_bytes
    from oxrl.plan.memory import memory, micro_batch

    cfg = load_config(path, overrides)
    dims = model_dims(cfg.model.name)
    assert dims is not None
    found = memory(cfg, dims)
    activations = activation_bytes(cfg, dims, micro_batch(cfg))
    return {
        "state": found.held + found.offloaded - activations.offloaded,
        "peak": found.phases["update"] + found.offloaded,
        "rollout": found.phases.get("rollout", 0) + found.offloaded,
        "stored": found.stored,
    }


def measured(run: Callable[[], object]) -> dict[str, int]:
    """As `predicted`, of a run that makes its updates with the classes of engines/train."""
    from tensor_bytes import PeakBytes

    from oxrl.engines.train.trainer import Trainer
    from oxrl.rollouts.sync import SyncRollouts

    peaks: list[int] = []
    states: list[int] = []
    rollouts: list[int] = []
    sample = SyncRollouts.next
    forward_backward = Trainer.forward_backward
    optim_step = Trainer.optim_step

    ledger = PeakBytes()
    gc.unfreeze()
    ledger.take_in_everything()
    before = ledger.now
    gc.freeze()  # what is in the ledger by now is not looked through again

    def counted_backward(*arguments: Any) -> Any:
        ledger.take_in_everything()
        with ledger:
            found = forward_backward(*arguments)
        peaks.append(ledger.peak)
        return found

    def counted_step(*arguments: Any) -> Any:
        ledger.take_in_everything()
        with ledger:
            found = optim_step(*arguments)
        peaks.append(ledger.peak)
        states.append(ledger.now)
        return found

    def counted_rollout(*arguments: Any, **named: Any) -> Any:
        ledger.take_in_everything()
        with ledger:
            found = sample(*arguments, **named)
        rollouts.append(ledger.peak)
        return found

    with ExitStack() as stack:
        # A run freezes what it has built, and that would not be listed.
        stack.enter_context(mock.patch.multiple(gc, freeze=mock.Mock(), unfreeze=mock.Mock()))
        stack.enter_context(mock.patch.object(Trainer, "forward_backward", counted_backward))
        stack.enter_context(mock.patch.object(Trainer, "optim_step", counted_step))
        stack.enter_context(mock.patch.object(SyncRollouts, "next", counted_rollout))
        run()
    found = {"state": states[-1] - before, "peak": max(peaks) - before}
    if rollouts:
        found["rollout"] = max(rollouts) - before
    return found


def tensor_files(checkpoint: Path) -> int:
    """Bytes of the files of tensors in a checkpoint, without the words at their beginning."""
    found = 0
    for path in checkpoint.rglob("*.safetensors"):
        with path.open("rb") as file:
            words = int.from_bytes(file.read(8), "little")
        found += path.stat().st_size - 8 - words
    return found


def compare(folder: Path, overrides: list[str], model: str = "") -> dict[str, float]:
    """Plan two updates of a model, or of that in `folder`/model, and make them."""
    import oxrl

    path = write_config(folder, overrides, model)
    planned = predicted(path, overrides)
    found = measured(lambda: oxrl.train(path, overrides=overrides))
    found["stored"] = tensor_files(max((folder / "run" / "checkpoints").glob("step_*")))
    return figures(planned, found)


def figures(planned: dict[str, int], found: dict[str, int]) -> dict[str, float]:
    """Both in MB, and by how much the plan is off."""
    shown: dict[str, float] = {}
    for name, size in found.items():
        shown[f"predicted_{name}"] = round(planned[name] / 1e6, 3)
        shown[f"measured_{name}"] = round(size / 1e6, 3)
        shown[f"{name}_off"] = round(planned[name] / size - 1, 3)
    return shown


def rank_body(folder: str, overrides: list[str], environment: dict[str, str]) -> None:
    """Two updates by one of several ranks; the first prints what it held."""
    import os

    os.environ.update(environment)
    import torch

    from oxrl.assembly.assembly import Assembly
    from oxrl.config import load_config
    from oxrl.config.conditions import has_reference_model
    from oxrl.engines.train.joined_ranks import joined_ranks
    from oxrl.types import SupervisedBatch, TokenBatch

    torch.set_num_threads(1)
    cfg = load_config(Path(folder) / "plan.yaml", overrides)
    rows = 2 * RANK_ROWS * cfg.run.training_gpus
    whole = torch.ones(rows, LENGTH, dtype=torch.bool)
    answered = whole.clone()
    answered[:, 0] = False
    tokens = torch.randint(2, 261, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = TokenBatch(tokens=tokens, attention_mask=whole, response_mask=answered)
    batch = SupervisedBatch(inputs=inputs, loss_weights=answered.float() / answered.sum())

    def loss_of(output: Any, part: Any) -> Any:
        return -(output.logprobs * part.loss_weights).sum(), {}

    with joined_ranks(torch.device("cpu"), cfg.run.waits) as ranks:
        kept: list[Any] = []

        def run() -> None:
            assembly = Assembly(cfg, ranks)
            trainer = assembly.trainer(assembly.policy_to_train(on_meta=assembly.cuts_weights()))
            kept.append(trainer)
            if has_reference_model(cfg):
                kept.append(assembly.scorer())
            for _ in range(2):
                trainer.forward_backward(batch, loss_of, frozenset({"logprobs"}))
                trainer.optim_step()

        found = measured(run)
        most = {name: max(one[name] for one in ranks.gather(found)) for name in found}
        if ranks.first:
            planned = predicted(Path(folder) / "plan.yaml", overrides)
            Path(folder, "found.json").write_text(json.dumps(figures(planned, most)))


def compare_ranks(folder: Path, overrides: list[str], world: int = 2) -> dict[str, float]:
    """As `compare`, on several ranks over gloo; the most that any of them held."""
    import multiprocessing
    import socket
    from importlib.util import find_spec

    from oxrl.errors import MissingExtraError

    if "train.backend=deepspeed" in overrides and find_spec("deepspeed") is None:
        raise MissingExtraError("needs DeepSpeed")
    given = [*overrides, f"run.training_gpus={world}"]
    write_config(folder, given)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []
    for rank in range(world):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
        started.append(context.Process(target=rank_body, args=(str(folder), given, own)))
        started[-1].start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a rank failed")
    return json.loads((folder / "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--cases", nargs="+", default=[*CASES, *ON_RANKS])
    parser.add_argument("--models", nargs="+", default=[], help="in place of random ones")
    options = parser.parse_args()
    from oxrl.errors import MissingExtraError

    for model in options.models:
        for case in options.cases:
            with tempfile.TemporaryDirectory() as name:
                found = compare(Path(name), CASES[case], model)
            print(json.dumps({"case": f"{case}, {model}", **found}), flush=True)
    if options.models:
        return
    for width in options.widths:
        for case in options.cases:
            with tempfile.TemporaryDirectory() as name:
                write_models(Path(name), width, case)
                try:
                    if case in ON_RANKS:
                        found = compare_ranks(Path(name), ON_RANKS[case])
                    else:
                        found = compare(Path(name), CASES[case])
                except MissingExtraError as error:
                    print(f"{case}: not measured: {error}", flush=True)
                    continue
            print(json.dumps({"case": f"{case}, width {width}", **found}), flush=True)


if __name__ == "__main__":
    main()
