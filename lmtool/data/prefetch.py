"""Make the next few things in a thread while the current one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Thing = TypeVar("Thing")

_POLL_SECONDS = 0.1


def prefetch(things: Iterable[Thing], ahead: int = 2) -> Iterator[Thing]:
    """The same things in the same order, up to `ahead` of them made in advance by a thread.

    An exception of the maker is raised here, at its place in the order. The thread ends when the things do, or soon
    after this iterator is closed or dropped.
    """
    ready: queue.Queue[tuple[str, Thing | BaseException | None]] = queue.Queue(maxsize=ahead)
    closed = threading.Event()

    def hand(kind: str, thing: Thing | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put((kind, thing), timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for thing in things:
                if not hand("thing", thing):
                    return
        except BaseException as problem:  # handed on whole: the reader raises it
            hand("problem", problem)
        else:
            hand("end", None)

    thread = threading.Thread(target=work, name="lmtool-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, thing = ready.get()
            if kind == "end":
                return
            if kind == "problem":
                raise thing  # type: ignore[misc]
            yield thing  # type: ignore[misc]
            del thing
    finally:
        closed.set()
        thread.join()
