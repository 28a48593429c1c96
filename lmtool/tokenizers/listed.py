"""Word-level and character-level vocabularies: a list of the commonest words, or characters, of a text.

For teaching: what is not in the list is unknown, and nothing is cut into pieces. Words are cleaned and end as in BERT
(white space, punctuation); characters stand as they are, white space too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lmtool.errors import UserError
from lmtool.tokenizers.backends import around, ends_with, roberta_around, sentinel_pieces
from lmtool.tokenizers.configs import CharacterConfig, ListedConfig, WordConfig
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer


def train_words(config: WordConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """List at most `vocab_size` words; the same texts give the same list.

    UserError where there is no text, or no room for a word.
    """
    cleaning, splitter = _cleaning(config.lowercase), pre_tokenizers.BertPreTokenizer()
    learned = tokenizers.Tokenizer(models.WordLevel())
    learned.normalizer, learned.pre_tokenizer = cleaning, splitter
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
    backend = _listed(config, [word for word, _ in words], vocab_size, "words")
    backend.normalizer, backend.pre_tokenizer = cleaning, splitter
    return _tokenizer(config, backend)


def of_words(config: WordConfig, words: Sequence[str]) -> Tokenizer:
    """The vocabulary of words that are known, behind the special tokens, in their order. Accents stay. A word that the
    splitting cuts, or the cleaning changes, has an entry that no text leads to."""
    special = set(config.specials.values())
    entries = [word for word in words if word not in special]
    backend = _listed(config, entries, len(entries) + len(special), "words")
    backend.normalizer, backend.pre_tokenizer = _cleaning(config.lowercase, False), pre_tokenizers.BertPreTokenizer()
    return _tokenizer(config, backend)


def _cleaning(lowercase: bool, strip_accents: bool | None = None) -> normalizers.Normalizer:
    """BERT's. strip_accents: None: where text is lowercased."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )


def train_characters(config: CharacterConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """List at most `vocab_size` characters; the same texts give the same list.

    UserError where there is no text, or no room for a character.
    """
    cleaning = normalizers.Lowercase() if config.lowercase else None
    # White space joins words in every text, whether training text has it within a document or not.
    counts: Counter[str] = Counter(" ")
    for portion in training_text(texts):
        for text in portion:
            counts.update(text if cleaning is None else cleaning.normalize_str(text))
    commonest = sorted(counts, key=lambda character: (-counts[character], character))
    backend = _listed(config, commonest, vocab_size, "characters")
    if cleaning is not None:
        backend.normalizer = cleaning
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _tokenizer(config, backend)


def _listed(config: ListedConfig, commonest: Sequence[str], vocab_size: int, units: str) -> tokenizers.Tokenizer:
    """Special tokens first, then words or characters, the commonest first; sentinels last."""
    special = list(dict.fromkeys(config.specials.values()))
    sentinels = [token for token, _ in sentinel_pieces(config.sentinels if config.special_tokens == "t5" else 0)]
    taken = len(special) + len(sentinels)
    if vocab_size <= taken:
        fewer = ", or a smaller tokenizer.sentinels=" if sentinels else ""
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for {units} beside {taken} special tokens",
            f"set tokenizer.vocab_size=1000 or more{fewer}",
        )
    entries = [*special, *commonest[: vocab_size - taken], *sentinels]
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
