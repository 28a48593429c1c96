"""Soft prompts (Lester et al. 2021): virtual tokens of the input learn.

Shape letters: P virtual tokens, E width of the token vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.models.base import Backbone
from lmtool.nn.initialization import generator_for
from lmtool.nn.virtual import VirtualTokens
from lmtool.streams import Permutation
from lmtool.tuning.base import TuningMethod, freeze
from lmtool.tuning.initial import made_for
from lmtool.types import ParameterGroup

NAME = "backbone.embed.virtual."
POPULATION = 5000
"""The published code draws from as many first entries of T5's vocabulary, which is ordered by frequency; learned
vocabularies are nearly so, in the order of their merges."""
# Entries without a text of their own: [unused7], <extra_id_0>, <0x0A>.
_PLACEHOLDER = re.compile(r"[\[<].+[\]>]")


class PromptTuning(TuningMethod):
    """Virtual tokens, and the heads of what is learned."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        embed, after = learner.backbone.embed, tokens_before(learner.backbone)
        width = embed.token.weight.shape[1]
        embed.virtual = made_for(learner, VirtualTokens, self.config.length, width, after)
        with torch.no_grad():
            if not embed.virtual.weight.is_meta:
                embed.virtual.weight.copy_(self._initial(learner, seed))

    def _initial(self, learner: BaseLearner, seed: int) -> Tensor:
        """(P, E). Where only weights are loaded there is no tokenizer, and zeros do."""
        backbone, count = learner.backbone, self.config.length
        width, tokenizer = backbone.embed.token.weight.shape[1], getattr(learner, "tokenizer", None)
        if self.config.init == "random":
            return torch.empty(count, width).uniform_(-0.5, 0.5, generator=generator_for(seed, f"{NAME}weight"))
        if tokenizer is None:
            return torch.zeros(count, width)
        labels = label_vectors(learner)[:count] if self.config.init == "class_labels" else []
        drawn = drawn_from_vocabulary(tokenizer, backbone.embed.token.num_embeddings, count - len(labels), seed)
        device = backbone.embed.token.weight.device
        return torch.cat([*labels, backbone.embed.tokens(torch.from_numpy(drawn).to(device))])

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        """The prompt at a rate of the size of the token vectors, the heads at a share of the schedule's."""
        groups, rate = decayed_groups(learner), vector_size(learner.backbone)
        prompt = [pair for group in groups for pair in group.parameters if pair[0].startswith(NAME)]
        for group in groups:
            group.parameters = [pair for pair in group.parameters if not pair[0].startswith(NAME)]
            group.learning_rate_scale = self.config.head_scale
        return [ParameterGroup("prompt", prompt, rate), *(group for group in groups if group.parameters)]


def tokens_before(backbone: Backbone) -> int:
    """How many tokens of a text stand before its virtual ones: none, but for an encoder the first. Its state stands for
    the text, and at another position than the pretrained one it is another's."""
    return 1 if backbone.config.architecture == "encoder" else 0


def vector_size(backbone: Backbone) -> float:
    """The root mean square of what the token vectors hold, at most 1. The published rate is for T5, whose vectors hold
    more than that; on BERT's, twenty times as small, its first step would leave nothing of what a prompt begins as."""
    weight = backbone.embed.token.weight.detach()
    if weight.is_meta:
        return 1.0
    size = float(weight.norm()) / math.sqrt(weight.numel()) * backbone.embed.scale
    return min(1.0, float(f"{size:.3g}"))  # to digits that every device gives


def drawn_from_vocabulary(tokenizer: Any, rows: int, count: int, seed: int) -> np.ndarray:
    """(count,) ids of entries with a text among the first `POPULATION`, each drawn once before one comes again. rows:
    of the token table."""
    ids = range(min(tokenizer.vocab_size, rows))
    pieces = zip(ids, tokenizer.pieces(ids), strict=True)
    texts = [
        number
        for number, piece in pieces
        if piece and number not in tokenizer.special_ids and not _PLACEHOLDER.fullmatch(piece)
    ]
    frequent = np.array(texts[:POPULATION], dtype=np.int64)
    order = Permutation(len(frequent), seed, "init", 0)(np.arange(len(frequent)))
    return frequent[order[np.arange(count) % len(frequent)]]


def label_vectors(learner: BaseLearner) -> Sequence[Tensor]:
    """(1, E) for each label of the task: the mean vector of its tokens (Lester et al. 2021, 3.2). UserError where the
    labels are not known."""
    labels = getattr(learner.config, "labels", None)
    if not labels:
        raise UserError("tuning.init=class_labels: the task names no labels", "give tuning.init=vocabulary")
    embed = learner.backbone.embed
    device = embed.token.weight.device
    tokens = [torch.from_numpy(np.asarray(learner.tokenizer.encode(label.replace("_", " ")))) for label in labels]
    return [embed.tokens(ids.to(device, torch.int64)).mean(0, keepdim=True) for ids in tokens if len(ids)]
