"""Heat maps of position scores, pairs of sentences, confusion, agreement of models, settings of a sweep."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.reporting.drawing import (
    BASELINE,
    COLORS,
    INK,
    PAPER,
    STYLE,
    VALIDATION,
    WIDE,
    blank_figure,
    label_ends,
    single_plot,
    tidy,
)
from lmtool.reporting.sweep_groups import Block, SeedGroup
from lmtool.reporting.text import number, plain, shorten

# Maps of matrices.

_MAX_SENTENCES_WITH_NUMBERS = 6
_MAX_CHARACTERS_OF_A_LINE = 44  # in a narrow page; words of a longer sentence are written upright

# From transparent to a color of the page, so that it is readable in light and in dark mode.
_PAPER = LinearSegmentedColormap.from_list("paper", [to_rgba(VALIDATION, 0.0), to_rgba(VALIDATION)])


@matplotlib.rc_context(STYLE)
def position_maps_figure(scores_ALL: np.ndarray, per_row: int = 4, words: Sequence[str] = ()) -> Figure:
    """Returns maps of position scores, each with its own color scale. scores_ALL: (A, L, L). per_row: maximum number of
    maps in a row. words: the words at the positions, if they are known."""
    heads = len(scores_ALL)
    columns = min(per_row, heads)
    rows = -(-heads // columns)
    size = 1.8 + 0.12 * len(words)  # room for the words at the axes
    figure = blank_figure(size * columns + 0.4, 0.2 + rows * (size + 0.2))
    for head, scores_LL in enumerate(scores_ALL, 1):
        axes = figure.add_subplot(rows, columns, head)
        mesh = _square_map(axes, scores_LL, rasterized=True)
        axes.tick_params(labelsize=6.5, length=2)
        if words:
            centers, names = [column + 0.5 for column in range(len(words))], shorten(words, 12)
            axes.set_xticks(centers, names, rotation=90)
            axes.set_yticks(centers, names)
        if head > heads - columns:
            axes.set_xlabel("key", fontsize=7.5)
        if head % columns == 1 or columns == 1:
            axes.set_ylabel("query", fontsize=7.5)
        if heads > 1:
            axes.set_title(f"head {head}", fontsize=8.5)
        _add_color_bar(figure, axes, mesh)
    return figure


@matplotlib.rc_context(STYLE)
def tree_figure(words: Sequence[str], heads: Sequence[int], depths: Sequence[int]) -> Figure:
    """Draws a dependency tree: the words from left to right at their depths, and a line from each word to its head.
    heads: numbers of words from 1; 0 for the root. depths: the number of edges from the root to each word."""
    names = shorten(words, 12)
    upright = len(" ".join(names)) > _MAX_CHARACTERS_OF_A_LINE
    figure, axes = single_plot(WIDE, 0.8 + (0.9 if upright else 0.4) * max(depths))
    for column, (word, head, depth) in enumerate(zip(names, heads, depths, strict=True)):
        if head:
            axes.plot([column, head - 1], [depth, depths[head - 1]], color=VALIDATION, linewidth=1, zorder=1)
        box, rotation = {"facecolor": PAPER, "linewidth": 0}, 90 if upright else 0
        axes.text(column, depth, word, ha="center", va="center", fontsize=8, rotation=rotation, bbox=box)
    axes.set_xlim(-0.6, len(words) - 0.4)
    axes.set_ylim(max(depths) + 0.5, -0.5)
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("depth")
    return figure


@matplotlib.rc_context(STYLE)
def distances_figure(scores_ALL: np.ndarray) -> Figure | None:
    """Draws position scores over the distance, a line per head, all on one scale; None if scores do not depend on the
    distance alone. scores_ALL: (A, L, L)."""
    if not np.allclose(scores_ALL[:, 1:, 1:], scores_ALL[:, :-1, :-1], atol=1e-5):
        return None
    length = scores_ALL.shape[-1]
    distances = list(range(1 - length, length))
    figure, axes = single_plot(WIDE, 2.4)
    tidy(axes, "key position minus query position")
    axes.set_title("score over the distance")
    ends = []
    for head, (scores_LL, color) in enumerate(zip(scores_ALL, itertools.cycle(COLORS), strict=False), 1):
        scores = [*scores_LL[:0:-1, 0].tolist(), *scores_LL[0].tolist()]
        name = f"head {head}" if len(scores_ALL) > 1 else ""
        axes.plot(distances, scores, color=color, linewidth=1.4, label=name or "score")
        ends.append((scores[-1], name, color))
    label_ends(axes, axes.get_xlim()[1], ends, 0.11)
    return figure


def _square_map(axes: Axes, values_LL: np.ndarray, **options: Any) -> QuadMesh:
    axes.patch.set_alpha(0)
    mesh = axes.pcolormesh(values_LL, cmap=_PAPER, edgecolors="none", **options)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    return mesh


def _add_color_bar(figure: Figure, axes: Axes, mesh: QuadMesh, **options: Any) -> None:
    ticks = MaxNLocator(nbins=4)  # more would overlap in a narrow figure
    bar = figure.colorbar(mesh, ax=axes, **{"shrink": 0.75, "pad": 0.03, "ticks": ticks, **options})
    bar.outline.set_visible(False)
    bar.ax.patch.set_alpha(0)  # transparent for dark mode
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # otherwise one path per shade
    bar.ax.tick_params(labelsize=6.5, length=0)


@matplotlib.rc_context(STYLE)
def pairs_figure(pairs_WSS: np.ndarray, layers: Sequence[int]) -> Figure:
    """Draws the cosines of each pair of sentences, in the first and the last layer. pairs_WSS: (W, S, S) for W layers
    and S sentences."""
    layer_indices = [0] if len(layers) == 1 else [0, len(layers) - 1]
    sentences = pairs_WSS.shape[-1]
    names = [str(number) for number in range(1, sentences + 1)]
    low = min(0.9, float(pairs_WSS.min()))  # early layers have similar vectors
    figure = blank_figure(2.6 * len(layer_indices), 2.2)
    for column, layer_index in enumerate(layer_indices, 1):
        axes = figure.add_subplot(1, len(layer_indices), column)
        mesh = _square_map(axes, pairs_WSS[layer_index], vmin=low, vmax=1)
        for row, column_in_map in np.ndindex(sentences, sentences) if sentences <= _MAX_SENTENCES_WITH_NUMBERS else ():
            cosine = float(pairs_WSS[layer_index, row, column_in_map])
            text_color = PAPER if cosine - low > 0.6 * (1 - low) else INK
            place = column_in_map + 0.5, row + 0.5
            axes.text(*place, f"{cosine:.2f}", ha="center", va="center", color=text_color, fontsize=7)
        positions = [index + 0.5 for index in range(sentences)]
        axes.set_xticks(positions, names)
        axes.set_yticks(positions, names)
        axes.set_title(f"layer {layers[layer_index]}", fontsize=8.5)
        axes.set_xlabel("sentence", fontsize=7.5)
        if column == 1:
            axes.set_ylabel("sentence", fontsize=7.5)
        _add_color_bar(figure, axes, mesh)
    return figure


# Maps of cells with text.


def _cell(axes: Axes, column: int, row: int, alpha: float, color: str = VALIDATION, height: float = 0.96) -> None:
    axes.add_patch(
        Rectangle((column - 0.48, row - height / 2), 0.96, height, facecolor=color, alpha=alpha, linewidth=0)
    )


def _text_color(shade: float) -> str:
    return "#ffffff" if shade > 0.6 else INK


def _label_cells(axes: Axes, columns: Sequence[str], rows: Sequence[str], x_label: str, y_label: str = "") -> None:
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


MAX_CLASSES = 20
"""Maximum number of classes of a confusion matrix."""
_OTHERS = "others"


def most_confused(pairs: Mapping[tuple[str, str], int]) -> tuple[list[str], list[list[int]]]:
    """Returns the labels with the most errors, and their counts, gold by predicted. If labels are left out, a last
    column counts the predictions of these. pairs: counts of (gold, predicted) labels."""
    errors: Counter[str] = Counter()
    for (gold, predicted), count in pairs.items():
        errors[gold] += count * (gold != predicted)
        errors[predicted] += count * (gold != predicted)
    labels = sorted(label for label, _ in errors.most_common(MAX_CLASSES))
    counts = [[pairs.get((gold, predicted), 0) for predicted in labels] for gold in labels]
    if len(labels) < len(errors):
        totals: Counter[str] = Counter()
        for (gold, _), count in pairs.items():
            totals[gold] += count
        counts = [[*row, totals[gold] - sum(row)] for gold, row in zip(labels, counts, strict=True)]
    return labels, counts


@matplotlib.rc_context(STYLE)
def confusion_figure(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Returns the confusion matrix of `most_confused`, gold labels in rows. The shade of a cell is its fraction of the
    row; its number counts examples."""
    size = max(map(len, counts), default=0)
    edge = min(1.7 + 0.52 * size, 7.2)
    figure, axes = single_plot(edge + 0.6, edge)
    for row, row_counts in enumerate(counts):
        for column, cell_count in enumerate(row_counts):
            fraction = cell_count / max(sum(row_counts), 1)
            _cell(axes, column, row, 0.04 + 0.76 * fraction, VALIDATION if row == column else BASELINE)
            if cell_count and size <= 12:
                axes.text(column, row, str(cell_count), ha="center", va="center", color=_text_color(fraction))
    names = shorten(labels, 18)
    columns = [*names, _OTHERS] if size > len(labels) else names
    _label_cells(axes, columns, names, "predicted", "gold")
    if size > 4 or max(map(len, names)) >= 12:
        axes.set_xticks(range(size), columns, rotation=45, ha="right")
    return figure


