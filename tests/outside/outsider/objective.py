"""An objective that masks and predicts every n-th token of a window."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from lmtool.data.examples import Plan, SplitData
from lmtool.data.formats import FormatTemplate, assemble, text_format
from lmtool.data.store import TokenStore
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.models.heads.lm import LMHead
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput, Target
from outsider.configs import EveryNthConfig


class Windows:
    def __init__(self, n: int, tokenizer: Tokenizer, store: TokenStore, max_length: int, split: str):
        self.n, self.split, self.mask = n, split, tokenizer.role("mask")
        self.template = FormatTemplate.of(text_format("bert", tokenizer), 1)
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("sep"))
        rows = windows(self.stream, max_length - self.template.special_count, True)
        self._plan = Plan(rows, rows["length"].astype(np.int64) + self.template.special_count)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])
        at = np.arange(1, len(whole.tokens), self.n)
        hidden = whole.tokens.copy()
        hidden[at] = self.mask
        target = Target(torch.from_numpy(whole.tokens[at].astype(np.int64)), at=torch.from_numpy(at))
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        return Batch(whole.packed(hidden), {"nth": target}, numbers, torch.zeros(len(numbers), dtype=torch.int32))

    def metadata(self) -> dict[str, Any]:
        return {"split": self.split, **self._plan.metadata(), "predicted_fraction": 1 / self.n}


class EveryNth(BaseLearner):
    loss_weights = {"nth": 1.0}

    def __init__(self, config: EveryNthConfig, backbone: nn.Module, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("lm", LMHead())

    def examples(self, data: SplitData, max_length: int) -> Windows:
        return Windows(self.config.n, self.tokenizer, data.text, max_length, data.split)

    def predictors(self, train: SplitData, examples: Windows) -> dict[str, ConstantPredictor]:
        return {
            "nth": ConstantPredictor.of_counts("unigram", token_counts(train.text.tokens, self.tokenizer.vocab_size))
        }

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"nth": float(len(batch.targets["nth"].labels))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        target = batch.targets["nth"]
        hidden_MH = self.backbone(batch.inputs, self.dropout_rng(batch, step))[target.at]
        total = self.heads["lm"].loss_sum(hidden_MH, self.backbone.embed.token.weight, target.labels)
        return StepOutput({"nth": total}, self.loss_weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        target = batch.targets["nth"]
        hidden_MH = self.backbone(batch.inputs)[target.at]
        each, best = self.heads["lm"].scores(hidden_MH, self.backbone.embed.token.weight, target.labels)
        return {"nth": Scores(each, target.labels, best, batch.inputs.documents[target.at])}
