"""Compares runs on the terminal and on a page: scores, differing configuration keys, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, cast

import numpy as np
import yaml

from lmtool.config import saved as yaml_files
from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.learners.metrics import METRICS, Metric, interval, resample_count, resampled_rows
from lmtool.learners.metrics.intervals import LEVEL
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.evaluations import interval_text, is_significant, print_difference
from lmtool.reporting.run_files import RunFiles, as_object, first_split, read_run, scored_rows
from lmtool.reporting.scores import score_of
from lmtool.reporting.sweep_groups import Difference
from lmtool.reporting.text import (
    count,
    duration,
    flops,
    is_number,
    lower_is_better,
    number,
    plain,
    shorten,
    size,
    title,
)
from lmtool.runs.files import SCORED_ROWS
from lmtool.runs.finding import read_manifest, saved_steps
from lmtool.runs.identity import NEUTRAL_KEYS, flatten
from lmtool.system.files import Damaged
from lmtool.system.terminal import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lmtool.reporting.plots import ScoreRow

# Tolerance between a recomputed score and the saved one: a regression's predictions are rounded in the file.
_TOLERANCE = 1e-4
_CLASS_METRICS = ("accuracy", "f1", "macro_f1", "matthews")
_BITS = "bits_per_byte"


def paired_difference(first: RunFiles, second: RunFiles) -> dict[str, dict[str, float]] | str:
    """Returns the score of the first run minus that of the second on the same rows, with a 95% bootstrap interval that
    resamples the rows of both runs together: {"value", "low", "high"} by metric. Returns the reason as a string if the
    runs cannot be paired."""
    rows = [[(row["gold"], row["prediction"]) for row in first_split(run)] for run in (first, second)]
    for run, run_rows in zip((first, second), rows, strict=True):
        if not run_rows:
            return f"{run.name} has no labeled predictions"
        if scored_rows(run) is None:
            return (
                f"the texts that {run.name} was scored on are not known: its result.json has no {SCORED_ROWS} and its "
                "predictions.jsonl no texts; try lmtool evaluate A against=B"
            )
    (first_gold, first_labels), (second_gold, second_labels) = (zip(*run_rows, strict=True) for run_rows in rows)
    if scored_rows(first) != scored_rows(second) or first_gold != second_gold:
        return "they were scored on different rows: other texts, other labels, or another order"
    columns = _columns(first_gold, first_labels, second_labels)
    if columns is None:
        return "their predictions are neither single labels nor numbers; try lmtool evaluate A against=B"
    gold, first_predicted, second_predicted = columns
    shared = [
        metric
        for metric in _metrics(first, gold, first_predicted)
        if metric in list(_metrics(second, gold, second_predicted))
    ]
    if not shared:
        return "their scores do not follow from single labels; try lmtool evaluate A against=B"
    resamples = resample_count(len(gold), [metric.name for metric in shared])
    differences: dict[str, list[float]] = {metric.name: [] for metric in shared}
    for rows_N in resampled_rows(len(gold), resamples):
        first_N, second_N, gold_N = first_predicted[rows_N], second_predicted[rows_N], gold[rows_N]
        for metric in shared:
            differences[metric.name].append(metric(gold_N, first_N) - metric(gold_N, second_N))
    return {
        metric.name: {
            "value": metric(gold, first_predicted) - metric(gold, second_predicted),
            **interval(differences[metric.name])._asdict(),
        }
        for metric in shared
    }


def _columns(*columns: Sequence[object]) -> tuple[np.ndarray, ...] | None:
    """Returns the columns as numbers; labels become their indices in the sorted set of all labels."""
    values = [value for column in columns for value in column]
    if all(is_number(value) for value in values):
        return tuple(np.asarray(column, dtype=np.float64) for column in columns)
    labels = {value for value in values if isinstance(value, str)}
    if not all(isinstance(value, str) for value in values):
        return None
    indices: dict[object, int] = {label: index for index, label in enumerate(sorted(labels))}
    return tuple(np.asarray([indices[value] for value in column], dtype=np.int64) for column in columns)


def _metrics(run: RunFiles, gold: np.ndarray, predicted: np.ndarray) -> Iterator[Metric]:
    for name, value in as_object(run.result.get("metrics")).items():
        metric = METRICS.get(name)
        if metric is None or not isinstance(value, int | float) or (name in _CLASS_METRICS) != (gold.dtype == np.int64):
            continue
        if math.isclose(metric(gold, predicted), value, abs_tol=_TOLERANCE):
            yield metric


def _configuration(run: RunFiles) -> dict[str, object]:
    try:
        return {key: value for key, value in flatten(yaml_files.load(run.config) or {}).items() if value != {}}
    except yaml.YAMLError as failure:
        run.problems.append(f"config.yaml is not valid YAML ({str(failure).splitlines()[0]}).")
        return {}


def changed_keys(configurations: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns dotted keys whose values differ between configurations, in order of first appearance."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    unset = object()
    return [
        key
        for key in keys
        if key.split(".")[0] not in NEUTRAL_KEYS
        and len({repr(configuration.get(key, unset)) for configuration in configurations}) > 1
    ]


@dataclass
class RunComparison:
    """Compared runs.

    names: unique names of the runs. configurations: flat configuration of each run. keys: the differing keys. metrics:
    the main metrics of the runs; of language models also the bits per byte, alone if their losses cannot be compared.
    paired: `paired_difference` of each other run and the first. caveat: why their losses cannot be compared, or None.
    """

    runs: list[RunFiles]
    names: list[str]
    configurations: list[dict[str, object]]
    keys: list[str]
    metrics: list[str]
    paired: list[dict[str, dict[str, float]] | str]
    caveat: str | None

    def settings(self, limit: int, width: int | None = None) -> list[list[str | None]]:
        """Returns a row for each of the first `limit` differing keys: the key, and its value in each run. width:
        maximum characters of a value; None for no maximum."""

        def text(value: object) -> str | None:
            return None if value is None else str(value) if width is None else plain(value, width)

        return [[key, *(text(values.get(key)) for values in self.configurations)] for key in self.keys[:limit]]


def compare(run_dirs: Sequence[str | Path]) -> RunComparison:
    """Reads the runs. Raises UserError if a folder is not a run or is named twice."""
    if len(run_dirs) < 2:
        raise UserError(f"a comparison needs at least two runs, not {len(run_dirs)}", "name the folders of two runs")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    folders = [run.run_dir.resolve() for run in runs]
    duplicate = next((run for run, folder in zip(runs, folders, strict=True) if folders.count(folder) > 1), None)
    if duplicate is not None:
        raise UserError(f"{duplicate.run_dir} is named twice", "name two different runs")
    names = [run.name for run in runs]
    if len({*names}) < len(names):  # jobs of several sweeps
        names = [str(run.run_dir) for run in runs]
    configurations = [_configuration(run) for run in runs]
    metrics = list(dict.fromkeys(str(run.result["metric"]) for run in runs if run.result.get("metric")))
    caveat = loss_caveat(runs)
    if all(is_number(_value(run, _BITS)) for run in runs):
        metrics = [_BITS] if caveat else [*metrics, _BITS]
    paired = [paired_difference(run, runs[0]) for run in runs[1:]]
    return RunComparison(runs, names, configurations, changed_keys(configurations), metrics, paired, caveat)


def loss_caveat(runs: Sequence[RunFiles]) -> str | None:
    """Returns why the losses of language models cannot be compared: different texts, objectives or vocabularies. None
    if they can, and for runs of tasks."""
    if any(run.result.get("metric") != "loss" for run in runs):
        return None
    if len({run.section("data").get("fingerprint") for run in runs}) > 1:
        return "the runs were scored on different texts, so that their scores cannot be compared"
    objectives = list(dict.fromkeys(str(run.result.get("objective")) for run in runs))
    if len(objectives) > 1:
        return f"the runs have different objectives ({', '.join(objectives)}), so that their losses cannot be compared"
    if len({_vocabulary(run) for run in runs}) == 1:
        return None
    sizes = ", ".join(f"{run.name} {run.section('model').get('vocabulary', '?')}" for run in runs)
    reason = f"the runs have different vocabularies (entries: {sizes}), so that their losses per token cannot be"
    return (
        f"{reason} compared; {title(_BITS)} can"
        if all(_BITS in _metrics_of(run) for run in runs)
        else f"{reason} compared"
    )


def _vocabulary(run: RunFiles) -> object:
    for folder in saved_steps(run.run_dir / "checkpoints")[:1]:
        with suppress(Damaged, OSError):
            if entry := read_manifest(folder).files.get("tokenizer.json"):
                return entry["sha256"]
    return run.section("model").get("vocabulary")


def _metrics_of(run: RunFiles) -> JsonObject:
    return as_object(run.result.get("metrics"))


def _value(run: RunFiles, metric: str) -> object:
    if metric == _BITS:
        return _metrics_of(run).get(_BITS)
    return run.result.get("value") if run.result.get("metric") == metric else None


def report_comparison(output: Output, run_dirs: Sequence[str | Path], path: Path) -> None:
    """Prints the comparison and writes its page. Raises UserError if a folder is not a run or is named twice."""
    comparison = compare(run_dirs)
    print_comparison(output, comparison)
    output.line(str(write_comparison(comparison, path)))


def print_comparison(output: Output, comparison: RunComparison) -> None:
    """Prints scores, sizes, speed, differing keys and paired differences from the first run: one column per run."""
    runs, names = comparison.runs, shorten(comparison.names, _COLUMN_CHARACTERS)
    rows: list[list[str | None]] = [
        [title(metric), *(_with_error(run, metric) for run in runs)] for metric in comparison.metrics
    ]
    for key, (name, formatter) in _SUMMARY_ROWS.items():
        if key == "baseline" and comparison.metrics == [_BITS]:  # that of the losses
            continue
        values = [run.result.get(key) for run in runs]
        cells = [formatter(value) if is_number(value) else "" for value in values]
        rows += [[name, *cells]] if any(cells) else []
    rows += test_rows(runs)
    rows.append(["status", *(title(str(run.result.get("status", "no result yet"))) for run in runs)])
    print_table(output, ["", *names], rows)
    if comparison.caveat is not None:
        output.warn(comparison.caveat)
    output.line()
    if comparison.keys:
        print_table(output, ["what differs", *names], comparison.settings(_PRINTED_KEYS, _COLUMN_CHARACTERS))
    else:
        output.line("The configurations are equal.")
    if len(comparison.keys) > _PRINTED_KEYS:
        output.line(f"and {counted(len(comparison.keys) - _PRINTED_KEYS, 'more key')}")
    for run, name, difference in zip(runs[1:], names[1:], comparison.paired, strict=True):
        if isinstance(difference, str):
            output.line(f"{name} minus {names[0]}: not paired, {difference}")
        else:
            print_difference(output, name, names[0], run.result["metrics"], difference)
    for run in runs:
        for problem in run.problems[:5]:
            output.warn(f"{run.name}: {problem}")


def write_comparison(comparison: RunComparison, path: Path) -> Path:
    """Writes the page of a comparison and its plots as PNG, and returns the path of the page."""
    from lmtool.reporting import drawing, plots

    figures = _figures(comparison)
    _write_figures(figures, path, "png")
    score_figure = figures.pop("scores", None)
    return html.write_page(
        path,
        "comparison.html",
        f"{len(comparison.runs)} runs",
        runs=comparison.runs,
        scores=scores_table(comparison),
        caveat=comparison.caveat,
        paired=_paired_rows(comparison),
        reasons=[
            f"{name} minus {comparison.names[0]}: not paired, {reason}."
            for name, reason in zip(comparison.names[1:], comparison.paired, strict=True)
            if isinstance(reason, str)
        ],
        changed=comparison.settings(_PAGE_KEYS),
        score_figure=None if score_figure is None else drawing.svgs(score_figure),
        scores_caption=plots.SCORES_CAPTION,
        curves=[drawing.svgs(figure) for figure in figures.values()],
    )


def write_comparison_figures(run_dirs: Sequence[str | Path], path: Path, file_format: str) -> list[Path]:
    """Writes the figures of a comparison as SVG or PDF into the folder of its plots, and returns the paths. path: the
    comparison's page. Raises as `report_comparison`."""
    return _write_figures(_figures(compare(run_dirs)), path, file_format)


