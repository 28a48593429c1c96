"""What a teacher gave before the run: stored outputs, texts it wrote, and labels of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.tables import build
from lmtool.data.split import Rows, SplitData
from lmtool.data.tables import read_table
from lmtool.distillation.configs import StandardConfig
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.seen import Teacher
from lmtool.distillation.store.folder import Shelf, open_or_make
from lmtool.distillation.store.outputs import Format, temperatures_of
from lmtool.distillation.store.teacher import CutTeacher, StoredTeacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Inference
from lmtool.learners.held_out import evaluation_tokens
from lmtool.models.configs import ModelConfig
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.provenance import Contents
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.kinds.labels import joined
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.bases import digest

# What the outputs of a teacher depend on, by which a store of them is known again.


# Fields of a task that change neither which rows there are (their contents are hashed) nor how they are read.
_BESIDE = frozenset(
    [
        "dropout",
        "loss",
        "label_smoothing",
        "metric",
        "metrics",
        "validation",
        "test",
        "path",
        "hub",
        "embedded",
        "files",
        "header",
        "aliases",
        "ragged_rows",
        "train_examples",
        "shots_per_class",
        "generation",
        "generate_examples",
        "scheduled_sampling",
        "bad_answers",
    ]
)


def stored(
    config: PretrainConfig | FinetuneConfig, teacher: Teacher, tokenizer: Tokenizer, contents: Contents
) -> Teacher:
    """A teacher that answers from a store, or has its predictions cut, as the configuration wants it; else itself.
    tokenizer: the student's. contents: hashes of the data."""
    section = config.distill
    if not isinstance(section, StandardConfig):
        return teacher
    top_k, temperatures = section.top_k, temperatures_of(list(section.terms.values()))
    read = teacher.learner, teacher.precision, teacher.origin, teacher.longest, teacher.reads_batches
    if not section.store:
        return teacher if top_k is None else CutTeacher(*read, top_k=top_k, temperatures=temperatures)
    states = "states" in section.terms
    known_by = "tokens" if teacher.reads_batches else "row"
    written = _generation(config) if section.targets != "gold" else None
    return StoredTeacher(
        *read,
        shelf=shelf_of(config, "outputs"),
        layout=Format(section.store_dtype, top_k, temperatures),
        of={
            **outputs_depend_on(config, teacher, contents),
            "states": states,
            "examples_known_by": known_by,
            "targets": {"targets": section.targets, "generation": written},
        },
        states=states,
        fixed=isinstance(config, FinetuneConfig),
        seed=config.seed,
        tokenizers=both_tokenizers(teacher, tokenizer, config.model),
    )


def _generation(config: PretrainConfig | FinetuneConfig) -> dict[str, Any] | None:
    """How a task's texts are written."""
    generation = config.learns.text_generation if isinstance(config.learns, TaskConfig) else None
    return None if generation is None else generation.model_dump(mode="json")


def shelf_of(config: PretrainConfig | FinetuneConfig, part: str) -> Shelf:
    """Where what a teacher gave is kept. part: of a folder that a user named."""
    store = config.distill.store if isinstance(config.distill, StandardConfig) else None
    return Shelf(str(Path(store) / part) if isinstance(store, str) else None, config.cache_dir)


def layout_of(model: ModelConfig) -> dict[str, Any]:
    """What decides how a batch is laid out for a model."""
    start = model.start_role
    return {"architecture": model.architecture, "text_format": model.text_format, "start": start}


def _model(teacher: Teacher) -> ModelConfig:
    return teacher.learner.backbone.config


def both_tokenizers(teacher: Teacher, tokenizer: Tokenizer, model: ModelConfig) -> dict[str, str]:
    """The teacher's and the student's, for the first screen where these differ. model: the student's."""
    theirs = _named(teacher.learner.tokenizer, _model(teacher))
    return {} if teacher.reads_batches else {"teacher_tokenizer": theirs, "student_tokenizer": _named(tokenizer, model)}


def _named(tokenizer: Tokenizer, model: ModelConfig) -> str:
    """A tokenizer, for the first screen."""
    return f"{tokenizer.vocab_size:,} tokens, laid out as {model.text_format}"


