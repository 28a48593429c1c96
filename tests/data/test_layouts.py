"""Special tokens that a tokenizer file adds to texts, compared with the formats of models."""

from __future__ import annotations

import json

import pytest

from lmtool.config.registry import build
from lmtool.data.configs import FORMATS
from lmtool.data.formats import layout_difference, with_format
from lmtool.tokenizers.configs import BpeConfig, ByteBpeConfig, SentencePieceConfig, WordPieceConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.data.data_fixtures import documents

KINDS = {
    "bert": (WordPieceConfig(), 200),
    "roberta": (ByteBpeConfig(special_tokens="roberta"), 400),
    "gpt2": (ByteBpeConfig(), 400),
    "gpt1": (BpeConfig(), 200),
    "t5": (SentencePieceConfig(sentinels=3), 60),
    "albert": (SentencePieceConfig(special_tokens="albert"), 60),
}
MATCHING_FORMATS = {
    "bert": {"bert"}, "roberta": {"roberta", "bart"}, "gpt2": {"plain"}, "gpt1": {"plain"}, "t5": {"t5", "gpt"},
    "albert": {"bert"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_with_format_changes_template_to_the_format(kind, tmp_path):
    config, size = KINDS[kind]
    tokenizer = build(config, documents(50), size)
    fitting = [name for name, metadata in FORMATS.items() if {*metadata.roles, *metadata.added} <= set(tokenizer.roles)]
    for name in fitting:
        problem = layout_difference(tokenizer, name)
        assert (problem is None) == (name in MATCHING_FORMATS[kind]), (name, problem)
        formatted = with_format(tokenizer, name)
        assert (formatted is tokenizer) == (problem is None)
        formatted.save(tmp_path / name)
        again = Tokenizer.load(tmp_path / name)
        assert layout_difference(again, name) is None
        assert again.encode("the cat ran").tolist() == tokenizer.encode("the cat ran").tolist()


def test_layout_difference_describes_mismatch():
    tokenizer = build(WordPieceConfig(), documents(50), 200)
    assert layout_difference(tokenizer, "plain") == "'[CLS] a [SEP]', not 'a'"
    one_segment = tokenizer.with_template(["c:0", "$A:0", "s:0"], ["c:0", "$A:0", "s:0", "$B:0", "s:0"], {
        "c": tokenizer.role("cls"), "s": tokenizer.role("sep"),
    })  # fmt: skip
    assert "in the segments [0, 0, 0, 0, 0], not [0, 0, 0, 1, 1]" in layout_difference(one_segment, "bert")


def test_copies_keep_special_tokens_without_role(tmp_path):
    build(ByteBpeConfig(), documents(50), 400).save(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = json.loads((tmp_path / name).read_text())
        values.pop("pad_token")
        extra = {"additional_special_tokens": ["cat"]} if name == "tokenizer_config.json" else {}
        (tmp_path / name).write_text(json.dumps(values | extra))
    tokenizer = Tokenizer.load(tmp_path)
    padded = tokenizer.with_padding()
    assert padded.roles["pad"] == tokenizer.role("eos") and padded.with_padding() is padded
    number = tokenizer.encode("cat").tolist()[0]
    assert number in tokenizer.special_ids
    assert number in padded.special_ids and number in with_format(tokenizer, "gpt").special_ids
