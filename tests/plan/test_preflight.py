"""What can be known before weights are read is told by `oxrl plan`, and stops a run before its
directory is made.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from oxrl.assembly.assembly import Assembly
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import DataError, OxrlError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.modelfiles.dims import model_dims
from oxrl.plan.memory import disk_needed
from oxrl.plan.preflight import CHECKS, Prepared, examine, prepare_to_begin, reply
from oxrl.rewards.model_pool import ModelPool
from support.checks_here import planned
from support.command_line import oxrl

pytestmark = pytest.mark.filterwarnings("ignore")
OXRL = Path(sys.executable).with_name("oxrl")
Values = dict[str, dict[str, Any]]
RL: Values = {
    "run": {"name": "looked", "steps": 2, "mlflow": False, "threads": 1},
    "model": {"name": "builtin:tiny"},
    "data": {"train": "train.jsonl", "prompts_per_step": 4},
    "reward": {"name": "math"},
    "rollout": {"n_samples": 2, "max_tokens": 4},
    "train": {"alg_name": "sgrpo"},
}
SFT: Values = {
    "run": RL["run"],
    "model": RL["model"],
    "data": {"train": "train.jsonl", "rows_per_step": 2},
    "train": {"alg_name": "sft"},
}
DPO: Values = {**SFT, "train": {"alg_name": "dpo"}}
PROMPTS = '{"prompt": "1+1?", "answer": "2"}\n' * 8
TALKS = '{"prompt": "1+1?", "completion": "2"}\n' * 8
PAIRS = '{"prompt": "1+1?", "chosen": "2", "rejected": "3"}\n' * 8
ROWS = {"sgrpo": PROMPTS, "sft": TALKS, "dpo": PAIRS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(base: Values, **sections: dict[str, Any]) -> Values:
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def small_model(folder: Path) -> Path:
    """A whole model folder: llama, with the tokenizer of the built-in models."""
    place = folder / "small"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=261, num_attention_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    builtin_tokenizer().save_pretrained(place)
    return place


def reward_file(folder: Path, text: str) -> None:
    (folder / "reward.py").write_text(text)


class Mistake(NamedTuple):
    """What is wrong, how it is made, and words of the message."""

    base: Values
    make: Callable[[Path], dict[str, dict[str, Any]] | None]
    words: str


def rows(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "train.jsonl").write_text(text)

    return write


def reward(text: str) -> Callable[[Path], dict[str, dict[str, Any]]]:
    def write(folder: Path) -> dict[str, dict[str, Any]]:
        reward_file(folder, text)
        return {"reward": {"name": "reward.py:score"}}

    return write


def damaged(name: str) -> Callable[[Path], dict[str, dict[str, Any]]]:
    """A model folder without some of its files."""

    def write(folder: Path) -> dict[str, dict[str, Any]]:
        place = small_model(folder)
        for file in place.glob(name):
            file.unlink()
        return {"model": {"name": str(place)}}

    return write


def family(name: str) -> Callable[[Path], dict[str, dict[str, Any]]]:
    def write(folder: Path) -> dict[str, dict[str, Any]]:
        place = small_model(folder)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "model_type": name}))
        return {"model": {"name": str(place)}}

    return write


def local_name(folder: Path) -> dict[str, dict[str, Any]]:
    small_model(folder).rename(folder / "models-here")
    (folder / "models").mkdir()
    (folder / "models-here").rename(folder / "models" / "qwen-small")
    return {"model": {"name": "models/qwen-smal"}}


MISTAKES: dict[str, Mistake] = {
    "empty file": Mistake(RL, rows(""), "no rows"),
    "blank lines": Mistake(SFT, rows("\n\n"), "no rows"),
    "no such column": Mistake(RL, rows('{"question": "1+1?", "answer": "2"}\n'), "no 'prompt'"),
    "columns of another recipe": Mistake(DPO, rows(PROMPTS), "train.jsonl:1"),
    "prompts for sft": Mistake(SFT, rows(PROMPTS), "train.jsonl:1"),
    "a broken row late in the file": Mistake(RL, rows(PROMPTS * 20 + "{\n"), "train.jsonl:161"),
    "prompts that are all too long": Mistake(
        changed(RL, data={"max_prompt_tokens": 2}), rows(PROMPTS), "8 longer than 2 tokens"
    ),
    "maths without answers": Mistake(RL, rows('{"prompt": "1+1?"}\n' * 8), '"answer"'),
    "maths with unreadable answers": Mistake(
        RL, rows('{"prompt": "1+1?", "answer": {"a": 1}}\n' * 8), "cannot read the ground truth"
    ),
    "exact without answers": Mistake(
        changed(RL, reward={"name": "exact"}), rows('{"prompt": "1+1?"}\n' * 8), '"answer"'
    ),
    "reward with another signature": Mistake(
        RL, reward("def score(words, thing): return 1.0"), "score"
    ),
    "reward that returns text": Mistake(
        RL, reward("def score(prompt, completion): return 'good'"), "need a number"
    ),
    "reward that raises on the data": Mistake(
        RL, reward("def score(prompt, completion): return prompt.metadata['gold']"), "gold"
    ),
    "reward that cannot be imported": Mistake(
        RL, reward("import no_such_package\ndef score(prompt, completion): return 1.0"), "no_such"
    ),
    "reward that never returns": Mistake(
        changed(RL, reward={"timeout_s": 0.3}),
        reward("import time\ndef score(prompt, completion): time.sleep(99)"),
        "did not return within",
    ),
    "no weights": Mistake(RL, damaged("*.safetensors"), "no weights"),
    "no tokenizer": Mistake(RL, damaged("tokenizer*"), "holds no tokenizer"),
    "no such family": Mistake(RL, family("no_such_family"), "no_such_family"),
    "a family that is no language model": Mistake(RL, family("vit"), "no causal language model"),
    "a folder that is not there": Mistake(RL, local_name, "did you mean 'qwen-small'?"),
    "a disk that is too small": Mistake(
        changed(RL, run={"steps": 10**7, "checkpoint_every": 1, "keep_checkpoints": 10**6 - 1}),
        lambda folder: None,
        "run.keep_checkpoints",
    ),
}
if find_spec("vllm") is None:
    MISTAKES["a sampler that is not installed"] = Mistake(
        changed(RL, inference_engine={"name": "vllm"}),
        lambda folder: None,
        "inference_engine.name: vllm is not installed",
    )


def made(folder: Path, name: str) -> Values:
    """The configuration of a mistake, with its files written."""
    mistake = MISTAKES[name]
    (folder / "train.jsonl").write_text(ROWS[mistake.base["train"]["alg_name"]])
    return changed(mistake.base, **(mistake.make(folder) or {}))


def findings(cfg: Config, subjects: Iterable[str] = CHECKS) -> dict[str, tuple[str, str]]:
    with closing(Prepared()) as prepared:
        found = [examine(cfg, prepared, subject) for subject in subjects]
    return {finding.subject: (finding.state, finding.text) for finding in found}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_before_a_run_and_leaves_nothing_behind(folder: Path, name: str) -> None:
    cfg = Config.model_validate(made(folder, name))
    wrong = [text for state, text in findings(cfg).values() if state == "wrong"]
    assert any(MISTAKES[name].words in text for text in wrong), wrong
    with pytest.raises(OxrlError) as error:
        run(cfg)
    assert MISTAKES[name].words in str(error.value)
    assert error.value.exit_code == 2
    assert not cfg.run.directory.exists()


@pytest.mark.parametrize("base", [RL, SFT, DPO], ids=["rl", "sft", "dpo"])
def test_nothing_is_wrong_with_what_works(folder: Path, base: Values) -> None:
    (folder / "train.jsonl").write_text(ROWS[base["train"]["alg_name"]])
    found = findings(Config.model_validate(base))
    assert {state for state, _ in found.values()} == {"ok"}
    place = {"model": {"name": str(small_model(folder))}}
    found = findings(Config.model_validate(changed(base, **place)))
    assert {state for state, _ in found.values()} == {"ok"}
    assert "LlamaForCausalLM" in found["model"][1]


LATE = {
    "sgrpo": '{"prompt": "%s", "answer": "2"}\n',
    "sft": '{"prompt": "1+1?", "completion": "%s"}\n',
    "dpo": '{"prompt": "1+1?", "chosen": "2", "rejected": "%s"}\n',
}


def told_gigabytes(text: str, phase: str) -> float:
    """What a finding says of a phase."""
    found = re.search(rf"([0-9.]+) ([kMG]B) in {phase}", text)
    assert found, text
    return float(found[1]) * {"kB": 1e-6, "MB": 1e-3, "GB": 1.0}[found[2]]


@pytest.mark.parametrize("length", [40, 90, 200])
@pytest.mark.parametrize("base", [RL, SFT, DPO], ids=["rl", "sft", "dpo"])
def test_memory_is_told_by_the_longest_row_of_the_data_wherever_that_stands(
    folder: Path, base: Values, length: int
) -> None:
    """A token of the built-in models is a character; so many more than in the row without it."""
    algorithm = base["train"]["alg_name"]
    short = ROWS[algorithm] * 20
    tokens: list[int] = []
    for long in ("", "7" * length):
        (folder / "train.jsonl").write_text(short + LATE[algorithm] % long + short)
        found = findings(Config.model_validate(base), [name for name in CHECKS if name != "reward"])
        data = re.search(r"321 rows of train.jsonl, with up to ([0-9,]+) tokens", found["data"][1])
        assert data is not None, found["data"]
        read = int(data[1].replace(",", ""))
        sampled = 4 if base is RL else 0
        assert found["memory"][0] == "ok"
        assert f"the rows of the data, at most {read + sampled} tokens each" in found["memory"][1]
        assert told_gigabytes(found["limit"][1], "update") >= told_gigabytes(
            found["memory"][1], "update"
        )
        tokens.append(read)
    replaced = len("1+1?") if base is RL else 1
    assert tokens[1] - tokens[0] == length - replaced


@pytest.mark.parametrize(
    ("allowed", "memory", "limit"),
    [("8000000000", "ok", "ok"), ("1000000000", "ok", "warning"), ("9000", "warning", "warning")],
)
def test_more_memory_than_the_machine_has_is_warned_of(
    folder: Path, allowed: str, memory: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gigabytes of keys and values with the longest rows, a sixteenth with those of the data;
    and half a gigabyte of Python. A container leaves more, something in between, or less.
    """
    (folder / "train.jsonl").write_text(PROMPTS)
    (folder / "memory.max").write_text(allowed)
    monkeypatch.setattr("oxrl.plan.memory.MEMORY_LIMIT", folder / "memory.max")
    dims = model_dims("builtin:tiny")
    assert dims is not None
    longest = 512
    slot = longest * 2 * dims.layers * dims.kv_heads * dims.head_dim * 4
    sections = {
        "model": {"max_length": longest},
        "inference_engine": {"max_rows": 2 * 10**9 // slot},
    }
    found = findings(Config.model_validate(changed(RL, **sections)))
    assert (found["memory"][0], found["limit"][0]) == (memory, limit)
    for subject in ("memory", "limit"):
        state, text = found[subject]
        assert ("out of memory is likely" in text) == (state == "warning")
        assert "512 tokens" in found["limit"][1]
    assert list(found).index("memory") < list(found).index("limit")
    assert "wrong" not in {state for state, _ in found.values()}


def test_a_warning_is_shown_and_the_plan_goes_on(folder: Path) -> None:
    """Slots for rows of the whole context of a model that no machine has the memory for."""
    (folder / "train.jsonl").write_text(PROMPTS)
    place = small_model(folder)
    config = json.loads((place / "config.json").read_text())
    config["max_position_embeddings"] = 2**40
    (place / "config.json").write_text(json.dumps(config))
    values = changed(RL, model={"name": str(place)})
    (folder / "run.yaml").write_text(json.dumps(values))
    result = planned("run.yaml", folder=folder)
    assert result.returncode == 0, result.stderr
    (ok,) = re.findall("^ok +memory: about .* in rollout, .*", result.stdout, re.MULTILINE)
    (warned,) = re.findall("^warning +limit: about .* in rollout, .*", result.stdout, re.MULTILINE)
    assert result.stdout.index(ok) < result.stdout.index(warned)


def test_what_cannot_be_reached_is_unknown(folder: Path) -> None:
    (folder / "train.jsonl").write_text(PROMPTS)
    cfg = Config.model_validate(changed(RL, model={"name": "nobody/nothing-7b"}))
    found = findings(cfg)
    for subject in ("model", "tokenizer", "memory", "limit", "disk"):
        assert found[subject][0] == "unknown"
    assert "without the tokenizer" in found["data"][1]
    assert found["reward"][0] == "ok"


def test_data_that_cannot_be_reached_are_unknown_and_others_are_still_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    far = "hf://datasets/nobody/nothing/train.jsonl"
    (folder / "train.jsonl").write_text(PROMPTS)
    cfg = Config.model_validate(changed(RL, data={"train": far, "eval": "train.jsonl"}))
    state, text = findings(cfg)["data"]
    assert state == "unknown"
    assert "not in the cache" in text and "rows of train.jsonl" in text
    (folder / "train.jsonl").write_text("")
    state, text = findings(cfg)["data"]
    assert state == "wrong" and "no rows" in text
    # A run cannot do without them.
    (folder / "train.jsonl").write_text(PROMPTS)
    with pytest.raises(DataError, match="not in the cache"):
        run(cfg)
    assert not cfg.run.directory.exists()


def test_a_reward_of_a_run_that_begins_is_loaded_once(folder: Path) -> None:
    (folder / "train.jsonl").write_text(PROMPTS)
    reward_file(
        folder,
        "open('loaded', 'a').write('x')\ndef score(prompt, completion): return 1.0\n",
    )
    cfg = Config.model_validate(changed(RL, reward={"name": "reward.py:score"}))
    run(cfg)
    assert (folder / "loaded").read_text() == "x"


def test_what_was_looked_at_before_a_run_is_let_go_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[Assembly]] = []

    class Kept(Assembly):
        def __init__(self, cfg: Config) -> None:
            super().__init__(cfg)
            built.append(weakref.ref(self))

    monkeypatch.setattr("oxrl.plan.preflight.Assembly", Kept)
    (folder / "train.jsonl").write_text(PROMPTS)
    with closing(prepare_to_begin(Config.model_validate(RL))) as prepared:
        gc.collect()
        assert prepared.pool is not None
        assert built and not any(reference() for reference in built)


