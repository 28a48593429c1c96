"""The style of every plot, the elements that plots share, and their output: PNG, SVG or PDF files, or SVG for a page.

Figures are created without pyplot: no display and no global state. In a page, colors are CSS variables, so that figures
are readable in light and in dark mode.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lmtool.reporting import hover
from lmtool.system.files import real_folder, replace_bytes
from lmtool.system.terminal import counted

INK, QUIET, FAINT, PAPER = "#2b2b2b", "#767676", "#c9c9c9", "#fffffc"
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
    PAPER: "var(--paper)",
}
_TICKS = {"color": QUIET, "major.size": 3, "labelcolor": QUIET}
STYLE: dict[Any, object] = {
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
    **{f"{axis}.{name}": value for axis in ("xtick", "ytick") for name, value in _TICKS.items()},
    "svg.fonttype": "none",
    "svg.hashsalt": "lmtool",
    "pdf.fonttype": 42,  # TrueType: text stays text, which journals ask for
    "path.simplify": True,
    "text.parse_math": False,
}
MAX_POINTS = 1500
"""Maximum number of points of a line."""
MIN_LINE_POINTS = 20
"""Fewer logged steps than this are drawn as points, since a line would suggest values between them."""

# Widths in inches: of a figure on a full page and on a phone, and the minimum of a small plot.
WIDE, NARROW = 7.2, 3.7
_SMALL_PLOT_WIDTH = 1.8


def blank_figure(width: float, height: float) -> Figure:
    """Returns an empty transparent figure. width, height: the size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def single_plot(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a transparent figure with one plot. width, height: in inches."""
    figure = blank_figure(width, height)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def small_plots(names: Sequence[str], width: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure of small plots over steps, as many in a row as fit. names: titles of the plots. width: in
    inches."""
    columns = max(1, min(len(names), int(width / _SMALL_PLOT_WIDTH)))
    rows = -(-len(names) // columns)
    figure = blank_figure(width, 1.75 * rows)
    plots = [figure.add_subplot(rows, columns, index) for index in range(1, len(names) + 1)]
    for axes, name in zip(plots, names, strict=True):
        tidy(axes)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_title(name, fontsize=8.5)
    return figure, plots


def tidy(axes: Axes, unit: str = "step") -> None:
    """Formats the axes; the x axis has integer ticks of a unit."""
    axes.patch.set_alpha(0)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.03)  # so that points at the ends are not clipped


def draw_baseline(axes: Axes, value: float) -> None:
    """Draws a dashed horizontal line at the value of a baseline."""
    axes.axhline(value, color=BASELINE, linewidth=1, linestyle=(0, (5, 4)), label="baseline")


def mark_steps(axes: Axes, steps: Sequence[int], name: str = "") -> None:
    """Draws a thin vertical line before each of these steps, numbered from 2 if `name` is given."""
    for number, step in enumerate(steps, 2):
        axes.axvline(step - 0.5, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
        if name:
            top, offset = (step - 0.5, 1), (3, -2)
            note = axes.annotate(f"{name} {number}", top, offset, ("data", "axes fraction"), "offset points", va="top")
            note.set(fontsize=7.5, color=QUIET)


def smooth(values: Sequence[float]) -> list[float]:
    """Returns a centered running mean over 6% of the points, narrower at the ends."""
    half = max(int(len(values) * 0.06 / 2), 2 if len(values) >= 20 else 0)
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for index in range(len(values)):
        # At the start the loss falls fast: a window that only looks ahead would start the line below its points.
        low, high = index - min(half, index), min(index + half, len(values) - 1)
        high = min(high, index + max(index - low, 1))
        smoothed.append((sums[high + 1] - sums[low]) / (high + 1 - low))
    return smoothed


def plot_logged_steps(axes: Axes, steps: list[int], values: list[float], color: str, width: float) -> None:
    """Plots the values of logged steps: a line, or points and their number if there are fewer than MIN_LINE_POINTS."""
    if len(steps) >= MIN_LINE_POINTS:
        axes.plot(*thin(steps, values), color=color, linewidth=width)
        return
    axes.plot(steps, values, color=color, linewidth=0, marker="o", markersize=3, clip_on=False)
    axes.set_xlabel(f"step ({counted(len(steps), 'logged row')})")


def plot_smoothed_steps(axes: Axes, steps: list[int], values: list[float], width: float) -> None:
    """Plots a training loss: each logged step and, from MIN_LINE_POINTS steps on, the running mean."""
    if len(steps) < MIN_LINE_POINTS:
        plot_logged_steps(axes, steps, values, TRAIN, width)
        return
    axes.plot(*thin(steps, values), color=TRAIN, linewidth=0.7, alpha=0.55, label="training")
    axes.plot(*thin(steps, smooth(values)), color=TRAIN, linewidth=width, label="running mean")


def label_ends(axes: Axes, x: float, labels: Iterable[tuple[float, str, str]], gap: float) -> None:
    """Labels lines at their right ends, in place of a legend. x: position of the labels. labels: (height, text, color)
    of each; close ones are moved apart. gap: minimum distance of two labels, as a fraction of the axes' height."""
    bottom, top = axes.get_ylim()
    height = -float("inf")
    for value, text, color in sorted(labels):
        height = max(value, height + gap * (top - bottom))
        axes.annotate(
            text, (x, height), (4, 0), textcoords="offset points", color=color, va="center", annotation_clip=False
        )


def thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Returns at most MAX_POINTS evenly spaced points of a line."""
    stride = -(-len(steps) // MAX_POINTS)
    return steps[::stride] if stride else steps, values[::stride] if stride else values


def focus(axes: Axes, values: Sequence[float], *, cut_high: bool) -> None:
    """Limits the y axis so that high first losses and outliers do not flatten the curve. cut_high: whether high values
    may be cut off; if not, the axis is unchanged."""
    if len(values) < 20 or not cut_high:
        return
    ordered = sorted(values)
    low, high = ordered[0], ordered[int(0.97 * (len(ordered) - 1))]
    bottom, top = axes.get_ylim()
    if ordered[-1] > high + 1.5 * (high - low):
        axes.set_ylim(max(bottom, low - 0.06 * (high - low)), min(top, high + 0.35 * (high - low) + 1e-9))


_drawings = itertools.count(1)
# CSS pixels per point: the widest figure fills the page, and all figures have letters of one size.
_SCALE = 1.59


def _arrange(figure: Figure) -> None:
    """Places the elements of a figure, once for all of its formats. A figure with a layout engine is placed anew for
    each format, which takes more than half of the time."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)


def _resize(figure: Figure, width: float, height: float) -> None:
    figure.set_size_inches(width, height)
    figure.set_layout_engine("constrained")


def svg(figure: Figure) -> str:
    """Returns the figure as an inline SVG without external references, with unique ids and the colors of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        _arrange(figure)
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
    opening_tag = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" style="max-width: {_SCALE * width:.0f}px">'
    drawing = text[text.index(">") + 1 :].replace("</svg>", "")
    return f"{opening_tag}{drawing}{hover.strips(figure)}</svg>"


def svgs(figure: Figure) -> tuple[str, str]:
    """Returns the figure as an inline SVG, and a second one for narrow pages ("" if the figure is small anyway)."""
    wide, (width, height) = svg(figure), figure.get_size_inches()
    if width < WIDE:
        return wide, ""
    _resize(figure, NARROW, min(height, max(2.6, height - 1)))  # tall figures have rows of text
    narrow = svg(figure)
    _resize(figure, width, height)
    return wide, narrow


# Without dates and versions, so that the same figure gives the same bytes.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def write_png(figure: Figure, path: Path) -> None:
    """Writes the figure as a PNG on a white background at 160 dpi."""
    _write(figure, path, "png")


def write_figures(figures: Mapping[str, Figure], folder: Path, file_format: str = "png") -> list[Path]:
    """Writes each figure on a white background as folder/NAME.FORMAT, and returns the paths; text in SVG and PDF stays
    text. Creates the folder. Raises OSError if it is a link or cannot be written."""
    paths = [real_folder(folder) / f"{name}.{file_format}" for name in figures]
    for figure, path in zip(figures.values(), paths, strict=True):
        _write(figure, path, file_format)
    return paths


def _write(figure: Figure, path: Path, file_format: str) -> None:
    buffer, alpha = io.BytesIO(), figure.patch.get_alpha()
    figure.patch.set_alpha(1)  # a transparent patch would stay transparent in white
    with matplotlib.rc_context(STYLE):
        _arrange(figure)
        figure.savefig(buffer, format=file_format, dpi=160, facecolor="white", metadata=_METADATA[file_format])
    figure.patch.set_alpha(alpha)
    replace_bytes(path, buffer.getvalue())
