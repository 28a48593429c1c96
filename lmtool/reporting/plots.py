"""Plots of curves and points: a run, its predictions, several runs, layers, one key of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullLocator

from lmtool.learners.metrics import mean_and_error
from lmtool.reporting import drawing, heat_maps
from lmtool.reporting.drawing import BASELINE, COLORS, INK, QUIET, STYLE, TRAIN, VALIDATION, WIDE, single_plot, tidy
from lmtool.reporting.run_files import (
    Baseline,
    CheckpointProbes,
    EvolutionResults,
    RunFiles,
    Series,
    comparable_loss,
    loss_terms,
    phase_starts,
    read_curves,
    series,
)
from lmtool.reporting.sweep_groups import Block, Difference, SeedGroup, number_of
from lmtool.reporting.text import exponent, lower_is_better, number, plain, title
from lmtool.system.terminal import counted

_RATE = FuncFormatter(lambda value, _: exponent(value))


@matplotlib.rc_context(STYLE)
def loss_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Draws the training loss (each row, and smoothed), validation loss and baseline over steps; None without rows. A
    loss with several terms is reduced to the terms of the validation loss (`comparable_loss`). width: in inches."""
    train_key, metric = _training_loss(run), _term_metric(run) or "loss"
    train, validation = series(run.train, train_key), series(run.validation, metric)
    if not train.steps and not validation.steps:
        return None
    figure, axes = single_plot(width, 1.6 + width / 4)
    tidy(axes)
    term = train_key.removeprefix("loss_") if train_key != "loss" else ""
    label = title(f"{term}_loss") if term else "loss"
    is_sum = train_key == "loss" and len(loss_terms(run)) > 1
    unit = "the weighted sum of its terms" if is_sum else "nats a prediction"
    axes.set_title(f"{label}, {unit}" if run.result.get("objective") else label)
    values = list(validation.values)
    if train.steps:
        drawing.plot_smoothed_steps(axes, *train, width=1.8)
        values += train.values
    baseline = run.baseline if run.baseline.get("metric") == metric else {}
    value = baseline.get("value")
    if isinstance(value, (int, float)):
        drawing.draw_baseline(axes, value)
        values.append(float(value))
    if validation.steps:
        axes.plot(*validation, color=VALIDATION, linewidth=1.6, marker="o", markersize=3.5, label="validation")
    drawing.focus(axes, values, cut_high=True)
    drawing.mark_steps(axes, phase_starts(run), "phase")
    _label_curves(axes, train, validation, baseline, narrow=width < WIDE)
    return figure


def _term_metric(run: RunFiles) -> str:
    metric = str(run.result.get("metric") or run.baseline.get("metric") or "")
    return metric if metric.endswith("_loss") else ""


def _training_loss(run: RunFiles) -> str:
    term_metric = _term_metric(run)
    return f"loss_{term_metric.removesuffix('_loss')}" if term_metric else comparable_loss(run)


def loss_caption(run: RunFiles) -> str:
    """Returns the caption of the loss figure."""
    key = _training_loss(run)
    rows = len(series(run.train, key).steps)
    sentences = ["Faint: each logged step of training; above it, its running mean. Dots: held-out data."]
    if rows < drawing.MIN_LINE_POINTS:
        logged = f"Single dots: {counted(rows, 'logged step')} of training. " if rows else ""
        sentences = [f"{logged}Joined dots: held-out data."]
    if not key:
        sentences.append("Held-out data is not scored on all terms of the training loss; see below.")
    elif key != "loss":
        term = title(key.removeprefix("loss_"))
        sentences.append(f"Only the {term} loss of training is drawn, since held-out data is scored on it.")
    extra_targets = run.metadata.get("trained_beside")
    if isinstance(extra_targets, str):
        sentences.append(f"Training also counts {extra_targets}, which are easier to predict.")
    return " ".join(sentences)


