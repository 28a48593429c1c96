"""Build a learner: configuration, tokenizer and checkpoint in, the one way for every command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from lmtool.config.base import Config
from lmtool.config.tables import build
from lmtool.learners.base import BaseLearner
from lmtool.models.configs import ModelConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.loading import LoadReport, load_into
from lmtool.weights.reading import Weights


class Teaches(Protocol):
    """The section of what is learned: an objective's or a task's."""

    def learner(self, *arguments: Any) -> BaseLearner: ...


class Blueprint(Protocol):
    """What a configuration of a run says of its learner."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def seed(self) -> int: ...

    @property
    def learns(self) -> Teaches: ...

    @property
    def tuned_by(self) -> Config | None:
        """The section of the tuning method, where there is one."""


def assemble(
    config: Blueprint,
    tokenizer: Tokenizer | None,
    start: Weights | None = None,
    trained: Weights | None = None,
    learns: Teaches | None = None,
) -> tuple[BaseLearner, LoadReport | None]:
    """The learner of a run on the default device, edited by its tuning method, and what was taken of a checkpoint.

    start: the weights that a run starts from, loaded before the edit; what they lack is new. trained: those of this
    very learner, edit and all, every tensor of which must be there. tokenizer: None to count parameters alone. learns:
    another section than the configuration's.
    UserError where a checkpoint does not fit.
    """
    learner = (learns or config.learns).learner(build(config.model, config.seed), tokenizer, config.seed)
    report = None
    if start is not None:
        report = replace(load_into(learner, start.tensors, start.origin), ignored=start.ignored)
    if config.tuned_by is not None:
        learner.tune(build(config.tuned_by), None if report is None else frozenset(report.new))
    if trained is not None:
        report = load_into(learner, trained.tensors, trained.origin, whole=True)
    return learner, report
