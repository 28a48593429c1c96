"""The teachers of a distilled run: models, peers, and their stored outputs and texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.saved import JsonObject
from lmtool.config.tables import build
from lmtool.costs.memory_of_run import model_of_peers
from lmtool.data.examples import Rows, SplitData
from lmtool.distillation.configs import CodistillationConfig, StandardConfig
from lmtool.distillation.configs.base import requires_same_inputs
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.recording import Teacher
from lmtool.distillation.store.folder import StoreLocation, open_or_make
from lmtool.distillation.store.outputs import Format, temperatures_of
from lmtool.distillation.teachers import HardLabels, StoredTeacher, TopWordsTeacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Inference
from lmtool.learners.held_out import evaluation_tokens
from lmtool.models.configs import ModelConfig
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig
from lmtool.resolver.teachers import TeacherSpec, one_vocabulary, task_of
from lmtool.session.labeled import relabel
from lmtool.session.open_run import OpenRun, prior_weights, start_weights, starting_tokenizer
from lmtool.session.provenance import Contents
from lmtool.session.trained import read_trained
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.labels import LoadedHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.assemble import assemble
from lmtool.weights.base import digest

# Fields of a task that do not change how its rows are read. The contents of the rows are hashed.
_IRRELEVANT_FIELDS = frozenset(
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
    """The teacher as `distill.store` and `distill.top_k` say: answering from a store, with its predictions truncated to
    the top k, or unchanged. tokenizer: the student's. contents: hashes of the data."""
    section = config.distill
    if not isinstance(section, StandardConfig):
        return teacher
    top_k, temperatures = section.top_k, temperatures_of(section.terms.values())
    read = teacher.learner, teacher.precision, teacher.origin, teacher.longest, teacher.reads_batches
    if not section.store:
        return teacher if top_k is None else TopWordsTeacher(*read, top_k=top_k, temperatures=temperatures)
    states = "states" in section.terms
    generation = config.learns.text_generation if isinstance(config.learns, TaskConfig) else None
    written = None if generation is None or section.targets == "gold" else generation.model_dump(mode="json")
    return StoredTeacher(
        *read,
        location=store_location(config, "outputs"),
        layout=Format(section.store_dtype, top_k, temperatures),
        identity={
            **outputs_depend_on(config, teacher, contents),
            "states": states,
            "examples_known_by": "tokens" if teacher.reads_batches else "row",
            "targets": {"targets": section.targets, "generation": written},
        },
        states=states,
        fixed=isinstance(config, FinetuneConfig),
        seed=config.seed,
        tokenizers=both_tokenizers(teacher, tokenizer, config.model),
    )


def store_location(config: PretrainConfig | FinetuneConfig, part: str) -> StoreLocation:
    """The storage of teachers' outputs: the cache, or a subfolder (`part`) of the folder in `distill.store`."""
    store = config.distill.store if isinstance(config.distill, StandardConfig) else None
    return StoreLocation(str(Path(store) / part) if isinstance(store, str) else None, config.cache_dir)


def layout_of(model: ModelConfig) -> JsonObject:
    """The properties of a model that decide the layout of its batches."""
    start = model.start_role
    return {"architecture": model.architecture, "text_format": model.text_format, "start": start}


def _model(teacher: Teacher) -> ModelConfig:
    return teacher.learner.backbone.config


def both_tokenizers(teacher: Teacher, tokenizer: Tokenizer, model: ModelConfig) -> dict[str, str]:
    """The tokenizers of teacher and student for the first screen; empty if they are the same. model: the student's."""
    if teacher.reads_batches:
        return {}
    tokenizers = {
        "teacher_tokenizer": (teacher.learner.tokenizer, _model(teacher)),
        "student_tokenizer": (tokenizer, model),
    }
    return {
        name: f"{pieces.vocab_size:,} tokens, laid out as {reader.text_format}"
        for name, (pieces, reader) in tokenizers.items()
    }


def outputs_depend_on(config: PretrainConfig | FinetuneConfig, teacher: Teacher, contents: Contents) -> JsonObject:
    """Everything that a teacher's outputs depend on, as plain data, which identifies their store."""
    learner = teacher.learner
    learned = config.task if isinstance(config, FinetuneConfig) else config.objective
    return {
        "teacher": digest(learner.state_dict()),
        "teacher_model": _model(teacher).model_dump(mode="json"),
        "precision": teacher.precision.name,
        "data": {
            origin: {name: value for name, value in hashes.items() if name.startswith(_TRAINING)}
            for origin, hashes in contents.items()
        },
        "task" if isinstance(config, FinetuneConfig) else "objective": _without(learned.model_dump(mode="json")),
        "tokenizer": learner.tokenizer.fingerprint,
        "max_length": config.max_length,
        "layout": layout_of(_model(teacher)),
        **({} if isinstance(config, FinetuneConfig) else {"documents": config.data.documents}),
    }


