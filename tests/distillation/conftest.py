"""Runs, also those of module fixtures, write no report.html: its plots take longer than the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.commands.conftest import skip_reports


@pytest.fixture(scope="module", autouse=True)
def no_reports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        skip_reports(patch)
        yield
