"""The base of a tuned run: the checkpoint from which the run started. The run's checkpoints leave out the weights that
tuning does not change; these are read from the base."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.runs.finding import read_json, read_manifest
from lmtool.system.files import Damaged, user_path
from lmtool.system.secrets import masked
from lmtool.types import part_of

BASE = "base.json"


@dataclass(frozen=True)
class Base:
    """The checkpoint from which a tuned run started, as recorded in base.json.

    A tuned checkpoint stores the trainable tensors, the tensors that the tuning method added, and the heads of its
    task. All other tensors are read from the base; their hash shows whether the base has changed since. A checkpoint is
    complete and has no base if its run started from random or merged weights, or used tuning=full.

    Attributes:
        checkpoint: The value of `checkpoint=` that the user gave.
        path: The absolute path of the base's folder when the run started; None if the base is on the hub.
        revision: The base's commit on the hub; None for a local folder.
        parts: Names of the parts ("backbone", "heads.pooler", ...) whose tensors are read from the base, except tensors
            that the tuned checkpoint stores itself.
        sha256: The `digest` of the tensors that are read from the base.
        tokenizer: Fingerprint of the run's tokenizer.
        names: Names of the tensors that are read from the base. base.json does not contain them.
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
        """Values of `checkpoint=` under which the base may be found, the most specific first."""
        if self.revision is not None:
            return [f"{self.checkpoint.partition('@')[0]}@{self.revision}"]
        return [*([] if self.path is None else [self.path]), self.checkpoint]

    def address(self) -> str | None:
        """Returns the first address that is on the hub or exists as a local path, or None."""
        for path in self.addresses:
            if "://" in path or user_path(path).exists():
                return path
        return None

    def base_tensors(self, tensors: Mapping[str, Tensor], tuned_names: Collection[str]) -> dict[str, Tensor]:
        """Returns the tensors of the base that complete a tuned checkpoint. tensors: all tensors of the base.
        tuned_names: names of the tensors that the tuned checkpoint stores itself."""
        return {
            name: tensor for name, tensor in tensors.items() if part_of(name) in self.parts and name not in tuned_names
        }

    def require_same(self, base_tensors: Mapping[str, Tensor], address: str, checkpoint: str) -> None:
        """Raises UserError if the tensors that a tuned checkpoint leaves to its base are no longer those with which the
        run started. address: where the base was read, for the message."""
        actual = digest(base_tensors)
        if actual != self.sha256:
            raise UserError(
                f"checkpoint={checkpoint} was tuned on weights that {address} no longer has: their sha256 was "
                f"{self.sha256[:16]} and is now {actual[:16]}",
                f"restore {self.checkpoint} as it was when the run started",
            )

    def to_plain(self) -> JsonObject:
        """Returns the content of base.json, with secrets masked. The commit is not masked, because it only looks like a
        secret."""
        plain = asdict(self)
        del plain["names"]
        path = None if self.path is None else masked(self.path)
        return {**plain, "checkpoint": masked(self.checkpoint), "path": path}


def base_tensor_names(learner: BaseLearner, loaded_parts: Collection[str]) -> frozenset[str]:
    """Returns the names of the tensors that the checkpoints of a tuned learner leave to the base: the frozen tensors of
    the parts that were loaded from it. The task's heads are always stored in the tuned checkpoint, because calibration
    may change their decision thresholds."""
    if learner.tuning is None:
        return frozenset()
    changed_names = learner.tuning.delta_names(learner) | {
        name for group in learner.parameter_groups() for name, _ in group.parameters
    }
    parameters = dict(learner.named_parameters(remove_duplicate=False))
    # A trained parameter may have further names, such as those of a tied output layer.
    trained = {id(parameters[name]) for name in changed_names if name in parameters}
    changed_names |= {name for name, parameter in parameters.items() if id(parameter) in trained}
    parts = set(loaded_parts) - {f"heads.{term}" for term in learner.loss_weights}
    frozen = {name for name in learner.state_dict() if name not in changed_names and part_of(name) in parts}
    # A method that freezes no parameter has no base, even if the model has constants.
    return frozenset(frozen) if frozen & parameters.keys() else frozenset()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 over the names, types, shapes and bytes of tensors, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def saved_base(folder: Path) -> Base | None:
    """Returns the base of a checkpoint of lmtool, or None if the checkpoint is complete. Raises UserError if base.json
    is damaged."""
    try:
        if BASE not in read_manifest(folder).files:
            return None
    except Damaged:
        return None  # the damage is reported when the tensors are read
    plain = read_json(folder, BASE)
    try:
        return TypeAdapter(Base).validate_python({key: value for key, value in plain.items() if key != "names"})
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise UserError(f"{folder / BASE}: {path}: {first['msg']}", "copy the checkpoint again") from error
