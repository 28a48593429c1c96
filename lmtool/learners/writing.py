"""Perplexity of language models on held-out text, and writers, which generate text from prompts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmtool.data.examples import Rows
from lmtool.data.formats import text_format
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor
from lmtool.learners.evaluation import Evaluation, ScoresTargets, TermScorer
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.generate import BATCH_TOKENS, GenerativeModel
from lmtool.learners.generation.strategies import Watch
from lmtool.learners.metrics.texts import perplexity, word_and_byte_rates
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Scores

# --- perplexity ---------------------------------------------------------------------------------------------------
#
# The end token of a document is predicted like any other token and counts in the loss and the token perplexity. Words
# and bytes are those of the original text, so their scores include neither end tokens nor blank lines between
# documents. The first token of the stream (or of each separate document) is not predicted; in the scores of words and
# bytes it counts with the mean loss of the other tokens.
#
# Shape letters: M targets.


class PerplexityScorer(TermScorer):
    """Adds the token perplexity of a learner with one term: exp of its loss."""

    def result(self) -> Evaluation:
        evaluation = super().result()
        return replace(evaluation, scores={"perplexity": perplexity(evaluation.loss), **evaluation.scores})


class TextScorer(PerplexityScorer):
    """Adds the scores of words and bytes, if their number is known. text: metadata of the token store. end: the end
    token of documents."""

    def __init__(
        self, learner: ScoresTargets, predictors: Mapping[str, Predictor] | None, text: Mapping[str, Any], end: int
    ):
        super().__init__(learner, predictors)
        self.text, self.end = text, end
        self.loss, self.count = 0.0, 0

    def add_term(self, name: str, batch: Batch, scores: Scores) -> None:
        super().add_term(name, batch, scores)
        of_text_M = scores.labels != self.end
        self.loss += float(scores.losses[of_text_M].double().sum())
        self.count += int(of_text_M.sum())

    def result(self) -> Evaluation:
        evaluation, text = super().result(), self.text
        if not (text.get("words") and text.get("bytes") and self.count):
            return evaluation
        scores = word_and_byte_rates(self.loss / self.count, text["tokens"], text["words"], text["bytes"])
        warnings = evaluation.warnings
        if text.get("unknown_fraction"):
            percent = f"{text['unknown_fraction']:.2%}"
            warnings = (
                *warnings,
                f"{percent} of the tokens are unknown: their text is not predicted, so the scores of words and bytes "
                "are too good",
            )
        return replace(evaluation, scores={**evaluation.scores, **scores}, warnings=warnings)


# --- writers: a decoder continues a text, an encoder-decoder answers one ---------------------------------------------
#
# Shape letters: L tokens of a text.


class Writer(ABC):
    """Generates text from prompts. prefix: whether a decoder's attention within the prompt is bidirectional. start: the
    first token of an answer. before: text that precedes every prompt."""

    def __init__(
        self,
        backbone: Backbone,
        head: LMHead,
        tokenizer: Tokenizer,
        prefix: bool = False,
        start: int | None = None,
        before: str = "",
    ):
        self.tokenizer, self.before = tokenizer, before
        # A vocabulary may have no end token (the GPT of 2018).
        ends = [number for role, number in tokenizer.roles.items() if role == "eos"]
        self.model = GenerativeModel(backbone, head, ends, start, tokenizer.vocab_size, prefix)

    @abstractmethod
    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        """A prompt with its special tokens."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, special tokens included."""
        return self.encode_with_template(self.encode(self.before + text)).tolist()

    def prompts(self, texts: Sequence[str], origin: Sequence[tuple[str, int]]) -> list[list[int]]:
        """The tokens of several prompts. Raises UserError with file:line for a prompt that is too long."""
        prompts = [self.prompt(text) for text in texts]
        for prompt, (file, line) in zip(prompts, origin, strict=True):
            try:
                self.model.require_capacity(len(prompt))
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
        """The new tokens of each prompt, see `GenerativeModel.generate`."""
        watching = {} if watch is None else {"watch": watch}
        return self.model.generate(prompts, config, seed, batch_tokens, **watching)

    @abstractmethod
    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The text of the new tokens of a prompt."""

    def full_text(self, prompt_text: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The readable result: the prompt together with the new text, or the new text. prompt_text: the prompt."""
        return self.text(prompt, new)

    def is_streamable(self, prompt: Sequence[int]) -> bool:
        """Whether `full_text` only grows at its end, so that it can be printed while it is generated."""
        return True


