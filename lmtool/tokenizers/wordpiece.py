"""WordPiece as BERT has it: training on text.

Text is cleaned, CJK characters stand alone, case and accents go (lowercase=true), words end at white space and
punctuation. A word is then cut greedily into the longest pieces of the vocabulary (Devlin et al. 2019).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from lmtool.tokenizers.backends import wordpiece
from lmtool.tokenizers.configs import SPECIALS, WordPieceConfig
from lmtool.tokenizers.texts import alphabet, training_text
from lmtool.tokenizers.tokenizer import Tokenizer

SPECIAL = SPECIALS["bert"]
PREFIX = "##"


def train(config: WordPieceConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for its characters.
    """
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=config.lowercase
    )
    splitter = pre_tokenizers.BertPreTokenizer()
    portions = training_text(texts)
    characters, continuing = alphabet(
        portions,
        normalizer,
        vocab_size,
        len(SPECIAL),
        lambda character: None if _stands_alone(character) else PREFIX + character,
    )

    # The library numbers the "##c" pieces in the order of a hash table, another one in each process, and its ties
    # follow the numbers. Given as special tokens they have fixed numbers, and so has all that follows.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.minimum_count,
        special_tokens=[*SPECIAL.values(), *continuing],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    learned = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix=PREFIX))
    learned.normalizer, learned.pre_tokenizer = normalizer, splitter
    learned.train_from_iterator(portions, trainer)

    backend = wordpiece(learned.get_vocab(), config.lowercase)
    backend.add_special_tokens(list(SPECIAL.values()))
    numbers = backend.get_vocab()
    roles = {name: numbers[token] for name, token in SPECIAL.items()}
    return Tokenizer(backend, roles, "the wordpiece tokenizer")


def _stands_alone(character: str) -> bool:
    """Whether the splitter never leaves this character inside a word: punctuation, and CJK ideographs."""
    code = ord(character)
    ascii_symbol = 33 <= code < 127 and not character.isalnum()
    ideograph = unicodedata.name(character, "").startswith("CJK ")
    return ascii_symbol or ideograph or unicodedata.category(character).startswith("P")
