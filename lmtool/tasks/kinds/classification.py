"""One of several classes for a text or a pair of texts (Devlin et al. 2019, section 4.1).

Shape letters: N examples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmtool.config.needs import refusal
from lmtool.data.examples import Rows, SplitData, unlabelled
from lmtool.data.formats import FormatTemplate, assemble, text_format, truncate_texts
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor
from lmtool.learners.model import hidden_at, indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.lm import LMHead, lm_head, masked_lm_head
from lmtool.models.heads.predicted import Classes, Predicted, PredictedWords
from lmtool.models.heads.sequence import summary_index
from lmtool.tasks.configs import ClassificationConfig
from lmtool.tasks.configs.base import ANSWER, PROMPT
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT
from lmtool.tasks.kinds.classes import ClassLearner, OneClassKind
from lmtool.tasks.kinds.labels import balanced_weights, class_names, class_numbers, class_warnings, label_counts
from lmtool.tasks.kinds.learner import PromptInspector, TaskEvaluation, TaskLearner, TaskScorer
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.sequence import SequenceLearner
from lmtool.tasks.kinds.text_learner import TextPairs
from lmtool.tasks.kinds.text_to_text import TextToTextLearner, WrittenKind
from lmtool.tasks.kinds.texts import EncodedTexts
from lmtool.tasks.prompting.examples import (
    ANSWERS,
    TERM,
    Auxiliary,
    Demonstrations,
    PromptedExamples,
    Wording,
    sample_demonstration_rows,
)
from lmtool.tasks.prompting.pattern import Pattern, PatternTexts, PromptTemplate, label_tokens, prompt_capacity
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, StepOutput, send


def prompted_texts(config: ClassificationConfig, rows: Rows) -> list[Sequence[str]]:
    """Prompts with the word of each row's class: text to train a tokenizer on."""
    template, words = PromptTemplate(config.template), config.words
    labels = np.zeros(len(rows), dtype=np.int64) if rows.labels is None else np.asarray(rows.labels)
    values = [dict(zip(rows.columns, texts, strict=True)) for texts in zip(*rows.columns.values(), strict=True)]
    return [[template.example(words[label], own) for label, own in zip(labels, values, strict=True)]]


