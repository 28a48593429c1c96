"""Start a learner from a checkpoint's tensors, and say what was taken, dropped and made new.

Tensors are named `backbone.` (what finetuning starts from), `heads.NAME.` and `objective.`. The backbone is taken
whole or not at all: a partial load is an error. A head is taken where the checkpoint has one of that name and shape;
only heads may be new, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.heads.lm import LMHead
from lmtool.types import part_of


@dataclass(frozen=True)
class LoadReport:
    """Parts by name ("backbone", "heads.pooler", ...), each with its number of values. ignored: what of a
    published folder is not read (`weights.unread`)."""

    taken: dict[str, int]
    dropped: dict[str, int]
    new: dict[str, int]
    ignored: tuple[str, ...] = ()

    def sentence(self) -> str:
        """One line for the screen."""

        def these(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} ({count:,})" for name, count in parts.items()) or "nothing"

        return f"taken: {these(self.taken)}; dropped: {these(self.dropped)}; new: {these(self.new)}"


def by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors grouped by part, in their order."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(part_of(name), {})[name] = tensor
    return parts


def differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What keeps `given` from being `wanted`: names missing, names too many, shapes that differ."""
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is not in the model" for name in given if name not in wanted]
    problems += [
        f"{name} is {tuple(given[name].shape)}, the model has {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in given and given[name].shape != tensor.shape
    ]
    return problems


def load_into(learner: nn.Module, tensors: Mapping[str, Tensor], origin: str, whole: bool = False) -> LoadReport:
    """Copy a checkpoint's tensors into a learner, whose heads get tables of their own where the checkpoint has them.

    origin: what to call the checkpoint in errors. whole: every part that learns must be there (to evaluate or to
    predict); one of constants alone (BART's zeros) may be missing.
    Raises UserError where the backbone, or with `whole` any part, does not fit.
    """
    for name, module in learner.named_modules():
        table = tensors.get(f"{name}.output.weight")
        if isinstance(module, LMHead) and module.output is None and table is not None:
            module.untie(*table.shape)
    wanted, given = by_part(learner.state_dict()), by_part(tensors)
    learned = {part_of(name) for name, _ in learner.named_parameters()}
    taken: dict[str, Tensor] = {}
    new: dict[str, int] = {}
    for part, own in wanted.items():
        problems = differences(own, given.get(part, {}))
        if not problems:
            taken.update({name: given[part][name] for name in own})
        elif part == "backbone" or (whole and (part in learned or part in given)):
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UserError(
                f"checkpoint={origin} does not fit the model: {problems[0]}{more}",
                "its configuration and its weights disagree: copy it again, or give another checkpoint=",
            )
        else:
            new[part] = sum(tensor.numel() for tensor in own.values())
    learner.load_state_dict(taken, strict=False)
    kept = {part_of(name) for name in taken}

    def sizes(parts: Mapping[str, Mapping[str, Tensor]], names: set[str]) -> dict[str, int]:
        return {part: sum(tensor.numel() for tensor in parts[part].values()) for part in parts if part in names}

    return LoadReport(sizes(wanted, kept), sizes(given, set(given) - kept), new)
