"""The figures of a sweep: a curve over one key, heat maps over two or three."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lmtool.reporting.drawing import INK, QUIET, STYLE, TRAIN, VALIDATION, blank
from lmtool.reporting.sweep_groups import Block, SeedGroup, number_of
from lmtool.reporting.text import lower_is_better, number, plain, title

# Values that span this factor get a logarithmic axis.
_LOGARITHMIC = 8
_CELLS, _PANELS, _POINTS = 12, 6, 40


def settings_figures(block: Block) -> tuple[list[Figure], str]:
    """The figures for the varying keys, and their caption; none if there are too few or too many values."""
    with_score = [group for group in block.groups if group.n]
    values = {key: _ordered([group.settings[key] for group in with_score]) for key in block.keys}
    # A key needs two values with scores.
    keys = [key for key in block.keys if len(values[key]) > 1]
    if len(keys) == 1 and len(keys) == len(block.keys) and len(with_score) <= _POINTS:
        return [_curve(block, keys[0], with_score)], _CURVE
    if not 2 <= len(keys) <= 3 or len(keys) != len(block.keys):
        return [], ""
    *panel, down, across = sorted(keys, key=lambda key: len(values[key]))
    if max(len(values[down]), len(values[across])) > _CELLS:
        return [], ""
    means = [group.mean for group in with_score]
    maps: dict[str, list[SeedGroup]] = {}
    for value in values[panel[0]] if panel else []:
        of_value = [group for group in with_score if group.settings[panel[0]] == value]
        maps[f"{plain(panel[0], 40)} = {_short(value)}"] = of_value
    maps = maps or {title(block.metric): with_score}
    if len(maps) > _PANELS:
        return [], ""
    scale = min(means), max(means)
    return [_heat_map(block, groups, name, (down, across), values, scale) for name, groups in maps.items()], _HEAT


_CURVE = "Dots: single jobs. Line: their mean, with its standard error over seeds."


_HEAT = "Mean over seeds; below it the standard error of the mean. The fuller the color, the better."


def _ordered(values: Sequence[str | None]) -> list[str | None]:
    """Unique values: numbers sorted, others in order of appearance."""
    once = list(dict.fromkeys(values))
    numbers = [number_of(value) for value in once]
    return once if None in numbers else [once[index] for index in sorted(range(len(once)), key=numbers.__getitem__)]  # type: ignore[arg-type]


def _curve(block: Block, key: str, with_score: Sequence[SeedGroup]) -> Figure:
    names = _ordered([group.settings[key] for group in with_score])
    at = {group.settings[key]: group for group in with_score}
    numbers = [number_of(name) for name in names]
    numeric = [value for value in numbers if value is not None]
    positions = numeric if len(numeric) == len(names) else [float(index) for index in range(len(names))]
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 3.2)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.set_title(title(block.metric))
        axes.set_xlabel(plain(key, 60))
        for position, name in zip(positions, names, strict=True):
            scores = list(at[name].scores.values())
            axes.scatter([position] * len(scores), scores, s=12, color=TRAIN, linewidths=0, zorder=2)
        axes.errorbar(
            positions,
            [at[name].mean for name in names],
            yerr=[at[name].error or 0.0 for name in names],
            color=VALIDATION,
            linewidth=1.5 if len(numeric) == len(names) else 0,
            elinewidth=1.2,
            marker="o",
            markersize=4.5,
            capsize=3,
            zorder=3,
        )
        _value_axis(axes, positions, [_short(name) for name in names], len(numeric) == len(names))
    return figure


def _value_axis(axes: Axes, positions: list[float], names: list[str], numeric: bool) -> None:
    """Sets a tick per value, as typed; the axis is logarithmic if values span a large factor."""
    if numeric and min(positions) > 0 and max(positions) >= _LOGARITHMIC * min(positions):
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    tilted = max(map(len, names)) * len(names) > 80
    axes.set_xticks(positions, names, rotation=30 if tilted else 0, ha="right" if tilted else "center")
    if not numeric:
        axes.margins(x=0.1)


def _heat_map(
    block: Block,
    with_score: Sequence[SeedGroup],
    name: str,
    keys: tuple[str, str],
    values: dict[str, list[str | None]],
    scale: tuple[float, float],
) -> Figure:
    """A heat map of two keys, for rows and columns. scale: lowest and highest mean of all maps."""
    down, across = keys
    with matplotlib.rc_context(STYLE):
        figure = blank(min(1.4 + 0.95 * len(values[across]), 7.2), 0.9 + 0.55 * len(values[down]))
        axes = figure.add_subplot()
        for group in with_score:
            x, y = values[across].index(group.settings[across]), values[down].index(group.settings[down])
            _cell(axes, x, y, group, _shade(block, group.mean, *scale))
        _map_axes(axes, values, keys)
        axes.set_title(name)
    return figure


def _shade(block: Block, mean: float, low: float, high: float) -> float:
    """The position of a mean between the worst (0) and the best (1)."""
    if not math.isfinite(high - low) or high == low:
        return 0.5
    share = (mean - low) / (high - low)
    return 1 - share if lower_is_better(block.metric) else share


def _cell(axes: Axes, x: int, y: int, group: SeedGroup, shade: float) -> None:
    square: Any = matplotlib.patches.Rectangle(
        (x - 0.48, y - 0.48), 0.96, 0.96, facecolor=VALIDATION, alpha=0.06 + 0.74 * shade, linewidth=0
    )
    axes.add_patch(square)
    color = "#ffffff" if shade > 0.6 else INK
    axes.text(x, y - 0.02, number(group.mean), ha="center", va="bottom", color=color)
    below = f"n = {group.n}" if group.error is None else f"± {number(group.error)}"
    axes.text(x, y + 0.06, below, ha="center", va="top", color=color, fontsize=7)


def _map_axes(axes: Axes, values: dict[str, list[str | None]], keys: tuple[str, str]) -> None:
    down, across = keys
    axes.patch.set_alpha(0)
    axes.set_xlim(-0.5, len(values[across]) - 0.5)
    axes.set_ylim(len(values[down]) - 0.5, -0.5)
    axes.set_xticks(range(len(values[across])), [_short(value) for value in values[across]])
    axes.set_yticks(range(len(values[down])), [_short(value) for value in values[down]])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(plain(across, 40))
    axes.set_ylabel(plain(down, 40), color=QUIET)


def _short(value: str | None) -> str:
    return "not given" if value is None else plain(value, 14)
