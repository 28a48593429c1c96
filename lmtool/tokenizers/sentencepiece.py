"""Trains a SentencePiece vocabulary: unigram (Kudo 2018; T5, ALBERT) or BPE (Sennrich et al. 2016; Llama).

A space is written "▁", also before the first word.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, normalizers

from lmtool.errors import UserError
from lmtool.tokenizers.backends import (
    CONTROL,
    PieceModel,
    albert_normalizer,
    merges_of,
    read_model,
    sentencepiece_bpe,
    sentinel_entries,
    unicode_normalizer,
    unigram,
)
from lmtool.tokenizers.configs import SentencePieceConfig
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tokenizers.trained import with_roles

# Ids of the special tokens for which the library has a role; _OTHER_TOKENS follow them.
_IDS_BY_ROLE = {
    "t5": {"pad": 0, "eos": 1, "unk": 2},
    "albert": {"pad": 0, "unk": 1},
    "xlnet": {"unk": 0, "bos": 1, "eos": 2},
}
_OTHER_TOKENS = {
    "t5": [],
    "albert": ["[CLS]", "[SEP]", "[MASK]"],
    "xlnet": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
}
_MAX_LINE = 2000
"""Maximum number of characters of a line of training text; by default the library skips lines above 4192 bytes."""


def train(config: SentencePieceConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a SentencePiece vocabulary; see trained.py for the arguments and errors of a training function."""
    model = read_model(train_model(config, texts, vocab_size))
    sentinels = sentinel_entries(config.sentinel_count)
    backend = _backend(config, model, sentinels)
    special = [piece for piece, _, type_ in model.pieces if type_ == CONTROL]
    special += [token for token in config.specials.values() if token not in special]
    special += [f"<extra_id_{number}>" for number in range(len(sentinels))]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return with_roles(config, backend)


def _backend(
    config: SentencePieceConfig, model: PieceModel, sentinels: Sequence[tuple[str, float]]
) -> tokenizers.Tokenizer:
    entries = [*((piece, score) for piece, score, _ in model.pieces), *sentinels]
    if config.algorithm == "unigram":
        return unigram(entries, config.special_tokens, model.character_map, config.lowercase)
    vocabulary = {piece: number for number, (piece, _) in enumerate(entries)}
    return sentencepiece_bpe(vocabulary, merges_of(model), config.special_tokens, _normalizer(config))


def _normalizer(config: SentencePieceConfig) -> list[normalizers.Normalizer]:
    """Before the SentencePiece library. BPE uses NFKC here and no normalization there, since `tokenizers` does not
    reproduce the library's character map exactly (it looks up whole graphemes)."""
    steps = list(albert_normalizer(config.lowercase)) if config.special_tokens != "t5" else []
    return [*steps, *(unicode_normalizer() if config.algorithm == "bpe" else ())]


def train_model(config: SentencePieceConfig, texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a vocabulary and returns the model file. `vocab_size` includes sentinels, but the file does not."""
    sentinels = config.sentinel_count
    ids = {"pad": -1, "unk": -1, "bos": -1, "eos": -1} | _IDS_BY_ROLE[config.special_tokens]  # -1: no such token
    steps = _normalizer(config)
    normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")]) if steps else None
    lines = _lines(training_text(texts), normalizer)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type=config.algorithm,
            vocab_size=max(vocab_size - sentinels, 1),
            hard_vocab_limit=False,
            character_coverage=config.character_coverage,
            normalization_rule_name="nmt_nfkc" if config.algorithm == "unigram" else "identity",
            max_sentence_length=4 * _MAX_LINE + 1,  # bytes; a character has at most 4
            pad_id=ids["pad"],
            unk_id=ids["unk"],
            eos_id=ids["eos"],
            bos_id=ids["bos"],
            control_symbols=_OTHER_TOKENS[config.special_tokens],
            # Each thread sums separately, so the result depends on the number of threads.
            num_threads=4,
            minloglevel=2,
        )
    except (RuntimeError, ValueError, OSError) as problem:
        match = re.search(r"smaller than required_chars. \d+ vs (\d+)", str(problem))
        if match is not None:
            minimum = int(match[1]) + sentinels
            raise UserError(
                f"tokenizer.vocab_size={vocab_size} is too small: the text's characters and the special tokens need "
                f"{minimum} entries",
                f"set tokenizer.vocab_size={max(minimum, 1000)} or more, or a smaller tokenizer.character_coverage=",
            ) from problem
        reason = " ".join(str(problem).rpartition("] ")[2].split())[-200:]
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for {sentinels + 5} special tokens and the text's "
            f"characters, or the text is too short ({reason})",
            "set tokenizer.vocab_size=1000 or more, or data.path= to more text",
        ) from problem
    return model.getvalue()


def _lines(batches: list[list[str]], normalizer: normalizers.Normalizer | None) -> Iterator[str]:
    for line in (line for batch in batches for text in batch for line in text.splitlines()):
        for start in range(0, len(line), _MAX_LINE):
            part = line[start : start + _MAX_LINE].replace("\x00", " ")
            if not part.isspace():
                yield part if normalizer is None else normalizer.normalize_str(part)
