"""A backbone and its heads, edited by a tuning method if there is one: the part of a learner that a checkpoint holds.

Shape letters: T tokens, M of them that are read, F width of what heads read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.base import Backbone, OneStack
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.features import LayerFeatures, LayerRecorder
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.stack import Side, Tap, TapPoint
from lmtool.types import Batch, Packed, ParameterGroup, Target, send


def labels_of(batch: Batch, term: str) -> Tensor:
    """(M,) classes of a term."""
    labels = batch.targets[term].labels
    if labels is None:
        raise ValueError(f"the batch has no labels for {term}")
    return labels


def indices_of(batch: Batch, term: str) -> Tensor:
    """(M,) flat token indices at which a term predicts."""
    at = batch.targets[term].at
    if at is None:
        raise ValueError(f"the batch has no places for {term}")
    return at


def hidden_at(
    read: Callable[..., Tensor], batch: Batch, places: dict[str, Tensor], rng: DropoutRng | None
) -> dict[str, Tensor]:
    """By term, the hidden states at its places: flat indices (...) give (..., H). One forward, whose last layer works
    on the places alone, on each once. places: those of `batch.host`, since a device would have to be asked how many
    there are. read: a backbone, or what reads its states in another way."""
    read_M, at = torch.cat([indices.flatten() for indices in places.values()]).unique(return_inverse=True)
    device = batch.inputs.tokens.device
    hidden_MH = read(batch.inputs, rng, read_M=send(read_M, device))
    parts = send(at, device).split([indices.numel() for indices in places.values()])
    return {
        term: hidden_MH.index_select(0, part).view(*indices.shape, hidden_MH.shape[-1])
        for (term, indices), part in zip(places.items(), parts, strict=True)
    }


class Tuning(Protocol):
    """A tuning method as a learner knows it, see `lmtool.tuning.base`."""

    def edit(self, learner: object, seed: int, new: Collection[str] | None = None) -> None: ...

    def merge(self, learner: object) -> None: ...

    def parameter_groups(self, learner: object) -> list[ParameterGroup]: ...

    def penalties(self, learner: object) -> dict[str, Tensor]: ...

    def on_step(self, learner: object, step: int) -> None: ...

    def delta(self, learner: object) -> set[str]: ...

    def fold(self, learner: Any) -> Any: ...


class TuningScheme(Protocol):
    """A scheme beside the tuning method as a learner knows it, see `lmtool.tuning.schemes`."""

    def attach(self, learner: object, new: Collection[str] | None) -> None: ...

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None: ...

    def first_step(self, name: str, steps: int) -> int | None: ...

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]: ...

    def on_step(self, learner: object, step: int) -> None: ...

    def penalties(self, learner: object) -> dict[str, Tensor]: ...


class ModelWithHeads(nn.Module):
    """A backbone and the heads on it, edited by a tuning method where there is one. seed: new heads derive
    from it."""

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__()
        self.seed = seed
        self.backbone: Backbone = backbone
        self.tokenizer: Any = None  # where only weights are loaded there is none
        self.heads = nn.ModuleDict()
        self.tuning: Tuning | None = None
        self.schemes: tuple[TuningScheme, ...] = ()
        self.added: frozenset[str] = frozenset()  # names of the parameters that the tuning method put in
        self.learning: frozenset[str] = frozenset()  # of those that learn by it, be it later in the run

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.backbone.parameters()).device

    @property
    def head_side(self) -> Side:
        """The side of a batch whose hidden states the heads read."""
        return "outputs" if isinstance(self.backbone, EncoderDecoder) else "inputs"

    @property
    def extracts(self) -> bool:
        """Whether nothing learns that the backbone reads, so that it only extracts features."""
        read = [*self.backbone.parameters(), *(table.weight for table in self.backbone.embed.further)]
        return not any(parameter.requires_grad for parameter in read)

    def hidden(
        self,
        inputs: Packed,
        outputs: Packed | None = None,
        rng: DropoutRng | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """What heads read: hidden states (T, F) of the outputs where there are any, else of the inputs (in an
        encoder-decoder the encoder's), or (M, F) of the tokens with the flat indices `read_M`. F is the backbone's
        `feature_size`. A backbone that only extracts features runs without gradient and without dropout."""
        features = next((head for head in self.heads.values() if isinstance(head, LayerFeatures)), None)
        kept = None if features is None else LayerRecorder(features, self.head_side, read_M, tap)
        tap, extracts = tap if kept is None else kept, self.extracts
        rng = None if extracts else rng
        with torch.no_grad() if extracts else nullcontext():
            if outputs is not None:
                states = self.backbone(inputs, rng, outputs, read_M=read_M, tap=tap)
            elif isinstance(self.backbone, EncoderDecoder):
                states = self.backbone.read_inputs(inputs, rng, read_M=read_M, tap=tap)
            else:
                states = self.backbone(inputs, rng, read_M=read_M, tap=tap)
        return states if kept is None else kept.read(states)

    @property
    def virtual_tokens(self) -> int:
        """Tokens that a tuning method puts into every text."""
        return self.backbone.embed.virtual_count

    def add_head(self, name: str, head: nn.Module) -> None:
        """Enter a head under its name and give it the initial weights of the backbone's family. UserError where there
        is one of that name: heads of tasks have the names that users give."""
        if name in self.heads:
            raise UserError(f"task.name={name} is the name of a head that the model has anyway", "give another name")
        self.heads[name] = head.to(self.device)
        self.backbone.initialize(head, self.seed, f"heads.{name}.")

    def tune(self, tuning: Tuning, new: Collection[str] | None = None, schemes: Sequence[TuningScheme] = ()) -> None:
        """Edit the model by a tuning method, which answers for what learns from then on, with the schemes beside it.
        new: the parts that did not come from a checkpoint; None: not known."""
        own = {name for name, _ in self.named_parameters()}
        tuning.edit(self, self.seed, new)
        self.added = frozenset(name for name, _ in self.named_parameters()) - own
        self.learning = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        self.tuning, self.schemes = tuning, tuple(schemes)
        for scheme in self.schemes:
            scheme.attach(self, new)


# Early exits: behind some of its layers a model of one stack has heads of their own, so that it can answer there
# without the layers above (Teerapittayanon, McDanel, Kung, "BranchyNet", ICPR 2016; Xin et al., "DeeBERT", ACL 2020).
#
# In a checkpoint the heads behind layer N are `heads.exit_N.`, each by the name that it has behind the last layer.
#
# Shape letters: T tokens, N documents, H hidden width.


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
    """The layers behind which a learner has heads of their own, in order."""
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


def _replace(module: nn.Module, **children: object) -> None:
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


def normalized_entropy(logits_MC: Tensor) -> Tensor:
    """(M,) the entropy of the classes divided by its maximum: 0 for a certain class, 1 for a uniform prediction."""
    logs_MC = logits_MC.float().log_softmax(-1)
    return -(logs_MC.exp() * logs_MC).sum(-1) / math.log(max(logits_MC.shape[-1], 2))
