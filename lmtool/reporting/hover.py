"""Numbers of a plot that a page shows on hover: an invisible strip per step, with an SVG title."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lmtool.reporting.text import number, plain

_MAX_STRIPS = 75
"""Maximum number of strips of a plot, and of points that they name."""


def strips(figure: Figure) -> str:
    """Returns the strips of a figure that has been drawn, as an SVG group; "" for a figure without lines.

    A strip belongs to a value on the x axis, and its title names this value and the value of every line there. A line
    without a label has the title of its plot.
    """
    rectangles = [rectangle for axes in figure.axes for rectangle in _strips_of(figure, axes)]
    return f'<g class="hover">{"".join(rectangles)}</g>' if rectangles else ""


def _strips_of(figure: Figure, axes: Axes) -> Iterator[str]:
    lines = [line for line in axes.get_lines() if line.get_label() != "_nolegend_"]
    curves = [(_name(line, axes), _points(line)) for line in lines if line.get_transform() == axes.transData]
    constants = [
        f"{_name(line, axes)} {number(float(line.get_ydata()[0]))}"  # type: ignore[index, arg-type]
        for line in lines
        if line.get_transform() == axes.get_yaxis_transform(which="grid")
    ]
    places = sorted({x for _, points in curves for x in points})
    if len(places) > _MAX_STRIPS:
        # Few points, such as evaluations, are all kept; the others are thinned.
        kept = {x for _, points in curves if len(points) <= _MAX_STRIPS for x in points}
        places = sorted(kept | set(places[:: math.ceil(len(places) / _MAX_STRIPS)]))
    if not places:
        return
    points_per_pixel = 72 / figure.dpi
    height = figure.get_figheight() * 72
    left, right = sorted(axes.get_xlim())
    edges = [left, *(sum(pair) / 2 for pair in pairwise(places)), right]
    top, bottom = (height - points_per_pixel * y for y in (axes.bbox.y1, axes.bbox.y0))
    unit = axes.get_xlabel().partition(" (")[0]
    for place, ends in zip(places, pairwise(edges), strict=True):
        start, end = (points_per_pixel * axes.transData.transform((min(max(x, left), right), 0))[0] for x in ends)
        values = [f"{name} {number(points[place])}" for name, points in curves if place in points]
        title = "\n".join([f"{unit} {place:g}", *values, *constants])
        yield (
            f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(end - start, 0):.1f}" height="{bottom - top:.1f}">'
            f"<title>{html.escape(title)}</title></rect>"
        )


def _name(line: Line2D, axes: Axes) -> str:
    label = str(line.get_label())
    return plain(axes.get_title(loc="left") if label.startswith("_") else label, 60)


def _points(line: Line2D) -> dict[float, float]:
    return {x: y for x, y in np.asarray(line.get_xydata()).tolist() if math.isfinite(y)}
