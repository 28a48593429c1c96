"""The style of every plot: PNG files for slides and papers, SVG for the page.

Figures are made without pyplot: no display and no global state. In the page, colors are CSS variables, so that a figure
is readable in light and in dark mode.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lmtool.reporting.text import plain
from lmtool.system.files import replace_bytes
from lmtool.system.terminal import counted

INK, QUIET, FAINT = "#2b2b2b", "#767676", "#c9c9c9"
TRAIN, VALIDATION, BASELINE = "#9db4c8", "#1f5f99", "#b5532a"
COLORS = ("#1f5f99", "#b5532a", "#3f8a55", "#8a5aa8", "#b08a1e", "#4aa3a8", "#a84a6b", "#6b6b6b")
# Colors that become CSS variables in the page; the others are readable in both modes.
_VARIABLES = {
    INK: "var(--ink)",
    QUIET: "var(--quiet)",
    FAINT: "var(--faint)",
    VALIDATION: "var(--blue)",
    BASELINE: "var(--rust)",
    TRAIN: "var(--pale)",
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "svg.fonttype": "none",
    "svg.hashsalt": "lmtool",
    "path.simplify": True,
    "text.parse_math": False,
}
POINTS = 1500
FEW = 20
"""Fewer logged steps than this are drawn as points, since a line would suggest values between them."""

# Figure widths in inches, for the full page and for a phone.
WIDE, NARROW = 7.2, 3.7
_PANEL = 1.8


def plots_per_row(plots: int, width: float) -> int:
    """The number of small plots per row of a figure. width: in inches."""
    return max(1, min(plots, int(width / _PANEL)))


def blank(width: float, height: float) -> Figure:
    """An empty transparent figure. width, height: in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def tidy(axes: Axes, unit: str = "step") -> None:
    """Formats the axes; the x axis has integer ticks of a unit."""
    axes.patch.set_alpha(0)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.03)  # so that points at the ends are not clipped


