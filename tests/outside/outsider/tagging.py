"""A tag for each word, in windows of long texts: the window with a word's first token predicts its tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Plan, Rows, SplitData
from lmtool.data.formats import FormatTemplate, assemble, text_format
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor
from lmtool.learners.metrics import compute
from lmtool.models.base import Backbone
from lmtool.models.heads.base import loss_sum, losses
from lmtool.models.heads.sequence import SequenceHead
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, Target
from outsider.configs import TaggingConfig


class Tagging(TaskKind):
    config: TaggingConfig

    def with_labels(self, columns: Any, origin: Any) -> TaggingConfig:
        tags = sorted({tag for value in columns[self.config.label] for tag in value.split()})
        return self.config if self.config.labels else self.config.model_copy(update={"labels": tuple(tags)})

    def rows(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]], labeled: bool) -> Rows:
        words = [value.split() for value in columns[self.config.text[0]]]
        labels = None
        if labeled or self.config.label in columns:
            number = {tag: index for index, tag in enumerate(self.config.labels or ())}
            labels = [[number[tag] for tag in value.split()] for value in columns[self.config.label]]
            for row, (own, tags) in enumerate(zip(words, labels, strict=True)):
                if len(own) != len(tags):
                    raise UserError(f"{origin[row][0]}:{origin[row][1]}: {len(own)} words and {len(tags)} tags")
        return Rows(list(range(len(words))), {self.config.text[0]: words}, labels, origin)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaggingLearner:
        return TaggingLearner(self, backbone, tokenizer, seed)

    def join(self, parts: Sequence[Any]) -> Prediction:
        tags: dict[int, tuple[int, float]] = {}
        for part in parts:
            assert not tags.keys() & part.keys(), "each word is predicted by one window"
            tags |= part
        return Prediction([tags[word][0] for word in sorted(tags)], min(score for _, score in tags.values()))

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        gold = np.concatenate([np.array(tags) for tags in rows.labels])
        return compute(("accuracy",), gold, np.concatenate([np.array(prediction.value) for prediction in predictions]))

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        return "first tag", Prediction([0], 1.0)

    def shown(self, value: Any) -> str | list[str]:
        labels = self.config.labels or ()
        return [labels[tag] for tag in value] if isinstance(value, list) else labels[value]


class Windows:
    """Windows of at most max_length tokens; the first token of each word predicts its tag."""

    def __init__(self, learner: TaggingLearner, rows: Rows, max_length: int, split: str):
        self.term, self.split, self.rows = learner.term, split, rows
        self.template = FormatTemplate.of(text_format(learner.backbone.config.text_format, learner.tokenizer), 1)
        room = max_length - self.template.special_count
        self.encoded = learner.tokenizer.encode_sentences(next(iter(rows.columns.values())))
        records = [
            (row, part, start, min(room, len(ids) - start))
            for row, (ids, _) in enumerate(self.encoded)
            for part, start in enumerate(range(0, len(ids), room))
        ]
        table = np.array(records, dtype=[("row", "i8"), ("part", "i4"), ("start", "i8"), ("length", "i8")])
        self._plan = Plan(table, table["length"] + self.template.special_count)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        before = len(self.template.pieces[0])
        ids, at, words, labels, offset = [], [], [], [], 0
        for record in rows:
            own, word_T = self.encoded[record["row"]]
            window = slice(record["start"], record["start"] + record["length"])
            first_T = np.append(True, word_T[1:] != word_T[:-1])[window]
            places = np.flatnonzero(first_T)
            at.append(offset + before + places)
            words.append(word_T[window][places])
            if self.rows.labels is not None:
                labels.append(np.array(self.rows.labels[record["row"]])[words[-1]])
            ids.append(own[window])
            offset += int(record["length"]) + self.template.special_count
        packed = assemble(self.template, [(np.concatenate(ids), rows["length"])]).packed()
        label_M = torch.from_numpy(np.concatenate(labels)) if labels else None
        target = Target(label_M, at=torch.from_numpy(np.concatenate(at)))
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        parts, row_N = (torch.from_numpy(rows[name].copy()) for name in ("part", "row"))
        packed.columns["word"] = torch.zeros_like(packed.tokens).index_put(
            (target.at,), torch.from_numpy(np.concatenate(words))
        )
        return Batch(packed, {self.term: target}, numbers, parts, rows=row_N)

    def metadata(self) -> dict[str, Any]:
        return {"split": self.split, **self._plan.metadata()}


class TaggingLearner(TaskLearner):
    def __init__(self, kind: Tagging, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        self.add_head(self.term, SequenceHead(backbone.feature_size, len(kind.config.labels or ())))

    def examples(self, data: SplitData, max_length: int) -> Windows:
        return Windows(self, self.rows(data), max_length, data.split)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        target = batch.targets[self.term]
        return self.heads[self.term](self.hidden_of(batch, self.dropout_rng(batch, step), target.at))

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return loss_sum(outputs, self.labels(batch))

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        labels, at = self.labels(batch), batch.targets[self.term].at
        return Scores(losses(outputs, labels), labels, outputs.argmax(-1), batch.inputs.documents[at])

    def parts(self, outputs: Tensor, batch: Batch) -> list[dict[int, tuple[int, float]]]:
        at = batch.targets[self.term].at
        documents, words = batch.inputs.documents[at].tolist(), batch.inputs.columns["word"][at].tolist()
        fractions, tags = outputs.float().softmax(-1).max(-1)
        tagged: list[dict[int, tuple[int, float]]] = [{} for _ in batch.inputs.lengths]
        for document, word, tag, share in zip(documents, words, tags.tolist(), fractions.tolist(), strict=True):
            tagged[document][word] = (tag, share)
        return tagged

    def predictors(self, train: SplitData, examples: Windows) -> dict[str, ConstantPredictor]:
        counts = np.bincount(np.concatenate([np.array(tags) for tags in self.rows(train).labels]))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}

    def baseline(self, train: SplitData, held_out: SplitData, batches: Any, predictors: Any) -> dict[str, Any]:
        """The commonest tag for each word."""
        tag = int(np.argmax(np.bincount(np.concatenate([np.array(tags) for tags in self.rows(train).labels]))))
        rows = self.rows(held_out)
        constant = [Prediction([tag] * len(tags), 1.0) for tags in rows.labels]
        metrics = self.kind.metrics(rows, constant)
        return {"name": "commonest tag", "metric": "accuracy", "value": metrics["accuracy"], "metrics": metrics}
