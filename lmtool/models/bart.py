"""BART: Lewis, Liu, Goyal, Ghazvininejad, Mohamed, Levy, Stoyanov, Zettlemoyer, "BART: Denoising Sequence-to-Sequence
Pre-training for Natural Language Generation, Translation, and Comprehension", ACL 2020. The sizes are those of
https://github.com/facebookresearch/fairseq/tree/main/examples/bart.

     token + position of the inputs      token + position of the outputs, shifted
             |                                   |
        norm, dropout                       norm, dropout
             |                                   |
    +--------+--------+                 +--------+--------+
    |    self_attn    |                 |    self_attn    |   attends to earlier tokens only
    |        |        |                 |        |        |
    +-----> add ------+                 +-----> add ------+
             |                                   |
           norm1                               norm1
             |                                   |
             |                          +--------+--------+
             |                  +-------|--> cross_attn   |
             |                  |       |        |        |
             |                  |       +-----> add ------+
             |                  |                |
             |                  |              norm2           x num_layers
             |                  |                |
    +--------+--------+         |       +--------+--------+
    |  fc_in gelu fc_out        |       |  fc_in gelu fc_out
    |        |        |         |       |        |        |
    +-----> add ------+         |       +-----> add ------+
             |                  |                |
           norm2                |              norm3
             |                  |                |
             +------------------+             hidden

The first two rows of each position table are unused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.models.base import VocabularyHead, positions_of
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.encoder_decoder import DecoderStack, EncoderDecoder, post_norm_layers
from lmtool.models.encoder_decoder_configs import BartConfig, PostNormConfig
from lmtool.models.family import HFClass, HFFormat, question_answering
from lmtool.models.keymap import EMPTY, KeyMap, Tied
from lmtool.models.published import expect
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.stack import Stack

POSITION_OFFSET = 2
"""Number of unused rows of a position table before position 0."""


class Bart(EncoderDecoder):
    """Encoder and decoder without the head, which is tied to the token embedding and adds a constant to the logit of
    each token."""

    vocabulary_head = VocabularyHead(constants=True)

    def __init__(self, config: BartConfig):
        width = config.hidden_size
        positions = [positions_of(config, causal, offset=POSITION_OFFSET) for causal in (False, True)]
        norms = [nn.LayerNorm(width, config.norm_epsilon) for _ in range(2)]
        encoder, decoder = post_norm_layers(config, "gelu", config.activation_dropout)
        super().__init__(
            config,
            Embeddings(config.vocab_size, width, positions[0], config.dropout, norm=norms[0]),
            Stack(encoder),
            DecoderStack(decoder, StackInput(positions[1], config.dropout, norm=norms[1])),
        )


def post_norm_pairs() -> list[tuple[str, str]]:
    """Returns the pairs of tensor names that BART and Marian have in common: those of the token embedding, the layers,
    and the language model head."""
    projections = [("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "out_proj")]
    sublayers = {
        "encoder": [("self_attn", "norm1", "self_attn")],
        "decoder": [("self_attn", "norm1", "self_attn"), ("cross_attn", "norm2", "encoder_attn")],
    }
    pairs = [("backbone.embed.token", "model.shared"), ("heads.lm.bias", "final_logits_bias")]
    pairs.append(("heads.lm.output", "lm_head"))
    for stack, parts in sublayers.items():
        layer, hf_layer = f"backbone.{stack}.layers.*.", f"model.{stack}.layers.*."
        for name, norm, hf_name in parts:
            pairs += [(f"{layer}{name}.{ours}", f"{hf_layer}{hf_name}.{theirs}") for ours, theirs in projections]
            pairs.append((layer + norm, f"{hf_layer}{hf_name}_layer_norm"))
        pairs += [(layer + "ffn.fc_in", hf_layer + "fc1"), (layer + "ffn.fc_out", hf_layer + "fc2")]
        pairs.append((layer + ("norm2" if stack == "encoder" else "norm3"), hf_layer + "final_layer_norm"))
    return pairs


class TwoStackFormat(HFFormat):
    """The format of an encoder and a decoder with the same widths."""

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        assert isinstance(config, PostNormConfig)
        hf_config = super().to_hf_config(config)
        return {**hf_config, "is_encoder_decoder": True, "decoder_layers": config.layers_of_decoder}

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        section = super().from_hf_config(data)
        expect(
            data,
            self.model,
            num_hidden_layers=(section["num_layers"],),
            # LayerDrop in training does not change the trained model; lmtool never drops layers.
            encoder_layerdrop=(0.0, data.get("encoder_layerdrop")),
            decoder_layerdrop=(0.0, data.get("decoder_layerdrop")),
        )
        return section


KEYS = KeyMap(
    (
        *post_norm_pairs(),
        ("backbone.embed.position", "model.encoder.embed_positions"),
        ("backbone.embed.norm", "model.encoder.layernorm_embedding"),
        ("backbone.decoder.embed.position", "model.decoder.embed_positions"),
        ("backbone.decoder.embed.norm", "model.decoder.layernorm_embedding"),
        ("heads.pooler.dense", "classification_head.dense"),
        ("heads.classifier.output", "classification_head.out_proj"),
    )
)
TIED = Tied(
    token="model.shared.weight",
    output="lm_head.weight",
    tables=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
)


_BIAS = "final_logits_bias"


class _BartFormat(TwoStackFormat):
    """In transformers, the constants that are added to the logits have the shape (1, V)."""

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        hf_tensors = super().to_hf(tensors, config)
        return {name: tensor[None] if name == _BIAS else tensor for name, tensor in hf_tensors.items()}

    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        flat = {name: tensor[0] if name == _BIAS else tensor for name, tensor in tensors.items()}
        return super().from_hf(flat, config)


HF_FORMAT = _BartFormat(
    model="bart",
    title="BART",
    keys=KEYS,
    tied=TIED,
    classes=(
        HFClass("BartForSequenceClassification", ("pooler", "classifier")),
        question_answering("BartForQuestionAnswering"),
        HFClass("BartForConditionalGeneration", predicts=True),
    ),
    prefix="model.",
    outside_prefixes=("lm_head.", "final_logits_bias", "classification_head.", "qa_outputs."),
    # Old files contain version numbers, `encoder.version` and `decoder.version`.
    unread_suffixes=("coder.version",),
    fields={
        "vocab_size": ("vocab_size", 50265),
        "encoder_layers": ("num_layers", 12),
        "decoder_layers": ("decoder_layers", 12),
        "d_model": ("hidden_size", 1024),
        "encoder_attention_heads": ("num_heads", 16),
        "encoder_ffn_dim": ("feedforward_size", 4096),
        "max_position_embeddings": ("max_positions", 1024),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "activation_dropout": ("activation_dropout", 0.0),
        "init_std": ("initializer_std", 0.02),
    },
    required_values={"activation_function": "gelu", "scale_embedding": False},
    supported_values={
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "add_final_layer_norm": (False,),
        "static_position_embeddings": (False,),
        "add_bias_logits": (False,),
        "is_decoder": (False,),
    },
    repeats={"decoder_attention_heads": "encoder_attention_heads", "decoder_ffn_dim": "encoder_ffn_dim"},
    # Hard-coded in transformers.
    lmtool_constants={"norm_epsilon": 1e-5},
)
