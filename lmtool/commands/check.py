"""`lmtool check`: statistics and problems of a data set, before training on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.configs import DataConfig
from lmtool.data.files import collect_errors
from lmtool.data.sources import Source, documents, open_source
from lmtool.errors import CheckFailed, UserError
from lmtool.reporting.console import Output
from lmtool.reporting.inspection import print_failed_rows, print_findings
from lmtool.resolver.commands import CheckConfig
from lmtool.session.open_run import tokenizer_at
from lmtool.session.requests import write_output
from lmtool.system.terminal import counted
from lmtool.tasks.checking import LabeledTexts, compare, read_valid_rows, texts_of_splits

MAX_SHARED = 0.01
"""Maximum fraction of held-out rows, or of words of held-out text, that may occur in the training data."""


def run(config: CheckConfig) -> JsonObject:
    """Reads the data, prints and writes the findings. Raises CheckFailed if rows cannot be read, or if more than
    MAX_SHARED of the held-out data occurs in the training data."""
    if (config.task is None) == (config.data is None):
        raise UserError("lmtool check needs either task= or data=", "lmtool check task=mydata.csv")
    output = Output()
    length_of, unit = _length_function(config)
    summaries: JsonObject = {}
    if config.task is not None:
        for member in config.task.member_configs():
            data, problems = read_valid_rows(member, config.seed, config.cache_dir, config.offline)
            summary: JsonObject = {"failing": [problem.message for problem in problems], "splits": {}}
            if data is not None:
                settings = (config.max_length, config.listed, config.seed, output.stage)
                splits = compare(texts_of_splits(data), config.near, length_of, *settings)
                metadata = {"warnings": data.metadata.get("warnings", []), "source": data.metadata.get("source")}
                summary = {**metadata, **summary, "splits": splits}
            summaries[member.name] = summary
    elif config.data is not None:
        summaries[config.data.name] = _text_summary(config, config.data, length_of, output)
    max_tokens = config.max_length if unit == "tokens" else None
    for name, summary in summaries.items():
        print_failed_rows(output, name, summary["failing"], config.listed)
        print_findings(output, name, summary, unit, max_tokens, config.listed)
    if config.output is not None:
        write_output(config.output, [{"data": name, **summary} for name, summary in summaries.items()])
    failing = [problem for summary in summaries.values() for problem in summary["failing"]]
    leaks = [(name, split) for name, summary in summaries.items() for split in _leaking_splits(summary["splits"])]
    if failing:
        raise CheckFailed(f"{counted(len(failing), 'row')} failed", "correct or remove them; see the list above")
    if leaks:
        largest_count = max(summaries[name]["splits"][split]["in_training"]["equal"] for name, split in leaks)
        split_names = ", ".join(f"{split} of {name}" for name, split in leaks)
        hint = (
            "remove them from one split, since scores on them say little; "
            f"listed={largest_count} output=FILE.jsonl lists them all"
        )
        if config.data is not None:
            message = f"more than {MAX_SHARED:.0%} of the words of {split_names} also occur in the training text"
            raise CheckFailed(message, f"validate on other text with data.validation=FILE, or {hint}")
        raise CheckFailed(
            f"more than {MAX_SHARED:.0%} of the rows of {split_names} also occur in the training rows", hint
        )
    return summaries


def _leaking_splits(splits: JsonMapping) -> list[str]:
    return [split for split, summary in splits.items() if summary.get("in_training", {}).get("share", 0) > MAX_SHARED]


def _text_summary(
    config: CheckConfig, text: DataConfig, length_of: Callable[[Sequence[str]], list[int]], output: Output
) -> JsonObject:
    with collect_errors() as problems:
        source = open_source(text, config.cache_dir, output.stage, config.offline)
        splits = {
            split: LabeledTexts.of_documents(_Documents(source, split), split) for split in ("train", "validation")
        }
        settings = (config.max_length, config.listed, config.seed, output.stage)
        summary = compare(splits, config.near, length_of, *settings)
    metadata = {name: value for name, value in source.metadata().items() if isinstance(value, int | str)}
    messages = list(dict.fromkeys(problem.message for problem in problems))  # since text is read more than once
    return {"source": metadata, "warnings": [], "failing": messages, "splits": summary}


@dataclass(frozen=True)
class _Documents:
    """The documents of a split, read again at each iteration."""

    source: Source
    split: str

    def __iter__(self) -> Iterator[str]:
        return documents(self.source.parts(self.split))


def _length_function(config: CheckConfig) -> tuple[Callable[[Sequence[str]], list[int]], str]:
    if config.checkpoint is None:
        return lambda texts: [len(text.split()) for text in texts], "words"
    tokenizer = tokenizer_at(config.checkpoint, config.offline)
    return lambda texts: [len(ids) for ids in tokenizer.encode_batch(list(texts))], "tokens"
