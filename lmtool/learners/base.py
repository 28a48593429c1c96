"""The base class of learners: a backbone, its heads, and what the loop, the evaluator and the commands call.

An objective, a task, a mixture of them: each is a subclass. In a checkpoint its tensors are named `backbone.`,
`heads.NAME.` and `objective.` (further networks of an objective).
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
    """Reports nothing."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


# Of a forward on a CPU. Larger ones are no faster (BERT, 2 layers, width 256: 13.2 calls of 128 texts a second of CPU
# time at 8,192 tokens, 12.8 at 2,048), and the heap never settles on their buffers: 688 MB after 250 calls and growing,
# against 456 MB from the 90th call on.
CPU_TOKENS = 2048


@dataclass(frozen=True)
class Inference:
    """max_length: tokens of an example, at most. batch_tokens: of a forward, at most. warn: reports what a user should
    know. progress: is given how many parts of how many are done."""

    max_length: int
    batch_tokens: int
    precision: Precision
    warn: Callable[[str], None] = no_warning
    progress: Callable[[int, int], None] = no_progress

    @property
    def forward_tokens(self) -> int:
        """Tokens of a forward on this device."""
        return min(self.batch_tokens, CPU_TOKENS) if self.precision.device.type == "cpu" else self.batch_tokens


@dataclass(frozen=True)
class Answers:
    """What a trained model answers to rows. records: plain data, one a row. scores: of `labelled` rows, by metric; none
    where the rows have no labels."""

    records: Iterator[dict[str, object]]
    scores: Mapping[str, float] = field(default_factory=dict)
    labelled: int = 0


def decayed_groups(learner: nn.Module) -> list[ParameterGroup]:
    """Every parameter that learns, once: matrices decay, vectors (norms and biases) do not."""
    decay, rest = ParameterGroup("decay", []), ParameterGroup("no_decay", [], weight_decay_scale=0.0)
    for name, parameter in learner.named_parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 else rest).parameters.append((name, parameter))
    return [group for group in (decay, rest) if group.parameters]


