"""Runs of vLLM that go on while a batch trains: logical ones repeat their tokens and versions, also
when they are killed and resumed, free ones are replayed, and kept caches are used. Runs where vLLM
is installed (`make test-scale`).
"""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.replay_schedule import replay_schedule
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.rollouts.whole_samples import read_step
from oxrl.types import Segment
from support.killed_runs import killed_until_done
from support.sampling_processes import parent_of
from support.small_runs import metric_lines, model_that_stops, rl_config

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]


def config(folder: Path, name: str, **rollout: Any) -> Config:
    """Six batches at a lag of two, with rows in flight whenever weights come."""
    model = folder / "model"
    if not model.is_dir():
        model_that_stops(model, "builtin:small")
    return rl_config(
        folder,
        name,
        [
            "inference_engine.max_rows=6",
            "inference_engine.probe_tokens=64",
            "run.checkpoint_every=1",
        ],
        model={"name": str(model)},
        run={"record": "tokens", "threads": 1},
        train={"alg_name": "sgrpo", "lr": 1e-3, "adam_eps": 1e-3},
        inference_engine={"name": "vllm", "processes": 1},
        rollout={
            "max_tokens": 12,
            "n_samples": 4,
            "max_staleness": 2,
            "force_strict_on_policy": False,
            **rollout,
        },
    )


def sampled(cfg: Config) -> list[Segment]:
    """Every response of a run, in the order in which they were trained on."""
    folder = cfg.run.directory / "rollouts"
    batches = [read_step(path) for path in sorted(folder.glob("*.samples.jsonl"))]
    segments = [one.completion.segments[0] for batch in batches for one in batch.rollouts]
    assert len(segments) == 6 * 4 * 4
    assert any(len({*one.versions}) > 1 for one in segments)  # weights came in between
    return segments


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A logical run that nothing happens to."""
    cfg = config(tmp_path_factory.mktemp("logical"), "whole", rounds=4)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert 1 <= max(line["data/staleness_max"] for line in lines) <= 2
    assert sum(line["rollout/tokens_read_again"] for line in lines) > 0
    return cfg


def check_same_tokens(ours: Config, theirs: Config) -> None:
    """Tokens and versions are equal, log-probabilities up to rounding."""
    for one, other in zip(sampled(ours), sampled(theirs), strict=True):
        assert (one.token_ids, one.versions) == (other.token_ids, other.versions)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_killed_logical_run_samples_the_tokens_of_one_that_was_not(
    whole: Config, tmp_path: Path
) -> None:
    killed = config(tmp_path, "killed", rounds=4)
    assert len(killed_until_done(killed, kills=1, seed=2)) == 1
    check_same_tokens(killed, whole)


def test_what_a_lost_vllm_had_is_sampled_again_from_the_last_boundary(
    whole: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ContinuousRollouts._begin
    lost: list[int] = []

    def beginning(source: ContinuousRollouts) -> None:
        """The process dies as soon as something is sampled while a batch trains."""
        engine: Any = source.parts.sampler
        process, _ = engine.workers[0].call(parent_of)
        begin(source)
        if not lost and source._working is not None:
            lost.append(process)
            os.kill(process, signal.SIGKILL)

    monkeypatch.setattr(ContinuousRollouts, "_begin", beginning)
    hurt = config(tmp_path, "hurt", rounds=4)
    run(hurt)
    assert len(lost) == 1
    lines = metric_lines(hurt.run.directory)
    assert sum(line["rollout/replaced_actors"] for line in lines) == 1
    check_same_tokens(hurt, whole)


def test_a_free_run_is_replayed(tmp_path: Path) -> None:
    cfg = config(tmp_path, "free", schedule="free")
    run(cfg)
    assert sampled(cfg)
    findings = replay_schedule(cfg.run.directory)
    assert len(findings) >= 2 and all(finding.equal for finding in findings), findings


def test_a_free_run_that_keeps_its_caches_ends_and_is_not_replayed(tmp_path: Path) -> None:
    """Nobody can prove what it samples: only that weights come, and that it keeps to its bound."""
    cfg = config(tmp_path, "kept", schedule="free", swap="keep")
    run(cfg)
    assert sampled(cfg)
    lines = metric_lines(cfg.run.directory)
    assert max(line["data/staleness_max"] for line in lines) <= 2
    assert [line["sync/retries"] for line in lines] == [0] * 6
    assert {line["rollout/tokens_read_again"] for line in lines} == {0}
    with pytest.raises(ConfigError, match=r"rollout\.swap was keep: .* rollout\.swap=recompute"):
        replay_schedule(cfg.run.directory)
