from __future__ import annotations

import numpy as np
import pytest

from lmtool.config.registry import build
from lmtool.data.configs import FORMATS
from lmtool.data.formats import FormatTemplate, text_format, truncate_texts
from lmtool.errors import UserError
from lmtool.tokenizers.configs import ByteBpeConfig

from .data_fixtures import bytebpe, wordpiece


def test_bert_format_joins_texts_and_pairs():
    tokenizer = wordpiece()
    laid = text_format("bert", tokenizer)
    cls, sep = tokenizer.role("cls"), tokenizer.role("sep")
    ids, columns = laid.join(np.array([7, 8], dtype=np.int32))
    assert ids.tolist() == [cls, 7, 8, sep] and ids.dtype == np.int64
    assert columns["segment"].tolist() == [0, 0, 0, 0]
    ids, columns = laid.join(np.array([7, 8]), np.array([9]))
    assert ids.tolist() == [cls, 7, 8, sep, 9, sep]
    assert columns["segment"].tolist() == [0, 0, 0, 0, 1, 1]
    assert [FormatTemplate.of(laid, texts).special_count for texts in (1, 2)] == [2, 3]
    with pytest.raises(UserError, match="no eos token"):
        text_format("gpt", tokenizer)


def test_roberta_format_joins_texts_and_pairs():
    """`<s> a </s>` and `<s> a </s></s> b </s>`, with RoBERTa's special tokens."""
    tokenizer = build(ByteBpeConfig(special_tokens="roberta"), ["a small text of some words"] * 3, 300)
    laid = text_format("roberta", tokenizer)
    ids, columns = laid.join(tokenizer.encode("a"))
    assert tokenizer.pieces(ids) == ["<s>", "a", "</s>"] and columns == {} and ids.dtype == np.int64
    ids, columns = laid.join(tokenizer.encode("a"), tokenizer.encode("b"))
    assert tokenizer.pieces(ids) == ["<s>", "a", "</s>", "</s>", "b", "</s>"] and columns == {}
    assert tokenizer.role("pad") == 1, "the published position table starts after the pad id"
    template = FormatTemplate.of(laid, 2)
    assert [len(piece) for piece in template.pieces] == [1, 2, 1] and template.special_count == 4


def test_gpt_format_joins_texts_and_pairs():
    tokenizer = bytebpe()
    laid = text_format("gpt", tokenizer)
    eos = tokenizer.role("eos")
    assert laid.join(np.array([7, 8]))[0].tolist() == [7, 8, eos]
    ids, columns = laid.join(np.array([7, 8]), np.array([9]))
    assert ids.tolist() == [7, 8, eos, 9, eos] and columns == {}
    with pytest.raises(UserError, match="no cls token"):
        text_format("bert", tokenizer)


def test_encoder_decoder_formats_join_texts_and_pairs():
    tokenizer = bytebpe()
    eos = tokenizer.role("eos")
    laid = text_format("t5", tokenizer)
    assert laid.join(np.array([7, 8]))[0].tolist() == [7, 8, eos]
    assert laid.join(np.array([7]), np.array([9]))[0].tolist() == [7, eos, 9, eos]
    tokenizer = wordpiece()
    laid = text_format("bart", tokenizer)
    cls, sep = tokenizer.role("cls"), tokenizer.role("sep")
    assert laid.join(np.array([7, 8]))[0].tolist() == [cls, 7, 8, sep]
    ids, columns = laid.join(np.array([7]), np.array([9]))
    assert ids.tolist() == [cls, 7, sep, sep, 9, sep] and columns == {}


@pytest.mark.parametrize("rule", ["bert", "longest_first"])
def test_truncation_shortens_the_longer_text(rule):
    def one_by_one(a: int, b: int, limit: int) -> tuple[int, int]:
        first_longer = a > b
        while a + b > limit:
            if a > b or (rule == "longest_first" and a == b and not first_longer):
                a -= 1
            else:
                b -= 1
        return a, b

    cases = [(a, b, limit) for a in range(12) for b in range(12) for limit in range(0, 24, 1)]
    for a, b, limit in cases:
        assert truncate_texts(np.array([[a], [b]]), limit, rule).flatten().tolist() == [*one_by_one(a, b, limit)]
    a, b = np.array([c[0] for c in cases]), np.array([c[1] for c in cases])
    new_a, new_b = truncate_texts(np.stack([a, b]), 7, rule)
    assert list(zip(new_a.tolist(), new_b.tolist(), strict=True)) == [one_by_one(x, y, 7) for x, y, _ in cases]


def test_formats_list_the_roles_they_read():
    """FORMATS lists exactly the roles that the formats read; configurations are checked against it."""

    class RecordingTokenizer:
        def __init__(self):
            self.roles = []

        def role(self, name):
            self.roles.append(name)
            return len(self.roles)

    for name, metadata in FORMATS.items():
        tokenizer = RecordingTokenizer()
        text_format(name, tokenizer)
        assert tuple(tokenizer.roles) == (*metadata.roles, *metadata.added)
