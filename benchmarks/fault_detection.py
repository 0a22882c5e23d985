"""Which faults on the way of a weight to a sampled token are found, by what, and how soon.

    python benchmarks/fault_detection.py [--engine local vllm] [--out FOLDER]
        the table: 14 faults x 4 places x 3 dtypes x 4 learning rates
    python benchmarks/fault_detection.py --running
        the same, with requests in flight at every delivery
    python benchmarks/fault_detection.py --syncs 1000 [--engine local vllm]
        false alarms: real training, a delivery after every step, nothing wrong

Between two deliveries the policy takes a real step of AdamW at the learning rate, which is all that
a stale tensor is off by. Places: in `policy.weights()`; on the wire, after what was sent was
fingerprinted; at the sampler while it loads, after what arrived was fingerprinted; at the sampler
later, after the delivery was proved. `local` is the local sampler with weights of its own, `vllm`
needs vLLM. `ray` and `ray-vllm` are the same behind training ranks and rollout actors: two ranks of
FSDP2 send to two actors, no weight passes through this process, and the faults are made in those.
`host` and `host-vllm` are samplers in a process of their own on this machine, which has the faults.

Letters: m the optimizer's own weights, w what arrived, h what the sampler holds, p the probe, l the
sampler's loader, all before anything was sampled; n before the next delivery; = the delivered bytes
are the right ones, and no alarm; ! missed; ? a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.hosted import ThisMachine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.engines.train import Bucket, Part
from oxrl.engines.train.fsdp import FsdpTrainer
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.engines.transport.base import WeightTransport
from oxrl.errors import WeightSyncError
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.modelfiles.builtin import BUILTIN_DIMS, builtin_tokenizer
from oxrl.models.fingerprints import fingerprint
from oxrl.models.weights import Whole
from oxrl.tables.watch import Deadlines
from oxrl.types import (
    Output,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Score,
    SupervisedBatch,
    TokenBatch,
)

Weights = dict[str, Tensor]
Fault = Callable[[Weights, Weights], Weights]

TOKENIZER = builtin_tokenizer()
VOCABULARY = len(TOKENIZER)
EMBEDDING = "model.embed_tokens.weight"
MATRIX = "model.layers.1.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"
Q_NORM = "model.layers.1.self_attn.q_norm.weight"
PAIR = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight")
DTYPES = ("float32", "bfloat16", "float16")
RATES = (1e-6, 1e-5, 1e-4, 3e-4)
WEIGHTS, WIRE, LOAD, LATER = "weights()", "wire", "load", "later"
ENGINES = ("local", "vllm", "ray", "ray-vllm", "host", "host-vllm")
PLACES = (WEIGHTS, WIRE, LOAD, LATER)
ROWS = 16  # of a step
# What an error says -> the letter of what found the fault.
FOUND_BY = {
    "no longer computes with": "n",
    "is not what the optimizer holds": "m",
    "policy.weights()": "m",
    "is kept": "h",
    "arrived": "w",
    "were never loaded": "w",
    "does not use it": "p",
}


def scaled(names: Iterable[str] | None) -> Fault:
    def scale(now: Weights, before: Weights) -> Weights:
        return {n: t * 1.001 if names is None or n in names else t for n, t in now.items()}

    return scale


def stale(name: str) -> Fault:
    return lambda now, before: now | {name: before[name]}


def rounded(dtype: torch.dtype) -> Fault:
    return lambda now, before: {name: t.to(dtype).to(t.dtype) for name, t in now.items()}


def dropped(now: Weights, before: Weights) -> Weights:
    return {name: tensor for name, tensor in now.items() if name != MATRIX}


def permuted(now: Weights, before: Weights) -> Weights:
    first, second = PAIR
    return now | {first: now[second], second: now[first]}


def one_stale_row(now: Weights, before: Weights) -> Weights:
    rows = now[EMBEDDING].clone()
    rows[ord("7") % VOCABULARY] = before[EMBEDDING][ord("7") % VOCABULARY]
    return now | {EMBEDDING: rows}


def one_zeroed(now: Weights, before: Weights) -> Weights:
    values = now[UP].clone()
    values[3, 5] = 0.0
    return now | {UP: values}


FAULTS: dict[str, Fault] = {
    "dropped": dropped,
    "permuted pair": permuted,
    "x 1.001 a matrix": scaled([MATRIX]),
    "x 1.001 a norm": scaled([NORM]),
    "x 1.001 embedding": scaled([EMBEDDING]),
    "x 1.001 all": scaled(None),
    "cast to bf16": rounded(torch.bfloat16),
    "cast to fp8": rounded(torch.float8_e4m3fn),
    "previous version": lambda now, before: before,
    "one stale embedding": one_stale_row,
    "stale up_proj": stale(UP),
    "stale q_norm": stale(Q_NORM),
    "one value zeroed": one_zeroed,
    "skipped": lambda now, before: {},
}


class Policy(LocalTrainer):
    """Trains for real; its weights() lies where `lie` is set."""

    lie: Weights | None = None

    def weights(self, part: Part = "all") -> Iterator[Bucket]:
        if self.lie is None:
            yield from super().weights(part)
        else:
            yield list(self.lie.items())


class Faulty:
    """A sampler with a fault on the way to it, or in it."""

    # Whether its workers take what ranks send by themselves.
    receives = False

    def __init__(self, sampler: Any) -> None:
        self.inner = sampler
        self.place = ""
        self.faulty: Weights = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        if self.place == WIRE and not self.faulty:
            # It is acknowledged, and nothing is loaded.
            self.inner._version = version
            return {name: fingerprint(tensor) for bucket in buckets for name, tensor in bucket}
        if self.place == WIRE:
            for _ in buckets:  # what was sent is fingerprinted as it is taken
                pass
            return self.inner.update_weights([list(self.faulty.items())], version)
        received = self.inner.update_weights(buckets, version)
        if self.place == LOAD:
            self.inner.update_weights([list(self.faulty.items())], version)
        return received


class FaultyReceiver(Faulty):
    """One whose own workers receive what ranks send."""

    def receive(self, version: int) -> Mapping[str, str]:
        """As `update_weights`, where vLLM's own workers receive: the fault comes right after."""
        received = self.inner.receive(version)
        if self.place == WIRE and self.faulty:
            return self.inner.update_weights([list(self.faulty.items())], version)
        if self.place == LOAD:
            self.inner.update_weights([list(self.faulty.items())], version)
        return received


