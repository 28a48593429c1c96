"""A row in words: the text before the answer, and the answer with what follows it.

White space in front of the answer belongs to it: vocabularies keep a space with the word behind it, so that a text cut
there has the tokens it has as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from lmtool.tasks.configs.prompt import ANSWER

SEPARATOR = "\n\n"
"""Between demonstrations (Brown et al. 2020, appendix G)."""


class Template:
    """text: with places for columns, and one for the answer, as `PromptConfig.template`."""

    def __init__(self, text: str):
        self.text = text
        before, _, self._after = text.partition(f"{{{ANSWER}}}")
        self._before = before.rstrip()
        self._space = before[len(self._before) :]

    def before(self, values: Mapping[str, str]) -> str:
        """What stands before the answer. values: the row's texts by column."""
        return _filled(self._before, values)

    def answer(self, text: str, values: Mapping[str, str]) -> str:
        """The answer, with the white space before it and all that follows it."""
        return self._space + text + _filled(self._after, values)

    def example(self, text: str, values: Mapping[str, str]) -> str:
        """A demonstration: all of it."""
        return self.before(values) + self.answer(text, values)

    def stop(self, values: Mapping[str, str]) -> str:
        """What ends an answer that is generated: the end of its line, or what follows it."""
        return _filled(self._after, values).strip() or "\n"


def _filled(text: str, values: Mapping[str, str]) -> str:
    pieces = Formatter().parse(text)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in pieces)