def _label_curves(axes: Axes, train: Series, validation: Series, baseline: Baseline, narrow: bool) -> None:
    labels = []
    if train.steps:
        labels.append((drawing.smooth(train.values)[-1], "training", QUIET))
    if validation.steps:
        labels.append((validation.values[-1], f"validation {number(validation.values[-1])}", VALIDATION))
    value = baseline.get("value")
    if isinstance(value, (int, float)):
        name = "baseline" if narrow else title(str(baseline.get("name", "baseline")))[:24]
        labels.append((float(value), f"{name} {number(float(value))}", BASELINE))
    right = axes.get_xlim()[1]  # the end of the baseline
    drawing.label_ends(axes, right, labels, 0.1 if narrow else 0.065)


@matplotlib.rc_context(STYLE)
def curves_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Draws small plots over steps: the main metric unless it is a loss, learning rate, gradient norm, speed. width: in
    inches."""
    metric, metric_name = run.result.get("metric"), ""
    plots: dict[str, Series] = {}
    if isinstance(metric, str) and metric and not metric.endswith("loss"):  # a loss has the large plot
        metric_name = f"validation {title(metric)}"
        plots[metric_name] = series(run.validation, metric)
    plots["learning rate"] = series(run.train, "learning_rate")
    plots["gradient norm"] = series(run.train, "grad_norm")
    plots["tokens per second"] = series(run.train, "tokens_per_second")
    plots = {name: points for name, points in plots.items() if points.steps}
    if not plots:
        return None
    rates = {"learning rate": _RATE, "tokens per second": EngFormatter(sep="")}
    figure, all_axes = drawing.small_plots(list(plots), width)
    for axes, (name, (steps, values)) in zip(all_axes, plots.items(), strict=True):
        if name == metric_name:
            axes.plot(*drawing.thin(steps, values), color=VALIDATION, linewidth=1.2, marker="o", markersize=2.5)
        else:
            drawing.plot_logged_steps(axes, steps, values, QUIET, 1.2)
        drawing.focus(axes, values, cut_high=name == "gradient norm")
        drawing.mark_steps(axes, phase_starts(run))
        value = run.baseline.get("value")
        if name in rates:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(rates[name])
        elif name == metric_name and run.baseline.get("metric") == metric and isinstance(value, (int, float)):
            drawing.draw_baseline(axes, value)
    return figure


@matplotlib.rc_context(STYLE)
def calibration_figure(bins: Sequence[Sequence[float]]) -> Figure:
    """Draws accuracy against confidence: a dot per bin, with an area proportional to the rows, and the line of perfect
    calibration.

    bins: (number of rows, mean confidence, accuracy) of each.
    """
    figure, axes = single_plot(3.8, 3.5)
    total = sum(rows for rows, _, _ in bins)
    axes.plot([0, 1], [0, 1], color=drawing.FAINT, linewidth=1)
    confidences, accuracies = [row[1] for row in bins], [row[2] for row in bins]
    axes.plot(confidences, accuracies, color=TRAIN, linewidth=1)
    sizes = [20 + 280 * rows / total for rows, _, _ in bins]
    axes.scatter(confidences, accuracies, s=sizes, color=VALIDATION, linewidths=0, clip_on=False)
    axes.set_xlim(0, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    return figure


@matplotlib.rc_context(STYLE)
def scatter_figure(gold: Sequence[float], predicted: Sequence[float]) -> Figure:
    """Draws the predicted values of a regression against the gold values, with the line of perfect agreement."""
    figure, axes = single_plot(3.8, 3.5)
    stride = max(len(gold) // drawing.MAX_POINTS, 1)
    low, high = min([*gold, *predicted]), max([*gold, *predicted])
    axes.plot([low, high], [low, high], color=drawing.FAINT, linewidth=1)
    axes.scatter(gold[::stride], predicted[::stride], s=8, color=VALIDATION, alpha=0.45, linewidths=0)
    axes.set_xlabel("gold")
    axes.set_ylabel("predicted")
    return figure


@matplotlib.rc_context(STYLE)
def overlay_figure(runs: Sequence[RunFiles], metric: str, split: str) -> Figure | None:
    """Draws one metric of several runs over steps. A training loss is reduced to the terms of the validation loss."""
    lines = [(run.name, _points(run, split, metric)) for run in runs]
    if not any(steps for _, (steps, _) in lines):
        return None
    figure, axes = single_plot(7.2, 3.4)
    tidy(axes)
    axes.set_title(f"{split} {title(metric)}" if metric != "learning_rate" else "learning rate")
    if metric == "learning_rate":
        axes.yaxis.set_major_formatter(_RATE)
    values: list[float] = []
    for index, (name, (steps, run_values)) in enumerate(lines):
        if steps:
            as_points = split == "train" and len(steps) < drawing.MIN_LINE_POINTS
            axes.plot(
                *drawing.thin(steps, run_values),
                color=COLORS[index % len(COLORS)],
                linewidth=0 if as_points else 1.4,
                marker="o" if as_points or split == "validation" else None,
                markersize=3,
                label=f"{plain(name, 40)} ({counted(len(steps), 'logged row')})" if as_points else plain(name, 40),
                linestyle=("-", "--", ":")[index // len(COLORS) % 3],
            )
            values += run_values
    drawing.focus(axes, values, cut_high=lower_is_better(metric))
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    return figure


def _points(run: RunFiles, split: str, metric: str) -> Series:
    if (split, metric) != ("train", "loss"):
        return series(run.validation if split == "validation" else run.train, metric)
    steps, values = series(run.train, comparable_loss(run) or metric)
    return Series(steps, drawing.smooth(values))


@matplotlib.rc_context(STYLE)
def layers_figure(target: str, checkpoints: Sequence[CheckpointProbes]) -> Figure:
    """Draws the accuracy of probes by layer, one line per checkpoint with standard errors; dashed for random weights,
    dotted for the most frequent class. checkpoints: as in probe.json."""
    figure, axes = single_plot(7.2, 3.8)
    tidy(axes, "layer (0: embedding)")
    axes.set_title(
        f"{plain(target, 40)}: accuracy of a linear probe (dashed: random weights, dotted: most frequent class)"
    )
    for index, probes in enumerate(checkpoints):
        color, name = COLORS[index % len(COLORS)], plain(probes["checkpoint"], 40)
        layers = [row["layer"] for row in probes["layers"]]
        trained, random = zip(*((row["trained"], row["random"]) for row in probes["layers"]), strict=True)
        for scores, style, label in ((trained, "-", name), (random, "--", None)):
            axes.errorbar(
                layers,
                [score["accuracy"] for score in scores],
                yerr=[score["standard_error"] for score in scores],
                color=color,
                linestyle=style,
                linewidth=1.6 if style == "-" else 1.0,
                marker="o" if style == "-" else None,
                markersize=3.5,
                capsize=2,
                label=label,
            )
        axes.axhline(probes["majority"]["accuracy"], color=color, linewidth=0.9, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@matplotlib.rc_context(STYLE)
def text_seen_figure(
    metric: str,
    unit: str,
    amounts: Sequence[int],
    values: Sequence[float],
    intervals: Sequence[Mapping[str, float] | None],
) -> Figure:
    """Draws a score over the text seen, on a logarithmic axis, with the intervals that are known. unit: tokens or
    words. intervals: "low" and "high"; None for values without one."""
    figure, axes = single_plot(6.4, 3.6)
    tidy(axes, f"{unit} seen")
    axes.set_title(plain(title(metric), 60))
    axes.plot(amounts, values, color=COLORS[0], marker="o", markersize=4, linewidth=1.4)
    for amount, interval in zip(amounts, intervals, strict=True):
        if interval is not None:
            axes.vlines(amount, interval["low"], interval["high"], color=COLORS[0], linewidth=1.0)
    if len(amounts) > 1:
        axes.set_xscale("log")
    return figure


@matplotlib.rc_context(STYLE)
def evolution_figure(results: EvolutionResults) -> Figure:
    """Draws, over layers, the information on the input token and on the predicted token, and the similarity to the
    layer before and between checkpoints, with 95% intervals, and dotted lines for shuffled tokens."""
    checkpoints = [(measured["checkpoint"], measured["layers"]) for measured in results["checkpoints"]]
    pairs = [(f"{pair['first']}, {pair['second']}", pair["layers"]) for pair in results["pairs"]]
    quantities = [
        ("information on the input token, nats", "input", checkpoints),
        ("information on the predicted token, nats", "predicted", checkpoints),
        ("similarity to the layer before", "before", checkpoints),
        ("similarity of checkpoints at a layer", "similarity", pairs),
    ]
    figure, all_axes = drawing.small_plots([name for name, _, _ in quantities], 2 * WIDE / 3)
    figure.set_size_inches(WIDE, 6.4)
    for axes, (_, key, lines) in zip(all_axes, quantities, strict=True):
        axes.set_xlabel("layer (0: embedding)")
        for index, (name, rows) in enumerate(lines):
            known = [(row["layer"], row[key]) for row in rows if row[key] is not None]
            if not known:
                continue
            layers, color = [layer for layer, _ in known], COLORS[index % len(COLORS)]
            values = [estimate["value"] for _, estimate in known]
            errors = [estimate["high"] - estimate["value"] for _, estimate in known]
            axes.errorbar(
                layers,
                values,
                yerr=errors,
                color=color,
                linewidth=1.6,
                marker="o",
                markersize=3.5,
                capsize=2,
                label=plain(name, 40),
            )
            axes.plot(layers, [estimate["shuffled"] for _, estimate in known], color=color, linestyle=":", linewidth=1)
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    return figure


@matplotlib.rc_context(STYLE)
def scaling_figure(
    unit: str,
    curves: Sequence[tuple[str, Sequence[tuple[float, float]], tuple[float, float, float]]],
    predicted_R: np.ndarray,
    losses_R: np.ndarray,
) -> Figure:
    """Draws the loss over N for each budget of FLOPs, with its parabola in log N, and the fitted loss over the measured
    loss of each run. unit: how N is counted. curves: for each budget its name, N and loss of its runs, and the
    coefficients of its parabola. predicted_R, losses_R: the loss of each run by the law, and measured."""
    figure, (left, right) = drawing.small_plots(["equal FLOPs: loss", "loss by the law"], WIDE)
    figure.set_size_inches(WIDE, 3.4)
    for index, (name, points, coefficients) in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        sizes, losses = np.array(sorted(points)).T
        dense = np.geomspace(sizes[0], sizes[-1], 60)
        left.plot(sizes, losses, "o", color=color, markersize=3.5, label=plain(name, 30))
        left.plot(dense, np.polyval(coefficients, np.log(dense)), color=color, linewidth=1.2)
    left.set_xscale("log")
    left.set_xlabel(unit)
    if curves:
        left.legend(frameon=False, fontsize=7, labelcolor=INK)
    right.xaxis.set_major_locator(MaxNLocator(4))
    right.set_xlabel("measured loss")
    right.plot(losses_R, predicted_R, "o", color=TRAIN, markersize=3.5)
    ends = [min(losses_R), max(losses_R)]
    right.plot(ends, ends, color=BASELINE, linewidth=1, linestyle=":")
    return figure


@matplotlib.rc_context(STYLE)
def terms_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Draws small plots over steps: each unweighted term of the training loss, and of the validation loss if it has
    that term; None for a loss with one term. width: in inches."""
    plots = [(name.removeprefix("loss_"), series(run.train, name)) for name in loss_terms(run)]
    plots = [(name, points) for name, points in plots if points.steps]
    if len(plots) < 2:
        return None
    figure, all_axes = drawing.small_plots([plain(name, 30) for name, _ in plots], width)
    for axes, (name, (steps, values)) in zip(all_axes, plots, strict=True):
        drawing.plot_smoothed_steps(axes, steps, values, width=1.6)
        validation = series(run.validation, f"{name}_loss")
        if validation.steps:
            axes.plot(*validation, color=VALIDATION, linewidth=1.2, marker="o", markersize=2.5, label="validation")
        baseline = series(run.validation, f"{name}_baseline").values[-1:]
        for value in baseline:
            drawing.draw_baseline(axes, value)
        drawing.focus(axes, [*values, *validation.values, *baseline], cut_high=True)
        drawing.mark_steps(axes, phase_starts(run))
    return figure


