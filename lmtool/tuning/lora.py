"""LoRA and (IA)3: tuning methods that replace linear maps of the layers by maps with added parameters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner
from lmtool.nn.blocks import CrossLayer
from lmtool.nn.context import Context
from lmtool.nn.dropout import Dropout, name_dropouts
from lmtool.nn.initialization import generator_for
from lmtool.tuning.base import TuningMethod, freeze, layers, learn_biases, linears
from lmtool.tuning.configs.methods import LoraConfig

# An edited linear map has parameters named `weight` and `bias`, like the map that it replaces, so that checkpoint names
# do not change.


class EditedLinear(nn.Linear):
    """A linear map with added parameters. It uses the parameters of `base` without copying them."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias

    @abstractmethod
    def fold(self) -> None:
        """Merges the added parameters into `weight` and `bias`, in place. Called once, without gradients."""

    def plain(self) -> nn.Linear:
        """Returns a linear map with the same `weight` and `bias` and without the added parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear


def edit_linears(
    learner: BaseLearner, names: Collection[str], build: Callable[[str, nn.Linear], EditedLinear]
) -> dict[str, EditedLinear]:
    """Replaces the linear maps of these attribute names, such as "q_proj", in all layers of the backbone. Returns the
    new maps by checkpoint name. build: builds the new map from the checkpoint name of a map and the map."""
    maps = {name: build(name, linear) for name, linear in linears(learner.backbone, names)}
    for name, linear in maps.items():
        learner.set_submodule(name, linear)
    return maps


@torch.no_grad()
def merge_linears(learner: BaseLearner) -> None:
    """Merges the added parameters of all edited maps of a learner, and replaces these maps by plain linear maps."""
    for name, module in list(learner.named_modules()):
        if isinstance(module, EditedLinear):
            cast(EditedLinear, module).fold()
            learner.set_submodule(name, module.plain())


# LoRA: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", ICLR
# 2022 (arXiv 2021), and the published code, https://github.com/microsoft/LoRA. Scale for high ranks:
# Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023. DoRA: Liu, Wang, Yin,
# Molchanov, Wang, Cheng, Chen, "DoRA: Weight-Decomposed Low-Rank Adaptation", ICML 2024.
#
# Shape letters: T tokens, I inputs and O outputs of a map, R rank.


class LoraLinear(EditedLinear):
    """Computes W0 x + b + scale B A x, with A in `lora_a`, (R, I), and B in `lora_b`, (O, R), initially zero. dropout:
    rate of the dropout of A's input, whose random numbers `set_dropout_rng` sets before each layer."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float):
        super().__init__(base)
        device, dtype = base.weight.device, base.weight.dtype
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features, device=device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank, device=device, dtype=dtype))
        self.scale = scale
        self.lora_dropout = Dropout(dropout)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Maps (T, I) to (T, O)."""
        low_TR = F.linear(self.lora_dropout(x_TI, None), self.lora_a)
        return torch.addmm(super().forward(x_TI), low_TR, self.lora_b.T, alpha=self.scale)

    def fold(self) -> None:
        self.weight.addmm_(self.lora_b, self.lora_a, alpha=self.scale)


class DoraLinear(LoraLinear):
    """Computes m / |W| W x + b, where W = W0 + scale B A, and |W| contains the norms of the rows of W.

    m is the trainable parameter `lora_magnitude`, (O,). Its initial values are the norms of the rows of W0.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float):
        super().__init__(base, rank, scale, dropout)
        self.lora_magnitude = nn.Parameter(torch.linalg.vector_norm(base.weight.detach(), dim=1))

    def forward(self, x_TI: Tensor) -> Tensor:
        """Maps (T, I) to (T, O). As in PEFT, dropout applies to every term except the output of the base map."""
        dropped_TI, base_TO, factor_O = self.lora_dropout(x_TI, None), nn.Linear.forward(self, x_TI), self._factor()
        if dropped_TI is not x_TI:
            plain_TO = F.linear(dropped_TI, self.weight)
        else:
            # Without dropout, W0 x is the output of the base map less its bias, which saves a product.
            plain_TO = base_TO if self.bias is None else base_TO - self.bias
        updated_TO = plain_TO + F.linear(F.linear(dropped_TI, self.lora_a), self.lora_b) * self.scale
        # The norms are in full precision; the sum is in the data type that autocast chose for the base map.
        return base_TO + (factor_O * updated_TO - plain_TO).to(base_TO.dtype)

    def _factor(self) -> Tensor:
        """m / |W|, in full precision and without gradients (section 4.3)."""
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            updated_OI = torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scale)
            norm_O = torch.linalg.vector_norm(updated_OI, dim=1)
        return self.lora_magnitude / norm_O

    def fold(self) -> None:
        factor_O = self._factor()
        super().fold()
        self.weight.mul_(factor_O[:, None])


