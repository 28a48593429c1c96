"""Word vectors from characters, which ELMo uses instead of a token embedding.

The ids are those of the tokenizer, and `VocabularyBytes` contains the bytes of each id. Tokens that continue a word are
joined to it, so that every word is read by its characters, whether it is in the vocabulary or not. A word that a batch
contains several times is computed once.

Shape letters: T tokens, W words, S words of one token, R words of several tokens, X tokens of such words, U different
words, V entries of the vocabulary, L symbols of a word, B bytes of an entry, C width of a symbol, F filters, P width of
a word's vector, N texts, K symbols of a word that are read.
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

# Symbols as in the original code: 0 is unused, and byte b is symbol b + 1.
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
        start_id: int | None = None,
        end_id: int | None = None,
    ) -> VocabularyBytes:
        """Builds the table from the bytes of each entry, in order. start_id, end_id: the entries that start and end a
        text."""
        lengths = np.array([len(entry) for entry in byte_strings], dtype=np.int64)
        symbols = np.zeros((len(byte_strings), min(longest, max(1, int(lengths.max(initial=0))))), dtype=np.int16)
        in_entry = np.arange(symbols.shape[1]) < lengths[:, None]
        flat = b"".join(entry[:longest] for entry in byte_strings)
        symbols[in_entry] = np.frombuffer(flat, dtype=np.uint8).astype(np.int16) + 1
        for token_id, symbol in ((start_id, TEXT_BEGINS), (end_id, TEXT_ENDS)):
            if token_id is not None:
                symbols[token_id], lengths[token_id] = 0, 1
                symbols[token_id, 0] = symbol
        return cls(symbols, lengths, np.asarray(continues_V, dtype=bool))

    @classmethod
    def from_ids(cls, entries: int, longest: int) -> VocabularyBytes:
        """Returns a stand-in for models that have no vocabulary yet, in which each entry is a word: its own number in
        decimal digits."""
        return cls.of_bytes([str(number).encode() for number in range(entries)], np.zeros(entries, bool), longest)


@dataclass(frozen=True)
class WordSegments:
    """The words of packed texts. packed: the first token of each word, with the lengths of the texts in words. first_W:
    the index of the first token of each word. word_T: the index of the word of each token. first_W and word_T are None
    if every token is a word."""

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
    """Computes a word's vector from its symbols: symbol vectors, convolutions of several widths, the maximum of each
    filter, relu, highways, and a projection (Kim, Jernite, Sontag and Rush 2016; Peters et al. 2018). Both directions
    read the same vector, so it is returned twice, concatenated.

    The vocabulary is set from a tokenizer (`spell`) and not stored in checkpoints. It stays on the host, where tokens
    are joined to words, so that the number of words is known without a device sync.
    """

    further_tables: tuple[nn.Embedding, ...] = ()

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
        # symbols_VB, lengths_V and continues_V of `VocabularyBytes`.
        self._vocabulary: tuple[Tensor, Tensor, Tensor] | None = None

    def spell(self, vocabulary_bytes: VocabularyBytes) -> None:
        """Sets the bytes of the vocabulary's entries."""
        self._vocabulary = (
            torch.from_numpy(vocabulary_bytes.symbols_VB),
            torch.from_numpy(vocabulary_bytes.lengths_V),
            torch.from_numpy(vocabulary_bytes.continues_V),
        )

    @property
    def longest(self) -> int:
        """Maximum number of bytes that are read per word: two symbols are its start and its end."""
        return self.word_length - 2

    def _vocabulary_bytes(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._vocabulary is None:
            self.spell(VocabularyBytes.from_ids(self.vocab_size, self.longest))
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def products(self) -> int:
        """Number of multiplications by weights per word; a filter counts once for each of its positions."""
        positions = [self.word_length - part.kernel_size[0] + 1 for part in self._filters]
        inner = [
            part.weight.numel() for part in (*self.highways.modules(), self.project) if isinstance(part, nn.Linear)
        ]
        return sum(inner) + sum(
            part.weight.numel() * count for part, count in zip(self._filters, positions, strict=True)
        )

    def saved_activations(self, keys: float, read: float) -> tuple[float, float]:
        """Returns the values of a word's symbols, the maximum of each filter and its index, and the values of the
        highways. An upper bound, since repeated words are computed once."""
        features = self.project.in_features
        return 0.0, self.word_length * (2 + self.characters.embedding_dim) + features * (3 + 3 * len(self.highways))

    @property
    def _filters(self) -> list[nn.Conv1d]:
        return [part for part in self.convolutions if isinstance(part, nn.Conv1d)]

    def entry_lengths(self) -> np.ndarray:
        """Returns (V,): the number of bytes of each entry, including bytes that are not read."""
        _, lengths_V, _ = self._vocabulary_bytes()
        return lengths_V.numpy()

    def words(self, packed: Packed) -> WordSegments:
        """Returns the words of packed texts, on the host. A word is a token and the continuations after it. The first
        token of a text always starts a word."""
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
        """Returns (U, L), the symbols of the distinct words, and (W,), the index of each word among them, on the host.
        Words of several tokens are not deduplicated. words: the words of these texts, on the host."""
        symbols_VB, lengths_V, _ = self._vocabulary_bytes()
        ids_T = on_host(packed.tokens)
        if words.first_W is None or words.word_T is None:
            ids_U, number_W = ids_T.unique(return_inverse=True)
            return self._frame(symbols_VB[ids_U].long(), lengths_V[ids_U]), number_W
        tokens_W = words.word_T.bincount(minlength=len(words.first_W))
        single_W = tokens_W == 1
        ids_U, number_S = ids_T[words.first_W[single_W]].unique(return_inverse=True)
        split_T = ~single_W[words.word_T]
        word_X, ids_X = (single_W.logical_not().cumsum(0) - 1)[words.word_T[split_T]], ids_T[split_T]
        split_words = int((~single_W).sum())
        # The offset of each token's bytes in its word.
        lengths_X = lengths_V[ids_X]
        ends_X = lengths_X.cumsum(0)
        lengths_R = torch.zeros(split_words, dtype=torch.int64).index_add_(0, word_X, lengths_X)
        starts_X = ends_X - lengths_X - (lengths_R.cumsum(0) - lengths_R)[word_X]
        columns = torch.arange(symbols_VB.shape[1])
        offset_XB = starts_X[:, None] + columns
        in_word_XB = (columns < lengths_X[:, None]) & (offset_XB < self.longest)
        symbols_RL = torch.zeros(split_words, self.longest, dtype=torch.int64)
        rows_XB = word_X[:, None].expand_as(offset_XB)
        symbols_RL[rows_XB[in_word_XB], offset_XB[in_word_XB]] = symbols_VB[ids_X].long()[in_word_XB]
        framed_UL = torch.cat(
            [
                self._frame(symbols_VB[ids_U].long(), lengths_V[ids_U]),
                self._frame(symbols_RL, lengths_R.clamp(max=self.longest)),
            ]
        )
        number_W = torch.empty(len(tokens_W), dtype=torch.int64)
        number_W[single_W] = number_S
        number_W[~single_W] = torch.arange(split_words) + len(ids_U)
        return framed_UL, number_W

    def _frame(self, symbols_UB: Tensor, lengths_U: Tensor) -> Tensor:
        """Returns (U, word_length): words between `WORD_BEGINS` and `WORD_ENDS`, padded. lengths_U: in bytes."""
        framed_UL = symbols_UB.new_full((len(symbols_UB), self.word_length), FILL)
        read_UB = symbols_UB[:, : self.longest]
        framed_UL[:, 0] = WORD_BEGINS
        inner_UB = framed_UL[:, 1 : 1 + read_UB.shape[1]]
        inner_UB.copy_(torch.where(read_UB > 0, read_UB, inner_UB))
        return framed_UL.scatter_(1, lengths_U.clamp(max=self.longest)[:, None] + 1, WORD_ENDS)

    def distinct_vectors(self, symbols_UL: Tensor) -> Tensor:
        """Returns (U, P): the vectors of distinct words. symbols_UL: their symbols, on the host."""
        # A filter has the same output wherever it reads only `FILL`, so one such position is enough.
        filled = int((symbols_UL == FILL).all(0).sum()) if len(symbols_UL) else 0
        columns = min(self.word_length, self.word_length - filled + self.widest)
        symbols_UK = send(symbols_UL[:, :columns], self.characters.weight.device)
        x_UCL = self.characters(symbols_UK).transpose(1, 2)
        # `max(-1)` saves the index of the maximum for the backward pass, not all values.
        features = [convolution(x_UCL).max(-1).values for convolution in self._filters]
        x_UF = F.relu(torch.cat(features, 1))
        for highway in self.highways:
            x_UF = highway(x_UF)
        projected: Tensor = self.project(x_UF)
        return projected

    def vectors(self, packed: Packed, words: WordSegments) -> Tensor:
        """Returns (W, 2P): the vector of each word, twice. words: the words of these texts, on the host."""
        symbols_UL, number_W = self.symbols(packed, words)
        vectors_WP = F.embedding(send(number_W, packed.tokens.device), self.distinct_vectors(symbols_UL))
        return torch.cat([vectors_WP, vectors_WP], 1)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Applies dropout; there are no positions and no norm."""
        return self.dropout(vectors_TH, rng)
