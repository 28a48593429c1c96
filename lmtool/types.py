"""The shapes that cross rooms.

Shape letters: T tokens of a packed batch, N documents in it, M places that predict, H hidden width, V vocabulary,
C classes.

A batch is *packed*: the real tokens of its documents laid end to end, no padding. "Document" here is one packed
sequence that attention does not leave: a text, a pair of texts, a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# The tensors of the host that those on a device were sent from.
_sent = WeakTensorKeyDictionary()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. One of the host goes there from pinned memory, so that neither waits for the other: a
    copy from pageable memory waits for all that the device has still to do."""
    if tensor.device.type == "cpu" and device.type != "cpu":
        sent = tensor.pin_memory().to(device, non_blocking=True)
        _sent[sent] = tensor
        return sent
    return tensor.to(device)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, for plans. Of one that was sent to a device it is what was sent, which nobody waits for;
    another is copied."""
    source = _sent.get(tensor)
    return tensor.cpu() if source is None else source


def receive(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on the host, for one wait together."""
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


@dataclass(frozen=True)
class Segments:
    """Where documents lie in a flat tensor: first index and number of tokens of each, on the host.

    device: where the index tensors are wanted.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    device: torch.device = torch.device("cpu")

    @classmethod
    def packed(cls, lengths: tuple[int, ...], device: torch.device = torch.device("cpu")) -> Segments:  # noqa: B008
        """Documents laid end to end."""
        return cls((0, *accumulate(lengths))[: len(lengths)], tuple(lengths), device)

    @cached_property
    def contiguous(self) -> bool:
        """Whether they are laid end to end from 0, so that every token is in exactly one of them."""
        return self.starts == Segments.packed(self.lengths).starts

    @cached_property
    def occupied(self) -> Segments:
        """The contiguous documents that have tokens."""
        if all(self.lengths):
            return self
        return Segments.packed(tuple(length for length in self.lengths if length), self.device)

    @cached_property
    def cu_lengths(self) -> Tensor:
        """(N+1,) int32 on the device: 0 and the cumulative lengths of contiguous segments, as the variable-length
        kernels want them. All layers of all stacks that read a batch share this one copy."""
        return send(torch.tensor((0, *accumulate(self.lengths)), dtype=torch.int32), self.device)


@dataclass(frozen=True)
class Packed:
    """Documents laid end to end.

    tokens: (T,) int64. lengths: N lengths that add up to T, on the host, so that plans need no device sync.
    columns: further (T, ...) tensors by name ("segment", ...), read by the embedding or mask that names them.
    prefixes: N numbers of tokens at the start of each document that all of it sees in a model that reads left to
    right, on the host; () for none.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    columns: dict[str, Tensor] = field(default_factory=dict)
    prefixes: tuple[int, ...] = ()

    @cached_property
    def segments(self) -> Segments:
        """Where the documents lie."""
        return Segments.packed(self.lengths, self.tokens.device)

    @property
    def starts(self) -> tuple[int, ...]:
        """First flat index of each document, on the host."""
        return self.segments.starts

    @cached_property
    def documents(self) -> Tensor:
        """(T,) int64: the document each token belongs to."""
        numbers_N = torch.arange(len(self.lengths), device=self.tokens.device)
        # With the size said, the device is not asked for it.
        return numbers_N.repeat_interleave(self.segments.cu_lengths.diff(), output_size=len(self.tokens))

    @cached_property
    def positions(self) -> Tensor:
        """(T,) int64: position within its document, from 0."""
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.segments.cu_lengths[self.documents]

    def to(self, device: torch.device) -> Packed:
        columns = {name: send(column, device) for name, column in self.columns.items()}
        return replace(self, tokens=send(self.tokens, device), columns=columns)


@dataclass(frozen=True)
class Target:
    """What one term predicts.

    labels: (M,) int64 classes, (M,) float32 values, (M, C) float32 soft labels or (M, 2) int64 places within a
    document (a span's first and last token); None where the step makes them.
    at: (M,) int64 flat token indices that predict; None means one label a document, at the place the head chooses
    (first, last, mean). span: (M, 2) int64 flat inclusive borders. side: which side of the batch `at` counts in.
    """

    labels: Tensor | None
    at: Tensor | None = None
    span: Tensor | None = None
    side: Literal["inputs", "outputs"] = "inputs"

    def to(self, device: torch.device) -> Target:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else send(tensor, device)

        return replace(self, labels=move(self.labels), at=move(self.at), span=move(self.span))


