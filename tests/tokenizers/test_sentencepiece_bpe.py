"""SentencePiece BPE as a fast tokenizer: the same ids as the sentencepiece library on any text."""

from __future__ import annotations

import io
import random
from pathlib import Path
from unicodedata import normalize

import pytest
import sentencepiece
from tokenizers import normalizers
from transformers import AutoTokenizer

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.tokenizers.backends import read_model
from lmtool.tokenizers.configs import SentencePieceConfig
from lmtool.tokenizers.sentencepiece import train_model
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.test_tokenizers import STRINGS

SYLLABLES = ["ab", "a", "aa", "b", "ba", "--", "=", "he", "the", "ing", "é", "ß", "中", "ﬁ", "ｆ", "가"]
CONFIG = SentencePieceConfig(algorithm="bpe", sentinels=4, character_coverage=0.99)


def words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices(SYLLABLES, k=chance.randint(1, 6))) for _ in range(count))


TEXTS = [words(random.Random(number), 30) for number in range(200)]
RANGES = ((0x20, 0x7F), (0, 0x300), (0x1100, 0x1200), (0xAC00, 0xD000), (0x2000, 0x2600), (0x10000, 0x110000))


def strings(count: int, seed: int) -> list[str]:
    """Random strings: any characters, small alphabets so that pieces overlap, and all kinds of spaces."""
    chance = random.Random(seed)
    spaces = [" ", "  ", "\t", "\n", "\u3000", "\u2581", "\u200b", "\x00", "\ufeff"]
    kinds = (
        lambda: "".join(chr(chance.randrange(*chance.choice(RANGES))) for _ in range(chance.randint(0, 30))),
        lambda: "".join(chance.choices("ab -=", k=chance.randint(0, 80))),
        lambda: "".join(chance.choices([*SYLLABLES, *spaces], k=chance.randint(0, 40))),
        lambda: "a" * chance.randint(0, 50) + chance.choice("b -") + "ab" * chance.randint(0, 50),
    )
    return [*STRINGS, "a" * 5000, " " * 5000, *(chance.choice(kinds)() for _ in range(count))]


def mismatched_texts(config: SentencePieceConfig, texts: list[str]) -> list[str]:
    """Texts with different ids in the library."""
    content, ours = train_model(config, TEXTS, 500), build(config, TEXTS, 500)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    # Normalization before the library: remove control characters, map white space to a space, NFKC.
    clean = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    cleaned = [clean.normalize_str(text) for text in texts]
    pairs = zip(texts, cleaned, ours.encode_batch(texts), strict=True)
    return [text for text, plain, ids in pairs if ids.tolist() != library.encode(plain)]


def test_bpe_ids_match_sentencepiece() -> None:
    assert mismatched_texts(CONFIG, strings(2000, 1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_bpe_ids_match_sentencepiece_on_many_texts(seed: int) -> None:
    albert = SentencePieceConfig(algorithm="bpe", special_tokens="albert", character_coverage=0.98 + seed / 200)
    texts = strings(40_000, seed)
    assert mismatched_texts(CONFIG, texts) == []
    assert mismatched_texts(albert, [normalize("NFD", text).lower() for text in texts if text.isascii()]) == []


def test_saved_bpe_tokenizer_has_roles_and_sentinels(tmp_path: Path) -> None:
    tokenizer = build(CONFIG, TEXTS, 500)
    assert build(CONFIG, iter(TEXTS), 500).fingerprint == tokenizer.fingerprint and tokenizer.vocab_size <= 500
    assert tokenizer.pieces(range(3)) == ["<pad>", "</s>", "<unk>"]
    assert tokenizer.sentinels == tuple(range(tokenizer.vocab_size - 1, tokenizer.vocab_size - 5, -1))
    assert tokenizer.decode(tokenizer.encode(" the  abab thing ")) == "the abab thing"
    for text in ("</s> <unk>", "<extra_id_0>"):  # text never encodes to a special token
        assert not set(tokenizer.encode(text).tolist()) & (tokenizer.special_ids - {tokenizer.role("unk")})
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.roles == tokenizer.roles
    ids, spans = loaded.encode_aligned("the  ﬁthing")
    assert "".join("the  ﬁthing"[start:end] for start, end in spans) == "theﬁthing" and len(ids) == len(spans)


def test_llama_folder_matches_transformers_and_sentencepiece(tmp_path: Path) -> None:
    """tokenizer.model alone, with a class, and as saved by transformers."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=700, byte_fallback=True,
        hard_vocab_limit=False, character_coverage=0.99, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    texts, alone = strings(300, 5), Tokenizer.load(tmp_path)
    assert alone.roles == {"unk": 0, "bos": 1, "eos": 2} and alone.decode(alone.encode("a  b\n中 ")) == "a  b\n中 "
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path, tmp_path / "saved"):
        ours = Tokenizer.load(folder)
        assert ours.roles == alone.roles and ours.special_ids == {0, 1, 2}
        for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
            assert ids.tolist() == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
            if text[:1] not in (" ", "\u2581"):  # transformers adds no space before a space
                assert ids.tolist() == library.encode(text), text
    (tmp_path / "tokenizer.model").write_bytes(train_model(SentencePieceConfig(sentinels=4), TEXTS, 300))
    with pytest.raises(UserError, match=r"tokenizer\.model: .* not a BPE model"):
        Tokenizer.load(tmp_path)


def test_too_small_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocab_size=20 is too small: .* special tokens need \d+ entries") as caught:
        build(CONFIG, TEXTS, 20)
    assert "src/" not in str(caught.value) and "tokenizer.vocab_size=1000" in str(caught.value.hint)


def test_damaged_score_raises_value_error() -> None:
    piece = b"\x12\x03abc"  # field 2, the score, as three bytes
    with pytest.raises(ValueError, match="wrong type"):
        read_model(b"\x0a" + bytes([len(piece)]) + piece)
