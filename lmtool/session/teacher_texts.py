"""Sequence-level distillation: the student learns texts that its teacher generates for the training rows, instead of
their targets or in addition to them (distill.targets=).

Kim and Rush 2016, "Sequence-Level Knowledge Distillation", section 3.2. The teacher generates the texts once, with the
settings in task.generation. They are stored as texts, not tokens, because the student may have another tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.recording import Teacher
from lmtool.distillation.store.folder import open_or_make
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Inference
from lmtool.learners.held_out import evaluation_tokens
from lmtool.resolver.commands import FinetuneConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.provenance import Contents
from lmtool.session.teachers import describe_tokenizers, outputs_depend_on, store_location

_FILE = "texts.jsonl"

Splits = Mapping[str, SplitData]


def with_teacher_texts(
    run: OpenRun, student: BaseLearner, distilled: Distilled | None, splits: Splits, contents: Contents
) -> tuple[Splits, JsonObject]:
    """Replaces the targets of the training rows with the teacher's texts if distill.targets says so. Also returns
    metadata for the first screen."""
    config, distill = run.config, run.config.distill
    if not isinstance(distill, StandardConfig) or distill.targets == "gold" or distilled is None:
        return splits, {}
    assert isinstance(config, FinetuneConfig)
    (teacher,) = distilled.teachers
    generation, rows = student.responder().generation, splits["train"].rows[config.task.name]
    if generation is None:
        raise UserError(
            f"a model trained on {student.config.name} cannot generate a text per row",
            "set task.head=text_to_text, or use a task with task.kind=seq2seq",
        )
    identity = {
        **outputs_depend_on(config, teacher, contents),
        "longest": teacher.longest,
        "generation": generation.model_dump(mode="json"),
        "seed": config.seed if generation.temperature else None,
    }
    store = open_or_make(
        store_location(config, "texts"),
        identity,
        lambda folder: _write_texts(folder, teacher, rows, config, run),
        run.output.stage,
    )
    lines = (store.folder / _FILE).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    new_rows, metadata = replace_targets(student, rows, texts, keep_gold=distill.targets == "both")
    tokenizers = describe_tokenizers(teacher, student.tokenizer, config.model)
    train = replace(splits["train"], rows={**splits["train"].rows, config.task.name: new_rows})
    return {**splits, "train": train}, {"teacher_texts": {**store.screen_metadata(), **metadata, **tokenizers}}


def replace_targets(student: BaseLearner, rows: Rows, texts: Sequence[str], keep_gold: bool) -> tuple[Rows, JsonObject]:
    """Makes a teacher's texts, one per row, the targets of training rows. Also returns metadata for the first screen.

    A row keeps its target if the teacher's text is empty or, for a task with labels, not a label. keep_gold: whether to
    keep all rows with their own targets, and to append copies with the teacher's texts where these differ.
    """
    assert rows.labels is not None
    labels = [student.responder().label_of(text) for text in texts]
    usable = np.array([label is not None for label in labels], dtype=bool)
    # For a row with several reference texts, the label is a tuple, whose first text is compared.
    pairs = zip(labels, rows.labels, strict=True)
    compared_pairs = [(label[0], gold[0]) if isinstance(label, tuple) else (label, gold) for label, gold in pairs]
    differs = np.array([label is not None and label != gold for label, gold in compared_pairs])
    metadata: JsonObject = {"rows": len(rows), "other_than_gold": int(differs.sum())}
    if not usable.all():
        count = f"{len(rows) - int(usable.sum()):,} of {len(rows):,}"
        metadata["warnings"] = [f"the teacher's text is empty or not a label for {count} rows: their targets are kept"]
    if keep_gold:
        appended = np.flatnonzero(differs)
        extended = rows.take(np.concatenate([np.arange(len(rows)), appended]))
        all_labels = [*rows.labels, *(labels[row] for row in appended)]
        return replace(extended, labels=_in_container_of(rows.labels, all_labels)), metadata
    targets = [label if label is not None else gold for label, gold in zip(labels, rows.labels, strict=True)]
    return replace(rows, labels=_in_container_of(rows.labels, targets)), metadata


def _in_container_of(labels: Any, values: list[Any]) -> Any:
    return np.array(values, dtype=labels.dtype) if isinstance(labels, np.ndarray) else values


def _write_texts(folder: Path, teacher: Teacher, rows: Rows, config: FinetuneConfig, run: OpenRun) -> JsonObject:
    max_length = min(config.max_length, teacher.longest or config.max_length)

    def progress(done: int, total: int) -> None:
        run.output.stage("the teacher generates texts", done, total)

    inference = Inference(max_length, evaluation_tokens(config), teacher.precision, progress=progress)
    records = teacher.learner.responder().answers(replace(rows, labels=None), inference).records
    texts = [str(record.get("written", record["prediction"])) for record in records]
    if len(texts) != len(rows):
        raise RuntimeError(f"the teacher generated {len(texts)} texts for {len(rows)} rows")
    lines = (
        json.dumps({"id": row, "text": text}, ensure_ascii=False) for row, text in zip(rows.ids, texts, strict=True)
    )
    (folder / _FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"rows": len(texts)}
