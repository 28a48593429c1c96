"""The base of a tuned run: the checkpoint whose unchanged weights the run's checkpoints leave out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from lmtool.config.checkpoint import read_json, read_manifest
from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.system.files import Damaged
from lmtool.system.secrets import masked
from lmtool.types import part_of

BASE = "base.json"


@dataclass(frozen=True)
class Base:
    """The starting checkpoint of a tuned run.

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


def left_to_base(learner: BaseLearner, loaded_parts: Collection[str]) -> frozenset[str]:
    """Names of the tensors that a new tuned learner shares with its base: those of the loaded parts, except trainable
    ones and the task's heads, whose thresholds are calibrated."""
    if learner.tuning is None:
        return frozenset()
    changed_names = learner.tuning.delta(learner) | {
        name for group in learner.parameter_groups() for name, _ in group.parameters
    }
    named = dict(learner.named_parameters(remove_duplicate=False))
    trained = {id(named[name]) for name in changed_names if name in named}
    changed_names |= {name for name, parameter in named.items() if id(parameter) in trained}
    parts = set(loaded_parts) - {f"heads.{term}" for term in learner.weights}
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
