"""Reads a run folder as plain data. A missing or damaged file is reported in `RunFiles.problems`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypedDict, cast

import yaml

from lmtool.config import saved
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.runs.files import SCORED_ROWS, bounded_lines, rows_digest
from lmtool.runs.finding import no_run
from lmtool.system.terminal import counted

MISSING_RESULT = "result.json is missing."
"""The problem of a run without a result."""
MAX_FILE_BYTES = 100_000_000
"""Maximum size in bytes of a file that is read at once."""


class Baseline(TypedDict, total=False):
    """The score of a constant prediction, as in facts.json. value: None if unknown. members: the baselines of the
    members of a mixture."""

    name: str
    metric: str
    value: float | None
    members: dict[str, Baseline]


Accuracy: TypeAlias = Mapping[str, float]
"""`accuracy` and `standard_error`."""


class LayerProbes(TypedDict):
    """Probes on one layer; 0 is the embedding."""

    layer: int
    trained: Accuracy
    random: Accuracy


class CheckpointProbes(TypedDict):
    """A checkpoint in probe.json. majority: accuracy of the most frequent class. examples, n: numbers of training and
    held-out positions."""

    checkpoint: str
    model: str
    layers: list[LayerProbes]
    majority: Accuracy
    classes: int
    examples: int
    n: int


class CheckpointEvolution(TypedDict):
    """A checkpoint in probe.json with target=evolution. predicts: next, masked or None. entropy, predicted_entropy: of
    the tokens, in nats. n, predicted_n: numbers of positions. layers: `layer`, and the estimates `input`, `predicted`
    and `before` (value, low, high, shuffled, shuffled_high) or None."""

    checkpoint: str
    model: str
    predicts: str | None
    entropy: float
    predicted_entropy: float | None
    n: int
    predicted_n: int
    layers: list[JsonObject]


class PairSimilarity(TypedDict):
    """The similarity of two checkpoints. layers: `layer`, and the estimate `similarity`."""

    first: str
    second: str
    layers: list[JsonObject]


class EvolutionResults(TypedDict):
    """The results of target=evolution in probe.json. texts: the number of windows of text."""

    types: int
    clusters: int
    texts: int
    checkpoints: list[CheckpointEvolution]
    pairs: list[PairSimilarity]


@dataclass
class RunFiles:
    """The contents of a run's files, unchecked: any value may be damaged.

    config: config.yaml. result: result.json. metadata: facts.json. environment: environment.json. samples:
    samples.json. train, validation: rows of metrics.jsonl by split. problems: sentences about files that could not be
    read.
    """

    run_dir: Path
    config: str = ""
    result: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)
    environment: JsonObject = field(default_factory=dict)
    samples: list[object] = field(default_factory=list)
    train: list[JsonObject] = field(default_factory=list)
    validation: list[JsonObject] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def baseline(self) -> Baseline:
        """The baseline in facts.json, or {}."""
        return cast(Baseline, self.section("baseline"))

    @property
    def keys(self) -> JsonObject:
        """The keys of config.yaml, or {}."""
        with suppress(yaml.YAMLError):
            return as_object(saved.load(self.config))
        return {}

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plugins that the run was started with."""
        plugins = self.keys.get("plugins")
        return tuple(map(str, plugins)) if isinstance(plugins, list) else ()

    def section(self, name: str) -> JsonObject:
        """Returns a section of facts.json, or {}."""
        return as_object(self.metadata.get(name))


def as_object(value: object) -> JsonObject:
    """Returns the value if it is a JSON object, otherwise {}."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[JsonObject]:
    """Returns the value if it is a list of JSON objects, otherwise []."""
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else []


def is_run(folder: Path) -> bool:
    """Whether a folder has a file that training writes."""
    return any((folder / name).is_file() for name in ("config.yaml", "result.json", "metrics.jsonl"))


def read_run(run_dir: str | Path) -> RunFiles:
    """Reads a run folder. Raises UserError if it is not a run."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise no_run(folder)
    run = RunFiles(folder)
    if not is_run(folder):
        raise UserError(
            f"{folder} is not a run: no config.yaml, result.json or metrics.jsonl",
            "name a folder written by a training command, such as runs/latest",
        )
    run.config = _read_text(run, "config.yaml")
    run.result = read_result(run)
    run.metadata = read_object(run, "facts.json", required=False)
    run.environment = read_object(run, "environment.json", required=False)
    samples = _read_json(run, "samples.json", required=False)
    if isinstance(samples, list):
        run.samples = samples
    elif samples is not None:
        run.problems.append("samples.json is not a list; its examples are left out.")
    _add_metrics(run)
    first = min((row["step"] for row in run.train), default=1)
    if first > 1:  # the first step is always logged
        run.problems.append(f"metrics.jsonl has no rows of training before step {first}: curves begin there.")
    return run