# The stack that reads each side of a batch, and whose states are swapped.
_STACKS = {"inputs": "encoder", "outputs": "decoder"}


@matplotlib.rc_context(STYLE)
def agreement_figure(accuracy: JsonMapping) -> Figure | None:
    """Returns a heat map of interchange accuracy per stack, with aligned layers in rows and the start of the swapped
    span in columns; None if nothing was measured. accuracy: `interchange_accuracy` of result.json."""
    cells = [cell for cell in accuracy.get("cells") or () if cell.get("n")]
    if not cells:
        return None
    by_stack = {name: [cell for cell in cells if cell["side"] == side] for side, name in _STACKS.items()}
    by_stack = {name: stack_cells for name, stack_cells in by_stack.items() if stack_cells}
    layers = {name: sorted({_aligned_layers(cell) for cell in stack_cells}) for name, stack_cells in by_stack.items()}
    regions = max(cell["region"] for cell in cells)
    spans = [f"{100 * part // regions}-{100 * (part + 1) // regions}%" for part in range(regions)]
    figure = blank_figure(3.8 * len(by_stack), 1.1 + 0.36 * max(map(len, layers.values())))
    for index, (name, stack_cells) in enumerate(by_stack.items(), 1):
        axes = figure.add_subplot(1, len(by_stack), index)
        axes.patch.set_alpha(0)
        if len(by_stack) > 1:
            axes.set_title(name)
        for cell in stack_cells:
            column, row, value = cell["region"] - 1, layers[name].index(_aligned_layers(cell)), float(cell["value"])
            _cell(axes, column, row, 0.04 + 0.76 * value, height=0.92)
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=_text_color(value))
        # Full names, since an axis title would be longer than the height of a map with one row.
        names = [f"layer {layer}, teacher's {teacher}" if layer else "embeddings" for layer, teacher in layers[name]]
        _label_cells(axes, spans, names, "start of the swapped span")
    return figure


