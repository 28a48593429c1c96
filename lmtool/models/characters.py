"""Word vectors from characters: what ELMo reads instead of a token table.

The ids are the tokenizer's; the vocabulary knows their bytes (`VocabularyBytes`). Entries that continue a word are
joined to it, so every word is read by its own characters, whether the vocabulary lists it or not. A word that occurs
several times in a batch is computed once.

Shape letters: T tokens, W words, U distinct words, V vocabulary entries, L symbols of a word, B bytes of an entry, C
symbol width, F filters, P width of a word's vector, N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.models.base import SpellingVocabulary
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.embeddings import StackInput
from lmtool.nn.positions import Position
from lmtool.types import Packed

# Symbols as in the published code: bytes start at 1; 0 means nothing and is never read.
TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS, FILL = range(257, 262)
SYMBOLS = 262


@dataclass(frozen=True)
class VocabularyBytes:
    """The bytes of a vocabulary's entries. symbols_VB: their first bytes as symbols, then zeros. lengths_V: number of
    bytes. continues_V: whether an entry continues a word."""

    symbols_VB: np.ndarray
    lengths_V: np.ndarray
    continues_V: np.ndarray

    @classmethod
    def of(cls, vocabulary: SpellingVocabulary, longest: int) -> VocabularyBytes:
        """longest: maximum bytes per entry. Tokens that start and end a text have special symbols; other special tokens
        are spelled as written."""
        byte_strings, roles = vocabulary.spelled(range(vocabulary.vocab_size)), vocabulary.roles
        return cls.of_bytes(byte_strings, ~vocabulary.starts_word, longest, roles.get("bos"), roles.get("eos"))

    @classmethod
    def of_bytes(
        cls,
        byte_strings: Sequence[bytes],
        continues_V: np.ndarray,
        longest: int,
        first_id: int | None = None,
        last_id: int | None = None,
    ) -> VocabularyBytes:
        """From the bytes of each entry, in order. first_id, last_id: entries that start and end texts."""
        lengths = np.array([len(word) for word in byte_strings], dtype=np.int64)
        symbols = np.zeros((len(byte_strings), min(longest, max(1, int(lengths.max(initial=0))))), dtype=np.int16)
        in_entry = np.arange(symbols.shape[1]) < lengths[:, None]
        flat = b"".join(word[:longest] for word in byte_strings)
        symbols[in_entry] = np.frombuffer(flat, dtype=np.uint8).astype(np.int16) + 1
        for number, symbol in ((first_id, TEXT_BEGINS), (last_id, TEXT_ENDS)):
            if number is not None:
                symbols[number], lengths[number] = 0, 1
                symbols[number, 0] = symbol
        return cls(symbols, lengths, np.asarray(continues_V, dtype=bool))

    @classmethod
    def from_ids(cls, entries: int, longest: int) -> VocabularyBytes:
        """Each entry is a word spelled as its number: for models that have no vocabulary yet."""
        return cls.of_bytes([str(number).encode() for number in range(entries)], np.zeros(entries, bool), longest)


@dataclass(frozen=True)
class WordSegments:
    """The words of packed texts. packed: first token of each word, with text lengths in words. first_W: index of that
    token; word_T: word of each token. Both are None if every token is a word."""

    packed: Packed
    first_W: Tensor | None = None
    word_T: Tensor | None = None


class Highway(nn.Module):
    """gate * relu(transform(x)) + (1 - gate) * x (Srivastava, Greff and Schmidhuber 2015)."""

    def __init__(self, width: int):
        super().__init__()
        self.transform, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_UF: Tensor) -> Tensor:
        return torch.lerp(x_UF, F.relu(self.transform(x_UF)), torch.sigmoid(self.gate(x_UF)))


class WordCharacters(StackInput):
    """A word's vector from its symbols: symbol vectors, convolutions of several widths, each filter's maximum, relu,
    highways, a projection (Kim, Jernite, Sontag and Rush 2016; Peters et al. 2018). Both directions read the same
    vector, so it is returned twice, concatenated.

    The `VocabularyBytes` come with a tokenizer (`spell`) and are not stored in a checkpoint, just as the tokenizer is
    not.
    """

    further: tuple[nn.Embedding, ...] = ()

    def __init__(
        self,
        vocab_size: int,
        word_length: int,
        character_size: int,
        filters: Sequence[tuple[int, int]],
        highways: int,
        width: int,
        dropout: float,
    ):
        super().__init__(Position(), dropout)
        self.vocab_size, self.word_length = vocab_size, word_length
        self.widest = max(size for size, _ in filters)
        features = sum(count for _, count in filters)
        self.characters = nn.Embedding(SYMBOLS, character_size)
        self.convolutions = nn.ModuleList(nn.Conv1d(character_size, count, size) for size, count in filters)
        self.highways = nn.ModuleList(Highway(features) for _ in range(highways))
        self.project = nn.Linear(features, width)
        self._spelled: tuple[Tensor, Tensor, Tensor] | None = None

    def spell(self, vocabulary_bytes: VocabularyBytes) -> None:
        """Set the vocabulary of the ids."""
        self._spelled = (
            torch.from_numpy(vocabulary_bytes.symbols_VB),
            torch.from_numpy(vocabulary_bytes.lengths_V),
            torch.from_numpy(vocabulary_bytes.continues_V),
        )

    @property
    def longest(self) -> int:
        """Maximum bytes read per word."""
        return self.word_length - 2

    def _vocabulary_bytes(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._spelled is None:
            self.spell(VocabularyBytes.from_ids(self.vocab_size, self.longest))
        assert self._spelled is not None
        if self._spelled[0].device != device:
            symbols, lengths, continues = self._spelled
            self._spelled = symbols.to(device), lengths.to(device), continues.to(device)
        return self._spelled

    @property
    def products(self) -> int:
        """Number of weights multiplied per word, with each filter counted at each of its positions."""
        positions = [self.word_length - part.kernel_size[0] + 1 for part in self._filters]
        inner = [
            part.weight.numel() for part in (*self.highways.modules(), self.project) if isinstance(part, nn.Linear)
        ]
        return sum(inner) + sum(
            part.weight.numel() * count for part, count in zip(self._filters, positions, strict=True)
        )

    @property
    def saved_activations(self) -> int:
        """fp32 values saved for the backward per distinct word: of its symbols, of each filter the maximum and its
        index, and of the highways."""
        features = self.project.in_features
        return self.word_length * (2 + self.characters.embedding_dim) + features * (3 + 3 * len(self.highways))

    @property
    def _filters(self) -> list[nn.Conv1d]:
        return [part for part in self.convolutions if isinstance(part, nn.Conv1d)]

    def entry_lengths(self) -> np.ndarray:
        """(V,) bytes of each entry, including those beyond the maximum."""
        _, lengths_V, _ = self._vocabulary_bytes(torch.device("cpu"))
        return lengths_V.numpy()

    def words(self, packed: Packed) -> WordSegments:
        """The words of packed texts: a token and the following ones that continue it. The first token of a text always
        starts a word."""
        _, _, continues_V = self._vocabulary_bytes(packed.tokens.device)
        starts_T = ~continues_V[packed.tokens] | (packed.positions == 0)
        first_W = starts_T.nonzero()[:, 0]
        if len(first_W) == len(packed.tokens):
            return WordSegments(packed)
        lengths_N = packed.documents[first_W].bincount(minlength=len(packed.lengths))
        words = Packed(packed.tokens[first_W], tuple(lengths_N.tolist()))
        return WordSegments(words, first_W, starts_T.cumsum(0) - 1)

    def symbols(self, packed: Packed, words: WordSegments) -> tuple[Tensor, Tensor]:
        """(U, L) symbols of the distinct words, words of several tokens not deduplicated; and (W,) the index of each
        word among them."""
        device = packed.tokens.device
        symbols_VB, lengths_V, _ = self._vocabulary_bytes(device)
        if words.first_W is None or words.word_T is None:
            ids_U, number_W = packed.tokens.unique(return_inverse=True)
            return self._framed(symbols_VB[ids_U].long(), lengths_V[ids_U]), number_W
        ids_T = packed.tokens
        tokens_W = words.word_T.bincount(minlength=len(words.first_W))
        single_W = tokens_W == 1
        ids_U, number_S = ids_T[words.first_W[single_W]].unique(return_inverse=True)
        split_T = ~single_W[words.word_T]
        word_P, ids_P = (single_W.logical_not().cumsum(0) - 1)[words.word_T[split_T]], ids_T[split_T]
        count = int((~single_W).sum())
        # Offset of each token in its word.
        lengths_P = lengths_V[ids_P]
        ends_P = lengths_P.cumsum(0)
        before_R = torch.zeros(count, dtype=torch.int64, device=device).index_add_(0, word_P, lengths_P)
        starts_P = ends_P - lengths_P - (before_R.cumsum(0) - before_R)[word_P]
        columns = torch.arange(symbols_VB.shape[1], device=device)
        at_PB = starts_P[:, None] + columns
        in_word_PB = (columns < lengths_P[:, None]) & (at_PB < self.longest)
        symbols_RL = torch.zeros(count, self.longest, dtype=torch.int64, device=device)
        rows_PB = word_P[:, None].expand_as(at_PB)
        symbols_RL[rows_PB[in_word_PB], at_PB[in_word_PB]] = symbols_VB[ids_P].long()[in_word_PB]
        framed_UL = torch.cat(
            [
                self._framed(symbols_VB[ids_U].long(), lengths_V[ids_U]),
                self._framed(symbols_RL, before_R.clamp(max=self.longest)),
            ]
        )
        number_W = torch.empty(len(tokens_W), dtype=torch.int64, device=device)
        number_W[single_W] = number_S
        number_W[~single_W] = torch.arange(count, device=device) + len(ids_U)
        return framed_UL, number_W

    def _framed(self, symbols_UB: Tensor, lengths_U: Tensor) -> Tensor:
        """(U, word_length) with the symbols around a word, padded with `FILL`."""
        framed_UL = symbols_UB.new_full((len(symbols_UB), self.word_length), FILL)
        in_entry = symbols_UB[:, : self.longest]
        framed_UL[:, 0] = WORD_BEGINS
        inner_UL = framed_UL[:, 1 : 1 + in_entry.shape[1]]
        inner_UL.copy_(torch.where(in_entry > 0, in_entry, inner_UL))
        return framed_UL.scatter_(1, lengths_U.clamp(max=self.longest)[:, None] + 1, WORD_ENDS)

    def of_symbols(self, symbols_UL: Tensor) -> Tensor:
        """(U, P) the words' vectors."""
        # A filter has the same value wherever it covers only `FILL`, so one such position is enough.
        filled = (symbols_UL == FILL).all(0).sum() if len(symbols_UL) else symbols_UL.new_tensor(0)
        columns = min(self.word_length, self.word_length - int(filled) + self.widest)
        x_UCL = self.characters(symbols_UL[:, :columns]).transpose(1, 2)
        # Only the index of each maximum is saved for the backward.
        found = [convolution(x_UCL).max(-1).values for convolution in self._filters]
        x_UF = F.relu(torch.cat(found, 1))
        for highway in self.highways:
            x_UF = highway(x_UF)
        projected: Tensor = self.project(x_UF)
        return projected

    def vectors(self, packed: Packed, words: WordSegments) -> Tensor:
        """(W, 2P) word vectors, twice."""
        symbols_UL, number_W = self.symbols(packed, words)
        vectors_WP = F.embedding(number_W, self.of_symbols(symbols_UL))
        return torch.cat([vectors_WP, vectors_WP], 1)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Dropout only."""
        return self.dropout(vectors_TH, rng)
