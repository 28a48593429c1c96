"""`lmtool inspect`: what the model is really fed, decoded, and what was done to the text, beside its definition.

Nothing is trained, and no weights are made: the model stands on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmtool.commands import session as shared
from lmtool.commands.configs import FinetuneConfig, PretrainConfig
from lmtool.config.tables import build
from lmtool.data.plan import Examples
from lmtool.data.store import open_store
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import CheckFailed, UserError
from lmtool.objectives.statistics import batches_of, measure
from lmtool.objectives.tally import FAMILY, Tally
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.reporting.text import plain
from lmtool.tasks.loading import load_task
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

# Characters of an example on the screen; the JSON lines have all of it.
_SHOWN = 2000
_BORDER = " ⏎ "  # between two texts


@dataclass(frozen=True)
class Looking:
    """n: examples to print. tokens: how many are measured. output: file for the examples as JSON lines, or None."""

    n: int = 3
    tokens: int = 200_000
    output: str | None = None

    @classmethod
    def of(cls, words: Sequence[str]) -> Looking:
        """From KEY=VALUE words. UserError where a value is no number."""
        values: dict[str, Any] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key == "output":
                values[key] = value
                continue
            number = value.replace("_", "").replace(",", "")
            if not number.isdigit() or (key == "tokens" and int(number) < 1):
                raise UserError(f"{word}: {key} is a whole number", f"give {key}={getattr(cls, key)}")
            values[key] = int(number)
        return cls(**values)


def run(config: PretrainConfig | FinetuneConfig, verb: str, looking: Looking) -> int:
    """Print examples and statistics. Raises CheckFailed where a statistic is not as defined."""
    output = Output()
    examples, tokenizer, labels = _pretraining(config, output) if isinstance(config, PretrainConfig) else _task(config)
    shown = list(_described(examples, tokenizer, looking.n, labels))
    for one in shown:
        _print(output, one)
    if looking.output is not None:
        lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in shown)
        try:
            Path(looking.output).write_text(lines, encoding="utf-8")
        except OSError as error:
            raise UserError(f"output={looking.output}: {error.strerror}", "give another output=FILE") from error
    tally = measure(examples, looking.tokens, config.max_length)
    facts = examples.facts()
    for name in ("truncated_fraction",):
        if name in facts:
            tally.note(name.replace("_", " "), facts[name], 1)
    what = config.objective.name if isinstance(config, PretrainConfig) else config.task.name
    _table(output, tally, f"{what} · {verb} · model={config.model.name}")
    broken = tally.broken()
    if broken:
        names = "; ".join(one.name for one in broken)
        raise CheckFailed(
            f"{len(broken)} of {len(tally.statistics)} statistics are not as defined: {names}",
            "give another seed=; what fails again is a fault of lmtool: please report it with the table above",
        )
    return 0


Described = tuple[Examples, Tokenizer, tuple[str, ...]]


def _pretraining(config: PretrainConfig, output: Output) -> Described:
    source = build(config.data, config.cache_dir, shared.bar(output))
    tokenizer = shared.starting_tokenizer(config) or trained_tokenizer(
        config.tokenizer, source, config.tokenizer.vocab_size or config.model.vocab_size, config.cache_dir
    )
    shared.require_rows(config.model, tokenizer)
    store = open_store(source, "train", tokenizer, config.cache_dir, shared.bar(output))
    with torch.device("meta"):
        learner = build(config.objective, build(config.model, config.seed), tokenizer, config.seed)
    return learner.examples(store, config.max_length, config.data.documents, "train"), tokenizer, ()


def _task(config: FinetuneConfig) -> Described:
    task = load_task(config.task, config.seed, config.cache_dir, config.offline)
    tokenizer = shared.starting_tokenizer(config)
    if tokenizer is None:
        texts = (text for column in task.train.texts for text in column)
        tokenizer = build(config.tokenizer, texts, config.tokenizer.vocab_size or config.model.vocab_size)
    with torch.device("meta"):
        learner = build(task.config, build(config.model, config.seed), tokenizer, config.seed)
    examples = learner.examples(task.train, config.max_length, "train")
    return examples, tokenizer, tuple(getattr(task.config, "labels", None) or ())


def _described(examples: Examples, tokenizer: Tokenizer, n: int, labels: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The first n examples as plain data."""
    if n < 1:
        return
    rows, numbers, epoch, _ = next(batches_of(examples, 1))
    rows, numbers = rows[:n], numbers[:n]
    batch = examples.batch(rows, numbers, epoch)
    texts = _texts(examples, rows, tokenizer)
    for number in range(len(numbers)):
        yield {
            "example": int(numbers[number]),
            "epoch": epoch,
            **({"text": texts[number]} if texts else {}),
            "input": _side(batch.inputs, number, tokenizer),
            **({"output": _side(batch.outputs, number, tokenizer)} if batch.outputs is not None else {}),
            "targets": {
                term: _target(batch, term, one, number, tokenizer, labels) for term, one in batch.targets.items()
            },
        }


