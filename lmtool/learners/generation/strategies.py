"""How the next tokens are chosen: the best one, a drawn one, or by search over beams (beam.py).

Shape letters: N prompts, R texts under way, V vocabulary, K best tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtool import random_streams
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import Decoding

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


Watch = Callable[[int, int], None]
"""Takes the number of a prompt and its next token, as soon as that is certain."""


@dataclass(frozen=True)
class Request:
    """N prompts that are generated together.

    starts: the tokens that each text begins with. limits: tokens of each text, at most. ends: tokens that end a text.
    keys: (N,) int64, of each prompt's draws. watch: takes the tokens.
    """

    starts: Sequence[Sequence[int]]
    limits: Sequence[int]
    ends: Collection[int]
    keys: np.ndarray
    watch: Watch


class Strategy(ABC):
    """One way to generate."""

    def __init__(self, config: GenerationConfig):
        self.config = config

    @abstractmethod
    def run(self, decoding: Decoding, request: Request) -> list[list[int]]:
        """The new tokens of each prompt, without the token that ended it."""

    def constraints(self, decoding: Decoding, request: Request) -> Constraints:
        return Constraints(self.config, request.ends, request.starts, request.limits, decoding.device)


class TokenByToken(Strategy):
    """The base of those that choose a token of each text and never come back to it."""

    @abstractmethod
    def choose(self, logits_RV: Tensor, keys_R: np.ndarray, step: int) -> Tensor:
        """(R,) tokens. keys_R: of the texts' draws. step: tokens of the text so far."""

    def run(self, decoding: Decoding, request: Request) -> list[list[int]]:
        constraints = self.constraints(decoding, request)
        texts: list[list[int]] = [[] for _ in request.starts]
        active, step = list(range(len(texts))), 0
        logits_RV = decoding.begin()
        while True:
            allowed_RV = constraints.apply(logits_RV[:, : decoding.vocabulary])
            tokens_R = self.choose(allowed_RV, request.keys[active], step)
            step += 1
            rows = []
            for row, (number, token) in enumerate(zip(active, tokens_R.tolist(), strict=True)):
                if token in request.ends:
                    continue
                texts[number].append(token)
                request.watch(number, token)
                if step < request.limits[number]:
                    rows.append(row)
            if not rows:
                return texts
            left = None
            if len(rows) < len(active):
                active, tokens_R, left = [active[row] for row in rows], tokens_R[rows], rows
            constraints.advance(tokens_R, left)
            logits_RV = decoding.advance(tokens_R, left)


class Greedy(TokenByToken):
    """The best token each time."""

    def choose(self, logits_RV: Tensor, keys_R: np.ndarray, step: int) -> Tensor:
        return logits_RV.argmax(-1)


class Sampling(TokenByToken):
    """Drawn at a temperature, of the best `top_k` (Fan et al. 2018) or of the fewest that have `top_p` of the
    probability (Holtzman et al. 2020)."""

    def choose(self, logits_RV: Tensor, keys_R: np.ndarray, step: int) -> Tensor:
        uniform = random_streams.uniform_at(0, "sample", 0, keys_R, np.full(len(keys_R), step))
        uniform_R1 = torch.from_numpy(uniform).to(logits_RV.device)[:, None]
        best = min(self.config.top_k or logits_RV.shape[1], logits_RV.shape[1])
        values_RK, tokens_RK = logits_RV.topk(best)
        shares_RK = (values_RK.double() / self.config.temperature).softmax(-1)
        sums_RK = shares_RK.cumsum(-1)
        total_R1 = sums_RK[:, -1:]
        if self.config.top_p is not None:
            kept_RK = sums_RK - shares_RK < self.config.top_p
            total_R1 = (shares_RK * kept_RK).sum(-1, keepdim=True)
        place_R1 = (sums_RK <= uniform_R1 * total_R1).sum(-1, keepdim=True).clamp(max=best - 1)
        return tokens_RK.gather(1, place_R1)[:, 0]


def draw_keys(seed: int, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """(N,) int64: the key of each prompt's draws, a function of the seed and of the prompt itself, so that neither its
    place nor its company matters. The same prompt again draws anew."""
    seen: dict[int, int] = {}
    keys = np.empty(len(prompts), dtype=np.uint64)
    for number, prompt in enumerate(prompts):
        content = np.asarray(prompt, dtype="<i8").tobytes()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        seen[digest] = seen.get(digest, -1) + 1
        keys[number] = random_streams.key(seed, "sample", digest, seen[digest])
    return keys.view(np.int64)