def _aligned_layers(cell: JsonObject) -> tuple[int, int]:
    return cell["student_layer"], cell["teacher_layer"]


@matplotlib.rc_context(STYLE)
def settings_figure(
    block: Block,
    groups: Sequence[SeedGroup],
    name: str,
    keys: tuple[str, str],
    values: Mapping[str, Sequence[str | None]],
    colors: Mapping[int, str],
) -> Figure:
    """Returns a heat map of two keys of a sweep. block: all compared groups; the mean of their reference is bold.
    groups: those in this map. keys: the key in rows and the one in columns. values: those of each key. colors: the
    color of each group that gets one, by its id."""
    row_key, column_key = keys
    figure, axes = single_plot(min(1.4 + 0.95 * len(values[column_key]), 7.2), 0.9 + 0.55 * len(values[row_key]))
    for group in groups:
        column = values[column_key].index(group.settings[column_key])
        row = values[row_key].index(group.settings[row_key])
        color = colors.get(id(group))
        _cell(axes, column, row, 0.06 if color is None else 0.45, color or VALIDATION)
        weight = "bold" if group is block.reference else "normal"
        axes.text(column, row - 0.02, number(group.mean), ha="center", va="bottom", color=INK, weight=weight)
        error_text = f"n = {group.n}" if group.error is None else f"± {number(group.error)}"
        axes.text(column, row + 0.06, error_text, ha="center", va="top", color=INK, fontsize=7)
    names = {key: [setting_text(value) for value in values[key]] for key in keys}
    _label_cells(axes, names[column_key], names[row_key], plain(column_key, 40), plain(row_key, 40))
    axes.set_title(name)
    return figure


def setting_text(value: str | None) -> str:
    """Returns the value of a key as the label of a tick."""
    return "not given" if value is None else plain(value, 14)
