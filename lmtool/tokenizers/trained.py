"""Vocabularies trained on text: BPE, byte-level BPE, WordPiece, words and characters."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lmtool.config.checkpoint import NoCheckpoint, find, is_checkpoint
from lmtool.errors import UserError
from lmtool.tokenizers.backends import (
    around,
    byte_level,
    ends_with,
    qwen2_level,
    roberta_around,
    sentinel_entries,
    word_end,
    wordpiece,
)
from lmtool.tokenizers.configs import (
    SPECIALS,
    BpeConfig,
    ByteBpeConfig,
    CharacterConfig,
    FolderConfig,
    ListedConfig,
    SpelledConfig,
    WordConfig,
    WordPieceConfig,
)
from lmtool.tokenizers.entries import PREFIX
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.texts import alphabet, training_text
from lmtool.tokenizers.tokenizer import Tokenizer

# Byte-pair encoding of words as GPT has it: training on text (Radford et al. 2018, after Sennrich et al. 2016).
#
# Text is cleaned and lowercased, words end at white space and punctuation, and a word's last character carries
# "</w>". Beside the published <unk> there is <|endoftext|>, which begins, ends and pads: text is learned document by
# document.


SUFFIX = "</w>"


def train_bpe(config: BpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for its characters.
    """
    learned = word_end(models.BPE(end_of_word_suffix=SUFFIX))
    corpus = training_text(texts)
    special = list(dict.fromkeys(config.specials.values()))
    characters, last = alphabet(
        corpus, learned.normalizer, vocab_size, len(special), lambda character: character + SUFFIX
    )
    # The library numbers the pieces with a suffix in the order of a hash table; as special tokens they have fixed
    # numbers, and so has all that follows.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.minimum_count,
        special_tokens=[*special, *last],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        end_of_word_suffix=SUFFIX,
        show_progress=False,
    )
    learned.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    unknown = config.specials["unk"]
    backend = word_end(
        models.BPE(learned.get_vocab(), merges, unk_token=unknown, end_of_word_suffix=SUFFIX, fuse_unk=False)
    )
    backend.add_special_tokens(special)
    numbers = backend.get_vocab()
    roles = {role: numbers[written] for role, written in config.specials.items()}
    return Tokenizer(backend, roles, "the bpe tokenizer")


# Byte-level byte-pair encoding as GPT-2 has it: training on text (Radford et al. 2019).
#
# Every text has an encoding and comes back unchanged. GPT-2 has one special token, <|endoftext|>, which begins, ends
# and pads; RoBERTa and BART have <s> <pad> </s> <unk> <mask> (Liu et al. 2019, Lewis et al. 2020).


