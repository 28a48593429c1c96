"""`lmtool inspect`: decodes the inputs of a model, and compares measured statistics with their expected values.

Nothing is trained. The model is on the meta device, without weights, unless it generates a part of its inputs (as the
generator of replaced-token detection does): then it has its initial weights, or those of checkpoint=.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from lmtool.config.base import JsonObject
from lmtool.costs.memory_of_run import TrainingConfig
from lmtool.data.examples import Rows, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.errors import CheckFailed, ConfigError, UserError
from lmtool.learners.base import BaseLearner, truncation_warnings
from lmtool.learners.inspection import FAMILYWISE_ERROR_RATE, Inspector, RunningStatistics, Statistic
from lmtool.learners.mixed_sources import examples_of, inspector_of
from lmtool.learners.representations.domains import (
    LEAST_PASSAGES,
    MAX_PASSAGES,
    Passages,
    Separation,
    mean_distance,
    separate,
    separate_by_words,
)
from lmtool.learners.representations.reading import embedder_of
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.inspection import InspectionScreen, print_inspection, write_inspection
from lmtool.reporting.text import number, percent, tenths
from lmtool.resolver.commands import FinetuneConfig, InspectKeys, PretrainConfig
from lmtool.runs.files import overwriting_errors
from lmtool.session.open_run import require_fit, start_weights, starting_tokenizer
from lmtool.session.preparation import FinetunePreparation, PretrainPreparation
from lmtool.session.requests import write_output
from lmtool.session.screens import warnings_of
from lmtool.system.files import user_path
from lmtool.tasks.checking import ComparedRows, compared_rows, independent_passages, shift
from lmtool.training.phases import words_of_phase
from lmtool.training.precision import select_device, select_precision
from lmtool.weights.assemble import assemble
from lmtool.weights.padded_model import load

_BATCH_TOKENS = 8192  # maximum tokens of a forward pass


def run(config: TrainingConfig, verb: str, keys: InspectKeys) -> int:
    """Prints examples and statistics for each phase of a run. Raises CheckFailed if a statistic violates its
    definition."""
    data = config.data if isinstance(config, PretrainConfig) else config.task
    if errors := list(overwriting_errors(keys.output, data.reads_file)):
        raise ConfigError(errors)
    require_rows_for_states(config, keys.states)
    output = Output()
    phase_configs: list[TrainingConfig] = list(config.phase_configs) if isinstance(config, PretrainConfig) else [config]
    parts: list[InspectionScreen] = []
    tallies: list[RunningStatistics] = []
    for count, phase_config in enumerate(phase_configs, 1):
        phase = ""
        if len(phase_configs) > 1 and isinstance(config, PretrainConfig):
            phase = f"phase {count} · {words_of_phase(config.phases[count - 1])} · "
        screen, stats = _inspect_phase(phase_config, phase_configs[0], f"{phase}{verb}", keys, output)
        parts.append(screen)
        tallies.append(stats)
    if keys.output is not None and keys.output.endswith(".html"):
        write_inspection(user_path(keys.output), parts)
        output.line(f"page: {keys.output}")
    elif keys.output is not None:
        phases = enumerate(parts, 1)
        rows = [{"phase": count, **row} if len(parts) > 1 else row for count, part in phases for row in part.examples]
        write_output(keys.output, rows)
    broken = [statistic for stats in tallies for statistic in stats.broken()]
    if broken:
        names = "; ".join(statistic.name for statistic in broken)
        total = sum(len(stats.statistics) for stats in tallies)
        raise CheckFailed(
            f"{len(broken)} of {total} statistics do not match their expected values: {names}",
            "set another seed=; if a statistic fails again, report this bug in lmtool with the table above",
        )
    return 0


def _inspect_phase(
    config: TrainingConfig, first: TrainingConfig, title: str, keys: InspectKeys, output: Output
) -> tuple[InspectionScreen, RunningStatistics]:
    """Prints the inspection of a configuration and returns its screen and statistics. first: configuration of the first
    phase. title: start of the heading, such as "pretrain"."""
    compared: list[ComparedRows] = []
    if isinstance(config, PretrainConfig):
        assert isinstance(first, PretrainConfig)
        inspector = _pretraining(config, first, output)
    else:
        inspector, compared = _task(config, output)
    loader = None
    # With both or neither given, examples are not packed into batches, so there is no padding to compare with.
    if (config.batch_examples is None) != (config.batch_tokens is None):
        loader = PackedLoader(inspector.examples, config.seed, config.batch_examples, config.batch_tokens)
        if loader.examples is not inspector.examples:
            inspector = inspector_of(inspector.learner, loader.examples, config.max_length)
    stats = inspector.measure(keys.tokens)
    if loader is not None:
        stats.report("padding that packing avoids, share", loader.metadata()["padding_avoided"], 1)
    learned_name = config.objective.name if isinstance(config, PretrainConfig) else config.task.name
    heading = f"{title} · {learned_name} · model={config.model.name}"
    screen = _screen_of(stats, heading, inspector.main_finding(stats), list(inspector.describe(keys.n)))
    print_inspection(output, screen, keys.brief)
    if not keys.brief:
        _print_shifts(output, compared, learned_name)
        if keys.states and isinstance(config, FinetuneConfig):
            _print_states(output, compared, config, keys.states)
    remark = config.model.remark(config.max_length)
    for warning in (*warnings_of(inspector.examples.metadata()), *([remark] if remark else ())):
        output.paragraph(f"warning: {warning}", "yellow")
    return screen, stats


def _pretraining(config: PretrainConfig, first: PretrainConfig, output: Output) -> Inspector:
    preparation = PretrainPreparation(config)
    config, on_stage = preparation.config, output.stage
    tokenizer = starting_tokenizer(config) or preparation.trained_tokenizer(on_stage, first.data)
    require_fit(config, tokenizer)
    data = preparation.split(config, "train", tokenizer, on_stage)
    with torch.device("meta"):
        learner, _ = assemble(config, tokenizer)
    if any(member.makes_inputs for member in config.objective.member_configs()):
        learner, loaded = assemble(config, tokenizer, start_weights(config))
        output.line(f"weights of the generator: {'random' if loaded is None else loaded.sentence()}")
        learner.to(select_device(config.device)).eval()
    return _inspector(learner, data, config.max_length)


def _task(config: FinetuneConfig, output: Output) -> tuple[Inspector, list[ComparedRows]]:
    preparation = FinetunePreparation(config)
    config, task = preparation.config, preparation.task
    tokenizer = starting_tokenizer(config) or preparation.trained_tokenizer(output.stage)
    require_fit(config, tokenizer)
    with torch.device("meta"):
        learner, _ = assemble(config, tokenizer)
    return _inspector(learner, task.splits()["train"], config.max_length), list(compared_rows(task.members))


def _inspector(learner: BaseLearner, data: SplitData, max_length: int) -> Inspector:
    return inspector_of(learner, examples_of(learner, data, max_length), max_length)


def _screen_of(stats: RunningStatistics, heading: str, finding: str, examples: list[JsonObject]) -> InspectionScreen:
    """Counts that must be zero, and are, appear only in the line below the table."""
    statistics = list(stats.statistics.values())
    never = [statistic.name for statistic in statistics if statistic.must_be_zero and statistic.holds(0)]
    visible_statistics = [statistic for statistic in statistics if statistic.name not in never]
    broken = frozenset(
        number for number, statistic in enumerate(visible_statistics) if not statistic.holds(stats.tested)
    )
    checked = sum(statistic.expected is not None for statistic in statistics)
    intervals = f"{stats.tested} interval{'s' * (stats.tested > 1)} around what was measured"
    together = f"{intervals} (together {1 - FAMILYWISE_ERROR_RATE:.1%} sure)"
    exact = checked - stats.tested - len(never)
    parts = [
        together if stats.tested else "",
        f"{exact} exact number{'s' * (exact > 1)}" if exact else "",
        f"zero, as required: {'; '.join(never)}" if never else "",
    ]
    verdict = f"all {checked} checks hold" if not broken else f"{len(broken)} of {checked} checks do not hold"
    return InspectionScreen(
        heading,
        finding,
        examples,
        [_row(statistic, stats.tested) for statistic in visible_statistics],
        broken,
        verdict,
        f"{verdict}: {'; '.join(filter(None, parts))}",
        [f"{name}: defined as {definition}" for name, definition in stats.remarks.items()],
    )


def _row(statistic: Statistic, tested: int) -> list[str]:
    named_fraction = "share" in statistic.name or "fraction" in statistic.name
    is_fraction = statistic.count > 0 and (statistic.is_fraction or named_fraction)
    format_value = tenths if is_fraction else _mean
    expected = interval = ""
    if statistic.expected_value is not None:
        expected = format_value(statistic.expected_value) if statistic.count else f"{statistic.expected_value:,.0f}"
        if not statistic.exact:
            low, high = statistic.interval(tested)
            interval = f"{low:.1%} .. {high:.1%}" if is_fraction else f"{_mean(low)} .. {_mean(high)}"
    measured_text = format_value(statistic.measured) if statistic.count else f"{statistic.measured:,.0f}"
    return [statistic.name, measured_text, expected, interval, f"{statistic.count:,.0f}" if statistic.count else ""]


def _mean(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else number(value)


def _print_shifts(output: Output, compared: Sequence[ComparedRows], heading: str) -> None:
    table, telling = [], []
    for rows in compared:
        distance, passages = shift(rows), _passages(rows)
        classified = ""
        if passages is not None:
            separation, (first, second) = separate_by_words(passages)
            classified = _interval_text(separation)
            if separation.differs:
                telling.append(f"{rows.source}: {', '.join(first)} · {rows.target}: {', '.join(second)}")
        table.append(
            [
                distance.source,
                distance.target,
                f"{distance.rows:,}",
                f"{distance.words:.4f}",
                f"{distance.chance:.4f}",
                percent(distance.unknown),
                percent(distance.unknown_types),
                "" if distance.labels is None else f"{distance.labels:.4f}",
                classified,
            ]
        )
    if not table:
        return
    header = ["from", "to", "rows", "words", "by chance", "unknown words", "unknown types", "labels", "told apart"]
    print_table(output, header, table, f"shift · {heading}")
    output.paragraph(
        "words, labels: Jensen-Shannon divergence in bits, 0 to 1; by chance: between a random sample of the "
        "source rows and the rest; unknown: absent from the source rows; at most 20,000 rows per side; told apart: the "
        "accuracy on held-out rows of a linear classifier of the two sides by their words, 0.5 by chance, with its 95% "
        f"interval (at most {MAX_PASSAGES:,} rows per side, half of them to train; of rows that share a line of the "
        f"file or a long text, one; empty below {LEAST_PASSAGES})",
        "dim",
    )
    for line in telling:
        output.paragraph(f"most telling words: {line}")


def _passages(rows: ComparedRows, limit: int = MAX_PASSAGES) -> Passages | None:
    return Passages.of(independent_passages(rows.first), independent_passages(rows.second), limit)


def _interval_text(separation: Separation) -> str:
    return f"{separation.accuracy:.3f} [{separation.low:.3f}, {separation.high:.3f}]"


def require_rows_for_states(config: TrainingConfig, states: int) -> None:
    """Raises UserError if hidden states cannot be compared. states: rows of each split."""
    if not states:
        return
    if not isinstance(config, FinetuneConfig):
        raise UserError(f"states={states} compares the rows of a task's splits", "lmtool inspect finetune task=TASK")
    if config.checkpoint in (None, "none"):
        raise UserError(f"states={states} compares hidden states of trained weights", "set checkpoint=runs/NAME")
    if states < LEAST_PASSAGES:
        raise UserError(f"states={states} is too few rows to compare", f"set states={LEAST_PASSAGES} or more")


def _print_states(output: Output, compared: Sequence[ComparedRows], config: FinetuneConfig, count: int) -> None:
    checkpoint, precision = str(config.checkpoint), select_precision(config.precision, select_device(config.device))
    loaded = load(checkpoint, str(precision.device), config.offline)
    embedder, _ = embedder_of(loaded, checkpoint, "last", "mean", _BATCH_TOKENS, precision, config.offline)
    table = []
    for rows in compared:
        passages = _passages(rows, count)
        if passages is None:
            continue
        with output.bar(f"states of {rows.target}") as progress:
            truncated: Counter[str] = Counter()
            vectors = embedder.vectors(Rows.of_texts(text=passages.texts), truncated, progress)
            x_NF = torch.from_numpy(np.concatenate([vector.vectors.reshape(1, -1) for vector in vectors])).float()
            for text in truncation_warnings(truncated, len(passages.texts)):
                output.line(text)
        separation, _ = separate(passages, x_NF)
        means = mean_distance(passages, x_NF)
        table.append(
            [
                rows.source,
                rows.target,
                f"{len(passages.texts) // 2:,}",
                f"{means.distance:.3f}",
                f"{means.chance:.3f}",
                _interval_text(separation),
                f"{separation.proxy_distance:.2f}",
            ]
        )
    if not table:
        return
    header = ["from", "to", "rows a side", "distance", "by chance", "told apart", "A-distance"]
    print_table(output, header, table, f"states · {checkpoint}")
    output.paragraph(
        "distance: between the mean states (last layer, mean over tokens), over the root mean square distance of a row "
        "from its mean; by chance: 95% of random splits are below; told apart: as above, by the states; A-distance: "
        "2 (1 - 2 error), the proxy of Ben-David et al. 2007, from 0 to 2",
        "dim",
    )
