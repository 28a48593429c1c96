"""Families at tiny, unusual sizes with their reference classes of transformers: `CASES`, and texts for both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lmtool.config.registry import build
from lmtool.models import (
    albert,
    bart,
    bert,
    bigbird,
    deberta,
    deberta_v3,
    distilbert,
    electra,
    gpt,
    gpt1,
    llama,
    modernbert,
    qwen2,
    roberta,
    spanbert,
    t5,
    transformer,
    xlnet,
)  # fmt: skip
from lmtool.models.configs import BertConfig, Gpt1Config, GptConfig, ModelConfig
from lmtool.models.decoder_configs import LlamaConfig, Qwen2Config
from lmtool.models.encoder_configs import (
    AlbertConfig,
    BigbirdConfig,
    DebertaConfig,
    DebertaV3Config,
    DistilbertConfig,
    ElectraConfig,
    ModernbertConfig,
    RobertaConfig,
    SpanbertConfig,
    XlnetConfig,
)  # fmt: skip
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from lmtool.models.heads.lm import ReplacedTokenHead, lm_head, masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.types import Packed

VOCABULARY = 97
LENGTHS = (5, 40, 1, 17, 16)
OUTPUT_LENGTHS = (7, 1, 23, 40, 16)
SEED = 11
CLASSES = 4


class Checkpoint(nn.Module):
    """Backbone and heads under the names of a checkpoint."""

    def __init__(self, backbone: nn.Module, **heads: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)


@dataclass
class Pair:
    """Our model and transformers' model of the same configuration, with the key maps of the family's module.
    unused: tensors of theirs that none of our heads has."""

    ours: Checkpoint
    theirs: nn.Module
    module: ModuleType
    unused: frozenset[str] = frozenset()

    def to_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        written: dict[str, Tensor] = self.module.HF_FORMAT.to_hf(tensors, self.ours.backbone.config)
        return written

    def from_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        read: dict[str, Tensor] = self.module.HF_FORMAT.from_hf(tensors, self.theirs.config.to_dict())
        return {name: tensor for name, tensor in read.items() if name not in self.unused}

    def double(self) -> Pair:
        self.ours.double()
        self.theirs.double()
        return self


@dataclass(frozen=True)
class Case:
    """A family at a tiny size.

    config, published: the same sizes in our and in their form. pretrained, bare, classifier: classes of transformers;
    `pretrained` has the heads of pretraining. heads: ours of the same kind. tied: names in their state that files leave
    out. unused: names that their classes have without using them. changed: keys of a config that we write whose values
    differ from `published`. prepare: changes their model. call: calls it. lengths: of the texts; classified: of those
    that are classified.
    """

    module: ModuleType
    config: ModelConfig
    published: PreTrainedConfig
    pretrained: type[nn.Module]
    bare: type[nn.Module] | None = None
    classifier: type[nn.Module] | None = None
    heads: tuple[str, ...] = ("masked_lm",)
    tied: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset({"initializer_range"})
    prepare: Callable[[nn.Module], object] = nn.Module.eval
    call: Callable[[nn.Module, dict[str, Tensor]], Any] = lambda model, rows: model(**rows)
    lengths: tuple[int, ...] = LENGTHS
    classified: tuple[int, ...] = LENGTHS

    @property
    def two_stacks(self) -> bool:
        return self.config.architecture == "encoder_decoder"

    def texts(self, lengths: tuple[int, ...] | None = None) -> Texts:
        """Texts of these lengths, by default `lengths`, with segments if the family reads them."""
        segments = 2 if self.module is xlnet else getattr(self.config, "segments", 0)
        return Texts.random(self.lengths if lengths is None else lengths, 1, segments)

    def pair(self) -> Pair:
        """Random weights on both sides; see `loaded`."""
        torch.manual_seed(SEED)
        backbone = build(self.config, 0)
        heads = {name: self.head(name, backbone) for name in self.heads}
        theirs = self.pretrained(self.published)
        self.prepare(theirs)
        return Pair(Checkpoint(backbone, **heads), theirs, self.module, self.unused)

    def classifier_pair(self) -> Pair:
        torch.manual_seed(SEED)
        backbone = build(self.config, 0)
        ours = Checkpoint(backbone, pooler=pooler(backbone), classifier=SequenceHead(backbone.hidden_size, CLASSES))
        assert self.classifier is not None
        published = copy.deepcopy(self.published)
        published.num_labels = CLASSES
        return Pair(ours, self.classifier(published).eval(), self.module, self.unused)

    def head(self, name: str, backbone: nn.Module) -> nn.Module:
        heads: dict[str, Callable[[], nn.Module]] = {
            "lm": lambda: lm_head(backbone),
            "masked_lm": lambda: masked_lm_head(backbone),
            "replaced_token": lambda: ReplacedTokenHead(backbone.hidden_size, backbone.head_activation),
            "pooler": lambda: pooler(backbone),
            "next_sentence": lambda: SequenceHead(backbone.hidden_size, 2),
            "sentence_order": lambda: SequenceHead(backbone.hidden_size, 2),
        }
        return heads[name]()


def loaded(pair: Pair) -> Pair:
    """The pair with transformers' weights in our model; every name must match. Biases and norms are changed first, so
    that they differ from 0 and 1."""
    with torch.no_grad():
        for parameter in pair.theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    pair.ours.load_state_dict(pair.from_hf(pair.theirs.state_dict()), strict=True)
    return pair


@dataclass
class Texts:
    """The same texts packed, and as padded rows. mask: the positions of real tokens in the rows. segments: None if the
    family has no segments."""

    packed: Packed
    ids: Tensor
    mask: Tensor
    segments: Tensor | None

    @classmethod
    def random(cls, lengths: tuple[int, ...], seed: int = 1, segments: int = 0) -> Texts:
        """Random texts without the tokens 0 and 1, padding in transformers, whose embeddings are never trained."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, VOCABULARY, (sum(lengths),), generator=generator)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids, types = torch.ones(mask.shape, dtype=torch.int64), torch.zeros(mask.shape, dtype=torch.int64)
        ids[mask] = tokens
        if segments < 2:
            return cls(Packed(tokens, lengths), ids, mask, None)
        types[mask] = segment = torch.randint(segments, (sum(lengths),), generator=generator)
        return cls(Packed(tokens, lengths, {"segment": segment}), ids, mask, types)

    def arguments(self) -> dict[str, Tensor]:
        """The arguments of the model of transformers."""
        rows = {"input_ids": self.ids, "attention_mask": self.mask.long()}
        return rows if self.segments is None else rows | {"token_type_ids": self.segments}

    def decoder_arguments(self) -> dict[str, Tensor]:
        return {"decoder_input_ids": self.ids, "decoder_attention_mask": self.mask.long()}