def _write_figures(figures: Mapping[str, Figure], path: Path, file_format: str) -> list[Path]:
    from lmtool.reporting import drawing

    with html.report_write_errors(path.parent):
        return drawing.write_figures(figures, path.with_name(f"{path.stem}_plots"), file_format)


def _figures(comparison: RunComparison) -> dict[str, Figure]:
    from lmtool.reporting import plots

    curves = [("validation", metric) for metric in comparison.metrics]
    curves += [("validation", "loss"), ("train", "loss"), ("train", "learning_rate")]
    figures = {
        f"{split}_{metric}": plots.overlay_figure(comparison.runs, metric, split)
        for split, metric in dict.fromkeys(curves)
    }
    if metric := _compared_metric(comparison):
        rows = list(_score_rows(comparison, metric))
        figures = {"scores": plots.scores_figure(rows, metric, comparison.names[0]), **figures}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _compared_metric(comparison: RunComparison) -> str | None:
    candidates = comparison.metrics[:1] if comparison.caveat is None else [_BITS]
    return next((name for name in candidates if all(is_number(_value(run, name)) for run in comparison.runs)), None)


def _score_rows(comparison: RunComparison, metric: str) -> Iterator[ScoreRow]:
    from lmtool.reporting.plots import ScoreRow

    quantile = NormalDist().inv_cdf((1 + LEVEL) / 2)
    for run, name, paired in zip(comparison.runs, comparison.names, [None, *comparison.paired], strict=True):
        value = float(cast(float, _value(run, metric)))
        score = score_of(run.result, run.baseline)
        error = score.standard_error if score is not None and score.metric == metric else None
        interval = None if error is None else (value - quantile * error, value + quantile * error)
        statistics = paired.get(metric) if isinstance(paired, dict) else None
        difference = None
        if statistics is not None:
            difference = Difference(statistics["value"], 1, low=statistics["low"], high=statistics["high"])
        yield ScoreRow(name, [], value, interval, difference)


