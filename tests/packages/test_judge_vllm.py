"""The reward `judge` against vLLM's own server on loopback (`make test-scale`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from oxrl.types import Completion, Prompt
from oxrl_graders.judge.pool import JudgePool
from support.samplers import lively
from support.vllm_server import vllm_server

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
    ),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(580),
]
PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "1+1"},), token_ids=(1,), answer="2")
MEMBERS = [Completion(segments=(), text=text, finish_reason="stop") for text in ("2", "3")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of vLLM with random weights."""
    with vllm_server(tmp_path_factory.mktemp("judge"), lively()) as url:
        yield url


def test_vllm_takes_the_schema_and_is_asked_for_no_recorded_verdict_again(
    url: str, tmp_path: Path
) -> None:
    options = {"url": url, "model": "tiny", "max_tokens": 600}
    judge = JudgePool(options, timeout_s=200.0, directory=tmp_path)
    (first,) = judge.score([(PROMPT, MEMBERS)])
    # Random weights may go on with white space, which the schema allows, up to max_tokens.
    assert {score.status for score in first} <= {"ok", "invalid"}, first
    assert judge._endpoint is not None and judge._endpoint.constrains
    assert len((tmp_path / "judgements.jsonl").read_bytes().splitlines()) == 2
    counted = judge.counters()
    assert counted["system/judge/prompt_tokens"] > 0 < counted["system/judge/completion_tokens"]
    again = JudgePool(options | {"url": "http://127.0.0.1:9/v1"}, directory=tmp_path)
    assert again.score([(PROMPT, MEMBERS)])[0] == first
    assert again.counters()["system/judge/requests"] == 0


def test_vllm_compares_two_responses(url: str) -> None:
    judge = JudgePool(
        {"url": url, "model": "tiny", "max_tokens": 600, "compare": "group"}, timeout_s=200.0
    )
    (scores,) = judge.score([(PROMPT, MEMBERS)])
    assert {score.status for score in scores} <= {"ok", "invalid"}, scores