def outputs_depend_on(config: PretrainConfig | FinetuneConfig, teacher: Teacher, contents: Contents) -> dict[str, Any]:
    """As plain data, by what a user calls it."""
    learner = teacher.learner
    learned = config.task if isinstance(config, FinetuneConfig) else config.objective
    return {
        "teacher": digest(learner.state_dict()),
        "teacher_model": _model(teacher).model_dump(mode="json"),
        "precision": teacher.precision.name,
        "data": {origin: _of_training(hashes) for origin, hashes in contents.items()},
        "task" if isinstance(config, FinetuneConfig) else "objective": _without(learned.model_dump(mode="json")),
        "tokenizer": learner.tokenizer.fingerprint,
        "max_length": config.max_length,
        "layout": layout_of(_model(teacher)),
        **({} if isinstance(config, FinetuneConfig) else {"documents": config.data.documents}),
    }


def _of_training(hashes: Mapping[str, Any]) -> dict[str, Any]:
    """What is trained on, of the hashes of data."""
    return {name: value for name, value in hashes.items() if name.startswith(("train", "unlabelled", "text"))}


def _without(section: Any) -> Any:
    """A task's section, and the members of a mixture, without what its examples do not depend on."""
    if isinstance(section, dict):
        return {name: _without(value) for name, value in section.items() if name not in _BESIDE}
    return [_without(value) for value in section] if isinstance(section, list) else section


# Sequence-level distillation (Kim and Rush 2016, "Sequence-Level Knowledge Distillation", section 3.2): the student
# of a task that writes texts learns what its teacher writes, in the place of the targets of the training rows or
# beside them.
#
# The teacher writes once, by the task's generation settings; its texts are stored, for it is text that is learned:
# the student may have another tokenizer.


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


# Predictions of a file as the labels of training rows: those that `lmtool predict output=` writes, or a run's
# predictions.jsonl.


def relabelled(
    config: FinetuneConfig, path: str, data: SplitData, teacher: str = "TEACHER"
) -> tuple[SplitData, dict[str, Any]]:
    """Training data whose rows have the labels of a file, and what the first screen says of it. UserError, with how
    many they are, where training rows have no prediction."""
    task = config.task
    rows, predictions = data.rows[task.name], predictions_of(task, path)
    of_both, of_text = _places(predictions)
    places = [of_both.get(key, of_text.get(key[1], -1)) for key in _keys(rows)]
    missing = [number for number, place in enumerate(places) if place < 0]
    if missing:
        file, line = rows.origin[missing[0]]
        raise UserError(
            f"distill.predictions={path} has a prediction for {len(rows) - len(missing):,} of {len(rows):,} training "
            f"rows; not for {file}:{line}: none has its texts",
            f"lmtool predict checkpoint={teacher} input={file} output={Path(path).stem}_train.jsonl",
        )
    labelled = replace(rows, labels=predictions.labels_at(np.array(places)))
    facts = {"predictions": f"{len(rows):,} of {path}"}
    others = len(predictions) - len(set(places))
    if others:
        facts["predictions of other rows"] = f"{others:,}, not read"
    return replace(data, rows={**data.rows, task.name: labelled}), facts


def predictions_of(task: TaskConfig, path: str) -> Rows:
    """A file of predictions as labelled rows of a task. UserError, naming file and line, where one is no label."""
    table = read_table(Path(path).expanduser())
    columns = {task.aliases.get(name, name): values for name, values in table.columns.items()}
    columns = joined(task, columns, table.origin)
    missing = [name for name in ("prediction", *task.reads) if name not in columns]
    if missing:
        raise UserError(
            f"distill.predictions={path} has no column {missing[0]}; it has {', '.join(columns)}",
            "give what lmtool predict output= writes of the task's rows",
        )
    kind: Any = build(task)
    labels = kind.labels_of_predictions(columns)
    kept = {name: values for name, values in columns.items() if name not in ("gold", "prediction", "score", "split")}
    return kind.rows({**kept, task.label: labels}, table.origin, labelled=True)


def _keys(rows: Rows) -> list[tuple[str, str]]:
    """Of each row its number, and all that is read of it."""
    texts = zip(*rows.columns.values(), strict=True)
    return [(str(number), json.dumps(own)) for number, own in zip(rows.ids, texts, strict=True)]


def _places(predictions: Rows) -> tuple[Mapping[tuple[str, str], int], Mapping[str, int]]:
    """The places of predictions by number and texts; and by texts alone, where no two of these differ."""
    keys = _keys(predictions)
    assert predictions.labels is not None
    labels = [repr(label) for label in predictions.labels]
    of_text: dict[str, int] = {}
    for place, (_, text) in enumerate(keys):
        first = of_text.setdefault(text, place)
        if first >= 0 and labels[first] != labels[place]:
            of_text[text] = -1
    return {key: place for place, key in enumerate(keys)}, of_text
