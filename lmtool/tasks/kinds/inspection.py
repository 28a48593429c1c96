"""What `lmtool inspect` shows of a task's examples: the texts of their rows, and classes by their names."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.learners.inspection import Inspector


class TaskInspector(Inspector):
    """Of the examples of a task."""

    def texts(self, rows: np.ndarray) -> list[list[str]]:
        """The columns of each row, where the examples hold them."""
        held = getattr(self.examples, "rows", None)
        if held is None:
            return super().texts(rows)
        return [[_shown(column[int(row)]) for column in held.columns.values()] for row in rows["row"]]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


class AnswerInspector(TaskInspector):
    """Of questions and windows."""

    def label(self, value: Any, of_place: bool) -> Any:
        return f"tokens {value[0]} to {value[1]}"


class ChoiceInspector(TaskInspector):
    """Of the pairs of a row's choices."""

    def label(self, value: Any, of_place: bool) -> Any:
        return "right" if value else "wrong"


class SequenceInspector(TaskInspector):
    """Of a task with one label a row."""

    def label(self, value: Any, of_place: bool) -> Any:
        return self.learner.kind.shown(value)
