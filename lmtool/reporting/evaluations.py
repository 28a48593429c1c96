"""The screens, pages and plots of `lmtool evaluate` and `lmtool probe`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lmtool.config.base import JsonMapping
from lmtool.errors import UserError
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.run_files import Accuracy, CheckpointProbes, EvolutionResults
from lmtool.reporting.text import number, plain, shorten
from lmtool.runs.files import replace_text, to_json, write_delimited
from lmtool.system.files import real_folder
from lmtool.system.secrets import masked_data
from lmtool.system.terminal import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Table: TypeAlias = "tuple[str, list[str], list[list[str]]]"  # heading, header, rows

# `lmtool evaluate` on a task: scores with intervals, classes, calibration, the hardest rows.

_PRINTED_ROWS, _PRINTED_CLASSES = 3, 40
# Maximum characters of a label.
_LABEL_CHARACTERS = 40


def print_evaluation(output: Output, title: str, split: str, evaluation: JsonMapping, baseline: JsonMapping) -> None:
    """Prints the scores of one split. title: the checkpoint and the task. evaluation: the result of
    `lmtool.tasks.analysis.analysis`. baseline: `name` and `metrics` of the baseline."""
    baseline_metrics = baseline.get("metrics", {})
    rows: list[list[object]] = [["loss", f"{evaluation['loss']:.4f}", "", ""]]
    for name, score in evaluation["metrics"].items():
        baseline_value = f"{baseline_metrics[name]:.4f}" if name in baseline_metrics else ""
        rows.append([name, f"{score['value']:.4f}", interval_text(score), baseline_value])
    if "calibration_error" in evaluation:
        rows.append(["calibration error", f"{evaluation['calibration_error']:.4f}", "", ""])
    headings = ["metric", "value", "95% interval", str(baseline.get("name", ""))]
    print_table(output, headings, rows, heading=f"{title} · {split} · n = {evaluation['n']:,}")
    classes = evaluation.get("classes", {})
    if 0 < len(classes) <= _PRINTED_CLASSES:
        output.line()
        table = [
            [
                name,
                f"{class_scores['precision']:.4f}",
                f"{class_scores['recall']:.4f}",
                f"{class_scores['f1']:.4f}",
                class_scores["support"],
            ]
            for name, class_scores in zip(shorten(classes, _LABEL_CHARACTERS), classes.values(), strict=True)
        ]
        print_table(output, ["class", "precision", "recall", "F1", "n"], table)
    elif classes:
        output.line(f"{len(classes)} classes: precision, recall and F1 of each with report=FOLDER")
    hardest = evaluation["hardest"][:_PRINTED_ROWS]
    if hardest:
        output.line()
        output.line("hardest:")
    for row in hardest:
        text = " | ".join(plain(_join(row[name]), 100) for name in row if name not in _SCORE_KEYS + _ANSWER_KEYS)
        gold, prediction = shorten([_join(row.get("gold")), _join(row["prediction"])], _LABEL_CHARACTERS)
        output.line(f"  loss {number(row['loss'])}  gold {gold}  predicted {prediction}  {text}")
    for warning in evaluation["warnings"]:
        output.warn(f"{split}: {warning}")


def print_text_scores(output: Output, title: str, metrics: Mapping[str, float]) -> None:
    """Prints the scores of a language model on text, the result of `Evaluation.metrics`, each loss with its standard
    error. title: the checkpoint and the text."""
    rows = []
    for name, value in metrics.items():
        # The only term of a loss is the loss.
        if name.endswith("standard_error") or (name.endswith("_loss") and value == metrics["loss"]):
            continue
        error = metrics.get(f"{name.removesuffix('loss')}standard_error") if name.endswith("loss") else None
        text = number(value) if isinstance(value, int) or abs(value) >= 100 else f"{value:.4f}"
        rows.append([name, text + (f" ± {error:.4f}" if error else "")])
    print_table(output, ["metric", "value"], rows, heading=title)


_SCORE_KEYS = ("id", "gold", "prediction", "score", "loss", "probabilities")
_ANSWER_KEYS = ("start", "end", "null_difference", "n_best")


def _join(value: object) -> object:
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    return "(empty)" if text == "" else text


def print_minimal_pairs(output: Output, title: str, details: JsonMapping) -> None:
    """Prints the accuracies of a model on minimal pairs. details: the result of `PairScores.details`."""
    paradigms, phenomena, accuracy = details["paradigms"], details["phenomena"], details["accuracy"]
    rows: list[list[object]] = [
        [name, entry["pairs"], f"{entry['value']:.4f}", entry["ties"] or ""] for name, entry in paradigms.items()
    ]
    print_table(output, ["paradigm", "pairs", "accuracy", "ties"], rows, heading=title)
    if len(phenomena) > 1:
        output.line()
        rows = [
            [name, entry["paradigms"], f"{entry['value']:.4f}", _interval_if_known(entry)]
            for name, entry in phenomena.items()
        ]
        print_table(output, ["phenomenon", "paradigms", "accuracy", "95% interval"], rows)
    limits = _interval_if_known(accuracy)
    interval = f" (95% interval over paradigms {limits})" if limits else ""
    output.line(
        f"accuracy {accuracy['value']:.4f}{interval}, mean of {counted(len(paradigms), 'paradigm')} with "
        f"{counted(details['pairs'], 'pair')}; chance is 0.5; {counted(details['ties'], 'tie')}, counted as wrong"
    )


def _interval_if_known(score: JsonMapping) -> str:
    return interval_text(score) if math.isfinite(score["low"]) else ""


def print_difference(
    output: Output,
    first: str,
    second: str,
    scores: Mapping[str, float],
    differences: Mapping[str, Mapping[str, float]],
    resampled: str = "rows",
) -> None:
    """Prints the difference of two systems on the same rows. scores: those of the first system by metric. differences:
    the first score minus the second, with its interval, by metric. resampled: what the intervals resample."""
    rows = []
    for name, statistics in differences.items():
        score, difference = scores[name], statistics["value"]
        row = [name, f"{score:.4f}", f"{score - difference:.4f}", f"{difference:+.4f}"]
        rows.append([*row, interval_text(statistics, "+"), "yes" if is_significant(statistics) else "no"])
    output.line()
    headings = ["metric", "first", "second", "difference", "95% interval", "significant"]
    print_table(output, headings, rows, heading=f"{first} minus {second}, the same {resampled} resampled for both")


def interval_text(score: Mapping[str, float], sign: str = "") -> str:
    """Returns the interval of a score as text. sign: "+" for an explicit sign of positive numbers."""
    return f"{score['low']:{sign}.4f} to {score['high']:{sign}.4f}"


def is_significant(difference: Mapping[str, float]) -> bool:
    """Whether the interval of a difference excludes 0."""
    return difference["low"] > 0 or difference["high"] < 0


EVALUATION, PROBES = "evaluation.json", "probe.json"
"""The file that marks the folder of report=, and of the output= of `lmtool probe`."""


def write_evaluation(folder: Path, details: JsonMapping) -> None:
    """Writes evaluation.json and plots/SPLIT_*.png to a folder. Raises UserError if that fails."""
    with _output_folder(folder, "report"):
        replace_text(folder / EVALUATION, to_json(masked_data(dict(details))) + "\n")
        for split, evaluation in details["splits"].items():
            _draw(folder / "plots", split, evaluation)


# `lmtool evaluate RUN@*`: scores over the text seen.

_CURVE_METRICS = 4


def print_curve(output: Output, run: str, task: str | None, points: Sequence[JsonMapping]) -> None:
    """Prints a row for each checkpoint of a learning curve.

    task: the task that the checkpoints were scored on; None for the text or the task of the run. points: for each
    checkpoint its `checkpoint` (the names of its amounts), `step`, `tokens`, `words` and `passes` (None if unknown),
    `metrics`, and the `intervals` of some of them.
    """
    names = _curve_metrics(points)[:_CURVE_METRICS]
    intervals = [name for name in names if all(_has_interval(point, name) for point in points)]
    amounts = ["tokens", *(["words"] if all(point["words"] is not None for point in points) else [])]
    header = ["checkpoint", "step", *amounts, "passes"]
    for name in names:
        header += [name, *(["95% interval"] if name in intervals else [])]
    rows = []
    for point in points:
        row: list[object] = [point["checkpoint"], f"{point['step']:,}", *(f"{point[name]:,}" for name in amounts)]
        row.append(f"{point['passes']:.2f}")
        for name in names:
            row.append(f"{point['metrics'][name]:.4f}")
            row += [interval_text(point["intervals"][name])] if name in intervals else []
        rows.append(row)
    title = " · ".join(filter(None, (f"{run}@*", task)))
    print_table(output, header, rows, heading=f"{title} · {counted(len(points), 'checkpoint')}")


def _curve_metrics(points: Sequence[JsonMapping]) -> list[str]:
    names = [name for name in points[0]["metrics"] if all(name in point["metrics"] for point in points)]
    return sorted(names, key=lambda name: name != "bits_per_byte")


def _has_interval(point: JsonMapping, name: str) -> bool:
    interval = point["intervals"].get(name)
    return interval is not None and math.isfinite(interval["low"]) and math.isfinite(interval["high"])


def write_curve(folder: Path, run: str, task: str | None, points: Sequence[JsonMapping]) -> None:
    """Writes evaluation.json, curve.csv and plots/curve.png to a folder, see `print_curve`. Raises UserError if that
    fails."""
    # Imported late: matplotlib takes most of a second.
    from lmtool.reporting import drawing, plots

    names = _curve_metrics(points)
    unit = "words" if all(str(point["checkpoint"]).endswith("w") for point in points) else "tokens"
    rows = []
    for point in points:
        row = {name: point[name] for name in ("checkpoint", "step", "tokens", "words", "passes")}
        for name in names:
            row[name] = point["metrics"][name]
            if _has_interval(point, name):
                row |= {f"{name}_{end}": point["intervals"][name][end] for end in ("low", "high")}
        rows.append(row)
    intervals = [point["intervals"][names[0]] if _has_interval(point, names[0]) else None for point in points]
    values = [float(point["metrics"][names[0]]) for point in points]
    figure = plots.text_seen_figure(names[0], unit, [point[unit] for point in points], values, intervals)
    with _output_folder(folder, "report"):
        details = {"checkpoint": f"{run}@*", "task": task, "points": list(points)}
        replace_text(folder / EVALUATION, to_json(masked_data(details)) + "\n")
        write_delimited(folder / "curve.csv", rows, ",", named_by_user=False)
        drawing.write_png(figure, real_folder(folder / "plots") / "curve.png")


@contextmanager
def _output_folder(folder: Path, key: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{key}={folder} cannot be written: {error.strerror}", f"set another {key}=") from error


def _draw(folder: Path, split: str, evaluation: JsonMapping) -> None:
    # Imported late: matplotlib takes most of a second.
    from lmtool.reporting import drawing, heat_maps, plots

    if "confusion" in evaluation:
        labels = evaluation["labels"]
        pairs = {
            (gold, predicted): count
            for gold, row in zip(labels, evaluation["confusion"], strict=True)
            for predicted, count in zip(labels, row, strict=True)
        }
        figure = heat_maps.confusion_figure(*heat_maps.most_confused(pairs))
        drawing.write_png(figure, real_folder(folder) / f"{split}_confusion.png")
    if "bins" in evaluation:
        figure = plots.calibration_figure(evaluation["bins"])
        drawing.write_png(figure, real_folder(folder) / f"{split}_calibration.png")


# `lmtool evaluate shots=`: scores over several samples of demonstrations, and a constant baseline.

_PROMPT_LINES, _LINE_CHARACTERS = 12, 100


def print_few_shot(output: Output, title: str, shots: int, summary: JsonMapping, prompt: str) -> None:
    """Prints the scores of one split. title: the checkpoint, the task and the split. shots: number of demonstrations.
    summary: `n`, `metrics`, `baseline`, `questions`, `cut`, `kept` and `warnings` from `lmtool.session.evaluation`.
    prompt: the first prompt; its last lines are printed."""
    metrics, baseline = summary["metrics"], summary["baseline"]
    sample_count = len(next(iter(metrics.values()))["draws"])
    rows = []
    for name, score in metrics.items():
        deviation = "" if score["standard_deviation"] is None else f"{score['standard_deviation']:.4f}"
        draws = " ".join(f"{value:.4f}" for value in score["draws"])
        rows.append([name, f"{score['mean']:.4f}", deviation, draws, f"{baseline['metrics'][name]:.4f}"])
    samples = counted(sample_count, "draw")
    heading = f"{title} · {counted(shots, 'shot')} · n = {summary['n']:,} · {samples}"
    print_table(output, ["metric", "mean", "standard deviation", "draws", str(baseline["name"])], rows, heading=heading)
    lines = prompt.split("\n")
    output.line("the first prompt ends:" if len(lines) > _PROMPT_LINES else "the first prompt:")
    for line in lines[-_PROMPT_LINES:]:
        output.line(f"  {plain(line, _LINE_CHARACTERS)}", "dim")
    if summary["cut"]:
        output.warn(
            f"{summary['cut']:,} of {summary['questions']:,} prompts are too long for {shots} demonstrations; "
            f"the first ones were left out, and {summary['kept']:.1f} remain on average; raise max_length="
        )
    for warning in summary["warnings"]:
        output.warn(plain(warning, 2 * _LINE_CHARACTERS))


# `lmtool probe`: accuracy by layer, with random weights and the most frequent class as baselines.

_HEADER = ["layer", "trained", "random weights"]


def print_probes(output: Output, target: str, probes: CheckpointProbes) -> None:
    """Prints the table of one checkpoint."""
    heading, rows = _probe_table(target, probes)
    print_table(output, _HEADER, rows, heading)


def _probe_table(target: str, probes: CheckpointProbes) -> tuple[str, list[list[str]]]:
    def text(score: Accuracy) -> str:
        # An error of 0 means that all predictions are right, or all wrong; it says nothing about other texts.
        error = score["standard_error"]
        return f"{score['accuracy']:.4f}" + (f" ± {error:.4f}" if math.isfinite(error) and error else "")

    # The error is unknown if all targets are in one text.
    measure = (
        "accuracy ± standard error"
        if math.isfinite(probes["majority"]["standard_error"])
        else "accuracy, without a standard error because the test set is a single text"
    )
    heading = (
        f"{probes['checkpoint']} · {target} · {measure} · n = {probes['n']:,}, "
        f"{probes['classes']:,} classes, trained on {probes['examples']:,}"
    )
    rows = [[_layer_name(row["layer"]), text(row["trained"]), text(row["random"])] for row in probes["layers"]]
    return heading, [*rows, ["majority", text(probes["majority"]), ""]]


def write_probes(folder: Path, target: str, checkpoints: Sequence[CheckpointProbes], settings: JsonMapping) -> None:
    """Writes probe.json, probe.png and probe.html to a folder. Raises UserError if that fails. settings: the settings
    of the probes."""
    # Imported late: matplotlib takes most of a second.
    from lmtool.reporting import plots

    figure = plots.layers_figure(target, checkpoints)
    tables = [(heading, _HEADER, rows) for heading, rows in (_probe_table(target, probes) for probes in checkpoints)]
    _write_page(folder, target, figure, tables, {"target": target, **settings, "checkpoints": list(checkpoints)})


def _write_page(
    folder: Path, title: str, figure: Figure, tables: Sequence[_Table], details: JsonMapping, notes: str = ""
) -> None:
    """tables: the heading, header and rows of each. details: the content of probe.json."""
    from lmtool.reporting import drawing

    with _output_folder(folder, "output"):
        replace_text(folder / PROBES, to_json(masked_data(dict(details))) + "\n")
        drawing.write_png(figure, folder / "probe.png")
        page = {"target": title, "drawing": drawing.svg(figure), "tables": tables, "notes": notes}
        html.write_page(folder / "probe.html", "probes.html", "probes", **page)


# `lmtool probe target=evolution`: information and similarity by layer.

_INFORMATION_HEADER = ["layer", "input token", "shuffled", "predicted token", "shuffled", "layer before", "shuffled"]
_PREDICTED = {"next": "the next token", "masked": "masked tokens"}


def print_evolution(output: Output, results: EvolutionResults) -> None:
    """Prints a table for each checkpoint, and one for each pair of checkpoints."""
    for heading, header, rows in _evolution_tables(results):
        print_table(output, header, rows, heading)
    output.line(_evolution_notes(results))


def _evolution_tables(results: EvolutionResults) -> list[_Table]:
    tables = list[_Table]()
    for measured in results["checkpoints"]:
        rows = [
            [
                _layer_name(row["layer"]),
                *(cell for name in ("input", "predicted", "before") for cell in _estimate_cells(row[name])),
            ]
            for row in measured["layers"]
        ]
        predicts = measured["predicts"]
        heading = f"{measured['checkpoint']} · information in nats, similarity 0 to 1 · n = {measured['n']:,}"
        heading += f" · input tokens have {measured['entropy']:.3f} nats"
        if predicts is not None:
            heading += f", {_PREDICTED[predicts]} {measured['predicted_entropy']:.3f} (n = {measured['predicted_n']:,})"
        tables.append((heading, _INFORMATION_HEADER, rows))
    for pair in results["pairs"]:
        rows = [[_layer_name(row["layer"]), *_estimate_cells(row["similarity"])] for row in pair["layers"]]
        tables.append(
            (f"{pair['first']} and {pair['second']} at the same layer", ["layer", "similarity", "shuffled"], rows)
        )
    return tables


def _layer_name(layer: int) -> str:
    return str(layer or "0 (embedding)")


def _estimate_cells(estimate: Mapping[str, float] | None) -> tuple[str, str]:
    if estimate is None:
        return "", ""
    known = math.isfinite(estimate["low"])
    limits = f" ({estimate['low']:.3f} to {estimate['high']:.3f})" if known else ""
    return f"{estimate['value']:.3f}{limits}", f"{estimate['shuffled']:.3f}, up to {estimate['shuffled_high']:.3f}"


def _evolution_notes(results: EvolutionResults) -> str:
    notes = (
        f"Information: of the token and the cluster of its state ({results['clusters']:,} clusters by k-means, the "
        f"{results['types']:,} most frequent types). Counting biases it upwards: what shuffled tokens have is no "
        "information. Similarity: projection-weighted CCA of the directions with 99% of the variance, at unmasked "
        f"tokens. 95% intervals: jackknife over {counted(results['texts'], 'text')}."
    )
    if any(measured["predicts"] is None for measured in results["checkpoints"]):
        notes += " A model without a masked or next token to predict has no information on one."
    return notes


def write_evolution(folder: Path, results: EvolutionResults, settings: JsonMapping) -> None:
    """Writes probe.json, probe.png and probe.html to a folder. Raises UserError if that fails."""
    from lmtool.reporting import plots

    details = {"target": "evolution", **settings, **results}
    figure = plots.evolution_figure(results)
    _write_page(folder, "evolution of layers", figure, _evolution_tables(results), details, _evolution_notes(results))
