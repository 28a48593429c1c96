"""How rows are put into words for a language model, as configuration. Imports no torch."""

from __future__ import annotations

from string import Formatter
from typing import Any

from pydantic import Field, field_validator

from lmtool.config.base import Config
from lmtool.config.nearest import nearest
from lmtool.errors import Problem
from lmtool.tasks.configs.base import TaskConfig

ANSWER = "label"
"""The place of the answer in a template."""
PROMPT = "prompt"
"""The head that reads a row as its prompt, and predicts the word in the place of the answer."""


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
        description="The task in words, for task.head=prompt and for `lmtool evaluate shots=`.",
    )

    @property
    def default_template(self) -> str:
        """The template where none is given."""
        return "".join(f"{name}: {{{name}}}\n" for name in self.text) + f"{self.label}: {{{ANSWER}}}"

    @property
    def template(self) -> str:
        return self.prompt.template or self.default_template

    def unworded(self) -> Problem | None:
        """Why rows cannot be put into words, if they cannot: the template names what is not read."""
        if ANSWER in self.reads:
            return Problem(
                "task.text",
                f"task={self.name} reads a column called {ANSWER}, which in a template is the place of the answer",
                f"give it another name: task.aliases={{{ANSWER}: text}} task.text=[text]",
            )
        named = places(self.template)
        if named == [ANSWER]:
            return Problem(
                "task.prompt.template",
                f"task.prompt.template={self.template!r} names no column to read",
                f"name those of task={self.name}: {', '.join(f'{{{name}}}' for name in self.reads)}",
            )
        for name in named:
            if name not in (*self.reads, ANSWER):
                close = nearest(name, self.reads)
                return Problem(
                    "task.prompt.template",
                    f"task.prompt.template names {{{name}}}; task={self.name} reads {', '.join(self.reads)}",
                    f"did you mean {{{close}}}?" if close else "name those columns alone: task.prompt.template=",
                )
        return None

    def unasked(self, model: Any) -> Problem | None:
        """Why a model of this configuration cannot learn the answer in its place of the template, if it cannot."""
        after = self.template.partition(f"{{{ANSWER}}}")[2]
        if model.architecture != "decoder" or not places(after):
            return self.unworded()
        return Problem(
            "task.prompt.template",
            f"task.prompt.template={self.template!r}: model={model.name} reads from left to right, and {{{ANSWER}}} "
            f"stands before {{{places(after)[0]}}}",
            f"put the answer last: task.prompt.template={self.default_template!r}",
        )
