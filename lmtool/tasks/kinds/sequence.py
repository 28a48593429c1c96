"""A text or a pair of texts as one vector, and a head on it: encoders (pooled first token), decoders (last token) and
encoder-decoders (last token of the decoder, which reads the same text), as in their papers or in transformers
(`SequenceConfig.head`).

Devlin et al. 2019, section 4.1; Radford et al. 2018, section 3.3; Lewis et al. 2020, section 3.1.

Shape letters: T tokens, N examples, H hidden width, C classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool import random_streams
from lmtool.config.tables import build
from lmtool.data.configs import FORMATS
from lmtool.data.examples import Plan, Rows, SplitData, unlabelled
from lmtool.learners.baseline import Predictor
from lmtool.learners.mixed_examples import MixedBatch, combine
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary, summary_index
from lmtool.nn.dropout import DropoutRng
from lmtool.tasks.configs.base import CoralConfig, DannConfig
from lmtool.tasks.configs.sequence import WindowedConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import is_unlabelled, row_ids, text_of
from lmtool.tasks.kinds.learner import TaskInspector, TaskLearner
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, StepOutput, send

TARGET = "target"
_STEEPNESS = 10.0  # schedule of Ganin et al. 2016, section 5.2.2


class Adaptation(ABC):
    """An auxiliary loss over the features of both domains."""

    def __init__(self, config: object):
        self.config = config

    @property
    def uninformed(self) -> float:
        """The loss, in nats, if the domains cannot be told apart."""
        return 0.0

    def head(self, width: int) -> nn.Module | None:
        """The trainable module over features of this width; None without one."""
        return None

    @abstractmethod
    def count(self, source: int, target: int) -> float:
        """The number of predictions for these numbers of texts."""

    @abstractmethod
    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        """The sum of losses."""


class GradientReversal(Adaptation):
    """Cross entropy of a domain classifier behind a gradient reversal layer (Ganin et al. 2016)."""

    config: DannConfig

    @property
    def uninformed(self) -> float:
        return math.log(2)

    def head(self, width: int) -> nn.Module:
        return DomainClassifier(width, self.config.hidden_size)

    def count(self, source: int, target: int) -> float:
        return float(source + target)

    def strength(self, step: int) -> float:
        """Scale of the reversed gradient at a step: from 0 to nearly 1."""
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
    """The squared Frobenius distance of the covariances over 4 H^2 (Sun and Saenko 2016, equation 1), within one
    forward; the mean over forwards with gradient accumulation."""

    config: CoralConfig

    def count(self, source: int, target: int) -> float:
        return 1.0

    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        width = source_NH.shape[1]
        gap_HH = _covariance(source_NH.float()) - _covariance(target_NH.float())
        return gap_HH.square().sum() / (4 * width**2)


class DomainClassifier(nn.Module):
    """A hidden layer with ReLU, and one output per domain."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.dense = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, 2)

    def forward(self, features_MH: Tensor) -> Tensor:
        """(M, H) to (M, 2)."""
        return self.output(F.relu(self.dense(features_MH)))


class _Reversal(torch.autograd.Function):
    """The identity, with a reversed and scaled gradient."""

    @staticmethod
    def forward(context: Any, features: Tensor, strength: float) -> Tensor:
        context.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -context.strength * gradient, None


def _covariance(features_NH: Tensor) -> Tensor:
    """(H, H); zero for a single text."""
    centred_NH = features_NH - features_NH.mean(0)
    return centred_NH.T @ centred_NH / max(len(features_NH) - 1, 1)


class PairedExamples:
    """Implements `data.plan.Examples`: pairs each text of a task with one of the other domain, resampled each epoch;
    target texts are used equally often, up to one."""

    def __init__(self, source: SequenceExamples, target: SequenceExamples, seed: int):
        self.source, self.target, self.seed, self.term = source, target, seed, source.term
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            own, others = self.source.plan(epoch), self.target.plan(epoch)
            order = random_streams.Permutation(len(others), self.seed, "sample", epoch)
            taken = order(np.arange(len(own)) % len(others))
            rows = np.empty(len(own), dtype=[("source", "i8"), ("target", "i8")])
            rows["source"], rows["target"] = np.arange(len(own)), taken
            retained = dict([*self._plans.items()][-1:])
            self._plans = retained | {epoch: Plan(rows, own.lengths + others.lengths[taken])}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> MixedBatch:
        # Even and odd numbers, so that no two texts share random numbers.
        own, others = 2 * np.asarray(examples), 2 * np.asarray(examples) + 1
        source = self.source.batch(self.source.plan(epoch).rows[rows["source"]], own, epoch)
        target = self.target.batch(self.target.plan(epoch).rows[rows["target"]], others, epoch)
        return combine([(self.term, source), (TARGET, target)])

    def metadata(self) -> dict[str, object]:
        """Metadata of the task's texts; lengths include both."""
        metadata = {**self.source.metadata(), **self.plan(0).metadata()}
        return {**metadata, "target_examples": len(self.target.plan(0))}