def mark(axes: Axes, steps: Sequence[int], name: str = "") -> None:
    """Draws a thin vertical line before each of these steps, numbered from 2 if `name` is given."""
    for number, step in enumerate(steps, 2):
        axes.axvline(step - 0.5, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
        if name:
            axes.annotate(
                f"{name} {number}", (step - 0.5, 1), (3, -2), ("data", "axes fraction"), "offset points",
                va="top", fontsize=7.5, color=QUIET,
            )  # fmt: skip


def smooth(values: Sequence[float], share: float = 0.06) -> list[float]:
    """A centered running mean over a fraction `share` of the points, narrower at the ends."""
    half = max(int(len(values) * share / 2), 2 if len(values) >= 20 else 0)
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for index in range(len(values)):
        # At the start the loss falls fast: a window that only looks ahead would start the line below its points.
        low, high = index - min(half, index), min(index + half, len(values) - 1)
        high = min(high, index + max(index - low, 1))
        smoothed.append((sums[high + 1] - sums[low]) / (high + 1 - low))
    return smoothed


def logged_steps(axes: Axes, steps: list[int], values: list[float], color: str, width: float) -> None:
    """Plots the values of logged steps: a line, or points and their number if there are fewer than FEW."""
    if len(steps) >= FEW:
        axes.plot(*thin(steps, values), color=color, linewidth=width)
        return
    axes.plot(steps, values, color=color, linewidth=0, marker="o", markersize=3, clip_on=False)
    axes.set_xlabel(f"step ({counted(len(steps), 'logged row')})")


def smoothed_steps(axes: Axes, steps: list[int], values: list[float], width: float) -> None:
    """Plots a training loss: each logged step and, unless there are few, the running mean."""
    if len(steps) < FEW:
        logged_steps(axes, steps, values, TRAIN, width)
        return
    axes.plot(*thin(steps, values), color=TRAIN, linewidth=0.7, alpha=0.55)
    axes.plot(*thin(steps, smooth(values)), color=TRAIN, linewidth=width)


def label_ends(axes: Axes, x: float, labels: Iterable[tuple[float, str, str]], gap: float) -> None:
    """Labels lines at their right ends, in place of a legend.

    Args:
        axes: where to draw.
        x: position of the labels.
        labels: (height, text, color) of each; close ones are moved apart.
        gap: minimum distance of two labels, as a fraction of the axes' height.
    """
    bottom, top = axes.get_ylim()
    height = -float("inf")
    for value, text, color in sorted(labels):
        height = max(value, height + gap * (top - bottom))
        axes.annotate(
            text, (x, height), (4, 0), textcoords="offset points", color=color, va="center", annotation_clip=False
        )


def thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """At most POINTS evenly spaced points of a line."""
    stride = -(-len(steps) // POINTS)
    return steps[::stride] if stride else steps, values[::stride] if stride else values


def focus(axes: Axes, values: Sequence[float], loss: bool) -> None:
    """Limits the y axis so that high first losses and outliers do not flatten the curve."""
    if len(values) < 20 or not loss:
        return
    ordered = sorted(values)
    low, high = ordered[0], ordered[int(0.97 * (len(ordered) - 1))]
    bottom, top = axes.get_ylim()
    if ordered[-1] > high + 1.5 * (high - low):
        axes.set_ylim(max(bottom, low - 0.06 * (high - low)), min(top, high + 0.35 * (high - low) + 1e-9))


_drawings = itertools.count(1)
# CSS pixels per point: the widest figure fills the page, and all figures have letters of one size.
_SCALE = 1.59


def svg(figure: Figure) -> str:
    """The figure as an inline SVG without external references, with unique ids and the colors of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", text).replace("xlink:href", "href")
    prefix = f"d{next(_drawings)}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = text.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    width, height = (72 * inches for inches in figure.get_size_inches())
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" style="max-width: {_SCALE * width:.0f}px">'
    return head + text[text.index(">") + 1 :]


def svgs(figure: Figure) -> tuple[str, str]:
    """The figure as an inline SVG, and a second one for narrow pages ("" if the figure is small anyway)."""
    wide, (width, height) = svg(figure), figure.get_size_inches()
    if width < WIDE:
        return wide, ""
    figure.set_size_inches(NARROW, min(height, 2.6))
    narrow = svg(figure)
    figure.set_size_inches(width, height)
    return wide, narrow


def write_png(figure: Figure, path: Path) -> None:
    """Writes the figure as a PNG on a white background at 160 dpi."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    replace_bytes(path, buffer.getvalue())


# Heat maps of attention and positions.

# From transparent to a color of the page, so that it is readable in light and in dark mode.
_PAPER = LinearSegmentedColormap.from_list("paper", [to_rgba(VALIDATION, 0.0), to_rgba(VALIDATION)])
_IN_A_ROW = 4
_PIECE = 10


def heads_figure(layer: int, weights_ALL: np.ndarray, tokens: Sequence[str]) -> Figure:
    """Attention maps of the heads of a layer. weights_ALL: (A, L, L)."""
    count = len(weights_ALL)
    columns = min(_IN_A_ROW, count)
    lines = -(-count // columns)
    names = [plain(piece, _PIECE) for piece in tokens]
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 0.4 + lines * (7.2 / columns + 0.3))
        for number, weights_LL in enumerate(weights_ALL, 1):
            axes = figure.add_subplot(lines, columns, number)
            _squares(axes, weights_LL, vmin=0, vmax=1)
            axes.set_title(f"{layer}.{number}", fontsize=8.5)
            _label_tokens(axes, names, columns, number % columns == 1 or columns == 1)
    return figure


def terms_figure(terms: Mapping[str, np.ndarray], tokens: Sequence[str]) -> Figure:
    """Maps of the terms of one head's scores, each with its own color scale. terms: (L, L) by name; NaN stays blank."""
    count = len(terms)
    names = [plain(piece, _PIECE) for piece in tokens]
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 7.2 / max(count, 2) + 0.4)
        for number, (name, scores_LL) in enumerate(terms.items(), 1):
            axes = figure.add_subplot(1, count, number)
            mesh = _squares(axes, scores_LL, rasterized=True)
            axes.set_title(name, fontsize=8.5)
            _label_tokens(axes, names, max(count, 2), number == 1)
            _scale(figure, axes, mesh, location="top", shrink=0.9)
    return figure


def position_maps_figure(scores_ALL: np.ndarray) -> Figure:
    """Maps of position scores, each with its own color scale. scores_ALL: (A, L, L)."""
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
                axes.set_xlabel("key", fontsize=7.5)
            if number % columns == 1 or columns == 1:
                axes.set_ylabel("query", fontsize=7.5)
            if count > 1:
                axes.set_title(f"head {number}", fontsize=8.5)
            _scale(figure, axes, mesh)
    return figure


def _squares(axes: Axes, values_LL: np.ndarray, **options: Any) -> QuadMesh:
    """A heat map of a square matrix, its first row at the top."""
    axes.patch.set_alpha(0)
    mesh = axes.pcolormesh(values_LL, cmap=_PAPER, edgecolors="none", **options)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    return mesh


def _label_tokens(axes: Axes, names: Sequence[str], columns: int, at_left: bool) -> None:
    """Labels the axes with tokens: the x axis, and the y axis of the leftmost of `columns` plots."""
    size = min(7.0, 200 / max(len(names), 1) / columns)
    positions = [at + 0.5 for at in range(len(names))]
    axes.set_xticks(positions, names, rotation=90, fontsize=size)
    axes.set_yticks(positions, names if at_left else [""] * len(names), fontsize=size)
    axes.tick_params(length=0)


def _scale(figure: Figure, axes: Axes, mesh: QuadMesh, **options: Any) -> None:
    """Adds the color bar."""
    ticks = MaxNLocator(nbins=4)  # more would overlap in a narrow figure
    bar = figure.colorbar(mesh, ax=axes, **{"shrink": 0.75, "pad": 0.03, "ticks": ticks, **options})
    bar.outline.set_visible(False)
    bar.ax.patch.set_alpha(0)  # transparent for dark mode
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # otherwise one path per shade
    bar.ax.tick_params(labelsize=6.5, length=0)


class _Similar(Protocol):
    """The fields of `looks.Similar` that are drawn."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def same(self) -> list[float]: ...
    @property
    def other_words(self) -> list[float]: ...


def similarity_figure(read: Sequence[_Similar]) -> Figure:
    """Cosines by layer, of the same word in other sentences (lines) and of different words (dots)."""
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 3.2)
        axes = figure.add_subplot()
        tidy(axes, "layer")
        ends: dict[int, list[tuple[float, str, str]]] = {}
        for each, color in zip(read, itertools.cycle(COLORS), strict=False):
            axes.plot(each.layers, each.same, color=color, linewidth=1.8, marker="o", markersize=3.5)
            axes.plot(each.layers, each.other_words, color=color, linewidth=0, marker=".", markersize=4, alpha=0.5)
            name = plain(Path(each.name).name or each.name, 24)
            if len(each.layers) > 1:
                ends.setdefault(each.layers[-1], []).append((each.same[-1], name, color))
            else:  # a label at the right could cover another line
                axes.annotate(name, (each.layers[0], each.same[0]), (-2, -11), textcoords="offset points", color=color)
        axes.set_ylim(None, 1.03)
        for layer, labels in ends.items():
            label_ends(axes, layer, labels, 0.075)
        axes.set_title("mean cosine of two vectors")
    return figure


def pairs_figure(pairs_WSS: np.ndarray, layers: Sequence[int]) -> Figure:
    """Cosines of each pair of sentences, in the first and the last layer."""
    indices = [0] if len(layers) == 1 else [0, len(layers) - 1]
    count = pairs_WSS.shape[-1]
    names = [str(number) for number in range(1, count + 1)]
    low = min(0.9, float(pairs_WSS.min()))  # the scale begins where the vectors do, which are alike at first
    with matplotlib.rc_context(STYLE):
        figure = blank(2.6 * len(indices), 2.2)
        for number, at in enumerate(indices, 1):
            axes = figure.add_subplot(1, len(indices), number)
            mesh = _squares(axes, pairs_WSS[at], vmin=low, vmax=1)
            positions = [index + 0.5 for index in range(count)]
            axes.set_xticks(positions, names)
            axes.set_yticks(positions, names)
            axes.set_title(f"layer {layers[at]}", fontsize=8.5)
            axes.set_xlabel("sentence", fontsize=7.5)
            if number == 1:
                axes.set_ylabel("sentence", fontsize=7.5)
            _scale(figure, axes, mesh)
    return figure
