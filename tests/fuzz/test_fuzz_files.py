"""What reading a user's files raises is an error of ours that names the file, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _detect_agent

from oxrl.commands.train import run
from oxrl.config import Config, check_config, dump_config, load_config
from oxrl.data.actions import object_in
from oxrl.data.chat import ChatEncoder
from oxrl.data.prompts import PromptDataset
from oxrl.errors import ConfigError, DataError, OxrlError, RunDirectoryError, why_no_file
from oxrl.modelfiles.hub_status import check_on_hub
from oxrl.models.load import load_tokenizer
from oxrl.runs.clock import note_speed
from oxrl_envs.openenv_adapter import OpenEnvEnvironment
from support.checks_here import planned
from support.command_line import oxrl
from support.fuzzing import BASES, TOKENIZER, Values

pytestmark = pytest.mark.filterwarnings("ignore")
LONG = "1" + "0" * 9_999


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    for name in ("loop", "loop.yaml", "loop.jsonl", "loop.py", "loop.jinja", "loop.png"):
        os.symlink(name, tmp_path / name)
    return tmp_path


def values(**sections: dict[str, Any]) -> Values:
    made: Values = json.loads(json.dumps(BASES[0]))
    made["run"] |= {"mlflow": False, "threads": 1}
    for section, fields in sections.items():
        made.setdefault(section, {}).update(fields)
    return made


NUMBERS = (LONG, "0x" + "f" * 9_000, "0o" + "7" * 9_000, f"[{LONG}]", f"{{a: {LONG}}}")


@pytest.mark.parametrize("field", ["run.steps", "train.lr", "reward.options", "run.name"])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:4])
def test_a_number_of_ten_thousand_digits_in_a_configuration(
    folder: Path, field: str, number: str
) -> None:
    section, _, name = field.partition(".")
    text = json.dumps(values(**{section: {name: "@"}})).replace('"@"', number)
    (folder / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as refused:
        load_config("run.yaml")
    assert field in str(refused.value)
    with pytest.raises(ConfigError, match=field):
        load_config(write(folder, values()), [f"{field}={number}"])


def write(folder: Path, made: Values) -> Path:
    path = folder / "good.yaml"
    path.write_text(json.dumps(made))
    return path


@pytest.mark.parametrize("stream", [False, True])
def test_a_number_of_ten_thousand_digits_in_a_row(folder: Path, stream: bool) -> None:
    good = '{"prompt": "1+1?", "answer": "2"}\n'
    (folder / "big.jsonl").write_text(f'{good}{{"prompt": "1+1?", "answer": {LONG}}}\n')
    with pytest.raises(DataError, match=r"big\.jsonl:2 .*digits"):
        PromptDataset.load(folder / "big.jsonl", TOKENIZER)


@pytest.mark.parametrize("text", ["[" * 200_000, LONG, f'{{"a": {LONG}}}', "[1]", "", "\x00"])
def test_a_file_of_statistics_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "statistics.json").write_text(text)
    with pytest.raises(DataError, match=r"statistics\.json"):
        object_in(folder / "statistics.json")


@pytest.mark.parametrize("number", ["1e308", "'1e308'", "1e39", "-1e300"])
@pytest.mark.parametrize("field", ["train.clip_high", "train.kl_coeff"])
def test_a_number_that_no_tensor_holds_is_refused(folder: Path, field: str, number: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_config(write(folder, values()), [f"{field}={number}"])
    section, _, name = field.partition(".")
    with pytest.raises(ValueError, match=name):
        check_config(Config.model_validate(values(**{section: {name: float(number.strip("'"))}})))


def test_the_largest_number_that_a_tensor_holds_is_taken(folder: Path) -> None:
    made = load_config(write(folder, values()), ["train.clip_high=3e38"])
    assert made.train.clip_high == 3e38 and "3.0e+38" in dump_config(made)


TEMPLATES = (
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ 1 / 0 }}",
    "{{ messages() }}",
    "{{ none + 1 }}",
    "{{ messages[0].content.a.b }}",
    "{{ messages[7].content }}",
    "{{ 'x' * (0 - 1).nothing }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ '%d' % 'x' }}",
    "{{ 10.0 ** 400 }}",
    "{{ messages | map(attribute='x.y.z') | sum }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_a_template_raises(folder: Path, template: str) -> None:
    tokenizer = load_tokenizer("builtin:tiny")
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"train\.jsonl:1: .*(template|refuses)"):
        PromptDataset.load("train.jsonl", tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}{% if tools %}" + template + "{% endif %}"
    encoder = ChatEncoder(tokenizer)
    with pytest.raises(DataError, match="template refuses"):
        encoder.encode_prompt([{"role": "user", "content": "x"}], [{"function": {}}])


@pytest.mark.parametrize("command", [partial(oxrl, "train"), planned], ids=["train", "plan"])
def test_a_template_of_a_file_that_includes_another_is_named(
    folder: Path, command: Callable[..., CompletedProcess[str]]
) -> None:
    (folder / "t.jinja").write_text("{% include 'x' %}")
    made = values(model={"chat_template": "t.jinja"}, run={"dir": "out"})
    found = command(write(folder, made), folder=folder)
    said = found.stdout + found.stderr
    assert found.returncode == 2 and "Traceback" not in said
    assert "template refuses" in said and "t.jinja" in said


LOOPS: dict[str, dict[str, dict[str, Any]]] = {
    "data.train": {"data": {"train": "loop.jsonl"}},
    "data.eval": {"data": {"eval": "loop.jsonl"}},
    "reward.name": {"reward": {"name": "loop.py:score"}},
    "model.chat_template": {"model": {"chat_template": "loop.jinja"}},
    "model.name": {"model": {"name": "./loop"}},
    "train.loss": {"train": {"loss": "loop.py:gate"}},
    "rollout.from_samples": {"rollout": {"from_samples": "loop"}},
}


@pytest.mark.parametrize("field", LOOPS)
def test_a_link_in_a_circle_that_a_configuration_names(folder: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}.*loop"):
        load_config(write(folder, values(**LOOPS[field])))


@pytest.mark.parametrize("place", ["loop", "loop/below"])
def test_a_run_directory_that_is_a_link_in_a_circle(folder: Path, place: str) -> None:
    cfg = load_config(write(folder, values(run={"dir": place})))
    with pytest.raises(RunDirectoryError, match="loop"):
        run(cfg)


def test_a_link_in_a_circle_is_not_called_a_slip_of_the_pen(folder: Path) -> None:
    assert why_no_file("loop.yaml") == "is a symbolic link that leads to no file"
    with pytest.raises(ConfigError, match=r"loop\.yaml: is a symbolic link"):
        load_config("loop.yaml")


COMMANDS = (
    "config show loop.yaml",
    "train loop.yaml",
    "report loop",
    "replay loop --step 1",
    "score loop reward.name=exact",
    "eval loop",
    "export loop --out out",
    "export builtin:tiny --out loop/below",
    "generate builtin:tiny --prompts-file loop.jsonl",
    "generate builtin:tiny --prompt x --max-tokens 1 --out loop.jsonl",
    "prepare gsm8k --source loop.jsonl --out out",
)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_link_in_a_circle_that_a_command_names(folder: Path, words: str) -> None:
    found = oxrl(*words.split(), folder=folder)
    said = found.stdout + found.stderr
    assert found.returncode == 2, said
    assert "loop" in said and "Traceback" not in said


def test_the_doctor_looks_at_a_link_in_a_circle(folder: Path) -> None:
    found = oxrl("doctor", "--runs", "loop/below", folder=folder)
    assert found.returncode in (0, 1) and "Traceback" not in found.stderr


def test_a_folder_that_is_gone_while_a_command_writes_into_it_is_named(folder: Path) -> None:
    (folder / "prompts.txt").write_text("x\n")
    (folder / "deep").mkdir()
    name = "deep/" + "n" * 300
    words = ("generate", "builtin:tiny", "--prompt", "x", "--max-tokens", "1", "--out", name)
    found = oxrl(*words, folder=folder)
    assert found.returncode == 2
    assert "n" * 300 in found.stderr and "Traceback" not in found.stderr


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, of a kind that measures the machine."""
    place = tmp_path_factory.mktemp("begun")
    (place / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    run(Config.model_validate(of_run(place, "run", steps=1)))
    return place


def of_run(place: Path, name: str, *, steps: int) -> Values:
    return values(
        run={"dir": str(place / name), "steps": steps},
        data={"train": str(place / "train.jsonl")},
    )


@pytest.mark.parametrize("damage", ["gone", "cut", "garbage", "list", "digits", "folder", "link"])
def test_a_run_whose_environment_json_is_damaged(begun: Path, tmp_path: Path, damage: str) -> None:
    place = begun / damage
    shutil.copytree(begun / "run", place)
    file = place / "environment.json"
    whole = file.read_text()
    file.unlink()
    match damage:
        case "cut":
            file.write_text(whole[: len(whole) // 2])
        case "garbage":
            file.write_bytes(b"\xff\x00{{{")
        case "list":
            file.write_text("[1]")
        case "digits":
            file.write_text(f'{{"a": {LONG}}}')
        case "folder":
            file.mkdir()
        case "link":
            file.symlink_to(file.name)
        case _:
            pass
    with pytest.raises(RunDirectoryError, match=r"environment\.json") as refused:
        run(Config.model_validate(of_run(begun, damage, steps=2)), resume=True)
    assert refused.value.exit_code == 2
    if damage in ("gone", "cut", "garbage", "list", "digits"):
        # What it says helps.
        file.write_text("{}")
        run(Config.model_validate(of_run(begun, damage, steps=2)), resume=True)


def test_the_speed_of_a_machine_is_noted_in_a_whole_file_alone(tmp_path: Path) -> None:
    speed: Any = None
    with pytest.raises(RunDirectoryError, match=r"environment\.json is gone"):
        note_speed(tmp_path, speed)


ANSWERS = {
    "html": b"<html>no hub</html>",
    "half": b'{"id": ',
    "list": b"[1, 2]",
    "number": b"7",
    "nothing": b"{}",
    "bytes": bytes(range(256)),
    "other types": b'{"id": 7, "siblings": 3, "sha": [], "tags": 1}',
    "digits": f'{{"id": {LONG}}}'.encode(),
    "nested": b"[" * 200_000,
}


class Babbling(BaseHTTPRequestHandler):
    """Answers everything with the same."""

    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.answer)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Babbling]]:
    """A server in the place of the hub, and nothing in the cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Babbling)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    # Both are noted when the library is imported.
    monkeypatch.setattr(hf_api.api, "endpoint", here)
    template = here + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # The library asks the hub for it once in a process, and keeps whatever is said.
    monkeypatch.setattr(_detect_agent, "_registry", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Babbling
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hub_that_answers_nonsense(hub: type[Babbling], name: str, tmp_path: Path) -> None:
    hub.answer = ANSWERS[name]
    check_on_hub("owner/model", None)  # whoever loads it says why it cannot
    with pytest.raises(OxrlError, match="owner/model") as refused:
        load_tokenizer("owner/model")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("text", ["[" * 200_000, LONG, "{", "\x00", "no"])
def test_a_policy_that_writes_no_action_goes_on_to_its_next_turn(text: str) -> None:
    environment = OpenEnvEnvironment.__new__(OpenEnvEnvironment)
    environment._field = ""
    step = environment.step(text)
    assert step.reason == "no action" and not step.terminated
