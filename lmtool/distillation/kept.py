"""What a tap keeps of the forwards of a step.

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from lmtool.nn.attended import Attended
from lmtool.nn.context import AttentionKind, TakesAttended
from lmtool.nn.stack import Place, Tap


class Kept(Tap):
    """Keeps the states at some places, and what self-attentions in the layers before others compute with: by place,
    those of each forward of a stack, in their order."""

    def __init__(self, states: Collection[Place] = (), attention: Collection[Place] = ()):
        self.states: dict[Place, list[Tensor]] = {place: [] for place in states}
        self.attended: dict[Place, list[Attended]] = {place: [] for place in attention}

    def wants(self, place: Place) -> bool:
        return place in self.states

    def __call__(self, place: Place, x_TH: Tensor) -> Tensor:
        self.states[place].append(x_TH)
        return x_TH

    def tokens(self, place: Place) -> list[int]:
        """How many tokens each forward had at a place."""
        states = [len(x_TH) for x_TH in self.states.get(place, ())]
        return states + [len(attended.q_TAD) for attended in self.attended.get(place, ())]

    def attention(self, place: Place, kind: AttentionKind) -> TakesAttended | None:
        return self.attended[place].append if kind == "self_attn" and place in self.attended else None
