"""Linear layers with aligned rows: equal to torch under autocast, with few distinct shapes of products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lmtool.nn.linear import ROW_MULTIPLE, aligned_rows, apply_linear, linear
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