def _paired_rows(comparison: RunComparison) -> list[list[str]]:
    return [
        [f"{name} minus {comparison.names[0]}", title(metric), f"{statistics['value']:+.4f}"]
        + [interval_text(statistics, "+"), "yes" if is_significant(statistics) else "no"]
        for name, difference in zip(comparison.names[1:], comparison.paired, strict=True)
        if not isinstance(difference, str)
        for metric, statistics in difference.items()
    ]


def _with_error(run: RunFiles, metric: str) -> str | None:
    score = score_of(run.result, run.baseline)
    if score is None or score.metric != metric:
        value = _value(run, metric)
        return number(value) if is_number(value) else None
    return number(score.value) + (f" ± {number(score.standard_error)}" if score.standard_error else "")


_COLUMN_CHARACTERS, _PRINTED_KEYS, _PAGE_KEYS = 40, 40, 100
# By key of result.json: the name of the row, and the function that formats its values.
_SUMMARY_ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "baseline": ("baseline", number),
    "parameters": ("parameters", count),
    "trainable_parameters": ("trainable", count),
    "flops": ("FLOPs", flops),
    "steps": ("steps", count),
    "tokens": ("tokens", count),
    "words": ("words", count),
    "epochs": ("passes over the data", number),
    "tokens_per_second": ("tokens per second", lambda rate: count(round(rate))),
    "peak_memory_bytes": ("peak memory", size),
    "seconds": ("time", duration),
}


