"""`lmtool report SWEEP fit=scaling`: the scaling law of a sweep of language models, the best size for each budget of
FLOPs, and the loss of a further run, predicted before it is made and scored afterwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.learners.metrics.scaling import CONSTANTS, Parabola, ScalingLaw, fit_law, fit_parabola
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.run_files import RunFiles, as_object, read_run
from lmtool.reporting.sweep_files import DONE_JOB, read_sweep
from lmtool.reporting.text import flops, is_number, lower_is_better, number
from lmtool.runs.files import replace_text, to_json
from lmtool.runs.finding import run_folder
from lmtool.system.terminal import counted

WITH, WITHOUT = "with embeddings", "without embeddings"
"""How parameters are counted: all parameters of the model; or those of the backbone without its token embedding."""
_MIN_SIZES = 3
_NEEDED = "sweep model.hidden_size=64,96,128,192 and max_flops=1e12,3e12,1e13, for example"


@dataclass(frozen=True)
class ScaledRun:
    """A finished run. parameters: N by the way of counting. tokens: D. budget: max_flops if it ended the run."""

    name: str
    parameters: dict[str, float]
    tokens: float
    loss: float
    budget: float | None
    identity: tuple[object, ...]


def scaled_run(folder: Path) -> ScaledRun:
    """Reads a run. Raises UserError if it has no loss, parameters or tokens."""
    run = read_run(folder)
    result, metric = run.result, str(run.result.get("metric"))
    values = [value for name in ("parameters", "tokens", "value") if is_number(value := result.get(name))]
    if len(values) < 3 or not all(math.isfinite(value) and value > 0 for value in values):
        raise UserError(f"{folder} has no finite parameters, tokens and loss", "name a finished pretraining run")
    if not result.get("objective") or not lower_is_better(metric):
        raise UserError(f"{folder} has no loss of a language model, but {metric}", "name a finished pretraining run")
    parameters, tokens, loss = (float(value) for value in values)
    counts = {WITH: parameters}
    blocks = as_object(run.section("model").get("blocks"))
    if blocks:
        counts[WITHOUT] = float(sum(blocks.values()) - blocks.get("embeddings", 0))
    budget = run.keys.get("max_flops") if result.get("ended") == "max_flops" else None
    return ScaledRun(run.name, counts, tokens, loss, None if budget is None else float(budget), _identity(run, metric))


def _identity(run: RunFiles, metric: str) -> tuple[object, ...]:
    text = run.section("data").get("fingerprint")
    return run.result.get("objective"), metric, text, run.section("model").get("vocabulary")


_IDENTITY = ("objective", "metric", "text", "vocabulary")


def report_scaling(output: Output, sweep: Path, predict: str | None) -> None:
    """Fits the scaling law of a sweep, prints it, and writes scaling.json and plots/scaling.png. predict: a finished
    run whose loss is predicted from the other runs and scored, or PARAMETERS,TOKENS; None to predict nothing. Raises
    UserError if there are fewer runs than the law needs, or runs with losses of other data or vocabulary."""
    jobs = [job for job in read_sweep(sweep).jobs if job.status == DONE_JOB]
    sizes, further = _further(predict)
    runs = [scaled_run(job.folder) for job in jobs if further is None or job.folder.resolve() != further[0]]
    _require_fit(sweep, [*runs, *([further[1]] if further is not None else [])], len(runs))
    ways = [way for way in (WITH, WITHOUT) if all(way in run.parameters for run in runs)]
    laws = {way: fit_law(*_columns(runs, way)) for way in ways}
    parabolas = {way: _parabolas(runs, way) for way in ways}
    notes = _notes(runs, parabolas, ways)
    details: JsonObject = {"runs": len(runs), "notes": notes, "laws": {}, "budgets": {}, "predictions": []}
    for way, law in laws.items():
        details["laws"][way] = {
            name: {"value": law.constants[name], **law.intervals[name]._asdict()} for name in CONSTANTS
        }
        rows = [[name, number(law.constants[name]), _between(*law.intervals[name])] for name in CONSTANTS]
        heading = f"L(N, D) = E + A / N^alpha + B / D^beta · N {way} · n = {counted(len(runs), 'run')}"
        print_table(output, ["constant", "value", "95% interval"], rows, heading)
        details["budgets"][way] = [_plain(budget, parabola) for budget, parabola in parabolas[way].items()]
        found = [[flops(budget), *_cells(parabola)] for budget, parabola in parabolas[way].items()]
        if found:
            print_table(output, ["budget", "best N", "its D", "loss"], found, f"best size for each budget · N {way}")
    for way, law in laws.items():
        if sizes is None and (further is None or way not in further[1].parameters):
            continue
        parameters = sizes[0] if sizes is not None else further[1].parameters[way]  # type: ignore[index]
        tokens = sizes[1] if sizes is not None else further[1].tokens  # type: ignore[index]
        if sizes is not None and way == WITHOUT:
            continue  # the typed number counts all parameters
        actual = None if further is None else further[1].loss
        prediction = _prediction(law, way, parameters, tokens, actual)
        details["predictions"].append(prediction)
        output.line(_prediction_text(prediction), "bold")
    for note in notes:
        output.line(note)
    for path in _write(sweep, runs, laws, parabolas, details):
        output.line(str(path))


def _further(predict: str | None) -> tuple[tuple[float, float] | None, tuple[Path, ScaledRun] | None]:
    if predict is None:
        return None, None
    first, comma, second = predict.partition(",")
    if not comma:
        folder = run_folder(predict)
        return None, (folder.resolve(), scaled_run(folder))
    try:
        parameters, tokens = float(first), float(second)
    except ValueError:
        parameters = tokens = 0.0
    if not (0 < parameters < math.inf and 0 < tokens < math.inf):
        raise UserError(f"predict={predict} is not PARAMETERS,TOKENS", "write predict=2e6,4e7, or name a finished run")
    return (parameters, tokens), None


def _require_fit(sweep: Path, all_runs: Sequence[ScaledRun], fitted: int) -> None:
    if fitted <= len(CONSTANTS):
        raise UserError(
            f"{sweep} has {counted(fitted, 'finished run')} to fit, but the law has {len(CONSTANTS)} constants", _NEEDED
        )
    common = Counter(run.identity for run in all_runs).most_common(1)[0][0]
    for run in all_runs:
        for name, value, expected in zip(_IDENTITY, run.identity, common, strict=True):
            if value != expected:
                raise UserError(
                    f"{run.name} has another {name} than the other runs: their losses are not on one curve",
                    "separate such runs into sweeps of their own",
                )
    for name, count in (
        ("model sizes", len({run.parameters[WITH] for run in all_runs[:fitted]})),
        ("numbers of tokens", len({run.tokens for run in all_runs[:fitted]})),
    ):
        if count < _MIN_SIZES:
            raise UserError(f"{sweep} has {count} {name}, and the law needs at least {_MIN_SIZES}", _NEEDED)


def _columns(runs: Sequence[ScaledRun], way: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parameters = np.array([run.parameters[way] for run in runs])
    return parameters, np.array([run.tokens for run in runs]), np.array([run.loss for run in runs])


def _parabolas(runs: Sequence[ScaledRun], way: str) -> dict[float, Parabola]:
    parabolas = {}
    for budget in sorted({run.budget for run in runs if run.budget is not None}):
        same = [run for run in runs if run.budget == budget]
        if len({run.parameters[way] for run in same}) >= _MIN_SIZES:
            parabolas[budget] = fit_parabola(*_columns(same, way))
    return parabolas


def _notes(
    runs: Sequence[ScaledRun], parabolas: Mapping[str, Mapping[float, Parabola]], ways: Sequence[str]
) -> list[str]:
    notes = []
    unbudgeted = sum(run.budget is None for run in runs)
    if unbudgeted:
        notes.append(
            f"{counted(unbudgeted, 'run')} did not end with max_flops: no part of the comparison at equal FLOPs."
        )
    budgets = {run.budget for run in runs if run.budget is not None}
    few = len(budgets - set(parabolas[WITH]))
    if few:
        notes.append(f"{counted(few, 'budget')} without {_MIN_SIZES} sizes: no parabola.")
    for way in ways:
        without = [budget for budget, parabola in parabolas[way].items() if parabola.best is None]
        if without:
            named = ", ".join(map(flops, without))
            notes.append(
                f"No best size {way} for {named}: the loss has no minimum between the smallest and the largest model. "
                "Add smaller or larger models."
            )
        exponent = _exponent(parabolas[way])
        if exponent is not None:
            notes.append(f"The best N {way} grows with FLOPs to the power {exponent:.2f} (no interval).")
    if WITHOUT not in ways:
        notes.append("N without embeddings is unknown: facts.json of a run of an earlier version has no blocks.")
    return notes


def _exponent(parabolas: Mapping[float, Parabola]) -> float | None:
    """Returns the slope of log best N over log FLOPs; None for fewer than two budgets with a minimum."""
    found = [(budget, parabola.best) for budget, parabola in parabolas.items() if parabola.best is not None]
    if len(found) < 2:
        return None
    logs = np.log(np.array(found, dtype=np.float64))
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def _between(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}"


def _cells(parabola: Parabola) -> list[str]:
    if parabola.best is None:
        return ["no minimum inside", "", ""]
    return [number(parabola.best), number(parabola.tokens), number(parabola.loss)]


def _plain(budget: float, parabola: Parabola) -> JsonObject:
    found = {"parameters": parabola.best, "tokens": parabola.tokens, "loss": parabola.loss}
    return {"flops": budget, "coefficients": list(parabola.coefficients), "best": found if parabola.best else None}


def _prediction(law: ScalingLaw, way: str, parameters: float, tokens: float, actual: float | None) -> JsonObject:
    low, high = law.prediction(parameters, tokens)
    inside = None if actual is None else low <= actual <= high
    predicted = {"way": way, "parameters": parameters, "tokens": tokens, "loss": law.loss(parameters, tokens)}
    return {**predicted, "low": low, "high": high, "actual": actual, "inside": inside}


def _prediction_text(prediction: Mapping[str, Any]) -> str:
    text = (
        f"prediction for N = {number(prediction['parameters'])} {prediction['way']}, "
        f"D = {number(prediction['tokens'])}: "
        f"loss {number(prediction['loss'])}, 95% interval {_between(prediction['low'], prediction['high'])}"
    )
    if prediction["actual"] is None:
        return text
    side = "inside" if prediction["inside"] else "outside"
    return f"{text}; the run has {number(prediction['actual'])}, {side} the interval"


def _write(
    sweep: Path,
    runs: Sequence[ScaledRun],
    laws: Mapping[str, ScalingLaw],
    parabolas: Mapping[str, Mapping[float, Parabola]],
    details: JsonObject,
) -> list[Path]:
    # Imported late: matplotlib takes most of a second.
    from lmtool.reporting import drawing, plots

    way = next(iter(laws))
    parameters, tokens, losses = _columns(runs, way)
    predicted = np.array([laws[way].loss(n, d) for n, d in zip(parameters, tokens, strict=True)])
    curves = [
        (
            flops(budget),
            [(run.parameters[way], run.loss) for run in runs if run.budget == budget],
            parabola.coefficients,
        )
        for budget, parabola in parabolas[way].items()
    ]
    figure = plots.scaling_figure(f"N {way}", curves, predicted, losses)
    with html.report_write_errors(sweep):
        replace_text(sweep / "scaling.json", to_json(details) + "\n")
        return [sweep / "scaling.json", *drawing.write_figures({"scaling": figure}, sweep / "plots")]
