"""Tiny published folders of every family, saved by transformers with random weights of unusual sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from lmtool.config.registry import build
from lmtool.tokenizers.configs import BpeConfig, ByteBpeConfig, SentencePieceConfig, TokenizerConfig, WordPieceConfig
from lmtool.tokenizers.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, unbelievably.",
    "She sells sea shells by the sea shore. What a lovely film, what an awful film!",
] * 20
ROWS = 330
_BERT = {
    "vocab_size": ROWS, "num_hidden_layers": 2, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 52,
    "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
_STACKS = {
    "vocab_size": ROWS, "encoder_layers": 2, "decoder_layers": 3, "d_model": 36, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "init_std": 0.2,
}  # fmt: skip
_MARIAN = _STACKS | {
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "scale_embedding": True,
    "activation_function": "relu",
}  # fmt: skip
_T5 = {
    "vocab_size": ROWS, "num_layers": 2, "num_decoder_layers": 3, "d_model": 36, "d_kv": 10, "num_heads": 3, "d_ff": 52,
    "decoder_start_token_id": 0,
}  # fmt: skip
_LLAMA = {
    "vocab_size": ROWS, "num_hidden_layers": 2, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 52, "max_position_embeddings": 40, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
_MODERNBERT = {
    "vocab_size": ROWS, "num_hidden_layers": 4, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 52,
    "max_position_embeddings": 40, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
_BIGBIRD = _BERT | {"sep_token_id": 3, "bos_token_id": 0, "eos_token_id": 0}
_DEBERTA = _BERT | {
    "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 20,
}  # fmt: skip
_DEBERTA_V3 = _DEBERTA | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8}
_ROBERTA = _BERT | {"max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
_WORDS, _BYTES = WordPieceConfig(), ByteBpeConfig(special_tokens="roberta")
_PIECES = SentencePieceConfig(sentinels=10)


def _of(name: str, config: str, tokenizer: TokenizerConfig, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**sizes)), tokenizer


FAMILIES: dict[str, tuple[Callable[[], nn.Module], TokenizerConfig]] = {
    "bert": _of("BertForPreTraining", "BertConfig", _WORDS, **_BERT),
    "roberta": _of("RobertaForMaskedLM", "RobertaConfig", _BYTES, **_ROBERTA),
    "distilbert": _of(
        "DistilBertForMaskedLM", "DistilBertConfig", _WORDS, vocab_size=ROWS, n_layers=2, dim=36, n_heads=3,
        hidden_dim=52, max_position_embeddings=40, initializer_range=0.2,
    ),
    "albert": _of("AlbertForPreTraining", "AlbertConfig", _WORDS, **_BERT, embedding_size=20),
    "electra": _of("ElectraForPreTraining", "ElectraConfig", _WORDS, **_BERT, embedding_size=20),
    "gpt": _of(
        "GPT2LMHeadModel", "GPT2Config", ByteBpeConfig(), vocab_size=ROWS, n_layer=2, n_embd=36, n_head=3, n_inner=52,
        n_positions=40, bos_token_id=0, eos_token_id=0, initializer_range=0.2,
    ),
    "gpt1": _of(
        "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", BpeConfig(), vocab_size=ROWS, n_layer=2, n_embd=36, n_head=3,
        n_positions=40, initializer_range=0.2,
    ),
    "modernbert": _of(
        "ModernBertForMaskedLM", "ModernBertConfig", ByteBpeConfig(special_tokens="bert"), **_MODERNBERT
    ),
    "bigbird": _of("BigBirdForMaskedLM", "BigBirdConfig", SentencePieceConfig(special_tokens="albert"), **_BIGBIRD),
    "deberta": _of("DebertaForMaskedLM", "DebertaConfig", ByteBpeConfig(special_tokens="bert"), **_DEBERTA),
    "deberta_v3": _of("DebertaV2ForMaskedLM", "DebertaV2Config", _WORDS, **_DEBERTA_V3),
    "xlnet": _of(
        "XLNetLMHeadModel", "XLNetConfig", SentencePieceConfig(special_tokens="xlnet"), vocab_size=ROWS, n_layer=2,
        d_model=36, n_head=3, d_inner=52, initializer_range=0.2,
    ),
    "llama": _of("LlamaForCausalLM", "LlamaConfig", ByteBpeConfig(), **_LLAMA),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", ByteBpeConfig(splitting="qwen2"), **_LLAMA),
    "t5": _of("T5ForConditionalGeneration", "T5Config", _PIECES, **_T5),
    "transformer": _of("MarianMTModel", "MarianConfig", _PIECES, **_MARIAN),
    "bart": _of("BartForConditionalGeneration", "BartConfig", _BYTES, **_STACKS, decoder_start_token_id=2),
}  # fmt: skip


@cache
def trained_tokenizer(family: str) -> Tokenizer:
    return build(FAMILIES[family][1], TEXTS, ROWS)


def make(family: str, folder: Path) -> nn.Module:
    """Write the family's folder. Returns the model in evaluation mode."""
    model, _ = FAMILIES[family]
    torch.manual_seed(5)
    published = model().eval()
    with torch.no_grad():
        for name, buffer in published.named_buffers():
            if name == "final_logits_bias" and family == "bart":
                buffer.normal_()
    published.save_pretrained(folder)
    trained_tokenizer(family).save(folder)
    return published


