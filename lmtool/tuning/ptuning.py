"""P-tuning: virtual tokens behind an encoder that learns with them (Liu et al. 2021), or prompts in every layer (Liu et
al. 2022).

Shape letters: P virtual tokens, E width of the token vectors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner
from lmtool.nn.virtual import VirtualTokens
from lmtool.tuning.base import TuningMethod, freeze
from lmtool.tuning.configs import PromptConfig
from lmtool.tuning.initial import draw_as_torch, made_for
from lmtool.tuning.prefix import add_prefixes
from lmtool.tuning.prompt import NAME, tokens_before


class EncodedTokens(VirtualTokens):
    """Virtual tokens that are computed: `weight` through an encoder, whose widths are that of the token vectors.

    lstm: two layers in both directions, half the width each, and two maps with a ReLU between them. mlp: three maps
    with ReLUs between them.
    """

    def __init__(self, count: int, width: int, after: int, lstm: bool):
        super().__init__(count, width, after)
        half, first = width // 2, 2 * (width // 2) if lstm else width
        self.lstm = nn.LSTM(width, half, num_layers=2, bidirectional=True) if lstm else None
        self.maps = nn.ModuleList(nn.Linear(first if number == 0 else width, width) for number in range(3 - lstm))

    def vectors(self) -> Tensor:
        # In full precision, as what it is folded to.
        with torch.autocast(self.weight.device.type, enabled=False):
            x_PE = self.weight if self.lstm is None else self.lstm(self.weight)[0]
            for number, part in enumerate(self.maps):
                x_PE = part(torch.relu(x_PE) if number else x_PE)
            return x_PE


class PTuning(TuningMethod):
    """The prompts and their encoder, and the heads of what is learned."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        config, embed = self.config, learner.backbone.embed
        if config.deep:
            add_prefixes(learner, seed, config.length, None)
            return
        width, after = embed.token.weight.shape[1], tokens_before(learner.backbone)
        embed.virtual = made_for(learner, EncodedTokens, config.length, width, after, config.encoder == "lstm")
        draw_as_torch(embed.virtual, seed, NAME)

    @torch.no_grad()
    def fold(self, learner: BaseLearner) -> Any:
        """The encoder by what it computes: soft prompts."""
        embed = learner.backbone.embed
        if self.config.deep or embed.virtual is None:
            return self.config
        vectors_PE, after = embed.virtual.vectors(), embed.virtual.after
        folded = made_for(learner, VirtualTokens, *vectors_PE.shape, after)
        folded.weight.copy_(vectors_PE)
        embed.virtual = folded
        learner.added = frozenset({f"{NAME}weight"})
        return PromptConfig(length=len(vectors_PE))
