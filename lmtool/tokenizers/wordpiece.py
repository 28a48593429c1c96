"""WordPiece as BERT has it: training on text.

Text is cleaned, CJK characters stand alone, case and accents go (lowercase=true), words end at white space and
punctuation. A word is then cut greedily into the longest pieces of the vocabulary (Devlin et al. 2019).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from lmtool.errors import UserError
from lmtool.tokenizers.backends import wordpiece
from lmtool.tokenizers.configs import SPECIALS, WordPieceConfig
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer

SPECIAL = SPECIALS["bert"]
PREFIX = "##"
ALPHABET = 1000  # characters at most, as in the library and in BERT's published vocabularies


def train(config: WordPieceConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for its characters.
    """
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=config.lowercase
    )
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    portions = training_text(texts)
    for portion in portions:
        for text in portion:
            counts.update(normalizer.normalize_str(text))
    alphabet, continuing = _alphabet(counts, vocab_size)

    # The library numbers the "##c" pieces in the order of a hash table, another one in each process, and its ties
    # follow the numbers. Given as special tokens they have fixed numbers, and so has all that follows.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.minimum_count,
        special_tokens=[*SPECIAL.values(), *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
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


def _alphabet(counts: Counter[str], vocab_size: int) -> tuple[list[str], list[str]]:
    """The characters that get an entry, and those that also get one as a continuation; the commonest first kept."""
    characters = [one for one in counts if not one.isspace()]
    if not characters:  # text of control characters alone
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    characters.sort(key=lambda one: (-counts[one], one))
    # Both forms of the alphabet take at most half of the vocabulary, so that there is room for pieces.
    kept = sorted(characters[: min(ALPHABET, max(vocab_size // 4, 1))])
    continuing = [PREFIX + one for one in kept if not _stands_alone(one)]
    needed = len(SPECIAL) + len(kept) + len(continuing)
    if needed > vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for {needed} special tokens and characters",
            "set tokenizer.vocab_size=1000 or more",
        )
    return kept, continuing


def _stands_alone(character: str) -> bool:
    """Whether the splitter never leaves this character inside a word: punctuation, and CJK ideographs."""
    code = ord(character)
    ascii_symbol = 33 <= code < 127 and not character.isalnum()
    ideograph = unicodedata.name(character, "").startswith("CJK ")
    return ascii_symbol or ideograph or unicodedata.category(character).startswith("P")
