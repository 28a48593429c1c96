"""RoBERTa, SpanBERT, DistilBERT, ALBERT and ELECTRA against transformers: tiny configurations of unusual sizes, packed
against padded, fp32, to 1e-5."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_published_parity import LENGTHS, Checkpoint, Pair, assert_gradients_equal, loaded
from torch import Tensor, nn

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import albert, distilbert, electra, roberta, spanbert
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_configs import (
    AlbertConfig,
    DistilbertConfig,
    ElectraConfig,
    RobertaConfig,
    SpanbertConfig,
)
from lmtool.models.heads.lm import MaskedLMHead, ReplacedTokenHead
from lmtool.models.heads.sequence import Pooler, SequenceHead, summary
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.types import Packed

SIZES = {
    "vocab_size": 97, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52, "max_positions": 40,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {
    "roberta": RobertaConfig(**SIZES),
    "spanbert": SpanbertConfig(**SIZES),
    "distilbert": DistilbertConfig(**SIZES),
    "albert": AlbertConfig(**SIZES, embedding_size=20),
    "albert_v1": AlbertConfig(**SIZES, embedding_size=20, activation="gelu"),
    "electra": ElectraConfig(**SIZES, embedding_size=20),
    "electra_wide": ElectraConfig(**SIZES, embedding_size=36),
    "generator": ElectraConfig(**SIZES, embedding_size=20),
}
MODULES = {
    "roberta": roberta,
    "spanbert": spanbert,
    "distilbert": distilbert,
    "albert": albert,
    "electra": electra,
    "generator": electra,
}
CLASSES = {
    "roberta": transformers.RobertaForMaskedLM,
    "spanbert": transformers.BertForMaskedLM,
    "distilbert": transformers.DistilBertForMaskedLM,
    "albert": transformers.AlbertForPreTraining,
    "electra": transformers.ElectraForPreTraining,
    "generator": transformers.ElectraForMaskedLM,
}


def pair_of(name: str) -> Pair:
    """Ours with the heads of theirs, and theirs from the configuration that we write."""
    torch.manual_seed(11)
    config, family = CONFIGS[name], name.split("_")[0]
    module = MODULES[family]
    backbone = build(config, 0)
    heads: dict[str, nn.Module] = {}
    if family == "electra":
        heads["replaced_token"] = ReplacedTokenHead(36, backbone.head_activation)
    else:
        table_width = backbone.embed.token.weight.shape[1]
        heads["masked_lm"] = MaskedLMHead(36, 97, backbone.head_activation, config.norm_epsilon, table_width)
    if family == "albert":
        heads |= {"pooler": Pooler(36), "sentence_order": SequenceHead(36, 2)}
    published = module.to_hf_config(config)
    theirs = CLASSES[family](transformers.AutoConfig.for_model(**published))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    # The head of ALBERT's sentence order has a dropout of its own.
    theirs.eval()
    return Pair(Checkpoint(backbone, **heads), theirs, module.to_hf, module.from_hf)


def texts(segments: int) -> tuple[Packed, dict[str, Tensor], Tensor]:
    """The same texts packed, as the padded arguments of transformers, and the mask of what is real."""
    generator = torch.Generator().manual_seed(1)
    # Tokens 0 and 1 are transformers' padding, whose row never learns.
    tokens = torch.randint(2, 97, (sum(LENGTHS),), generator=generator)
    segment = torch.randint(max(segments, 1), (sum(LENGTHS),), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids, types = torch.ones(mask.shape, dtype=torch.int64), torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask], types[mask] = tokens, segment
    given = {"input_ids": ids, "attention_mask": mask.long()}
    columns = {}
    if segments:
        given["token_type_ids"], columns["segment"] = types, segment
    return Packed(tokens, LENGTHS, columns), given, mask


def logits_of(pair: Pair, name: str, packed: Packed, given: dict[str, Tensor], mask: Tensor):
    """Ours and theirs: of the tokens, and of the texts where there is such a head."""
    theirs = pair.theirs(**given)
    hidden = pair.ours.backbone(packed)
    heads = pair.ours.heads
    if "replaced_token" in heads:
        return [(heads["replaced_token"](hidden), theirs.logits[mask])]
    table = pair.ours.backbone.embed.token.weight
    if "sentence_order" not in heads:
        return [(heads["masked_lm"](hidden, table), theirs.logits[mask])]
    order = heads["sentence_order"](heads["pooler"](summary(hidden, packed, "first")))
    return [(heads["masked_lm"](hidden, table), theirs.prediction_logits[mask]), (order, theirs.sop_logits)]


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_loss_and_gradients(name: str) -> None:
    pair = loaded(pair_of(name))
    packed, given, mask = texts(getattr(CONFIGS[name], "segments", 0))
    losses = []
    for ours, theirs in logits_of(pair, name, packed, given, mask):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        generator = torch.Generator().manual_seed(5)
        for values in (ours, theirs):
            generator.manual_seed(5)
            if values.ndim == 1:
                target = torch.rand(values.shape, generator=generator).round()
                losses.append(F.binary_cross_entropy_with_logits(values, target))
            else:
                labels = torch.randint(values.shape[1], (len(values),), generator=generator)
                losses.append(F.cross_entropy(values, labels))
    ours, theirs = sum(losses[::2]), sum(losses[1::2])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours.backward()
    theirs.backward()
    assert_gradients_equal(pair)


@pytest.mark.parametrize("name", CONFIGS)
def test_key_map_in_both_directions(name: str) -> None:
    pair = loaded(pair_of(name))
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    tied = {key for key in theirs if key.endswith(("decoder.weight", "decoder.bias"))}
    tied |= {"vocab_projector.weight", "generator_lm_head.weight"}
    assert published.keys() == theirs.keys() - tied
    for key, tensor in published.items():
        assert torch.equal(tensor, theirs[key]), key
    back = pair.from_hf(published)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in ours.items())


BARE: dict[str, Callable] = {
    "roberta": transformers.RobertaModel,
    "spanbert": transformers.BertModel,
    "distilbert": transformers.DistilBertModel,
    "albert": transformers.AlbertModel,
    "electra": transformers.ElectraModel,
}


@pytest.mark.parametrize("name", BARE)
def test_key_map_reads_bare_models(name: str) -> None:
    pair = pair_of(name)
    tensors = pair.from_hf(BARE[name](pair.theirs.config).state_dict())
    backbone = {key for key in pair.ours.state_dict() if key.startswith("backbone.")}
    pooler = {"heads.pooler.dense.weight", "heads.pooler.dense.bias"}
    assert backbone <= tensors.keys() <= backbone | pooler
    assert (tensors.keys() & pooler == set()) == (name in ("distilbert", "electra"))


CLASSIFIERS: dict[str, Callable] = {
    "roberta": transformers.RobertaForSequenceClassification,
    "spanbert": transformers.BertForSequenceClassification,
    "distilbert": transformers.DistilBertForSequenceClassification,
    "albert": transformers.AlbertForSequenceClassification,
    "electra": transformers.ElectraForSequenceClassification,
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name: str) -> None:
    """The first token, a map with the family's activation, a linear map."""
    pair, module = pair_of(name), MODULES[name]
    backbone = pair.ours.backbone
    heads = {"pooler": Pooler(36, backbone.pooler_activation), "classifier": SequenceHead(36, 4)}
    published = transformers.AutoConfig.for_model(**module.to_hf_config(CONFIGS[name]), num_labels=4)
    pair = loaded(Pair(Checkpoint(backbone, **heads), CLASSIFIERS[name](published).eval(), *pair_functions(module)))
    packed, given, _ = texts(getattr(CONFIGS[name], "segments", 0))
    pooled = pair.ours.heads["pooler"](summary(backbone(packed), packed, "first"))
    ours = pair.ours.heads["classifier"](pooled)
    torch.testing.assert_close(ours, pair.theirs(**given).logits, rtol=1e-5, atol=1e-5)
    written = pair.to_hf(pair.ours.state_dict())
    assert written.keys() == pair.theirs.state_dict().keys()
    assert module.HF_FORMAT.class_of_heads(heads).name == CLASSIFIERS[name].__name__


