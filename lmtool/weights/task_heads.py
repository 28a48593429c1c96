"""Task heads in transformers' format, and a classifier's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.models.published import unnamed

# Task heads in transformers, one class per kind of output.
#
# To add one: a line in `HEADS`, its class with its tensors in `HF_FORMAT.classes` of each family that has it, and the
# `task` section of such a folder, below.


CLASSIFIER, QUESTION_ANSWERING, WORDS = "classifier", "question_answering", "token_classifier"
CHOICES = "multiple_choice"
DECISIONS = {"thresholds": "transformers decides at .5", "null_threshold": "transformers compares with 0"}
"""Tensors of a head that turn scores into decisions, and what there is instead of them in transformers: they change no
logits, and have no place in a published folder."""


@dataclass(frozen=True)
class TaskHead:
    """name: of the head in our tensors if no task is known. suffix: end of the transformers class; XLNet's class for
    question answering appends "Simple". kinds: task kinds whose heads are exported as this one. tokens: whether it
    has logits for each token instead of a whole text."""

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


def head_of_class(config: JsonMapping) -> TaskHead | None:
    """The task head of a config.json's class; None if it names no class, or one without a task head."""
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        for head in HEADS.values():
            if str(name).removesuffix("Simple").endswith(head.suffix):
                return head
    return None


def head_of_task(task: JsonMapping) -> TaskHead | None:
    """The transformers head for a `task` section, by its kind; None if there is none."""
    kind = task.get("kind")
    if kind in UNPUBLISHED:
        return None
    return next((head for head in HEADS.values() if kind in head.kinds), HEADS[CLASSIFIER])


# A classifier's config.json and its task, both ways.
#
# transformers saves every head under its class: `...ForSequenceClassification` reads texts or pairs and predicts one
# value (one label) or a class (two or more labels, named in `id2label`); if `problem_type` says so, any number of
# classes, each with a probability of at least .5.


# What the labels alone say: one, or several.
_REGRESSION, _CLASSIFICATION = "regression", "single_label_classification"
_MULTI_LABEL = "multi_label_classification"
NUM_CHOICES = "num_choices"
"""Our key of a config.json: how many choices a row has, of which transformers' class says nothing."""


def task_of(config: JsonMapping) -> JsonObject | None:
    """The `task` section for a config.json with a task head; None if lmtool has no such task (see `refusal`). Files
    from 2019 name no class and are taken for classifiers, which only their tensors can tell."""
    if refusal(config) is not None:
        return None
    head = head_of_class(config)
    if head is not None and head.name == QUESTION_ANSWERING:
        return {"kind": "extractive_qa", "name": QUESTION_ANSWERING}
    if head is not None and head.name == CHOICES:
        count = config.get(NUM_CHOICES) or 2
        columns = ["text", *(f"choice{number + 1}" for number in range(count))]
        return {
            "kind": "multiple_choice", "name": CHOICES, "head": "transformers", "text": columns, "choices": count,
        }  # fmt: skip
    names = label_names(config)
    if head is not None and head.name == WORDS:
        words = {"kind": "token_classification", "name": WORDS, "labels": names}
        if all(name == "O" or name[:2] in ("B-", "I-") for name in names):
            return {**words, "scheme": "bio"}
        return {**words, "scheme": "none", "metrics": ["accuracy"], "metric": "accuracy"}
    section = {"name": CLASSIFIER, "head": "transformers"}
    if config.get("problem_type") == _MULTI_LABEL:
        return {"kind": "multi_label", **section, "labels": names, "thresholds": None}
    if len(names) == 1:
        return {"kind": "regression", **section, "label": names[0]}
    return {"kind": "classification", **section, "labels": names}


def refusal(config: JsonMapping) -> str | None:
    """Why lmtool has no task for a head, or None."""
    head = head_of_class(config)
    if head is not None and head.name in (QUESTION_ANSWERING, CHOICES):
        return None
    count, given = len(label_names(config)), config.get("problem_type")
    if head is not None and head.name == WORDS:
        return None if count > 1 else f"its config.json has labels: {count}; words have two tags or more"
    kind = _REGRESSION if count == 1 else _CLASSIFICATION
    if count and given in (None, kind, _MULTI_LABEL):
        return None
    known = f"{_REGRESSION} of one label, {_CLASSIFICATION} of several, {_MULTI_LABEL}"
    return f"its config.json says problem_type={given} with labels: {count}; lmtool has {known}"


def is_multi_label(config: JsonMapping) -> bool:
    """Whether a classifier's classes are not exclusive."""
    head = head_of_class(config)
    return head is not None and head.name == CLASSIFIER and config.get("problem_type") == _MULTI_LABEL


def label_names(config: JsonMapping) -> list[str]:
    """Class names in order. Without `id2label` there are `num_labels` unnamed ones, or two. UserError unless the ids
    are 0, 1, ..."""
    names = config.get("id2label")
    if not names:
        count = config.get("num_labels")
        return [unnamed(number) for number in range(2 if count is None else count)]
    numbers = {str(number) for number in names} if isinstance(names, Mapping) else set()
    if not numbers or numbers != {str(number) for number in range(len(numbers))}:
        raise UserError(f"config.json: id2label={names!r} does not number its labels 0, 1, ...", "copy it again")
    by_number = {int(number): str(name) for number, name in names.items()}
    return [by_number[number] for number in range(len(by_number))]


def labels_of(task: JsonMapping) -> JsonObject:
    """The keys of config.json for what a `task` section predicts: classes by id, one value, or the best of several
    choices."""
    if task.get("kind") == "multiple_choice":
        return {NUM_CHOICES: task["choices"]}
    names = task.get("labels") or [task.get("label") or unnamed(0)]
    if task.get("kind") == "token_classification":
        return _numbered(names)
    return {
        "problem_type": _MULTI_LABEL
        if "thresholds" in task
        else _CLASSIFICATION
        if task.get("labels")
        else _REGRESSION,
        **_numbered(names),
    }


def _numbered(names: Sequence[str]) -> JsonObject:
    return {
        "num_labels": len(names),
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
