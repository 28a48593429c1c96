"""The heads of tasks as transformers publishes them: a class a kind of output. Imports no torch.

To add one: its line in `HEADS`, its class with its tensors in `PUBLISHED.classes` of each family that has it, and the
section of a task that such a folder stands for, in `classifiers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CLASSIFIER, QUESTION_ANSWERING, WORDS = "classifier", "question_answering", "token_classifier"
CHOICES = "multiple_choice"
DECISIONS = {"thresholds": "transformers decides at .5", "null_threshold": "transformers compares with 0"}
"""Tensors of a head that turn scores into decisions, and what there is instead of them in transformers: they change no
logits, and have no place in a published folder."""


@dataclass(frozen=True)
class TaskHead:
    """name: of the head in our tensors where no task is known. suffix: the end of the class in transformers; XLNet's
    class of question answering adds "Simple" to it. kinds: those of the tasks whose heads are exported so. tokens:
    whether it gives logits of each token, not of a whole text."""

    name: str
    suffix: str
    kinds: tuple[str, ...]
    tokens: bool = False


HEADS: dict[str, TaskHead] = {
    head.name: head
    for head in (
        TaskHead(CLASSIFIER, "ForSequenceClassification", ("classification", "multi_label", "regression")),
        TaskHead(QUESTION_ANSWERING, "ForQuestionAnswering", ("extractive_qa",), tokens=True),
        TaskHead(WORDS, "ForTokenClassification", ("token_classification",), tokens=True),
        TaskHead(CHOICES, "ForMultipleChoice", ("multiple_choice",)),
    )
}
"""By name."""
UNPUBLISHED: tuple[str, ...] = ("span_classification",)
"""Kinds whose heads transformers has no class for; one that is named nowhere is taken for a kind of classification."""


def head_of_class(config: Mapping[str, Any]) -> TaskHead | None:
    """The head that a config.json says its folder has; None where it names no class, or one of no task."""
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        for head in HEADS.values():
            if str(name).removesuffix("Simple").endswith(head.suffix):
                return head
    return None


def head_of_task(task: Mapping[str, Any]) -> TaskHead | None:
    """The published head of a `task` section, by its kind; None where transformers has none."""
    kind = task.get("kind")
    if kind in UNPUBLISHED:
        return None
    return next((head for head in HEADS.values() if kind in head.kinds), HEADS[CLASSIFIER])
