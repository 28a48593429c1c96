"""Texts from texts, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.generation.configs import GenerationConfig
from lmtool.tasks.configs.prompt import PromptedConfig

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
    writes: ClassVar[bool] = True
    """Its labels are texts."""

    kind: Literal["seq2seq"] = Field("seq2seq", description="A text from a text.")
    name: str = Field("seq2seq", description="The task's name.", pattern=r"^[a-z][a-z0-9_]*$")
    text: tuple[str, ...] = Field(("source",), min_length=1, max_length=1, description="The column that is read.")
    label: str = Field("target", description="The column that is written; a list of texts: all of them are right.")
    prefix: str = Field("", description='Text before every source (T5: "translate English to German: ").')
    target_tokens: int = Field(
        128, ge=2, description="Tokens of a target, at most; longer ones are cut in training, and counted."
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

    def misfit(self, model: Any) -> Problem | None:
        if self.mask == "prefix" and model.architecture == "decoder" and not model.sees_prefixes:
            message = f"task.mask=prefix lets all of a source see itself; model={model.name} reads it in turn"
            return Problem("task.mask", message, "give task.mask=causal")
        return super().misfit(model)

    @model_validator(mode="after")
    def _metric_listed(self) -> Seq2SeqConfig:
        if self.generation.max_new_tokens < 2:
            raise ValueError("generation.max_new_tokens=1 leaves no room for a text and its end")
        if self.prompt.words:
            raise ValueError("prompt.words are for classes; here the answer is a text")
        return self