@dataclass(frozen=True)
class Lanes:
    """Which lanes of a running text the documents of a batch are segments of, on the host (data/loader.py).

    numbers: the lane of each document. read: how many tokens of its lane come before it; 0 in all or in none of them.
    count: how many lanes there are.
    """

    numbers: tuple[int, ...]
    read: tuple[int, ...]
    count: int

    @property
    def complete(self) -> bool:
        """Whether it is all of them, in their order."""
        return self.numbers == tuple(range(self.count))


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    inputs: what the (encoder or decoder-only) model reads. outputs: what a second stack reads, shifted already.
    targets: by the name of the term. examples: (N,) int64 numbers of the examples, for keyed randomness. parts: (N,)
    int32 window or choice within the example. rows: (N,) int64 numbers of the table's rows that the documents are of,
    by which predictions are joined; None where they are of no table. groups: (N,) int64 documents that are compared
    with each other. lanes: of text that is read in lanes, which its documents are of. source: the batch this one was
    moved from.
    """

    inputs: Packed
    targets: dict[str, Target]
    examples: Tensor
    parts: Tensor
    outputs: Packed | None = None
    rows: Tensor | None = None
    groups: Tensor | None = None
    lanes: Lanes | None = None
    source: Batch | None = field(default=None, repr=False)

    def to(self, device: torch.device) -> Batch:
        """The batch on the device; `host` stays."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            outputs=None if self.outputs is None else self.outputs.to(device),
            targets={name: target.to(device) for name, target in self.targets.items()},
            source=self.host,
        )

    @property
    def host(self) -> Batch:
        """The batch as the loader made it: what is computed from this one does not wait for the device."""
        return self if self.source is None else self.source

    @property
    def tokens(self) -> int:
        """Real tokens in the batch, both sides."""
        return sum(self.inputs.lengths) + (sum(self.outputs.lengths) if self.outputs is not None else 0)


@dataclass(frozen=True)
class StepOutput:
    """What a forward of one micro-batch gives the loop.

    sums: by term, the *sum* of the losses of its targets (a scalar with gradient). The loop divides each once by
    its count over all micro-batches and devices. weights: by term, its coefficient in the loss.
    """

    sums: dict[str, Tensor]
    weights: dict[str, float]


@dataclass(frozen=True)
class Scores:
    """What evaluation reads of one term: M targets, each with its own loss.

    losses: (M,) float32. labels: (M,) as in the target. predictions: (M,) int64 or float32, the best class or the
    value. documents: (M,) int64, the document of the batch each target lies in.
    """

    losses: Tensor
    labels: Tensor
    predictions: Tensor
    documents: Tensor

    def cpu(self) -> Scores:
        """The scores on the host."""
        return Scores(*receive(self.losses, self.labels, self.predictions, self.documents))


def part_of(name: str) -> str:
    """The part a tensor belongs to: `backbone`, `objective` or `heads.NAME`."""
    pieces = name.split(".")
    return ".".join(pieces[:2]) if pieces[0] == "heads" else pieces[0]


@dataclass
class ParameterGroup:
    """Parameters that share a learning rate (as a multiple of the schedule's) and a weight decay (as a multiple
    of the optimizer's)."""

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    learning_rate_scale: float = 1.0
    weight_decay_scale: float = 1.0


@runtime_checkable
class Learner(Protocol):
    """What the loop trains. It never knows more than this. An `nn.Module` whose tensors are named `backbone.`,
    `heads.NAME.` and `objective.`."""

    def counts(self, batch: Batch) -> dict[str, float]:
        """How much each term predicts in this batch, known without a forward."""

    def __call__(self, batch: Batch, step: int) -> StepOutput: ...

    def penalties(self) -> dict[str, Tensor]:
        """Terms added once a step whatever the batch (towards the pretrained weights, ...)."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """What learns. Frozen parameters are in no group."""

    def on_step(self, step: int) -> None:
        """Called before the forward of each optimizer step, with the step's number from 1."""


@dataclass(frozen=True)
class Step:
    """The data of one optimizer step: its micro-batches on the host, and the cursor of the step after it.

    cursor: plain data that `Loader.steps` takes to resume exactly there. epoch: whole and broken epochs read after
    this step. phase: the phase of the run it belongs to, from 1; None of a run without phases. rate_scale: its learning
    rate as a multiple of the schedule's. idle: micro-batches that are run and count nothing, where other processes have
    more of this step, so that all run as many.
    """

    batches: list[Batch]
    cursor: dict[str, int]
    epoch: float
    phase: int | None = None
    rate_scale: float = 1.0
    idle: tuple[Batch, ...] = ()


@runtime_checkable
class Loader(Protocol):
    """Where the loop gets its data. Order is a function of (seed, epoch), so a cursor is two counters."""

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterable[Step]:
        """Steps from the cursor on (None: from the beginning), without end: an epoch follows the other. Of several
        processes, the share of one, `rank` of `ranks`: its batches, and idle ones where others have more."""

    def steps_in_epoch(self, epoch: int) -> int: ...

    def facts(self) -> dict[str, Any]:
        """Examples, tokens an epoch, mean length, truncated and padding fractions: for the screens and the report."""


@runtime_checkable
class Phased(Loader, Protocol):
    """A loader whose steps change at shares of the run: it must know how long the run is."""

    def mean_tokens(self, budget: str) -> float:
        """Tokens of a step, mean over a run that this budget ends."""

    def stretch(self, budget: str) -> float:
        """Steps of a run that this budget ends, as a multiple of those it would have if all were like the first."""

    def fix(self, steps: int, budget: str) -> None:
        """The run has so many steps, and this budget ends it. Until it is known the first phase lasts."""
