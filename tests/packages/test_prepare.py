"""Preparers: what they write, what they reject, what they never leak from the held-out part into
training.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import ReadOptions
from oxrl.data.prompts import PromptDataset
from oxrl.errors import DataError, MissingExtraError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.rewards import exact_reward, math_reward
from oxrl_datasets.prepare import GENERATORS, PREPARERS
from oxrl_datasets.visual import CELL, VisualQuestions

Find = Callable[[str], Path]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_the_whole_of_gsm8k_is_prepared_and_its_solutions_are_right(
    real_data: Find, tmp_path: Path
) -> None:
    report = PREPARERS["gsm8k"](real_data("gsm8k"), tmp_path)
    assert (
        report["written"] == {"train.jsonl": 7473, "test.jsonl": 1119} and report["rejected"] == 0
    )
    assert set(report["source_sha256"]) == {"train.jsonl", "test.jsonl"}
    assert json.loads((tmp_path / "report.json").read_text()) == report
    rows = read(tmp_path / "train.jsonl") + read(tmp_path / "test.jsonl")
    assert len({row["uid"] for row in rows}) == 8592
    assert all(math_reward(row["completion"], row["answer"]).value == 1.0 for row in rows)
    assert not any("<<" in row["completion"] for row in rows)
    first = rows[0]
    assert (
        first["prompt"].startswith("Natalia sold clips to 48 of her friends")
        and "####" in first["prompt"]
    )
    assert (
        first["completion"].startswith("Natalia sold 48/2 = 24 clips in May.")
        and first["answer"] == "72"
    )


def test_prepared_gsm8k_loads_as_prompts_and_as_conversations(
    real_data: Find, tmp_path: Path
) -> None:
    PREPARERS["gsm8k"](real_data("gsm8k"), tmp_path, limit=20, instruction="", calculator="true")
    prompts = PromptDataset.load(tmp_path / "train.jsonl", builtin_tokenizer())
    conversations = ConversationDataset.load(tmp_path / "train.jsonl", builtin_tokenizer())
    assert len(prompts) == len(conversations) == 20
    assert any("<<" in row["completion"] for row in read(tmp_path / "train.jsonl"))


def test_gsm8k_takes_a_seeded_subset_in_the_original_order(real_data: Find, tmp_path: Path) -> None:
    def uids(seed: int, out: str) -> list[str]:
        PREPARERS["gsm8k"](real_data("gsm8k") / "test.jsonl", tmp_path / out, seed=seed, limit=50)
        return [row["uid"] for row in read(tmp_path / out / "test.jsonl")]

    first = uids(1, "a")
    assert first == uids(1, "b") == sorted(first) and len(first) == 50
    assert first != uids(2, "c")


def test_gsm8k_rows_without_an_answer_are_rejected_with_a_reason(tmp_path: Path) -> None:
    rows = [
        {"question": "q", "answer": "2+2\n#### 1,004"},
        {"question": "q", "answer": "no marker"},
        {"question": "q", "answer": "#### many"},
        {"prompt": "q"},
    ]
    raw = tmp_path / "raw.jsonl"
    raw.write_text("\n".join(map(json.dumps, rows)))
    report = PREPARERS["gsm8k"](raw, tmp_path / "out")
    assert report["written"] == {"train.jsonl": 1} and report["rejected"] == 3
    assert [reject["place"] for reject in report["rejects"]] == [f"{raw}:{n}" for n in (2, 3, 4)]
    assert read(tmp_path / "out" / "train.jsonl")[0]["answer"] == "1004"
    raw.write_text(json.dumps(rows[1]))
    with pytest.raises(DataError, match=r"no row can be used; 1 rejected"):
        PREPARERS["gsm8k"](raw, tmp_path / "out")


def test_sources_that_are_not_there_teach(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no train or test"):
        PREPARERS["gsm8k"](tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="no data file"):
        PREPARERS["gsm8k"](tmp_path / "none.jsonl", tmp_path / "out")
    with pytest.raises(DataError, match="arithmetic is generated"):
        PREPARERS["arithmetic"](tmp_path, tmp_path / "out")


@pytest.mark.parametrize("dataset", PREPARERS)
def test_an_option_with_the_name_of_an_argument_is_refused_like_any_other(
    dataset: str, tmp_path: Path
) -> None:
    raw = None if dataset in (*GENERATORS, "demonstrations") else tmp_path / "raw.jsonl"
    for own in ("name", "source", "out"):
        wrong: dict[str, Any] = {own: "x"}
        with pytest.raises(DataError, match=f"option {own}='x': .*the options of {dataset} and"):
            PREPARERS[dataset](raw, tmp_path / "out", **wrong)


def test_without_the_library_a_preparer_names_the_pip_command(tmp_path: Path) -> None:
    for name, library, command in (
        ("gsm8k", "datasets", "pip install datasets"),
        ("reasoning-gym", "reasoning_gym", r"pip install -e \"\.\[tasks\]\""),
    ):
        try:
            __import__(library)
        except ImportError:
            with pytest.raises(MissingExtraError, match=command):
                PREPARERS[name](None, tmp_path)


def test_reasoning_gym_tasks_are_split_without_overlap(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the [tasks] extra is not installed")
    prepare = PREPARERS["reasoning-gym"]
    small = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    report = prepare(
        None, tmp_path, task="chain_sum", parameters=small, train_rows="60", eval_rows=40
    )
    train, held = read(tmp_path / "train.jsonl"), read(tmp_path / "eval.jsonl")
    assert len(train) == 60 and len(held) + report["rejected"] == 40
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}
    assert report["rejects"][0]["reason"] == "the question is in train.jsonl"
    assert len(PromptDataset.load(tmp_path / "train.jsonl", builtin_tokenizer())) == 60
    with pytest.raises(DataError, match="no task 'chain_summ'; close names:.*chain_sum"):
        prepare(None, tmp_path, task="chain_summ")
    with pytest.raises(
        DataError, match="refuses task=chain_sum with .*unexpected keyword argument 'foo'"
    ):
        prepare(None, tmp_path, parameters='{"foo": 1}')
    with pytest.raises(DataError, match="is no JSON object"):
        prepare(None, tmp_path, parameters="[1]")


@pytest.mark.parametrize(
    ("operands", "low", "high", "operators"), [(2, 0, 30, "+"), (3, 1, 9, "+-"), (2, 10, 99, "-")]
)
def test_sums_are_right_and_no_held_out_tuple_is_trained_on_in_any_order(
    tmp_path: Path, operands: int, low: int, high: int, operators: str
) -> None:
    counts = {"sft_rows": 3000, "rl_rows": 2000, "eval_rows": 150}
    report = PREPARERS["arithmetic"](
        None, tmp_path, operands=operands, low=low, high=high, operators=operators, **counts
    )
    sft, rl, held = (read(tmp_path / f"{split}.jsonl") for split in ("sft", "rl", "eval"))
    assert [len(sft), len(rl), len(held)] == list(counts.values()) and report[
        "held_out_tuples"
    ] == 150
    tuples = {tuple(sorted(row["operands"])) for row in held}
    assert len(tuples) == 150
    assert not tuples & {tuple(sorted(row["operands"])) for row in sft + rl}
    for row in sft + rl + held:
        terms = row["prompt"].removesuffix("=").replace("-", "+-").split("+")
        assert str(sum(map(int, terms))) == row.get("answer", row.get("completion"))
        assert [abs(int(term)) for term in terms] == row["operands"]
        assert all(low <= number <= high for number in row["operands"])
    assert {character for row in rl for character in row["prompt"] if character in "+-"} == set(
        operators
    )


def test_sums_depend_on_the_seed_only(tmp_path: Path) -> None:
    def texts(seed: int, out: str) -> list[str]:
        PREPARERS["arithmetic"](
            None, tmp_path / out, seed=seed, sft_rows=50, rl_rows=50, eval_rows=50
        )
        return [(tmp_path / out / f"{split}.jsonl").read_text() for split in ("sft", "rl", "eval")]

    assert texts(0, "a") == texts(0, "b")
    assert all(one != other for one, other in zip(texts(0, "a"), texts(1, "c"), strict=True))


def test_question_and_digit_order_are_options_and_files_load(tmp_path: Path) -> None:
    PREPARERS["arithmetic"](
        None,
        tmp_path,
        question="What is {expression}?",
        reverse="true",
        low="10",
        high="20",
        eval_rows="5",
    )
    (row, *_) = read(tmp_path / "eval.jsonl")
    first, second = row["operands"]
    assert (row["prompt"], row["answer"]) == (
        f"What is {first}+{second}?",
        str(first + second)[::-1],
    )
    (prompt, *_) = PromptDataset.load(
        tmp_path / "rl.jsonl", builtin_tokenizer(), ReadOptions(limit=3)
    ).in_order()
    assert exact_reward(str(prompt.answer), prompt.answer).value == 1.0
    assert len(ConversationDataset.load(tmp_path / "sft.jsonl", builtin_tokenizer())) == 4000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # 0..3 has 4 + 6 = 10 unordered pairs.
        (
            {"high": 3, "eval_rows": 10},
            "eval_rows=10 would hold out every one of the 10 unordered tuples",
        ),
        ({"operands": 1}, "operands >= 2"),
        ({"low": 5, "high": 5}, "low < high"),
        ({"operators": "+x"}, r"only \+ and - are known"),
        ({"question": "What?"}, "must contain {expression}"),
        ({"rl_rows": 0}, "at least one row"),
        (
            {"rows": 5},
            "option rows=5: Extra inputs are not permitted; .* their defaults: operands=2, low=0",
        ),
        ({"high": "many"}, "option high='many': Input should be a valid integer"),
        ({"reverse": "maybe"}, "option reverse='maybe': Input should be a valid boolean"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        PREPARERS["arithmetic"](None, tmp_path, **options)


def any_columns(folder: Path, rows: int = 100) -> Path:
    path = folder / "raw.jsonl"
    lines: list[str] = []
    for i in range(rows // 2):
        # Every question is asked twice, once in other letters.
        for question in (f"What is {i} plus ONE?", f"WHAT IS {i}  PLUS ONE? "):
            lines.append(json.dumps({"question": question, "meta": {"gold": i + 1}}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("test", "aside"), [(0.1, 10), (30, 30)])
def test_any_columns_are_split_and_no_prompt_is_in_both_parts(
    tmp_path: Path, test: float, aside: int
) -> None:
    columns = {"prompt": "question", "answer": "meta.gold"}
    raw = any_columns(tmp_path)
    prepared = PREPARERS["prompt-answer"]
    report = prepared(raw, tmp_path / "out", test=test, seed=3, **columns)
    assert report["written"] == {"train.jsonl": 100 - aside, "test.jsonl": aside}
    split = {"test": test, "different_prompts": 50, "repeated_prompts": 50}
    assert report["split"] == split
    parts = [read(tmp_path / "out" / name) for name in ("train.jsonl", "test.jsonl")]
    questions = [{" ".join(row["prompt"].split()).lower() for row in part} for part in parts]
    assert not questions[0] & questions[1]
    assert len({row["uid"] for part in parts for row in part}) == 100
    assert parts[0][0]["answer"] == int(parts[0][0]["prompt"].split()[2]) + 1
    prepared(raw, tmp_path / "again", test=test, seed=3, **columns)
    prepared(raw, tmp_path / "other", test=test, seed=4, **columns)
    first, again, other = (
        (tmp_path / folder / "test.jsonl").read_bytes() for folder in ("out", "again", "other")
    )
    assert first == again != other
    assert len(PromptDataset.load(tmp_path / "out" / "train.jsonl", builtin_tokenizer())) > 0


@pytest.mark.parametrize("test", [0.0, 0.001, 100])
def test_a_part_without_rows_is_refused(tmp_path: Path, test: float) -> None:
    raw = any_columns(tmp_path)
    with pytest.raises(DataError, match="some have to be on either side"):
        PREPARERS["prompt-answer"](
            raw, tmp_path / "out", test=test, prompt="question", answer="meta.gold"
        )


def test_columns_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no field 'meta.silver'"):
        PREPARERS["prompt-answer"](
            any_columns(tmp_path), tmp_path / "out", prompt="question", answer="meta.silver"
        )
    with pytest.raises(DataError, match="--test splits rows of a raw file"):
        PREPARERS["arithmetic"](None, tmp_path / "out", test=0.5)


def test_shapes_of_drawings_lie_up_to_a_pixel_off_centre_on_either_side() -> None:
    from PIL import Image, ImageOps

    files, _ = VisualQuestions(eval_rows=1, rl_rows=1, sft_rows=40).make(0, None)
    right: set[float] = set()
    down: set[float] = set()
    for row in files["sft"]:
        data = base64.b64decode(row["images"][0].partition(",")[2])
        image = ImageOps.invert(Image.open(BytesIO(data)).convert("L"))
        for cell in range(image.width // CELL):
            box = image.crop((cell * CELL, 0, (cell + 1) * CELL, CELL)).getbbox()
            assert box is not None
            # A large one may be cut off, or reach into the next cell.
            if min(box) == 0 or max(box) == CELL:
                continue
            right.add((box[0] + box[2] - 1) / 2 - CELL // 2)
            down.add((box[1] + box[3] - 1) / 2 - CELL // 2)
    assert right == down == {-1, 0, 1}
