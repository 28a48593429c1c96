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

from lmtool import streams
from lmtool.generation.configs import GenerationConfig
from lmtool.generation.constraints import Constraints
from lmtool.generation.decoding import Decoding

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
        uniform = streams.uniform_at(0, "sample", 0, keys_R, np.full(len(keys_R), step))
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
        keys[number] = streams.key(seed, "sample", digest, seen[digest])
    return keys.view(np.int64)
