"""report.html: configuration, results and reproduction of a run on one self-contained page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from lmtool.config.registry import command_line
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.reporting import html
from lmtool.reporting.examples import PredictionSummary, predictions_html, samples_html, summarize
from lmtool.reporting.run_files import (
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
from lmtool.reporting.text import count, duration, number, percent, plain, size, title
from lmtool.system.files import real_folder

_CELL_KEYS = {"side", "student_layer", "teacher_layer", "region", "value", "n"}
_COLUMNS = {"standard_error": "±", "parameters": "parameters", "weight_bytes": "bytes", "tokens_per_second": "tokens/s"}


def distillation_html(run: RunFiles) -> str:
    """Returns the table of the models, their agreement, and the command that trains the student without a teacher."""
    models = models_of(run)
    if not models:
        return ""
    names = {"score": title(str(run.result.get("metric", "score"))), **_COLUMNS}
    columns = [key for key in names if any(model.get(key) is not None for model in models)]
    rows = [[model.get("name"), *(_cell(model.get(key)) for key in columns)] for model in models]
    parts = [html.table(["model", *(names[key] for key in columns)], rows), *_agreement(run)]
    if not any(model["name"] == UNDISTILLED for model in models):
        words = ["--config", str(run.run_dir / "config.yaml"), "distill=none", f"name={run.name}-alone"]
        command = command_line(str(run.result.get("command")), *words, modules=run.plugins)
        parts.append(html.paragraph("The same student without a teacher is not in this folder. Train it with"))
        parts.append(html.commands([command]))
    return "".join(parts)


def _cell(value: object) -> object:
    return round(value) if isinstance(value, float) and abs(value) > 1000 else value


def interchange_of(run: RunFiles) -> JsonObject:
    """Returns the measurements under interchange interventions; {} if there were none."""
    accuracy = as_object(as_object(run.result.get("distillation")).get("interchange_accuracy"))
    cells = accuracy.get("cells")
    return accuracy if as_objects(cells) == cells and all(cell.keys() >= _CELL_KEYS for cell in cells) else {}


def _agreement(run: RunFiles) -> Iterator[str]:
    """Yields sentences about the aligned layers and the agreement of student and teacher."""
    if layers := as_object(run.section("data").get("distillation")).get("layers"):
        yield html.paragraph(f"Student layers and their teacher layers: {layers}.")
    distillation: JsonObject = run.result["distillation"]
    fidelity, accuracy = distillation.get("fidelity"), interchange_of(run)
    if _is_share(fidelity):
        yield html.paragraph(f"Student and teacher agree on {_share_text(fidelity)}.")
    if _is_share(accuracy):
        changed_share = accuracy.get("changed")
        changed_text = ""
        if _is_share(changed_share):
            changed_text = f"; where the swap changes the teacher's prediction, on {_share_text(changed_share)}"
        swapped = "With states of another text swapped into both models (interchange accuracy)"
        yield html.paragraph(f"{swapped}, they agree on {_share_text(accuracy)}{changed_text}.")
    elif distillation.get("interchange_accuracy_reason"):
        reason = plain(str(distillation["interchange_accuracy_reason"]), 300)
        yield html.paragraph(f"Agreement under interchange interventions was not measured: {reason}.")


def _is_share(share: object) -> TypeGuard[JsonObject]:
    return isinstance(share, dict) and isinstance(share.get("value"), float) and isinstance(share.get("n"), int)


def _share_text(share: JsonMapping) -> str:
    return f"{percent(share['value'])} of {count(share['n'])} targets"


_MAX_CLASSES = 40


def write_report(run_dir: str | Path) -> Path:
    """Writes report.html and plots/*.png of a run folder and returns the path of the report.

    The section of a missing or damaged file is left out, with a note on the page. Raises UserError if the folder is not
    a run or cannot be written.
    """
    run = read_run(run_dir)
    predictions = summarize(read_predictions(run))
    with html.report_write_errors(run.run_dir):
        figures = _draw(run, predictions)
    curves = (figures.get("loss", ""), figures.get("terms", ""), _terms(run), figures.get("curves", ""))
    body = [
        _headline(run, predictions),
        html.section("Curves", *curves),
        html.section("Phases", _phases(run)),
        html.section("Distillation", distillation_html(run), figures.get("agreement", "")),
        html.section("Predictions", figures.get("confusion", "") or figures.get("scatter", "")),
        html.section("Mixture", _mixture(run)),
        html.section("Classes", _classes(run)),
        html.section("Examples", samples_html(run.samples), predictions_html(predictions)),
        html.section("Facts", _metadata(run)),
        html.section("Learning rates", _learning_rates(run)),
        html.section("Lineage", _lineage(run)),
        html.section("Forgetting", _forgetting(run)),
        html.section("Repeat it", html.commands(repeat_commands(run))),
        html.section(
            "Details",
            html.collapsible("Configuration (config.yaml)", run.config),
            html.collapsible("Environment", _environment_text(run.environment)),
            html.collapsible("Result (result.json)", json.dumps(run.result, indent=2) if run.result else ""),
        ),
        html.section("Left out", *(html.paragraph(problem) for problem in run.problems[:20])),
    ]
    return html.write_page(run.run_dir / "report.html", run.name, body)


def _draw(run: RunFiles, predictions: PredictionSummary) -> dict[str, str]:
    """Writes the PNG files and returns the page's figures by name."""
    # matplotlib takes most of a second to import, so a command that draws nothing does not.
    from lmtool.reporting import drawing, heat_maps, plots

    over_steps = {"loss": plots.loss_figure, "terms": plots.terms_figure, "curves": plots.curves_figure}
    figures = {name: draw(run, drawing.WIDE) for name, draw in over_steps.items()}
    figures["agreement"] = heat_maps.agreement_figure(interchange_of(run))
    captions = {
        "loss": plots.loss_caption(run),
        "terms": "Each term of the training loss before its weight. Dots: held-out data; dashed: its baseline.",
        "agreement": "Fraction of predictions on which both models agree, with states of another text swapped in.",
        "confusion": "Rows: gold labels. Columns: predictions. Shade: fraction of the gold label.",
        "scatter": "One dot per held-out example.",
    }
    mixed = isinstance(run.result.get("mixture"), dict)  # labels of several tasks do not fit into one plot
    if mixed:
        figures |= {"scatter": None, "confusion": None}
    elif predictions.is_regression:
        figures["scatter"] = plots.scatter_figure(predictions.gold, predictions.predicted)
    elif len(predictions.pairs) > 0 and predictions.has_labels(run.result.get("classes") or ()):
        figures["confusion"] = heat_maps.confusion_figure(*predictions.confusion())
    figures_html = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        drawing.write_png(figure, real_folder(run.run_dir / "plots") / f"{name}.png")
        narrow_figure = over_steps[name](run, drawing.NARROW) if name in over_steps else None
        narrow_svg = "" if narrow_figure is None else drawing.svg(narrow_figure)
        figures_html[name] = html.figure(drawing.svg(figure), captions.get(name, ""), narrow_svg)
    return figures_html


def _headline(run: RunFiles, predictions: PredictionSummary) -> str:
    result = run.result
    score = score_of(result, run.baseline, predictions.examples)
    seed = f"seed {result['seed']}" if result.get("seed") is not None else None
    learned_name = result.get("objective") or result.get("task")
    parts = (result.get("command"), result.get("model"), learned_name, seed, stop_reason(result))
    subtitle = " · ".join(plain(part, 80) for part in parts if part)
    lines = [f"<h1>{html.escape(run.name)}</h1>", html.paragraph(subtitle)]
    status = result.get("status")
    if status is None:
        lines.append(html.paragraph("This run has no result yet: it is running or was stopped.", "unclear"))
    elif status != "done":
        lines.append(html.paragraph(f"This run's status: {title(str(status))}.", "unclear"))
    if score is not None:
        lines.append(_score_html(score, as_object(result.get("metrics"))))
        note = selection_note(result)
        lines += [html.paragraph(f"The score is {note}.")] if note else []
        lines += [html.paragraph(sentence) for sentence in test_scores(result)]
    lines.append(_key_numbers(run))
    return "\n".join(line for line in lines if line)


def _score_html(score: Score, metrics: JsonMapping) -> str:
    label = title(score.metric)
    if isinstance(metrics.get("perplexity"), (int, float)):
        label = f"validation {label} · perplexity {number(float(metrics['perplexity']))}"
    elif score.metric == "loss":
        label = "validation loss"
    head = html.headline(score.value, label, score.standard_error or None)
    if score.baseline is not None:
        head += html.headline(score.baseline, f"{title(score.baseline_name)} baseline", kind="baseline")
    sentence = score.sentence[0].upper() + score.sentence[1:] + "."
    kind = score.verdict if score.verdict != "unknown" else "quiet"
    return f'<div class="head">{head}</div>{html.paragraph(sentence, kind)}'


def _key_numbers(run: RunFiles) -> str:
    result = run.result
    numbers: list[tuple[str, Callable[[float], str]]] = [
        ("steps", count),
        ("tokens", count),
        ("seconds", duration),
        ("evaluation_seconds", duration),
        ("tokens_per_second", lambda rate: count(round(rate))),
        ("padding_fraction", percent),
        ("peak_memory_bytes", size),
        ("parameters", count),
    ]
    if result.get("trainable_parameters") != result.get("parameters"):
        numbers.append(("trainable_parameters", count))
    names = {
        "seconds": "training",
        "evaluation_seconds": "evaluation",
        "padding_fraction": "padding",
        "peak_memory_bytes": "peak memory",
        "trainable_parameters": "trainable",
    }
    items = [
        f"<div>{html.escape(formatter(result[key]))}<span>{html.escape(names.get(key, title(key)))}</span></div>"
        for key, formatter in numbers
        if isinstance(result.get(key), (int, float))
    ]
    return f'<div class="strip">{"".join(items)}</div>' if items else ""


def _terms(run: RunFiles) -> str:
    """Returns held-out scores of each term of a loss with several terms."""
    metrics = as_object(run.result.get("metrics"))
    names = [key.removesuffix("_baseline") for key in metrics if key.endswith("_baseline")]
    columns = ("loss", "baseline", "accuracy", "count")
    rows = [[name, *(metrics.get(f"{name}_{column}") for column in columns)] for name in names]
    return html.table(["held-out", "loss", "baseline", "accuracy", "n"], rows) if len(rows) > 1 else ""


def _metadata(run: RunFiles) -> str:
    metrics = as_object(run.result.get("metrics"))
    scores = {key: number(value) for key, value in metrics.items() if isinstance(value, (int, float))}
    data_metadata = html.metadata("data", run.section("data"))
    right = html.metadata("model", run.section("model")) + _trainable(run) + html.metadata("scores", scores)
    return html.columns(data_metadata, right)


def _trainable(run: RunFiles) -> str:
    by_role = run.section("learns")
    has_all_counts = all(
        isinstance(counts, dict) and {"trainable", "total"} <= set(counts) for counts in by_role.values()
    )
    if not by_role or not has_all_counts:
        return ""
    return html.table(["parameters", "trainable", "total"], parameter_rows(by_role))


def _lineage(run: RunFiles) -> str:
    """Returns the checkpoints that the run descends from, oldest first."""
    names = {"checkpoint": "checkpoint", "step": "step", "command": "command", "sha256": "sha256 of its weights"}
    return _table(as_objects(run.metadata.get("lineage")), names)


def _table(rows: Sequence[JsonMapping], names: Mapping[str, str]) -> str:
    """Returns the columns `names` of the rows, under these headings; "" without rows."""
    return html.table([*names.values()], [[row.get(name) for name in names] for row in rows]) if rows else ""


def _phases(run: RunFiles) -> str:
    """Returns the overrides, fraction of the budget and steps of each phase."""
    names = {"phase": "phase", "share": "share of the budget", "given": "changed keys"}
    names |= {"first_step": "first step", "last_step": "last step"}
    phases = as_objects(run.result.get("phases"))
    rows = [{**row, "phase": count, "share": percent(row.get("share") or 0)} for count, row in enumerate(phases, 1)]
    note = html.paragraph("Held-out text is scored with the settings of the last phase during the whole run.")
    return _table(rows, names) + note if rows else ""


def _mixture(run: RunFiles) -> str:
    """Returns the examples read and planned, score and baseline of each member of a mixture."""
    members, metrics = as_object(run.result.get("mixture")), as_object(run.result.get("metrics"))
    if not members or not metrics:
        return ""
    baselines = run.baseline.get("members") or {}
    rows = []
    for name, member in members.items():
        baseline = baselines.get(name) or {}
        metric, value = baseline.get("metric"), baseline.get("value")
        score = metrics.get(f"{name}_{metric}")
        percentages = [percent(member[key]) for key in ("share", "planned")]
        rows.append([name, member["examples"], *percentages, metric, score, value, metrics.get(f"{name}_loss")])
    return html.table(["member", "examples", "share", "planned", "metric", "score", "baseline", "loss"], rows)


def _forgetting(run: RunFiles) -> str:
    """Returns the scores of the pretraining objective on held-out text before and after, and the change of the
    weights."""
    forgetting = as_object(run.result.get("forgetting"))
    if not {"before", "after", "distance"} <= set(forgetting):
        return ""
    before, after = forgetting["before"], forgetting["after"]
    scores = html.table(["score", "before", "after"], [[name, before[name], after.get(name)] for name in before])
    distances = html.table(["weights", "relative distance"], [[*pair] for pair in forgetting["distance"].items()])
    return html.paragraph(f"{forgetting.get('objective')} on {forgetting.get('text')}") + html.columns(
        scores, distances
    )


def _learning_rates(run: RunFiles) -> str:
    """Returns the peak learning rate of each part of the model, and the first step that trains it."""
    columns = ("group", "parameters", "learning_rate", "weight_decay", "without_decay", "from_step")
    # Three digits, since 0.0015 must not become 0.002.
    rows = [
        {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        for row in as_objects(run.metadata.get("rates"))
    ]
    return _table(rows, {column: title(column) for column in columns})


def _classes(run: RunFiles) -> str:
    """Returns precision, recall and F1 of each class on the development split, most frequent class first."""
    classes = as_object(run.result.get("classes"))
    rows = [{**as_object(scores), "class": name} for name, scores in classes.items()]
    rows.sort(key=lambda row: -(row.get("support") or 0))
    names = {"class": "class", "precision": "precision", "recall": "recall", "f1": "F1", "support": "n"}
    more = html.paragraph(f"{len(rows) - _MAX_CLASSES} more are in result.json.") if len(rows) > _MAX_CLASSES else ""
    return _table(rows[:_MAX_CLASSES], names) + more


def _environment_text(environment: JsonMapping) -> str:
    """Returns the environment, one entry per line, nested entries indented."""
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
