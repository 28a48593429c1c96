"""Types shared by all packages.

Shape letters: T tokens of a packed batch, N documents in it, M predicting positions, H hidden width, V vocabulary, C
classes.

A batch is *packed*: the real tokens of its documents are concatenated without padding. A "document" here is one packed
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

# For each tensor on a device that `send` made: the host tensor that it is a copy of.
_host_tensors = WeakTensorKeyDictionary()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. Host tensors are copied from pinned memory, without waiting; a copy from
    pageable memory would wait for all work queued on the device."""
    if tensor.device.type == "cpu" and device.type != "cpu":
        on_device = tensor.pin_memory().to(device, non_blocking=True)
        _host_tensors[on_device] = tensor
        return on_device
    return tensor.to(device)


def on_host(tensor: Tensor) -> Tensor:
    """Returns the tensor on the host, for plans. A tensor that `send` copied to a device is returned as it was sent,
    without waiting for the device; any other tensor is copied."""
    source = _host_tensors.get(tensor)
    return tensor.cpu() if source is None else source


def receive(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors on the host, after waiting for the device once for all of them."""
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


@dataclass(frozen=True)
class Segments:
    """The documents in a flat tensor.

    starts: first flat index of each document. lengths: its number of tokens. Both are on the host. device: the device
    of the index tensors.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    device: torch.device = torch.device("cpu")

    @classmethod
    def packed(cls, lengths: tuple[int, ...], device: torch.device = torch.device("cpu")) -> Segments:  # noqa: B008
        """Contiguous documents."""
        return cls((0, *accumulate(lengths))[: len(lengths)], tuple(lengths), device)

    @cached_property
    def contiguous(self) -> bool:
        """Whether the documents are concatenated from index 0, so that every token is in exactly one of them."""
        return self.starts == Segments.packed(self.lengths).starts

    @cached_property
    def occupied(self) -> Segments:
        """The contiguous documents that have tokens."""
        if all(self.lengths):
            return self
        return Segments.packed(tuple(length for length in self.lengths if length), self.device)

    @cached_property
    def cu_lengths(self) -> Tensor:
        """(N+1,) int32 on the device: cumulative lengths from 0 of contiguous segments, as the variable-length kernels
        expect them. All layers that read a batch share this copy."""
        return send(torch.tensor((0, *accumulate(self.lengths)), dtype=torch.int32), self.device)


@dataclass(frozen=True)
class Packed:
    """Concatenated documents.

    tokens: (T,) int64. lengths: N lengths that sum to T, on the host, so that plans need no device sync. columns: more
    (T, ...) tensors by name ("segment", ...), read by the embedding or mask that names them. prefixes: N numbers of
    leading tokens that the whole document attends to in a causal model, on the host; () for none.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    columns: dict[str, Tensor] = field(default_factory=dict)
    prefixes: tuple[int, ...] = ()

    @cached_property
    def segments(self) -> Segments:
        """Segments of the documents."""
        return Segments.packed(self.lengths, self.tokens.device)

    @property
    def starts(self) -> tuple[int, ...]:
        """First flat index of each document, on the host."""
        return self.segments.starts

    @cached_property
    def documents(self) -> Tensor:
        """(T,) int64: the document each token belongs to."""
        numbers_N = torch.arange(len(self.lengths), device=self.tokens.device)
        # Given output_size, torch does not wait for the device to compute it.
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
    """What one loss term predicts.

    labels: (M,) int64 classes, (M,) float32 values, (M, C) float32 soft labels or (M, 2) int64 token offsets within a
    document (a span's first and last token); None if the step computes them. at: (M,) int64 flat indices of predicting
    tokens; None means one label per document, at the token the head chooses (first, last, mean). span: (M, 2) int64
    flat inclusive boundaries. side: the side of the batch that `at` indexes.
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
    """The lanes of joined text that the documents of a batch are segments of, on the host (data/loader.py).

    numbers: lane of each document. read: number of tokens of its lane before the document; 0 for all documents or for
    none. count: number of lanes.
    """

    numbers: tuple[int, ...]
    read: tuple[int, ...]
    count: int

    @property
    def complete(self) -> bool:
        """Whether the batch has every lane once, in order."""
        return self.numbers == tuple(range(self.count))


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    inputs: read by the encoder or the decoder-only model. outputs: read by a second stack, already shifted. targets: by
    name of the term. examples: (N,) int64 example numbers, for keyed randomness. parts: (N,) int32 window or choice
    within the example. rows: (N,) int64 table rows of the documents, by which predictions are joined; None without a
    table. groups: (N,) int64 documents that are compared with each other. lanes: the lanes of the documents, for
    joined text. source: the batch on the host that this one is a copy of.
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
        """Returns the batch on the device; `host` stays."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            outputs=None if self.outputs is None else self.outputs.to(device),
            targets={name: target.to(device) for name, target in self.targets.items()},
            source=self.host,
        )

    @property
    def host(self) -> Batch:
        """The batch as the loader built it: computing on it does not wait for the device."""
        return self if self.source is None else self.source

    @property
    def tokens(self) -> int:
        """Real tokens in the batch, both sides."""
        return sum(self.inputs.lengths) + (sum(self.outputs.lengths) if self.outputs is not None else 0)


@dataclass(frozen=True)
class StepOutput:
    """The result of a forward pass over one micro-batch.

    sums: by term, the *sum* of the losses of its targets (a scalar with gradient). The loop divides each sum once
    by the number of its targets in all micro-batches and devices. loss_weights: by term, its coefficient in the loss.
    """

    sums: dict[str, Tensor]
    loss_weights: dict[str, float]


@dataclass(frozen=True)
class Scores:
    """The scores of one term in evaluation: M targets, each with its own loss.

    losses: (M,) float32. labels: (M,) as in the target. predictions: (M,) int64 or float32, the best class or the
    value. documents: (M,) int64, the document of each target.
    """

    losses: Tensor
    labels: Tensor
    predictions: Tensor
    documents: Tensor

    def cpu(self) -> Scores:
        """Returns the scores on the host."""
        return Scores(*receive(self.losses, self.labels, self.predictions, self.documents))


def part_of(name: str) -> str:
    """Returns the part of a model to which a tensor belongs: `backbone`, `objective` or `heads.NAME`."""
    components = name.split(".")
    return ".".join(components[:2]) if components[0] == "heads" else components[0]


@dataclass
class ParameterGroup:
    """Parameters that share a learning rate (as a multiple of the schedule's) and a weight decay (as a multiple of the
    optimizer's)."""

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    learning_rate_scale: float = 1.0
    weight_decay_scale: float = 1.0


@runtime_checkable
class Learner(Protocol):
    """What the loop trains; the loop knows nothing else. An `nn.Module` whose tensors are named `backbone.`,
    `heads.NAME.` and `objective.`."""

    def counts(self, batch: Batch) -> dict[str, float]:
        """Returns how many targets each term has in this batch, known without a forward pass."""

    def __call__(self, batch: Batch, step: int) -> StepOutput: ...

    def penalties(self) -> dict[str, Tensor]:
        """Returns the terms that are added once per step, whatever the batch (a pull towards the pretrained weights,
        ...)."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """Returns the trainable parameters. Frozen ones are in no group."""

    def on_step(self, step: int) -> None:
        """Called before the forward pass of each optimizer step, with the step number from 1."""


@dataclass(frozen=True)
class Step:
    """The data of one optimizer step: its micro-batches on the host, and the cursor of the next step.

    cursor: plain data from which `Loader.steps` resumes. epoch: epochs read after this step, fractions included. phase:
    number of its phase, from 1; None without phases. rate_scale: learning rate as a multiple of the schedule's. idle:
    micro-batches that run without counting, so that all processes run equally many.
    """

    batches: list[Batch]
    cursor: dict[str, int]
    epoch: float
    phase: int | None = None
    rate_scale: float = 1.0
    idle: tuple[Batch, ...] = ()


@runtime_checkable
class Loader(Protocol):
    """The loop's source of data. The order is a function of (seed, epoch), so a cursor is two counters."""

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterable[Step]:
        """Yields steps from the cursor on (None: from the start), epoch after epoch, without end. With several
        processes, a step has the batches of process `rank` of `ranks`, and idle ones if other ranks have more."""

    def steps_in_epoch(self, epoch: int) -> int: ...

    def metadata(self) -> dict[str, Any]:
        """Returns the number of examples, tokens per epoch, mean length, truncated and padding fractions, for the
        screens and the report."""


@runtime_checkable
class Phased(Loader, Protocol):
    """A loader whose steps change at fractions of the run, so that it has to know the run's length."""

    def mean_tokens(self, budget: str) -> float:
        """Returns the mean tokens per step of a run that ends with this budget."""

    def stretch(self, budget: str) -> float:
        """Returns the number of steps of a run that ends with this budget, divided by that of a run whose steps are
        all like the first."""

    def fix(self, steps: int, budget: str) -> None:
        """Sets the number of steps, and the budget that ends the run. Until then the first phase applies."""
