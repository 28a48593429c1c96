"""The start screen of a run (its plan) and the end screen (its result)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from lmtool import __version__
from lmtool.config.base import JsonMapping
from lmtool.reporting.console import Output
from lmtool.reporting.costs import RunPlan
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.scores import CONSTANT_SUFFIXES, score_of, selection_note, stop_reason, test_scores
from lmtool.reporting.text import count, duration, format_value, number, percent, plain, shorten, size, title
from lmtool.system.terminal import plural

# Labels that are listed with their counts; of more labels, only two are.
_MAX_LABELS = 20
_STYLES = {"better": "bold green", "worse": "bold red", "unclear": "bold yellow", "unknown": "bold"}


def metadata_text(metadata: Mapping[str, object]) -> str:
    """Returns metadata on one line: 'documents 1 234 · tokens 1.2 M'."""
    known = {key: value for key, value in metadata.items() if value is not None}
    return " · ".join(f"{title(key)} {format_value(key, value)}" for key, value in known.items())


def _sections(label: str, metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns a row for the plain metadata, and one for each nested section ('train', 'validation')."""
    flat = {key: value for key, value in metadata.items() if not isinstance(value, Mapping)}
    texts = [metadata_text(flat)] if flat else []
    for key, value in metadata.items():
        if isinstance(value, Mapping):
            texts.append(f"{title(key)}: {_label_counts(value) if key == 'labels' else metadata_text(value)}")
    return _rows_under_label(label, texts)


