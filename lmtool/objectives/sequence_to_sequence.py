"""Objectives of encoder-decoders: denoising (BART) and span corruption (T5), and their shared base with prefix LM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.learners.base import BaseLearner, Inference
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.model import labels_of
from lmtool.learners.writing import AnswerWriter, written
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.objectives.checks.denoising import CorruptedSpansInspector, NoisyInspector
from lmtool.objectives.clm import SAMPLED
from lmtool.objectives.configs import DenoisingConfig, NextTokenConfig, SpanCorruptionConfig
from lmtool.objectives.examples.denoising import CorruptedSpans, NoisyWindows
from lmtool.objectives.examples.windows import Sides
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, send

# Shared by the objectives of encoder-decoders: outputs are predicted token by token, given the inputs.
# Shape letters: T tokens of the outputs, M of them text, H hidden width.


class SequenceToSequence(BaseLearner):
    """One term with the objective's name: the cross entropy of every output token, including special ones. Evaluation
    scores text only: the positions of sentinels and ends say little about the language."""

    backbone: EncoderDecoder
    trained_beside = "special tokens (sentinels, ends)"

    def __init__(self, config: NextTokenConfig, backbone: EncoderDecoder, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.term = config.name
        self.weights = {self.term: 1.0}
        self.add_head("lm", lm_head(backbone))

    def sides(self) -> Sides:
        """The layout of the backbone's family. UserError if the tokenizer lacks one of its special tokens."""
        return Sides(self.backbone, self.tokenizer)

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        """Unigrams of the training store, without special tokens."""
        counts = token_counts(train.text.tokens, self.tokenizer.vocab_size)
        return {self.term: ConstantPredictor.of_counts("unigram", counts, self.tokenizer.special_ids)}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(labels_of(batch, self.term)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        hidden_TH = self.backbone(batch.inputs, self.dropout_rng(batch, step), batch.outputs)
        labels = labels_of(batch, self.term)
        total = self._lm.loss_sum(hidden_TH, self._table, labels, self.config.label_smoothing)
        return StepOutput({self.term: total}, self.weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each text token's loss and best prediction, in evaluation."""
        outputs = cast(Packed, batch.outputs)
        labels, special = labels_of(batch, self.term), torch.tensor(sorted(self.tokenizer.special_ids))
        at = send((~torch.isin(labels_of(batch.host, self.term), special)).nonzero()[:, 0], labels.device)
        hidden_MH = self.backbone(batch.inputs, None, outputs, at)
        each, best = self._lm.scores(hidden_MH, self._table, labels[at])
        return {self.term: Scores(each, labels[at], best, outputs.documents[at])}

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads["lm"])

    @property
    def _table(self) -> Tensor:
        return self.backbone.embed.token.weight

    def writer(self) -> AnswerWriter:
        return AnswerWriter(self.backbone, self._lm, self.tokenizer)

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """The first n examples of a batch as plain data: the encoder's `prompt`, and the generated `text`; special
        tokens are written out."""
        inputs = [ids.tolist() for ids in batch.inputs.tokens.split(list(batch.inputs.lengths))[:n]]
        new = self.writer().write(inputs, SAMPLED, self.seed)
        return [
            {
                "prompt": self.tokenizer.decode(ids, skip_special=False),
                "text": self.tokenizer.decode(text, skip_special=False),
            }
            for ids, text in zip(inputs, new, strict=True)
        ]

    def respond(self, rows: Rows, inference: Inference) -> Iterator[dict[str, str]]:
        """Responds to texts: for each, the `text` and its `continuation`, up to the end or 80 tokens."""
        yield from written(self.writer(), rows, SAMPLED, self.seed, inference.batch_tokens, inference.precision)

    def line(self, record: dict[str, str]) -> str:
        return record["text"] + record["continuation"]


# Denoising: the original text from the text with noise (Lewis et al. 2020, section 2.2).


class Denoising(SequenceToSequence):
    """The one term `denoising`."""

    config: DenoisingConfig

    def examples(self, data: SplitData, max_length: int) -> NoisyWindows:
        """Neither side is longer than max_length."""
        return NoisyWindows(self.config, self.tokenizer, self.sides(), data, max_length, self.seed)

    def inspector(self, examples: NoisyWindows, max_length: int) -> NoisyInspector:
        return NoisyInspector(self, examples, max_length)


# Span corruption (Raffel et al. 2020, section 3.1.4).


class SpanCorruption(SequenceToSequence):
    """The one term `span_corruption`."""

    config: SpanCorruptionConfig

    def examples(self, data: SplitData, max_length: int) -> CorruptedSpans:
        """Neither side is longer than max_length."""
        return CorruptedSpans(self.config, self.tokenizer, self.sides(), data, max_length, self.seed)

    def inspector(self, examples: CorruptedSpans, max_length: int) -> CorruptedSpansInspector:
        return CorruptedSpansInspector(self, examples, max_length)
