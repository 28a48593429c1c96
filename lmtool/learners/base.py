"""The base class of learners: a model with heads, and the methods that the loop, the evaluator and the commands call.

Objectives, tasks and mixtures are subclasses. In a checkpoint, the names of tensors begin with `backbone.`,
`heads.NAME.` or `objective.` (additional networks of an objective).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lmtool.config.base import Config
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.data.rows import text_cell
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor, headline_terms, mean_losses
from lmtool.learners.evaluation import Scorer, TermScorer
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.inspection import Inspector
from lmtool.learners.metrics import LOSS, Metric
from lmtool.learners.model import ModelWithHeads
from lmtool.learners.writing import Writer
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.predicted import Binary, Classes, Predicted, PredictedWords
from lmtool.nn.dropout import DeviceRng, DropoutRng, TokenRng, token_keys
from lmtool.random_streams import key
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, ParameterGroup, Scores, StepOutput


def truncation_warnings(truncated: Mapping[str, int], rows: int) -> Iterator[str]:
    """Yields warnings about truncated texts. truncated: the number of texts by what was done to them, such as "texts
    are truncated to 512 tokens". rows: the number of all texts."""
    for what, count in truncated.items():
        yield f"{count:,} of {rows:,} {what}"


def no_progress(done: int, total: int) -> None:
    """Ignores progress; the default of `Inference.progress`."""


# Maximum tokens of a forward on a CPU. Larger forwards are hardly faster (BERT, 2 layers, width 256, 128 texts a call:
# 13.2 calls per second of CPU time at 8,192 tokens, 12.8 at 2,048), but need more memory: the heap had 688 MB after 250
# calls and was still growing, compared with a constant 456 MB from the 90th call on.
CPU_TOKENS = 2048


@dataclass(frozen=True)
class Inference:
    """Settings of inference. max_length: maximum tokens of an example. batch_tokens: maximum tokens of a forward,
    see `forward_tokens`. truncated: counts the truncated texts, see `truncation_warnings`. progress: called with the
    number of finished rows and the number of all rows."""

    max_length: int
    batch_tokens: int
    precision: Precision
    truncated: Counter[str] = field(default_factory=Counter)
    progress: Callable[[int, int], None] = no_progress


def forward_tokens(batch_tokens: int, precision: Precision) -> int:
    """Returns the maximum tokens of a forward on a device: on a CPU, at most `CPU_TOKENS`."""
    return min(batch_tokens, CPU_TOKENS) if precision.device.type == "cpu" else batch_tokens


@dataclass(frozen=True)
class Answers:
    """The predictions of a trained model: the record of each row, as plain data, and the score of each metric over the
    `labeled_count` rows with labels."""

    records: Iterator[dict[str, object]]
    scores: Mapping[str, float] = field(default_factory=dict)
    labeled_count: int = 0


class Responder:
    """Answers texts that a user gives. The base class refuses; a learner that can answer returns a subclass. columns:
    the names of the columns that it reads. generation: the settings for generating a text per row; None if it does
    not."""

    columns: tuple[str, ...] = ("text",)
    fills_masks: bool = False
    continues: bool = False
    generation: GenerationConfig | None = None

    def __init__(self, learner: BaseLearner):
        self.learner: Any = learner

    def read_rows(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]]) -> Rows:
        """Returns the rows of a table without labels, for `answers`. Raises UserError if a column is missing or a cell
        has no text. columns: the columns of the table, by name. origin: the file and the line of each row."""
        columns = self.columns_read(columns, origin)
        texts = {
            name: [text_cell(place, name, value) for value, place in zip(values, origin, strict=True)]
            for name, values in columns.items()
        }
        return Rows(list(range(len(origin))), texts, None, origin)

    def columns_read(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]]) -> dict[str, list[Any]]:
        """Returns the columns of a table that are read. Raises UserError if one is missing."""
        missing = [name for name in self.columns if name not in columns]
        if missing:
            raise UserError(
                f"{origin[0][0]}: the column {missing[0]} is missing; the columns are {', '.join(columns)}",
                f"rename the text columns of a copy of the file: {', '.join(self.columns)}",
            )
        return {name: columns[name] for name in self.columns}

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """Returns the predictions for rows: filled masks, a continuation, or a label; with scores if the rows have
        labels. Raises UserError if the learner has no predictions for texts."""
        raise UserError(
            f"a model trained on {self.learner.config.name} has no predictions for texts",
            "finetune the checkpoint on a task, and predict with the result",
        )

    def label_of(self, text: str) -> object:
        """Returns the label that a generated text represents; None if it represents no label."""
        return None

    def line(self, record: dict[str, Any]) -> str:
        """Returns a record of `answers` as a line of output."""
        return str(record)


def decayed_groups(learner: nn.Module) -> list[ParameterGroup]:
    """Returns the trainable parameters in two groups: matrices, with weight decay, and vectors (norms and biases),
    without."""
    decay, no_decay = ParameterGroup("decay", []), ParameterGroup("no_decay", [], weight_decay_scale=0.0)
    for name, parameter in learner.named_parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 else no_decay).parameters.append((name, parameter))
    return [group for group in (decay, no_decay) if group.parameters]


