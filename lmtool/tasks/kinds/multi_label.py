"""Multi-label classification: a binary decision for each class of a text or a pair of texts.

Shape letters: N examples, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantRates, Predictor
from lmtool.learners.metrics import Metric
from lmtool.learners.metrics.scores import MULTI_LABEL, best_thresholds, compute_multi_label
from lmtool.models.base import Backbone
from lmtool.models.heads.base import binary_losses
from lmtool.models.heads.predicted import Binary, Predicted
from lmtool.tasks.configs.sequence import MultiLabelConfig
from lmtool.tasks.kinds.classes import ClassLearner, require_one_per_class, with_class_weights
from lmtool.tasks.kinds.labels import Columns, Origin, class_names, class_numbers, class_warnings, text_of_label
from lmtool.tasks.kinds.predictions import Label, Prediction, PredictionColumns, values_of
from lmtool.tasks.kinds.sequence import SequenceLearner, WindowedKind
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores


class MultiLabel(WindowedKind):
    """Rows of texts with (C,) binary labels. Predictions are (C,) float32 probabilities and, after the thresholds are
    applied, (C,) int8 decisions."""

    config: MultiLabelConfig

    def with_labels(self, columns: Columns, origin: Origin) -> MultiLabelConfig:
        if self.config.labels is not None:
            return self.config
        rows, words = self._classes(columns[self.config.label])
        if not words:
            raise UserError(
                f"task.label={self.config.label} is empty in all {len(origin)} training rows: nothing to learn",
                "name another column with task.label=",
            )
        names = class_names(self.config, words, [origin[row] for row in rows])
        return self.config.model_copy(update={"labels": names})

    def _classes(self, values: Sequence[object]) -> tuple[list[int], list[str]]:
        rows, words = [], []
        for row, value in enumerate(values):
            parts = value if isinstance(value, list | tuple) else text_of_label(value).split(self.config.delimiter)
            names = [word for word in map(text_of_label, parts) if word]
            rows += [row] * len(names)
            words += names
        return rows, words

    def decoded_labels(self, values: Sequence[object], origin: Origin) -> np.ndarray:
        """Returns (N, C) float32."""
        rows, words = self._classes(values)
        labels_NC = np.zeros((len(values), len(self.classes)), dtype=np.float32)
        labels_NC[rows, class_numbers(self.config, self.classes, words, [origin[row] for row in rows])] = 1
        return labels_NC

    def fit_config(self, train: Rows) -> MultiLabelConfig:
        """Adds class weights, if they are configured. Raises UserError if the number of weights or thresholds is not
        the number of labels."""
        require_one_per_class("thresholds", self.config.thresholds, self.classes)
        counts_C = np.asarray(train.labels).sum(axis=0)
        weights_C = np.where(counts_C > 0, (len(train) - counts_C) / np.maximum(counts_C, 1), 1.0)
        return with_class_weights(self.config, tuple(np.maximum(weights_C, 1 / max(len(train), 1)).tolist()))

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        metadata, warnings = super().metadata(train)
        labels_NC = np.asarray(train.labels)
        counts = {name: int(count) for name, count in zip(self.classes, labels_NC.sum(axis=0), strict=True)}
        metadata |= {"labels": counts, "labels_a_row": round(float(labels_NC.sum(axis=1).mean()), 2)}
        return metadata, [*warnings, *class_warnings(counts)]

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> MultiLabelLearner:
        return MultiLabelLearner(self, backbone, tokenizer, seed)

    def vote(self, part: Prediction) -> np.ndarray:
        return np.asarray(part.value)

    def prediction_of_votes(self, votes: np.ndarray) -> Prediction:
        return Prediction(votes, float(votes.max()))

    def scores_of(self, labels: np.ndarray, values: np.ndarray) -> dict[str, float]:
        return compute_multi_label(self.config.metrics, labels, values)

    @property
    def metric(self) -> Metric:
        return MULTI_LABEL[self.config.metric]

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the constant baseline: the classes that more than half of the training rows have."""
        frequencies_C = np.asarray(train.labels).mean(axis=0)
        return "majority", Prediction((frequencies_C > 0.5).astype(np.int8), float((1 - frequencies_C).min()))

    def shown(self, value: Label) -> str:
        """Returns the names of the classes joined with the delimiter, as in a text column."""
        return self.config.delimiter.join(compress(self.classes, value))

    def line(self, record: JsonMapping) -> str:
        return super().line({**record, "prediction": record["prediction"] or "none"})


class MultiLabelLearner(SequenceLearner, ClassLearner):
    """Minimizes binary cross entropies with the task's label smoothing, focal loss and weights: the mean over texts and
    classes, as in torch. Weights and focal factors do not change the divisor."""

    def __init__(self, kind: MultiLabel, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed, len(kind.classes))
        self.set_loss(kind.config.loss)
        thresholds = torch.full((len(kind.classes),), 0.5, dtype=torch.float64, device=self.device)
        self.heads[self.term].register_buffer("thresholds", thresholds)

    def target_count(self, batch: Batch) -> float:
        return float(self.labels(batch).numel())

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        loss, weights_C = self.loss, self.weights_on(outputs.device)
        return binary_losses(outputs, self.labels(batch), loss.label_smoothing, loss.focal_gamma, weights_C).sum()

    def predicted(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Binary(outputs.flatten())

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Returns plain binary cross entropies, and decisions at a probability of 0.5."""
        labels_NC = self.labels(batch)
        documents = self.documents(batch).repeat_interleave(labels_NC.shape[1])
        losses_NC, decisions_NC = binary_losses(outputs, labels_NC), outputs >= 0
        return Scores(losses_NC.flatten(), labels_NC.flatten().long(), decisions_NC.flatten().long(), documents)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """Returns the probability of each class, and the maximum."""
        probabilities_NC = outputs.detach().float().sigmoid()
        best_N = probabilities_NC.amax(-1).tolist()
        return list(map(Prediction, probabilities_NC.cpu().numpy(), best_N))

    def calibrate(self, rows: Rows, predictions: Sequence[Prediction]) -> None:
        """Tunes the thresholds on labeled rows; they are stored with the head."""
        if self.config.thresholds is None:
            thresholds_C = best_thresholds(np.asarray(rows.labels), np.asarray(values_of(predictions)))
            self.heads[self.term].get_buffer("thresholds").copy_(torch.from_numpy(thresholds_C))

    def with_thresholds(self, predictions: Sequence[Prediction]) -> Sequence[Prediction]:
        """Returns 0 or 1 for each class; the score is the probability of the least certain decision."""
        thresholds_C = np.asarray(self.config.thresholds)
        if self.config.thresholds is None:
            thresholds_C = self.heads[self.term].get_buffer("thresholds").cpu().numpy()
        decided = PredictionColumns(len(predictions))
        for row, prediction in enumerate(predictions):
            probabilities_C = np.asarray(prediction.value)
            decisions_C = probabilities_C >= thresholds_C
            certainty = np.where(decisions_C, probabilities_C, 1 - probabilities_C).min()
            decided.put(row, Prediction(decisions_C.astype(np.int8), float(certainty), probabilities_C))
        return decided

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, Predictor]:
        """Returns the frequency of each class in the training rows."""
        labels_NC = np.asarray(self.rows(train).labels)
        return {self.term: ConstantRates.of_counts("base rate", labels_NC.sum(axis=0), len(labels_NC))}