def new_model(seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The quickstart's model with heads that vLLM's CPU attention has, and lively logits."""
    dims: dict[str, Any] = {**BUILTIN_DIMS["builtin:tiny"], "head_dim": 32}
    torch.manual_seed(seed)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**dims, tie_word_embeddings=True, **special))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(5 if name == EMBEDDING else 6)
    return model.to(dtype).eval()


def new_sampler(engine: str, dtype: torch.dtype, folder: Path) -> Faulty:
    model = new_model(0, dtype)
    if engine == "local":
        return Faulty(LocalSampler(model, TOKENIZER, max_rows=8))
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    folder = folder / str(os.getpid())  # actors do not write the same files
    save_model(model, folder)
    TOKENIZER.save_pretrained(folder)
    name = str(dtype).removeprefix("torch.")
    options = VllmOptions(dtype=name, max_model_len=128, log_file=str(folder / "vllm.log"))
    return FaultyReceiver(VllmEngine(str(folder), options))


def train(policy: Policy, step: int) -> None:
    """One step on sums, which there are more of than steps."""
    generator = torch.Generator().manual_seed(step)
    pairs = torch.randint(10, 99, (ROWS, 2), generator=generator).tolist()
    rows = [TOKENIZER(f"{a}+{b}={a + b:03d};")["input_ids"] for a, b in pairs]
    tokens = torch.tensor(rows)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    inputs = TokenBatch(tokens=tokens, attention_mask=everywhere, response_mask=everywhere)
    weights = torch.full(tokens.shape, 1 / tokens.numel())

    def loss(output: Output, batch: Any) -> Any:
        mask = batch.inputs.response_mask
        return supervised_loss(output.logprobs, mask, batch.loss_weights)

    batch = SupervisedBatch(inputs=inputs, loss_weights=weights)
    policy.forward_backward(batch, loss, frozenset({"logprobs"}))
    policy.optim_step()


def snapshot(policy: Policy) -> Weights:
    return {name: t.detach().clone() for bucket in policy.weights() for name, t in bucket}


def equal(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def delivered(sync: WeightSync, version: int) -> str:
    """The letter of what stopped a delivery; empty if nothing did."""
    try:
        sync.deliver(version)
    except WeightSyncError as error:
        said = str(error)
        return next((letter for words, letter in FOUND_BY.items() if words in said), "l")
    return ""


def new_sync(
    policy: Any, sampler: Any, dtype: torch.dtype, transport: WeightTransport | None = None
) -> WeightSync:
    settings = SyncOptions(
        dtype=dtype, vocabulary=VOCABULARY, temperature=1.0, probe_every=0, probe_tokens=64
    )
    new = partial(new_model, 9, dtype)
    return WeightSync(policy, sampler, settings, new, transport=transport)


class Running:
    """Requests of which some are being sampled at all times."""

    def __init__(self, sampler: Any) -> None:
        self.sampler: Any = sampler
        self.count = 0

    def go_on(self, step: int) -> None:
        """Sample two tokens of each; what ends makes room for others."""
        if self.count <= 8:  # others wait behind those that are being sampled
            self.sampler.submit(requests(step))
            self.count += 8
        until = self.sampler.round + 2
        while self.count and self.sampler.round < until:
            self.count -= len(self.sampler.poll(120, until))
        if not self.count:
            raise AssertionError("nothing is being sampled")

    def end(self) -> None:
        """Sample what is left."""
        while self.count:
            self.count -= len(self.sampler.poll(120))


class Trials:
    """Faults one after the other on one policy, one sampler and one WeightSync."""

    def __init__(
        self,
        sampler: Any,
        dtype: torch.dtype,
        rate: float,
        sync: WeightSync | None = None,
        *,
        running: bool = False,
    ) -> None:
        self.policy: Any = Policy(new_model(1, dtype), TrainerOptions(lr=rate))
        if sync is not None:
            self.policy = sync.policy
        self.sampler = sampler
        self.sync = sync or new_sync(self.policy, sampler, dtype)
        self.running = Running(self.sync.sampler) if running else None
        self.version = 0
        self.sync.deliver(0)
        self._step()
        self.sync.deliver(self.version)

    def _step(self) -> None:
        self.version += 1
        train(self.policy, self.version)
        if self.running is not None:
            self.running.go_on(self.version)

    def outcome(self, fault: str, place: str) -> str:
        """The letter of what found the fault."""
        before = snapshot(self.policy)
        self._step()
        now = snapshot(self.policy)
        faulty = FAULTS[fault](now, before)
        holds = before | faulty  # what is not sent stays
        # A worker that receives by itself can only be made to hold the old weights, not to skip.
        if place in (LOAD, LATER) or (place == WIRE and self.sampler.receives and not faulty):
            faulty = holds
        found = self._deliver(faulty, place)
        harmless = equal(holds, now)
        self.sampler.place = ""
        self.policy.lie = None
        # What the fault left behind is not the next trial's.
        self.sync._held.clear()
        self._step()
        self.sync.deliver(self.version)
        if harmless and fault not in ("dropped", "skipped"):
            return "?" if found else "="
        return found or ("=" if harmless else "!")

    def _deliver(self, faulty: Weights, place: str) -> str:
        if place == WEIGHTS:
            self.policy.lie = faulty
        if place in (WIRE, LOAD):
            self.sampler.faulty = faulty
            self.sampler.place = place
        found = delivered(self.sync, self.version)
        if place == LATER:
            self.sampler.inner.update_weights([list(faulty.items())], self.version)
        if found:
            return found
        self.sampler.place = ""
        self.policy.lie = None
        self._step()
        return delivered(self.sync, self.version)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class RankPolicy(FsdpTrainer):
    """As Policy, cut up over ranks."""

    lie: Weights | None = None

    def weights(self, part: Part = "all") -> Iterator[Bucket]:
        if self.lie is None:
            yield from super().weights(part)
        else:
            yield list(self.lie.items())

    def weights_in_turn(
        self, part: Part = "all", dtype: torch.dtype | None = None
    ) -> Iterator[Bucket | Whole | None]:
        """Of a lie every rank has all."""
        if self.lie is None:
            yield from super().weights_in_turn(part, dtype)
        else:
            yield from Trainer.weights_in_turn(self, part, dtype)


@contextmanager
def policy_of_rank(dtype: torch.dtype, rate: float) -> Iterator[dict[str, RankPolicy]]:
    """What each rank builds."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as own:
        yield {"policy": RankPolicy(new_model(1, dtype), TrainerOptions(lr=rate), ranks=own)}


def set_lie(policy: RankPolicy, lie: Weights | None) -> None:
    policy.lie = lie


def set_fault(sampler: Faulty, place: str, faulty: Weights) -> None:
    sampler.place = place
    sampler.faulty = faulty


def change(sampler: Faulty, faulty: Weights, version: int) -> None:
    """Have a sampler compute with other weights, without a word."""
    sampler.inner.update_weights([list(faulty.items())], version)


class LyingRanks:
    """A RayTrainer whose ranks lie where `lie` is set."""

    def __init__(self, group: Any) -> None:
        from oxrl.engines.ray.trainer import RayTrainer

        self._group = group
        self._trainer = RayTrainer(group, "policy")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def lie(self) -> None:
        """Is only set."""

    @lie.setter
    def lie(self, lie: Weights | None) -> None:
        self._group.call(self._group.waits.of("step"), "policy", set_lie, lie)


class FaultyActors:
    """Rollout workers whose processes have the fault; `inner` is what loads into them unproved."""

    def __init__(self, rollouts: Any, *, receives: bool) -> None:
        self._rollouts = rollouts
        self.receives = receives
        self.inner = self
        self.faulty: Weights = {}

    @property
    def place(self) -> None:
        """Is only set."""

    @place.setter
    def place(self, place: str) -> None:
        for worker in self._rollouts.members.values():
            worker.call(set_fault, place, self.faulty)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        faulty = dict(named for bucket in buckets for named in bucket)
        for worker in self._rollouts.members.values():
            worker.call(change, faulty, version)


@contextmanager
def ray_trials(
    engine: str, dtype: torch.dtype, rate: float, folder: Path, *, running: bool
) -> Iterator[Trials]:
    """Two training ranks that send to two rollout actors."""
    # Imported here: Ray is an extra.
    from oxrl.engines.ray.cluster import Cluster, layout
    from oxrl.engines.ray.rollouts import RayRollouts
    from oxrl.engines.ray.trainer import RankGroup
    from oxrl.engines.ray.transport import RayTransport

    cluster = Cluster(4)
    places = layout(2, 2, trainer_gpus=0, sampler_gpus=0, colocated=False)
    cluster.reserve(places.bundles)
    try:
        build_rank = partial(policy_of_rank, dtype, rate)
        group = RankGroup(cluster, places.trainers, build_rank, Deadlines.alike(120))
        build = partial(new_sampler, engine, dtype, folder)
        rollouts = RayRollouts(cluster, places.samplers, build, Deadlines.alike(120))
        transport = RayTransport(group, rollouts, partial(new_model, 9, dtype))
        sync = new_sync(LyingRanks(group), rollouts, dtype, transport)
        sampler = FaultyActors(rollouts, receives=engine == "vllm")
        yield Trials(sampler, dtype, rate, sync, running=running)
    finally:
        cluster.close()


@contextmanager
def hosted(engine: str, dtype: torch.dtype, folder: Path) -> Iterator[RolloutWorkers]:
    """A sampler in a process of its own on this machine."""
    machine = ThisMachine(threads=1)
    try:
        build = partial(new_sampler, engine, dtype, folder)
        yield RolloutWorkers(machine, [None], build, Deadlines.alike(120))
    finally:
        machine.close()


@contextmanager
def host_trials(
    engine: str, dtype: torch.dtype, rate: float, folder: Path, *, running: bool
) -> Iterator[Trials]:
    """This process trains, and sends to one that samples."""
    with hosted(engine, dtype, folder) as rollouts:
        policy = Policy(new_model(1, dtype), TrainerOptions(lr=rate))
        sync = new_sync(policy, rollouts, dtype)
        sampler: Any = FaultyActors(rollouts, receives=False)
        yield Trials(sampler, dtype, rate, sync, running=running)


def apart_table(
    engine: str, dtype: torch.dtype, rates: Iterable[float], *, running: bool = False
) -> list[dict[str, Any]]:
    """Outcomes where samplers are processes of their own."""
    place, _, sampler = engine.partition("-")
    begin = ray_trials if place == "ray" else host_trials
    lines: list[dict[str, Any]] = []
    for rate in rates:
        with (
            tempfile.TemporaryDirectory() as folder,
            begin(sampler or "local", dtype, rate, Path(folder), running=running) as trials,
        ):
            lines += outcomes(trials, dtype, rate)
    return lines


def outcomes(trials: Trials, dtype: torch.dtype, rate: float) -> list[dict[str, Any]]:
    """Every fault in every place."""
    where = {"dtype": str(dtype).removeprefix("torch."), "lr": rate}
    return [
        {"fault": fault, "place": place, **where, "found": trials.outcome(fault, place)}
        for fault in FAULTS
        for place in PLACES
    ]


def table(
    engine: str,
    dtypes: Iterable[torch.dtype],
    rates: Iterable[float],
    out: Path,
    *,
    running: bool,
) -> Counter:
    """Every fault, everywhere; written to `out` and printed; how often each letter came."""
    lines: list[dict[str, Any]] = []
    for dtype in dtypes:
        if engine.startswith(("ray", "host")):
            lines += apart_table(engine, dtype, rates, running=running)
            show(engine, lines, dtype)
            continue
        with tempfile.TemporaryDirectory() as folder:
            sampler = new_sampler(engine, dtype, Path(folder))
            for rate in rates:
                trials = Trials(sampler, dtype, rate, running=running)
                lines += outcomes(trials, dtype, rate)
                if trials.running is not None:
                    trials.running.end()
            sampler.close()
        show(engine, lines, dtype)
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (out / f"faults_{engine}.jsonl").write_text(text, encoding="utf-8")
    return Counter(line["found"] for line in lines)


def show(engine: str, lines: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """A row per fault; per place one letter for each learning rate."""
    name = str(dtype).removeprefix("torch.")
    own = [line for line in lines if line["dtype"] == name]
    rates = ", ".join(f"{rate:g}" for rate in sorted({line["lr"] for line in own}))
    say(f"\n{engine}, {name}; learning rates {rates}")
    say(f"{'':22}" + "".join(f"{place:12}" for place in PLACES))
    for fault in FAULTS:
        cells = [
            "".join(line["found"] for line in own if (line["fault"], line["place"]) == (fault, at))
            for at in PLACES
        ]
        say(f"{fault:22}" + "".join(f"{cell:12}" for cell in cells))


def requests(step: int) -> list[Request]:
    """Eight requests of a step, of 12 tokens each."""
    prompts = [tuple(TOKENIZER(f"{10 + i}+")["input_ids"]) for i in range(8)]
    return [
        Request(
            id=f"{step}/{i}",
            prompt=Prompt(uid="", messages=(), token_ids=token_ids),
            draw=i,
            sample=0,
            sampling=Sampling(max_tokens=12, stop_token_ids=()),
            seed=step * 8 + i,
        )
        for i, token_ids in enumerate(prompts)
    ]


def sampled(sampler: Any, step: int) -> list[Rollout]:
    """Eight responses of the policy, as a run remembers them."""
    asked = requests(step)
    done = generate(sampler, asked, deadline_s=120)
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            score=Score(value=0.0),
            group_id=request.draw,
            sample=0,
            seed=request.seed,
        )
        for request, completion in zip(asked, done, strict=True)
    ]


