"""Tokenizer folders in the layouts of published families: lmtool and transformers give the same ids for every text.

The vocabularies are trained here, so nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import models, pre_tokenizers, trainers
from transformers import (
    AlbertTokenizer,
    BartTokenizer,
    BertTokenizer,
    BigBirdTokenizer,
    DistilBertTokenizer,
    ElectraTokenizer,
    GPT2Tokenizer,
    OpenAIGPTTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    RobertaTokenizer,
    T5Tokenizer,
    XLNetTokenizer,
)

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.tokenizers import backends
from lmtool.tokenizers.configs import TOKENIZER_FILES, ByteBpeConfig, FolderConfig, SentencePieceConfig, WordPieceConfig
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.sentencepiece import train_model
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.breadth import slow_but

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
STRINGS = 10_000
TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, unbelievably.",
    "She sells sea shells by the sea shore. Café, naïve, Ångström, 中文 and 123,456 numbers!",
    "Don't stop -- it's 'quoted' “text” with [brackets] and <angles>. The masks, 1,2,3, are 4,000 5, 6,",
    "Reading and writing, walking and talking: lowest newest widest, lower newer wider.",
] * 30
ADVERSARIAL = [
    "", " ", "   ", "\n\n\t ", "Hello world", "HELLO  Wörld\tÉcole\nnew line\r\nanother",
    " leading and trailing ", "[MASK] [CLS]a[SEP] <|endoftext|> [UNK]", "a <mask> b<mask> <mask>.",
    "<s>text</s> <pad><unk></w>", "<extra_id_0> x<extra_id_99>y <extra_id_100>",
    "##ing ▁the Ġthe </w> @@ ▁", "[mask] [cls] <MASK>", "中文字 mixed日本語 かな 한국어 ไทย עברית العربية",
    "emoji 👩‍👩‍👧 🏳️‍🌈 🇩🇪 \u200bzero\u200dwidth\ufeff",
    "\u0301 combining é e\u0301 n\u0303 \u1e69",
    "control \x01\x07\x7f\x85\ufffd chars\u00a0nbsp\u3000wide\u2028line", "nul \x00 inside",
    "a" * 300, "ab" * 3000, "字" * 200, "punct!!! ... ¿qué? —dash— $5.00 #tag @user ²½ … ‘’“”",
    "``quoted'' 1,000,000 and 1, 2,", "İstanbul ẞ ﬁ ligature ǅ Σίσυφος",
    "snake_case camelCase x=y+z; #include <stdio.h> https://a.b/c?d=e&f=%20",
    "\ud7a3\u1112\u1161\u11ab \u0e33 ㍿ ½ Ⅷ ① ｆｕｌｌ", "I'll we've they'd IT'S don't",
    "\U0010ffff \ue000 private", "tabs\t\tand  double   spaces", "١٢٣ 一二三 ৪",
    "soft\u00adhyphen non\u2011breaking",
]  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A folder, and the transformers class for it."""

    folder: Path
    reader: type


def real_strings() -> Iterator[str]:
    """Lines of the data sets beside the checkout: prose, verse, tweets and tables, in two languages."""
    files = sorted(path for path in SHARED.rglob("*") if path.suffix in (".txt", ".tsv", ".csv", ".jsonl", ".conll"))
    share = 2 * STRINGS // max(len(files), 1)
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n")[:300] for line in islice(file, share) if line.strip())


def texts_to_compare() -> list[str]:
    strings = list(real_strings()) if SHARED.is_dir() else []
    strings = strings[:: max(len(strings) // STRINGS, 1)]
    return [*ADVERSARIAL, *TEXTS[:4], *strings]


def wordpiece_folder(folder: Path, lowercase: bool = True) -> None:
    ours = build(WordPieceConfig(lowercase=lowercase), TEXTS, 400)
    write(folder / "vocab.txt", "".join(f"{word}\n" for word in ours.pieces(range(ours.vocab_size))))
    write(folder / "tokenizer_config.json", json.dumps({"do_lower_case": lowercase}))


def merges_folder(folder: Path, special: list[str], suffix: str = "") -> None:
    library = backends.gpt1_bpe(models.BPE()) if suffix else backends.gpt2_bpe(models.BPE())
    options = {"end_of_word_suffix": suffix} if suffix else {}
    library.model = models.BPE(**({"unk_token": "<unk>"} | options if suffix else {}))
    alphabet = [] if suffix else sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **options
    )
    library.train_from_iterator(TEXTS, trainer)
    model = json.loads(library.to_str())["model"]
    write(folder / "vocab.json", json.dumps(model["vocab"]))
    write(folder / "merges.txt", "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]))


def pieces_folder(folder: Path, kind: backends.UnigramFamily) -> None:
    (folder / "spiece.model").write_bytes(
        train_model(SentencePieceConfig(special_tokens=kind, lowercase=kind == "albert"), TEXTS, 420)
    )


def bigbird_folder(folder: Path) -> None:
    pieces_folder(folder, "albert")
    # Without the class it would be read as ALBERT's.
    write(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "BigBirdTokenizer"}))


