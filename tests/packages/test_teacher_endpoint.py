"""A teacher behind a server: one of the test's own, and where vLLM is installed one of vLLM's."""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oxrl.data.batching import to_token_batch
from oxrl.errors import ConfigError, DeadlineError, EngineError, Stopped
from oxrl.runs.waiting import Patience, no_stop
from oxrl.tables.watch import Deadlines
from oxrl.types import Output, TokenBatch
from oxrl_graders.judge import endpoint as transport
from oxrl_graders.judge.endpoint import Client
from oxrl_teachers import endpoint
from oxrl_teachers.elsewhere import await_all
from oxrl_teachers.endpoint import EndpointTeacher
from support.judge_server import Answer, Json, JudgeServer, judge_server, refused
from support.samplers import TOKENIZER, lively
from support.teacher_server import Entries, completion, entries_of, teacher_server, twisted
from support.vllm_server import vllm_server

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]
ROWS = [
    [40, 41, 42, 43, 44, 45, 46],
    [100, 7, 90, 33, 61, 62, 15, 80, 81, 82, 83],
    [61, 61, 62],
]
# The middle row is the one that a server fails on, where it fails on one.
MIDDLE = ROWS[1]
VOCABULARY = 261


@cache
def model() -> PreTrainedModel:
    return lively()


def batch(rows: list[list[int]] | None = None, prompt: int = 1) -> TokenBatch:
    """Rows of which the first tokens are a prompt, and the last one is not trained on."""
    given = ROWS if rows is None else rows
    trained = [
        [prompt <= place < len(row) - (len(row) > 3) for place in range(len(row))] for row in given
    ]
    return to_token_batch(given, trained, 0)


def teacher(url: str, **options: Any) -> EndpointTeacher:
    client = Client(url, key=options.pop("key", ""), retries=options.pop("retries", 4))
    settings = {"stop": no_stop, "deadline_s": 500.0, **options}
    count = settings.pop("candidates", 4)
    return EndpointTeacher("model.teachers.big", client, "tiny", count, **settings)


def want(count: int) -> frozenset[str]:
    return frozenset({"logprobs", f"top_k={count}"} if count else {"logprobs"})


def truth(inputs: TokenBatch, count: int) -> Output:
    """What the model says, computed here row by row from its own logits."""
    shape = inputs.tokens.shape
    logprobs = torch.zeros(shape)
    ids = torch.zeros((*shape, count), dtype=torch.int64)
    top = torch.zeros((*shape, count))
    for row in range(len(inputs)):
        with torch.no_grad():
            logits = model()(input_ids=inputs.tokens[row : row + 1], use_cache=False).logits[0]
        before = logits.float().log_softmax(-1)
        for place in inputs.response_mask[row].nonzero()[:, 0].tolist():
            here = before[place - 1]
            logprobs[row, place] = here[inputs.tokens[row, place]]
            top[row, place], ids[row, place] = here.topk(count)
    return Output(logprobs=logprobs, top_ids=ids, top_logprobs=top)


def assert_true(said: Output, inputs: TokenBatch, count: int, bound: float = 1e-4) -> None:
    expected = truth(inputs, count)
    assert said.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(said.logprobs, expected.logprobs, atol=bound, rtol=0)
    if not count:
        assert said.top_ids is None and said.top_logprobs is None
        return
    assert said.top_ids is not None and said.top_logprobs is not None
    assert torch.equal(said.top_ids, expected.top_ids)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(said.top_logprobs, expected.top_logprobs, atol=bound, rtol=0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.01)
    with teacher_server(model()) as server:
        yield server


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of vLLM with the same weights, which gives at most 8 candidates."""
    folder = tmp_path_factory.mktemp("teacher")
    with vllm_server(folder, model(), "--max-logprobs", "8") as url:
        yield url


NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
)


@pytest.fixture(params=["server", pytest.param("real", marks=NEEDS_VLLM)])
def url(request: pytest.FixtureRequest) -> str:
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, str) else found.url


def test_a_server_says_what_the_model_says(url: str) -> None:
    for count in (0, 1, 3, 8):
        for inputs in (batch(), batch(prompt=2), batch(ROWS[:1])):
            said = teacher(url).forward(inputs, want(count))
            assert_true(said, inputs, count, bound=1e-3)


def test_a_server_is_tried_before_a_run(url: str) -> None:
    teacher(url, candidates=8).try_out((1, 2, 260))
    with pytest.raises(EngineError, match=r"model\.teachers\.big\.url: http://127\.0\.0\.1:9/v1"):
        teacher("http://127.0.0.1:9/v1", retries=0).try_out((1, 2, 260))


@NEEDS_VLLM
def test_vllm_refuses_what_it_has_not(real: str) -> None:
    """More candidates than it was started for, tokens that it does not have, another model."""
    with pytest.raises(ConfigError, match=r"greater than max allowed: 8.*--max-logprobs 9"):
        teacher(real, candidates=9).try_out((1, 2, 260))
    with pytest.raises(ConfigError, match="teachers.big.url: .*400"):
        teacher(real).try_out((1, 2, 100_000))
    other = EndpointTeacher(
        "model.teachers.big", Client(real), "other", 1, stop=no_stop, deadline_s=60.0
    )
    with pytest.raises(ConfigError, match="teachers.big.url: .*404"):
        other.try_out((1, 2, 260))


def reversed_order(entries: Entries, request: Json) -> Any:
    return [entry and dict(reversed(entry.items())) for entry in entries]


def nothing_of_the_first(entries: Entries, request: Json) -> Any:
    return [{}, *entries[1:]]


def one_more_than_asked(entries: Entries, request: Json) -> Any:
    """One candidate more, always: the row's own token is no extra one then."""
    return entries_of(model(), request | {"prompt_logprobs": request["prompt_logprobs"] + 1})


