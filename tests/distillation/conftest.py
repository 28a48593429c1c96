"""Runs end without report.html, those of a module's fixtures too: its plots take longer than all the rest of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.commands.conftest import skip_reports


@pytest.fixture(scope="module", autouse=True)
def no_reports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        skip_reports(patch)
        yield
