"""Plots of curves and points: a run, its predictions, several runs, layers, one key of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from lmtool.reporting import drawing, heat_maps
from lmtool.reporting.drawing import BASELINE, COLORS, FEW, INK, QUIET, STYLE, TRAIN, VALIDATION, WIDE, single, tidy
from lmtool.reporting.run_files import (
    Baseline,
    CheckpointProbes,
    RunFiles,
    comparable_loss,
    loss_terms,
    phase_starts,
    series,
)
from lmtool.reporting.sweep_groups import Block, SeedGroup, number_of
from lmtool.reporting.text import exponent, lower_is_better, number, plain, title
from lmtool.system.terminal import counted

_RATE = FuncFormatter(lambda value, _: exponent(value))
_Series: TypeAlias = tuple[list[int], list[float]]
"""Steps and values."""


def loss_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Draws the training loss (each row, and smoothed), validation loss and baseline over steps; None without rows. A
    loss with several terms is reduced to those of the validation loss (`comparable_loss`). width: in inches."""
    headline, key = _headline(run), _training_loss(run)
    term = key.removeprefix("loss_") if key != "loss" else ""
    train = series(run.train, key)
    validation = series(run.validation, headline or "loss")
    if not train[0] and not validation[0]:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = single(width, 1.6 + width / 4)
        tidy(axes)
        label = title(f"{term}_loss") if term else "loss"
        unit = "the weighted sum of its terms" if key == "loss" and len(loss_terms(run)) > 1 else "nats a prediction"
        axes.set_title(f"{label}, {unit}" if run.result.get("objective") else label)
        values = list(validation[1])
        if train[0]:
            drawing.smoothed_steps(axes, *train, width=1.8)
            values += train[1]
        baseline = run.baseline if run.baseline.get("metric") == (headline or "loss") else {}
        value = baseline.get("value")
        if isinstance(value, (int, float)):
            drawing.baseline_line(axes, value)
            values.append(float(value))
        if validation[0]:
            axes.plot(*validation, color=VALIDATION, linewidth=1.6, marker="o", markersize=3.5)
        drawing.focus(axes, values, True)
        drawing.mark(axes, phase_starts(run), "phase")
        _end_labels(axes, train, validation, baseline, narrow=width < WIDE)
    return figure


def _headline(run: RunFiles) -> str:
    """Returns the metric of the run if it is the loss of one term (rtd_loss), otherwise ""."""
    metric = str(run.result.get("metric") or run.baseline.get("metric") or "")
    return metric if metric.endswith("_loss") else ""


def _training_loss(run: RunFiles) -> str:
    """Returns the key of a training row that is comparable with held-out data; "" if none is."""
    headline = _headline(run)
    return f"loss_{headline.removesuffix('_loss')}" if headline else comparable_loss(run)


def loss_caption(run: RunFiles) -> str:
    """Returns the caption of the loss figure."""
    key = _training_loss(run)
    rows = len(series(run.train, key)[0])
    sentences = ["Faint: each logged step of training; above it, its running mean. Dots: held-out data."]
    if rows < FEW:
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


def _end_labels(axes: Axes, train: _Series, validation: _Series, baseline: Baseline, narrow: bool) -> None:
    """Labels the curves at their ends. narrow: whether labels are short."""
    labels = []
    if train[0]:
        labels.append((drawing.smooth(train[1])[-1], "training", QUIET))
    if validation[0]:
        labels.append((validation[1][-1], f"validation {number(validation[1][-1])}", VALIDATION))
    value = baseline.get("value")
    if isinstance(value, (int, float)):
        name = "baseline" if narrow else title(str(baseline.get("name", "baseline")))[:24]
        labels.append((float(value), f"{name} {number(float(value))}", BASELINE))
    drawing.label_ends(axes, axes.get_xlim()[1], labels, 0.1 if narrow else 0.065)  # the right end of the baseline


