"""Runs that train an agent program at its chat endpoint, whatever client it asks with."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import EnvironmentDefinitionError
from support.continuous_runs import use
from support.figures import Learned
from support.known_weights import model_that_adds
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config, sft_config

# Thirty lines that know nothing of oxRL: ask, look at the answer, ask again, say what it was worth.
AGENT = '''
import json
import os
import sys
import urllib.request


def ask(messages):
    """One request to a chat endpoint, as any client of it makes it."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["choices"][0]["message"]


row = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": sys.argv[1]}]
worth = 0.0
for attempt in range(2):
    message = ask(messages)
    plain = sum(character.isascii() for character in message["content"][:6])
    worth += plain / 12
    messages += [message, {"role": "user", "content": f"{plain} plain; again"}]
print(json.dumps({"reward": worth, "reason": "counted"}))
'''
OPENAI = AGENT[AGENT.index("row = ") :].replace("ask(messages)", "ask(messages).model_dump()", 1)
AGENT_WITH_OPENAI = f"""
import json
import sys

from openai import OpenAI

client = OpenAI()


def ask(messages):
    answer = client.chat.completions.create(model="any", messages=messages)
    return answer.choices[0].message


{OPENAI}
"""


def agent_config(folder: Path, name: str, source: str, **sections: dict[str, Any]) -> Config:
    """A run of the program with a model whose turns end."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    model = folder / "model"
    if not model.exists():
        model_that_stops(model)
    command = [sys.executable, str(folder / f"{name}.py"), "{prompt}"]
    given: dict[str, dict[str, Any]] = {
        "model": {"name": str(model)},
        "environment": {
            "name": "agent",
            "options": {"command": command},
            "max_turns": 3,
            "timeout_s": 60,
        },
        "reward": {"name": ""},
        "rollout": {"max_tokens": 16, "n_samples": 2},
        "data": {"prompts_per_step": 2},
        "run": {"steps": 2, "checkpoint_every": 0},
    }
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    return rl_config(folder, name, **given)


def sample_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_trains_on_what_a_program_asked_and_what_it_said_it_was_worth(
    tmp_path: Path,
) -> None:
    known = {"name": str(model_that_adds(tmp_path / "adds"))}
    cfg = agent_config(tmp_path, "plain", AGENT, model=known)
    run(cfg)
    lines = sample_lines(cfg.run.directory)
    assert len(lines) == 8
    whole = [line for line in lines if len(line["turns"]) == 2 and line["end"] == "completed"]
    untrained = [line for line in whole if line["step"] == 1]
    assert len(untrained) >= 2
    for line in whole:
        first, second = line["turns"]
        plain = [sum(c.isascii() for c in turn["text"][:6]) for turn in (first, second)]
        assert first["messages"] == [{"role": "user", "content": f"{plain[0]} plain; again"}]
        assert line["reward"] == pytest.approx(sum(plain) / 12)
        assert line["reason"] == "counted"
    assert any(line["reward"] for line in untrained)
    steps = metric_lines(cfg.run.directory)
    assert steps[0]["update/grad_norm"] > 0
    assert all(step["mismatch/abs_logdiff_max"] < 1e-4 for step in steps)


@pytest.mark.full
def test_the_client_that_a_program_asks_with_changes_no_byte(tmp_path: Path) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("openai is not installed: pip install openai, beside oxrl")
    plain = agent_config(tmp_path, "plain", AGENT)
    other = agent_config(tmp_path, "other", AGENT_WITH_OPENAI)
    run(plain)
    run(other)
    assert final_files(plain.run.directory) == final_files(other.run.directory)
    assert sample_lines(plain.run.directory) == sample_lines(other.run.directory)


def model_that_answers_with_digits(folder: Path) -> Path:
    """Any digit, twice: what the policy of a real agent can do before it is trained."""
    chance = random.Random(0)
    rows: list[str] = []
    for _ in range(400):
        first, second = chance.choices("0123456789", k=2)
        said = [f"{chance.randint(2, 7)}+{chance.randint(3, 6)}=", first, "0 plain; again", second]
        roles = ["user", "assistant"] * 2
        pairs = zip(roles, said, strict=True)
        rows.append(json.dumps({"messages": [{"role": r, "content": text} for r, text in pairs]}))
    (folder / "digits.jsonl").write_text("\n".join(rows) + "\n")
    cfg = sft_config(
        folder,
        "warm",
        data={"train": str(folder / "digits.jsonl"), "rows_per_step": 32},
        train={"alg_name": "sft", "lr": 4e-3},
        run={"steps": 50, "checkpoint_every": 0},
    )
    run(cfg)
    return max((cfg.run.directory / "checkpoints").glob("step_*"))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_program_gets_the_answers_that_it_says_are_worth_more(
    tmp_path: Path, learned: Learned
) -> None:
    wants_sevens = AGENT.replace("character.isascii()", "character == '7'").replace("/ 12", "/ 2")
    cfg = agent_config(
        tmp_path,
        "learns",
        wants_sevens,
        model={"name": str(model_that_answers_with_digits(tmp_path))},
        rollout={"max_tokens": 4, "n_samples": 8},
        data={"prompts_per_step": 4},
        run={"steps": 20},
        train={"alg_name": "sgrpo", "lr": 2e-3},
    )
    run(cfg)
    rewards = [line["reward/mean"] for line in metric_lines(cfg.run.directory)]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    learned("gain of three steps", last - first, at_least=0.3)


# It asks more often, and each evaluation so far is a line of a file beside it, which it tells of.
AGENT_THAT_COUNTS = (
    AGENT.replace("range(2)", "range(6)")
    .replace(
        "messages = [",
        """
path = os.path.join(os.path.dirname(__file__), "evaluations.txt")
with open(path, "a+") as file:
    if sys.argv[1] == "held out":
        file.write("again\\n")
    file.seek(0)
    evaluations = len(file.readlines())
messages = [""",
        1,
    )
    .replace("plain; again", "plain after {evaluations}; again")
)


def test_programs_that_are_in_flight_are_asked_again_and_one_that_says_otherwise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "held out"}) + "\n")
    few = {"data": {"prompts_per_step": 1, "eval": str(held_out), "eval_rows": 1}}
    lag = {"max_staleness": 2, "force_strict_on_policy": False}
    parks: dict[str, Any] = few | {"rollout": lag, "environment": {"alive": 3}}
    every = {"steps": 4, "eval_every": 1}
    plain = agent_config(tmp_path, "plain", AGENT, run=every, **parks)
    without = agent_config(tmp_path, "without", AGENT, run={"steps": 4}, **parks)
    run(plain)
    run(without)
    # An evaluation ends every program and begins it anew, which changes nothing.
    assert sample_lines(plain.run.directory) == sample_lines(without.run.directory)
    assert any(len(line["versions"]) > 1 for line in sample_lines(plain.run.directory))
    # So many programs and steps that some evaluation meets one with a turn that was answered; a
    # policy that learned something might end every program at once.
    parks["environment"] = {"alive": 5, "max_turns": 7}
    parks["train"] = {"alg_name": "sgrpo", "lr": 1e-9}
    every["steps"] = 8
    counts = agent_config(tmp_path, "counts", AGENT_THAT_COUNTS, run=every, **parks)
    says = r"name=agent: episode .*It answered turn 1 otherwise: messages was .* plain after (\d); "
    with pytest.raises(EnvironmentDefinitionError, match=says) as raised:
        run(counts)
    was, now = re.findall(r"plain after (\d+); again", str(raised.value))
    assert int(now) == int(was) + 1
