"""Plots of a run, checked on matplotlib figures."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from lmtool.reporting import drawing, heat_maps, looks, plots
from lmtool.reporting.run_files import RunFiles


def run_of(steps: int, terms: dict[str, float] | None = None, scored: tuple[str, ...] = (), **files: Any) -> RunFiles:
    """A run with `steps` logged steps.

    Args:
        terms: Terms of the training loss, with their values.
        scored: Terms that the validation row has too; each is 1.
    """
    train = [
        {
            "step": 10 * row, "loss": 3.0 + 1 / row, "learning_rate": 1e-3, "grad_norm": 1.0,
            **{f"loss_{term}": value for term, value in (terms or {}).items()},
        }
        for row in range(1, steps + 1)
    ]  # fmt: skip
    validation = [{"step": 10 * steps, "loss": 1.0, **{f"{term}_loss": 1.0 for term in scored}}]
    return RunFiles(Path("run"), train=train, validation=validation, **files)


@pytest.mark.parametrize("steps", [1, 2, drawing.MIN_LINE_POINTS - 1, drawing.MIN_LINE_POINTS, 60])
def test_few_logged_steps_are_drawn_as_points(steps: int) -> None:
    """A line between two points of a warmup schedule would show values that never occurred."""
    run = run_of(steps, {"mlm": 2.0, "nsp": 1.0})
    figures = [plots.loss_figure(run), plots.curves_figure(run), plots.terms_figure(run)]
    axes = [axes for figure in figures if figure is not None for axes in figure.axes]
    assert len(axes) == 1 + 2 + 2
    few = steps < drawing.MIN_LINE_POINTS
    for panel in axes:
        training = panel.get_lines()[0]
        assert (training.get_marker() == "o") == (training.get_linewidth() == 0) == few
        assert not few or not training.get_clip_on()
        assert panel.get_xlabel() == (f"step ({steps} logged row{'s' * (steps > 1)})" if few else "step")
    (overlay,) = plots.overlay_figure([run, run_of(60)], "learning_rate", "train").axes  # type: ignore[union-attr]
    assert [line.get_linewidth() > 0 for line in overlay.get_lines()] == [not few, True]
    names = [text.get_text() for text in overlay.get_legend().get_texts()]
    assert names == [f"run ({steps} logged row{'s' * (steps > 1)})" if few else "run", "run"]
    assert plots.loss_caption(run).startswith(f"Single dots: {steps} logged step" if few else "Faint:")


@pytest.mark.parametrize(
    ("terms", "scored", "result", "drawn", "named"),
    [
        ({"mlm": 2.0, "soft": 9.0}, ("mlm",), {"objective": "mlm"}, 2.0, "mlm loss, nats a prediction"),
        ({"sst2": 2.0, "soft": 9.0}, (), {"task": "sst2"}, 2.0, "sst2 loss"),
        ({"mlm": 2.0, "nsp": 1.0}, ("mlm", "nsp"), {"objective": "mlm"}, 3.1, "loss, the weighted sum of its terms"),
        ({"mlm": 2.0, "nsp": 1.0, "soft": 9.0}, ("mlm", "nsp"), {"objective": "mlm"}, None, "loss"),
        ({}, (), {"task": "sst2"}, 3.1, "loss"),
        ({"sst2": 2.0}, (), {"task": "sst2"}, 3.1, "loss"),
    ],
)
def test_loss_figure_compares_same_loss(
    terms: dict[str, float], scored: tuple[str, ...], result: dict[str, str], drawn: float | None, named: str
) -> None:
    """The training loss of a distilled run is a weighted sum; its validation loss is that of the task alone."""
    run = run_of(10, terms, scored, result=result)
    (axes,) = plots.loss_figure(run).axes  # type: ignore[union-attr]
    assert axes.get_title(loc="left").startswith(named)
    last = [line.get_ydata()[-1] for line in axes.get_lines()]
    assert last == pytest.approx([1.0] if drawn is None else [drawn, 1.0])
    assert ("Only the" in plots.loss_caption(run)) == (drawn == 2.0)
    overlay = plots.overlay_figure([run], "loss", "train")
    if drawn is not None:
        assert overlay is not None and overlay.axes[0].get_lines()[0].get_ydata()[-1] == pytest.approx(drawn)


def test_line_labels_do_not_overlap() -> None:
    cosines = np.ones((3, 2, 2))
    read = [
        looks.SimilarityByLayer(name, (0, 1, 2), [1.0, 0.9, last], [0.1] * 3, cosines)
        for name, last in (("a", 0.9), ("b", 0.89))
    ]
    figure = plots.similarity_figure(read)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 4
    assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("layers", [1, 3])
def test_axis_labels_of_heat_map_fit_figure(layers: int) -> None:
    cells = [
        {"side": "inputs", "student_layer": layer, "teacher_layer": 2 * layer, "region": region, "value": 0.5, "n": 9}
        for layer in range(layers)
        for region in (1, 2, 3, 4)
    ]
    figure = heat_maps.agreement_figure({"cells": cells})
    assert figure is not None
    figure.draw_without_rendering()
    page, box = figure.bbox, figure.axes[0].get_tightbbox()
    assert box is not None and box.y0 >= page.y0 and box.y1 <= page.y1 and box.x0 >= page.x0 and box.x1 <= page.x1
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["embeddings", "layer 1, teacher's 2", "layer 2, teacher's 4"][:layers]


def test_position_maps_have_axis_labels_and_clear_background() -> None:
    figure = heat_maps.position_maps_figure(np.zeros((6, 4, 4)))
    maps, bars = figure.axes[::2], figure.axes[1::2]
    assert [axes.get_ylabel() for axes in maps] == ["query", "", "", "", "query", ""]
    assert [axes.get_xlabel() for axes in maps] == ["", "", *["key"] * 4]
    assert all(not axes.patch.get_alpha() and axes.patch.get_alpha() is not None for axes in (*maps, *bars))
    words = " ".join(value for value in vars(looks).values() if isinstance(value, str))
    assert not re.search(r"\b[Dd]ark\b", words)


def test_points_at_axis_ends_are_not_clipped() -> None:
    """The largest point of a calibrated model is at (1, 1), and the last scored step at the end of the axis."""
    assert not plots.calibration_figure([[90, 1.0, 1.0], [10, 0.0, 0.0]]).axes[0].collections[0].get_clip_on()
    figure = plots.curves_figure(
        RunFiles(
            Path("run"),
            result={"metric": "accuracy"},
            validation=[{"step": step, "accuracy": 0.5} for step in (1, 100)],
        ),
        drawing.NARROW,
    )
    assert figure is not None
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (line,) = axes.get_lines()
    radius = line.get_markersize() / 2 * figure.dpi / 72
    places = axes.transData.transform(line.get_xydata())[:, 0]
    assert places.min() - radius >= axes.bbox.x0 and places.max() + radius <= axes.bbox.x1


@pytest.mark.parametrize("file_format", ["png", "svg", "pdf"])
def test_files_of_figures_are_reproducible_and_white(tmp_path: Path, file_format: str) -> None:
    figure = plots.loss_figure(run_of(30))
    assert figure is not None
    first, second = (drawing.write_figures({"loss": figure}, tmp_path / name, file_format) for name in "ab")
    data = first[0].read_bytes()
    assert first == [tmp_path / "a" / f"loss.{file_format}"] and data == second[0].read_bytes()
    assert figure.patch.get_alpha() == 0  # transparent in a page
    if file_format == "png":
        assert image.imread(first[0])[0, 0].tolist() == [1, 1, 1, 1]
    elif file_format == "svg":
        assert b">validation 1.000</text>" in data and b"<dc:date>" not in data and b"#ffffff" in data
    else:
        # Fonts as TrueType: text that can be searched and edited.
        assert b"/FontFile2" in data and b"/Type3" not in data and b"CreationDate" not in data
