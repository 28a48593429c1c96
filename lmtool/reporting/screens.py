"""The first and the last screen of a run: its plan, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from lmtool import __version__
from lmtool.reporting.console import Output
from lmtool.reporting.costs import RunPlan
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.scores import CONSTANTS, Score, score_of, selected_on, stopped_by, test_scores
from lmtool.reporting.text import count, duration, fact, number, percent, plain, shortened, size, title
from lmtool.system.terminal import plural

# Labels that are shown each with its rows.
_LABELS = 20
_STYLES = {"better": "bold green", "worse": "bold red", "unclear": "bold yellow", "unknown": "bold"}


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Facts on one line: 'documents 1 234 · tokens 1.2 M'."""
    return " · ".join(
        f"{title(str(key))} {fact(str(key), value)}" for key, value in metadata.items() if value is not None
    )


def _sections(label: str, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One row of the plain metadata, and one of each nested section ('train', 'validation')."""
    flat = {key: value for key, value in metadata.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in metadata.items() if isinstance(value, Mapping)}
    texts = [metadata_text(flat)] if flat else []
    texts += [f"{title(str(key))}: {_nested_text(str(key), value)}" for key, value in nested.items()]
    return [(label if index == 0 else "", text) for index, text in enumerate(texts)]


def _nested_text(key: str, metadata: Mapping[str, Any]) -> str:
    """A nested section on one line. Rows by label: the names as they are written; of many the rarest and commonest."""
    if key != "labels":
        return metadata_text(metadata)
    counts = [f"{name} {count(rows)}" for name, rows in zip(shortened(metadata, 40), metadata.values(), strict=True)]
    if len(counts) <= _LABELS:
        return " · ".join(counts)
    order = sorted(range(len(counts)), key=list(metadata.values()).__getitem__)
    return f"{count(len(counts))}, from {counts[order[0]]} to {counts[order[-1]]}"


def _plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parts = " · ".join(f"{title(part)} {count(number)}" for part, number in plan.parameters.items())
    passes = f" = {fact('', float(plan.epochs))} epochs" if plan.epochs is not None else ""
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
        *((f"phase {number}", phase.words) for number, phase in enumerate(plan.phases, 1)),
        *(("", note) for note in plan.notes),
    ]


def learning_rows(learns: Mapping[str, Mapping[str, int]]) -> list[tuple[str, ...]]:
    """How many parameters learn of how many, by role and in all. learns: by role, {"trainable", "total"}; roles without
    parameters have no row. The numbers are exact, so that they can be held against published ones."""
    roles = {role: counts for role, counts in learns.items() if counts["total"]}
    rows = [(title(role), f"{counts['trainable']:,}", f"{counts['total']:,}") for role, counts in roles.items()]
    trainable, total = (sum(counts[kind] for counts in roles.values()) for kind in ("trainable", "total"))
    return [*rows, ("in all", f"{trainable:,}", f"{total:,}")]


def _learning_text(learns: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """`learning_rows` in columns, the first behind a label."""
    if not learns:
        return []
    rows = learning_rows(learns)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    texts = [f"{role:{widths[0]}}  {own:>{widths[1]}} of {whole:>{widths[2]}}" for role, own, whole in rows]
    return [("learns" if number == 0 else "", text) for number, text in enumerate(texts)]


class RateRow(TypedDict):
    """The settings of parameters that learn alike, as facts.json has them. group: "layer 12 to layer 7". learning_rate:
    before the schedule. without_decay: parameters (norms, biases). from_step: the first step in which they learn; None:
    not in this run."""

    group: str
    parameters: int
    learning_rate: float
    weight_decay: float
    without_decay: int
    from_step: int | None


def rate_text(row: RateRow) -> str:
    """A row of the learning rates by depth: 'layer 2: 198 272 · rate 0.0001 · decay 0.01 (1 280 without) · from step
    1'."""
    without = f" ({count(row['without_decay'])} without)" if row["weight_decay"] and row["without_decay"] else ""
    decay = f"decay {row['weight_decay']:.3g}{without}" if row["weight_decay"] else "no decay"
    first = "not in this run" if row["from_step"] is None else f"from step {count(row['from_step'])}"
    parameters = f"{title(str(row['group']))}: {count(row['parameters'])}"
    return " · ".join([parameters, f"rate {row['learning_rate']:.3g}", decay, first])


def baseline_text(baseline: Baseline | None) -> str:
    """'unigram: loss 6.931'."""
    value = None if baseline is None else baseline.get("value")
    if baseline is None or value is None:
        return "none known"
    return f"{title(str(baseline.get('name')))}: {title(str(baseline.get('metric')))} {number(value)}"


@dataclass(frozen=True)
class StartScreen:
    """What the first screen shows.

    choices: what was chosen ({"model": "bert_tiny", "data": "pydocs"}). data: metadata, with a section a split. model:
    layers, width, where the weights come from. trainable: trainable and all parameters by role. rates: learning rates
    by depth, as facts.json has them. machine: device, precision, attention path, kind of dropout. resumed_step: the
    step that a started run resumes from. branch: the run and step that a new one begins at.
    """

    command: str
    run_dir: str
    choices: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    plan: RunPlan
    baseline: Baseline
    machine: Mapping[str, Any]
    trainable: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rates: Sequence[RateRow] = ()
    resumed_step: int | None = None
    branch: str | None = None


def print_start(output: Output, screen: StartScreen) -> None:
    """Print on one screen what will happen."""
    chosen = " ".join(f"{plain(key)}={plain(value, 80)}" for key, value in screen.choices.items())
    output.line(f"lmtool {__version__} · {screen.command} · {chosen}", "bold")
    where = plain(screen.run_dir)
    if screen.branch is not None:
        where += f" · branches from {plain(screen.branch)}"
    elif screen.resumed_step is not None:
        where += f" · resumes from step {count(screen.resumed_step)}"
    rows = [("run", where), *_sections("data", screen.data), *_sections("model", screen.model)]
    rows += [*_plan_rows(screen.plan), ("baseline", baseline_text(screen.baseline)), *_learning_text(screen.trainable)]
    if len(screen.rates) > 1:  # a single rate is in the configuration
        rows += [("rates" if index == 0 else "", rate_text(row)) for index, row in enumerate(screen.rates)]
    output.rows([*rows, ("machine", metadata_text(screen.machine))])


def forgetting_rows(forgetting: Any) -> list[tuple[str, str]]:
    """The pretraining's loss before and after, and how far the weights moved, as result.json has them."""
    if not isinstance(forgetting, Mapping):
        return []
    before, after = (float(forgetting[when]["loss"]) for when in ("before", "after"))
    sentence = f"{plain(forgetting['objective'])} loss {number(before)} before, {number(after)} after"
    moved = " · ".join(f"{plain(level)} {percent(share)}" for level, share in forgetting["distance"].items())
    added = f" · {count(forgetting['added'])} parameters added beside" if forgetting["added"] else ""
    return [("forgets", f"{sentence}, on {plain(forgetting['text'])}"), ("moved", f"{moved}{added}")]


def _took_text(seconds: float, evaluation_seconds: float) -> str:
    """The time of a run, and the part of it that was training if the rest is more than 5%."""
    took = f" in {duration(seconds + evaluation_seconds)}"
    return f"{took}, {duration(seconds)} of it training" if evaluation_seconds > 0.05 * seconds else took


def _speed_text(result: Mapping[str, Any]) -> str:
    parts = []
    if result.get("tokens_per_second") is not None:
        parts.append(f"{count(round(result['tokens_per_second']))} tokens/s")
    if result.get("tokens") is not None:
        parts.append(f"{count(result['tokens'])} tokens")
    if result.get("padding_fraction") is not None:
        parts.append(f"padding {percent(result['padding_fraction'])}")
    if result.get("peak_memory_bytes"):
        parts.append(f"peak memory {size(result['peak_memory_bytes'])}")
    return " · ".join(parts)


def end_screen(
    output: Output,
    *,
    result: Mapping[str, Any],
    baseline: Baseline | None,
    run_dir: str,
    report: str | None,
    next_commands: Sequence[str],
    examples: int | None = None,
) -> None:
    """Say what happened: the score beside its baseline, time, speed, the report, and what to type next.

    result: result.json. examples: scored examples, for the standard error of an accuracy.
    """
    status = title(str(result.get("status", "done")))
    seconds = result.get("seconds")
    took = "" if seconds is None else _took_text(seconds, result.get("evaluation_seconds") or 0.0)
    steps = f" · {count(result['steps'])} {plural(result['steps'], 'step')}" if result.get("steps") is not None else ""
    reason = stopped_by(result)
    ended = "" if reason is None else f" · {reason}"
    score: Score | None = score_of(result, baseline, examples)
    output.line(f"{status}{took}{steps}{ended}", _STYLES[score.verdict] if score else "bold")
    selected = selected_on(result)
    more = "" if selected is None else f" · {selected}"
    rows = [("score", f"{score.text} · {score.sentence}{more}")] if score else []
    rows += [("test" if index == 0 else "", sentence) for index, sentence in enumerate(test_scores(result))]
    if read := result.get("mixture"):
        fractions = [f"{plain(name)} {count(own['examples'])} ({percent(own['share'])})" for name, own in read.items()]
        rows.append(("mixture", f"examples read: {' · '.join(fractions)}"))
    other_metrics = {
        key: value
        for key, value in (result.get("metrics") or {}).items()
        if isinstance(value, (int, float))
        and (score is None or (key != score.metric and (value != score.value or not key.endswith("_loss"))))
        and not key.endswith((*CONSTANTS, "standard_error"))
    }
    if other_metrics:
        rows.append(("also", metadata_text(other_metrics)))
    if mix := result.get("layer_mix"):
        fractions = [f"{layer or 'embedding'} {percent(share)}" for layer, share in enumerate(mix["weights"])]
        rows.append(("layers", f"{' · '.join(fractions)} · gamma {number(mix['gamma'])}"))
    rows += forgetting_rows(result.get("forgetting"))
    if speed := _speed_text(result):
        rows.append(("speed", speed))
    rows.append(("run", plain(run_dir)))
    if result.get("delta_bytes"):
        rows.append(("weights", f"{size(result['delta_bytes'])} beside those of {plain(str(result['base']))}"))
    if report is not None:
        rows.append(("report", plain(report)))
    rows += [("next" if index == 0 else "", plain(command)) for index, command in enumerate(next_commands)]
    output.rows(rows)
