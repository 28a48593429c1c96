"""One class or one number for a text or a pair of texts, over encoders (pooled first token), decoders (last token) and
encoder-decoders (last token of the decoder, which reads the same text), as their papers have it, or as transformers has
it (`TaskConfig.head`).

Devlin et al. 2019, section 4.1; Radford et al. 2018, section 3.3; Lewis et al. 2020, section 3.1.

Shape letters: T tokens, N examples, H hidden width, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.heads.learner import BaseLearner
from lmtool.heads.losses import loss_sum, losses
from lmtool.heads.sequence import Pooler, SequenceHead, summary, summary_index
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.nn.dropout import Draws
from lmtool.tasks.configs import ClassificationConfig, RegressionConfig, TaskConfig
from lmtool.tasks.examples import SequenceExamples
from lmtool.tasks.rows import TaskRows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput


class SequenceLearner(BaseLearner, ABC):
    """The backbone, its pooler where it has one, and a head of the task's name. The one term is the task's name."""

    def __init__(self, config: TaskConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int, outputs: int):
        super().__init__(backbone, seed)
        self.config, self.tokenizer = config, tokenizer
        self.weights = {config.name: 1.0}
        self.form = backbone.config.sequence_form(config.head)
        if self.form.pooled:
            self.add_head("pooler", Pooler(backbone.hidden_size, backbone.pooler_activation))
        dropout = backbone.config.dropout if config.dropout is None else config.dropout
        self.add_head(config.name, SequenceHead(backbone.hidden_size, outputs, dropout, self.form.bias))

    def examples(self, rows: TaskRows, max_length: int, split: str) -> SequenceExamples:
        """Rows tokenised, cut and laid out for this backbone."""
        model, start = self.backbone.config, None
        if isinstance(model, EncoderDecoderConfig):
            start = self.tokenizer.role(model.start_role)
        layout = self.form.text_format
        return SequenceExamples(rows, self.tokenizer, layout, max_length, self.config.name, split, start)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(N, C) outputs of the head. A backbone of which nothing learns is a feature extractor: it runs without
        gradient and without dropout, and only the head drops."""
        draws = self.draws(batch, step)
        learns = any(parameter.requires_grad for parameter in self.backbone.parameters())
        with nullcontext() if learns else torch.no_grad():
            summary_NH = self._summary(batch, draws if learns else None)
        if self.form.pooled:
            summary_NH = self.heads["pooler"](summary_NH)
        if draws is not None:
            draws = draws if batch.outputs is None else draws.for_outputs()
            draws = draws.rows(self._place(batch))
        return self.heads[self.config.name](summary_NH, draws)

    def _summary(self, batch: Batch, draws: Draws | None) -> Tensor:
        """(N, H): one token's hidden state, the only one that the last layer gives, or the mean over the text."""
        sides = (batch.inputs, draws) if batch.outputs is None else (batch.inputs, draws, batch.outputs)
        if self.form.place == "mean":
            return summary(self.backbone(*sides), self._read(batch), "mean")
        return self.backbone(*sides, read_M=self._place(batch))

    def _place(self, batch: Batch) -> Tensor:
        """(N,) flat index of the token that stands for the text."""
        return summary_index(self._read(batch), "last" if self.form.place == "last" else "first")

    @staticmethod
    def _read(batch: Batch) -> Packed:
        """The side whose hidden states are summed up."""
        return batch.inputs if batch.outputs is None else batch.outputs

    def labels(self, batch: Batch) -> Tensor:
        """(N,) labels of a labelled batch."""
        labels = batch.targets[self.config.name].labels
        if labels is None:
            raise ValueError("the batch has no labels")
        return labels

    @abstractmethod
    def best(self, outputs_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) the best class or the value, and (N,) its probability or the value again."""

    @abstractmethod
    def losses(self, outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
        """(N,) fp32 loss of each example, as evaluation counts it."""

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each example's loss and prediction, in evaluation."""
        outputs_NC, labels_N = self.outputs(batch, 0), self.labels(batch)
        each = self.losses(outputs_NC, labels_N)
        documents = torch.arange(len(each), device=each.device)
        return {self.config.name: Scores(each, labels_N, self.best(outputs_NC)[0], documents)}


class ClassificationLearner(SequenceLearner):
    """Cross entropy, smoothed and weighted by class as the task says.

    With class weights the loss is the weighted sum of the losses over the sum of the weights of the labels, as in
    torch; without, the mean over examples.
    """

    class_weights: Tensor | None

    def __init__(self, config: ClassificationConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        if config.labels is None or config.loss.class_weights == "balanced":
            raise ValueError("build a task from the config that load_task gives back: its labels are filled in")
        super().__init__(config, backbone, tokenizer, seed, len(config.labels))
        self.labels_by_number = config.labels
        weights = config.loss.class_weights
        self.smoothing = config.loss.label_smoothing
        self.register_buffer("class_weights", torch.tensor(weights) if weights != "none" else None, persistent=False)

    def counts(self, batch: Batch) -> dict[str, float]:
        labels = self.labels(batch)
        if self.class_weights is None:
            return {self.config.name: float(len(labels))}
        return {self.config.name: float(self.class_weights.to(labels.device).double()[labels].sum())}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        logits_NC = self.outputs(batch, step)
        weights_C = None if self.class_weights is None else self.class_weights.to(logits_NC.device)
        total = loss_sum(logits_NC, self.labels(batch), self.smoothing, weights_C)
        return StepOutput({self.config.name: total}, self.weights)

    def best(self, outputs_NC: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = outputs_NC.float().softmax(-1).max(-1)
        return probabilities.indices, probabilities.values

    def losses(self, outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Plain cross entropy, whatever smoothing and weights train with."""
        return losses(outputs_NC, labels_N)

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """(N, C) probabilities in fp32; labels are not read."""
        return self.outputs(batch, 0).float().softmax(-1)


class RegressionLearner(SequenceLearner):
    """Mean squared error."""

    def __init__(self, config: RegressionConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed, 1)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.config.name: float(len(self.labels(batch)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        values_N = self.outputs(batch, step)[:, 0].float()
        return StepOutput({self.config.name: F.mse_loss(values_N, self.labels(batch), reduction="sum")}, self.weights)

    def best(self, outputs_NC: Tensor) -> tuple[Tensor, Tensor]:
        values_N = outputs_NC[:, 0].float()
        return values_N, values_N

    def losses(self, outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
        return (outputs_NC[:, 0].float() - labels_N).square()

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """(N,) values in fp32; labels are not read."""
        return self.outputs(batch, 0)[:, 0].float()
