"""Tasks that read a text, or a pair of texts, as one vector: encoders (pooled first token), decoders (last token) and
encoder-decoders (last token of the decoder, which reads the same text), as in their papers or in transformers
(`SequenceConfig.head`).

Devlin et al. 2019, section 4.1; Radford et al. 2018, section 3.3; Lewis et al. 2020, section 3.1.

Shape letters: T tokens, N examples, H hidden width, C classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.data.configs import FORMATS
from lmtool.data.examples import Examples, Plan, Rows, SplitData, unlabeled_name
from lmtool.learners.baseline import Predictor
from lmtool.learners.inspection import Inspector
from lmtool.learners.mixed_examples import MixedBatch, combine
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary, summary_index
from lmtool.nn.dropout import DropoutRng
from lmtool.tasks.configs.base import CoralConfig, DannConfig
from lmtool.tasks.configs.sequence import WindowedConfig
from lmtool.tasks.kinds.base import TaskKind, TextKind
from lmtool.tasks.kinds.labels import Columns, Origin, cell_text, parents_of, text_of, words_of
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Label, Prediction
from lmtool.tasks.kinds.texts import GroupedExamples, InputFormat, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, StepOutput, send

TARGET = "target"
_STEEPNESS = 10.0  # schedule of Ganin et al. 2016, section 5.2.2


class Adaptation(ABC):
    """An auxiliary loss over the features of both domains."""

    def __init__(self, config: object):
        self.config = config

    @property
    def uninformed_loss(self) -> float:
        """The loss, in nats, of a model whose features do not distinguish the domains."""
        return 0.0

    def head(self, width: int) -> nn.Module | None:
        """Returns a new trainable module for features of this width; None if the loss has no parameters."""
        return None

    @abstractmethod
    def count(self, source: int, target: int) -> float:
        """Returns the number of losses that `loss` adds up for these numbers of source and target texts."""

    @abstractmethod
    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        """Returns the sum of the losses. step: the training step."""


class GradientReversal(Adaptation):
    """Cross entropy of a domain classifier behind a gradient reversal layer (Ganin et al. 2016)."""

    config: DannConfig

    @property
    def uninformed_loss(self) -> float:
        return math.log(2)

    def head(self, width: int) -> nn.Module:
        return DomainClassifier(width, self.config.hidden_size)

    def count(self, source: int, target: int) -> float:
        return float(source + target)

    def strength(self, step: int) -> float:
        """Returns the scale of the reversed gradient at a training step, which rises from 0 to nearly 1."""
        progress = min(step / self.config.steps, 1.0)
        return 2 / (1 + math.exp(-_STEEPNESS * progress)) - 1

    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        assert head is not None
        features_MH = torch.cat([source_NH, target_NH])
        labels_M = torch.ones(len(features_MH), dtype=torch.int64, device=features_MH.device)
        labels_M[: len(source_NH)] = 0
        logits_M2 = head(_Reversal.apply(features_MH, self.strength(step)))
        return F.cross_entropy(logits_M2.float(), labels_M, reduction="sum")


class MomentMatching(Adaptation):
    """The squared Frobenius distance of the covariances, divided by 4 H^2 (Sun and Saenko 2016, equation 1).
    Covariances are those of one forward pass; with gradient accumulation, the loss is the mean over passes."""

    config: CoralConfig

    def count(self, source: int, target: int) -> float:
        return 1.0

    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        width = source_NH.shape[1]
        gap_HH = _covariance(source_NH.float()) - _covariance(target_NH.float())
        return gap_HH.square().sum() / (4 * width**2)


class DomainClassifier(nn.Module):
    """Predicts the domain of a text: a hidden layer with ReLU, and one output for each domain."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.dense = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, 2)

    def forward(self, features_MH: Tensor) -> Tensor:
        """Maps (M, H) to (M, 2)."""
        return self.output(F.relu(self.dense(features_MH)))


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, features: Tensor, strength: float) -> Tensor:
        context.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -context.strength * gradient, None


def _covariance(features_NH: Tensor) -> Tensor:
    centered_NH = features_NH - features_NH.mean(0)
    return centered_NH.T @ centered_NH / max(len(features_NH) - 1, 1)


class PairedExamples:
    """Pairs each text of a task with a text of the other domain. Pairs are resampled every epoch, and all target texts
    are used equally often."""

    def __init__(self, source: SequenceExamples, target: SequenceExamples, seed: int):
        self.source, self.target, self.seed, self.term = source, target, seed, source.term
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            source, target = self.source.plan(epoch), self.target.plan(epoch)
            order = random_streams.Permutation(len(target), self.seed, "sample", epoch)
            sampled = order(np.arange(len(source)) % len(target))
            rows = np.empty(len(source), dtype=[("source", "i8"), ("target", "i8")])
            rows["source"], rows["target"] = np.arange(len(source)), sampled
            previous = dict([*self._plans.items()][-1:])
            self._plans = previous | {epoch: Plan(rows, source.lengths + target.lengths[sampled])}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> MixedBatch:
        # Source texts get even numbers and target texts odd ones, so that no two texts share random numbers.
        even = 2 * np.asarray(examples)
        source = self.source.batch(self.source.plan(epoch).rows[rows["source"]], even, epoch)
        target = self.target.batch(self.target.plan(epoch).rows[rows["target"]], even + 1, epoch)
        return combine([(self.term, source), (TARGET, target)])

    def metadata(self) -> JsonObject:
        """Returns metadata of the task's texts. Lengths are those of source and target together."""
        metadata = {**self.source.metadata(), **self.plan(0).metadata()}
        return {**metadata, "target_examples": len(self.target.plan(0))}


