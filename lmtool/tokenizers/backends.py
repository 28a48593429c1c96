"""Builds the tokenizers of the model families from their vocabularies, as in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Builds WordPiece with BERT's cleaning and splitting (Devlin et al. 2019).

    Args:
        vocabulary: Ids by entry.
        lowercase: Lowercase texts.
        strip_accents: None means that accents are stripped if text is lowercased.
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
    entries = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, entries])
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

    Args:
        entries: Text and score by id.
        family: The model family.
        character_map: SentencePiece's precompiled map for normalization; may be empty.
        lowercase: Lowercase texts (ALBERT, XLNet).
        keep_accents: Do not strip accents (ALBERT, XLNet).
        add_prefix_space: Add a space before the text.
    """
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
    trailing spaces are removed, repeated spaces become one, and a space is added before the text.

    Args:
        vocabulary: Ids by entry.
        merges: Pairs of entries in the order in which they are merged.
        family: The model family, for the template.
        normalizer: Steps that are applied before the rules for spaces.
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
    """Builds Llama's SentencePiece BPE model: texts are not cleaned, and unknown characters become byte tokens.

    Args:
        vocabulary: Ids by entry.
        merges: Pairs of entries in the order in which they are merged.
        scheme: Whether a space is added before each section of text between special tokens, the first one, or none.
    """
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