def sentence_logits(pair: Pair, head: str, hidden_TH: Tensor, packed: Packed) -> Tensor:
    """Our logits of each text."""
    heads, place = pair.ours.heads, "last" if pair.module is xlnet else "first"
    logits: Tensor = heads[head](heads["pooler"](summary(hidden_TH, packed, place)))
    return logits


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient, zeros for a parameter that the loss does not depend on."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def assert_gradients_equal(pair: Pair) -> None:
    """Asserts that their renamed gradients equal ours, relative to the largest of each tensor; the gradient of a key
    bias is rounding only."""
    theirs = pair.from_hf({name: gradient_of(parameter) for name, parameter in pair.theirs.named_parameters()})
    ours = {name: gradient_of(parameter) for name, parameter in pair.ours.named_parameters()}
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=0.1)
        difference = (ours[name] - gradient).abs().max() / scale
        assert difference < 1e-5, (name, difference)


SIZES = {
    "vocab_size": VOCABULARY, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52,
    "max_positions": 40,
}  # fmt: skip
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
THEIR_SIZES = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 3,
    "intermediate_size": 52, "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
THEIR_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OUTPUT_LAYER = frozenset({"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"})
LM_HEAD = frozenset({"lm_head.weight"})


def bert_case(
    module: ModuleType, config: type[ModelConfig], family: str, pretrained: str = "ForMaskedLM",
    heads: str = "masked_lm", tied: frozenset[str] = OUTPUT_LAYER, more: dict[str, Any] | None = None,
    theirs: dict[str, Any] | None = None,
) -> Case:  # fmt: skip
    """A family with BERT's sizes. heads: names, separated by spaces. more, theirs: further fields."""
    return Case(
        module,
        config(**SIZES | NO_DROPOUT | (more or {})),
        getattr(transformers, f"{family}Config")(**THEIR_SIZES | THEIR_NO_DROPOUT | (theirs or {})),
        *(getattr(transformers, family + name) for name in (pretrained, "Model", "ForSequenceClassification")),
        heads=tuple(heads.split()),
        tied=tied,
    )


