"""`lmtool report RUN [RUN ...]`: rewrites the report of a run, or compares several runs; `lmtool report SWEEP`: prints
the summary of a finished or running sweep. With `format=latex` or `format=csv`, prints the tables alone, and
for one run writes its methods in LaTeX with references; with `format=svg` or `format=pdf`, writes the figures alone.
With `fit=scaling`, fits a scaling law to a sweep."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from lmtool.errors import UserError
from lmtool.reporting.comparison import (
    compare,
    paper_table,
    raw_scores_table,
    report_comparison,
    write_comparison_figures,
)
from lmtool.reporting.console import FIGURE_FORMATS, TABLE_FORMATS, Output
from lmtool.reporting.methods import write_methods
from lmtool.reporting.report import write_report, write_run_figures
from lmtool.reporting.run_files import is_run
from lmtool.reporting.scaling import report_scaling
from lmtool.reporting.sweep_files import is_sweep, read_sweep
from lmtool.reporting.sweep_groups import blocks_of
from lmtool.reporting.sweep_report import group_table, raw_group_table, report_sweep, write_sweep_figures
from lmtool.runs.finding import run_folder
from lmtool.system.terminal import say

_FORMS = (
    "use against=JOB or against=KEY=VALUE to compare a sweep with a job or a setting, fit=scaling with predict=RUN or "
    "predict=PARAMETERS,TOKENS for a scaling law, format=latex or csv for tables, and format=svg or pdf for figures"
)
_FORMATS = (*TABLE_FORMATS, *FIGURE_FORMATS)


def main(words: list[str]) -> int:
    """Rewrites a report or prints a comparison. words: run folders, or the folder of a sweep and against=JOB or
    against=SETTING; and format=latex, csv, svg or pdf."""
    names = [word for word in words if "=" not in word]
    overrides = [word.partition("=") for word in words if "=" in word]
    against = [value for key, _, value in overrides if key == "against"]
    formats = [value for key, _, value in overrides if key == "format"]
    fits = [value for key, _, value in overrides if key == "fit"]
    predictions = [value for key, _, value in overrides if key == "predict"]
    unknown = next((key for key, _, _ in overrides if key not in ("against", "format", "fit", "predict")), None)
    if unknown is not None:
        raise UserError(f"report: there is no key {unknown}", _FORMS)
    if len(formats) > 1 or any(value not in _FORMATS for value in formats):
        raise UserError(f"report: format={' format='.join(formats)}", f"use one of {', '.join(_FORMATS)}")
    if not names or len(against) > 1:
        raise UserError(f"{' '.join(['report', *words])}: give run folders", "lmtool report runs/NAME")
    folders, output = _runs_among(names), Output()
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if sweeps and len(folders) > 1:
        jobs = [str(job.folder) for job in read_sweep(sweeps[0]).jobs[:2]]
        raise UserError(
            f"{sweeps[0]} is a sweep, and only runs can be compared",
            f"use its jobs: {shlex.join(['lmtool', 'report', *jobs])}",
        )
    if against and not sweeps:
        raise UserError(f"against={against[0]} needs the folder of a sweep", "lmtool report runs/SWEEP against=3")
    if fits or predictions:
        if fits != ["scaling"] or len(predictions) > 1 or against or formats or not sweeps:
            raise UserError(
                f"{' '.join(['report', *words])}: a scaling law is fitted to the folder of one sweep",
                "write lmtool report runs/SWEEP fit=scaling, and predict=RUN or predict=PARAMETERS,TOKENS",
            )
        report_scaling(output, sweeps[0], predictions[0] if predictions else None)
        return 0
    page = folders[0].parent / "comparison.html"
    if formats and formats[0] in FIGURE_FORMATS:
        if sweeps:
            sweep = read_sweep(sweeps[0])
            paths = write_sweep_figures(sweep, blocks_of(sweep, *against), formats[0])
        elif len(folders) == 1:
            paths = write_run_figures(folders[0], formats[0])
        else:
            paths = write_comparison_figures(folders, page, formats[0])
        for path in paths:
            output.line(str(path))
    elif formats == ["latex"] and not sweeps and len(folders) == 1:
        for path in write_methods(folders[0]):
            output.line(str(path))
    elif formats and not sweeps and len(folders) == 1:
        raise UserError(
            f"format={formats[0]} prints the table of a sweep or of several runs", f"lmtool report {folders[0]}"
        )
    elif formats:
        scores, groups = (raw_scores_table, raw_group_table) if formats == ["csv"] else (paper_table, group_table)
        tables = [groups(block) for block in blocks_of(read_sweep(sweeps[0]), *against)] if sweeps else []
        for header, rows in tables or [scores(compare(folders))]:
            say(TABLE_FORMATS[formats[0]](header, rows))
    elif sweeps:
        report_sweep(output, sweeps[0], *against)
    elif len(folders) == 1:
        output.line(str(write_report(folders[0])))
    else:
        report_comparison(output, folders, page)
    return 0


def _runs_among(names: list[str]) -> list[Path]:
    folders = [run_folder(name) for name in names]
    runs, left_out = list[Path](), list[str]()
    for name, folder in zip(names, folders, strict=True):
        if folder.name != Path(name).name and folders.count(folder) > 1:  # runs/latest
            left_out.append(f"{name} ({folder.name})")
        elif not folder.exists() or (is_run(folder) and not is_sweep(folder)):
            runs.append(folder)
        else:
            kind = "a file" if folder.is_file() else "a sweep" if is_sweep(folder) else "no run"
            left_out.append(f"{name} ({kind})")
    if len(runs) < 2 or not left_out:
        return folders
    say(f"left out: {', '.join(left_out)}", sys.stderr)
    return runs
