from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer, BertTokenizer, OpenAIGPTTokenizer, PreTrainedTokenizerFast

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.tokenizers.configs import BpeConfig, ByteBpeConfig, FolderConfig, SentencePieceConfig, WordPieceConfig
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, unbelievably.",
    "She sells sea shells by the sea shore. Café, naïve, Ångström, 中文 and 123,456 numbers!",
    "Don't stop -- it's 'quoted' “text” with [brackets] and <angles>.",
] * 20
STRINGS = [
    "",
    " ",
    "Hello world",
    "HELLO  Wörld\tÉcole\nnew line",
    "[MASK] [CLS] <|endoftext|> [UNK]",
    "中文字 mixed日本語 かな 한국어",
    "emoji 👩‍👩‍👧 \u200bzero width \u0301 combining é",
    "control \x00\x07\ufffd chars\u00a0nbsp\u3000wide",
    "a" * 300,
    "punct!!! ... ¿qué? —dash— $5.00 #tag @user ²½",
    "İstanbul ẞ ﬁ ligature",
]


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    return build(WordPieceConfig(), TEXTS, 400)


@pytest.fixture(scope="module")
def bytebpe() -> Tokenizer:
    return build(ByteBpeConfig(), TEXTS, 400)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return build(BpeConfig(), TEXTS, 400)


def test_wordpiece_has_bert_roles(wordpiece):
    assert wordpiece.pieces(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert wordpiece.roles == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert wordpiece.special_ids == {0, 1, 2, 3, 4}
    assert wordpiece.vocab_size <= 400
    with pytest.raises(UserError, match="no eos token"):
        wordpiece.role("eos")


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_ids_match_bert_tokenizer(tmp_path, lowercase):
    ours = build(WordPieceConfig(lowercase=lowercase), TEXTS, 400)
    words = ours.pieces(range(ours.vocab_size))
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    # BertTokenizer's normalization with the trained vocabulary.
    theirs = BertTokenizer(vocab={word: n for n, word in enumerate(words)}, do_lower_case=lowercase)
    for text in STRINGS + TEXTS[:3]:
        plain = text.replace("[", "(").replace("]", ")")  # theirs reads [MASK] as a special token
        assert ours.encode(plain).tolist() == theirs.encode(plain, add_special_tokens=False), text


def test_bpe_ids_match_gpt_tokenizer(tmp_path, bpe):
    model = json.loads(bpe._backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "#version: 0.2\n" + "".join(f"{first} {second}\n" for first, second in model["merges"])
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    theirs = OpenAIGPTTokenizer.from_pretrained(tmp_path)
    for text in STRINGS + TEXTS[:3]:
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert bpe.encode(text).tolist() == ids, text


def test_bpe_roles_and_merges_match_paper(bpe):
    assert bpe.pieces(range(2)) == ["<unk>", "<|endoftext|>"] and bpe.special_ids == {0, 1}
    assert bpe.roles == {"unk": 0, "pad": 1, "bos": 1, "eos": 1} and bpe.vocab_size <= 400
    assert bpe.pieces(bpe.encode("The dog, the DOG")) == ["the</w>", "dog</w>", ",</w>", "the</w>", "dog</w>"]
    assert bpe.decode(bpe.encode("The lazy dog sleeps")) == "the lazy dog sleeps"
    assert 0 in bpe.encode("हिन्दी")
    # Sennrich et al. 2016, section 3.2: the merges of this toy text.
    toy = build(BpeConfig(minimum_count=1), ["low " * 5 + "lower " * 2 + "newest " * 6 + "widest " * 3], 40)
    merges = [tuple(pair) for pair in json.loads(toy._backend.to_str())["model"]["merges"]]
    assert set(merges[:3]) == {("e", "s"), ("es", "t</w>"), ("l", "o")}


def test_bytebpe_decodes_to_same_text(bytebpe):
    for text in STRINGS:
        assert bytebpe.decode(bytebpe.encode(text)) == text
    end = bytebpe.role("eos")
    assert bytebpe.roles == {"pad": end, "bos": end, "eos": end}


def test_special_token_strings_in_text_are_not_special(wordpiece, bytebpe, bpe):
    for tokenizer in (wordpiece, bytebpe, bpe):
        for text in ("[MASK] a [SEP]", "<|endoftext|>", "[PAD][UNK]"):
            ids = tokenizer.encode(text)
            assert len(ids) > 1 and not set(ids.tolist()) & (tokenizer.special_ids - {tokenizer.roles.get("unk")})
    assert "".join(wordpiece.pieces(wordpiece.encode("[SEP]"))).replace("##", "") == "[sep]"


def test_batch_encoding_matches_single_texts(wordpiece, bytebpe, bpe):
    for tokenizer in (wordpiece, bytebpe, bpe):
        for ids, text in zip(tokenizer.encode_batch(STRINGS), STRINGS, strict=True):
            assert ids.dtype == np.int32 and np.array_equal(ids, tokenizer.encode(text))


def test_starts_word_marks_first_pieces(wordpiece, bytebpe):
    ids = wordpiece.encode("unbelievably, zzz")
    starts = wordpiece.starts_word[ids]
    assert [not piece.startswith("##") for piece in wordpiece.pieces(ids)] == starts.tolist()
    ids = bytebpe.encode(" the dog, unbelievably")
    words = [piece for piece, start in zip(bytebpe.pieces(ids), bytebpe.starts_word[ids], strict=True) if start]
    assert len(words) == 4 and words[2] == ","
    assert len(bytebpe.starts_word) == bytebpe.vocab_size


@pytest.mark.parametrize(
    "config",
    [
        WordPieceConfig(), BpeConfig(), ByteBpeConfig(), ByteBpeConfig(special_tokens="roberta"),
        SentencePieceConfig(), SentencePieceConfig(special_tokens="albert"), SentencePieceConfig(algorithm="bpe"),
        SentencePieceConfig(special_tokens="xlnet"),
    ],
    ids=lambda config: f"{config.name} {getattr(config, 'special_tokens', '')}",
)  # fmt: skip
def test_config_roles_match_tokenizer(config):
    tokenizer = build(config, TEXTS, 420)
    assert {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])} == config.roles
    assert FolderConfig(path="x").roles is None