LANGUAGE_MODEL = "lm"
"""The term and head of the auxiliary language model."""


class SequenceKind(TaskKind):
    """The base of kinds whose rows are one text or a pair, and one label."""

    def rows(self, columns: dict[str, list[object]], origin: list[tuple[str, int]], labelled: bool) -> Rows:
        texts = {
            name: [text_of(self.config, name, value, where) for value, where in zip(columns[name], origin, strict=True)]
            for name in self.config.reads
        }
        values, labels = columns.get(self.config.label), None
        if labelled or (values is not None and not is_unlabelled(values)):
            labels = self.decoded_labels(values or [], origin)
        return Rows(row_ids(columns, len(origin)), texts, labels, origin)

    @abstractmethod
    def decoded_labels(self, values: Sequence[object], origin: Sequence[tuple[str, int]]) -> np.ndarray:
        """(N,) labels of a column. UserError with file:line at the first invalid value."""

    def metadata(self, train: Rows) -> tuple[dict[str, object], list[str]]:
        empty = sum(not text.strip() for texts in train.columns.values() for text in texts)
        return {}, [f"{empty:,} empty texts in the training rows"] if empty else []


class WindowedKind(SequenceKind):
    """The base of kinds whose long texts may be read in windows."""

    def join(self, parts: Sequence[Any]) -> Prediction:
        """Joins the windows of a text: the mean of their votes, or the maximum of each."""
        if len(parts) == 1:
            return parts[0]
        votes = np.stack([self.vote(part) for part in parts])
        return self.elected(votes.max(axis=0) if self.config.windows == "max" else votes.mean(axis=0))

    @abstractmethod
    def vote(self, part: Prediction) -> np.ndarray:
        """A window's prediction as numbers that can be averaged."""

    @abstractmethod
    def elected(self, votes: np.ndarray) -> Prediction:
        """The prediction for joined votes."""


