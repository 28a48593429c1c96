"""Text from a model: prompts in, tokens out, in batches over one cache.

Prompts of about equal length are generated together; what comes out is what each would give alone.


"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lmtool.errors import UserError
from lmtool.learners.generation.beam import BeamSearch
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import Continuation, Decoding, EncoderDecoderDecoding
from lmtool.learners.generation.strategies import Greedy, Request, Sampling, Strategy, Watch, draw_keys
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead

BATCH_TOKENS = 8192


def strategy_of(config: GenerationConfig) -> Strategy:
    """The one that the configuration asks for."""
    if config.beams > 1:
        return BeamSearch(config)
    return Sampling(config) if config.temperature > 0 else Greedy(config)


def _nobody(number: int, token: int) -> None:
    """Watches nothing."""


@torch.no_grad()
def generate(
    backbone: Backbone,
    head: LMHead,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    ends: Collection[int] = (),
    start: int | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    prefix: bool = False,
    watch: Watch = _nobody,
) -> list[list[int]]:
    """The new tokens of each prompt: what a decoder adds to it, what an encoder-decoder answers.

    ends: tokens that end a text; the one met is no part of it. start: the token that an answer begins with, of an
    encoder-decoder. vocabulary: rows of the table that stand for tokens; None: all. seed: of the draws, which depend
    on it and on the prompt alone. batch_tokens: kept in the cache at a time, about. prefix: whether all of a prompt
    sees all of it, on a decoder that learned so. watch: takes each token as soon as it is certain.
    A text ends where the model is full. UserError for a prompt without tokens, and for one that leaves no room.
    """
    strategy, space = strategy_of(config), Space(backbone, start)
    for prompt in prompts:
        space.require_room(len(prompt))
    keys = draw_keys(seed, prompts)
    limits = [space.limit(len(prompt), config.max_new_tokens) for prompt in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    with _evaluating(backbone):
        for group in _groups(prompts, limits, config.beams, batch_tokens):
            chosen = [[int(token) for token in prompts[number]] for number in group]
            own = [limits[number] for number in group]
            rows = vocabulary or backbone.config.vocab_size
            decoding = space.decoding(head, rows, chosen, max(own), prefix)
            starts = chosen if start is None else [[start]] * len(group)
            request = Request(starts, own, frozenset(ends), keys[group], _numbered(watch, group))
            for number, text in zip(group, strategy.run(decoding, request), strict=True):
                texts[number] = text
    return texts


class Space:
    """How long texts of a model may be. start: as in `generate`."""

    def __init__(self, backbone: Backbone, start: int | None = None):
        self.backbone, self.start = backbone, start

    def limit(self, length: int, new: int) -> int:
        """Tokens behind a prompt of this length, of `new` at most."""
        if isinstance(self.backbone, EncoderDecoder):
            return min(new, self.backbone.longest_answer)
        return min(new, self.backbone.longest_text - length)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that leaves room for one more."""
        return self.backbone.longest_text - (not isinstance(self.backbone, EncoderDecoder))

    def require_room(self, length: int) -> None:
        """UserError for a prompt without tokens, and for one that leaves no room."""
        if not length:
            raise UserError("the prompt has no tokens", "give a text")
        if length > self.longest_prompt:
            raise UserError(
                f"the prompt has {length} tokens; the model has room for {self.longest_prompt}", "give a shorter one"
            )

    def decoding(
        self, head: LMHead, vocabulary: int, prompts: Sequence[Sequence[int]], limit: int, prefix: bool
    ) -> Decoding:
        """The prompts over a new cache."""
        if isinstance(self.backbone, EncoderDecoder):
            if self.start is None:
                raise ValueError("an encoder-decoder's answer begins with a start token; none is given")
            return EncoderDecoderDecoding(self.backbone, head, vocabulary, prompts, self.start, limit)
        assert isinstance(self.backbone, Decoder)
        capacity = min(max(map(len, prompts)) + limit, self.backbone.longest_text)
        return Continuation(self.backbone, head, vocabulary, prompts, capacity, prefix)


@contextmanager
def _evaluating(backbone: nn.Module) -> Iterator[None]:
    was_training = backbone.training
    backbone.eval()
    try:
        yield
    finally:
        backbone.train(was_training)


def _groups(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], beams: int, batch_tokens: int
) -> Iterator[list[int]]:
    """Numbers of prompts that are generated together: of about equal length, and within `batch_tokens`."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    group: list[int] = []
    for number in order:
        row = (len(prompts[number]) + limits[number]) * beams
        if group and row * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _numbered(watch: Watch, group: list[int]) -> Watch:
    return lambda row, token: watch(group[row], token)
