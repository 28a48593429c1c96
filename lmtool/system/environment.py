"""Environment variables that the command line sets, before torch is loaded and for child processes. Standard library
only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

# Read by torch's libraries when they are loaded. Values set by the user are not changed.
ENVIRONMENT = {
    # Waiting OpenMP threads spin before they sleep, by default for milliseconds, which starves the working thread on a
    # busy machine; a thread that sleeps too soon must be woken for every small operation. Milliseconds per finetuning
    # step of BERT (4 layers, width 256, bf16) on two cores, idle and with another busy process: 92 and 114 at 1,000
    # spins, 61 and 230 at 10,000, 60 and 877 at the default (300,000).
    "GOMP_SPINCOUNT": "10000",
    # oneDNN compiles a bf16 matrix product for each shape and keeps 1024 of them in each of two caches. A packed batch
    # has new shapes every step: 11 MB a step, 2.6 GB after 150 steps of BERT (4 layers, width 256) instead of 1.1 GB. A
    # step needs about 40 compiled products, and takes the same time if the caches are empty.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    # Hides warnings of torch's C++ code, a line from each process: that a step used all parameters (DDP must look for
    # unused parameters because other steps have some), that a host name has no IPv6 address. Errors are still raised.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # At lower levels torch's profiler prints a line when it starts and stops.
    "KINETO_LOG_LEVEL": "6",
}

# Python with -m or -c imports from the working directory first, so it would run a stranger's `ctypes.py` there. lmtool
# starts Python with -P; this variable does the same for processes that libraries start.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


@contextmanager
def child_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the child processes that the block starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def is_reachable(address: str, seconds: float = 5.0) -> bool:
    """Whether the server of an address (https://host:port/...) accepts a connection in time. True if a proxy is set.
    Called before libraries that would retry for half a minute."""
    from urllib.request import getproxies  # imports http and email, which few commands need

    server = urlsplit(address)
    if getproxies().get(server.scheme):
        return True
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), timeout=seconds).close()
    except OSError:
        return False
    return True


def available_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
