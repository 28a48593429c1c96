"""`lmtool evaluate` of several runs: they are grouped by setting like the jobs of a sweep, and a row of a table has the
mean and the standard deviation of a setting's score over its seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import DONE, UserError
from lmtool.learners.metrics import mean_and_error
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.evaluations import EVALUATION, interval_text
from lmtool.reporting.scores import CONSTANT_SUFFIXES
from lmtool.reporting.sweep_files import DONE_JOB, ReportedJob, SweepFiles
from lmtool.reporting.sweep_groups import SEED, Block, SeedGroup, blocks_of, deviation_of, varying_keys
from lmtool.reporting.sweep_report import difference_cells, headline, sentences, setting
from lmtool.reporting.text import shorten, title
from lmtool.runs.files import SCORED_ROWS, replace_text, to_json, write_delimited
from lmtool.runs.identity import FREE_KEYS, flatten
from lmtool.system.files import real_folder
from lmtool.system.secrets import masked_data
from lmtool.system.terminal import counted, listing

_PRINTED_ROWS, _SETTING_CHARACTERS, _LISTED_RUNS = 100, 60, 4
# A run with another name, in another folder or on another device is another seed of the same setting.
_OWN_KEYS = FREE_KEYS | {"version"}


def unscored_job(number: int, run: str, config: JsonMapping) -> ReportedJob:
    """Returns a run as the job of a sweep without a score yet. number: a number that no other run has. config: its
    saved configuration, complete, so that equal settings have equal keys."""
    keys = {key: value for key, value in flatten(config).items() if key.partition(".")[0] not in _OWN_KEYS}
    # The names of components come first, because a long setting is shortened.
    ordered = sorted(keys.items(), key=lambda item: not item[0].endswith(".name"))
    overrides = {key: str(value) for key, value in ordered if value is not None}
    objective = overrides.get("objective.name")
    return ReportedJob(number, Path(run), overrides, DONE_JOB, exit_status=DONE, result={"objective": objective})


def with_scores(job: ReportedJob, metrics: JsonMapping, task: str | None) -> ReportedJob:
    """Returns the job with its scores, the headline score first. task: the task; None for scores on text."""
    scores = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    metric, value = next(iter(scores.items()))
    result = {**job.result, "metrics": scores} | ({"task": task} if task is not None else {})
    rows = "" if task is None else metrics.get(SCORED_ROWS)
    return replace(job, metric=metric, value=value if math.isfinite(value) else None, rows=rows, result=result)


def refuse_repetitions(jobs: Sequence[ReportedJob]) -> None:
    """Raises UserError if two runs have the same setting and the same seed, which would count as two seeds."""
    keys = varying_keys(jobs)
    first: dict[tuple[str | None, ...], ReportedJob] = {}
    for job in jobs:
        identity = tuple(job.overrides.get(key) for key in (*keys, SEED))
        other = first.setdefault(identity if SEED in job.overrides else (str(job.folder),), job)
        if other is not job:
            raise UserError(
                f"{other.folder} and {job.folder} have the same setting and the same seed, so they are no two seeds",
                "name one of them",
            )


def refuse_other_rows(jobs: Sequence[ReportedJob]) -> None:
    """Raises UserError if a run was scored on other rows than the first one."""
    for job in jobs:
        if job.rows != jobs[0].rows:
            raise UserError(
                f"{job.folder} was scored on other rows than {jobs[0].folder}: other texts, other labels, or another "
                "order",
                "set task.path= to a file whose rows are the same for all runs",
            )


def blocks_of_runs(jobs: Sequence[ReportedJob]) -> list[Block]:
    """Returns the groups of the runs by setting: a block for each objective, if they are scored on text."""
    return blocks_of(SweepFiles(Path(), list(jobs)))


@dataclass(frozen=True)
class SeedScore:
    """A score of one setting.

    kind: "metric", "phenomenon" or "paradigm". values: the score of each run. interval: `low` and `high`, the ends of
    the 95% interval of the mean over paradigms; None without one.
    """

    group: SeedGroup
    kind: str
    name: str
    values: Sequence[float]
    interval: JsonMapping | None = None

    @property
    def mean(self) -> float:
        return mean_and_error(self.values)[0]

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for a single one."""
        return deviation_of(self.values)

    @property
    def interval_text(self) -> str:
        return "" if self.interval is None else interval_text(self.interval)


def metric_scores(group: SeedGroup) -> Iterator[SeedScore]:
    """Yields the metrics that all runs of a setting have, without counts and standard errors."""
    runs = scores_of_runs(group)
    for name in runs[0]:
        if not f"_{name}".endswith(CONSTANT_SUFFIXES) and all(
            math.isfinite(scores.get(name, math.nan)) for scores in runs
        ):
            yield SeedScore(group, "metric", name, [scores[name] for scores in runs])


def scores_of_runs(group: SeedGroup) -> list[dict[str, float]]:
    """Returns the scores of each run of a setting, by name."""
    return [job.result["metrics"] for job in group.jobs]


def print_seeds(output: Output, title_: str, blocks: Sequence[Block], scores: Sequence[SeedScore]) -> None:
    """Prints a row for each setting, best first, and its other scores. title_: what the runs are scored on. scores: the
    scores of each setting, the headline score among them."""
    for heading, header, rows in _tables(title_, blocks, scores):
        if len(rows) <= _PRINTED_ROWS:
            print_table(output, header, rows, heading)
            output.line()
        else:
            output.line(f"{header[0]}: {counted(len(rows), 'row')}, which report=FOLDER writes to {_TABLE}")
    for block in blocks:
        for sentence in _sentences(block):
            output.line(sentence)