_TRAINING = ("train", "unlabelled", "text")
"""Prefixes of the hashes of training data."""


def _without(section: Any) -> Any:
    """A `task` section, including the members of a mixture, without `_IRRELEVANT_FIELDS`."""
    if isinstance(section, dict):
        return {name: _without(value) for name, value in section.items() if name not in _IRRELEVANT_FIELDS}
    return [_without(value) for value in section] if isinstance(section, list) else section


# Sequence-level distillation (Kim and Rush 2016, "Sequence-Level Knowledge Distillation", section 3.2): for a task that
# generates texts, the student learns the teacher's texts instead of the targets of the training rows, or in addition to
# them.
#
# The teacher generates once, with the task's generation settings. Texts are stored, not tokens, because the student may
# have another tokenizer.


_FILE = "texts.jsonl"

Splits = Mapping[str, SplitData]


def with_teacher_texts(
    run: OpenRun, student: BaseLearner, distilled: Distilled | None, splits: Splits, contents: Contents
) -> tuple[Splits, JsonObject]:
    """The splits with the teacher's texts for the training rows, and metadata for the first screen. contents: hashes of
    the data."""
    config, section = run.config, run.config.distill
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
        store_location(config, "texts"), of, lambda folder: _write(folder, teacher, rows, config, run), run.output.stage
    )
    lines = (opened_store.folder / _FILE).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    replaced, metadata = taught(student, rows, texts, section.targets == "both")
    tokenizers = both_tokenizers(teacher, student.tokenizer, config.model)
    train = replace(splits["train"], rows={**splits["train"].rows, config.task.name: replaced})
    return {**splits, "train": train}, {"teacher_texts": {**opened_store.screen_metadata(), **metadata, **tokenizers}}


def taught(student: BaseLearner, rows: Rows, texts: Sequence[str], alongside: bool) -> tuple[Rows, JsonObject]:
    """Rows with a teacher's texts as their targets, and metadata for the first screen. A row keeps its target if the
    text is empty or, for a task with labels, not a label. alongside: keep all rows, and append those whose text differs
    from the target."""
    assert rows.labels is not None
    labels = [student.label_of(text) for text in texts]
    usable = np.array([label is not None for label in labels], dtype=bool)
    # The label of a row with several targets is a tuple, of which the first is compared.
    pairs = zip(labels, rows.labels, strict=True)
    compared = [(label[0], gold[0]) if isinstance(label, tuple) else (label, gold) for label, gold in pairs]
    other = np.array([label is not None and label != gold for label, gold in compared])
    metadata: JsonObject = {"rows": len(rows), "other_than_gold": int(other.sum())}
    if not usable.all():
        count = f"{len(rows) - int(usable.sum()):,} of {len(rows):,}"
        metadata["warnings"] = [f"{count} texts of the teacher are empty or no label: these rows keep their targets"]
    if alongside:
        extra = np.flatnonzero(other)
        taken = rows.take(np.concatenate([np.arange(len(rows)), extra]))
        return replace(taken, labels=_joined(rows.labels, [labels[row] for row in extra])), metadata
    both = [label if label is not None else gold for label, gold in zip(labels, rows.labels, strict=True)]
    return replace(rows, labels=_joined(rows.labels, both, only_extra=True)), metadata


def _joined(labels: Any, extra: Sequence[Any], only_extra: bool = False) -> Any:
    """Labels followed by extra ones, in the same container. only_extra: return just the extra ones."""
    if isinstance(labels, np.ndarray):
        values = np.array(extra, dtype=labels.dtype)
        return values if only_extra else np.concatenate([labels, values])
    return [*(() if only_extra else labels), *extra]


def _write(folder: Path, teacher: Teacher, rows: Rows, config: FinetuneConfig, run: OpenRun) -> JsonObject:
    """Write the file with the teacher's text for each row."""
    length = min(config.max_length, teacher.longest or config.max_length)

    def progress(done: int, total: int) -> None:
        run.output.stage("the teacher writes", done, total)

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


TrainingConfig = PretrainConfig | FinetuneConfig