def small_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Draws small plots over steps: the main metric unless it is a loss, learning rate, gradient norm, speed. width: in
    inches."""
    metric = run.result.get("metric")
    plots = [
        ("learning rate", series(run.train, "learning_rate"), TRAIN),
        ("gradient norm", series(run.train, "grad_norm"), TRAIN),
        ("tokens per second", series(run.train, "tokens_per_second"), TRAIN),
    ]
    if isinstance(metric, str) and metric and not metric.endswith("loss"):  # a loss has the large plot
        plots.insert(0, (f"validation {title(metric)}", series(run.validation, metric), VALIDATION))
    plots = [plot for plot in plots if plot[1][0]][:4]
    if not plots:
        return None
    with matplotlib.rc_context(STYLE):
        figure, all_axes = drawing.step_plots([name for name, _, _ in plots], width)
        for axes, (name, (steps, values), color) in zip(all_axes, plots, strict=True):
            if color == VALIDATION:
                axes.plot(*drawing.thin(steps, values), color=color, linewidth=1.2, marker="o", markersize=2.5)
            else:
                drawing.logged_steps(axes, steps, values, QUIET, 1.2)
            drawing.focus(axes, values, name == "gradient norm")
            drawing.mark(axes, phase_starts(run))
            value = run.baseline.get("value")
            if name in ("learning rate", "tokens per second"):
                axes.set_ylim(bottom=0)
                axes.yaxis.set_major_formatter(_RATE if name == "learning rate" else EngFormatter(sep=""))
            elif color == VALIDATION and run.baseline.get("metric") == metric and isinstance(value, (int, float)):
                drawing.baseline_line(axes, value)
    return figure


def calibration_figure(bins: Sequence[Sequence[float]]) -> Figure:
    """Draws accuracy against confidence, one dot per bin, its area proportional to the rows; the line is perfect
    calibration.

    bins: (rows, mean confidence, accuracy) each.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = single(3.8, 3.5)
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