OVER_STEPS: Mapping[str, Callable[..., Figure | None]] = {
    "loss": loss_figure,
    "terms": terms_figure,
    "curves": curves_figure,
}
"""The figures of a run over steps, by file name; each takes the run and a width."""


class _SimilarityByLayer(Protocol):
    """The fields of `looks.SimilarityByLayer` that are drawn."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def same(self) -> list[float]: ...
    @property
    def other_words(self) -> list[float]: ...


@matplotlib.rc_context(STYLE)
def similarity_figure(similarities: Sequence[_SimilarityByLayer]) -> Figure:
    """Draws mean cosines by layer: of the same word in different sentences (lines), and of different words (dots)."""
    figure, axes = single_plot(7.2, 3.2)
    tidy(axes, "layer (0: embedding)")
    axes.set_ylabel("mean cosine")
    ends: dict[int, list[tuple[float, str, str]]] = {}
    for similar, color in zip(similarities, itertools.cycle(COLORS), strict=False):
        name = plain(Path(similar.name).name or similar.name, 24)
        line: dict[str, Any] = {"color": color, "linewidth": 1.8, "marker": "o", "markersize": 3.5}
        axes.plot(similar.layers, similar.same, label=f"{name}, same word", **line)
        dots: dict[str, Any] = {"color": color, "linewidth": 0, "marker": ".", "markersize": 4, "alpha": 0.5}
        axes.plot(similar.layers, similar.other_words, label=f"{name}, different words", **dots)
        if len(similar.layers) > 1:
            labels = [(similar.same[-1], name, color), (similar.other_words[-1], f"{name}, different words", color)]
            ends.setdefault(similar.layers[-1], []).extend(labels)
        else:  # a label at the right could cover another line
            axes.annotate(
                name, (similar.layers[0], similar.same[0]), (-2, -11), textcoords="offset points", color=color
            )
    axes.set_ylim(None, 1.03)
    for layer, labels in ends.items():
        drawing.label_ends(axes, layer, labels, 0.075)
    axes.set_title("similarity of two vectors")
    return figure


# Settings of a sweep, and the scores of runs.

# Values that span this factor get a logarithmic axis.
_LOGARITHMIC = 8
# Blocks that exceed these numbers get no figure, or one of fewer settings.
_MAX_VALUES = 12  # of a key on an axis of a map
_MAX_MAPS = 6
_MAX_POINTS = 40  # of a curve
_MAX_LINES = 8  # the number of colors
_MAX_ROWS = 30
_LABEL_CHARACTERS = 48
_MAX_EXCESS = 4  # of an interval over the range of the scores, as a multiple of this range
_LINE_STYLES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)), (0, (3, 3)))


class ScoreRow(NamedTuple):
    """A setting or a run in `scores_figure`.

    scores: of its jobs. mean: their mean, or the score of the run. interval: 95% interval of it; None if unknown.
    difference: from the reference; None for the reference itself and where it is unknown.
    """

    name: str
    scores: Sequence[float]
    mean: float
    interval: tuple[float, float] | None
    difference: Difference | None


@matplotlib.rc_context(STYLE)
def scores_figure(rows: Sequence[ScoreRow], metric: str, reference: str) -> Figure:
    """Draws one row for each setting or run, the first at the top. The left plot has the single scores and their mean
    with its interval. The right one has the difference from the reference with its interval, in color if it is
    significant. metric: the metric of the scores. reference: the name of the row that the others are compared with."""
    has_differences = any(row.difference is not None and row.difference.value is not None for row in rows)
    # Less than WIDE, since a narrow version would have no room beside the names.
    figure = drawing.blank_figure(WIDE - 0.1, 0.75 + 0.24 * len(rows))
    columns = figure.subplots(1, 1 + has_differences, sharey=True, squeeze=False)[0]
    for axes in columns:
        axes.patch.set_alpha(0)
        axes.margins(x=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.grid(axis="y", color=drawing.FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines.left.set_visible(False)
    columns[0].set_yticks(range(len(rows)), [plain(row.name, _LABEL_CHARACTERS) for row in rows], color=INK)
    columns[0].set_ylim(len(rows) - 0.5, -0.5)
    columns[0].set_title(title(metric))
    for position, row in enumerate(rows):
        color = _emphasis(row.difference, metric) or (INK if row.name == reference else QUIET)
        columns[0].scatter(row.scores, [position] * len(row.scores), s=12, color=TRAIN, linewidths=0, zorder=2)
        _draw_interval(columns[0], position, row.mean, row.interval, color)
        difference = row.difference
        if difference is not None and difference.value is not None:
            low, high = difference.low, difference.high
            interval = None if low is None or high is None else (low, high)
            _draw_interval(columns[-1], position, difference.value, interval, color)
    _limit(columns[0], [score for row in rows for score in (*row.scores, row.mean)])
    if has_differences:
        columns[1].axvline(0, color=QUIET, linewidth=0.8)
        columns[1].set_title(f"minus {plain(reference, 40)}")
        values = [row.difference.value for row in rows if row.difference is not None]
        _limit(columns[1], [0.0, *(value for value in values if value is not None)])
    return figure


SCORES_CAPTION = (
    "Bars: 95% intervals; one that meets the edge continues beyond it. Black: the reference. Blue: significantly "
    "better, rust: significantly worse than the reference; gray: no significant difference is known."
)


def _emphasis(difference: Difference | None, metric: str) -> str | None:
    if difference is None or difference.value is None or not difference.significant:
        return None
    return VALIDATION if (difference.value < 0) == lower_is_better(metric) else BASELINE


def _draw_interval(axes: Axes, row: int, value: float, interval: tuple[float, float] | None, color: str) -> None:
    if interval is not None:
        axes.plot(interval, [row, row], color=color, linewidth=1.4, zorder=3)
    axes.plot([value], [row], color=color, marker="o", markersize=4.5, zorder=4)


def _limit(axes: Axes, values: Sequence[float]) -> None:
    """Cuts the x axis where intervals are much wider than the values are apart, as with two seeds."""
    low, high = min(values), max(values)
    left, right = axes.get_xlim()
    if high > low:
        room = _MAX_EXCESS * (high - low)
        axes.set_xlim(max(left, low - room), min(right, high + room))


def block_figures(block: Block) -> dict[str, tuple[Figure, str]]:
    """Returns the figures of a block of a sweep with their captions, by file name: scores over the varying keys, scores
    with intervals, and curves of the settings over steps."""
    contrasts = {id(group): difference for group, difference in block.contrasts()}
    figures: dict[str, tuple[Figure, str]] = {}
    settings, caption = _settings_figures(block, contrasts)
    for index, figure in enumerate(settings, 1):
        name = f"settings_{index}" if len(settings) > 1 else "settings"
        figures[name] = figure, caption if index == len(settings) else ""
    scored = [group for group in block.groups if group.n]
    if len(scored) > 1:
        rows = [
            ScoreRow(group.label, [*group.scores.values()], group.mean, group.interval, contrasts.get(id(group)))
            for group in _first_groups(block, scored, _MAX_ROWS)
        ]
        caption = f"Pale dots: single jobs. {SCORES_CAPTION}{_left_out(scored, rows)}"
        figures["scores"] = scores_figure(rows, block.metric, block.reference.label), caption
    shown = _first_groups(block, scored, _MAX_LINES)
    curves = [
        (group, [read_curves(job.folder, job.result) for job in group.jobs if job.value is not None]) for group in shown
    ]
    for name, split, metric in (("curves", "validation", block.metric), ("training", "train", "loss")):
        curves_of_seeds = _seeds_figure(block, contrasts, curves, split, metric)
        if curves_of_seeds is not None:
            figures[name] = curves_of_seeds, f"{_SEEDS_CAPTION}{_left_out(scored, shown)}"
    return figures


_SEEDS_CAPTION = (
    "Lines: mean over seeds; bands: its standard error. A color marks a setting whose final score differs "
    "significantly from that of the reference (black); gray: no significant difference is known."
)


def _first_groups(block: Block, scored: Sequence[SeedGroup], count: int) -> list[SeedGroup]:
    if block.reference in scored[:count]:
        return list(scored[:count])
    return [*scored[: count - 1], block.reference]


def _left_out(scored: Sequence[SeedGroup], shown: Sequence[object]) -> str:
    missing = len(scored) - len(shown)
    return f" {counted(missing, 'setting')} with lower ranks: in the table only." if missing > 0 else ""


@matplotlib.rc_context(STYLE)
def _seeds_figure(
    block: Block,
    contrasts: Mapping[int, Difference],
    curves: Sequence[tuple[SeedGroup, Sequence[RunFiles]]],
    split: str,
    metric: str,
) -> Figure | None:
    lines = [(group, *_mean_curve([_points(run, split, metric) for run in runs])) for group, runs in curves]
    lines = [line for line in lines if len(line[1]) > 1]
    if not lines:
        return None
    figure, axes = single_plot(WIDE, 3.0 + 0.2 * len(lines))
    tidy(axes)
    axes.set_title(f"{split} {title(metric)}")
    colors, styles = itertools.cycle(COLORS), itertools.cycle(_LINE_STYLES)
    values: list[float] = []
    for group, steps, means, errors in lines:
        significant = _emphasis(contrasts.get(id(group)), block.metric) is not None
        is_reference = group is block.reference
        color = INK if is_reference else next(colors) if significant else QUIET
        style = "-" if is_reference or significant else next(styles)
        label = plain(group.label, _LABEL_CHARACTERS)
        axes.plot(*drawing.thin(steps, means), color=color, linestyle=style, linewidth=1.5, label=label)
        if any(errors):
            low, high = np.subtract(means, errors), np.add(means, errors)
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        values += means
    drawing.focus(axes, values, cut_high=lower_is_better(metric))
    columns = 2 if max(len(group.label) for group, *_ in lines) <= _LABEL_CHARACTERS // 2 else 1
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, labelcolor=INK, ncols=columns)
    return figure


def _mean_curve(curves: Sequence[Series]) -> tuple[list[int], list[float], list[float]]:
    """Returns the steps that all curves have, the mean there, and its standard error (0 for one curve)."""
    by_step = [dict(zip(*curve, strict=True)) for curve in curves if curve.steps]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    statistics = [mean_and_error([values[step] for values in by_step]) for step in steps]
    return steps, [mean for mean, _ in statistics], [error or 0.0 for _, error in statistics]


def _settings_figures(block: Block, contrasts: Mapping[int, Difference]) -> tuple[list[Figure], str]:
    scored_groups = [group for group in block.groups if group.n]
    values = {key: _unique_values([group.settings[key] for group in scored_groups]) for key in block.keys}
    # A key needs two values with scores.
    keys = [key for key in block.keys if len(values[key]) > 1]
    if len(keys) != len(block.keys):
        return [], ""
    if len(keys) == 1 and len(scored_groups) <= _MAX_POINTS:
        return [_curve_figure(block, keys[0], scored_groups)], _CURVE_CAPTION
    if not 2 <= len(keys) <= 3:
        return [], ""
    *map_keys, row_key, column_key = sorted(keys, key=lambda key: len(values[key]))
    if max(len(values[row_key]), len(values[column_key])) > _MAX_VALUES:
        return [], ""
    maps: dict[str, list[SeedGroup]] = {}
    for value in values[map_keys[0]] if map_keys else []:
        value_groups = [group for group in scored_groups if group.settings[map_keys[0]] == value]
        maps[f"{plain(map_keys[0], 40)} = {heat_maps.setting_text(value)}"] = value_groups
    maps = maps or {title(block.metric): scored_groups}
    if len(maps) > _MAX_MAPS:
        return [], ""
    emphases = {key: _emphasis(difference, block.metric) for key, difference in contrasts.items()}
    colors = {key: color for key, color in emphases.items() if color is not None}
    return [
        heat_maps.settings_figure(block, groups, name, (row_key, column_key), values, colors)
        for name, groups in maps.items()
    ], _MAP_CAPTION


_CURVE_CAPTION = "Dots: single jobs. Line: their mean, with its standard error over seeds."
_MAP_CAPTION = (
    "Mean over seeds; below it the standard error of the mean. Bold: the reference. Blue: significantly better, rust: "
    "significantly worse than the reference; pale: no significant difference is known."
)


def _unique_values(values: Sequence[str | None]) -> list[str | None]:
    unique = list(dict.fromkeys(values))
    numbers = [number_of(value) for value in unique]
    if None in numbers:
        return unique
    return [unique[index] for index in sorted(range(len(unique)), key=numbers.__getitem__)]  # type: ignore[arg-type]


@matplotlib.rc_context(STYLE)
def _curve_figure(block: Block, key: str, scored_groups: Sequence[SeedGroup]) -> Figure:
    names = _unique_values([group.settings[key] for group in scored_groups])
    group_by_value = {group.settings[key]: group for group in scored_groups}
    numbers = [number_of(name) for name in names]
    numeric = [value for value in numbers if value is not None]
    is_numeric = len(numeric) == len(names)
    positions = numeric if is_numeric else [float(index) for index in range(len(names))]
    figure, axes = single_plot(7.2, 3.2)
    axes.set_title(title(block.metric))
    axes.set_xlabel(plain(key, 60))
    for position, name in zip(positions, names, strict=True):
        scores = list(group_by_value[name].scores.values())
        axes.scatter([position] * len(scores), scores, s=12, color=TRAIN, linewidths=0, zorder=2)
    means = [group_by_value[name].mean for name in names]
    errors = [group_by_value[name].error or 0.0 for name in names]
    axes.errorbar(
        positions,
        means,
        errors,
        color=VALIDATION,
        linewidth=1.5 if is_numeric else 0,
        elinewidth=1.2,
        capsize=3,
        zorder=3,
        marker="o",
        markersize=4.5,
    )
    _value_axis(axes, positions, [heat_maps.setting_text(name) for name in names], is_numeric)
    return figure


def _value_axis(axes: Axes, positions: list[float], names: list[str], numeric: bool) -> None:
    if numeric and min(positions) > 0 and max(positions) >= _LOGARITHMIC * min(positions):
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    tilted = max(map(len, names)) * len(names) > 80
    axes.set_xticks(positions, names, rotation=30 if tilted else 0, ha="right" if tilted else "center")
    if not numeric:
        axes.margins(x=0.1)
