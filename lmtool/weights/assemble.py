"""Builds a learner from a configuration and a tokenizer, applies its tuning method, and loads weights into it. Every
command builds its learners here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.learners.model import add_exits
from lmtool.models.configs import ModelConfig
from lmtool.models.heads.lm import LMHead
from lmtool.runs.checkpoints import mismatches
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tuning.configs.base import TuningConfig
from lmtool.types import part_of
from lmtool.weights.reading import Weights, group_by_part

# The names of tensors start with `backbone.`, `heads.NAME.` or `objective.`. The backbone must be loaded completely. A
# head is loaded if the checkpoint has one of the same name and shapes; otherwise it stays as initialized, which is
# reported.


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from a checkpoint, as the number of values in each part ("backbone", "heads.pooler", ...).

    Attributes:
        loaded: Parts that were loaded into the learner.
        dropped: Parts of the checkpoint that were not loaded.
        new: Parts of the learner that keep their initial values.
        ignored: Keys and files of a Hugging Face folder that are not read, as in `Weights.ignored`.
    """

    loaded: dict[str, int]
    dropped: dict[str, int]
    new: dict[str, int]
    ignored: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Describes the report in one line for the screen."""

        def described(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} ({count:,})" for name, count in parts.items()) or "nothing"

        return f"loaded: {described(self.loaded)}; dropped: {described(self.dropped)}; new: {described(self.new)}"


def load_into(learner: nn.Module, tensors: Mapping[str, Tensor], origin: str, require_all: bool = False) -> LoadReport:
    """Copies the tensors of a checkpoint into a learner. An output layer that is tied to the token embedding is untied
    if the checkpoint has a separate tensor for it. Raises UserError if the tensors of the backbone are missing or have
    other shapes; with `require_all`, as in evaluation and prediction, also those of any other part, except parts with
    only constants (BART's zero bias). origin: the checkpoint in error messages."""
    for name, module in learner.named_modules():
        table = tensors.get(f"{name}.output.weight")
        if isinstance(module, LMHead) and module.output is None and table is not None:
            module.untie(*table.shape)
    expected, available = group_by_part(learner.state_dict()), group_by_part(tensors)
    trainable_parts = {part_of(name) for name, _ in learner.named_parameters()}
    loaded: dict[str, Tensor] = {}
    new: dict[str, int] = {}
    for part, expected_part in expected.items():
        differences = mismatches(expected_part, available.get(part, {}))
        if not differences:
            loaded.update({name: available[part][name] for name in expected_part})
        elif part == "backbone" or (require_all and (part in trainable_parts or part in available)):
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise UserError(
                f"checkpoint={origin} does not fit the model: {differences[0]}{more}",
                "copy the checkpoint again, because its weights do not match its configuration; or set another "
                "checkpoint=",
            )
        else:
            new[part] = sum(tensor.numel() for tensor in expected_part.values())
    learner.load_state_dict(loaded, strict=False)
    loaded_parts = {part_of(name) for name in loaded}

    def sizes(parts: Mapping[str, Mapping[str, Tensor]], names: set[str]) -> dict[str, int]:
        return {part: sum(tensor.numel() for tensor in parts[part].values()) for part in parts if part in names}

    return LoadReport(sizes(expected, loaded_parts), sizes(available, set(available) - loaded_parts), new)


class Blueprint(Protocol):
    """A learner that `assemble` can build: the configuration of a run, or a `SavedModel`. `learner_config.learner` adds
    heads to a backbone; `exits` are the layers with early exits."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def seed(self) -> int: ...
    @property
    def learner_config(self) -> Any: ...
    @property
    def tuning_config(self) -> TuningConfig | None: ...
    @property
    def exits(self) -> tuple[int, ...]: ...


def assemble(
    config: Blueprint,
    tokenizer: Tokenizer | None,
    start: Weights | None = None,
    trained: Weights | None = None,
    earlier: Sequence[Weights] = (),
) -> tuple[Any, LoadReport | None]:
    """Builds a learner on the default device, applies its tuning method and loads its weights.

    Args:
        config: The configuration of a run, or the description of a checkpoint.
        tokenizer: The tokenizer. None if the learner does not read texts, for example to count its parameters.
        start: Weights from which a run starts. They are loaded before tuning is applied. Heads that they lack keep
            their initial values.
        trained: Weights of this learner after training. They are loaded after tuning is applied, and must be complete.
        earlier: Weights of earlier runs whose parameters the tuning method reuses (stacked adapters, adapter fusion).

    Returns:
        The learner, and the report on the loaded parts; the report is None without `start` and `trained`.

    Raises:
        UserError: If a checkpoint does not fit, or if no parameter is trainable.
    """
    backbone, tuning_config = build(config.model, config.seed), config.tuning_config
    if tokenizer is not None:
        backbone.spell(tokenizer)
    method = None if tuning_config is None else build(tuning_config)
    if method is not None:
        method.prepare(backbone)
    learner = config.learner_config.learner(backbone, tokenizer, config.seed)
    add_exits(learner, config.exits)
    report = None
    if start is not None:
        report = replace(load_into(learner, start.tensors, start.origin), ignored=start.ignored)
    if method is not None and tuning_config is not None:
        schemes = [build(scheme) for scheme in tuning_config.schemes]
        learner.tune(method, None if report is None else frozenset(report.new), schemes)
        if not any(parameter.requires_grad for parameter in learner.parameters()):
            raise UserError(
                f"tuning={tuning_config.name} trains no parameter of model={config.model.name}", "set tuning=full"
            )
        if earlier:
            method.build_on(learner, [(weights.origin, weights.tensors) for weights in earlier])
    if trained is not None:
        report = replace(load_into(learner, trained.tensors, trained.origin, require_all=True), ignored=trained.ignored)
    return learner, report
