"""Byte-level byte-pair encoding as GPT-2 has it: training on text (Radford et al. 2019).

Every text has an encoding and comes back unchanged. One special token, <|endoftext|>, begins, ends and pads.
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lmtool.errors import UserError
from lmtool.tokenizers.configs import ByteBpeConfig
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer

END = "<|endoftext|>"


def train(config: ByteBpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    UserError where there is no text, or no room for the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for the {len(alphabet)} bytes and {END}",
            "set tokenizer.vocab_size=1000 or more",
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.minimum_count,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(training_text(texts), trainer)
    end = backend.get_vocab()[END]
    return Tokenizer(backend, {"pad": end, "bos": end, "eos": end}, "the bytebpe tokenizer")
