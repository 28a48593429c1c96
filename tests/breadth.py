"""Which cases of a wide test run always, and which are one more of their kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases of a parametrised test; those that are not among `quick` run with the slow ones. Each of `quick` must
    be a case."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"no case: {unknown}"
    return [case if case in quick else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
