"""Builds the tokenizers of the model families from their vocabularies, as in transformers. Also reads the model files
of SentencePiece, which are protocol buffers; field numbers:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from lmtool.tokenizers.configs import SPECIALS

UnigramFamily = Literal["t5", "albert", "xlnet"]
SPACE = "▁"
# As in transformers, the id of the unknown token depends on the family, not on the files.
_UNKNOWN: dict[UnigramFamily, int] = {"t5": 2, "albert": 1, "xlnet": 0}


def family_of_vocabulary(vocabulary: Mapping[str, int]) -> str | None:
    """Returns the family whose special tokens a vocabulary contains, or None."""
    return next((name for name, roles in SPECIALS.items() if set(roles.values()) <= vocabulary.keys()), None)


def bert_normalizer(
    lowercase: bool, strip_accents: bool | None = None, chinese: bool = True
) -> normalizers.BertNormalizer:
    """Returns BERT's text cleaning. strip_accents: None means that accents are stripped if text is lowercased. chinese:
    whether to put spaces around CJK characters."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )


def wordpiece(
    vocabulary: Mapping[str, int],
    lowercase: bool = True,
    strip_accents: bool | None = None,
    chinese: bool = True,
    unknown: str = "[UNK]",
) -> tokenizers.Tokenizer:
    """Builds WordPiece with BERT's cleaning and splitting (Devlin et al. 2019), see `bert_normalizer`."""
    model = models.WordPiece(
        dict(vocabulary), unk_token=unknown, continuing_subword_prefix="##", max_input_chars_per_word=100
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = bert_normalizer(lowercase, strip_accents, chinese)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    set_bert_template(backend, "[CLS]", "[SEP]")
    return backend


def gpt2_bpe(model: models.Model, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Builds byte-level BPE with GPT-2's word splitting."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen2_bpe(model: models.Model, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Builds byte-level BPE over NFC with Qwen2's word splitting: digits and line ends are separate words (Yang et al.
    2024; transformers' Qwen2Tokenizer)."""
    backend = gpt2_bpe(model)
    backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return backend


def set_roberta_template(
    backend: tokenizers.Tokenizer, first: str = "<s>", last: str = "</s>", add_prefix_space: bool = False
) -> None:
    """Sets the template <s> a </s> for a text, <s> a </s></s> b </s> for a pair."""
    numbers = backend.get_vocab()
    backend.post_processor = processors.RobertaProcessing(
        (last, numbers[last]), (first, numbers[first]), trim_offsets=True, add_prefix_space=add_prefix_space
    )


def gpt1_bpe(model: models.Model) -> tokenizers.Tokenizer:
    """Builds GPT-1's BPE, which ends words with "</w>", with BERT's cleaning and splitting (Radford et al. 2018; as in
    transformers, without ftfy and spaCy)."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def albert_normalizer(lowercase: bool, keep_accents: bool = False) -> Iterator[normalizers.Normalizer]:
    """Yields the steps of `preprocess_text` in tokenization.py of ALBERT's release."""
    yield normalizers.Replace("``", '"')
    yield normalizers.Replace("''", '"')
    if not keep_accents:
        yield normalizers.NFKD()
        yield normalizers.StripAccents()
    if lowercase:
        yield normalizers.Lowercase()


def unigram(
    entries: Sequence[tuple[str, float]],
    family: UnigramFamily,
    character_map: bytes,
    lowercase: bool = True,
    keep_accents: bool = False,
    add_prefix_space: bool = True,
) -> tokenizers.Tokenizer:
    """Builds SentencePiece's unigram model with a family's cleaning and template; special tokens are not added.
    entries: text and score by id. character_map: SentencePiece's precompiled map for normalization; may be empty.
    lowercase, keep_accents: for ALBERT and XLNet."""
    backend = tokenizers.Tokenizer(models.Unigram(list(entries), _UNKNOWN[family], False))
    steps = list(albert_normalizer(lowercase, keep_accents)) if family != "t5" else []
    if character_map:
        steps.append(normalizers.Precompiled(character_map))
    if family == "albert":
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if steps:
        backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    scheme: Literal["always", "never"] = "always" if add_prefix_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)]
    )
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    _set_family_template(backend, family)
    return backend


def bigbird_unigram(
    entries: Sequence[tuple[str, float]], unknown: str, add_prefix_space: bool = True
) -> tokenizers.Tokenizer:
    """Builds BigBird's unigram model; special tokens are not added. The only cleaning is that repeated spaces become
    one."""
    # As in transformers, the unknown token has id 100 if the vocabulary lacks it.
    unknown_id = next((number for number, entry in enumerate(entries) if entry == (unknown, 0.0)), 100)
    backend = tokenizers.Tokenizer(models.Unigram(list(entries), unknown_id, False))
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), SPACE)
    scheme: Literal["always", "never"] = "always" if add_prefix_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=True)
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme, split=True)
    return backend


def unicode_normalizer() -> list[normalizers.Normalizer]:
    """Returns steps that remove control characters, replace white space by spaces, and apply NFKC."""
    return [normalizers.Nmt(), normalizers.NFKC()]


