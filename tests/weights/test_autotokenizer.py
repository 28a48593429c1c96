"""AutoTokenizer gives the same ids on folders that lmtool exports, for every family and tokenizer."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from lmtool.config.registry import build, builder_module, lookup
from lmtool.data.examples import Rows
from lmtool.data.formats import with_format
from lmtool.errors import CheckFailed, UserError
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tokenizers.configs import (
    BpeConfig,
    ByteBpeConfig,
    CharacterConfig,
    SentencePieceConfig,
    SpelledConfig,
    TokenizerConfig,
    WordConfig,
    WordPieceConfig,
)
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights import comparing
from lmtool.weights.comparing import compare_autotokenizer
from lmtool.weights.exporting import Export, TokenizerSettings, write_export
from lmtool.weights.folders import families
from tests.breadth import slow_but
from tests.tokenizers.test_published_folders import ADVERSARIAL, TEXTS

KINDS: dict[str, TokenizerConfig] = {
    "wordpiece": WordPieceConfig(),
    "bytebpe": ByteBpeConfig(),
    "bytebpe_roberta": ByteBpeConfig(special_tokens="roberta"),
    "bytebpe_qwen2": ByteBpeConfig(splitting="qwen2"),
    "bytebpe_qwen2_bert": ByteBpeConfig(splitting="qwen2", special_tokens="bert"),
    "bpe": BpeConfig(),
    "t5": SentencePieceConfig(sentinels=10),
    "albert": SentencePieceConfig(special_tokens="albert", lowercase=True),
    "xlnet": SentencePieceConfig(special_tokens="xlnet"),
    "pairs": SentencePieceConfig(algorithm="bpe", special_tokens="albert"),
    "word": WordConfig(special_tokens="roberta"),
    "character": CharacterConfig(special_tokens="gpt"),
    "spelled": SpelledConfig(),
}
CHARACTERS = " \t\n\r\u00a0\u3000\u200b\u200d\u0301\ufeff\x00\x01\x7f\x85'sdtlvm12309ABcdéñ中あ한ไ😀👩,.!-—“<>[]/#▁Ġ"


@cache
def train_tokenizer(kind: str) -> Tokenizer:
    return build(KINDS[kind], TEXTS, 420)


@cache
def odd_strings(tokenizer: Tokenizer) -> list[str]:
    """Random unusual characters, and special tokens in texts."""
    chance = random.Random(3)
    drawn = ["".join(chance.choices(CHARACTERS, k=chance.randint(1, 20))) for _ in range(100)]
    special = [f"a {token} b{token}c  {token}" for token in tokenizer.pieces(sorted(tokenizer.special_ids))]
    return [*(text for text in ADVERSARIAL if len(text) < 1000), *drawn, *special]


def write_folder(model: str, tokenizer: Tokenizer, split: bool, folder: Path) -> Path | None:
    """The folder of a model without weights; None if the tokenizer lacks a special token of the model."""
    entry = lookup("model", model)
    assert entry is not None
    config = entry.config(**({"random_plan": "transformers"} if model == "bigbird" else {}))
    if isinstance(config, EncoderDecoderConfig) and config.start_role not in tokenizer.roles:
        return None
    content = builder_module(entry).HF_FORMAT.to_hf_config(config)
    settings = TokenizerSettings(False, 60, split, False)
    write_export(Export("", content, {}, {}, ()), config, tokenizer, settings, "", folder, lambda draft: None)
    return folder


@pytest.mark.parametrize("model", slow_but({"bert", "bart", "qwen2"}, families().values()))
def test_exported_tokenizers_match_or_are_refused(model: str, tmp_path: Path) -> None:
    refused = set()
    for number, kind in enumerate(KINDS):
        tokenizer, split = train_tokenizer(kind), bool(number % 2)
        try:
            folder = write_folder(model, tokenizer, split, tmp_path / kind)
        except UserError as error:
            refused.add(kind)
            assert "Qwen2Tokenizer" in error.message and not (tmp_path / kind).exists()
            continue
        if folder is None:
            continue
        theirs, strings = AutoTokenizer.from_pretrained(folder), odd_strings(tokenizer)
        ours = [ids.tolist() for ids in tokenizer.with_parsing(not split).encode_batch(strings)]
        given = theirs(strings, add_special_tokens=False)["input_ids"]
        assert [text for text, *both in zip(strings, ours, given, strict=True) if both[0] != both[1]] == [], kind
        assert {role: getattr(theirs, f"{role}_token_id") for role in tokenizer.roles} == tokenizer.roles
        assert len(theirs) == tokenizer.vocab_size
        assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint, kind
        if kind in ("wordpiece", "bytebpe_qwen2"):
            assert "gives the same ids" in compare_autotokenizer(folder, tokenizer)
    assert refused == (set(KINDS) - {"bytebpe_qwen2", "bytebpe_qwen2_bert"} if model == "qwen2" else set())


PAIRS = {
    "albert": "albert", "bart": "bytebpe_roberta", "bert": "wordpiece", "bigbird": "pairs",
    "deberta": "bytebpe_roberta", "deberta_v3": "albert", "distilbert": "wordpiece", "electra": "wordpiece",
    "modernbert": "bytebpe_qwen2_bert", "roberta": "bytebpe_roberta", "t5": "t5", "xlnet": "xlnet",
}  # fmt: skip


@pytest.mark.parametrize("model", PAIRS)
def test_pair_truncation_matches_autotokenizer(model: str, tmp_path: Path) -> None:
    """300 pairs of random lengths and limits: one or both texts truncated, equal lengths, odd and even room."""
    entry, draw = lookup("model", model), random.Random(5)
    assert entry is not None
    format_name = entry.config().text_format
    tokenizer = with_format(train_tokenizer(PAIRS[model]), format_name)
    folder = write_folder(model, tokenizer, False, tmp_path / "folder")
    assert folder is not None
    theirs = AutoTokenizer.from_pretrained(folder)
    both_sides = 0
    for _ in range(300):
        counts = [draw.choice([1, 3, 10, 11, 25])] * 2 if draw.random() < 0.2 else draw.choices(range(1, 40), k=2)
        first, second = (" ".join(draw.choices(["the", "cat", "saw", "a", "river"], k=count)) for count in counts)
        limit = draw.randint(6, 60)
        given = theirs(first, second, truncation=True, max_length=limit)
        rows = Rows.of_texts(text=[first], pair=[second])
        examples = SequenceExamples(rows, InputFormat(tokenizer, format_name, limit), "text", "input")
        inputs = examples.batch(examples.plan(0).rows, np.arange(1), 0).inputs
        assert inputs.tokens.tolist() == given["input_ids"], (counts, limit)
        if "segment" in inputs.columns and "token_type_ids" in given:
            assert inputs.columns["segment"].tolist() == given["token_type_ids"]
        lengths = [len(tokenizer.encode(text)) for text in (first, second)]
        both_sides += min(lengths) > (limit - theirs.num_special_tokens_to_add(pair=True)) / 2
    assert both_sides > 60


def test_differences_from_autotokenizer_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer("wordpiece")
    folder = write_folder("bert", tokenizer, False, tmp_path / "folder")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for change, message in (
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False}, "encodes 5 of 29 unusual strings differently"),
        ({"tokenizer_class": "T5Tokenizer"}, "AutoTokenizer cannot read the folder"),
        ({"extra_special_tokens": ["a"]}, "of 29 unusual strings differently"),
    ):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(CheckFailed, match=message):
            compare_autotokenizer(folder, tokenizer)
    monkeypatch.setattr(comparing, "find_spec", lambda name: None)
    assert "transformers is not installed" in compare_autotokenizer(folder, tokenizer)


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer"}])
def test_byte_level_llama_matches_autotokenizer(settings: dict[str, str], tmp_path: Path) -> None:
    folder = write_folder("llama", train_tokenizer("bytebpe_qwen2"), False, tmp_path / "folder")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    strings = odd_strings(train_tokenizer("bytebpe_qwen2"))
    ours = Tokenizer.load(folder, parse_special_tokens=True).encode_batch(strings)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert [ids.tolist() for ids in ours] == theirs(strings, add_special_tokens=False)["input_ids"]
