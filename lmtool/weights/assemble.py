"""Build a learner from configuration, tokenizer and checkpoint, as every command does, and load its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads, add_exits
from lmtool.models.configs import ModelConfig
from lmtool.models.heads.lm import LMHead
from lmtool.runs.checkpoints import mismatches
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tuning.configs.base import TuningConfig
from lmtool.types import part_of
from lmtool.weights.reading import Weights, by_part

# The names of tensors start with `backbone.`, `heads.NAME.` or `objective.`. The backbone must be loaded completely. A
# head is loaded if the checkpoint has one of the same name and shapes; otherwise it stays as initialized, which is
# reported.


@dataclass(frozen=True)
class LoadReport:
    """The number of values by part ("backbone", "heads.pooler", ...): `loaded` into the learner, `dropped` because only
    the checkpoint has them, and `new`, as initialized. ignored: see `Weights`."""

    loaded: dict[str, int]
    dropped: dict[str, int]
    new: dict[str, int]
    ignored: tuple[str, ...] = ()

    def sentence(self) -> str:
        """One line for the screen."""

        def described(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} ({count:,})" for name, count in parts.items()) or "nothing"

        return f"loaded: {described(self.loaded)}; dropped: {described(self.dropped)}; new: {described(self.new)}"


def load_into(learner: nn.Module, tensors: Mapping[str, Tensor], origin: str, require_all: bool = False) -> LoadReport:
    """Copy a checkpoint's tensors into a learner. Its output layers are untied if the checkpoint's are.

    Args:
        learner: The module to load into.
        tensors: The checkpoint's tensors under our names.
        origin: Name of the checkpoint in error messages.
        require_all: Every trainable part must be present (to evaluate or predict). A part with only constants (BART's
            zero bias) may be missing.

    Raises:
        UserError: If the backbone, or with `require_all` any part, does not fit.
    """
    for name, module in learner.named_modules():
        table = tensors.get(f"{name}.output.weight")
        if isinstance(module, LMHead) and module.output is None and table is not None:
            module.untie(*table.shape)
    expected, found = by_part(learner.state_dict()), by_part(tensors)
    learned = {part_of(name) for name, _ in learner.named_parameters()}
    loaded: dict[str, Tensor] = {}
    new: dict[str, int] = {}
    for part, expected_part in expected.items():
        differences = mismatches(expected_part, found.get(part, {}))
        if not differences:
            loaded.update({name: found[part][name] for name in expected_part})
        elif part == "backbone" or (require_all and (part in learned or part in found)):
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise UserError(
                f"checkpoint={origin} does not fit the model: {differences[0]}{more}",
                "copy it again, because its weights do not match its configuration; or set another checkpoint=",
            )
        else:
            new[part] = sum(tensor.numel() for tensor in expected_part.values())
    learner.load_state_dict(loaded, strict=False)
    loaded_parts = {part_of(name) for name in loaded}

    def sizes(parts: Mapping[str, Mapping[str, Tensor]], names: set[str]) -> dict[str, int]:
        return {part: sum(tensor.numel() for tensor in parts[part].values()) for part in parts if part in names}

    return LoadReport(sizes(expected, loaded_parts), sizes(found, set(found) - loaded_parts), new)


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
    def tuned_by(self) -> TuningConfig | None:
        """The `tuning` section, or None."""

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
            raise UserError(
                f"tuning={tuned_by.name} trains no parameter of model={config.model.name}", "set tuning=full"
            )
        if earlier:
            method.build_on(learner, [(weights.origin, weights.tensors) for weights in earlier])
    if trained is not None:
        report = replace(load_into(learner, trained.tensors, trained.origin, require_all=True), ignored=trained.ignored)
    return learner, report
