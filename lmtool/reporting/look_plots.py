"""Attention and positions drawn: a square a pair of places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

from lmtool.reporting.drawing import COLOURS, STYLE, VALIDATION, blank, tidy
from lmtool.reporting.text import plain

# From nothing to the ink of the page, so that it reads on light and on dark paper.
_PAPER = LinearSegmentedColormap.from_list("paper", [to_rgba(VALIDATION, 0.0), to_rgba(VALIDATION)])
_IN_A_ROW = 4
_PIECE = 10


def heads_figure(layer: int, weights_ALL: Any, pieces: Sequence[str]) -> Figure:
    """The heads of a layer side by side. weights_ALL: (A, L, L)."""
    count, length = len(weights_ALL), len(pieces)
    columns = min(_IN_A_ROW, count)
    lines = -(-count // columns)
    names = [plain(piece, _PIECE) for piece in pieces]
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 0.4 + lines * (7.2 / columns + 0.3))
        for number, weights_LL in enumerate(weights_ALL, 1):
            axes = figure.add_subplot(lines, columns, number)
            axes.patch.set_alpha(0)
            axes.pcolormesh(weights_LL, cmap=_PAPER, vmin=0, vmax=1, edgecolors="none")
            axes.invert_yaxis()
            axes.set_aspect("equal")
            axes.set_title(f"{layer}.{number}", fontsize=8.5)
            size = min(7.0, 200 / max(length, 1) / columns)
            places = [at + 0.5 for at in range(length)]
            axes.set_xticks(places, names, rotation=90, fontsize=size)
            axes.set_yticks(places, names if number % columns == 1 or columns == 1 else [""] * length, fontsize=size)
            axes.tick_params(length=0)
    return figure


def places_figure(scores_ALL: Any) -> Figure:
    """The maps of positions side by side, each with its own scale. scores_ALL: (A, L, L)."""
    count = len(scores_ALL)
    columns = min(_IN_A_ROW, count)
    lines = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        figure = blank(1.8 * columns + 0.4, 0.2 + lines * 2.0)
        for number, scores_LL in enumerate(scores_ALL, 1):
            axes = figure.add_subplot(lines, columns, number)
            axes.patch.set_alpha(0)
            mesh = axes.pcolormesh(scores_LL, cmap=_PAPER, edgecolors="none", rasterized=True)
            axes.invert_yaxis()
            axes.set_aspect("equal")
            axes.tick_params(labelsize=6.5, length=2)
            if count > 1:
                axes.set_title(f"head {number}", fontsize=8.5)
            bar = figure.colorbar(mesh, ax=axes, shrink=0.75, pad=0.03)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=6.5, length=0)
    return figure


class _Similar(Protocol):
    """As of looks.py."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def same(self) -> list[float]: ...
    @property
    def others(self) -> list[float]: ...


def similarity_figure(read: Sequence[_Similar]) -> Figure:
    """By layer, the cosine of the same word in other sentences (lines) and of different words (dots)."""
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 3.2)
        axes = figure.add_subplot()
        tidy(axes, "layer")
        for each, colour in zip(read, itertools.cycle(COLOURS), strict=False):
            axes.plot(each.layers, each.same, color=colour, linewidth=1.8, marker="o", markersize=3.5)
            axes.plot(each.layers, each.others, color=colour, linewidth=0, marker=".", markersize=4, alpha=0.5)
            axes.annotate(
                plain(Path(each.name).name or each.name, 24), (each.layers[-1], each.same[-1]), (6, 0),
                textcoords="offset points", color=colour, va="center", annotation_clip=False,
            )  # fmt: skip
        axes.set_ylim(None, 1.03)
        axes.set_title("mean cosine of two vectors")
    return figure


def pairs_figure(pairs_WSS: Any, layers: Sequence[int]) -> Figure:
    """The cosines of each pair of sentences, of the first layer and of the last."""
    shown = [0] if len(layers) == 1 else [0, len(layers) - 1]
    count = pairs_WSS.shape[-1]
    names = [str(number) for number in range(1, count + 1)]
    with matplotlib.rc_context(STYLE):
        figure = blank(2.6 * len(shown), 2.2)
        for number, at in enumerate(shown, 1):
            axes = figure.add_subplot(1, len(shown), number)
            axes.patch.set_alpha(0)
            mesh = axes.pcolormesh(pairs_WSS[at], cmap=_PAPER, vmin=min(0.0, float(pairs_WSS.min())), vmax=1)
            axes.invert_yaxis()
            axes.set_aspect("equal")
            places = [place + 0.5 for place in range(count)]
            axes.set_xticks(places, names)
            axes.set_yticks(places, names)
            axes.set_title(f"layer {layers[at]}", fontsize=8.5)
            bar = figure.colorbar(mesh, ax=axes, shrink=0.75, pad=0.03)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=6.5, length=0)
    return figure
