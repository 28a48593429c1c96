"""Rows that cannot be read: the first is an error, unless somebody collects them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lmtool.errors import UserError

_collected: ContextVar[list[UserError] | None] = ContextVar("collected", default=None)


def refuse(problem: UserError) -> None:
    """Raise what is wrong with a row; where problems are collected, keep it instead: the reader then leaves the row
    out and reads on."""
    problems = _collected.get()
    if problems is None:
        raise problem
    problems.append(problem)


def collecting() -> bool:
    """Whether problems are collected here."""
    return _collected.get() is not None


@contextmanager
def collected() -> Iterator[list[UserError]]:
    """Rows that are read inside and fail are left out; what is wrong with each comes here."""
    problems: list[UserError] = []
    token = _collected.set(problems)
    try:
        yield problems
    finally:
        _collected.reset(token)
