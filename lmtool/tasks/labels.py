"""A task's head in a checkpoint, under the labels of a task that it is used for: classes are matched by name.

Published classifiers number their classes as they like (MNLI's three in several orders), so a place says nothing. Names
that differ in case alone are the same; transformers' LABEL_0, LABEL_1, ... are no names, and match by their numbers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmtool.models.published import unnamed
from lmtool.tasks.configs import TaskConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TakenHead:
    """A checkpoint's head for a task.

    name: of the head in the checkpoint. form: how it reads a text (`TaskConfig.head_fields`). labels: the task's
    classes, with those of the head's that the task's data do not hold at the end; None for a value. order: for each of
    them the row of the head, None where they are the same. note: how the classes were matched, "" where their names
    are equal.
    """

    name: str
    form: Mapping[str, Any]
    labels: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None
    note: str = ""

    def tensors(self, tensors: Mapping[str, Tensor], task: str) -> dict[str, Tensor]:
        """A checkpoint's tensors with this head under the name of the task, its rows in the task's order."""
        exits = {".".join(name.split(".")[:2]) for name in tensors if name.startswith("heads.exit_")}
        for heads in ("heads", *exits):
            tensors = self._taken(tensors, heads, task)
        return dict(tensors)

    def _taken(self, tensors: Mapping[str, Tensor], heads: str, task: str) -> dict[str, Tensor]:
        """So of the heads with this prefix: the model's, or those of an early exit."""
        own = f"{heads}.{self.name}."
        taken = {name: tensor for name, tensor in tensors.items() if not name.startswith((own, f"{heads}.{task}."))}
        for name, tensor in tensors.items():
            if name.startswith(own):
                ordered = name.startswith((f"{own}output.", f"{own}thresholds")) and self.order is not None
                taken[f"{heads}.{task}.{name[len(own) :]}"] = tensor[list(self.order or ())] if ordered else tensor
        return taken


def sections_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of the tasks that a saved configuration is of, by their names: its task's, or those of the members
    of a mixture."""
    section = saved.get("task")
    if not isinstance(section, dict):
        return {}
    members = section.get("members")
    parts = [section] if not isinstance(members, list) else [part for part in members if isinstance(part, dict)]
    return {str(part.get("name")): part for part in parts}


def taken_head(section: Mapping[str, Any], task: TaskConfig, partial: bool = False) -> TakenHead | None:
    """The head of a checkpoint's `task` section for another task of the kind; None where their classes differ.

    partial: the task's classes are those its data hold, which need not be all of the head's.
    """
    if section.get("kind") != task.kind:
        return None
    name = str(section.get("name"))
    form = {field: section[field] for field in task.head_fields if field in section}
    if not task.has_classes:
        return TakenHead(name, form)
    theirs, ours = tuple(section.get("labels") or ()), task.class_names or ()
    match = _matched(theirs, ours)
    if match is None or (len(match) < len(theirs) and not partial):
        return None
    rest = [number for number in range(len(theirs)) if number not in match]
    order = (*match, *rest)
    pairs = [(theirs[row], label) for row, label in zip(match, ours, strict=True)]
    note = ", ".join(f"{given} = {label}" for given, label in pairs) if any(a != b for a, b in pairs) else ""
    if note and _unnamed(theirs):
        note += " (by number: the checkpoint does not name its classes)"
    labels = (*ours, *(theirs[number] for number in rest))
    return TakenHead(name, form, labels, None if order == tuple(range(len(theirs))) else order, note)


def _matched(theirs: Sequence[str], ours: Sequence[str]) -> tuple[int, ...] | None:
    """For each of our labels the number of theirs; None where one has none."""
    for written in (str, str.casefold):
        numbers = {written(label): number for number, label in enumerate(theirs)}
        if len(numbers) == len(theirs) and len({written(label) for label in ours}) == len(ours):
            rows = [numbers.get(written(label)) for label in ours]
            if None not in rows:
                return tuple(row for row in rows if row is not None)
    return tuple(range(len(theirs))) if _unnamed(theirs) and len(ours) == len(theirs) else None


def _unnamed(labels: Sequence[str]) -> bool:
    return list(labels) == [unnamed(number) for number in range(len(labels))]
