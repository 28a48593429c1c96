"""Configuration of tasks that generate texts or extract spans. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.needs import Requirement
from lmtool.config.tables import component
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.models.configs import PREFIXES
from lmtool.tasks.configs.base import BestMetric, PromptedConfig, TaskConfig, TaskName

TextMetric = Literal["bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"]


class ScheduledSamplingConfig(Config):
    """How often a decoder in training reads its own prediction instead of the true token (Bengio et al. 2015, section
    2.4)."""

    schedule: Literal["none", "linear", "exponential", "inverse_sigmoid"] = Field(
        "none",
        description="Probability of the true token at step i. none: 1. linear: 1 - i / steps. exponential: exp(-i / "
        "steps). inverse_sigmoid: steps / (steps + exp(i / steps)).",
    )
    steps: float = Field(1000.0, gt=0, description="Time scale of the schedule, in steps.")
    least: float = Field(0.0, ge=0, le=1, description="Minimum probability of the true token.")
    predictions: Literal["one_pass", "step_by_step"] = Field(
        "one_pass",
        description="How the predictions are made. one_pass: from true tokens only, in one forward (Mihaylova and "
        "Martins 2019). step_by_step: from everything read so far, predictions included (Bengio et al. 2015), "
        "one forward per token of the longest target.",
    )


@component("task", "seq2seq", builder="lmtool.tasks.kinds.seq2seq:Seq2Seq")
class Seq2SeqConfig(PromptedConfig):
    """A text from a text: translation, summaries, answers, code."""

    architectures: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")

    kind: Literal["seq2seq"] = Field("seq2seq", description="A text from a text.")
    name: TaskName = "seq2seq"
    text: tuple[str, ...] = Field(("source",), min_length=1, max_length=1, description="The source column.")
    label: str = Field("target", description="The target column; a list of texts holds several references.")
    prefix: str = Field("", description='Text before every source (T5: "translate English to German: ").')
    target_tokens: int = Field(
        128, ge=2, description="Maximum tokens per target; longer ones are truncated in training, and counted."
    )
    mask: Literal["causal", "prefix"] = Field(
        "causal",
        description="Attention within a decoder's source. causal: to preceding tokens; prefix: to the whole source "
        "(Liu et al. 2018). Encoders always attend to all.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Label smoothing: the probability mass spread over all tokens."
    )
    scheduled_sampling: ScheduledSamplingConfig = Field(
        default_factory=lambda: ScheduledSamplingConfig.model_validate({}),
        description="Scheduled sampling of the model's own predictions in training.",
    )
    generation: GenerationConfig = Field(
        default_factory=lambda: GenerationConfig.model_validate({}),
        description="How scored texts are generated.",
    )
    generate_examples: int | None = Field(
        500,
        ge=1,
        description="Development rows generated at each evaluation in training, a seeded sample; the end of the run "
        "generates all. Null: always all.",
    )
    dropout: None = Field(None, description="Not used: there is no new head. Give model.dropout.")
    metrics: tuple[TextMetric, ...] = Field(
        ("bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"),
        min_length=1,
        description="Metrics to report: bleu and chrf in percent (sacrebleu), the others as fractions (rouge-score).",
    )
    metric: BestMetric[TextMetric] = "bleu"

    @property
    def makes_inputs(self) -> bool:
        return self.scheduled_sampling.schedule != "none"

    @property
    def writes_text(self) -> bool:
        return True

    @property
    def labels_as_text(self) -> bool:
        return True

    @property
    def longest_target(self) -> int:
        return self.target_tokens

    @property
    def text_generation(self) -> GenerationConfig:
        return self.generation

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        if self.mask == "prefix":
            yield Requirement(
                PREFIXES,
                "task.mask",
                "task.mask=prefix makes attention within the source bidirectional",
                "give task.mask=causal",
            )

    @model_validator(mode="after")
    def _metric_listed(self) -> Seq2SeqConfig:
        if self.generation.max_new_tokens < 2:
            raise ValueError("generation.max_new_tokens=1 leaves no capacity for a text and its end token")
        if self.prompt.words:
            raise ValueError("prompt.words apply to classes; here the answer is a text")
        return self


AnswerMetric = Literal[
    "exact_match",
    "f1",
    "has_answer_exact_match",
    "has_answer_f1",
    "no_answer_accuracy",
    "best_exact_match",
    "best_f1",
]


@component("task", "extractive_qa", builder="lmtool.tasks.kinds.extractive_qa:ExtractiveQa")
class ExtractiveQaConfig(TaskConfig):
    """The answer to a question, as a span of a context."""

    layouts: ClassVar[tuple[str, ...]] = ("squad", "table", "parquet")
    default_max_length: ClassVar[int] = 384

    kind: Literal["extractive_qa"] = Field(
        "extractive_qa", description="The answer to a question, as a span of a text."
    )
    name: TaskName = "extractive_qa"
    text: tuple[str, ...] = Field(
        ("question", "context"),
        min_length=2,
        max_length=2,
        description="The text columns: the question, and its context.",
    )
    label: str = Field("answers", description="The answers' column: text and answer_start.")
    unanswerable: bool = Field(
        False,
        description="Whether a question may have no answer in its context (SQuAD 2.0); no answer is then a "
        "prediction and scored.",
    )
    bad_answers: Literal["refuse", "skip"] = Field(
        "refuse",
        description="An answer that does not occur in its context at answer_start: refuse the data, or skip and "
        "count the row.",
    )
    question_tokens: int = Field(64, ge=1, description="Maximum tokens per question; longer ones are truncated.")
    stride: int = Field(
        128,
        ge=0,
        description="Tokens shared by adjacent windows of a long context, as transformers' doc_stride; at most half "
        "a window.",
    )
    answer_tokens: int = Field(30, ge=1, description="Maximum tokens per predicted answer.")
    n_best: int = Field(20, ge=1, description="Answers reported per question, with their probabilities.")
    null_threshold: float | None = Field(
        None,
        description="No answer is predicted if its score exceeds the best answer's by more than this. Null: tuned "
        "for f1 on the development set, and stored in the checkpoint.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the head's output layer.")
    metrics: tuple[AnswerMetric, ...] = Field(
        ("exact_match", "f1"),
        min_length=1,
        description="Metrics to report, as fractions. has_answer_... and no_answer_accuracy: over questions with and "
        "without an answer; best_...: under the threshold that is best for this metric.",
    )
    metric: BestMetric[AnswerMetric] = "f1"

    def completed(self, tensors: dict[str, Any]) -> dict[str, Any]:
        name, head = f"heads.{self.name}.null_threshold", tensors.get(f"heads.{self.name}.output.weight")
        if not self.unanswerable or name in tensors or head is None:
            return tensors
        return {**tensors, name: head.new_zeros(()).double()}

    @model_validator(mode="after")
    def _metrics_fit(self) -> ExtractiveQaConfig:
        of_null = [name for name in self.metrics if name not in ("exact_match", "f1")]
        if of_null and not self.unanswerable:
            raise ValueError(f"metrics names {of_null[0]}, which needs unanswerable=true")
        if self.null_threshold is not None and not self.unanswerable:
            raise ValueError(f"null_threshold={self.null_threshold} needs unanswerable=true")
        return self
