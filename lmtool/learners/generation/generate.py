"""Text generation in batches, with a key/value cache: from the tokens of prompts to the tokens of generated texts.

Prompts of similar length are processed together. Each text is the same as if its prompt were processed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import ContinuationDecoding, Decoding, EncoderDecoderDecoding, groups_by_length
from lmtool.learners.generation.strategies import BeamSearch, Greedy, Request, Sampling, Strategy, Watch, sampling_keys
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.nn.linear import divided_products

NO_TEXTS: Mapping[int, list[int]] = MappingProxyType({})
BATCH_TOKENS = 8192
"""Approximate number of tokens in the cache at a time, by default."""


def strategy_of(config: GenerationConfig) -> Strategy:
    """Returns the decoding strategy that a configuration selects."""
    if config.beams > 1:
        return BeamSearch(config)
    return Sampling(config) if config.temperature > 0 else Greedy(config)


def _ignore(*values: object) -> None:
    """Ignores what was generated; the default of `watch` and `keep`."""


@dataclass(frozen=True)
class GenerativeModel:
    """A decoder or an encoder-decoder with its language-model head, which generates text.

    ends: the tokens that end a text; they are not part of the text. start: the first token of an encoder-decoder's
    answer; None for a decoder. vocab_size: the number of rows of the token table that are tokens; None means all rows.
    bidirectional_prompt: whether a decoder's attention within the prompt is bidirectional (prefix LM).
    """

    backbone: Backbone
    head: LMHead
    ends: Collection[int] = ()
    start: int | None = None
    vocab_size: int | None = None
    bidirectional_prompt: bool = False

    def limit(self, length: int, max_new_tokens: int) -> int:
        """Returns how many new tokens, at most `max_new_tokens`, fit after a prompt of `length` tokens."""
        if isinstance(self.backbone, EncoderDecoder):
            return min(max_new_tokens, self.backbone.longest_answer)
        return min(max_new_tokens, self.backbone.longest_text - length)

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt, so that at least one new token fits after it."""
        # The answer of an encoder-decoder takes no positions from its prompt.
        return self.backbone.longest_text - (not isinstance(self.backbone, EncoderDecoder))

    def require_capacity(self, length: int) -> None:
        """Raises UserError if a prompt is empty, or if no new token fits after it. length: tokens of the prompt."""
        if not length:
            raise UserError("the prompt is empty: it has no tokens", "write a text as the prompt")
        if length > self.longest_prompt:
            raise UserError(
                f"the prompt has {length} tokens, more than the maximum of {self.longest_prompt}",
                "use a shorter prompt",
            )

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        seed: int = 0,
        batch_tokens: int = BATCH_TOKENS,
        watch: Watch = _ignore,
        finished: Mapping[int, list[int]] = NO_TEXTS,
        keep: Callable[[Mapping[int, list[int]]], None] = _ignore,
    ) -> list[list[int]]:
        """Returns the new tokens for each prompt: a decoder's continuation, or an encoder-decoder's answer.

        Args:
            prompts: The token ids of each prompt.
            config: How tokens are chosen, and how many at most. A text also ends at the last position of the model.
            seed: The seed of sampling. A sampled text depends only on the seed and on its prompt.
            batch_tokens: Approximate number of tokens in the cache at a time.
            watch: Called with the index of a prompt and a token, for each token as soon as it is final.
            finished: The new tokens of texts that an earlier call finished, by the index of the prompt.
            keep: Called with the new tokens of texts by the index of the prompt, as soon as a batch is finished.

        Raises:
            UserError: A prompt is empty or too long.
        """
        strategy = strategy_of(config)
        for prompt in prompts:
            self.require_capacity(len(prompt))
        keys = sampling_keys(seed, prompts)
        limits = [self.limit(len(prompt), config.max_new_tokens) for prompt in prompts]
        texts: list[list[int]] = [[] for _ in prompts]
        lengths = list(map(len, prompts))
        sizes = [(length + limit) * config.beams for length, limit in zip(lengths, limits, strict=True)]
        with _evaluation_mode(self.backbone), divided_products():
            for group in groups_by_length(lengths, sizes, batch_tokens):
                # Only whole batches are left out, so that the others are the same as without a stop.
                if all(number in finished for number in group):
                    for number in group:
                        texts[number] = finished[number]
                    continue
                batch = [[int(token) for token in prompts[number]] for number in group]
                batch_limits = [limits[number] for number in group]
                starts = batch if self.start is None else [[self.start]] * len(group)
                request = Request(starts, batch_limits, frozenset(self.ends), keys[group], _with_indices(watch, group))
                decoding = self.decoding(batch, max(batch_limits))
                written = dict(zip(group, strategy.run(decoding, request), strict=True))
                for number, text in written.items():
                    texts[number] = text
                keep(written)
        return texts

    def decoding(self, prompts: Sequence[Sequence[int]], limit: int) -> Decoding:
        """Returns the state of decoding for a batch of prompts. limit: maximum new tokens of a text."""
        vocab_size = self.vocab_size or self.backbone.config.vocab_size
        if isinstance(self.backbone, EncoderDecoder):
            if self.start is None:
                raise ValueError("an encoder-decoder's answer begins with a start token; start is None")
            return EncoderDecoderDecoding(self.backbone, self.head, vocab_size, prompts, self.start, limit)
        assert isinstance(self.backbone, Decoder)
        capacity = min(max(map(len, prompts)) + limit, self.backbone.longest_text)
        return ContinuationDecoding(self.backbone, self.head, vocab_size, prompts, capacity, self.bidirectional_prompt)


@contextmanager
def _evaluation_mode(backbone: nn.Module) -> Iterator[None]:
    was_training = backbone.training
    backbone.eval()
    try:
        yield
    finally:
        backbone.train(was_training)


def _with_indices(watch: Watch, group: list[int]) -> Watch:
    return lambda row, token: watch(group[row], token)
