"""The summary of a sweep, from the files of its folder: a table on the screen, sweep.html, sweep.csv and plots/."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.learners.metrics.intervals import LEVEL
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.sweep_files import DONE_JOB, ReportedJob, SweepFiles, final_status, read_sweep
from lmtool.reporting.sweep_groups import SEED, Block, Difference, SeedGroup, blocks_of, csv_rows, varying_keys_and_seed
from lmtool.reporting.text import count, duration, flops, lower_is_better, number, plain, title
from lmtool.runs.files import SCORED_ROWS, write_delimited
from lmtool.system.terminal import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Sentences to quote, and rows that the screen and the page share.

_MAX_NAMES = 3
_INTERVAL = f"{LEVEL:.0%} interval"
_SETTING_CHARACTERS = 200
_NAME_CHARACTERS = 80
_SAME_IN_EVERY_PAIR = "every pair of seeds differs by the same amount, which gives no interval"
# Groups whose keys change the prediction targets: losses over different targets are not comparable.
_TARGET_GROUPS = ("tokenizer", "data")


def setting(group: SeedGroup) -> str:
    return plain(group.label, _SETTING_CHARACTERS)


def score(block: Block, group: SeedGroup) -> str:
    """Returns 'accuracy 0.712 ± 0.010 (mean and standard error, n = 3)'."""
    if not group.n:
        return f"no {title(block.metric)}"
    value = f"{title(block.metric)} {number(group.mean)}"
    if group.error is None:
        return f"{value} (n = 1: no error over seeds is known)"
    return f"{value} ± {number(group.error)} (mean and standard error, n = {group.n})"


def interval_text(difference: Difference) -> str:
    """Returns '-0.020 to +0.010', empty where no interval is known."""
    if difference.low is None or difference.high is None:
        return ""
    return f"{with_sign(difference.low)} to {with_sign(difference.high)}"


def with_sign(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def status_line(sweep: SweepFiles) -> str:
    """Returns '11 of 12 jobs done, 1 failed'."""
    counts = Counter(job.status for job in sweep.jobs)
    unfinished = [f"{count} {status}" for status, count in counts.items() if status != DONE_JOB]
    return ", ".join([f"{counts[DONE_JOB]} of {counted(len(sweep.jobs), 'job')} done", *unfinished])


def headline(block: Block) -> str:
    """Returns the sentence to quote: the best setting and its score."""
    on = f" on {plain(block.task, 80)}" if block.task else ""
    settings = sum(group.n > 0 for group in block.groups)
    if not block.keys:
        return f"{score(block, block.best)}{on}."
    best = f"{setting(block.best)}: {score(block, block.best)}"
    if settings == 1:
        return f"The only setting with a score{on}: {best}."
    condition = "" if block.rows_known else ", if their rows are the same"
    return f"Best of {counted(settings, 'setting')}{on}{condition}: {best}."


def sentences(block: Block, target_groups: Sequence[str] = _TARGET_GROUPS) -> list[str]:
    """Returns the sentences below the headline: ties, the named reference, missing cells, and cautions. target_groups:
    groups whose keys change the targets of these scores."""
    notes = [_ties(block)] if block.reference is block.best else [_difference_from_reference(block)]
    baseline = _mean_of(block.best, lambda result: result["baseline"])
    if baseline is not None:
        notes.append(f"A constant prediction has {title(block.metric)} {number(baseline)}.")
    contrasts = [difference for _, difference in block.contrasts()]
    known_intervals = sum(difference.significant is not None for difference in contrasts)
    if known_intervals >= 10:
        notes.append(
            f"{known_intervals} intervals of {LEVEL:.0%} each: without any true difference, about "
            f"{round(known_intervals * (1 - LEVEL)) or 1} would exclude 0 by chance."
        )
    if block.missing:
        cells = [" ".join(f"{key}={value}" for key, value in cell.items()) for cell in block.missing]
        notes.append(f"Missing from the grid: {_first_names([plain(cell, 120) for cell in cells])}.")
    target_keys = [key for key in block.keys if key.partition(".")[0].partition("/")[0] in target_groups]
    if target_keys and lower_is_better(block.metric):
        notes.append(
            f"{plain(target_keys[0], 80)} varies: {title(block.metric)} over different targets is not comparable."
        )
    results = [job.result.get("objective") for group in block.groups for job in group.jobs]
    objectives = [plain(name, 80) for name in dict.fromkeys(results) if name is not None]
    if len(objectives) > 1 and lower_is_better(block.metric):
        notes.append(
            f"The settings have different objectives ({', '.join(objectives)}): their losses are not comparable; a "
            "downstream score, a probe and minimal pairs are."
        )
    if not block.rows_known:
        notes.append(
            f"The rows of these scores are not known, because result.json has no {SCORED_ROWS} and predictions.jsonl "
            "no texts: no differences, and comparable only if the rows are the same."
        )
    if block.has_other_rows:
        notes.append("Scored on other rows than the other settings of this task: not compared with them.")
    return [sentence for sentence in notes if sentence]


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return "; ".join(names[:_MAX_NAMES]) + more


def _ties(block: Block) -> str:
    contrasts = block.contrasts()
    if not contrasts:
        return ""
    tied = [group for group, difference in contrasts if difference.significant is False]
    unknown = [(group, difference) for group, difference in contrasts if difference.significant is None]
    notes = []
    if not any(difference.pairs > 1 for _, difference in contrasts):
        return (
            "Whether the others differ significantly is unknown: no two of their seeds can be paired. "
            "Add seeds: seed=1,2,3."
        )
    if tied:
        notes.append(f"Not significantly different from it: {_first_names([setting(group) for group in tied])}.")
    elif not unknown:
        notes.append("All others differ significantly.")
    unpaired = [group for group, difference in unknown if not difference.same_in_every_pair]
    if unpaired:
        notes.append(f"Unknown for {counted(len(unpaired), 'setting')}: fewer than two seeds can be paired.")
    if len(unknown) > len(unpaired):
        settings = counted(len(unknown) - len(unpaired), "setting")
        notes.append(f"Unknown for {settings}: {_SAME_IN_EVERY_PAIR}. {_one_more_pair(block)}")
    return " ".join(notes)


def _one_more_pair(block: Block) -> str:
    seeds = [int(job.seed) for job in block.jobs if job.seed.isdecimal()]
    return f"Add a pair: seed={max(seeds, default=0) + 1}."


def _difference_from_reference(block: Block) -> str:
    difference = next((difference for group, difference in block.contrasts() if group is block.best), None)
    if difference is None or difference.value is None:
        return f"The best shares no seed with {setting(block.reference)}."
    interval = f", {_INTERVAL} {interval_text(difference)}" if difference.low is not None else ""
    significance = {True: ", significant", False: ", not significant", None: ", significance unknown"}[
        difference.significant
    ]
    pairs = counted(difference.pairs, "pair")
    note = f": {_SAME_IN_EVERY_PAIR}. {_one_more_pair(block)}" if difference.same_in_every_pair else "."
    return (
        f"Best minus {setting(block.reference)}: {with_sign(difference.value)}{interval}, {pairs} of seeds"
        f"{significance}{note}"
    )


def group_table(block: Block) -> tuple[list[str], list[list[object]]]:
    """Returns the header, and a row per setting, best first."""
    seeded = any(group.error is not None for group in block.groups)
    rows_known = any(group.rows_error is not None for group in block.groups)
    keys = block.keys or ["setting"]
    contrasts = {id(group): difference for group, difference in block.contrasts()}
    header = [*keys, title(block.metric)]
    header += (["± seeds"] if seeded else []) + (["± rows"] if rows_known else []) + ["n"]
    compared = bool(contrasts)
    header += ["difference", *([_INTERVAL, "pairs", "significant"] if seeded else [])] if compared else []
    extra_columns = _extra_columns(block)
    header += [*extra_columns, "time", "jobs"]
    rows = []
    for index, group in enumerate(block.groups):
        settings = [group.settings[key] for key in block.keys] or [group.label]
        row: list[object] = [*settings, group.mean if group.n else None]
        row += ([group.error] if seeded else []) + ([group.rows_error] if rows_known else [])
        row.append(group.n if group.n == len(group.jobs) else f"{group.n} of {len(group.jobs)}")
        row += difference_cells(contrasts.get(id(group)), group is block.reference, seeded) if compared else []
        row += [values[index] for values in extra_columns.values()]
        rows.append([*row, _time(group.jobs), _job_numbers(group.jobs)])
    return header, rows


def raw_group_table(block: Block) -> tuple[list[str], list[list[object]]]:
    """Returns the header, and a row per setting, best first, for other programs: plain numbers, which are means over
    jobs, with the unit in the name (FLOPs for flops)."""
    contrasts = {id(group): difference for group, difference in block.contrasts()}
    rows: list[dict[str, object]] = []
    for group in block.groups:
        row: dict[str, object] = {key: group.settings[key] for key in block.keys} or {"setting": group.label}
        row |= {block.metric: group.mean if group.n else None, "standard_error_of_seeds": group.error}
        row |= {"standard_error_of_rows": group.rows_error, "n": group.n, "jobs": len(group.jobs)}
        contrast = contrasts.get(id(group), Difference(None, 0))
        row |= {"difference": contrast.value, "difference_low": contrast.low, "difference_high": contrast.high}
        row["pairs"] = contrast.pairs
        for name in ("flops", "tokens", "trainable_parameters"):
            row[name] = _mean_of(group, itemgetter(name))
        row["seconds"] = _seconds(group.jobs)
        rows.append(row)
    return list(rows[0]), [list(row.values()) for row in rows]


def _extra_columns(block: Block) -> dict[str, Sequence[object]]:
    def rise_of(result: JsonMapping) -> float:
        return float(result["forgetting"]["after"]["loss"] - result["forgetting"]["before"]["loss"])

    trainable = [_mean_of(group, lambda result: result["trainable_parameters"]) for group in block.groups]
    rise = [_mean_of(group, rise_of) for group in block.groups]
    spent = [_mean_of(group, lambda result: result["flops"]) for group in block.groups]
    tokens = [_mean_of(group, lambda result: result["tokens"]) for group in block.groups]
    columns: dict[str, Sequence[object]] = {}
    if len({f"{value:.2g}" for value in tokens if value is not None}) > 1:
        columns["FLOPs"] = [None if value is None else flops(value) for value in spent]
        columns["tokens"] = [None if value is None else count(round(value)) for value in tokens]
    if len(set(trainable) - {None}) > 1:
        columns["trainable parameters"] = [None if mean is None else round(mean) for mean in trainable]
    if set(rise) != {None}:
        columns["forgets"] = [None if mean is None else with_sign(mean) for mean in rise]
    return columns


def _mean_of(group: SeedGroup, value: Callable[[JsonMapping], float]) -> float | None:
    values = []
    for job in group.jobs:
        with suppress(KeyError, TypeError, ValueError):
            values.append(float(value(job.result)))
    values = [number for number in values if math.isfinite(number)]
    return sum(values) / len(values) if values else None


def difference_cells(difference: Difference | None, reference: bool, seeded: bool) -> list[object]:
    """Returns the difference from the reference setting; if `seeded`, its interval, number of pairs and significance,
    too. difference: None if it is unknown."""
    if difference is None:
        return ["reference" if reference else "", *(["", None, ""] if seeded else [])]
    value = "" if difference.value is None else with_sign(difference.value)
    significance = {True: "yes", False: "no", None: "unknown"}[difference.significant]
    return [value, *([interval_text(difference), difference.pairs, significance] if seeded else [])]


def _time(jobs: Sequence[ReportedJob]) -> str | None:
    seconds = _seconds(jobs)
    return None if seconds is None else duration(seconds)


def _seconds(jobs: Sequence[ReportedJob]) -> float | None:
    seconds = [job.seconds for job in jobs if job.seconds is not None]
    return sum(seconds) / len(seconds) if seconds else None


def _job_numbers(jobs: Sequence[ReportedJob]) -> str:
    numbers = [str(job.number) for job in jobs]
    return " ".join(numbers[:12]) + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")


def unscored_table(sweep: SweepFiles) -> tuple[list[str], list[list[object]]]:
    """Returns the header, and a row per job without a score: setting, status and reason."""
    keys = [
        key
        for key in dict.fromkeys(key for job in sweep.jobs for key in job.overrides)
        if key == SEED or len({job.overrides.get(key) for job in sweep.jobs}) > 1
    ]
    rows: list[list[object]] = []
    for job in (job for job in sweep.jobs if job.value is None):
        settings = " ".join(f"{key}={job.overrides[key]}" for key in keys if key in job.overrides)
        rows.append([str(job.number), settings, job.status, job.reason])
    return ["job", "setting", "status", "reason"], rows


def end_line(record: JsonMapping, finished: int, total: int | None, seconds_left: float | None) -> str:
    """Returns the line printed at the end of a job: 'job 3 done: accuracy 0.712 · 4.9 s · 4 of 12 · left 39 s'."""
    metric, value = record.get("metric"), record.get("value")
    status = final_status(record.get("exit_status"))
    parts = [f"{title(str(metric))} {number(value)}"] if metric and isinstance(value, int | float) else []
    parts += [duration(record["seconds"])] if isinstance(record.get("seconds"), float) else []
    parts += [f"{finished} of {total}"] if total else []
    parts += [f"left {duration(seconds_left)}"] if seconds_left else []
    return f"job {record.get('job')} {status}: {' · '.join(parts)}".removesuffix(": ")


# sweep.html, sweep.csv and plots/ in the folder of a sweep.


def write_sweep(sweep: SweepFiles, blocks: Sequence[Block]) -> tuple[Path, Path]:
    """Writes plots/*.png, the page and the table, and returns the paths of both. Raises UserError if that fails."""
    page, table = sweep.folder / "sweep.html", sweep.folder / "sweep.csv"
    figures = _figures(blocks)
    _write_figures(sweep, figures, "png")
    with html.report_write_errors(sweep.folder):
        write_delimited(table, csv_rows(sweep), ",", named_by_user=False)
    html.write_page(
        page,
        "sweep.html",
        sweep.name,
        sweep=sweep,
        subtitle=" · ".join(filter(None, (sweep.command, status_line(sweep)))),
        blocks=[
            _block_values(block, block_figures, several=len(blocks) > 1)
            for block, block_figures in zip(blocks, figures, strict=True)
        ],
        unscored=unscored_table(sweep),
        jobs=_job_table(sweep),
    )
    return page, table


_Figures: TypeAlias = "dict[str, tuple[Figure, str]]"  # by file name, with captions


def write_sweep_figures(sweep: SweepFiles, blocks: Sequence[Block], file_format: str) -> list[Path]:
    """Writes plots/*.svg or plots/*.pdf, and returns the paths. Raises UserError if that fails."""
    return _write_figures(sweep, _figures(blocks), file_format)


def _write_figures(sweep: SweepFiles, figures: Sequence[_Figures], file_format: str) -> list[Path]:
    # Imported late: matplotlib takes most of a second.
    from lmtool.reporting import drawing

    by_name = {name: figure for block_figures in figures for name, (figure, _) in block_figures.items()}
    with html.report_write_errors(sweep.folder):
        return drawing.write_figures(by_name, sweep.folder / "plots", file_format)


def _figures(blocks: Sequence[Block]) -> list[_Figures]:
    from lmtool.reporting import plots

    figures = []
    for block in blocks:
        words = re.sub(r"[^A-Za-z0-9.+-]+", "-", f"{block.task} {block.metric}")[:_NAME_CHARACTERS]
        prefix = f"{words}_" if len(blocks) > 1 else ""
        figures.append({f"{prefix}{name}": values for name, values in plots.block_figures(block).items()})
    return figures


def _block_values(block: Block, figures: _Figures, several: bool) -> JsonObject:
    from lmtool.reporting import drawing

    errors = "mean and standard error over seeds" if block.best.error is not None else "no error over seeds is known"
    label = " · ".join(part for part in (block.task, title(block.metric), f"n = {block.best.n}", errors) if part)
    groups = group_table(block)
    return {
        "mean": block.best.mean,
        "error": block.best.error,
        "label": label,
        "headline": headline(block),
        "sentences": sentences(block),
        "name": f"{block.task}: {title(block.metric)}" if several else title(block.metric),
        "figures": [(*drawing.svgs(figure), caption) for figure, caption in figures.values()],
        "groups": groups,
        "notes": " ".join(_group_notes(block, groups[0])),
    }


def _group_notes(block: Block, header: Sequence[str]) -> Iterator[str]:
    reference = "the best" if block.reference is block.best else setting(block.reference)
    legend = {
        "± seeds": "± seeds: standard error of the mean over the seeds.",
        "± rows": "± rows: standard error of one job's score over the scored rows.",
        "difference": f"Difference: minus {reference}, over common seeds; interval by Student's t.",
        "forgets": "Forgets: the rise of the checkpoint's pretraining loss.",
    }
    yield from (text for column, text in legend.items() if column in header)
    if sum(group.n > 0 for group in block.groups) > 1:
        yield (
            "The score of the best setting is optimistic, because the setting was selected on these rows. Report its "
            "score on other rows."
        )


def _job_table(sweep: SweepFiles) -> tuple[list[str], list[list[object]], list[str]]:
    keys = varying_keys_and_seed(sweep.jobs)
    metrics = list(dict.fromkeys(job.metric for job in sweep.jobs if job.metric))
    rows: list[list[object]] = []
    for job in sweep.jobs:
        values = [job.value if job.metric == metric else None for metric in metrics]
        rows.append([str(job.number), *(job.overrides.get(key) for key in keys), *values, job.seconds, job.status])
    reports = [job.folder / "report.html" for job in sweep.jobs]
    links = [quote(f"{path.parent.name}/{path.name}") if path.is_file() else "" for path in reports]
    return ["job", *keys, *map(title, metrics), "seconds", "status"], rows, links


# The table printed at the end of a sweep.

_PRINTED_GROUPS, _PRINTED_UNSCORED = 60, 20


def report_sweep(output: Output, folder: str | Path, against: str | None = None) -> SweepFiles:
    """Prints the summary of a sweep's folder, and writes sweep.html, sweep.csv and plots/ there. against: as in
    `blocks_of`. Raises UserError if the folder is not a sweep, or cannot be written."""
    sweep = read_sweep(folder)
    blocks = blocks_of(sweep, against)
    print_summary(output, sweep, blocks)
    for path in write_sweep(sweep, blocks):
        output.line(str(path))
    return sweep


def print_summary(output: Output, sweep: SweepFiles, blocks: list[Block]) -> None:
    """Prints the groups of each block, best first, the jobs without a score, and the sentences to quote."""
    output.line(f"{plain(sweep.name, 80)}: {status_line(sweep)}", "bold")
    for block in blocks:
        header, rows = group_table(block)
        heading = plain(block.task, 80) if len(blocks) > 1 else None
        print_table(output, header, rows[:_PRINTED_GROUPS], heading, best=0)
        if len(rows) > _PRINTED_GROUPS:
            output.line(f"and {counted(len(rows) - _PRINTED_GROUPS, 'more setting')}, in sweep.html and sweep.csv")
    header, rows = unscored_table(sweep)
    if rows:
        print_table(output, header, rows[:_PRINTED_UNSCORED], "without a score")
    if len(rows) > _PRINTED_UNSCORED:
        output.line(f"and {len(rows) - _PRINTED_UNSCORED} more, in sweep.csv")
    for block in blocks:
        output.line(headline(block), "bold")
        for sentence in sentences(block):
            output.line(sentence)
    for problem in sweep.problems:
        output.warn(problem)