def electra_case(pretrained: str, heads: str, embedding_size: int = 20) -> Case:
    sizes = {"embedding_size": embedding_size}
    tied = frozenset({"generator_lm_head.weight"} if pretrained == "ForMaskedLM" else ())
    return bert_case(electra, ElectraConfig, "Electra", pretrained, heads, tied, sizes, sizes)


def albert_case(activation: str, published: str) -> Case:
    more, theirs = {"activation": activation}, {"hidden_act": published, "classifier_dropout_prob": 0.0}
    sizes = {"embedding_size": 20}
    heads = "masked_lm pooler sentence_order"
    tied = frozenset({"predictions.decoder.weight", "predictions.decoder.bias"})
    return bert_case(albert, AlbertConfig, "Albert", "ForPreTraining", heads, tied, more | sizes, theirs | sizes)


def causal_case(module: ModuleType, config: type[LlamaConfig], family: str, tied: bool) -> Case:
    """Llama or Qwen2, with three query heads for each key and value head."""
    positions = RotaryPositionsConfig(base=5000.0)
    sizes, theirs = {**SIZES, "hidden_size": 48, "num_heads": 6}, {**THEIR_SIZES, "hidden_size": 48}
    ours = config(**sizes, num_key_value_heads=2, positions=positions, tied=tied)
    published = getattr(transformers, f"{family}Config")(
        **theirs | {"num_attention_heads": 6}, num_key_value_heads=2, rms_norm_eps=ours.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=tied,
    )  # fmt: skip
    pretrained, bare = (getattr(transformers, family + name) for name in ("ForCausalLM", "Model"))
    return Case(module, ours, published, pretrained, bare, heads=("lm",), tied=LM_HEAD if tied else frozenset())


def deberta_case(module: ModuleType, config: type[ModelConfig], family: str, **fields: Any) -> Case:
    """For texts longer and shorter than the table of distances. fields: fields of our configuration."""
    ours = config(**SIZES | {"max_positions": 60, "max_distance": 20} | NO_DROPOUT | fields)
    published = getattr(transformers, f"{family}Config")(
        **module.HF_FORMAT.to_hf_config(ours) | {"initializer_range": 0.2, "num_labels": CLASSES}
    )
    classes = (getattr(transformers, family + name) for name in ("ForMaskedLM", "Model", "ForSequenceClassification"))
    return Case(module, ours, published, *classes, tied=OUTPUT_LAYER)


def each_text_in_blocks(model: nn.Module, rows: dict[str, Tensor]) -> Any:
    """BigBird samples random blocks in training mode only, and chooses dense or sparse attention for a whole batch."""
    model.train()
    logits = []
    for ids, mask, segments in zip(*rows.values(), strict=True):
        model.bert.set_attention_type("block_sparse")
        ids, segments = ids[mask.bool()][None], segments[mask.bool()][None]
        logits.append(model(ids, attention_mask=torch.ones_like(ids), token_type_ids=segments).logits)
    if logits[0].dim() == 2:
        return SimpleNamespace(logits=torch.cat(logits))
    return SimpleNamespace(logits=nn.utils.rnn.pad_sequence([row[0] for row in logits], batch_first=True))


