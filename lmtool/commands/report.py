"""`lmtool report RUN [RUN ...]`: rewrites the report of a run, or compares several runs; `lmtool report SWEEP`: prints
the summary of a finished or running sweep."""

from __future__ import annotations

from lmtool.errors import UserError
from lmtool.reporting.comparison import report_comparison
from lmtool.reporting.console import Output
from lmtool.reporting.report import write_report
from lmtool.reporting.sweep_files import is_sweep
from lmtool.reporting.sweep_report import report_sweep
from lmtool.runs.finding import run_folder


def main(words: list[str]) -> int:
    """Rewrites a report or prints a comparison. words: run folders, or the folder of a sweep and against=JOB or
    against=SETTING."""
    names = [word for word in words if "=" not in word]
    overrides = [word.partition("=") for word in words if "=" in word]
    against = [value for key, _, value in overrides if key == "against"]
    unknown = next((key for key, _, _ in overrides if key != "against"), None)
    if unknown is not None:
        hint = "compare with a job or a setting of the sweep: against=JOB or against=KEY=VALUE"
        raise UserError(f"report: there is no key {unknown}", hint)
    if not names or len(against) > 1:
        raise UserError(f"{' '.join(['report', *words])}: give run folders", "lmtool report runs/NAME")
    folders, output = [run_folder(name) for name in names], Output()
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if sweeps and len(folders) > 1:
        raise UserError(
            f"{sweeps[0]} is a sweep, and only runs can be compared",
            f"use its jobs: lmtool report {sweeps[0]}/0 {sweeps[0]}/1",
        )
    if against and not sweeps:
        raise UserError(f"against={against[0]} needs the folder of a sweep", "lmtool report runs/SWEEP against=3")
    if sweeps:
        report_sweep(output, sweeps[0], *against)
    elif len(folders) == 1:
        output.line(str(write_report(folders[0])))
    else:
        report_comparison(output, folders, folders[0].parent / "comparison.html")
    return 0
