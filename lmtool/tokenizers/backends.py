"""The tokenizers of the model families, assembled from their vocabularies as in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from lmtool.tokenizers.configs import SPECIALS

Pieces = Literal["t5", "albert", "xlnet"]
SPACE = "▁"
# The id of the unknown token in each family; as in transformers, files do not change it.
_UNKNOWN: dict[Pieces, int] = {"t5": 2, "albert": 1, "xlnet": 0}


def family_of_vocabulary(vocabulary: Mapping[str, int]) -> str | None:
    """The family whose special tokens a vocabulary contains, or None."""
    return next((name for name, roles in SPECIALS.items() if set(roles.values()) <= vocabulary.keys()), None)


def bert_normalizer(
    lowercase: bool, strip_accents: bool | None = None, chinese: bool = True
) -> normalizers.BertNormalizer:
    """BERT's text cleaning. strip_accents: None: if text is lowercased. chinese: put spaces around CJK characters."""
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
    """WordPiece with BERT's cleaning and splitting (Devlin et al. 2019).

    Args:
        vocabulary: Ids by entry.
        lowercase: Lowercase texts.
        strip_accents: None: if text is lowercased.
        chinese: Put spaces around CJK characters.
        unknown: The unknown token.
    """
    model = models.WordPiece(
        dict(vocabulary), unk_token=unknown, continuing_subword_prefix="##", max_input_chars_per_word=100
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = bert_normalizer(lowercase, strip_accents, chinese)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    around(backend, "[CLS]", "[SEP]")
    return backend


def byte_level(model: models.Model, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Byte-level subwords with GPT-2's word splitting."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen2_level(model: models.Model, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Byte-level subwords over NFC with Qwen2's word splitting: digits and line ends are separate words (Yang et al.
    2024; transformers' Qwen2Tokenizer)."""
    backend = byte_level(model)
    backend.normalizer = normalizers.NFC()
    entries = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, entries])
    return backend


def roberta_around(
    backend: tokenizers.Tokenizer, first: str = "<s>", last: str = "</s>", add_prefix_space: bool = False
) -> None:
    """Set the template <s> a </s> for a text, <s> a </s></s> b </s> for a pair."""
    numbers = backend.get_vocab()
    backend.post_processor = processors.RobertaProcessing(
        (last, numbers[last]), (first, numbers[first]), trim_offsets=True, add_prefix_space=add_prefix_space
    )


def word_end(model: models.Model) -> tokenizers.Tokenizer:
    """GPT-1's subwords, with "</w>" at the end of a word, with BERT's cleaning and splitting (Radford et al. 2018;
    like transformers, without ftfy and spaCy)."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def albert_normalizer(lowercase: bool, keep_accents: bool = False) -> Iterator[normalizers.Normalizer]:
    """ALBERT's `preprocess_text` (tokenization.py of its release)."""
    yield normalizers.Replace("``", '"')
    yield normalizers.Replace("''", '"')
    if not keep_accents:
        yield normalizers.NFKD()
        yield normalizers.StripAccents()
    if lowercase:
        yield normalizers.Lowercase()


def unigram(
    entries: Sequence[tuple[str, float]],
    kind: Pieces,
    characters: bytes,
    lowercase: bool = True,
    keep_accents: bool = False,
    add_prefix_space: bool = True,
) -> tokenizers.Tokenizer:
    """SentencePiece's unigram model with a family's word splitting, without special tokens.

    Args:
        entries: Text and score by id.
        kind: The family.
        characters: SentencePiece's precompiled character map; may be empty.
        lowercase: Lowercase texts (ALBERT, XLNet).
        keep_accents: Do not strip accents (ALBERT, XLNet).
        add_prefix_space: Add a space before the text.
    """
    backend = tokenizers.Tokenizer(models.Unigram(list(entries), _UNKNOWN[kind], False))
    steps = list(albert_normalizer(lowercase, keep_accents)) if kind != "t5" else []
    if characters:
        steps.append(normalizers.Precompiled(characters))
    if kind == "albert":
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if steps:
        backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    scheme: Literal["always", "never"] = "always" if add_prefix_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)]
    )
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    _family_template(backend, kind)
    return backend


