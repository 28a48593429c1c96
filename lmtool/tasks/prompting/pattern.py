"""The template of a prompt as tokens: the tokens around the texts of a row, and the position of the answer.

Each part of the template and each text is tokenized separately. White space before a text or the answer is tokenized
with it.

Shape letters: K columns of a template, E rows, N rows that are read at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter

import numpy as np

from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.tasks.configs.base import ANSWER
from lmtool.tasks.kinds.texts import EncodedTexts
from lmtool.tokenizers.tokenizer import Tokenizer

SEPARATOR = "\n\n"
"""Separates demonstrations (Brown et al. 2020, appendix G)."""


class PromptTemplate:
    """A template that is filled with texts. text: the template with placeholders (`PromptConfig.template`)."""

    def __init__(self, text: str):
        self.text = text
        before, _, self._after = text.partition(f"{{{ANSWER}}}")
        self._before = before.rstrip()
        self._space = before[len(self._before) :]

    def before(self, values: Mapping[str, str]) -> str:
        """Returns the text before the answer. values: the texts of the row by column."""
        return _filled(self._before, values)

    def answer(self, text: str, values: Mapping[str, str]) -> str:
        """Returns the answer with the white space before it and the text after it."""
        return self._space + text + _filled(self._after, values)

    def example(self, text: str, values: Mapping[str, str]) -> str:
        """Returns a complete demonstration: the template filled with a row and its answer."""
        return self.before(values) + self.answer(text, values)

    def stop(self, values: Mapping[str, str]) -> str:
        """Returns the text that ends a generated answer: the text after it in the template, or a line break."""
        return _filled(self._after, values).strip() or "\n"


def _filled(text: str, values: Mapping[str, str]) -> str:
    pieces = Formatter().parse(text)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in pieces)


# Put in front of a part when it is tokenized, so that the part gets the tokens that it has inside a text.
_LETTER = "a"


class Pattern:
    """A template as tokens. columns: the columns in the template, in order. spaces: the white space before each column.
    space: the white space before the answer."""

    def __init__(self, template: str, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._literals, self._names, spaces, literal = [], [], [], ""
        for text, name, _, _ in Formatter().parse(template):
            literal += text
            if name is not None:
                stripped = literal.rstrip()
                self._literals.append(stripped)
                spaces.append(literal[len(stripped) :])
                self._names.append(name)
                literal = ""
        self._ending = literal
        self.columns = tuple(name for name in self._names if name != ANSWER)
        self.spaces = tuple(space for name, space in zip(self._names, spaces, strict=True) if name != ANSWER)
        self.space = spaces[self._names.index(ANSWER)]

    @property
    def ends_with_answer(self) -> bool:
        """Whether no text follows the answer."""
        return self._names[-1] == ANSWER and not self._ending.strip()

    def pieces(self, answer: Sequence[int] | None, before: str = "") -> tuple[list[list[int]], tuple[int, int]]:
        """Returns the K+1 runs of tokens around the columns, and the position of the answer: its run, and its first
        token within the run. answer: the tokens of the answer; None: the runs end where the answer would begin. before:
        a text before the prompt."""
        pieces: list[list[int]] = [[]]
        position, literal = (0, 0), before
        for text, name in zip(self._literals, self._names, strict=True):
            pieces[-1] += self._tokens(literal + text, len(pieces) == 1 and not pieces[0] and not before)
            literal = ""
            if name != ANSWER:
                pieces.append([])
                continue
            position = (len(pieces) - 1, len(pieces[-1]))
            if answer is None:
                return pieces, position
            pieces[-1] += answer
        pieces[-1] += self._tokens(self._ending, False)
        return pieces, position

    def answer(self, word: str) -> list[int]:
        """Returns the tokens of a word at the answer's position."""
        return self.tokenizer.encode(self.space + word).tolist()

    def _tokens(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        ids = self.tokenizer.encode(text).tolist()
        if first:
            return ids
        letter, letter_and_text = (self.tokenizer.encode(start).tolist() for start in (_LETTER, _LETTER + text))
        return letter_and_text[len(letter) :] if letter_and_text[: len(letter)] == letter else ids


class PatternTexts:
    """The encoded texts of E rows for a pattern. lengths: (K, E) the number of tokens of each text."""

    def __init__(self, rows: Rows, pattern: Pattern):
        self.texts = [
            EncodedTexts.of([space + text if text else "" for text in rows.columns[name]], pattern.tokenizer)
            for name, space in zip(pattern.columns, pattern.spaces, strict=True)
        ]
        self.lengths = np.array([text.lengths for text in self.texts], dtype=np.int64).reshape(-1, len(rows))

    def cells(self, rows_N: np.ndarray, lengths_KN: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns, for each column, the ids of these rows, truncated to the (K, N) lengths, and the lengths."""
        return [(text.read(rows_N, lengths), lengths) for text, lengths in zip(self.texts, lengths_KN, strict=True)]


def prompt_capacity(max_length: int, special_count: int, texts: int) -> int:
    """Returns the number of tokens left for texts in a prompt. special_count: the tokens around the texts. texts: the
    number of texts. Raises UserError if there is less than one token for each text."""
    if max_length - special_count < texts:
        raise UserError(
            f"max_length={max_length} leaves too little room for text: the prompt around it has {special_count} tokens",
            f"set max_length={special_count + 16 * max(texts, 1)}, or shorten task.prompt.template",
        )
    return max_length - special_count


def label_tokens(pattern: Pattern, labels: Sequence[str], words: Sequence[str]) -> list[int]:
    """Returns the token of each class's word at the answer's position. Raises UserError unless each word is a different
    single token."""
    tokens: list[int] = []
    hint = "give words of one token each: task.prompt.words={CLASS: WORD, ...}"
    unknown = pattern.tokenizer.roles.get("unk")
    for label, word in zip(labels, words, strict=True):
        ids = pattern.answer(word)
        if len(ids) != 1:
            pieces = " ".join(pattern.tokenizer.pieces(ids))
            raise UserError(
                f"task.prompt.words: {word!r}, for {label}, has {len(ids)} tokens in this vocabulary ({pieces}); it "
                "must be a single token",
                hint,
            )
        if ids[0] == unknown:
            raise UserError(f"task.prompt.words: {word!r}, for {label}, is not in this vocabulary", hint)
        if ids[0] in tokens:
            other = labels[tokens.index(ids[0])]
            raise UserError(
                f"task.prompt.words: {word!r}, for {label}, is the same token as the word for {other}: "
                f"{pattern.tokenizer.pieces(ids)[0]}",
                "give each class a different word: task.prompt.words={CLASS: WORD, ...}",
            )
        tokens += ids
    return tokens