def everything(entries: Entries, request: Json) -> Any:
    return entries_of(model(), request | {"prompt_logprobs": VOCABULARY})


@pytest.mark.parametrize(
    "twist", [reversed_order, nothing_of_the_first, one_more_than_asked, everything]
)
def test_other_forms_of_an_answer_say_the_same(
    server: JudgeServer, twist: Callable[..., Any]
) -> None:
    server.answer = twisted(model(), twist)
    for count in (1, 4):
        assert_true(teacher(server.url).forward(batch(), want(count)), batch(), count)


def test_a_token_that_is_as_likely_as_a_candidate_is_no_candidate(server: JudgeServer) -> None:
    """Candidates that depended on what was sampled would bias the estimate."""

    def alike(entries: Entries, request: Json) -> Any:
        named = {"7": -1.0, "8": -2.0}
        return [None] + [
            {text: {"logprob": value} for text, value in (named | {str(own): -2.0}).items()}
            for own in request["prompt"][1:]
        ]

    server.answer = twisted(model(), alike)
    inputs = batch([[1, own] for own in (3, 8, 90)])
    said = teacher(server.url).forward(inputs, want(2)).top_ids
    assert said is not None and said[:, 1].tolist() == [[7, 8]] * 3


def test_a_probability_of_0_is_a_small_one(server: JudgeServer) -> None:
    """Its logarithm would make every gradient NaN."""

    def impossible(entries: Entries, request: Json) -> Any:
        named = ("7", "8", str(request["prompt"][1]))
        return [None, {name: {"logprob": -math.inf if name != "7" else 0.0} for name in named}]

    server.answer = twisted(model(), impossible)
    said = teacher(server.url).forward(batch([[1, 90]]), want(2))
    assert said.logprobs is not None and said.top_logprobs is not None
    assert said.logprobs[0, 1] == -9999.0
    assert said.top_logprobs[0, 1].tolist() == [0.0, -9999.0]


def of_each(change: Callable[[Json, str], object]) -> Callable[[Entries, Json], Any]:
    """Change what is said of the second place, given its own token."""

    def twist(entries: Entries, request: Json) -> Any:
        entry = entries[2]
        assert entry is not None
        change(entry, str(request["prompt"][2]))
        return entries

    return twist


def set_to(value: Any) -> Callable[[Json, str], None]:
    return lambda entry, own: entry.__setitem__(own, value)


