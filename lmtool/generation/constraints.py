"""What a text may not become: too short, repetitive, or without an end.

Shape letters: R texts under way, V vocabulary, T tokens so far, G size of an n-gram.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lmtool.generation.configs import GenerationConfig

_NONE = -1  # stands before texts that are shorter than others


class Constraints:
    """Keeps what the texts are so far, where that matters. ends: tokens that end a text. prompts: what the texts begin
    with, which counts for repetition: of an answer its start token. limits: tokens of each text, at most.

    What applies, and in which order, is as in transformers' `generate`."""

    def __init__(
        self,
        config: GenerationConfig,
        ends: Collection[int],
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        device: torch.device,
    ):
        self.config, self.ends, self.step = config, sorted(ends), 0
        self.limits_R = torch.tensor(limits, device=device) if config.forced_eos and ends else None
        self.history_RT: Tensor | None = None
        self.penalty = config.repetition_penalty or 1.0
        if config.no_repeat_ngram or self.penalty != 1.0:
            longest = max(map(len, prompts))
            rows = [[_NONE] * (longest - len(prompt)) + [int(token) for token in prompt] for prompt in prompts]
            self.history_RT = torch.tensor(rows, device=device)

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Logits, or log-probabilities, with those at -inf that may not come next."""
        if self.history_RT is not None and self.penalty != 1.0:
            logits_RV = _penalized(logits_RV, self.history_RT, self.penalty)
        if self.step < self.config.min_new_tokens and self.ends:
            logits_RV = logits_RV.clone()
            logits_RV[:, self.ends] = -torch.inf
        if self.history_RT is not None and self.config.no_repeat_ngram:
            logits_RV = _without_repetition(logits_RV, self.history_RT, self.config.no_repeat_ngram)
        if self.limits_R is not None:
            last_R = self.limits_R == self.step + 1
            ended_V = torch.full_like(logits_RV[0], -torch.inf)
            ended_V[self.ends] = 0.0
            logits_RV = torch.where(last_R[:, None], ended_V, logits_RV)
        return logits_RV

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> None:
        """The texts have a token more; rows: as in `Decoding.advance`."""
        self.step += 1
        from_R = slice(None) if rows is None else torch.tensor(rows, device=tokens_R.device)
        if self.limits_R is not None:
            self.limits_R = self.limits_R[from_R]
        if self.history_RT is not None:
            self.history_RT = torch.cat([self.history_RT[from_R], tokens_R[:, None]], 1)


def _penalized(logits_RV: Tensor, history_RT: Tensor, penalty: float) -> Tensor:
    """Tokens that the text has are less probable (Keskar et al. 2019, section 4.1; negative logits as transformers)."""
    seen_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
    row, place = ((history_RT != _NONE) & (history_RT < logits_RV.shape[1])).nonzero(as_tuple=True)
    seen_RV[row, history_RT[row, place]] = True
    return torch.where(seen_RV, torch.where(logits_RV < 0, logits_RV * penalty, logits_RV / penalty), logits_RV)


def _without_repetition(logits_RV: Tensor, history_RT: Tensor, size: int) -> Tensor:
    """Tokens that would end an n-gram of `size` tokens that the text has already are at -inf (Paulus et al. 2018,
    section 2.5)."""
    if history_RT.shape[1] < size:
        return logits_RV
    grams_RWG = history_RT.unfold(1, size, 1)
    last_RG = history_RT[:, history_RT.shape[1] - size + 1 :]
    again_RW = (grams_RWG[..., :-1] == last_RG[:, None]).all(-1) & (grams_RWG != _NONE).all(-1)
    row, window = again_RW.nonzero(as_tuple=True)
    logits_RV = logits_RV.clone()
    logits_RV[row, grams_RWG[row, window, -1]] = -torch.inf
    return logits_RV
