"""Permutation language modeling: predicts tokens in a random order, each from the tokens before it in this order.

Yang, Dai, Yang, Carbonell, Salakhutdinov, Le, "XLNet: Generalized Autoregressive Pretraining for Language
Understanding", NeurIPS 2019, section 2.

Shape letters: T tokens, M predicted positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import SplitData
from lmtool.learners.baseline import ConstantPredictor
from lmtool.learners.model import indices_of
from lmtool.models.base import StatefulBackbone
from lmtool.nn.dropout import DropoutRng
from lmtool.objectives.checks.masking import PermutationInspector
from lmtool.objectives.clm import LanguageModelLearner, unigram
from lmtool.objectives.configs import PlmConfig
from lmtool.objectives.examples.masked import MaskedExamples, MaskedWindows, Permutations, PermutedWindows
from lmtool.objectives.examples.pairs import MaskedPairs
from lmtool.objectives.filling import MaskFiller
from lmtool.types import Batch, Packed, on_host


class PermutationLanguageModel(MaskFiller, LanguageModelLearner):
    """Permutation language modeling. The model has a second stream of hidden states, the query stream, which has only
    the predicted tokens; they are predicted from its states."""

    config: PlmConfig
    term = "plm"
    masks = Permutations
    inspector_class = PermutationInspector

    def examples(self, data: SplitData, max_length: int) -> MaskedExamples:
        if self.config.pairs != "none":
            return self.masked_examples(MaskedPairs, data, max_length)
        carries_state = self.carried is not None and data.documents == "joined"
        return self.masked_examples(PermutedWindows if carries_state else MaskedWindows, data, max_length)

    def predictors(self, train: SplitData, examples: MaskedExamples) -> dict[str, ConstantPredictor]:
        """Returns the unigram predictor without special tokens, which are never predicted."""
        return {"plm": unigram(train, self.tokenizer)}

    def states(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """Returns the query stream. In lanes, the first `reuse` states of a window are cached for the next window."""
        query_M = indices_of(batch.host, "plm")
        if self.carried is None or batch.lanes is None:
            return cast(Tensor, self.backbone(batch.inputs, rng, query_M=query_M))
        initial_state = cast(StatefulBackbone, self.backbone).initial_state
        carried = self.carried.begin(batch.lanes, initial_state)
        states: Tensor = self.backbone(batch.inputs, rng, query_M=query_M, carried=carried, reuse=self.config.reuse)
        self.carried.keep(batch.lanes, carried, initial_state)
        return states

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Predicted tokens are shown as masks, although other tokens may attend to them."""
        tokens = batch.inputs.tokens.clone()
        tokens[indices_of(batch, "plm")] = self.tokenizer.role("mask")
        visible_batch = replace(batch, inputs=replace(batch.inputs, tokens=tokens))
        return self.samples_of(visible_batch, "plm", lambda _, indices: self._logits(batch.inputs, indices), n)

    def logits_at(self, packed: Packed, indices: Tensor) -> Tensor:
        """Returns the logits (M, V) at masked positions, predicted from all tokens that are not masked. No token
        attends to a mask token, which the model has never read."""
        is_mask_T = packed.tokens == self.tokenizer.role("mask")
        rank_T = is_mask_T.to(packed.tokens.dtype).index_fill(0, indices, 1)
        return self._logits(replace(packed, columns={**packed.columns, "rank": rank_T}), indices)

    def _logits(self, packed: Packed, indices: Tensor) -> Tensor:
        return self.lm(self.backbone(packed, query_M=on_host(indices)), self.table_VW)
