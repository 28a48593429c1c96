"""Replaced-token detection: a generator fills masks, the model says which tokens are not the original ones.

Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020:
L = L_MLM(generator) + 50 L_RTD(model). A sample that is the original token counts as original. The variants are those
of section 3.4, each a learner over the same generator.

Shape letters: T tokens, M places, V vocabulary, W width of its table.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.data.assembly import Assembled
from lmtool.heads.lm import MaskedLMHead, masked_lm_head
from lmtool.heads.replaced_token import CopyGate, ReplacedTokenHead, copy_best, copy_losses
from lmtool.learners.baseline import BestConstant, ConstantPredictor
from lmtool.learners.targets import places_of
from lmtool.metrics import Metric
from lmtool.models.base import Backbone
from lmtool.objectives.configs import RtdConfig, RtdVariant
from lmtool.objectives.corruption.masking import Masked
from lmtool.objectives.examples.masks import TokenMasks
from lmtool.objectives.generated import GeneratedTextLearner, Read
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target


class DetectedMasks(TokenMasks):
    """The term `rtd` is of every token; its labels are made in the step."""

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        return {**super().targets(whole, masked), "rtd": Target(None)}


class ReplacedTokenDetection(GeneratedTextLearner):
    """variant=electra. Class 1 of the term `rtd` is a replaced token. Its loss alone is the score: a sum in which it
    counts 50 times is the loss of nothing."""

    term = "rtd"
    metric = Metric("rtd_loss", smaller_is_better=True)
    masks: ClassVar[type[TokenMasks]] = DetectedMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.weights[self.term] = config.weight
        self.add_head("replaced_token", ReplacedTokenHead(backbone.hidden_size, backbone.head_activation))

    def places(self, batch: Batch) -> Tensor:
        return torch.arange(len(batch.inputs.tokens), device=batch.inputs.tokens.device)

    @property
    def replaced_share(self) -> float:
        """How many of its places count as replaced before anything is scored: all masked ones."""
        return self.config.probability

    def predictor(self, unigram: ConstantPredictor) -> BestConstant:
        """The share of replaced tokens in whatever is scored: the generator makes the labels."""
        return BestConstant("base rate", (1 - self.replaced_share, self.replaced_share))

    def loss_sum(self, read: Read) -> Tensor:
        return self.scored(read)[0].sum()

    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        replaced_M = (read.filled != read.original)[read.at]
        logits_M = self.heads["replaced_token"](read.hidden_MH)
        each = F.binary_cross_entropy_with_logits(logits_M.float(), replaced_M.float(), reduction="none")
        return each, replaced_M.long(), (logits_M > 0).long()

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """Further: each place has the `sampled` piece, and each piece the model's probability that it is `replaced`."""
        samples = super().samples(batch, n)
        filled = self.filled(batch, self._generator_hidden(batch, None), 0)
        suspicion_T = self.heads["replaced_token"](self.backbone(filled)).float().sigmoid().cpu()
        tokens = filled.tokens.cpu()
        for start, sample in zip(batch.inputs.starts, samples, strict=False):
            sample["replaced"] = suspicion_T[start : start + len(sample["pieces"])].tolist()
            for place in sample["masked"]:
                place["sampled"] = self.tokenizer.pieces([int(tokens[start + place["position"]])])[0]
        return samples


class MaskedDetectedMasks(TokenMasks):
    """The term `rtd` is of the masked places alone."""

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        return {**targets, "rtd": Target(None, at=targets["mlm"].at)}


class MaskedTokenDetection(ReplacedTokenDetection):
    """variant=electra_15: detection at the masked places alone."""

    masks = MaskedDetectedMasks
    replaced_share = 0.5

    def places(self, batch: Batch) -> Tensor:
        return places_of(batch, "mlm")


class RestoredMasks(TokenMasks):
    """The term `replace_mlm` is that of the generator again."""

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        return {**targets, "replace_mlm": targets["mlm"]}


class ReplacedTokenRestoration(GeneratedTextLearner):
    """variant=replace_mlm: the original tokens at the masked places, from a text without masks."""

    term = "replace_mlm"
    masks: ClassVar[type[TokenMasks]] = RestoredMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("masked_lm", masked_lm_head(backbone))

    @property
    def head(self) -> MaskedLMHead:
        """What names the original token."""
        return cast(MaskedLMHead, self.heads["masked_lm"])

    def places(self, batch: Batch) -> Tensor:
        return places_of(batch, self.term)

    def predictor(self, unigram: ConstantPredictor) -> ConstantPredictor:
        return unigram

    def loss_sum(self, read: Read) -> Tensor:
        return self.head.loss_sum(read.hidden_MH, self.table_VW, read.original[read.at])

    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        labels_M = read.original[read.at]
        each, best = self.head.scores(read.hidden_MH, self.table_VW, labels_M)
        return each, labels_M, best


class AllTokensMasks(TokenMasks):
    """The term `all_tokens_mlm` is of all tokens that could be masked."""

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        text = np.flatnonzero(~self.vocabulary.special[whole.tokens])
        target = Target(torch.from_numpy(whole.tokens[text]), at=torch.from_numpy(text))
        return {**super().targets(whole, masked), "all_tokens_mlm": target}


class AllTokensRestoration(ReplacedTokenRestoration):
    """variant=all_tokens_mlm: the original token at every place, copied or named anew as a gate says."""

    term, masks = "all_tokens_mlm", AllTokensMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("copy", CopyGate(backbone.hidden_size))

    def loss_sum(self, read: Read) -> Tensor:
        return self._losses(read).sum()

    def _losses(self, read: Read) -> Tensor:
        gate_M = self.heads["copy"](read.hidden_MH)
        labels_M, copied_M = read.original[read.at], read.filled[read.at]
        return copy_losses(self.head, gate_M, read.hidden_MH, self.table_VW, copied_M, labels_M)

    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        gate_M = self.heads["copy"](read.hidden_MH)
        best = copy_best(self.head, gate_M, read.hidden_MH, self.table_VW, read.filled[read.at])
        return self._losses(read), read.original[read.at], best


VARIANTS: dict[RtdVariant, type[GeneratedTextLearner]] = {
    "electra": ReplacedTokenDetection,
    "electra_15": MaskedTokenDetection,
    "replace_mlm": ReplacedTokenRestoration,
    "all_tokens_mlm": AllTokensRestoration,
}


def build(config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> GeneratedTextLearner:
    """The learner of the configuration's variant."""
    return VARIANTS[config.variant](config, backbone, tokenizer, seed)
