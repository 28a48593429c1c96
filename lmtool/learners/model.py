"""A backbone and the heads on it, edited by a tuning method where there is one: what a learner is in a checkpoint.

Shape letters: T tokens, M of them that are read, F width of what heads read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.features import LayerFeatures, LayerRecorder
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.stack import Side, Tap
from lmtool.types import Packed, ParameterGroup


class Tuning(Protocol):
    """A tuning method as a learner knows it, see `lmtool.tuning.base`."""

    def edit(self, learner: Any, seed: int, new: Collection[str] | None = None) -> None: ...

    def merge(self, learner: Any) -> None: ...

    def parameter_groups(self, learner: Any) -> list[ParameterGroup]: ...

    def penalties(self, learner: Any) -> dict[str, Tensor]: ...

    def on_step(self, learner: Any, step: int) -> None: ...

    def delta(self, learner: Any) -> set[str]: ...

    def fold(self, learner: Any) -> Any: ...


class TuningScheme(Protocol):
    """A scheme beside the tuning method as a learner knows it, see `lmtool.tuning.schemes`."""

    def attach(self, learner: Any, new: Collection[str] | None) -> None: ...

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None: ...

    def first_step(self, name: str, steps: int) -> int | None: ...

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]: ...

    def on_step(self, learner: Any, step: int) -> None: ...

    def penalties(self, learner: Any) -> dict[str, Tensor]: ...


class ModelWithHeads(nn.Module):
    """A backbone and the heads on it, edited by a tuning method where there is one. seed: new heads derive
    from it."""

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__()
        self.seed = seed
        self.backbone: Backbone = backbone
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
