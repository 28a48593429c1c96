"""A language model that writes: text in, text out. A decoder continues a text, an encoder-decoder answers one.

Shape letters: L tokens of a text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lmtool.data.formats import text_format
from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.generation.configs import GenerationConfig
from lmtool.generation.generate import BATCH_TOKENS, Space, generate
from lmtool.generation.strategies import Watch
from lmtool.heads.lm import LMHead
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision


class Writer(ABC):
    """layout: puts a prompt's special tokens around its ids; None: as the model's family does. prefix: whether all of a
    prompt sees all of it, on a decoder that learned so. start: the token that an answer begins with."""

    def __init__(
        self,
        backbone: Backbone,
        head: LMHead,
        tokenizer: Tokenizer,
        layout: Callable[[np.ndarray], np.ndarray] | None = None,
        prefix: bool = False,
        start: int | None = None,
    ):
        self.backbone, self.head, self.tokenizer, self.prefix = backbone, head, tokenizer, prefix
        self.layout = self._own_layout if layout is None else layout
        self.space = Space(backbone, start)
        # A vocabulary may have no end (GPT's of 2018).
        self.ends = tuple(number for role, number in tokenizer.roles.items() if role == "eos")

    @abstractmethod
    def _own_layout(self, ids_L: np.ndarray) -> np.ndarray:
        """The family's layout of a prompt."""

    def prompt(self, text: str) -> list[int]:
        """The tokens that the model reads of a text."""
        return self.layout(self.encode(text)).tolist()

    def prompts(self, texts: Sequence[str], origin: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Those of several texts. UserError with file:line where one leaves the model no room to write."""
        prompts = [self.prompt(text) for text in texts]
        for prompt, (file, line) in zip(prompts, origin, strict=True):
            try:
                self.space.require_room(len(prompt))
            except UserError as error:
                raise UserError(f"{file}:{line}: {error.message}", error.hint) from error
        return prompts

    def encode(self, text: str) -> np.ndarray:
        """(L,) tokens of a text."""
        return self.tokenizer.encode(text)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        seed: int,
        batch_tokens: int = BATCH_TOKENS,
        watch: Watch | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, see `generate`."""
        watching = {} if watch is None else {"watch": watch}
        return generate(
            self.backbone, self.head, prompts, config, self.ends, self.space.start, self.tokenizer.vocab_size, seed,
            batch_tokens, self.prefix, **watching,
        )  # fmt: skip

    @abstractmethod
    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """What the new tokens of a prompt say."""

    def whole(self, given: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The text with what was written, as a reader wants it. given: the prompt's text."""
        return self.text(prompt, new)


class Continues(Writer):
    """A decoder."""

    def _own_layout(self, ids_L: np.ndarray) -> np.ndarray:
        return ids_L if len(ids_L) else np.array([self.tokenizer.role("eos")])

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        return self.tokenizer.continuation(prompt, new)

    def whole(self, given: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        return given + self.text(prompt, new)


class Answers(Writer):
    """An encoder-decoder. Its gaps are written as the tokenizer writes them: <extra_id_0>, <extra_id_1>, ... (T5),
    <mask> (BART)."""

    def __init__(
        self,
        backbone: EncoderDecoder,
        head: LMHead,
        tokenizer: Tokenizer,
        layout: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self._format = text_format(backbone.config.text_format, tokenizer)
        super().__init__(backbone, head, tokenizer, layout, start=tokenizer.role(backbone.config.start_role))
        gaps = [*tokenizer.sentinels, *(number for role, number in tokenizer.roles.items() if role == "mask")]
        self.gaps = dict(zip(tokenizer.pieces(gaps), gaps, strict=True))
        self._gap = re.compile("(" + "|".join(map(re.escape, sorted(self.gaps, key=len, reverse=True))) + ")")

    def _own_layout(self, ids_L: np.ndarray) -> np.ndarray:
        return self._format.single(ids_L)[0]

    def encode(self, text: str) -> np.ndarray:
        if not self.gaps:
            return super().encode(text)
        runs = [
            np.array([self.gaps[run]]) if run in self.gaps else self.tokenizer.encode(run)
            for run in self._gap.split(text)
        ]
        return np.concatenate(runs)

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        return self._plain(new)

    def whole(self, given: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Of a text with gaps that the model names, each filling in the place of its gap."""
        sentinels = {*self.tokenizer.sentinels} & {*prompt}
        if not sentinels:
            return self.text(prompt, new)
        fillings: dict[int, list[int]] = {}
        current: list[int] = []
        for token in new:
            if token in self.tokenizer.sentinels:
                current = fillings.setdefault(token, [])
            else:
                current.append(token)
        filled = {piece: self._plain(fillings.get(number, ())) for piece, number in self.gaps.items()}
        parts = (f"[{filled[run].strip()}]" if run in self.gaps else run for run in self._gap.split(given))
        return "".join(parts)

    def _plain(self, ids: Sequence[int]) -> str:
        """Text without the special tokens that stand around it; the names of gaps are kept."""
        hidden = self.tokenizer.special_ids - set(self.tokenizer.sentinels)
        return self.tokenizer.decode([number for number in ids if number not in hidden], skip_special=False)


def written(
    writer: Writer, rows: Rows, config: GenerationConfig, seed: int, batch_tokens: int, precision: Precision
) -> Iterator[dict[str, str]]:
    """For each row of one column of texts, the `text` and its `continuation`."""
    (texts,) = rows.columns.values()
    prompts = writer.prompts(texts, rows.origin)
    with precision.autocast():
        new = writer.write(prompts, config, seed, batch_tokens)
    for text, prompt, ids in zip(texts, prompts, new, strict=True):
        yield {"text": text, "continuation": writer.text(prompt, ids)}