def pair_functions(module) -> tuple[Callable, Callable]:
    return module.to_hf, module.from_hf


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_in_both_directions(name: str) -> None:
    """Through transformers' own reading and writing of a config.json."""
    module, config = MODULES[name.split("_")[0]], CONFIGS[name]
    written = transformers.AutoConfig.for_model(**module.to_hf_config(config)).to_dict()
    assert type(config)(**module.from_hf_config(written)) == config


@pytest.mark.parametrize(
    ("module", "key", "value"),
    [
        (roberta, "hidden_act", "relu"),
        (roberta, "pad_token_id", 0),
        (spanbert, "position_embedding_type", "relative_key"),
        (distilbert, "activation", "relu"),
        (albert, "num_hidden_groups", 2),
        (albert, "hidden_act", "swish"),
        (electra, "tie_word_embeddings", 0.5),
    ],
)
def test_variants_are_refused(module, key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"config.json: {key}={value!r}"):
        module.from_hf_config({key: value})


@pytest.mark.parametrize("name", BARE)
def test_other_positions_have_no_published_form(name: str) -> None:
    with pytest.raises(UserError, match="rotary: .* in transformers has learned"):
        MODULES[name].to_hf_config(CONFIGS[name].model_copy(update={"positions": RotaryPositionsConfig()}))


def test_a_distilbert_has_one_epsilon() -> None:
    with pytest.raises(UserError, match="norm_epsilon=1e-05"):
        distilbert.to_hf_config(DistilbertConfig(norm_epsilon=1e-5))


def test_albert_has_one_layer() -> None:
    model = build(CONFIGS["albert"], 0)
    assert len(model.layers) == 1 and len(list(model.depth())) == 3
    assert {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("layers.")} == {"0"}
