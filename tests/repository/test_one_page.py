"""Every page of one_page/ computes what `oxrl train` does with the YAML beside it: the same samples,
losses, gradient norms and weights, step by step. A changed constant is noticed.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oxrl.commands.train import run
from oxrl.config import load_config
from support.known_weights import model_that_adds

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "one_page"
# Constant of the page that says how long it runs, its value here, and optimizer steps of the run.
LENGTHS = {
    "sgrpo": ("BATCHES", 2, 4),
    "ppo": ("BATCHES", 2, 4),
    "sft": ("STEPS", 3, 3),
    "dpo": ("STEPS", 3, 3),
    "continuous": ("BATCHES", 5, 5),
    "opd_topk": ("BATCHES", 3, 3),
    "same_numbers": ("BATCHES", 3, 3),
    "centering": ("BATCHES", 2, 4),
}
# Prompts of a batch, fewer than on the page.
PROMPTS = {"sgrpo": 8, "ppo": 12, "opd_topk": 24, "same_numbers": 8, "centering": 8}
# In the second step from the file of weights ratios that can be clipped are 0.068 and less, and 0.074
# and more, away from 1: none is so near that rounding decides whether it is clipped.
CLIP = 0.0715
PAGES = [*LENGTHS]
SAMPLING = ["sgrpo", "ppo"]
RECORDED = [*SAMPLING, "continuous", "opd_topk", "same_numbers", "centering"]
DISTILLED = ["opd_topk"]
# Of a teacher, so few that some sampled tokens are none.
CANDIDATES = 8
CLOSE = 1e-6
# Norms of a gradient sum some 100,000 squares in another order: up to 1.1e-6 under other roundings.
CLOSE_NORM = 1e-5
# What a page says of a step -> the run's metric.
METRICS = {
    "loss": "update/loss",
    "grad_norm": "update/grad_norm",
    "critic_loss": "value/loss",
    "critic_norm": "value/grad_norm",
}

Page = dict[str, Any]


def run_page(
    name: str, folder: Path, instead: dict[str, str] | None = None, **constants: object
) -> Page:
    """What the script holds at its end, after it ran with other constants, which it has to have.

    `instead`: lines that it has to have as well, and what is there in their place.
    """
    text = (FOLDER / f"{name}.py").read_text()
    for lines, others in (instead or {}).items():
        assert text.count(lines) == 1, lines
        text = text.replace(lines, others)
    for constant, value in constants.items():
        text, found = re.subn(rf"^{constant} = .*$", f"{constant} = {value!r}", text, flags=re.M)
        assert found == 1, constant
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    script.write_text(text)
    return runpy.run_path(str(script))


def differences(page: Page, directory: Path) -> set[str]:
    """In what a page is not the run: samples, weights, and keys of METRICS."""
    found: set[str] = set()
    lines = lines_of(directory / "metrics.jsonl")
    assert len(lines) == len(page["steps"])
    for step, line in zip(page["steps"], lines, strict=True):
        for key, value in step.items():
            expected = line[METRICS[key]]
            close = CLOSE_NORM if key.endswith("norm") else CLOSE
            if abs(value - expected) > close * (1 + abs(expected)):
                found.add(key)
    if "asked" in page:
        page["samples"] = [answer["tokens"] for answer in page["asked"]]
        found |= sampling_differences(page["asked"], directory)
    if "samples" in page and page_samples(page) != run_samples(directory):
        found.add("samples")
    final = sorted((directory / "checkpoints").iterdir())[-1]
    found |= weight_differences(Path(page["OUT"]) / "model.safetensors", final, "weights")
    if "critic" in page:
        learned = Path(page["OUT"]) / "critic"
        page["critic"].save_pretrained(learned)
        save_file(page["value_head"].state_dict(), learned / "value_head.safetensors")
        for name in ("model.safetensors", "value_head.safetensors"):
            found |= weight_differences(learned / name, final / "critic", "critic")
    return found


def sampling_differences(asked: list[dict[str, Any]], directory: Path) -> set[str]:
    """By which weights a token was sampled, and how likely it was to them."""
    if of_tokens(directory, "versions") != [answer["versions"] for answer in asked]:
        return {"versions"}
    theirs = torch.tensor(sum(of_tokens(directory, "rollout_logprobs"), []))
    ours = torch.tensor(sum((answer["logprobs"] for answer in asked), []))
    close = torch.allclose(ours, theirs, CLOSE, CLOSE)
    return set() if close else {"logprobs"}


def weight_differences(learned: Path, directory: Path, what: str) -> set[str]:
    """`what` where a file of weights is not that of the same name in a checkpoint."""
    ours = load_file(learned)
    theirs = load_file(directory / learned.name)
    assert ours.keys() == theirs.keys()
    far = [name for name in ours if not torch.allclose(ours[name], theirs[name], 0, CLOSE)]
    return {what} if far else set()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page_samples(page: Page) -> list[tuple[str, list[int]]]:
    tokenizer = page["tokenizer"]
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    said = [[token for token in ids if token not in ends] for ids in page["samples"]]
    return list(zip(tokenizer.batch_decode(said), page["samples"], strict=True))


def run_samples(directory: Path) -> list[tuple[str, list[int]]]:
    texts = [line["response"] for line in lines_of(directory / "samples.jsonl")]
    return list(zip(texts, of_tokens(directory, "tokens"), strict=True))


def of_tokens(directory: Path, name: str) -> list[list[Any]]:
    """What a run recorded of the tokens of every answer."""
    found: list[list[Any]] = []
    for path in sorted((directory / "rollouts").glob("step_????????.safetensors")):
        batch = load_file(path)
        rows = zip(batch[name], batch["response_mask"], strict=True)
        found += [row[mask].tolist() for row, mask in rows]
    return found


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers, sometimes rightly, and does not end every answer in time; and beside it
    one that says something else, a teacher.
    """
    folder = tmp_path_factory.mktemp("models")
    model_that_adds(teacher_of(folder), noise=0.02)
    return model_that_adds(folder / "start")