def read_curves(run_dir: Path, result: JsonObject) -> RunFiles:
    """Reads metrics.jsonl alone; there are no rows if the folder has none. result: result.json, or {}."""
    run = RunFiles(run_dir, result=result)
    _add_metrics(run)
    return run


def _add_metrics(run: RunFiles) -> None:
    for row in _metrics(run):
        (run.validation if row.get("split") == "validation" else run.train).append(row)


def _read_text(run: RunFiles, name: str, required: bool = True) -> str:
    path = run.run_dir / name
    if not path.is_file():
        if required:
            run.problems.append(f"{name} is missing.")
        return ""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            run.problems.append(f"{name} has more than {MAX_FILE_BYTES} bytes and is left out.")
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as failure:
        run.problems.append(f"{name} cannot be read ({failure.strerror}).")
        return ""


def _read_json(run: RunFiles, name: str, required: bool = True) -> object:
    text = _read_text(run, name, required)
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        run.problems.append(f"{name} is not valid JSON ({failure}).")
        return None


def read_object(run: RunFiles, name: str, required: bool = True) -> JsonObject:
    """Returns a JSON object in the run's folder, or {}; errors are added to `run.problems`."""
    value = _read_json(run, name, required)
    if value is not None and not isinstance(value, dict):
        run.problems.append(f"{name} is not a JSON object.")
    return as_object(value)


def read_result(run: RunFiles, required: bool = True) -> JsonObject:
    """Returns result.json, and adds a problem to the run if it is damaged, or if it is missing and required."""
    return with_own_errors(read_object(run, "result.json", required))


def with_own_errors(result: JsonObject) -> JsonObject:
    """Returns result.json with the standard error of the score as `standard_error`, and that of its gain over the
    baseline as `gain_standard_error`.

    Older results have only the former key, with the error of the gain if all terms of the loss have a baseline. The
    error of the score is then that of the term with the same loss; without such a term it is unknown.
    """
    metrics, metric = as_object(result.get("metrics")), result.get("metric")
    terms = [key.removesuffix("_count") for key in metrics if key.endswith("_count")]
    terms = [term for term in terms if metric in ("loss", f"{term}_loss")]
    if "gain_standard_error" in result or "standard_error" not in result or not terms:
        return result
    if any(f"{term}_gain_standard_error" not in metrics for term in terms):
        return result

    def separated(values: JsonObject, loss: object) -> JsonObject:
        others = {name: value for name, value in values.items() if name != "standard_error"}
        errors = (metrics.get(f"{term}_standard_error") for term in terms if metrics.get(f"{term}_loss") == loss)
        error = next(errors, None)
        return {
            **others,
            **({} if error is None else {"standard_error": error}),
            **({"gain_standard_error": values["standard_error"]} if "standard_error" in values else {}),
        }

    separate = separated({**result, "metrics": separated(metrics, metrics.get("loss"))}, result.get("value"))
    if models := as_objects(as_object(result.get("distillation")).get("models")):
        kept = [{name: value for name, value in model.items() if name != "standard_error"} for model in models]
        separate["distillation"] = {**result["distillation"], "models": kept}
    return separate


def _metrics(run: RunFiles) -> Iterator[JsonObject]:
    """Yields the rows of metrics.jsonl that have a step. An incomplete last line, left by a kill, is not reported."""
    for number, line in enumerate(_lines(run, "metrics.jsonl"), start=1):
        row = _row(line)
        if row is not None and isinstance(row.get("step"), int):
            yield row
        elif line.strip() and line.endswith(b"\n"):
            run.problems.append(f"metrics.jsonl:{number} is not a row with a step; it is left out.")


def _lines(run: RunFiles, name: str) -> Iterator[bytes]:
    if not (run.run_dir / name).is_file():
        return
    try:
        yield from bounded_lines(run.run_dir / name)
    except OSError as failure:
        run.problems.append(f"{name} cannot be read ({failure.strerror}).")
    except UserError as failure:
        run.problems.append(f"{failure.message}.")


def _row(line: bytes) -> JsonObject | None:
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_predictions(run: RunFiles) -> Iterator[JsonObject]:
    """Yields the rows of predictions.jsonl that have a gold label and a prediction."""
    broken_lines = 0
    for line in _lines(run, "predictions.jsonl"):
        row = _row(line)
        if row is None:
            broken_lines += 1
        elif row.get("gold") is not None and row.get("prediction") is not None:
            yield row
    if broken_lines:
        run.problems.append(f"predictions.jsonl: left out {counted(broken_lines, 'line')} without a JSON object.")


