"""Reading files: every malformed input is an error that names the place, every legal one is read
unchanged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from oxrl.data.memory import lines_of
from oxrl.data.rows import read_rows
from oxrl.errors import DataError
from oxrl.modelfiles.hub import file_hash


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_bom_crlf_blank_lines_and_unicode_separators_are_read(tmp_path: Path) -> None:
    content = (
        '\ufeff{"a": "x\u2028y"}\r\n\n{"a": "\u0085\\u0000 🙂 שלום"}\n   \n{"a": "last"}'.encode()
    )
    rows = list(read_rows(write(tmp_path / "d.jsonl", content)))
    assert [row.fields["a"] for row in rows] == ["x\u2028y", "\u0085\0 🙂 שלום", "last"]
    assert [row.place.rpartition(":")[2] for row in rows] == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": ', r"d\.jsonl:2 \(byte 15\): not JSON: .*may be truncated"),
        (
            b'{"a": 1}\n{oops}\n{"a": 2}\n',
            r"d\.jsonl:2 \(byte 10\): not JSON: Expecting property name[^;]*$",
        ),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"d\.jsonl:2 \(byte 16\): not UTF-8"),
        (b"[1, 2]\n", r"d\.jsonl:1 \(byte 0\): a line must be a JSON object, got list"),
        (b"[" * 200_000, r"d\.jsonl:1 \(byte 0\): JSON is nested too deeply"),
    ],
)
def test_a_broken_line_is_named_with_its_byte_offset(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(write(tmp_path / "d.jsonl", content)))


def test_parquet_rows_are_read_and_a_corrupt_footer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": [1, 2]}), path)
    rows = list(read_rows(path))
    assert [dict(row.fields) for row in rows] == [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": 2},
    ]
    assert rows[1].place == f"{path} row 2"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"d\.parquet \(\d+ bytes\): not a readable Parquet file"):
        list(read_rows(path))


def test_a_missing_file_and_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"ends in \.jsonl or \.parquet, not '\.csv'"):
        list(read_rows(write(tmp_path / "d.csv", b"a,b")))


def test_the_file_hash_is_sha256(tmp_path: Path) -> None:
    # SHA-256 of "abc" from FIPS 180-2, appendix B.1.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_hash(write(tmp_path / "x", b"abc")) == digest


def test_a_data_frame_is_its_rows_without_what_is_missing() -> None:
    frame = pandas.DataFrame(
        {
            "prompt": ["1+1?", "2+2?", "3+3?"],
            "answer": ["2", None, "6"],
            "bonus": [0.5, 1.5, math.nan],
        }
    )
    rows = [
        {"prompt": "1+1?", "answer": "2", "bonus": 0.5},
        {"prompt": "2+2?", "bonus": 1.5},
        {"prompt": "3+3?", "answer": "6"},
    ]
    assert [json.loads(line) for line in lines_of(frame, "dataset").splitlines()] == rows
    # Of a list nothing is left out.
    told = lines_of([{"a": None, 2: numpy.int64(3), "c": numpy.ones(2)}], "dataset")
    assert told == '{"a": null, "2": 3, "c": [1.0, 1.0]}\n'