def teacher_of(folder: Path) -> Path:
    """Where the teacher of a model stands, which is in this folder."""
    return folder / "teacher"


@pytest.fixture(scope="module")
def both(
    start: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Page, Path]]:
    """`both(name)`: the page and the directory of its run, some steps of each, computed once."""

    @cache
    def compute(name: str) -> tuple[Page, Path]:
        folder = tmp_path_factory.mktemp(name)
        return short_page(name, start, folder), short_run(name, start, folder / "run")

    return compute


@pytest.fixture(scope="module")
def clipped(
    start: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Page, Path]]:
    """`clipped(name)`: the same of one batch, whose second step clips."""

    @cache
    def compute(name: str) -> tuple[Page, Path]:
        folder = tmp_path_factory.mktemp(f"clipped_{name}")
        page = short_page(name, start, folder, BATCHES=1, CLIP=CLIP)
        narrow = ["run.steps=2", f"train.clip_low={CLIP}", f"train.clip_high={CLIP}"]
        return page, short_run(name, start, folder / "run", *narrow)

    return compute


def short_page(
    name: str,
    start: Path,
    folder: Path,
    instead: dict[str, str] | None = None,
    **changed: object,
) -> Page:
    length, value, _ = LENGTHS[name]
    given = {length: value, "MODEL": str(start), "OUT": str(folder / "page")}
    if name in PROMPTS:
        given["PROMPTS"] = PROMPTS[name]
    if name in DISTILLED:
        given["TEACHER"] = str(teacher_of(start.parent))
        given["CANDIDATES"] = CANDIDATES
    return run_page(name, folder, instead, **given | changed)


def short_run(name: str, start: Path, directory: Path, *overrides: str) -> Path:
    given = [
        f"model.name={start}",
        f"run.steps={LENGTHS[name][2]}",
        f"run.dir={directory}",
        "run.mlflow=false",
    ]
    if name in PROMPTS:
        given.append(f"data.prompts_per_step={PROMPTS[name]}")
    if name in DISTILLED:
        given.append(f"model.teachers.adds.name={teacher_of(start.parent)}")
        given.append(f"train.teacher_candidates={CANDIDATES}")
    if name in RECORDED:
        given.append("run.record=tokens")
    run(load_config(FOLDER / f"{name}.yaml", [*given, *overrides]))
    return directory


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_the_run(name: str, both: Callable[[str], tuple[Page, Path]]) -> None:
    page, directory = both(name)
    assert differences(page, directory) == set()


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.share_prefix=true", "train.micro_batch_tokens=300"),
        ("train.share_prefix=false", "inference_engine.max_rows=7"),
    ],
)
def test_what_makes_a_run_faster_or_smaller_changes_rounding_alone(
    overrides: tuple[str, ...],
    start: Path,
    both: Callable[[str], tuple[Page, Path]],
    tmp_path: Path,
) -> None:
    page, _ = both("sgrpo")
    assert differences(page, short_run("sgrpo", start, tmp_path / "run", *overrides)) == set()