LANGUAGE_MODEL = "lm"
"""The name of the auxiliary language model's term and head."""


class WindowedKind(TextKind):
    """Base of the kinds whose long texts may be read in windows."""

    config: WindowedConfig

    def rows(self, columns: Columns, origin: Origin, labeled: bool) -> Rows:
        rows = super().rows(columns, origin, labeled)
        trees = {
            name: parents_of(heads, words_of(name, rows.columns, origin), columns, origin)
            for name, heads in self.config.head_columns.items()
        }
        return replace(rows, parents=trees)

    def inputs(self, columns: Columns, origin: Origin) -> dict[str, list[Label]]:
        """Texts with dependency trees may be lists of words."""
        if not self.config.reads_trees:
            return super().inputs(columns, origin)
        return {
            name: [
                cell if isinstance(cell, list | tuple) else text_of(self.config, name, cell, place)
                for cell, place in zip(columns[name], origin, strict=True)
            ]
            for name in self.config.reads
        }

    def prompt_columns(self, rows: Rows) -> Mapping[str, Sequence[str]]:
        return {name: list(map(cell_text, cells)) for name, cells in rows.columns.items()}

    def join(self, parts: Sequence[Label]) -> Prediction:
        """Joins the predictions for the windows of a text: the mean of their votes, or the elementwise maximum."""
        if len(parts) == 1:
            return parts[0]
        votes = np.stack([self.vote(part) for part in parts])
        return self.prediction_of_votes(votes.max(axis=0) if self.config.windows == "max" else votes.mean(axis=0))

    @abstractmethod
    def vote(self, part: Prediction) -> np.ndarray:
        """Returns the prediction for a window, as numbers that can be averaged."""

    @abstractmethod
    def prediction_of_votes(self, votes: np.ndarray) -> Prediction:
        """Returns the prediction that joined votes stand for."""


