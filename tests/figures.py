"""Figures that are made but not drawn, for tests that do not look at them."""

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


@pytest.fixture(scope="module", autouse=True)
def undrawn_figures() -> Iterator[None]:
    """For the conftest.py of a folder whose runs, also those of module fixtures, write pages that no test looks at."""
    with pytest.MonkeyPatch.context() as patch:
        skip_drawing(patch)
        yield
