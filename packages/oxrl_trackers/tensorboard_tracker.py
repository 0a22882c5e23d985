"""TensorBoard: event files in RUN/tensorboard, one more with every start.

tensorboard --logdir runs
"""

from __future__ import annotations

import time

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportMissingImports]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportMissingImports]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportMissingImports]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

from oxrl.runs.files import Json
from oxrl.runs.tracker_process import Place, TrackedRun, numbers


class TensorBoardTracker(Place):
    """See `oxrl.runs.tracker_process.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory / "tensorboard.json")
        self._writer = EventFileWriter(str(run.directory / "tensorboard"))
        if self.logged < 0:
            self._add(0, [_text("config", _as_markdown(run.params))])

    def log(self, records: list[Json]) -> None:
        for record in records:
            values = numbers(record).items()
            self._add(record["step"], [Summary.Value(tag=k, simple_value=v) for k, v in values])
        self._writer.flush()
        self.note(records[-1]["step"])

    def close(self, outcome: str) -> None:
        self._add(max(self.logged, 0), [_text("outcome", outcome)])
        self._writer.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)


def _text(tag: str, text: str) -> Summary.Value:
    """A text for TensorBoard's text page."""
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _as_markdown(params: Json) -> str:
    """A table of the config."""
    rows = [f"| {path} | {value} |" for path, value in params.items()]
    return "\n".join(["| field | value |", "|---|---|", *rows])
