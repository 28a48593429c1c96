"""Byte-level byte-pair encoding as GPT-2 has it: training on text (Radford et al. 2019).

Every text has an encoding and comes back unchanged. GPT-2 has one special token, <|endoftext|>, which begins, ends and
pads; RoBERTa and BART have <s> <pad> </s> <unk> <mask> (Liu et al. 2019, Lewis et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, models, pre_tokenizers, trainers

from lmtool.errors import UserError
from lmtool.tokenizers.backends import around, byte_level, qwen2_level, roberta_around
from lmtool.tokenizers.configs import SPECIALS, ByteBpeConfig
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer

END = "<|endoftext|>"
_ENTRIES: dict[str, tuple[list[str], list[str]]] = {
    "gpt2": ([END], []),
    "roberta": (["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
    "bert": ([*SPECIALS["bert"].values()], []),
}
"""The special tokens in front of all other entries, and those behind them."""


def train(config: ByteBpeConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
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