@pytest.mark.parametrize("name", SAMPLING)
def test_the_case_is_a_hard_one(name: str, clipped: Callable[[str], tuple[Page, Path]]) -> None:
    """Groups of unequal lengths, rewards that differ, and ratios that are clipped.

    All of it is what the file of weights says: of one batch, and of one step from there.
    """
    page, directory = clipped(name)
    assert differences(page, directory) == set()
    samples = lines_of(directory / "samples.jsonl")
    first, second = lines_of(directory / "metrics.jsonl")
    lengths: dict[int, set[int]] = {}
    for line in samples:
        lengths.setdefault(line["draw"], set()).add(len(line["response"]))
    assert any(len(of_group) > 1 for of_group in lengths.values())
    assert len({line["finish_reason"] for line in samples}) == 2
    assert 0 < first["reward/mean"] < 1
    assert second["update/clip_frac_high"] + second["update/clip_frac_low"] > 0


@pytest.mark.parametrize("name", SAMPLING)
def test_another_clip_makes_another_run(
    name: str, start: Path, clipped: Callable[[str], tuple[Page, Path]], tmp_path: Path
) -> None:
    _, directory = clipped(name)
    page = short_page(name, start, tmp_path, BATCHES=1, CLIP=0.3)
    assert differences(page, directory) >= {"loss", "grad_norm", "weights"}


@pytest.mark.parametrize(
    ("name", "changed", "seen"),
    [
        ("sgrpo", {"SEED": 2}, {"samples", "loss", "grad_norm", "weights"}),
        ("sgrpo", {"KL_COEFF": 0.0}, {"loss", "grad_norm", "weights"}),
        ("ppo", {"SEED": 2}, {"samples", "loss", "grad_norm", "weights", "critic"}),
        ("ppo", {"VALUE_CLIP": 0.001}, {"critic_loss", "critic_norm", "critic"}),
        ("ppo", {"LAMBDA": 1.0}, {"loss", "grad_norm", "weights", "critic"}),
        ("sft", {"SEED": 2}, {"loss", "grad_norm", "weights"}),
        ("dpo", {"SEED": 2}, {"loss", "grad_norm", "weights"}),
        ("dpo", {"BETA": 0.11}, {"loss", "grad_norm", "weights"}),
        ("opd_topk", {"SEED": 2}, {"samples", "loss", "grad_norm", "weights"}),
        ("opd_topk", {"CANDIDATES": 7}, {"loss", "grad_norm", "weights"}),
        ("same_numbers", {"SEED": 2}, {"samples", "grad_norm", "weights"}),
        ("centering", {"SEED": 2}, {"samples", "grad_norm", "weights"}),
        ("centering", {"MIN_P": 0.2}, {"samples", "grad_norm", "weights"}),
        ("centering", {"TOP_P": 0.8}, {"samples", "grad_norm", "weights"}),
        ("centering", {"HEAD": 1}, {"loss", "grad_norm", "weights"}),
        ("continuous", {"AHEAD": 1}, {"versions", "loss", "grad_norm", "weights"}),
        ("continuous", {"ROUNDS": 11}, {"versions", "loss", "grad_norm", "weights"}),
        ("continuous", {"FIRST": 1}, {"versions", "loss", "grad_norm", "weights"}),
        ("continuous", {"MOST_RATIO": 1.0}, {"loss", "grad_norm", "weights"}),
    ],
)
def test_another_constant_makes_another_run(
    name: str,
    changed: dict[str, Any],
    seen: set[str],
    start: Path,
    both: Callable[[str], tuple[Page, Path]],
    tmp_path: Path,
) -> None:
    _, directory = both(name)
    page = short_page(name, start, tmp_path, **changed)
    assert differences(page, directory) >= seen


def test_weights_change_in_the_middle_of_answers(
    both: Callable[[str], tuple[Page, Path]],
) -> None:
    """The oldest tokens are as old as they may be, and some answers are of several versions."""
    page, directory = both("continuous")
    ages = [line["data/staleness_max"] for line in lines_of(directory / "metrics.jsonl")]
    assert ages == [0, 1, 1, 1, 2]
    assert page["AHEAD"] == 2
    mixed = [answer for answer in page["asked"] if len(set(answer["versions"])) > 1]
    assert len(mixed) > page["SLOTS"]
    assert len({len(answer["tokens"]) for answer in page["asked"]}) > 1


