"""Files larger than memory: the same units, in the same order, with only their places held."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import ReadOptions
from oxrl.data.preferences import PreferenceDataset
from oxrl.data.prompts import PromptDataset
from oxrl.errors import ConfigError, DataError
from oxrl.models.load import load_tokenizer
from support.small_runs import (
    final_files,
    metric_lines,
    preference_config,
    sft_config,
    steps_config,
)


def write(path: Path, rows: list[dict[str, Any]], *, start: bytes = b"") -> Path:
    path.write_bytes(
        start + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    )
    return path


def test_streamed_units_and_their_report_are_those_of_memory(tmp_path: Path) -> None:
    chats = [{"prompt": f"é {i}", "completion": "x" * (i % 7)} for i in range(40)]
    path = write(tmp_path / "chats.jsonl", chats, start=b"\xef\xbb\xbf")
    tokenizer = load_tokenizer("builtin:tiny")
    held, streamed = (
        ConversationDataset.load(path, tokenizer, ReadOptions(max_tokens=14, stream=s))
        for s in (False, True)
    )
    assert held.report == streamed.report and held.report["empty"] and held.report["overlong"]
    assert len(held) == len(streamed) > 0 and held.in_order() == streamed.in_order()
    assert [held.at(i, seed=3) for i in range(90)] == [streamed.at(i, seed=3) for i in range(90)]
    prompts = write(
        tmp_path / "prompts.jsonl",
        [{"prompt": f"{i}+1", "answer": i + 1, "uid": i} for i in range(9)],
    )
    held, streamed = (
        PromptDataset.load(prompts, tokenizer, ReadOptions(stream=s)) for s in (False, True)
    )
    assert [held.at(i, seed=0) for i in range(30)] == [streamed.at(i, seed=0) for i in range(30)]


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", [{"prompt": "?", "completion": "abcdefgh" * 250}] * 75)
    tokenizer, held = load_tokenizer("builtin:tiny"), {}
    ConversationDataset.load(path, tokenizer, ReadOptions(limit=1))  # caches of the libraries
    for stream in (False, True):
        tracemalloc.start()
        data = ConversationDataset.load(path, tokenizer, ReadOptions(stream=stream))
        held[stream] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(data) == 75
    assert held[False] > 1_250_000 and held[True] < 75_000


@pytest.mark.parametrize(
    "algorithm", ["sft", "dpo", "sampo", "kto", "reward_model", "process_reward_model"]
)
def test_a_streamed_run_is_the_same_run(tmp_path: Path, algorithm: str) -> None:
    """Preference runs also look their reference up by the place of a unit, and KTO's rows stand
    behind each other.
    """
    built = {"sft": sft_config, "process_reward_model": steps_config}
    build = built.get(algorithm, preference_config)
    for name, stream in (("held", False), ("streamed", True)):
        run(
            build(
                tmp_path,
                name,
                ["run.steps=2"],
                data={"stream": stream},
                train={"alg_name": algorithm},
            )
        )
    assert metric_lines(tmp_path / "held") == metric_lines(tmp_path / "streamed")
    assert final_files(tmp_path / "held") == final_files(tmp_path / "streamed")


def test_pairs_on_disk_hold_places_and_a_table_only(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}?", "chosen": "abcdefgh" * 100, "rejected": "hgfedcba" * 100}
        for i in range(50)
    ]
    path, tokenizer, held = (
        write(tmp_path / "pairs.jsonl", rows),
        load_tokenizer("builtin:tiny"),
        {},
    )
    PreferenceDataset.load(path, tokenizer, ReadOptions(limit=1))
    for stream in (False, True):
        tracemalloc.start()
        data = PreferenceDataset.load(
            path, tokenizer, ReadOptions(stream=stream, unpaired=True)
        ).with_mismatched()
        data = data.with_reference(torch.arange(200.0).view(100, 2), range(100))
        held[stream] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        units = [data.at(draw, seed=1) for draw in range(3)]
        assert len(data) == 100 and all(unit.ref_logprobs for unit in units)
        assert [next(data.batches(5)), units] == held.setdefault(
            "units", [next(data.batches(5)), units]
        )
    assert held[False] > 1_250_000 and held[True] < 75_000


def test_a_file_that_changes_meanwhile_and_what_cannot_be_streamed_are_errors(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "chats.jsonl", [{"prompt": "a", "completion": "b"}])
    data = ConversationDataset.load(path, load_tokenizer("builtin:tiny"), ReadOptions(stream=True))
    for completion in ("c", " "):  # one that could be learned, and of the same length, is as wrong
        write(path, [{"prompt": "a", "completion": completion}])
        with pytest.raises(DataError, match="changed while it was being read"):
            data.at(0, seed=0)
    sft_config(tmp_path, "run")
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(ConfigError, match=r"must end in \.jsonl for data\.stream"):
        load_config(
            tmp_path / "run.yaml", ["data.stream=true", f"data.train={tmp_path / 'rows.parquet'}"]
        )
    with pytest.raises(ConfigError, match=r"must end in \.jsonl for data\.stream"):
        load_config(
            tmp_path / "run.yaml", ["data.stream=true", f"data.eval={tmp_path}/rows.parquet"]
        )
