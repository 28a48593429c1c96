"""Linear layers with aligned rows: equal to torch under autocast, with few distinct shapes of products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lmtool.nn import linear as linear_module
from lmtool.nn.linear import ROW_MULTIPLE, PackedWeights, aligned_rows, apply_linear, linear, packed_products
from lmtool.nn.regions import is_plain

CPU_BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def operands(tokens, bias=True):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, 24), (40, 24), (40,)][: 3 if bias else 2]
    made = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    return made if bias else [*made, None]


def gradients_of(function, inputs):
    with torch.autocast(**CPU_BF16):
        out = function(*inputs)
    leaves = [tensor for tensor in inputs if tensor is not None]
    return out, torch.autograd.grad(out.float().square().sum(), leaves)


@pytest.mark.parametrize("tokens", [1, ROW_MULTIPLE - 1, ROW_MULTIPLE, ROW_MULTIPLE + 1, 3 * ROW_MULTIPLE - 7])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_match_autocast(tokens, bias):
    inputs = operands(tokens, bias)
    out, gradients = gradients_of(linear, inputs)
    expected, expected_gradients = gradients_of(F.linear, inputs)
    assert out.dtype == torch.bfloat16 and out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == other.dtype == torch.float32
        torch.testing.assert_close(gradient, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def test_frozen_weight_has_no_gradient():
    x, weight, bias = operands(ROW_MULTIPLE + 5)
    weight.requires_grad_(False)
    with torch.autocast(**CPU_BF16):
        linear(x, weight, bias).float().sum().backward()
    assert weight.grad is None and x.grad is not None and bias.grad is not None


def test_fp32_equals_torch_bitwise():
    inputs = operands(ROW_MULTIPLE + 1)
    assert torch.equal(linear(*inputs), F.linear(*inputs))


def test_bf16_rows_are_padded_with_zeros():
    x = torch.randn(ROW_MULTIPLE + 1, 3)
    rows = aligned_rows(x, torch.bfloat16)
    assert len(rows) == 2 * ROW_MULTIPLE and torch.equal(rows[: len(x)], x.bfloat16()) and not rows[len(x) :].any()
    assert aligned_rows(x, torch.float32) is x
    assert len(aligned_rows(x[:5], torch.bfloat16)) == 5


def test_products_of_all_batch_sizes_have_few_shapes(monkeypatch):
    seen, real = set(), F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.add(len(x)) or real(x, *rest))
    for tokens in range(ROW_MULTIPLE, 3 * ROW_MULTIPLE + 1):
        gradients_of(linear, operands(tokens))
    assert seen == {ROW_MULTIPLE, 2 * ROW_MULTIPLE, 3 * ROW_MULTIPLE}


def test_module_with_hook_is_called():
    module, x = nn.Linear(24, 40), torch.randn(ROW_MULTIPLE + 1, 24)
    module.register_forward_hook(lambda module, inputs, out: out + 1)
    assert not is_plain(module, nn.Linear)
    assert torch.equal(apply_linear(module, x), F.linear(x, module.weight, module.bias) + 1)


def packed(weights, layer, x):
    with torch.no_grad(), packed_products(weights):
        return apply_linear(layer, x)


@pytest.mark.parametrize("tokens", [1, 2, 48, 49, 130])
@pytest.mark.parametrize("outputs", [5, 40, 43])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_match_torch(tokens, outputs, bias):
    layer, x, weights = nn.Linear(24, outputs, bias), torch.randn(tokens, 24), PackedWeights()
    for _ in range(3):  # the second product copies the weight
        torch.testing.assert_close(packed(weights, layer, x), layer(x), rtol=0, atol=1e-5)


def test_packed_rows_do_not_depend_on_the_batch():
    layer, x, weights = nn.Linear(384, 96), torch.randn(48, 384), PackedWeights()
    packed(weights, layer, x)
    expected = packed(weights, layer, x)
    for tokens in (2, 3, 16, 29):
        assert torch.equal(packed(weights, layer, x[:tokens]), expected[:tokens])


def test_changed_weight_is_packed_again():
    layer, x, weights = nn.Linear(24, 40), torch.randn(9, 24), PackedWeights()
    for _ in range(3):
        packed(weights, layer, x)
        with torch.no_grad():
            layer.weight.mul_(2)
        for _ in range(3):
            torch.testing.assert_close(packed(weights, layer, x), layer(x), rtol=0, atol=1e-5)


def test_joint_weights_follow_changed_and_replaced_layers():
    layers, weights = [nn.Linear(24, 8) for _ in range(3)], PackedWeights()

    def check():
        weight, bias = weights.joint(*layers)
        assert torch.equal(weight, torch.cat([layer.weight for layer in layers]))
        assert torch.equal(bias, torch.cat([layer.bias for layer in layers]))
        assert weights.joint(*layers)[0] is weight

    check()
    with torch.no_grad():
        layers[2].bias.add_(1)
    check()
    layers[1] = nn.Linear(24, 8)
    check()
    layers.pop()
    check()


def test_copies_have_a_maximum_size_and_end_with_their_weights(monkeypatch):
    monkeypatch.setattr(linear_module, "_MAX_PACKED_BYTES", 2 * 24 * 40 * 4)
    layers, x, weights = [nn.Linear(24, 40) for _ in range(3)], torch.randn(9, 24), PackedWeights()

    def copies():
        for layer in layers:
            for _ in range(2):
                packed(weights, layer, x)
        return sum(copy is not None for _, copy in weights._copies.values())

    assert copies() == 2
    layers.pop(0)
    assert len(weights._copies) == 2 and copies() == 2