def _texts(examples: Any, rows: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The texts before anything was done to them, where the examples can tell."""
    if hasattr(examples, "assemble"):
        whole = examples.assemble(rows)
        ids, lengths = whole.tokens, whole.lengths
    elif hasattr(examples, "stream"):
        lengths = rows["length"].astype(np.int64)
        ids = examples.stream.read(rows["start"], lengths)
    elif hasattr(examples, "rows"):
        columns = examples.rows.texts
        return [_BORDER.join(column[int(row)] for column in columns) for row in rows["row"]]
    else:
        return []
    return [_decoded(part, tokenizer) for part in np.split(ids, np.cumsum(lengths)[:-1])]


def _decoded(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of ids, with a sign where one text ends and another begins. What is unknown to the vocabulary stays."""
    between = [number for role, number in tokenizer.roles.items() if role != "unk"]
    texts = [part[~np.isin(part, between)] for part in np.split(ids, np.flatnonzero(np.isin(ids, between)))]
    return _BORDER.join(tokenizer.decode(one, skip_special=False) for one in texts if len(one))


def _side(packed: Packed | None, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    assert packed is not None
    part = slice(packed.starts[number], packed.starts[number] + packed.lengths[number])
    ids = packed.tokens[part].tolist()
    made: dict[str, Any] = {"pieces": tokenizer.pieces(ids), "ids": ids}
    made |= {name: column[part].tolist() for name, column in packed.columns.items()}
    return made | ({"prefix": packed.prefixes[number]} if packed.prefixes else {})


def _target(batch: Batch, term: str, target: Target, number: int, tokenizer: Tokenizer, labels: tuple[str, ...]) -> Any:
    """A class or value; or for each place its position, the piece to predict, and the borders it is read from."""
    if target.labels is None:
        return "made in the step"
    if target.at is None:
        value = target.labels[number].item()
        return labels[int(value)] if labels and isinstance(value, int) else value
    side = batch.inputs if target.side == "inputs" else batch.outputs
    assert side is not None
    mine = (side.documents[target.at] == number).nonzero()[:, 0].tolist()
    start = side.starts[number]
    places = []
    for row in mine:
        place = {"position": int(target.at[row]) - start, "label": tokenizer.pieces([int(target.labels[row])])[0]}
        if target.span is not None:
            place["borders"] = (target.span[row] - start).tolist()
        places.append(place)
    return places


def _print(output: Output, example: dict[str, Any]) -> None:
    """One example: its text, each side as pieces with what is predicted behind an arrow, and its classes."""
    output.line(f"example {example['example']}, epoch {example['epoch']}", "bold")
    rows = []
    if "text" in example:
        rows.append(("text", plain(example["text"], _SHOWN)))
    predicted = {
        term: {place["position"]: place["label"] for place in places}
        for term, places in example["targets"].items()
        if isinstance(places, list)
    }
    on_inputs = next(iter(predicted.values()), {}) if "output" not in example else {}
    rows.append(("input", _pieces(example["input"], on_inputs)))
    if "output" in example:
        rows.append(("output", _pieces(example["output"], next(iter(predicted.values()), {}))))
    for term, value in example["targets"].items():
        rows.append((term, f"{len(value)} places" if isinstance(value, list) else str(value)))
        borders = [place["borders"] for place in value if "borders" in place] if isinstance(value, list) else []
        if borders:
            rows.append((f"{term} borders", " ".join(f"{a}..{b}" for a, b in sorted({(a, b) for a, b in borders}))))
    if "prefix" in example["input"]:
        rows.append(("prefix", f"{example['input']['prefix']} tokens"))
    _tell(output, rows)
    output.line()


def _tell(output: Output, rows: list[tuple[str, str]]) -> None:
    """The rows, on a terminal with what is predicted and the special tokens set off."""
    if not output.live:
        output.rows(rows)
        return
    from rich.text import Text

    for label, text in rows:
        line = Text(f" {label:<12} ", style="dim")
        body = Text(text)
        body.highlight_regex(r"\S+→\S+", "bold yellow")
        body.highlight_regex(r"(?<!\S)(\[[A-Z]+\]|</?[a-z_0-9|]+>)(?!\S)", "cyan")
        output.console.print(line.append_text(body))
        output.log(line.plain)


def _pieces(side: dict[str, Any], predicted: dict[int, str]) -> str:
    """`shown→truth` at the places that predict; where every place does (a next token), the pieces alone."""
    pieces = side["pieces"]
    if len(predicted) >= len(pieces) - 1:
        predicted = {}
    words = [f"{piece}→{predicted[at]}" if at in predicted else piece for at, piece in enumerate(pieces)]
    return plain(" ".join(words), _SHOWN)


def _table(output: Output, tally: Tally, heading: str) -> None:
    tested = tally.tested
    rows = []
    for one in tally.statistics.values():
        interval = defined = ""
        if one.expected is not None:
            defined = f"{one.defined:.4g}"
            if not one.exact:
                half = one.half_width(tested)
                interval = f"{one.measured - half:.4f} .. {one.measured + half:.4f}"
        verdict = "" if one.expected is None else "holds" if one.holds(tested) else "DOES NOT HOLD"
        value = f"{one.measured:.0f}" if one.exact else f"{one.measured:.4f}"
        rows.append([one.name, value, defined, interval, "" if one.exact else f"{one.count:,.0f}", verdict])
    print_table(output, ["statistic", "measured", "definition", "interval", "of", ""], rows, heading)
    together = f"{tested} intervals hold together with {1 - FAMILY:.1%}; " if tested else ""
    output.line(f"{together}what has no definition is only told")
