"""The rules of training: batches, budgets, amounts of text, phases and devices. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence

from lmtool.config.base import JsonObject
from lmtool.errors import Problem
from lmtool.training.configs import OptimizerConfig, amounts_of
from lmtool.training.phases import EPOCH_KEYS


def require_one_batch_size(batch_examples: int | None, batch_tokens: int | None) -> Iterator[Problem]:
    if batch_examples is not None and batch_tokens is not None:
        message = f"batch_examples={batch_examples} and batch_tokens={batch_tokens} both set the batch size"
        yield Problem("batch_tokens", message, "set one of them to null: batch_tokens=null or batch_examples=null")
    if batch_examples is None and batch_tokens is None:
        yield Problem("batch_tokens", "missing batch size", "set batch_examples=32 or batch_tokens=2048")


def require_unit_of_reference(
    optimizer: OptimizerConfig, batch_examples: int | None, batch_tokens: int | None
) -> Iterator[Problem]:
    scaling = optimizer.batch_scaling
    if scaling is None or (batch_examples is None) == (batch_tokens is None):
        return
    unit, other = ("examples", "tokens") if batch_tokens is None else ("tokens", "examples")
    if getattr(scaling, unit) is None:
        reference, batch = getattr(scaling, other), batch_tokens or batch_examples
        message = (
            f"optimizer.batch_scaling has its reference in {other} ({reference}), but batch_{unit}={batch} in {unit}"
        )
        hint = (
            f'set "optimizer.batch_scaling={{rule: {scaling.rule}, {unit}: N}}", or batch_{other}=N batch_{unit}=null'
        )
        yield Problem("optimizer.batch_scaling", message, hint)


def require_budget(
    max_steps: int | None,
    max_epochs: float | None,
    max_tokens: int | None,
    max_words: int | None,
    max_minutes: float | None,
    max_flops: float | None,
) -> Iterator[Problem]:
    if {max_steps, max_epochs, max_tokens, max_words, max_minutes, max_flops} == {None}:
        names = "max_steps, max_epochs, max_tokens, max_words, max_minutes or max_flops"
        yield Problem("max_steps", f"missing budget: one of {names}", "set max_steps=10000, for example")


def require_ascending_amounts(
    checkpoint_at: Sequence[int | str] | None, max_tokens: int | None, max_words: int | None
) -> Iterator[Problem]:
    if checkpoint_at == ():
        yield Problem("checkpoint_at", "checkpoint_at=[] lists no amount", "set checkpoint_at=null")
    try:
        amounts = amounts_of(checkpoint_at)
    except ValueError as error:
        hint = "set checkpoint_at=[500K,1.5M,2B] (tokens) or [10Mw,100Mw] (words)"
        yield Problem("checkpoint_at", f"checkpoint_at: {error}", hint)
        return
    ascending = sorted({amount.number: amount.name for amount in amounts}.items())
    key, budget = ("max_words", max_words) if amounts and amounts[0].words else ("max_tokens", max_tokens)
    if len({amount.words for amount in amounts}) > 1:
        message = f"checkpoint_at={_listed(checkpoint_at)} mixes tokens and words"
        yield Problem("checkpoint_at", message, "use amounts of one of them")
    elif [number for number, _ in ascending] != [amount.number for amount in amounts]:
        message = f"checkpoint_at={_listed(checkpoint_at)} is not ascending"
        yield Problem("checkpoint_at", message, f"set checkpoint_at={_listed([name for _, name in ascending])}")
    elif budget is not None and ascending and ascending[-1][0] > budget:
        number, name = ascending[-1]
        message = f"checkpoint_at={name} is beyond the budget, {key}={budget}"
        yield Problem("checkpoint_at", message, f"set {key}={number}, or omit the amount")


def _listed(amounts: Sequence[int | str] | None) -> str:
    return f"[{','.join(map(str, amounts or ()))}]"


def refuse_epochs_of_unequal_phases(
    phases: Sequence[JsonObject], max_epochs: float | None, max_steps: int | None
) -> Iterator[Problem]:
    differing = [key for key in EPOCH_KEYS if len({json.dumps(phase.get(key), sort_keys=True) for phase in phases}) > 1]
    if max_epochs is not None and differing:
        message = (
            f"max_epochs={max_epochs:g}: the length of an epoch changes in the phases, with {', '.join(differing)}"
        )
        rest = f"; max_steps={max_steps} ends the run" if max_steps is not None else " max_steps=10000"
        yield Problem("max_epochs", message, f"set max_epochs=null{rest}")


def require_device(device: str) -> Iterator[Problem]:
    """A run on CUDA needs a driver. The number of devices is checked later."""
    if not device.startswith("cuda") or not sys.platform.startswith("linux"):
        return
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")):
        yield Problem("device", f"device={device}: this machine has no such device", "set device=cpu or device=auto")
