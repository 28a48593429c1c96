"""Whether a server answers, asked before a library that would retry for half a minute. Standard library only."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

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
