"""The task heads of transformers, and the keys of config.json that describe them. Imports no torch.

To add a head, add an entry to `HEADS`, add the transformers class with its tensors to `HF_FORMAT.classes` of each
family, and let `task_of` return the `task` section for a folder with this class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.models.published import default_label
from lmtool.system.terminal import counted

CLASSIFIER, QUESTION_ANSWERING, TOKEN_CLASSIFIER = "classifier", "question_answering", "token_classifier"
MULTIPLE_CHOICE = "multiple_choice"
DECISIONS = {"thresholds": "transformers decides at .5", "null_threshold": "transformers compares with 0"}
"""Tensors of a head that turn scores into decisions, with the rule that transformers uses instead. They do not change
logits, and are not exported."""


@dataclass(frozen=True)
class TaskHead:
    """A kind of head in transformers.

    Attributes:
        name: Name of the head in lmtool's tensors, if the checkpoint has no `task` section with another name.
        suffix: Suffix of the transformers class. XLNet's class for question answering appends "Simple".
        kinds: Kinds of tasks whose heads are exported as this head.
        scores_tokens: Whether the head scores each token, and not the whole text.
    """

    name: str
    suffix: str
    kinds: tuple[str, ...]
    scores_tokens: bool = False


HEADS: dict[str, TaskHead] = {
    head.name: head
    for head in (
        TaskHead(CLASSIFIER, "ForSequenceClassification", ("classification", "multi_label", "regression")),
        TaskHead(QUESTION_ANSWERING, "ForQuestionAnswering", ("extractive_qa",), scores_tokens=True),
        TaskHead(TOKEN_CLASSIFIER, "ForTokenClassification", ("token_classification",), scores_tokens=True),
        TaskHead(MULTIPLE_CHOICE, "ForMultipleChoice", ("multiple_choice",)),
    )
}
"""The heads by name."""
UNPUBLISHED: tuple[str, ...] = ("span_classification",)
"""Kinds of tasks without a class in transformers. Kinds that plugins define are exported as classification."""


def head_of_class(config: JsonMapping) -> TaskHead | None:
    """Returns the task head of the class that config.json names; None if it names no class or a class without a task
    head."""
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        for head in HEADS.values():
            if str(name).removesuffix("Simple").endswith(head.suffix):
                return head
    return None


def head_of_task(task: JsonMapping) -> TaskHead | None:
    """Returns the head of transformers for a `task` section, or None if transformers has no such head."""
    kind = task.get("kind")
    if kind in UNPUBLISHED:
        return None
    return next((head for head in HEADS.values() if kind in head.kinds), HEADS[CLASSIFIER])


# In transformers, `...ForSequenceClassification` is a regression if `id2label` has one label, and a classification if
# it has several. With `problem_type` "multi_label_classification", a text has every class whose probability is at least
# .5.
_REGRESSION, _CLASSIFICATION = "regression", "single_label_classification"
_MULTI_LABEL = "multi_label_classification"
NUM_CHOICES = "num_choices"
"""The number of choices per row: a key that lmtool adds to config.json, because transformers does not store it."""


def task_of(config: JsonMapping) -> JsonObject | None:
    """Returns the `task` section for a config.json with a task head; None if lmtool does not support the task
    (`refusal` gives the reason).

    Files from 2019 name no class. They are treated as classifiers; whether they are is visible only in their tensors.
    """
    if refusal(config) is not None:
        return None
    head = head_of_class(config)
    if head is not None and head.name == QUESTION_ANSWERING:
        return {"kind": "extractive_qa", "name": QUESTION_ANSWERING}
    if head is not None and head.name == MULTIPLE_CHOICE:
        count = config.get(NUM_CHOICES) or 2
        columns = ["text", *(f"choice{number + 1}" for number in range(count))]
        section = {"kind": "multiple_choice", "name": MULTIPLE_CHOICE, "head": "transformers"}
        return {**section, "text": columns, "choices": count}
    names = label_names(config)
    if head is not None and head.name == TOKEN_CLASSIFIER:
        token_section = {"kind": "token_classification", "name": TOKEN_CLASSIFIER, "labels": names}
        if all(name == "O" or name[:2] in ("B-", "I-") for name in names):
            return {**token_section, "scheme": "bio"}
        return {**token_section, "scheme": "none", "metrics": ["accuracy"], "metric": "accuracy"}
    section = {"name": CLASSIFIER, "head": "transformers"}
    if config.get("problem_type") == _MULTI_LABEL:
        return {"kind": "multi_label", **section, "labels": names, "thresholds": None}
    if len(names) == 1:
        return {"kind": "regression", **section, "label": names[0]}
    return {"kind": "classification", **section, "labels": names}


def refusal(config: JsonMapping) -> str | None:
    """Returns the reason why lmtool does not support the task of a finetuned model, or None if it does."""
    head = head_of_class(config)
    if head is not None and head.name in (QUESTION_ANSWERING, MULTIPLE_CHOICE):
        return None
    count, problem_type = len(label_names(config)), config.get("problem_type")
    if head is not None and head.name == TOKEN_CLASSIFIER:
        return (
            None if count > 1 else f"config.json has {counted(count, 'label')}; token classification needs two or more"
        )
    kind = _REGRESSION if count == 1 else _CLASSIFICATION
    if count and problem_type in (None, kind, _MULTI_LABEL):
        return None
    supported = f"{_REGRESSION} with one label, {_CLASSIFICATION} with several, {_MULTI_LABEL}"
    return f"config.json has problem_type={problem_type} and {counted(count, 'label')}; lmtool supports {supported}"


def is_multi_label(config: JsonMapping) -> bool:
    """Returns whether config.json describes a classifier that may assign several classes to a text."""
    head = head_of_class(config)
    return head is not None and head.name == CLASSIFIER and config.get("problem_type") == _MULTI_LABEL


def label_names(config: JsonMapping) -> list[str]:
    """Returns the names of the classes in the order of their ids. Without `id2label`, there are `num_labels` classes
    with default names, by default two. Raises UserError unless the ids are 0, 1, ..."""
    names = config.get("id2label")
    if not names:
        count = config.get("num_labels")
        return [default_label(number) for number in range(2 if count is None else count)]
    numbers = {str(number) for number in names} if isinstance(names, Mapping) else set()
    if not numbers or numbers != {str(number) for number in range(len(numbers))}:
        raise UserError(f"config.json: id2label={names!r} does not number the labels 0, 1, ...", "copy the file again")
    by_number = {int(number): str(name) for number, name in names.items()}
    return [by_number[number] for number in range(len(by_number))]


def labels_of(task: JsonMapping) -> JsonObject:
    """Returns the keys of config.json for the labels or choices in a `task` section."""
    if task.get("kind") == "multiple_choice":
        return {NUM_CHOICES: task["choices"]}
    names = task.get("labels") or [task.get("label") or default_label(0)]
    if task.get("kind") == "token_classification":
        return _label_keys(names)
    kind = _CLASSIFICATION if task.get("labels") else _REGRESSION
    return {"problem_type": _MULTI_LABEL if "thresholds" in task else kind, **_label_keys(names)}


def _label_keys(names: Sequence[str]) -> JsonObject:
    return {
        "num_labels": len(names),
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
