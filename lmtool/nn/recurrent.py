"""A recurrent layer over packed texts: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate
of Gers, Schmidhuber and Cummins 2000, and the projection of Sak, Senior and Beaufays 2014.

Texts run in lockstep, the longest first, so that a step covers the unfinished texts and nothing is padded (torch's
PackedSequence). The gates' products with the inputs are one product over all tokens; their products with the state are
one per step. The backward is written out: weights get their gradient from one product over all steps instead of a sum
over steps. On one core it takes 0.4 to 0.7 of the time of `torch.nn.LSTM`, which has no clipping.

Shape letters: T tokens, M selected tokens, N texts, R texts at a step, I input width, C cell width, P output width: C,
or that of the projection, G gates (4C), X any width.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lmtool.nn.attention import only
from lmtool.nn.cache import Cache
from lmtool.nn.context import Context
from lmtool.nn.dropout import Dropout
from lmtool.types import Segments, send


class State(NamedTuple):
    """State between steps, for each text in batch order. output_NP: the layer's last output. cell_NC: its memory."""

    output_NP: Tensor
    cell_NC: Tensor


@dataclass(frozen=True)
class Lockstep:
    """The steps in which packed texts are read together, in one direction. Shared by all layers that read a batch.

    sizes: texts at each step, on the host. tokens_T: the tokens in the order in which they are read, step by step,
    longer texts first. position_T: for each token, its index in `tokens_T`. order_N: the texts, longest first. last_N:
    for each text in batch order, the index of its last token in `tokens_T`; 0 for an empty text. empty_N: which texts
    are empty, None if none is.
    """

    sizes: tuple[int, ...]
    tokens_T: Tensor
    position_T: Tensor
    order_N: Tensor
    last_N: Tensor
    empty_N: Tensor | None

    @classmethod
    def of(cls, texts: Segments, reverse: bool = False) -> Lockstep:
        """texts: contiguous from 0. reverse: read each text from its last token to its first."""
        lengths, starts = np.asarray(texts.lengths, dtype=np.int64), np.asarray(texts.starts, dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        sorted_lengths = lengths[order]
        steps = np.arange(int(lengths.max(initial=0)))[:, None]
        active = steps < sorted_lengths
        offsets = sorted_lengths - 1 - steps if reverse else np.broadcast_to(steps, active.shape)
        tokens = (starts[order] + offsets)[active]
        position = np.empty_like(tokens)
        position[tokens] = np.arange(len(tokens))
        ends = np.where(lengths > 0, starts if reverse else starts + lengths - 1, 0)
        last = position[ends] if len(position) else np.zeros_like(ends)

        def tensor(values: np.ndarray) -> Tensor:
            return send(torch.from_numpy(values), texts.device)

        empty = tensor(lengths == 0) if (lengths == 0).any() else None
        sizes = tuple(int(size) for size in active.sum(1))
        return cls(sizes, tensor(tokens), tensor(position), tensor(order), tensor(last), empty)


class LstmCell(nn.Module):
    """One layer in one direction; gates in the order input, forget, cell, output, as in torch.

    projection_size: P, None for no projection. cell_clip, projection_clip: bounds of the cell and of the projected
    values at every step, None for none. Weight names are torch's; there is one bias.
    """

    def __init__(
        self,
        input_size: int,
        cell_size: int,
        projection_size: int | None = None,
        cell_clip: float | None = None,
        projection_clip: float | None = None,
    ):
        super().__init__()
        if projection_size is None and projection_clip is not None:
            raise ValueError("there is no projection to clip")
        self.cell_size, self.output_size = cell_size, cell_size if projection_size is None else projection_size
        self.cell_clip, self.projection_clip = cell_clip, projection_clip
        self.weight_ih = nn.Parameter(torch.empty(4 * cell_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * cell_size, self.output_size))
        self.bias = nn.Parameter(torch.zeros(4 * cell_size))
        self.weight_hr: nn.Parameter | None
        if projection_size is None:
            self.register_parameter("weight_hr", None)
        else:
            self.weight_hr = nn.Parameter(torch.empty(projection_size, cell_size))

    @torch.no_grad()
    def open_forget_gates(self) -> None:
        """Sets the forget gates' biases to 1 and the others to 0, so that a new cell remembers (Jozefowicz, Zaremba and
        Sutskever 2015)."""
        self.bias.zero_()
        self.bias[self.cell_size : 2 * self.cell_size] = 1.0

    def saved_activations(self, keys: float, read: float) -> tuple[float, float]:
        """Returns the inputs; gates, the cell state before and after its activation, and the output."""
        return self.weight_ih.shape[1], 6 * self.cell_size + 2 * self.output_size

    def forward(self, x_TI: Tensor, steps: Lockstep, state: State | None = None) -> tuple[Tensor, State]:
        """Returns (T, P): outputs, and the states after the last token of each text. state: the state before the first
        token; None for zeros. An empty text keeps its state."""
        gates_TG = F.linear(x_TI, self.weight_ih, self.bias).index_select(0, steps.tokens_T)
        # Sums over many steps stay in full precision for every type of the products.
        state_dtype = torch.promote_types(gates_TG.dtype, torch.float32)
        if state is None:
            texts = len(steps.order_N)
            state = State(
                gates_TG.new_zeros(texts, self.output_size, dtype=state_dtype),
                gates_TG.new_zeros(texts, self.cell_size, dtype=state_dtype),
            )
        output_NP, cell_NC = (part.to(state_dtype).index_select(0, steps.order_N) for part in state)
        clips = self.cell_clip, self.projection_clip
        with torch.autocast(x_TI.device.type, enabled=False):
            output_TP, cells_TC = _Recurrence.apply(
                gates_TG, self.weight_hh, self.weight_hr, output_NP, cell_NC, steps.sizes, clips
            )
        end_state = State(end_values(output_TP, steps, state.output_NP), end_values(cells_TC, steps, state.cell_NC))
        return output_TP.index_select(0, steps.position_T), end_state


def end_values(values_TX: Tensor, steps: Lockstep, before_NX: Tensor) -> Tensor:
    """Returns (N, X): the value after the last token of each text, in batch order. before_NX: those of empty texts."""
    if not len(values_TX):
        return before_NX
    ends_NX = values_TX.index_select(0, steps.last_N)
    return ends_NX if steps.empty_N is None else torch.where(steps.empty_N[:, None], before_NX, ends_NX)


class _Recurrence(torch.autograd.Function):
    """All steps of a layer. sizes: texts at each step. Returns outputs (T, P) and cells (T, C). Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        weight_hh: Tensor,
        weight_hr: Tensor | None,
        output: Tensor,
        cell: Tensor,
        sizes: tuple[int, ...],
        clips: tuple[float | None, float | None],
    ) -> tuple[Tensor, Tensor]:
        cell_clip, projection_clip = clips
        product_dtype, state_dtype, C = gates.dtype, output.dtype, cell.shape[1]
        state_weight = weight_hh.to(product_dtype).T
        projection = None if weight_hr is None else weight_hr.to(product_dtype).T
        gates = gates.to(state_dtype, copy=True)
        cells, tanhs = gates.new_empty(len(gates), C), gates.new_empty(len(gates), C)
        all_outputs = gates.new_empty(len(gates), output.shape[1])
        previous_output, previous_cell, start = output, cell, 0
        for size in sizes:
            rows = slice(start, start + size)
            step, cell_R, tanh_R = gates[rows], cells[rows], tanhs[rows]
            if product_dtype == state_dtype:
                step.addmm_(previous_output[:size], state_weight)
            else:
                step += previous_output[:size].to(product_dtype) @ state_weight
            step[:, : 2 * C].sigmoid_()
            step[:, 2 * C : 3 * C].tanh_()
            step[:, 3 * C :].sigmoid_()
            torch.mul(step[:, C : 2 * C], previous_cell[:size], out=cell_R)
            cell_R.addcmul_(step[:, :C], step[:, 2 * C : 3 * C])
            if cell_clip is not None:
                cell_R.clamp_(-cell_clip, cell_clip)
            torch.tanh(cell_R, out=tanh_R)
            output_R = step[:, 3 * C :] * tanh_R
            if projection is not None:
                output_R = (output_R.to(product_dtype) @ projection).to(state_dtype)
                if projection_clip is not None:
                    output_R.clamp_(-projection_clip, projection_clip)
            all_outputs[rows] = output_R
            previous_output, previous_cell, start = all_outputs[rows], cell_R, start + size
        ctx.save_for_backward(gates, cells, tanhs, all_outputs, output, cell, weight_hh, weight_hr)
        ctx.sizes, ctx.clips, ctx.product_dtype = sizes, clips, product_dtype
        ctx.set_materialize_grads(False)
        return all_outputs, cells

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gates, cells, tanhs, all_outputs, output, cell, weight_hh, weight_hr = ctx.saved_tensors
        (grad_outputs, grad_cells), (cell_clip, projection_clip) = gradients, ctx.clips
        if grad_outputs is None and grad_cells is None:
            return (None,) * 7
        C, product_dtype, state_dtype = cell.shape[1], ctx.product_dtype, output.dtype
        previous_outputs = _previous_values(all_outputs, output, ctx.sizes)
        previous_cells = _previous_values(cells, cell, ctx.sizes)
        inputs, forgets, candidates, outputs = gates.split(C, 1)
        # Derivatives of the gates, for all steps at once.
        slopes = torch.stack(
            [
                candidates * inputs * (1 - inputs),
                previous_cells * forgets * (1 - forgets),
                inputs * (1 - candidates * candidates),
                tanhs * outputs * (1 - outputs),
            ],
            1,
        )
        cell_slopes = outputs * (1 - tanhs * tanhs)
        if cell_clip is not None:
            in_cell_clip = cells.abs() < cell_clip
        # Gradients of the outputs, to which those of later steps are added.
        totals = torch.zeros_like(all_outputs) if grad_outputs is None else grad_outputs.to(state_dtype, copy=True)
        if projection_clip is not None:
            in_output_clip = all_outputs.abs() < projection_clip
        gate_gradients = torch.empty_like(slopes)
        hidden_gradients = torch.zeros_like(cells) if grad_cells is None else grad_cells.to(state_dtype, copy=True)
        state_weight = weight_hh.to(product_dtype)
        projection = None if weight_hr is None else weight_hr.to(product_dtype)
        output_gradient, cell_gradient = torch.zeros_like(output), torch.zeros_like(cell)
        start, later_size = len(gates), 0
        for size in reversed(ctx.sizes):
            start -= size
            rows = slice(start, start + size)
            total = totals[rows]
            if later_size:
                total[:later_size] += output_gradient[:later_size]
            if projection_clip is not None:
                total *= in_output_clip[rows]
            hidden = total if projection is None else (total.to(product_dtype) @ projection).to(state_dtype)
            cell_total = hidden_gradients[rows]
            if later_size:
                cell_total[:later_size] += cell_gradient[:later_size]
            cell_total.addcmul_(hidden, cell_slopes[rows])
            if cell_clip is not None:
                cell_total *= in_cell_clip[rows]
            step = gate_gradients[rows]
            torch.mul(cell_total[:, None], slopes[rows, :3], out=step[:, :3])
            torch.mul(hidden, slopes[rows, 3], out=step[:, 3])
            torch.mul(cell_total, forgets[rows], out=cell_gradient[:size])
            output_gradient[:size] = step.view(size, -1).to(product_dtype) @ state_weight
            later_size = size
        flat = gate_gradients.view(len(gates), -1).to(product_dtype)
        grad_weight_hh = (flat.T @ previous_outputs.to(product_dtype)).to(weight_hh.dtype)
        grad_weight_hr = None
        if weight_hr is not None:
            grad_weight_hr = (totals.to(product_dtype).T @ (outputs * tanhs).to(product_dtype)).to(weight_hr.dtype)
        return flat, grad_weight_hh, grad_weight_hr, output_gradient, cell_gradient, None, None


def _previous_values(values: Tensor, first: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Returns (T, X): the values of the previous step at each index. first: (N, X) before the first step."""
    parts, start = [first[: sizes[0]]] if sizes else [values[:0]], 0
    for size, following in zip(sizes, sizes[1:], strict=False):
        parts.append(values[start : start + following])
        start += size
    return torch.cat(parts)


# Recurrent layers in a stack, whose states a cache can hold.


@lru_cache(maxsize=8)
def steps_of(texts: Segments, reverse: bool = False) -> Lockstep:
    """Returns the steps of packed texts, left to right or right to left, cached for all layers that read a batch."""
    return Lockstep.of(texts, reverse)


class StateCache:
    """The states of a recurrent layer after the tokens it has read, instead of keys and values."""

    accumulates = True

    def __init__(self, cache: Cache):
        self.state: tuple[Tensor, ...] | None = None

    def of(self, cache: Cache) -> StateCache:
        """Returns the same state in another cache."""
        return copy(self)

    def keep(self, state: tuple[Tensor, ...]) -> None:
        """Stores the state after the new tokens, from which the next ones start."""
        self.state = state

    def select(self, rows_R: Tensor) -> None:
        """Keeps only these documents."""
        if self.state is not None:
            self.state = tuple(part.index_select(0, rows_R) for part in self.state)


class SegmentStates(StateCache):
    """The states before a segment and, separately, those after it: a layer may read its segment again."""

    accumulates = False

    def __init__(self, before: State):
        self.state: tuple[Tensor, ...] | None = before
        self.after: tuple[Tensor, ...] = before

    def keep(self, state: tuple[Tensor, ...]) -> None:
        self.after = state


class RecurrentLayer(nn.Module):
    """An LSTM as a left-to-right layer of a stack, followed by dropout."""

    def __init__(self, cell: LstmCell, dropout: float):
        super().__init__()
        self.cell = cell
        self.dropout = Dropout(dropout)

    def forward(self, x_TI: Tensor, context: Context) -> Tensor:
        """Maps (T, I) to (T, P), or (M, P) of the selected tokens."""
        cache: StateCache | None = context.cache
        before = None if cache is None or cache.state is None else State(*cache.state)
        output_TP, state = self.cell(x_TI, steps_of(context.packed.segments), before)
        if cache is not None:
            cache.keep(state)
        return self.dropout(only(output_TP, context.read_M), context.read_rng)


Reset = Literal["before", "after"]
"""Where a GRU applies its reset gate: before the product with the state (Cho et al. 2014) or after it (torch)."""


def next_gru_state(read_RG: Tensor, state_RC: Tensor, weight_GC: Tensor, bias_G: Tensor, reset: Reset) -> Tensor:
    """Returns (R, C): the states after a step. Gates are those of torch.nn.GRU, in its order: reset, update, new.

    read_RG: the products of the gates with what the step reads. weight_GC, bias_G: the map of the state.
    """
    width = 2 * state_RC.shape[1]
    if reset == "after":
        old_RG = F.linear(state_RC, weight_GC, bias_G)
        open_R2C = (read_RG[:, :width] + old_RG[:, :width]).sigmoid()
        reset_RC, update_RC = open_R2C.chunk(2, -1)
        new_RC = (read_RG[:, width:] + reset_RC * old_RG[:, width:]).tanh()
    else:
        open_R2C = (read_RG[:, :width] + F.linear(state_RC, weight_GC[:width], bias_G[:width])).sigmoid()
        reset_RC, update_RC = open_R2C.chunk(2, -1)
        new_RC = (read_RG[:, width:] + F.linear(reset_RC * state_RC, weight_GC[width:], bias_G[width:])).tanh()
    return torch.lerp(new_RC, state_RC.to(new_RC.dtype), update_RC)


class BidirectionalGru(nn.Module):
    """A GRU in both directions as a layer of a stack, followed by dropout. reset=after is torch.nn.GRU, which has no
    other form; its weights, with their names, are those of both forms.

    It computes in the type of its weights, because autocast would always use fp16 for cuDNN, which needs a gradient
    scaler.
    """

    def __init__(self, input_size: int, state_size: int, dropout: float, reset: Reset = "before"):
        super().__init__()
        self.cell = nn.GRU(input_size, state_size, bidirectional=True)
        self.dropout, self.reset = Dropout(dropout), reset

    def saved_activations(self, keys: float, read: float) -> tuple[float, float]:
        """Returns the inputs and, for each direction, gates, their parts and states."""
        return 0.0, self.cell.input_size + 2 * 7 * self.cell.hidden_size

    def forward(self, x_TI: Tensor, context: Context) -> Tensor:
        """Maps (T, I) to (T, 2C), or (M, 2C) of the selected tokens: states left to right, then right to left."""
        if not len(x_TI):
            states_TP = x_TI.new_zeros(0, 2 * self.cell.hidden_size)
        else:
            wide_TI, read = x_TI.to(next(self.cell.parameters()).dtype), context.packed.segments
            with torch.autocast(x_TI.device.type, enabled=False):
                if self.reset == "after":
                    states_TP = self._states_of_torch(wide_TI, steps_of(read))
                else:
                    sides = (steps_of(read), "l0"), (steps_of(read, reverse=True), "l0_reverse")
                    states_TP = torch.cat([self._states(wide_TI, steps, side) for steps, side in sides], -1)
        return self.dropout(only(states_TP, context.read_M), context.read_rng)

    def _states_of_torch(self, x_TI: Tensor, steps: Lockstep) -> Tensor:
        sequence = PackedSequence(x_TI.index_select(0, steps.tokens_T), torch.tensor(steps.sizes))
        states_TP: Tensor = self.cell(sequence)[0].data
        return states_TP.index_select(0, steps.position_T)

    def _states(self, x_TI: Tensor, steps: Lockstep, side: str) -> Tensor:
        weight_ih, weight_hh, bias_ih, bias_hh = (
            getattr(self.cell, f"{name}_{side}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        state_RC, states = x_TI.new_zeros(len(steps.order_N), self.cell.hidden_size), []
        for read_RG in F.linear(x_TI, weight_ih, bias_ih).index_select(0, steps.tokens_T).split(steps.sizes):
            state_RC = next_gru_state(read_RG, state_RC[: len(read_RG)], weight_hh, bias_hh, "before")
            states.append(state_RC)
        return torch.cat(states).index_select(0, steps.position_T)
