"""Episodes of robots in LeRobot's layout: a Parquet file per episode, frames in it, facts beside.

    meta/info.json            what there is: features with type and shape, frames per second, places
    meta/episodes.jsonl       {"episode_index", "tasks": [text], "length"}, of a simulator "seed"
    meta/tasks.jsonl          {"task_index", "task": text}
    meta/stats.json           of every feature of numbers: min, max, mean, std, count, q01, q99
    data/chunk-000/episode_000000.parquet
        action, observation.state, observation.images.<camera> {"bytes", "path"}, timestamp,
        frame_index, episode_index, index, task_index, next.reward, next.done, next.success

Written is version 2.1 with images in the Parquet files; read are 2.0 and 2.1, and 3.0 (several
episodes in a file), as far as frames are images. Videos are refused: nothing here decodes them.

Source: documentation and dataset cards of Hugging Face's LeRobot, "LeRobotDataset" v2.1 and v3.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oxrl.data.actions import object_in
from oxrl.data.rows import Fields, Json, JsonArray, JsonObject
from oxrl.errors import DataError
from oxrl.runs.files import pretty_json, write_atomically

VERSION = "v2.1"
READ = ("v2.0", "v2.1", "v3.0")
IMAGES = "observation.images."
OF_ALL = "observation.image"
CHUNK = 1000  # episodes in a folder
FPS = 10  # frames per second that are written
PLACE = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
# What every frame is numbered by, and what came of it.
KINDS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
    "next.reward": "float32",
    "next.done": "bool",
    "next.success": "bool",
}


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One step of an episode.

    Args:
        images: camera -> bytes of an image file.
        action: numbers.
        state: of the robot, numbers; None where it is not known.
        reward: of the action.
    """

    images: Mapping[str, bytes]
    action: Sequence[float]
    state: Sequence[float] | None = None
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RobotEpisode:
    """An episode of a robot: its task, what was seen and done step by step, and if it succeeded.

    seed: that a simulator began with; None where it is not known. It is a field of ours, in
        meta/episodes.jsonl, which LeRobot passes over.
    """

    task: str
    frames: Sequence[Frame]
    success: bool = False
    seed: int | None = None


def write_episodes(directory: Path, episodes: Sequence[RobotEpisode], *, robot: str) -> None:
    """Write episodes as a dataset of version 2.1.

    Args:
        directory: of the dataset, new or empty.
        episodes: with the same cameras and sizes in all frames.
        robot: its type, in words.

    Raises:
        DataError: there are none, or something is there already.
    """
    if not episodes or not all(episode.frames for episode in episodes):
        raise DataError(f"{directory}: a dataset needs an episode, and every episode a frame")
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory} is not empty: episodes need a folder of their own")
    frames = [frame for episode in episodes for frame in episode.frames]
    tasks = list(dict.fromkeys(episode.task for episode in episodes))
    told: JsonArray = []
    first = 0
    for number, episode in enumerate(episodes):
        _write_episode(directory, number, first, episode, tasks.index(episode.task))
        begun = {} if episode.seed is None else {"seed": episode.seed}
        length = len(episode.frames)
        told.append({"episode_index": number, "tasks": [episode.task], "length": length, **begun})
        first += length
    meta = directory / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    _write_lines(meta / "episodes.jsonl", told)
    named = [{"task_index": index, "task": task} for index, task in enumerate(tasks)]
    _write_lines(meta / "tasks.jsonl", named)
    info = {
        "codebase_version": VERSION,
        "robot_type": robot,
        "total_episodes": len(episodes),
        "total_frames": first,
        "total_tasks": len(tasks),
        "total_videos": 0,
        "total_chunks": (len(episodes) - 1) // CHUNK + 1,
        "chunks_size": CHUNK,
        "fps": FPS,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": PLACE,
        "video_path": None,
        "features": _features(frames[0]),
    }
    write_atomically(meta / "info.json", json.dumps(info, indent=2) + "\n")
    stats = {"action": statistics([frame.action for frame in frames])}
    if frames[0].state is not None:
        states: list[Json] = [frame.state for frame in frames]
        stats["observation.state"] = statistics(states)
    write_atomically(meta / "stats.json", pretty_json(stats))