def test_continuation_is_text_added_by_ids(wordpiece, bytebpe, bpe):
    for tokenizer in (wordpiece, bytebpe, bpe):
        before, ids = tokenizer.encode("the lazy").tolist(), tokenizer.encode(" dog sleeps").tolist()
        assert tokenizer.continuation(before, ids) == " dog sleeps" and tokenizer.continuation([], ids).strip()
    cut = bytebpe.encode("é").tolist()  # two bytes; the first alone is not valid text
    assert bytebpe.continuation(cut[:1], cut[1:]) == bytebpe.decode(cut[1:])


def test_saved_tokenizer_matches_transformers(tmp_path, wordpiece, bytebpe, bpe):
    for name, tokenizer in (("wordpiece", wordpiece), ("bytebpe", bytebpe), ("bpe", bpe)):
        tokenizer.save(tmp_path / name)
        loaded = Tokenizer.load(tmp_path / name)
        assert loaded.fingerprint == tokenizer.fingerprint and loaded.roles == tokenizer.roles
        for reader in (PreTrainedTokenizerFast, AutoTokenizer):
            theirs = reader.from_pretrained(tmp_path / name)
            for text in STRINGS:
                ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
                assert ids == loaded.encode(text).tolist(), text
        roles = {role: theirs.convert_tokens_to_ids(getattr(theirs, f"{role}_token")) for role in tokenizer.roles}
        assert roles == tokenizer.roles
    both = PreTrainedTokenizerFast.from_pretrained(tmp_path / "wordpiece")("the dog", "the sea")
    assert both["input_ids"].count(wordpiece.role("sep")) == 2 and both["input_ids"][0] == wordpiece.role("cls")


