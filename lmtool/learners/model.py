"""A backbone with heads, edited by an optional tuning method: the part of a learner that a checkpoint contains.

Shape letters: T tokens, M selected tokens, F width of the states that heads read.
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
    """(M,) flat indices of the tokens at which a term predicts."""
    at = batch.targets[term].at
    if at is None:
        raise ValueError(f"the batch has no positions for {term}")
    return at


def hidden_at(
    read: Callable[..., Tensor], batch: Batch, indices: dict[str, Tensor], rng: DropoutRng | None
) -> dict[str, Tensor]:
    """The hidden states at the positions of each term, in one forward whose last layer computes each of them once.

    Args:
        read: a backbone, or a function with its signature.
        batch: the batch, on its device.
        indices: flat token indices (...) by term, from `batch.host`: their number is needed without synchronization.
        rng: dropout; None in evaluation.

    Returns:
        (..., H) by term.
    """
    read_M, at = torch.cat([index.flatten() for index in indices.values()]).unique(return_inverse=True)
    device = batch.inputs.tokens.device
    hidden_MH = read(batch.inputs, rng, read_M=send(read_M, device))
    parts = send(at, device).split([index.numel() for index in indices.values()])
    return {
        term: hidden_MH.index_select(0, part).view(*index.shape, hidden_MH.shape[-1])
        for (term, index), part in zip(indices.items(), parts, strict=True)
    }


class Tuning(Protocol):
    """The tuning method's interface to a learner, see `lmtool.tuning.base`."""

    def edit(self, learner: object, seed: int, new: Collection[str] | None = None) -> None: ...

    def merge(self, learner: object) -> None: ...

    def parameter_groups(self, learner: object) -> list[ParameterGroup]: ...

    def penalties(self, learner: object) -> dict[str, Tensor]: ...

    def on_step(self, learner: object, step: int) -> None: ...

    def delta(self, learner: object) -> set[str]: ...

    def fold(self, learner: Any) -> Any: ...


class TuningScheme(Protocol):
    """The interface of a scheme added to the tuning method, see `lmtool.tuning.schemes`."""

    def attach(self, learner: object, new: Collection[str] | None) -> None: ...

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None: ...

    def first_step(self, name: str, steps: int) -> int | None: ...

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]: ...

    def on_step(self, learner: object, step: int) -> None: ...

    def penalties(self, learner: object) -> dict[str, Tensor]: ...


class ModelWithHeads(nn.Module):
    """A backbone with heads, and optionally a tuning method. seed: initializes new heads."""

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__()
        self.seed = seed
        self.backbone: Backbone = backbone
        self.tokenizer: Any = None  # None if only weights are loaded
        self.heads = nn.ModuleDict()
        self.tuning: Tuning | None = None
        self.schemes: tuple[TuningScheme, ...] = ()
        self.added: frozenset[str] = frozenset()  # names of the parameters that the tuning method adds
        self.learning: frozenset[str] = frozenset()  # names of trainable parameters, from whatever step

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(self.backbone.parameters()).device

    @property
    def head_side(self) -> Side:
        """The side of a batch whose hidden states the heads read."""
        return "outputs" if isinstance(self.backbone, EncoderDecoder) else "inputs"

    @property
    def extracts(self) -> bool:
        """Whether the backbone is frozen, so that it only extracts features."""
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
        """The hidden states that heads read. A frozen backbone runs without gradient and without dropout.

        Args:
            inputs: the inputs.
            outputs: the decoder's side of an encoder-decoder; without it, the encoder's states are returned.
            rng: dropout; None in evaluation.
            read_M: flat indices of the tokens to return; None for all.
            tap: reads or replaces states between layers.

        Returns:
            (T, F), or (M, F) with `read_M`. F is the backbone's `feature_size`.
        """
        features = next((head for head in self.heads.values() if isinstance(head, LayerFeatures)), None)
        recorder = None if features is None else LayerRecorder(features, self.head_side, read_M, tap)
        tap, extracts = tap if recorder is None else recorder, self.extracts
        rng = None if extracts else rng
        with torch.no_grad() if extracts else nullcontext():
            if outputs is not None:
                states = self.backbone(inputs, rng, outputs, read_M=read_M, tap=tap)
            elif isinstance(self.backbone, EncoderDecoder):
                states = self.backbone.read_inputs(inputs, rng, read_M=read_M, tap=tap)
            else:
                states = self.backbone(inputs, rng, read_M=read_M, tap=tap)
        return states if recorder is None else recorder.read(states)

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens that a tuning method adds to every text."""
        return self.backbone.embed.virtual_count

    def add_head(self, name: str, head: nn.Module) -> None:
        """Adds a head, initialized like the backbone's family. UserError if the name is taken: users name the heads of
        tasks."""
        if name in self.heads:
            raise UserError(
                f"task.name={name} is the name of an existing head of the model", "choose another task.name"
            )
        self.heads[name] = head.to(self.device)
        self.backbone.initialize(head, self.seed, f"heads.{name}.")

    def tune(self, tuning: Tuning, new: Collection[str] | None = None, schemes: Sequence[TuningScheme] = ()) -> None:
        """Applies a tuning method, which decides from then on what is trainable, and schemes.

        Args:
            tuning: edits the model.
            new: names of parts that were not loaded from a checkpoint; None if unknown.
            schemes: attached after the tuning method.
        """
        before = {name for name, _ in self.named_parameters()}
        tuning.edit(self, self.seed, new)
        self.added = frozenset(name for name, _ in self.named_parameters()) - before
        self.learning = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        self.tuning, self.schemes = tuning, tuple(schemes)
        for scheme in self.schemes:
            scheme.attach(self, new)


# --- early exits --------------------------------------------------------------------------------------------------
#
# Additional heads after some layers of a single-stack model, which predict without the layers above (Teerapittayanon,
# McDanel, Kung, "BranchyNet", ICPR 2016; Xin et al., "DeeBERT", ACL 2020). In a checkpoint, the heads after layer N are
# `heads.exit_N.NAME`, with the names of the heads after the last layer.
#
# Shape letters: T tokens, N documents, H hidden width.

_EXIT = "exit_"
AnyLearner = TypeVar("AnyLearner", bound=ModelWithHeads)


def add_exits(learner: ModelWithHeads, depths: Collection[int]) -> None:
    """Adds newly initialized copies of a learner's heads after these layers, counted from 1."""
    final_heads = dict(learner.heads.items())
    for depth in depths:
        heads = nn.ModuleDict({name: copy.deepcopy(head) for name, head in final_heads.items()})
        learner.add_head(f"{_EXIT}{depth}", heads)