def test_a_check_does_not_end_because_one_before_it_gave_up_waiting(folder: Path) -> None:
    (folder / "train.jsonl").write_text(PROMPTS)
    values = changed(RL, reward={"name": "math", "workers": 2})
    with closing(Prepared()) as prepared:
        reply(prepared, {"config": values, "subject": "data"})
        prepared.patience.cancel()
        assert reply(prepared, {"config": values, "subject": "reward"})["state"] == "ok"


def test_rollouts_alone_are_scored_as_when_they_go_on(folder: Path) -> None:
    """In the process that samples: FSDP trains nothing there."""
    (folder / "train.jsonl").write_text(PROMPTS)
    model = folder / "judge"
    AutoModelForSequenceClassification.from_config(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=260,
            num_labels=1,
            pad_token_id=0,
        )
    ).save_pretrained(model)
    builtin_tokenizer().save_pretrained(model)
    values = changed(
        RL,
        reward={"name": str(model)},
        run={"only": "rollouts", "training_gpus": 2, "device": "cpu"},
        train={"backend": "fsdp"},
    )
    with closing(prepare_to_begin(Config.model_validate(values))) as prepared:
        assert isinstance(prepared.pool, ModelPool)


def test_the_disk_has_to_hold_only_what_is_written() -> None:
    cfg = Config.model_validate(changed(RL, run={"steps": 3, "checkpoint_every": 1}))
    dims = model_dims("builtin:tiny")
    assert dims is not None
    assert disk_needed(cfg, dims)[1] == 3
    once = cfg.model_copy(update={"run": cfg.run.model_copy(update={"checkpoint_every": 0})})
    assert disk_needed(once, dims)[1] == 2