def test_keys_and_values_that_outlive_their_weights_are_noticed(
    start: Path, both: Callable[[str], tuple[Page, Path]], tmp_path: Path
) -> None:
    _, directory = both("continuous")
    forgets = 'for answer in running:\n        answer["computed"] = None\n'
    page = short_page("continuous", start, tmp_path, instead={forgets: "pass\n"})
    assert differences(page, directory) >= {"logprobs", "loss", "grad_norm", "weights"}


@pytest.mark.parametrize(
    ("lines", "others"),
    [
        # A sampled token that is a candidate counts twice; none counts; their weight has a slope.
        ("torch.where(counted, 0.0, ratio * gap", "torch.where(counted & False, 0.0, ratio * gap"),
        ("torch.where(counted, 0.0, ratio * gap", "torch.where(counted | True, 0.0, ratio * gap"),
        ("(by_student - by_teacher).detach()", "(by_student - by_teacher)"),
        # Candidates of the place before.
        ("by_teacher.topk(CANDIDATES)", "by_teacher.roll(1, 1).topk(CANDIDATES)"),
    ],
)
def test_another_estimate_makes_another_run(
    lines: str,
    others: str,
    start: Path,
    both: Callable[[str], tuple[Page, Path]],
    tmp_path: Path,
) -> None:
    _, directory = both("opd_topk")
    page = short_page("opd_topk", start, tmp_path, instead={lines: others})
    assert differences(page, directory) >= {"grad_norm", "weights"}


def test_some_sampled_tokens_are_candidates_and_some_are_not(
    both: Callable[[str], tuple[Page, Path]],
) -> None:
    page, _ = both("opd_topk")
    counted = page["counted"][page["mask"]]
    assert 0 < int(counted.sum()) < len(counted)


def test_not_a_bit_differs_between_a_cache_and_padded_rows(
    start: Path, both: Callable[[str], tuple[Page, Path]], tmp_path: Path
) -> None:
    page, directory = both("same_numbers")
    assert page["different"] == 0
    assert {line["mismatch/bits"] for line in lines_of(directory / "metrics.jsonl")} == {0.0}
    # A cache that rounds what it holds is seen.
    rounds = {"kept.append((key, v))": "kept.append((key.bfloat16().float(), v))"}
    assert short_page("same_numbers", start, tmp_path, instead=rounds)["different"] > 0


@pytest.mark.parametrize(
    ("lines", "others"),
    [
        # The policy is what is left by the cut; a token of the tail stands for all of it.
        ("return outcomes(logits, kept,", "return outcomes(logits, kept | True,"),
        ("torch.where(in_head, logprobs, possible[..., -1])", "logprobs"),
        ("torch.where(in_head, old[i], old_outcomes[i][..., -1])", "old[i]"),
        ("loss = loss - expected", "loss = loss + 0 * expected"),
    ],
)
def test_an_update_that_drifts_is_another_one(
    lines: str,
    others: str,
    start: Path,
    both: Callable[[str], tuple[Page, Path]],
    tmp_path: Path,
) -> None:
    _, directory = both("centering")
    page = short_page("centering", start, tmp_path, instead={lines: others})
    assert differences(page, directory) >= {"grad_norm", "weights"}


def test_some_tokens_were_cut_and_some_are_of_the_tail(
    both: Callable[[str], tuple[Page, Path]],
) -> None:
    page, _ = both("centering")
    trained = page["mask"]
    told = (page["head"] == page["tokens"][..., None]).any(-1)
    assert not page["kept"][trained].all()
    assert 0 < int(told[trained].sum()) < int(trained.sum())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_needs_little(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 200
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    others = {module for module in imported if module not in sys.stdlib_module_names}
    # numpy, because the order of rows is that of numpy's bits.
    assert others <= {
        "numpy",
        "torch",
        "transformers",
        "oxrl.functional",
        "oxrl.engines.sample.gumbel",
    }


@pytest.mark.parametrize("name", PAGES)
def test_a_page_and_its_yaml_are_of_one_length(name: str) -> None:
    """The constants that the other tests replace."""
    length, short, steps = LENGTHS[name]
    text = (FOLDER / f"{name}.py").read_text()
    constants = dict(re.findall(r'^([A-Z_]+) = "?([^"\s]+)', text, flags=re.M))
    cfg = load_config(FOLDER / f"{name}.yaml")
    assert cfg.run.steps == int(constants[length]) * steps // short
    assert cfg.model.name == constants["MODEL"]
    if name in DISTILLED:
        assert cfg.model.teachers["adds"].name == constants["TEACHER"]
        assert cfg.train.teacher_candidates == int(constants["CANDIDATES"])
