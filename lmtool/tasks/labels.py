"""Loading a task's head for a task with other labels: classes are matched by name.

Published classifiers number their classes differently (MNLI's three in several orders), so indices are not reliable.
Names are compared without case; transformers' LABEL_0, LABEL_1, ... are not names, and match by index.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmtool.config.base import JsonMapping
from lmtool.models.published import default_label
from lmtool.tasks.configs.base import TaskConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoadedHead:
    """A checkpoint's head for a task.

    name: the head's name in the checkpoint. settings: the saved values of `TaskConfig.head_fields`. labels: the task's
    classes, followed by the head's classes that the task's data lacks; None for heads without classes. order: for each
    class, its row in the head; None if no row moves. note: a sentence on how classes were matched; "" if all names are
    equal.
    """

    name: str
    settings: Mapping[str, object]
    labels: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None
    note: str = ""

    def tensors(self, tensors: Mapping[str, Tensor], task: str) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint, with this head renamed to the task and its rows in the order of the
        task's classes."""
        exits = {".".join(name.split(".")[:2]) for name in tensors if name.startswith("heads.exit_")}
        for heads in ("heads", *exits):
            tensors = self._renamed(tensors, heads, task)
        return dict(tensors)

    def _renamed(self, tensors: Mapping[str, Tensor], heads: str, task: str) -> dict[str, Tensor]:
        prefix = f"{heads}.{self.name}."
        replaced = (prefix, f"{heads}.{task}.")
        renamed = {name: tensor for name, tensor in tensors.items() if not name.startswith(replaced)}
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                ordered = name.startswith((f"{prefix}output.", f"{prefix}thresholds")) and self.order is not None
                renamed[f"{heads}.{task}.{name[len(prefix) :]}"] = tensor[list(self.order or ())] if ordered else tensor
        return renamed


def sections_of(saved: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Returns the task sections in a saved configuration, by name: its task, or the members of its mixture."""
    section = saved.get("task")
    if not isinstance(section, dict):
        return {}
    members = section.get("members")
    parts = [section] if not isinstance(members, list) else [part for part in members if isinstance(part, dict)]
    return {str(part.get("name")): part for part in parts}


def load_head(section: JsonMapping, task: TaskConfig, partial: bool = False) -> LoadedHead | None:
    """Matches a head, described by the `task` section of a checkpoint, to another task of the same kind. None if the
    classes differ.

    partial: whether the task's classes may be a subset of the head's, because they are only those that occur in its
    data.
    """
    if section.get("kind") != task.kind:
        return None
    name = str(section.get("name"))
    settings = {field: section[field] for field in task.head_fields if field in section}
    if not task.has_classes:
        return LoadedHead(name, settings)
    saved, expected = tuple(section.get("labels") or ()), task.class_names or ()
    match = _matched(saved, expected)
    if match is None or (len(match) < len(saved) and not partial):
        return None
    unmatched = [number for number in range(len(saved)) if number not in match]
    order = (*match, *unmatched)
    pairs = [(saved[row], label) for row, label in zip(match, expected, strict=True)]
    note = ", ".join(f"{saved_name} = {label}" for saved_name, label in pairs) if any(a != b for a, b in pairs) else ""
    if note and _has_default_names(saved):
        note += " (by number: the checkpoint does not name its classes)"
    labels = (*expected, *(saved[number] for number in unmatched))
    return LoadedHead(name, settings, labels, None if order == tuple(range(len(saved))) else order, note)


def _matched(saved: Sequence[str], expected: Sequence[str]) -> tuple[int, ...] | None:
    for spelling in (str, str.casefold):
        numbers = {spelling(label): number for number, label in enumerate(saved)}
        if len(numbers) == len(saved) and len({spelling(label) for label in expected}) == len(expected):
            rows = [numbers.get(spelling(label)) for label in expected]
            if None not in rows:
                return tuple(row for row in rows if row is not None)
    return tuple(range(len(saved))) if _has_default_names(saved) and len(expected) == len(saved) else None


def _has_default_names(labels: Sequence[str]) -> bool:
    return list(labels) == [default_label(number) for number in range(len(labels))]
