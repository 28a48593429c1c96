"""A head on the hidden state of each word's first piece, and in training of the later ones.

Shape letters: N windows, M words or pieces that predict, H hidden width, C tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.split import SplitData
from lmtool.errors import UserError
from lmtool.heads.losses import loss_sum, losses
from lmtool.heads.sequence import SequenceHead
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.exits import entropy_share
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.stack import Side
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.schemes import inside_tags
from lmtool.tasks.kinds.word_windows import WORD, WordWindows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput


class TokenLearner(TaskLearner):
    """The backbone and a linear map of the task's name, as transformers' ...ForTokenClassification: over an encoder, a
    decoder, the encoder alone of T5, and BART's decoder, which reads the same text (Lewis et al. 2020, section 3.2).

    Cross entropy, smoothed and weighted by tag as the task says, over the pieces that learn.
    """

    scores_tokens = True
    class_weights: Tensor | None

    @property
    def head_side(self) -> Side:
        return self.config.states_read(self.backbone.config)

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        config = kind.config
        if config.labels is None or config.loss.class_weights == "balanced":
            raise ValueError("build a task from the config that load_task gives back: its labels are filled in")
        misfit = config.misfit(backbone.config)
        if misfit is not None:
            raise UserError(misfit.message, misfit.hint)
        super().__init__(kind, backbone, tokenizer, seed)
        dropout = backbone.config.dropout if config.dropout is None else config.dropout
        self.add_token_head(SequenceHead(self.token_width, len(config.labels), dropout))
        weights = config.loss.class_weights
        self.loss = config.loss
        self.register_buffer("class_weights", torch.tensor(weights) if weights != "none" else None, persistent=False)

    def examples(self, data: SplitData, max_length: int) -> WordWindows:
        """Sentences tokenised, laid out for this backbone and cut into windows."""
        model, learns = self.backbone.config, data.split == "train" and self.config.train_on == "all"
        start = None
        if model.token_states == "outputs" and isinstance(self.backbone, EncoderDecoder):
            start = self.tokenizer.role(self.backbone.config.start_role)
        return WordWindows(
            self.rows(data),
            self.tokenizer,
            self.config.text_format(model),
            max_length,
            self.config.stride,
            self.term,
            data.split,
            np.array(inside_tags(self.config.labels, self.config.scheme)) if learns else None,
            start,
        )

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(M, C)."""
        draws, at_M = self.draws(batch, step), self._places(batch)
        hidden_MH = self.hidden_of(batch, draws, at_M)
        if draws is not None:
            draws = (draws if batch.outputs is None else draws.for_outputs()).rows(at_M)
        return self.heads[self.term](self.pooled(hidden_MH), draws)

    def _places(self, batch: Batch) -> Tensor:
        """(M,) flat indices of the tokens that predict."""
        at_M = batch.targets[self.term].at
        assert at_M is not None
        return at_M

    def counts(self, batch: Batch) -> dict[str, float]:
        labels = self.labels(batch)
        if self.class_weights is None:
            return {self.term: float(len(labels))}
        return {self.term: float(self.class_weights.to(labels.device).double()[labels].sum())}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        logits_MC = self.outputs(batch, step)
        weights_C = None if self.class_weights is None else self.class_weights.to(logits_MC.device)
        loss = self.loss
        total = loss_sum(logits_MC, self.labels(batch), loss.label_smoothing, weights_C, loss.focal_gamma)
        return StepOutput({self.term: total}, self.weights)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Plain cross entropy, whatever smoothing and weights train with."""
        labels_M, at_M = self.labels(batch), self._places(batch)
        return Scores(losses(outputs, labels_M), labels_M, outputs.argmax(-1), batch.inputs.documents[at_M])

    def doubts(self, outputs: Tensor, batch: Batch) -> Tensor:
        unsure_N = outputs.new_zeros(len(batch.inputs.lengths), dtype=torch.float32)
        return unsure_N.scatter_reduce(0, batch.inputs.documents[self._places(batch)], entropy_share(outputs), "amax")

    def parts(self, outputs: Tensor, batch: Batch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each window the numbers of its words in order, their best tags and the probabilities of these."""
        at_M = self._places(batch)
        word_M = batch.inputs.columns[WORD][at_M].cpu().numpy()
        share_M, tag_M = (values.cpu().numpy() for values in outputs.float().softmax(-1).max(-1))
        first_M = word_M >= 0  # later pieces predict in training alone
        borders = np.bincount(batch.inputs.documents[at_M].cpu().numpy()[first_M], minlength=len(batch.inputs.lengths))
        ends = np.cumsum(borders)[:-1]
        pieces = (np.split(values[first_M], ends) for values in (word_M, tag_M, share_M))
        return list(zip(*pieces, strict=True))

    def predictors(self, train: SplitData, examples: WordWindows) -> dict[str, ConstantPredictor]:
        """The shares of the tags among the training words."""
        tags = np.fromiter(chain(*(self.rows(train).labels or ())), dtype=np.int64)
        counts = np.bincount(tags, minlength=len(self.config.labels))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, Any]:
        """The commonest tag for each word."""
        name, prediction = self.kind.constant(self.rows(train))
        rows = self.rows(held_out)
        constant = [Prediction(prediction.value * len(tags), prediction.score) for tags in rows.labels or ()]
        metrics = self.kind.metrics(rows, constant)
        return {
            "name": name,
            "prediction": self.kind.shown(prediction.value)[0],
            "metric": self.metric.name,
            "value": metrics[self.metric.name],
            "metrics": metrics,
        }
