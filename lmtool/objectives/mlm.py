"""Masked language modelling, with or without next-sentence prediction.

Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
NAACL 2019, section 3.1; dynamic masks: Liu et al., "RoBERTa", 2019, section 4.1.

Shape letters: T tokens, N examples, M predicted places, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmtool.data.formats import text_format
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.heads.learner import BaseLearner
from lmtool.heads.lm import MaskedLMHead
from lmtool.heads.losses import loss_sum, losses
from lmtool.heads.sequence import Pooler, SequenceHead, summary
from lmtool.models.base import Backbone
from lmtool.objectives.baseline import ConstantPredictor, token_counts
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.examples import MaskedPairs, MaskedWindows
from lmtool.objectives.targets import labels_of, places_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput

_GUESSES = 5


class MaskedLanguageModel(BaseLearner):
    """Terms `mlm` and, with pairs=nsp, `nsp`; the loss is their sum. Class 1 of `nsp` is a random second segment."""

    def __init__(self, config: MlmConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(backbone, seed)
        self.config, self.tokenizer = config, tokenizer
        model, width = backbone.config, backbone.hidden_size
        table_width = backbone.embed.token.weight.shape[1]
        self.add_head("masked_lm", MaskedLMHead(width, model.vocab_size, "gelu", model.norm_epsilon, table_width))
        self.weights = {"mlm": 1.0}
        if config.pairs == "nsp":
            self.add_head("pooler", Pooler(width))
            self.add_head("next_sentence", SequenceHead(width, 2))
            self.weights["nsp"] = 1.0

    def examples(self, store: TokenStore, max_length: int, documents: str, split: str) -> MaskedWindows | MaskedPairs:
        """What is learned of a store. documents: separate or joined, for windows of text; a pair is always one."""
        format_name = self.backbone.config.text_format
        if self.config.pairs == "nsp":
            return MaskedPairs(self.config, self.tokenizer, format_name, store, max_length, split, self.seed)
        return MaskedWindows(self.config, self.tokenizer, format_name, store, max_length, documents, split, self.seed)

    def baselines(self, store: TokenStore, examples: MaskedWindows | MaskedPairs) -> dict[str, ConstantPredictor]:
        """Constant predictors counted on the training store and examples: unigrams without special tokens, which are
        never predicted, and the share of random pairs."""
        counts = token_counts(store.tokens, self.tokenizer.vocab_size)
        found = {"mlm": ConstantPredictor.of_counts("unigram", counts, self.tokenizer.special_ids)}
        if self.config.pairs == "nsp":
            random = np.bincount(examples.plan(0).rows["random"], minlength=2)
            found["nsp"] = ConstantPredictor.of_counts("base rate", random)
        return found

    def counts(self, batch: Batch) -> dict[str, float]:
        return {name: float(len(labels_of(batch, name))) for name in self.weights}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        hidden_TH = self.backbone(batch.inputs, self.draws(batch, step))
        hidden_MH = hidden_TH.index_select(0, places_of(batch, "mlm"))
        total = self._masked_lm.loss_sum(hidden_MH, self.backbone.embed.token.weight, labels_of(batch, "mlm"))
        sums = {"mlm": total}
        if self.config.pairs == "nsp":
            sums["nsp"] = loss_sum(self._next_sentence(hidden_TH, batch), labels_of(batch, "nsp"))
        return StepOutput(sums, self.weights)

    @property
    def _masked_lm(self) -> MaskedLMHead:
        return cast(MaskedLMHead, self.heads["masked_lm"])

    def _next_sentence(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """(N, 2) logits: the segments follow each other, or not."""
        pooled_NH = self.heads["pooler"](summary(hidden_TH, batch.inputs, "first"))
        return self.heads["next_sentence"](pooled_NH)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each target's loss and best guess, in evaluation."""
        hidden_TH = self.backbone(batch.inputs)
        at, labels = places_of(batch, "mlm"), labels_of(batch, "mlm")
        table_VH = self.backbone.embed.token.weight
        each, best = self._masked_lm.scores(hidden_TH.index_select(0, at), table_VH, labels)
        scores = {"mlm": Scores(each, labels, best, batch.inputs.documents[at])}
        if self.config.pairs == "nsp":
            logits_NC, labels = self._next_sentence(hidden_TH, batch), labels_of(batch, "nsp")
            documents = torch.arange(len(labels), device=labels.device)
            scores["nsp"] = Scores(losses(logits_NC, labels), labels, logits_NC.argmax(-1), documents)
        return scores

    @torch.no_grad()
    def samples(self, batch: Batch, tokenizer: Tokenizer, n: int) -> list[dict[str, Any]]:
        """The first n examples of a batch as plain data: `pieces` of the text as it was, and `masked`: for each
        hidden place its `position` among them, the `truth`, `shown` in its place, and `guesses`: the five most
        probable pieces, each with its probability."""
        hidden_TH = self.backbone(batch.inputs)
        at, labels = places_of(batch, "mlm"), labels_of(batch, "mlm")
        wanted = batch.inputs.documents[at] < n
        at, labels = at[wanted], labels[wanted]
        logits_MV = self._masked_lm(hidden_TH.index_select(0, at), self.backbone.embed.token.weight)
        # Rows of the table beyond the vocabulary stand for no piece.
        probability_MV = logits_MV.float().softmax(-1)[:, : tokenizer.vocab_size]
        shares, guesses = (one.cpu() for one in probability_MV.topk(min(_GUESSES, tokenizer.vocab_size)))
        tokens, shown = batch.inputs.tokens.cpu().clone(), batch.inputs.tokens.cpu()[at.cpu()]
        tokens[at.cpu()] = labels.cpu()
        samples = []
        for start, length in list(zip(batch.inputs.starts, batch.inputs.lengths, strict=True))[:n]:
            masked = [
                {
                    "position": place - start,
                    "truth": tokenizer.pieces([int(labels[row])])[0],
                    "shown": tokenizer.pieces([int(shown[row])])[0],
                    "guesses": list(map(list, zip(tokenizer.pieces(guesses[row]), shares[row].tolist(), strict=True))),
                }
                for row, place in enumerate(at.tolist())
                if start <= place < start + length
            ]
            samples.append({"pieces": tokenizer.pieces(tokens[start : start + length]), "masked": masked})
        return samples

    @torch.no_grad()
    def complete(
        self, texts: Sequence[str], autocast: Callable[[], AbstractContextManager]
    ) -> Iterator[dict[str, Any]]:
        """Fill the masks of texts, written as the tokenizer's mask token. For each `text`: it `filled` with the best
        pieces, and `masks`, for each the five `guesses` with their probabilities. UserError where there is no mask, or
        the text is longer than the model."""
        mask = self.tokenizer.role("mask")
        written = self.tokenizer.pieces([mask])[0]
        layout = text_format(self.backbone.config.text_format, self.tokenizer)
        device = self.backbone.embed.token.weight.device
        for text in texts:
            runs = [self.tokenizer.encode(run) for run in text.split(written)]
            if len(runs) == 1:
                raise UserError(
                    f"nothing to fill: no {written} in {text[:80]!r}", f"write {written} where a word is missing"
                )
            ids = np.concatenate([runs[0], *(np.append(mask, run) for run in runs[1:])])
            tokens, columns = layout.single(ids)
            if len(tokens) > self.backbone.config.max_positions:
                raise UserError(
                    f"{len(tokens)} tokens; the model reads {self.backbone.config.max_positions}", "cut the text"
                )
            packed = Packed(
                torch.from_numpy(np.asarray(tokens, dtype=np.int64)),
                (len(tokens),),
                {name: torch.from_numpy(np.asarray(column, dtype=np.int64)) for name, column in columns.items()},
            ).to(device)
            at = torch.nonzero(packed.tokens == mask)[:, 0]
            with autocast():
                logits_MV = self._masked_lm(self.backbone(packed)[at], self.backbone.embed.token.weight)
            shares, best = logits_MV.float().softmax(-1)[:, : self.tokenizer.vocab_size].topk(_GUESSES)
            filled = packed.tokens.clone()
            filled[at] = best[:, 0]
            yield {
                "text": text,
                "filled": self.tokenizer.decode(filled.tolist()),
                "masks": [
                    {"guesses": list(map(list, zip(self.tokenizer.pieces(row), share.tolist(), strict=True)))}
                    for row, share in zip(best.tolist(), shares, strict=True)
                ],
            }