def read_episodes(directory: Path) -> Iterator[RobotEpisode]:
    """The episodes of a dataset, in their order.

    Args:
        directory: of the dataset, which holds meta/info.json.

    Returns:
        One episode after the other; a file is read when its first episode is asked for.

    Raises:
        DataError: it is none, of another version, or its frames are videos; says where.
    """
    info = _info(directory)
    version = info.get("codebase_version")
    if version not in READ:
        raise DataError(f"{directory} is of version {version}; read are {', '.join(READ)}")
    features: Mapping[str, Fields] = info.get("features", {})
    if "action" not in features:
        raise DataError(f"{directory}: meta/info.json names no feature action")
    videos = [name for name, feature in features.items() if feature.get("dtype") == "video"]
    if videos:
        raise DataError(
            f"{directory}: {', '.join(videos)} are videos, which are not decoded here; write the "
            "dataset with images (LeRobot: use_videos=False)"
        )
    cameras = [name for name in features if name.startswith(OF_ALL)]
    tasks = _tasks(directory)
    seeds = _seeds(directory)
    paths = sorted((directory / "data").glob("chunk-*/*.parquet"))
    if not paths:
        raise DataError(f"{directory} has no data/chunk-*/*.parquet")
    for path in paths:
        yield from _episodes_of(path, cameras, tasks, seeds)


def statistics(rows: Sequence[Sequence[float]]) -> JsonObject:
    """Compute a dataset's statistics of a feature: min, max, mean, std, count, q01 and q99.

    Args:
        rows: [n][size], n at least 1.

    Returns:
        By name a list of `size` numbers; `count` has one. std divides by n.
    """
    import numpy as np

    table = np.asarray(rows, dtype=np.float64)
    low, high = np.quantile(table, [0.01, 0.99], axis=0)
    return {
        "min": table.min(0).tolist(),
        "max": table.max(0).tolist(),
        "mean": table.mean(0).tolist(),
        "std": table.std(0).tolist(),
        "count": [len(table)],
        "q01": low.tolist(),
        "q99": high.tolist(),
    }


