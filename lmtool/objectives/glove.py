"""GloVe: learns word vectors from counts of words that occur together.

Pennington, Socher, Manning, "GloVe: Global Vectors for Word Representation", EMNLP 2014. The counts are sums of
1 / distance within a window of a document. The loss of a pair is weight * (score - log count)^2 (equation 8), and the
vector of a word is the sum of its two vectors (section 4.2). The paper trains with AdaGrad at a rate of 0.05.

Shape letters: N pairs of words.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import SplitData
from lmtool.learners.baseline import WeightedValue
from lmtool.learners.model import labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.sampled import CooccurrenceHead
from lmtool.objectives.checks.language import CooccurrencesInspector
from lmtool.objectives.configs import GloveConfig
from lmtool.objectives.examples.cooccurrences import Cooccurrences
from lmtool.objectives.skip_gram import WordVectorLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput


class Glove(WordVectorLearner):
    """GloVe, with the term `glove`: the mean over pairs of the weighted squared errors."""

    config: GloveConfig
    inspector_class = CooccurrencesInspector

    def __init__(self, config: GloveConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights = {"glove": 1.0}
        self.add_head("glove", CooccurrenceHead(backbone.config.vocab_size, backbone.hidden_size))
        self._total: float | None = None

    @property
    def _head(self) -> CooccurrenceHead:
        return cast(CooccurrenceHead, self.heads["glove"])

    def examples(self, data: SplitData, max_length: int) -> Cooccurrences:
        """Returns the pairs of a split. The counts of held-out text are scaled to the size of the training text; if
        that is not known, they are used as they are."""
        saved_total, special = self._head.total, self.tokenizer.special_ids
        arguments = self.config, data.text, data.split, special, self.tokenizer.vocab_size
        if data.split != "train":
            total = self._total
            if total is None:
                total = 0.0 if saved_total.is_meta else float(saved_total[0])
            return Cooccurrences(*arguments, training_total=total)
        examples = Cooccurrences(*arguments)
        self._total = examples.total
        if not saved_total.is_meta:
            saved_total[0] = examples.total
        return examples

    def predictors(self, train: SplitData, examples: Cooccurrences) -> dict[str, WeightedValue]:
        """Returns the predictor of one count for all pairs."""
        counts = examples.plan(0).rows["count"]
        weights = examples.weights(counts)
        return {"glove": WeightedValue("one count", float((weights * np.log(counts)).sum() / weights.sum()))}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"glove": float(len(labels_of(batch, "glove")))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        losses_N, _ = self._losses(batch)
        return StepOutput({"glove": losses_N.sum()}, self.loss_weights)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss (N,) and the score (N,) of each pair."""
        labels_N2 = labels_of(batch, "glove")
        scores_N = self._head(self.backbone(batch.inputs), batch.inputs.tokens.view(-1, 2))
        return labels_N2[:, 1] * (scores_N - labels_N2[:, 0]) ** 2, scores_N

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        losses_N, scores_N = self._losses(batch)
        documents_N = torch.arange(len(losses_N), device=losses_N.device)
        return {"glove": Scores(losses_N.float(), labels_of(batch, "glove"), scores_N, documents_N)}

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> None:
        """Scores of pairs are not logits of classes."""
        return None
