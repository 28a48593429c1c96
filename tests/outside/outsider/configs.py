"""Configurations of the plugin's components: no torch, and no YAML except the recipes of its models."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.registry import component
from lmtool.learners.configs import ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.sequence import RegressionConfig
from lmtool.tuning.configs.base import TuningConfig


@component("model", "averager", builder="outsider.model:Averager.build")
class AveragerConfig(ModelConfig):
    """Each token sees the mean of its document: no attention at all."""

    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "mean"

    name: Literal["averager"] = Field("averager", description="The averager.")
    vocab_size: int = Field(512, ge=8, description="Rows of the token embedding.")
    num_layers: int = Field(1, ge=1, description="Layers.")
    hidden_size: int = Field(16, ge=4, description="Width of the hidden states.")
    max_positions: int = Field(128, ge=8, description="Maximum sequence length in tokens.")
    pull: float = Field(0.5, gt=0, description="Weight of the document's mean.")

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}


@component("model", "gated", builder="outsider.lstm:Lstm.build")
class LstmConfig(ModelConfig):
    """A recurrent language model (Hochreiter and Schmidhuber 1997): no attention, no positions, no heads."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"

    name: Literal["gated"] = Field("gated", description="The recurrent model.")
    vocab_size: int = Field(512, ge=8, description="Rows of the token embedding.")
    num_layers: int = Field(2, ge=1, description="Layers.")
    hidden_size: int = Field(24, ge=4, description="Width of the hidden states.")
    max_positions: int = Field(128, ge=8, description="Maximum sequence length in tokens.")


@component("objective", "every_nth", builder="outsider.objective:EveryNth")
class EveryNthConfig(ObjectiveConfig):
    """Restore every n-th token of a window."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str, ...]] = ("mask",)

    name: Literal["every_nth"] = Field("every_nth", description="Restore every n-th token.")
    n: int = Field(4, ge=2, description="Tokens from one hidden token to the next.")


@component("task", "graded", builder="outsider.task:Graded")
class GradedConfig(RegressionConfig):
    """One number for a text, by a loss that forgives outliers."""

    kind: Literal["graded"] = Field("graded", description="One number, by a forgiving loss.")
    name: str = Field("graded", description="The task's name: its head is heads.NAME.")
    forgiveness: float = Field(1.0, gt=0, description="Distance from which the loss is linear.")


@component("task", "tagging", builder="outsider.tagging:Tagging")
class TaggingConfig(TaskConfig):
    """A tag for each word of a text: words and tags are separated by spaces."""

    kind: Literal["tagging"] = Field("tagging", description="A tag for each word.")
    name: str = Field("tagging", description="The task's name: its head is heads.NAME.")
    text: tuple[str, ...] = Field(("words",), description="The column of the words.")
    label: str = Field("tags", description="The column of the tags.")
    labels: tuple[str, ...] | None = Field(None, description="The tags; null: those of the training rows, sorted.")
    metrics: tuple[Literal["accuracy"], ...] = Field(("accuracy",), description="Share of the words that are right.")
    metric: Literal["accuracy"] = Field("accuracy", description="The score that chooses the best checkpoint.")


@component("objective", "two_models", builder="outsider.two_models:TwoModels")
class TwoModelsConfig(ObjectiveConfig):
    """Masked words by two models of one size, each of which learns from the other too (Zhang et al. 2018)."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str, ...]] = ("mask", "sep")

    name: Literal["two_models"] = Field("two_models", description="Two models that learn from each other.")
    agreement: float = Field(0.5, ge=0, description="Weight of the distance between the two.")


@component("tuning", "prompted", builder="outsider.prompted:PromptedTuning")
class PromptedConfig(TuningConfig):
    """Virtual tokens before each text and a small map behind each layer learn, and the heads."""

    name: Literal["prompted"] = Field("prompted", description="Virtual tokens, adapters and heads learn.")
    tokens: int = Field(4, ge=1, description="Virtual tokens.")
    width: int = Field(8, ge=1, description="Width of the maps.")
    scale: float = Field(3.0, gt=0, description="Learning rate of the virtual tokens, as a multiple.")
    decay: float = Field(0.01, ge=0, description="Weight of their squares in the loss.")


@component("tuning", "vectors", builder="outsider.tuning:VectorTuning")
class VectorsConfig(TuningConfig):
    """Only vectors (biases and norms) and the heads learn."""

    requires_transformer: ClassVar[bool] = False

    name: Literal["vectors"] = Field("vectors", description="Only vectors and heads learn.")
