"""The tokenizers of the published families, assembled from their vocabularies as transformers assembles them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lmtool.tokenizers.configs import SPECIALS
from lmtool.tokenizers.pieces import CONTROL, UNIGRAM, USER_DEFINED, read_model

Pieces = Literal["t5", "albert"]
SPACE = "▁"


def family_of(vocabulary: Mapping[str, int]) -> str | None:
    """The family whose special tokens a vocabulary holds, or None."""
    return next((name for name, roles in SPECIALS.items() if set(roles.values()) <= vocabulary.keys()), None)


def wordpiece(
    vocabulary: Mapping[str, int],
    lowercase: bool = True,
    strip_accents: bool | None = None,
    chinese: bool = True,
    unknown: str = "[UNK]",
) -> tokenizers.Tokenizer:
    """BERT's cleaning and splitting over a vocabulary. strip_accents: None: as lowercase."""
    model = models.WordPiece(
        dict(vocabulary), unk_token=unknown, continuing_subword_prefix="##", max_input_chars_per_word=100
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    _around(backend, vocabulary, "[CLS]", "[SEP]")
    return backend


def byte_level(model: models.Model, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Byte-level pieces with GPT-2's splitting of words."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def roberta_around(backend: tokenizers.Tokenizer, add_prefix_space: bool = False) -> None:
    """<s> a </s> around a text, <s> a </s></s> b </s> around a pair."""
    numbers = backend.get_vocab()
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", numbers["</s>"]), ("<s>", numbers["<s>"]), trim_offsets=True, add_prefix_space=add_prefix_space
    )


def word_end(model: models.Model) -> tokenizers.Tokenizer:
    """GPT-1's pieces, "</w>" at the end of a word, over BERT's cleaning and splitting (Radford et al. 2018; without
    ftfy and spaCy, as transformers)."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def albert_cleaning(lowercase: bool, keep_accents: bool = False) -> Iterator[normalizers.Normalizer]:
    """ALBERT's `preprocess_text` (its tokenization.py)."""
    yield normalizers.Replace("``", '"')
    yield normalizers.Replace("''", '"')
    if not keep_accents:
        yield normalizers.NFKD()
        yield normalizers.StripAccents()
    if lowercase:
        yield normalizers.Lowercase()


def unigram(
    content: bytes, kind: Pieces, sentinels: int = 100, lowercase: bool = True, keep_accents: bool = False
) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece model file, given as its bytes. ValueError where it is no unigram model."""
    model = read_model(content)
    if model.kind != UNIGRAM:
        raise ValueError("its pieces are no unigram model")
    pieces = [(piece, score) for piece, score, _ in model.pieces]
    # The sentinels come after the vocabulary, from the last one to the first (extra_ids of T5's vocabulary).
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(sentinels if kind == "t5" else 0))]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, model.unknown, model.byte_fallback))
    steps = list(albert_cleaning(lowercase, keep_accents)) if kind == "albert" else []
    if model.characters:
        steps.append(normalizers.Precompiled(model.characters))
    if kind == "albert":
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if steps:
        backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    vocabulary = backend.get_vocab()
    special = [piece for piece, _, type_ in model.pieces if type_ == CONTROL]
    special += [token for token in SPECIALS[kind].values() if token in vocabulary and token not in special]
    special += [f"<extra_id_{number}>" for number in range(sentinels if kind == "t5" else 0)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = [piece for piece, _, type_ in model.pieces if type_ == USER_DEFINED and piece not in special]
    backend.add_tokens([AddedToken(token, normalized=False) for token in named])
    if kind == "albert":
        _around(backend, vocabulary, "[CLS]", "[SEP]")
    elif "</s>" in vocabulary:
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", vocabulary["</s>"])]
        )
    return backend


def _around(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int], cls: str, sep: str) -> None:
    if cls in vocabulary and sep in vocabulary:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
        )
