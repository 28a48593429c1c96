"""Beam search: of each prompt the most probable texts are kept, and searched on from.

The form of Hugging Face's `generate`, which its results equal: twice as many candidates as beams, so that enough go on
where the best ones end; ended texts are compared by log-probability / length ** length_penalty.

Shape letters: N prompts, B beams, C candidates, V vocabulary, L tokens of the longest text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.learners.generation.decoding import Decoding
from lmtool.learners.generation.strategies import Request, Strategy

# The score of what is no text: below any log-probability, and still comparable.
_NEVER = -1e9


@dataclass
class _Ended:
    """The best ended texts of N prompts. scores_NB: normalised. tokens_NBL, lengths_NB: their tokens. there_NB: whether
    there is one."""

    scores_NB: Tensor
    tokens_NBL: Tensor
    lengths_NB: Tensor
    there_NB: Tensor

    @classmethod
    def none(cls, prompts: int, beams: int, longest: int, device: torch.device) -> _Ended:
        zeros = torch.zeros(prompts, beams, longest, dtype=torch.int64, device=device)
        scores = torch.full((prompts, beams), _NEVER, device=device)
        return cls(scores, zeros, zeros[..., 0].clone(), zeros[..., 0].bool())

    def merge(self, scores_NC: Tensor, tokens_NCL: Tensor, length: int, ended_NC: Tensor) -> None:
        """Let candidates in where they are better."""
        beams = self.scores_NB.shape[1]
        scores = torch.cat([self.scores_NB, torch.where(ended_NC, scores_NC, _NEVER)], 1)
        self.scores_NB, best_NB = scores.topk(beams)
        tokens = torch.cat([self.tokens_NBL, tokens_NCL], 1)
        self.tokens_NBL = tokens.gather(1, best_NB[..., None].expand(-1, -1, tokens.shape[2]))
        lengths = torch.cat([self.lengths_NB, torch.full_like(scores_NC, length, dtype=torch.int64)], 1)
        self.lengths_NB = lengths.gather(1, best_NB)
        self.there_NB = torch.cat([self.there_NB, ended_NC], 1).gather(1, best_NB)

    def take(self, left_M: Tensor) -> None:
        self.scores_NB, self.tokens_NBL = self.scores_NB[left_M], self.tokens_NBL[left_M]
        self.lengths_NB, self.there_NB = self.lengths_NB[left_M], self.there_NB[left_M]

    def best(self, row: int, ends: frozenset[int]) -> list[int]:
        """The tokens of a prompt's best text, without the one that ended it."""
        tokens = self.tokens_NBL[row, 0, : int(self.lengths_NB[row, 0])].tolist()
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens


class BeamSearch(Strategy):
    """`beams` texts a prompt."""

    def run(self, decoding: Decoding, request: Request) -> list[list[int]]:
        beams, ends, device = self.config.beams, frozenset(request.ends), decoding.device
        constraints, texts = self.constraints(decoding, request), [[] for _ in request.starts]  # type: ignore[var-annotated]
        ends_E = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        active, longest = list(range(len(texts))), max(request.limits)

        def scored(logits_RV: Tensor) -> Tensor:
            # The probabilities are those that the model learned: of all rows of its table, those without a token too.
            return constraints.apply(logits_RV.log_softmax(-1)[:, : decoding.vocabulary])

        log_probs_RV = scored(decoding.begin())
        candidates = max(2, 1 + len(ends)) * beams
        if candidates > log_probs_RV.shape[1]:
            raise UserError(
                f"beams={beams} asks for {candidates} candidates of {log_probs_RV.shape[1]} tokens", "give fewer beams="
            )
        # One text a prompt to begin with.
        scores_NB = torch.zeros(len(active), 1, device=device)
        tokens_NBL = torch.zeros(len(active), 1, longest, dtype=torch.int64, device=device)
        ended = _Ended.none(len(active), beams, longest, device)
        step = 0
        while True:
            prompts, wide = len(active), scores_NB.shape[1]
            sums = (scores_NB[..., None] + log_probs_RV.view(prompts, wide, -1)).flatten(1)
            sums_NC, index_NC = sums.topk(candidates)
            parent_NC, token_NC = index_NC // log_probs_RV.shape[1], index_NC % log_probs_RV.shape[1]
            tokens_NCL = tokens_NBL.gather(1, parent_NC[..., None].expand(-1, -1, longest)).clone()
            tokens_NCL[..., step] = token_NC
            step += 1
            full_N1 = torch.tensor([request.limits[number] <= step for number in active], device=device)[:, None]
            end_NC = torch.isin(token_NC, ends_E) | full_N1
            # Of candidates that end, those among the best `beams` alone count.
            counts_NC = end_NC & (torch.arange(candidates, device=device) < beams)
            ended.merge(sums_NC / step**self.config.length_penalty, tokens_NCL, step, counts_NC)
            live_NB, next_NB = (sums_NC + end_NC * _NEVER).topk(beams)
            done = (self._settled(ended, live_NB, step, active, request) | full_N1[:, 0]).tolist()
            for row, number in enumerate(active):
                if done[row]:
                    texts[number] = ended.best(row, ends)
                    for token in texts[number]:
                        request.watch(number, token)
            left = [row for row in range(prompts) if not done[row]]
            if not left:
                return texts
            left_M = torch.tensor(left, device=device)
            ended.take(left_M)
            active, next_NB, scores_NB = [active[row] for row in left], next_NB[left_M], live_NB[left_M]
            tokens_NBL = tokens_NCL[left_M].gather(1, next_NB[..., None].expand(-1, -1, longest))
            rows = (parent_NC[left_M].gather(1, next_NB) + left_M[:, None] * wide).flatten().tolist()
            chosen_R = token_NC[left_M].gather(1, next_NB).flatten()
            constraints.advance(chosen_R, rows)
            log_probs_RV = scored(decoding.advance(chosen_R, rows))

    def _settled(self, ended: _Ended, live_NB: Tensor, step: int, active: list[int], request: Request) -> Tensor:
        """(N,) whether nothing that is still searched is expected to be better than what has ended."""
        config = self.config
        lengths = [float(step)] * len(active)
        if config.early_stopping == "never" and config.length_penalty > 0:
            lengths = [float(request.limits[number]) for number in active]
        lengths_N = torch.tensor(lengths, device=live_NB.device)
        best_N1 = (live_NB[:, 0] / lengths_N**config.length_penalty)[:, None]
        worst_NB = torch.where(ended.there_NB, ended.scores_NB.amin(1, keepdim=True), _NEVER)
        settled_N = ~(best_N1 > worst_NB).any(1)
        return settled_N | ended.there_NB.all(1) if config.early_stopping is True else settled_N