def test_rows(runs: Sequence[RunFiles]) -> list[list[str | None]]:
    """Returns a row for each labeled test split: its name, and the score of each run."""
    return [
        [split, *(None if value is None else number(value) for value in values)]
        for split, values in _test_scores(runs).items()
    ]


def _test_scores(runs: Sequence[RunFiles]) -> dict[str, list[float | None]]:
    tests = [as_object(run.result.get("tests")) for run in runs]
    scores: dict[str, list[float | None]] = {}
    for split in dict.fromkeys(name for splits in tests for name in splits):
        values = [
            as_object(splits.get(split)).get(str(run.result.get("metric")))
            for run, splits in zip(runs, tests, strict=True)
        ]
        scores[plain(split)] = [value if is_number(value) else None for value in values]
    return scores


def scores_table(comparison: RunComparison) -> tuple[list[str], list[list[object]]]:
    """Returns the header and the rows of a table of all runs, best first in the first metric; as they were named if no
    score can be compared."""
    runs, metrics = comparison.runs, comparison.metrics

    def sort_key(numbered: tuple[int, RunFiles]) -> tuple[bool, str, float]:
        metric = metrics[0] if metrics and metrics[0] == _BITS else str(numbered[1].result.get("metric"))
        value = _value(numbered[1], metric)
        if not is_number(value):
            return True, metric, 0.0
        return False, metric, value if lower_is_better(metric) else -value

    numbered = list(enumerate(runs))
    if comparison.caveat is None or metrics[:1] == [_BITS]:
        numbered.sort(key=sort_key)
    errors = [_error(run) for run in runs]
    columns: dict[str, Sequence[object]] = {"run": comparison.names}
    for metric in metrics:
        columns[title(metric)] = [_value(run, metric) for run in runs]
        if metric != _BITS and any(errors):
            columns[f"± {title(metric)}"] = [
                error if run.result.get("metric") == metric else None for run, error in zip(runs, errors, strict=True)
            ]
    columns |= {str(name): values for name, *values in test_rows(runs)}
    if metrics != [_BITS]:  # that of the losses
        columns["baseline"] = [run.baseline.get("value") for run in runs]
    for key, (name, formatter) in _TABLE_COLUMNS.items():
        values = [run.result.get(key) for run in runs]
        if key != "words" or None not in values:
            columns[name] = [formatter(value) if is_number(value) else None for value in values]
    statuses = [title(str(run.result.get("status", ""))) for run in runs]
    columns |= {} if set(statuses) == {"done"} else {"status": statuses}
    return list(columns), [[values[index] for values in columns.values()] for index, _ in numbered]


