"""The effect of memory on text that repeats at a distance longer than a segment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.models.decoder_configs import TransformerXlConfig
from lmtool.models.heads.lm import lm_head
from lmtool.nn.cache import Carried
from lmtool.types import Packed

PERIOD, SEGMENT, LANES = 24, 8, 16


def passes(backbone, head, ids, optimizer=None):
    """Mean loss over the second half of a pass along lanes."""
    state, losses = backbone.initial_state(LANES), []
    for start in range(0, ids.shape[1] - 1 - SEGMENT, SEGMENT):
        carried = Carried(state, (start,) * LANES)
        inputs, labels = ids[:, start : start + SEGMENT], ids[:, start + 1 : start + SEGMENT + 1]
        hidden = backbone(Packed(inputs.flatten(), (SEGMENT,) * LANES), carried=carried)
        loss = head.loss_sum(hidden, backbone.embed.token.weight, labels.flatten()) / labels.numel()
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        state = {"memory": carried.after["memory"].detach()}
    return np.mean(losses[len(losses) // 2 :])


@pytest.mark.slow
def test_memory_of_a_period_lowers_the_loss_on_periodic_text():
    config = TransformerXlConfig(
        vocab_size=12, num_layers=2, hidden_size=32, num_heads=2, feedforward_size=64, dropout=0.0, max_positions=96,
        memory_length=32, clamp_distance=None, same_length=False, cutoffs=(),
    )  # fmt: skip
    backbone, generator = build(config, 0), torch.Generator().manual_seed(0)
    head = lm_head(backbone)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=3e-3)

    def text(length):
        return torch.randint(0, 12, (LANES, PERIOD), generator=generator).repeat(1, length // PERIOD)

    for _ in range(40):
        passes(backbone, head, text(240), optimizer)
    backbone.eval()
    held_out, losses = text(240), []
    for memory in (0, 8, 32):
        backbone.set_memory_length(memory)
        with torch.no_grad():
            losses.append(passes(backbone, head, held_out))
    # Without the tokens one period back, all twelve tokens are equally likely.
    assert losses[0] > 2.2 and losses[1] > 2.2 and losses[2] < 0.5 * losses[1]
