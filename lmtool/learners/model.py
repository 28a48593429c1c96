"""A backbone with heads, edited by an optional tuning method: the part of a learner that a checkpoint contains.

Shape letters: T tokens, M selected tokens, H hidden width, F width of the states that heads read, V vocabulary, W
width of the token table.
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
    """Returns the labels (M,) of a term's targets."""
    labels = batch.targets[term].labels
    if labels is None:
        raise ValueError(f"the batch has no labels for {term}")
    return labels


def indices_of(batch: Batch, term: str) -> Tensor:
    """Returns the flat indices (M,) of the tokens at which a term predicts."""
    at = batch.targets[term].at
    if at is None:
        raise ValueError(f"the batch has no positions for {term}")
    return at


def hidden_at(
    forward: Callable[..., Tensor], batch: Batch, indices: dict[str, Tensor], rng: DropoutRng | None
) -> dict[str, Tensor]:
    """Returns the hidden states (..., H) that each term reads, from a single forward. A position that several terms
    read is computed once in the last layer.

    forward: a backbone, or a function with its signature. batch: on its device. indices: flat token indices (...) by
    term. They come from `batch.host`, because the number of distinct indices must be known without waiting for the
    device. rng: the dropout; None in evaluation.
    """
    read_M, inverse = torch.cat([index.flatten() for index in indices.values()]).unique(return_inverse=True)
    device = batch.inputs.tokens.device
    hidden_MH = forward(batch.inputs, rng, read_M=send(read_M, device))
    rows_by_term = send(inverse, device).split([index.numel() for index in indices.values()])
    return {
        term: hidden_MH.index_select(0, rows).view(*index.shape, hidden_MH.shape[-1])
        for (term, index), rows in zip(indices.items(), rows_by_term, strict=True)
    }


class Tuning(Protocol):
    """The interface of a tuning method, such as LoRA, to the model that it edits; see `lmtool.tuning.base`."""

    def edit(self, learner: object, seed: int, new: Collection[str] | None = None) -> None:
        """Edits the model after its weights are loaded: freezes, adds or replaces parameters. new: names of the
        submodules that were not loaded from a checkpoint; None if unknown."""

    def merge(self, learner: object) -> None:
        """Merges added parameters into the weights that the model had before, which gives a plain model."""

    def parameter_groups(self, learner: object) -> list[ParameterGroup]: ...

    def penalties(self, learner: object) -> dict[str, Tensor]: ...

    def on_step(self, learner: object, step: int) -> None: ...

    def delta_names(self, learner: object) -> set[str]:
        """Returns the names of the tensors by which the tuned model differs from the model before tuning."""
        ...

    def fold(self, learner: Any) -> Any:
        """Replaces modules that only training needs (such as the MLP that computes a prefix) by what they compute.
        Returns the configuration of the new model."""


class TuningScheme(Protocol):
    """The interface of a tuning scheme, such as gradual unfreezing, which is combined with a tuning method; see
    `lmtool.tuning.schemes`."""

    def attach(self, learner: object, new: Collection[str] | None) -> None: ...

    def set_steps_in_epoch(self, steps_in_epoch: Callable[[int], int]) -> None:
        """Called before training. steps_in_epoch: the number of steps of an epoch."""

    def first_step(self, name: str, steps: int) -> int | None:
        """Returns the first of `steps` steps in which a parameter is trained; None if never."""
        ...

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]: ...

    def on_step(self, learner: object, step: int) -> None: ...

    def penalties(self, learner: object) -> dict[str, Tensor]: ...


