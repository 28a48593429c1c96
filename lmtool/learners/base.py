"""The base class of learners: a backbone with heads, and the interface of the loop, the evaluator and the commands.

Objectives, tasks and mixtures are subclasses. In a checkpoint, tensors are named `backbone.`,
`heads.NAME.` and `objective.` (additional networks of an objective).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lmtool.config.base import Config
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor, mean_losses
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


def no_warning(text: str) -> None:
    """Ignores a warning."""


def no_progress(done: int, total: int) -> None:
    """Ignores progress."""


# Tokens of a forward on a CPU. Larger ones are not faster (BERT, 2 layers, width 256: 13.2 calls of 128 texts a second
# of CPU time at 8,192 tokens, 12.8 at 2,048), and the heap keeps growing: 688 MB after 250 calls and growing, against
# 456 MB from the 90th call on.
CPU_TOKENS = 2048


@dataclass(frozen=True)
class Inference:
    """Settings of inference. max_length: maximum tokens of an example. batch_tokens: maximum tokens of a forward. warn:
    receives warnings for the user. progress: receives (done, total)."""

    max_length: int
    batch_tokens: int
    precision: Precision
    warn: Callable[[str], None] = no_warning
    progress: Callable[[int, int], None] = no_progress

    @property
    def forward_tokens(self) -> int:
        """Maximum tokens of a forward on this device."""
        return min(self.batch_tokens, CPU_TOKENS) if self.precision.device.type == "cpu" else self.batch_tokens


@dataclass(frozen=True)
class Answers:
    """A trained model's predictions. records: plain data, one per row. labelled: number of rows with labels. scores: by
    metric, over those rows."""

    records: Iterator[dict[str, object]]
    scores: Mapping[str, float] = field(default_factory=dict)
    labelled: int = 0


def decayed_groups(learner: nn.Module) -> list[ParameterGroup]:
    """The trainable parameters in two groups: matrices with weight decay, vectors (norms and biases) without."""
    decay, rest = ParameterGroup("decay", []), ParameterGroup("no_decay", [], weight_decay_scale=0.0)
    for name, parameter in learner.named_parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 else rest).parameters.append((name, parameter))
    return [group for group in (decay, rest) if group.parameters]


class BaseLearner(ModelWithHeads, ABC):
    """A trainable model: `backbone`, `heads`, and optional networks in `objective`.

    Attributes:
        seed: of the run; initializes new heads and dropout.
        weights: coefficient of each term in the loss.
        metric: selects the best checkpoint; for text the `loss`, or the loss of one term, TERM_loss.
        reads: the columns that `respond` reads.
        predicts_rows: whether its scorer stores a prediction for each row.
        makes_inputs: whether the model generates part of its inputs, so that examples need its weights.
        scores_part: whether evaluations during training score only part of the rows.
        slides: whether it can be scored over overlapping windows, see `SplitData.stride`.
        pretrained: heads that are useless until loaded from a checkpoint.
        reads_text: whether its examples are made from the text of a split.
        query_stream: whether it also predicts with a query stream.
        scores_tokens: whether its heads read every token of a text.
        trained_beside: description of predictions that count in training but not in evaluation.
        objective: additional trainable networks.
    """

    weights: dict[str, float]
    metric: Metric = LOSS
    reads: tuple[str, ...] = ("text",)
    predicts_rows: bool = False
    makes_inputs: bool = False
    scores_part: bool = False
    slides: bool = False
    reads_text: bool = True
    query_stream: bool = False
    scores_tokens: bool = True
    trained_beside: str = ""
    pretrained: tuple[str, ...] = ()

    def __init__(self, config: Config, backbone: Backbone, tokenizer: Tokenizer | None, seed: int):
        super().__init__(backbone, seed)
        self.objective: nn.ModuleDict | None = None
        self.config: Any = config
        self.tokenizer: Any = tokenizer

    # Interface of the loop.

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """The number of targets of each term in a batch, known without a forward."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> StepOutput:
        """The sum of each term's losses over a batch. step: the optimizer step, from 1."""

    def penalties(self) -> dict[str, Tensor]:
        """Terms added once per step, independent of the batch: those of the tuning method and the schemes."""
        terms = {} if self.tuning is None else dict(self.tuning.penalties(self))
        for scheme in self.schemes:
            terms |= scheme.penalties(self)
        return terms

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None:
        """Called before training. steps_in_epoch: the optimizer steps of each epoch, counted from 0."""
        for scheme in self.schemes:
            scheme.begin(steps_in_epoch)

    def first_step(self, name: str, steps: int) -> int | None:
        """The first step that trains a parameter; None if it stays frozen for `steps` steps."""
        first_steps = [scheme.first_step(name, steps) for scheme in self.schemes]
        return max((first or 0 for first in first_steps), default=1) if None not in first_steps else None

    def on_step(self, step: int) -> None:
        """Called before the forward of each optimizer step, counted from 1."""
        if self.tuning is not None:
            self.tuning.on_step(self, step)
        for scheme in self.schemes:
            scheme.on_step(self, step)

    def parameter_groups(self) -> list[ParameterGroup]:
        """The trainable parameters, each tensor once."""
        groups = decayed_groups(self) if self.tuning is None else self.tuning.parameter_groups(self)
        for scheme in self.schemes:
            groups = scheme.groups(groups)
        return groups

    def dropout_rng(self, batch: Batch, step: int) -> DropoutRng | None:
        """The dropout of a batch in a step, for its inputs (and `for_outputs`); None in evaluation. On a CPU it is
        keyed by token; on CUDA it uses the device's generator, seeded by the step and the batch's first example. A
        model that runs twice per step samples `at` another index in its second forward."""
        if not self.training:
            return None
        device = batch.inputs.tokens.device
        if device.type == "cpu":
            keys_T = token_keys(self.seed, step, batch.examples, batch.parts, batch.inputs)
            if batch.outputs is None:
                return TokenRng(keys_T)
            output_keys_T = token_keys(self.seed, step, batch.examples, batch.parts, batch.outputs, outputs=True)
            return TokenRng(keys_T, output_keys_T)
        first = (int(batch.examples[0]), int(batch.parts[0])) if len(batch.examples) else ()
        return DeviceRng(key(self.seed, "dropout", step, *first), device)

    def hidden_of(self, batch: Batch, rng: DropoutRng | None, read_M: Tensor | None = None) -> Tensor:
        """The hidden states of a batch, see `hidden`."""
        return self.hidden(batch.inputs, batch.outputs, rng, read_M)

    # Data.

    def is_in(self, data: SplitData) -> bool:
        """Whether a split has data for it."""
        return True

    @abstractmethod
    def examples(self, data: SplitData, max_length: int) -> Examples:
        """The examples of a split. An example may have several parts: windows of a long text, choices."""

    def inspector(self, examples: Any, max_length: int) -> Inspector:
        """The inspector of examples that `examples` returned for this max_length."""
        return Inspector(self, examples, max_length)

    # Distillation.

    def predicted(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """Interprets the logits of a head for a batch.

        Returns:
            The predicted term, and the predictions; None if no other model can learn from them.
        """
        term = head if head in self.weights or len(self.weights) > 1 else next(iter(self.weights))
        if term not in self.weights:
            return None
        if isinstance(logits, TokenLogits):
            return term, PredictedWords(logits)
        return term, Binary(logits) if logits.ndim == 1 else Classes(logits)

    # Evaluation.

    @abstractmethod
    def score(self, batch: Batch) -> dict[str, Scores]:
        """The loss and prediction of each target, by term, in evaluation mode."""

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> Scorer:
        """Returns the scorer of a split. examples: from `examples(data)`. predictors: from `predictors`."""
        return TermScorer(self, predictors)

    @abstractmethod
    def predictors(self, train: SplitData, examples: Any) -> Mapping[str, Predictor]:
        """The best constant predictor of each term, fitted on the training data. examples: from `examples(train)`."""

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, object]:
        """The score of the constant predictors on a held-out split.

        Args:
            train: the training data.
            held_out: the split.
            batches: of the split.
            predictors: fitted on `train`.

        Returns:
            Plain data: `name`, `metric`, `value`.
        """
        weights = {term: weight for term, weight in self.headline.items() if term in predictors}
        losses = mean_losses({term: predictors[term] for term in weights}, batches)
        return {
            "name": " and ".join(dict.fromkeys(predictors[term].name for term in weights)),
            "metric": self.metric.name,
            "value": sum(weight * losses[term] for term, weight in weights.items()),
        }

    @property
    def headline(self) -> dict[str, float]:
        """The terms that its metric sums, with their coefficients."""
        term = self.metric.name.removesuffix("_loss")
        return {term: 1.0} if term in self.weights else self.weights

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """The weighted loss of the constant predictors on batches."""
        return sum(self.weights[term] * loss for term, loss in mean_losses(predictors, batches).items())

    # Inference.

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """The model's outputs for the first n examples of a held-out batch, as plain data."""
        return []

    def read_rows(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]]) -> Rows:
        """Unlabeled rows of a table, for `respond`. UserError if a column is missing or is not text."""
        missing = [name for name in self.reads if name not in columns]
        if missing:
            raise UserError(
                f"{origin[0][0]}: no column {missing[0]} to read; there are {', '.join(columns)}",
                f"name its text columns {', '.join(self.reads)}",
            )
        return Rows(list(range(len(origin))), {name: columns[name] for name in self.reads}, None, origin)

    def respond(self, rows: Rows, inference: Inference) -> Iterator[dict[str, Any]]:
        """The model's predictions for rows of texts: filled masks, continuations, labels. Plain data, one per row.

        Raises:
            UserError: the learner predicts nothing.
        """
        raise UserError(
            f"a model trained on {self.config.name} has no predictions for texts",
            "finetune the checkpoint on a task, and predict with the result",
        )

    def writer(self) -> Writer:
        """The writer that generates text with this model. UserError if it cannot."""
        raise UserError(
            f"a model trained on {self.config.name} cannot generate text",
            "lmtool predict labels texts and fills their masks; a decoder or an encoder-decoder generates",
        )

    def writes(self) -> GenerationConfig:
        """The settings for generating a text per row. UserError if it cannot."""
        raise UserError(
            f"a model trained on {self.config.name} cannot generate a text per row", "choose a task= or head that can"
        )

    def label_of(self, text: str) -> object:
        """The label that a generated text stands for; None for none."""
        return None

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """The records of `respond`, with scores if the rows are labeled."""
        return Answers(self.respond(rows, inference))

    def line(self, record: dict[str, Any]) -> str:
        """A record of `respond` as a line of output."""
        return str(record)