def qwen2_folder(folder: Path) -> None:
    merges_folder(folder, ["<|endoftext|>"])
    # Without the class it would be read as GPT-2's.
    write(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())


ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FAMILIES: dict[str, tuple[Callable[[Path], None], type]] = {
    "bert": (wordpiece_folder, BertTokenizer),
    "bert_cased": (lambda folder: wordpiece_folder(folder, False), BertTokenizer),
    "electra": (wordpiece_folder, ElectraTokenizer),
    "distilbert": (wordpiece_folder, DistilBertTokenizer),
    "gpt2": (lambda folder: merges_folder(folder, ["<|endoftext|>"]), GPT2Tokenizer),
    "roberta": (lambda folder: merges_folder(folder, ROBERTA), RobertaTokenizer),
    "bart": (lambda folder: merges_folder(folder, ROBERTA), BartTokenizer),
    "gpt1": (lambda folder: merges_folder(folder, ["<unk>"], "</w>"), OpenAIGPTTokenizer),
    "t5": (lambda folder: pieces_folder(folder, "t5"), T5Tokenizer),
    "albert": (lambda folder: pieces_folder(folder, "albert"), AlbertTokenizer),
    "bigbird": (bigbird_folder, BigBirdTokenizer),
    "xlnet": (lambda folder: pieces_folder(folder, "xlnet"), XLNetTokenizer),
    "qwen2": (qwen2_folder, Qwen2Tokenizer),
}


@pytest.fixture(scope="module", params=slow_but({"bert", "gpt2", "roberta", "t5"}, FAMILIES))
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    make, reader = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make(folder)
    return Published(folder, reader)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return texts_to_compare()


def compare(ours: Tokenizer, theirs: object, texts: list[str], split: bool) -> None:
    expected = theirs(texts, add_special_tokens=False, split_special_tokens=split)["input_ids"]
    different = [
        (text[:80], ids.tolist()[:20], wanted[:20])
        for text, ids, wanted in zip(texts, ours.encode_batch(texts), expected, strict=True)
        if ids.tolist() != wanted
    ]
    assert not different, f"{len(different)} of {len(texts)}: {different[:3]}"


@pytest.mark.parametrize("parse", [False, True])
def test_published_files_match_transformers(published: Published, texts: list[str], parse: bool) -> None:
    theirs = published.reader.from_pretrained(published.folder)
    alike = parse or published.reader in (ElectraTokenizer, DistilBertTokenizer, BartTokenizer)
    texts = texts[:1000] if alike else texts
    compare(Tokenizer.load(published.folder, parse_special_tokens=parse), theirs, texts, not parse)


@pytest.mark.parametrize("parse", [False, True])
def test_folder_saved_by_transformers_matches(
    published: Published, tmp_path: Path, texts: list[str], parse: bool
) -> None:
    theirs = published.reader.from_pretrained(published.folder)
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path, parse_special_tokens=parse)
    compare(ours, theirs, texts[:500], not parse)
    roles = {name: getattr(theirs, f"{name}_token_id") for name in ours.roles}
    assert ours.roles == roles


def test_roles_match_transformers(published: Published) -> None:
    ours, theirs = Tokenizer.load(published.folder), published.reader.from_pretrained(published.folder)
    for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        wanted = getattr(theirs, f"{name}_token_id")
        # GPT-2's class has its end token as unk_token too, which byte-level BPE never needs.
        if (published.reader, name) != (GPT2Tokenizer, "unk"):
            assert ours.roles.get(name) == wanted, name


def test_saved_folder_loads_same_tokenizer(published: Published, tmp_path: Path, texts: list[str]) -> None:
    ours = Tokenizer.load(published.folder)
    ours.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.roles == ours.roles and again.sentinels == ours.sentinels
    assert again.fingerprint == ours.fingerprint and again.same_encoding(ours)
    compare(again, PreTrainedTokenizerFast.from_pretrained(tmp_path), texts[:500], True)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no data sets beside the checkout (../shared/data)")
def test_comparison_has_10000_real_strings(texts: list[str]) -> None:
    assert len(texts) > STRINGS and len(set(texts)) > STRINGS / 2


