"""Classes as words in a prompt (Schick and Schuetze 2021, section 3; Gao et al. 2021): a row is read as its template,
and the language model's own head says how probable each class's word is in the place of the answer. An encoder fills a
mask, a decoder continues, an encoder-decoder writes the word.

Shape letters: N texts, M places that are read, H hidden width, C classes.
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
from lmtool.data.assembly import Template as Layout
from lmtool.data.assembly import assemble
from lmtool.data.formats import text_format, truncate_texts
from lmtool.data.split import Rows, SplitData, unlabelled
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor
from lmtool.learners.targets import hidden_at, labels_of, places_of
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.lm import LMHead, lm_head, masked_lm_head
from lmtool.models.heads.predicted import Classes, Predicted, PredictedWords
from lmtool.models.heads.sequence import summary_index
from lmtool.tasks.configs import ClassificationConfig
from lmtool.tasks.configs.base import ANSWER
from lmtool.tasks.kinds.classes import ClassLearner
from lmtool.tasks.kinds.learner import PromptInspector, TaskEvaluation, TaskScorer
from lmtool.tasks.kinds.text_learner import TextPairs
from lmtool.tasks.kinds.text_to_text import TextToTextLearner, WrittenKind
from lmtool.tasks.kinds.texts import EncodedTexts
from lmtool.tasks.prompting.examples import ANSWERS, TERM, Auxiliary, Demonstrations, PromptedExamples, Wording
from lmtool.tasks.prompting.pattern import Pattern, PatternTexts, PromptTemplate, label_tokens, room_for_texts
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, StepOutput, send


def prompted_texts(config: ClassificationConfig, rows: Rows) -> list[Sequence[str]]:
    """Rows in words, each with that of its class: text from which a tokenizer can be trained."""
    template, words = PromptTemplate(config.template), config.words
    labels = np.zeros(len(rows), dtype=np.int64) if rows.labels is None else np.asarray(rows.labels)
    values = [dict(zip(rows.columns, texts, strict=True)) for texts in zip(*rows.columns.values(), strict=True)]
    return [[template.example(words[label], own) for label, own in zip(labels, values, strict=True)]]


class PromptedLearner(ClassLearner):
    """The scores of a text's classes are the logits of their words, and of no others."""

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
        if tokenizer is not None:  # without one, parameters are counted alone
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
        around = Layout.of(text_format(config.text_format(self.backbone.config), self.tokenizer), 1)
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

    def inspector(self, examples: Any, max_length: int) -> PromptInspector:
        return PromptInspector(self, examples, max_length)

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> TaskScorer:
        rows = self.rows(data)
        return DrawsScorer(self, rows, data.split, self.parts_of(rows, examples), predictors.get(self.term))

    def counted(self, batch: Batch, count: float) -> dict[str, float]:
        if TERM not in batch.targets:
            return {self.term: count}
        return {self.term: count, TERM: float(len(labels_of(batch, TERM)))}

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(N, C) logits of the words of the classes."""
        read_N = send(self.places(batch.host), batch.inputs.tokens.device)
        return self._of_words(self.hidden(batch.inputs, draws=self.draws(batch, step), read_M=read_N))

    def stepped(self, batch: Batch, step: int, loss: Callable[[Tensor], Tensor]) -> StepOutput:
        if TERM not in batch.targets:
            return StepOutput({self.term: loss(self.outputs(batch, step))}, self.weights)
        places = {self.term: self.places(batch.host), TERM: places_of(batch.host, TERM)}
        hidden = hidden_at(self.backbone, batch, places, None if self.extracts else self.draws(batch, step))
        of_text = self._lm.loss_sum(hidden[TERM], self._table, labels_of(batch, TERM))
        return StepOutput({self.term: loss(self._of_words(hidden[self.term])), TERM: of_text}, self.weights)

    def uninformed_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """With auxiliary language modelling, also what guessing among all tokens loses."""
        of_text = self.weights.get(TERM, 0.0) * math.log(self.backbone.config.vocab_size)
        return super().uninformed_loss(batches, predictors) + of_text

    def predicted(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """The words of the classes, and with auxiliary language modelling those of the texts, come of one head."""
        return (self.term, Classes(logits)) if isinstance(logits, Tensor) else (TERM, PredictedWords(logits))

    def places(self, batch: Batch) -> Tensor:
        """(N,) flat indices, on the host, of the tokens at which the answers are predicted."""
        if self.fills:
            return batch.inputs.columns[ANSWERS].nonzero()[:, 0]
        return summary_index(batch.inputs, "last")

    def _of_words(self, hidden_NH: Tensor) -> Tensor:
        return self._lm.of_tokens(hidden_NH, self._table, self.words)


class DrawsScorer(TaskScorer):
    """The loss of a row is the mean over its draws of demonstrations."""

    def result(self) -> TaskEvaluation:
        evaluation = super().result()
        if evaluation.losses is None:
            return evaluation
        return replace(evaluation, losses=evaluation.losses / self.parts_N)


class PromptWriter(TextToTextLearner):
    """An encoder-decoder reads the prompt, with a gap in the place of the answer where something follows it, and writes
    the word."""

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
    """Prompts and the words that are written. pieces: the tokens around the texts of a prompt."""

    def __init__(self, *arguments: Any):
        *others, self.pattern, self.pieces = arguments
        super().__init__(*others)

    def sourced(self, room: int) -> tuple[EncodedTexts, int]:
        layout = Layout(tuple(np.array(tokens, dtype=np.int64) for tokens in self.pieces), {}, {})
        columns = len(layout.pieces) - 1
        texts = PatternTexts(self.rows, self.pattern)
        kept = truncate_texts(texts.lengths[:columns], room_for_texts(room, layout.overhead, columns))
        row_E = np.arange(len(self.rows))
        cells = [(text.read(row_E, own), own) for text, own in zip(texts.texts, kept, strict=False)]
        assembled = assemble(layout, cells)
        cut = int(np.sum((kept < texts.lengths[:columns]).any(axis=0)))
        return EncodedTexts.of_ids(assembled.tokens, assembled.lengths), cut


def _with_gap(pattern: Pattern) -> list[list[int]]:
    """The tokens of a prompt around its texts, with the model's mark of a gap in the place of an answer that something
    follows. UserError where the vocabulary has none and a text follows."""
    tokenizer = pattern.tokenizer
    gaps = [*tokenizer.sentinels[:1], *(number for role, number in tokenizer.roles.items() if role == "mask")]
    if pattern.ends_with_answer or not gaps:
        pieces, _ = pattern.pieces(None)
        if len(pieces) <= len(pattern.columns):
            raise UserError(
                f"task.prompt.template: {{{ANSWER}}} stands before {{{pattern.columns[-1]}}}, and the vocabulary has "
                "no token for a gap",
                "put the answer last",
            )
        return pieces
    return pattern.pieces(gaps[:1])[0]
