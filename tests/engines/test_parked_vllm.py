"""Parked requests of vLLM: tokens and versions are those of an engine that was not cut, and
log-probabilities agree up to rounding. Runs where vLLM is installed (`make test-scale`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import EngineError
from oxrl.models.weights import buckets
from oxrl.types import Completion, TokenRun
from support.parked import by_id, in_flight_of, run_to, through_json
from support.samplers import TOKENIZER, lively, make_requests

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"),
    # vLLM's own imports use what their authors have deprecated since.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    folder = tmp_path_factory.mktemp("model")
    save_model(lively(), folder)
    TOKENIZER.save_pretrained(folder)
    # Fewer rows than requests: some wait.
    options = VllmOptions(max_model_len=256, log_file=str(folder / "vllm.log"), max_rows=6)
    engine = VllmEngine(str(folder), options)
    yield engine
    engine.close()


def deliver(engine: Any, seed: int) -> None:
    engine.update_weights(buckets(lively(seed=seed).named_parameters()), seed)


def requests() -> list[Any]:
    made = [
        *make_requests(3, 2, max_tokens=14, temperature=1.2),
        *make_requests(2, prefix="greedy ", max_tokens=9, temperature=0.0),
        *make_requests(2, prefix="long ", words=9, max_tokens=20, stop_token_ids=()),
    ]
    begun = TokenRun(token_ids=(65, 66), logprobs=(-0.5, -0.25), versions=(-3, -3))
    made[-1] = replace(made[-1], prefix=begun)
    return made


def by_rounds(engine: Any) -> list[tuple[int, dict[str, Completion]]]:
    found: list[tuple[int, dict[str, Completion]]] = []
    while in_flight_of(engine.state()):
        found.append((engine.round, by_id(run_to(engine, engine.round + 1))))
    return found


def check_alike(found: list[Any], expected: list[Any]) -> None:
    """The same requests end in the same rounds with the same tokens and versions."""
    assert [(round, done.keys()) for round, done in found] == [
        (round, done.keys()) for round, done in expected
    ]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        for id, completion in ours.items():
            [one], [other] = completion.segments, theirs[id].segments
            assert (one.token_ids, one.versions) == (other.token_ids, other.versions)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert (completion.text, completion.finish_reason) == (
                theirs[id].text,
                theirs[id].finish_reason,
            )


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_an_idle_vllm_goes_on_from_a_round(engine: Any, cut: int) -> None:
    asked = requests()
    named = {one.id: one for one in asked}
    deliver(engine, 0)
    engine.round = 0
    engine.submit(asked)
    run_to(engine, cut)
    assert engine.round == cut
    state = engine.state()
    deliver(engine, 1)
    expected = by_rounds(engine)
    assert len(expected) > 5
    engine.submit([replace(one, id=f"gone {one.id}") for one in asked])
    run_to(engine, engine.round + 2)
    deliver(engine, 0)
    engine.restore(through_json(state), named)
    assert engine.state() == state
    with pytest.raises(EngineError, match="1 requests that it is not restored with, such as"):
        engine.restore(state, {one.id: one for one in asked[:-1]})
    assert engine.state() == state
    deliver(engine, 1)
    check_alike(by_rounds(engine), expected)


def test_a_proved_delivery_leaves_what_runs_as_a_plain_one_does(engine: Any) -> None:
    found: list[Any] = []
    for proved in (False, True):
        policy = LocalTrainer(lively(), TrainerOptions(lr=1e-3))
        options = SyncOptions(
            dtype=torch.float32, vocabulary=261, temperature=1.0, probe_every=1, probe_tokens=64
        )
        sync = WeightSync(policy, engine, options, lambda: lively(seed=3))
        engine.round = 0
        ended: list[Any] = []
        for version in range(4):
            policy.model.load_state_dict(lively(seed=version).state_dict())
            if proved:
                sync.deliver(version)
            else:
                engine.update_weights(policy.weights("all"), version)
            if not version:
                engine.submit(requests())
            until = engine.round + 4
            ended.append((until, by_id(run_to(engine, until))))
        found.append([*ended, *by_rounds(engine)])
    plain, with_proof = found
    check_alike(with_proof, plain)
    versions = [
        version
        for _, done in with_proof
        for completion in done.values()
        for version in completion.segments[0].versions
    ]
    assert -1 not in versions and {0, 1, 2, 3} <= set(versions)