class PromptedLearner(ClassLearner):
    """The class scores are the logits of the classes' words."""

    words: Tensor

    def __init__(self, kind: WrittenKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        config: ClassificationConfig = kind.config
        problem = refusal(config, model=backbone.config)
        if problem is not None:
            raise UserError(problem.message, problem.hint)
        self.fills = backbone.config.architecture == "encoder"
        self.pretrained = ("masked_lm",) if self.fills else ("lm",)
        self.add_head(self.pretrained[0], masked_lm_head(backbone) if self.fills else lm_head(backbone))
        if config.auxiliary_mlm:
            self.weights = {self.term: 1.0 - config.auxiliary_mlm, TERM: config.auxiliary_mlm}
        self.weigh(config)
        tokens = [0] * len(config.words)
        if tokenizer is not None:  # parameter counting passes no tokenizer
            self.pattern = Pattern(config.template, tokenizer)
            self.mask = tokenizer.role("mask") if self.fills else None
            tokens = label_tokens(self.pattern, config.labels or (), config.words)
        self.tokens = tokens
        self.register_buffer("words", torch.tensor(tokens), persistent=False)

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads[self.pretrained[0]])

    @property
    def _table(self) -> Tensor:
        return self.backbone.embed.token.weight

    def examples(self, data: SplitData, max_length: int) -> PromptedExamples:
        config, rows = self.config, self.rows(data)
        around = FormatTemplate.of(text_format(config.text_format(self.backbone.config), self.tokenizer), 1)
        wording = Wording(self.pattern, around, self.mask, self.tokens)
        demonstrations = auxiliary = None
        if config.demonstrations:
            demonstrations = Demonstrations(
                config.demonstration_rows or {}, config.labels, config.text, self.pattern, config.demonstrations,
                self.seed,
            )  # fmt: skip
        if config.auxiliary_mlm and data.split == "train":
            texts = data.rows.get(unlabelled(config.name), rows)
            auxiliary = Auxiliary(texts, self.pattern, wording.template(False), ANSWERS, max_length, self.seed)
        return PromptedExamples(rows, wording, max_length, self.term, data.split, demonstrations, auxiliary)

    def inspector(self, examples: object, max_length: int) -> PromptInspector:
        return PromptInspector(self, examples, max_length)

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> TaskScorer:
        rows = self.rows(data)
        return DemonstrationScorer(self, rows, data.split, self.parts_of(rows, examples), predictors.get(self.term))

    def term_counts(self, batch: Batch, count: float) -> dict[str, float]:
        if TERM not in batch.targets:
            return {self.term: count}
        return {self.term: count, TERM: float(len(labels_of(batch, TERM)))}

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(N, C) logits of the words of the classes."""
        read_N = send(self.places(batch.host), batch.inputs.tokens.device)
        return self._of_words(self.hidden(batch.inputs, rng=self.dropout_rng(batch, step), read_M=read_N))

    def stepped(self, batch: Batch, step: int, loss: Callable[[Tensor], Tensor]) -> StepOutput:
        if TERM not in batch.targets:
            return StepOutput({self.term: loss(self.outputs(batch, step))}, self.weights)
        places = {self.term: self.places(batch.host), TERM: indices_of(batch.host, TERM)}
        hidden = hidden_at(self.backbone, batch, places, None if self.extracts else self.dropout_rng(batch, step))
        of_text = self._lm.loss_sum(hidden[TERM], self._table, labels_of(batch, TERM))
        return StepOutput({self.term: loss(self._of_words(hidden[self.term])), TERM: of_text}, self.weights)

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """Adds the auxiliary language modeling loss of a uniform prediction."""
        of_text = self.weights.get(TERM, 0.0) * math.log(self.backbone.config.vocab_size)
        return super().baseline_loss(batches, predictors) + of_text

    def predicted(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """With auxiliary language modeling, one head predicts both the class words and the words of texts."""
        return (self.term, Classes(logits)) if isinstance(logits, Tensor) else (TERM, PredictedWords(logits))

    def places(self, batch: Batch) -> Tensor:
        """(N,) flat indices, on the host, of the tokens that predict the answers."""
        if self.fills:
            return batch.inputs.columns[ANSWERS].nonzero()[:, 0]
        return summary_index(batch.inputs, "last")

    def _of_words(self, hidden_NH: Tensor) -> Tensor:
        return self._lm.of_tokens(hidden_NH, self._table, self.words)


class DemonstrationScorer(TaskScorer):
    """The loss of a row is the mean over its sampled demonstrations."""

    def result(self) -> TaskEvaluation:
        evaluation = super().result()
        if evaluation.losses is None:
            return evaluation
        return replace(evaluation, losses=evaluation.losses / self.parts_N)


class PromptWriter(TextToTextLearner):
    """An encoder-decoder reads the prompt, with a gap at the answer's placeholder if text follows it, and writes the
    word."""

    pretrained = ("lm",)

    def __init__(self, kind: WrittenKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        if tokenizer is not None:
            self.pieces = _with_gap(Pattern(kind.config.template, tokenizer))

    def pairs(self, rows: Rows) -> Rows:
        labels = None if rows.labels is None else [(word,) for word in self.kind.written(np.asarray(rows.labels))]
        return replace(rows, labels=labels)

    def examples(self, data: SplitData, max_length: int) -> PromptPairs:
        pairs, pattern = self.pairs(self.rows(data)), Pattern(self.config.template, self.tokenizer)
        reads = self.writing, pairs, self.tokenizer, self.backbone.config
        return PromptPairs(*reads, max_length, data.split, self.longest_answer, pattern, self.pieces)


class PromptPairs(TextPairs):
    """Prompts and the words to write. pieces: the tokens around the texts of a prompt."""

    def __init__(self, *arguments: Any):
        *others, self.pattern, self.pieces = arguments
        super().__init__(*others)

    def sourced(self, capacity: int) -> tuple[EncodedTexts, int]:
        layout = FormatTemplate(tuple(np.array(tokens, dtype=np.int64) for tokens in self.pieces), {}, {})
        columns = len(layout.pieces) - 1
        texts = PatternTexts(self.rows, self.pattern)
        retained = truncate_texts(texts.lengths[:columns], prompt_capacity(capacity, layout.special_count, columns))
        row_E = np.arange(len(self.rows))
        cells = [(text.read(row_E, own), own) for text, own in zip(texts.texts, retained, strict=False)]
        assembled = assemble(layout, cells)
        cut = int(np.sum((retained < texts.lengths[:columns]).any(axis=0)))
        return EncodedTexts.of_ids(assembled.tokens, assembled.lengths), cut


def _with_gap(pattern: Pattern) -> list[list[int]]:
    """The tokens around a prompt's texts, with the model's gap token at the answer's placeholder if text follows it.
    UserError if the vocabulary has no gap token and a text column follows."""
    tokenizer = pattern.tokenizer
    gaps = [*tokenizer.sentinels[:1], *(number for role, number in tokenizer.roles.items() if role == "mask")]
    if pattern.ends_with_answer or not gaps:
        pieces, _ = pattern.pieces(None)
        if len(pieces) <= len(pattern.columns):
            raise UserError(
                f"task.prompt.template: {{{ANSWER}}} precedes {{{pattern.columns[-1]}}}, and the vocabulary has no "
                "token for a gap",
                "put the answer last",
            )
        return pieces
    return pattern.pieces(gaps[:1])[0]


class Classification(OneClassKind, WrittenKind):
    """Rows of texts with one class number each."""

    config: ClassificationConfig

    def with_labels(
        self, columns: Mapping[str, list[object]], origin: Sequence[tuple[str, int]]
    ) -> ClassificationConfig:
        """Adds the class names, if not configured: the distinct values of the training column."""
        if self.config.labels is not None:
            return self.config
        names = class_names(self.config, columns[self.config.label], origin)
        return self.config.model_copy(update={"labels": names})

    def decoded_labels(self, values: Sequence[object], origin: Sequence[tuple[str, int]]) -> np.ndarray:
        return class_numbers(self.config, self.config.labels or (), values, origin)

    def fitted(self, train: Rows) -> ClassificationConfig:
        """Adds class weights, if configured. UserError if labels do not suit weights or metrics."""
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
                f"task.metrics names f1, which needs two classes; the data have {len(names)}",
                "use macro_f1, accuracy or matthews",
            )
        if self.config.demonstrations and self.config.demonstration_rows is None:
            values["demonstration_rows"] = sample_demonstration_rows(train, names)
        return type(self.config).model_validate(values)

    def metadata(self, train: Rows) -> tuple[dict[str, object], list[str]]:
        metadata, warnings = super().metadata(train)
        counts = label_counts(np.asarray(train.labels), self.config.labels or ())
        return {**metadata, "labels": counts}, [*warnings, *class_warnings(counts)]

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
        """The class with this name or word, at probability 1; None for other texts."""
        words = list(self.label_words())
        return Prediction(words.index(text), 1.0) if text in words else None

    @property
    def wrong(self) -> Prediction:
        """The extra class for texts that name no class."""
        return Prediction(len(self.classes), 0.0)

    def join(self, parts: Sequence[Any]) -> Prediction:
        """Averages the logits over several demonstrations."""
        if not self.config.demonstrations:
            return super().join(parts)
        logs = np.log(np.maximum([part.probabilities for part in parts], np.finfo(np.float32).tiny))
        return self.elected(np.exp(logs.mean(axis=0)))

    def vote(self, part: Prediction) -> np.ndarray:
        return np.asarray(part.probabilities)

    def elected(self, votes: np.ndarray) -> Prediction:
        fractions = votes / votes.sum()
        return Prediction(int(fractions.argmax()), float(fractions.max()), fractions)


class ClassificationLearner(SequenceLearner, ClassLearner):
    """Classification by a head over the whole text."""

    def __init__(self, kind: Classification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        SequenceLearner.__init__(self, kind, backbone, tokenizer, seed, len(kind.config.labels or ()))
        self.weigh(kind.config)
