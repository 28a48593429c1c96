"""T5: Raffel, Shazeer, Roberts, Lee, Narang, Matena, Zhou, Li, Liu, "Exploring the Limits of Transfer Learning with
a Unified Text-to-Text Transformer", JMLR 2020; version 1.1:
https://github.com/google-research/text-to-text-transfer-transformer.

       tokens of the inputs               tokens of the outputs, shifted
             |                                   |
          dropout                             dropout
             |                                   |
    +--------+--------+                 +--------+--------+
    |      norm1      |                 |      norm1      |
    |    self_attn    |                 |    self_attn    |   attends to earlier tokens only
    |        |        |                 |        |        |
    +-----> add ------+                 +-----> add ------+
             |                                   |
             |                          +--------+--------+
             |                          |      norm2      |
             |                  +-------|--> cross_attn   |
             |                  |       |        |        |
             |                  |       +-----> add ------+
             |                  |                |             x num_layers
    +--------+--------+         |       +--------+--------+
    |      norm2      |         |       |      norm3      |
    |       ffn       |         |       |       ffn       |
    |        |        |         |       |        |        |
    +-----> add ------+         |       +-----> add ------+
             |                  |                |
    final_norm, dropout         |       final_norm, dropout
             |                  |                |
             +------------------+             hidden

Norms are RMS norms, there are no biases, and scores are not scaled. All layers of a stack share one table of relative
positions, which is added to their scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.models.base import VocabularyHead, positions_of
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.encoder_decoder import DecoderStack, EncoderDecoder
from lmtool.models.encoder_decoder_configs import T5Config
from lmtool.models.family import HFClass, HFFormat, question_answering
from lmtool.models.keymap import EMPTY, KeyMap, Tied
from lmtool.models.published import expect, section_fields
from lmtool.nn.attention import CrossAttention, SelfAttention
from lmtool.nn.blocks import PreNormCrossLayer, PreNormLayer
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.feedforward import FeedForward, GatedFeedForward
from lmtool.nn.initialization import Draw, initialize_each, normal
from lmtool.nn.stack import Stack


class T5(EncoderDecoder):
    """Encoder and decoder without the head, which is tied to the token embedding (1.0) or untied (1.1)."""

    config: T5Config

    def __init__(self, config: T5Config):
        width, widths = config.hidden_size, (config.hidden_size, config.feedforward_size)
        bias, scale = False, 1.0
        attention = (width, config.num_heads, config.attention_dropout, config.head_size, bias, scale)

        def norm() -> nn.Module:
            return nn.RMSNorm(width, config.norm_epsilon)

        def ffn() -> FeedForward:
            if config.feedforward == "relu":
                return FeedForward(*widths, "relu", bias, config.dropout)
            return GatedFeedForward(*widths, "gelu_tanh", bias, config.dropout)

        encoder = [
            PreNormLayer(SelfAttention(*attention), ffn(), norm(), norm(), config.dropout)
            for _ in range(config.num_layers)
        ]
        decoder = [
            PreNormCrossLayer(
                SelfAttention(*attention), CrossAttention(*attention), ffn(), (norm(), norm(), norm()), config.dropout
            )
            for _ in range(config.layers_of_decoder)
        ]
        positions = [positions_of(config, causal) for causal in (False, True)]
        super().__init__(
            config,
            Embeddings(config.vocab_size, width, positions[0], config.dropout),
            Stack(encoder, final_norm=norm(), dropout=config.dropout),
            DecoderStack(decoder, StackInput(positions[1], config.dropout), norm(), config.dropout),
        )
        self.vocabulary_head = VocabularyHead(config.tied, width**-0.5 if config.tied else 1.0)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Draws with the standard deviations of Mesh TensorFlow: 1/sqrt(inputs) for linear layers, for queries divided
        by sqrt(head_size) because scores are not scaled, 1/sqrt(hidden_size) for positions, and 1 for tokens."""
        factor = self.config.initializer_std

        def draw_of(name: str, part: nn.Module) -> Draw:
            if isinstance(part, nn.Linear):
                divisor = self.config.head_size if name.endswith("_attn.q_proj") else 1
                return normal(factor / math.sqrt(part.in_features * divisor))
            return normal(factor if name.endswith("embed.token") else factor / math.sqrt(self.hidden_size))

        initialize_each(module, seed, draw_of, prefix)


# A text classifier has this head; the names of its other tensors start with this prefix.
_HEAD, _CLASSIFIER_PREFIX = "classification_head", "transformer."


