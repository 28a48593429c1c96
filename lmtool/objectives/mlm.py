"""Masked language modeling, over tokens or spans, with or without next-sentence or sentence-order prediction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import SplitData
from lmtool.learners.baseline import ConstantPredictor
from lmtool.learners.model import hidden_at, indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits, loss_sum, losses
from lmtool.models.heads.lm import MaskedLMHead, masked_lm_head
from lmtool.models.heads.predicted import Predicted
from lmtool.models.heads.sequence import SequenceHead, SpanBoundaryHead, pooler, summary_index
from lmtool.objectives.checks.masking import MaskedPairsInspector, MaskedWindowsInspector, MaskingInspector
from lmtool.objectives.checks.spans import SpanInspector, SpanPairsInspector, SpanWindowsInspector
from lmtool.objectives.clm import unigram
from lmtool.objectives.configs import PairsConfig, SpanConfig
from lmtool.objectives.examples.masked import MaskedExamples, MaskedWindows, SpanMasks
from lmtool.objectives.examples.pairs import MaskedPairs
from lmtool.objectives.filling import MaskFiller
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput

# Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
# NAACL 2019, section 3.1; dynamic masks: Liu et al., "RoBERTa", 2019, section 4.1; sentence order: Lan et al.,
# "ALBERT", 2020, section 3.1.
# Shape letters: T tokens, N examples, M predicted positions, H hidden width, V vocabulary, W width of its table.


# The head of each term over pairs.
_PAIR_HEADS = {"nsp": "next_sentence", "sop": "sentence_order"}
# The term of each head.
_TERMS = {
    "masked_lm": "mlm", "enhanced_masked_lm": "mlm", "span_boundary": "sbo",
    **{head: term for term, head in _PAIR_HEADS.items()},
}  # fmt: skip


class MaskedLanguageModel(MaskFiller):
    """Terms `mlm` and, with pairs=nsp or sop, one of that name; the loss is their sum. Class 1 of `nsp` is a random
    second segment, of `sop` a second segment that precedes the first."""

    config: PairsConfig

    def __init__(self, config: PairsConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head(_masked_lm_name(config), masked_lm_head(backbone, config.enhanced_decoder))
        self.weights = {"mlm": 1.0}
        if config.pairs != "none":
            self.add_head("pooler", pooler(backbone))
            self.add_head(_PAIR_HEADS[config.pairs], SequenceHead(backbone.hidden_size, 2))
            self.weights[config.pairs] = 1.0

    def examples(self, data: SplitData, max_length: int) -> MaskedExamples:
        return self.masked_examples(MaskedWindows if self.config.pairs == "none" else MaskedPairs, data, max_length)

    def inspector(self, examples: MaskedExamples, max_length: int) -> MaskingInspector:
        kind = MaskedWindowsInspector if self.config.pairs == "none" else MaskedPairsInspector
        return kind(self, examples, max_length)

    def predictors(self, train: SplitData, examples: MaskedExamples) -> dict[str, ConstantPredictor]:
        """Unigrams of the training store without special tokens, which are never predicted, and the frequencies of the
        pairs' classes."""
        predictors = {"mlm": unigram(train, self.tokenizer)}
        if self.config.pairs != "none":
            classes = np.bincount(examples.plan(0).rows["label"], minlength=2)
            predictors[self.config.pairs] = ConstantPredictor.of_counts("base rate", classes)
        return predictors

    def counts(self, batch: Batch) -> dict[str, float]:
        return {name: float(len(labels_of(batch, name))) for name in self.weights}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        hidden = hidden_at(self._read, batch, self.places(batch.host), self.dropout_rng(batch, step))
        return StepOutput(self.sums(hidden, batch), self.weights)

    def places(self, batch: Batch) -> dict[str, Tensor]:
        """By term, the flat indices of the tokens whose hidden states it reads."""
        places = {"mlm": indices_of(batch, "mlm")}
        if self.config.pairs != "none":
            at_end = self.backbone.config.summary == "pooled_last"
            places[self.config.pairs] = summary_index(batch.inputs, "last" if at_end else "first")
        return places

    def sums(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """By term, the sum of its losses. hidden: by term, the states at its positions."""
        sums = {"mlm": self.masked_lm.loss_sum(hidden["mlm"], self.table_VW, labels_of(batch, "mlm"))}
        if self.config.pairs != "none":
            logits_NC = self._pair_logits(hidden)
            sums[self.config.pairs] = loss_sum(logits_NC, labels_of(batch, self.config.pairs))
        return sums

    def predicted(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        return super().predicted(_TERMS.get(head, head), logits, batch)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each target's loss and best prediction, in evaluation."""
        return self.scores(hidden_at(self._read, batch, self.places(batch.host), None), batch)

    def scores(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Scores]:
        """By term, its scores. hidden: by term, the states at its positions."""
        at, labels = indices_of(batch, "mlm"), labels_of(batch, "mlm")
        each, best = self.masked_lm.scores(hidden["mlm"], self.table_VW, labels)
        scores = {"mlm": Scores(each, labels, best, batch.inputs.documents[at])}
        if self.config.pairs != "none":
            logits_NC, labels = self._pair_logits(hidden), labels_of(batch, self.config.pairs)
            documents = torch.arange(len(labels), device=labels.device)
            scores[self.config.pairs] = Scores(losses(logits_NC, labels), labels, logits_NC.argmax(-1), documents)
        return scores

    @property
    def masked_lm(self) -> MaskedLMHead:
        return cast(MaskedLMHead, self.heads[_masked_lm_name(self.config)])

    @property
    def _read(self) -> Callable[..., Tensor]:
        """The states that the terms read, of a packed batch."""
        return partial(self.masked_lm.states, self.backbone)

    @property
    def table_VW(self) -> Tensor:
        return self.backbone.embed.token.weight

    def _pair_logits(self, hidden: dict[str, Tensor]) -> Tensor:
        """(N, 2) logits of the two pair classes."""
        pooled_NH = self.heads["pooler"](hidden[self.config.pairs])
        return self.heads[_PAIR_HEADS[self.config.pairs]](pooled_NH)

    def logits_at(self, packed: Packed, at: Tensor) -> Tensor:
        return self.masked_lm(self._read(packed, read_M=at), self.table_VW)


def _masked_lm_name(config: PairsConfig) -> str:
    """The name of the head. After a mask decoder it differs, since such a head cannot read the last layer."""
    return "enhanced_masked_lm" if config.enhanced_decoder else "masked_lm"


# Masked language modeling over spans, with the span boundary objective.
# Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting Spans",
# TACL 2020: L = L_MLM + L_SBO, each the mean over its own tokens.
# Shape letters: T tokens, M predicted positions, H hidden width.


class SpanLanguageModel(MaskedLanguageModel):
    """Terms `mlm`, `sbo` with the boundary objective, and that of the pairs."""

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

    def inspector(self, examples: MaskedExamples, max_length: int) -> SpanInspector:
        kind = SpanWindowsInspector if self.config.pairs == "none" else SpanPairsInspector
        return kind(self, examples, max_length)

    def predictors(self, train: SplitData, examples: MaskedExamples) -> dict[str, ConstantPredictor]:
        """As in masked language modeling; the boundary predicts the same tokens as the masks."""
        predictors = super().predictors(train, examples)
        return predictors | {"sbo": predictors["mlm"]} if self.config.boundary else predictors

    def places(self, batch: Batch) -> dict[str, Tensor]:
        """As in masked language modeling; the boundary reads the (M, 2) boundaries of each target's span."""
        places = super().places(batch)
        return places | {"sbo": self._boundaries(batch)} if self.config.boundary else places

    def sums(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        sums = super().sums(hidden, batch)
        if self.config.boundary:
            features = self._features(hidden, batch)
            sums["sbo"] = self._boundary.loss_sum(features, self.table_VW, labels_of(batch, "sbo"))
        return sums

    def scores(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Scores]:
        scores = super().scores(hidden, batch)
        if self.config.boundary:
            at, labels = indices_of(batch, "sbo"), labels_of(batch, "sbo")
            each, best = self._boundary.scores(self._features(hidden, batch), self.table_VW, labels)
            scores["sbo"] = Scores(each, labels, best, batch.inputs.documents[at])
        return scores

    @property
    def _boundary(self) -> SpanBoundaryHead:
        return cast(SpanBoundaryHead, self.heads["span_boundary"])

    def _features(self, hidden: dict[str, Tensor], batch: Batch) -> Tensor:
        """The inputs of the head for each position of `sbo`."""
        return self._boundary.features(hidden["sbo"], indices_of(batch, "sbo") - self._boundaries(batch)[:, 0] - 1)

    @staticmethod
    def _boundaries(batch: Batch) -> Tensor:
        boundaries_M2 = batch.targets["sbo"].span
        if boundaries_M2 is None:
            raise ValueError("the batch has no span boundaries")
        return boundaries_M2
