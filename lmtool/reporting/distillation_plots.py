"""The plots of a distilled run: its terms over the steps, and where its models agree when states are swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lmtool.reporting.drawing import (
    BASELINE,
    INK,
    STYLE,
    VALIDATION,
    WIDE,
    blank,
    focus,
    mark,
    panels_a_row,
    smoothed_steps,
    tidy,
)
from lmtool.reporting.run_files import RunFiles, loss_terms, phase_starts, series
from lmtool.reporting.text import plain

TERM = "loss_"


def terms_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Small multiples over steps: each term of the training loss before its weight, and on held-out data where it is
    measured there; None where the loss has one term alone. width: in inches."""
    panels = [(name.removeprefix(TERM), series(run.train, name)) for name in loss_terms(run)]
    panels = [(name, points) for name, points in panels if points[0]]
    if len(panels) < 2:
        return None
    columns = panels_a_row(len(panels), width)
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = blank(width, 1.75 * rows)
        for index, (name, (steps, values)) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            tidy(axes)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.set_title(plain(name, 30), fontsize=8.5)
            smoothed_steps(axes, steps, values, width=1.6)
            held_out = series(run.validation, f"{name}_loss")
            if held_out[0]:
                axes.plot(*held_out, color=VALIDATION, linewidth=1.2, marker="o", markersize=2.5)
            baseline = series(run.validation, f"{name}_baseline")[1][-1:]
            for value in baseline:
                axes.axhline(value, color=BASELINE, linewidth=1, linestyle=(0, (5, 4)))
            focus(axes, [*values, *held_out[1], *baseline], True)
            mark(axes, phase_starts(run))
    return figure


_SIDES = {"inputs": "encoder", "outputs": "decoder"}


def agreement_figure(accuracy: Mapping[str, Any]) -> Figure | None:
    """A heat map of interchange accuracy: aligned layers down, where in the text the swapped span begins across; a
    panel a stack. accuracy: `interchange_accuracy` as result.json has it; None where nothing was measured."""
    cells = [cell for cell in accuracy.get("cells") or () if cell.get("n")]
    if not cells:
        return None
    sides = [side for side in _SIDES if any(cell["side"] == side for cell in cells)]
    regions = max(cell["region"] for cell in cells)
    layers = {side: _layers(cells, side) for side in sides}
    with matplotlib.rc_context(STYLE):
        figure = blank(3.8 * len(sides), 1.1 + 0.36 * max(map(len, layers.values())))
        for index, side in enumerate(sides):
            axes = figure.add_subplot(1, len(sides), index + 1)
            if len(sides) > 1:
                axes.set_title(_SIDES[side])
            _heat(axes, [cell for cell in cells if cell["side"] == side], layers[side], regions)
    return figure


def _layers(cells: Sequence[Mapping[str, Any]], side: str) -> list[tuple[int, int]]:
    """The aligned layers of a stack, the student's first."""
    return sorted({(cell["student_layer"], cell["teacher_layer"]) for cell in cells if cell["side"] == side})


def _heat(axes: Axes, cells: Sequence[Mapping[str, Any]], layers: Sequence[tuple[int, int]], regions: int) -> None:
    axes.patch.set_alpha(0)
    for cell in cells:
        row = layers.index((cell["student_layer"], cell["teacher_layer"]))
        column, value = cell["region"] - 1, float(cell["value"])
        corner = (column - 0.48, row - 0.46)
        axes.add_patch(
            matplotlib.patches.Rectangle(
                corner, 0.96, 0.92, facecolor=VALIDATION, alpha=0.04 + 0.76 * value, linewidth=0
            )
        )
        colour = "#ffffff" if value > 0.6 else INK
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    axes.set_xlim(-0.5, regions - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xticks(
        range(regions), [f"{100 * part // regions}-{100 * (part + 1) // regions}%" for part in range(regions)]
    )
    # Named in full: a title of this axis would be longer than a map of one row is high.
    names = [f"layer {own}, teacher's {its}" if own else "embeddings" for own, its in layers]
    axes.set_yticks(range(len(layers)), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("where the swapped span begins")
