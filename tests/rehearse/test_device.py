"""The simulated CUDA device: operations that it refuses, and operations that count as waits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lmtool.nn.kernels import flash_attention
from lmtool.nn.layout import Full, Layout
from lmtool.types import Segments, on_host, receive, send
from tests.rehearse.device import CUDA

pytestmark = pytest.mark.rehearse


def on_device(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype, device=CUDA)


REFUSED = {
    "two devices": (lambda: on_device(3) + torch.ones(3), "on the same device"),
    "an index of the device on the host": (lambda: torch.ones(3).index_select(0, on_device(1).long()), "same device"),
    "a product of integers": (lambda: on_device(2, 2).long() @ on_device(2, 2).long(), "integers"),
    "a product of two types": (lambda: on_device(2, 2) @ on_device(2, 2).double(), "different types"),
    "pinning": (lambda: on_device(3).pin_memory(), "cannot pin"),
    "an array": (lambda: on_device(3).numpy(), "numpy"),
    "a GRU in half precision": (lambda: half_gru(on_device(4, 3)), "gru_cell in torch.bfloat16"),
    "flash of heads of 12": (lambda: flash(on_device(4, 2, 12, dtype=torch.bfloat16)), "flash attention of"),
    "flash in fp32": (lambda: flash(on_device(4, 2, 16)), "flash attention of torch.float32"),
    "flash of strided heads": (lambda: flash(on_device(4, 2, 17, dtype=torch.bfloat16)[:, :, :16]), "strides"),
    "flash by offsets of the host": (
        lambda: flash(on_device(4, 2, 16, dtype=torch.bfloat16), torch.device("cpu")),
        "same device|offsets of",
    ),
}  # fmt: skip


def half_gru(x):
    with torch.autocast("cuda", torch.bfloat16):
        return nn.GRU(3, 5).to(CUDA)(x[:, None])


def flash(x, device=CUDA):
    segments = Segments.packed((3, 1), device)
    return flash_attention(x, x, x, Layout(segments, segments, Full()), None)


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_operation_is_refused(case, cuda):
    call, message = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError), match=message):
        call()


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a list": lambda x: x[[0, 1]],
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "assigned by a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "a tensor of numbers": lambda x: torch.tensor([1, 2], device=CUDA),
    "pageable memory": lambda x: torch.ones(3).to(CUDA, non_blocking=True),
    "a blocking copy": lambda x: torch.ones(3).pin_memory().to(CUDA),
    "equal": lambda x: torch.equal(x, x),
}
NO_WAITS = {
    "a sum": lambda x: x.sum() + 1,
    "a product": lambda x: F.linear(x, torch.eye(3, device=CUDA)),
    "a number": lambda x: x * torch.tensor(2.0),
    "a slice": lambda x: x[1:],
    "an index": lambda x: x[torch.arange(2, device=CUDA)],
    "pinned memory": lambda x: torch.ones(3).pin_memory().to(CUDA, non_blocking=True),
    "sent": lambda x: send(torch.ones(3), CUDA),
    "sent and read on the host": lambda x: on_host(send(torch.ones(3), CUDA)),
    "received": lambda x: receive(x, x.long()),
    "repeats of a known number": lambda x: x.repeat_interleave(x.long(), output_size=3),
}


@pytest.mark.parametrize("case", WAITS)
def test_synchronizing_operation_is_counted_as_a_wait(case, cuda):
    x = on_device(3)
    assert not cuda.waits
    WAITS[case](x)
    assert cuda.waits.total() >= 1
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        WAITS[case](x)


@pytest.mark.parametrize("case", NO_WAITS)
def test_asynchronous_operation_is_no_wait(case, cuda):
    NO_WAITS[case](on_device(3))
    assert not cuda.waits


def test_pending_copy_has_no_values_before_synchronization(cuda):
    """A non-blocking copy to the host, read before and after a synchronization."""
    x = torch.arange(3.0).to(CUDA)
    copy = x.to("cpu", non_blocking=True)
    x += 1
    assert copy.isnan().all()
    torch.cuda.synchronize()
    assert copy.tolist() == [0.0, 1.0, 2.0]
    assert receive(x)[0].tolist() == [1.0, 2.0, 3.0]


def test_modules_keep_their_parameters_on_the_device(cuda):
    """Tied tables stay tied."""
    first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    second.weight = first.weight
    parameter = first.weight
    model = nn.Sequential(first, second).to(CUDA)
    assert model[0].weight is model[1].weight is parameter and parameter.device == CUDA
    assert len(list(model.parameters())) == 3


def test_allocated_memory_is_counted(cuda):
    x = on_device(1000)
    view = x.view(10, 100)
    assert torch.cuda.memory_allocated() == 4000
    del x
    assert torch.cuda.memory_allocated() == 4000 and view.shape == (10, 100)
    del view
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4000


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layer_matches_cpu(kind, cuda):
    plain, ours = kind(3, 5, bidirectional=True), kind(3, 5, bidirectional=True)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(4, 2, 3)
    for layer, read in ((plain, x), (ours.to(CUDA), x.to(CUDA))):
        layer(read)[0].square().sum().backward()
    for theirs, mine in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    assert cuda.kernels[f"{kind.__name__.lower()}_cell"]
