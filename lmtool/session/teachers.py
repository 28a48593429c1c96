"""The teachers of a distilled run: reads teachers from their checkpoints, applies distill.store and distill.top_k to
them, and builds the peers of codistillation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.costs.memory_of_run import TrainingConfig, model_of_peers
from lmtool.distillation.configs.base import different_inputs
from lmtool.distillation.configs.modes import CodistillationConfig, StandardConfig
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.recording import Teacher
from lmtool.distillation.store.folder import StoreLocation
from lmtool.distillation.store.outputs import StoreFormat, temperatures_of
from lmtool.distillation.teacher_configs import TeacherSpec, needs_one_vocabulary, task_of
from lmtool.distillation.teachers import HardLabels, StoredTeacher, TopWordsTeacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.models.configs import ModelConfig
from lmtool.resolver.commands import FinetuneConfig
from lmtool.session.labeled import relabel
from lmtool.session.open_run import prior_weights, start_weights, starting_tokenizer
from lmtool.session.provenance import Contents
from lmtool.session.trained import read_trained
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.labels import LoadedHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.assemble import assemble
from lmtool.weights.base import digest

# Fields of a task that do not change a teacher's outputs for its rows, and so do not identify stored outputs. The rows
# themselves are identified by hashes of their contents.
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


def with_output_settings(config: TrainingConfig, teacher: Teacher, tokenizer: Tokenizer, contents: Contents) -> Teacher:
    """Returns a teacher as distill.store and distill.top_k ask for it: with distill.store, one whose outputs are read
    from disk; otherwise with distill.top_k, one whose predictions are truncated. tokenizer: the student's."""
    section = config.distill
    if not isinstance(section, StandardConfig):
        return teacher
    top_k, temperatures = section.top_k, temperatures_of(section.terms.values())
    fields = teacher.learner, teacher.precision, teacher.origin, teacher.longest, teacher.reads_batches
    if not section.store:
        return teacher if top_k is None else TopWordsTeacher(*fields, top_k=top_k, temperatures=temperatures)
    states = "states" in section.terms
    generation = config.learner_config.text_generation if isinstance(config.learner_config, TaskConfig) else None
    # Texts that the teacher generates are part of the examples, so their settings are part of the identity.
    plain_generation = None if generation is None or section.targets == "gold" else generation.model_dump(mode="json")
    return StoredTeacher(
        *fields,
        location=store_location(config, "outputs"),
        store_format=StoreFormat(section.store_dtype, top_k, temperatures),
        identity={
            **outputs_depend_on(config, teacher, contents),
            "states": states,
            "examples_known_by": "tokens" if teacher.reads_batches else "row",
            "targets": {"targets": section.targets, "generation": plain_generation},
        },
        states=states,
        fixed_examples=isinstance(config, FinetuneConfig),
        seed=config.seed,
        tokenizers=describe_tokenizers(teacher, tokenizer, config.model),
    )


def store_location(config: TrainingConfig, subfolder: str) -> StoreLocation:
    """Returns where to store a teacher's outputs or texts: in a subfolder of distill.store=FOLDER, or in the cache."""
    store = config.distill.store if isinstance(config.distill, StandardConfig) else None
    return StoreLocation(str(Path(store) / subfolder) if isinstance(store, str) else None, config.cache_dir)


def layout_of(model: ModelConfig) -> JsonObject:
    """Returns the properties of a model that determine how its batches are laid out: the order of special tokens and
    texts."""
    start = model.start_role
    return {"architecture": model.architecture, "text_format": model.text_format, "start": start}


def _model(teacher: Teacher) -> ModelConfig:
    return teacher.learner.backbone.config


def describe_tokenizers(teacher: Teacher, tokenizer: Tokenizer, model: ModelConfig) -> dict[str, str]:
    """Describes the tokenizers of teacher and student by name, for the first screen; empty if the teacher reads the
    student's batches."""
    if teacher.reads_batches:
        return {}
    tokenizers = {
        "teacher_tokenizer": (teacher.learner.tokenizer, _model(teacher)),
        "student_tokenizer": (tokenizer, model),
    }
    return {
        name: f"{vocabulary.vocab_size:,} tokens, laid out as {model_config.text_format}"
        for name, (vocabulary, model_config) in tokenizers.items()
    }


def outputs_depend_on(config: TrainingConfig, teacher: Teacher, contents: Contents) -> JsonObject:
    """Returns everything that a teacher's outputs depend on as plain data, which identifies their store. config: the
    student's configuration."""
    learner = teacher.learner
    task_or_objective = config.task if isinstance(config, FinetuneConfig) else config.objective
    return {
        "teacher": digest(learner.state_dict()),
        "teacher_model": _model(teacher).model_dump(mode="json"),
        "precision": teacher.precision.name,
        "data": {
            origin: {name: value for name, value in hashes.items() if name.startswith(_TRAINING_DATA)}
            for origin, hashes in contents.items()
        },
        "task" if isinstance(config, FinetuneConfig) else "objective": _relevant(
            task_or_objective.model_dump(mode="json")
        ),
        "tokenizer": learner.tokenizer.fingerprint,
        "max_length": config.max_length,
        "layout": layout_of(_model(teacher)),
        **({} if isinstance(config, FinetuneConfig) else {"documents": config.data.documents}),
    }


