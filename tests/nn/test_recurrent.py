"""Recurrent layers against torch's and, with clipping, a plain cell; carried states; independence of packed texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lmtool.nn.context import Context
from lmtool.nn.layout import Full, Layout
from lmtool.nn.positions import Position
from lmtool.nn.recurrent import BidirectionalGru, Lockstep, LstmCell, Reset, State
from lmtool.types import Packed, Segments

LENGTHS = (3, 1, 6, 0, 4)


def drawn(projection: int | None, clips: tuple[float | None, float | None] = (None, None), inputs: int = 3) -> LstmCell:
    torch.manual_seed(1)
    layer = LstmCell(inputs, 5, projection, *clips).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    return layer


def plain(layer: LstmCell, x_TI: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One text, step by step, by the definition: the output of each step, and the last states."""
    (given, cell), outputs = state, []
    for x_I in x_TI:
        gates = layer.weight_ih @ x_I + layer.weight_hh @ given + layer.bias
        write, forget, new, read = gates.chunk(4)
        cell = forget.sigmoid() * cell + write.sigmoid() * new.tanh()
        if layer.cell_clip is not None:
            cell = cell.clamp(-layer.cell_clip, layer.cell_clip)
        given = read.sigmoid() * cell.tanh()
        if layer.weight_hr is not None:
            given = layer.weight_hr @ given
        if layer.projection_clip is not None:
            given = given.clamp(-layer.projection_clip, layer.projection_clip)
        outputs.append(given)
    return (torch.stack(outputs) if outputs else x_TI.new_zeros(0, layer.output_size)), given, cell


def gradients(outputs: Tensor, layer: nn.Module, *inputs: Tensor) -> list[Tensor]:
    weighted = (outputs * torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)).sum()
    return list(torch.autograd.grad(weighted, [*inputs, *layer.parameters()]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("projection", "clips"), [(None, (None, None)), (2, (None, None)), (4, (0.4, 0.25))])
def test_packed_texts_match_a_plain_cell(projection, clips, reverse):
    layer, torch_generator = drawn(projection, clips), torch.Generator().manual_seed(2)
    x_TI = torch.randn(sum(LENGTHS), 3, dtype=torch.float64, generator=torch_generator).requires_grad_()
    given = torch.randn(
        len(LENGTHS), layer.output_size, dtype=torch.float64, generator=torch_generator
    ).requires_grad_()
    cell = (torch.randn(len(LENGTHS), 5, dtype=torch.float64, generator=torch_generator) / 4).requires_grad_()

    out_TP, after = layer(x_TI, Lockstep.of(Segments.packed(LENGTHS), reverse), State(given, cell))
    texts = [
        plain(layer, text.flip(0) if reverse else text, (given[number], cell[number]))
        for number, text in enumerate(x_TI.split(LENGTHS))
    ]
    expected = torch.cat([text[0].flip(0) if reverse else text[0] for text in texts])
    expected_after = torch.stack([torch.cat(text[1:]) for text in texts])

    torch.testing.assert_close(out_TP, expected)
    torch.testing.assert_close(torch.cat(after, 1), expected_after)
    if clips[0] is not None:
        assert (after.cell_NC.abs() == clips[0]).any() and (out_TP.abs() == clips[1]).any(), "nothing was clipped"
    ours = gradients(torch.cat([out_TP.flatten(), *(part.flatten() for part in after)]), layer, x_TI, given, cell)
    theirs = gradients(
        torch.cat([expected.flatten(), expected_after[:, : layer.output_size].flatten(),
                   expected_after[:, layer.output_size :].flatten()]),
        layer, x_TI, given, cell,
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("projection", [None, 2])
def test_lstm_matches_torch(projection):
    layer, lengths = drawn(projection), tuple(length for length in LENGTHS if length)
    theirs = nn.LSTM(3, 5, proj_size=projection or 0).double()
    named = {"weight_ih_l0": layer.weight_ih, "weight_hh_l0": layer.weight_hh, "bias_ih_l0": layer.bias}
    named |= {"bias_hh_l0": torch.zeros(20)} | ({} if projection is None else {"weight_hr_l0": layer.weight_hr})
    theirs.load_state_dict(named)
    x_TI = torch.randn(sum(lengths), 3, dtype=torch.float64)
    packed = nn.utils.rnn.pack_sequence(list(x_TI.split(lengths)), enforce_sorted=False)

    out_TP, _ = layer(x_TI, Lockstep.of(Segments.packed(lengths)))
    torch.testing.assert_close(out_TP, torch.cat(nn.utils.rnn.unpack_sequence(theirs(packed)[0])))


def test_carried_state_continues_a_text_and_texts_are_independent():
    layer, x_TI = drawn(2, (0.5, 0.3)), torch.randn(14, 3, dtype=torch.float64)
    whole, after = layer(x_TI, Lockstep.of(Segments.packed((6, 8))))
    first, carried = layer(torch.cat([x_TI[:4], x_TI[6:9]]), Lockstep.of(Segments.packed((4, 3))))
    second, ended = layer(torch.cat([x_TI[4:6], x_TI[9:]]), Lockstep.of(Segments.packed((2, 5))), carried)

    torch.testing.assert_close(torch.cat([first[:4], second[:2], first[4:], second[2:]]), whole)
    torch.testing.assert_close(tuple(ended), tuple(after))
    alone, _ = layer(x_TI[6:], Lockstep.of(Segments.packed((8,))))
    torch.testing.assert_close(alone, whole[6:])


def test_empty_text_has_empty_output_and_zero_state():
    layer = drawn(2)
    out_TP, after = layer(torch.zeros(0, 3, dtype=torch.float64), Lockstep.of(Segments.packed((0,))))
    assert out_TP.shape == (0, 2) and not after.cell_NC.any()


def test_bf16_autocast_keeps_states_in_fp32():
    layer, x_TI = drawn(2, (3.0, 3.0)).float(), torch.randn(14, 3)
    steps = Lockstep.of(Segments.packed(LENGTHS))
    full, _ = layer(x_TI, steps)
    with torch.autocast("cpu", torch.bfloat16):
        half, after = layer(x_TI, steps)
        half.sum().backward()
    assert half.dtype == after.cell_NC.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.05)
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def test_open_forget_gates_sets_the_forget_bias_to_one():
    layer = drawn(None)
    layer.open_forget_gates()
    assert layer.bias.tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10


def test_projection_clip_without_projection_is_refused():
    with pytest.raises(ValueError, match="no projection"):
        LstmCell(3, 5, projection_clip=3.0)


@pytest.mark.parametrize("reset", ["before", "after"])
def test_gru_computes_in_the_dtype_of_the_weights(reset: Reset) -> None:
    """Autocast does not change it; cuDNN would otherwise run in fp16."""
    layer, read = BidirectionalGru(6, 5, 0.0, reset), []
    layer.cell.register_forward_pre_hook(
        lambda cell, inputs: read.append((inputs[0].data.dtype, torch.is_autocast_enabled("cpu")))
    )
    x_TI = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    packed = Packed(torch.zeros(7, dtype=torch.int64), (4, 3))
    context = Context(packed, Layout.of(packed, Full()), packed.positions, Position())
    plain = layer(x_TI, context)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x_TI, context), plain)
        assert layer(x_TI, context).dtype == torch.float32
    assert read == ([] if reset == "before" else [(torch.float32, False)] * 3)
