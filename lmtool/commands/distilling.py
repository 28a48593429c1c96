"""The teachers of a run, and what is trained in the place of its learner."""

from __future__ import annotations

from lmtool.commands.configs import FinetuneConfig, PretrainConfig
from lmtool.commands.labelled import sections_of
from lmtool.commands.trained import Trained, read_trained
from lmtool.config.tables import build
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.seen import Teacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.tasks.labels import taken_head
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision

TrainingConfig = PretrainConfig | FinetuneConfig


def distilled(
    config: TrainingConfig, student: BaseLearner, tokenizer: Tokenizer, precision: Precision
) -> Distilled | None:
    """What learns in a run, around its learner; None where that learns alone. UserError where a teacher cannot be
    read, or does not go with the student."""
    if not config.distill.teachers and config.distill.name == "none":
        return None
    teachers = [teacher_of(config, path, tokenizer, precision) for path in config.distill.teachers]
    return build(config.distill, student, teachers)


def teacher_of(config: TrainingConfig, path: str, tokenizer: Tokenizer, precision: Precision) -> Teacher:
    """A trained checkpoint as a learner of what the run learns, which reads the batches of its student."""
    trained = read_trained(path, config.offline, precision)
    if trained.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"distill.teacher={path} has another tokenizer than the student: it cannot read the student's batches",
            f"give tokenizer=folder tokenizer.path={path}, or a teacher with the student's tokenizer",
        )
    learner = _of_task(config, trained) if isinstance(config, FinetuneConfig) else trained.learner(config.learns)
    return Teacher(learner.requires_grad_(False), precision, path)


def _of_task(config: FinetuneConfig, trained: Trained) -> BaseLearner:
    """The teacher's learner of the student's task, with the classes in the order of the student's."""
    section = sections_of(trained.saved).get(config.task.name)
    taken = None if section is None else taken_head(section, config.task)
    if taken is None:
        raise UserError(
            f"distill.teacher={trained.checkpoint} was not trained for task={config.task.name} with these labels",
            f"lmtool finetune task={config.task.name} trains one",
        )
    return trained.learner(config.task.with_head(taken.form), {config.task.name: taken})
