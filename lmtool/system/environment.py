"""What the command line sets in the environment: before torch is loaded, and for the processes that a part of it
starts. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

# Read by torch's libraries when they are loaded; what the user has set stays.
ENVIRONMENT = {
    # OpenMP threads wait by spinning, and on a machine with other work the spinners starve the worker: a tiny BERT
    # (width 128) trained at 3,000 tokens a second beside other processes, and with this at 16,000 and more beside two
    # busy loops on two cores. Alone it lost about a quarter there, and 3% at width 256.
    "GOMP_SPINCOUNT": "1000",
    # oneDNN compiles its bf16 products for each shape and keeps 1024 of them in each of two caches. A packed batch has
    # new shapes every step: 11 MB a step, 2.6 GB after 150 steps of BERT (4 layers, width 256) instead of 1.1 GB. A
    # step needs about 40, and a step with nothing in the cache takes the same time.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    # What torch's C++ prints for its developers, a line from each process: that a step used all parameters (which DDP
    # looks for since others do not), that a host's name has no IPv6 address. Its errors are raised as ever.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Torch's profiler writes a line of its own to the terminal when it starts and stops, at every level below this one.
    "KINETO_LOG_LEVEL": "6",
}

# A Python that is started with -m or -c imports from the working folder first: a `ctypes.py` among the files of a
# stranger would be run. lmtool starts its own with -P; this is for those that libraries start.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


@contextmanager
def inherited(values: Mapping[str, str]) -> Iterator[None]:
    """Within, the environment has these values, for the processes that are started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# Whether a server answers, asked before a library that would retry for half a minute. Standard library only.


PATIENCE_SECONDS = 5.0


def answers(address: str, seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether the server of an address (https://host:port/...) takes a connection in time; taken for granted behind a
    proxy."""
    from urllib.request import getproxies  # with http and email, for a question that few commands ask

    server = urlsplit(address)
    if getproxies().get(server.scheme):
        return True
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), timeout=seconds).close()
    except OSError:
        return False
    return True
