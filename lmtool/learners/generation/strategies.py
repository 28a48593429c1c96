"""Decoding strategies: greedy, sampling, and beam search.

Shape letters: N prompts, R unfinished texts, T tokens of their history, V vocabulary, K best tokens, W windows, G
tokens of an n-gram.
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
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import Decoding
from lmtool.types import receive, send

_PADDING = -1  # fills the history of texts that are shorter than others; no token has this id


class Constraints:
    """Changes the logits of a step: makes repeated tokens less likely, and excludes tokens that may not come next.

    The constraints are applied in the same order as in transformers' `generate`. prompts: the first tokens of each text
    (for an answer, its start token), whose repetition counts too. limits: maximum new tokens of each text.
    """

    def __init__(
        self,
        config: GenerationConfig,
        ends: Collection[int],
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        device: torch.device,
    ):
        self.config, self.step = config, 0
        self.ends_E = send(torch.tensor(sorted(ends), dtype=torch.int64), device) if ends else None
        self.limits_R = send(torch.tensor(limits), device) if config.forced_eos and ends else None
        self.history_RT: Tensor | None = None
        self.penalty = config.repetition_penalty or 1.0
        if config.no_repeat_ngram or self.penalty != 1.0:
            longest = max(map(len, prompts))
            rows = [[_PADDING] * (longest - len(prompt)) + [int(token) for token in prompt] for prompt in prompts]
            self.history_RT = send(torch.tensor(rows), device)

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Returns the constrained logits, or log-probabilities: -inf for tokens that may not come next."""
        if self.history_RT is not None and self.penalty != 1.0:
            logits_RV = _penalize(logits_RV, self.history_RT, self.penalty)
        if self.step < self.config.min_new_tokens and self.ends_E is not None:
            logits_RV = logits_RV.index_fill(1, self.ends_E, -torch.inf)
        if self.history_RT is not None and self.config.no_repeat_ngram:
            logits_RV = _without_repetition(logits_RV, self.history_RT, self.config.no_repeat_ngram)
        if self.limits_R is not None and self.ends_E is not None:
            is_last_R = self.limits_R == self.step + 1
            only_ends_V = torch.full_like(logits_RV[0], -torch.inf).index_fill(0, self.ends_E, 0.0)
            logits_RV = torch.where(is_last_R[:, None], only_ends_V, logits_RV)
        return logits_RV

    def advance(self, tokens_R: Tensor, rows: Sequence[int] | None = None) -> None:
        """Appends a token to each text. rows: see `Decoding.advance`."""
        self.step += 1
        rows_R = slice(None) if rows is None else send(torch.tensor(rows), tokens_R.device)
        if self.limits_R is not None:
            self.limits_R = self.limits_R[rows_R]
        if self.history_RT is not None:
            self.history_RT = torch.cat([self.history_RT[rows_R], tokens_R[:, None]], 1)


def _penalize(logits_RV: Tensor, history_RT: Tensor, penalty: float) -> Tensor:
    """Makes tokens that the text already contains less likely (Keskar et al. 2019, section 4.1; negative logits are
    multiplied, as in transformers)."""
    repeated_RV = _marked(history_RT, (history_RT != _PADDING) & (history_RT < logits_RV.shape[1]), logits_RV)
    return torch.where(repeated_RV, torch.where(logits_RV < 0, logits_RV * penalty, logits_RV / penalty), logits_RV)


def _without_repetition(logits_RV: Tensor, history_RT: Tensor, size: int) -> Tensor:
    """Excludes tokens that would repeat an n-gram (Paulus et al. 2018, section 2.5)."""
    if history_RT.shape[1] < size:
        return logits_RV
    grams_RWG = history_RT.unfold(1, size, 1)
    last_RG = history_RT[:, history_RT.shape[1] - size + 1 :]
    matches_RW = (grams_RWG[..., :-1] == last_RG[:, None]).all(-1) & (grams_RWG != _PADDING).all(-1)
    return logits_RV.masked_fill(_marked(grams_RWG[..., -1], matches_RW, logits_RV), -torch.inf)


def _marked(tokens_RT: Tensor, counts_RT: Tensor, logits_RV: Tensor) -> Tensor:
    """Returns (R, V) bool: whether a token is in a text at a place that counts."""
    texts, vocabulary = logits_RV.shape
    # Places that do not count mark a column that is left out, since selecting places would wait for the device.
    columns_RT = torch.where(counts_RT, tokens_RT, vocabulary)
    marked = torch.zeros(texts, vocabulary + 1, dtype=torch.bool, device=logits_RV.device)
    return marked.scatter_(1, columns_RT, True)[:, :vocabulary]


