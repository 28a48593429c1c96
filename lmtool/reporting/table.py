"""Small tables of results: lines and colour on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.text import duration, lower_is_better, number, plain
from lmtool.secrets import masked

_CELL = 120


def cell(value: Any) -> str:
    """A value as the text of a cell: None is empty, numbers are short, text is safe and masked."""
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return plain(masked(str(value)), _CELL)


def _numeric(column: Sequence[Any]) -> bool:
    known = [value for value in column if value not in (None, "")]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The table as plain lines: a head, a rule, the rows; numbers stand right."""
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[index]) for row in texts)]) for index, name in enumerate(header)]
    right = [_numeric([row[index] for row in rows]) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(placed).rstrip()

    return [
        line([plain(name, _CELL) for name in header]),
        "  ".join("-" * width for width in widths),
        *map(line, texts),
    ]


def print_table(
    output: Output,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    heading: str | None = None,
    best: int | None = None,
) -> None:
    """Print a table with an optional heading; `best` is the row to set off."""
    if heading:
        output.line(heading, "bold")
    lines = table_lines(header, rows)
    if not output.live:
        for line in lines:
            output.line(line)
        return
    right = [_numeric([row[index] for row in rows]) for index in range(len(header))]
    output.table([plain(name, _CELL) for name in header], [[cell(value) for value in row] for row in rows], right, best)
    for line in lines:
        output.log(line)


def sweep_table(jobs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of a sweep, best first, failed jobs last.

    jobs: {"overrides": {key: value}, "status", "metric", "value", "seconds", "run_dir"} each; only overrides that
    differ between the jobs become columns.
    """
    keys = list(dict.fromkeys(key for job in jobs for key in job.get("overrides", {})))
    differing = [key for key in keys if len({str(job.get("overrides", {}).get(key)) for job in jobs}) > 1] or keys
    metrics = list(dict.fromkeys(str(job["metric"]) for job in jobs if job.get("metric")))

    def order(job: Mapping[str, Any]) -> tuple[bool, int, float]:
        value = job.get("value")
        if not isinstance(value, (int, float)) or value != value:
            return True, 0, 0.0
        metric = str(job.get("metric"))
        return False, metrics.index(metric), value if lower_is_better(metric) else -value

    rows: list[list[Any]] = []
    for job in sorted(jobs, key=order):
        overrides = job.get("overrides", {})
        scores = [job.get("value") if job.get("metric") == metric else None for metric in metrics]
        seconds = job.get("seconds")
        took = duration(seconds) if isinstance(seconds, (int, float)) else None
        rows.append([*(overrides.get(key) for key in differing), *scores, took, job.get("status"), job.get("run_dir")])
    return [*differing, *metrics, "time", "status", "run"], rows


def print_sweep(output: Output, jobs: Sequence[Mapping[str, Any]]) -> None:
    """The table that ends a sweep."""
    header, rows = sweep_table(jobs)
    done = sum(job.get("status") == "done" for job in jobs)
    best = 0 if rows and any(isinstance(job.get("value"), (int, float)) for job in jobs) else None
    print_table(output, header, rows, f"{done} of {len(jobs)} jobs done", best)
