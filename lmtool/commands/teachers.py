"""The teachers of a run, as far as their configurations say: what does not go with the student is refused before any
weights are read. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from lmtool.commands.configs import RunConfig
from lmtool.config.checkpoint import read_checkpoint
from lmtool.config.rules import rule
from lmtool.config.tables import Choice
from lmtool.distillation.configs import DistillConfig
from lmtool.errors import Problem, UserError
from lmtool.models.configs import ModelConfig
from lmtool.weights.folders import published_folder


def saved_teacher(path: str, offline: bool) -> dict[str, Any]:
    """The configuration in a teacher's checkpoint, not decoded yet. UserError where it cannot be read."""
    published = published_folder(path, offline)
    return read_checkpoint(path) if published is None else published.saved_config()


@rule(RunConfig, "distill", "model", "offline", running=True)
def teachers_fit_model(distill: DistillConfig, model: ModelConfig, offline: bool) -> Iterator[Problem]:
    """What a student learns from a teacher's model can be learned with its own. A trained student is read without its
    teacher."""
    for path in distill.teachers:
        try:
            teacher = Choice("model").validate(saved_teacher(path, offline).get("model"))
        except UserError as error:
            yield Problem("distill.teacher", error.message.replace("checkpoint=", "distill.teacher="), error.hint)
            continue
        except ValidationError:
            continue  # reported where it is decoded
        misfit = distill.misfit_of_teacher(model, teacher) if isinstance(teacher, ModelConfig) else None
        if misfit is not None:
            yield misfit
