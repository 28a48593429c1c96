"""One of several classes for a text or a pair of texts (Devlin et al. 2019, section 4.1).

Shape letters: N examples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.plan import Examples
from lmtool.data.split import Rows, SplitData
from lmtool.errors import UserError
from lmtool.heads.losses import loss_sum, losses
from lmtool.learners.baseline import ConstantPredictor
from lmtool.models.base import Backbone
from lmtool.tasks.configs import ClassificationConfig
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT
from lmtool.tasks.kinds.base import Prediction
from lmtool.tasks.kinds.labels import balanced_weights, class_names, class_numbers, label_counts
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.one_class import OneClassKind
from lmtool.tasks.kinds.sequence import SequenceLearner
from lmtool.tasks.kinds.text_to_text import TextToTextLearner, WrittenKind
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput


class Classification(OneClassKind, WrittenKind):
    """Rows of texts with the number of a class each."""

    config: ClassificationConfig

    def with_labels(self, columns: Mapping[str, list[Any]], origin: Sequence[tuple[str, int]]) -> ClassificationConfig:
        """The classes by name: those of the configuration, else the different values of the training column."""
        if self.config.labels is not None:
            return self.config
        names = class_names(self.config, columns[self.config.label], origin)
        return self.config.model_copy(update={"labels": names})

    def decoded_labels(self, values: Sequence[Any], origin: Sequence[tuple[str, int]]) -> np.ndarray:
        return class_numbers(self.config, self.config.labels or (), values, origin)

    def fitted(self, train: Rows) -> ClassificationConfig:
        """With a weight for each class, where the loss has weights. UserError where labels and scores do not fit."""
        names = self.config.labels or ()
        values = self.config.model_dump()
        if self.config.loss.class_weights == "balanced":
            values["loss"]["class_weights"] = balanced_weights(np.asarray(train.labels), len(names))
        weights = values["loss"]["class_weights"]
        if isinstance(weights, tuple) and len(weights) != len(names):
            raise UserError(
                f"task.loss.class_weights has {len(weights)} weights for the {len(names)} labels "
                f"{', '.join(names[:8])}",
                "give one weight a label, in their order, or class_weights=balanced",
            )
        if "f1" in self.config.metrics and len(names) != 2:
            raise UserError(
                f"task.metrics names f1, which is of two classes; the data have {len(names)}",
                "take macro_f1, accuracy or matthews",
            )
        return type(self.config).model_validate(values)

    def facts(self, train: Rows) -> tuple[dict[str, Any], list[str]]:
        facts, warnings = super().facts(train)
        counts = label_counts(np.asarray(train.labels), self.config.labels or ())
        absent = [name for name, count in counts.items() if not count]
        if absent:
            warnings = [*warnings, f"no training row has the label {', '.join(absent)}"]
        return {**facts, "labels": counts}, warnings

    def candidates(self, rows: Rows) -> list[tuple[str, ...]]:
        """The words of the classes, the same for every row."""
        words = self.config.prompt.words
        texts = tuple(words.get(label, label.replace("_", " ")) for label in self.classes)
        unknown = [name for name in words if name not in self.classes]
        if unknown:
            raise UserError(
                f"task.prompt.words names {unknown[0]!r}, which is no label of task={self.config.name}",
                f"the labels are {', '.join(self.classes[:8])}",
            )
        if len(set(texts)) < len(texts):
            raise UserError(
                f"task={self.config.name}: two classes have the same word in {', '.join(texts)}",
                "give each its own: task.prompt.words={CLASS: WORD, ...}",
            )
        return [texts] * len(rows)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaskLearner:
        learner = TextToTextLearner if self.config.head == TEXT_TO_TEXT else ClassificationLearner
        return learner(self, backbone, tokenizer, seed)

    @property
    def classes(self) -> Sequence[str]:
        return self.config.labels or ()

    def label_words(self) -> Sequence[str]:
        return self.classes

    def written(self, labels: np.ndarray) -> list[str]:
        return [self.classes[label] for label in labels]

    def parsed(self, text: str) -> Prediction | None:
        """The class of this name, sure where there is one."""
        return Prediction(self.classes.index(text), 1.0) if text in self.classes else None

    @property
    def wrong(self) -> Prediction:
        """A class beside the others."""
        return Prediction(len(self.classes), 0.0)

    def vote(self, part: Prediction) -> np.ndarray:
        return np.asarray(part.probabilities)

    def elected(self, votes: np.ndarray) -> Prediction:
        shares = votes / votes.sum()
        return Prediction(int(shares.argmax()), float(shares.max()), shares)


class ClassificationLearner(SequenceLearner):
    """Cross entropy, smoothed, focal and weighted by class as the task says.

    With class weights the loss is the weighted sum of the losses over the sum of the weights of the labels, as in
    torch; without, the mean over examples. A focal loss is divided by the same, not by its own weights: texts that are
    learned already lower it.
    """

    class_weights: Tensor | None

    def __init__(self, kind: Classification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        config = kind.config
        if config.labels is None or config.loss.class_weights == "balanced":
            raise ValueError("build a task from the config that load_task gives back: its labels are filled in")
        super().__init__(kind, backbone, tokenizer, seed, len(config.labels))
        weights = config.loss.class_weights
        self.loss = config.loss
        self.register_buffer("class_weights", torch.tensor(weights) if weights != "none" else None, persistent=False)

    def counts(self, batch: Batch) -> dict[str, float]:
        labels = self.labels(batch)
        if self.class_weights is None:
            return self.counted(batch, float(len(labels)))
        return self.counted(batch, float(self.class_weights.to(labels.device).double()[labels].sum()))

    def forward(self, batch: Batch, step: int) -> StepOutput:
        labels_N, smoothing, gamma = self.labels(batch), self.loss.label_smoothing, self.loss.focal_gamma
        weights_C = None if self.class_weights is None else self.class_weights.to(labels_N.device)
        return self.stepped(batch, step, lambda logits_NC: loss_sum(logits_NC, labels_N, smoothing, weights_C, gamma))

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Plain cross entropy, whatever smoothing and weights train with."""
        labels_N = self.labels(batch)
        documents = torch.arange(len(labels_N), device=labels_N.device)
        return Scores(losses(outputs, labels_N), labels_N, outputs.argmax(-1), documents)

    def parts(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        """The best class of each text, its probability, and those of all classes."""
        shares_NC = outputs.detach().float().softmax(-1)
        best, classes = shares_NC.max(-1)
        return list(map(Prediction, classes.tolist(), best.tolist(), shares_NC.cpu().numpy()))

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        """The shares of the classes in the training rows."""
        counts = np.bincount(np.asarray(self.rows(train).labels), minlength=len(self.kind.config.labels))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}
