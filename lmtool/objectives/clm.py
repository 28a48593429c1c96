"""Causal language modelling: the next token, from all before it.

Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners", 2019.

Shape letters: T tokens, M places that predict, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol, cast

import torch

from lmtool.data.plan import Examples
from lmtool.data.split import Rows, SplitData
from lmtool.generation.sampling import generate
from lmtool.heads.lm import LMHead, lm_head
from lmtool.learners.base import BaseLearner, Warn, silent
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.targets import labels_of, places_of
from lmtool.models.base import Decoder
from lmtool.objectives.configs import NextTokenConfig
from lmtool.objectives.examples.masked import CausalWindows
from lmtool.objectives.examples.windows import Stream
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Scores, StepOutput

# Tokens of a sample's prompt, and of what is added to it: a paragraph.
_PROMPT, _CONTINUATION = 12, 80


class TextWindows(Examples, Protocol):
    """Examples cut out of a stream of documents."""

    stream: Stream


class CausalLanguageModel(BaseLearner):
    """The one term `clm`: every place of a window but its last predicts the token after it."""

    backbone: Decoder
    term: ClassVar[str] = "clm"

    def __init__(self, config: NextTokenConfig, backbone: Decoder, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.weights = {self.term: 1.0}
        self.add_head("lm", lm_head(backbone))

    def examples(self, data: SplitData, max_length: int) -> TextWindows:
        return CausalWindows(self.tokenizer, data.text, max_length, data.documents, data.split)

    def predictors(self, train: SplitData, examples: TextWindows) -> dict[str, ConstantPredictor]:
        """Unigrams of the training store, the end of each document among them."""
        counts = token_counts(train.text.tokens, self.tokenizer.vocab_size)
        end = self.tokenizer.role("eos")
        counts[end] += len(examples.stream.offsets) - 1
        return {self.term: ConstantPredictor.of_counts("unigram", counts, self.tokenizer.special_ids - {end})}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(labels_of(batch, self.term)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        hidden_MH = self.backbone(batch.inputs, self.draws(batch, step), read_M=places_of(batch, self.term))
        table_VH, labels = self.backbone.embed.token.weight, labels_of(batch, self.term)
        total = self._lm.loss_sum(hidden_MH, table_VH, labels, self.config.label_smoothing)
        return StepOutput({self.term: total}, self.weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each target's loss and best guess, in evaluation."""
        at, labels = places_of(batch, self.term), labels_of(batch, self.term)
        hidden_MH = self.backbone(batch.inputs, read_M=at)
        each, best = self._lm.scores(hidden_MH, self.backbone.embed.token.weight, labels)
        return {self.term: Scores(each, labels, best, batch.inputs.documents[at])}

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads["lm"])

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[dict[str, str]]:
        """The first n documents of a batch as plain data: the `prompt`, their first tokens, and the `text` that the
        model continues (temperature 0.8, the best 40)."""
        samples = []
        for start, length in list(zip(batch.inputs.starts, batch.inputs.lengths, strict=True))[:n]:
            prompt = batch.inputs.tokens[start : start + min(length, _PROMPT)].tolist()
            new = generate(self.backbone, self._lm, prompt, _CONTINUATION, 0.8, 40, self.seed + start)
            samples.append({"prompt": self.tokenizer.decode(prompt), "text": self.tokenizer.continuation(prompt, new)})
        return samples

    def respond(
        self, rows: Rows, max_length: int, batch_tokens: int, precision: Precision, warn: Warn = silent
    ) -> Iterator[dict[str, str]]:
        """Complete texts: for each the `text` and its `continuation`, up to the end of the text, where the
        vocabulary has one (GPT's of 2018 has none), or 80 tokens."""
        ends = tuple(number for role, number in self.tokenizer.roles.items() if role == "eos")
        for text in rows.columns["text"]:
            prompt = self.tokenizer.encode(text).tolist() or [self.tokenizer.role("eos")]
            with precision.autocast():
                new = generate(self.backbone, self._lm, prompt, _CONTINUATION, 0.8, 40, self.seed, ends)
            yield {"text": text, "continuation": self.tokenizer.continuation(prompt, new)}

    def line(self, record: dict[str, str]) -> str:
        return record["text"] + record["continuation"]
