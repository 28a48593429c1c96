"""A vocabulary of whole words that no word is outside of: one that is not listed is spelled.

Text is cut into words as BERT cuts it, at white space and around punctuation; case and accents stay. A word that is
listed is one token. Another one is the longest listed word that it begins with, or nothing but the mark of a beginning,
and pieces of a byte each that continue it ("##", as in WordPiece): its characters are all there, for a model that reads
them (ELMo), while its first id says no more than that. Words are written in GPT-2's alphabet of bytes, with its space
in front. Of a word of more than 49 bytes the first 49 are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lmtool.errors import UserError
from lmtool.tokenizers.configs import SpelledConfig
from lmtool.tokenizers.entries import PREFIX
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer

LONGEST = 49
"""Bytes of a word that are kept."""
_BEGINS = "Ġ"  # how the alphabet of bytes writes a space


def train(config: SpelledConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """List the commonest words, at most `vocab_size` entries: special tokens first, then words by their count, then
    what spells others. The same texts give the same list.

    UserError where there is no text, or no room for a word.
    """
    inside = [PREFIX + character for character in sorted(pre_tokenizers.ByteLevel.alphabet())]
    special = list(dict.fromkeys(config.specials.values()))
    taken = len(special) + 1 + len(inside)
    if vocab_size <= taken:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for words beside {taken} special tokens and bytes",
            "set tokenizer.vocab_size=2000 or more",
        )
    learned = tokenizers.Tokenizer(models.WordLevel())
    _cut(learned)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=config.minimum_count, special_tokens=[], show_progress=False
    )
    learned.train_from_iterator(training_text(texts), trainer)
    words = [word for word, _ in sorted(learned.get_vocab().items(), key=lambda item: item[1])]
    entries = [*special, *words[: vocab_size - taken], _BEGINS, *inside]
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
