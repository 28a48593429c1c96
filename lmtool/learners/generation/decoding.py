"""Incremental decoding over a key/value cache: each step returns the logits of the next token of each text.

A decoder continues its prompts, an encoder-decoder answers its inputs. Prompts of different length are read packed,
and every text has its own length in the cache: what a text becomes does not depend on those beside it.

Shape letters: N prompts, R texts under way, H hidden width, V rows of the token table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lmtool.errors import NotFinite
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.types import Packed, send


class Decoding(ABC):
    """head: reads tokens off the hidden states. vocabulary: rows of its table that stand for tokens, the first ones:
    those behind them may have probability, and are never chosen."""

    def __init__(self, backbone: Backbone, head: LMHead, vocabulary: int):
        self.backbone, self.head, self.vocabulary = backbone, head, vocabulary

    @property
    def device(self) -> torch.device:
        return self.backbone.embed.token.weight.device

    @abstractmethod
    def begin(self) -> Tensor:
        """Read the prompts: logits (N, V) of the first new token of each, fp32, rows that stand for no token too."""

    @abstractmethod
    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Read a token more of each text: logits (R, V) of the next ones. rows: which of the texts before each goes on
        from; None: each from itself. Those that come no more are left out of the batch. The texts of one prompt stand
        together, as many for each."""

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """(R, V), fp32. NotFinite where one is no finite number."""
        logits_RV = self.head(hidden_RH, self.backbone.embed.token.weight).float()
        # A sum is several times as fast as a look at each, and finite where they all are.
        if not bool(torch.isfinite(logits_RV.sum())):
            raise NotFinite("predictions")
        return logits_RV

    def packed(self, texts: Sequence[Sequence[int]], prefixes: tuple[int, ...] = ()) -> Packed:
        """Texts end to end."""
        tokens_T = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return Packed(send(tokens_T, self.device), tuple(map(len, texts)), prefixes=prefixes)

    @staticmethod
    def one_each(tokens_R: Tensor) -> Packed:
        return Packed(tokens_R, (1,) * len(tokens_R))


class ContinuationDecoding(Decoding):
    """A decoder continues N prompts.

    capacity: tokens of prompt and text together, at most. prefix: whether all of a prompt sees all of it.
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
        return self.logits(self.backbone(self.one_each(tokens_R), cache=self.cache))


class EncoderDecoderDecoding(Decoding):
    """An encoder-decoder answers N inputs, which the encoder reads once.

    start: the token that an answer begins with. capacity: tokens of an answer, at most.
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
        self.input_of = list(range(len(inputs)))  # of each text, among the inputs that are left

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
        return self.logits(backbone.decode(self.encoded, self.one_each(tokens_R), cache=self.cache))
