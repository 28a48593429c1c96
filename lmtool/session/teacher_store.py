"""What the outputs of a teacher depend on, by which a store of them is known again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtool.distillation.cut import CutTeacher
from lmtool.distillation.seen import Teacher
from lmtool.distillation.store.folder import Shelf
from lmtool.distillation.store.outputs import Format, temperatures_of
from lmtool.distillation.store.teacher import StoredTeacher
from lmtool.models.configs import ModelConfig
from lmtool.schema.run import FinetuneConfig, PretrainConfig
from lmtool.session.provenance import Contents
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.bases import digest

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
    section: Any = config.distill
    top_k = getattr(section, "top_k", None)
    temperatures = temperatures_of(list(getattr(section, "terms", {}).values()))
    read = teacher.learner, teacher.precision, teacher.origin, teacher.longest, teacher.reads_batches
    if not getattr(section, "store", None):
        return teacher if top_k is None else CutTeacher(*read, top_k=top_k, temperatures=temperatures)
    states = "states" in getattr(section, "terms", {})
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
    generation = getattr(config.learns, "generation", None)
    return None if generation is None else generation.model_dump(mode="json")


def shelf_of(config: PretrainConfig | FinetuneConfig, part: str) -> Shelf:
    """Where what a teacher gave is kept. part: of a folder that a user named."""
    store = getattr(config.distill, "store", None)
    return Shelf(str(Path(store) / part) if isinstance(store, str) else None, config.cache_dir)


def layout_of(model: ModelConfig) -> dict[str, Any]:
    """What decides how a batch is laid out for a model."""
    start = getattr(model, "start_role", None)
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
