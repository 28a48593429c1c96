"""One of several classes for a text or a pair of texts (Devlin et al. 2019, section 4.1).

Shape letters: N examples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.tasks.configs import ClassificationConfig
from lmtool.tasks.configs.base import PROMPT
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT
from lmtool.tasks.kinds.classes import ClassLearner, OneClassKind
from lmtool.tasks.kinds.labels import balanced_weights, class_names, class_numbers, class_warnings, label_counts
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.prompted import PromptedLearner, PromptWriter, prompted_texts
from lmtool.tasks.kinds.sequence import SequenceLearner
from lmtool.tasks.kinds.text_to_text import TextToTextLearner, WrittenKind
from lmtool.tasks.prompting.examples import kept_rows
from lmtool.tokenizers.tokenizer import Tokenizer


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
                "give one weight a label, in their order, or task.loss.class_weights=balanced",
            )
        if "f1" in self.config.metrics and len(names) != 2:
            raise UserError(
                f"task.metrics names f1, which is of two classes; the data have {len(names)}",
                "take macro_f1, accuracy or matthews",
            )
        if self.config.demonstrations and self.config.demonstration_rows is None:
            values["demonstration_rows"] = kept_rows(train, names)
        return type(self.config).model_validate(values)

    def facts(self, train: Rows) -> tuple[dict[str, Any], list[str]]:
        facts, warnings = super().facts(train)
        counts = label_counts(np.asarray(train.labels), self.config.labels or ())
        return {**facts, "labels": counts}, [*warnings, *class_warnings(counts)]

    def candidates(self, rows: Rows) -> list[tuple[str, ...]]:
        """The words of the classes, the same for every row."""
        problem = self.config.ambiguous()
        if problem is not None:
            raise UserError(problem.message, problem.hint)
        return [self.config.words] * len(rows)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaskLearner:
        if self.config.head == TEXT_TO_TEXT:
            return TextToTextLearner(self, backbone, tokenizer, seed)
        if self.config.head != PROMPT:
            return ClassificationLearner(self, backbone, tokenizer, seed)
        writes = backbone.config.architecture == "encoder_decoder"
        return (PromptWriter if writes else PromptedLearner)(self, backbone, tokenizer, seed)

    @property
    def classes(self) -> Sequence[str]:
        return self.config.labels or ()

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        return prompted_texts(self.config, rows) if self.config.head == PROMPT else super().texts(rows)

    def label_words(self) -> Sequence[str]:
        return self.config.words if self.config.head == PROMPT else self.config.written_labels

    def written(self, labels: np.ndarray) -> list[str]:
        words = self.label_words()
        return [words[label] for label in labels]

    def parsed(self, text: str) -> Prediction | None:
        """The class of this name, or of this word, sure where there is one."""
        words = list(self.label_words())
        return Prediction(words.index(text), 1.0) if text in words else None

    @property
    def wrong(self) -> Prediction:
        """A class beside the others."""
        return Prediction(len(self.classes), 0.0)

    def join(self, parts: Sequence[Any]) -> Prediction:
        """Beside several demonstrations the mean of the logits decides."""
        if not self.config.demonstrations:
            return super().join(parts)
        logs = np.log(np.maximum([part.probabilities for part in parts], np.finfo(np.float32).tiny))
        return self.elected(np.exp(logs.mean(axis=0)))

    def vote(self, part: Prediction) -> np.ndarray:
        return np.asarray(part.probabilities)

    def elected(self, votes: np.ndarray) -> Prediction:
        shares = votes / votes.sum()
        return Prediction(int(shares.argmax()), float(shares.max()), shares)


class ClassificationLearner(SequenceLearner, ClassLearner):
    """By a head over the whole text."""

    def __init__(self, kind: Classification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        SequenceLearner.__init__(self, kind, backbone, tokenizer, seed, len(kind.config.labels or ()))
        self.weigh(kind.config)
