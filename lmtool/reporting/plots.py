"""The plots of a run, of what it predicts, and of several runs or layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from lmtool.reporting.drawing import (
    BASELINE,
    COLORS,
    FAINT,
    FEW,
    INK,
    POINTS,
    QUIET,
    STYLE,
    TRAIN,
    VALIDATION,
    WIDE,
    blank,
    focus,
    label_ends,
    logged_steps,
    mark,
    plots_per_row,
    smooth,
    smoothed_steps,
    thin,
    tidy,
)
from lmtool.reporting.run_files import Baseline, RunFiles, comparable_loss, loss_terms, phase_starts, series
from lmtool.reporting.text import exponent, lower_is_better, number, plain, shortened, title
from lmtool.system.terminal import counted

_RATE = FuncFormatter(lambda value, _: exponent(value))


def loss_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Training loss (each row, and smoothed), validation loss and baseline over steps; None without rows. A loss with
    several terms is reduced to those of the validation loss (`comparable_loss`). width: in inches."""
    headline, key = _headline(run), _training_loss(run)
    term = key.removeprefix("loss_") if key != "loss" else ""
    train = series(run.train, key)
    validation = series(run.validation, headline or "loss")
    if not train[0] and not validation[0]:
        return None
    with matplotlib.rc_context(STYLE):
        figure = blank(width, 1.6 + width / 4)
        axes = figure.add_subplot()
        tidy(axes)
        named = title(f"{term}_loss") if term else "loss"
        unit = "the weighted sum of its terms" if key == "loss" and len(loss_terms(run)) > 1 else "nats a prediction"
        axes.set_title(f"{named}, {unit}" if run.result.get("objective") else named)
        values = list(validation[1])
        if train[0]:
            smoothed_steps(axes, *train, width=1.8)
            values += train[1]
        baseline = run.baseline if run.baseline.get("metric") == (headline or "loss") else {}
        value = baseline.get("value")
        if isinstance(value, (int, float)):
            axes.axhline(value, color=BASELINE, linewidth=1, linestyle=(0, (5, 4)))
            values.append(float(value))
        if validation[0]:
            axes.plot(*validation, color=VALIDATION, linewidth=1.6, marker="o", markersize=3.5)
        focus(axes, values, True)
        mark(axes, phase_starts(run), "phase")
        _end_labels(axes, train, validation, baseline, narrow=width < WIDE)
    return figure


def _headline(run: RunFiles) -> str:
    """The metric of the run if it is the loss of one term (rtd_loss), otherwise ""."""
    metric = str(run.result.get("metric") or run.baseline.get("metric") or "")
    return metric if metric.endswith("_loss") else ""


def _training_loss(run: RunFiles) -> str:
    """The key of a training row that is comparable with held-out data; "" if none is."""
    headline = _headline(run)
    return f"loss_{headline.removesuffix('_loss')}" if headline else comparable_loss(run)


def loss_caption(run: RunFiles) -> str:
    """The caption of the loss figure."""
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


def _end_labels(axes: Axes, train: Any, validation: Any, baseline: Baseline, narrow: bool) -> None:
    """Labels the curves at their ends. narrow: with short labels."""
    labels = []
    if train[0]:
        labels.append((smooth(train[1])[-1], "training", QUIET))
    if validation[0]:
        labels.append((validation[1][-1], f"validation {number(validation[1][-1])}", VALIDATION))
    value = baseline.get("value")
    if isinstance(value, (int, float)):
        name = "baseline" if narrow else title(str(baseline.get("name", "baseline")))[:24]
        labels.append((float(value), f"{name} {number(float(value))}", BASELINE))
    label_ends(axes, axes.get_xlim()[1], labels, 0.1 if narrow else 0.065)  # the right end of the baseline


