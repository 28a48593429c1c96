"""Sequence-level distillation (Kim and Rush 2016, "Sequence-Level Knowledge Distillation", section 3.2): the student of
a task that writes texts learns what its teacher writes, in the place of the targets of the training rows or beside
them.

The teacher writes once, by the task's generation settings; its texts are stored, for it is text that is learned: the
student may have another tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.data.split import Rows, SplitData
from lmtool.distillation.configs import StandardConfig
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.seen import Teacher
from lmtool.distillation.store.folder import open_or_make
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import evaluation_tokens
from lmtool.learners.inference import Inference
from lmtool.schema.run import FinetuneConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.provenance import Contents
from lmtool.session.teacher_store import both_tokenizers, outputs_depend_on, shelf_of

_FILE = "texts.jsonl"

Splits = Mapping[str, SplitData]


def with_texts(
    opened: OpenRun, student: BaseLearner, distilled: Distilled | None, splits: Splits, contents: Contents
) -> tuple[Splits, dict[str, Any]]:
    """The splits with what the teacher writes for the training rows, and what the first screen says of it. contents:
    hashes of the data."""
    config, section = opened.config, opened.config.distill
    if not isinstance(section, StandardConfig) or section.targets == "gold" or distilled is None:
        return splits, {}
    assert isinstance(config, FinetuneConfig)
    (teacher,) = distilled.teachers
    generation, rows = student.writes(), splits["train"].rows[config.task.name]
    of = {
        **outputs_depend_on(config, teacher, contents),
        "longest": teacher.longest,
        "generation": generation.model_dump(mode="json"),
        "seed": config.seed if generation.temperature else None,
    }
    opened_store = open_or_make(
        shelf_of(config, "texts"), of, lambda folder: _write(folder, teacher, rows, config, opened), opened.output.stage
    )
    lines = (opened_store.folder / _FILE).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    replaced, facts = taught(student, rows, texts, section.targets == "both")
    tokenizers = both_tokenizers(teacher, student.tokenizer, config.model)
    train = replace(splits["train"], rows={**splits["train"].rows, config.task.name: replaced})
    return {**splits, "train": train}, {"teacher_texts": {**opened_store.said(), **facts, **tokenizers}}


def taught(student: BaseLearner, rows: Rows, texts: Sequence[str], beside: bool) -> tuple[Rows, dict[str, Any]]:
    """Rows whose targets are what a teacher wrote, and how many these are. beside: the rows as they are, and behind
    them those of which it wrote something else. A text that is empty, or no label where labels are written, teaches
    nothing: that row stays as it is."""
    assert rows.labels is not None
    labels = [student.label_of(text) for text in texts]
    usable = np.array([label is not None for label in labels], dtype=bool)
    other = np.array(
        [label is not None and not _same(label, gold) for label, gold in zip(labels, rows.labels, strict=True)]
    )
    facts: dict[str, Any] = {"rows": len(rows), "other_than_gold": int(other.sum())}
    if not usable.all():
        count = f"{len(rows) - int(usable.sum()):,} of {len(rows):,}"
        facts["warnings"] = [f"{count} texts of the teacher are empty or no label: these rows keep their targets"]
    if beside:
        further = np.flatnonzero(other)
        taken = rows.take(np.concatenate([np.arange(len(rows)), further]))
        return replace(taken, labels=_joined(rows.labels, [labels[row] for row in further])), facts
    both = [label if label is not None else gold for label, gold in zip(labels, rows.labels, strict=True)]
    return replace(rows, labels=_joined(rows.labels, both, alone=True)), facts


def _same(label: Any, gold: Any) -> bool:
    """Whether a teacher's is the one that is learned of a row."""
    return label[0] == gold[0] if isinstance(label, tuple) else label == gold


def _joined(labels: Any, further: Sequence[Any], alone: bool = False) -> Any:
    """Labels in the form of those of the rows. alone: without these."""
    if isinstance(labels, np.ndarray):
        values = np.array(further, dtype=labels.dtype)
        return values if alone else np.concatenate([labels, values])
    return [*(() if alone else labels), *further]


def _write(folder: Path, teacher: Teacher, rows: Rows, config: FinetuneConfig, opened: OpenRun) -> dict[str, Any]:
    """A file of what the teacher writes for each row."""
    length = min(config.max_length, teacher.longest or config.max_length)

    def progress(done: int, total: int) -> None:
        opened.output.stage("the teacher writes", done, total)

    inference = Inference(length, evaluation_tokens(config), teacher.precision, progress=progress)
    records = teacher.learner.answers(replace(rows, labels=None), inference).records
    texts = [str(record.get("written", record["prediction"])) for record in records]
    if len(texts) != len(rows):
        raise RuntimeError(f"{len(texts)} texts for {len(rows)} rows")
    lines = (
        json.dumps({"id": row, "text": text}, ensure_ascii=False) for row, text in zip(rows.ids, texts, strict=True)
    )
    (folder / _FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"rows": len(texts)}