class SequenceLearner(TaskLearner):
    """The backbone, its pooler if any, and a head with the task's name. outputs: width of the head's output."""

    def __init__(self, kind: SequenceKind, backbone: Backbone, tokenizer: Tokenizer, seed: int, outputs: int):
        super().__init__(kind, backbone, tokenizer, seed)
        self.form = self.config.form(backbone.config)
        if self.form.pooled:
            self.add_head("pooler", pooler(backbone))
        dropout = backbone.config.dropout if self.config.dropout is None else self.config.dropout
        if self.config.auxiliary_lm:
            self.add_head(LANGUAGE_MODEL, lm_head(backbone))
            self.weights = {**self.weights, LANGUAGE_MODEL: self.config.auxiliary_lm}
        new = FORMATS[self.form.text_format].new
        form, width = self.form, backbone.hidden_size if self.form.pooled else backbone.feature_size
        head = SequenceHead(width, outputs, dropout, form.bias, form.dense, len(new), backbone.hidden_size)
        self.add_head(self.term, head)
        self.adaptation: Adaptation | None = None
        domain = self.config.domain if isinstance(self.config, WindowedConfig) else None
        if domain is not None:
            self.adaptation = build(domain)
            self.weights = {**self.weights, self.domain_term: domain.weight}
            classifier = self.adaptation.head(width)
            if classifier is not None:
                self.add_head(self.domain_term, classifier)
        if head.tokens is not None:
            first = backbone.embed.extend(head.tokens)
            self.tokenizer = None if tokenizer is None else tokenizer.with_tokens(new, first)

    @property
    def domain_term(self) -> str:
        """The term and head of the domain adaptation loss."""
        return f"{self.term}_domain"

    def examples(self, data: SplitData, max_length: int) -> Any:
        """Tokenized, truncated and formatted rows; in training, paired with texts of the other domain, if any."""
        own, other = self.rows(data), data.rows.get(unlabelled(self.term))
        examples = self._examples(own, data.split, max_length)
        if self.adaptation is None or other is None or data.split != "train":
            return examples
        return PairedExamples(examples, self._examples(other, TARGET, max_length), self.seed)

    def inspector(self, examples: object, max_length: int) -> TaskInspector:
        return super().inspector(examples.source if isinstance(examples, PairedExamples) else examples, max_length)

    def labels(self, batch: Batch) -> Tensor:
        return super().labels(dict(batch.members)[self.term] if isinstance(batch, MixedBatch) else batch)

    def _examples(self, rows: Rows, split: str, max_length: int) -> SequenceExamples:
        model, start = self.backbone.config, None
        if isinstance(model, EncoderDecoderConfig):
            start = self.tokenizer.role(model.start_role)
        stride = self.config.stride if self.config.windowed != "none" else None
        layout = InputFormat(self.tokenizer, self.form.text_format, max_length, start, stride)
        return SequenceExamples(rows, layout, self.term, split)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(N, C) outputs of the head."""
        rng = self.dropout_rng(batch, step)
        return self._of_summary(self._summary(batch, rng), batch, rng)

    def stepped(self, batch: Batch, step: int, loss: Callable[[Tensor], Tensor]) -> StepOutput:
        """A training step. loss: maps the head's (N, C) outputs to the sum of losses."""
        if isinstance(batch, MixedBatch):
            return self._adapted(batch, step, loss)
        if LANGUAGE_MODEL not in self.weights:
            return StepOutput({self.term: loss(self.outputs(batch, step))}, self.weights)
        rng = self.dropout_rng(batch, step)
        hidden_TH = self.hidden_of(batch, rng)
        total = loss(self._of_summary(summary(hidden_TH, batch.inputs, self.form.pooling), batch, rng))
        at_M = send(self._predicting(batch, self.backbone.config.vocab_size), hidden_TH.device)
        table_VH, labels_M = self.backbone.embed.token.weight, batch.inputs.tokens[at_M + 1].long()
        of_text = cast(LMHead, self.heads[LANGUAGE_MODEL]).loss_sum(hidden_TH[at_M], table_VH, labels_M)
        return StepOutput({self.term: total, LANGUAGE_MODEL: of_text}, self.weights)

    def _adapted(self, batch: MixedBatch, step: int, loss: Callable[[Tensor], Tensor]) -> StepOutput:
        """A training step on texts of two domains."""
        assert self.adaptation is not None
        (_, source), (_, target) = batch.members
        rng = self.dropout_rng(source, step)
        source_NH = self._pooled(self._summary(source, rng))
        target_NH = self._pooled(self._summary(target, self.dropout_rng(target, step)))
        total = loss(self._of_features(source_NH, source, rng))
        classifier = dict(self.heads.items()).get(self.domain_term)
        adaptation_loss = self.adaptation.loss(source_NH, target_NH, classifier, step)
        return StepOutput({self.term: total, self.domain_term: adaptation_loss}, self.weights)

    def term_counts(self, batch: Batch, count: float) -> dict[str, float]:
        """`counts` of a batch, given the task's own count."""
        if isinstance(batch, MixedBatch) and self.adaptation is not None:
            texts = [len(part.inputs.lengths) for _, part in batch.members]
            return {self.term: count, self.domain_term: self.adaptation.count(*texts)}
        if LANGUAGE_MODEL not in self.weights:
            return {self.term: count}
        return {self.term: count, LANGUAGE_MODEL: float(len(self._predicting(batch, self.backbone.config.vocab_size)))}

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """Adds the auxiliary loss of a uniform prediction: over all tokens, or over two domains."""
        more = self.weights.get(LANGUAGE_MODEL, 0.0) * math.log(self.backbone.config.vocab_size)
        if self.adaptation is not None:
            more += self.weights[self.domain_term] * self.adaptation.uninformed
        return super().baseline_loss(batches, predictors) + more

    @staticmethod
    def _predicting(batch: Batch, vocabulary: int) -> Tensor:
        """(M,) flat indices, on the host, of the tokens that predict the next one: those before another token of their
        text and within the language model's vocabulary."""
        inputs = batch.host.inputs
        has_next_T = (inputs.tokens < vocabulary).roll(-1)
        has_next_T[summary_index(inputs, "last")] = False
        return has_next_T.nonzero()[:, 0]

    def _of_summary(self, summary_NH: Tensor, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """(N, C): the pooler, if any, and the head."""
        return self._of_features(self._pooled(summary_NH), batch, rng)

    def _pooled(self, summary_NH: Tensor) -> Tensor:
        """(N, H): inputs of the head."""
        return self.heads["pooler"](summary_NH) if self.form.pooled else summary_NH

    def _of_features(self, features_NH: Tensor, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """(N, C): the head."""
        if rng is not None:
            rng = rng if batch.outputs is None else rng.for_outputs()
            rng = rng.rows(self._place(batch))
        return self.heads[self.term](features_NH, rng)

    def _summary(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """(N, H): one token's hidden state, the only one that the last layer gives, or the mean or maximum over the
        text."""
        if self.form.pooling in ("mean", "max"):
            return summary(self.hidden_of(batch, rng), self._read(batch), self.form.pooling)
        return self.hidden_of(batch, rng, self._place(batch))

    def _place(self, batch: Batch) -> Tensor:
        """(N,) flat index of the token that stands for the text."""
        return summary_index(self._read(batch), "last" if self.form.pooling == "last" else "first")

    @staticmethod
    def _read(batch: Batch) -> Packed:
        """The packed texts whose hidden states are pooled."""
        return batch.inputs if batch.outputs is None else batch.outputs
