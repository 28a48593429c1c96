"""What a text may not become: too short, or repetitive.

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
    with, which counts for repetition: of an answer its start token."""

    def __init__(
        self, config: GenerationConfig, ends: Collection[int], prompts: Sequence[Sequence[int]], device: torch.device
    ):
        self.config, self.ends, self.step = config, sorted(ends), 0
        self.history_RT: Tensor | None = None
        if config.no_repeat_ngram:
            longest = max(map(len, prompts))
            rows = [[_NONE] * (longest - len(prompt)) + [int(token) for token in prompt] for prompt in prompts]
            self.history_RT = torch.tensor(rows, device=device)

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Logits, or log-probabilities, with those at -inf that may not come next."""
        if self.step < self.config.min_new_tokens and self.ends:
            logits_RV = logits_RV.clone()
            logits_RV[:, self.ends] = -torch.inf
        if self.history_RT is not None:
            logits_RV = _without_repetition(logits_RV, self.history_RT, self.config.no_repeat_ngram)
        return logits_RV

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> None:
        """The texts have a token more; rows: as in `Decoding.advance`."""
        self.step += 1
        if self.history_RT is not None:
            before_RT = self.history_RT if rows is None else self.history_RT[torch.tensor(rows)]
            self.history_RT = torch.cat([before_RT, tokens_R[:, None]], 1)


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
