"""A CUDA device simulated on a CPU, with values: operations that a GPU refuses raise errors, and operations that the
host waits for are counted, with the calling line of lmtool.

`CudaTensor` is a tensor whose device is cuda:0, also for autocast and autograd; its values are in a CPU tensor. A
dispatch mode intercepts every operation before it is computed there:
- an operation on tensors of both devices is refused, as are types without a CUDA kernel, and violations of the
  unchecked preconditions of flash attention (types, strides, sizes, offsets);
- an operation that returns a value to the host (`item`, `nonzero`, a mask as an index, a copy in either direction that
  is not both pinned and non-blocking) is a wait; a non-blocking copy to the host has no values until a synchronization;
- kernels of CUDA only (flash, fused recurrent cells) are computed by plain formulas.
A function mode intercepts the few calls that never reach the dispatcher. Processes communicate over gloo. Not
simulated: time, parallel streams, the numerics of GPU kernels, compilers, FSDP, NCCL.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.utils._device
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.weak import WeakTensorKeyDictionary

import lmtool
from lmtool.nn import kernels
from lmtool.training import compiling, engine, group, profiling
from tests.nn.kernel_stand_ins import flash_on_cpu

CUDA = torch.device("cuda", 0)
LMTOOL = str(Path(lmtool.__file__).parent) + "/"
MEMORY = 80 * 10**9

# Functions whose frames determine the phase of a run.
PHASES = {
    ("training/step.py", "gradients"): "step",
    ("training/step.py", "apply_gradients"): "step",
    ("training/health.py", "watch"): "step",
    ("training/health.py", "check"): "row",
    ("training/step.py", "row"): "row",
    ("training/loop.py", "score"): "evaluation",
    ("training/loop.py", "save"): "checkpoint",
}


class Place(NamedTuple):
    """phase: of a run. line: of lmtool, followed by its caller's line."""

    phase: str
    line: str


def place() -> Place:
    """The current phase and line of lmtool. The backward pass has another thread, without the frames of the step."""
    lines: list[str] = []
    phase, otherwise = ("around", "elsewhere") if _is_main() else ("step", "backward")
    for frame in callers():
        name = frame.f_code.co_filename
        if name.startswith(LMTOOL):
            inside = name[len(LMTOOL) :]
            if len(lines) < 2:
                lines.append(f"{inside}:{frame.f_lineno}")
            if (inside, frame.f_code.co_name) in PHASES:
                phase = PHASES[inside, frame.f_code.co_name]
                break
    return Place(phase, " < ".join(lines) or otherwise)


def callers() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class Device:
    """Counts of operations. waits: operations that the host waited for, by place. products: matrix products by type and
    place. kernels: of attention and recurrent cells. debug: the mode of `torch.cuda.set_sync_debug_mode`."""

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, Place]] = Counter()
        self.products: Counter[tuple[str, Place]] = Counter()
        self.kernels: Counter[str] = Counter()
        self.debug = "default"
        self.allocated = self.peak = 0
        self._coming: list[tuple[Tensor, Tensor]] = []
        self._holders: Counter[int] = Counter()

    def wait(self, what: str) -> None:
        """Records an implicit synchronization, and synchronizes."""
        self.waits[what, place()] += 1
        self.synchronize()
        if self.debug == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {place().line}")
        if self.debug == "warn":
            ours = (__file__, os.path.dirname(torch.__file__))  # on a GPU, the frames between are C++
            caller = next(frame for frame in callers() if not frame.f_code.co_filename.startswith(ours))
            warnings.warn_explicit(
                "called a synchronizing CUDA operation", UserWarning, caller.f_code.co_filename, caller.f_lineno
            )

    def synchronize(self, *_: Any) -> None:
        """Completes all pending copies to the host."""
        for target, value in self._coming:
            target.copy_(value)
        self._coming.clear()

    def fetch(self, value: Tensor) -> Tensor:
        """A copy on the host whose values arrive at the next synchronization."""
        target = torch.full_like(value, torch.nan if value.is_floating_point() else -1 if value.is_signed() else 0)
        self._coming.append((target, value.clone()))
        return target

    def hold(self, value: Tensor, times: int) -> None:
        """Counts the memory of a new (1) or deleted (-1) tensor of the device."""
        if value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        at, before = storage.data_ptr(), self._holders[storage.data_ptr()]
        self._holders[at] = before + times
        if bool(before) != bool(before + times):
            self.allocated += times * storage.nbytes()
            self.peak = max(self.peak, self.allocated)


