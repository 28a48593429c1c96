"""Multiple choice, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.tasks.configs.prompt import ANSWER, PromptedConfig
from lmtool.tasks.configs.sequence import SequenceConfig


@component("task", "multiple_choice", builder="lmtool.tasks.kinds.multiple_choice:MultipleChoice")
class MultipleChoiceConfig(PromptedConfig, SequenceConfig):
    """The best of several choices of a row."""

    kind: Literal["multiple_choice"] = Field("multiple_choice", description="The best of several choices of a row.")
    name: str = Field(
        "multiple_choice",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    text: tuple[str, ...] = Field(
        ("text", "choice1", "choice2"),
        min_length=3,
        description="The columns that are read: what stands before the choices, then the choices. Each choice is read "
        "as a pair: the first columns with spaces between them, and the choice.",
    )
    choices: int = Field(2, ge=2, description="How many of the last columns are choices.")
    continued: bool = Field(
        False,
        description="Whether the column before the choices is the beginning of each choice, and not of the first text.",
    )
    wordings: dict[str, str] = Field(
        {}, description="Values of the columns before the choices, and how they are read instead."
    )
    metrics: tuple[Literal["accuracy"], ...] = Field(
        ("accuracy",), min_length=1, description="Scores that are reported."
    )
    metric: Literal["accuracy"] = Field("accuracy", description="The score that chooses the best checkpoint.")

    @property
    def default_template(self) -> str:
        """The columns before the choices with spaces between them, and the choice."""
        return "".join(f"{{{name}}} " for name in self.text[: -self.choices]) + f"{{{ANSWER}}}"

    @model_validator(mode="after")
    def _text_before_choices(self) -> MultipleChoiceConfig:
        before = len(self.text) - self.choices - self.continued
        if before < 1:
            needed = "a text before the choices" + (", and the beginning of each" if self.continued else "")
            raise ValueError(f"text={list(self.text)} names {self.choices} choices; there must be {needed}")
        if self.prompt.words:
            raise ValueError("prompt.words are for classes; here each choice is an answer")
        return self