def _error(run: RunFiles) -> float | None:
    score = score_of(run.result, run.baseline)
    return None if score is None else score.standard_error


# By key of result.json: the name of the column, and the function that formats its values.
_TABLE_COLUMNS: dict[str, tuple[str, Callable[[float], object]]] = {
    **{name: (name, lambda value: value) for name in ("parameters", "steps", "tokens", "words", "seconds")},
    "flops": ("FLOPs", flops),
    "tokens_per_second": ("tokens/s", round),
    "peak_memory_bytes": ("peak memory", size),
}


def paper_table(comparison: RunComparison) -> tuple[list[str], list[list[object]]]:
    """Returns the table of all runs with durations as on the screen, which a page formats by itself."""
    header, rows = scores_table(comparison)
    place = header.index("seconds")
    header[place] = "time"
    for row in rows:
        seconds = row[place]
        row[place] = duration(seconds) if is_number(seconds) else None
    return header, rows


def raw_scores_table(comparison: RunComparison) -> tuple[list[str], list[list[object]]]:
    """Returns the header and the rows of a table of all runs for other programs, as they were named: the keys of
    result.json with their numbers, which have the unit in the key (FLOPs for flops)."""
    runs = comparison.runs
    metrics = dict.fromkeys(
        [*comparison.metrics, *(str(run.result["metric"]) for run in runs if run.result.get("metric"))]
    )
    columns: dict[str, Sequence[object]] = {"run": comparison.names}
    for metric in metrics:
        columns[metric] = [_value(run, metric) for run in runs]
        if metric != _BITS:
            own = [run.result.get("metric") == metric for run in runs]
            errors = [_error(run) if is_own else None for run, is_own in zip(runs, own, strict=True)]
            columns |= {f"{metric}_standard_error": errors} if any(errors) else {}
    columns |= dict(_test_scores(runs))
    columns["baseline"] = [run.baseline.get("value") for run in runs]
    columns |= {key: [run.result.get(key) for run in runs] for key in _TABLE_COLUMNS}
    columns["status"] = [run.result.get("status", "") for run in runs]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
