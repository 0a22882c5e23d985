"""A delivery that is proved with requests running leaves them as a plain one does."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from oxrl.assembly import assemble
from oxrl.assembly.assembly import Assembly, Engines
from oxrl.assembly.sampler_processes import proved_delivery, sampler_here
from oxrl.commands.train import run
from oxrl.engines.delivery.sync import WeightSync
from support.never_idle_kinds import config, prepare
from support.small_runs import final_files, metric_lines

FULL = pytest.mark.full
Patch = pytest.MonkeyPatch


def sample_apart(patch: Patch) -> None:
    """Have runs of one process sample from a model of their own, which is sent to and proved."""
    build = assemble.build_engines

    def build_apart(assembly: Assembly, stack: ExitStack) -> Engines:
        engines = build(assembly, stack)
        if not assembly.cfg.sampling_process:
            policy = engines.trainers["policy"]
            sampler = sampler_here(assembly)
            delivery = proved_delivery(assembly, policy, sampler, engines.limits)
            engines = engines._replace(sampler=sampler, delivery=delivery)
        sync = cast(WeightSync, engines.delivery)
        sync.options = replace(sync.options, probe_every=1)  # a perturbed copy every time
        return engines

    patch.setattr(assemble, "build_engines", build_apart)


def running(sampler: Any) -> int:
    """Requests that are being sampled, in this process or in others."""
    if hasattr(sampler, "workers"):
        return sum(len(worker.in_flight) for worker in sampler.workers)
    return len(sampler._here)


def count_perturbed(patch: Patch) -> list[int]:
    """Have the requests counted that run while a perturbed copy is loaded, copy after copy."""
    counted: list[int] = []
    sync: Any = WeightSync
    load = sync._load

    def counting(self: Any, version: int, strength: float, *given: Any) -> Any:
        if strength:
            counted.append(running(self.sampler))
        return load(self, version, strength, *given)

    patch.setattr(sync, "_load", counting)
    return counted


def deliver_plainly(self: Any, version: int) -> None:
    """In place of `WeightSync.deliver`: the weights, and nothing else."""
    self._transport.deliver(version, self.options.copy())


def without_proof(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if not key.startswith("sync/")} for line in lines
    ]


def versions_of(content: bytes) -> list[set[int]]:
    """The versions of what was sampled of each response in a file of whole samples."""
    found: list[set[int]] = []
    for line in content.splitlines()[1:]:
        for response in json.loads(line)["responses"]:
            segments = response["completion"]["segments"]
            sampled = [one for one in segments if one["origin"] == "policy"]
            found.append({version for one in sampled for version in one["versions"]})
    return found


@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("cached", 0),
        ("sgrpo", 2),
        pytest.param("sgrpo", 0, marks=FULL),
        pytest.param("two minibatches", 0, marks=FULL),
        pytest.param("adapter", 0, marks=FULL),
        pytest.param("images", 0, marks=FULL),
        pytest.param("tools", 0, marks=FULL),
        pytest.param("cached", 2, marks=FULL),
        pytest.param("adapter", 2, marks=FULL),
        pytest.param("images", 2, marks=FULL),
        pytest.param("tools", 2, marks=FULL),
    ],
)
def test_a_proved_delivery_leaves_a_whole_run_as_a_plain_one_does(
    kind: str, processes: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    prepare(kind, monkeypatch.setattr)
    sample_apart(monkeypatch)
    perturbed = count_perturbed(monkeypatch)
    kept: dict[str, Any] = {"processes": processes, "steps": 6, "record": "tokens"}
    proved = config(tmp_path, "proved", kind, **kept)
    plain = config(tmp_path, "plain", kind, **kept)
    run(proved)
    # Evaluations are delivered to as well, with nothing running.
    assert len(perturbed) >= 6
    assert sum(count > 0 for count in perturbed) >= 5, perturbed
    monkeypatch.setattr(WeightSync, "deliver", deliver_plainly)
    perturbed.clear()
    run(plain)
    assert not perturbed
    ours, theirs = proved.run.directory, plain.run.directory
    assert (ours / "samples.jsonl").read_bytes() == (theirs / "samples.jsonl").read_bytes()
    drawn = sorted(path.name for path in (ours / "rollouts").glob("*.samples.jsonl"))
    assert len(drawn) == 6
    versions: list[set[int]] = []
    for name in drawn:
        content = (ours / "rollouts" / name).read_bytes()
        assert content == (theirs / "rollouts" / name).read_bytes()
        versions += versions_of(content)
    assert -1 not in set().union(*versions) and any(len(some) > 1 for some in versions)
    assert without_proof(metric_lines(ours)) == without_proof(metric_lines(theirs))
    files, expected = final_files(ours), final_files(theirs)
    for one in (files, expected):
        del one["delivery/probe.json"]
    assert [name for name in files if files[name] != expected[name]] == []
