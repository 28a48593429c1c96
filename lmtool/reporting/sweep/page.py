"""sweep.html and sweep.csv in the folder of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmtool.reporting import html
from lmtool.reporting.report import write_page, writing
from lmtool.reporting.sweep.files import Job, SweepFiles
from lmtool.reporting.sweep.groups import SEED, Block, varied
from lmtool.reporting.sweep.words import group_table, headline, sentences, setting, status_line, unscored_table
from lmtool.reporting.text import number, plain, title
from lmtool.runs.files import write_delimited

_GROUPS, _JOBS, _UNSCORED = 300, 1000, 300
# What a spreadsheet takes for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_sweep(sweep: SweepFiles, blocks: Sequence[Block]) -> tuple[Path, Path]:
    """Write both files; their paths. UserError where the disk refuses."""
    page, table = sweep.folder / "sweep.html", sweep.folder / "sweep.csv"
    with writing(sweep.folder):
        write_delimited(table, csv_rows(sweep), ",", typed=False)
        write_page(page, html.page(f"{sweep.name} · lmtool", [part for part in _body(sweep, blocks) if part]))
    return page, table


def _body(sweep: SweepFiles, blocks: Sequence[Block]) -> Iterator[str]:
    yield f"<h1>{html.escape(sweep.name)}</h1>"
    yield html.paragraph(" · ".join(part for part in (sweep.command, status_line(sweep)) if part))
    for block in blocks:
        yield _head(block)
    if not blocks:
        yield html.paragraph("No job has a score yet.", "unclear")
    for block in blocks:
        name = f"{block.learns}: {title(block.metric)}" if len(blocks) > 1 else title(block.metric)
        yield html.section(name, _figures(block), _groups(block))
    yield html.section("Without a score", _unscored(sweep))
    yield html.section("Jobs", _jobs(sweep))
    yield html.section("Left out", *(html.paragraph(problem) for problem in sweep.problems))


def _head(block: Block) -> str:
    margin = "" if block.best.error is None else f" <small>± {html.escape(number(block.best.error))}</small>"
    errors = "mean and standard error over seeds" if block.best.error is not None else "no error over seeds is known"
    label = " · ".join(part for part in (block.learns, title(block.metric), f"n = {block.best.n}", errors) if part)
    value = f'<div class="value">{html.escape(number(block.best.mean))}{margin}'
    value += f'<span class="label">{html.escape(label)}</span></div>'
    words = html.paragraph(headline(block), "") + "".join(map(html.paragraph, sentences(block)))
    return f'<div class="head">{value}</div>{words}'


def _figures(block: Block) -> str:
    if not block.keys:
        return ""
    # matplotlib takes most of a second to import, so a command that draws nothing does not.
    from lmtool.reporting import drawing
    from lmtool.reporting.sweep import plots

    figures, caption = plots.settings_figures(block)
    drawn = [html.figure(wide, narrow=narrow) for wide, narrow in map(drawing.svgs, figures)]
    return (html.columns(*drawn) if len(drawn) > 1 else "".join(drawn)) + (html.paragraph(caption) if drawn else "")


def _groups(block: Block) -> str:
    header, rows = group_table(block)
    notes = []
    if "± seeds" in header:
        notes.append("± seeds: standard error of the mean over the seeds.")
    if "± rows" in header:
        notes.append("± rows: standard error of one job's score, for the number of rows that were scored.")
    if "difference" in header:
        to = "the best" if block.reference is block.best else setting(block.reference)
        notes.append(f"Difference: less {to}, over the seeds that both have; its interval by Student's t.")
    if "forgets" in header:
        notes.append("Forgets: by how much the loss of the checkpoint's own pretraining rose.")
    if sum(group.n > 0 for group in block.groups) > 1:
        notes.append("The best of several is flattered by the rows it was chosen on: report its score on others.")
    table = html.table(header, rows[:_GROUPS])
    return f"{_wide(table)}{_more(len(rows), _GROUPS)}{html.paragraph(' '.join(notes))}"


def _unscored(sweep: SweepFiles) -> str:
    header, rows = unscored_table(sweep)
    return html.table(header, rows[:_UNSCORED]) + _more(len(rows), _UNSCORED) if rows else ""


def _jobs(sweep: SweepFiles) -> str:
    keys = _keys(sweep.jobs)
    metrics = list(dict.fromkeys(job.metric for job in sweep.jobs if job.metric))
    rows = [
        [str(job.number), *(job.overrides.get(key) for key in keys)]
        + [job.value if job.metric == metric else None for metric in metrics]
        + [job.seconds, job.status]
        for job in sweep.jobs[:_JOBS]
    ]
    table = html.table(["job", *keys, *map(title, metrics), "seconds", "status"], rows)
    return _wide(table) + _more(len(sweep.jobs), _JOBS)


def _wide(table: str) -> str:
    """A table that is moved sideways by itself where the page is narrow."""
    return f'<div class="wide">{table}</div>'


def _more(count: int, shown: int) -> str:
    return html.paragraph(f"{count - shown} further rows are in sweep.csv.") if count > shown else ""


def _keys(jobs: Sequence[Job]) -> list[str]:
    """All that varies, the seed last."""
    seeded = len({job.overrides.get(SEED) for job in jobs}) > 1
    return [*varied(jobs), *([SEED] if seeded else [])]


def csv_rows(sweep: SweepFiles) -> Iterator[dict[str, Any]]:
    """A row a job: its number, what varied, how it ended, its scores and sizes."""
    keys = _keys(sweep.jobs)
    metrics = list(dict.fromkeys(name for job in sweep.jobs for name in _scores(job)))
    sizes = ("steps", "tokens", "tokens_per_second", "parameters", "trainable_parameters", "peak_memory_bytes")
    for job in sweep.jobs:
        scores = _scores(job)
        row: dict[str, Any] = {"job": job.number, **{key: job.overrides.get(key) for key in keys}}
        row |= {"status": job.status, "reason": job.reason, "task": job.learns, "metric": job.metric}
        row |= {"value": job.value, "standard_error": job.standard_error}
        row |= {f"metrics.{name}": scores.get(name) for name in metrics}
        row |= {"seconds": job.seconds, **{name: job.result.get(name) for name in sizes}, "folder": str(job.folder)}
        yield {csv_cell(name): csv_cell(value) for name, value in row.items()}


def csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: text that begins like one, and is no number, has a ' before it.
    Control characters are made visible."""
    if value is None or isinstance(value, int | float):
        return value
    text = plain(value)
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _scores(job: Job) -> dict[str, Any]:
    """The metrics of result.json that are numbers."""
    metrics = job.result.get("metrics")
    known = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): value for name, value in known if isinstance(value, int | float)}