class SequenceLearner(TaskLearner):
    """Learns a task over whole texts: the backbone, the pooler if the family has one, and a head with the task's name.
    outputs: the output width of the head."""

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int, outputs: int):
        super().__init__(kind, backbone, tokenizer, seed)
        self.form = form = self.config.form(backbone.config)
        if isinstance(self.config, WindowedConfig) and self.config.reads_both_orders(backbone.config):
            self.orders = 2
        if form.pooled:
            self.add_head("pooler", pooler(backbone))
        if self.config.auxiliary_lm:
            self.add_head(LANGUAGE_MODEL, lm_head(backbone))
            self.loss_weights = {**self.loss_weights, LANGUAGE_MODEL: self.config.auxiliary_lm}
        width = backbone.hidden_size if form.pooled else backbone.feature_size
        added = FORMATS[form.text_format].added
        head = SequenceHead(width, outputs, self.head_dropout, form.bias, form.dense, len(added), backbone.hidden_size)
        self.add_head(self.term, head)
        self.adaptation: Adaptation | None = None
        domain = self.config.domain if isinstance(self.config, WindowedConfig) else None
        if domain is not None:
            self.adaptation = build(domain)
            self.loss_weights = {**self.loss_weights, self.domain_term: domain.weight}
            classifier = self.adaptation.head(width)
            if classifier is not None:
                self.add_head(self.domain_term, classifier)
        if head.tokens is not None:
            first = backbone.embed.extend(head.tokens)
            self.tokenizer = None if tokenizer is None else tokenizer.with_tokens(added, first)

    @property
    def domain_term(self) -> str:
        """The name of the loss term and of the head of domain adaptation."""
        return f"{self.term}_domain"

    def examples(self, data: SplitData, max_length: int) -> Examples:
        """Returns the examples of a split. With domain adaptation, training rows are paired with texts of the other
        domain."""
        if self.orders == 2:
            return self._both_orders(self.rows(data), data.split, max_length)
        examples = self.sequence_examples(self.rows(data), data.split, max_length)
        target = data.rows.get(unlabeled_name(self.term))
        if self.adaptation is None or target is None or data.split != "train":
            return examples
        return PairedExamples(examples, self.sequence_examples(target, TARGET, max_length), self.seed)

    def sequence_examples(self, rows: Rows, split: str, max_length: int) -> SequenceExamples:
        """Returns the examples of rows with one text or a pair of texts, in the text format of this backbone."""
        stride = self.config.stride if self.config.windowed != "none" else None
        input_format = InputFormat(
            self.tokenizer, self.form.text_format, max_length, self.start_token, stride, self.config.truncation
        )
        return SequenceExamples(rows, input_format, self.term, split)

    def _both_orders(self, rows: Rows, split: str, max_length: int) -> GroupedExamples:
        doubled = rows.take(np.repeat(np.arange(len(rows)), 2))
        (first, firsts), (second, seconds) = rows.columns.items()
        columns = {
            name: [text for pair in zip(texts, others, strict=True) for text in pair]
            for name, texts, others in ((first, firsts, seconds), (second, seconds, firsts))
        }
        pairs = self.sequence_examples(replace(doubled, columns=columns), split, max_length)
        return GroupedExamples(rows, pairs, 2)

    def part_counts(self, rows: Rows, examples: Examples) -> np.ndarray:
        return np.full(len(rows), 2) if self.orders == 2 else super().part_counts(rows, examples)

    def inspector(self, examples: Any, max_length: int) -> Inspector:
        examples = examples.pairs if self.orders == 2 else examples
        return super().inspector(examples.source if isinstance(examples, PairedExamples) else examples, max_length)

    def labels(self, batch: Batch) -> Tensor:
        return super().labels(dict(batch.members)[self.term] if isinstance(batch, MixedBatch) else batch)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (N, C): outputs of the head."""
        rng = self.dropout_rng(batch, step)
        return self._head_outputs(self._pooled(self._summary(batch, rng)), batch, rng)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        if isinstance(batch, MixedBatch):
            return self._adapted_step(batch, step)
        if LANGUAGE_MODEL not in self.loss_weights:
            return super().forward(batch, step)
        rng = self.dropout_rng(batch, step)
        hidden_TH = self.hidden_of(batch, rng)
        features_NH = self._pooled(summary(hidden_TH, batch.inputs, self.form.pooling))
        total = self.training_loss(self._head_outputs(features_NH, batch, rng), batch)
        at_M = send(self._predicting_indices(batch), hidden_TH.device)
        labels_M = batch.inputs.tokens[at_M + 1].long()
        lm_loss = cast(LMHead, self.heads[LANGUAGE_MODEL]).loss_sum(hidden_TH[at_M], self.table_VW, labels_M)
        return StepOutput({self.term: total, LANGUAGE_MODEL: lm_loss}, self.loss_weights)

    def _adapted_step(self, batch: MixedBatch, step: int) -> StepOutput:
        assert self.adaptation is not None
        (_, source), (_, target) = batch.members
        rng = self.dropout_rng(source, step)
        source_NH = self._pooled(self._summary(source, rng))
        target_NH = self._pooled(self._summary(target, self.dropout_rng(target, step)))
        total = self.training_loss(self._head_outputs(source_NH, source, rng), batch)
        classifier = dict(self.heads.items()).get(self.domain_term)
        adaptation_loss = self.adaptation.loss(source_NH, target_NH, classifier, step)
        return StepOutput({self.term: total, self.domain_term: adaptation_loss}, self.loss_weights)

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = super().counts(batch)
        if isinstance(batch, MixedBatch) and self.adaptation is not None:
            texts = [len(part.inputs.lengths) for _, part in batch.members]
            return {**counts, self.domain_term: self.adaptation.count(*texts)}
        if LANGUAGE_MODEL not in self.loss_weights:
            return counts
        return {**counts, LANGUAGE_MODEL: float(len(self._predicting_indices(batch)))}

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """Adds the auxiliary loss of a uniform prediction: over the vocabulary, or over two domains."""
        auxiliary_loss = self.loss_weights.get(LANGUAGE_MODEL, 0.0) * math.log(self.backbone.config.vocab_size)
        if self.adaptation is not None:
            auxiliary_loss += self.loss_weights[self.domain_term] * self.adaptation.uninformed_loss
        return super().baseline_loss(batches, predictors) + auxiliary_loss

    def _predicting_indices(self, batch: Batch) -> Tensor:
        """Returns (M,) on the host. The next token must be in the language model's vocabulary."""
        inputs = batch.host.inputs
        has_next_T = (inputs.tokens < self.backbone.config.vocab_size).roll(-1)
        has_next_T[summary_index(inputs, "last")] = False
        return has_next_T.nonzero()[:, 0]

    def _pooled(self, summary_NH: Tensor) -> Tensor:
        if self.orders == 2:
            return summary_NH.unflatten(0, (-1, 2)).sum(1)
        return self.heads["pooler"](summary_NH) if self.form.pooled else summary_NH

    def _head_outputs(self, features_NH: Tensor, batch: Batch, rng: DropoutRng | None) -> Tensor:
        return self.heads[self.term](
            features_NH,
            None if rng is None else self.head_rng(rng, batch, self._summary_indices(batch)[:: self.orders]),
        )

    def _summary(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """Returns (N, H). If one token represents a text, the last layer computes only this token."""
        if self.form.pooling in ("mean", "max"):
            return summary(self.hidden_of(batch, rng), self._pooled_texts(batch), self.form.pooling)
        return self.hidden_of(batch, rng, self._summary_indices(batch))

    def _summary_indices(self, batch: Batch) -> Tensor:
        return summary_index(self._pooled_texts(batch), "last" if self.form.pooling == "last" else "first")

    @staticmethod
    def _pooled_texts(batch: Batch) -> Packed:
        return batch.inputs if batch.outputs is None else batch.outputs
