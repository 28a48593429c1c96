"""Regression: a number for a text or a pair of texts, by squared error (Devlin et al. 2019, section 4.1: STS-B).

Shape letters: N examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantValue
from lmtool.models.base import Backbone
from lmtool.models.heads.predicted import Predicted, Values
from lmtool.models.heads.sequence import SequenceHead
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT, RegressionConfig
from lmtool.tasks.kinds.labels import Origin, cell_text, numbers
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Label, Prediction
from lmtool.tasks.kinds.sequence import SequenceLearner
from lmtool.tasks.kinds.text_to_text import TextToTextLearner, WrittenKind
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores


class Regression(WrittenKind):
    """Rows of texts, each with a value."""

    config: RegressionConfig

    def decoded_labels(self, values: Sequence[object], origin: Origin) -> np.ndarray:
        return numbers(self.config, values, origin)

    def fit_config(self, train: Rows) -> RegressionConfig:
        """Adds the mean and the standard deviation of the values, if they are standardized. Raises UserError if all
        values are equal."""
        if self.config.standardize != "train":
            return self.config
        values = np.asarray(train.labels)
        if not values.std():
            raise UserError(
                f"task.standardize=train: all training rows have the value {values[0]:g}", "omit task.standardize="
            )
        return self.config.model_copy(update={"standardize": (float(values.mean()), float(values.std()))})

    def first_loss(self, train: Rows) -> float | None:
        """Returns the expected loss of a new head, which predicts 0 (standardized: the mean): the mean square of the
        values, or 1 if they are standardized. None if values are generated as text."""
        if self.config.head == TEXT_TO_TEXT:
            return None
        return 1.0 if self.config.standardize else float(np.square(np.asarray(train.labels)).mean())

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        metadata, warnings = super().metadata(train)
        labels = np.asarray(train.labels)
        return {**metadata, "label_range": [float(labels.min()), float(labels.max())]}, warnings

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaskLearner:
        learner = TextToTextLearner if self.config.head == TEXT_TO_TEXT else RegressionLearner
        return learner(self, backbone, tokenizer, seed)

    def label_words(self) -> Sequence[str]:
        return ()

    def label_texts(self, labels: np.ndarray) -> list[str]:
        """Returns the values as texts, rounded to multiples of 0.2 (Raffel et al. 2020, section 2.4)."""
        return [f"{value:.1f}" for value in np.round(labels * 5) / 5 + 0.0]  # + 0.0 turns -0.0 into 0.0

    def parse(self, text: str) -> Prediction | None:
        try:
            value = float(text)
        except ValueError:
            return None
        # A prediction has a value and a score; for numbers both are the same.
        return Prediction(value, value) if np.isfinite(value) else None

    @property
    def invalid_prediction(self) -> Prediction:
        return Prediction(0.0, 0.0)

    def vote(self, part: Prediction) -> np.ndarray:
        """Returns what a part of a long text contributes to the average: its value."""
        return np.array([part.value])

    def prediction_of_votes(self, votes: np.ndarray) -> Prediction:
        return Prediction(float(votes[0]), float(votes[0]))

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the mean of the training rows."""
        mean = float(np.asarray(train.labels).mean())
        return "mean", Prediction(mean, mean)

    def shown(self, value: Label) -> float:
        return float(value)

    def line(self, record: JsonMapping) -> str:
        texts = " | ".join(cell_text(record[name]) for name in self.config.reads)
        return f"{record['prediction']:.3f}  {texts}"


class RegressionLearner(SequenceLearner):
    """Minimizes the squared error, in units of the standard deviation; the training loop divides its sum by the number
    of rows. The head outputs values on the original scale."""

    def __init__(self, kind: Regression, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed, 1)
        mean_and_deviation = self.config.standardize
        mean, self.deviation = mean_and_deviation if isinstance(mean_and_deviation, tuple) else (0.0, 1.0)
        if mean_and_deviation is not None:
            output = cast(SequenceHead, self.heads[self.term]).output
            with torch.no_grad():
                output.weight.mul_(self.deviation)
                if output.bias is not None:
                    output.bias.fill_(mean)

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(outputs[:, 0].float(), self.labels(batch), reduction="sum") / self.deviation**2

    def predicted(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Values(outputs[:, 0], self.deviation)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        labels_N, values_N = self.labels(batch), outputs[:, 0].float()
        losses_N = ((values_N - labels_N) / self.deviation).square()
        return Scores(losses_N, labels_N, values_N, self.documents(batch))

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """Returns the value of each text."""
        values = outputs[:, 0].float().tolist()
        return list(map(Prediction, values, values))

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantValue]:
        """Returns the mean value of the training rows as a constant baseline."""
        return {self.term: ConstantValue("mean", float(np.asarray(self.rows(train).labels).mean()), self.deviation)}
