"""Two models trained together on masked tokens and on each other's distribution (Zhang et al., "Deep Mutual Learning",
2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.config.registry import build
from lmtool.data.examples import SplitData
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import MaskedLMHead
from lmtool.nn.dropout import rng_at
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.examples.masked import MaskedWindows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput
from outsider.configs import TwoModelsConfig


class TwoModels(BaseLearner):
    def __init__(self, config: TwoModelsConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights = {"first": 1.0, "second": 1.0, "agreement": config.agreement}
        self.peer: Backbone = build(backbone.config, seed + 1)
        self.peer.to(self.device)
        for name in ("masked_lm", "peer_lm"):
            self.add_head(name, MaskedLMHead(backbone.hidden_size, backbone.config.vocab_size))

    def examples(self, data: SplitData, max_length: int) -> MaskedWindows:
        return MaskedWindows(MlmConfig(), self.tokenizer, "bert", data, max_length, self.seed)

    def predictors(self, train: SplitData, examples: MaskedWindows) -> dict[str, ConstantPredictor]:
        counts = token_counts(train.text.tokens, self.tokenizer.vocab_size)
        return dict.fromkeys(("first", "second"), ConstantPredictor.of_counts("unigram", counts))

    def counts(self, batch: Batch) -> dict[str, float]:
        return dict.fromkeys(self.loss_weights, float(len(labels_of(batch, "mlm"))))

    def logits(self, batch: Batch, step: int) -> list[Tensor]:
        rng, at = self.dropout_rng(batch, step), indices_of(batch, "mlm")
        return [
            self.heads[head](model(batch.inputs, rng_at(rng, place), read_M=at), model.embed.token.weight).float()
            for place, (head, model) in enumerate((("masked_lm", self.backbone), ("peer_lm", self.peer)))
        ]

    def forward(self, batch: Batch, step: int) -> StepOutput:
        labels, logits = labels_of(batch, "mlm"), self.logits(batch, step)
        first, second = (F.cross_entropy(own, labels, reduction="sum") for own in logits)
        fractions = [own.log_softmax(-1) for own in logits]
        agreement = sum(
            F.kl_div(own, other.detach(), log_target=True, reduction="sum")
            for own, other in (fractions, fractions[::-1])
        )
        return StepOutput({"first": first, "second": second, "agreement": agreement}, self.loss_weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        labels, documents = labels_of(batch, "mlm"), batch.inputs.documents[indices_of(batch, "mlm")]
        return {
            name: Scores(F.cross_entropy(own, labels, reduction="none"), labels, own.argmax(-1), documents)
            for name, own in zip(("first", "second"), self.logits(batch, 0), strict=True)
        }
