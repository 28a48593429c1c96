"""What `lmtool evaluate` prints and writes of a task: scores with intervals, classes, calibration, the hardest rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtool.drafts import real_folder
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.reporting.text import number, plain, shortened
from lmtool.runs.files import replace_text, to_json
from lmtool.secrets import masked_data

_HARDEST, _CLASSES = 3, 40
# Characters of a label's name.
_NAME = 40


def print_evaluation(
    output: Output, title: str, split: str, evaluation: Mapping[str, Any], constant: Mapping[str, Any]
) -> None:
    """One split. evaluation: as `lmtool.tasks.analysis.analysis` gives it. constant: the baseline's `name` and
    `metrics`."""
    beside = constant.get("metrics", {})
    rows: list[list[Any]] = [["loss", f"{evaluation['loss']:.4f}", "", ""]]
    for name, score in evaluation["metrics"].items():
        known = f"{beside[name]:.4f}" if name in beside else ""
        rows.append([name, f"{score['value']:.4f}", between(score), known])
    if "calibration_error" in evaluation:
        rows.append(["calibration error", f"{evaluation['calibration_error']:.4f}", "", ""])
    headings = ["metric", "value", "95% interval", str(constant.get("name", ""))]
    print_table(output, headings, rows, heading=f"{title} · {split} · n = {evaluation['n']:,}")
    classes = evaluation.get("classes", {})
    if 0 < len(classes) <= _CLASSES:
        output.line()
        table = [
            [name, f"{of['precision']:.4f}", f"{of['recall']:.4f}", f"{of['f1']:.4f}", of["support"]]
            for name, of in zip(shortened(classes, _NAME), classes.values(), strict=True)
        ]
        print_table(output, ["class", "precision", "recall", "F1", "n"], table)
    elif classes:
        output.line(f"{len(classes)} classes: precision, recall and F1 of each with report=FOLDER")
    hardest = evaluation["hardest"][:_HARDEST]
    if hardest:
        output.line()
        output.line("hardest:")
    for row in hardest:
        text = " | ".join(plain(_joined(row[name]), 100) for name in row if name not in _NOT_TEXT)
        gold, prediction = shortened([_joined(row.get("gold")), _joined(row["prediction"])], _NAME)
        output.line(f"  loss {number(row['loss'])}  gold {gold}  predicted {prediction}  {text}")
    for warning in evaluation["warnings"]:
        output.line(f"warning: {split}: {warning}", "yellow")


_NOT_TEXT = (
    "id", "gold", "prediction", "score", "loss", "probabilities", "start", "end", "null_difference", "n_best",
)  # fmt: skip


def _joined(value: Any) -> Any:
    """A list as its items with spaces between them."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def print_difference(
    output: Output, first: str, second: str, scores: Mapping[str, float], gap: Mapping[str, Mapping[str, float]]
) -> None:
    """Two systems on the same rows. scores: the first's. gap: the first's less the second's, by metric."""
    rows = [
        [
            name, f"{scores[name]:.4f}", f"{scores[name] - of['value']:.4f}", f"{of['value']:+.4f}", between(of, "+"),
            "yes" if is_apart(of) else "no",
        ]
        for name, of in gap.items()
    ]  # fmt: skip
    output.line()
    headings = ["metric", "first", "second", "difference", "95% interval", "apart"]
    print_table(output, headings, rows, heading=f"{first} less {second}, the same rows resampled for both")


def between(score: Mapping[str, float], sign: str = "") -> str:
    """The interval of a score as text. sign: + to write it before positive numbers too."""
    return f"{score['low']:{sign}.4f} to {score['high']:{sign}.4f}"


def is_apart(gap: Mapping[str, float]) -> bool:
    """Whether the interval of a difference leaves out 0."""
    return gap["low"] > 0 or gap["high"] < 0


def write_evaluation(folder: Path, details: Mapping[str, Any]) -> None:
    """evaluation.json and plots/SPLIT_*.png in a folder. UserError where the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "evaluation.json", to_json(masked_data(dict(details))) + "\n")
        for split, evaluation in details["splits"].items():
            _draw(folder / "plots", split, evaluation)
    except OSError as error:
        raise UserError(f"report={folder}: {error.strerror}", "give another report=") from error


def _draw(folder: Path, split: str, evaluation: Mapping[str, Any]) -> None:
    # matplotlib takes most of a second to import, so a command that draws nothing does not.
    from lmtool.reporting import drawing, plots

    if "confusion" in evaluation:
        figure = plots.confusion_figure(*_commonest(evaluation["labels"], evaluation["confusion"]))
        drawing.write_png(figure, real_folder(folder) / f"{split}_confusion.png")
    if "bins" in evaluation:
        drawing.write_png(
            plots.calibration_figure(evaluation["bins"]), real_folder(folder) / f"{split}_calibration.png"
        )


def _commonest(labels: list[str], counts: list[list[int]], limit: int = 20) -> tuple[list[str], list[list[int]]]:
    """The confusion of the classes with the most gold rows, in their order."""
    order = sorted(range(len(labels)), key=lambda row: -sum(counts[row]))[:limit]
    kept = sorted(order)
    return [labels[row] for row in kept], [[counts[row][column] for column in kept] for row in kept]
