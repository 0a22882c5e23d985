"""Reading YAML and overrides: every mistake is found, placed and explained, all in one go."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from oxrl.cli.generate import read_prompts
from oxrl.config import dump_config, load_config, load_source
from oxrl.config.given import mapping_source
from oxrl.config.load_evaluation import load_evaluation_config
from oxrl.config.source import read_source
from oxrl.errors import ConfigError, DataError

# The block of the architecture notes, unchanged, and the lines that go with it.
BLOCK = """\
run: {name: demo, steps: 10}
model: {name: "builtin:tiny"}
data: {train: data/train.jsonl, prompts_per_step: 16}
reward: {name: math}
train:
  alg_name: "sgrpo"
  clip_low: -0.2        # magnitudes are stored: abs() with one warning
  clip_high: 0.2
  kl_coeff: 0.0
rollout:
  temperature: 1.0
  max_tokens: 512
  n_samples: 8
  force_strict_on_policy: true
"""


def problems(path: Path | str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def count(report: str) -> int:
    return int(report.split()[0])


def text(folder: Path, content: str | bytes) -> Path:
    path = Path("text.yaml")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_block_of_the_architecture_notes_loads_unchanged_with_one_warning(folder: Path) -> None:
    path = text(folder, BLOCK)
    with pytest.warns(UserWarning, match="sign is dropped") as caught:
        cfg = load_config(path)
    assert len(caught) == 1
    assert "text.yaml:7" in str(caught[0].message)
    assert (cfg.train.clip_low, cfg.train.clip_high) == (0.2, 0.2)
    assert (cfg.train.row.gate, cfg.rollout.n_samples, cfg.data.prompts_per_step) == (
        "ppo_clip",
        8,
        16,
    )


def test_two_negative_clip_bounds_still_give_one_warning(write: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning) as caught:
        cfg = load_config(write(), ["train.clip_low=-0.1", "train.clip_high='-0.3'"])
    assert (len(caught), cfg.train.clip_low, cfg.train.clip_high) == (1, 0.1, 0.3)


@pytest.mark.parametrize("written", ["1e-6", '"1e-6"', "1E-6", "1.0e-6", "0.000001"])
def test_every_spelling_of_a_float_is_a_float(folder: Path, written: str) -> None:
    cfg = load_config(text(folder, BLOCK.replace("clip_low: -0.2", f"lr: {written}")))
    assert cfg.train.lr == 1e-6


@pytest.mark.parametrize(
    ("written", "value"), [("1_000", 1000), ("0x10", 16), ("0o20", 16), ("1e3", 1000), ('"7"', 7)]
)
def test_every_spelling_of_an_integer_is_an_integer(
    write: Callable[..., Path], written: str, value: int
) -> None:
    assert load_config(write(), [f"run.steps={written}"]).run.steps == value


def test_problems_of_every_kind_are_reported_at_once_with_their_lines(folder: Path) -> None:
    content = (
        BLOCK.replace("-0.2 ", "1.5 ").replace("max_tokens", "max_token").replace("math", "maths")
    )
    content = content.replace("n_samples: 8", "n_samples: 1\n  n_samples: 2") + "trian: {}\n"
    report = problems(text(folder, content), ("train.lr=fast", "train.gamma=0.9"))
    assert count(report) == 7
    for line in (
        "text.yaml:4: reward.name = 'maths'",
        "text.yaml:7: train.clip_low = 1.5",
        "text.yaml:12: rollout.max_token = 512",
        "text.yaml:14: rollout.n_samples",
        "text.yaml:16: trian",
        "override 'train.lr=fast': train.lr = 'fast'",
        "override 'train.gamma=0.9': train.gamma = 0.9",
    ):
        assert line in report
    for hint in (
        "did you mean 'math'?",
        "did you mean 'max_tokens'?",
        "text.yaml:13",
        "did you mean 'train'?",
        "ppo",
    ):
        assert hint in report


def test_a_field_problem_does_not_hide_a_problem_across_sections(
    write: Callable[..., Path],
) -> None:
    report = problems(write(train={"lr": "fast", "minibatches": 5}))
    assert count(report) == 2
    assert "nearest valid: train.minibatches 4 or 6, or data.prompts_per_step 10 or 15" in report


def test_a_problem_that_only_follows_from_another_is_not_reported(
    write: Callable[..., Path],
) -> None:
    report = problems(write(model={"max_length": "long"}, rollout={"max_tokens": 5000}))
    assert count(report) == 1


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("rollout.temprature=1.0", "did you mean 'temperature'?"),
        ("rollout.lr=1e-6", "did you mean train.lr?"),
        ("lr=1e-6", "did you mean train.lr?"),
        ("modle.name=x", "did you mean 'model'?"),
        ("train.alg_name=srgpo", "did you mean 'sgrpo'?"),
        ("train.loss=cipso", "did you mean 'cispo'?"),
        ("train.weights=token_maen", "did you mean 'token_mean'?"),
        ("train.ratio=tokn", "did you mean 'token'?"),
        ("train.lr_schedule=cosin", "did you mean 'cosine'?"),
        ("model.name=builtin:tinny", "did you mean 'builtin:tiny'?"),
        ("data.train=data/trian.jsonl", "did you mean 'train.jsonl'?"),
        ("train=x", "section.field=value"),
        ("train.lr", "section.field=value"),
        ("train.lr=[1, 2]", "single value"),
        ("run.seed=true", "must not be true or false"),
        ("train.lr=no", "must be a valid number"),
        ("run.mlflow=no", "must be true or false"),
        ("run.mlflow=1", "must be true or false"),
        ("run.name=123", "quote it"),
        ("run.steps=", "is empty"),
        ("run.steps=1.5", "must be a valid integer"),
        ("train.lr=.inf", "finite"),
        ("train.lr=.nan", "finite"),
        ("train.clip_low=1", "less than 1"),
        ("rollout.top_p=0", "greater than 0"),
        ("train.lr=!!python/name:os.system", "tag"),
        ("train.lr=[1", "not YAML"),
        ("train.mix={a: {b: 1, b: 2}}", "found duplicate key"),
        ("run.name=*x", "not YAML"),
        ("~train.lr", "takes back a field that the file sets"),
    ],
)
def test_one_wrong_override_gives_one_problem_that_says_what_to_write(
    write: Callable[..., Path], field: str, hint: str
) -> None:
    report = problems(write(), (field,))
    assert hint in report
    assert f"override '{field}'" in report
    assert not report[0].isdigit() or count(report) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "must hold sections"),
        ("train:\n\tlr: 1\n", "text.yaml:2: not YAML: .* this line has a tab"),
        ("train: [1\n", "not YAML"),
        ("a: 1\n---\nb: 2\n", "text.yaml:2: not YAML"),
        ("a: *nowhere\n", "text.yaml:1: not YAML"),
        ("a: b: c\n", "text.yaml:1: not YAML"),
        ("a: \x00\n", "not YAML"),
        ("[" * 3000, "not a configuration"),
        ("- " * 3000, "nested far too deep"),
        (b"run: {name: \xff}\n", "byte 12 is not UTF-8"),
        ("run: 5\n", "is a section and holds fields"),
        ("? [1, 2]\n: 3\n", "a field name must be a word"),
        ("run: &run {name: [*run]}\n", "not a configuration: more than"),
        ("foo: &a {x: *a}\n", "not a configuration: more than"),
        ("run: {}\ntrain: !!seq {lr: 1}\n", r"text.yaml:2: what has keys is tagged .*:seq"),
        ("run: !!str {name: a}\n", r"text.yaml:1: what has keys is tagged .*:str"),
        ("run: {name: !odd {a: 1}}\n", r"text.yaml:1: what has keys is tagged !odd"),
        ("train: !!seq\n", "text.yaml:1: train"),
        ("train: !!map [1]\n", "text.yaml:1: train"),
    ],
)
def test_a_file_that_is_no_configuration_says_where_and_why(
    folder: Path, content: str | bytes, message: str
) -> None:
    assert re.search(message, problems(text(folder, content)))


def test_a_name_with_nul_names_no_file() -> None:
    with pytest.raises(ConfigError, match="no such file: a name cannot hold .* NUL"):
        load_config("run\0.yaml")


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    assert "is a pipe or a device; give a file" in problems(str(folder / "pipe.yaml"))
    os.mkfifo(folder / "prompts.txt")
    with pytest.raises(DataError, match=r"--prompts-file .*prompts\.txt: is a pipe"):
        read_prompts(folder / "prompts.txt")


def test_a_pipe_that_a_shell_made_is_read(write: Callable[..., Path]) -> None:
    content = write("config.yaml").read_bytes()
    ours, theirs = os.pipe()
    os.write(theirs, content)
    os.close(theirs)
    try:
        assert load_config(f"/dev/fd/{ours}").run.name == load_config("config.yaml").run.name
    finally:
        os.close(ours)


def test_a_missing_file_names_the_closest_one(write: Callable[..., Path]) -> None:
    write("config.yaml")
    assert "did you mean 'config.yaml'?" in problems("confg.yaml")
    assert "the folder nowhere does not exist" in problems("nowhere/config.yaml")
    assert "is a folder" in problems("data")


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_loads(folder: Path) -> None:
    content = BLOCK.replace("-0.2", "0.2").replace("\n", "\r\n")
    assert load_config(text(folder, b"\xef\xbb\xbf" + content.encode())).run.name == "demo"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (">-\n    Answer with\n    a number.", "Answer with a number."),
        (">\n    Answer\n\n    with\n    a number.", "Answer\nwith a number.\n"),
        ("|  # as it stands\n    Answer\n    so.", "Answer\nso.\n"),
        (">- # folded\n    Answer\n    so.", "Answer so."),
        ("# of every prompt\n    Answer so.\n", "Answer so."),
        ("'Answer\n    so.'", "Answer so."),
    ],
)
def test_text_over_several_lines_and_comments_are_read_as_yaml_says(
    tmp_path: Path, written: str, meant: str
) -> None:
    path = tmp_path / "text.yaml"
    path.write_text(f"run:\n  name: {written}\n  steps: 3\n")
    assert read_source(path).values == {"run.name": meant, "run.steps": 3}


def test_required_fields_are_asked_for_one_by_one(folder: Path) -> None:
    report = problems(text(folder, "train: {alg_name: sgrpo}\n"))
    assert count(report) == 5
    for field in ("run.name", "run.steps", "model.name", "data.train", "reward.name"):
        assert f"{field}\n    is required" in report


def test_a_misspelt_required_name_is_one_problem_not_two(folder: Path) -> None:
    report = problems(
        text(
            folder,
            BLOCK.replace("-0.2", "0.2").replace("steps:", "stpes:").replace("model:", "modle:"),
        )
    )
    assert count(report) == 2
    assert "did you mean 'steps'?" in report
    assert "did you mean 'model'?" in report


def test_each_of_several_files_has_a_problem_of_its_own_at_its_own_line(
    write: Callable[..., Path],
) -> None:
    path = write(data={"train": ...})
    path.write_text(
        path.read_text().replace(
            "data:", "data:\n  train:\n    none.jsonl: 0.5\n    data/a.txt: 0.5"
        )
    )
    report = problems(path)
    assert count(report) == 2
    assert (
        "run.yaml:8: data.train.none.jsonl" in report
        and "run.yaml:9: data.train.data/a.txt" in report
    )
    override = "data.train={none.jsonl: 1, data/test.jsonl: 1}"
    assert f"override '{override}': data.train.none.jsonl" in problems(path, (override,))


@pytest.mark.parametrize("field", ["alg_name: sfft", "alg_nam: sft"])
def test_a_misspelt_algorithm_brings_no_problems_of_another_one(folder: Path, field: str) -> None:
    """What a run must and must not say depends on its algorithm: nothing about sgrpo is told to who
    means sft.
    """
    start = "run: {name: x, steps: 1}\nmodel: {name: 'builtin:tiny', max_length: 99}\n"
    report = problems(
        text(
            folder,
            f"{start}data: {{train: data/none.jsonl, rows_per_step: 4}}\ntrain: {{{field}}}\n",
        )
    )
    assert count(report) == 2
    assert (
        "text.yaml:3: data.train" in report
        and "text.yaml:4: train.alg_nam" in report
        and "did you mean" in report
    )


def test_later_overrides_win_and_a_tilde_takes_a_field_back(write: Callable[..., Path]) -> None:
    path = write(train={"clip_low": 0.1})
    assert load_config(path, ["train.lr=1e-5", "train.lr=2e-5"]).train.lr == 2e-5
    assert load_config(path, ["~train.clip_low"]).train.clip_low == 0.2
    assert load_config(path, ["train.alg_name=cispo", "~train.clip_low"]).train.row.gate == "cispo"
    assert load_config(path, ["data.eval=data/test.jsonl", "data.eval="]).data.eval is None


def test_no_warning_without_a_reason(write: Callable[..., Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(write())


def test_a_kl_term_without_weight_warns_that_it_does_nothing(write: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning, match="no effect while train.kl_coeff is 0") as told:
        load_config(write(), ["train.kl=loss_k2"])
    assert told[0].filename == __file__  # who reads the configuration, not oxRL's own file


def test_half_precision_on_the_processor_warns(write: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning, match="slower and less exact"):
        load_config(write(), ["run.device=cpu", "model.dtype=bfloat16"])


def test_a_warm_up_that_never_ends_warns(write: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning, match="is not over when the run ends"):
        load_config(write(), ["train.warmup_steps=12"])
    with pytest.warns(UserWarning, match="leaves none of 12 steps to the policy"):
        load_config(write(train={"alg_name": "ppo"}), ["train.critic_warmup_steps=12"])


def test_an_evaluation_may_cut_the_distribution_and_needs_no_training_data(
    write: Callable[..., Path],
) -> None:
    path = write(data={"eval": "data/test.jsonl", "train": "data/gone.jsonl"})
    cfg = load_evaluation_config(
        path, ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.n_samples=1"]
    )
    assert (cfg.rollout.top_p, cfg.rollout.top_k) == (0.9, 20)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.attention=flash_attention_2", "model.attention = 'flash_attention_2'\n    needs"),
        ("model.chat_template=gone.jinja", "model.chat_template = 'gone.jinja'\n    no such file"),
        ("model.offload_activations=true", "model.offload_activations = true\n    offloads the"),
    ],
)
def test_an_evaluation_is_refused_what_its_model_cannot_be_loaded_with(
    write: Callable[..., Path], override: str, told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_evaluation_config(write(), [override])
    assert f"override '{override}': {told}" in str(refused.value)


def test_one_of_several_training_files_is_never_chosen_for_an_evaluation(
    write: Callable[..., Path],
) -> None:
    path = write()
    two = json.dumps(
        dict.fromkeys((load_config(path).data.train, str(path.parent / "other.jsonl")), 1.0)
    )
    (path.parent / "other.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    with pytest.raises(
        ConfigError, match="data.train is several files; name the one to evaluate on"
    ):
        load_evaluation_config(path, [f"data.train={two}"])
    load_evaluation_config(path, [f"data.train={two}", "data.eval=data/test.jsonl"])


def test_a_supervised_run_can_be_evaluated_with_and_without_a_reward(
    write: Callable[..., Path],
) -> None:
    path = write(train={"alg_name": "sft"})
    assert load_evaluation_config(path).reward.name == ""
    preference = write("dpo.yaml", train={"alg_name": "dpo"})
    with pytest.raises(ConfigError, match=r"reward.name\n    is required"):
        load_evaluation_config(preference)
    cfg = load_evaluation_config(path, ["reward.name=exact", "rollout.max_tokens=32"])
    assert (cfg.reward.name, cfg.rollout.max_tokens) == ("exact", 32)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (["train.alg_name=sgrpo"], "truncate"),
        (["train.alg_name=sgrpo", "train.correction=none"], "none"),
        (["train.alg_name=icepop"], "mask"),
        (["train.alg_name=dppo_tv"], "none"),
        (["train.alg_name=a3po"], "truncate"),
        (["train.alg_name=sgrpo", "train.old_logprobs=bypass"], "none"),
    ],
)
def test_samples_of_another_engine_are_corrected_unless_the_ratio_does_it(
    write: Callable[..., Path], folder: Path, train: list[str], expected: str
) -> None:
    vllm = ["inference_engine.name=vllm", "inference_engine.actors=1"]
    cfg = load_config(write(), [*vllm, *train])
    assert cfg.train.row.correction == expected
    (folder / "resolved.yaml").write_text(dump_config(cfg))
    assert load_config("resolved.yaml") == cfg
    assert load_config(write(), ["train.alg_name=sgrpo"]).train.row.correction == "none"


def test_a_misspelt_field_of_a_section_that_is_not_read_is_unknown(
    write: Callable[..., Path],
) -> None:
    with pytest.raises(ConfigError, match="unknown field; did you mean 'max_tokens'"):
        load_config(write(train={"alg_name": "sft"}), ["rollout.max_tokenss=3"])


@pytest.mark.parametrize(
    "field", ["model.name", "model.chat_template", "data.eval", "reward.name", "run.dir"]
)
def test_a_name_that_no_file_system_takes_is_refused(
    write: Callable[..., Path], field: str
) -> None:
    with pytest.raises(ConfigError, match="has 3,000 characters; no name of a file"):
        load_config(write(), [f"{field}={'x' * 3000}"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('"data.eval": data/test.jsonl', "data.eval\n    unknown section; did you mean 'data'?"),
        ("train.beta: 0.1", "train.beta\n    unknown section; did you mean 'train'?"),
        ("foo: 3", "foo\n    unknown section (sections, their fields below them:"),
        ("trian:", "trian\n    unknown section; did you mean 'train'?"),
        ("trian: {}", "trian\n    unknown section; did you mean 'train'?"),
        ("critic: {}", "critic\n    unknown section; a section of verl"),
        ("trainer:", "trainer = null\n    unknown field; a section of verl"),
    ],
)
def test_one_mistake_at_the_top_of_a_file_is_one_problem(
    write: Callable[..., Path], line: str, told: str
) -> None:
    path = write()
    path.write_text(f"{path.read_text()}{line}\n")
    report = problems(path)
    assert count(report) == 1 and told in report


def test_a_misnamed_mapping_is_one_unknown_field_and_read_as_what_was_meant(
    write: Callable[..., Path],
) -> None:
    report = problems(write(data={"column": {"answer": "solution"}}))
    assert count(report) == 1
    assert "data.column = {'answer': 'solution'}\n    unknown field; did you mean" in report
    report = problems(write(run={"helth": {"kl": 3}}))
    assert "run.helth = {'kl': 3}\n    unknown field; did you mean 'health'?" in report
    assert "run.health.kl = 3\n    must be 'warn'" in report and "train.kl" not in report
    report = problems(write(train={"foo": {}}))
    assert count(report) == 1 and "train.foo = {}\n    unknown field" in report
    report = problems(write(), ("train.foo={a: 1}",))
    assert "override 'train.foo={a: 1}': train.foo = {'a': 1}" in report
    with pytest.raises(ConfigError, match=r"data\.column = .*\n    unknown field; did you mean"):
        load_source(mapping_source("here", {"data": {"column": {"answer": "x"}}}, ()))


def test_a_section_that_holds_a_value_names_its_field_once(folder: Path) -> None:
    report = problems(text(folder, BLOCK.replace('{name: "builtin:tiny"}', '"builtin:tiny"')))
    assert count(report) == 1 and "model\n    is a section and holds fields" in report


def test_a_mapping_of_python_is_held_to_what_a_file_may_say() -> None:
    values = {
        "run": {"name": "x", "steps": 10**5000},
        "model": {"name": "builtin:tiny"},
        "train": {"alg_name": "sgrpo", "clip_low": -0.2, "lr": [1]},
    }
    with pytest.raises(ConfigError) as caught:
        load_source(mapping_source("here", values, ()))
    assert "here: run.steps\n    Exceeds the limit" in str(caught.value)
    assert "here: train.lr\n    takes a single value" in str(caught.value)


def test_a_dropped_sign_is_told_of_a_mapping_of_python(write: Callable[..., Path]) -> None:
    values = yaml.safe_load(write(train={"clip_low": -0.2}).read_text())
    with pytest.warns(UserWarning, match=r"train\.clip_low = -0\.2 is stored as 0\.2 \(here\)"):
        load_source(mapping_source("here", values, ()))