def _sentences(block: Block) -> list[str]:
    # All runs are scored on the same text, whichever they were trained on.
    notes = [headline(block), *sentences(block, ("tokenizer",))]
    if unknown := [str(job.folder) for job in block.jobs if not job.seed]:
        notes.append(f"Without a known seed, each counted as one more: {listing(unknown, _LISTED_RUNS)}.")
    return notes


def _tables(
    title_: str, blocks: Sequence[Block], scores: Sequence[SeedScore]
) -> Iterator[tuple[str, list[str], list[list[object]]]]:
    names = _setting_names(blocks)
    several = sum(len(block.groups) for block in blocks) > 1
    first = [score for score in scores if score.kind == "metric" and score.name in {block.metric for block in blocks}]
    for block in blocks:
        heading = f"{title_} · {counted(len(block.groups), 'setting')}, {counted(len(block.jobs), 'run')}"
        yield heading, *_setting_table(block, names, first)
    for kind in dict.fromkeys(score.kind for score in scores):
        of_kind = [score for score in scores if score.kind == kind and id(score) not in map(id, first)]
        has_interval = any(score.interval is not None for score in of_kind)
        header = [kind, *(["setting"] if several else []), "mean", "standard deviation", "n"]
        rows: list[list[object]] = []
        for name in dict.fromkeys(score.name for score in of_kind):
            for score in (score for score in of_kind if score.name == name):
                row: list[object] = [name, *([names[id(score.group)]] if several else [])]
                row += [f"{score.mean:.4f}", _fixed(score.deviation), len(score.values)]
                rows.append([*row, *([score.interval_text] if has_interval else [])])
        if rows:
            yield "", [*header, *([_OVER_PARADIGMS] if has_interval else [])], rows


_OVER_PARADIGMS, _OVER_SEEDS = "95% interval over paradigms", "95% interval over seeds"


def _setting_table(
    block: Block, names: Mapping[int, str], scores: Sequence[SeedScore]
) -> tuple[list[str], list[list[object]]]:
    by_group = {id(score.group): score for score in scores}
    has_interval = any(score.interval is not None for score in scores)
    contrasts = {id(group): difference for group, difference in block.contrasts()}
    header = ["setting", title(block.metric), "standard deviation", "n", *([_OVER_PARADIGMS] if has_interval else [])]
    header += ["difference", _OVER_SEEDS, "pairs", "significant"] if contrasts else []
    rows: list[list[object]] = []
    for group in block.groups:
        row: list[object] = [names[id(group)], f"{group.mean:.4f}", _fixed(group.deviation), group.n]
        row += [by_group[id(group)].interval_text] if has_interval and id(group) in by_group else []
        row += difference_cells(contrasts.get(id(group)), group is block.reference, True) if contrasts else []
        rows.append([*row, listing([job.folder.name for job in group.jobs], _LISTED_RUNS)])
    return [*header, "runs"], rows


def _setting_names(blocks: Sequence[Block]) -> dict[int, str]:
    groups = [group for block in blocks for group in block.groups]
    labels = [setting(group) if group.settings else "all runs" for group in groups]
    return {id(group): name for group, name in zip(groups, shorten(labels, _SETTING_CHARACTERS), strict=True)}


def _fixed(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


_TABLE = "seeds.csv"


def write_seeds(
    folder: Path, title_: str, blocks: Sequence[Block], scores: Sequence[SeedScore], task: str | None
) -> None:
    """Writes evaluation.json, seeds.csv, seeds.html and plots/scores.png to a folder. Raises UserError if that fails.
    title_: the title of the page. task: None for scores on text."""
    # Imported late: matplotlib takes most of a second.
    from lmtool.reporting import drawing, plots

    details = {"task": task, "settings": [_details(group, scores) for block in blocks for group in block.groups]}
    figures = [figures["scores"][0] for figures in map(plots.block_figures, blocks) if "scores" in figures]
    with html.report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / EVALUATION, to_json(masked_data(details)) + "\n")
        write_delimited(folder / _TABLE, map(_csv_row, scores), ",", named_by_user=False)
        for number, figure in enumerate(figures, 1):
            name = f"scores_{number}" if len(figures) > 1 else "scores"
            drawing.write_png(figure, real_folder(folder / "plots") / f"{name}.png")
    page = {
        "target": title_,
        "drawing": "".join(map(drawing.svg, figures)),
        "tables": list(_tables(title_, blocks, scores)),
        "notes": " ".join(sentence for block in blocks for sentence in _sentences(block)),
    }
    html.write_page(folder / "seeds.html", "probes.html", title_, **page)


def _details(group: SeedGroup, scores: Sequence[SeedScore]) -> JsonObject:
    return {
        "setting": dict(group.settings),
        "runs": [str(job.folder) for job in group.jobs],
        "seeds": [job.seed for job in group.jobs],
        "scores": [
            {"kind": score.kind, "name": score.name, **_statistics(score), "values": list(score.values)}
            for score in scores
            if score.group is group
        ],
    }


def _statistics(score: SeedScore) -> JsonObject:
    interval = score.interval or {}
    values = {"mean": score.mean, "standard_deviation": score.deviation, "n": len(score.values)}
    return {**values, "low": interval.get("low"), "high": interval.get("high")}


def _csv_row(score: SeedScore) -> JsonObject:
    runs = " ".join(str(job.folder) for job in score.group.jobs)
    return {**score.group.settings, "kind": score.kind, "name": score.name, **_statistics(score), "runs": runs}
