"""The models of a run: which there are, and a further one that is built, asked and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.assembly.assemble import assemble
from oxrl.assembly.assembly import Assembly
from oxrl.commands.train import run
from oxrl.config import Config, roles
from oxrl.config.roles import roles_of
from oxrl.engines.train.trainer import AdapterOff
from oxrl.errors import InvariantError
from oxrl.modelfiles.dims import ModelDims, model_dims
from oxrl.plan.memory import Memory, memory, memory_needed
from oxrl.recipes.machine import Machine
from oxrl.runs.clock import Clock
from oxrl.tables.roles import Role
from support.rank_processes import run_ranks
from support.samplers import lively
from support.second_model import WANT, answer_on_ranks, rows, said_by_transformers, with_second
from support.small_runs import (
    final_files,
    metric_lines,
    model_that_stops,
    preference_config,
    rl_config,
)

KL = {"kl": "loss_k3", "kl_coeff": 0.1}
ALL = {"alg_name": "ppo", "lr": 1e-3, "critic_warmup_steps": 1, **KL}
LORA = {"rank": 2, "alpha": 4}


def config(folder: Path, name: str, overrides: Sequence[str] = (), **sections: Any) -> Config:
    sections = {"train": ALL, "run": {"steps": 2, "checkpoint_every": 1}} | sections
    return rl_config(folder, name, overrides, **sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not the policy, of another size."""
    made = tmp_path_factory.mktemp("models") / "second"
    lively("builtin:small", seed=5).save_pretrained(made)
    return made


@pytest.fixture
def one_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(roles, "MODELS", with_second(folder))
    return folder


def assembled(cfg: Config, stack: ExitStack) -> Machine:
    return assemble(Assembly(cfg), Clock(), stack)


def test_a_run_has_the_models_that_its_algorithm_asks_for(tmp_path: Path) -> None:
    name = str(model_that_stops(tmp_path / "model"))  # adapters need one in a folder
    model = {"name": name}
    policy = Role(name="policy", model=name, trained=True, temperature=0.7, saved=".")
    critic = Role(name="critic", model=name, trained=True, head="values", lr=2e-3, saved="critic")
    reference = Role(name="reference", model=name, temperature=0.7)
    rollout = {"max_tokens": 6, "n_samples": 4, "temperature": 0.7}
    plain = {"alg_name": "sgrpo", "lr": 1e-3}
    expected: list[tuple[dict[str, Any], list[Role]]] = [
        ({"train": plain}, [policy]),
        ({"train": plain | KL}, [policy, reference]),
        ({"train": plain | KL, "lora": LORA}, [policy]),
        ({"train": ALL | {"critic_lr": 2e-3}}, [policy, critic, reference]),
    ]
    for sections, found in expected:
        cfg = config(tmp_path, "run", model=model, rollout=rollout, **sections)
        assert roles_of(cfg) == found
    follows = preference_config(
        tmp_path / "pairs", "run", train={"alg_name": "tr_dpo"}, model=model
    )
    policy, reference = roles_of(follows)
    assert reference == Role(name="reference", model=name, saved="reference")


def test_the_machine_has_every_model_by_its_role(tmp_path: Path) -> None:
    with ExitStack() as stack:
        machine = assembled(config(tmp_path, "run"), stack)
        assert list(machine.models) == ["policy", "critic", "reference"]
        assert machine.policy is machine.models["policy"]
        assert list(machine.saved) == [".", "critic"]
        [critic] = [each for each in machine.features if type(each).__name__ == "Critic"]
        assert vars(critic)["engine"] is machine.models["critic"]


def test_a_role_that_nobody_has_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    with ExitStack() as stack:
        machine = assembled(config(tmp_path, "run"), stack)
        told = r"^this run has no teacher\.big; its models are policy, critic, reference$"
        with pytest.raises(InvariantError, match=told):
            machine.models["teacher.big"]


ASKING = """
from oxrl.recipes.features.base import Feature

class Asking(Feature):
    def __init__(self, given):
        self.teacher = given.models["teacher.big"]
    def holds_policy(self, step):
        return False
"""


def test_a_feature_that_asks_for_a_model_is_told_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    features = {f"{tmp_path}/asking.py:Asking": {}}
    told = r"^this run has no teacher\.big; its models are policy, critic, reference$"
    with pytest.raises(InvariantError, match=told):
        run(config(tmp_path, "run", train=ALL | {"features": features}))