def _rows_under_label(label: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", text) for index, text in enumerate(texts)]


def _label_counts(metadata: Mapping[str, int]) -> str:
    """Returns the counts of labels; of many labels, only the rarest and the most frequent one."""
    counts = [f"{name} {count(rows)}" for name, rows in zip(shorten(metadata, 40), metadata.values(), strict=True)]
    if len(counts) <= _MAX_LABELS:
        return " · ".join(counts)
    order = sorted(range(len(counts)), key=list(metadata.values()).__getitem__)
    return f"{count(len(counts))}, from {counts[order[0]]} to {counts[order[-1]]}"


def _plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parts = " · ".join(f"{title(part)} {count(number)}" for part, number in plan.parameters.items())
    passes = f" = {format_value('', float(plan.epochs))} epochs" if plan.epochs is not None else ""
    time = "time unknown" if plan.seconds is None else plan.time_text
    return [
        ("params", f"{count(plan.total_parameters)} · {count(plan.trainable_parameters)} trainable · {parts}"),
        (
            "plan",
            f"{plan.steps_text} {plural(plan.steps, 'step')} × {count(round(plan.tokens_per_step))} tokens = "
            f"{count(round(plan.tokens))} tokens{passes} · {time} · memory about {size(plan.needed_bytes)} · "
            f"disk {size(plan.disk_bytes)}{f' in {plan.checkpoints:,} checkpoints' if plan.checkpoints > 3 else ''}",
        ),
        *([("ends", plan.ends_text)] if plan.ends_by else []),
        *((f"phase {number}", phase.text) for number, phase in enumerate(plan.phases, 1)),
        *(("", note) for note in plan.notes),
    ]


def parameter_rows(counts_by_role: Mapping[str, Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Returns (role, trainable, total) of each role with parameters, and the sum. counts_by_role: {"trainable",
    "total"}. The numbers are exact, for comparison with published ones."""
    present = {role: counts for role, counts in counts_by_role.items() if counts["total"]}
    rows = [(title(role), f"{counts['trainable']:,}", f"{counts['total']:,}") for role, counts in present.items()]
    trainable, total = (sum(counts[kind] for counts in present.values()) for kind in ("trainable", "total"))
    return [*rows, ("in all", f"{trainable:,}", f"{total:,}")]


def _parameter_text(counts_by_role: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Formats `parameter_rows` as aligned rows of a screen."""
    if not counts_by_role:
        return []
    rows = parameter_rows(counts_by_role)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    texts = (f"{role:{widths[0]}}  {trainable:>{widths[1]}} of {total:>{widths[2]}}" for role, trainable, total in rows)
    return _rows_under_label("learns", texts)


class RateRow(TypedDict):
    """The optimizer settings of a group of parameters, as in facts.json.

    group: "layer 12 to layer 7". learning_rate: the peak, before the schedule. without_decay: number of parameters
    without weight decay (norms, biases). from_step: first training step; None if frozen during the whole run.
    """

    group: str
    parameters: int
    learning_rate: float
    weight_decay: float
    without_decay: int
    from_step: int | None


def rate_text(row: RateRow) -> str:
    """Returns a row of the learning rates by depth: 'layer 2: 198 272 · rate 0.0001 · decay 0.01 (1 280 without) · from
    step 1'."""
    without = f" ({count(row['without_decay'])} without)" if row["weight_decay"] and row["without_decay"] else ""
    decay = f"decay {row['weight_decay']:.3g}{without}" if row["weight_decay"] else "no decay"
    first = "not in this run" if row["from_step"] is None else f"from step {count(row['from_step'])}"
    parameters = f"{title(str(row['group']))}: {count(row['parameters'])}"
    return " · ".join([parameters, f"rate {row['learning_rate']:.3g}", decay, first])


def baseline_text(baseline: Baseline | None) -> str:
    """Returns 'unigram: loss 6.931'."""
    value = None if baseline is None else baseline.get("value")
    if baseline is None or value is None:
        return "none known"
    return f"{title(str(baseline.get('name')))}: {title(str(baseline.get('metric')))} {number(value)}"


@dataclass(frozen=True)
class StartScreen:
    """The contents of the start screen.

    choices: selected components ({"model": "bert_tiny", "data": "pydocs"}). data: metadata, with a section per split.
    model: layers, width, origin of the weights. trainable: parameter counts by role. rates: learning rates by depth.
    machine: device, precision, attention path, kind of dropout. resumed_step: step of the checkpoint that the run
    resumes from. branch: run and step that the run branches from.
    """

    command: str
    run_dir: str
    choices: Mapping[str, object]
    data: Mapping[str, object]
    model: Mapping[str, object]
    plan: RunPlan
    baseline: Baseline
    machine: Mapping[str, object]
    trainable: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rates: Sequence[RateRow] = ()
    resumed_step: int | None = None
    branch: str | None = None


def print_start(output: Output, screen: StartScreen) -> None:
    """Prints the start screen."""
    choices = " ".join(f"{plain(key)}={plain(value, 80)}" for key, value in screen.choices.items())
    output.line(f"lmtool {__version__} · {screen.command} · {choices}", "bold")
    run_dir = plain(screen.run_dir)
    if screen.branch is not None:
        run_dir += f" · branches from {plain(screen.branch)}"
    elif screen.resumed_step is not None:
        run_dir += f" · resumes from step {count(screen.resumed_step)}"
    rows = [("run", run_dir), *_sections("data", screen.data), *_sections("model", screen.model)]
    rows += [*_plan_rows(screen.plan), ("baseline", baseline_text(screen.baseline)), *_parameter_text(screen.trainable)]
    if len(screen.rates) > 1:  # a single rate is in the configuration
        rows += _rows_under_label("rates", map(rate_text, screen.rates))
    output.rows([*rows, ("machine", metadata_text(screen.machine))])


def _forgetting_rows(forgetting: JsonMapping) -> list[tuple[str, str]]:
    """Returns the pretraining loss before and after finetuning, and the change of the weights."""
    before, after = (float(forgetting[moment]["loss"]) for moment in ("before", "after"))
    sentence = f"{plain(forgetting['objective'])} loss {number(before)} before, {number(after)} after"
    distances = " · ".join(f"{plain(level)} {percent(share)}" for level, share in forgetting["distance"].items())
    added_parameters = f" · {count(forgetting['added'])} parameters added" if forgetting["added"] else ""
    return [("forgets", f"{sentence}, on {plain(forgetting['text'])}"), ("moved", f"{distances}{added_parameters}")]


def _headline(result: JsonMapping) -> str:
    """Returns the status, time, steps and the reason for stopping. The training time is separate if evaluation takes
    more than 5% of it."""
    text, seconds = title(str(result.get("status", "done"))), result.get("seconds")
    if seconds is not None:
        evaluation_seconds = result.get("evaluation_seconds") or 0.0
        text += f" in {duration(seconds + evaluation_seconds)}"
        text += f", {duration(seconds)} of it training" if evaluation_seconds > 0.05 * seconds else ""
    if result.get("steps") is not None:
        text += f" · {count(result['steps'])} {plural(result['steps'], 'step')}"
    return " · ".join(filter(None, (text, stop_reason(result))))


def _speed_text(result: JsonMapping) -> str:
    formats: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda rate: f"{count(round(rate))} tokens/s",
        "tokens": lambda tokens: f"{count(tokens)} tokens",
        "padding_fraction": lambda fraction: f"padding {percent(fraction)}",
        "peak_memory_bytes": lambda memory: f"peak memory {size(memory)}" if memory else "",
    }
    parts = [formatter(result[key]) for key, formatter in formats.items() if result.get(key) is not None]
    return " · ".join(filter(None, parts))


def print_end(
    output: Output,
    *,
    result: JsonMapping,
    baseline: Baseline | None,
    run_dir: str,
    report: str,
    next_commands: Sequence[str],
) -> None:
    """Prints the end screen.

    Args:
        output: where to print.
        result: result.json.
        baseline: the score's baseline.
        run_dir: the run's folder.
        report: path of the report.
        next_commands: suggested commands.
    """
    score = score_of(result, baseline)
    output.line(_headline(result), _STYLES[score.verdict] if score else "bold")
    rows = []
    if score:
        rows.append(("score", " · ".join(filter(None, (score.text, score.sentence, selection_note(result))))))
    rows += _rows_under_label("test", test_scores(result))
    if mixture := result.get("mixture"):
        members = [f"{plain(name)} {count(row['examples'])} ({percent(row['share'])})" for name, row in mixture.items()]
        rows.append(("mixture", f"examples read: {' · '.join(members)}"))
    other_metrics = {
        key: value
        for key, value in (result.get("metrics") or {}).items()
        if isinstance(value, (int, float))
        and (score is None or (key != score.metric and (value != score.value or not key.endswith("_loss"))))
        and not key.endswith((*CONSTANT_SUFFIXES, "standard_error"))
    }
    if other_metrics:
        rows.append(("also", metadata_text(other_metrics)))
    if mix := result.get("layer_mix"):
        layers = [f"{layer or 'embedding'} {percent(share)}" for layer, share in enumerate(mix["weights"])]
        rows.append(("layers", f"{' · '.join(layers)} · gamma {number(mix['gamma'])}"))
    if forgetting := result.get("forgetting"):
        rows += _forgetting_rows(forgetting)
    if speed := _speed_text(result):
        rows.append(("speed", speed))
    rows.append(("run", plain(run_dir)))
    if result.get("delta_bytes"):
        rows.append(("weights", f"{size(result['delta_bytes'])} in addition to {plain(str(result['base']))}"))
    rows.append(("report", plain(report)))
    output.rows([*rows, *_rows_under_label("next", map(plain, next_commands))])
