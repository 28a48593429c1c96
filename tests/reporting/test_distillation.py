"""Report of a distilled run: teacher, student and undistilled student side by side."""

from __future__ import annotations

import json

from lmtool.reporting.heat_maps import agreement_figure
from lmtool.reporting.report import distillation_summary, write_report
from lmtool.reporting.run_files import UNDISTILLED, models_of, read_run

MODELS = [
    {"name": "teacher runs/big", "score": 0.9, "parameters": 4000, "weight_bytes": 16000, "tokens_per_second": 1234.5},
    {"name": "student", "score": 0.8, "parameters": 1000, "weight_bytes": 4000, "tokens_per_second": 5678.9},
]


def distilled(task_run, **config):
    folder = task_run("student", 0.8, distill={"name": "standard", "teacher": "runs/big"}, **config)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "distillation": {"models": MODELS}}))
    rows = [{"step": step, "split": "train", "loss": 1.0, "loss_sst2": 0.7, "loss_soft": 0.1} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_undistilled_run_with_same_settings_is_found(task_run):
    folder = distilled(task_run, max_steps=5)
    task_run("longer", 0.7, distill={"name": "none"}, max_steps=6)
    assert [model["name"] for model in models_of(read_run(folder))] == ["teacher runs/big", "student"]
    task_run("alone", 0.75, distill={"name": "none"}, max_steps=5)
    models = models_of(read_run(folder))
    assert models[2] == {**MODELS[1], "name": UNDISTILLED, "run": "alone", "score": 0.75, "standard_error": None}


def test_missing_undistilled_run_gets_command(task_run):
    folder = distilled(task_run)
    page = write_report(folder).read_text()
    assert "distill=none name=student-alone" in page and "1.23 k" not in page and "1,234" in page
    assert (folder / "plots" / "terms.png").stat().st_size > 1000
    assert "teacher runs/big" in page


def test_run_without_teacher_has_no_distillation_section(task_run):
    assert distillation_summary(read_run(task_run())) is None


CELLS = [
    {"side": "inputs", "student_layer": layer, "teacher_layer": 2 * layer, "region": region, "value": 0.5, "n": 8}
    for layer in (1, 2)
    for region in (1, 2, 3, 4)
]
MEASURED = {
    "fidelity": {"value": 0.875, "n": 64},
    "interchange_accuracy": {"value": 0.5, "n": 64, "changed": {"value": 0.25, "n": 16}, "cells": CELLS},
}


def test_agreement_is_reported_and_drawn(task_run):
    folder = distilled(task_run)
    result = json.loads((folder / "result.json").read_text())
    result["distillation"] |= MEASURED
    (folder / "result.json").write_text(json.dumps(result))
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert "87.5% of 64 targets" in page and "prediction, on 25% of 16 targets" in page
    assert (folder / "plots" / "agreement.png").stat().st_size > 1000
    assert "layer 2, teacher's 4" in page and "25-50%" in page


def test_unmeasured_agreement_has_reason(task_run):
    folder = distilled(task_run)
    result = json.loads((folder / "result.json").read_text())
    result["distillation"] |= {"interchange_accuracy": None, "interchange_accuracy_reason": "no layers are aligned"}
    (folder / "result.json").write_text(json.dumps(result))
    summary = distillation_summary(read_run(folder))
    assert summary is not None and "not measured: no layers are aligned." in summary["agreement"][-1]
    assert agreement_figure({}) is None


def test_each_stack_has_heat_map():
    cells = [*CELLS, *({**cell, "side": "outputs"} for cell in CELLS), {**CELLS[0], "value": None, "n": 0}]
    figure = agreement_figure({"cells": cells})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["encoder", "decoder"]
    assert [len(axes.patches) for axes in figure.axes] == [8, 8]