class ModelWithHeads(nn.Module):
    """A backbone with heads, and optionally a tuning method. seed: the seed that initializes new heads."""

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__()
        self.seed = seed
        self.backbone: Backbone = backbone
        self.tokenizer: Any = None  # None if only weights are loaded
        self.heads = nn.ModuleDict()
        self.tuning: Tuning | None = None
        self.schemes: tuple[TuningScheme, ...] = ()
        self.added_names: frozenset[str] = frozenset()  # names of the parameters that the tuning method adds
        self.trainable_names: frozenset[str] = frozenset()  # names of parameters that train at some step

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.backbone.parameters()).device

    @property
    def table_VW(self) -> Tensor:
        """The token table."""
        return self.backbone.embed.token.weight

    @property
    def head_side(self) -> Side:
        """The side of a batch (inputs or outputs) whose hidden states the heads read."""
        return "outputs" if isinstance(self.backbone, EncoderDecoder) else "inputs"

    @property
    def is_feature_extractor(self) -> bool:
        """Whether the backbone only extracts features, because all of its parameters are frozen."""
        parameters = [*self.backbone.parameters(), *(table.weight for table in self.backbone.embed.further_tables)]
        return not any(parameter.requires_grad for parameter in parameters)

    def hidden(
        self,
        inputs: Packed,
        outputs: Packed | None = None,
        rng: DropoutRng | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Returns the hidden states that the heads read: (T, F), or (M, F) with `read_M`. F is the backbone's
        `feature_size`. A frozen backbone runs without gradients and without dropout.

        outputs: the decoder's side of an encoder-decoder. Without it, the states of the encoder are returned. rng: the
        dropout; None in evaluation. read_M: flat indices of the tokens whose states are returned; None means all
        tokens. tap: reads or replaces the states between layers.
        """
        feature_head = next((head for head in self.heads.values() if isinstance(head, LayerFeatures)), None)
        recorder = None if feature_head is None else LayerRecorder(feature_head, self.head_side, read_M, tap)
        is_frozen = self.is_feature_extractor
        if recorder is not None:
            tap = recorder
        rng = None if is_frozen else rng
        with torch.no_grad() if is_frozen else nullcontext():
            if outputs is None:
                states = self.backbone.read_inputs(inputs, rng, read_M=read_M, tap=tap)
            else:
                states = self.backbone(inputs, rng, outputs, read_M=read_M, tap=tap)
        return states if recorder is None else recorder.read(states)

    @property
    def virtual_tokens(self) -> int:
        """The number of virtual tokens that a tuning method, such as prompt tuning, adds to every text."""
        return self.backbone.embed.virtual_count

    def add_head(self, name: str, head: nn.Module) -> None:
        """Adds a head and initializes it as the backbone's family does. Raises UserError if a head has this name
        already, since the name of a task, which users choose, becomes the name of its head."""
        if name in self.heads:
            raise UserError(
                f"task.name={name} is the name of an existing head of the model", "choose another task.name"
            )
        self.heads[name] = head.to(self.device)
        self.backbone.initialize(head, self.seed, f"heads.{name}.")

    def tune(self, tuning: Tuning, new: Collection[str] | None = None, schemes: Sequence[TuningScheme] = ()) -> None:
        """Applies a tuning method, which from then on selects the trainable parameters, and then tuning schemes. new:
        names of the submodules that were not loaded from a checkpoint; None if unknown."""
        names_before = {name for name, _ in self.named_parameters()}
        tuning.edit(self, self.seed, new)
        self.added_names = frozenset(name for name, _ in self.named_parameters()) - names_before
        self.trainable_names = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        self.tuning, self.schemes = tuning, tuple(schemes)
        for scheme in self.schemes:
            scheme.attach(self, new)


# --- early exits --------------------------------------------------------------------------------------------------
#
# Additional heads after some layers of a single-stack model, which predict without the layers above (Teerapittayanon,
# McDanel, Kung, "BranchyNet", ICPR 2016; Xin et al., "DeeBERT", ACL 2020). In a checkpoint, the heads after layer N are
# `heads.exit_N.NAME`, with the names of the heads after the last layer.
#
# Shape letters: T tokens, N documents, H hidden width, M targets, C classes.

_EXIT = "exit_"
AnyLearner = TypeVar("AnyLearner", bound=ModelWithHeads)


def add_exits(learner: ModelWithHeads, depths: Collection[int]) -> None:
    """Adds exits to a learner: one copy of its heads, with new weights, after each of the layers `depths`, counted
    from 1."""
    final_heads = dict(learner.heads.items())
    for depth in depths:
        heads = nn.ModuleDict({name: copy.deepcopy(head) for name, head in final_heads.items()})
        learner.add_head(f"{_EXIT}{depth}", heads)


def exits_of(learner: ModelWithHeads) -> list[int]:
    """Returns the numbers of the layers that have an exit, sorted."""
    names = (name.removeprefix(_EXIT) for name in learner.heads if name.startswith(_EXIT))
    return sorted(int(name) for name in names if name.isdecimal())


def is_exit(part: str) -> bool:
    """Returns whether a submodule of a learner belongs to an exit. part: its name, such as `heads.NAME`."""
    return part.startswith(f"heads.{_EXIT}")


def at_exit(learner: AnyLearner, depth: int | None) -> AnyLearner:
    """Returns a copy of a learner that predicts at an exit. The copy shares the tensors of the learner. learner: the
    learner with exits. depth: the number of the layer with the exit; None means the last layer."""
    if depth is None:
        return copy.copy(learner)
    backbone = cast(OneStack, learner.backbone)
    truncated_backbone = copy.copy(backbone)
    truncated_backbone.config = backbone.config.model_copy(update={"num_layers": depth})
    _replace_children(truncated_backbone, layers=nn.ModuleList(list(backbone.layers)[:depth]))
    view = copy.copy(learner)
    _replace_children(view, backbone=truncated_backbone, heads=learner.heads[f"{_EXIT}{depth}"])
    return view


def _replace_children(module: nn.Module, **children: object) -> None:
    """Replaces submodules of a shallow copy, without changing the module that it was copied from."""
    module.__dict__["_modules"] = {**module.__dict__["_modules"], **children}


class Segment(Tap):
    """A tap with which a forward skips the first layers: it continues from the states of an earlier forward over the
    same texts, and records the states after a deeper layer.

    start_layer: the number of the layer that computed `states`; 0 for the embedding. states: (T, H); None to start from
    the embedding of the inputs. end_layer: the number of the layer whose output becomes `recorded`, (T, H), before the
    final norm; None to record nothing.
    """

    def __init__(self, start_layer: int, states: Tensor | None, end_layer: int | None):
        self.start_layer, self.states, self.end_layer = start_layer, states, end_layer
        self.recorded: Tensor | None = None

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        return None if self.states is None else (self.start_layer, self.states)

    def wants(self, place: TapPoint) -> bool:
        return place.layer == self.end_layer

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        self.recorded = x_TH
        return x_TH


def select_documents(batch: Batch, selected_N: Tensor) -> Batch:
    """Returns a batch that has only the selected documents, on the same device. batch: a batch without outputs, whose
    targets have no spans. selected_N: (N,) bool on the host, which documents are selected."""
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

    def select_targets(target: Target) -> Target:
        if target.at is None:
            return target if target.labels is None else replace(target, labels=target.labels[selected_N])
        selected_M = selected_T[target.at]
        labels = None if target.labels is None else target.labels[selected_M]
        return replace(target, labels=labels, at=new_index_T[target.at[selected_M]])

    def select_rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[selected_N]

    selected = replace(
        host,
        inputs=packed,
        targets={name: select_targets(target) for name, target in host.targets.items()},
        examples=host.examples[selected_N],
        parts=host.parts[selected_N],
        rows=select_rows(host.rows),
        groups=select_rows(host.groups),
        source=None,
    )
    return selected.to(device)


def normalized_entropy(logits_MC: Tensor) -> Tensor:
    """Returns the entropy (M,) of each predicted distribution, divided by the maximum entropy of C classes: 0 if all
    probability is on one class, 1 if the distribution is uniform."""
    logs_MC = logits_MC.float().log_softmax(-1)
    return -(logs_MC.exp() * logs_MC).sum(-1) / math.log(max(logits_MC.shape[-1], 2))
