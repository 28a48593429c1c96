"""report.html: configuration, results and reproduction of a run on one self-contained page."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import command_line
from lmtool.reporting import html
from lmtool.reporting.examples import (
    PredictionSummary,
    leading_examples,
    prediction_groups,
    prediction_rows,
    predictions_note,
    sample_groups,
    summarize,
)
from lmtool.reporting.run_files import (
    MISSING_RESULT,
    UNDISTILLED,
    RunFiles,
    as_object,
    as_objects,
    models_of,
    read_predictions,
    read_run,
)
from lmtool.reporting.scores import Score, score_of, selection_note, stop_reason, test_scores
from lmtool.reporting.screens import parameter_rows
from lmtool.reporting.text import count, duration, is_number, number, percent, plain, size, title
from lmtool.runs.identity import budgets
from lmtool.runs.locks import is_held

if TYPE_CHECKING:
    from matplotlib.figure import Figure
_ROW_KEYS = ("step", "split", "tokens", "best", "phase")  # of a validation row, beside its metrics
_CELL_KEYS = {"side", "student_layer", "teacher_layer", "region", "value", "n"}
_MODEL_COLUMNS = {
    "standard_error": "±", "parameters": "parameters", "weight_bytes": "bytes", "tokens_per_second": "tokens/s",
}  # fmt: skip


def distillation_summary(run: RunFiles) -> JsonObject | None:
    """Returns the table of the models, sentences about their agreement, and the command that trains the student without
    a teacher, unless there is such a run; None if the run has no teacher."""
    models = models_of(run)
    if not models:
        return None

    def rounded(value: object) -> object:
        return round(value) if isinstance(value, float) and abs(value) > 1000 else value

    names = {"score": title(str(run.result.get("metric", "score"))), **_MODEL_COLUMNS}
    columns = [key for key in names if any(model.get(key) is not None for model in models)]
    rows = [[model.get("name"), *(rounded(model.get(key)) for key in columns)] for model in models]
    command = None
    if not any(model["name"] == UNDISTILLED for model in models):
        words = ["--config", str(run.run_dir / "config.yaml"), "distill=none", f"name={run.name}-alone"]
        command = command_line(str(run.result.get("command")), *words, modules=run.plugins)
    return {
        "models": (["model", *(names[key] for key in columns)], rows),
        "agreement": list(_agreement(run)),
        "command": command,
    }


def interchange_of(run: RunFiles) -> JsonObject:
    """Returns the measurements under interchange interventions; {} if there were none."""
    accuracy = as_object(as_object(run.result.get("distillation")).get("interchange_accuracy"))
    cells = accuracy.get("cells")
    if not isinstance(cells, list):
        return {}
    return accuracy if all(isinstance(cell, dict) and cell.keys() >= _CELL_KEYS for cell in cells) else {}


def _agreement(run: RunFiles) -> Iterator[str]:
    if layers := as_object(run.section("data").get("distillation")).get("layers"):
        yield f"Student layers and their teacher layers: {layers}."
    distillation: JsonObject = run.result["distillation"]
    fidelity, accuracy = distillation.get("fidelity"), interchange_of(run)
    if _is_fraction(fidelity):
        yield f"Student and teacher agree on {_fraction_text(fidelity)}."
    if _is_fraction(accuracy):
        changed, changed_text = accuracy.get("changed"), ""
        if _is_fraction(changed):
            changed_text = f"; where the swap changes the teacher's prediction, on {_fraction_text(changed)}"
        swapped = "With states of another text swapped into both models (interchange accuracy)"
        yield f"{swapped}, they agree on {_fraction_text(accuracy)}{changed_text}."
    elif distillation.get("interchange_accuracy_reason"):
        reason = plain(str(distillation["interchange_accuracy_reason"]), 300)
        yield f"Agreement under interchange interventions was not measured: {reason}."


def _is_fraction(value: object) -> TypeGuard[JsonObject]:
    return isinstance(value, dict) and isinstance(value.get("value"), float) and isinstance(value.get("n"), int)


def _fraction_text(fraction: JsonMapping) -> str:
    return f"{percent(fraction['value'])} of {count(fraction['n'])} targets"


def write_report(run_dir: str | Path, trains: bool | None = None, reason: str = "") -> Path:
    """Writes report.html and plots/*.png of a run folder and returns the path of the report. The section of a missing
    or damaged file is left out, with a note on the page.

    trains: for a run without a result, whether it is still training, which the page says, and no PNG is written; None
    if only the run's lock says so. reason: why it stopped; may be empty. Raises UserError if the folder is not a run or
    cannot be written.
    """
    run = read_run(run_dir)
    note = ""
    if not os.path.lexists(run.run_dir / "result.json"):
        held = is_held(run.run_dir / "LOCK") if trains is None else trains
        note = _unfinished_note(run, held, reason)
        run.problems.remove(MISSING_RESULT)
        run.result = _result_so_far(run)
    predictions = summarize(read_predictions(run))
    figures = _page_figures(run, predictions, writes_png=not trains)
    score = score_of(run.result, run.baseline, predictions.scored_count)
    leading, more = leading_examples([*sample_groups(run.samples), *prediction_groups(predictions)])
    class_header, classes = _classes(run)
    return html.write_page(
        run.run_dir / "report.html",
        "report.html",
        run.name,
        run=run,
        subtitle=_subtitle(run.result),
        status=run.result.get("status"),
        note=note,
        score=score,
        score_label=_score_label(score, run.result) if score else "",
        selection_note=selection_note(run.result),
        tests=test_scores(run.result) if score else (),
        key_numbers=list(_key_numbers(run.result)),
        figures=figures,
        terms=_terms(run),
        phases=_phases(run),
        distillation=distillation_summary(run),
        mixture=_mixture(run),
        classes=(class_header, classes),
        confused=predictions.confused_pairs(),
        predictions=prediction_rows(predictions),
        predictions_note=predictions_note(predictions),
        leading_examples=leading,
        more_examples=more,
        scores={key: number(value) for key, value in as_object(run.result.get("metrics")).items() if is_number(value)},
        trainable=_trainable(run),
        rates=_learning_rates(run),
        lineage=_lineage(run),
        forgetting=_forgetting(run),
        commands=repeat_commands(run),
        environment=_environment_text(run.environment),
        result="" if note or not run.result else json.dumps(run.result, indent=2),
    )


def _unfinished_note(run: RunFiles, trains: bool, reason: str) -> str:
    step = max((row["step"] for row in (*run.train, *run.validation)), default=0)
    limits = " or ".join(f"{key}={value:g}" for key, value in budgets(run.keys).items() if is_number(value))
    place = f"step {count(step)}" + (f" of a run that ends at {limits}" if limits else "")
    written = f"This page was written at {time.strftime('%Y-%m-%d %H:%M')}"
    if trains:
        return f"Training, at {place}. {written}; {command_line('report', str(run.run_dir))} writes it again."
    cause = f": {plain(reason, 300)}" if reason else ""
    resume = command_line("resume", str(run.run_dir), modules=run.plugins)
    return f"Stopped after {place}{cause}. {written}; {resume} continues the run."


def _result_so_far(run: RunFiles) -> JsonObject:
    keys, last = run.keys, run.train[-1] if run.train else {}
    named = {key: as_object(keys.get(key)).get("name") for key in ("model", "task", "objective")}
    best = [row for row in run.validation if row.get("best") is True] or run.validation
    metrics = {name: value for name, value in best[-1].items() if name not in _ROW_KEYS} if best else {}
    metric = str(run.baseline.get("metric"))
    return {
        "command": keys.get("command"),
        "seed": keys.get("seed"),
        **named,
        "steps": last.get("step"),
        **{name: last.get(name) for name in ("tokens", "tokens_per_second")},
        "metric": metric,
        "value": metrics.get(metric),
        "metrics": metrics,
        **({"validation_step": best[-1]["step"]} if best else {}),
    }


def write_run_figures(run_dir: str | Path, file_format: str) -> list[Path]:
    """Writes plots/*.svg or plots/*.pdf of a run folder, and returns the paths. Raises as `write_report`."""
    from lmtool.reporting import drawing

    run = read_run(run_dir)
    figures = _run_figures(run, summarize(read_predictions(run)))
    with html.report_write_errors(run.run_dir):
        return drawing.write_figures(figures, run.run_dir / "plots", file_format)


def _run_figures(run: RunFiles, predictions: PredictionSummary) -> dict[str, Figure]:
    # matplotlib takes most of a second to import, so a command that draws nothing does not.
    from lmtool.reporting import heat_maps, plots

    figures = {name: draw(run) for name, draw in plots.OVER_STEPS.items()}
    figures["agreement"] = heat_maps.agreement_figure(interchange_of(run))
    if not isinstance(run.result.get("mixture"), dict):  # labels of several tasks do not fit into one plot
        if predictions.is_regression:
            figures["scatter"] = plots.scatter_figure(predictions.gold, predictions.predicted)
        elif len(predictions.pairs) > 0 and predictions.has_labels(run.result.get("classes") or ()):
            figures["confusion"] = heat_maps.confusion_figure(*heat_maps.most_confused(predictions.pairs))
    return {name: figure for name, figure in figures.items() if figure is not None}


def _page_figures(run: RunFiles, predictions: PredictionSummary, writes_png: bool) -> dict[str, tuple[str, ...]]:
    """Writes the PNG files if asked to, and returns (SVG, caption, SVG for narrow pages) of each figure by name."""
    from lmtool.reporting import drawing, plots

    captions = {
        "loss": plots.loss_caption(run),
        "terms": "Each term of the training loss before its weight. Dots: held-out data; dashed: its baseline.",
        "agreement": "Fraction of predictions on which both models agree, with states of another text swapped in.",
        "confusion": _confusion_caption(predictions),
        "scatter": "One dot per held-out example.",
    }
    figures = _run_figures(run, predictions)
    if writes_png:
        with html.report_write_errors(run.run_dir):
            drawing.write_figures(figures, run.run_dir / "plots")
    page_figures: dict[str, tuple[str, ...]] = {}
    for name, figure in figures.items():
        narrow_figure = plots.OVER_STEPS[name](run, drawing.NARROW) if name in plots.OVER_STEPS else None
        narrow_svg = "" if narrow_figure is None else drawing.svg(narrow_figure)
        page_figures[name] = drawing.svg(figure), captions.get(name, ""), narrow_svg
    return page_figures


def _confusion_caption(predictions: PredictionSummary) -> str:
    from lmtool.reporting.heat_maps import MAX_CLASSES

    classes = len({name for pair in predictions.pairs for name in pair})
    caption = "Rows: gold labels. Columns: predictions. Shade: fraction of the gold label."
    if classes > MAX_CLASSES:
        caption += (
            f" The {MAX_CLASSES} of {classes} labels with the most errors; others: predictions of all other labels."
        )
    return caption


def _subtitle(result: JsonMapping) -> str:
    seed = f"seed {result['seed']}" if result.get("seed") is not None else None
    learned_name = result.get("objective") or result.get("task")
    parts = (result.get("command"), result.get("model"), learned_name, seed, stop_reason(result))
    return " · ".join(plain(part, 80) for part in parts if part)


def _score_label(score: Score, result: JsonMapping) -> str:
    label, metrics = title(score.metric), as_object(result.get("metrics"))
    if "validation_step" in result:
        return f"{label} so far, at step {result['validation_step']}"
    if isinstance(metrics.get("perplexity"), (int, float)):
        return f"validation {label} · perplexity {number(float(metrics['perplexity']))}"
    return "validation loss" if score.metric == "loss" else label


# By key of result.json: the name in the page, and the function that formats the value.
_KEY_NUMBERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "steps": ("steps", count),
    "tokens": ("tokens", count),
    "seconds": ("training", duration),
    "evaluation_seconds": ("evaluation", duration),
    "tokens_per_second": ("tokens per second", lambda rate: count(round(rate))),
    "padding_fraction": ("padding", percent),
    "peak_memory_bytes": ("peak memory", size),
    "parameters": ("parameters", count),
    "trainable_parameters": ("trainable", count),
}


def _key_numbers(result: JsonMapping) -> Iterator[tuple[str, str]]:
    for key, (name, formatter) in _KEY_NUMBERS.items():
        repeated = key == "trainable_parameters" and result.get(key) == result.get("parameters")
        if isinstance(result.get(key), (int, float)) and not repeated:
            yield name, formatter(result[key])


def _terms(run: RunFiles) -> list[list[object]]:
    metrics = as_object(run.result.get("metrics"))
    names = [key.removesuffix("_baseline") for key in metrics if key.endswith("_baseline")]
    columns = ("loss", "baseline", "accuracy", "count")
    rows = [[name, *(metrics.get(f"{name}_{column}") for column in columns)] for name in names]
    return rows if len(rows) > 1 else []


def _trainable(run: RunFiles) -> list[tuple[str, ...]]:
    by_role = run.section("learns")
    has_all_counts = all(
        isinstance(counts, dict) and {"trainable", "total"} <= set(counts) for counts in by_role.values()
    )
    return parameter_rows(by_role) if by_role and has_all_counts else []


def _table(rows: Sequence[JsonMapping], names: Mapping[str, str]) -> tuple[list[str], list[list[object]]]:
    return [*names.values()], [[row.get(name) for name in names] for row in rows]


def _phases(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    names = {
        "phase": "phase", "share": "share of the budget", "given": "changed keys", "first_step": "first step",
        "last_step": "last step",
    }  # fmt: skip
    phases = enumerate(as_objects(run.result.get("phases")), 1)
    rows = [{**row, "phase": phase, "share": percent(row.get("share") or 0)} for phase, row in phases]
    return _table(rows, names)


def _mixture(run: RunFiles) -> list[list[object]]:
    members, metrics = as_object(run.result.get("mixture")), as_object(run.result.get("metrics"))
    if not metrics:
        return []
    baselines = run.baseline.get("members") or {}
    rows = []
    for name, member in members.items():
        baseline = baselines.get(name) or {}
        metric, value = baseline.get("metric"), baseline.get("value")
        score = metrics.get(f"{name}_{metric}")
        percentages = [percent(member[key]) for key in ("share", "planned")]
        rows.append([name, member["examples"], *percentages, metric, score, value, metrics.get(f"{name}_loss")])
    return rows


def _forgetting(run: RunFiles) -> JsonObject | None:
    forgetting = as_object(run.result.get("forgetting"))
    if not {"before", "after", "distance"} <= set(forgetting):
        return None
    before, after = forgetting["before"], forgetting["after"]
    return {
        "subject": f"{forgetting.get('objective')} on {forgetting.get('text')}",
        "scores": [[name, before[name], after.get(name)] for name in before],
        "distances": list(forgetting["distance"].items()),
    }


def _learning_rates(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    columns = ("group", "parameters", "learning_rate", "weight_decay", "without_decay", "from_step")
    # Three digits, since 0.0015 must not become 0.002.
    rows = [
        {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        for row in as_objects(run.metadata.get("rates"))
    ]
    return _table(rows, {column: title(column) for column in columns})


def _lineage(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    names = {"checkpoint": "checkpoint", "step": "step", "command": "command", "sha256": "sha256 of its weights"}
    return _table(as_objects(run.metadata.get("lineage")), names)


def _classes(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    classes = as_object(run.result.get("classes"))
    rows = [{**as_object(scores), "class": name} for name, scores in classes.items()]
    rows.sort(key=lambda row: -(row.get("support") or 0))
    names = {"class": "class", "precision": "precision", "recall": "recall", "f1": "F1", "support": "n"}
    return _table(rows, names)


def _environment_text(environment: JsonMapping) -> str:
    lines: list[str] = []

    def add(values: JsonMapping, indent: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                lines.append(f"{indent}{key}:")
                add(value, indent + "  ")
            elif isinstance(value, (list, tuple)):
                lines.append(f"{indent}{key}: {' '.join(str(item) for item in value)}")
            else:
                lines.append(f"{indent}{key}: {value}")

    add(environment, "")
    return "\n".join(lines)


def repeat_commands(run: RunFiles) -> list[str]:
    """Returns the commands that repeat the run: from its saved configuration, and as typed."""
    command = run.result.get("command") or run.environment.get("command")
    lines = []
    if isinstance(command, str) and command.replace("_", "").isalnum():
        repeated = command_line(command, "--config", str(run.run_dir / "config.yaml"), modules=run.plugins)
        lines += ["# the same run again, from its saved configuration", repeated]
    argv = run.environment.get("arguments")
    if isinstance(argv, list) and argv:
        lines += ["# the original command", shlex.join(["lmtool", *map(str, argv[1:])])]
    following = run.metadata.get("next")
    if isinstance(following, list) and following:
        lines += ["# possible next steps", *map(str, following[:5])]
    return lines
