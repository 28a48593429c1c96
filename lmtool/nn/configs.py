"""Configuration of positions, and types shared by configurations. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.registry import component

Side = Literal["inputs", "outputs"]
"""Side of a batch. inputs: read by the encoder, or by the only stack. outputs: read by the decoder of an
encoder-decoder."""
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
"""gelu: with the error function (BERT); gelu_tanh: its tanh approximation (GPT-2); silu: x sigmoid(x) (Llama)."""
Extension = Literal["linear", "ntk", "yarn"]
"""How rotary positions are changed for texts longer than in training; see `nn.positions.Rotary.extend`."""
BlockPart = Literal["residual", "norm", "scaling", "feed_forward", "projections"]
"""Part of a transformer layer that a study may leave out. residual: the sums, so that a sublayer's output replaces its
input. norm: all norms of the backbone. scaling: the factor 1/sqrt(D) of the scores. feed_forward: the feed-forward
sublayer with its norm. projections: those of queries, keys and values, which are then the states themselves."""
AdapterReads = Literal["output", "sum", "input"]
"""Input of an adapter. output: the output of its sublayer. sum: that output plus the residual, normalized as in the
layer. input: the input of the sublayer (a parallel adapter)."""


class PositionsConfig(Config):
    """Base class of all kinds of positions."""

    even_heads: ClassVar[bool] = False
    """Whether the width of a head must be even."""
    has_limit: ClassVar[bool] = False
    """Whether the number of positions is limited, so that virtual tokens use some of them."""
    reads_trees: ClassVar[bool] = False
    """Whether positions depend on the dependency tree of a text."""

    name: str = Field(description="Kind of positions.")


@component("model/positions", "learned", builder="lmtool.nn.positions:build_learned")
class LearnedPositionsConfig(PositionsConfig):
    """A learned vector per position, for model.max_positions positions (Gehring et al. 2017; BERT, GPT-2)."""

    has_limit: ClassVar[bool] = True

    name: Literal["learned", "concatenated"] = Field("learned", description="A learned vector per position.")


@component("model/positions", "concatenated", builder="lmtool.nn.positions:build_concatenated")
class ConcatenatedPositionsConfig(LearnedPositionsConfig):
    """A learned vector per position, concatenated with the token vector instead of added, and a linear map of both
    to the width of the token vectors."""

    name: Literal["concatenated"] = Field(
        "concatenated", description="A learned vector, concatenated with each token vector."
    )
    size: int = Field(
        32,
        ge=1,
        le=1_000_000,
        description="width P of a position's vector; the map has H x (H + P) weights for token vectors of width H",
    )


@component("model/positions", "sinusoidal", builder="lmtool.nn.positions:build_sinusoidal")
class SinusoidalPositionsConfig(PositionsConfig):
    """Sines and cosines of the position, without learned parameters (Vaswani et al. 2017)."""

    name: Literal["sinusoidal"] = Field("sinusoidal", description="Sines and cosines of the position.")
    base: float = Field(
        10000.0, gt=1, description="pair i of the model's H dimensions has the angle position / base^(2i/H)"
    )


@component("model/positions", "shaw", builder="lmtool.nn.positions:build_shaw")
class ShawPositionsConfig(PositionsConfig):
    """Learned vectors of the clipped distance, added to keys and values (Shaw, Uszkoreit and Vaswani 2018)."""

    name: Literal["shaw"] = Field("shaw", description="Vectors of the distance, added to keys and values.")
    clip: int = Field(
        16,
        ge=1,
        le=100_000,
        description="distance in tokens beyond which all are the same (the paper's k): 2 clip + 1 vectors",
    )


@component("model/positions", "t5", builder="lmtool.nn.positions:build_t5")
class T5PositionsConfig(PositionsConfig):
    """A learned bias per head and bucket of distances, added to the scores (Raffel et al. 2020)."""

    name: Literal["t5"] = Field("t5", description="A learned bias per head and bucket of distances.")
    buckets: int = Field(
        32,
        ge=4,
        le=100_000,
        description="number of distance buckets, even; an encoder uses half of them for each direction",
    )
    max_distance: int = Field(
        128,
        ge=3,
        le=100_000_000,
        description="distance in tokens from which all share the last bucket. Half of the buckets hold one distance "
        "each; the others grow logarithmically",
    )

    @model_validator(mode="after")
    def _buckets_fit(self) -> T5PositionsConfig:
        if self.buckets % 2:
            raise ValueError(f"buckets={self.buckets} is not even: an encoder uses half of them for each direction")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(f"max_distance={self.max_distance} is not more than buckets/2={self.buckets // 2}")
        return self


@component("model/positions", "rotary", builder="lmtool.nn.positions:build_rotary")
class RotaryPositionsConfig(PositionsConfig):
    """Queries and keys rotated by an angle proportional to the position (Su et al. 2021)."""

    even_heads: ClassVar[bool] = True

    name: Literal["rotary"] = Field("rotary", description="Queries and keys rotated by their position.")
    base: float = Field(10000.0, gt=1, description="pair i of a head's D dimensions turns by position / base^(2i/D)")
    layout: Literal["half_split", "interleaved"] = Field(
        "half_split",
        description="pairs of dimensions: half_split: i and i + D/2 (GPT-NeoX); interleaved: 2i and 2i + 1 (GPT-J)",
    )


@component("model/positions", "alibi", builder="lmtool.nn.positions:build_alibi")
class AlibiPositionsConfig(PositionsConfig):
    """A penalty on the scores proportional to the distance, with a fixed slope per head (Press et al. 2022)."""

    name: Literal["alibi"] = Field("alibi", description="A penalty on the scores proportional to the distance.")


class TreePositionsConfig(PositionsConfig):
    """Base class of positions in a dependency tree (Wang, Tu, Wang and Shi 2019), alone or added to positions in the
    sequence of tokens."""

    has_limit: ClassVar[bool] = True
    reads_trees: ClassVar[bool] = True


@component("model/positions", "tree_depth", builder="lmtool.nn.positions:build_tree_depth")
class TreeDepthPositionsConfig(TreePositionsConfig):
    """A learned vector of a word's depth in the dependency tree of its sentence, for tasks with task.heads."""

    name: Literal["tree_depth"] = Field("tree_depth", description="A learned vector of the depth in a tree.")
    deepest: int = Field(32, ge=1, le=100_000, description="depth from which all share a vector; the root has depth 0")
    sequence: Literal["learned", "sinusoidal", "none"] = Field(
        "learned", description="positions in the sequence, which are added; none: only those in the tree"
    )


@component("model/positions", "tree_distance", builder="lmtool.nn.positions:build_tree_distance")
class TreeDistancePositionsConfig(TreePositionsConfig):
    """Learned vectors of the clipped distance in the dependency tree, added to keys and values, for tasks with
    task.heads."""

    name: Literal["tree_distance"] = Field(
        "tree_distance", description="Vectors of the distance in a tree, added to keys and values."
    )
    clip: int = Field(
        16,
        ge=1,
        le=100_000,
        description="distance in the tree from which all share a vector: 2 clip + 1 vectors, and one for no tree. Its "
        "sign is negative for earlier words",
    )
    sequence: Literal["learned", "sinusoidal", "shaw", "none"] = Field(
        "learned", description="positions in the sequence, which are added; none: only those in the tree"
    )


@component("model/positions", "none", builder="lmtool.nn.positions:build_none")
class NoPositionsConfig(PositionsConfig):
    """No positions: a decoder can infer them from its mask; an encoder reads a bag of words."""

    name: Literal["none"] = Field("none", description="No positions.")
