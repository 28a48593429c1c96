"""Incremental decoding over a key/value cache: each step returns the logits of the next token of each text.

A decoder continues its prompts, an encoder-decoder answers its inputs. Prompts of different lengths are packed, and
each text has its own length in the cache, so its tokens do not depend on the other texts of the batch.

Shape letters: N prompts, R unfinished texts, H hidden width, V rows of the token table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from lmtool.errors import NotFinite
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.types import Packed, send


class Decoding(ABC):
    """Incremental decoding of a batch of prompts.

    head: the language-model head. vocabulary: number of rows of its table that are tokens; any rows after them are
    never chosen.
    """

    def __init__(self, backbone: Backbone, head: LMHead, vocabulary: int):
        self.backbone, self.head, self.vocabulary = backbone, head, vocabulary

    @property
    def device(self) -> torch.device:
        return self.backbone.embed.token.weight.device

    @abstractmethod
    def begin(self) -> Tensor:
        """Read the prompts and return the logits of their first new tokens: (N, V) fp32, all rows of the table."""

    @abstractmethod
    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Append a token to each text and return the logits (R, V) of the next tokens.

        rows: for each text, the row of the previous step that it continues; None: the same rows as before. Rows that
        are not listed leave the batch. Texts of one prompt are adjacent, and each prompt has equally many.
        """

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The logits of hidden states: (R, V) fp32. Raises NotFinite."""
        logits_RV = self.head(hidden_RH, self.backbone.embed.token.weight).float()
        # Testing the sum is several times faster than testing each value.
        if not bool(torch.isfinite(logits_RV.sum())):
            raise NotFinite("predictions")
        return logits_RV

    def packed(self, texts: Sequence[Sequence[int]], prefixes: tuple[int, ...] = ()) -> Packed:
        """Concatenated texts."""
        tokens_T = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return Packed(send(tokens_T, self.device), tuple(map(len, texts)), prefixes=prefixes)

    @staticmethod
    def single_tokens(tokens_R: Tensor) -> Packed:
        return Packed(tokens_R, (1,) * len(tokens_R))


class ContinuationDecoding(Decoding):
    """A decoder continues N prompts.

    capacity: maximum tokens of a prompt and its text. prefix: whether attention within the prompt is bidirectional.
    """

    def __init__(
        self,
        backbone: Decoder,
        head: LMHead,
        vocabulary: int,
        prompts: Sequence[Sequence[int]],
        capacity: int,
        prefix: bool = False,
    ):
        super().__init__(backbone, head, vocabulary)
        self.prompts, self.prefix = prompts, prefix
        self.cache = backbone.new_cache(len(prompts), capacity)

    def begin(self) -> Tensor:
        lengths = tuple(map(len, self.prompts))
        packed = self.packed(self.prompts, lengths if self.prefix else ())
        last_N = torch.tensor([start + length - 1 for start, length in zip(packed.starts, lengths, strict=True)])
        return self.logits(self.backbone(packed, cache=self.cache, read_M=send(last_N, self.device)))

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        if rows is not None:
            self.cache.select(rows)
        return self.logits(self.backbone(self.single_tokens(tokens_R), cache=self.cache))


class EncoderDecoderDecoding(Decoding):
    """An encoder-decoder answers N inputs, which the encoder reads once.

    start: the first token of an answer. capacity: maximum tokens of an answer.
    """

    def __init__(
        self,
        backbone: EncoderDecoder,
        head: LMHead,
        vocabulary: int,
        inputs: Sequence[Sequence[int]],
        start: int,
        capacity: int,
    ):
        super().__init__(backbone, head, vocabulary)
        self.inputs, self.start = inputs, start
        self.cache = backbone.new_cache(len(inputs), capacity)
        self.input_of = list(range(len(inputs)))  # for each text, the index of its input among those still in use

    def begin(self) -> Tensor:
        backbone = cast(EncoderDecoder, self.backbone)
        self.encoded = backbone.encode(self.packed(self.inputs)).in_rows()
        return self._step(torch.full((len(self.inputs),), self.start, device=self.device))

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        if rows is not None:
            self.cache.select(rows)
            inputs = [self.input_of[row] for row in rows]
            left = list(dict.fromkeys(inputs))
            self.encoded.select(left, len(rows) // len(left))
            self.input_of = [left.index(number) for number in inputs]
        return self._step(tokens_R)

    def _step(self, tokens_R: Tensor) -> Tensor:
        backbone = cast(EncoderDecoder, self.backbone)
        return self.logits(backbone.decode(self.encoded, self.single_tokens(tokens_R), cache=self.cache))


def groups_by_length(lengths: Sequence[int], sizes: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of texts to process together: of similar length, and within `batch_tokens`.

    lengths: tokens by which the texts are sorted. sizes: tokens that each text needs in the cache.
    """
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and sizes[number] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group
