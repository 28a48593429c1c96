"""`lmtool report RUN [RUN ...]`: write the report of a run again, or lay several beside each other; `lmtool report
SWEEP`: its summary, whole or under way."""

from __future__ import annotations

from lmtool.config.checkpoint import run_folder
from lmtool.errors import UserError
from lmtool.reporting.comparison import report_comparison
from lmtool.reporting.console import Output
from lmtool.reporting.report import write_report
from lmtool.reporting.sweep_files import is_sweep
from lmtool.reporting.sweep_report import report_sweep


def main(words: list[str]) -> int:
    """words: run folders, or that of a sweep, and against=JOB or against=SETTING."""
    named = [word for word in words if "=" not in word]
    typed = [word for word in words if "=" in word]
    against = [word.partition("=")[2] for word in typed if word.startswith("against=")]
    if len(against) < len(typed):
        other = next(word for word in typed if not word.startswith("against="))
        raise UserError(
            f"report: there is no key {other.partition('=')[0]}",
            "name a job or a setting of the sweep: against=JOB or against=KEY=VALUE",
        )
    if not named or len(against) > 1:
        raise UserError(f"{' '.join(['report', *words])}: give run folders", "lmtool report runs/NAME")
    folders, output = [run_folder(word) for word in named], Output()
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if sweeps and len(folders) > 1:
        raise UserError(f"{sweeps[0]} is a sweep", f"give its jobs: lmtool report {sweeps[0]}/0 {sweeps[0]}/1")
    if against and not sweeps:
        raise UserError(f"against={against[0]} goes with a sweep", "lmtool report runs/SWEEP against=3")
    if sweeps:
        report_sweep(output, sweeps[0], *against)
    elif len(folders) == 1:
        output.line(str(write_report(folders[0])))
    else:
        report_comparison(output, folders, folders[0].parent / "comparison.html")
    return 0
