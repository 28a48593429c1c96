"""Soft prompts as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.tuning.configs.base import TuningConfig

SMALL_RATE = 1e-2
"""Soft prompts hardly move below this learning rate: they are published with 0.3."""


@component("tuning", "prompt", builder="lmtool.tuning.prompt:PromptTuning")
class PromptConfig(TuningConfig):
    """Soft prompts (Lester et al. 2021): vectors that stand in every text as tokens do, and learn; the model is frozen.

    Published for T5, whose encoder reads them before all tokens, as decoders do here. Of an encoder they stand behind
    the first token, whose state the classifier reads: it keeps the position it was pretrained at. Where token vectors
    hold less than T5's, whose root mean square is above 1, a prompt's learning rate is smaller in proportion.
    """

    name: Literal["prompt"] = Field("prompt", description="Soft prompts: vectors among the tokens of every text.")
    length: int = Field(100, ge=1, le=100_000, description="Virtual tokens of a text, which take positions.")
    init: Literal["vocabulary", "class_labels", "random"] = Field(
        "vocabulary",
        description="What they begin as. vocabulary: the embeddings of a seeded draw from the first 5,000 entries of "
        "the vocabulary, its most frequent ones. class_labels: the mean embedding of each label's words, and from the "
        "vocabulary what is left. random: uniform in [-0.5, 0.5].",
    )
    head_scale: float = Field(
        0.01, gt=0, description="Learning rate of the heads that learn beside them, as a multiple of the schedule's."
    )

    @property
    def positions(self) -> int:
        return self.length

    def misfit(self, model: Any, task: Any) -> Problem | None:
        if self.init == "class_labels" and not hasattr(task, "labels"):
            return Problem(
                "tuning.init",
                f"tuning.init=class_labels: task.kind={task.kind} has no labels",
                "give tuning.init=vocabulary",
            )
        return super().misfit(model, task)

    def warnings(self, optimizer: Any, model: Any) -> list[str]:
        if optimizer.lr >= SMALL_RATE:
            return []
        return [
            f"optimizer.lr={optimizer.lr:g}: soft prompts hardly move below {SMALL_RATE:g}; optimizer=auto gives the "
            "published 0.3"
        ]
