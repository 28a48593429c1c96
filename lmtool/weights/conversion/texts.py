"""An exported folder as a user of transformers would use it, beside what `lmtool predict` does with the checkpoint.

Tokenizer and settings are read from the folder's files as AutoTokenizer reads them, rows are padded, and the folder's
weights read those; on the other side texts are laid out and packed as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtool.data.assembly import Template
from lmtool.data.configs import FORMATS
from lmtool.data.formats import text_format
from lmtool.data.plan import Examples
from lmtool.data.split import Rows
from lmtool.models.configs import ModelConfig
from lmtool.session.trained import has_segments
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.texts import SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch
from lmtool.weights.comparing import Comparison, difference, tokenized
from lmtool.weights.exporting import Reading
from lmtool.weights.folders import read_settings
from lmtool.weights.heads import CheckpointModel, format_of
from lmtool.weights.load import Loaded

_TEXTS = (
    ("A", "b"),
    ("The dog sleeps", "It does."),
    ("What a lovely film!", "An awful one; nobody should have to see it, nobody at all."),
    ("She sells sea shells by the sea shore, and has for many years.", "Ångström naïve 中文 3.14"),
)


def layout_of(model: ModelConfig, task: Mapping[str, Any] | None, tokenizer: Tokenizer) -> str | None:
    """The format in which the exported model reads a text; None where it continues one, which stands as it is, and
    where the vocabulary lacks what the format puts around texts."""
    if task is None and model.architecture == "decoder":
        return None
    name = model.text_format if task is None else format_of(model, task)
    return name if set(FORMATS[name].roles) <= set(tokenizer.roles) else None


def reading_of(
    model: ModelConfig, saved: Mapping[str, Any], task: Mapping[str, Any] | None, tokenizer: Tokenizer
) -> Reading:
    """How AutoTokenizer is to read texts. Those of a masked language model may hold masks."""
    segments = has_segments(model)
    if task is None:
        return Reading(segments, model.max_positions, False)
    return Reading(segments, saved["max_length"], not tokenizer.parse_special_tokens)


@torch.no_grad()
def compare_texts(
    comparison: Comparison,
    original: TaskLearner | CheckpointModel,
    again: Loaded,
    folder: Path,
    layout: str,
    tokenizer: Tokenizer,
) -> None:
    """Enter the differences on texts and on pairs, each as long as the folder allows. original: a task's learner, or a
    backbone with its heads. layout: the format that it reads."""
    settings = read_settings(folder)
    longest, split = settings["model_max_length"], bool(settings.get("split_special_tokens"))
    texts = list(_TEXTS)
    if split:
        texts += [(f"so {written} it", f"is {written}") for written in tokenizer.pieces(tokenizer.roles.values())]
    for kind, rows in (("texts", [(first,) for first, _ in texts]), ("pairs", texts)):
        overhead = Template.of(text_format(layout, tokenizer), len(rows[0])).overhead
        fitting = [row for row in rows if sum(map(len, tokenizer.encode_batch(row))) + overhead <= longest]
        if isinstance(original, TaskLearner):
            if not original.takes_texts(len(rows[0])):
                continue
            fitting = [row for row in fitting if _is_whole(original, row, longest)]
        if fitting:
            comparison.texts[kind] = _difference(original, again, folder, layout, tokenizer, fitting, longest)


def _is_whole(original: TaskLearner, row: tuple[str, ...], longest: int) -> bool:
    """Whether the task reads all of a row, and in one piece."""
    facts = original.examples_of_texts([row], longest).facts()
    return facts["examples"] == 1 and not facts.get("truncated") and not facts.get("cut_questions")


def _difference(
    original: TaskLearner | CheckpointModel,
    again: Loaded,
    folder: Path,
    layout: str,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, ...]],
    longest: int,
) -> float:
    """The largest difference in what is predicted; infinite where a text is read as other tokens or segments."""
    columns = tuple(list(column) for column in zip(*texts, strict=True))
    examples: Examples
    if isinstance(original, TaskLearner):
        examples = original.examples_of_texts(texts, longest)
    else:
        rows = Rows.of_texts(**{f"text{number}": column for number, column in enumerate(columns)})
        examples = SequenceExamples(rows, tokenizer, layout, longest, "sample", "sample")
    plan = examples.plan(0)
    batch = examples.batch(plan.rows, plan.rows["row"].copy(), 0)
    read = tokenized(folder, *columns)
    real = read["attention_mask"].bool()
    none = torch.zeros_like(read["input_ids"])
    ours = batch.inputs.columns.get("segment", none[real]) if _has_segments(again) else none[real]
    if not torch.equal(read["input_ids"][real], batch.inputs.tokens):
        return float("inf")
    if not torch.equal(read.get("token_type_ids", none)[real], ours):
        return float("inf")
    if isinstance(original, CheckpointModel) and again.config.architecture == "encoder_decoder":
        return 0.0  # what its decoder continues has nothing to do with how texts are read
    copied = again.model(**read)
    theirs = [copied.hidden[real], copied.pair_logits]
    if isinstance(original, TaskLearner):
        logits, target = copied.logits, batch.targets.get(original.term)
        if original.scores_tokens and logits is not None:
            logits = logits[real] if target is None or target.at is None else logits[real][target.at]
        theirs = [logits]
    pairs = zip(_predicted(original, batch), theirs, strict=True)
    differences = [
        difference(mine, other) / max(1.0, float(mine.abs().max()))
        for mine, other in pairs
        if mine is not None and other is not None
    ]
    return float(torch.tensor(differences).max())  # no number where one is none


def _has_segments(loaded: Loaded) -> bool:
    return loaded.config.segment_types > 1


def _predicted(original: TaskLearner | CheckpointModel, batch: Batch) -> list[Tensor | None]:
    """A task's outputs; else the hidden states, and the logits over pairs where there are any."""
    if isinstance(original, TaskLearner):
        return [original.outputs(batch, 0)]
    hidden_TH = original.hidden(batch.inputs, None)
    return [hidden_TH, original.pair_logits(hidden_TH, batch.inputs)]
