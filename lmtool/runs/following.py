"""The run folder as seen by ranks above 0: rank 0 writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from lmtool.runs.files import plain_data
from lmtool.runs.run_folder import RunFolder


class FollowedFolder(RunFolder):
    """The folder of a run that another process has locked and writes. This process only reads checkpoints.

    result: of a finished run, as read by that process.
    """

    writes: ClassVar[bool] = False

    def __init__(self, path: Path, config: Mapping[str, object], result: dict[str, object] | None):
        self.path, self._result = path, result
        self.config = plain_data(dict(config))
        self._resume_point: Path | None = None
        self.row_counts = Counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def extends(self) -> bool:
        return False

    def follow(self, resume_point: Path | None) -> None:
        """Resumes from the checkpoint that rank 0 selected."""
        self._resume_point = resume_point

    def resume_point(self, report: Callable[[str], None] | None = None) -> Path | None:
        return self._resume_point

    def result(self) -> dict[str, object] | None:
        return self._result

    def announce(self) -> None: ...

    def write_environment(self, arguments: Sequence[str], metadata: Mapping[str, object] | None = None) -> None: ...

    def write_json(self, name: str, content: object) -> None: ...

    def write_rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> None: ...

    def append_log(self, line: str) -> None: ...

    def log(self, text: str) -> None: ...

    def begin_at(self, step: int, rows: Iterable[Mapping[str, object]]) -> None: ...

    def append(self, row: Mapping[str, object]) -> None: ...

    def sync(self) -> None: ...

    def missing_rows(self, expected: Mapping[str, int], step: int) -> str | None:
        return None

    def drop_rows_after(self, step: int) -> None: ...
