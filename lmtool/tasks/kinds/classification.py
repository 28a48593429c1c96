"""Classification of a text or a pair of texts (Devlin et al. 2019, section 4.1).

Shape letters: N examples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Rows, SplitData, unlabeled_name
from lmtool.data.formats import FormatTemplate, assemble, text_format, truncate_texts
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor
from lmtool.learners.inspection import Inspector
from lmtool.learners.model import hidden_at, indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.lm import LMHead, lm_head, masked_lm_head
from lmtool.models.heads.predicted import Classes, Predicted, PredictedWords
from lmtool.models.heads.sequence import summary_index
from lmtool.tasks.configs.base import ANSWER, PROMPT
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT
from lmtool.tasks.kinds.classes import NamedClassKind, TextClassLearner, with_class_weights
from lmtool.tasks.kinds.labels import balanced_weights
from lmtool.tasks.kinds.learner import TaskEvaluation, TaskInspector, TaskLearner, TaskScorer
from lmtool.tasks.kinds.predictions import Label, Prediction
from lmtool.tasks.kinds.sequence import SequenceLearner
from lmtool.tasks.kinds.text_learner import PairFormat, TextPairs
from lmtool.tasks.kinds.text_to_text import TextToTextLearner, WrittenKind
from lmtool.tasks.kinds.texts import EncodedTexts
from lmtool.tasks.prompting.examples import (
    ANSWERS,
    AUXILIARY_TERM,
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
    """Returns the prompt of each row, filled with the word of its class, to train a tokenizer on."""
    template, words = PromptTemplate(config.template), config.words
    labels = np.zeros(len(rows), dtype=np.int64) if rows.labels is None else np.asarray(rows.labels)
    values = [dict(zip(rows.columns, texts, strict=True)) for texts in zip(*rows.columns.values(), strict=True)]
    return [[template.example(words[label], texts) for label, texts in zip(labels, values, strict=True)]]


class PromptInspector(TaskInspector):
    """Inspects prompts. Shows classes with their words."""

    def label(self, value: Label, of_token: bool) -> object:
        if of_token:  # of the auxiliary masked texts
            return Inspector.label(self, value, of_token)
        return f"{super().label(value, of_token)}: {self.learner.config.words[int(value)]}"


class DemonstrationScorer(TaskScorer):
    """Averages the loss of a row over its samples of demonstrations."""

    def result(self) -> TaskEvaluation:
        evaluation = super().result()
        if evaluation.losses is None:
            return evaluation
        return replace(evaluation, losses=evaluation.losses / self.parts_N)


class PromptedLearner(TextClassLearner):
    """Classification by a prompt: the score of a class is the logit of its word at the answer's position."""

    words: Tensor
    scorer_class = DemonstrationScorer
    inspector_class = PromptInspector

    def __init__(self, kind: Classification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        config = kind.config
        problem = config.first_conflict(backbone.config)
        if problem is not None:
            raise UserError(problem.message, problem.hint)
        self.fills_mask = backbone.config.architecture == "encoder"
        (self.lm_name,) = config.pretrained_heads(backbone.config)
        self.add_head(self.lm_name, masked_lm_head(backbone) if self.fills_mask else lm_head(backbone))
        if config.auxiliary_mlm:
            self.loss_weights = {self.term: 1.0 - config.auxiliary_mlm, AUXILIARY_TERM: config.auxiliary_mlm}
        self.set_loss(config.loss)
        tokens = [0] * len(config.words)
        if tokenizer is not None:  # parameter counting passes no tokenizer
            self.pattern = Pattern(config.template, tokenizer)
            self.mask = tokenizer.role("mask") if self.fills_mask else None
            tokens = label_tokens(self.pattern, config.labels or (), config.words)
        self.tokens = tokens
        self.register_buffer("words", torch.tensor(tokens), persistent=False)

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads[self.lm_name])

    def examples(self, data: SplitData, max_length: int) -> PromptedExamples:
        config, rows = self.config, self.rows(data)
        text_template = FormatTemplate.of(text_format(config.text_format(self.backbone.config), self.tokenizer), 1)
        wording = Wording(self.pattern, text_template, self.mask, self.tokens)
        demonstrations = auxiliary = None
        if config.demonstrations:
            demonstrations = Demonstrations(
                config.demonstration_rows or {},
                config.labels,
                config.text,
                self.pattern,
                config.demonstrations,
                self.seed,
            )
        if config.auxiliary_mlm and data.split == "train":
            texts = data.rows.get(unlabeled_name(config.name), rows)
            auxiliary = Auxiliary(texts, self.pattern, wording.template(False), max_length, self.seed)
        return PromptedExamples(rows, wording, max_length, self.term, data.split, demonstrations, auxiliary)

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = super().counts(batch)
        if AUXILIARY_TERM in batch.targets:
            counts[AUXILIARY_TERM] = float(len(labels_of(batch, AUXILIARY_TERM)))
        return counts

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (N, C): logits of the words of the classes."""
        read_N = send(self.answer_indices(batch.host), batch.inputs.tokens.device)
        return self._word_logits(self.hidden(batch.inputs, rng=self.dropout_rng(batch, step), read_M=read_N))

    def forward(self, batch: Batch, step: int) -> StepOutput:
        if AUXILIARY_TERM not in batch.targets:
            return super().forward(batch, step)
        indices = {self.term: self.answer_indices(batch.host), AUXILIARY_TERM: indices_of(batch.host, AUXILIARY_TERM)}
        hidden = hidden_at(
            self.backbone, batch, indices, None if self.is_feature_extractor else self.dropout_rng(batch, step)
        )
        mlm_loss = self._lm.loss_sum(hidden[AUXILIARY_TERM], self.table_VW, labels_of(batch, AUXILIARY_TERM))
        total = self.training_loss(self._word_logits(hidden[self.term]), batch)
        return StepOutput({self.term: total, AUXILIARY_TERM: mlm_loss}, self.loss_weights)

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """Adds the auxiliary language modeling loss of a uniform prediction."""
        mlm_loss = self.loss_weights.get(AUXILIARY_TERM, 0.0) * math.log(self.backbone.config.vocab_size)
        return super().baseline_loss(batches, predictors) + mlm_loss

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """Assigns predictions to terms: with auxiliary language modeling, the same head predicts the words of classes
        and the masked words of texts."""
        return (self.term, Classes(logits)) if isinstance(logits, Tensor) else (AUXILIARY_TERM, PredictedWords(logits))

    def answer_indices(self, batch: Batch) -> Tensor:
        """Returns (N,): flat indices, on the host, of the tokens that predict the answers."""
        if self.fills_mask:
            return batch.inputs.columns[ANSWERS].nonzero()[:, 0]
        return summary_index(batch.inputs, "last")

    def _word_logits(self, hidden_NH: Tensor) -> Tensor:
        return self._lm.of_tokens(hidden_NH, self.table_VW, self.words)


class PromptWriter(TextToTextLearner):
    """Classification by a prompt with an encoder-decoder, which reads the prompt and writes the word of the class. If
    text follows the answer, the prompt has a gap token in its place."""

    def __init__(self, kind: Classification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        if tokenizer is not None:
            self.pieces = _with_gap(Pattern(kind.config.template, tokenizer))

    def pairs(self, rows: Rows) -> Rows:
        return replace(rows, labels=self.references(rows))

    def examples(self, data: SplitData, max_length: int) -> PromptPairs:
        pattern = Pattern(self.config.template, self.tokenizer)
        return PromptPairs(self.pair_format(max_length), self.pairs(self.rows(data)), data.split, pattern, self.pieces)


class PromptPairs(TextPairs):
    """Examples of a prompt and the word to write. pieces: the tokens around the texts of a prompt."""

    def __init__(self, pair_format: PairFormat, rows: Rows, split: str, pattern: Pattern, pieces: list[list[int]]):
        self.pattern, self.pieces = pattern, pieces
        super().__init__(pair_format, rows, split)

    def encode_sources(self, capacity: int) -> tuple[EncodedTexts, int]:
        template = FormatTemplate(tuple(np.array(tokens, dtype=np.int64) for tokens in self.pieces), {}, {})
        columns = len(template.pieces) - 1
        texts = PatternTexts(self.rows, self.pattern)
        retained = truncate_texts(
            texts.lengths[:columns], prompt_capacity(capacity, template.special_count, columns), "bert"
        )
        row_E = np.arange(len(self.rows))
        cells = [(text.read(row_E, lengths), lengths) for text, lengths in zip(texts.texts, retained, strict=False)]
        assembled = assemble(template, cells)
        truncated = int(np.sum((retained < texts.lengths[:columns]).any(axis=0)))
        return EncodedTexts(assembled.tokens, assembled.lengths), truncated


def _with_gap(pattern: Pattern) -> list[list[int]]:
    """If text follows the answer, the model's gap token takes the answer's place."""
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


class Classification(NamedClassKind, WrittenKind):
    """Rows of texts, each with the number of its class."""

    config: ClassificationConfig

    def fit_config(self, train: Rows) -> ClassificationConfig:
        """Adds class weights and demonstrations, if they are configured. Raises UserError if the number of labels does
        not fit the weights or metrics."""
        super().fit_config(train)
        config = with_class_weights(self.config, balanced_weights(np.asarray(train.labels), len(self.classes)))
        if config.demonstrations and config.demonstration_rows is None:
            rows = sample_demonstration_rows(train, self.classes)
            config = config.model_copy(update={"demonstration_rows": rows})
        return config

    def candidates(self, rows: Rows) -> list[tuple[str, ...]]:
        """Returns the words of the classes, the same for every row."""
        problem = self.config.ambiguous("task")
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

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        return prompted_texts(self.config, rows) if self.config.head == PROMPT else super().texts(rows)

    @property
    def label_smoothing(self) -> float:
        return self.config.loss.label_smoothing

    def label_words(self) -> Sequence[str]:
        return self.config.words if self.config.head == PROMPT else self.config.written_labels

    def label_texts(self, labels: np.ndarray) -> list[str]:
        words = self.label_words()
        return [words[label] for label in labels]

    def parse(self, text: str) -> Prediction | None:
        """Returns the class whose name or word the text is, with probability 1; None for any other text."""
        words = list(self.label_words())
        return Prediction(words.index(text), 1.0) if text in words else None

    @property
    def invalid_prediction(self) -> Prediction:
        """An additional class, for texts that name no class."""
        return Prediction(len(self.classes), 0.0)

    def join(self, parts: Sequence[Label]) -> Prediction:
        """Averages the logits over the samples of demonstrations."""
        if not self.config.demonstrations:
            return super().join(parts)
        logs = np.log(np.maximum([part.probabilities for part in parts], np.finfo(np.float32).tiny))
        return self.prediction_of_votes(np.exp(logs.mean(axis=0)))

    def vote(self, part: Prediction) -> np.ndarray:
        return np.asarray(part.probabilities)

    def prediction_of_votes(self, votes: np.ndarray) -> Prediction:
        probabilities = votes / votes.sum()
        return Prediction(int(probabilities.argmax()), float(probabilities.max()), probabilities)


class ClassificationLearner(SequenceLearner, TextClassLearner):
    """Classification by a head over the whole text."""

    def __init__(self, kind: Classification, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed, len(kind.classes))
        self.set_loss(kind.config.loss)