def test_training_is_deterministic_across_processes(wordpiece, bytebpe, bpe):
    code = (
        "import json, sys; from lmtool.config.registry import build;"
        "from lmtool.tokenizers.configs import BpeConfig, ByteBpeConfig, SentencePieceConfig, WordPieceConfig;"
        "texts = json.load(sys.stdin);"
        "print(*(build(one(), texts, 400).fingerprint for one in (WordPieceConfig, ByteBpeConfig, BpeConfig)))"
    )
    for threads in ("1", "4"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(TEXTS),
            env={"RAYON_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [wordpiece.fingerprint, bytebpe.fingerprint, bpe.fingerprint]


def test_fingerprint_depends_on_size_and_case(wordpiece):
    assert build(WordPieceConfig(), TEXTS, 100).fingerprint != wordpiece.fingerprint
    assert build(WordPieceConfig(lowercase=False), TEXTS, 400).fingerprint != wordpiece.fingerprint


@pytest.mark.parametrize("config", [WordPieceConfig(), ByteBpeConfig(), BpeConfig()])
def test_training_without_text_is_refused(config):
    for texts in ([], ["", " \n"]):
        with pytest.raises(UserError, match="no characters"):
            build(config, texts, 400)


@pytest.mark.parametrize(("config", "size"), [(WordPieceConfig(), 8), (ByteBpeConfig(), 200), (BpeConfig(), 3)])
def test_too_small_vocabulary_is_refused(config, size):
    with pytest.raises(UserError, match=f"vocab_size={size} is too small"):
        build(config, TEXTS, size)


def test_megabyte_word_is_split_for_training(wordpiece):
    """Training time grows with the square of a word's length; text without such words is unchanged."""
    word = "ab" * 500_000
    assert training_text([word, "a b"]) == [[word[:1000]] * 1000, ["a b"]]
    assert training_text(TEXTS) == [TEXTS]
    assert build(WordPieceConfig(), [*TEXTS, word], 400).vocab_size <= 400
    assert build(ByteBpeConfig(), [*TEXTS, word], 400).vocab_size == 400


def test_catastrophic_pattern_is_refused(tmp_path, wordpiece):
    """A foreign tokenizer.json may have a regex that backtracks without end; the library panics."""
    wordpiece.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({**data, "pre_tokenizer": pattern}))
    tokenizer = Tokenizer.load(tmp_path)
    text = "a" * 40 + "!"
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text]), tokenizer.encode_aligned):
        with pytest.raises(UserError, match="cannot tokenize a text") as caught:
            encode(text)
        assert caught.value.hint and len(tokenizer.encode("b")) == 1


def test_small_vocabularies_respect_vocab_size():
    for size in (16, 20, 50, 300):
        assert build(WordPieceConfig(), TEXTS, size).vocab_size <= size
        assert build(BpeConfig(), TEXTS, size).vocab_size <= size
    assert build(ByteBpeConfig(), TEXTS, 257).vocab_size == 257


def test_folder_without_tokenizer_is_refused_by_key(tmp_path):
    for path, problem in ((tmp_path, "the folder has no tokenizer"), (tmp_path / "x", "no such folder")):
        with pytest.raises(UserError, match=f"tokenizer.path={path}: {problem}"):
            build(FolderConfig(path=str(path)), (), 400)


def test_broken_tokenizer_folders_are_refused(tmp_path, wordpiece):
    with pytest.raises(UserError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no tokenizer.json"):
        Tokenizer.load(tmp_path)
    wordpiece.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_bytes()
    for content in (whole[:500], b"", b"[]", b"{}", b"\xff\xfe", whole.replace(b'"WordPiece"', b'"Nonsense"')):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"tokenizer\.json: not a valid tokenizer file|tokenizer\.json:\d+:\d+: not JSON"
        ):
            Tokenizer.load(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "special_tokens_map.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"special_tokens_map\.json:1"):
        Tokenizer.load(tmp_path)