def first_split(run: RunFiles) -> Iterator[JsonObject]:
    """Yields the rows of `read_predictions` in the first split, which gives the run's score."""
    split = None
    for number, row in enumerate(read_predictions(run)):
        split = row.get("split") if number == 0 else split
        if row.get("split") == split:
            yield row


def scored_rows(run: RunFiles) -> str | None:
    """Returns the digest of the rows that gave the run's score, which result.json records. For a run of an older
    version, the digest of the texts and labels in predictions.jsonl; None if it has no texts."""
    recorded = run.result.get(SCORED_ROWS)
    if isinstance(recorded, str):
        return recorded
    rows = []
    for row in first_split(RunFiles(run.run_dir)):
        texts = [row[key] for key in takewhile(lambda key: key != "gold", row) if key not in ("task", "id", "split")]
        if not texts:
            return None
        rows.append([texts, row["gold"]])
    return rows_digest(rows)


class Series(NamedTuple):
    """Values over steps."""

    steps: list[int]
    values: list[float]


def series(rows: list[JsonObject], key: str) -> Series:
    """Returns the steps and finite values of one key of the rows."""
    points = [
        (row["step"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
    ]
    return Series([step for step, _ in points], [value for _, value in points])


def loss_terms(run: RunFiles) -> list[str]:
    """Returns the keys of the training loss's terms."""
    return list(dict.fromkeys(key for row in run.train for key in row if key.startswith("loss_")))


def comparable_loss(run: RunFiles) -> str:
    """Returns the key of the training loss that is comparable with the `loss` of held-out data.

    It is `loss` if held-out data is scored on all terms or on none. If held-out data is scored on a single one of
    several terms (the others are auxiliary, or of a teacher), it is the key of this term; otherwise "".
    """
    terms = [key.removeprefix("loss_") for key in loss_terms(run)]
    validated_terms = [term for term in terms if series(run.validation, f"{term}_loss").steps]
    if not validated_terms and run.result.get("task") in terms:
        validated_terms = [str(run.result["task"])]
    if len(terms) < 2 or not validated_terms or len(validated_terms) == len(terms):
        return "loss"
    return f"loss_{validated_terms[0]}" if len(validated_terms) == 1 else ""


def phase_starts(run: RunFiles) -> list[int]:
    """Returns the first step of each phase but the first one; without a result, from the rows of metrics.jsonl."""
    if phases := as_objects(run.result.get("phases")):
        starts = [phase.get("first_step") for phase in phases[1:]]
        return [step for step in starts if isinstance(step, int)]
    steps, phase_numbers = series(run.train, "phase")
    changes = zip(steps[1:], phase_numbers, phase_numbers[1:], strict=False)
    return [step for step, before, phase in changes if phase != before]


UNDISTILLED = "student without a teacher"
# Configuration keys in which the run of the same student without a teacher may differ.
_IGNORED_KEYS = ("distill", "name", "run_dir", "checkpoint_every")


def models_of(run: RunFiles) -> list[JsonObject]:
    """Returns the models of a distilled run in result.json (`name`, `score`, `parameters`, ...), and the same student
    without a teacher if a run in the same folder trained it."""
    models = as_objects(as_object(run.result.get("distillation")).get("models"))
    undistilled = _undistilled_run(run) if models else None
    if undistilled is None:
        return models
    student = next((model for model in models if model.get("name") == "student"), {})
    sizes = {key: student.get(key) for key in ("parameters", "weight_bytes", "tokens_per_second")}
    scores = {"score": undistilled.result.get("value"), "standard_error": undistilled.result.get("standard_error")}
    return [*models, {**sizes, "name": UNDISTILLED, "run": undistilled.run_dir.name, **scores}]


def _undistilled_run(run: RunFiles) -> RunFiles | None:
    config = _config_without_distillation(run.run_dir)
    if config is None:
        return None
    keys = ("command", "model", "task", "objective", "seed", "metric")
    for path in sorted(run.run_dir.resolve().parent.glob("*/result.json")):
        if path.parent == run.run_dir.resolve() or path.parent.is_symlink():  # runs/latest
            continue
        try:
            result = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            continue
        # Compare results first: reading the configurations of many runs is slow.
        if not isinstance(result, dict) or result.get("status") != "done" or "distillation" in result:
            continue
        if any(result.get(key) != run.result.get(key) for key in keys):
            continue
        if _config_without_distillation(path.parent) == config:
            return read_run(path.parent)
    return None


def _config_without_distillation(folder: Path) -> JsonMapping | None:
    try:
        config = saved.read_yaml(folder / "config.yaml")
    except (OSError, UserError):
        return None
    return (
        {key: value for key, value in config.items() if key not in _IGNORED_KEYS} if isinstance(config, dict) else None
    )
