"""Continue a text token by token: greedy, or drawn at a temperature from the best few.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.heads.lm import LMHead
from lmtool.models.base import Decoder
from lmtool.streams import key
from lmtool.types import Packed


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
    `max_positions`, the older half is forgotten.
    """
    if not len(prompt_ids):
        raise UserError("the prompt has no tokens", "give a text, or start from the end-of-text token")
    generator = torch.Generator().manual_seed(key(seed, "sample") & (2**63 - 1))
    device = backbone.embed.token.weight.device
    window = backbone.config.max_positions
    was_training = backbone.training
    backbone.eval()
    try:
        ids, new = [int(one) for one in prompt_ids], 0
        pending, cache = ids[-window:], backbone.new_cache(1, window)
        while new < max_new_tokens:
            if cache.lengths[0] + len(pending) > window:
                pending, cache = ids[-max(window // 2, 1) :], backbone.new_cache(1, window)
            tokens_T = torch.tensor(pending, device=device)
            hidden_TH = backbone(Packed(tokens_T, (len(pending),)), cache=cache)
            logits_V = head(hidden_TH[-1:], backbone.embed.token.weight)[0]
            chosen = _choose(logits_V.float().cpu(), temperature, top_k, generator)
            if chosen in stop:
                break
            ids.append(chosen)
            pending, new = [chosen], new + 1
        return ids[len(ids) - new :]
    finally:
        backbone.train(was_training)


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax())
    values, indices = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    drawn = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return int(indices[drawn])