def test_with_an_adapter_the_reference_is_the_policy_and_takes_no_memory(tmp_path: Path) -> None:
    plain = {"alg_name": "sgrpo", "lr": 1e-3}
    sections = {"model": {"name": str(model_that_stops(tmp_path / "model"))}, "lora": LORA}
    compared = config(tmp_path, "run", train=plain | KL, **sections)
    alone = config(tmp_path, "alone", train=plain, **sections)
    dims = dims_of("builtin:tiny")
    assert memory(compared, dims) == memory(alone, dims)
    with ExitStack() as stack:
        machine = assembled(compared, stack)
        assert isinstance(machine.models["reference"], AdapterOff)
        assert list(machine.models) == ["policy", "reference"] and list(machine.saved) == ["."]
    with ExitStack() as stack:
        assert list(assembled(alone, stack).models) == ["policy"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_further_model_says_what_transformers_say(
    temperature: float, tmp_path: Path, one_more: Path
) -> None:
    cfg = config(tmp_path, "run", [f"rollout.temperature={temperature}"])
    with ExitStack() as stack:
        machine = assembled(cfg, stack)
        assert list(machine.models) == ["policy", "critic", "reference", "second"]
        found = machine.models["second"].forward(rows(), WANT).logprobs
    expected = said_by_transformers(one_more, rows(), temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 1


needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-scale` runs this",
)


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_two_ranks_build_every_model_in_the_same_order(
    backend: str, tmp_path: Path, folder: Path
) -> None:
    cfg = config(
        tmp_path, "run", train=ALL | {"backend": backend}, run={"steps": 2, "training_gpus": 2}
    )
    run_ranks(2, answer_on_ranks, tmp_path / "run.yaml", folder, tmp_path)
    tiny = tmp_path / "tiny"
    Assembly(cfg).model().save_pretrained(tiny)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["names"] == ["policy", "critic", "reference", "second"]
        for name, weights in (("reference", tiny), ("second", folder)):
            expected = said_by_transformers(weights, rows(), 1.0)
            torch.testing.assert_close(found["said"][name], expected, rtol=0, atol=1e-5)


def dims_of(name: str) -> ModelDims:
    dims = model_dims(name)
    assert dims is not None
    return dims


def changes(found: Memory, before: Memory) -> set[int]:
    return {found.phases[phase] - before.phases[phase] for phase in before.phases}


def test_the_plan_counts_a_further_model_by_its_own_size(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, "run")
    dims = dims_of("builtin:tiny")
    before = memory(cfg, dims)
    needed, _ = memory_needed(cfg, dims)
    monkeypatch.setattr(roles, "MODELS", with_second(folder))
    found = memory(cfg, dims)
    size = 4 * sum(weight.numel() for weight in lively("builtin:small").parameters())
    assert changes(found, before) == {size} == {found.held - before.held}
    # A checkpoint holds nothing of it.
    assert found.stored == before.stored and found.offloaded == before.offloaded
    assert memory_needed(cfg, dims)[0] - needed >= size
    # Nobody knows the size of what is not there: it counts as the policy.
    monkeypatch.setattr(roles, "MODELS", with_second(tmp_path / "unknown"))
    assert changes(memory(cfg, dims), found) == {4 * dims.parameters}


def test_a_run_that_asks_a_further_model_nothing_is_the_same_to_the_byte(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = config(tmp_path / "without", "run")
    run(without)
    monkeypatch.setattr(roles, "MODELS", with_second(folder))
    with_it = config(tmp_path / "with", "run")
    run(with_it)
    one = without.run.directory
    two = with_it.run.directory
    assert metric_lines(one) == metric_lines(two)
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
    assert final_files(one) == final_files(two)
    held = [
        sorted(str(path.relative_to(place)) for path in (place / "checkpoints").rglob("*"))
        for place in (one, two)
    ]
    assert held[0] == held[1] and any("critic" in name for name in held[0])


def test_a_moving_reference_is_saved_where_a_feature_moves_it(tmp_path: Path) -> None:
    train = {"alg_name": "prorl", "lr": 1e-3}
    with ExitStack() as stack:
        machine = assembled(config(tmp_path, "run", train=train), stack)
        assert list(machine.saved) == [".", "reference"]
        assert machine.saved["reference"] is machine.models["reference"]


def test_a_role_that_is_saved_has_a_folder_of_its_checkpoint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [*_, answers] = with_second(folder)

    def kept(cfg: Config) -> Any:
        for role in answers(cfg):
            yield dataclasses.replace(role, saved="second")

    cfg = config(tmp_path, "run")
    dims = dims_of("builtin:tiny")
    stored = memory(cfg, dims).stored
    monkeypatch.setattr(roles, "MODELS", [*roles.MODELS, kept])
    assert memory(cfg, dims).stored - stored == 4 * dims_of("builtin:small").parameters
    with ExitStack() as stack:
        machine = assembled(cfg, stack)
        assert machine.saved["second"] is machine.models["second"]
