"""Figures that are made but not drawn, and runs without reports, for tests that do not look at them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST_BYTES = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<svg></svg>"}


def skip_drawing(patch: pytest.MonkeyPatch) -> None:
    """Figures are neither arranged nor drawn, which is most of the time of a page; their files have only the first
    bytes of their format."""

    def save(figure: Figure, target: Any, **settings: Any) -> None:
        start = FIRST_BYTES[settings["format"]]
        target.write(start.decode() if isinstance(target, io.StringIO) else start)

    patch.setattr("matplotlib.figure.Figure.savefig", save)
    patch.setattr("matplotlib.figure.Figure.draw_without_rendering", lambda figure: None)


def skip_reports(patch: pytest.MonkeyPatch) -> None:
    """Runs write no report.html: plots take longer than the rest of a tiny run."""
    patch.setattr("lmtool.session.screens.write_report", lambda run, **state: run / "report.html")


def resample_less(patch: pytest.MonkeyPatch) -> None:
    """Intervals have a tenth of the resamples: all take longer than scoring a tiny model. They are tested in
    tests/learners/metrics."""
    patch.setattr("lmtool.learners.metrics.intervals.RESAMPLES", 1_000)


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    """For the conftest.py of a folder whose tests look at no report of a run, at no figure and at no exact interval,
    also for the runs of module fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        skip_reports(patch)
        skip_drawing(patch)
        resample_less(patch)
        yield
