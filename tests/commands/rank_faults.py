"""A plugin that breaks one rank of a run; every process imports it before the rest of the command."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch

from lmtool.runs import identity
from lmtool.training import group

SECONDS = 4
FAULT, RANK = os.environ.get("RANK_FAULT"), os.environ.get("RANK")


def at_backward(number, act):
    """Calls `act` before backward number `number`."""
    calls, backward = [0], torch.Tensor.backward

    def broken(self, *arguments, **named):
        calls[0] += 1
        if calls[0] == number:
            act()
        return backward(self, *arguments, **named)

    torch.Tensor.backward = broken


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def bug():
    raise KeyError("nobody expected this")


if FAULT == "hang":
    group.TIMEOUT = timedelta(seconds=SECONDS)
if RANK == "1":
    if FAULT == "memory":
        at_backward(3, out_of_memory)
    elif FAULT == "bug":
        at_backward(3, bug)
    elif FAULT == "hang":
        at_backward(3, lambda: time.sleep(600))
    elif FAULT == "code":
        identity.fingerprint = lambda plugins=(): "0123456789abcdef"
    elif FAULT == "data":
        from lmtool.session import provenance

        contents = provenance.contents_of
        provenance.contents_of = lambda *given: {
            origin: {**own, "text": "another"} for origin, own in contents(*given).items()
        }
