"""The style of every plot: PNG files for slides and papers, SVG for the page.

Drawn without pyplot, so that no display, no global state and no figure is left behind. In the page the ink is a CSS
variable, so that the same drawing reads on light and on dark paper.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
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
# In the page these inks become variables; the others read on both papers.
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
"""Fewer logged steps than these are points: a line would show what lies between them, which nobody knows."""

# Inches of a figure over the whole page, and over that of a phone.
WIDE, NARROW = 7.2, 3.7
_PANEL = 1.8


def panels_a_row(panels: int, width: float) -> int:
    """The number of small plots in a row of a figure of this width in inches."""
    return max(1, min(panels, int(width / _PANEL)))


def blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches, on no paper."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def tidy(axes: Axes, unit: str = "step") -> None:
    """Axes over whole numbers of a unit."""
    axes.patch.set_alpha(0)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.03)  # a point at an end is as round as the others


def mark(axes: Axes, steps: Sequence[int], name: str = "") -> None:
    """A thin vertical line before each of these steps, numbered from 2 where it has a name."""
    for number, step in enumerate(steps, 2):
        axes.axvline(step - 0.5, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
        if name:
            axes.annotate(
                f"{name} {number}", (step - 0.5, 1), (3, -2), ("data", "axes fraction"), "offset points",
                va="top", fontsize=7.5, color=QUIET,
            )  # fmt: skip


def smooth(values: Sequence[float], share: float = 0.06) -> list[float]:
    """A centred running mean over `share` of the points, narrower at the ends; the line that the eye would draw."""
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
    """Values of the logged steps of a run: a line, or, where they are FEW, points, and how many there are."""
    if len(steps) >= FEW:
        axes.plot(*thin(steps, values), color=color, linewidth=width)
        return
    axes.plot(steps, values, color=color, linewidth=0, marker="o", markersize=3, clip_on=False)
    axes.set_xlabel(f"step ({counted(len(steps), 'logged row')})")


def smoothed_steps(axes: Axes, steps: list[int], values: list[float], width: float) -> None:
    """A training loss: each logged step, and above them, unless they are few, their running mean."""
    if len(steps) < FEW:
        logged_steps(axes, steps, values, TRAIN, width)
        return
    axes.plot(*thin(steps, values), color=TRAIN, linewidth=0.7, alpha=0.55)
    axes.plot(*thin(steps, smooth(values)), color=TRAIN, linewidth=width)


def label_ends(axes: Axes, x: float, labels: Iterable[tuple[float, str, str]], gap: float) -> None:
    """Name lines where they end, at x, instead of in a legend far away. labels: (height, text, color) each, pushed
    apart. gap: between two of them, as a share of the axes' height."""
    bottom, top = axes.get_ylim()
    height = -float("inf")
    for value, text, color in sorted(labels):
        height = max(value, height + gap * (top - bottom))
        axes.annotate(
            text, (x, height), (4, 0), textcoords="offset points", color=color, va="center", annotation_clip=False
        )


def thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """So many points of a line that more would not be seen."""
    stride = -(-len(steps) // POINTS)
    return steps[::stride] if stride else steps, values[::stride] if stride else values


def focus(axes: Axes, values: Sequence[float], loss: bool) -> None:
    """Keep the first steps' high losses and stray peaks from flattening all that follows."""
    if len(values) < 20 or not loss:
        return
    ordered = sorted(values)
    low, high = ordered[0], ordered[int(0.97 * (len(ordered) - 1))]
    bottom, top = axes.get_ylim()
    if ordered[-1] > high + 1.5 * (high - low):
        axes.set_ylim(max(bottom, low - 0.06 * (high - low)), min(top, high + 0.35 * (high - low) + 1e-9))


_drawings = itertools.count(1)
# CSS pixels a point: the widest figure fills the page, the narrow ones keep the size of their letters.
_SCALE = 1.59


def svg(figure: Figure) -> str:
    """The figure as an inline SVG: no outside names or addresses, ids of its own, ink from the page."""
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
    """The figure as an inline SVG, and once more for a page as narrow as a phone's; nothing for that where it is small
    anyway."""
    wide, (width, height) = svg(figure), figure.get_size_inches()
    if width < WIDE:
        return wide, ""
    figure.set_size_inches(NARROW, min(height, 2.6))
    narrow = svg(figure)
    figure.set_size_inches(width, height)
    return wide, narrow


def write_png(figure: Figure, path: Path) -> None:
    """The figure as a PNG on white paper, 160 dots an inch."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    replace_bytes(path, buffer.getvalue())


# Attention and positions drawn: a square a pair of places.


# From nothing to the ink of the page, so that it reads on light and on dark paper.
_PAPER = LinearSegmentedColormap.from_list("paper", [to_rgba(VALIDATION, 0.0), to_rgba(VALIDATION)])
_IN_A_ROW = 4
_PIECE = 10


def heads_figure(layer: int, weights_ALL: Any, tokens: Sequence[str]) -> Figure:
    """The heads of a layer side by side. weights_ALL: (A, L, L)."""
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


def terms_figure(terms: Mapping[str, Any], tokens: Sequence[str]) -> Figure:
    """The terms of one head's scores side by side, each with its own scale. terms: (L, L) by name, NaN stays blank."""
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


def position_maps_figure(scores_ALL: Any) -> Figure:
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


def _label_tokens(axes: Axes, names: Sequence[str], columns: int, at_left: bool) -> None:
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
    """As in looks.py."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def same(self) -> list[float]: ...
    @property
    def other_words(self) -> list[float]: ...


def similarity_figure(read: Sequence[_Similar]) -> Figure:
    """By layer, the cosine of the same word in other sentences (lines) and of different words (dots)."""
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
            else:  # a line may begin at the only point
                axes.annotate(name, (each.layers[0], each.same[0]), (-2, -11), textcoords="offset points", color=color)
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
