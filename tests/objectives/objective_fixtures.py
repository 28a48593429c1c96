"""A tiny corpus, tokenizer and models for the tests of objectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lmtool.config.registry import build
from lmtool.data.examples import SplitData
from lmtool.data.store import TokenStore
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.encoder_configs import DebertaConfig, XlnetConfig
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.models.pretransformer_configs import LstmConfig
from lmtool.tokenizers.configs import ByteBpeConfig, SentencePieceConfig, WordPieceConfig

TEXT = "the old cat sat near a quiet river while two dogs watched some birds cross over it very slowly"
WORDS = TEXT.split()
SIZES = {
    "vocab_size": 400, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48,
    "max_positions": 64, "attention_dropout": 0.0,
}  # fmt: skip


def sentences(documents=40, seed=0):
    """Random documents as lists of sentences."""
    draws = np.random.default_rng(seed)
    return [
        [" ".join(draws.choice(WORDS, draws.integers(3, 14))) + "." for _ in range(draws.integers(1, 9))]
        for _ in range(documents)
    ]


def tokenizer(kind="wordpiece"):
    config = {
        "wordpiece": WordPieceConfig(minimum_count=1),
        "bytebpe": ByteBpeConfig(minimum_count=1),
        "roberta": ByteBpeConfig(minimum_count=1, special_tokens="roberta"),
        "t5": SentencePieceConfig(sentinels=12),
    }[kind]
    return build(config, (text for document in sentences() for text in document), 100 if kind == "t5" else 350)


def tokenizers():
    """The tokenizer of each family that the tests of objectives train."""
    words = tokenizer()
    return {
        "bert": words, "deberta": words, "xlnet": words, "gpt": tokenizer("bytebpe"), "t5": tokenizer("t5"),
        "bart": tokenizer("roberta"), "lstm": tokenizer("bytebpe"),
    }  # fmt: skip


def store(tokens, documents=None):
    """A token store in memory. documents: lists of sentences."""
    documents = sentences() if documents is None else documents
    ids = [[tokens.encode(text) for text in document] for document in documents]
    flat = [ids for document in ids for ids in document]
    sentence_offsets = np.cumsum([0, *map(len, flat)])
    document_sentences = np.cumsum([0, *map(len, documents)])
    return TokenStore(
        np.concatenate(flat).astype(np.uint16), sentence_offsets[document_sentences], sentence_offsets,
        document_sentences, {}, Path(),
    )  # fmt: skip


def split(store, documents="joined", name="train", rows=()):
    """The store as the data of a split."""
    return SplitData(name, store, documents, dict(rows))


def backbone(family="bert", seed=0, **fields):
    config = {
        "bert": BertConfig, "gpt": GptConfig, "t5": T5Config, "bart": BartConfig, "deberta": DebertaConfig,
        "xlnet": XlnetConfig, "lstm": LstmConfig,
    }[family]  # fmt: skip
    if family == "lstm":
        sizes = {key: SIZES[key] for key in ("vocab_size", "num_layers", "hidden_size", "max_positions")}
        return build(config(**{**sizes, "embedding_size": 24, "dropout": 0.1, **fields}), seed)
    own = {"t5": {"head_size": 16}, "deberta": {"max_distance": 16}}.get(family, {})
    return build(config(**{**SIZES, **own, **fields}), seed)


def rows_of(examples, count, epoch=0):
    """The first `count` examples of an epoch as one batch."""
    numbers = np.arange(count)
    return examples.batch(examples.plan(epoch).rows[:count], numbers, epoch)


def gradients(learner, batches):
    """Losses by term and gradients by parameter of one step over several micro-batches."""
    learner.zero_grad()
    counts = {name: sum(learner.counts(batch).get(name, 0) for batch in batches) for name in learner.loss_weights}
    losses = dict.fromkeys(counts, 0.0)
    for batch in batches:
        output = learner(batch, 1)
        sum(output.loss_weights[name] * total / counts[name] for name, total in output.sums.items()).backward()
        for name, total in output.sums.items():
            losses[name] += total.item() / counts[name]
    return losses, {
        name: parameter.grad.clone() for name, parameter in learner.named_parameters() if parameter.grad is not None
    }
