"""The families of the earlier era that read a text one token after the other, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.models.configs import Layers, ModelConfig, Positions, Width
from lmtool.nn.configs import Side


@component("model", "lstm", builder="lmtool.models.lstm:build")
class LstmConfig(ModelConfig):
    """An LSTM language model (Dai and Le 2015): embedding, LSTM layers, an output table of its own. Defaults: theirs of
    1,024 units."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"
    sees_prefixes: ClassVar[bool] = False
    tied: ClassVar[bool] = False

    name: Literal["lstm"] = Field("lstm", description="An LSTM language model.")
    num_layers: Layers = Field(1, description="LSTM layers.")
    embedding_size: Width = Field(512, description="Width of the token vectors.")
    hidden_size: Width = Field(1024, description="Units of a layer: the width of its states and of its memory.")
    max_positions: Positions = Field(8192, description="Longest sequence in tokens; nothing is learned of positions.")
    dropout: float = Field(0.5, ge=0, lt=1, description="Share of activations dropped behind embedding and layers.")
    initializer_std: float = Field(
        1.0, gt=0, description="Factor of the initial standard deviations: 1/sqrt(inputs) of each map and table."
    )

    @property
    def carries_state(self) -> bool:
        return True

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "embedding": self.embedding_size}
