"""Trains vocabularies on text: BPE, byte-level BPE, WordPiece, words, characters and spelled words. Also loads existing
tokenizers.

A training function takes the tokenizer's configuration, the training text, and the maximum number of entries, including
special tokens. It raises UserError if there is no text, or if the number is too small for the special tokens and the
text's characters or words. The same text always gives the same vocabulary.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lmtool.errors import UserError
from lmtool.runs.finding import NoCheckpoint, find, is_checkpoint
from lmtool.system.files import user_path
from lmtool.tokenizers.backends import (
    bert_normalizer,
    gpt1_bpe,
    gpt2_bpe,
    qwen2_bpe,
    sentinel_entries,
    set_bert_template,
    set_roberta_template,
    set_t5_template,
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
    TokenizerConfig,
    WordConfig,
    WordPieceConfig,
)
from lmtool.tokenizers.entries import PREFIX, SUFFIX
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.texts import alphabet, training_text
from lmtool.tokenizers.tokenizer import Tokenizer


def train_bpe(config: BpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains GPT-1's byte-pair encoding (Radford et al. 2018, after Sennrich et al. 2016).

    Text is cleaned and lowercased, words end at white space and punctuation, and a word's last subword ends with
    "</w>". In addition to GPT-1's <unk> there is <|endoftext|>, which starts, ends and pads.
    """
    learned = gpt1_bpe(models.BPE(end_of_word_suffix=SUFFIX))
    corpus = training_text(texts)
    special = list(dict.fromkeys(config.specials.values()))
    characters, last = alphabet(
        corpus, learned.normalizer, vocab_size, len(special), lambda character: character + SUFFIX
    )
    trainer = _trainer(config, vocab_size, [*special, *last], characters, end_of_word_suffix=SUFFIX)
    learned.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    unknown = config.specials["unk"]
    backend = gpt1_bpe(
        models.BPE(learned.get_vocab(), merges, unk_token=unknown, end_of_word_suffix=SUFFIX, fuse_unk=False)
    )
    backend.add_special_tokens(special)
    return with_roles(config, backend)


def _trainer(
    config: BpeConfig | ByteBpeConfig | WordPieceConfig,
    vocab_size: int,
    fixed: list[str],
    characters: list[str],
    **affix: str,
) -> trainers.BpeTrainer:
    """The library numbers characters with an affix in the order of a hash table, which differs between processes, and
    breaks ties by number. So these characters are among the special tokens (`fixed`), whose order determines their
    ids."""
    return trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.minimum_count,
        special_tokens=fixed,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
        **affix,  # type: ignore[arg-type]
    )


