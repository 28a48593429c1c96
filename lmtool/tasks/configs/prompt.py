"""How rows are put into words for a language model, as configuration. Imports no torch."""

from __future__ import annotations

from string import Formatter

from pydantic import Field, field_validator

from lmtool.config.base import Config
from lmtool.tasks.configs.base import TaskConfig

ANSWER = "label"
"""The place of the answer in a template."""


class PromptConfig(Config):
    """A pattern, and the words that stand for the classes (Schick and Schuetze 2021, section 3)."""

    template: str | None = Field(
        None,
        description="A row as text: {COLUMN} is replaced by the row's text, {label} by the answer; \\n "
        "is the end of a line. Null: each column behind its name, then the answer.",
    )
    words: dict[str, str] = Field({}, description="Classes, and what is written for them. Others: their names.")

    @field_validator("template")
    @classmethod
    def _has_one_answer(cls, template: str | None) -> str | None:
        # A shell hands over the two characters as they are typed.
        template = None if template is None else template.replace("\\n", "\n")
        if template is not None and places(template).count(ANSWER) != 1:
            raise ValueError(f"template={template!r}: {{{ANSWER}}}, the place of the answer, comes once")
        return template


def places(template: str) -> list[str]:
    """The names between braces, in their order. ValueError where braces do not match."""
    names = [name for _, name, form, change in Formatter().parse(template) if name is not None]
    if any(form or change for _, _, form, change in Formatter().parse(template)):
        raise ValueError(f"template={template!r}: a place is a column's name in braces, nothing more")
    return names


class PromptedConfig(TaskConfig):
    """The base of kinds that a language model can do from a prompt, without training."""

    prompt: PromptConfig = Field(
        default_factory=lambda: PromptConfig.model_validate({}),
        description="The task in words, for `lmtool evaluate shots=`.",
    )

    @property
    def default_template(self) -> str:
        """The template where none is given."""
        return "".join(f"{name}: {{{name}}}\n" for name in self.text) + f"{self.label}: {{{ANSWER}}}"

    @property
    def template(self) -> str:
        return self.prompt.template or self.default_template