WRONG: dict[str, tuple[Callable[[Entries, Json], Any], str]] = {
    "absent": (lambda entries, request: None, "answers without prompt_logprobs.*OpenAI's own"),
    "a text": (lambda entries, request: "no", "answers without prompt_logprobs"),
    "too many": (lambda entries, request: [*entries, {}], "of 12 tokens, .*asked about 11"),
    "too few": (lambda entries, request: entries[:-1], "of 10 tokens, .*asked about 11"),
    "own lacks": (
        of_each(lambda entry, own: entry.pop(own)),
        "candidates at token 90 of a row, and was asked for 4 and for the token itself",
    ),
    "one candidate": (
        of_each(lambda entry, own: [entry.pop(name) for name in [*entry] if name != own]),
        "gives 1 candidates at token 90 of a row, and was asked for 4",
    ),
    "ids below 0": (
        lambda entries, request: [
            entry and {f"-{name}": told for name, told in entry.items()} for entry in entries
        ],
        "gives 0 candidates at token 7 of a row",
    ),
    "a list": (lambda entries, request: [None, *[[]] * 10], "token 7 of a row what cannot be read"),
    "None within": (lambda entries, request: [None] * 11, "token 7 of a row what cannot be read"),
    "a bare number": (of_each(set_to(-1.0)), "token 90 of a row what cannot be read"),
    "a word": (of_each(set_to({"logprob": "likely"})), "token 90 of a row what cannot be read"),
    "NaN": (of_each(set_to({"logprob": math.nan})), "nan of all probability"),
    "logits": (of_each(set_to({"logprob": 7.5})), "no log-probabilities.*raw_logprobs"),
    "not normalised": (
        lambda entries, request: [
            entry and {name: {"logprob": -0.1} for name in entry} for entry in entries
        ],
        "no log-probabilities.*raw_logprobs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_leaves_its_row_out_and_no_other(
    server: JudgeServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    twist, reason = WRONG[name]

    def answer(request: Json) -> Answer:
        entries = entries_of(model(), request)
        return completion(twist(entries, request) if request["prompt"] == MIDDLE else entries)

    server.answer = answer
    check_middle_left_out(server, caplog, reason)
    assert len(server.requests) == 3  # it would say the same again
    server.answer = twisted(model(), twist)
    with pytest.raises(ConfigError, match=rf"model\.teachers\.big\.url: the server at .*{reason}"):
        teacher(server.url).try_out(tuple(MIDDLE))


def check_middle_left_out(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, reason: str, **options: Any
) -> None:
    """All rows but the middle one have the right numbers, and the log says why it has none."""
    inputs = batch()
    with caplog.at_level(logging.WARNING):
        said = teacher(server.url, **options).forward(inputs, want(4))
    others = torch.tensor([0, 2])
    length = inputs.tokens.shape[1]
    assert_true(said.select(others, length), inputs.select(others), 4)
    mask = inputs.response_mask[1]
    assert said.logprobs is not None and said.top_ids is not None and said.top_logprobs is not None
    assert torch.equal(said.logprobs[1].isnan(), mask)
    assert (said.top_ids[1][mask] == -1).all() and said.top_logprobs[1][mask].isnan().all()
    [told] = [record.getMessage() for record in caplog.records if "no answer on" in record.message]
    assert "model.teachers.big: no answer on 1 of 3 rows: " in told
    assert re.search(reason, told), told


@pytest.mark.parametrize(
    ("answer", "reason", "asked"),
    [
        (refused(500, "broken"), "500 broken", 5),
        (refused(429, "slowly", Retry_After="0"), "429 slowly", 5),
        (refused(400, "too long"), "400 too long", 1),
        (refused(404, "<html>nothing here</html>"), "404 <html>", 1),
        ((200, {}, b"<html>hello</html>"), "JSONDecodeError", 5),
        ((200, {}, b"[]"), "JSON that is no object", 5),
        ((200, {}, b""), "JSONDecodeError", 5),
        ((302, {"Location": "http://127.0.0.1:9/"}, b""), "it has moved to", 1),
    ],
)
def test_a_failure_is_tried_again_where_that_may_help(
    server: JudgeServer, answer: Answer, reason: str, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    right = server.answer
    server.answer = lambda request: answer if request["prompt"] == MIDDLE else right(request)
    check_middle_left_out(server, caplog, reason)
    assert len(server.requests) == 2 + asked
    times = iter([refused(503), refused(502)])
    server.answer = lambda request: next(times, right(request))
    assert_true(teacher(server.url).forward(batch(), want(4)), batch(), 4)


def test_a_server_that_is_gone_is_soon_given_up(server: JudgeServer) -> None:
    server.answer = lambda request: refused(503, "gone")
    rows = [[1, place, 2] for place in range(3, 103)]
    said = teacher(server.url, retries=2).forward(batch(rows), want(1)).logprobs
    assert said is not None and said[:, 1].isnan().all()
    # The rows that were under way are asked three times, all others once.
    assert len(server.requests) <= 100 + 2 * endpoint.AT_ONCE


def test_a_server_that_comes_back_is_asked_again_where_it_fails(server: JudgeServer) -> None:
    right = server.answer
    asked = teacher(server.url, retries=1)
    server.answer = lambda request: refused(503, "gone")
    asked.forward(batch(), want(1))
    server.answer = right
    assert_true(asked.forward(batch(), want(1)), batch(), 1)
    once = iter([refused(503)])
    server.answer = lambda request: next(once, None) or right(request)
    assert_true(asked.forward(batch(), want(1)), batch(), 1)


def test_a_deadline_is_of_the_next_answer() -> None:
    futures = [Future[None]() for _ in range(20)]

    def answer() -> None:
        for future in futures:
            time.sleep(0.1)
            future.set_result(None)

    thread = threading.Thread(target=answer)
    thread.start()
    await_all(futures, Patience(deadline_s=1.5), "answers")
    thread.join()
    with pytest.raises(DeadlineError, match="for an answer"):
        await_all([Future[None]()], Patience(deadline_s=0.1), "an answer")


def drip(listening: socket.socket, over: threading.Event) -> None:
    """Answer a byte now and then, for ever."""
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_drip_on, args=(connection, over), daemon=True).start()


def _drip_on(connection: socket.socket, over: threading.Event) -> None:
    with connection, suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not over.wait(0.02):
            connection.sendall(b" ")


@pytest.fixture
def dripping() -> Iterator[str]:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=(listening, over), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        over.set()


def test_no_row_takes_longer_than_half_of_what_the_run_waits(
    dripping: str, server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        said = teacher(dripping, deadline_s=1.0).forward(batch(), want(1)).logprobs
    assert said is not None and bool(said.isnan().any(1).all())
    assert "no answer on 3 of 3 rows: " in caplog.text
    assert "no answer in time" in caplog.text
    server.delay_s = 2.0
    said = teacher(server.url, deadline_s=0.5).forward(batch(), want(1)).logprobs
    assert said is not None and bool(said.isnan().any(1).all())
    assert time.monotonic() - start < 30


def test_a_signal_and_a_deadline_end_the_wait(
    dripping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = teacher(dripping, stop=lambda: True)
    with pytest.raises(Stopped):
        asked.forward(batch(), want(1))
    asked.close()
    # A row that is never given up, as where the name of a server is looked up for long.
    over = threading.Event()
    late = teacher(dripping, deadline_s=30.0)
    late.deadline_s = 0.3
    monkeypatch.setattr(late, "_answer", lambda row, k: over.wait(30))
    with pytest.raises(DeadlineError, match=r"run\.deadlines\.rollout=0\.3 s for model\.teachers"):
        late.forward(batch(), want(1))
    late.close()
    over.set()


def test_rows_are_asked_at_the_same_time_and_each_once(server: JudgeServer) -> None:
    server.delay_s = 0.05
    rows = [[1, place, 2] for place in range(3, 43)]
    asked = teacher(server.url, candidates=2)
    for row in rows[:20]:
        asked.begin(tuple(row))
    inputs = batch(rows + rows[:5])
    said = asked.forward(inputs, want(2))
    assert_true(said, inputs, 2)
    assert len(server.requests) == 40
    assert 1 < server.most_at_once <= endpoint.AT_ONCE
    assert_true(asked.forward(inputs, want(2)), inputs, 2)
    assert len(server.requests) == 80  # nothing is kept that was asked for


def test_what_nobody_asks_for_is_forgotten(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MOST_KEPT", 8)
    asked = teacher(server.url, candidates=1)
    for place in range(20):
        asked.begin((1, place, 2))
        assert len(asked._asked) == min(place + 1, 8)
    inputs = batch([[1, place, 2] for place in range(20)])
    assert_true(asked.forward(inputs, want(1)), inputs, 1)
    assert len(asked._asked) == 0


def test_a_key_is_sent_and_is_in_no_message(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sk-very-secret-key"
    with judge_server() as elsewhere:
        answers = [
            refused(401, f"bad key {key}"),
            (307, {"Location": f"{elsewhere.url}/completions"}, b""),
        ]
        for answer in answers:
            right = server.answer
            server.answer = lambda request, answer=answer: answer
            with pytest.raises(ConfigError) as caught:
                teacher(server.url, key=key).try_out((1, 2))
            with caplog.at_level(logging.DEBUG):
                teacher(server.url, key=key).forward(batch(), want(1))
            server.answer = right
            assert key not in str(caught.value) + caplog.text
        assert set(server.keys) == {f"Bearer {key}"}
        assert elsewhere.requests == []


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint.key_of("") == ""
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ValueError, match="TEACHER_KEY is not set"):
        endpoint.key_of("TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", "sécret")
    with pytest.raises(ValueError, match="no HTTP header may hold"):
        endpoint.key_of("TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", " sk-1 ")
    assert endpoint.key_of("TEACHER_KEY") == "sk-1"


def test_a_server_is_tried_with_the_last_token_of_the_vocabulary(server: JudgeServer) -> None:
    asked = {"url": server.url, "name": "tiny", "key_env": "", "candidates": 3, "only": []}
    waits = Deadlines.alike(60)

    def built(more: Json) -> EndpointTeacher:
        return endpoint.endpoint(
            "model.teachers.big",
            asked | more,
            tokenizer=TOKENIZER,
            waits=waits,
            stop=no_stop,
            closing=lambda close: None,
        )

    built({})
    [tried] = server.requests
    assert max(tried["prompt"]) == max(TOKENIZER.get_vocab().values())
    assert tried["prompt_logprobs"] == 3 and tried["model"] == "tiny"
    with pytest.raises(ConfigError, match="the policy samples 2 tokens alone"):
        built({"only": [1, 2]})
