"""Masked language modeling over tokens or spans, alone or together with next-sentence or sentence-order prediction."""

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
from lmtool.objectives.checks.masking import MaskingInspector, SpanInspector
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
# Shape letters: T tokens, N examples, M predicted positions, H hidden width, V vocabulary, W width of the token table.


_EVERY_TOKEN = "every token"
# The name of the head that predicts each term over segment pairs.
_PAIR_HEADS = {"nsp": "next_sentence", "sop": "sentence_order"}
# The term that each head predicts.
_TERMS = {
    "masked_lm": "mlm",
    "enhanced_masked_lm": "mlm",
    "span_boundary": "sbo",
    **{head: term for term, head in _PAIR_HEADS.items()},
}


class MaskedLanguageModel(MaskFiller):
    """Masked language modeling. The loss is the sum of the term `mlm` and, with pairs=nsp or pairs=sop, of the term
    `nsp` or `sop`. Class 1 of `nsp` means that the second segment is random; class 1 of `sop` means that the segments
    are swapped."""

    config: PairsConfig
    inspector_class: type[MaskingInspector] = MaskingInspector

    def __init__(self, config: PairsConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head(_masked_lm_name(config), masked_lm_head(backbone, config.enhanced_decoder))
        self.loss_weights = {"mlm": 1.0}
        self._predicts_every_token = False
        if config.pairs != "none":
            self.add_head("pooler", pooler(backbone))
            self.add_head(_PAIR_HEADS[config.pairs], SequenceHead(backbone.hidden_size, 2))
            self.loss_weights[config.pairs] = 1.0

    def examples(self, data: SplitData, max_length: int) -> MaskedExamples:
        return self.masked_examples(MaskedWindows if self.config.pairs == "none" else MaskedPairs, data, max_length)

    def predictors(self, train: SplitData, examples: MaskedExamples) -> dict[str, ConstantPredictor]:
        """Returns the unigram predictor without special tokens, and for pairs that of the frequencies of the two
        classes."""
        predictors = {"mlm": unigram(train, self.tokenizer)}
        if self.config.pairs != "none":
            classes = np.bincount(examples.plan(0).rows["label"], minlength=2)
            predictors[self.config.pairs] = ConstantPredictor.of_counts("base rate", classes)
        return predictors

    def counts(self, batch: Batch) -> dict[str, float]:
        return {name: float(len(labels_of(batch, name))) for name in self.loss_weights}

    def predict_every_token(self) -> dict[str, str | None]:
        self._predicts_every_token = True
        return {"mlm": None}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        indices = self.read_indices(batch.host)
        if self._predicts_every_token:
            indices[_EVERY_TOKEN] = torch.arange(len(batch.host.inputs.tokens))
        hidden = hidden_at(self._read, batch, indices, self.dropout_rng(batch, step))
        sums = self.sums(hidden, batch)
        if self._predicts_every_token:  # replaces the predictions of the targets, which the loss has reported
            self.masked_lm.observe_words(hidden[_EVERY_TOKEN], self.table_VW)
        return StepOutput(sums, self.loss_weights)

    def read_indices(self, batch: Batch) -> dict[str, Tensor]:
        """Returns, for each term, the flat indices of the tokens whose hidden states the term reads."""
        indices = {"mlm": indices_of(batch, "mlm")}
        if self.config.pairs != "none":
            reads_last = self.backbone.config.summary == "pooled_last"
            indices[self.config.pairs] = summary_index(batch.inputs, "last" if reads_last else "first")
        return indices

    def sums(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Returns the sum of each term's losses. hidden: the hidden states that each term reads."""
        sums = {"mlm": self.mlm_loss(hidden["mlm"], labels_of(batch, "mlm"))}
        if self.config.pairs != "none":
            logits_N2 = self._pair_logits(hidden)
            sums[self.config.pairs] = loss_sum(logits_N2, labels_of(batch, self.config.pairs))
        return sums

    def mlm_loss(self, hidden_MH: Tensor, labels_M: Tensor) -> Tensor:
        """Returns the sum of the losses of masked tokens, a scalar. A subclass may define another loss here; scores
        remain cross entropies."""
        return self.masked_lm.loss_sum(hidden_MH, self.table_VW, labels_M)

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        return super().interpret_logits(_TERMS.get(head, head), logits, batch)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the best prediction of each target, in evaluation mode."""
        return self.scores(hidden_at(self._read, batch, self.read_indices(batch.host), None), batch)

    def scores(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Scores]:
        """Returns the scores of each term. hidden: the hidden states that each term reads."""
        indices, labels = indices_of(batch, "mlm"), labels_of(batch, "mlm")
        mlm_losses, best = self.masked_lm.scores(hidden["mlm"], self.table_VW, labels)
        scores = {"mlm": Scores(mlm_losses, labels, best, batch.inputs.documents[indices])}
        if self.config.pairs != "none":
            logits_N2, labels = self._pair_logits(hidden), labels_of(batch, self.config.pairs)
            documents = torch.arange(len(labels), device=labels.device)
            scores[self.config.pairs] = Scores(losses(logits_N2, labels), labels, logits_N2.argmax(-1), documents)
        return scores

    @property
    def masked_lm(self) -> MaskedLMHead:
        """The head that predicts masked tokens."""
        return cast(MaskedLMHead, self.heads[_masked_lm_name(self.config)])

    @property
    def _read(self) -> Callable[..., Tensor]:
        return partial(self.masked_lm.states, self.backbone)

    def _pair_logits(self, hidden: dict[str, Tensor]) -> Tensor:
        pooled_NH = self.heads["pooler"](hidden[self.config.pairs])
        return self.heads[_PAIR_HEADS[self.config.pairs]](pooled_NH)

    def logits_at(self, packed: Packed, indices: Tensor) -> Tensor:
        return self.masked_lm(self._read(packed, read_M=indices), self.table_VW)


def _masked_lm_name(config: PairsConfig) -> str:
    """With an enhanced mask decoder the name differs, because such a head cannot be used without the decoder."""
    return "enhanced_masked_lm" if config.enhanced_decoder else "masked_lm"


# Masked language modeling over spans, with the span boundary objective (Joshi, Chen, Liu, Weld, Zettlemoyer, Levy,
# "SpanBERT: Improving Pre-training by Representing and Predicting Spans", TACL 2020). The loss is L_MLM + L_SBO, where
# each term is the mean over its own targets.
# Shape letters: T tokens, M predicted positions, H hidden width.


class SpanLanguageModel(MaskedLanguageModel):
    """Masked language modeling over spans. In addition to the terms of `MaskedLanguageModel`, the loss has the term
    `sbo`, the span boundary objective, unless boundary=false."""

    config: SpanConfig
    masks = SpanMasks
    inspector_class = SpanInspector

    def __init__(self, config: SpanConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        if config.boundary:
            head = SpanBoundaryHead(
                backbone.hidden_size,
                backbone.config.vocab_size,
                config.boundary_targets,
                config.boundary_position_size,
                backbone.head_activation,
                backbone.head_norm_epsilon,
                backbone.embed.token.weight.shape[1],
            )
            self.add_head("span_boundary", head)
            self.loss_weights["sbo"] = 1.0

    def predictors(self, train: SplitData, examples: MaskedExamples) -> dict[str, ConstantPredictor]:
        """The unigram predictor also serves the term `sbo`, which predicts the same tokens."""
        predictors = super().predictors(train, examples)
        return predictors | {"sbo": predictors["mlm"]} if self.config.boundary else predictors

    def read_indices(self, batch: Batch) -> dict[str, Tensor]:
        """Adds the term `sbo`, with the flat indices (M, 2) of the two tokens next to each target's span."""
        indices = super().read_indices(batch)
        return indices | {"sbo": self._boundaries(batch)} if self.config.boundary else indices

    def sums(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        sums = super().sums(hidden, batch)
        if self.config.boundary:
            features = self._features(hidden, batch)
            sums["sbo"] = self._boundary.loss_sum(features, self.table_VW, labels_of(batch, "sbo"))
        return sums

    def scores(self, hidden: dict[str, Tensor], batch: Batch) -> dict[str, Scores]:
        scores = super().scores(hidden, batch)
        if self.config.boundary:
            indices, labels = indices_of(batch, "sbo"), labels_of(batch, "sbo")
            sbo_losses, best = self._boundary.scores(self._features(hidden, batch), self.table_VW, labels)
            scores["sbo"] = Scores(sbo_losses, labels, best, batch.inputs.documents[indices])
        return scores

    @property
    def _boundary(self) -> SpanBoundaryHead:
        return cast(SpanBoundaryHead, self.heads["span_boundary"])

    def _features(self, hidden: dict[str, Tensor], batch: Batch) -> Tensor:
        position_in_span_M = indices_of(batch, "sbo") - self._boundaries(batch)[:, 0] - 1
        return self._boundary.features(hidden["sbo"], position_in_span_M)

    @staticmethod
    def _boundaries(batch: Batch) -> Tensor:
        boundaries_M2 = batch.targets["sbo"].span
        if boundaries_M2 is None:
            raise ValueError("the batch has no span boundaries")
        return boundaries_M2
