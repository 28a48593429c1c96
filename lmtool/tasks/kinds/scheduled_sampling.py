"""How many true tokens a decoder reads at a step of training, and its own ones in the place of others (Bengio et al.
2015, sections 2.2 to 2.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lmtool.generation.decoding import Decoding
from lmtool.tasks.configs import ScheduledSamplingConfig


def share_of_truth(config: ScheduledSamplingConfig, step: int) -> float:
    """The share at this step, counted from 1."""
    if config.schedule == "none":
        return 1.0
    pace = step / config.steps
    if config.schedule == "linear":
        share = 1.0 - pace
    elif config.schedule == "exponential":
        share = math.exp(-pace)
    else:
        share = config.steps / (config.steps + math.exp(min(pace, 700.0)))
    return max(config.least, share)


def read_step_by_step(
    decoding: Decoding, texts: Sequence[Sequence[int]], own: Sequence[Sequence[bool]]
) -> list[list[int]]:
    """What each of N texts reads behind its beginning, token by token: a true token, or where `own` says so the best
    one behind all that was read before. texts, own: of each text, of the same lengths."""
    read: list[list[int]] = [[] for _ in texts]
    active, step, logits_RV = list(range(len(texts))), 0, decoding.begin()
    while True:
        best = logits_RV.argmax(-1).tolist()
        rows = [row for row, number in enumerate(active) if step < len(texts[number])]
        if not rows:
            return read
        for row in rows:
            number = active[row]
            read[number].append(best[row] if own[number][step] else texts[number][step])
        left = rows if len(rows) < len(active) else None
        active = [active[row] for row in rows]
        tokens_R = torch.tensor([read[number][step] for number in active], device=decoding.device)
        logits_RV, step = decoding.advance(tokens_R, left), step + 1
