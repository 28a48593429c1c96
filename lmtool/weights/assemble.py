"""Build a learner from configuration, tokenizer and checkpoint. Every command builds its learner here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads, add_exits
from lmtool.models.configs import ModelConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.loading import LoadReport, load_into
from lmtool.weights.reading import Weights

Built = TypeVar("Built", bound=ModelWithHeads)
BuiltCo = TypeVar("BuiltCo", bound=ModelWithHeads, covariant=True)


class LearnerBuilder(Protocol[BuiltCo]):
    """The configuration section of an objective or a task; for a saved checkpoint, its heads."""

    def learner(self, *arguments: Any) -> BuiltCo: ...


class Blueprint(Protocol[BuiltCo]):
    """The description of a learner in a run's configuration or a checkpoint."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def seed(self) -> int: ...

    @property
    def learns(self) -> LearnerBuilder[BuiltCo]: ...

    @property
    def tuned_by(self) -> Any:
        """The `tuning` section, including its `schemes`; None without one."""

    @property
    def exits(self) -> tuple[int, ...]:
        """Layers with early exits."""


def assemble(
    config: Blueprint[Built],
    tokenizer: Tokenizer | None,
    start: Weights | None = None,
    trained: Weights | None = None,
    learns: LearnerBuilder[Built] | None = None,
    earlier: Sequence[Weights] = (),
) -> tuple[Built, LoadReport | None]:
    """Build a run's learner on the default device, apply its tuning method and load its weights.

    Args:
        config: The configuration of a run, or the description in a checkpoint.
        tokenizer: None if only parameters are counted.
        start: Weights that the run starts from, loaded before tuning is applied. Missing heads stay as initialized.
        trained: Weights of this learner after tuning was applied. Every tensor is required.
        learns: Replaces the configuration's objective or task.
        earlier: Weights of finished runs that the tuning method combines (adapter fusion).

    Returns:
        The learner, and the report of the loaded parts; None without `start` and `trained`.

    Raises:
        UserError: If a checkpoint does not fit, or if no parameter is trainable.
    """
    backbone, tuned_by = build(config.model, config.seed), config.tuned_by
    if tokenizer is not None:
        backbone.spell(tokenizer)
    method = None if tuned_by is None else build(tuned_by)
    if method is not None:
        method.prepare(backbone)
    learner = (learns or config.learns).learner(backbone, tokenizer, config.seed)
    add_exits(learner, config.exits)
    report = None
    if start is not None:
        report = replace(load_into(learner, start.tensors, start.origin), ignored=start.ignored)
    if method is not None and tuned_by is not None:
        schemes = [build(scheme) for scheme in tuned_by.schemes]
        learner.tune(method, None if report is None else frozenset(report.new), schemes)
        if not any(parameter.requires_grad for parameter in learner.parameters()):
            raise UserError(f"tuning={tuned_by.name}: this model has no trainable parameter", "set tuning=full")
        if earlier:
            method.build_on(learner, [(weights.origin, weights.tensors) for weights in earlier])
    if trained is not None:
        report = replace(load_into(learner, trained.tensors, trained.origin, require_all=True), ignored=trained.ignored)
    return learner, report