def scatter_figure(gold: Sequence[float], predicted: Sequence[float]) -> Figure:
    """Returns the predicted value against gold value of a regression, with the line of perfect agreement."""
    with matplotlib.rc_context(STYLE):
        figure, axes = single(3.8, 3.5)
        stride = max(len(gold) // drawing.POINTS, 1)
        low, high = min([*gold, *predicted]), max([*gold, *predicted])
        axes.plot([low, high], [low, high], color=drawing.FAINT, linewidth=1)
        axes.scatter(gold[::stride], predicted[::stride], s=8, color=VALIDATION, alpha=0.45, linewidths=0)
        axes.set_xlabel("gold")
        axes.set_ylabel("predicted")
    return figure


def overlay_figure(runs: Sequence[RunFiles], metric: str, split: str) -> Figure | None:
    """Returns one metric of several runs over steps. A training loss is reduced to the terms of the validation loss."""

    def points(run: RunFiles) -> _Series:
        if (split, metric) == ("train", "loss"):
            return series(run.train, comparable_loss(run) or metric)
        return series(run.validation if split == "validation" else run.train, metric)

    lines = [(run.name, points(run)) for run in runs]
    if not any(steps for _, (steps, _) in lines):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = single(7.2, 3.4)
        tidy(axes)
        axes.set_title(f"{split} {title(metric)}" if metric != "learning_rate" else "learning rate")
        if metric == "learning_rate":
            axes.yaxis.set_major_formatter(_RATE)
        values: list[float] = []
        for index, (name, (steps, values_of_run)) in enumerate(lines):
            if steps:
                line = drawing.smooth(values_of_run) if (split, metric) == ("train", "loss") else values_of_run
                few = split == "train" and len(steps) < FEW
                axes.plot(
                    *drawing.thin(steps, line),
                    color=COLORS[index % len(COLORS)],
                    linewidth=0 if few else 1.4,
                    marker="o" if few or split == "validation" else None,
                    markersize=3,
                    label=f"{plain(name, 40)} ({counted(len(steps), 'logged row')})" if few else plain(name, 40),
                    linestyle=("-", "--", ":")[index // len(COLORS) % 3],
                )
                values += line
        drawing.focus(axes, values, lower_is_better(metric))
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    return figure


def layers_figure(target: str, checkpoints: Sequence[CheckpointProbes]) -> Figure:
    """Draws the accuracy of probes by layer, one line per checkpoint with standard errors; dashed for random weights,
    dotted for the most frequent class. checkpoints: as in probe.json."""
    with matplotlib.rc_context(STYLE):
        figure, axes = single(7.2, 3.8)
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


def terms_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Draws small plots over steps: each unweighted term of the training loss, and of the validation loss if it has
    that term; None for a loss with one term. width: in inches."""
    plots = [(name.removeprefix("loss_"), series(run.train, name)) for name in loss_terms(run)]
    plots = [(name, points) for name, points in plots if points[0]]
    if len(plots) < 2:
        return None
    with matplotlib.rc_context(STYLE):
        figure, all_axes = drawing.step_plots([plain(name, 30) for name, _ in plots], width)
        for axes, (name, (steps, values)) in zip(all_axes, plots, strict=True):
            drawing.smoothed_steps(axes, steps, values, width=1.6)
            validation = series(run.validation, f"{name}_loss")
            if validation[0]:
                axes.plot(*validation, color=VALIDATION, linewidth=1.2, marker="o", markersize=2.5)
            baseline = series(run.validation, f"{name}_baseline")[1][-1:]
            for value in baseline:
                drawing.baseline_line(axes, value)
            drawing.focus(axes, [*values, *validation[1], *baseline], True)
            drawing.mark(axes, phase_starts(run))
    return figure


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


def similarity_figure(similarities: Sequence[_Similar]) -> Figure:
    """Returns the cosines by layer, of the same word in other sentences (lines) and of different words (dots)."""
    with matplotlib.rc_context(STYLE):
        figure, axes = single(7.2, 3.2)
        tidy(axes, "layer")
        ends: dict[int, list[tuple[float, str, str]]] = {}
        for similar, color in zip(similarities, itertools.cycle(COLORS), strict=False):
            axes.plot(similar.layers, similar.same, color=color, linewidth=1.8, marker="o", markersize=3.5)
            axes.plot(
                similar.layers, similar.other_words, color=color, linewidth=0, marker=".", markersize=4, alpha=0.5
            )
            name = plain(Path(similar.name).name or similar.name, 24)
            if len(similar.layers) > 1:
                ends.setdefault(similar.layers[-1], []).append((similar.same[-1], name, color))
            else:  # a label at the right could cover another line
                axes.annotate(
                    name, (similar.layers[0], similar.same[0]), (-2, -11), textcoords="offset points", color=color
                )
        axes.set_ylim(None, 1.03)
        for layer, labels in ends.items():
            drawing.label_ends(axes, layer, labels, 0.075)
        axes.set_title("mean cosine of two vectors")
    return figure


# Settings of a sweep.

# Values that span this factor get a logarithmic axis.
_LOGARITHMIC = 8
_CELLS, _PANELS, _POINTS = 12, 6, 40


def settings_figures(block: Block) -> tuple[list[Figure], str]:
    """Returns the figures for the varying keys, and their caption; none if there are too few or too many values."""
    with_score = [group for group in block.groups if group.n]
    values = {key: _order([group.settings[key] for group in with_score]) for key in block.keys}
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
        maps[f"{plain(panel[0], 40)} = {heat_maps.setting_text(value)}"] = of_value
    maps = maps or {title(block.metric): with_score}
    if len(maps) > _PANELS:
        return [], ""
    scale = min(means), max(means)
    return [
        heat_maps.settings_figure(block, groups, name, (down, across), values, scale) for name, groups in maps.items()
    ], _HEAT


_CURVE = "Dots: single jobs. Line: their mean, with its standard error over seeds."
_HEAT = "Mean over seeds; below it the standard error of the mean. The fuller the color, the better."


def _order(values: Sequence[str | None]) -> list[str | None]:
    """Returns unique values: numbers sorted, others in order of appearance."""
    once = list(dict.fromkeys(values))
    numbers = [number_of(value) for value in once]
    return once if None in numbers else [once[index] for index in sorted(range(len(once)), key=numbers.__getitem__)]  # type: ignore[arg-type]


def _curve(block: Block, key: str, with_score: Sequence[SeedGroup]) -> Figure:
    names = _order([group.settings[key] for group in with_score])
    group_by_value = {group.settings[key]: group for group in with_score}
    numbers = [number_of(name) for name in names]
    numeric = [value for value in numbers if value is not None]
    positions = numeric if len(numeric) == len(names) else [float(index) for index in range(len(names))]
    with matplotlib.rc_context(STYLE):
        figure, axes = single(7.2, 3.2)
        axes.set_title(title(block.metric))
        axes.set_xlabel(plain(key, 60))
        for position, name in zip(positions, names, strict=True):
            scores = list(group_by_value[name].scores.values())
            axes.scatter([position] * len(scores), scores, s=12, color=TRAIN, linewidths=0, zorder=2)
        means, errors = (
            [group_by_value[name].mean for name in names],
            [group_by_value[name].error or 0.0 for name in names],
        )
        axes.errorbar(
            positions, means, errors, color=VALIDATION, linewidth=1.5 if len(numeric) == len(names) else 0,
            elinewidth=1.2, capsize=3, zorder=3, marker="o", markersize=4.5,
        )  # fmt: skip
        _value_axis(axes, positions, [heat_maps.setting_text(name) for name in names], len(numeric) == len(names))
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
