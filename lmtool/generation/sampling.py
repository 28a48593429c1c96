"""Text token by token: greedy, or drawn at a temperature from the best few. A decoder continues a text, an
encoder-decoder answers one.

Shape letters: T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lmtool.errors import NotFinite, UserError
from lmtool.heads.lm import LMHead
from lmtool.models.base import Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.streams import key
from lmtool.types import Packed

Step = Callable[[int | None], Tensor]
"""Takes the token chosen last (None at first), gives the logits (V,) of the next one."""


@torch.no_grad()
def generate(
    backbone: Decoder,
    head: LMHead,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
) -> list[int]:
    """The tokens a decoder adds to the prompt, without the prompt.

    temperature: 0 takes the best token each time; otherwise logits are divided by it. top_k: draw from the best k
    only (Fan et al. 2018). stop: tokens that end the text; the one met is not part of the result. Draws come from a
    generator of the stream "sample", so the same seed gives the same text. Where text and prompt outgrow
    the longest the model reads, the older half is forgotten.
    """
    if not len(prompt_ids):
        raise UserError("the prompt has no tokens", "give a text, or start from the end-of-text token")
    with _evaluating(backbone):
        step = _continuation(backbone, head, [int(one) for one in prompt_ids])
        return _drawn(step, max_new_tokens, temperature, top_k, seed, stop)


@torch.no_grad()
def answer(
    backbone: EncoderDecoder,
    head: LMHead,
    input_ids: Sequence[int],
    start: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
) -> list[int]:
    """The tokens an encoder-decoder gives to its input, without the first, `start`: the token of the family's
    `start_role`. At most as many as the model reads; the rest as in `generate`. The encoder runs once."""
    if not len(input_ids):
        raise UserError("the input has no tokens", "give a text")
    limit = min(max_new_tokens, backbone.longest_answer)
    with _evaluating(backbone):
        return _drawn(_answering(backbone, head, input_ids, start, limit), limit, temperature, top_k, seed, stop)


@contextmanager
def _evaluating(backbone: nn.Module) -> Iterator[None]:
    was_training = backbone.training
    backbone.eval()
    try:
        yield
    finally:
        backbone.train(was_training)


def _continuation(backbone: Decoder, head: LMHead, ids: list[int]) -> Step:
    """The next token of a text. ids: the text so far, which grows."""
    device, window = backbone.embed.token.weight.device, backbone.longest_text
    pending, cache = ids[-window:], backbone.new_cache(1, window)

    def step(chosen: int | None) -> Tensor:
        nonlocal pending, cache
        if chosen is not None:
            ids.append(chosen)
            pending = [chosen]
        if cache.lengths[0] + len(pending) > cache.capacity:
            pending, cache = ids[-max(window // 2, 1) :], backbone.new_cache(1, window)
        hidden_TH = backbone(Packed(torch.tensor(pending, device=device), (len(pending),)), cache=cache)
        return head(hidden_TH[-1:], backbone.embed.token.weight)[0]

    return step


def _answering(backbone: EncoderDecoder, head: LMHead, input_ids: Sequence[int], start: int, limit: int) -> Step:
    """The next token of an answer of at most `limit` tokens."""
    table_VH = backbone.embed.token.weight
    inputs_T = torch.tensor([int(one) for one in input_ids], device=table_VH.device)
    state = backbone.encode(Packed(inputs_T, (len(inputs_T),)))
    cache = backbone.new_cache(1, limit)

    def step(chosen: int | None) -> Tensor:
        pending_T = torch.tensor([start if chosen is None else chosen], device=table_VH.device)
        hidden_TH = backbone.decode(state, Packed(pending_T, (1,)), cache=cache)
        return head(hidden_TH, table_VH)[0]

    return step


def _drawn(
    step: Step, max_new_tokens: int, temperature: float, top_k: int | None, seed: int, stop: Collection[int]
) -> list[int]:
    generator = torch.Generator().manual_seed(key(seed, "sample") & (2**63 - 1))
    new: list[int] = []
    while len(new) < max_new_tokens:
        logits_V = step(new[-1] if new else None)
        if not bool(torch.isfinite(logits_V).all()):
            raise NotFinite("predictions")
        chosen = _choose(logits_V.float().cpu(), temperature, top_k, generator)
        if chosen in stop:
            break
        new.append(chosen)
    return new


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax())
    values, indices = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    drawn = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return int(indices[drawn])