class LoraTuning(TuningMethod):
    """Trains A and B of every edited map, the head, and the biases that `bias` selects. All other parameters are
    frozen."""

    config: LoraConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        config = self.config
        linear_class = DoraLinear if config.dora else LoraLinear

        def build(name: str, linear: nn.Linear) -> LoraLinear:
            lora = linear_class(linear, config.rank, config.scale, config.dropout)
            _initialize(lora.lora_a, seed, f"{name}.lora_a")
            name_dropouts(lora, f"{name}.")
            return lora

        maps = edit_linears(learner, config.projections, build)
        if config.bias != "none":
            learn_biases(learner, None if config.bias == "all" else maps)
        if config.dropout:
            for named_layer in layers(learner.backbone):
                named_layer.layer.register_forward_pre_hook(set_dropout_rng)

    def merge(self, learner: BaseLearner) -> None:
        merge_linears(learner)


@torch.no_grad()
def _initialize(lora_a: Tensor, seed: int, name: str) -> None:
    """As published: Kaiming's uniform initialization with a = sqrt(5), uniform within 1 / sqrt(inputs)."""
    if not lora_a.is_meta:
        bound = 1 / math.sqrt(lora_a.shape[1])
        lora_a.copy_(torch.empty(lora_a.shape).uniform_(-bound, bound, generator=generator_for(seed, name)))


def set_dropout_rng(layer: nn.Module, arguments: tuple[object, ...]) -> None:
    """Sets the dropout generator of each LoRA map before a layer runs (a forward pre-hook, whose second argument is the
    `Context`). A generator belongs to the tokens that a map reads. Keys and values of cross-attention read the
    encoder's tokens. The output projection of the last attention, and the feed-forward part, read only the tokens whose
    states later layers or heads need. All other maps read all tokens of the layer."""
    context = cast(Context, arguments[1])
    last_attention = "cross_attn" if isinstance(layer, CrossLayer) else "self_attn"
    for name, module in layer.named_modules():
        if not isinstance(module, LoraLinear):
            continue
        attention, _, projection = name.partition(".")
        if attention == "cross_attn" and projection in ("k_proj", "v_proj"):
            module.lora_dropout.preset_rng = None if context.encoded is None else context.encoded.rng
        elif attention == "ffn" or (projection == "out_proj" and attention == last_attention):
            module.lora_dropout.preset_rng = context.read_rng
        else:
            module.lora_dropout.preset_rng = context.rng


# (IA)3: Liu, Tam, Muqeeth, Mohta, Huang, Bansal, Raffel, "Few-Shot Parameter-Efficient Fine-Tuning is Better and
# Cheaper than In-Context Learning", NeurIPS 2022, section 3.3.


class ScaledOutputs(EditedLinear):
    """Computes ia3 * (W x + b), with trainable ia3, (O,), initially 1."""

    def __init__(self, base: nn.Linear):
        super().__init__(base)
        self.ia3 = nn.Parameter(torch.ones_like(base.weight[:, 0]))

    def forward(self, x_TI: Tensor) -> Tensor:
        """Maps (T, I) to (T, O)."""
        out_TO = super().forward(x_TI)
        # Under autocast, the output of the map has a lower precision than ia3; keys must have the type of the queries.
        return (out_TO * self.ia3).to(out_TO.dtype)

    def fold(self) -> None:
        self.weight.mul_(self.ia3[:, None])
        if self.bias is not None:
            self.bias.mul_(self.ia3)


class ScaledInputs(EditedLinear):
    """Computes W (ia3 * x) + b, with trainable ia3, (I,), initially 1."""

    def __init__(self, base: nn.Linear):
        super().__init__(base)
        self.ia3 = nn.Parameter(torch.ones_like(base.weight[0]))

    def forward(self, x_TI: Tensor) -> Tensor:
        """Maps (T, I) to (T, O)."""
        return F.linear(x_TI * self.ia3, self.weight, self.bias)

    def fold(self) -> None:
        self.weight.mul_(self.ia3)


class Ia3Tuning(TuningMethod):
    """Trains the head and, in each layer, vectors that rescale activations: in each attention, cross-attention
    included, one for its keys and one for its values; in each feed-forward part one for its inner activations."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        edit_linears(learner, ("k_proj", "v_proj"), lambda name, linear: ScaledOutputs(linear))
        edit_linears(learner, ("fc_out",), lambda name, linear: ScaledInputs(linear))

    def merge(self, learner: BaseLearner) -> None:
        merge_linears(learner)