def with_double_mask(model: nn.Module, rows: dict[str, Tensor]) -> Any:
    """XLNet multiplies by its mask, and builds its sinusoids in fp32; both must be float64."""
    inner = model.transformer
    if "relative_positional_encoding" not in vars(inner):
        encoding = inner.relative_positional_encoding
        inner.relative_positional_encoding = lambda *sizes, **more: encoding(*sizes, **more).to(inner.dtype)
    return model(**rows | {"attention_mask": rows["attention_mask"].to(inner.dtype)})


def with_separate_output_layer(model: nn.Module) -> None:
    """T5 1.1: transformers always ties the output layer and omits only the scaling."""
    model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 36) * 0.2)


def two_stack_sizes(**fields: Any) -> dict[str, Any]:
    return SIZES | NO_DROPOUT | {"decoder_layers": 2} | fields


TABLES = LM_HEAD | {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
MODEL_TABLES = frozenset({"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"})
CONSTANTS = frozenset({"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"})
THEIR_STACKS = {
    "vocab_size": VOCABULARY, "d_model": 36, "max_position_embeddings": 40, "encoder_layers": 3, "decoder_layers": 2,
    "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "dropout": 0.0, "init_std": 0.2,
}  # fmt: skip


def t5_case(version: str) -> Case:
    """Heads of width 10, which does not divide the hidden width; distances beyond the last bucket."""
    gated = version == "1.1"
    kind = {"feedforward": "gated_gelu", "tied": False} if gated else {}
    positions = {"name": "t5", "buckets": 12, "max_distance": 20}
    config = T5Config.model_validate(two_stack_sizes(**kind, num_heads=5, head_size=10, positions=positions))
    published = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=36, d_kv=10, d_ff=52, num_layers=3, num_decoder_layers=2, num_heads=5,
        relative_attention_num_buckets=12, relative_attention_max_distance=20, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated, n_positions=40,
    )  # fmt: skip
    return Case(
        t5, config, published, transformers.T5ForConditionalGeneration, heads=("lm",),
        tied=TABLES - LM_HEAD if gated else TABLES, changed=frozenset({"tie_word_embeddings"} if gated else ()),
        prepare=with_separate_output_layer if gated else nn.Module.eval,
    )  # fmt: skip


def bart_case(
    module: ModuleType, config: ModelConfig, family: str, pretrained: str, tied: frozenset[str], **fields: Any
) -> Case:
    published = getattr(transformers, f"{family}Config")(**THEIR_STACKS, **fields)
    classes = (getattr(transformers, family + name) for name in (pretrained, "Model"))
    prepare = lambda model: model.final_logits_bias.normal_() if module is bart else None  # noqa: E731
    return Case(
        module, config, published, *classes, heads=("lm",), tied=tied, changed=frozenset({"init_std"}), prepare=prepare
    )