def logits_of(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, decoder: torch.Tensor | None) -> torch.Tensor:
    """Logits of the published model at every position."""
    more = {} if decoder is None else {"decoder_input_ids": decoder}
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, **more)
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


def sample(two_stacks: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Ids and mask of three rows, padded on the right; ids for a decoder."""
    ids = torch.arange(3 * 19).reshape(3, 19) * 37 % (ROWS - 40) + 10
    mask = (torch.arange(19)[None] < torch.tensor([19, 11, 1])[:, None]).long()
    return ids, mask, (torch.arange(3 * 7).reshape(3, 7) * 11 % 200 + 10 if two_stacks else None)


def _names(count: int, names: list[str] | None) -> dict[str, Any]:
    """The labels of a published classifier, as keys of its configuration."""
    if names is None:
        return {"num_labels": count}
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


CLASSIFIERS: dict[str, tuple[str, str]] = {
    "bert": ("BertForSequenceClassification", "BertTokenizer"),
    "roberta": ("RobertaForSequenceClassification", "RobertaTokenizer"),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertTokenizer"),
    "albert": ("AlbertForSequenceClassification", "PreTrainedTokenizerFast"),
    "electra": ("ElectraForSequenceClassification", "ElectraTokenizer"),
    "gpt": ("GPT2ForSequenceClassification", "GPT2Tokenizer"),
    "gpt1": ("OpenAIGPTForSequenceClassification", "PreTrainedTokenizerFast"),
    "modernbert": ("ModernBertForSequenceClassification", "PreTrainedTokenizerFast"),
    "bigbird": ("BigBirdForSequenceClassification", "PreTrainedTokenizerFast"),
    "deberta": ("DebertaForSequenceClassification", "PreTrainedTokenizerFast"),
    "deberta_v3": ("DebertaV2ForSequenceClassification", "PreTrainedTokenizerFast"),
    "xlnet": ("XLNetForSequenceClassification", "XLNetTokenizer"),
    "llama": ("LlamaForSequenceClassification", "PreTrainedTokenizerFast"),
    "qwen2": ("Qwen2ForSequenceClassification", "PreTrainedTokenizerFast"),
    "bart": ("BartForSequenceClassification", "BartTokenizer"),
    "t5": ("T5ForSequenceClassification", "PreTrainedTokenizerFast"),
}
"""The published classifier of each family, and the tokenizer_class of its folder."""


def make_classifier(
    family: str, folder: Path, count: int = 2, names: list[str] | None = None, **keys: Any
) -> nn.Module:
    """Write a classifier's folder as transformers does. Returns the model in evaluation mode."""
    model, _ = FAMILIES[family]
    name, tokenizer_class = CLASSIFIERS[family]
    torch.manual_seed(7)
    config = model().config
    longest = "n_positions" if hasattr(config, "n_positions") else "max_position_embeddings"
    config.update({**_names(count, names), **({} if family == "xlnet" else {longest: 160}), **keys})
    published = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in published.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    written = trained_tokenizer(family)
    published.config.pad_token_id = written.roles.get("pad", published.config.pad_token_id)
    published.save_pretrained(folder)
    written.save(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}
    if family in ("albert",):
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps(settings))
    return published
