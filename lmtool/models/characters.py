"""Word vectors from characters, ELMo's replacement for a token embedding.

The ids are the tokenizer's; the vocabulary has their bytes (`VocabularyBytes`). Entries that continue a word are joined
to it, so that every word is read by its characters, whether it is in the vocabulary or not. A repeated word of a batch
is computed once.

Shape letters: T tokens, W words, U different words, V entries of the vocabulary, L symbols of a word, B bytes of an
entry, C width of a symbol, F filters, P width of a word's vector, N texts, K symbols of a word that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.models.base import SpellingVocabulary
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.embeddings import StackInput
from lmtool.nn.positions import Position
from lmtool.types import Packed, on_host, send

# Symbols as in the original code: bytes start at 1; 0 is unused.
TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS, FILL = range(257, 262)
SYMBOLS = 262


@dataclass(frozen=True)
class VocabularyBytes:
    """The bytes of the entries of a vocabulary. symbols_VB: the first bytes of each entry as symbols, then zeros.
    lengths_V: the number of bytes of each entry. continues_V: whether an entry continues a word."""

    symbols_VB: np.ndarray
    lengths_V: np.ndarray
    continues_V: np.ndarray

    @classmethod
    def of(cls, vocabulary: SpellingVocabulary, longest: int) -> VocabularyBytes:
        """Reads the bytes of a tokenizer's entries. longest: the maximum number of bytes per entry. The tokens that
        start and end a text have special symbols; other special tokens are read as they are written."""
        byte_strings, roles = vocabulary.spellings(range(vocabulary.vocab_size)), vocabulary.roles
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
        """Builds the table from the bytes of each entry, in order. first_id, last_id: the entries that start and end a
        text."""
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
        """Returns a stand-in for models that have no vocabulary yet: each entry is a word, which is spelled as the
        entry's number."""
        return cls.of_bytes([str(number).encode() for number in range(entries)], np.zeros(entries, bool), longest)


