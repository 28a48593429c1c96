"""Skip-gram with negative sampling: learns word vectors from text.

Mikolov, Sutskever, Chen, Corrado, Dean, "Distributed Representations of Words and Phrases and their Compositionality",
NeurIPS 2013, section 2.2. A word of frequency f is dropped with the probability of the paper,
1 - sqrt(t / f); the published code uses another formula. A negative sample may equal the predicted word, as in equation
4 of the paper.

Shape letters: M pairs of a word and a context word, J negatives of a pair, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.base import Answers, BaseLearner, Inference, Responder
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.sampled import WordPairsHead
from lmtool.objectives.checks.language import WordPairsInspector
from lmtool.objectives.configs import SkipGramConfig
from lmtool.objectives.examples.words import WordCounts, WordPairs
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput

_NEIGHBORS = 5
"""Number of nearest words shown for a word."""


class WordVectorLearner(BaseLearner):
    """The base class of objectives that train word vectors, which are compared by their cosines."""

    @torch.no_grad()
    def nearest_words(self, ids: Sequence[int]) -> list[list[object]]:
        """Returns the words whose vectors have the largest cosines with the mean vector of some words, each with its
        cosine. ids: the ids of these words, which are left out."""
        table_VH = self.backbone.embed.token.weight[: self.tokenizer.vocab_size].float()
        mean_H = F.normalize(table_VH[list(ids)].mean(0), dim=0)
        cosine_V = F.normalize(table_VH, dim=1) @ mean_H
        cosine_V[[*self.tokenizer.special_ids, *ids]] = -2.0  # below every cosine
        values, best = cosine_V.topk(min(_NEIGHBORS, len(cosine_V)))
        return list(map(list, zip(self.tokenizer.pieces(best.tolist()), values.tolist(), strict=True)))

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Returns the first n distinct words of a batch with their nearest words, as in `NeighborResponder.answers`."""
        ids = list(dict.fromkeys(batch.inputs.tokens.tolist()))[:n]
        return [{"text": self.tokenizer.pieces([word])[0], "neighbours": self.nearest_words([word])} for word in ids]

    def responder(self) -> NeighborResponder:
        return NeighborResponder(self)


class SkipGram(WordVectorLearner):
    """Skip-gram with negative sampling.

    The loss has two terms, whose sum is the objective of the paper as a mean over pairs: `skip_gram` is the mean over
    pairs of -log sigmoid(score), and `negatives` is J times the mean over negatives of -log sigmoid(-score).
    """

    config: SkipGramConfig
    inspector_class = WordPairsInspector

    def __init__(self, config: SkipGramConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights = {"skip_gram": 1.0, "negatives": float(config.negatives)}
        head = WordPairsHead(backbone.config.vocab_size, backbone.hidden_size, 1 + config.negatives)
        self.add_head("skip_gram", head)
        self._counts: WordCounts | None = None

    @property
    def _head(self) -> WordPairsHead:
        return cast(WordPairsHead, self.heads["skip_gram"])

    def examples(self, data: SplitData, max_length: int) -> WordPairs:
        """Words are subsampled and negatives sampled by the word counts of the training text, or else of the split
        itself."""
        if self._counts is None:
            self._counts = WordCounts(self.config, self.tokenizer)
        word_counts, saved_counts = self._counts, self._head.counts
        if data.split == "train":
            word_counts.add(token_counts(data.text.tokens, self.tokenizer.vocab_size))
            if not saved_counts.is_meta:
                saved_counts[: len(word_counts.counts)] = torch.from_numpy(word_counts.counts)
        elif not word_counts.counts.any():
            has_saved_counts = not saved_counts.is_meta and bool(saved_counts.any())
            size = self.tokenizer.vocab_size
            word_counts = WordCounts(self.config, self.tokenizer)
            word_counts.add(
                saved_counts[:size].cpu().numpy() if has_saved_counts else token_counts(data.text.tokens, size)
            )
        return WordPairs(self.config, data.text, max_length, data.split, self.seed, word_counts)

    def predictors(self, train: SplitData, examples: WordPairs) -> dict[str, ConstantPredictor]:
        """Returns the predictor that gives each word a constant score: the log of its frequency among context words
        divided by its frequency among negatives."""
        counts, negatives = examples.counts, self.config.negatives
        context_V = counts.counts * counts.retention + 1  # 1 is added, so that no word has the frequency 0
        odds_V = context_V / context_V.sum() / (negatives * np.maximum(counts.noise, 1e-12))
        return {
            "skip_gram": ConstantPredictor("unigram", np.log1p(1 / odds_V)),
            "negatives": ConstantPredictor("unigram", np.log1p(odds_V)),
        }

    def counts(self, batch: Batch) -> dict[str, float]:
        return {term: float(len(labels_of(batch, term))) for term in self.loss_weights}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        pair_scores_M, negative_scores_MJ = self._scores(batch)
        sums = {"skip_gram": F.softplus(-pair_scores_M).sum(), "negatives": F.softplus(negative_scores_MJ).sum()}
        return StepOutput(sums, self.loss_weights)

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels_M, negatives = labels_of(batch, "skip_gram"), self.config.negatives
        words = torch.cat([labels_M[:, None], labels_of(batch, "negatives").view(-1, negatives)], 1)  # (M, 1 + J)
        scores = self._head(self.backbone(batch.inputs), indices_of(batch, "skip_gram"), words)
        return scores[:, 0], scores[:, 1:]

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """A pair counts as correct if its score is above those of all of its negatives; a negative counts as correct if
        its score is below that of its pair."""
        pair_scores_M, negative_scores_MJ = self._scores(batch)
        signed_scores = {"skip_gram": pair_scores_M, "negatives": -negative_scores_MJ.reshape(-1)}
        above_MJ = pair_scores_M[:, None] > negative_scores_MJ
        correct = {"skip_gram": above_MJ.all(1), "negatives": above_MJ.reshape(-1)}
        scores = {}
        for term, term_scores in signed_scores.items():
            labels, documents = labels_of(batch, term), batch.inputs.documents[indices_of(batch, term)]
            predictions = torch.where(correct[term], labels, -1)
            scores[term] = Scores(F.softplus(-term_scores.float()), labels, predictions, documents)
        return scores


class NeighborResponder(Responder):
    """Names the nearest words of texts."""

    learner: WordVectorLearner

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """Returns for each `text` its nearest words (`neighbours`), each with its cosine. Reading the records raises
        UserError if a text has no word of the vocabulary."""
        return Answers(map(self._neighbors, rows.columns["text"]))

    def _neighbors(self, text: str) -> JsonObject:
        tokenizer = self.learner.tokenizer
        ids = [token for token in tokenizer.encode(text).tolist() if token not in tokenizer.special_ids]
        if not ids:
            raise UserError(f"{text[:80]!r} has no word of the vocabulary", "use a word of the training text")
        return {"text": text, "neighbours": self.learner.nearest_words(ids)}

    def line(self, record: JsonObject) -> str:
        return record["text"] + "  " + ", ".join(f"{word} {cosine:.2f}" for word, cosine in record["neighbours"])