class BaseLearner(ModelWithHeads, ABC):
    """Holds `backbone` and `heads`; further networks that learn are submodules with names of their own.

    seed: of the run; new heads and dropout derive from it. weights: by term, its coefficient in the loss. metric:
    the score that chooses the best checkpoint: of text the `loss`, or that of one term, TERM_loss. reads: the
    columns that `respond` reads. predicts_rows: whether its scorer keeps a prediction of each row. makes_inputs:
    whether it makes a part of what it reads itself, so that examples cannot be shown without its weights.
    scores_part: whether its scores in training are of a part of the rows. slides: whether it can be scored over
    windows that overlap, see `SplitData.stride`. pretrained: heads that say nothing until a checkpoint brings them.
    reads_text: whether its examples are made of the text of a split. query_stream: whether it predicts by a stream of
    queries too. scores_tokens: whether its heads read every token of a text. trained_beside: predictions that training
    counts and an evaluation does not, in words. objective: further networks that learn.
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

    # What the loop asks.

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """How much each term predicts in this batch, known without a forward."""

    @abstractmethod
    def forward(self, batch: Batch, step: int) -> StepOutput:
        """The sums of the terms' losses over a batch."""

    def penalties(self) -> dict[str, Tensor]:
        """Terms added once a step, whatever the batch: those of the tuning method and its schemes."""
        terms = {} if self.tuning is None else dict(self.tuning.penalties(self))
        for scheme in self.schemes:
            terms |= scheme.penalties(self)
        return terms

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None:
        """Called before training, with the optimizer steps of each pass over the examples by its number from 0."""
        for scheme in self.schemes:
            scheme.begin(steps_in_epoch)

    def first_step(self, name: str, steps: int) -> int | None:
        """The step from which a parameter that learns does so; None where it does not within these many steps."""
        firsts = [scheme.first_step(name, steps) for scheme in self.schemes]
        return max((first or 0 for first in firsts), default=1) if None not in firsts else None

    def on_step(self, step: int) -> None:
        """Called before the forward of each optimizer step, with its number from 1."""
        if self.tuning is not None:
            self.tuning.on_step(self, step)
        for scheme in self.schemes:
            scheme.on_step(self, step)

    def parameter_groups(self) -> list[ParameterGroup]:
        """What learns, each tensor once."""
        groups = decayed_groups(self) if self.tuning is None else self.tuning.parameter_groups(self)
        for scheme in self.schemes:
            groups = scheme.groups(groups)
        return groups

    def dropout_rng(self, batch: Batch, step: int) -> DropoutRng | None:
        """The dropout of this batch in this step, for its inputs (and `for_outputs`); None in evaluation. Keyed by
        token on a CPU; on CUDA from the device's generator, seeded by the step and the batch's first example. A model
        that runs twice in a step takes draws `at` another place for its second forward."""
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
        """`hidden` of a batch."""
        return self.hidden(batch.inputs, batch.outputs, rng, read_M)

    # What it reads.

    def is_in(self, data: SplitData) -> bool:
        """Whether a split has something for it."""
        return True

    @abstractmethod
    def examples(self, data: SplitData, max_length: int) -> Examples:
        """What is made of a split. An example may have several parts: windows of a long text, choices."""

    def inspector(self, examples: Any, max_length: int) -> Inspector:
        """What `inspect` reports of examples that it made of a split, for this max_length."""
        return Inspector(self, examples, max_length)

    # What another model can learn of it.

    def predicted(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        """What the logits that a head of this name gave for a batch stand for: the term whose targets are predicted,
        and how. None where no other model can learn from them."""
        term = head if head in self.weights or len(self.weights) > 1 else next(iter(self.weights))
        if term not in self.weights:
            return None
        if isinstance(logits, TokenLogits):
            return term, PredictedWords(logits)
        return term, Binary(logits) if logits.ndim == 1 else Classes(logits)

    # How it is scored.

    @abstractmethod
    def score(self, batch: Batch) -> dict[str, Scores]:
        """By term, each target's loss and best guess, in evaluation."""

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> Scorer:
        """Collects the scores of a split. examples: those it made of `data`. predictors: as `predictors` gives them."""
        return TermScorer(self, predictors)

    @abstractmethod
    def predictors(self, train: SplitData, examples: Any) -> Mapping[str, Predictor]:
        """By term, the best that reading nothing predicts, fitted on the training data.
        examples: those it made of `train`."""

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, object]:
        """What reading nothing scores on a held-out split, as plain data: `name`, `metric`, `value`.

        batches: those of the split. predictors: fitted on `train`.
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
        """The terms whose losses its metric adds up, with their coefficients."""
        term = self.metric.name.removesuffix("_loss")
        return {term: 1.0} if term in self.weights else self.weights

    def baseline_loss(self, batches: Iterable[Batch], predictors: Mapping[str, Predictor]) -> float:
        """What reading nothing loses on batches, the terms added up with their weights."""
        return sum(self.weights[term] * loss for term, loss in mean_losses(predictors, batches).items())

    # What it is used for.

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """The first n examples of a held-out batch with what the model makes of them, as plain data."""
        return []

    def read_rows(self, columns: dict[str, list[Any]], origin: list[tuple[str, int]]) -> Rows:
        """Unlabeled rows of a table, for `respond`. UserError where a column is missing or holds no text."""
        missing = [name for name in self.reads if name not in columns]
        if missing:
            raise UserError(
                f"{origin[0][0]}: no column {missing[0]} to read; there are {', '.join(columns)}",
                f"name its text columns {', '.join(self.reads)}",
            )
        return Rows(list(range(len(origin))), {name: columns[name] for name in self.reads}, None, origin)

    def respond(self, rows: Rows, inference: Inference) -> Iterator[dict[str, Any]]:
        """What a trained model answers to rows of texts: masks filled, texts completed, labels. Plain data, one a row.

        UserError where it answers nothing.
        """
        raise UserError(
            f"what {self.config.name} teaches answers no texts",
            "finetune the checkpoint on a task, and predict with that",
        )

    def writer(self) -> Writer:
        """What generates text with this model. UserError where nothing does."""
        raise UserError(
            f"what {self.config.name} teaches generates no text",
            "lmtool predict labels texts and fills their masks; a decoder or an encoder-decoder generates",
        )

    def writes(self) -> GenerationConfig:
        """How it writes the text of a row of a table. UserError where it writes none."""
        raise UserError(
            f"what {self.config.name} teaches writes no text for a row", "give a task=, or a head, that does"
        )

    def label_of(self, text: str) -> object:
        """The label of a row that a written text stands for; None for none."""
        return None

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """What `respond` gives, and the scores of it where the rows are labeled."""
        return Answers(self.respond(rows, inference))

    def line(self, record: dict[str, Any]) -> str:
        """A record of `respond` as a line on the screen."""
        return str(record)
