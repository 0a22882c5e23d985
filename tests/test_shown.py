"""Words of others are shown without what a terminal obeys, and without secrets."""

from __future__ import annotations

import logging
import time
from io import StringIO
from pathlib import Path

import pytest

from oxrl.config import load_config
from oxrl.errors import ConfigError, OxrlError
from oxrl.redact import masked, printable, shown, without_tokens
from oxrl.runs.console import Console, run_logging
from oxrl.runs.environment import without_secret
from oxrl.usercode.user_code import raised_as

HF = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\rb\x00c\x7f\x9b", r"a\rb\x00c\x7f\x9b"),
        ("\u202eabc\u2066\u200f\ufeff\u2028", r"\u202eabc\u2066\u200f\ufeff\u2028"),
        ("\ud800", r"\ud800"),
        ("line\n\ttab é 🙂 👩\u200d🔬 שלום", "line\n\ttab é 🙂 👩\u200d🔬 שלום"),
    ],
)
def test_what_a_terminal_obeys_becomes_an_escape(text: str, expected: str) -> None:
    assert printable(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.api_key = 'abc def'", "train.api_key = ***"),
        ("override 'run.token=abc'", "override 'run.token=***'"),
        ("{'password': 'x y'}", "{'password': ***}"),
        ("WANDB_API_KEY=abc oxrl", "WANDB_API_KEY=*** oxrl"),
        (HF, "hf_***"),
        ("sk-proj-abc123DEF456ghi789jkl", "sk-***"),
        ("ray://user:pa:ss@host:123/x", "ray://***@host:123/x"),
        ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3.SflKxwRJSMeKKF2", "Bearer eyJ***"),
        # Words of this trade, and names that only look like it.
        ("rollout.max_tokens = 512", "rollout.max_tokens = 512"),
        (
            "stop token: 151645, eos_token='<|im_end|>'",
            "stop token: 151645, eos_token='<|im_end|>'",
        ),
        ("/data/task-force-of-twenty-people", "/data/task-force-of-twenty-people"),
        ("unknown key: value", "unknown key: value"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, expected: str) -> None:
    assert masked(text) == expected
    assert str(OxrlError(text)) == expected


def test_long_texts_of_others_are_looked_through_at_once() -> None:
    began = time.process_time()
    for part in ("a.", "a-", "a_", "key.", "token", "x:", "eyJ", "A1.-", "'"):
        masked(part * (20_000 // len(part)))
    # A few hundredths; where the time grew with the square of the length, minutes.
    assert time.process_time() - began < 20


def test_a_secret_of_the_environment_does_not_stay_in_what_a_reward_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", "zebra-staple-9912")
    monkeypatch.setenv("SORT_KEY", "id")
    monkeypatch.setenv("PLAIN", "nothing secret")
    error = ValueError("zebra-staple-9912 was refused by id, nothing secret")
    assert raised_as(error, None) == "ValueError: *** was refused by id, nothing secret"


def test_a_path_with_an_equals_sign_is_kept_in_a_config() -> None:
    assert without_tokens("data/key=5/token=3.jsonl") == "data/key=5/token=3.jsonl"
    assert without_secret("train.my_token=abc") == "train.my_token=***"
    assert without_secret("rollout.max_tokens=5") == "rollout.max_tokens=5"


CONFIG = """\
run: {name: x, steps: 1, mlflow: false}
model: {name: "builtin:tiny"}
data: {train: rows.jsonl}
train: {alg_name: sft}
"""


@pytest.mark.parametrize(
    "override", ["model.hf_token=abcSECRET", "train.password=abcSECRET", f"model.nme={HF}SECRET"]
)
def test_an_unknown_field_does_not_echo_a_secret(override: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "c.yaml", [override])
    assert "SECRET" not in str(raised.value) and "***" in str(raised.value)


def test_a_log_and_a_console_show_what_others_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = StringIO()
    evil = f"\x1b[2Jreward\n2026-01-01 00:00:00,000 INFO oxrl: forged {HF}"
    with run_logging(tmp_path / "run.log"), Console(1, "x", stream=stream) as console:
        logging.getLogger("oxrl.test").warning("%s", evil)
        console.message(evil)
    kept = (tmp_path / "run.log").read_text()
    for text in (kept, capsys.readouterr().err, stream.getvalue()):
        assert "\x1b" not in text and HF not in text
        assert r"\x1b[2J" in text
    assert [line.startswith("2026-01-01") for line in kept.splitlines()] == [False, False]
    assert shown(evil).endswith("hf_***")
