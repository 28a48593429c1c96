"""Learned vectors before or in a text: keys and values in each layer (prefix tuning), virtual tokens (soft prompts)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmtool.nn.layout import with_prefix
from lmtool.types import Packed, Segments, send

# Prefix tuning: learned keys and values before every text, in the attention of each layer.
#
# A prefix of P corresponds to the cache of P earlier tokens: it has positions 0 to P - 1, a text starts at position P,
# and everything that a text attends to comes after the prefix. The prefix itself is not processed by any layer.
#
# Shape letters: P prefix rows, T tokens, S keys with the prefix before each document, A heads, D head width, W = A*D.


@dataclass(frozen=True)
class LayerPrefix:
    """The prefix of one layer. keys_PW, values_PW. index_S: for each key of the attention, its row among prefix and
    tokens, concatenated."""

    keys_PW: Tensor
    values_PW: Tensor
    index_S: Tensor

    def prepend_to(self, k_TAD: Tensor, v_TAD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values (S, A, D): for each document the prefix, then the document's own."""
        keys_PAD, values_PAD = self.heads(k_TAD)
        keys_SAD = torch.cat([keys_PAD, k_TAD]).index_select(0, self.index_S)
        return keys_SAD, torch.cat([values_PAD, v_TAD]).index_select(0, self.index_S)

    def heads(self, like_TAD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (P, A, D): keys and values, in the type of `like_TAD`."""
        keys_PAD, values_PAD = (
            rows.to(like_TAD.dtype).unflatten(-1, like_TAD.shape[1:]) for rows in (self.keys_PW, self.values_PW)
        )
        return keys_PAD, values_PAD


class KeyPrefix(nn.Module):
    """The prefixes of `depth` layers (Li and Liang 2021, 4.2). `weight`: (P, depth * 2 * W), each row with key and
    value of every layer in turn."""

    def __init__(self, count: int, depth: int, width: int):
        super().__init__()
        self.depth = depth
        self.weight = nn.Parameter(torch.zeros(count, depth * 2 * width))

    def __len__(self) -> int:
        return len(self.weight)

    def rows(self) -> Tensor:
        """Returns the keys and values, (P, depth * 2 * W)."""
        return self.weight

    def layers(self, segments: Segments) -> list[LayerPrefix]:
        """Returns the prefix of each layer, for documents in these segments."""
        index_S = _prefixed_index(segments, len(self))
        parts = self.rows().chunk(2 * self.depth, -1)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [LayerPrefix(keys_PW, values_PW, index_S) for keys_PW, values_PW in pairs]


def _prefixed_index(segments: Segments, count: int) -> Tensor:
    """Returns (S,): the row of each key among prefix and tokens, concatenated."""
    lengths = torch.tensor(with_prefix(segments, count).lengths, dtype=torch.int64)
    first_S = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    steps_S = torch.arange(len(first_S)) - first_S
    # Step `count` is a document's first token, which comes after `count` rows in the joined tensor too.
    source_S = steps_S + torch.tensor(segments.starts, dtype=torch.int64).repeat_interleave(lengths)
    return send(torch.where(steps_S < count, steps_S, source_S), segments.device)


# Virtual tokens: learned vectors inserted into every text.
#
# They are inserted between token lookup and positions, so they have positions, count towards the longest text, and are
# visible wherever their position is. A model returns the states of the text's own tokens only.
#
# Shape letters: T tokens of a batch, S of them with virtual ones, N documents, P virtual tokens per text, E width of
# the token vectors.


@dataclass(frozen=True)
class Insertion:
    """Virtual tokens inserted among those of a batch.

    packed: all tokens; a virtual one has the columns of the token next to it. number_S: 0 for a token of the batch,
    1..P for a virtual one. source_S: the batch's token at, or next to, each position. batch_T: positions of the batch's
    tokens.
    """

    packed: Packed
    number_S: Tensor
    source_S: Tensor
    batch_T: Tensor


class VirtualTokens(nn.Module):
    """`count` vectors in each text, after its first `after` tokens (Lester et al. 2021: 0; after a class token: 1).
    `weight`: (P, E)."""

    def __init__(self, count: int, width: int, after: int = 0):
        super().__init__()
        self.after = after
        self.weight = nn.Parameter(torch.zeros(count, width))

    def __len__(self) -> int:
        return len(self.weight)

    def vectors(self) -> Tensor:
        """Returns (P, E): the inserted vectors."""
        return self.weight

    def insertion(self, packed: Packed, before: Sequence[int] | None = None) -> Insertion:
        """Returns the insertion of the virtual tokens into these texts. before: cached tokens of each document; a
        continued document already has its virtual tokens. Raises ValueError if a new text has fewer than `after`
        tokens."""
        read_lengths = [0] * len(packed.lengths) if before is None else before
        starting = [length > 0 and not past for length, past in zip(packed.lengths, read_lengths, strict=True)]
        if any(starts and length < self.after for length, starts in zip(packed.lengths, starting, strict=True)):
            raise ValueError(f"virtual tokens stand behind {self.after} tokens; a text has fewer")
        lengths = tuple(length + len(self) * starts for length, starts in zip(packed.lengths, starting, strict=True))
        segments = Segments.packed(lengths)
        documents_S = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        steps_S = torch.arange(sum(lengths)) - torch.tensor(segments.starts)[documents_S]
        added_S = torch.tensor(starting)[documents_S]
        number_S = (steps_S - self.after + 1) * (added_S & (steps_S >= self.after) & (steps_S < self.after + len(self)))
        # A token after the virtual tokens moves by their number. The source of a virtual token is the last token before
        # the virtual tokens.
        offset_S = torch.where(added_S & (steps_S >= self.after), steps_S - len(self), steps_S)
        offset_S = torch.where(number_S > 0, max(self.after - 1, 0), offset_S)
        source_S = torch.tensor(packed.starts)[documents_S] + offset_S
        device = packed.tokens.device
        number_S, source_S, batch_T = (
            send(index, device) for index in (number_S, source_S, (number_S == 0).nonzero()[:, 0])
        )
        columns = {name: column.index_select(0, source_S) for name, column in packed.columns.items()}
        prefixes = tuple(prefix + len(self) * starts for prefix, starts in zip(packed.prefixes, starting, strict=False))
        tokens_S = packed.tokens.index_select(0, source_S)
        return Insertion(Packed(tokens_S, lengths, columns, prefixes), number_S, source_S, batch_T)

    def insert(self, vectors_TE: Tensor, insertion: Insertion) -> Tensor:
        """Returns (S, E): the batch's token vectors with the virtual ones inserted."""
        if len(insertion.number_S) == len(vectors_TE):
            return vectors_TE  # no text begins here
        token_SE = vectors_TE.index_select(0, insertion.source_S)
        virtual_SE = nn.functional.embedding((insertion.number_S - 1).clamp(min=0), self.vectors())
        return torch.where(insertion.number_S[:, None] > 0, virtual_SE.to(token_SE.dtype), token_SE)