def plain_unigram(
    entries: Sequence[tuple[str, float]], unknown: str, add_prefix_space: bool = True
) -> tokenizers.Tokenizer:
    """BigBird's unigram model, without special tokens. Texts are not cleaned, except that repeated spaces become
    one."""
    number = next((number for number, (piece, score) in enumerate(entries) if (piece, score) == (unknown, 0.0)), 100)
    backend = tokenizers.Tokenizer(models.Unigram(list(entries), number, False))
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), SPACE)
    scheme: Literal["always", "never"] = "always" if add_prefix_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=True)
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme, split=True)
    return backend


def unicode_normalizer() -> list[normalizers.Normalizer]:
    """Remove control characters, replace white space by spaces, and apply NFKC."""
    return [normalizers.Nmt(), normalizers.NFKC()]


def sequence(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    kind: Pieces,
    normalizer: Sequence[normalizers.Normalizer],
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE model with its library's word splitting, without special tokens: leading and trailing spaces
    are removed, repeated ones become one, and one is added before the text.

    Args:
        vocabulary: Ids by entry.
        merges: Pairs in the order in which they are merged.
        kind: The family, for its template.
        normalizer: Applied before.
    """
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
    # No token crosses a space, so words can be split one by one.
    backend.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    _family_template(backend, kind)
    return backend


def _family_template(backend: tokenizers.Tokenizer, kind: Pieces) -> None:
    if kind == "albert":
        around(backend, "[CLS]", "[SEP]")
    elif kind == "xlnet":
        append_tokens(backend, "<sep>", "<cls>")
    else:
        ends_with(backend, "</s>")


def byte_fallback(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], scheme: Literal["always", "first", "never"]
) -> tokenizers.Tokenizer:
    """Llama's SentencePiece BPE model: texts are not cleaned, and unknown characters become byte tokens.

    Args:
        vocabulary: Ids by entry.
        merges: Pairs in the order in which they are merged.
        scheme: Whether a space is added before a text.
    """
    model = models.BPE(dict(vocabulary), list(merges), fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])])
    return backend


def sentinel_entries(count: int) -> list[tuple[str, float]]:
    """T5's sentinels, which follow the vocabulary in reverse order."""
    return [(f"<extra_id_{number}>", 0.0) for number in reversed(range(count))]


def around(backend: tokenizers.Tokenizer, first: str, last: str) -> None:
    """Set the template [CLS] a [SEP] for a text, [CLS] a [SEP] b [SEP] for a pair, if both tokens exist."""
    _set_template(backend, f"{first} $A {last}", f"{first} $A {last} $B:1 {last}:1", first, last)


def append_tokens(backend: tokenizers.Tokenizer, separator: str, summary: str) -> None:
    """Set the template a <sep> <cls> for a text, a <sep> b <sep> <cls> for a pair, with the segments 0, 1 and 2, if
    both tokens exist."""
    single, pair = f"$A:0 {separator}:0 {summary}:2", f"$A:0 {separator}:0 $B:1 {separator}:1 {summary}:2"
    _set_template(backend, single, pair, separator, summary)


def ends_with(backend: tokenizers.Tokenizer, last: str) -> None:
    """Set the template a </s> for a text, a </s> b </s> for a pair, if the token exists."""
    _set_template(backend, f"$A {last}", f"$A {last} $B {last}", last)


def _set_template(backend: tokenizers.Tokenizer, single: str, pair: str, *tokens: str) -> None:
    numbers = backend.get_vocab()
    if all(token in numbers for token in tokens):
        special = [(token, numbers[token]) for token in tokens]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
