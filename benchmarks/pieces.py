"""What each training rank holds, reads and writes of a model: a ledger of memory and bytes.

    python benchmarks/pieces.py [--engines fsdp zero3 zero2] [--ranks 2 4 8] [--whole]

Most of any rank, a line each: peak of memory while a reference is loaded (resident, as the kernel
counts it, over what the process had before), bytes read for that, bytes written of a checkpoint
with moments, bytes read to resume from it, and CPU seconds of the resume; `of_ranks` are sums over
the ranks. The bound of the peak is (1 / ranks + 0.1) of the model and one bucket; ZeRO-2 keeps the
whole model on every rank, so that its bound is that. `--whole`: every rank loads the whole model
first, as a comparison. The model is random, 235 MB in float32; gloo ranks here, one thread each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 1e6
CONTEXT = multiprocessing.get_context("forkserver")
IMPORTS = ["torch", "transformers", "oxrl.models.load", "oxrl.engines.train.fsdp"]
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}


def write_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **SIZES,
        vocab_size=8192,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def counters() -> dict[str, int]:
    """Bytes that this process has read and written so far, by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024


def rank_body(engine: str, source: str, target: str, whole: bool, environment: Any) -> None:
    os.environ.update(environment)
    import torch

    from oxrl.engines.train.joined_ranks import joined_ranks
    from oxrl.engines.train.options import TrainerOptions
    from oxrl.models.load import LoadOptions, load_policy
    from oxrl.models.weights import sent_bytes
    from oxrl.tables.engines import TRAINING_ENGINES
    from oxrl.tables.watch import Deadlines

    torch.set_num_threads(1)
    settings = {} if engine == "fsdp" else {"zero_stage": int(engine[-1])}
    builder = TRAINING_ENGINES["fsdp" if engine == "fsdp" else "deepspeed"].load()
    # ZeRO-2 keeps whole weights on every rank; only moments and gradients are cut up.
    later = LoadOptions(on_meta=not whole and engine != "zero2")
    found: dict[str, float] = {}
    with joined_ranks(torch.device("cpu"), Deadlines.alike(600)) as ranks:
        if engine != "fsdp":
            import deepspeed  # noqa: F401  (what it takes is not the model's)
        ranks.agree("all are here")
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        read = counters()["rchar"]
        options = TrainerOptions(lr=0.0, trained=False)
        # ZeRO-2 cuts up what an optimizer holds; a reference beside it is whole.
        frozen = {"zero_stage": 0} if engine == "zero2" else settings
        reference = builder(load_policy(source, later), options, ranks=ranks, **frozen)
        found["load peak MB"] = (resident("VmHWM") - before) / MB
        found["load read MB"] = (counters()["rchar"] - read) / MB
        del reference
        options = TrainerOptions(lr=1e-3)
        trainer = builder(load_policy(source, later), options, ranks=ranks, **settings)
        if (Path(target) / "trainer_state.json").exists():
            read = counters()["rchar"]
            spent = time.process_time()
            trainer.load(Path(target))
            found["resume CPU s"] = time.process_time() - spent
            found["resume read MB"] = (counters()["rchar"] - read) / MB
        written = counters()["wchar"]
        trainer.save(Path(target).with_name(f"{engine}_{ranks.world}"))
        found["written MB"] = (counters()["wchar"] - written) / MB
        lines = ranks.gather(found)
        if ranks.first:
            model = Path(source, "model.safetensors").stat().st_size / MB
            share = 1.0 if whole or engine == "zero2" else 1 / ranks.world
            case = {"case": f"{engine} {ranks.world}", "model_mb": model}
            case["bound_mb"] = (share + 0.1) * model + sent_bytes(torch.device("cpu")) / MB
            for name in found:
                key = name.lower().replace(" ", "_")
                case[key] = max(line[name] for line in lines)
                if key != "load_peak_mb":
                    case[f"{key}_of_ranks"] = sum(line[name] for line in lines)
            print(json.dumps({name: _rounded(value) for name, value in case.items()}), flush=True)


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def run_ranks(world: int, *arguments: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started: list[Any] = []
    for rank in range(world):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
        started.append(CONTEXT.Process(target=rank_body, args=(*arguments, own)))
        started[-1].start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a rank failed")


def checkpoint_of_one(source: str, target: Path) -> None:
    """A checkpoint with moments: weights beside themselves twice, as if they were moments."""
    import torch

    from oxrl.engines.train.local import LocalTrainer
    from oxrl.engines.train.options import TrainerOptions
    from oxrl.models.load import load_policy

    trainer = LocalTrainer(load_policy(source), TrainerOptions(lr=1e-3))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer._clip_and_step(1e-3)  # pyright: ignore[reportPrivateUsage]
    trainer.save(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["fsdp", "zero3"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    CONTEXT.set_forkserver_preload(IMPORTS)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        target = Path(folder) / "saved"
        for body, arguments in (
            (write_model, (source,)),
            (checkpoint_of_one, (str(source), target)),
        ):
            process = CONTEXT.Process(target=body, args=arguments)
            process.start()
            process.join()
        for engine in asked.engines:
            for world in asked.ranks:
                run_ranks(world, engine, str(source), str(target), asked.whole)


if __name__ == "__main__":
    main()