END = "<|endoftext|>"
_ENTRIES: dict[str, tuple[list[str], list[str]]] = {
    "gpt2": ([END], []),
    "roberta": (["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
    "bert": ([*SPECIALS["bert"].values()], []),
}
"""The special tokens in front of all other entries, and those behind them."""


def train_byte_level_bpe(config: ByteBpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Published order: RoBERTa's mask is the last entry, the others are the first.
    first, last = _ENTRIES[config.special_tokens]
    special = [*first, *last]
    if vocab_size < len(alphabet) + len(special):
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for the {len(alphabet)} bytes and {' '.join(special)}",
            "set tokenizer.vocab_size=1000 or more",
        )
    backend = (qwen2_level if config.splitting == "qwen2" else byte_level)(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(last),
        min_frequency=config.minimum_count,
        special_tokens=first,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(training_text(texts), trainer)
    if config.special_tokens == "roberta":
        # The mask takes the space before it with it, as in the published tokenizer.json.
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
        roberta_around(backend)
    elif config.special_tokens == "bert":
        around(backend, "[CLS]", "[SEP]")
    numbers = backend.get_vocab()
    roles = {role: numbers[token] for role, token in config.specials.items()}
    return Tokenizer(backend, roles, "the bytebpe tokenizer")


# WordPiece as BERT has it: training on text.
#
# Text is cleaned, CJK characters stand alone, case and accents go (lowercase=true), words end at white space and
# punctuation. A word is then cut greedily into the longest pieces of the vocabulary (Devlin et al. 2019).


SPECIAL = SPECIALS["bert"]
CONTINUATION = "##"


def train_wordpiece(config: WordPieceConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for its characters.
    """
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=config.lowercase
    )
    splitter = pre_tokenizers.BertPreTokenizer()
    corpus = training_text(texts)
    characters, continuing = alphabet(
        corpus,
        normalizer,
        vocab_size,
        len(SPECIAL),
        lambda character: None if _is_separate(character) else CONTINUATION + character,
    )

    # The library numbers the "##c" pieces in the order of a hash table, another one in each process, and its ties
    # follow the numbers. Given as special tokens they have fixed numbers, and so has all that follows.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.minimum_count,
        special_tokens=[*SPECIAL.values(), *continuing],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    learned = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix=CONTINUATION))
    learned.normalizer, learned.pre_tokenizer = normalizer, splitter
    learned.train_from_iterator(corpus, trainer)

    backend = wordpiece(learned.get_vocab(), config.lowercase)
    backend.add_special_tokens(list(SPECIAL.values()))
    numbers = backend.get_vocab()
    roles = {name: numbers[token] for name, token in SPECIAL.items()}
    return Tokenizer(backend, roles, "the wordpiece tokenizer")


def _is_separate(character: str) -> bool:
    """Whether the splitter never leaves this character inside a word: punctuation, and CJK ideographs."""
    code = ord(character)
    ascii_symbol = 33 <= code < 127 and not character.isalnum()
    ideograph = unicodedata.name(character, "").startswith("CJK ")
    return ascii_symbol or ideograph or unicodedata.category(character).startswith("P")


# Word-level and character-level vocabularies: a list of the commonest words, or characters, of a text.
#
# For teaching: what is not in the list is unknown, and nothing is cut into pieces. Words are cleaned and end as in
# BERT (white space, punctuation); characters stand as they are, white space too.


def train_words(config: WordConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """List at most `vocab_size` words; the same texts give the same list.

    UserError where there is no text, or no room for a word.
    """
    normalizer, splitter = _normalizer(config.lowercase), pre_tokenizers.BertPreTokenizer()
    learned = tokenizers.Tokenizer(models.WordLevel())
    learned.normalizer, learned.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=config.minimum_count, special_tokens=[], show_progress=False
    )
    learned.train_from_iterator(training_text(texts), trainer)
    words = sorted(learned.get_vocab().items(), key=lambda item: item[1])
    if not words:
        raise UserError(
            f"tokenizer.minimum_count={config.minimum_count}: no word of the text is in it so often",
            "give tokenizer.minimum_count=1, or more text with data.path=",
        )
    backend = _word_level(config, [word for word, _ in words], vocab_size, "words")
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    return _tokenizer(config, backend)


def of_words(config: WordConfig, words: Sequence[str]) -> Tokenizer:
    """The vocabulary of words that are known, behind the special tokens, in their order. Accents stay. A word that the
    splitting cuts, or the cleaning changes, has an entry that no text leads to."""
    special = set(config.specials.values())
    entries = [word for word in words if word not in special]
    backend = _word_level(config, entries, len(entries) + len(special), "words")
    backend.normalizer, backend.pre_tokenizer = _normalizer(config.lowercase, False), pre_tokenizers.BertPreTokenizer()
    return _tokenizer(config, backend)


def _normalizer(lowercase: bool, strip_accents: bool | None = None) -> normalizers.Normalizer:
    """BERT's. strip_accents: None: where text is lowercased."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )


def train_characters(config: CharacterConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """List at most `vocab_size` characters; the same texts give the same list.

    UserError where there is no text, or no room for a character.
    """
    normalizer = normalizers.Lowercase() if config.lowercase else None
    # White space joins words in every text, whether training text has it within a document or not.
    counts: Counter[str] = Counter(" ")
    for portion in training_text(texts):
        for text in portion:
            counts.update(text if normalizer is None else normalizer.normalize_str(text))
    commonest = sorted(counts, key=lambda character: (-counts[character], character))
    backend = _word_level(config, commonest, vocab_size, "characters")
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _tokenizer(config, backend)


def _word_level(config: ListedConfig, commonest: Sequence[str], vocab_size: int, units: str) -> tokenizers.Tokenizer:
    """Special tokens first, then words or characters, the commonest first; sentinels last."""
    special = list(dict.fromkeys(config.specials.values()))
    sentinels = [token for token, _ in sentinel_entries(config.sentinels if config.special_tokens == "t5" else 0)]
    reserved = len(special) + len(sentinels)
    if vocab_size <= reserved:
        fewer = ", or a smaller tokenizer.sentinels=" if sentinels else ""
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for {units} beside {reserved} special tokens",
            f"set tokenizer.vocab_size=1000 or more{fewer}",
        )
    entries = [*special, *commonest[: vocab_size - reserved], *sentinels]
    numbers = {word: number for number, word in enumerate(entries)}
    return tokenizers.Tokenizer(models.WordLevel(numbers, unk_token=config.specials["unk"]))


def _tokenizer(config: ListedConfig, backend: tokenizers.Tokenizer) -> Tokenizer:
    specials, numbers = config.specials, backend.get_vocab()
    sentinels: Sequence[str] = [token for token in numbers if token.startswith("<extra_id_")]
    special = [*dict.fromkeys(specials.values()), *sorted(sentinels, key=numbers.__getitem__)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    if config.special_tokens == "roberta":
        roberta_around(backend)
    elif config.special_tokens == "t5":
        ends_with(backend, specials["eos"])
    elif config.special_tokens == "bert":
        around(backend, specials["cls"], specials["sep"])
    roles = {role: numbers[token] for role, token in specials.items()}
    return Tokenizer(backend, roles, f"the {config.name} tokenizer")


# A vocabulary of whole words that no word is outside of: one that is not listed is spelled.
#
# Text is cut into words as BERT cuts it, at white space and around punctuation; case and accents stay. A word that is
# listed is one token. Another one is the longest listed word that it begins with, or nothing but the mark of a
# beginning, and pieces of a byte each that continue it ("##", as in WordPiece): its characters are all there, for a
# model that reads them (ELMo), while its first id says no more than that. Words are written in GPT-2's alphabet of
# bytes, with its space in front. Of a word of more than 49 bytes the first 49 are kept.


LONGEST = 49
"""Bytes of a word that are kept."""
_STARTS = "Ġ"  # how the alphabet of bytes writes a space


def train_spelled_wordpiece(config: SpelledConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """List the commonest words, at most `vocab_size` entries: special tokens first, then words by their count, then
    what spells others. The same texts give the same list.

    UserError where there is no text, or no room for a word.
    """
    continuing = [PREFIX + character for character in sorted(pre_tokenizers.ByteLevel.alphabet())]
    special = list(dict.fromkeys(config.specials.values()))
    reserved = len(special) + 1 + len(continuing)
    if vocab_size <= reserved:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for words beside {reserved} special tokens and bytes",
            "set tokenizer.vocab_size=2000 or more",
        )
    learned = tokenizers.Tokenizer(models.WordLevel())
    _cut(learned)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=config.minimum_count, special_tokens=[], show_progress=False
    )
    learned.train_from_iterator(training_text(texts), trainer)
    words = [word for word, _ in sorted(learned.get_vocab().items(), key=lambda item: item[1])]
    entries = [*special, *words[: vocab_size - reserved], _STARTS, *continuing]
    numbers = {word: number for number, word in enumerate(entries)}
    backend = tokenizers.Tokenizer(
        models.WordPiece(
            numbers,
            unk_token=config.specials["unk"],
            continuing_subword_prefix=PREFIX,
            max_input_chars_per_word=1 + LONGEST,
        )
    )
    _cut(backend)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(Regex(f"^{PREFIX}"), ""), decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Tokenizer(
        backend, {role: numbers[token] for role, token in config.specials.items()}, "the spelled tokenizer"
    )


def _cut(backend: tokenizers.Tokenizer) -> None:
    """How it cuts text into words in the alphabet of bytes."""
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
            pre_tokenizers.Split(Regex(f"(?<=^.{{{1 + LONGEST}}}).+"), "removed"),
        ]
    )


# An existing tokenizer, from its folder.


def load(config: FolderConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Load it; the text and the size asked for are not read. UserError where the folder holds no tokenizer."""
    folder = Path(config.path).expanduser()
    if has_tokenizer(folder) and not is_checkpoint(folder):
        return Tokenizer.load(folder, config.parse_special_tokens)
    try:
        return Tokenizer.load(find(config.path), config.parse_special_tokens)
    except NoCheckpoint as error:
        raise UserError(
            f"tokenizer.path={config.path}: {'no tokenizer in it' if folder.exists() else 'no such folder'}",
            "give a folder with tokenizer files (tokenizer.json, ...), or a run folder (runs/NAME)",
        ) from error
