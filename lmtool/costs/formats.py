"""How a run computes, as far as bytes go."""

from __future__ import annotations

from dataclasses import dataclass

# A value in fp32: of weights, of the residual stream, of what norms read.
VALUE_BYTES = 4


@dataclass(frozen=True)
class Formats:
    """How a run computes. half: bf16 or fp16 products. cuda: on such a device, where attention runs in the type of the
    products, by a variable-length kernel where it can. recomputes: whether layers keep their input alone."""

    half: bool = False
    cuda: bool = False
    recomputes: bool = False

    @property
    def product(self) -> int:
        """Bytes of an element that a product reads."""
        return 2 if self.half else VALUE_BYTES

    @property
    def attention(self) -> int:
        """Of one that attention reads: on a CPU it is fp32, see `nn.tiled`."""
        return self.product if self.cuda else VALUE_BYTES