class ContinuationWriter(Writer):
    """A decoder that continues a text."""

    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        return ids_L if len(ids_L) else np.array([self.tokenizer.role("eos")])

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        return self.tokenizer.continuation(prompt, new)

    def full_text(self, prompt_text: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        return prompt_text + self.text(prompt, new)


class ReplyWriter(ContinuationWriter):
    """A decoder that generates a target after a source and an end token."""

    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        return np.append(ids_L, self.tokenizer.role("eos"))

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        return self.tokenizer.decode(new).strip()

    def full_text(self, prompt_text: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        return self.text(prompt, new)


class AnswerWriter(Writer):
    """An encoder-decoder. Gaps in prompts are written as in the tokenizer: <extra_id_0>, <extra_id_1>, ... (T5), <mask>
    (BART)."""

    def __init__(
        self,
        backbone: EncoderDecoder,
        head: LMHead,
        tokenizer: Tokenizer,
        before: str = "",
    ):
        self._format = text_format(backbone.config.text_format, tokenizer)
        start = tokenizer.role(backbone.config.start_role)
        super().__init__(backbone, head, tokenizer, start=start, before=before)
        sentinels_by_text = [
            *tokenizer.sentinels,
            *(number for role, number in tokenizer.roles.items() if role == "mask"),
        ]
        self.sentinels_by_text = dict(zip(tokenizer.pieces(sentinels_by_text), sentinels_by_text, strict=True))
        self._gap = re.compile(
            "(" + "|".join(map(re.escape, sorted(self.sentinels_by_text, key=len, reverse=True))) + ")"
        )

    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        return self._format.join(ids_L)[0]

    def encode(self, text: str) -> np.ndarray:
        if not self.sentinels_by_text:
            return super().encode(text)
        runs = [
            np.array([self.sentinels_by_text[run]]) if run in self.sentinels_by_text else self.tokenizer.encode(run)
            for run in self._gap.split(text)
        ]
        return np.concatenate(runs)

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        return self._plain(new)

    def full_text(self, prompt_text: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        """For a prompt with sentinels, the prompt with each gap filled."""
        if self.is_streamable(prompt):
            return self.text(prompt, new)
        fillings: dict[int, list[int]] = {}
        current: list[int] = []
        for token in new:
            if token in self.tokenizer.sentinels:
                current = fillings.setdefault(token, [])
            else:
                current.append(token)
        filled = {piece: self._plain(fillings.get(number, ())) for piece, number in self.sentinels_by_text.items()}
        parts = (
            f"[{filled[run].strip()}]" if run in self.sentinels_by_text else run for run in self._gap.split(prompt_text)
        )
        return "".join(parts)

    def is_streamable(self, prompt: Sequence[int]) -> bool:
        return not {*self.tokenizer.sentinels} & {*prompt}

    def _plain(self, ids: Sequence[int]) -> str:
        """Text without special tokens except sentinels."""
        hidden = self.tokenizer.special_ids - set(self.tokenizer.sentinels)
        return self.tokenizer.decode([number for number in ids if number not in hidden], skip_special=False)


def writer_of(
    backbone: Backbone, head: LMHead, tokenizer: Tokenizer, task: Mapping[str, object] | None = None
) -> Writer:
    """The writer of a language model. task: the section of its sequence-to-sequence task, with `prefix` and `mask`;
    None without a task. Raises UserError for an encoder."""
    section = task or {}
    before = str(section.get("prefix", ""))
    if isinstance(backbone, EncoderDecoder):
        return AnswerWriter(backbone, head, tokenizer, before)
    if not isinstance(backbone, Decoder):
        raise UserError(
            f"model={backbone.config.name} is an encoder, which generates no text", "lmtool predict fills its masks"
        )
    if not section:
        return ContinuationWriter(backbone, head, tokenizer)
    return ReplyWriter(backbone, head, tokenizer, section.get("mask") == "prefix", before=before)


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
