"""Small runs and commands, each of which is done on the CPU and on the device that is none.

A case is a function of a folder; what it writes there, and what it returns, are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from oxrl.errors import ConfigError
from oxrl.models import linear
from support import pretend_device
from support.command_line import PRETEND, forked, from_server
from support.small_runs import (
    final_files,
    metric_lines,
    model_that_stops,
    preference_config,
    rl_config,
    sft_config,
    steps_config,
)

Case = Callable[[Path], Any]
DEADLINE_S = 200.0
SAID = "said.json"
FAILED = "failed.txt"
MANY = 100
# A number is a promise of how rows are cut; auto is one number on the CPU, and another beside it.
SAME = ("train.micro_batch_tokens=64",)
TALK = """
from oxrl.environments import Step

class Talk:
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        return Step("go on", reward=len(set(text)) / 10)
"""


def _in_process(float64: bool | None, case: Case, folder: Path) -> None:
    """The body of a process. None: it is to see no device but the CPU."""
    warnings.simplefilter("ignore")
    try:
        if float64 is None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            # The device has PyTorch's products alone.
            linear.onednn_is_faster = lambda: False
        elif not float64:
            pretend_device.offered().lack_float64()
        (folder / SAID).write_text(json.dumps(case(folder), sort_keys=True, default=str))
        if float64 is not None:
            # Far more than it takes to register a device: something was computed there.
            assert pretend_device.offered().operations() > MANY
    # Whatever it is, the test has to tell it.
    except BaseException:
        (folder / FAILED).write_text(traceback.format_exc())
        raise


def started(folder: Path, case: Case, *, there: bool, float64: bool = False) -> ForkServerProcess:
    """Begin a case in a process of its own.

    Args:
        folder: where it is done.
        case: what is done.
        there: on the device that is none; else on the CPU.
        float64: that device has it.
    """
    process = forked(_in_process, float64 if there else None, case, folder)
    with from_server(PRETEND) if there else nullcontext():
        process.start()
    return process


def done(folder: Path, case: Case, *, there: bool, float64: bool = False) -> None:
    """Do a case in a process of its own. Arguments as of `started`."""
    process = started(folder, case, there=there, float64=float64)
    process.join(DEADLINE_S)
    failed = folder / FAILED
    assert process.exitcode == 0, failed.read_text() if failed.exists() else process.exitcode


def on_both(case: Case, folder: Path, *, float64: bool = False) -> list[Path]:
    """Do a case on the CPU and on the device, in a folder of the same path.

    Returns:
        where what came of either is now.
    """
    found: list[Path] = []
    for name in ("cpu", "pretend"):
        here = folder / "here"
        here.mkdir()
        done(here, case, there=name == "pretend", float64=float64)
        found.append(here.rename(folder / name))
    return found


def without_times(value: Any) -> Any:
    """What was said, without metrics that may differ between identical runs."""
    if isinstance(value, dict):
        free = ("time/", "throughput/", "system/")
        return {key: without_times(v) for key, v in value.items() if not key.startswith(free)}
    if isinstance(value, list):
        return [without_times(element) for element in value]
    return value


def left(folder: Path) -> dict[str, Any]:
    """All that a case left, by name: what it said, and of each run metrics, samples and weights."""
    found: dict[str, Any] = {"said": without_times(json.loads((folder / SAID).read_text()))}
    for file in sorted(folder.rglob("metrics.jsonl")):
        run = file.parent
        name = str(run.relative_to(folder))
        found[f"{name} metrics"] = metric_lines(run)
        for samples in sorted(run.glob("*samples*.jsonl")):
            found[f"{name} {samples.name}"] = samples.read_bytes()
        for path, content in final_files(run).items():
            found[f"{name} {path}"] = content
    return found


def differing(folder: Path, other: Path) -> list[str]:
    """Names of what two folders of one case do not have in common."""
    ours = left(folder)
    theirs = left(other)
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


# --- Recipes.
def _run(cfg: Any) -> Any:
    from oxrl.commands.train import run

    run(cfg)
    return metric_lines(cfg.run.directory)[-1]["step"]


def _rl(folder: Path, overrides: Sequence[str] = (), **sections: Any) -> Any:
    sections["run"] = {"steps": 2} | sections.get("run", {})
    sections["train"] = {"alg_name": "sgrpo", "lr": 1e-3} | sections.get("train", {})
    return rl_config(folder, "run", [*SAME, *overrides], **sections)


def _given(make: Any, folder: Path, overrides: Sequence[str] = (), **sections: Any) -> Any:
    sections["run"] = {"steps": 2} | sections.get("run", {})
    return make(folder, "run", [*SAME, *overrides], **sections)


def sgrpo_with_kl(folder: Path) -> Any:
    return _run(_rl(folder, train={"kl_coeff": 0.1, "minibatches": 2}))


def ppo(folder: Path) -> Any:
    return _run(_rl(folder, train={"alg_name": "ppo"}))


def cispo(folder: Path) -> Any:
    return _run(_rl(folder, train={"alg_name": "cispo", "minibatches": 2}))


def gspo(folder: Path) -> Any:
    return _run(_rl(folder, train={"alg_name": "gspo", "minibatches": 2}))


def sft_packed(folder: Path) -> Any:
    return _run(_given(sft_config, folder, data={"pack_tokens": 64}))


def sft_held_out(folder: Path) -> Any:
    data = {"eval": str(folder / "chats.jsonl")}
    return _run(_given(sft_config, folder, data=data, run={"eval_every": 1, "keep_best": True}))


def scored_evaluation(folder: Path) -> Any:
    data = {"eval": str(folder / "prompts.jsonl"), "eval_rows": 4}
    return _run(_rl(folder, data=data, run={"eval_every": 1}))


def dpo(folder: Path) -> Any:
    data = {"eval": str(folder / "held_out_pairs.jsonl")}
    return _run(_given(preference_config, folder, data=data, run={"eval_every": 2}))


def kto(folder: Path) -> Any:
    return _run(_given(preference_config, folder, train={"alg_name": "kto", "lr": 1e-3}))


def reward_model(folder: Path) -> Any:
    """Trained, then the reward of another run."""
    train = {"alg_name": "reward_model", "lr": 1e-3}
    _run(preference_config(folder, "rm", [*SAME, "run.steps=2"], train=train))
    scores = str(folder / "rm" / "checkpoints" / "step_00000002")
    return _run(_rl(folder, reward={"name": scores}))


def process_reward_model(folder: Path) -> Any:
    return _run(_given(steps_config, folder))


def rejection(folder: Path) -> Any:
    return _run(
        _rl(
            folder,
            ["run.steps=1"],
            train={"alg_name": "rft", "keep_reward": 0.0},
            rollout={"n_samples": 4},
            model={"name": _on_disk(folder)},
        )
    )


def _on_disk(folder: Path) -> str:
    return str(model_that_stops(folder / "model"))


def lora(folder: Path) -> Any:
    return _run(_rl(folder, model={"name": _on_disk(folder)}, lora={"rank": 4}))


def images(folder: Path) -> Any:
    from support.vision_runs import rl, write_rows

    write_rows(folder)
    return _run(rl(folder, "run", train={"micro_batch_tokens": 256}))


def image_answers(folder: Path) -> Any:
    from support.vision_runs import config, write_rows

    write_rows(folder)
    fields = {"micro_batch_tokens": 256, "alg_name": "sft", "lr": 1e-3}
    model = {"name": "builtin:tiny-vl"}
    return _run(config(folder, "builtin:tiny-vl", model=model, train=fields))


def actions(folder: Path) -> Any:
    from support.action_runs import CHOICES, imitation, make_data, reinforcement

    make_data(folder)
    model = {"name": "builtin:tiny-vla"}
    fields = {"micro_batch_tokens": 512}
    run = {"steps": 2}
    sft = imitation(
        folder, "sft", action=CHOICES, model=model, run=run, train=fields | {"alg_name": "sft"}
    )
    _run(sft)
    start = model | {"name": str(folder / "sft" / "checkpoints" / "step_00000002")}
    return _run(reinforcement(folder, "rl", model=start, run=run, train=fields))


def episodes_with_tools(folder: Path) -> Any:
    environment = {"name": "tools", "options": {"tools": ["calculator"]}, "max_turns": 2}
    rollout = {"max_tokens": 6, "n_samples": 2}
    return _run(_rl(folder, environment=environment, rollout=rollout))


def episodes(folder: Path) -> Any:
    (folder / "talk.py").write_text(TALK)
    name = f"{folder / 'talk.py'}:Talk"
    environment = {"name": name, "max_turns": 2}
    return _run(_rl(folder, environment=environment, model={"name": _on_disk(folder)}))


# --- How they are trained.
def master_weights(folder: Path) -> Any:
    return _run(_rl(folder, model={"dtype": "bfloat16"}))


def no_masters(folder: Path) -> Any:
    """Rounded by numbers that are drawn on the device."""
    train = {"alg_name": "sft", "lr": 1e-3, "master_weights": "none"}
    return _run(_given(sft_config, folder, model={"dtype": "bfloat16"}, train=train))


def offloaded_activations(folder: Path) -> Any:
    model = {"gradient_checkpointing": True, "offload_activations": True}
    return _run(_given(sft_config, folder, model=model))


def muon(folder: Path) -> Any:
    train = {"alg_name": "sft", "lr": 1e-3, "optimizer": "muon"}
    return _run(_given(sft_config, folder, train=train))


def deterministic(folder: Path) -> Any:
    return _run(_rl(folder, run={"deterministic": True}))


def prompts_read_once(folder: Path) -> Any:
    return _run(_rl(folder, train={"share_prefix": True, "kl_coeff": 0.1}))


def eager_attention(folder: Path) -> Any:
    return _run(_rl(folder, ["model.attention=eager"], train={"kl_coeff": 0.1}))


def async_checkpoints(folder: Path) -> Any:
    run = {"async_checkpoints": True, "checkpoint_every": 1}
    return _run(_given(sft_config, folder, run=run))


def sampling_ahead(folder: Path) -> Any:
    return _run(
        _rl(
            folder,
            run={"steps": 4},
            rollout={"max_staleness": 2, "rounds": 3, "force_strict_on_policy": False},
        )
    )


# --- Commands.
def evaluated(folder: Path) -> Any:
    """`oxrl eval` of a run, of a model, and of answers that are given."""
    from oxrl.commands.evaluate import run_eval

    scored = _rl(folder, data={"eval": str(folder / "prompts.jsonl"), "eval_rows": 4})
    _run(scored)
    answers = folder / "answers.jsonl"
    found: list[Any] = [run_eval(scored.run.directory, out=answers), answers.read_text()]
    reward = f"reward.name={folder / 'reward.py'}:digits"
    of_model = [*SAME, reward, f"data.eval={folder / 'prompts.jsonl'}", "rollout.max_tokens=4"]
    found.append(run_eval("builtin:tiny", of_model, samples=2))
    chats = [*SAME, "run.steps=1", f"data.eval={folder / 'chats.jsonl'}"]
    sft_config(folder, "sft", chats)
    found.append(run_eval(folder / "sft.yaml", chats))
    return found


def generated(folder: Path) -> Any:
    from oxrl.commands.evaluate import run_generate
    from oxrl.types import Sampling

    few = Sampling(max_tokens=12)
    words = run_generate("builtin:tiny", ["3+4=", "hm"], samples=2, sampling=few)
    greedy = run_generate("builtin:tiny", ["3+4="], sampling=Sampling(max_tokens=5, temperature=0))
    return [*words, *greedy]


def played(folder: Path) -> Any:
    from oxrl.commands.play import run_play
    from oxrl.types import Sampling

    (folder / "talk.py").write_text(TALK)
    few = ["rollout.max_tokens=3", "environment.max_turns=2"]
    environment = f"{folder / 'talk.py'}:Talk"
    return run_play(_on_disk(folder), environment, ["hm"], few, samples=2, sampling=Sampling())


def replayed(folder: Path) -> Any:
    """A run that is gone through again there is equal to its record, to the last bit."""
    from oxrl.commands.replay import replay

    cfg = _rl(folder, run={"record": "tokens", "steps": 4}, train={"kl_coeff": 0.1})
    _run(cfg)
    findings = replay(cfg.run.directory, 3, tolerance=0.0)
    assert findings and all(finding.equal for finding in findings), findings
    return [list(finding) for finding in findings]


def scored_again(folder: Path) -> Any:
    """By a reward model, on the device."""
    from oxrl_stats.score import run_score

    train = {"alg_name": "reward_model", "lr": 1e-3}
    _run(preference_config(folder, "rm", [*SAME, "run.steps=2"], train=train))
    cfg = _rl(folder)
    _run(cfg)
    out = folder / "scored.jsonl"
    name = folder / "rm" / "checkpoints" / "step_00000002"
    run_score(cfg.run.directory, [f"reward.name={name}"], out)
    return out.read_text()


def exported(folder: Path) -> Any:
    """An adapter that was trained there is merged."""
    from oxrl.commands.export import run_export

    cfg = _rl(folder, model={"name": _on_disk(folder)}, lora={"rank": 4})
    _run(cfg)
    run_export(cfg.run.directory, folder / "merged")
    return hashlib.sha256((folder / "merged" / "model.safetensors").read_bytes()).hexdigest()


def delivered(folder: Path) -> Any:
    """Weights get to a sampler that has its own, with the proof; what is tampered with is refused."""
    import torch

    from oxrl.engines.train.local import LocalTrainer
    from oxrl.engines.train.options import TrainerOptions
    from oxrl.errors import WeightSyncError
    from oxrl.runs.device import chosen_device
    from support.weight_attacks import Remote, small_step, synced, tiny_model

    here = chosen_device()
    policy = LocalTrainer(tiny_model(0).to(here), TrainerOptions(lr=1e-3))
    sampler = Remote(tiny_model(5).to(here))
    sync = synced(sampler, policy)
    sync.deliver(0)
    small_step(policy)
    sync.deliver(1)
    for mine, theirs in zip(policy.model.parameters(), sampler.model.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine.device.type == here.type
    found = sync.metrics()
    tampered = Remote(tiny_model(5).to(here), lambda bucket: [(n, t * 1.001) for n, t in bucket])
    try:
        synced(tampered, policy).deliver(0)
    except WeightSyncError as error:
        return [found, str(error)]
    raise AssertionError("what was tampered with was taken")


# --- What the device refuses, and what is said of it.
def strict(folder: Path) -> Any:
    """Tensors that are elsewhere raise, and so does what the device lacks."""
    import torch

    from oxrl.models.load import LoadOptions, load_policy
    from oxrl.runs.device import chosen_device, has_type

    here = chosen_device()
    assert here.type == pretend_device.NAME and not has_type(here, torch.float64)
    model = load_policy("builtin:tiny", LoadOptions(device=here))
    assert {weight.device.type for weight in model.parameters()} == {here.type}
    words = torch.tensor([[1, 2, 3]])
    assert model(input_ids=words.to(here)).logits.device.type == here.type
    numbers = torch.ones(2, 3).to(here)
    mixed: list[Callable[[], object]] = [
        lambda: model(input_ids=words),
        lambda: numbers + torch.ones(2, 3),
        lambda: torch.cat([numbers, torch.ones(2, 3)]),
        lambda: torch.where(numbers > 0, numbers, torch.ones(2, 3)),
        lambda: numbers.masked_fill_(torch.ones(2, 3, dtype=torch.bool), 0.0),
        lambda: numbers.double(),
        lambda: numbers.numpy(),
    ]
    for number, compute in enumerate(mixed):
        try:
            compute()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError(f"number {number} was computed")
    for asked in ("cuda", "mps", "xpu"):
        try:
            chosen_device(asked)
        except ConfigError as error:
            assert f"no {asked.upper()} device (it sees pretend)" in str(error)
    # No operations of a run: enough for the count.
    return [float(numbers.sum()) for _ in range(MANY)]


def out_of_memory(folder: Path) -> Any:
    """Micro-batches that do not fit there are made smaller, and what is kept is given back."""
    import pytest
    import torch

    from oxrl.runs.device import chosen_device, has_type

    offered = pretend_device.offered()
    for name in ("roomy", "full"):
        many = ["train.micro_batch_tokens=4096", "data.rows_per_step=24", "run.steps=1"]
        _run(sft_config(folder, name, many))
        assert (offered.times_emptied() > 0) == (name == "full")
        offered.limit_memory(offered.peak_bytes() * 3 // 4)
    peak = offered.peak_bytes()
    offered.limit_memory(1)
    with pytest.raises(torch.OutOfMemoryError):  # not: it has no such type
        has_type(chosen_device(), torch.int16)
    return peak


def planned(folder: Path) -> Any:
    """What is said of a device before a run and by `oxrl doctor`."""
    from oxrl.commands.doctor import examine as look_around
    from oxrl.plan.preflight import Prepared, examine

    found = examine(_rl(folder), Prepared(), "device")
    told = "pretend; no float64: losses and norms are computed on the CPU"
    assert (found.state, found.text) == ("ok", told)
    [device] = [finding for finding in look_around(folder) if finding.subject == "device"]
    assert device.text.startswith(f"{told}; no CUDA device")
    return _run(_rl(folder, run={"steps": 1}))


# --- Runs that are stopped.
def resumed(folder: Path) -> Any:
    """Six steps, or what is left of them."""
    from oxrl.commands.train import run

    cfg = _rl(folder, run={"steps": 6, "checkpoint_every": 2}, train={"kl_coeff": 0.1})
    run(cfg, resume=True)
    return cfg.run.steps


def killed_and_resumed(folder: Path) -> None:
    """A run on the device that is killed in its fourth step or later, and goes on."""
    process = started(folder, resumed, there=True)
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join(DEADLINE_S)
    assert process.exitcode and process.exitcode < 0
    done(folder, resumed, there=True)
