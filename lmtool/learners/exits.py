"""Early exits: behind some of its layers a model of one stack has heads of their own, so that it can answer there
without the layers above (Teerapittayanon, McDanel, Kung, "BranchyNet", ICPR 2016; Xin et al., "DeeBERT", ACL 2020).

In a checkpoint the heads behind layer N are `heads.exit_N.`, each by the name that it has behind the last layer.

Shape letters: T tokens, N documents, H hidden width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from lmtool.learners.model import ModelWithHeads
from lmtool.models.base import OneStack
from lmtool.nn.stack import Side, Tap, TapPoint
from lmtool.types import Batch, Packed, Target

_EXIT = "exit_"
AnyLearner = TypeVar("AnyLearner", bound=ModelWithHeads)


def add_exits(learner: ModelWithHeads, depths: Collection[int]) -> None:
    """Put heads like those of a learner, with initial weights of their own, behind the layers of these numbers, counted
    from 1."""
    own = dict(learner.heads.items())
    for depth in depths:
        heads = nn.ModuleDict({name: copy.deepcopy(head) for name, head in own.items()})
        learner.add_head(f"{_EXIT}{depth}", heads)


def exits_of(learner: ModelWithHeads) -> list[int]:
    """The layers behind which a learner has heads of their own, in their order."""
    names = (name.removeprefix(_EXIT) for name in learner.heads if name.startswith(_EXIT))
    return sorted(int(name) for name in names if name.isdecimal())


def is_exit(part: str) -> bool:
    """Whether a part of a learner (`heads.NAME`) is that of an exit."""
    return part.startswith(f"heads.{_EXIT}")


def at_exit(learner: AnyLearner, depth: int | None) -> AnyLearner:
    """A learner that ends behind a layer where the given one has an exit: with its tensors, without the layers above.
    None: behind the last. The mode that it is in is the given one's now."""
    if depth is None:
        return copy.copy(learner)
    backbone = cast(OneStack, learner.backbone)
    short = copy.copy(backbone)
    short.config = backbone.config.model_copy(update={"num_layers": depth})
    _replace(short, layers=nn.ModuleList(list(backbone.layers)[:depth]))
    view = copy.copy(learner)
    _replace(view, backbone=short, heads=learner.heads[f"{_EXIT}{depth}"])
    return view


def _replace(module: nn.Module, **children: Any) -> None:
    """Give a shallow copy other submodules, which the original keeps."""
    module.__dict__["_modules"] = {**module.__dict__["_modules"], **children}


class Segment(Tap):
    """A forward that begins behind a layer, where an earlier one over the same texts ended, and keeps the states behind
    a deeper one.

    first: where it begins; 0 for the embedding. states: (T, H) there. last: of which `kept` are the states, (T, H)
    before the final norm; None: nothing is kept.
    """

    def __init__(self, first: int, states: Tensor | None, last: int | None):
        self.first, self.states, self.last = first, states, last
        self.kept: Tensor | None = None

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        return None if self.states is None else (self.first, self.states)

    def wants(self, place: TapPoint) -> bool:
        return place.layer == self.last

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        self.kept = x_TH
        return x_TH


def some_documents(batch: Batch, kept_N: Tensor) -> Batch:
    """The documents of a batch for which a mask, on the host, is true: a batch on the same device. Of one that reads
    one side, whose targets have no spans."""
    host, device = batch.host, batch.inputs.tokens.device
    inputs = host.inputs
    kept_T = kept_N[inputs.documents]
    numbers = kept_N.nonzero()[:, 0].tolist()
    packed = Packed(
        inputs.tokens[kept_T],
        tuple(inputs.lengths[number] for number in numbers),
        {name: column[kept_T] for name, column in inputs.columns.items()},
        tuple(inputs.prefixes[number] for number in numbers) if inputs.prefixes else (),
    )
    place_T = kept_T.cumsum(0) - 1

    def of(target: Target) -> Target:
        if target.at is None:
            return target if target.labels is None else replace(target, labels=target.labels[kept_N])
        kept_M = kept_T[target.at]
        labels = None if target.labels is None else target.labels[kept_M]
        return replace(target, labels=labels, at=place_T[target.at[kept_M]])

    def rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[kept_N]

    some = replace(
        host,
        inputs=packed,
        targets={name: of(target) for name, target in host.targets.items()},
        examples=host.examples[kept_N],
        parts=host.parts[kept_N],
        rows=rows(host.rows),
        groups=rows(host.groups),
        source=None,
    )
    return some.to(device)


def entropy_share(logits_MC: Tensor) -> Tensor:
    """(M,) the entropy of classes as a share of the largest that there can be: 0 where one is certain, 1 where all are
    alike."""
    logs_MC = logits_MC.float().log_softmax(-1)
    return -(logs_MC.exp() * logs_MC).sum(-1) / math.log(max(logits_MC.shape[-1], 2))