@dataclass(frozen=True)
class WordSegments:
    """The words of packed texts. packed: the first token of each word, with the lengths of the texts in words. first_W:
    the index of this token. word_T: the word of each token. Both are None if every token is a word."""

    packed: Packed
    first_W: Tensor | None = None
    word_T: Tensor | None = None

    def to(self, device: torch.device) -> WordSegments:
        """Returns a copy on the device."""
        if self.first_W is None or self.word_T is None:
            return WordSegments(self.packed.to(device))
        return WordSegments(self.packed.to(device), send(self.first_W, device), send(self.word_T, device))


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

    symbols_VB, lengths_V, continues_V: of `VocabularyBytes`, set from a tokenizer (`spell`) and not stored in
    checkpoints. They stay on the host, where tokens are joined to words, so that the number of words is known without a
    device sync.
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
        """Sets the vocabulary of the ids."""
        self._spelled = (
            torch.from_numpy(vocabulary_bytes.symbols_VB),
            torch.from_numpy(vocabulary_bytes.lengths_V),
            torch.from_numpy(vocabulary_bytes.continues_V),
        )

    @property
    def longest(self) -> int:
        """Maximum bytes read per word."""
        return self.word_length - 2

    def _vocabulary_bytes(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._spelled is None:
            self.spell(VocabularyBytes.from_ids(self.vocab_size, self.longest))
        assert self._spelled is not None
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
        """Returns (V,): number of bytes of each entry, including bytes that are not read."""
        _, lengths_V, _ = self._vocabulary_bytes()
        return lengths_V.numpy()

    def words(self, packed: Packed) -> WordSegments:
        """Returns the words of packed texts, on the host: a token and its continuations. The first token of a text
        always starts a word."""
        _, _, continues_V = self._vocabulary_bytes()
        packed = replace(packed, tokens=on_host(packed.tokens))
        starts_T = ~continues_V[packed.tokens] | (packed.positions == 0)
        first_W = starts_T.nonzero()[:, 0]
        if len(first_W) == len(packed.tokens):
            return WordSegments(packed)
        lengths_N = packed.documents[first_W].bincount(minlength=len(packed.lengths))
        words = Packed(packed.tokens[first_W], tuple(lengths_N.tolist()))
        return WordSegments(words, first_W, starts_T.cumsum(0) - 1)

    def symbols(self, packed: Packed, words: WordSegments) -> tuple[Tensor, Tensor]:
        """Returns (U, L): symbols of the distinct words and (W,) the index of each word among them, on the host. Words
        of several tokens are not deduplicated. words: of these texts, on the host."""
        symbols_VB, lengths_V, _ = self._vocabulary_bytes()
        ids_T = on_host(packed.tokens)
        if words.first_W is None or words.word_T is None:
            ids_U, number_W = ids_T.unique(return_inverse=True)
            return self._framed(symbols_VB[ids_U].long(), lengths_V[ids_U]), number_W
        tokens_W = words.word_T.bincount(minlength=len(words.first_W))
        single_W = tokens_W == 1
        ids_U, number_S = ids_T[words.first_W[single_W]].unique(return_inverse=True)
        split_T = ~single_W[words.word_T]
        word_P, ids_P = (single_W.logical_not().cumsum(0) - 1)[words.word_T[split_T]], ids_T[split_T]
        count = int((~single_W).sum())
        # Offset of each token in its word.
        lengths_P = lengths_V[ids_P]
        ends_P = lengths_P.cumsum(0)
        before_R = torch.zeros(count, dtype=torch.int64).index_add_(0, word_P, lengths_P)
        starts_P = ends_P - lengths_P - (before_R.cumsum(0) - before_R)[word_P]
        columns = torch.arange(symbols_VB.shape[1])
        at_PB = starts_P[:, None] + columns
        in_word_PB = (columns < lengths_P[:, None]) & (at_PB < self.longest)
        symbols_RL = torch.zeros(count, self.longest, dtype=torch.int64)
        rows_PB = word_P[:, None].expand_as(at_PB)
        symbols_RL[rows_PB[in_word_PB], at_PB[in_word_PB]] = symbols_VB[ids_P].long()[in_word_PB]
        framed_UL = torch.cat(
            [
                self._framed(symbols_VB[ids_U].long(), lengths_V[ids_U]),
                self._framed(symbols_RL, before_R.clamp(max=self.longest)),
            ]
        )
        number_W = torch.empty(len(tokens_W), dtype=torch.int64)
        number_W[single_W] = number_S
        number_W[~single_W] = torch.arange(count) + len(ids_U)
        return framed_UL, number_W

    def _framed(self, symbols_UB: Tensor, lengths_U: Tensor) -> Tensor:
        """Returns (U, word_length) with the symbols around a word, padded with `FILL`."""
        framed_UL = symbols_UB.new_full((len(symbols_UB), self.word_length), FILL)
        in_entry = symbols_UB[:, : self.longest]
        framed_UL[:, 0] = WORD_BEGINS
        inner_UL = framed_UL[:, 1 : 1 + in_entry.shape[1]]
        inner_UL.copy_(torch.where(in_entry > 0, in_entry, inner_UL))
        return framed_UL.scatter_(1, lengths_U.clamp(max=self.longest)[:, None] + 1, WORD_ENDS)

    def of_symbols(self, symbols_UL: Tensor) -> Tensor:
        """Returns (U, P): the vectors of words, given their symbols, which are on the host."""
        # A filter has the same output at all positions with only `FILL`, so one of them is enough.
        filled = int((symbols_UL == FILL).all(0).sum()) if len(symbols_UL) else 0
        columns = min(self.word_length, self.word_length - filled + self.widest)
        symbols_UK = send(symbols_UL[:, :columns], self.characters.weight.device)
        x_UCL = self.characters(symbols_UK).transpose(1, 2)
        # Save the index of the maximum for the backward, not all values.
        features = [convolution(x_UCL).max(-1).values for convolution in self._filters]
        x_UF = F.relu(torch.cat(features, 1))
        for highway in self.highways:
            x_UF = highway(x_UF)
        projected: Tensor = self.project(x_UF)
        return projected

    def vectors(self, packed: Packed, words: WordSegments) -> Tensor:
        """Returns (W, 2P): the vector of each word, twice. words: the words of these texts, on the host."""
        symbols_UL, number_W = self.symbols(packed, words)
        vectors_WP = F.embedding(send(number_W, packed.tokens.device), self.of_symbols(symbols_UL))
        return torch.cat([vectors_WP, vectors_WP], 1)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Applies dropout only."""
        return self.dropout(vectors_TH, rng)
