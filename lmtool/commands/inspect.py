"""`lmtool inspect`: what the model is really fed, decoded, and what was done to the text, beside its definition.

Nothing is trained, and no weights are made, but for a model that makes a part of what it reads itself (the generator of
replaced-token detection: at its initial weights, or those of checkpoint=); any other stands on the meta device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmtool.commands.evaluate import write_output
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.errors import CheckFailed
from lmtool.learners.base import BaseLearner
from lmtool.learners.inspection import FAMILY, Inspector, RunningStatistics, Statistic
from lmtool.learners.mixed_examples import examples_of, inspector_of
from lmtool.reporting.console import Output
from lmtool.reporting.inspection import InspectionScreen, print_inspection, print_shifts, write_inspection
from lmtool.reporting.text import number
from lmtool.resolver.schema.inspection import Looking
from lmtool.resolver.schema.phases import words_of
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig
from lmtool.session.open_run import require_fit, start_weights, starting_tokenizer
from lmtool.session.preparation import FinetunePreparation, PretrainPreparation
from lmtool.session.screens import warnings_of
from lmtool.tasks.checking import Shift, shifts
from lmtool.training.precision import select_device
from lmtool.weights.assemble import assemble


def run(config: PretrainConfig | FinetuneConfig, verb: str, looking: Looking) -> int:
    """Print examples and statistics, of a run in phases those of each. Raises CheckFailed where a statistic is not as
    defined."""
    output = Output()
    phase_configs: list[PretrainConfig | FinetuneConfig] = (
        list(config.forms) if isinstance(config, PretrainConfig) else [config]
    )
    parts: list[InspectionScreen] = []
    tallies: list[RunningStatistics] = []
    for count, form in enumerate(phase_configs, 1):
        phase = ""
        if len(phase_configs) > 1 and isinstance(config, PretrainConfig):
            phase = f"phase {count} · {words_of(config.phases[count - 1])} · "
        screen, stats = _looked_into(form, phase_configs[0], f"{phase}{verb}", looking, output)
        parts.append(screen)
        tallies.append(stats)
    if looking.output is not None and looking.output.endswith(".html"):
        write_inspection(Path(looking.output).expanduser(), parts)
        output.line(f"page: {looking.output}")
    elif looking.output is not None:
        phases = enumerate(parts, 1)
        rows = [{"phase": count, **row} if len(parts) > 1 else row for count, part in phases for row in part.examples]
        write_output(looking.output, rows)
    broken = [statistic for stats in tallies for statistic in stats.broken()]
    if broken:
        names = "; ".join(statistic.name for statistic in broken)
        total = sum(len(stats.statistics) for stats in tallies)
        raise CheckFailed(
            f"{len(broken)} of {total} statistics are not as defined: {names}",
            "set another seed=; what fails again is a bug in lmtool: please report it with the table above",
        )
    return 0


def _looked_into(
    config: PretrainConfig | FinetuneConfig, first: Any, verb: str, looking: Looking, output: Output
) -> tuple[InspectionScreen, RunningStatistics]:
    """Print what a configuration's examples are, and return it. first: that of the first phase, on whose text the
    vocabulary is trained. verb: what the heading begins with."""
    remarks_only: list[Shift] = []
    if isinstance(config, PretrainConfig):
        inspector = _pretraining(config, first, output)
    else:
        inspector, remarks_only = _task(config, output)
    loader = None
    if (config.batch_examples is None) != (config.batch_tokens is None):
        loader = PackedLoader(inspector.examples, config.seed, config.batch_examples, config.batch_tokens)
        if loader.examples is not inspector.examples:
            inspector = inspector_of(inspector.learner, loader.examples, config.max_length)
    stats = inspector.measured(looking.tokens)
    if loader is not None:
        stats.note("padding that packing avoids, share", loader.metadata()["padding_avoided"], 1)
    learned = config.objective.name if isinstance(config, PretrainConfig) else config.task.name
    heading = f"{verb} · {learned} · model={config.model.name}"
    screen = _screen_of(stats, heading, inspector.fact(stats), list(inspector.described(looking.n)))
    print_inspection(output, screen, looking.brief)
    if not looking.brief:
        print_shifts(output, remarks_only, learned)
    remark = config.model.remark(config.max_length)
    for warning in (*warnings_of(inspector.examples.metadata()), *([remark] if remark else ())):
        output.paragraph(f"warning: {warning}", "yellow")
    return screen, stats


def _pretraining(config: PretrainConfig, first: PretrainConfig, output: Output) -> Inspector:
    """first: the configuration of the first phase, on whose text the vocabulary is trained."""
    preparation = PretrainPreparation(config)
    config, on_stage = preparation.config, output.stage
    tokenizer = starting_tokenizer(config) or preparation.trained_tokenizer(on_stage, first.data)
    require_fit(config, tokenizer)
    data = preparation.split(config, "train", tokenizer, on_stage)
    with torch.device("meta"):
        learner, _ = assemble(config, tokenizer)
    if learner.makes_inputs:
        learner, loaded = assemble(config, tokenizer, start_weights(config))
        output.line(f"weights of the generator: {'random' if loaded is None else loaded.sentence()}")
        learner.to(select_device(config.device)).eval()
    return _inspector(learner, data, config.max_length)


def _task(config: FinetuneConfig, output: Output) -> tuple[Inspector, list[Shift]]:
    preparation = FinetunePreparation(config)
    config, task = preparation.config, preparation.task
    tokenizer = starting_tokenizer(config) or preparation.trained_tokenizer(output.stage)
    require_fit(config, tokenizer)
    with torch.device("meta"):
        learner, _ = assemble(config, tokenizer)
    return _inspector(learner, task.splits()["train"], config.max_length), list(shifts(task.members))


def _inspector(learner: BaseLearner, data: SplitData, max_length: int) -> Inspector:
    return inspector_of(learner, examples_of(learner, data, max_length), max_length)


def _screen_of(stats: RunningStatistics, heading: str, fact: str, examples: list[dict[str, Any]]) -> InspectionScreen:
    """The screen of statistics; checks whose subject never occurred have no row."""
    statistics = list(stats.statistics.values())
    never = [statistic.name for statistic in statistics if statistic.checks_itself and statistic.holds(0)]
    visible_statistics = [statistic for statistic in statistics if statistic.name not in never]
    broken = frozenset(
        number for number, statistic in enumerate(visible_statistics) if not statistic.holds(stats.tested)
    )
    defined = sum(statistic.expected is not None for statistic in statistics)
    intervals = f"{stats.tested} interval{'s' * (stats.tested > 1)} around what was measured"
    together = f"{intervals} (together {1 - FAMILY:.1%} sure)"
    exact = defined - stats.tested - len(never)
    parts = [
        together if stats.tested else "",
        f"{exact} exact number{'s' * (exact > 1)}" if exact else "",
        f"zero, as required: {'; '.join(never)}" if never else "",
    ]
    verdict = f"all {defined} checks hold" if not broken else f"{len(broken)} of {defined} checks do not hold"
    return InspectionScreen(
        heading, fact, examples, [_row(statistic, stats.tested) for statistic in visible_statistics], broken, verdict,
        f"{verdict}: {'; '.join(filter(None, parts))}",
        [f"{name}: defined as {definition}" for name, definition in stats.remarks.items()],
    )  # fmt: skip


def _row(statistic: Statistic, tested: int) -> list[str]:
    """The name, the mean, what it should be, the interval, and of how many draws; shares as percentages."""
    share = statistic.count > 0 and (statistic.is_share or "share" in statistic.name or "fraction" in statistic.name)
    format_value = _percent if share else _mean
    defined = interval = ""
    if statistic.defined is not None:
        defined = format_value(statistic.defined) if statistic.count else f"{statistic.defined:,.0f}"
        if not statistic.exact:
            low, high = statistic.interval(tested)
            interval = f"{low:.1%} .. {high:.1%}" if share else f"{_mean(low)} .. {_mean(high)}"
    measured = format_value(statistic.measured) if statistic.count else f"{statistic.measured:,.0f}"
    return [statistic.name, measured, defined, interval, f"{statistic.count:,.0f}" if statistic.count else ""]


def _mean(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else number(value)


def _percent(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
