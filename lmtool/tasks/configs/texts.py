"""Configuration of tasks below the level of a whole text: tags, spans, answers, generated texts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.registry import component
from lmtool.errors import Problem
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side
from lmtool.tasks.configs.base import (
    BestMetric,
    ClassMetric,
    ClassMetrics,
    ClassNames,
    PromptedConfig,
    TaskConfig,
    TaskName,
    require_classes,
)
from lmtool.tasks.configs.sequence import ClassLossConfig

if TYPE_CHECKING:
    from torch import Tensor

TextMetric = Literal["bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"]


class ScheduledSamplingConfig(Config):
    """How often a decoder in training reads its own prediction instead of the true token (Bengio et al. 2015, section
    2.4)."""

    schedule: Literal["none", "linear", "exponential", "inverse_sigmoid"] = Field(
        "none",
        description="none; linear, exponential, inverse_sigmoid: decay of the fraction of true tokens. At step i the "
        "fraction is: none 1; linear 1 - i / steps; exponential exp(-i / steps); inverse_sigmoid steps / (steps + "
        "exp(i / steps))",
    )
    steps: float = Field(1000.0, gt=0, description="speed of the decay, in steps")
    least: float = Field(0.0, ge=0, le=1, description="minimum fraction of true tokens")
    predictions: Literal["one_pass", "step_by_step"] = Field(
        "one_pass",
        description="one_pass: predicted from true tokens; step_by_step: from the tokens read so far. one_pass: a "
        "single forward pass (Mihaylova and Martins 2019); step_by_step: one forward pass per token of the longest "
        "target (Bengio et al. 2015)",
    )


@component("task", "seq2seq", builder="lmtool.tasks.kinds.seq2seq:Seq2Seq")
class Seq2SeqConfig(PromptedConfig):
    """A text from a text: translation, summaries, answers, code."""

    example_model: ClassVar[str] = "t5"
    architectures: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")
    labels_as_text: ClassVar[bool] = True

    kind: Literal["seq2seq"] = Field("seq2seq", description="A text from a text.")
    name: TaskName = "seq2seq"
    text: tuple[str, ...] = Field(("source",), min_length=1, max_length=1, description="input column")
    label: str = Field("target", description="target column; a list of texts: several references")
    turns: int | None = Field(
        None,
        ge=1,
        description="for dialogues, lists of utterances: maximum utterances before a reply; null: the source is a "
        "text. Every utterance but the first is the target of a row, in the column that `label` names, and its source "
        "is the lines before it",
    )
    prefix: str = Field("", description='text before every source (T5: "translate English to German: ")')
    target_tokens: int = Field(
        128, ge=2, description="maximum tokens per target; longer ones are cut in training, and counted"
    )
    mask: Literal["causal", "prefix"] = Field(
        "causal",
        description="attention within a decoder's source: causal, or prefix (bidirectional). prefix: Liu et al. 2018; "
        "an encoder is always bidirectional",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the probability spread over all tokens")
    scheduled_sampling: ScheduledSamplingConfig = Field(
        default_factory=lambda: ScheduledSamplingConfig.model_validate({}),
        description="how often a decoder reads its own prediction in training (Bengio et al. 2015)",
    )
    generation: GenerationConfig = Field(
        default_factory=lambda: GenerationConfig.model_validate({}), description="how the scored texts are generated"
    )
    generate_examples: int | None = Field(
        500,
        ge=1,
        description="development rows generated per evaluation in training (all of them at the end); null: all",
    )
    dropout: None = Field(None, description="no effect, since there is no head; use model.dropout")
    metrics: tuple[TextMetric, ...] = Field(
        ("bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"),
        min_length=1,
        description="bleu and chrf out of 100, the others out of 1",
    )
    metric: BestMetric[TextMetric] = "bleu"

    @property
    def makes_inputs(self) -> bool:
        return self.scheduled_sampling.schedule != "none"

    @property
    def writes_text(self) -> bool:
        return True

    @property
    def generates_text(self) -> bool:
        return True

    @property
    def longest_target(self) -> int:
        return self.target_tokens

    @property
    def text_generation(self) -> GenerationConfig:
        return self.generation

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        if self.mask == "prefix" and not model.reads_prefixes:
            message = f"{section}.mask=prefix makes attention within the source bidirectional"
            hint = f"set {section}.mask=causal"
            yield Problem("task.mask", f"{message}; model={model.name} reads tokens in turn", hint)

    @model_validator(mode="after")
    def _texts_fit(self) -> Seq2SeqConfig:
        if self.generation.max_new_tokens < 2:
            raise ValueError("generation.max_new_tokens=1 leaves no room for a text and its end token")
        if self.prompt.words:
            raise ValueError("prompt.words apply to classes; here the answer is a text")
        return self


AnswerMetric = Literal[
    "exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "no_answer_accuracy", "best_exact_match", "best_f1"
]


@component("task", "extractive_qa", builder="lmtool.tasks.kinds.extractive_qa:ExtractiveQa")
class ExtractiveQaConfig(TaskConfig):
    """The answer to a question, as a span of a context."""

    descriptions: ClassVar[dict[str, str]] = {
        "path": "local data: a folder with train, dev and test files (SQuAD's .json, .jsonl), or one file"
    }

    layouts: ClassVar[tuple[str, ...]] = ("squad", "table", "parquet")
    scores_tokens: ClassVar[bool] = True
    default_max_length: ClassVar[int] = 384

    kind: Literal["extractive_qa"] = Field(
        "extractive_qa", description="The answer to a question, as a span of a text."
    )
    name: TaskName = "extractive_qa"
    text: tuple[str, ...] = Field(
        ("question", "context"),
        min_length=2,
        max_length=2,
        description="input columns: the question, and the text that it is about",
    )
    label: str = Field("answers", description="column of the answers: their text and answer_start")
    unanswerable: bool = Field(False, description="true: a question may have no answer in its context (SQuAD 2.0)")
    bad_answers: Literal["refuse", "skip"] = Field(
        "refuse", description="answer text not found at answer_start: refuse the data, or skip and count the row"
    )
    question_tokens: int = Field(64, ge=1, description="maximum tokens per question; longer ones are cut")
    stride: int = Field(
        128,
        ge=0,
        description="tokens shared by adjacent windows of a long context, at most half a window. transformers calls "
        "it doc_stride",
    )
    answer_tokens: int = Field(30, ge=1, description="maximum tokens per predicted answer")
    n_best: int = Field(20, ge=1, description="number of best answers saved per question, with their probabilities")
    null_threshold: float | None = Field(
        None,
        description="predict no answer if its score is higher by more than this; null: tuned on development rows. "
        "Tuned for F1, and saved in the checkpoint",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate before the output layer")
    metrics: tuple[AnswerMetric, ...] = Field(
        ("exact_match", "f1"),
        min_length=1,
        description="also has_answer_exact_match, has_answer_f1, no_answer_accuracy, best_exact_match, best_f1. As "
        "fractions of 1. has_answer_...: over questions with an answer; no_answer_accuracy: over the others; "
        "best_...: with the threshold that is best for that score",
    )
    metric: BestMetric[AnswerMetric] = "f1"

    def with_unstored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name, head = f"heads.{self.name}.null_threshold", tensors.get(f"heads.{self.name}.output.weight")
        if not self.unanswerable or name in tensors or head is None:
            return tensors
        return {**tensors, name: head.new_zeros(()).double()}

    @model_validator(mode="after")
    def _metrics_fit(self) -> ExtractiveQaConfig:
        null_metrics = [name for name in self.metrics if name not in ("exact_match", "f1")]
        if null_metrics and not self.unanswerable:
            raise ValueError(f"metrics names {null_metrics[0]}, which needs unanswerable=true")
        if self.null_threshold is not None and not self.unanswerable:
            raise ValueError(f"null_threshold={self.null_threshold} needs unanswerable=true")
        return self


@component("task", "token_classification", builder="lmtool.tasks.kinds.tokens:TokenClassification")
class TokenClassificationConfig(TaskConfig):
    """A tag for each word of a sentence."""

    descriptions: ClassVar[dict[str, str]] = {
        "path": "folder with train, dev and test files (.conll .tsv .txt .conllu .jsonl .parquet), or one file",
        "header": "names of all CoNLL columns, if words and tags are not in the first and last one",
    }

    has_classes: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("conll", "conllu", "table", "parquet")
    scores_tokens: ClassVar[bool] = True

    kind: Literal["token_classification"] = Field(
        "token_classification", description="A tag for each word of a sentence."
    )
    name: TaskName = "token_classification"
    text: tuple[str, ...] = Field(
        ("tokens",),
        min_length=1,
        max_length=1,
        description="word column: lists, or texts split at whitespace; CoNLL: the first column. Used for CoNLL "
        "columns without a header; CoNLL-U: the form",
    )
    label: str = Field("tags", description="tag column, one tag per word; CoNLL: the last column")
    labels: tuple[str, ...] | None = Field(
        None,
        description="tag names in order, quoted; null: those found in train. A file may contain the names, or their "
        "numbers from 0. For an entity scheme: O, and B and I of each type",
    )
    scheme: Literal["auto", "bio", "iob1", "iobes", "none"] = Field(
        "auto",
        description="scheme of the files: bio, iob1, iobes (or BILOU), none (single tags); auto: detected in train. "
        "The model learns and predicts bio. iob1: B only between adjacent entities of the same type; none: for "
        "example parts of speech",
    )
    heads: str | None = Field(
        None,
        description="column of heads in a dependency tree, for model/positions=tree_depth and tree_distance; CoNLL-U: "
        "head. Numbers of words from 1, 0 for the root: a list, or a text split at whitespace; null: none",
    )
    train_on: Literal["all", "first"] = Field(
        "all", description="subwords that learn a word's tag: all (those after a B learn I), or first"
    )
    stride: int = Field(
        64,
        ge=0,
        description="tokens shared by adjacent windows of a long sentence. At most half of a window; each word is "
        "predicted by the window in which it has the most context",
    )
    metrics: tuple[Literal["f1", "precision", "recall", "accuracy"], ...] = Field(
        ("f1", "precision", "recall", "accuracy"),
        min_length=1,
        description="of entities, with exact boundaries and type; accuracy: of words. As conlleval scores them",
    )
    metric: Literal["f1", "accuracy"] = Field(
        "f1", description="metric that selects the best checkpoint; f1 or accuracy"
    )
    loss: ClassLossConfig = Field(
        default_factory=lambda: ClassLossConfig.model_validate({}), description="Smoothing and weights of the loss"
    )

    @property
    def head_columns(self) -> dict[str, str]:
        return {} if self.heads is None else {self.text[0]: self.heads}

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    def states_read(self, model: ModelConfig) -> Side:
        return model.token_states or super().states_read(model)

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        if model.token_states is None:
            message = f"task={self.name} tags words; model={model.name} has no hidden state for each token"
            yield Problem("task", message, "set model=bert, model=t5 or model=bart")

    def text_format(self, model: ModelConfig) -> str:
        """Returns the format of transformers' ...ForTokenClassification, which is that of its sequence classifier."""
        return model.sequence_form(None if model.transformers_form is None else "transformers").text_format

    @model_validator(mode="after")
    def _labels_fit(self) -> TokenClassificationConfig:
        require_classes(self.labels, self.loss.class_weights)
        if self.scheme == "none" and self.metrics != ("accuracy",):
            raise ValueError(f"metrics={list(self.metrics)} score entities; scheme=none supports accuracy only")
        return self


@component("task", "span_classification", builder="lmtool.tasks.kinds.span_classification:SpanClassification")
class SpanClassificationConfig(TaskConfig):
    """One of several classes for a span of a text, or for a pair of spans."""

    has_classes: ClassVar[bool] = True
    default_max_length: ClassVar[int] = 256

    kind: Literal["span_classification"] = Field(
        "span_classification", description="One of several classes for a span of a text, or for a pair of spans."
    )
    name: TaskName = "span_classification"
    text: tuple[str, ...] = Field(
        ("text", "span"),
        min_length=2,
        max_length=3,
        description="input columns: the text, and one or two spans, each [start, end) in characters",
    )
    labels: ClassNames = None
    metrics: ClassMetrics = ("accuracy",)
    metric: BestMetric[ClassMetric] = "accuracy"

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    @model_validator(mode="after")
    def _labels_fit(self) -> SpanClassificationConfig:
        require_classes(self.labels)
        return self