def _write_episode(
    directory: Path, number: int, first: int, episode: RobotEpisode, task: int
) -> None:
    # Who reads text does without it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    frames = episode.frames
    count = len(frames)
    numbers = pa.list_(pa.float32())
    actions = [list(map(float, frame.action)) for frame in frames]
    columns: JsonObject = {"action": pa.array(actions, numbers)}
    if frames[0].state is not None:
        states = [list(map(float, frame.state or ())) for frame in frames]
        columns["observation.state"] = pa.array(states, numbers)
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for camera in frames[0].images:
        shown = [
            {"bytes": frame.images[camera], "path": f"frame_{at:06d}.png"}
            for at, frame in enumerate(frames)
        ]
        columns[IMAGES + camera] = pa.array(shown, picture)
    before = [False] * (count - 1)
    told: JsonObject = {
        "timestamp": [at / FPS for at in range(count)],
        "frame_index": range(count),
        "episode_index": [number] * count,
        "index": range(first, first + count),
        "task_index": [task] * count,
        "next.reward": [frame.reward for frame in frames],
        "next.done": [*before, True],
        "next.success": [*before, episode.success],
    }
    columns |= {name: pa.array(told[name], kind) for name, kind in KINDS.items()}
    path = directory / PLACE.format(episode_chunk=number // CHUNK, episode_index=number)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def _features(frame: Frame) -> JsonObject:
    from io import BytesIO

    from PIL import Image

    from oxrl.data.image_files import FORMATS  # with Pillow, for images alone

    found: JsonObject = {"action": _feature("float32", [len(frame.action)])}
    if frame.state is not None:
        found["observation.state"] = _feature("float32", [len(frame.state)])
    for camera, content in frame.images.items():
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            shape = [image.height, image.width, 3]
        found[IMAGES + camera] = _feature("image", shape, ["height", "width", "channel"])
    return found | {name: _feature(kind, [1]) for name, kind in KINDS.items()}


def _feature(kind: str, shape: list[int], names: list[str] | None = None) -> JsonObject:
    return {"dtype": kind, "shape": shape, "names": names}


def _episodes_of(
    path: Path, cameras: Sequence[str], tasks: Mapping[int, str], seeds: Mapping[int, int]
) -> Iterator[RobotEpisode]:
    """The episodes of one file, of which version 3 puts several into one."""
    import pyarrow.lib
    import pyarrow.parquet as pq

    try:
        rows: list[JsonObject] = pq.read_table(path).to_pylist()
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    by_episode: dict[int, list[JsonObject]] = {}
    for number, row in enumerate(rows):
        if "action" not in row or "episode_index" not in row:
            raise DataError(f"{path} row {number}: no action, or no episode_index")
        by_episode.setdefault(int(row["episode_index"]), []).append(row)
    for number, found in by_episode.items():
        frames = [_frame(row, cameras, path) for row in found]
        task = tasks.get(int(found[0].get("task_index", 0)), "")
        success = bool(found[-1].get("next.success", False))
        yield RobotEpisode(task=task, frames=frames, success=success, seed=seeds.get(number))


def _frame(row: Fields, cameras: Sequence[str], path: Path) -> Frame:
    images: dict[str, bytes] = {}
    for name in cameras:
        given = row.get(name)
        content = given.get("bytes") if isinstance(given, Mapping) else None
        if content is None:
            where = f"frame {row.get('frame_index')} of episode {row.get('episode_index')}"
            raise DataError(f"{path}, {where}: {name} holds no bytes of an image")
        images[name.removeprefix(IMAGES)] = content
    state = row.get("observation.state")
    action = row["action"]
    return Frame(
        images=images,
        action=action if isinstance(action, list) else [action],
        state=[state] if isinstance(state, float) else state,
        reward=float(row.get("next.reward") or 0.0),
    )


def _info(directory: Path) -> Fields:
    """Read meta/info.json, whose features must be objects.

    Raises:
        DataError: it is not there, or its features are something else.
    """
    path = directory / "meta" / "info.json"
    try:
        info = object_in(path)
    except DataError as error:
        raise DataError(f"{error}; is it a LeRobot dataset?") from error
    features = info.get("features", {})
    if not isinstance(features, dict):
        raise DataError(f"{path}: features are {type(features).__name__}, need an object")
    for name, feature in features.items():
        if not isinstance(feature, dict):
            raise DataError(f"{path}: feature {name} is {feature!r:.60}, need an object")
    return info


def _tasks(directory: Path) -> dict[int, str]:
    """The text of every task.

    Raises:
        DataError: the file of tasks is damaged; names it and the line.
    """
    lines = directory / "meta" / "tasks.jsonl"
    if lines.is_file():
        return _read_lines(lines, "task", lambda row: {int(row["task_index"]): str(row["task"])})
    table = directory / "meta" / "tasks.parquet"
    if not table.is_file():
        return {}
    import pyarrow.parquet as pq

    # Version 3 keeps the text in the index of a pandas frame.
    return {
        int(row["task_index"]): str(row.get("task", row.get("__index_level_0__", "")))
        for row in pq.read_table(table).to_pylist()
    }


def _seeds(directory: Path) -> dict[int, int]:
    """The seed of every episode that has one.

    Raises:
        DataError: the file of episodes is damaged; names it and the line.
    """
    path = directory / "meta" / "episodes.jsonl"
    if not path.is_file():
        return {}
    return _read_lines(
        path,
        "episode",
        lambda row: {int(row["episode_index"]): int(row["seed"])} if "seed" in row else {},
    )


def _read_lines(path: Path, what: str, read: Callable[[Json], dict[int, Json]]) -> dict[int, Json]:
    """Read the lines of a file into values by number; `read` returns those of one line."""
    found: dict[int, Json] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            if line.strip():
                found |= read(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path} line {number} is no {what}, but {line!r:.60}") from error
    return found


def _write_lines(path: Path, lines: Sequence[Json]) -> None:
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