def build_peers(
    config: TrainingConfig,
    distill: CodistillationConfig,
    tokenizer: Tokenizer,
    run_heads: Mapping[str, LoadedHead] | None = None,
) -> list[BaseLearner]:
    """The peers of codistillation, each initialized with its own seed. run_heads: by task, its head in the run's
    checkpoint. UserError if their weights cannot be read or do not fit the run."""
    peer_config = _peer_config(config, distill, tokenizer)
    heads = run_heads if peer_config.checkpoint == config.checkpoint else None
    peers = []
    for number in range(1, distill.learners):
        seeded = peer_config.model_copy(update={"seed": config.seed + number})
        prior = prior_weights(seeded) if isinstance(seeded, FinetuneConfig) else []
        learner, _ = assemble(seeded, tokenizer, start_weights(seeded, heads), earlier=prior)
        peers.append(learner)
    return peers


def _peer_config(config: TrainingConfig, distill: CodistillationConfig, tokenizer: Tokenizer) -> TrainingConfig:
    """The run's configuration with the model and the checkpoint of the peers."""
    if distill.model is not None:
        config = config.model_copy(update={"model": distill.model, "checkpoint": None})
        if isinstance(config, FinetuneConfig) and config.tuning.name != "full":
            raise UserError(
                f"tuning={config.tuning.name} edits pretrained weights, but those of distill.model are random",
                "set tuning=full, or distill.checkpoint=RUN instead of distill.model",
            )
        return config
    if distill.checkpoint is None:
        return config
    model = model_of_peers(config, distill)
    for need in requires_same_inputs(f"distill.checkpoint={distill.checkpoint}", model):
        if not need.offer.holds(config.model):
            raise UserError(need.problem(config.model).message, "use another checkpoint, or omit it")
    config = config.model_copy(update={"model": model, "checkpoint": distill.checkpoint})
    peer_tokenizer = starting_tokenizer(config)
    if peer_tokenizer is not None and not peer_tokenizer.same_encoding(tokenizer):
        raise UserError(
            f"distill.checkpoint={distill.checkpoint} has another tokenizer, but peers read the same batches",
            f"set tokenizer=folder tokenizer.path={distill.checkpoint}, or use another checkpoint",
        )
    return config


def distilled(
    config: TrainingConfig,
    student: BaseLearner,
    tokenizer: Tokenizer,
    precision: Precision,
    contents: Contents,
    heads: Mapping[str, LoadedHead] | None = None,
) -> Distilled | None:
    """The distillation of a run; None without distillation. contents: hashes of the data. heads: by task, its head in
    the run's starting checkpoint. UserError if a teacher cannot be read or does not fit the student."""
    if isinstance(config.distill, CodistillationConfig):
        return build(config.distill, student, build_peers(config, config.distill, tokenizer, heads))
    if not config.distill.checkpoints and config.distill.name == "none":
        return None
    predictions = config.distill.predictions if isinstance(config.distill, StandardConfig) else None
    if predictions is not None and isinstance(config, FinetuneConfig):
        labels = HardLabels(student, precision, predictions, relabel=partial(relabel, config, predictions))
        return build(config.distill, student, [labels])
    teachers = [teacher_of(config, path, tokenizer, precision) for path in config.distill.checkpoints]
    return build(config.distill, student, [stored(config, teacher, tokenizer, contents) for teacher in teachers])


def teacher_of(config: TrainingConfig, path: str, tokenizer: Tokenizer, precision: Precision) -> Teacher:
    """A trained checkpoint with the student's objective or tasks, or those members of a mixture that it was trained
    for. It reads the student's batches if tokenizer, layout and length fit, otherwise the same examples."""
    trained = read_trained(path, config.offline, precision)
    same = trained.tokenizer.same_encoding(tokenizer)
    if one_vocabulary(config.distill, config.learns) and not same:
        raise UserError(
            f"distill.teacher={path} does not have the tokenizer of the student: it cannot read the student's batches",
            f"set tokenizer=folder tokenizer.path={path}, or use a teacher with the student's tokenizer",
        )
    known, student_learns = TeacherSpec(path, trained.saved), config.learns
    parts: list[Any] = []
    heads: dict[str, LoadedHead] = {}
    for part in student_learns.parts():
        if not known.teaches(part):
            continue
        task = task_of(part)
        head = None if task is None else known.head_for(task)
        if task is None or head is None:
            parts.append(part)
            continue
        heads[task.name] = head
        without_auxiliaries = known.without_auxiliaries(task.with_head(head.form))
        parts.append(without_auxiliaries if task is part else part.model_copy(update={"task": without_auxiliaries}))
    if not parts:
        raise UserError(
            f"distill.teacher={path} was trained for nothing that the student learns", "use another teacher"
        )
    learner = trained.learner(student_learns.of_parts(parts), heads)
    reads_batches = same and layout_of(trained.config.model) == layout_of(config.model)
    reads_batches = reads_batches and config.max_length <= trained.config.model.max_positions
    return Teacher(learner.requires_grad_(False), precision, path, trained.longest, reads_batches)
