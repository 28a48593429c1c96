"""Load a checkpoint's tensors into a learner and report the outcome; the base of a tuned run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from lmtool.config.checkpoint import read_json, read_manifest
from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.models.heads.lm import LMHead
from lmtool.system.files import Damaged
from lmtool.system.secrets import masked
from lmtool.types import part_of

# Tensor names start with `backbone.`, `heads.NAME.` or `objective.`. The backbone must be loaded completely. A head is
# loaded if the checkpoint has one of the same name and shapes; otherwise it stays as initialized, which is reported.


@dataclass(frozen=True)
class LoadReport:
    """Number of values by part ("backbone", "heads.pooler", ...). loaded: copied into the learner. dropped: only in the
    checkpoint. new: as initialized. ignored: keys and files of a Hugging Face folder that are not read
    (`ignored_keys`)."""

    loaded: dict[str, int]
    dropped: dict[str, int]
    new: dict[str, int]
    ignored: tuple[str, ...] = ()

    def sentence(self) -> str:
        """One line for the screen."""

        def described(parts: dict[str, int]) -> str:
            return ", ".join(f"{name} ({count:,})" for name, count in parts.items()) or "nothing"

        return f"loaded: {described(self.loaded)}; dropped: {described(self.dropped)}; new: {described(self.new)}"


def by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors grouped by part, in order."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(part_of(name), {})[name] = tensor
    return parts


def mismatched(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Differences between `found` and `expected`: missing names, extra names, different shapes."""
    mismatches = [f"{name} is missing" for name in expected if name not in found]
    mismatches += [f"{name} is not in the model" for name in found if name not in expected]
    mismatches += [
        f"{name} is {tuple(found[name].shape)}, the model has {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    return mismatches


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
        mismatches = mismatched(expected_part, found.get(part, {}))
        if not mismatches:
            loaded.update({name: found[part][name] for name in expected_part})
        elif part == "backbone" or (require_all and (part in learned or part in found)):
            more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
            raise UserError(
                f"checkpoint={origin} does not fit the model: {mismatches[0]}{more}",
                "copy it again, because its configuration and weights do not match; or set another checkpoint=",
            )
        else:
            new[part] = sum(tensor.numel() for tensor in expected_part.values())
    learner.load_state_dict(loaded, strict=False)
    loaded_parts = {part_of(name) for name in loaded}

    def sizes(parts: Mapping[str, Mapping[str, Tensor]], names: set[str]) -> dict[str, int]:
        return {part: sum(tensor.numel() for tensor in parts[part].values()) for part in parts if part in names}

    return LoadReport(sizes(expected, loaded_parts), sizes(found, set(found) - loaded_parts), new)


BASE = "base.json"


@dataclass(frozen=True)
class Base:
    """The base of a tuned run: the checkpoint whose unchanged weights the run's checkpoints leave out.

    A tuned checkpoint stores trainable tensors, tensors added by the tuning method, and the heads of its task; all
    others are read from the base if their hash is unchanged. Checkpoints of runs from random weights, of tuning=full
    and from merged weights are complete and have no base.

    Attributes:
        checkpoint: As typed.
        path: The base's folder when the run started, or None.
        revision: The base's commit on the hub, or None.
        parts: Parts whose tensors come from the base, unless the tuned checkpoint has them.
        sha256: `digest` of those tensors.
        tokenizer: Fingerprint of the run's tokenizer.
        names: Names of those tensors, not stored in base.json.
    """

    checkpoint: str
    path: str | None
    revision: str | None
    parts: tuple[str, ...]
    sha256: str
    tokenizer: str
    names: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def addresses(self) -> list[str]:
        """Values of `checkpoint=` that may name the base, the most specific first."""
        if self.revision is not None:
            return [f"{self.checkpoint.partition('@')[0]}@{self.revision}"]
        return [*([] if self.path is None else [self.path]), self.checkpoint]

    def address(self) -> str | None:
        """The first address that exists, or None."""
        for path in self.addresses:
            if "://" in path or os.path.exists(os.path.expanduser(path)):
                return path
        return None

    def base_tensors(self, tensors: Mapping[str, Tensor], tuned_names: Collection[str]) -> dict[str, Tensor]:
        """The base's tensors that a tuned checkpoint lacks. tuned_names: names of the tensors it has."""
        return {
            name: tensor for name, tensor in tensors.items() if part_of(name) in self.parts and name not in tuned_names
        }

    def require_same(self, base_tensors: Mapping[str, Tensor], address: str, checkpoint: str) -> None:
        """Raise UserError if the base has changed.

        Args:
            base_tensors: The tensors left out of the tuned checkpoint, as they are now.
            address: Where they were read.
            checkpoint: The tuned checkpoint.
        """
        actual = digest(base_tensors)
        if actual != self.sha256:
            raise UserError(
                f"checkpoint={checkpoint} was tuned on other weights than those in {address}: sha256 was "
                f"{self.sha256[:16]}, is now {actual[:16]}",
                f"restore {self.checkpoint} as it was when the run started",
            )

    def to_plain(self) -> JsonObject:
        """Content of base.json. The commit is not masked: it only looks like a secret."""
        plain = asdict(self)
        del plain["names"]
        path = None if self.path is None else masked(self.path)
        return {**plain, "checkpoint": masked(self.checkpoint), "path": path}


def left_to_base(learner: BaseLearner, report: LoadReport) -> frozenset[str]:
    """Names of the tensors that a new tuned learner shares with its base: the loaded ones, except trainable ones and
    the task's heads, whose thresholds are calibrated."""
    if learner.tuning is None:
        return frozenset()
    changed_names = learner.tuning.delta(learner) | {
        name for group in learner.parameter_groups() for name, _ in group.parameters
    }
    named = dict(learner.named_parameters(remove_duplicate=False))
    trained = {id(named[name]) for name in changed_names if name in named}
    changed_names |= {name for name, parameter in named.items() if id(parameter) in trained}
    parts = set(report.loaded) - {f"heads.{term}" for term in learner.weights}
    frozen = {name for name in learner.state_dict() if name not in changed_names and part_of(name) in parts}
    # A method that freezes no parameter has no base, even if the model has constants.
    return frozenset(frozen) if frozen & named.keys() else frozenset()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes of tensors, ordered by name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def saved_base(folder: Path) -> Base | None:
    """The base of a checkpoint of lmtool; None if it is complete. UserError if base.json is damaged."""
    try:
        if BASE not in read_manifest(folder).files:
            return None
    except Damaged:
        return None  # reported when the tensors are read
    plain = read_json(folder, BASE)
    try:
        return TypeAdapter(Base).validate_python({key: value for key, value in plain.items() if key != "names"})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{folder / BASE}: {where}: {first['msg']}", "copy the checkpoint again") from error
