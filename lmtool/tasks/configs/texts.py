"""Tasks whose predictions are texts or pieces of texts, as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.needs import Requirement
from lmtool.config.tables import component
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.models.configs import PREFIXES
from lmtool.tasks.configs.base import PromptedConfig, TaskConfig

# Texts from texts, as configuration. Imports no torch.


TextMetric = Literal["bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"]


class ScheduledSamplingConfig(Config):
    """How often a decoder in training reads its own prediction in the place of the true token (Bengio et al. 2015,
    section 2.4)."""

    schedule: Literal["none", "linear", "exponential", "inverse_sigmoid"] = Field(
        "none",
        description="The share of true tokens at step i. none: 1. linear: 1 - i / steps. exponential: exp(-i / steps). "
        "inverse_sigmoid: steps / (steps + exp(i / steps)).",
    )
    steps: float = Field(1000.0, gt=0, description="The pace of the schedule, in steps.")
    least: float = Field(0.0, ge=0, le=1, description="The share of true tokens, at least.")
    predictions: Literal["one_pass", "step_by_step"] = Field(
        "one_pass",
        description="What the model predicts in their place. one_pass: behind true tokens alone, in one forward "
        "(Mihaylova and Martins 2019). step_by_step: behind what it has read so far, own tokens too (Bengio et al. "
        "2015), a forward for each token of the longest target.",
    )


@component("task", "seq2seq", builder="lmtool.tasks.kinds.seq2seq:Seq2Seq")
class Seq2SeqConfig(PromptedConfig):
    """A text from a text: translation, summaries, answers, code."""

    architectures: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")

    kind: Literal["seq2seq"] = Field("seq2seq", description="A text from a text.")
    name: str = Field("seq2seq", description="The task's name.", pattern=r"^[a-z][a-z0-9_]*$")
    text: tuple[str, ...] = Field(("source",), min_length=1, max_length=1, description="The column that is read.")
    label: str = Field("target", description="The column that is written; a list of texts: all of them are right.")
    prefix: str = Field("", description='Text before every source (T5: "translate English to German: ").')
    target_tokens: int = Field(
        128, ge=2, description="Maximum tokens per target; longer ones are cut in training, and counted."
    )
    mask: Literal["causal", "prefix"] = Field(
        "causal",
        description="What a decoder's source sees of itself. causal: what is before each token; prefix: all of it (Liu "
        "et al. 2018). An encoder always sees all.",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of the probability spread over all tokens.")
    scheduled_sampling: ScheduledSamplingConfig = Field(
        default_factory=lambda: ScheduledSamplingConfig.model_validate({}),
        description="Reading own predictions in training.",
    )
    generation: GenerationConfig = Field(
        default_factory=lambda: GenerationConfig.model_validate({}),
        description="How the texts that are scored are generated.",
    )
    generate_examples: int | None = Field(
        500,
        ge=1,
        description="Development rows generated at each evaluation in training, a seeded draw; the end of the run "
        "generates all. Null: all, always.",
    )
    dropout: None = Field(None, description="There is no head to drop before: give model.dropout.")
    metrics: tuple[TextMetric, ...] = Field(
        ("bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"),
        min_length=1,
        description="Scores that are reported: bleu and chrf of 100 (sacrebleu), the others shares of 1 (rouge-score).",
    )
    metric: TextMetric = Field("bleu", description="The score that chooses the best checkpoint.")

    @property
    def makes_inputs(self) -> bool:
        return self.scheduled_sampling.schedule != "none"

    @property
    def writes_text(self) -> bool:
        return True

    @property
    def writes_labels(self) -> bool:
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
                PREFIXES, "task.mask", "task.mask=prefix lets all of a source see itself", "give task.mask=causal"
            )

    @model_validator(mode="after")
    def _metric_listed(self) -> Seq2SeqConfig:
        if self.generation.max_new_tokens < 2:
            raise ValueError("generation.max_new_tokens=1 leaves no room for a text and its end")
        if self.prompt.words:
            raise ValueError("prompt.words are for classes; here the answer is a text")
        return self


# Extractive question answering, as configuration. Imports no torch.


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
    """The answer to a question, as a piece of a context."""

    layouts: ClassVar[tuple[str, ...]] = ("squad", "table", "parquet")
    default_max_length: ClassVar[int] = 384

    kind: Literal["extractive_qa"] = Field("extractive_qa", description="The answer to a question, a piece of a text.")
    name: str = Field(
        "extractive_qa",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    text: tuple[str, ...] = Field(
        ("question", "context"),
        min_length=2,
        max_length=2,
        description="The columns that are read: the question, and the text that it is about.",
    )
    label: str = Field("answers", description="The column of the answers: their text and answer_start.")
    unanswerable: bool = Field(
        False,
        description="Whether a question may have no answer in its context (SQuAD 2.0), which is then predicted and "
        "scored as well.",
    )
    bad_answers: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What to do with an answer that does not stand in its context at answer_start: refuse the data, "
        "or skip and count the row.",
    )
    question_tokens: int = Field(64, ge=1, description="Maximum tokens per question; longer ones are cut.")
    stride: int = Field(
        128,
        ge=0,
        description="Tokens that neighbouring windows of a long context share, as transformers' doc_stride; at most "
        "half of a window is taken.",
    )
    answer_tokens: int = Field(30, ge=1, description="Maximum tokens per predicted answer.")
    n_best: int = Field(20, ge=1, description="Answers that are kept of each question, with their probabilities.")
    null_threshold: float | None = Field(
        None,
        description="No answer is predicted where its score is better than the best answer's by more than this. Null: "
        "tuned for f1 on the development set, and stored in the checkpoint.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the head's output layer.")
    metrics: tuple[AnswerMetric, ...] = Field(
        ("exact_match", "f1"),
        min_length=1,
        description="Scores that are reported, shares of 1. has_answer_... and no_answer_accuracy: of the questions "
        "that have an answer, and of the others; best_...: with the threshold that is best for this score.",
    )
    metric: AnswerMetric = Field("f1", description="The score that chooses the best checkpoint.")

    def completed(self, tensors: dict[str, Any]) -> dict[str, Any]:
        name, head = f"heads.{self.name}.null_threshold", tensors.get(f"heads.{self.name}.output.weight")
        if not self.unanswerable or name in tensors or head is None:
            return tensors
        return {**tensors, name: head.new_zeros(()).double()}

    @model_validator(mode="after")
    def _metrics_fit(self) -> ExtractiveQaConfig:
        of_null = [name for name in self.metrics if name not in ("exact_match", "f1")]
        if of_null and not self.unanswerable:
            raise ValueError(f"metrics names {of_null[0]}, which is of data with unanswerable=true")
        if self.null_threshold is not None and not self.unanswerable:
            raise ValueError(f"null_threshold={self.null_threshold} is of data with unanswerable=true")
        return self