def test_the_plan_lists_everything_that_is_wrong_and_exits_with_2(folder: Path) -> None:
    values = made(folder, "no tokenizer")
    values = changed(values, run={"keep_checkpoints": 10**9, "checkpoint_every": 1, "steps": 10**9})
    (folder / "train.jsonl").write_text("")
    (folder / "run.yaml").write_text(json.dumps(values))
    result = planned("run.yaml", folder=folder)
    assert result.returncode == 2, result.stderr
    for words in ("3 problems", "holds no tokenizer", "no rows", "are free at"):
        assert words in result.stderr
    assert "ok          model: LlamaForCausalLM" in result.stdout
    assert "Traceback" not in result.stderr
    shutil.rmtree(folder / "small")


@pytest.mark.full  # waits for the deadline of a template
def test_a_template_that_never_ends_is_given_up(folder: Path) -> None:
    from oxrl.plan import preflight_process

    (folder / "train.jsonl").write_text(PROMPTS)
    (folder / "endless.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    values = changed(SFT, model={"chat_template": "endless.jinja"})
    (folder / "train.jsonl").write_text(TALKS)
    found = {
        subject: (state, text)
        for subject, state, text in preflight_process.examine_apart(Config.model_validate(values))
    }
    state, text = found["tokenizer"]
    assert state == "wrong"
    assert "template" in text
    assert found["disk"][0] == "ok"


def test_a_model_without_a_configuration_is_one_problem(folder: Path) -> None:
    """Not one more for everything that cannot be made of it."""
    (folder / "train.jsonl").write_text(PROMPTS)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    given = changed(RL, model={"name": "./model"})
    (folder / "config.yaml").write_text(json.dumps(given))
    found = planned("config.yaml", folder=folder)
    assert found.returncode == 2
    assert "1 problem in what config.yaml names" in found.stderr
    assert "config.json names no model_type" in found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is here")
def test_a_device_that_is_not_here_is_wrong_and_unknown_where_other_machines_train(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = {"run": {**RL["run"], "device": "cuda"}}
    here = Config.model_validate({**RL, **cuda})
    found = examine(here, Prepared(), "device")
    assert (found.state, "PyTorch sees no CUDA device" in found.text) == ("wrong", True)
    actors = {"inference_engine": {"actors": 1}}
    there = Config.model_validate({**RL, **cuda, **actors})
    assert examine(there, Prepared(), "device").state == "unknown"
    (folder / "train.jsonl").write_text(PROMPTS)
    (folder / "config.yaml").write_text(json.dumps({**RL, **cuda}))
    told = planned("config.yaml", folder=folder)
    assert told.returncode == 2 and "run.device is cuda" in told.stderr


@pytest.mark.parametrize("command", ["generate", "eval", "export"])
def test_a_run_that_is_not_there_is_said_to_be_none(folder: Path, command: str) -> None:
    """Not looked for on the hub, also where there is no folder of runs yet."""
    more = {"generate": ["--prompt", "x"], "export": ["--out", "there"]}.get(command, [])
    found = oxrl(command, "runs/nothing", *more, folder=folder)
    assert found.returncode == 2
    assert "no such run, checkpoint or folder of a model: 'runs/nothing'" in found.stderr
    (folder / "runs" / "nothin").mkdir(parents=True)
    found = oxrl(command, "runs/nothing", *more, folder=folder)
    assert "did you mean 'nothin'?" in found.stderr


def test_a_model_of_the_hub_is_looked_at_in_the_cache_or_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[str | None] = [str(small_model(folder) / "config.json"), None]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: cached.pop(0))
    cfg = Config.model_validate(changed(RL, model={"name": "nobody/small"}))
    found = examine(cfg, Prepared(), "model")
    assert found.state == "ok" and "LlamaForCausalLM" in found.text
    found = examine(cfg, Prepared(), "model")
    assert found.state == "unknown"
    assert "nobody/small is not in the hub's cache on this machine" in found.text
