"""Scoring: the log-probabilities of candidate texts after prompts, in batches, without generating text.

What several prompts begin with is read once and kept, and so is each prompt for all of its candidates. What a candidate
scores does not depend on what it is scored beside.

Shape letters: N prompts, R candidates, T their tokens, V rows of the token table, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtool.errors import NotFinite
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.nn.cache import Cache
from lmtool.nn.context import EncoderState
from lmtool.types import Packed, Segments, send

Ids = Sequence[int]


@dataclass(frozen=True)
class CandidateScorer:
    """head: reads tokens off the hidden states. start: the token that an answer begins with, of an encoder-decoder.
    prefix: whether all of a prompt sees all of it, on a decoder that learned so. batch_tokens: of one forward, and kept
    in the cache at a time, about.
    """

    backbone: Backbone
    head: LMHead
    start: int | None = None
    prefix: bool = False
    batch_tokens: int = 8192

    @torch.no_grad()
    def score(self, shared: Ids, prompts: Sequence[Ids], candidates: Sequence[Sequence[Ids]]) -> list[np.ndarray]:
        """For each prompt, the log-probability of each of its candidates, in nats: the sum over its tokens, behind
        `shared` and the prompt. No prompt with what it shares, and no candidate, is empty. float64.

        shared: tokens that all prompts begin with; of a decoder."""
        if isinstance(self.backbone, EncoderDecoder):
            return self._answers(self.backbone, [[*shared, *prompt] for prompt in prompts], candidates)
        assert isinstance(self.backbone, Decoder)
        if self.prefix or not all(map(len, prompts)):
            # Then what is shared is read in the light of what follows, or nothing is left to read behind it.
            shared, prompts = (), [[*shared, *prompt] for prompt in prompts]
        return self._continuations(self.backbone, shared, prompts, candidates)

    def _continuations(
        self, backbone: Decoder, shared: Ids, prompts: Sequence[Ids], candidates: Sequence[Sequence[Ids]]
    ) -> list[np.ndarray]:
        scores = [np.zeros(len(texts)) for texts in candidates]
        longest = [max(map(len, texts), default=1) - 1 for texts in candidates]
        sizes = [len(shared) + len(prompt) + more for prompt, more in zip(prompts, longest, strict=True)]
        prefix_cache = None
        if shared:
            prefix_cache = backbone.new_cache(1, max(sizes))
            backbone(self._packed([shared]), cache=prefix_cache, read_M=self._index([len(shared) - 1]))
        for group in _groups(sizes, self.batch_tokens):
            chosen = [prompts[number] for number in group]
            lengths = tuple(map(len, chosen))
            if prefix_cache is None:
                cache = backbone.new_cache(len(group), max(sizes[number] for number in group))
            else:
                cache = _branch(prefix_cache, [0] * len(group))
            packed = self._packed(chosen, lengths if self.prefix else ())
            hidden_NH = backbone(packed, cache=cache, read_M=self._index(np.cumsum(lengths) - 1))
            self._first_tokens(hidden_NH, group, candidates, scores)
            pairs = [
                (row, number, index)
                for row, number in enumerate(group)
                for index, text in enumerate(candidates[number])
                if len(text) > 1
            ]
            size = max(1, self.batch_tokens // max(sizes[number] for number in group))
            for at in range(0, len(pairs), size):
                some = pairs[at : at + size]
                branch_cache = _branch(cache, [row for row, _, _ in some])
                texts = [candidates[number][index] for _, number, index in some]
                hidden_TH = backbone(self._packed([text[:-1] for text in texts]), cache=branch_cache)
                sums = self._sums(hidden_TH, [text[1:] for text in texts])
                for (_, number, index), value in zip(some, sums, strict=True):
                    scores[number][index] += value
        return scores

    def _answers(
        self, backbone: EncoderDecoder, prompts: Sequence[Ids], candidates: Sequence[Sequence[Ids]]
    ) -> list[np.ndarray]:
        if self.start is None:
            raise ValueError("an encoder-decoder's answer begins with a start token; none is given")
        scores = [np.zeros(len(texts)) for texts in candidates]
        sizes = [len(prompt) + sum(map(len, texts)) for prompt, texts in zip(prompts, candidates, strict=True)]
        for group in _groups(sizes, self.batch_tokens):
            encoded = backbone.encode(self._packed([prompts[number] for number in group]))
            hidden_NH = backbone.decode(encoded, self._packed([[self.start]] * len(group)))
            self._first_tokens(hidden_NH, group, candidates, scores)
            pairs = [
                (row, number, index)
                for row, number in enumerate(group)
                for index, text in enumerate(candidates[number])
                if len(text) > 1
            ]
            if not pairs:
                continue
            texts = [candidates[number][index] for _, number, index in pairs]
            outputs = self._packed([[self.start, *text[:-1]] for text in texts])
            hidden_TH = backbone.decode(_repeated(encoded, [row for row, _, _ in pairs]), outputs)
            for (_, number, index), value in zip(pairs, self._sums(hidden_TH, texts), strict=True):
                scores[number][index] = value
        return scores

    def _first_tokens(
        self, hidden_NH: Tensor, group: Sequence[int], candidates: Sequence[Sequence[Ids]], scores: list[np.ndarray]
    ) -> None:
        """Enter the first tokens of the candidates: all of those of a prompt are read off one hidden state."""
        table_VH = self.backbone.embed.token.weight
        log_probs_NV = self.head(hidden_NH, table_VH).float().log_softmax(-1)
        rows = [row for row, number in enumerate(group) for _ in candidates[number]]
        first_tokens = [text[0] for number in group for text in candidates[number]]
        device = log_probs_NV.device
        values = log_probs_NV[send(torch.tensor(rows), device), send(torch.tensor(first_tokens), device)]
        if not bool(torch.isfinite(values.sum())):
            raise NotFinite("predictions")
        remaining = iter(values.double().cpu().tolist())
        for number in group:
            scores[number] += [next(remaining) for _ in candidates[number]]

    def _sums(self, hidden_TH: Tensor, labels: Sequence[Ids]) -> list[float]:
        """The log-probability of each text, from a hidden state in front of each of its tokens."""
        labels_T = self._index([token for text in labels for token in text])
        losses_T, _ = self.head.scores(hidden_TH, self.backbone.embed.token.weight, labels_T)
        if not bool(torch.isfinite(losses_T.sum())):
            raise NotFinite("predictions")
        parts = losses_T.double().cpu().split([len(text) for text in labels])
        return [-float(part.sum()) for part in parts]

    def _packed(self, texts: Sequence[Ids], prefixes: tuple[int, ...] = ()) -> Packed:
        tokens_T = self._index([token for text in texts for token in text])
        return Packed(tokens_T, tuple(map(len, texts)), prefixes=prefixes)

    def _index(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        return send(torch.as_tensor(np.asarray(numbers, dtype=np.int64)), self.backbone.embed.token.weight.device)


def _branch(cache: Cache, rows: Sequence[int]) -> Cache:
    """These documents of a cache, in one of their branch_cache: the first stays as it is."""
    other = deepcopy(cache)
    other.select(rows)
    return other


def _repeated(encoded: EncoderState, rows: Sequence[int]) -> EncoderState:
    """The inputs of these rows, each read where it lies."""
    segments = encoded.segments
    starts, lengths = ([side[row] for row in rows] for side in (segments.starts, segments.lengths))
    return EncoderState(encoded.hidden_SH, Segments(tuple(starts), tuple(lengths), segments.device))


def _groups(sizes: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of prompts that are read together: of about equal length, and within so many tokens."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    group: list[int] = []
    for number in order:
        if group and sizes[number] * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group