def small_figure(run: RunFiles, width: float = WIDE) -> Figure | None:
    """Small plots over steps: the main metric unless it is a loss, learning rate, gradient norm, speed. width: in
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
        columns = plots_per_row(len(plots), width)
        rows = -(-len(plots) // columns)
        figure = blank(width, 1.75 * rows)
        for index, (name, (steps, values), color) in enumerate(plots):
            axes = figure.add_subplot(rows, columns, index + 1)
            tidy(axes)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.set_title(name, fontsize=8.5)
            if color == VALIDATION:
                axes.plot(*thin(steps, values), color=color, linewidth=1.2, marker="o", markersize=2.5)
            else:
                logged_steps(axes, steps, values, QUIET, 1.2)
            focus(axes, values, name == "gradient norm")
            mark(axes, phase_starts(run))
            if name in ("learning rate", "tokens per second"):
                axes.set_ylim(bottom=0)
                axes.yaxis.set_major_formatter(_RATE if name == "learning rate" else EngFormatter(sep=""))
                continue
            value = run.baseline.get("value")
            if color == VALIDATION and run.baseline.get("metric") == metric and isinstance(value, (int, float)):
                axes.axhline(value, color=BASELINE, linewidth=1, linestyle=(0, (5, 4)))
    return figure


def confusion_figure(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Confusion matrix, gold labels in rows: the shade is the fraction of the row, the number counts examples."""
    size = len(labels)
    with matplotlib.rc_context(STYLE):
        edge = min(1.7 + 0.52 * size, 7.2)
        figure = blank(edge + 0.6, edge)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        fractions = [[value / max(sum(row), 1) for value in row] for row in counts]
        for i in range(size):
            for j in range(size):
                color = VALIDATION if i == j else BASELINE
                axes.add_patch(
                    matplotlib.patches.Rectangle(
                        (j - 0.48, i - 0.48),
                        0.96,
                        0.96,
                        facecolor=color,
                        alpha=0.04 + 0.76 * fractions[i][j],
                        linewidth=0,
                    )
                )
                if counts[i][j] and size <= 12:
                    axes.text(
                        j,
                        i,
                        f"{counts[i][j]}",
                        ha="center",
                        va="center",
                        color="#ffffff" if fractions[i][j] > 0.6 else INK,
                    )
        axes.set_xlim(-0.5, size - 0.5)
        axes.set_ylim(size - 0.5, -0.5)
        names = shortened(labels, 18)
        axes.set_xticks(
            range(size),
            names,
            rotation=0 if size <= 4 and max(map(len, names)) < 12 else 45,
            ha="center" if size <= 4 and max(map(len, names)) < 12 else "right",
        )
        axes.set_yticks(range(size), names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted")
        axes.set_ylabel("gold")
    return figure


def calibration_figure(bins: Sequence[Sequence[float]]) -> Figure:
    """Accuracy against confidence, one dot per bin, its area proportional to the rows; the line is perfect calibration.

    bins: (rows, mean confidence, accuracy) each.
    """
    with matplotlib.rc_context(STYLE):
        figure = blank(3.8, 3.5)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        total = sum(rows for rows, _, _ in bins)
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
        axes.plot([row[1] for row in bins], [row[2] for row in bins], color=TRAIN, linewidth=1)
        sizes = [20 + 280 * rows / total for rows, _, _ in bins]
        confidences, accuracies = [row[1] for row in bins], [row[2] for row in bins]
        axes.scatter(confidences, accuracies, s=sizes, color=VALIDATION, linewidths=0, clip_on=False)
        axes.set_xlim(0, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("confidence")
        axes.set_ylabel("accuracy")
    return figure


def scatter_figure(gold: Sequence[float], predicted: Sequence[float]) -> Figure:
    """Predicted value against gold value of a regression, with the line of perfect agreement."""
    with matplotlib.rc_context(STYLE):
        figure = blank(3.8, 3.5)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        stride = max(len(gold) // POINTS, 1)
        low, high = min([*gold, *predicted]), max([*gold, *predicted])
        axes.plot([low, high], [low, high], color=FAINT, linewidth=1)
        axes.scatter(gold[::stride], predicted[::stride], s=8, color=VALIDATION, alpha=0.45, linewidths=0)
        axes.set_xlabel("gold")
        axes.set_ylabel("predicted")
    return figure


def overlay_figure(runs: Sequence[RunFiles], metric: str, split: str) -> Figure | None:
    """One metric of several runs over steps. A training loss is reduced to the terms of the validation loss."""

    def points(run: RunFiles) -> tuple[list[int], list[float]]:
        if (split, metric) == ("train", "loss"):
            return series(run.train, comparable_loss(run) or metric)
        return series(run.validation if split == "validation" else run.train, metric)

    lines = [(run.name, points(run)) for run in runs]
    if not any(steps for _, (steps, _) in lines):
        return None
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 3.4)
        axes = figure.add_subplot()
        tidy(axes)
        axes.set_title(f"{split} {title(metric)}" if metric != "learning_rate" else "learning rate")
        if metric == "learning_rate":
            axes.yaxis.set_major_formatter(_RATE)
        values: list[float] = []
        for index, (name, (steps, values_of_run)) in enumerate(lines):
            if steps:
                line = smooth(values_of_run) if (split, metric) == ("train", "loss") else values_of_run
                few = split == "train" and len(steps) < FEW
                axes.plot(
                    *thin(steps, line),
                    color=COLORS[index % len(COLORS)],
                    linewidth=0 if few else 1.4,
                    marker="o" if few or split == "validation" else None,
                    markersize=3,
                    label=f"{plain(name, 40)} ({counted(len(steps), 'logged row')})" if few else plain(name, 40),
                    linestyle=("-", "--", ":")[index // len(COLORS) % 3],
                )
                values += line
        focus(axes, values, lower_is_better(metric))
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    return figure


def layers_figure(target: str, checkpoints: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy of probes by layer, one line per checkpoint with standard errors; dashed for random weights, dotted for
    the most frequent class. checkpoints: as in probe.json."""
    with matplotlib.rc_context(STYLE):
        figure = blank(7.2, 3.8)
        axes = figure.add_subplot()
        tidy(axes, "layer (0: embedding)")
        axes.margins(x=0.03)
        axes.set_title(
            f"{plain(target, 40)}: accuracy of a linear probe (dashed: random weights, dotted: most frequent class)"
        )
        for index, probes in enumerate(checkpoints):
            color, name = COLORS[index % len(COLORS)], plain(probes["checkpoint"], 40)
            layers = [row["layer"] for row in probes["layers"]]
            for weights, style, label in (("trained", "-", name), ("random", "--", None)):
                scores = [row[weights] for row in probes["layers"]]
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
    """Small plots over steps: each unweighted term of the training loss, and of the validation loss if it has that
    term; None for a loss with one term. width: in inches."""
    plots = [(name.removeprefix("loss_"), series(run.train, name)) for name in loss_terms(run)]
    plots = [(name, points) for name, points in plots if points[0]]
    if len(plots) < 2:
        return None
    columns = plots_per_row(len(plots), width)
    rows = -(-len(plots) // columns)
    with matplotlib.rc_context(STYLE):
        figure = blank(width, 1.75 * rows)
        for index, (name, (steps, values)) in enumerate(plots):
            axes = figure.add_subplot(rows, columns, index + 1)
            tidy(axes)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.set_title(plain(name, 30), fontsize=8.5)
            smoothed_steps(axes, steps, values, width=1.6)
            validation = series(run.validation, f"{name}_loss")
            if validation[0]:
                axes.plot(*validation, color=VALIDATION, linewidth=1.2, marker="o", markersize=2.5)
            baseline = series(run.validation, f"{name}_baseline")[1][-1:]
            for value in baseline:
                axes.axhline(value, color=BASELINE, linewidth=1, linestyle=(0, (5, 4)))
            focus(axes, [*values, *validation[1], *baseline], True)
            mark(axes, phase_starts(run))
    return figure


_STACKS = {"inputs": "encoder", "outputs": "decoder"}


def agreement_figure(accuracy: Mapping[str, Any]) -> Figure | None:
    """Heat maps of interchange accuracy, one per stack: aligned layers in rows, start of the swapped span in columns.
    accuracy: `interchange_accuracy` of result.json. None if nothing was measured."""
    cells = [cell for cell in accuracy.get("cells") or () if cell.get("n")]
    if not cells:
        return None
    stacks = [side for side in _STACKS if any(cell["side"] == side for cell in cells)]
    regions = max(cell["region"] for cell in cells)
    layers = {side: _layers(cells, side) for side in stacks}
    with matplotlib.rc_context(STYLE):
        figure = blank(3.8 * len(stacks), 1.1 + 0.36 * max(map(len, layers.values())))
        for index, side in enumerate(stacks):
            axes = figure.add_subplot(1, len(stacks), index + 1)
            if len(stacks) > 1:
                axes.set_title(_STACKS[side])
            _heat(axes, [cell for cell in cells if cell["side"] == side], layers[side], regions)
    return figure


def _layers(cells: Sequence[Mapping[str, Any]], side: str) -> list[tuple[int, int]]:
    """The aligned (student, teacher) layers of a stack."""
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
        color = "#ffffff" if value > 0.6 else INK
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
    axes.set_xlim(-0.5, regions - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xticks(
        range(regions), [f"{100 * part // regions}-{100 * (part + 1) // regions}%" for part in range(regions)]
    )
    # Full names, since an axis title would be longer than the height of a map with one row.
    names = [f"layer {student}, teacher's {teacher}" if student else "embeddings" for student, teacher in layers]
    axes.set_yticks(range(len(layers)), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("start of the swapped span")
