"""`lmtool inspect`: what the model is really fed, decoded, and what was done to the text, beside its definition.

Nothing is trained, and no weights are made, but for a model that makes a part of what it reads itself (the generator of
replaced-token detection: at its initial weights, or those of checkpoint=); any other stands on the meta device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from lmtool.commands.configs import FinetuneConfig, PretrainConfig
from lmtool.commands.evaluate import write_output
from lmtool.commands.finetune import own_tokenizer
from lmtool.commands.labelled import data_to_learn
from lmtool.commands.looking import Looking
from lmtool.commands.phases import words_of
from lmtool.commands.screens import warnings_of
from lmtool.commands.starting import require_fit, start_weights, starting_tokenizer, with_tasks
from lmtool.commands.texts import text_of
from lmtool.data.configs import DataConfig
from lmtool.data.loader import PackedLoader
from lmtool.data.sources import Source, open_source
from lmtool.data.split import SplitData
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import CheckFailed
from lmtool.learners.base import BaseLearner
from lmtool.learners.inspection import Inspector
from lmtool.learners.mixed_sources import examples_of, inspector_of
from lmtool.learners.tally import FAMILY, Tally
from lmtool.reporting.console import Output
from lmtool.reporting.shift import print_shifts
from lmtool.reporting.table import print_table
from lmtool.reporting.text import plain
from lmtool.tasks.members import rows_of
from lmtool.tasks.shift import Shift, shifts
from lmtool.training.precision import choose_device
from lmtool.weights.assemble import assemble

# Characters of an example on the screen; the JSON lines have all of it.
_SHOWN = 2000
# Between documents of an example, and between the texts of a pair.
_BORDER = " ‖ "
# What is predicted, and special tokens.
_HIGHLIGHTS = {r"\S+→\S+": "bold yellow", r"(?<!\S)(\[[A-Z]+\]|</?[a-z_0-9|]+>)(?!\S)": "cyan"}


def run(config: PretrainConfig | FinetuneConfig, verb: str, looking: Looking) -> int:
    """Print examples and statistics, of a run in phases those of each. Raises CheckFailed where a statistic is not as
    defined."""
    output = Output()
    forms: list[PretrainConfig | FinetuneConfig] = (
        list(config.forms) if isinstance(config, PretrainConfig) else [config]
    )
    shown: list[dict[str, Any]] = []
    tallies: list[Tally] = []
    for number, form in enumerate(forms, 1):
        if len(forms) > 1 and isinstance(config, PretrainConfig):
            output.line(f"phase {number} · {words_of(config.phases[number - 1])}", "bold")
        rows, tally = _looked_into(form, forms[0], verb, looking, output)
        shown += rows if len(forms) == 1 else [{"phase": number, **row} for row in rows]
        tallies.append(tally)
    if looking.output is not None:
        write_output(looking.output, shown)
    broken = [statistic for tally in tallies for statistic in tally.broken()]
    if broken:
        names, number = (
            "; ".join(statistic.name for statistic in broken),
            sum(len(tally.statistics) for tally in tallies),
        )
        raise CheckFailed(
            f"{len(broken)} of {number} statistics are not as defined: {names}",
            "give another seed=; what fails again is a bug in lmtool: please report it with the table above",
        )
    return 0


def _looked_into(
    config: PretrainConfig | FinetuneConfig, first: Any, verb: str, looking: Looking, output: Output
) -> tuple[list[dict[str, Any]], Tally]:
    """Print the examples and statistics of a configuration, and return them. first: that of the first phase, on whose
    text the vocabulary is trained."""
    apart: list[Shift] = []
    if isinstance(config, PretrainConfig):
        inspector = _pretraining(config, first, output)
    else:
        inspector, apart = _task(config, output)
    loader = None
    if (config.batch_examples is None) != (config.batch_tokens is None):
        loader = PackedLoader(inspector.examples, config.seed, config.batch_examples, config.batch_tokens)
        if loader.examples is not inspector.examples:
            inspector = inspector_of(inspector.learner, loader.examples, config.max_length)
    shown = list(inspector.described(looking.n))
    for row in shown:
        _print(output, row)
    tally = inspector.measured(looking.tokens)
    if loader is not None:
        tally.note("padding fraction of rectangular batches, avoided", loader.facts()["padding_avoided"], 1)
    learned = config.objective.name if isinstance(config, PretrainConfig) else config.task.name
    _table(output, tally, f"{learned} · {verb} · model={config.model.name}", inspector.fact(tally))
    print_shifts(output, apart, learned)
    remark = config.model.remark(config.max_length)
    for warning in (*warnings_of(inspector.examples.facts()), *([remark] if remark else ())):
        output.line(f"warning: {warning}", "yellow")
    return shown, tally


def _pretraining(config: PretrainConfig, first: PretrainConfig, output: Output) -> Inspector:
    config, tasks = with_tasks(config)
    tokenizer = starting_tokenizer(config)
    progress = output.stage

    def opened(data: DataConfig) -> Source:
        return open_source(data, config.cache_dir, progress, config.offline)

    source = opened(config.data)
    tokenizer = tokenizer or trained_tokenizer(
        config.tokenizer, source if first.data == config.data else opened(first.data),
        config.tokenizer.vocab_size or config.model.vocab_size, config.cache_dir, progress,
    )  # fmt: skip
    require_fit(config, tokenizer)
    rows = rows_of(tasks, "train")
    data = text_of(config.data, source, "train", tokenizer, config.cache_dir, progress, rows)
    with torch.device("meta"):
        learner, _ = assemble(config, tokenizer)
    if learner.makes_inputs:
        learner, loaded = assemble(config, tokenizer, start_weights(config))
        output.line(f"weights of the generator: {'random' if loaded is None else loaded.sentence()}")
        learner.to(choose_device(config.device)).eval()
    return _inspector(learner, data, config.max_length)


def _task(config: FinetuneConfig, output: Output) -> tuple[Inspector, list[Shift]]:
    config, task, _ = data_to_learn(config)
    tokenizer = starting_tokenizer(config)
    tokenizer = tokenizer or own_tokenizer(config, task, output)
    require_fit(config, tokenizer)
    with torch.device("meta"):
        learner, _ = assemble(config, tokenizer)
    return _inspector(learner, task.splits()["train"], config.max_length), list(shifts(task.members))


def _inspector(learner: BaseLearner, data: SplitData, max_length: int) -> Inspector:
    return inspector_of(learner, examples_of(learner, data, max_length), max_length)


def _print(output: Output, example: dict[str, Any]) -> None:
    """One example: its text, each side as pieces with what is predicted behind an arrow, and its classes."""
    member = f"{example['member']}: " if "member" in example else ""
    output.line(f"{member}example {example['example']}, epoch {example['epoch']}", "bold")
    rows = []
    if "text" in example:
        borders = [0, *example["boundaries"], len(example["text"]) + 1]
        parts = [example["text"][start : end - 1] for start, end in pairwise(borders)]
        rows.append(("text", plain(_BORDER.join(parts), _SHOWN)))
    predicted = {
        term: {place["position"]: place["label"] for place in places}
        for term, places in example["targets"].items()
        if isinstance(places, list)
    }
    on_inputs = next(iter(predicted.values()), {}) if "output" not in example else {}
    rows.append(("input", _pieces(example["input"], on_inputs)))
    if "filled" in example:
        pieces = example["filled"]["pieces"]
        replaced = {at: piece for at, piece in on_inputs.items() if pieces[at] != piece}
        rows.append(("filled", _pieces(example["filled"], replaced)))
    if "output" in example:
        rows.append(("output", _pieces(example["output"], next(iter(predicted.values()), {}))))
    for term, value in example["targets"].items():
        rows.append((term, f"{len(value)} places" if isinstance(value, list) else str(value)))
        borders = [place["borders"] for place in value if "borders" in place] if isinstance(value, list) else []
        if borders:
            rows.append((f"{term} borders", " ".join(f"{a}..{b}" for a, b in sorted({(a, b) for a, b in borders}))))
    rows += [(title, text) for title, text in example.get("drawing", ())]
    if "prefix" in example["input"]:
        rows.append(("prefix", f"{example['input']['prefix']} tokens"))
    output.rows(rows, _HIGHLIGHTS)
    output.line()


def _pieces(side: dict[str, Any], predicted: dict[int, str]) -> str:
    """`shown→truth` at the places that predict; where every place does (a next token), the pieces alone."""
    pieces = side["pieces"]
    if len(predicted) >= len(pieces) - 1:
        predicted = {}
    words = [f"{piece}→{predicted[at]}" if at in predicted else piece for at, piece in enumerate(pieces)]
    return plain(" ".join(words), _SHOWN)


def _table(output: Output, tally: Tally, heading: str, fact: str) -> None:
    """The fact that stands out, the statistics, and in a line what was looked for and never found."""
    tested = tally.tested
    rows = []
    never = [
        statistic.name for statistic in tally.statistics.values() if statistic.checks_itself and statistic.holds(0)
    ]
    for statistic in tally.statistics.values():
        if statistic.name in never:
            continue
        interval = defined = ""
        if statistic.expected is not None:
            defined = f"{statistic.defined:.4g}"
            if not statistic.exact:
                low, high = statistic.interval(tested)
                interval = f"{low:.4f} .. {high:.4f}"
        verdict = "" if statistic.expected is None else "holds" if statistic.holds(tested) else "DOES NOT HOLD"
        value = f"{statistic.measured:.4f}" if statistic.count else f"{statistic.measured:.0f}"
        rows.append(
            [statistic.name, value, defined, interval, f"{statistic.count:,.0f}" if statistic.count else "", verdict]
        )
    if fact:
        output.line(fact, "bold")
    print_table(output, ["statistic", "measured", "definition", "interval", "of", ""], rows, heading)
    for name, definition in tally.remarks.items():
        output.line(f"definition of {name}: {definition}")
    if never:
        output.line(f"none of these, as it must be: {'; '.join(never)}")
    together = f"{tested} intervals hold together with {1 - FAMILY:.1%}; " if tested else ""
    output.line(f"{together}what has no definition is only told")
