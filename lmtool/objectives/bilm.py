"""Bidirectional language modeling: predicts each word from the preceding words, and again from the following words.

Peters, Neumann, Iyyer, Gardner, Clark, Lee, Zettlemoyer, "Deep Contextualized Word Representations", 2018, section 3.1.
The two directions have separate LSTMs, and share the word vectors and the softmax. The model reads every word by its
characters; as a target, a word that is not in the vocabulary is the unknown word.

Shape letters: T tokens, H hidden width, M predicting positions, P width of the states of one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from lmtool.data.examples import Examples, SplitData
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.evaluation import Evaluation, TermScorer
from lmtool.learners.metrics.texts import perplexity
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.elmo import Elmo
from lmtool.models.heads.sampled import SampledLMHead, log_uniform
from lmtool.objectives.checks.language import WordInspector
from lmtool.objectives.configs import BilmConfig
from lmtool.objectives.examples.words import BACKWARD, FORWARD, WordWindows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput

_TERMS = (FORWARD, BACKWARD)


class DirectionsScorer(TermScorer):
    """Adds the perplexity of each direction, and the perplexity of the mean loss of both directions."""

    def result(self) -> Evaluation:
        evaluation = super().result()
        directions = {
            f"{term}_perplexity": perplexity(term_evaluation.loss) for term, term_evaluation in evaluation.terms.items()
        }
        return replace(evaluation, scores={"perplexity": perplexity(evaluation.loss), **directions})


class BidirectionalLanguageModel(BaseLearner):
    """Bidirectional language modeling, with the terms `forward` and `backward`, each of weight 1/2. The first half of a
    word's hidden state predicts the next word; the second half predicts the previous word."""

    backbone: Elmo
    inspector_class = WordInspector

    def __init__(self, config: BilmConfig, backbone: Elmo, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights = dict.fromkeys(_TERMS, 0.5)
        half = backbone.hidden_size // 2
        self.add_head("lm", SampledLMHead(half, backbone.config.vocab_size, config.negatives))

    def examples(self, data: SplitData, max_length: int) -> WordWindows:
        reader = self.backbone.reader
        byte_limits = reader.longest, reader.entry_lengths()
        return WordWindows(self.tokenizer, data.text, max_length, data.documents, data.split, byte_limits)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> DirectionsScorer:
        return DirectionsScorer(self, predictors)

    def predictors(self, train: SplitData, examples: WordWindows) -> dict[str, ConstantPredictor]:
        """Returns the unigram predictor of the words in the training text, the same for both directions."""
        vocab_size = self.tokenizer.vocab_size
        continuations = set(range(vocab_size)) - set(examples.begins_V.nonzero()[0].tolist())
        never = (continuations | self.tokenizer.special_ids) - {self.tokenizer.role("eos"), examples.unknown}
        predictor = ConstantPredictor.of_counts("unigram", examples.counts(vocab_size), never)
        return dict.fromkeys(_TERMS, predictor)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {term: float(len(labels_of(batch, term))) for term in _TERMS}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        states, head = self._states(batch, step), self._lm
        sample = None
        if head.sampled is not None and self.training:
            sample = log_uniform(self.backbone.config.vocab_size, head.sampled, self.seed, step)
            sample = sample.to(batch.inputs.tokens.device)
        sums = {
            term: head.loss_sum(hidden_MP, head.output_table, labels_of(batch, term))
            if sample is None
            else head.sampled_loss_sum(hidden_MP, labels_of(batch, term), sample)
            for term, hidden_MP in states.items()
        }
        return StepOutput(sums, self.loss_weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the best prediction of each target, with the full softmax."""
        scores = {}
        for term, hidden_MP in self._states(batch).items():
            labels = labels_of(batch, term)
            losses, best = self._lm.scores(hidden_MP, self._lm.output_table, labels)
            scores[term] = Scores(losses, labels, best, batch.inputs.documents[indices_of(batch, term)])
        return scores

    def _states(self, batch: Batch, step: int | None = None) -> dict[str, Tensor]:
        hidden_TH = self.backbone(batch.inputs, None if step is None else self.dropout_rng(batch, step))
        directions = dict(zip(_TERMS, hidden_TH.chunk(2, 1), strict=True))
        return {term: states.index_select(0, indices_of(batch, term)) for term, states in directions.items()}

    @property
    def _lm(self) -> SampledLMHead:
        return cast(SampledLMHead, self.heads["lm"])