class BaseLearner(ModelWithHeads, ABC):
    """A trainable model: `backbone`, `heads`, and optional additional networks in `objective`.

    seed: the seed of the run, which initializes new heads and determines dropout. loss_weights: the weight of each term
    of the loss. A term is one summand of the loss, such as `mlm` or `nsp`. metric: the metric that selects the best
    checkpoint. Objectives use `loss`, or the loss of one term, TERM_loss.
    """

    loss_weights: dict[str, float]
    metric: Metric = LOSS
    inspector_class: type[Inspector] = Inspector

    def __init__(self, config: Config, backbone: Backbone, tokenizer: Tokenizer | None, seed: int):
        super().__init__(backbone, seed)
        self.objective: nn.ModuleDict | None = None
        self.config: Any = config
        self.tokenizer: Any = tokenizer

    # Interface of the loop.

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """Returns the number of targets of each term in a batch, without a forward."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> StepOutput:
        """Returns the sum of each term's losses over a batch. step: the number of the optimizer step, from 1."""

    def penalties(self) -> dict[str, Tensor]:
        """Returns the terms of the loss that do not depend on the batch and are added once per step: the regularization
        of the tuning method and of the schemes."""
        terms = {} if self.tuning is None else dict(self.tuning.penalties(self))
        for scheme in self.schemes:
            terms |= scheme.penalties(self)
        return terms

    def on_step(self, step: int) -> None:
        """Called before the forward of each optimizer step. step: the number of the step, from 1."""
        if self.tuning is not None:
            self.tuning.on_step(self, step)
        for scheme in self.schemes:
            scheme.on_step(self, step)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Returns the trainable parameters in groups, as the optimizer needs them; each tensor occurs once."""
        groups = decayed_groups(self) if self.tuning is None else self.tuning.parameter_groups(self)
        for scheme in self.schemes:
            groups = scheme.groups(groups)
        return groups

    def dropout_rng(self, batch: Batch, step: int) -> DropoutRng | None:
        """Returns the random numbers of dropout for a batch in a step, for inputs and outputs; None in evaluation.

        On a CPU, dropout is a function of the example and the position of each token, so it does not depend on how
        examples are batched. On CUDA, it uses the device's generator, seeded by the step and the batch's first example.
        A learner that runs its model twice per step uses `rng_at` for the second forward.
        """
        if not self.training:
            return None
        device = batch.inputs.tokens.device
        if device.type == "cpu":
            keys_T = token_keys(self.seed, step, batch.examples, batch.parts, batch.inputs)
            if batch.outputs is None:
                return TokenRng(keys_T)
            output_keys_T = token_keys(self.seed, step, batch.examples, batch.parts, batch.outputs, outputs=True)
            return TokenRng(keys_T, output_keys_T)
        first_example = (int(batch.examples[0]), int(batch.parts[0])) if len(batch.examples) else ()
        return DeviceRng(key(self.seed, "dropout", step, *first_example), device)

    # Data.

    @abstractmethod
    def examples(self, data: SplitData, max_length: int) -> Examples:
        """Returns the examples of a split. An example may have several parts: the windows of a long text, or
        choices."""

    def inspector(self, examples: Any, max_length: int) -> Inspector:
        """Returns the inspector of examples, which `lmtool inspect` uses. examples: the examples, as the method
        `examples` returned them. max_length: maximum tokens of an example."""
        return self.inspector_class(self, examples, max_length)

    # Distillation.

    def predict_every_token(self) -> dict[str, str | None]:
        """Makes the observer of later forwards get predictions for every token, not only for the targets, of the terms
        that can: those of masked words. Returns these terms, each with the member of a mixture that has it, or None."""
        return {}

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """Returns the term that a head predicts and, from its logits, predictions that another model can learn from;
        None if no other model can."""
        if head in self.loss_weights:
            term = head
        elif len(self.loss_weights) == 1:
            (term,) = self.loss_weights
        else:
            return None
        if isinstance(logits, TokenLogits):
            return term, PredictedWords(logits)
        return term, Binary(logits) if logits.ndim == 1 else Classes(logits)

    # Evaluation.

    @abstractmethod
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the prediction of each target, by term, in evaluation mode."""

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> Scorer:
        """Returns the scorer of a split. examples, predictors: the results of the methods of these names."""
        return TermScorer(self, predictors)

    @abstractmethod
    def predictors(self, train: SplitData, examples: Any) -> Mapping[str, Predictor]:
        """Returns the best constant predictor of each term, fitted on the training data. train: the training data.
        examples: the examples of the training data, as `examples` returned them."""

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, object]:
        """Returns the score of the constant predictors, which are fitted on `train`, on a held-out split: the `name` of
        the baseline, its `metric`, and the `value` of the metric. batches: those of the held-out split."""
        terms = headline_terms(self.metric, self.loss_weights)
        weights = {term: weight for term, weight in terms.items() if term in predictors}
        losses = mean_losses({term: predictors[term] for term in weights}, batches)
        return {
            "name": " and ".join(dict.fromkeys(predictors[term].name for term in weights)),
            "metric": self.metric.name,
            "value": sum(weight * losses[term] for term, weight in weights.items()),
        }

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """Returns the weighted loss of the constant predictors on batches."""
        return sum(self.loss_weights[term] * loss for term, loss in mean_losses(predictors, batches).items())

    # Inference.

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """Returns the model's outputs for the first n examples of a held-out batch, as plain data for the report."""
        return []

    def responder(self) -> Responder:
        """Returns the object that answers texts that a user gives."""
        return Responder(self)

    def writer(self) -> Writer:
        """Returns the writer that generates text with this model. Raises UserError if the model cannot generate
        text."""
        raise UserError(
            f"a model trained on {self.config.name} cannot generate text",
            "use a checkpoint of a decoder or an encoder-decoder; or use lmtool predict for labels and filled masks",
        )