device = Device()


class WaitRow(NamedTuple):
    """phase, line: see `Place`. operation: the operation that the host waited for."""

    phase: str
    line: str
    operation: str


def wait_rows(of: Device) -> list[tuple[str, str, str, int]]:
    """A device's waits as plain data: the fields of a `WaitRow`, and a count."""
    return [(*where, what, count) for (what, where), count in of.waits.items()]


def wait_lines(rows: Counter[WaitRow], tests: Counter[WaitRow] | None = None) -> Iterator[str]:
    """Waits as a table, those of steps first. tests: the number of tests with each wait."""
    phases = ("step", "row", "evaluation", "checkpoint", "around")
    for row in sorted(rows, key=lambda row: (phases.index(row.phase), -rows[row])):
        within = f" in {tests[row]:>3} tests" if tests else ""
        yield f"{row.phase:<11}{rows[row]:>7,}{within}  {row.operation}  {row.line}"


class CudaTensor(torch.Tensor):
    """A tensor of the device. value: the CPU tensor with its values."""

    value: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor, requires_grad: bool = False) -> CudaTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            layout=value.layout, device=CUDA, requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, value: Tensor, requires_grad: bool = False):
        assert not isinstance(value, CudaTensor)
        self.value = value
        device.hold(value, 1)

    def __del__(self) -> None:
        device.hold(self.value, -1)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(function, types, args, kwargs or {})

    # With these two methods, modules keep their parameters when they move to the device, as on CUDA.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> CudaTensor:
        return CudaTensor(inner["value"])

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        copy = CudaTensor(self.value.detach().clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        return memo.setdefault(id(self), copy)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return CudaTensor, (self.value.detach().clone(), self.requires_grad)

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.value!r})"


# --- refused operations, and waits ---------------------------------------------------------------------------------

PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")}
# Operations without kernels for integers.
FLOATING = PRODUCTS | {"aten::_softmax", "aten::_log_softmax"}
READS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "_unique2",
        "unique_consecutive", "unique_dim", "bincount", "_linalg_check_errors", "linalg_eigh",
    )
}  # fmt: skip
INDEXES = {f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_")}
# Operations whose tensors without dimensions must be on the device, too.
STRICT = PRODUCTS | {
    f"aten::{name}" for name in ("embedding", "index_select", "gather", "cat", "stack", "_fused_adamw_", "_fused_adam_")
}
FLASH = {"torch_attn::_varlen_attn": 1, "aten::_flash_attention_forward": 1}
FLASH_BACKWARD = {"torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"}


class Operation(NamedTuple):
    """name: of the operation with its overload. base: the name without the overload. aliases: whether it returns an
    argument or a view of one."""

    name: str
    base: str
    aliases: bool


@cache
def operation(function: Any) -> Operation:
    schema = function._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return Operation(name, schema.name, any(given.alias_info is not None for given in schema.returns))


def refuse(message: str) -> RuntimeError:
    return RuntimeError(f"{message}, at {place().line}")


def require_one_device(of: Operation, ours: list[CudaTensor], others: list[Tensor]) -> None:
    """Beside tensors of the device, a tensor of the host must be a scalar or an index."""
    if not ours or of.base in INDEXES or "nested" in of.base:
        return
    if any(tensor.ndim or of.base in STRICT for tensor in others):
        raise refuse(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {of.name}")


def require_types(of: Operation, ours: list[CudaTensor]) -> None:
    """Matrix products on CUDA need floating-point tensors of one type."""
    if of.base not in FLOATING:
        return
    kinds = {tensor.dtype for tensor in ours}
    if not all(kind.is_floating_point for kind in kinds):
        raise refuse(f'"{of.base}" not implemented for integers on CUDA')
    if len(kinds) > 1:
        raise refuse(f"{of.base} of different types: {sorted(map(str, kinds))}")
    if of.base in PRODUCTS:
        device.products[str(kinds.pop()).removeprefix("torch."), place()] += 1


def require_flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int) -> None:
    """Preconditions that the kernel does not check: rows aligned to 16 bytes, and int32 offsets on the device."""
    for tensor in (q, k, v):
        steps = (*tensor.stride()[:-1], tensor.storage_offset(), tensor.shape[-1])
        good = tensor.dtype in (torch.float16, torch.bfloat16) and tensor.ndim == 3 and tensor.shape[-1] <= 256
        if not (good and isinstance(tensor, CudaTensor) and tensor.stride(-1) == 1 and not any(at % 8 for at in steps)):
            raise refuse(f"flash attention of {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}")
    for offsets in (cu_q, cu_k):
        if not isinstance(offsets, CudaTensor) or offsets.dtype != torch.int32 or not offsets.is_contiguous():
            raise refuse(f"flash attention by offsets of {offsets.dtype} on {offsets.device}")
    if len(cu_q) != len(cu_k) or len(cu_q) < 2 or any(type(size) is not int or size < 1 for size in longest[:2]):
        raise refuse(f"flash attention of {len(cu_q)} and {len(cu_k)} offsets, of at most {longest[:2]} tokens")


def note_reads(of: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Records operations whose result the host needs before it continues."""
    sized = kwargs.get("output_size") is not None
    if of.base in READS or (of.name == "aten::repeat_interleave.Tensor" and not sized):
        device.wait(of.name)
    for index in args[1] if of.base in INDEXES else ():
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            device.wait(f"{of.name} by a mask")
        elif index is not None and not isinstance(index, CudaTensor) and index.numel():
            device.wait(f"{of.name} by indices of the host")


# --- computation ---------------------------------------------------------------------------------------------------


def value_of(tree: Any) -> Any:
    return tree.value if isinstance(tree, CudaTensor) else tree


def placed(tree: Any) -> Any:
    """Plain tensors as tensors of the device."""
    return CudaTensor(tree) if type(tree) in (torch.Tensor, torch.nn.Parameter) else tree


def dispatched(function: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(kind not in (torch.Tensor, torch.nn.Parameter, CudaTensor) for kind in types):
        return NotImplemented  # jagged tensors hold tensors of the device
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in leaves if isinstance(tensor, CudaTensor)]
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted)
    if not ours and (wanted is None or wanted.type != "cuda"):
        pins = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        if pins:
            PINNED[result] = True
        return result
    of = operation(function)
    if (special := SPECIAL.get(of.base)) is not None:
        return special(function, *args, **kwargs)
    if of.base.startswith("c10d::"):
        return exchanged(function, args, kwargs)
    require_one_device(of, ours, [tensor for tensor in leaves if not isinstance(tensor, CudaTensor)])
    require_types(of, ours)
    note_reads(of, args, kwargs)
    if of.base in FLASH:
        require_flash(*args[:7])
    if of.base in FLASH or of.base in FLASH_BACKWARD:
        device.kernels[of.base.partition("::")[2]] += 1
    return computed(function, args, kwargs, wanted)


def computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: torch.device | None = None) -> Any:
    """The result of an operation, computed on the values."""
    plain_args, plain_kwargs = pytree.tree_map(value_of, (args, kwargs))
    plain_kwargs |= {} if wanted is None else {"device": torch.device("cpu")}
    result = function(*plain_args, **plain_kwargs)
    if wanted is not None and wanted.type == "cpu":
        return result
    result = pytree.tree_map(placed, result)
    return return_and_correct_aliasing(function, args, kwargs, result) if operation(function).aliases else result


def to_copy(function: Any, source: Tensor, **kwargs: Any) -> Tensor:
    """`aten::_to_copy`, between devices or on one."""
    target = torch.device(kwargs.pop("device", None) or source.device)
    blocks = not kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    value = function(value_of(source), **kwargs)
    if target.type == "cuda":
        if not isinstance(source, CudaTensor):
            enter(source, blocks)
        return CudaTensor(value)
    if not blocks:
        return device.fetch(value)
    device.wait("copy to the host")
    return value


PINNED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def enter(source: Tensor, blocks: bool) -> None:
    """Records the wait for a copy from the host to the device, if any."""
    if source not in PINNED:
        device.wait("copy to the device from memory that is not pinned")
    elif blocks:
        device.wait("copy to the device that blocks")


def copy_(function: Any, target: Tensor, source: Tensor, blocking: bool = False, **kwargs: Any) -> Tensor:
    """`aten::copy_`: its third argument is non_blocking."""
    blocks = not (blocking or kwargs.get("non_blocking"))
    if isinstance(target, CudaTensor) and not isinstance(source, CudaTensor) and source.ndim:
        enter(source, blocks)
    elif isinstance(source, CudaTensor) and not isinstance(target, CudaTensor):
        device.wait("copy to the host")
    function(value_of(target), value_of(source))
    return target


def exchanged(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective operation over gloo, into the given tensors."""
    plain_args, plain_kwargs = pytree.tree_map(value_of, (args, kwargs))
    _, work = function(*plain_args, **plain_kwargs)
    return args[0], work


def require_wide(cell: str, inputs: Tensor) -> None:
    """Autocast always runs cuDNN's recurrent layers in fp16, so they must be called outside of it."""
    device.kernels[cell] += 1
    if inputs.dtype != torch.float32:
        raise refuse(f"a {cell} in {inputs.dtype} under autocast")


def gru_cell(
    function: Any, inputs: Tensor, states: Tensor, before: Tensor, input_bias: Tensor, state_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """`aten::_thnn_fused_gru_cell`: (R, C) states, and the workspace for its backward."""
    require_wide("gru_cell", inputs)
    inputs, states, before, input_bias, state_bias = map(value_of, (inputs, states, before, input_bias, state_bias))
    (reset, update, new), (own_reset, own_update, own_new) = (
        gates.chunk(3, 1) for gates in (inputs + input_bias, states + state_bias)
    )
    reset, update = (reset + own_reset).sigmoid(), (update + own_update).sigmoid()
    new = (new + reset * own_new).tanh()
    kept = torch.cat([reset, update, new, before, own_new], 1)
    return CudaTensor(new + update * (before - new)), CudaTensor(kept)


def gru_cell_backward(function: Any, gradient: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """`aten::_thnn_fused_gru_cell_backward`: gradients of inputs, states, the previous state, and both biases."""
    gradient, (reset, update, new, before, own_new) = value_of(gradient), value_of(kept).chunk(5, 1)
    for_new = gradient * (1 - update) * (1 - new * new)
    for_update = gradient * (before - new) * update * (1 - update)
    for_reset = for_new * own_new * reset * (1 - reset)
    for_inputs = torch.cat([for_reset, for_update, for_new], 1)
    for_states = torch.cat([for_reset, for_update, for_new * reset], 1)
    parts = for_inputs, for_states, gradient * update, for_inputs.sum(0), for_states.sum(0)
    return tuple(map(CudaTensor, parts))


def lstm_cell(
    function: Any, inputs: Tensor, states: Tensor, before: Tensor, input_bias: Tensor, state_bias: Tensor
) -> tuple[Tensor, ...]:
    """`aten::_thnn_fused_lstm_cell`: (R, C) outputs and cells, and the gates, (R, 4C)."""
    require_wide("lstm_cell", inputs)
    inputs, states, before, input_bias, state_bias = map(value_of, (inputs, states, before, input_bias, state_bias))
    write, forget, new, read = (inputs + states + input_bias + state_bias).chunk(4, 1)
    write, forget, new, read = write.sigmoid(), forget.sigmoid(), new.tanh(), read.sigmoid()
    cell = forget * before + write * new
    return tuple(map(CudaTensor, (read * cell.tanh(), cell, torch.cat([write, forget, new, read], 1))))


def lstm_cell_backward(
    function: Any,
    for_output: Tensor | None,
    for_cell: Tensor | None,
    before: Tensor,
    cell: Tensor,
    gates: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    """`aten::_thnn_fused_lstm_cell_backward_impl`: gradients of the gates, the previous cell, and the bias."""
    before, cell, (write, forget, new, read) = value_of(before), value_of(cell), value_of(gates).chunk(4, 1)
    outer, inner = (torch.zeros_like(cell) if each is None else value_of(each) for each in (for_output, for_cell))
    inner = inner + outer * read * (1 - cell.tanh() ** 2)
    parts = [
        inner * new * write * (1 - write), inner * before * forget * (1 - forget), inner * write * (1 - new * new),
        outer * cell.tanh() * read * (1 - read),
    ]  # fmt: skip
    for_gates = torch.cat(parts, 1)
    return tuple(map(CudaTensor, (for_gates, inner * forget, for_gates.sum(0))))


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::_to_copy": to_copy,
    "aten::copy_": copy_,
    "aten::_fused_sdp_choice": lambda *_, **__: 0,  # plain formulas
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
}


class Operations(TorchDispatchMode):
    """Intercepts every operation."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(function, types, args, kwargs or {})


# --- calls that do not reach the dispatcher ------------------------------------------------------------------------


def made(real: Any, data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    """`torch.tensor` and `torch.as_tensor`: created on the host, then copied."""
    if device is None or torch.device(device).type != "cuda":
        more = {"requires_grad": True} if requires_grad else {}
        return real(data, *args, device=device, **more, **kwargs)
    return real(data, *args, **kwargs).to(CUDA).requires_grad_(requires_grad)


def pinned(real: Any, tensor: Tensor, *_: Any) -> Tensor:
    if isinstance(tensor, CudaTensor):
        raise refuse("cannot pin a tensor of the device: only dense CPU tensors can be pinned")
    copy = tensor.clone()
    PINNED[copy] = True
    return copy


def indexed(real: Any, tensor: Tensor, index: Any, *value: Any) -> Any:
    """Indexing; an index of host numbers is copied to the device first."""
    return real(tensor, sent(index) if isinstance(tensor, CudaTensor) else index, *value)


def sent(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(sent, index))
    if not isinstance(index, list):
        return index
    device.wait("index by a list")
    return CudaTensor(torch.tensor(index, dtype=None if index else torch.int64))


def take_data(real: Any, tensor: Tensor, data: Tensor) -> None:
    """`tensor.data = data`."""
    real(tensor, data)
    if isinstance(tensor, CudaTensor):
        tensor.value = value_of(data)


def of_value(real: Any, tensor: Tensor, *args: Any) -> Any:
    return real(value_of(tensor), *args)


CALLS: dict[Any, Callable[..., Any]] = {
    torch.tensor: made,
    torch.as_tensor: made,
    torch.Tensor.pin_memory: pinned,
    torch.Tensor.is_pinned: lambda real, tensor, *_: tensor in PINNED,
    torch.Tensor.cuda: lambda real, tensor, *_, non_blocking=False: tensor.to(CUDA, non_blocking=non_blocking),
    torch.Tensor.tolist: lambda real, tensor: real(tensor.cpu()),
    torch.Tensor.__getitem__: indexed,
    torch.Tensor.__setitem__: indexed,
    torch.Tensor.untyped_storage: of_value,
    torch.Tensor.data_ptr: of_value,
    torch.Tensor.data.__set__: take_data,  # type: ignore[attr-defined]
}


class Calls(TorchFunctionMode):
    """Intercepts the calls of `CALLS`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = CALLS.get(function)
        return function(*args, **kwargs or {}) if call is None else call(function, *args, **kwargs or {})


class Stream:
    """The only stream of the device."""

    def synchronize(self) -> None:
        device.synchronize()


def properties(_: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="a simulated CUDA device", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132
    )


def set_debug_mode(mode: str | int) -> None:
    device.debug = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)  # type: ignore[call-overload]


def reset_peak(_: Any = None) -> None:
    device.peak = device.allocated


def path_exists(real: Callable[..., bool], path: Any) -> bool:
    """`os.path.exists`, true for the device node of the driver too."""
    return path == "/dev/nvidiactl" or real(path)


def profile_of_host(activities: Any, **options: Any) -> profile:
    """A CPU-only profiler: without kernels to time, torch's CUDA profiler would warn at every operation."""
    return profile(activities=[ProfilerActivity.CPU], **options)


def summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Like `engine._summed`; gloo's future would contain tensors of the host."""
    torch.distributed.all_reduce(gradients)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


# Replacements of functions of `torch.cuda`.
ANSWERS: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "is_initialized": lambda: True,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda _: None,
    "current_stream": lambda _=None: Stream(),
    "synchronize": device.synchronize,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda _=None: properties().name,
    "get_device_capability": lambda _=None: (9, 0),
    "get_device_properties": properties,
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda _=None: (MEMORY - device.allocated, MEMORY),
    "memory_allocated": lambda _=None: device.allocated,
    "max_memory_allocated": lambda _=None: device.peak,
    "reset_peak_memory_stats": reset_peak,
    "empty_cache": lambda: None,
    "set_sync_debug_mode": set_debug_mode,
    "get_sync_debug_mode": lambda: ["default", "warn", "error"].index(device.debug),
    "manual_seed_all": lambda _: None,  # the CPU's generator was seeded
    "get_rng_state": lambda _=None: torch.get_rng_state(),
}


@contextmanager
def simulated_device() -> Iterator[Device]:
    """A context in which torch has a CUDA device. guard.py must have been loaded."""
    device.__init__()  # type: ignore[misc]
    torch._C._ensureCUDADeviceGuardSet()
    torch.utils._device._device_constructors()  # scans torch once, before calls are intercepted
    with ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch.cuda, "default_generators", (torch.default_generator,)))
        stack.callback(kernels.has_flash.cache_clear)
        kernels.has_flash.cache_clear()
        # Compilers do not support modes: compiled functions are called directly.
        stack.enter_context(patch.object(torch, "compile", lambda function, **_: function))
        stack.enter_context(patch.object(compiling, "missing_requirement", lambda _: None))
        stack.enter_context(patch.object(profiling, "profile", profile_of_host))
        # Products of 8,192 rows take minutes on a CPU.
        stack.enter_context(patch("lmtool.commands.profile.product_rate", lambda *_: 1e12))
        stack.enter_context(patch.object(group, "backend_of", lambda _: "gloo"))
        stack.enter_context(patch.object(engine, "_summed", summed))
        # DDP's statistics read timers of CUDA events.
        logger = torch._C._distributed_c10d.Logger
        stack.enter_context(patch.object(logger, "set_runtime_stats_and_log", lambda _: None))
        stack.enter_context(patch.object(os.path, "exists", partial(path_exists, os.path.exists)))
        stack.enter_context(flash_on_cpu())
        stack.enter_context(Calls())
        stack.enter_context(Operations())
        yield device