def false_alarms(engine: str, dtype: torch.dtype, syncs: int, rate: float) -> dict[str, Any]:
    """Deliver after each of `syncs` steps of training; what the proofs said."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place, _, own = engine.partition("-")
        if place == "host":
            sampler: Any = stack.enter_context(hosted(own or "local", dtype, folder))
        else:
            sampler = new_sampler(engine, dtype, folder)
        policy = Policy(new_model(1, dtype), TrainerOptions(lr=rate))
        settings = SyncOptions(
            dtype=dtype, vocabulary=VOCABULARY, temperature=1.0, probe_tokens=128
        )
        sync = WeightSync(policy, sampler, settings, lambda: new_model(9, dtype))
        alarms = 0.0
        worst = 0.0
        seconds = 0.0
        start = time.monotonic()
        for step in range(syncs):
            sync.deliver(step)
            metrics = sync.metrics()
            alarms += metrics["sync/retries"]
            worst = max(worst, metrics["sync/probe_limit_share"])
            seconds += metrics["time/sync_s"]
            if step % 10 == 0:
                sync.remember(sampled(sampler, step))
            train(policy, step + 1)
        spent = time.monotonic() - start
        nll = policy.last_loss
        sampler.close()
    return {
        "engine": engine,
        "dtype": str(dtype).removeprefix("torch."),
        "syncs": syncs,
        "lr": rate,
        "alarms": alarms,
        "worst_share_of_limit": worst,
        "last_loss": nll,
        "sync_s": seconds / syncs,
        "share_of_time": seconds / spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Which faults of a weight delivery are found.")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["local"])
    parser.add_argument(
        "--dtypes", nargs="+", default=[str(d).removeprefix("torch.") for d in DTYPES]
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--syncs", type=int, default=0, help="look for false alarms instead")
    parser.add_argument("--running", action="store_true", help="with requests in flight")
    parser.add_argument("--lr", type=float, default=3e-4, help="of the training with --syncs")
    parser.add_argument("--out", type=Path, default=Path("runs/fault_detection"))
    arguments = parser.parse_args()
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    for engine in arguments.engine:
        if arguments.syncs:
            for dtype in dtypes:
                say(json.dumps(false_alarms(engine, dtype, arguments.syncs, arguments.lr)))
            continue
        counts = table(engine, dtypes, arguments.rates, arguments.out, running=arguments.running)
        say(f"\n{engine}: {sum(counts.values())} faults: {dict(counts)}")


if __name__ == "__main__":
    main()
