"""Scorers of language models on held-out text (perplexity), and writers, which generate text from prompts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from lmtool.learners.metrics.texts import perplexity, word_and_byte_rates
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Scores

# --- perplexity ---------------------------------------------------------------------------------------------------
#
# The end token of a document is predicted like any other token, and counts in the loss and in the perplexity per token.
# Words and bytes are counted in the original text, so perplexity per word and bits per byte include neither end tokens
# nor blank lines between documents. The first token of the stream (or of each separate document) is not predicted; in
# perplexity per word and bits per byte, it counts with the mean loss of the other tokens.
#
# Shape letters: M targets.


DOCUMENT_LOSSES = "document_losses"
"""The key of an evaluation's details that holds the summed loss of the text of each document, by its number."""


class PerplexityScorer(TermScorer):
    """The scorer of a learner with one term. Adds the perplexity per token, exp of the loss."""

    def result(self) -> Evaluation:
        evaluation = super().result()
        return replace(evaluation, scores={"perplexity": perplexity(evaluation.loss), **evaluation.scores})


class TextScorer(PerplexityScorer):
    """Adds the perplexity per word and the bits per byte, if the number of words and bytes is known.

    metadata: that of the token store, with the number of tokens, words and bytes. end_id: the token that ends
    documents. documents_of: returns the number of the document of each target (M,) of a batch; None if it is unknown.
    """

    def __init__(
        self,
        learner: ScoresTargets,
        predictors: Mapping[str, Predictor] | None,
        metadata: Mapping[str, Any],
        end_id: int,
        documents_of: Callable[[Batch], np.ndarray] | None = None,
    ):
        super().__init__(learner, predictors)
        self.metadata, self.end_id, self.documents_of = metadata, end_id, documents_of
        self.has_documents = documents_of is not None
        self.loss_sum, self.token_count = 0.0, 0
        self.document_losses: Counter[int] = Counter()

    def add_term(self, name: str, batch: Batch, scores: Scores) -> None:
        super().add_term(name, batch, scores)
        is_text_M = scores.labels != self.end_id
        self.loss_sum += float(scores.losses[is_text_M].double().sum())
        self.token_count += int(is_text_M.sum())

    def take(self, batch: Batch, outputs: Mapping[str, Scores]) -> None:
        super().take(batch, outputs)
        if self.documents_of is None or not self.by_document:
            return
        (scores,), documents_M = outputs.values(), self.documents_of(batch)
        is_text_M = (scores.labels != self.end_id).numpy()
        numbers, positions = np.unique(documents_M[is_text_M], return_inverse=True)
        sums = np.bincount(positions, scores.losses.double().numpy()[is_text_M], len(numbers))
        self.document_losses.update(dict(zip(numbers.tolist(), sums.tolist(), strict=True)))

    def result(self) -> Evaluation:
        evaluation, metadata = super().result(), self.metadata
        if not (metadata.get("words") and metadata.get("bytes") and self.token_count):
            return evaluation
        scores = word_and_byte_rates(
            self.loss_sum / self.token_count, metadata["tokens"], metadata["words"], metadata["bytes"]
        )
        warnings = evaluation.warnings
        if metadata.get("unknown_fraction"):
            percent = f"{metadata['unknown_fraction']:.2%}"
            warnings = (
                *warnings,
                f"{percent} of the tokens are unknown: their text is not predicted, so word_perplexity and "
                "bits_per_byte are too good",
            )
        details = {**evaluation.details, DOCUMENT_LOSSES: self.document_losses}
        return replace(evaluation, scores={**evaluation.scores, **scores}, warnings=warnings, details=details)


# --- writers: a decoder continues a text, an encoder-decoder generates an answer ----------------------------------
#
# Shape letters: L tokens of a text.


