"""How many true tokens a decoder reads at a step of training (Bengio et al. 2015, section 2.4)."""

from __future__ import annotations

import math

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
