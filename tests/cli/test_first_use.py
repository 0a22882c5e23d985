"""Commands as somebody types them for the first time: one word, and whatever is at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from oxrl import __version__
from oxrl.cli import app
from oxrl.commands.evaluate import run_generate
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError
from oxrl.tables.policy import ROWS
from oxrl.types import Sampling
from oxrl_datasets.prepare import PREPARERS

ENDING = {"run": {"name": "s", "steps": 2, "threads": 1, "mlflow": False, "checkpoint_every": 1}}
SFT = {
    **ENDING,
    "model": {"name": "builtin:tiny"},
    "data": {"train": "sft.jsonl", "rows_per_step": 2},
    "train": {"alg_name": "sft", "lr": 1e-3},
}


def oxrl(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short supervised run."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1?", "completion": str(n + 1), "answer": "2"} for n in range(4)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 2)
    run(Config.model_validate(SFT))
    return tmp_path / "runs" / "s"


def test_the_version_is_told() -> None:
    assert oxrl("--version").output == f"oxrl {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_can_complete(shell: str) -> None:
    script = oxrl("completion", shell).output
    assert f"_OXRL_COMPLETE=complete_{shell}" in script


def test_names_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OXRL_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "oxrl algorithms dapo")
    found = CliRunner().invoke(app, [], prog_name="oxrl").output
    assert "dapo" in found and "sgrpo" not in found


@pytest.mark.parametrize("name", ["dapo", "ppo", "dpo", "mpo", "kto", "sft", "reward_model"])
def test_an_algorithm_is_told_in_full(name: str) -> None:
    text = oxrl("algorithms", name).output
    row = ROWS[name]
    assert text.startswith(f"{name}: {row.summary}\n")
    for words in ("source", "deviation", "recipe", *(f"train.{key} = " for key in row.defaults)):
        assert words in text
    for kind, cell in row.cells:
        field = "loss" if kind == "gate" else kind
        assert f"train.{field}: {cell}" in text
    assert "oxrl.functional." in text or "1 x nll" in text


def test_every_algorithm_can_be_told() -> None:
    from oxrl.commands.algorithm_page import describe

    for name in ROWS:
        assert len(describe(name).splitlines()) > 8


def test_an_algorithm_of_another_name_is_asked_back() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dapo'"):
        oxrl("algorithms", "dappo")


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(eval/\S+) +(\S+)", text)}


def test_a_run_a_checkpoint_and_a_model_are_evaluated_alike(supervised: Path) -> None:
    checkpoint = supervised / "checkpoints" / "step_00000002"
    of_run = numbers(oxrl("eval", str(supervised)).output)
    assert set(of_run) == {"eval/loss", "eval/perplexity", "eval/tokens"}
    assert 4 < of_run["eval/loss"] < 7  # about ln 261, the uniform guess
    assert of_run["eval/perplexity"] == pytest.approx(2.718281828 ** of_run["eval/loss"], rel=1e-4)
    assert numbers(oxrl("eval", str(checkpoint)).output) == of_run
    assert numbers(oxrl("eval", str(supervised / "checkpoints")).output) == of_run
    model = numbers(oxrl("eval", str(checkpoint), "data.eval=sft.jsonl").output)
    assert model == of_run
    random = numbers(oxrl("eval", "builtin:tiny", "data.eval=sft.jsonl").output)
    assert random["eval/tokens"] == of_run["eval/tokens"]
    assert random["eval/loss"] != of_run["eval/loss"]


def test_a_model_without_a_run_is_scored_by_a_reward(supervised: Path) -> None:
    options = ("data.eval=rl.jsonl", "reward.name=exact", "rollout.max_tokens=2")
    found = numbers(oxrl("eval", "builtin:tiny", *options, "--samples", "2").output)
    assert found["eval/responses"] == 4


def test_options_of_rewards_need_one(supervised: Path) -> None:
    with pytest.raises(ConfigError, match="--samples is for responses that a reward scores"):
        oxrl("eval", str(supervised), "--samples", "3")


def test_a_run_a_checkpoint_and_a_model_generate_alike(supervised: Path) -> None:
    checkpoint = supervised / "checkpoints" / "step_00000002"
    few = Sampling(max_tokens=4)
    of_run = run_generate(str(supervised), ["1+1?"], sampling=few)
    assert run_generate(str(checkpoint), ["1+1?"], sampling=few) == of_run
    assert run_generate("builtin:tiny", ["1+1?"], sampling=few)[0]["tokens"] == 4


def test_a_run_a_checkpoint_and_a_model_are_exported_alike(supervised: Path) -> None:
    checkpoint = supervised / "checkpoints" / "step_00000002"
    weights: set[bytes] = set()
    for number, source in enumerate((supervised, checkpoint)):
        out = supervised.parent.parent / f"out{number}"
        assert "wrote" in oxrl("export", str(source), "--out", str(out)).output
        weights.add((out / "model.safetensors").read_bytes())
    assert len(weights) == 1
    out = supervised.parent.parent / "builtin"
    oxrl("export", "builtin:tiny", "--out", str(out))
    assert (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file()


def test_a_response_that_does_not_fit_names_the_option_of_the_command(supervised: Path) -> None:
    checkpoint = supervised / "checkpoints" / "step_00000002"
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with pytest.raises(ConfigError, match="--max-tokens 256 .* of 64: write --max-tokens"):
        run_generate(str(checkpoint), ["1+1?"])
    with pytest.raises(ConfigError, match="shorten that --prompt"):
        run_generate(str(checkpoint), ["x" * 99])


def test_options_of_a_dataset_do_not_get_lost_in_its_report(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"prompt": "a", "chosen": "b", "worse": "c"}\n')
    report = PREPARERS["preference"](raw, tmp_path / "out", rejected="worse")
    assert report["options"]["rejected"] == "worse"
    assert report["rejected"] == 0