class Writer(ABC):
    """The base class of writers, which generate text from prompts. bidirectional_prompt: whether a decoder's attention
    within the prompt is bidirectional. start: the first token of an encoder-decoder's answer; None for a decoder.
    prompt_prefix: a text that is put before every prompt."""

    def __init__(
        self,
        backbone: Backbone,
        head: LMHead,
        tokenizer: Tokenizer,
        bidirectional_prompt: bool = False,
        start: int | None = None,
        prompt_prefix: str = "",
    ):
        self.tokenizer, self.prompt_prefix = tokenizer, prompt_prefix
        # A vocabulary may have no end token (the GPT of 2018).
        ends = [number for role, number in tokenizer.roles.items() if role == "eos"]
        self.model = GenerativeModel(backbone, head, ends, start, tokenizer.vocab_size, bidirectional_prompt)

    @abstractmethod
    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        """Returns the tokens of a prompt with special tokens. ids_L: its tokens without special tokens."""

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, including special tokens. text: the prompt."""
        return self.encode_with_template(self.encode(self.prompt_prefix + text)).tolist()

    def prompts(self, texts: Sequence[str], origin: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Returns the tokens of several prompts, including special tokens. texts: the prompts. origin: the file and the
        line of each prompt, for messages. Raises UserError if a prompt is empty or too long."""
        prompts = [self.prompt(text) for text in texts]
        for prompt, (file, line) in zip(prompts, origin, strict=True):
            try:
                self.model.require_capacity(len(prompt))
            except UserError as error:
                raise UserError(f"{file}:{line}: {error.message}", error.hint) from error
        return prompts

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens (L,) of a text, without special tokens."""
        return self.tokenizer.encode(text)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        seed: int,
        batch_tokens: int = BATCH_TOKENS,
        **options: Any,
    ) -> list[list[int]]:
        """Returns the new tokens for each prompt. options: further arguments of `GenerativeModel.generate`."""
        return self.model.generate(prompts, config, seed, batch_tokens, **options)

    @abstractmethod
    def text(self, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        """Returns the new tokens as text. prompt: the tokens of the prompt. new_ids: the new tokens."""

    def full_text(self, prompt_text: str, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        """Returns the result for a reader: a continuation together with its prompt, or an answer alone. prompt: the
        tokens of the prompt."""
        return self.text(prompt, new_ids)

    def is_streamable(self, prompt: Sequence[int]) -> bool:
        """Returns whether new tokens only extend `full_text` at its end, so that it can be printed during
        generation."""
        return True


class ContinuationWriter(Writer):
    """Continues texts with a decoder. An empty prompt becomes the end-of-text token."""

    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        return ids_L if len(ids_L) else np.array([self.tokenizer.role("eos")])

    def text(self, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        return self.tokenizer.continuation(prompt, new_ids)

    def full_text(self, prompt_text: str, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        return prompt_text + self.text(prompt, new_ids)


class ReplyWriter(ContinuationWriter):
    """Generates targets with a decoder that was finetuned on pairs of a source and a target. The prompt is the source,
    followed by the end-of-text token."""

    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        return np.append(ids_L, self.tokenizer.role("eos"))

    def text(self, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(new_ids).strip()

    def full_text(self, prompt_text: str, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        return self.text(prompt, new_ids)


class AnswerWriter(Writer):
    """Generates answers with an encoder-decoder. A prompt may have gaps, which the model fills. In the prompt, a gap is
    the tokenizer's sentinel or mask token: <extra_id_0>, <extra_id_1>, ... (T5), or <mask> (BART)."""

    def __init__(
        self,
        backbone: EncoderDecoder,
        head: LMHead,
        tokenizer: Tokenizer,
        prompt_prefix: str = "",
    ):
        self._text_format = text_format(backbone.config.text_format, tokenizer)
        start = tokenizer.role(backbone.config.start_role)
        super().__init__(backbone, head, tokenizer, start=start, prompt_prefix=prompt_prefix)
        gap_ids = [*tokenizer.sentinels, *(number for role, number in tokenizer.roles.items() if role == "mask")]
        self.gap_id_by_text = dict(zip(tokenizer.pieces(gap_ids), gap_ids, strict=True))
        self._gap_pattern = re.compile(
            "(" + "|".join(map(re.escape, sorted(self.gap_id_by_text, key=len, reverse=True))) + ")"
        )

    def encode_with_template(self, ids_L: np.ndarray) -> np.ndarray:
        return self._text_format.join(ids_L)[0]

    def encode(self, text: str) -> np.ndarray:
        if not self.gap_id_by_text:
            return super().encode(text)
        parts = [
            np.array([self.gap_id_by_text[part]]) if part in self.gap_id_by_text else self.tokenizer.encode(part)
            for part in self._gap_pattern.split(text)
        ]
        return np.concatenate(parts)

    def text(self, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        return self._decode(new_ids)

    def full_text(self, prompt_text: str, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
        """Returns the answer; for a prompt with sentinels, the prompt, with [the filling] of each gap in its
        place."""
        if self.is_streamable(prompt):
            return self.text(prompt, new_ids)
        fillings: dict[int, list[int]] = {}
        filling: list[int] = []
        for token in new_ids:
            if token in self.tokenizer.sentinels:
                filling = fillings.setdefault(token, [])
            else:
                filling.append(token)
        filled = {piece: self._decode(fillings.get(number, ())) for piece, number in self.gap_id_by_text.items()}
        return "".join(
            f"[{filled[part].strip()}]" if part in self.gap_id_by_text else part
            for part in self._gap_pattern.split(prompt_text)
        )

    def is_streamable(self, prompt: Sequence[int]) -> bool:
        return not {*self.tokenizer.sentinels} & {*prompt}

    def _decode(self, ids: Sequence[int]) -> str:
        omitted_ids = self.tokenizer.special_ids - set(self.tokenizer.sentinels)
        return self.tokenizer.decode([number for number in ids if number not in omitted_ids], skip_special=False)


def writer_of(
    backbone: Backbone, head: LMHead, tokenizer: Tokenizer, task: Mapping[str, object] | None = None
) -> Writer:
    """Returns the writer of a model. task: the configuration of the sequence-to-sequence task on which the model was
    finetuned, with the keys `prefix` and `mask`; None if it was not finetuned. Raises UserError if the model is an
    encoder, which generates no text."""
    section = task or {}
    prompt_prefix = str(section.get("prefix", ""))
    if isinstance(backbone, EncoderDecoder):
        return AnswerWriter(backbone, head, tokenizer, prompt_prefix)
    if not isinstance(backbone, Decoder):
        raise UserError(
            f"model={backbone.config.name} is an encoder, which generates no text",
            "use lmtool predict to fill masks in a text",
        )
    if not section:
        return ContinuationWriter(backbone, head, tokenizer)
    return ReplyWriter(backbone, head, tokenizer, section.get("mask") == "prefix", prompt_prefix=prompt_prefix)


def generate_continuations(
    writer: Writer, rows: Rows, config: GenerationConfig, seed: int, batch_tokens: int, precision: Precision
) -> Iterator[dict[str, object]]:
    """Yields for each row of a table with one text column the `text` and its `continuation`, see `Writer.write`."""
    (texts,) = rows.columns.values()
    prompts = writer.prompts(texts, rows.origin)
    with precision.autocast():
        new_ids = writer.write(prompts, config, seed, batch_tokens)
    for text, prompt, ids in zip(texts, prompts, new_ids, strict=True):
        yield {"text": text, "continuation": writer.text(prompt, ids)}
