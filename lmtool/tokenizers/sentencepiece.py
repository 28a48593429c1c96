"""Train a SentencePiece vocabulary: unigram (Kudo 2018; T5, ALBERT) or BPE (Sennrich et al. 2016; Llama).

Spaces are written "▁", also before the first word.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, normalizers

from lmtool.errors import UserError
from lmtool.tokenizers.backends import albert_normalizer, sentinel_entries, sequence, unicode_normalizer, unigram
from lmtool.tokenizers.configs import SentencePieceConfig
from lmtool.tokenizers.sentencepiece_model import CONTROL, PieceModel, merges_of, read_model
from lmtool.tokenizers.texts import training_text
from lmtool.tokenizers.tokenizer import Tokenizer

# Ids of the special tokens that the library knows by role, and the tokens that follow them.
_FIRST = {
    "t5": {"pad": 0, "eos": 1, "unk": 2},
    "albert": {"pad": 0, "unk": 1},
    "xlnet": {"unk": 0, "bos": 1, "eos": 2},
}
_NEXT = {
    "t5": [],
    "albert": ["[CLS]", "[SEP]", "[MASK]"],
    "xlnet": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
}
_LONGEST = 2000  # characters of a line; the library skips lines above 4192 bytes by default


def train(config: SentencePieceConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a SentencePiece vocabulary; see trained.py for the arguments and errors of a training function."""
    model = read_model(train_model(config, texts, vocab_size))
    sentinels = sentinel_entries(config.sentinel_count)
    backend = _backend(config, model, sentinels)
    numbers = backend.get_vocab()
    special = [piece for piece, _, type_ in model.pieces if type_ == CONTROL]
    special += [token for token in config.specials.values() if token not in special]
    special += [f"<extra_id_{number}>" for number in range(len(sentinels))]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Tokenizer(
        backend, {role: numbers[token] for role, token in config.specials.items()}, "the sentencepiece tokenizer"
    )


def _backend(
    config: SentencePieceConfig, model: PieceModel, sentinels: Sequence[tuple[str, float]]
) -> tokenizers.Tokenizer:
    kind = config.special_tokens
    if config.algorithm == "unigram":
        unigrams = [(piece, score) for piece, score, _ in model.pieces]
        return unigram([*unigrams, *sentinels], kind, model.characters, config.lowercase)
    entries = [*(piece for piece, _, _ in model.pieces), *(piece for piece, _ in sentinels)]
    vocabulary = {piece: number for number, piece in enumerate(entries)}
    return sequence(vocabulary, merges_of(model), kind, _normalizer(config))


def _normalizer(config: SentencePieceConfig) -> list[normalizers.Normalizer]:
    """Normalization before the library reads the text. `tokenizers` does not reproduce the library's character map
    exactly (it looks up whole graphemes), so BPE uses NFKC here and no normalization in the library."""
    steps = list(albert_normalizer(config.lowercase)) if config.special_tokens != "t5" else []
    return [*steps, *(unicode_normalizer() if config.algorithm == "bpe" else ())]


def train_model(config: SentencePieceConfig, texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a vocabulary and return its model file. Sentinels count in `vocab_size`, but are not in the file."""
    kind = config.special_tokens
    sentinels = config.sentinel_count
    first = {"pad": -1, "unk": -1, "bos": -1, "eos": -1} | _FIRST[kind]
    steps = _normalizer(config)
    clean = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")]) if steps else None
    lines = _lines(training_text(texts), clean)
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
            max_sentence_length=4 * _LONGEST + 1,
            pad_id=first["pad"],
            unk_id=first["unk"],
            eos_id=first["eos"],
            bos_id=first["bos"],
            control_symbols=_NEXT[kind],
            # Each thread sums separately, so the result depends on their number.
            num_threads=4,
            minloglevel=2,
        )
    except (RuntimeError, ValueError, OSError) as problem:
        needed = re.search(r"smaller than required_chars. \d+ vs (\d+)", str(problem))
        if needed is not None:
            least = int(needed[1]) + sentinels
            raise UserError(
                f"tokenizer.vocab_size={vocab_size} is too small: the text's characters and the special tokens need "
                f"{least} entries",
                f"set tokenizer.vocab_size={max(least, 1000)} or more, or a smaller tokenizer.character_coverage=",
            ) from problem
        reason = " ".join(str(problem).rpartition("] ")[2].split())[-200:]
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for {sentinels + 5} special tokens and the text's "
            f"characters, or the text is too short ({reason})",
            "set tokenizer.vocab_size=1000 or more, or give more text with data.path=",
        ) from problem
    return model.getvalue()


def _lines(corpus: list[list[str]], clean: normalizers.Normalizer | None) -> Iterator[str]:
    """Lines of at most `_LONGEST` characters."""
    for portion in corpus:
        for text in portion:
            for line in text.splitlines():
                for start in range(0, len(line), _LONGEST):
                    part = line[start : start + _LONGEST].replace("\x00", " ")
                    if not part.isspace():
                        yield part if clean is None else clean.normalize_str(part)
