"""Words by their characters: what ELMo reads in the place of a table of tokens.

The ids that are read are those of the tokenizer. What they spell is known by its vocabulary (`Spellings`): pieces that
continue a word are joined to it, so that every word is read by its own characters, whether the vocabulary lists it or
not. A word that comes several times in a batch is computed once.

Shape letters: T tokens, W words, U different words, V entries of the vocabulary, L symbols of a word, B bytes of an
entry, C width of a symbol, F filters, P width of a word's vector, N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.models.base import SpelledVocabulary
from lmtool.nn.dropout import Draws
from lmtool.nn.embeddings import StackInput
from lmtool.nn.positions import Position
from lmtool.types import Packed

# Symbols, as in the published code: the bytes from 1 on; 0 stands for nothing and is never read.
TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS, FILL = range(257, 262)
SYMBOLS = 262


@dataclass(frozen=True)
class Spellings:
    """What the entries of a vocabulary spell. symbols_VB: their first bytes as symbols, 0 behind them. lengths_V: how
    many they have. continues_V: whether an entry continues a word."""

    symbols_VB: np.ndarray
    lengths_V: np.ndarray
    continues_V: np.ndarray

    @classmethod
    def of(cls, vocabulary: SpelledVocabulary, longest: int) -> Spellings:
        """longest: bytes of an entry that are kept. The tokens that begin and end a text have symbols of their own;
        other special tokens are spelled as they are written."""
        spelled, roles = vocabulary.spelled(range(vocabulary.vocab_size)), vocabulary.roles
        return cls.of_bytes(spelled, ~vocabulary.starts_word, longest, roles.get("bos"), roles.get("eos"))

    @classmethod
    def of_bytes(
        cls,
        spelled: Sequence[bytes],
        continues_V: np.ndarray,
        longest: int,
        begins: int | None = None,
        ends: int | None = None,
    ) -> Spellings:
        """Of the bytes of each entry, in their order. begins, ends: the entries that begin and end texts."""
        lengths = np.array([len(word) for word in spelled], dtype=np.int64)
        symbols = np.zeros((len(spelled), min(longest, max(1, int(lengths.max(initial=0))))), dtype=np.int16)
        inside = np.arange(symbols.shape[1]) < lengths[:, None]
        flat = b"".join(word[:longest] for word in spelled)
        symbols[inside] = np.frombuffer(flat, dtype=np.uint8).astype(np.int16) + 1
        for number, symbol in ((begins, TEXT_BEGINS), (ends, TEXT_ENDS)):
            if number is not None:
                symbols[number], lengths[number] = 0, 1
                symbols[number, 0] = symbol
        return cls(symbols, lengths, np.asarray(continues_V, dtype=bool))

    @classmethod
    def numbered(cls, entries: int, longest: int) -> Spellings:
        """Each entry a word, its number: of a model that has no vocabulary yet."""
        return cls.of_bytes([str(number).encode() for number in range(entries)], np.zeros(entries, bool), longest)


@dataclass(frozen=True)
class PackedWords:
    """The words of packed texts. packed: of each word its first token, and the texts by their words. first_W: where
    that token stands; word_T: the word of each token. Both None where every token is a word."""

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
    """A word's vector of its symbols: vectors of the symbols, convolutions of several widths, of each filter the
    largest value, relu, highways, a projection (Kim, Jernite, Sontag and Rush 2016; Peters et al. 2018). Both
    directions read the same one: it is given twice, side by side.

    symbols_VB, lengths_V, continues_V: those of `Spellings`, which come with a tokenizer (`spell`) and are in no
    checkpoint, as the tokenizer is.
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

    def spell(self, spellings: Spellings) -> None:
        """Read the ids of this vocabulary from now on."""
        self._spelled = (
            torch.from_numpy(spellings.symbols_VB),
            torch.from_numpy(spellings.lengths_V),
            torch.from_numpy(spellings.continues_V),
        )

    @property
    def longest(self) -> int:
        """Bytes of a word that are read."""
        return self.word_length - 2

    def _spellings(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._spelled is None:
            self.spell(Spellings.numbered(self.vocab_size, self.longest))
        assert self._spelled is not None
        if self._spelled[0].device != device:
            symbols, lengths, continues = self._spelled
            self._spelled = symbols.to(device), lengths.to(device), continues.to(device)
        return self._spelled

    @property
    def products(self) -> int:
        """Values that a word's symbols are multiplied with, those of a filter at each of its places."""
        places = [self.word_length - part.kernel_size[0] + 1 for part in self._filters]
        inner = [
            part.weight.numel() for part in (*self.highways.modules(), self.project) if isinstance(part, nn.Linear)
        ]
        return sum(inner) + sum(part.weight.numel() * count for part, count in zip(self._filters, places, strict=True))

    @property
    def kept_values(self) -> int:
        """fp32 values that a different word keeps for the backward: of its symbols, and of each filter its largest
        value, the place of it, and what the highways compute."""
        features = self.project.in_features
        return self.word_length * (2 + self.characters.embedding_dim) + features * (3 + 3 * len(self.highways))

    @property
    def _filters(self) -> list[nn.Conv1d]:
        return [part for part in self.convolutions if isinstance(part, nn.Conv1d)]

    def spelled_lengths(self) -> np.ndarray:
        """(V,) bytes of each entry, those that are not read too."""
        _, lengths_V, _ = self._spellings(torch.device("cpu"))
        return lengths_V.numpy()

    def words(self, packed: Packed) -> PackedWords:
        """The words of packed texts: a token and those behind it that continue it. The first token of a text begins
        one, whatever it is."""
        _, _, continues_V = self._spellings(packed.tokens.device)
        starts_T = ~continues_V[packed.tokens] | (packed.positions == 0)
        first_W = starts_T.nonzero()[:, 0]
        if len(first_W) == len(packed.tokens):
            return PackedWords(packed)
        lengths_N = packed.documents[first_W].bincount(minlength=len(packed.lengths))
        words = Packed(packed.tokens[first_W], tuple(lengths_N.tolist()))
        return PackedWords(words, first_W, starts_T.cumsum(0) - 1)

    def symbols(self, packed: Packed, words: PackedWords) -> tuple[Tensor, Tensor]:
        """(U, L) symbols of the different words, those that are spelled by several tokens each for itself; and (W,) the
        number of each word among them."""
        device = packed.tokens.device
        symbols_VB, lengths_V, _ = self._spellings(device)
        if words.first_W is None or words.word_T is None:
            ids_U, number_W = packed.tokens.unique(return_inverse=True)
            return self._framed(symbols_VB[ids_U].long(), lengths_V[ids_U]), number_W
        ids_T = packed.tokens
        tokens_W = words.word_T.bincount(minlength=len(words.first_W))
        single_W = tokens_W == 1
        ids_U, number_S = ids_T[words.first_W[single_W]].unique(return_inverse=True)
        several_T = ~single_W[words.word_T]
        word_P, ids_P = (single_W.logical_not().cumsum(0) - 1)[words.word_T[several_T]], ids_T[several_T]
        count = int((~single_W).sum())
        # Where in its word each piece begins.
        lengths_P = lengths_V[ids_P]
        ends_P = lengths_P.cumsum(0)
        before_R = torch.zeros(count, dtype=torch.int64, device=device).index_add_(0, word_P, lengths_P)
        starts_P = ends_P - lengths_P - (before_R.cumsum(0) - before_R)[word_P]
        columns = torch.arange(symbols_VB.shape[1], device=device)
        at_PB = starts_P[:, None] + columns
        inside_PB = (columns < lengths_P[:, None]) & (at_PB < self.longest)
        spelled_RL = torch.zeros(count, self.longest, dtype=torch.int64, device=device)
        rows_PB = word_P[:, None].expand_as(at_PB)
        spelled_RL[rows_PB[inside_PB], at_PB[inside_PB]] = symbols_VB[ids_P].long()[inside_PB]
        framed_UL = torch.cat(
            [
                self._framed(symbols_VB[ids_U].long(), lengths_V[ids_U]),
                self._framed(spelled_RL, before_R.clamp(max=self.longest)),
            ]
        )
        number_W = torch.empty(len(tokens_W), dtype=torch.int64, device=device)
        number_W[single_W] = number_S
        number_W[~single_W] = torch.arange(count, device=device) + len(ids_U)
        return framed_UL, number_W

    def _framed(self, symbols_UB: Tensor, lengths_U: Tensor) -> Tensor:
        """(U, word_length) with the symbols around a word, and `FILL` behind it."""
        framed_UL = symbols_UB.new_full((len(symbols_UB), self.word_length), FILL)
        inside = symbols_UB[:, : self.longest]
        framed_UL[:, 0] = WORD_BEGINS
        own_UL = framed_UL[:, 1 : 1 + inside.shape[1]]
        own_UL.copy_(torch.where(inside > 0, inside, own_UL))
        return framed_UL.scatter_(1, lengths_U.clamp(max=self.longest)[:, None] + 1, WORD_ENDS)

    def of_symbols(self, symbols_UL: Tensor) -> Tensor:
        """(U, P) the words' vectors."""
        # A filter finds the same wherever it sees nothing but `FILL`: one such place stands for all.
        filled = (symbols_UL == FILL).all(0).sum() if len(symbols_UL) else symbols_UL.new_tensor(0)
        kept = min(self.word_length, self.word_length - int(filled) + self.widest)
        x_UCL = self.characters(symbols_UL[:, :kept]).transpose(1, 2)
        # The place of the largest value is kept for the backward, not all values.
        found = [convolution(x_UCL).max(-1).values for convolution in self._filters]
        x_UF = F.relu(torch.cat(found, 1))
        for highway in self.highways:
            x_UF = highway(x_UF)
        projected: Tensor = self.project(x_UF)
        return projected

    def vectors(self, packed: Packed, words: PackedWords) -> Tensor:
        """(W, 2P) the vectors of words, twice."""
        symbols_UL, number_W = self.symbols(packed, words)
        vectors_WP = F.embedding(number_W, self.of_symbols(symbols_UL))
        return torch.cat([vectors_WP, vectors_WP], 1)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, draws: Draws | None = None) -> Tensor:
        """Dropout alone."""
        return self.dropout(vectors_TH, draws)