CASES: dict[str, Case] = {
    "bert": bert_case(bert, BertConfig, "Bert", "ForPreTraining", "masked_lm pooler next_sentence"),
    "roberta": bert_case(
        roberta, RobertaConfig, "Roberta", tied=frozenset({"lm_head.decoder.weight", "lm_head.decoder.bias"}),
        theirs={"max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "spanbert": bert_case(spanbert, SpanbertConfig, "Bert"),
    "distilbert": Case(
        distilbert, DistilbertConfig(**SIZES, **NO_DROPOUT),
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY, n_layers=3, dim=36, n_heads=3, hidden_dim=52, max_position_embeddings=40,
            dropout=0.0, attention_dropout=0.0, initializer_range=0.2, seq_classif_dropout=0.0,
        ),
        transformers.DistilBertForMaskedLM, transformers.DistilBertModel,
        transformers.DistilBertForSequenceClassification, tied=frozenset({"vocab_projector.weight"}),
    ),
    "albert": albert_case("gelu_tanh", "gelu_new"),
    "albert_v1": albert_case("gelu", "gelu"),
    "electra": electra_case("ForPreTraining", "replaced_token"),
    "electra_wide": electra_case("ForPreTraining", "replaced_token", 36),
    "electra_generator": electra_case("ForMaskedLM", "masked_lm"),
    "modernbert": Case(
        modernbert,
        ModernbertConfig(
            **SIZES | {"num_layers": 5}, local_window=3, positions=RotaryPositionsConfig(base=700.0),
            local_rotary_base=50.0, dropout=0.0,
        ),
        transformers.ModernBertConfig(
            **THEIR_SIZES | {"num_hidden_layers": 5}, local_attention=6, pad_token_id=0, cls_token_id=2, sep_token_id=3,
            bos_token_id=None, eos_token_id=None, rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
        transformers.ModernBertForMaskedLM, transformers.ModernBertModel,
        transformers.ModernBertForSequenceClassification, tied=frozenset({"decoder.weight"}),
    ),
    # A text that fills 20 blocks, one with three free positions in the last of 18 blocks, and a dense one.
    "bigbird": replace(
        bert_case(
            bigbird, BigbirdConfig, "BigBird",
            more={"max_positions": 80, "block_size": 4, "random_blocks": 2, "random_plan": "transformers"},
            theirs={"max_position_embeddings": 80, "block_size": 4, "num_random_blocks": 2, "sep_token_id": 3},
        ),
        unused=frozenset({f"{prefix}pooler.{name}" for prefix in ("", "bert.") for name in ("weight", "bias")}),
        call=each_text_in_blocks, lengths=(80, 69, 29), classified=(80, 69, 29),
    ),
    **{
        "_".join([name, *map(str, fields.values())]): deberta_case(module, config, family, **more | fields)
        for name, module, config, family, more, variants in (
            ("deberta", deberta, DebertaConfig, "Deberta", {}, ({"max_distance": 64},)),
            ("deberta_v3", deberta_v3, DebertaV3Config, "DebertaV2", {"buckets": 8}, ({"buckets": 64},)),
        )
        for fields in (
            {}, {"positions": {"name": "learned"}}, {"scores": ("c2p",)}, {"scores": ("p2c", "p2c")}, *variants,
        )
    },
    "xlnet": Case(
        xlnet,
        XlnetConfig(**SIZES | {"max_positions": 60}, **NO_DROPOUT, initializer_std=0.2),
        transformers.XLNetConfig(
            vocab_size=VOCABULARY, n_layer=3, d_model=36, n_head=3, d_inner=52, dropout=0.0, summary_last_dropout=0.0,
            initializer_range=0.2, mem_len=None,
        ),
        transformers.XLNetLMHeadModel, transformers.XLNetModel, transformers.XLNetForSequenceClassification,
        heads=("lm",), tied=frozenset({"lm_loss.weight"}), changed=frozenset(), call=with_double_mask, classified=(40,),
    ),
    "gpt": Case(
        gpt, GptConfig(**SIZES, **NO_DROPOUT),
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_layer=3, n_embd=36, n_head=3, n_inner=52, n_positions=40, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
        ),
        transformers.GPT2LMHeadModel, transformers.GPT2Model, heads=("lm",), tied=LM_HEAD,
    ),
    "gpt1": Case(
        gpt1, Gpt1Config(**SIZES | {"feedforward_size": 144}, **NO_DROPOUT),
        transformers.OpenAIGPTConfig(
            vocab_size=VOCABULARY, n_positions=40, n_embd=36, n_layer=3, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, initializer_range=0.2,
        ),
        transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTModel, heads=("lm",), tied=LM_HEAD,
    ),
    "llama": causal_case(llama, LlamaConfig, "Llama", tied=True),
    "llama_untied": causal_case(llama, LlamaConfig, "Llama", tied=False),
    "qwen2": causal_case(qwen2, Qwen2Config, "Qwen2", tied=True),
    "qwen2_untied": causal_case(qwen2, Qwen2Config, "Qwen2", tied=False),
    "t5": t5_case("1.0"),
    "t5_v11": t5_case("1.1"),
    "bart": bart_case(
        bart, BartConfig(**two_stack_sizes(activation_dropout=0.0)), "Bart", "ForConditionalGeneration", MODEL_TABLES
    ),
    # Marian has the architecture of the paper, except for the order of the channels.
    "transformer": bart_case(
        transformer, Transformer2017Config(**two_stack_sizes()), "Marian", "MTModel", MODEL_TABLES | CONSTANTS,
        activation_function="relu", scale_embedding=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ),
}  # fmt: skip
