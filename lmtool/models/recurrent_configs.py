"""The families of the earlier era that read a text one token after the other, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.models.configs import Layers, ModelConfig, Positions, Summary, Vocabulary, Width
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.nn.configs import Side


@component("model", "lstm", builder="lmtool.models.lstm:build")
class LstmConfig(ModelConfig):
    """An LSTM language model (Dai and Le 2015): embedding, LSTM layers, an output table of its own. Defaults: theirs of
    1,024 units."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Summary] = "last"
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
    def even_states(self) -> bool:
        return self.embedding_size == self.hidden_size

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "embedding": self.embedding_size}


@component("model", "rnn_attention", builder="lmtool.models.rnn_attention:build")
class RnnAttentionConfig(EncoderDecoderConfig):
    """A recurrent encoder-decoder with attention (Bahdanau et al. 2015). Defaults: theirs (appendix A.2.3)."""

    # The decoder reads the same text, as BART's does (Lewis et al. 2020, 3.2).
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "outputs"
    tied: ClassVar[bool] = False

    name: Literal["rnn_attention"] = Field("rnn_attention", description="A recurrent encoder-decoder with attention.")
    vocab_size: Vocabulary = Field(30000, description="Rows of the token embedding; at least the tokenizer's entries.")
    num_layers: Layers = Field(1, description="Layers of the encoder, each in both directions; the decoder has one.")
    embedding_size: Width = Field(620, description="Width of the token vectors.")
    hidden_size: Width = Field(1000, description="Units of a recurrent layer in one direction.")
    attention_size: Width = Field(1000, description="Width inside the attention, where a state and a key are added.")
    output_size: Width = Field(500, description="Width of what the output layer reads, the maximum of two maps.")
    max_positions: Positions = Field(8192, description="Longest sequence in tokens; nothing is learned of positions.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of activations dropped behind embedding and layers.")
    initializer_std: float = Field(
        0.01, gt=0, description="Standard deviation of matrices that nothing else is said of."
    )

    @property
    def even_states(self) -> bool:
        return False

    @property
    def layers_of_decoder(self) -> int:
        return 1

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "embedding": self.embedding_size, "output": self.output_size}