_SPECIAL_ENTRIES: dict[str, tuple[list[str], list[str]]] = {
    "gpt2": (["<|endoftext|>"], []),
    "roberta": (["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
    "bert": ([*SPECIALS["bert"].values()], []),
}
"""Special tokens before and after all other entries, in the order of the pretrained vocabularies."""


def train_byte_level_bpe(config: ByteBpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains GPT-2's byte-level byte-pair encoding (Radford et al. 2019), which encodes every text without loss.

    GPT-2 has one special token, <|endoftext|>, which starts, ends and pads; RoBERTa and BART have <s> <pad> </s> <unk>
    <mask> (Liu et al. 2019, Lewis et al. 2020).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first, last = _SPECIAL_ENTRIES[config.special_tokens]
    special = [*first, *last]
    if vocab_size < len(alphabet) + len(special):
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for the {len(alphabet)} bytes and {' '.join(special)}",
            "set tokenizer.vocab_size=1000 or more",
        )
    backend = (qwen2_bpe if config.splitting == "qwen2" else gpt2_bpe)(models.BPE())
    trainer = _trainer(config, vocab_size - len(last), first, alphabet)
    backend.train_from_iterator(training_text(texts), trainer)
    if config.special_tokens == "roberta":
        # The mask absorbs the space before it, as in RoBERTa's tokenizer.json.
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
        set_roberta_template(backend)
    elif config.special_tokens == "bert":
        set_bert_template(backend, "[CLS]", "[SEP]")
    return with_roles(config, backend)


def train_wordpiece(config: WordPieceConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains BERT's WordPiece (Devlin et al. 2019).

    Text is cleaned, CJK characters are separate words, case and accents are removed (lowercase=true), and words end at
    white space and punctuation. A word is split greedily into the longest entries.
    """
    special = list(config.specials.values())
    normalizer, splitter = bert_normalizer(config.lowercase), pre_tokenizers.BertPreTokenizer()
    corpus = training_text(texts)
    characters, continuations = alphabet(
        corpus,
        normalizer,
        vocab_size,
        len(special),
        lambda character: None if _is_separate_word(character) else PREFIX + character,
    )
    trainer = _trainer(config, vocab_size, [*special, *continuations], characters, continuing_subword_prefix=PREFIX)
    bpe = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix=PREFIX))
    bpe.normalizer, bpe.pre_tokenizer = normalizer, splitter
    bpe.train_from_iterator(corpus, trainer)

    backend = wordpiece(bpe.get_vocab(), config.lowercase)
    backend.add_special_tokens(special)
    return with_roles(config, backend)


def _is_separate_word(character: str) -> bool:
    code = ord(character)
    ascii_symbol = 33 <= code < 127 and not character.isalnum()
    ideograph = unicodedata.name(character, "").startswith("CJK ")
    return ascii_symbol or ideograph or unicodedata.category(character).startswith("P")


def train_words(config: WordConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Builds a vocabulary of the most frequent words, cleaned and split as in BERT; other words are unknown. Also
    raises UserError if no word is frequent enough."""
    backend = tokenizers.Tokenizer(models.WordLevel())
    backend.normalizer, backend.pre_tokenizer = bert_normalizer(config.lowercase), pre_tokenizers.BertPreTokenizer()
    words = _frequent_words(backend, config, texts, vocab_size)
    if not words:
        raise UserError(
            f"tokenizer.minimum_count={config.minimum_count}: no word of the text is this frequent",
            "set tokenizer.minimum_count=1, or data.path= to more text",
        )
    backend.model = _word_level(config, words, vocab_size, "words")
    return _with_special_tokens(config, backend)


def from_words(config: WordConfig, words: Sequence[str]) -> Tokenizer:
    """Builds a vocabulary of special tokens and the given words, in this order. Accents are not stripped. If cleaning
    or splitting changes a word, no text uses the word's entry."""
    special = set(config.specials.values())
    entries = [word for word in words if word not in special]
    backend = tokenizers.Tokenizer(_word_level(config, entries, len(entries) + len(special), "words"))
    backend.normalizer = bert_normalizer(config.lowercase, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _with_special_tokens(config, backend)


def train_characters(config: CharacterConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Builds a vocabulary of the most frequent characters, including white space; other characters are unknown."""
    normalizer = normalizers.Lowercase() if config.lowercase else None
    # A space has an entry even if no document contains one, since joined texts contain spaces.
    counts: Counter[str] = Counter(" ")
    for batch in training_text(texts):
        for text in batch:
            counts.update(text if normalizer is None else normalizer.normalize_str(text))
    characters = sorted(counts, key=lambda character: (-counts[character], character))
    backend = tokenizers.Tokenizer(_word_level(config, characters, vocab_size, "characters"))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _with_special_tokens(config, backend)


def _frequent_words(
    backend: tokenizers.Tokenizer, config: WordConfig | SpelledConfig, texts: Iterable[str], vocab_size: int
) -> list[str]:
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=config.minimum_count, special_tokens=[], show_progress=False
    )
    backend.train_from_iterator(training_text(texts), trainer)
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _word_level(config: ListedConfig, frequent: Sequence[str], vocab_size: int, units: str) -> models.WordLevel:
    special = list(dict.fromkeys(config.specials.values()))
    sentinels = [token for token, _ in sentinel_entries(config.sentinel_count)]
    reserved = len(special) + len(sentinels)
    if vocab_size <= reserved:
        sentinels_hint = ", or a smaller tokenizer.sentinels=" if sentinels else ""
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for {units} and {reserved} special tokens",
            f"set tokenizer.vocab_size=1000 or more{sentinels_hint}",
        )
    entries = [*special, *frequent[: vocab_size - reserved], *sentinels]
    numbers = {word: number for number, word in enumerate(entries)}
    return models.WordLevel(numbers, unk_token=config.specials["unk"])


def _with_special_tokens(config: ListedConfig, backend: tokenizers.Tokenizer) -> Tokenizer:
    specials, numbers = config.specials, backend.get_vocab()
    sentinels: Sequence[str] = [token for token in numbers if token.startswith("<extra_id_")]
    special = [*dict.fromkeys(specials.values()), *sorted(sentinels, key=numbers.__getitem__)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    if config.special_tokens == "roberta":
        set_roberta_template(backend)
    elif config.special_tokens == "t5":
        set_t5_template(backend, specials["eos"])
    elif config.special_tokens == "bert":
        set_bert_template(backend, specials["cls"], specials["sep"])
    return with_roles(config, backend)


def with_roles(config: TokenizerConfig, backend: tokenizers.Tokenizer) -> Tokenizer:
    """Returns the tokenizer of a backend that has the special tokens of a configuration."""
    numbers = backend.get_vocab()
    roles = {role: numbers[token] for role, token in (config.specials or {}).items()}
    return Tokenizer(backend, roles, f"the {config.name} tokenizer")


MAX_WORD_BYTES = 49
"""Maximum number of bytes of a word; longer words are truncated."""
_WORD_START = "Ġ"  # a space in GPT-2's byte alphabet


def train_spelled_wordpiece(config: SpelledConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Builds a vocabulary of special tokens, the most frequent words, and 257 entries that spell other words.

    Text is split as in BERT, at white space and around punctuation; case and accents are unchanged. A word in the
    vocabulary is one token. Any other word becomes its longest prefix in the vocabulary (at least the word-start mark)
    and one "##" token for each remaining byte, so that a model that reads characters (ELMo) loses none. Words are
    written in GPT-2's byte alphabet, beginning with a space.
    """
    reserved = len(_spelling_entries(config, []))
    if vocab_size <= reserved:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for words and {reserved} special tokens and bytes",
            "set tokenizer.vocab_size=2000 or more",
        )
    backend = _spelling_backend()
    words = _frequent_words(backend, config, texts, vocab_size)
    return _spelled(config, backend, words[: vocab_size - reserved])


def from_spelled_words(config: SpelledConfig, words: Iterable[str]) -> tuple[Tokenizer, list[str]]:
    """Builds the vocabulary of `train_spelled_wordpiece` with the given words, in this order. Also returns the words
    without an entry, because cleaning, splitting or truncation changes them."""
    backend = _spelling_backend()
    entries: dict[str, None] = {}
    unreachable = []
    for word in words:
        normalized = backend.normalizer.normalize_str(word)
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalized)]
        if normalized == word and len(pieces) == 1 and len(word.encode()) <= MAX_WORD_BYTES:
            entries[pieces[0]] = None
        else:
            unreachable.append(word)
    return _spelled(config, backend, list(entries)), unreachable


def _spelling_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel())
    backend.normalizer = bert_normalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
            pre_tokenizers.Split(Regex(f"(?<=^.{{{1 + MAX_WORD_BYTES}}}).+"), "removed"),
        ]
    )
    return backend


