"""What `lmtool inspect` shows of a task's examples: the texts of their rows, and labels by their names."""

from __future__ import annotations

from typing import Any

from lmtool.learners.inspection import Drawn, Inspector
from lmtool.learners.tally import Tally


class TaskInspector(Inspector):
    """Of the examples of a task."""

    def texts(self, drawn: Drawn) -> list[list[str]]:
        """The columns of each row, where the examples hold them; words with a space between them."""
        held, row_N = getattr(self.examples, "rows", None), drawn.batch.rows
        if held is None or row_N is None:
            return super().texts(drawn)
        numbers = row_N.numpy()[drawn.borders[:-1]].tolist()
        rows = [[values[number] for values in held.columns.values()] for number in numbers]
        return [[" ".join(cell) if _is_words(cell) else str(cell) for cell in row] for row in rows]

    def fact(self, tally: Tally) -> str:
        """How long examples are, and how many are cut."""
        length, cut = tally.measured("tokens an example"), tally.measured("truncated fraction")
        if length is None:
            return ""
        words = f"an example has {length:.0f} tokens on average"
        return words if cut is None else f"{words}; {cut:.1%} are cut to max_length={self.max_length}"

    def label(self, value: Any, of_place: bool) -> Any:
        return self.learner.kind.shown(value)


def _is_words(cell: Any) -> bool:
    return isinstance(cell, list) and all(isinstance(word, str) for word in cell)


class PromptInspector(TaskInspector):
    """Of prompts: classes with their words."""

    def label(self, value: Any, of_place: bool) -> Any:
        if of_place:  # of masked texts beside the prompts
            return Inspector.label(self, value, of_place)
        return f"{super().label(value, of_place)}: {self.learner.config.words[int(value)]}"


class AnswerInspector(TaskInspector):
    """Of questions and windows."""

    def label(self, value: Any, of_place: bool) -> Any:
        return f"tokens {value[0]} to {value[1]}"


class ChoiceInspector(TaskInspector):
    """Of the pairs of a row's choices."""

    def label(self, value: Any, of_place: bool) -> Any:
        return "right" if value else "wrong"


class TextPairInspector(TaskInspector):
    """Of sources and targets: labels are tokens."""

    def check_plan(self, tally: Tally) -> None:
        """What is cut. A source may be shorter then than max_length: its target has room too."""
        facts = self.examples.facts()
        tally.note("truncated fraction", facts["truncated"], facts["examples"])

    def label(self, value: Any, of_place: bool) -> Any:
        return Inspector.label(self, value, of_place)
