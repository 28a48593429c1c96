"""Log-probabilities of candidate texts after prompts, in batches, without generating text.

Tokens that all prompts begin with are processed once, and each prompt is processed once for all of its candidates. The
score of a candidate does not depend on the other texts of a batch.

Shape letters: N prompts, T tokens of candidates, V rows of the token table, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtool.errors import NotFinite
from lmtool.learners.generation.decoding import groups_by_length
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.nn.context import EncoderState
from lmtool.types import Packed, Segments, send

Ids = Sequence[int]


@dataclass(frozen=True)
class CandidateScorer:
    """Scores candidate texts with a decoder or an encoder-decoder. start, bidirectional_prompt: see `GenerativeModel`.
    batch_tokens: approximate number of tokens of a forward, and of tokens in all caches."""

    backbone: Backbone
    head: LMHead
    start: int | None = None
    bidirectional_prompt: bool = False
    batch_tokens: int = 8192

    @torch.no_grad()
    def score(self, shared: Ids, prompts: Sequence[Ids], candidates: Sequence[Sequence[Ids]]) -> list[np.ndarray]:
        """Returns, for each prompt, the log-probabilities of its candidates in nats, float64.

        The log-probability of a candidate is the sum over its tokens, given `shared`, the token ids that all prompts
        begin with, and the rest of the prompt. Neither the candidate nor `shared` with the prompt may be empty.
        """
        if isinstance(self.backbone, EncoderDecoder):
            return self._answers(self.backbone, [[*shared, *prompt] for prompt in prompts], candidates)
        assert isinstance(self.backbone, Decoder)
        if self.bidirectional_prompt or not all(map(len, prompts)):
            # With bidirectional attention, the states of the shared tokens depend on the prompt. If a prompt is empty,
            # the last shared token predicts the first token of its candidates.
            shared, prompts = (), [[*shared, *prompt] for prompt in prompts]
        return self._continuations(self.backbone, shared, prompts, candidates)

    def _continuations(
        self, backbone: Decoder, shared: Ids, prompts: Sequence[Ids], candidates: Sequence[Sequence[Ids]]
    ) -> list[np.ndarray]:
        scores = [np.zeros(len(texts)) for texts in candidates]
        # The last token of a candidate is predicted, but never read.
        tokens_read = [max(map(len, texts), default=1) - 1 for texts in candidates]
        sizes = [len(shared) + len(prompt) + count for prompt, count in zip(prompts, tokens_read, strict=True)]
        prefix_cache, cached_tokens = None, self.batch_tokens // 2  # of the prompts, and as many of their candidates
        if shared:
            prefix_cache = backbone.new_cache(1, max(sizes))
            backbone(self._pack([shared]), cache=prefix_cache, read_M=self._index([len(shared) - 1]))
        for group in groups_by_length(sizes, sizes, cached_tokens):
            longest = max(sizes[number] for number in group)
            if prefix_cache is None:
                cache = backbone.new_cache(len(group), longest)
            else:
                cache = prefix_cache.branch([0] * len(group))
            lengths = tuple(len(prompts[number]) for number in group)
            packed = self._pack([prompts[number] for number in group], lengths if self.bidirectional_prompt else ())
            hidden_NH = backbone(packed, cache=cache, read_M=self._index(np.cumsum(lengths) - 1))
            self._add_first_tokens(hidden_NH, group, candidates, scores)
            pairs = _multi_token_candidates(group, candidates)
            size = max(1, cached_tokens // longest)
            for start in range(0, len(pairs), size):
                batch = pairs[start : start + size]
                texts = [candidates[number][index] for _, number, index in batch]
                packed = self._pack([text[:-1] for text in texts])
                hidden_TH = backbone(packed, cache=cache.branch([row for row, _, _ in batch]))
                sums = self._log_probabilities(hidden_TH, [text[1:] for text in texts])
                for (_, number, index), value in zip(batch, sums, strict=True):
                    scores[number][index] += value
            del cache  # before the next one is made
        return scores

    def _answers(
        self, backbone: EncoderDecoder, prompts: Sequence[Ids], candidates: Sequence[Sequence[Ids]]
    ) -> list[np.ndarray]:
        if self.start is None:
            raise ValueError("an encoder-decoder's answer begins with a start token; start is None")
        scores = [np.zeros(len(texts)) for texts in candidates]
        sizes = [len(prompt) + sum(map(len, texts)) for prompt, texts in zip(prompts, candidates, strict=True)]
        for group in groups_by_length(sizes, sizes, self.batch_tokens):
            encoded = backbone.encode(self._pack([prompts[number] for number in group]))
            hidden_NH = backbone.decode(encoded, self._pack([[self.start]] * len(group)))
            self._add_first_tokens(hidden_NH, group, candidates, scores)
            pairs = _multi_token_candidates(group, candidates)
            if not pairs:
                continue
            texts = [candidates[number][index] for _, number, index in pairs]
            outputs = self._pack([[self.start, *text[:-1]] for text in texts])
            hidden_TH = backbone.decode(_repeat(encoded, [row for row, _, _ in pairs]), outputs)
            for (_, number, index), value in zip(pairs, self._log_probabilities(hidden_TH, texts), strict=True):
                scores[number][index] = value
        return scores

    def _add_first_tokens(
        self, hidden_NH: Tensor, group: Sequence[int], candidates: Sequence[Sequence[Ids]], scores: list[np.ndarray]
    ) -> None:
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

    def _log_probabilities(self, hidden_TH: Tensor, labels: Sequence[Ids]) -> list[float]:
        labels_T = self._index([token for text in labels for token in text])
        losses_T, _ = self.head.scores(hidden_TH, self.backbone.embed.token.weight, labels_T)
        if not bool(torch.isfinite(losses_T.sum())):
            raise NotFinite("predictions")
        losses_by_text = losses_T.double().cpu().split([len(text) for text in labels])
        return [-float(losses.sum()) for losses in losses_by_text]

    def _pack(self, texts: Sequence[Ids], prefixes: tuple[int, ...] = ()) -> Packed:
        tokens_T = self._index([token for text in texts for token in text])
        return Packed(tokens_T, tuple(map(len, texts)), prefixes=prefixes)

    def _index(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        return send(torch.as_tensor(np.asarray(numbers, dtype=np.int64)), self.backbone.embed.token.weight.device)


def _repeat(encoded: EncoderState, rows: Sequence[int]) -> EncoderState:
    segments = encoded.segments
    starts, lengths = ([side[row] for row in rows] for side in (segments.starts, segments.lengths))
    return EncoderState(encoded.hidden_SH, Segments(tuple(starts), tuple(lengths), segments.device))


def _multi_token_candidates(group: Sequence[int], candidates: Sequence[Sequence[Ids]]) -> list[tuple[int, int, int]]:
    """Returns the row of the prompt in the group, the index of the prompt, and the index of the candidate."""
    return [
        (row, number, index)
        for row, number in enumerate(group)
        for index, text in enumerate(candidates[number])
        if len(text) > 1
    ]