def _spelling_entries(config: SpelledConfig, words: Sequence[str]) -> list[str]:
    continuations = [PREFIX + character for character in sorted(pre_tokenizers.ByteLevel.alphabet())]
    return [*dict.fromkeys(config.specials.values()), *words, _WORD_START, *continuations]


def _spelled(config: SpelledConfig, backend: tokenizers.Tokenizer, words: Sequence[str]) -> Tokenizer:
    backend.model = models.WordPiece(
        {word: number for number, word in enumerate(_spelling_entries(config, words))},
        unk_token=config.specials["unk"],
        continuing_subword_prefix=PREFIX,
        max_input_chars_per_word=1 + MAX_WORD_BYTES,
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(Regex(f"^{PREFIX}"), ""), decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    )
    special = dict.fromkeys(config.specials.values())
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return with_roles(config, backend)


def load(config: FolderConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Loads an existing tokenizer; ignores `texts` and `vocab_size`. Raises UserError if the folder has no
    tokenizer."""
    folder = user_path(config.path)
    if has_tokenizer(folder) and not is_checkpoint(folder):
        return Tokenizer.load(folder, config.parse_special_tokens)
    try:
        return Tokenizer.load(find(config.path), config.parse_special_tokens)
    except NoCheckpoint as error:
        raise UserError(
            f"tokenizer.path={config.path}: {'the folder has no tokenizer' if folder.exists() else 'no such folder'}",
            "use a folder with tokenizer files (tokenizer.json, ...), or a run folder (runs/NAME)",
        ) from error