def _pairs() -> tuple[tuple[str, str], ...]:
    pairs = [("backbone.embed.token", "shared"), ("heads.lm.output", "lm_head")]
    pairs += [("heads.pooler.dense", f"{_HEAD}.dense"), ("heads.classifier.output", f"{_HEAD}.out_proj")]
    projections = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o"))
    # In transformers, `layer.N` contains a sublayer and its norm.
    stack_names = {
        "encoder": (("self_attn", "norm1", "SelfAttention"), ("ffn", "norm2", "DenseReluDense")),
        "decoder": (
            ("self_attn", "norm1", "SelfAttention"),
            ("cross_attn", "norm2", "EncDecAttention"),
            ("ffn", "norm3", "DenseReluDense"),
        ),
    }
    for stack, sublayers in stack_names.items():
        for number, (name, norm, hf_name) in enumerate(sublayers):
            layer, hf_layer = f"backbone.{stack}.layers.*.", f"{stack}.block.*.layer.{number}."
            parts = (("fc_in", "wi"), ("fc_gate", "wi_0"), ("fc_out", "wo")) if name == "ffn" else projections
            pairs += [(f"{layer}{name}.{part}", f"{hf_layer}{hf_name}.{hf_part}") for part, hf_part in parts]
            pairs.append((layer + norm, hf_layer + "layer_norm"))
        pairs.append((f"backbone.{stack}.final_norm", f"{stack}.final_layer_norm"))
        owner = "embed" if stack == "encoder" else "decoder.embed"
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        pairs.append((f"backbone.{owner}.position", table))
    return tuple(pairs)


KEYS = KeyMap(_pairs())
_TIED = Tied("shared.weight", "lm_head.weight", tables=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"))
# An unused table in old files.
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_BUCKETS = {
    "relative_attention_num_buckets": ("buckets", 32),
    "relative_attention_max_distance": ("max_distance", 128),
}


_TOKEN = "backbone.embed.token.weight"


class _T5Format(HFFormat):
    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        hf_tensors = super().to_hf(tensors, config)
        gated = any(".wi_0." in name for name in hf_tensors)
        return {name.replace(".wi.", ".wi_1.") if gated else name: tensor for name, tensor in hf_tensors.items()}

    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        """Version 1.0 has no output layer of its own; in 1.1 a missing one is a copy of the token embedding.
        Raises UserError without a decoder."""
        renamed = {
            name.removeprefix(_CLASSIFIER_PREFIX).replace(".wi_1.", ".wi."): tensor for name, tensor in tensors.items()
        }
        if {name.partition(".")[0] for name in renamed if ".block." in name} == {"encoder"}:
            raise UserError(
                "the weights contain no decoder; T5EncoderModel and T5ForTokenClassification consist of T5's encoder "
                "only",
                "use a checkpoint with encoder and decoder, such as one of T5ForConditionalGeneration",
            )
        ours, model_class = super().from_hf(renamed, config), self.named_class(config)
        has_task_head = "heads.classifier.output.weight" in ours if model_class is None else not model_class.predicts
        if not _scales_states(config) and _TOKEN in ours and not has_task_head:
            ours.setdefault("heads.lm.output.weight", ours[_TOKEN].clone())
        return ours

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        """`dropout_rate` applies to attention weights too, so `attention_dropout` is lost."""
        assert isinstance(config, T5Config)
        return {
            **super().to_hf_config(config),
            "is_encoder_decoder": True,
            "num_decoder_layers": config.layers_of_decoder,
            **{key: getattr(config.positions, field) for key, (field, _) in _BUCKETS.items()},
            "feed_forward_proj": {"relu": "relu", "gated_gelu": "gated-gelu"}[config.feedforward],
            "tie_word_embeddings": config.tied,
        }

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        section = super().from_hf_config(data)
        gated = data.get("feed_forward_proj", "relu") == "gated-gelu"
        # These keys repeat feed_forward_proj.
        expect(data, "t5", is_gated_act=(gated,), dense_act_fn=("gelu_new",) if gated else ("relu",))
        return {
            **section,
            "attention_dropout": section["dropout"],
            "positions": {"name": "t5", **section_fields(data, _BUCKETS)},
            "feedforward": "gated_gelu" if gated else "relu",
            "tied": _scales_states(data),
        }


def _scales_states(config: Mapping[str, object]) -> bool:
    """Whether hidden states are scaled before the output layer, as in version 1.0."""
    tied_output = config.get("tie_word_embeddings") is not False
    return bool(config["scale_decoder_outputs"]) if "scale_decoder_outputs" in config else tied_output


HF_FORMAT = _T5Format(
    model="t5",
    title="T5",
    keys=KEYS,
    tied=_TIED,
    classes=(
        HFClass("T5ForSequenceClassification", ("pooler", "classifier"), prefix=_CLASSIFIER_PREFIX),
        question_answering("T5ForQuestionAnswering"),
        HFClass("T5ForConditionalGeneration", predicts=True),
    ),
    unsupported={"T5ForTokenClassification": "it has the encoder alone"},
    outside_prefixes=("lm_head.", f"{_HEAD}.", "qa_outputs."),
    unread_suffixes=(_UNREAD,),
    unties=False,  # in T5, transformers uses tie_word_embeddings to scale the hidden states
    fields={
        "vocab_size": ("vocab_size", 32128),
        "num_layers": ("num_layers", 6),
        "num_decoder_layers": ("decoder_layers", None),
        "d_model": ("hidden_size", 512),
        "num_heads": ("num_heads", 8),
        "d_kv": ("head_size", 64),
        "d_ff": ("feedforward_size", 2048),
        "n_positions": ("max_positions", 512),  # in old files; transformers does not read it
        "dropout_rate": ("dropout", 0.1),
        "initializer_factor": ("initializer_std", 1.0),
        "layer_norm_epsilon": ("norm_epsilon", 1e-6),
    },
    supported_values={"feed_forward_proj": ("relu", "gated-gelu"), "is_decoder": (False,)},
    positions="t5",
)