def exits_of(learner: ModelWithHeads) -> list[int]:
    """The numbers of the layers with exits, sorted."""
    names = (name.removeprefix(_EXIT) for name in learner.heads if name.startswith(_EXIT))
    return sorted(int(name) for name in names if name.isdecimal())


def is_exit(part: str) -> bool:
    """Whether a part of a learner (`heads.NAME`) belongs to an exit."""
    return part.startswith(f"heads.{_EXIT}")


def at_exit(learner: AnyLearner, depth: int | None) -> AnyLearner:
    """A view of a learner that ends at an exit. It shares the tensors, and the current training mode.

    depth: the layer of the exit; None for the last layer.
    """
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
    """Replaces submodules of a shallow copy without changing the original."""
    module.__dict__["_modules"] = {**module.__dict__["_modules"], **children}


class Segment(Tap):
    """A forward that continues after a layer, from the states of an earlier forward over the same texts, and records
    the states after a deeper layer.

    first: the layer of `states`, (T, H); 0 for the embedding. last: the layer whose output becomes `recorded`, (T, H)
    before the final norm; None to record nothing."""

    def __init__(self, first: int, states: Tensor | None, last: int | None):
        self.first, self.states, self.last = first, states, last
        self.recorded: Tensor | None = None

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        return None if self.states is None else (self.first, self.states)

    def wants(self, place: TapPoint) -> bool:
        return place.layer == self.last

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        self.recorded = x_TH
        return x_TH


def some_documents(batch: Batch, selected_N: Tensor) -> Batch:
    """A batch of the documents that a mask on the host selects, on the same device. The batch must have inputs only,
    and targets without spans."""
    host, device = batch.host, batch.inputs.tokens.device
    inputs = host.inputs
    selected_T = selected_N[inputs.documents]
    numbers = selected_N.nonzero()[:, 0].tolist()
    packed = Packed(
        inputs.tokens[selected_T],
        tuple(inputs.lengths[number] for number in numbers),
        {name: column[selected_T] for name, column in inputs.columns.items()},
        tuple(inputs.prefixes[number] for number in numbers) if inputs.prefixes else (),
    )
    new_index_T = selected_T.cumsum(0) - 1

    def of(target: Target) -> Target:
        if target.at is None:
            return target if target.labels is None else replace(target, labels=target.labels[selected_N])
        selected_M = selected_T[target.at]
        labels = None if target.labels is None else target.labels[selected_M]
        return replace(target, labels=labels, at=new_index_T[target.at[selected_M]])

    def rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[selected_N]

    some = replace(
        host,
        inputs=packed,
        targets={name: of(target) for name, target in host.targets.items()},
        examples=host.examples[selected_N],
        parts=host.parts[selected_N],
        rows=rows(host.rows),
        groups=rows(host.groups),
        source=None,
    )
    return some.to(device)


def normalized_entropy(logits_MC: Tensor) -> Tensor:
    """(M,) the entropy of the classes divided by its maximum: 0 for a certain class, 1 for a uniform prediction."""
    logs_MC = logits_MC.float().log_softmax(-1)
    return -(logs_MC.exp() * logs_MC).sum(-1) / math.log(max(logits_MC.shape[-1], 2))
