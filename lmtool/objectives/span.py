"""Masked language modelling over spans, with the span boundary objective.

Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting Spans",
TACL 2020: L = L_MLM + L_SBO, each the mean over its own tokens.

Shape letters: T tokens, M predicted places, H hidden width.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from lmtool.data.split import SplitData
from lmtool.heads.span_boundary import SpanBoundaryHead
from lmtool.learners.baseline import ConstantPredictor
from lmtool.learners.targets import labels_of, places_of
from lmtool.models.base import Backbone
from lmtool.objectives.checks.spans import SpanInspector, SpanPairsInspector, SpanWindowsInspector
from lmtool.objectives.configs import SpanConfig
from lmtool.objectives.examples.masked import MaskedWindows
from lmtool.objectives.examples.masked_pairs import MaskedPairs
from lmtool.objectives.examples.masks import SpanMasks
from lmtool.objectives.mlm import MaskedLanguageModel
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores


class SpanLanguageModel(MaskedLanguageModel):
    """Terms `mlm`, `sbo` where the configuration has the boundary objective, and that of the pairs."""

    config: SpanConfig
    masks = SpanMasks

    def __init__(self, config: SpanConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        if config.boundary:
            head = SpanBoundaryHead(
                backbone.hidden_size, backbone.config.vocab_size, config.boundary_targets,
                config.boundary_position_size, backbone.head_activation, backbone.head_norm_epsilon,
                backbone.embed.token.weight.shape[1],
            )  # fmt: skip
            self.add_head("span_boundary", head)
            self.weights["sbo"] = 1.0

    def inspector(self, examples: MaskedWindows | MaskedPairs, max_length: int) -> SpanInspector:
        kind = SpanWindowsInspector if self.config.pairs == "none" else SpanPairsInspector
        return kind(self, examples, max_length)

    def predictors(self, train: SplitData, examples: MaskedWindows | MaskedPairs) -> dict[str, ConstantPredictor]:
        """Those of masked language modelling; the boundary predicts the same tokens as the masks."""
        predictors = super().predictors(train, examples)
        return predictors | {"sbo": predictors["mlm"]} if self.config.boundary else predictors

    def places(self, batch: Batch) -> dict[str, Tensor]:
        """Those of masked language modelling; the boundary reads the (M, 2) borders of the span of each target."""
        places = super().places(batch)
        return places | {"sbo": self._borders(batch)} if self.config.boundary else places

    def sums(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        sums = super().sums(hidden, batch)
        if self.config.boundary:
            features = self._features(hidden, batch)
            sums["sbo"] = self._boundary.loss_sum(features, self.table_VW, labels_of(batch, "sbo"))
        return sums

    def scores(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Scores]:
        scores = super().scores(hidden, batch)
        if self.config.boundary:
            at, labels = places_of(batch, "sbo"), labels_of(batch, "sbo")
            each, best = self._boundary.scores(self._features(hidden, batch), self.table_VW, labels)
            scores["sbo"] = Scores(each, labels, best, batch.inputs.documents[at])
        return scores

    @property
    def _boundary(self) -> SpanBoundaryHead:
        return cast(SpanBoundaryHead, self.heads["span_boundary"])

    def _features(self, hidden: dict[str, Tensor], batch: Batch) -> Tensor:
        """What the head reads for each place of `sbo`."""
        return self._boundary.features(hidden["sbo"], places_of(batch, "sbo") - self._borders(batch)[:, 0] - 1)

    @staticmethod
    def _borders(batch: Batch) -> Tensor:
        borders_M2 = batch.targets["sbo"].span
        if borders_M2 is None:
            raise ValueError("the batch has no borders of spans")
        return borders_M2
