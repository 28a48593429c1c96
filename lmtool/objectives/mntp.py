"""Masked next-token prediction, alone or mixed with causal language modeling.

BehnamGhader et al., "LLM2Vec: Large Language Models Are Secretly Powerful Text Encoders", COLM 2024, section 2.2;
mixed with causal language modeling: Charpentier and Samuel, "GPT or BERT: why not both?", 2024.

Shape letters: T tokens, M predicting positions, N documents, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Examples, SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor
from lmtool.learners.model import hidden_at, indices_of, labels_of
from lmtool.learners.writing import ContinuationWriter
from lmtool.models.base import Decoder
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.models.heads.predicted import Predicted
from lmtool.objectives.checks.masking import MaskedNextTokensInspector
from lmtool.objectives.clm import next_token_unigram, unigram
from lmtool.objectives.configs import MntpConfig
from lmtool.objectives.examples.language import CAUSAL, MASKED, MaskedNextTokenWindows
from lmtool.objectives.filling import MaskFiller
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput


class MaskedNextTokens(MaskFiller):
    """Masked next-token prediction, with the term `mntp`. With objective.causal above 0, the term `clm` predicts every
    next token of the texts that are read causally. Both terms share the language-model head."""

    config: MntpConfig
    backbone: Decoder
    inspector_class = MaskedNextTokensInspector
    tokens_before: ClassVar[int] = 1

    def __init__(self, config: MntpConfig, backbone: Decoder, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("lm", lm_head(backbone))
        self.loss_weights = {MASKED: 1 - config.causal, **({CAUSAL: config.causal} if config.causal else {})}

    @property
    def lm(self) -> LMHead:
        """The language-model head."""
        return cast(LMHead, self.heads["lm"])

    def examples(self, data: SplitData, max_length: int) -> MaskedNextTokenWindows:
        return MaskedNextTokenWindows(self.config, self.tokenizer, data, max_length, self.seed)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {term: float(len(labels_of(batch, term))) for term in self.loss_weights}

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        """Returns the unigram predictor of the training text for each term; only `clm` predicts ends of documents."""
        predictors = {MASKED: unigram(train, self.tokenizer)}
        if self.config.causal:
            documents = len(cast(MaskedNextTokenWindows, examples).stream.offsets) - 1
            predictors[CAUSAL] = next_token_unigram(train, self.tokenizer, documents)
        return predictors

    def forward(self, batch: Batch, step: int) -> StepOutput:
        indices = {term: indices_of(batch.host, term) for term in self.loss_weights}
        hidden = hidden_at(self.backbone, batch, indices, self.dropout_rng(batch, step))
        smoothing, z_loss = self.config.label_smoothing, self.config.z_loss
        sums = {
            term: self.lm.loss_sum(hidden_MH, self.table_VW, labels_of(batch, term), smoothing, z_loss)
            for term, hidden_MH in hidden.items()
        }
        return StepOutput(sums, self.loss_weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the best prediction of each target, in evaluation mode."""
        indices = {term: indices_of(batch.host, term) for term in self.loss_weights}
        hidden, scores = hidden_at(self.backbone, batch, indices, None), {}
        for term, hidden_MH in hidden.items():
            labels = labels_of(batch, term)
            losses, best = self.lm.scores(hidden_MH, self.table_VW, labels)
            scores[term] = Scores(losses, labels, best, batch.inputs.documents[indices_of(batch, term)])
        return scores

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """Returns None: one head has the predictions of both terms."""
        return None

    def logits_at(self, packed: Packed, indices: Tensor) -> Tensor:
        """Returns the logits (M, V) of the tokens at flat indices (M,), which the model predicts one position earlier.
        The texts are read in both directions, after the end-of-text token that precedes documents in training, so that
        first tokens have a position before them too."""
        first_N = torch.tensor(packed.starts, device=packed.tokens.device)
        end, texts = self.tokenizer.role("eos"), packed.tokens.split(list(packed.lengths))
        tokens = torch.cat([part for text in texts for part in (text.new_tensor([end]), text)])
        lengths = tuple(length + 1 for length in packed.lengths)
        # An end token before each document shifts its tokens by one more position; the prediction is one before.
        read_M = indices + torch.searchsorted(first_N, indices, right=True) - 1
        hidden_MH = self.backbone(Packed(tokens, lengths, prefixes=lengths), None, read_M=read_M)
        return self.lm(hidden_MH, self.table_VW)

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Returns samples as in `MaskFiller.samples`, of masked texts only."""
        targets = {**batch.targets, MASKED: replace(batch.targets[MASKED], at=indices_of(batch, MASKED) + 1)}
        samples = self.samples_of(replace(batch, targets=targets), MASKED, self._logits_in_batch, n)
        return [sample for sample in samples if sample["masked"]]

    def _logits_in_batch(self, packed: Packed, indices: Tensor) -> Tensor:
        return self.lm(self.backbone(packed, None, read_M=indices - 1), self.table_VW)

    def writer(self) -> ContinuationWriter:
        """Returns the writer. Raises UserError if the model was not trained to continue texts."""
        if not self.config.causal:
            raise UserError(
                "a model trained on mntp alone fills masks, and cannot continue a text",
                "train it with objective=mntp_hybrid, or use lmtool predict for filled masks",
            )
        return ContinuationWriter(self.backbone, self.lm, self.tokenizer)
