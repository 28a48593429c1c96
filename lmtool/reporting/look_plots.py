"""Attention and positions drawn: a square a pair of places."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lmtool.reporting.drawing import COLOURS, STYLE, VALIDATION, blank, label_ends, tidy
from lmtool.reporting.text import plain

# From nothing to the ink of the page, so that it reads on light and on dark paper.
_PAPER = LinearSegmentedColormap.from_list("paper", [to_rgba(VALIDATION, 0.0), to_rgba(VALIDATION)])
_IN_A_ROW = 4
_PIECE = 10


def heads_figure(layer: int, weights_ALL: Any, pieces: Sequence[str]) -> Figure:
    """The heads of a layer side by side. weights_ALL: (A, L, L)."""
    count = len(weights_ALL)
    columns = min(_IN_A_ROW, count)
    lines = -(-count // columns)
    names = [plain(piece, _PIECE) for piece in pieces]
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 0.4 + lines * (7.2 / columns + 0.3))
        for number, weights_LL in enumerate(weights_ALL, 1):
            axes = figure.add_subplot(lines, columns, number)
            _squares(axes, weights_LL, vmin=0, vmax=1)
            axes.set_title(f"{layer}.{number}", fontsize=8.5)
            _pieces(axes, names, columns, number % columns == 1 or columns == 1)
    return figure


def terms_figure(terms: Mapping[str, Any], pieces: Sequence[str]) -> Figure:
    """The terms of one head's scores side by side, each with its own scale. terms: (L, L) by name, NaN stays blank."""
    count = len(terms)
    names = [plain(piece, _PIECE) for piece in pieces]
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 7.2 / max(count, 2) + 0.4)
        for number, (name, scores_LL) in enumerate(terms.items(), 1):
            axes = figure.add_subplot(1, count, number)
            mesh = _squares(axes, scores_LL, rasterized=True)
            axes.set_title(name, fontsize=8.5)
            _pieces(axes, names, max(count, 2), number == 1)
            _scale(figure, axes, mesh, location="top", shrink=0.9)
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
            mesh = _squares(axes, scores_LL, rasterized=True)
            axes.tick_params(labelsize=6.5, length=2)
            if number > count - columns:
                axes.set_xlabel("is looked at", fontsize=7.5)
            if number % columns == 1 or columns == 1:
                axes.set_ylabel("looks", fontsize=7.5)
            if count > 1:
                axes.set_title(f"head {number}", fontsize=8.5)
            _scale(figure, axes, mesh)
    return figure


def _squares(axes: Axes, values_LL: Any, **options: Any) -> QuadMesh:
    """A square a pair of places, the first row at the top."""
    axes.patch.set_alpha(0)
    mesh = axes.pcolormesh(values_LL, cmap=_PAPER, edgecolors="none", **options)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    return mesh


def _pieces(axes: Axes, names: Sequence[str], columns: int, at_left: bool) -> None:
    """The tokens below, and beside the leftmost of so many drawings in a row."""
    size = min(7.0, 200 / max(len(names), 1) / columns)
    places = [at + 0.5 for at in range(len(names))]
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_yticks(places, names if at_left else [""] * len(names), fontsize=size)
    axes.tick_params(length=0)


def _scale(figure: Figure, axes: Axes, mesh: QuadMesh, **options: Any) -> None:
    """The bar that says which number a shade is."""
    ticks = MaxNLocator(nbins=4)  # more of them run into each other over a narrow drawing
    bar = figure.colorbar(mesh, ax=axes, **{"shrink": 0.75, "pad": 0.03, "ticks": ticks, **options})
    bar.outline.set_visible(False)
    bar.ax.patch.set_alpha(0)  # a page may be dark
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # else a path a shade
    bar.ax.tick_params(labelsize=6.5, length=0)


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
        ends: dict[int, list[tuple[float, str, str]]] = {}
        for each, colour in zip(read, itertools.cycle(COLOURS), strict=False):
            axes.plot(each.layers, each.same, color=colour, linewidth=1.8, marker="o", markersize=3.5)
            axes.plot(each.layers, each.others, color=colour, linewidth=0, marker=".", markersize=4, alpha=0.5)
            name = plain(Path(each.name).name or each.name, 24)
            if len(each.layers) > 1:
                ends.setdefault(each.layers[-1], []).append((each.same[-1], name, colour))
            else:  # a line may begin at the only point
                axes.annotate(name, (each.layers[0], each.same[0]), (-2, -11), textcoords="offset points", color=colour)
        axes.set_ylim(None, 1.03)
        for layer, labels in ends.items():
            label_ends(axes, layer, labels, 0.075)
        axes.set_title("mean cosine of two vectors")
    return figure


def pairs_figure(pairs_WSS: Any, layers: Sequence[int]) -> Figure:
    """The cosines of each pair of sentences, of the first layer and of the last."""
    shown = [0] if len(layers) == 1 else [0, len(layers) - 1]
    count = pairs_WSS.shape[-1]
    names = [str(number) for number in range(1, count + 1)]
    low = min(0.9, float(pairs_WSS.min()))  # the scale begins where the vectors do, which are alike at first
    with matplotlib.rc_context(STYLE):
        figure = blank(2.6 * len(shown), 2.2)
        for number, at in enumerate(shown, 1):
            axes = figure.add_subplot(1, len(shown), number)
            mesh = _squares(axes, pairs_WSS[at], vmin=low, vmax=1)
            places = [place + 0.5 for place in range(count)]
            axes.set_xticks(places, names)
            axes.set_yticks(places, names)
            axes.set_title(f"layer {layers[at]}", fontsize=8.5)
            axes.set_xlabel("sentence", fontsize=7.5)
            if number == 1:
                axes.set_ylabel("sentence", fontsize=7.5)
            _scale(figure, axes, mesh)
    return figure
