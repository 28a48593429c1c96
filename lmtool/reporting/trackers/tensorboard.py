"""TensorBoard: its configuration and its tracker. Events are written by the package tensorboard, since torch's writer
would import torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from lmtool.config.base import JsonMapping
from lmtool.config.registry import component
from lmtool.reporting.trackers.base import RunMetadata, Tracker, TrackerConfig, numbers
from lmtool.system.files import user_path

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


@component("logger", "tensorboard", builder="lmtool.reporting.trackers.tensorboard:TensorBoard")
class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard."""

    package: ClassVar[str | None] = "tensorboard"

    folder: str | None = Field(
        None,
        description="parent folder of the event files, one subfolder per run; null: runs/NAME/tensorboard",
        min_length=1,
    )


FLUSH_SECONDS = 10


class TensorBoard(Tracker):
    """Writes scalars by training step, and the configuration and the result as texts."""

    config: TensorBoardConfig

    def __init__(self, config: TensorBoardConfig, run: RunMetadata):
        super().__init__(config, run)
        self._writer: EventFileWriter
        self._step = run.step

    @property
    def folder(self) -> Path:
        if self.config.folder is None:
            return Path(self.run.folder) / "tensorboard"
        return user_path(self.config.folder) / self.run.name

    def start(self) -> str | None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self.folder), flush_secs=FLUSH_SECONDS)
        if self.run.step:
            # A resumed run: START tells readers to discard the steps of earlier files that this run repeats.
            self._add(self.run.step + 1, session_log=SessionLog(status=SessionLog.START))
        else:
            self._text("config", self.run.config)
        return None

    def write(self, row: JsonMapping) -> None:
        self._step = int(row["step"])
        self._scalars({f"{row['split']}/{name}": value for name, value in numbers(row)})

    def end(self, result: JsonMapping | None) -> str | None:
        if result is not None:
            self._scalars({f"result/{name}": value for name, value in numbers(result)})
            self._text("result", result)
        self._writer.close()
        return None

    def _scalars(self, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(
            self._step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=values[tag]) for tag in values])
        )

    def _text(self, tag: str, content: JsonMapping) -> None:
        """Writes preformatted text, since TensorBoard renders Markdown."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        text = "\n".join(f"    {line}" for line in json.dumps(content, indent=2, ensure_ascii=False).splitlines())
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = create_summary_metadata(display_name=tag, description="")
        self._add(self._step, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _add(self, step: int, **content: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **content))
