"""schedule.jsonl: what is written is read, what was changed is named, what is no schedule refused.

pytest tests/rollouts/test_schedule.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.errors import RunDirectoryError
from oxrl.rollouts.schedule import (
    SCHEDULE,
    RecordedBatch,
    ScheduleFile,
    read_schedule,
    wrong_lines,
)
from oxrl.runs.files import CHAIN_FIELD, Chain, encode_line

LINES: list[dict[str, Any]] = [
    {"weights": 0, "worker": 0, "round": 0},
    {"weights": 0, "worker": 1, "round": 0},
    {"batch": 0, "draws": [0, 4]},
    {"retry": "5/1", "worker": 1},
    {"weights": 2, "worker": 0, "round": 31},
    {"weights": 2, "worker": 1, "round": 28},
    {"batch": 2, "draws": [4, 8]},
    {"weights": 4, "worker": 0, "round": 60},
    {"weights": 4, "worker": 1, "round": 59},
]
BATCHES = [RecordedBatch(0, 0, 4), RecordedBatch(2, 4, 8)]


def written(folder: Path) -> Path:
    file = ScheduleFile(folder / SCHEDULE)
    file.add(LINES[:3])
    file.add(LINES[3:])
    return folder / SCHEDULE


def named(path: Path, batches: list[RecordedBatch] = BATCHES) -> list[str]:
    """What is wrong, without the folder."""
    found = [str(wrong) for wrong in wrong_lines(read_schedule(path), batches)]
    return [text.replace(str(path), path.name) for text in found]


def changed(raw: list[bytes], number: int, **fields: Any) -> list[bytes]:
    """The lines of a file with other fields in one of them, its hash as it was."""
    line = json.loads(raw[number - 1])
    line |= fields
    return [*raw[: number - 1], json.dumps(line).encode() + b"\n", *raw[number:]]


def hashed_again(raw: list[bytes]) -> bytes:
    """The same lines as if they had been written so."""
    chain = Chain()
    lines = [json.loads(line) for line in raw]
    for line in lines:
        line.pop(CHAIN_FIELD, None)
    return b"".join(chain.seal(encode_line(line)) for line in lines)


def test_what_is_written_is_read_and_fits_the_record(tmp_path: Path) -> None:
    path = written(tmp_path)
    found = read_schedule(path)
    assert [line.says for line in found.lines] == LINES and found.changed is None
    assert [line.number for line in found.lines] == list(range(1, len(LINES) + 1))
    assert named(path) == []


# Line -> another value of a field of it.
CHANGES: list[tuple[int, dict[str, Any]]] = [
    (1, {"weights": 1}),
    (2, {"round": 3}),
    (3, {"draws": [0, 5]}),
    (3, {"draws": [1, 4]}),
    (4, {"retry": "5/2"}),
    (4, {"worker": 0}),
    (5, {"weights": 3}),
    (6, {"worker": 0}),
    (7, {"batch": 3}),
    (9, {"round": 58}),
]


@pytest.mark.parametrize(("number", "fields"), CHANGES)
def test_a_changed_line_is_named_with_what_it_says(
    number: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path)
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(changed(raw, number, **fields)))
    [text] = named(path)
    says = json.dumps(LINES[number - 1] | fields)
    assert text.startswith(f"different  schedule.jsonl, line {number}: it says {says}, the record")


def test_a_line_that_was_hashed_again_is_compared_with_the_samples(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(hashed_again(changed(raw, 7, draws=[4, 9])))
    assert named(path) == [
        'different  schedule.jsonl, line 7: it says {"batch": 2, "draws": [4, 9]}, the record says '
        '{"batch": 2, "draws": [4, 8]}'
    ]
    path.write_bytes(hashed_again(raw[:4]))
    assert named(path) == [
        "different  schedule.jsonl, after line 4: it says nothing more, the record says "
        '{"weights": 2, "worker": 0}'
    ]
    path.write_bytes(hashed_again(raw[:3] + raw[6:] + raw[3:6]))  # draws out of order
    assert named(path)[0].startswith("different  schedule.jsonl, line 4: it says")
    path.write_bytes(hashed_again(raw))
    [text] = named(path, BATCHES[:1])
    assert text.startswith('different  schedule.jsonl, line 8: it says {"weights": 4')


def test_a_line_that_was_taken_out_is_seen(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes().splitlines(keepends=True)
    for number in range(1, len(raw)):
        path.write_bytes(b"".join(raw[: number - 1] + raw[number:]))
        assert named(path)[0].startswith(f"different  schedule.jsonl, line {number}: "), number


# What stands in line 3 instead -> what is said of it.
DAMAGE = [
    (b"", None),
    (b"not json\n", "no JSON object, but b'not json"),
    (b"[1]\n", "no JSON object"),
    (b'{"wieghts": 0, "worker": 0, "round": 0}\n', "is no decision of a run"),
    (b'{"weights": 0, "worker": 0}\n', "round = None is no decision"),
    (b'{"weights": -1, "worker": 0, "round": 0}\n', "weights = -1 is no decision"),
    (b'{"weights": true, "worker": 0, "round": 0}\n', "weights = True is no decision"),
    (b'{"batch": 0, "draws": [0]}\n', "draws = \\[0\\] is no decision"),
    (b'{"batch": 0, "draws": "0-4"}\n', "draws = '0-4' is no decision"),
    (b'{"retry": 5, "worker": 1}\n', "retry = 5 is no decision"),
    (b'{"retry": "5/1", "worker": 1, "more": 2}\n', "is no decision"),
    (b"{}\n", "{} is no decision"),
    (b"\xff\xfe\n", "no JSON object"),
]


@pytest.mark.parametrize(("line", "said"), DAMAGE)
def test_what_is_no_schedule_is_refused_with_its_line(
    line: bytes, said: str | None, tmp_path: Path
) -> None:
    path = written(tmp_path)
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*raw[:2], line, *raw[3:]]))
    if said is None:
        assert named(path)
        return
    with pytest.raises(RunDirectoryError, match=f"schedule.jsonl, line 3: .*{said}"):
        read_schedule(path)


def test_a_file_that_is_missing_or_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"is not there: runs with rollout.schedule=free"):
        read_schedule(tmp_path / SCHEDULE)
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(RunDirectoryError, match=r"line 9: it ends in the middle of a line"):
        read_schedule(path)
    path.write_bytes(b"")
    assert named(path) == [
        "different  schedule.jsonl, after line 0: it says nothing more, the record says "
        '{"weights": 0, "worker": 0}'
    ]
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read_schedule(tmp_path / "folder")


def test_a_resumed_run_goes_on_at_the_mark_of_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / SCHEDULE
    first = ScheduleFile(path)
    first.add(LINES[:3])
    mark = first.mark()
    first.add(LINES[3:5])
    with path.open("ab") as file:
        file.write(b'{"batch": 2, "dra')  # killed here
    second = ScheduleFile(path)
    second.cut(mark)
    second.add(LINES[3:])
    assert [line.says for line in read_schedule(path).lines] == LINES
    here = second.here
    second.add([LINES[0]])
    second.cut(here)
    assert named(path) == []
    # One that is not gone on with begins anew.
    third = ScheduleFile(path)
    third.add(LINES[:1])
    assert [line.says for line in read_schedule(path).lines] == LINES[:1]


def test_a_schedule_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    path = tmp_path / SCHEDULE
    first = ScheduleFile(path)
    first.add(LINES[:5])
    mark = first.mark()
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(raw[:4]))
    with pytest.raises(RunDirectoryError, match=rf"had {mark.bytes} when the checkpoint was taken"):
        ScheduleFile(path).cut(mark)
    path.write_bytes(b"".join(raw).replace(b'"round": 31', b'"round": 32'))
    with pytest.raises(RunDirectoryError, match="schedule.jsonl, line 5: it is not what was"):
        ScheduleFile(path).cut(mark)
    again = (hashed_again(changed(raw, 5, round=other)) for other in range(100))
    as_long = next(lines for lines in again if len(lines) == mark.bytes and lines != b"".join(raw))
    path.write_bytes(as_long)
    with pytest.raises(RunDirectoryError, match="its lines were written again"):
        ScheduleFile(path).cut(mark)
    path.unlink()
    with pytest.raises(RunDirectoryError, match="has 0 bytes"):
        ScheduleFile(path).cut(mark)
