"""Incremental decoding with a key/value cache: each step returns the logits of the next token of each text.

A decoder continues prompts; an encoder-decoder generates answers to inputs. Prompts of different lengths are packed,
and each text has its own length in the cache, so its tokens do not depend on the other texts of the batch.

Shape letters: N prompts, R unfinished texts, H hidden width, V rows of the token table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import cast

import torch
from torch import Tensor

from lmtool.errors import NotFinite
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.types import Packed, receive, send

_LEAST_SAVED = 64
"""Tokens that must be saved by reading the beginning of all prompts once."""


class Decoding(ABC):
    """The state of incremental decoding for a batch of prompts. vocab_size: the number of rows of the token table that
    are tokens. Rows after them are padding."""

    def __init__(self, backbone: Backbone, head: LMHead, vocab_size: int):
        self.backbone, self.head, self.vocab_size = backbone, head, vocab_size
        self._sums: list[Tensor] = []  # of the logits of each step since the last `receive`

    @property
    def device(self) -> torch.device:
        return self.backbone.embed.token.weight.device

    @property
    def steps_at_once(self) -> int:
        """How many steps pass before the host reads their tokens, so that a GPU does not wait at each. The tokens
        after the end of a text are dropped."""
        return 1 if self.device.type == "cpu" else 8

    @abstractmethod
    def read_prompts(self) -> Tensor:
        """Reads the prompts, and returns the logits of the first new tokens: (N, V) fp32, for all rows of the table."""

    @abstractmethod
    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Appends a token to each text, and returns the logits (R, V) of the next tokens. tokens_R: the tokens to
        append. rows: for each text, the row of the previous step that it continues; None means that row i continues row
        i. Rows that are not listed leave the batch. Texts that continue the same prompt are adjacent, and each prompt
        has equally many texts."""

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Returns the logits (R, V) of hidden states, fp32."""
        logits_RV = self.head(hidden_RH, self.backbone.embed.token.weight).float()
        # Testing the sum is several times faster than testing each value.
        self._sums.append(logits_RV.sum())
        return logits_RV

    def receive(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors on the host. Raises NotFinite if a logit since the last call was not finite."""
        *on_host, sums = receive(*tensors, torch.stack(self._sums))
        self._sums.clear()
        if not bool(torch.isfinite(sums).all()):
            raise NotFinite("predictions")
        return tuple(on_host)

    def pack(self, texts: Sequence[Sequence[int]], prefixes: tuple[int, ...] = ()) -> Packed:
        """Packs texts. prefixes: for each text, how many of its first tokens attend to each other bidirectionally."""
        tokens_T = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return Packed(send(tokens_T, self.device), tuple(map(len, texts)), prefixes=prefixes)

    @staticmethod
    def single_tokens(tokens_R: Tensor) -> Packed:
        """Packs one token for each of R texts."""
        return Packed(tokens_R, (1,) * len(tokens_R))


class ContinuationDecoding(Decoding):
    """Decoding with a decoder, which continues N prompts of token ids. capacity: maximum tokens of a prompt together
    with its continuation. bidirectional_prompt: whether attention within the prompt is bidirectional."""

    def __init__(
        self,
        backbone: Decoder,
        head: LMHead,
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        capacity: int,
        bidirectional_prompt: bool = False,
    ):
        super().__init__(backbone, head, vocab_size)
        self.prompts, self.bidirectional_prompt = prompts, bidirectional_prompt
        self.shared = 0 if bidirectional_prompt else _shared_tokens(prompts)
        self.cache = backbone.new_cache(1 if self.shared else len(prompts), capacity)

    def read_prompts(self) -> Tensor:
        if self.shared:
            self._read([self.prompts[0][: self.shared]])
            self.cache = self.cache.branch([0] * len(self.prompts))
        return self.logits(self._read([prompt[self.shared :] for prompt in self.prompts]))

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Appends texts to the cache. Returns the hidden states (N, H) of their last tokens."""
        lengths = tuple(map(len, texts))
        packed = self.pack(texts, lengths if self.bidirectional_prompt else ())
        last_N = torch.tensor([start + length - 1 for start, length in zip(packed.starts, lengths, strict=True)])
        return self.backbone(packed, cache=self.cache, read_M=send(last_N, self.device))

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        if rows is not None:
            self.cache.select(rows)
        return self.logits(self.backbone(self.single_tokens(tokens_R), cache=self.cache))


def _shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens that all prompts begin with, such as demonstrations or an instruction, if reading
    them once is worth a forward of its own. At least one token of each prompt remains."""
    shared = min(len(commonprefix([list(prompt) for prompt in prompts])), min(map(len, prompts)) - 1)
    return shared if shared * (len(prompts) - 1) >= _LEAST_SAVED else 0


class EncoderDecoderDecoding(Decoding):
    """Decoding with an encoder-decoder, which generates answers to N inputs of token ids. The encoder reads each input
    once. start: the first token of an answer. capacity: maximum tokens of an answer."""

    def __init__(
        self,
        backbone: EncoderDecoder,
        head: LMHead,
        vocab_size: int,
        inputs: Sequence[Sequence[int]],
        start: int,
        capacity: int,
    ):
        super().__init__(backbone, head, vocab_size)
        self.inputs, self.start = inputs, start
        self.cache = backbone.new_cache(len(inputs), capacity)
        self.input_indices = list(range(len(inputs)))  # of each text, in `self.encoded`

    def read_prompts(self) -> Tensor:
        backbone = cast(EncoderDecoder, self.backbone)
        self.encoded = backbone.encode(self.pack(self.inputs)).in_rows()
        return self._step(torch.full((len(self.inputs),), self.start, device=self.device))

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        if rows is not None:
            self.cache.select(rows)
            indices = [self.input_indices[row] for row in rows]
            unfinished = list(dict.fromkeys(indices))
            self.encoded.select(unfinished, len(rows) // len(unfinished))
            self.input_indices = [unfinished.index(index) for index in indices]
        return self._step(tokens_R)

    def _step(self, tokens_R: Tensor) -> Tensor:
        backbone = cast(EncoderDecoder, self.backbone)
        return self.logits(backbone.decode(self.encoded, self.single_tokens(tokens_R), cache=self.cache))


def groups_by_length(lengths: Sequence[int], sizes: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yields groups of texts to process together: the indices of texts with similar lengths. sizes: the number of
    tokens that each text needs in the cache. batch_tokens: maximum tokens of a group in the cache. A single text may
    exceed this number."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and sizes[number] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group
