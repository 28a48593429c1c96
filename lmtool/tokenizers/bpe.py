"""Byte-pair encoding of words as GPT has it: training on text (Radford et al. 2018, after Sennrich et al. 2016).

Text is cleaned and lowercased, words end at white space and punctuation, and a word's last character carries "</w>".
Beside the published <unk> there is <|endoftext|>, which begins, ends and pads: text is learned document by document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import models, trainers

from lmtool.tokenizers.backends import word_end
from lmtool.tokenizers.configs import BpeConfig
from lmtool.tokenizers.texts import alphabet, training_text
from lmtool.tokenizers.tokenizer import Tokenizer

SUFFIX = "</w>"


def train(config: BpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for its characters.
    """
    learned = word_end(models.BPE(end_of_word_suffix=SUFFIX))
    portions = training_text(texts)
    special = list(dict.fromkeys(config.specials.values()))
    characters, last = alphabet(
        portions, learned.normalizer, vocab_size, len(special), lambda character: character + SUFFIX
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
    learned.train_from_iterator(portions, trainer)
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    unknown = config.specials["unk"]
    backend = word_end(
        models.BPE(learned.get_vocab(), merges, unk_token=unknown, end_of_word_suffix=SUFFIX, fuse_unk=False)
    )
    backend.add_special_tokens(special)
    numbers = backend.get_vocab()
    roles = {role: numbers[written] for role, written in config.specials.items()}
    return Tokenizer(backend, roles, "the bpe tokenizer")
