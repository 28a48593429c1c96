"""`lmtool generate`: generates text. A decoder continues the prompt, an encoder-decoder answers it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lmtool.data.rows import text_cell
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.writing import Writer
from lmtool.reporting.console import Output, SafeStream
from lmtool.resolver.commands import FinetuneConfig, GenerateConfig
from lmtool.session.requests import Origin, check_output, input_lines, input_table, write_output
from lmtool.session.trained import Trained, load_trained
from lmtool.session.unfinished import UnfinishedOutput, unfinished_output
from lmtool.system.terminal import counted, visible
from lmtool.weights.base import digest


@dataclass(frozen=True)
class Requested:
    """What a command generates from. texts: the prompts as typed. prompts: their tokens. settings: how tokens are
    chosen."""

    trained: Trained
    learner: BaseLearner
    writer: Writer
    texts: list[str]
    prompts: list[list[int]]
    settings: GenerationConfig


def requested(config: GenerateConfig, output: Output) -> Requested:
    """Reads the checkpoint and the prompts, and prints warnings about both."""
    trained = load_trained(config)
    learner = trained.learner()
    writer = learner.writer()
    texts, origin = _prompts(config, trained)
    prompts = writer.prompts(texts, origin)
    defaults = trained.saved.get("generation", {})
    generation = GenerationConfig.model_validate(
        {name: getattr(config, name) for name in GenerationConfig.model_fields}
    )
    settings = generation.with_published(defaults)
    if unused := settings.differences(defaults):
        output.line(f"settings of the checkpoint that are not used: {' '.join(unused)}", "yellow")
    limit = min(writer.model.limit(len(prompt), settings.max_new_tokens) for prompt in prompts)
    if limit < settings.max_new_tokens:
        output.warn(f"the model has room for {limit} of max_new_tokens={settings.max_new_tokens}")
    return Requested(trained, learner, writer, texts, prompts, settings)


def run(config: GenerateConfig) -> None:
    """Reads the prompts and generates. The text of a single prompt is printed token by token."""
    check_output(config.output)
    output = Output()
    request = requested(config, output)
    trained, writer, settings = request.trained, request.writer, request.settings
    texts, prompts = request.texts, request.prompts
    is_streamed = config.output is None and len(texts) == 1 and settings.beams == 1 and writer.is_streamable(prompts[0])
    stream = _StreamedText(writer, texts[0], prompts[0]) if is_streamed else None
    write = partial(writer.write, prompts, settings, config.seed, config.batch_tokens)
    with trained.precision.autocast():
        if config.output is not None:
            # Everything that determines the tokens, or which of them are one batch.
            weights = digest(trained.weights.tensors)
            determining = [weights, trained.saved.get("model"), prompts, settings.model_dump(), config.seed]
            determining += [config.batch_tokens, trained.precision.name]
            with unfinished_output(config.output, determining) as unfinished:
                generated = _continue(write, unfinished, len(prompts), output)
                answers = zip(texts, prompts, generated, strict=True)
                rows = ({"prompt": text, "text": writer.full_text(text, prompt, ids)} for text, prompt, ids in answers)
                write_output(config.output, rows)
            output.line(f"{counted(len(texts), 'text')} written to {config.output}")
            return
        generated = write() if stream is None else write(watch=stream)
    if stream is not None:
        stream.end()
        return
    for text, prompt, ids in zip(texts, prompts, generated, strict=True):
        output.line(writer.full_text(text, prompt, ids))


def _continue(
    write: Callable[..., list[list[int]]], unfinished: UnfinishedOutput, count: int, output: Output
) -> list[list[int]]:
    file = unfinished.file
    unfinished.lines()  # without the line that a killed process left incomplete
    file.seek(0)
    try:
        finished = {int(number): list(map(int, tokens)) for number, tokens in map(json.loads, file)}
    except (ValueError, TypeError) as error:
        raise unfinished.damaged() from error
    if finished:
        output.line(f"continues after {len(finished):,} of {counted(count, 'text')}, which were generated before")
    with output.bar("generating") as progress:

        def keep(texts: Mapping[int, list[int]]) -> None:
            file.write(b"".join(f"{json.dumps(row)}\n".encode() for row in texts.items()))
            file.flush()
            finished.update(texts)
            progress(len(finished), count)

        return write(finished=dict(finished), keep=keep)


class _StreamedText:
    def __init__(self, writer: Writer, prompt_text: str, prompt: Sequence[int]):
        self.writer, self.prompt_text, self.prompt = writer, prompt_text, prompt
        self.tokens: list[int] = []
        self.stream, self.printed = SafeStream(sys.stdout), 0
        self._print()

    def __call__(self, number: int, token: int) -> None:
        self.tokens.append(token)
        self._print()

    def _print(self, last: bool = False) -> None:
        text = self.writer.full_text(self.prompt_text, self.prompt, self.tokens)
        resolved = text if last else text.rstrip("\ufffd")
        if len(resolved) > self.printed:
            lines = resolved[self.printed :].split("\n")
            self.stream.write("\n".join(map(visible, lines)))
            self.stream.flush()
            self.printed = len(resolved)

    def end(self) -> None:
        self._print(last=True)
        self.stream.write("\n")
        self.stream.flush()


def _prompts(config: GenerateConfig, trained: Trained) -> tuple[list[str], Origin]:
    if config.prompt is not None:
        return [config.prompt], [("prompt", 1)]
    assert config.input is not None
    task = trained.config.task if isinstance(trained.config, FinetuneConfig) else None
    table = input_table(config.input, task)
    if table is None:
        return input_lines(config.input)
    name = config.column or (task.text[0] if task is not None else "text")
    aliases = {} if task is None else {alias: column for column, alias in task.aliases.items()}
    values = table.columns.get(name, table.columns.get(aliases.get(name, name)))
    if values is None:
        raise UserError(
            f"input={config.input}: no column {name}; its first line names {', '.join(table.columns)}",
            "set column=NAME; if the file has no header line, add one; if it has one text per line, rename it to .txt",
        )
    return [text_cell(place, name, value) for value, place in zip(values, table.origin, strict=True)], table.origin