_TRAINING_DATA = ("train", "unlabelled", "text")
"""Prefixes of the names of hashes of training data; "unlabelled" is spelled as in outputs that are already stored. A
teacher's outputs do not depend on held-out data."""


def _relevant(section: Any) -> Any:
    if isinstance(section, dict):
        return {name: _relevant(value) for name, value in section.items() if name not in _IRRELEVANT_FIELDS}
    return [_relevant(value) for value in section] if isinstance(section, list) else section


def build_peers(
    config: TrainingConfig,
    distill: CodistillationConfig,
    tokenizer: Tokenizer,
    run_heads: Mapping[str, LoadedHead] | None = None,
) -> list[BaseLearner]:
    """Builds the peers of codistillation, each initialized with a different seed. run_heads: for each task that has
    one, its head in the run's starting checkpoint. Raises UserError if the weights of the peers cannot be read or do
    not fit the run."""
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
    if distill.model is not None:
        config = config.model_copy(update={"model": distill.model, "checkpoint": None})
        if isinstance(config, FinetuneConfig) and config.tuning.name != "full":
            raise UserError(
                f"tuning={config.tuning.name} adapts pretrained weights, but those of distill.model= are random",
                "set tuning=full, or distill.checkpoint=RUN instead of distill.model",
            )
        return config
    if distill.checkpoint is None:
        return config
    model = model_of_peers(config, distill)
    # What the peers' model requires of the run's model, so that both read the same batches.
    for problem in different_inputs(f"distill.checkpoint={distill.checkpoint}", model, config.model):
        raise UserError(problem.message, "use another checkpoint, or omit distill.checkpoint=")
    config = config.model_copy(update={"model": model, "checkpoint": distill.checkpoint})
    peer_tokenizer = starting_tokenizer(config)
    if peer_tokenizer is not None and not peer_tokenizer.same_encoding(tokenizer):
        raise UserError(
            f"the tokenizer of distill.checkpoint={distill.checkpoint} differs from that of the run, whose batches the "
            "peers read",
            f"set tokenizer=folder tokenizer.path={distill.checkpoint}, or use another checkpoint",
        )
    return config


def build_distilled(
    config: TrainingConfig,
    student: BaseLearner,
    tokenizer: Tokenizer,
    precision: Precision,
    contents: Contents,
    heads: Mapping[str, LoadedHead] | None = None,
) -> Distilled | None:
    """Builds the student together with its teachers or peers, as the mode in distill= asks for; None with distill=none.
    precision: that of the teachers. heads: for each task that has one, its head in the run's starting checkpoint.
    Raises UserError if a teacher cannot be read or does not fit the student."""
    if isinstance(config.distill, CodistillationConfig):
        return build(config.distill, student, build_peers(config, config.distill, tokenizer, heads))
    if not config.distill.checkpoints and config.distill.name == "none":
        return None
    predictions = config.distill.predictions if isinstance(config.distill, StandardConfig) else None
    if predictions is not None and isinstance(config, FinetuneConfig):
        teacher = HardLabels(student, precision, predictions, relabel=partial(relabel, config, predictions))
        return build(config.distill, student, [teacher])
    teachers = [
        with_output_settings(config, read_teacher(config, path, tokenizer, precision), tokenizer, contents)
        for path in config.distill.checkpoints
    ]
    return build(config.distill, student, teachers)


def read_teacher(config: TrainingConfig, path: str, tokenizer: Tokenizer, precision: Precision) -> Teacher:
    """Reads a teacher from its checkpoint.

    The teacher gets the student's objective or task; of a mixture, it gets only the members that the checkpoint was
    trained for. It reads the student's batches if its tokenizer, layout and maximum length allow it; otherwise it
    tokenizes the texts of the student's examples itself.

    config, tokenizer: the student's. precision: the teacher's. Raises UserError if the checkpoint cannot be read, has
    another tokenizer although the terms need the student's, or was trained for nothing that the student learns.
    """
    trained = read_trained(path, config.offline, precision)
    same_tokenizer = trained.tokenizer.same_encoding(tokenizer)
    if needs_one_vocabulary(config.distill, config.learner_config) and not same_tokenizer:
        raise UserError(
            f"the tokenizer of distill.teacher={path} differs from the student's: it cannot read the student's batches",
            f"set tokenizer=folder tokenizer.path={path}, or use a teacher with the student's tokenizer",
        )
    spec, student_learns = TeacherSpec(path, trained.saved), config.learner_config
    parts: list[Any] = []
    heads: dict[str, LoadedHead] = {}
    for member in student_learns.member_configs():
        if not spec.teaches(member):
            continue
        task = task_of(member)
        head = None if task is None else spec.head_for(task)
        if task is None or head is None:
            parts.append(member)
            continue
        heads[task.name] = head
        without_auxiliaries = spec.without_auxiliaries(task.with_head(head.settings))
        parts.append(without_auxiliaries if task is member else member.model_copy(update={"task": without_auxiliaries}))
    if not parts:
        raise UserError(
            f"distill.teacher={path} was trained for nothing that the student learns", "use another teacher"
        )
    learner = trained.learner(student_learns.select_members(parts), heads)
    reads_batches = same_tokenizer and layout_of(trained.config.model) == layout_of(config.model)
    reads_batches = reads_batches and config.max_length <= trained.config.model.max_positions
    return Teacher(learner.requires_grad_(False), precision, path, trained.longest, reads_batches)