def sentencepiece_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    family: UnigramFamily,
    normalizer: Sequence[normalizers.Normalizer],
) -> tokenizers.Tokenizer:
    """Builds SentencePiece's BPE model; special tokens are not added. As in the SentencePiece library, leading and
    trailing spaces are removed, repeated spaces become one, and a space is added before the text. merges: in the order
    in which they are merged. normalizer: steps that are applied before the rules for spaces."""
    unknown = "<unk>"
    backend = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges), unk_token=unknown, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [
            *normalizer,
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex("^ | $"), ""),
            normalizers.Prepend(SPACE),
            normalizers.Replace(" ", SPACE),
        ]
    )
    # No token extends across a space, so each word can be tokenized separately.
    backend.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    _set_family_template(backend, family)
    return backend


def _set_family_template(backend: tokenizers.Tokenizer, family: UnigramFamily) -> None:
    if family == "albert":
        set_bert_template(backend, "[CLS]", "[SEP]")
    elif family == "xlnet":
        set_xlnet_template(backend, "<sep>", "<cls>")
    else:
        set_t5_template(backend, "</s>")


def llama_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], scheme: Literal["always", "first", "never"]
) -> tokenizers.Tokenizer:
    """Builds Llama's SentencePiece BPE model: texts are not cleaned, and unknown characters become byte tokens. merges:
    in the order in which they are merged. scheme: which sections of text, between special tokens, a space is added
    before: all, the first, or none."""
    model = models.BPE(dict(vocabulary), list(merges), fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])])
    return backend


def sentinel_entries(count: int) -> list[tuple[str, float]]:
    """Returns text and score of T5's sentinels, which follow the other entries in reverse order."""
    return [(f"<extra_id_{number}>", 0.0) for number in reversed(range(count))]


def set_bert_template(backend: tokenizers.Tokenizer, first: str, last: str) -> None:
    """Sets the template [CLS] a [SEP] for a text, [CLS] a [SEP] b [SEP] for a pair, if both tokens exist."""
    _set_template(backend, f"{first} $A {last}", f"{first} $A {last} $B:1 {last}:1", first, last)


def set_xlnet_template(backend: tokenizers.Tokenizer, separator: str, summary: str) -> None:
    """Sets the template a <sep> <cls> for a text, a <sep> b <sep> <cls> for a pair, with the segments 0, 1 and 2, if
    both tokens exist."""
    single, pair = f"$A:0 {separator}:0 {summary}:2", f"$A:0 {separator}:0 $B:1 {separator}:1 {summary}:2"
    _set_template(backend, single, pair, separator, summary)


def set_t5_template(backend: tokenizers.Tokenizer, last: str) -> None:
    """Sets the template a </s> for a text, a </s> b </s> for a pair, if the token exists."""
    _set_template(backend, f"$A {last}", f"$A {last} $B {last}", last)


def _set_template(backend: tokenizers.Tokenizer, single: str, pair: str, *tokens: str) -> None:
    numbers = backend.get_vocab()
    if all(token in numbers for token in tokens):
        special = [(token, numbers[token]) for token in tokens]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


UNIGRAM, BPE = 1, 2
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class PieceModel:
    """The content of a model file. pieces: (text, score, type) by id. kind: UNIGRAM or BPE. character_map: the
    precompiled map for normalization; may be empty."""

    pieces: list[tuple[str, float, int]]
    kind: int
    character_map: bytes


def read_model(content: bytes) -> PieceModel:
    """Parses a model file. Raises ValueError if the content is not a SentencePiece model."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_as_bytes(value)))
            score = _as_float(piece[2]) if 2 in piece else 0.0
            pieces.append((_as_bytes(piece.get(1, b"")).decode("utf-8"), score, _as_integer(piece.get(3, 1))))
        elif number == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("contains no pieces")
    return PieceModel(pieces, _as_integer(trainer.get(3, UNIGRAM)), _as_bytes(normalizer.get(2, b"")))


def merges_of(model: PieceModel) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model in order. The file does not store merges: SentencePiece merges any two pieces
    that form a piece, by score and then from left to right."""
    scores = {piece: score for piece, score, type_ in model.pieces if type_ == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    for order, (piece, score) in enumerate(scores.items()):
        splits = [length for length in range(1, len(piece)) if piece[:length] in scores and piece[length:] in scores]
        # If two overlapping pairs form the same piece, the left pair is merged first: "ab"+"a" in "ab"+"a"+"ba".
        splits.sort(key=lambda length: piece[length:] != piece[: len(piece) - length])
        ranked += [(-score, order, piece[:length], piece[length:]) for length in splits]
    ranked.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in ranked]


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) of each field of a message: integers as int, all other values as bytes."""
    offset = 0
    while offset < len(content):
        tag, offset = _varint(content, offset)
        kind = tag & 7
        if kind == _VARINT:
            value, offset = _varint(content, offset)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, offset = _varint(content, offset)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("not a protocol buffer")
        if offset + size > len(content):
            raise ValueError("the file is truncated")
        yield tag >> 3, content[offset : offset + size]
        offset += size


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """The integer of variable length at an offset, and the offset of its end."""
    value = shift = 0
    while True:
        if offset >= len(content) or shift > 63:
            raise ValueError("the file is truncated")
        byte = content[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has a wrong type")
    return value


def _as_float(value: int | bytes) -> float:
    content = _as_bytes(value)
    if len(content) != 4:
        raise ValueError("a field has a wrong type")
    return float(struct.unpack("<f", content)[0])


def _as_integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has a wrong type")
    return value
