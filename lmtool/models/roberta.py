"""RoBERTa: Liu, Ott, Goyal, Du, Joshi, Chen, Levy, Lewis, Zettlemoyer, Stoyanov, "RoBERTa: A Robustly Optimized BERT
Pretraining Approach", 2019. The sizes are those of https://github.com/facebookresearch/fairseq (examples/roberta).

    token + position + the one segment
             |
           norm, dropout
             |
      BERT's layers (bert.py), x num_layers
             |
          hidden

Its table of positions begins behind the number of the padding token, 1: two rows that no token reads stand before
that of position 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lmtool.models.base import new, positions_of
from lmtool.models.encoder import BertLike, post_norm_layer
from lmtool.models.encoder_configs import RobertaConfig
from lmtool.models.keymap import EMPTY, QUESTION_ANSWERING, KeyMap, Tied, encoder_pairs
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.embeddings import Embeddings

OFFSET = 2
"""Rows of the table of positions before that of position 0."""


class Roberta(BertLike):
    """The encoder, without its heads."""

    def __init__(self, config: RobertaConfig):
        width, position = config.hidden_size, positions_of(config, causal=False, offset=OFFSET)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: RobertaConfig, seed: int) -> Roberta:
    """A new encoder on the default device."""
    return new(Roberta, config, seed)


KEYS = KeyMap(
    (
        *encoder_pairs("roberta"),
        ("heads.pooler.dense", "roberta.pooler.dense"),
        # A classifier's, in whose file no other stands.
        ("heads.pooler.dense", "classifier.dense"),
        ("heads.classifier.output", "classifier.out_proj"),
        QUESTION_ANSWERING,
        ("heads.masked_lm.dense", "lm_head.dense"),
        ("heads.masked_lm.norm", "lm_head.layer_norm"),
        ("heads.masked_lm.bias", "lm_head.bias"),
        ("heads.masked_lm.output", "lm_head.decoder"),
    )
)
TIED = Tied(
    token="roberta.embeddings.word_embeddings.weight",
    output="lm_head.decoder.weight",
    head="lm_head.",
    bias=("lm_head.bias", "lm_head.decoder.bias"),
)
_CONSTANT = "roberta.embeddings.position_ids"
_HEADS = ("roberta.", "lm_head.", "classifier.", "qa_outputs.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face RobertaForMaskedLM (with its pooler where there is
    one) or of its classifier. Tied copies are not written."""
    published = {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}
    if "classifier.out_proj.weight" in published:
        return {name.replace("roberta.pooler.", "classifier."): tensor for name, tensor in published.items()}
    return published


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare RobertaModel, whose names lack `roberta.`. The pooler that some classifiers' files
    carry is not read by them, and dropped."""
    unread = "roberta.pooler." if "classifier.dense.weight" in tensors else _CONSTANT
    names = {name if name.startswith(_HEADS) else "roberta." + name: name for name in tensors}
    full = TIED.resolve({path: tensors[name] for path, name in names.items()}, config)
    return {
        KEYS.from_published(path) or names.get(path, path): tensor
        for path, tensor in full.items()
        if path != _CONSTANT and not path.startswith(unread)
    }


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("question_answering",), "RobertaForQuestionAnswering"),
    (("pooler", "classifier"), "RobertaForSequenceClassification"),
    (("masked_lm",), "RobertaForMaskedLM"),
    ((), "RobertaModel"),
)
_FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "feedforward_size",
    "max_position_embeddings": "max_positions",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "segments",
    "initializer_range": "initializer_std",
    "layer_norm_eps": "norm_epsilon",
}
# What transformers takes for keys that a file leaves out.
_DEFAULTS = {
    "vocab_size": 50265, "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip


def published_config(config: RobertaConfig) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face RoBERTa. UserError where it has no place in one."""
    require_learned(config, "RoBERTa")
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    ours["max_position_embeddings"] += OFFSET
    # Positions begin behind the number of the padding token.
    more = {"hidden_act": "gelu", "position_embedding_type": "absolute", "pad_token_id": OFFSET - 1}
    return {"model_type": "roberta", **ours, **more}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    expect(
        data,
        "roberta",
        hidden_act=("gelu",),
        position_embedding_type=("absolute",),
        pad_token_id=(OFFSET - 1,),
        is_decoder=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True, False),
    )
    section = {"name": "roberta", **sizes(data, _FIELDS, _DEFAULTS)}
    return {**section, "max_positions": section["max_positions"] - OFFSET}