Watch = Callable[[int, int], None]
"""A callback that receives the index of a prompt and its next token, as soon as the token is final."""


@dataclass(frozen=True)
class Request:
    """N texts that are generated together. starts: the first tokens of each text: a decoder's prompt, or the start
    token of an answer. limits: maximum new tokens of each text. ends: the tokens that end a text. keys: (N,) int64, the
    key of each text's random numbers, see `sampling_keys`. watch: called with each new token."""

    starts: Sequence[Sequence[int]]
    limits: Sequence[int]
    ends: Collection[int]
    keys: np.ndarray
    watch: Watch


class Strategy(ABC):
    """The base class of decoding strategies, which choose the tokens of texts from the logits."""

    def __init__(self, config: GenerationConfig):
        self.config = config

    @abstractmethod
    def run(self, decoding: Decoding, request: Request) -> list[list[int]]:
        """Returns the new tokens of each text, without the token that ended the text."""

    def constraints(self, decoding: Decoding, request: Request) -> Constraints:
        """Returns the configured constraints for the texts of a request."""
        return Constraints(self.config, request.ends, request.starts, request.limits, decoding.device)


class TokenByToken(Strategy):
    """The base class of strategies that choose one token after another, without search."""

    @abstractmethod
    def choose(self, logits_RV: Tensor, keys_R: np.ndarray, step: int) -> Tensor:
        """Returns the next tokens (R,). logits_RV: -inf for tokens that may not come next. keys_R: the keys of the
        texts' random numbers. step: how many tokens were generated before."""

    def run(self, decoding: Decoding, request: Request) -> list[list[int]]:
        constraints = self.constraints(decoding, request)
        texts: list[list[int]] = [[] for _ in request.starts]
        active, step = list(range(len(texts))), 0
        unread: list[Tensor] = []
        logits_RV = decoding.read_prompts()
        while True:
            allowed_RV = constraints.apply(logits_RV[:, : decoding.vocab_size])
            tokens_R = self.choose(allowed_RV, request.keys[active], step)
            unread.append(tokens_R)
            step += 1
            # None keeps all rows, which is faster than selecting them.
            remaining = None
            if len(unread) == decoding.steps_at_once or step == min(request.limits[number] for number in active):
                rows = list(range(len(active)))
                (tokens_SR,) = decoding.receive(torch.stack(unread))
                for tokens in tokens_SR.tolist():
                    rows = [row for row in rows if tokens[row] not in request.ends]
                    for row in rows:
                        texts[active[row]].append(tokens[row])
                        request.watch(active[row], tokens[row])
                unread.clear()
                rows = [row for row in rows if step < request.limits[active[row]]]
                if not rows:
                    return texts
                if len(rows) < len(active):
                    active, tokens_R, remaining = [active[row] for row in rows], tokens_R[rows], rows
            constraints.advance(tokens_R, remaining)
            logits_RV = decoding.advance(tokens_R, remaining)


class Greedy(TokenByToken):
    """Always chooses the most probable token."""

    def choose(self, logits_RV: Tensor, keys_R: np.ndarray, step: int) -> Tensor:
        return logits_RV.argmax(-1)


class Sampling(TokenByToken):
    """Samples at a temperature from the `top_k` most probable tokens (Fan et al. 2018), or from the smallest set with
    probability `top_p` (Holtzman et al. 2020)."""

    def choose(self, logits_RV: Tensor, keys_R: np.ndarray, step: int) -> Tensor:
        uniform = random_streams.uniform_at(0, "sample", 0, keys_R, np.full(len(keys_R), step))
        uniform_R1 = send(torch.from_numpy(uniform), logits_RV.device)[:, None]
        top_k = min(self.config.top_k or logits_RV.shape[1], logits_RV.shape[1])
        values_RK, tokens_RK = logits_RV.topk(top_k)
        probabilities_RK = (values_RK.double() / self.config.temperature).softmax(-1)
        sums_RK = probabilities_RK.cumsum(-1)
        total_R1 = sums_RK[:, -1:]
        if self.config.top_p is not None:
            nucleus_RK = sums_RK - probabilities_RK < self.config.top_p
            total_R1 = (probabilities_RK * nucleus_RK).sum(-1, keepdim=True)
        index_R1 = (sums_RK <= uniform_R1 * total_R1).sum(-1, keepdim=True).clamp(max=top_k - 1)
        return tokens_RK.gather(1, index_R1)[:, 0]


