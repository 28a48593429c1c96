"""The teachers of a run, and what is trained in the place of its learner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from lmtool.config.tables import build
from lmtool.costs.memory_of_run import model_of_peers
from lmtool.distillation.configs import CodistillationConfig
from lmtool.distillation.configs.base import reads_alike
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.hard_labels import HardLabels
from lmtool.distillation.seen import Teacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits, evaluation_tokens
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.teachers import TeacherSpec, one_vocabulary, task_of
from lmtool.session.provenance import Contents
from lmtool.session.start import earlier_weights, start_weights, starting_tokenizer
from lmtool.session.teacher_store import layout_of, relabelled, stored
from lmtool.session.trained import read_trained
from lmtool.tasks.labels import TakenHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.assemble import assemble

TrainingConfig = PretrainConfig | FinetuneConfig


def peers_of(
    config: TrainingConfig,
    distill: CodistillationConfig,
    tokenizer: Tokenizer,
    taken: Mapping[str, TakenHead] | None = None,
) -> list[BaseLearner]:
    """The peers, each as it is at the start of a run with a seed of its own. taken: by task, its head in the run's
    checkpoint. UserError where their weights cannot be read, or do not go with the run."""
    own = _of_peers(config, distill, tokenizer)
    heads = taken if own.checkpoint == config.checkpoint else None
    peers = []
    for number in range(1, distill.learners):
        seeded = own.model_copy(update={"seed": config.seed + number})
        earlier = earlier_weights(seeded) if isinstance(seeded, FinetuneConfig) else []
        learner, _ = assemble(seeded, tokenizer, start_weights(seeded, heads), earlier=earlier)
        peers.append(learner)
    return peers


def _of_peers(config: TrainingConfig, distill: CodistillationConfig, tokenizer: Tokenizer) -> TrainingConfig:
    """The run's configuration with the model of the peers, and what they start from."""
    if distill.model is not None:
        config = config.model_copy(update={"model": distill.model, "checkpoint": None})
        if isinstance(config, FinetuneConfig) and config.tuning.name != "full":
            raise UserError(
                f"tuning={config.tuning.name} edits pretrained weights, and those of distill.model are random",
                "give tuning=full, or distill.checkpoint=RUN in the place of distill.model",
            )
        return config
    if distill.checkpoint is None:
        return config
    model = model_of_peers(config, distill)
    for need in reads_alike(f"distill.checkpoint={distill.checkpoint}", model):
        if not need.offer.holds(config.model):
            raise UserError(need.problem(config.model).message, "give another checkpoint, or leave it out")
    config = config.model_copy(update={"model": model, "checkpoint": distill.checkpoint})
    own = starting_tokenizer(config)
    if own is not None and not own.cuts_alike(tokenizer):
        raise UserError(
            f"distill.checkpoint={distill.checkpoint} has another tokenizer than the run: its batches are others",
            f"give tokenizer=folder tokenizer.path={distill.checkpoint}, or another checkpoint",
        )
    return config


def distilled(
    config: TrainingConfig,
    student: BaseLearner,
    tokenizer: Tokenizer,
    precision: Precision,
    contents: Contents,
    taken: Mapping[str, TakenHead] | None = None,
) -> Distilled | None:
    """What learns in a run, around its learner; None where that learns alone. contents: hashes of the data. taken: by
    task, its head in the checkpoint that the run starts from. UserError where a teacher cannot be read, or does not go
    with the student."""
    if isinstance(config.distill, CodistillationConfig):
        return build(config.distill, student, peers_of(config, config.distill, tokenizer, taken))
    if not config.distill.checkpoints and config.distill.name == "none":
        return None
    predictions = config.distill.label_file
    if predictions is not None and isinstance(config, FinetuneConfig):
        labels = HardLabels(student, precision, predictions, relabel=partial(relabelled, config, predictions))
        return build(config.distill, student, [labels])
    teachers = [teacher_of(config, path, tokenizer, precision) for path in config.distill.checkpoints]
    return build(config.distill, student, [stored(config, teacher, tokenizer, contents) for teacher in teachers])


def side_by_side(
    student: BaseLearner, distilled: Distilled, held_out: HeldOutSplits, config: RunConfig, precision: Precision
) -> list[dict[str, Any]]:
    """What the report sets beside each other: teachers, peers and the student, each with its `score` on the first
    held-out split, its standard error, parameters, bytes of weights, and the tokens a second at which it was scored."""
    teachers = {f"teacher {teacher.origin}": teacher.learner for teacher in distilled.teachers}
    models = {"student": student, **distilled.beside(), **teachers}
    return [_measured(name, learner, held_out, config, precision) for name, learner in reversed(models.items())]


def _measured(
    name: str, learner: BaseLearner, held_out: HeldOutSplits, config: RunConfig, precision: Precision
) -> dict[str, Any]:
    first = held_out.first
    data: Mapping[str, Any] = {first.data.split: first.data}
    longest = min(config.max_length, learner.backbone.config.max_positions)
    splits = HeldOutSplits(learner, data, longest, evaluation_tokens(config), config.seed)
    learner.eval()
    started = time.perf_counter()
    evaluation = splits.score(precision).first
    seconds = time.perf_counter() - started
    metrics = evaluation.metrics()
    error = {"standard_error": metrics["standard_error"]} if "standard_error" in metrics else {}
    weights = list(_weights(learner))
    return {
        "name": name,
        "score": metrics[learner.metric.name],
        **error,
        "parameters": sum(tensor.numel() for tensor in weights),
        "weight_bytes": sum(tensor.nbytes for tensor in weights),
        "tokens_per_second": splits.first.loader.facts()["tokens_per_epoch"] / max(seconds, 1e-9),
    }


def _weights(learner: BaseLearner) -> Iterator[nn.Parameter]:
    """What predicts: a generator is not a part of it."""
    yield from learner.backbone.parameters()
    yield from learner.heads.parameters()


def teacher_of(config: TrainingConfig, path: str, tokenizer: Tokenizer, precision: Precision) -> Teacher:
    """A trained checkpoint as a learner of what the run learns, which reads the batches of its student, or what these
    are of; of a mixture of the members that it was trained for."""
    trained = read_trained(path, config.offline, precision)
    same = trained.tokenizer.cuts_alike(tokenizer)
    if one_vocabulary(config.distill, config.learns) and not same:
        raise UserError(
            f"distill.teacher={path} has another tokenizer than the student: it cannot read the student's batches",
            f"give tokenizer=folder tokenizer.path={path}, or a teacher with the student's tokenizer",
        )
    known, learned = TeacherSpec(path, trained.saved), config.learns
    parts: list[Any] = []
    heads: dict[str, TakenHead] = {}
    for part in learned.parts():
        if not known.teaches(part):
            continue
        task = task_of(part)
        taken = None if task is None else known.head_for(task)
        if task is None or taken is None:
            parts.append(part)
            continue
        heads[task.name] = taken
        alone = known.without_auxiliaries(task.with_head(taken.form))
        parts.append(alone if task is part else part.model_copy(update={"task": alone}))
    if not parts:
        raise UserError(f"distill.teacher={path} was trained for nothing that the student learns", "give another")
    learner = trained.learner(learned.of_parts(parts), heads)
    reads = same and layout_of(trained.config.model) == layout_of(config.model)
    reads = reads and config.max_length <= trained.config.model.max_positions
    return Teacher(learner.requires_grad_(False), precision, path, trained.longest, reads)
