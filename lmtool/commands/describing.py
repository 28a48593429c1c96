"""Examples as plain data: the text, what the model reads of it, and what it is to predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lmtool.data.plan import Examples
from lmtool.learners.mixture import MixedExamples, Mixture
from lmtool.objectives.checks.statistics import batches_of, has_weights
from lmtool.objectives.examples.masked import MaskedPairs
from lmtool.objectives.rtd import ReplacedTokenDetection
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target


def described(
    examples: Examples, tokenizer: Tokenizer, n: int, labels: tuple[str, ...], learner: Any
) -> Iterator[dict[str, Any]]:
    """The first n examples, of a mixture the first n of each member. labels: names of a task's classes. learner: asked
    for what it makes of an example itself, where it has weights."""
    if n < 1:
        return
    if isinstance(examples, MixedExamples):
        learners = dict(learner.members.items()) if isinstance(learner, Mixture) else {}
        for name, member in examples.members.items():
            for row in described(member, tokenizer, n, labels, learners.get(name)):
                yield {"member": name, **row}
        return
    rows, numbers, epoch, _ = next(batches_of(examples, 1))
    rows, numbers = rows[:n], numbers[:n]
    batch = examples.batch(rows, numbers, epoch)
    texts = _texts(examples, rows, tokenizer)
    filled = None
    if isinstance(learner, ReplacedTokenDetection) and has_weights(learner):
        filled = learner.sampled(batch.to(next(learner.parameters()).device), epoch).filled.to(torch.device("cpu"))
    for number in range(len(numbers)):
        targets = {
            term: _target(batch, term, target, number, tokenizer, labels) for term, target in batch.targets.items()
        }
        entry: dict[str, Any] = {"example": int(numbers[number]), "epoch": epoch}
        if texts:
            entry["text"] = "\n".join(texts[number])
            # Where in the text another document, or the second text of a pair, begins.
            entry["boundaries"] = (np.cumsum([len(text) + 1 for text in texts[number]])[:-1]).tolist()
        entry["input"] = _side(batch.inputs, number, tokenizer)
        if filled is not None:
            entry["filled"] = _side(filled, number, tokenizer)
            targets |= {"rtd": _replaced(learner, batch, filled, number)} if "rtd" in targets else {}
        if batch.outputs is not None:
            entry["output"] = _side(batch.outputs, number, tokenizer)
        yield {**entry, "targets": targets}


def _texts(examples: Any, rows: np.ndarray, tokenizer: Tokenizer) -> list[list[str]]:
    """The texts of each example before anything was done to them, where the examples can tell: documents of a window,
    segments of a pair, columns of a row."""
    if hasattr(examples, "rows"):
        return [[column[int(row)] for column in examples.rows.columns.values()] for row in rows["row"]]
    if hasattr(examples, "stream"):
        return [_documents(examples.stream, int(row["start"]), int(row["length"]), tokenizer) for row in rows]
    if isinstance(examples, MaskedPairs):
        spans = [[(int(row[f"{side}_start"]), int(row[f"{side}_length"])) for side in "ab"] for row in rows]
        tokens = examples.store.tokens
        return [[tokenizer.decode(tokens[at : at + length].tolist()) for at, length in pair] for pair in spans]
    return []


def _documents(stream: Any, start: int, length: int, tokenizer: Tokenizer) -> list[str]:
    """The documents of a window; the tokens that separate them are left out."""
    ids = stream.read(np.array([start]), np.array([length]))
    within = stream.borders[(stream.borders > start) & (stream.borders < start + length)] - start
    return [tokenizer.decode(part.tolist()) for part in np.split(ids, within)]


def _side(packed: Packed, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    part = slice(packed.starts[number], packed.starts[number] + packed.lengths[number])
    ids = packed.tokens[part].tolist()
    side: dict[str, Any] = {"pieces": tokenizer.pieces(ids), "ids": ids}
    side |= {name: column[part].tolist() for name, column in packed.columns.items()}
    return side | ({"prefix": packed.prefixes[number]} if packed.prefixes else {})


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


def _replaced(learner: ReplacedTokenDetection, batch: Batch, filled: Packed, number: int) -> list[dict[str, Any]]:
    """The places whose token is not the original one; all others are original."""
    other_T = (filled.tokens != learner.original(batch)) & (batch.inputs.documents == number)
    start = batch.inputs.starts[number]
    return [{"position": int(at) - start, "label": "replaced"} for at in other_T.nonzero()[:, 0]]