def sampling_keys(seed: int, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the key of each prompt's random numbers, (N,) int64.

    A key depends only on the seed and on the tokens of the prompt, not on the other prompts. If several prompts are
    equal, each gets a different key.
    """
    occurrences: dict[int, int] = {}
    keys = np.empty(len(prompts), dtype=np.uint64)
    for number, prompt in enumerate(prompts):
        content = np.asarray(prompt, dtype="<i8").tobytes()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        occurrences[digest] = occurrences.get(digest, -1) + 1
        keys[number] = random_streams.key(seed, "sample", digest, occurrences[digest])
    return keys.view(np.int64)


# --- beam search --------------------------------------------------------------------------------------------------
#
# The results equal the results of Hugging Face's `generate`. There are at least twice as many candidates as beams, so
# that enough unfinished texts remain if the best candidates end. Finished texts are compared by
# log-probability / length ** length_penalty.
#
# Shape letters: N prompts, M prompts that remain, B beams, C candidates, R unfinished texts, V vocabulary, L tokens of
# the longest text, E end tokens.


# The score of a candidate that does not count: below any log-probability, but finite.
_INVALID = -1e9


@dataclass
class FinishedTexts:
    """The best finished texts of N prompts, at most B per prompt. scores_NB: the length-normalized log-probabilities.
    valid_NB: whether there is a text; a prompt may have fewer than B finished texts."""

    scores_NB: Tensor
    tokens_NBL: Tensor
    lengths_NB: Tensor
    valid_NB: Tensor

    @classmethod
    def empty(cls, prompts: int, beams: int, longest: int, device: torch.device) -> FinishedTexts:
        """Returns an instance without any text. longest: maximum tokens of a text."""
        zeros = torch.zeros(prompts, beams, longest, dtype=torch.int64, device=device)
        scores = torch.full((prompts, beams), _INVALID, device=device)
        return cls(scores, zeros, zeros[..., 0].clone(), zeros[..., 0].bool())

    def merge(self, scores_NC: Tensor, tokens_NCL: Tensor, length: int, finished_NC: Tensor) -> None:
        """Retains the best B of the finished texts and new candidates. scores_NC: the length-normalized
        log-probabilities of the candidates. length: the number of tokens of every candidate. finished_NC: whether a
        candidate is finished; the others are ignored."""
        beams = self.scores_NB.shape[1]
        scores = torch.cat([self.scores_NB, torch.where(finished_NC, scores_NC, _INVALID)], 1)
        self.scores_NB, best_NB = scores.topk(beams)
        tokens = torch.cat([self.tokens_NBL, tokens_NCL], 1)
        self.tokens_NBL = tokens.gather(1, best_NB[..., None].expand(-1, -1, tokens.shape[2]))
        lengths = torch.cat([self.lengths_NB, torch.full_like(scores_NC, length, dtype=torch.int64)], 1)
        self.lengths_NB = lengths.gather(1, best_NB)
        self.valid_NB = torch.cat([self.valid_NB, finished_NC], 1).gather(1, best_NB)

    def select(self, rows_M: Tensor) -> None:
        """Retains the prompts with these rows."""
        self.scores_NB, self.tokens_NBL = self.scores_NB[rows_M], self.tokens_NBL[rows_M]
        self.lengths_NB, self.valid_NB = self.lengths_NB[rows_M], self.valid_NB[rows_M]

    def best(self, row: int, ends: frozenset[int]) -> list[int]:
        """Returns the tokens of a prompt's best text, without the token that ended the text. row: the row of the
        prompt. ends: the tokens that end a text."""
        tokens_L, length = receive(self.tokens_NBL[row, 0], self.lengths_NB[row, 0])
        tokens = tokens_L[: int(length)].tolist()
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens


class BeamSearch(Strategy):
    """Beam search: continues the `beams` most probable texts of each prompt."""

    def run(self, decoding: Decoding, request: Request) -> list[list[int]]:
        beams, ends, device = self.config.beams, frozenset(request.ends), decoding.device
        constraints, texts = self.constraints(decoding, request), [[] for _ in request.starts]  # type: ignore[var-annotated]
        ends_E = send(torch.tensor(sorted(ends), dtype=torch.int64), device)
        active, longest = list(range(len(texts))), max(request.limits)

        def constrained_log_probs(logits_RV: Tensor) -> Tensor:
            # As in training, the softmax includes all rows of the table, even padding rows, which are no tokens.
            return constraints.apply(logits_RV.log_softmax(-1)[:, : decoding.vocab_size])

        log_probs_RV = constrained_log_probs(decoding.read_prompts())
        candidates = max(2, 1 + len(ends)) * beams
        if candidates > log_probs_RV.shape[1]:
            raise UserError(
                f"beams={beams} needs {candidates} candidates per step, but the vocabulary has only "
                f"{log_probs_RV.shape[1]} tokens",
                "set a smaller beams=",
            )
        # In the first step, there is one text per prompt.
        scores_NB = torch.zeros(len(active), 1, device=device)
        tokens_NBL = torch.zeros(len(active), 1, longest, dtype=torch.int64, device=device)
        finished = FinishedTexts.empty(len(active), beams, longest, device)
        step = 0
        while True:
            prompts, width = len(active), scores_NB.shape[1]
            sums = (scores_NB[..., None] + log_probs_RV.view(prompts, width, -1)).flatten(1)
            sums_NC, index_NC = sums.topk(candidates)
            parent_NC, token_NC = index_NC // log_probs_RV.shape[1], index_NC % log_probs_RV.shape[1]
            tokens_NCL = tokens_NBL.gather(1, parent_NC[..., None].expand(-1, -1, longest)).clone()
            tokens_NCL[..., step] = token_NC
            step += 1
            at_limit_N1 = send(torch.tensor([request.limits[number] <= step for number in active]), device)[:, None]
            end_NC = torch.isin(token_NC, ends_E) | at_limit_N1
            # As in transformers, a candidate that ends counts as finished only if it is among the best `beams`.
            finished_NC = end_NC & (torch.arange(candidates, device=device) < beams)
            finished.merge(sums_NC / step**self.config.length_penalty, tokens_NCL, step, finished_NC)
            unfinished_sums_NB, next_NB = (sums_NC + end_NC * _INVALID).topk(beams)
            ends_N = self._search_ends(finished, unfinished_sums_NB, step, active, request) | at_limit_N1[:, 0]
            # Of all prompts, so that the host waits once.
            parents_NB = parent_NC.gather(1, next_NB) + torch.arange(prompts, device=device)[:, None] * width
            done_N, parents_NB = decoding.receive(ends_N, parents_NB)
            is_done = done_N.tolist()
            for row, number in enumerate(active):
                if is_done[row]:
                    texts[number] = finished.best(row, ends)
                    for token in texts[number]:
                        request.watch(number, token)
            remaining = [row for row in range(prompts) if not is_done[row]]
            if not remaining:
                return texts
            rows = parents_NB[remaining].flatten().tolist()
            remaining_M = send(torch.tensor(remaining), device)
            finished.select(remaining_M)
            active = [active[row] for row in remaining]
            next_NB, scores_NB = next_NB[remaining_M], unfinished_sums_NB[remaining_M]
            tokens_NBL = tokens_NCL[remaining_M].gather(1, next_NB[..., None].expand(-1, -1, longest))
            chosen_R = token_NC[remaining_M].gather(1, next_NB).flatten()
            constraints.advance(chosen_R, rows)
            log_probs_RV = constrained_log_probs(decoding.advance(chosen_R, rows))

    def _search_ends(
        self, finished: FinishedTexts, unfinished_sums_NB: Tensor, step: int, active: list[int], request: Request
    ) -> Tensor:
        config = self.config
        lengths = [float(step)] * len(active)
        if config.early_stopping == "never" and config.length_penalty > 0:
            lengths = [float(request.limits[number]) for number in active]
        lengths_N = send(torch.tensor(lengths), unfinished_sums_NB.device)
        best_N1 = (unfinished_sums_NB[:, 0] / lengths_N**config.length_penalty)[:, None]
        worst_NB = torch.where(finished.valid_NB, finished.scores_NB.amin(1, keepdim=True), _INVALID)
        decided_N = ~(best_N1 > worst_NB).any(1)
        return decided_N | finished.valid_NB.all(1) if config.early_stopping is True else decided_N