def test_sentinel_ids_descend(tmp_path: Path) -> None:
    tokenizer = build(SentencePieceConfig(sentinels=7), TEXTS, 300)
    assert tokenizer.pieces(tokenizer.sentinels) == [f"<extra_id_{number}>" for number in range(7)]
    assert list(tokenizer.sentinels) == list(range(tokenizer.vocab_size - 1, tokenizer.vocab_size - 8, -1))
    assert tokenizer.roles == {"pad": 0, "eos": 1, "unk": 2} and set(tokenizer.sentinels) < tokenizer.special_ids


@pytest.mark.parametrize("kind", ["t5", "albert", "xlnet"])
def test_sentencepiece_training_is_deterministic(kind: backends.UnigramFamily) -> None:
    config = SentencePieceConfig(special_tokens=kind, sentinels=10)
    tokenizer, again = build(config, TEXTS, 400), build(config, iter(TEXTS), 400)
    assert tokenizer.fingerprint == again.fingerprint and tokenizer.vocab_size <= 400
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"
    assert tokenizer.starts_word[tokenizer.encode("unbelievably lazy")].sum() == 2


def test_ids_match_sentencepiece_library(tmp_path: Path, texts: list[str]) -> None:
    """Only printable ASCII, because sentencepiece keeps control characters that transformers drops."""
    import sentencepiece

    (tmp_path / "spiece.model").write_bytes(train_model(SentencePieceConfig(), TEXTS, 420))
    library, ours = sentencepiece.SentencePieceProcessor(str(tmp_path / "spiece.model")), Tokenizer.load(tmp_path)
    plain = [text for text in texts if text.isascii() and text.isprintable()]
    assert len(plain) > 10
    for text, ids in zip(plain, ours.encode_batch(plain), strict=True):
        if "<" not in text:  # sentinels are pieces of the vocabulary
            assert ids.tolist() == library.encode(text), text


@pytest.mark.parametrize("special", ["gpt2", "roberta"])
def test_byte_bpe_has_special_tokens_of_family(special: str, tmp_path: Path) -> None:
    tokenizer = build(ByteBpeConfig(special_tokens=special), TEXTS, 400)
    assert tokenizer.vocab_size <= 400
    for text in ADVERSARIAL:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    if special == "roberta":
        assert tokenizer.pieces(range(4)) == ["<s>", "<pad>", "</s>", "<unk>"]
        assert tokenizer.roles["mask"] == tokenizer.vocab_size - 1
        tokenizer.save(tmp_path)
        both = PreTrainedTokenizerFast.from_pretrained(tmp_path)("a dog", "a fox")["input_ids"]
        assert both.count(2) == 3 and both[0] == 0


def test_special_tokens_are_read_on_request(tmp_path: Path) -> None:
    build(WordPieceConfig(), TEXTS, 300).save(tmp_path)
    reading = build(FolderConfig(path=str(tmp_path), parse_special_tokens=True), (), 0)
    plain = build(FolderConfig(path=str(tmp_path)), (), 0)
    assert reading.roles["mask"] in reading.encode("the [MASK] dog")
    assert plain.roles["mask"] not in plain.encode("the [MASK] dog")
    assert reading.fingerprint != plain.fingerprint  # separate token stores
    assert reading.same_encoding(plain) and plain.same_encoding(reading)  # teacher and student may share ids
    for others in (build(WordPieceConfig(), TEXTS, 100), build(WordPieceConfig(lowercase=False), TEXTS, 300)):
        assert not plain.same_encoding(others)


def test_oversized_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(UserError, match=r"tokenizer\.json: .* 8,589,934,592 bytes; .* at most 200,000,000"):
        Tokenizer.load(tmp_path)


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path) and len(set(TOKENIZER_FILES)) == len(TOKENIZER_FILES)
    write(tmp_path / "vocab.txt", "a\nb\n")
    with pytest.raises(
        UserError, match=r"vocab\.txt: not a valid tokenizer file: the unknown token \[UNK\] is missing"
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    for content in (b"", b"\x00\xff", b"\x0a\xff\xff\xff\xff", b"hello, world"):
        (tmp_path / "spiece.model").write_bytes(content)
        with pytest.raises(UserError, match=r"spiece\.model: not a valid tokenizer file"):
            Tokenizer.load(tmp_path)
    (tmp_path / "spiece.model").unlink()
    write(tmp_path / "vocab.json", '{"a": 0, "b": 1}')
    write(tmp_path / "merges.txt", "#version: 0.2\na b c\n")
    with pytest.raises(UserError, match=r"merges\.txt: .*'a b c' is not a pair"):
        Tokenizer.load(tmp_path)
