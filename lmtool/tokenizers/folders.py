"""Reads a tokenizer from a folder in Hugging Face's format: tokenizer.json, or the older files.

vocab.txt: WordPiece (BERT, ELECTRA, DistilBERT). vocab.json and merges.txt: byte-level BPE (GPT-2, RoBERTa, BART,
Qwen2), or GPT-1's BPE with "</w>". spiece.model: SentencePiece (T5, ALBERT, XLNet; BPE: Llama). As in transformers,
tokenizer_config.json overrides tokenizer.json, depending on the class that the folder names (classes.py).
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from unicodedata import normalize

import tokenizers
from tokenizers import AddedToken

from lmtool.config.base import JsonMapping
from lmtool.errors import UserError
from lmtool.tokenizers import backends
from lmtool.tokenizers.backends import BPE, CONTROL, UNIGRAM, USER_DEFINED, merges_of, read_model
from lmtool.tokenizers.classes import (
    ALBERT,
    BERT,
    GPT1,
    GPT2,
    LLAMA,
    ROBERTA,
    SENTENCEPIECE_FILES,
    T5,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    XLNET,
    FileVocabulary,
    Settings,
    TokenizerClass,
    file_error,
    read_bytes,
    read_json,
    read_text,
    transformers_class,
)
from lmtool.tokenizers.configs import SPECIALS
from lmtool.tokenizers.special import read_special

MAX_GROWTH = 1000
"""Maximum number of characters that may replace one character. The supported families need at most 66."""
_RULE_GROUPS = ("normalizer", "pre_tokenizer"), ("decoder",), ("post_processor",)
_EMPTY_MATCHES = ("?", "*", "|", "^", "$", "{0", "{,", "()", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G", r"\K")
"""Operators of regular expressions that may match the empty string."""


def require_bounded(path: Path, content: Mapping[str, object]) -> None:
    """Raises UserError if the rules of a tokenizer.json may replace one character by more than `MAX_GROWTH`."""
    for names in _RULE_GROUPS:
        growth, inserted = 1.0, list[str]()
        for step in (step for name in names for step in _steps(content.get(name))):
            growth *= _growth(step, inserted)
        if growth > MAX_GROWTH:
            raise file_error(path, f"{' and '.join(names)} may replace one character by more than {MAX_GROWTH:,}")


def require_bounded_map(path: Path, character_map: bytes) -> None:
    """Raises UserError if SentencePiece's character map may replace one character by more than `MAX_GROWTH`."""
    if _longest_replacement(character_map) > MAX_GROWTH:
        raise file_error(path, f"the character map may replace one character by more than {MAX_GROWTH:,}")


def _steps(rule: object) -> Iterator[JsonMapping]:
    if not isinstance(rule, Mapping):
        return
    nested = [value for value in rule.values() if isinstance(value, list)] if rule.get("type") == "Sequence" else []
    if not nested:
        yield rule
    for step in (step for steps in nested for step in steps):
        yield from _steps(step)


def _growth(step: JsonMapping, inserted: list[str]) -> float:
    """The maximum number of characters by which a step replaces one character; for a template, how often it repeats a
    text. A step that inserts a text appends it to `inserted`."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        inserted.append(content)
        return _replacement_growth(step.get("pattern"), len(content))
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return max((len(normalize(kind, text)) / max(len(text), 1) for text in inserted), default=1.0)
    if kind == "Precompiled":
        try:
            return float(_longest_replacement(base64.b64decode(str(step.get("precompiled_charsmap")))))
        except ValueError:  # the library reports this error
            return 1.0
    if kind == "TemplateProcessing":
        layouts = [step[name] for name in ("single", "pair") if isinstance(step.get(name), list)]
        return float(max((sum("Sequence" in piece for piece in layout) for layout in layouts), default=1))
    return {"ByteLevel": 4.0, "Metaspace": 2.0}.get(str(kind), 1.0)


def _replacement_growth(pattern: object, length: int) -> float:
    text, regular = "", True
    if isinstance(pattern, Mapping):
        regular = "Regex" in pattern
        text = str(pattern.get("Regex", pattern.get("String", "")))
    if not text or (regular and any(operator in text for operator in _EMPTY_MATCHES)):
        return 1.0 + length
    return max(1.0, length if regular else math.ceil(length / len(text)))


def _longest_replacement(character_map: bytes) -> int:
    """A character map consists of the size of a trie, the trie, and zero-terminated texts, measured in bytes."""
    if len(character_map) < 4:
        return 1
    (trie_size,) = struct.unpack("<I", character_map[:4])
    return max(map(len, character_map[4 + trie_size :].split(b"\0")))


NO_ENTRIES = "the vocabulary has no entries"


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder contains a tokenizer's files."""
    if any((folder / name).is_file() for name in (TOKENIZER_JSON, "vocab.txt", *SENTENCEPIECE_FILES)):
        return True
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """Returns a folder's tokenizer, its special tokens by role, and those without a role. Raises UserError if a file is
    missing or damaged, or if the folder names an unsupported transformers class."""
    if not has_tokenizer(folder):
        raise UserError(
            f"tokenizer: {folder} {'has no tokenizer.json' if folder.is_dir() else 'is not a folder'}",
            "use a folder with tokenizer.json (or vocab.txt, or vocab.json and merges.txt, or spiece.model), such as "
            "a run's checkpoint or the output of `lmtool tokenizer`",
        )
    settings = Settings.read(folder)
    kind = transformers_class(folder, settings)
    tokenizer_json = folder / TOKENIZER_JSON if (folder / TOKENIZER_JSON).is_file() else None
    if tokenizer_json is not None and not isinstance(kind, TokenizerClass):
        return _read_unchanged(folder, settings, tokenizer_json, guess_family=kind is None)
    if isinstance(kind, str):
        raise UserError(
            f"{settings.path}: tokenizer_class={kind} needs tokenizer.json, which {folder} lacks",
            "copy tokenizer.json into the folder, or set tokenizer_class to a class that reads the other files, "
            f"such as {BERT.names[0]}",
        )
    kind = kind or _guess_class(folder)
    if tokenizer_json is None:
        original, vocabulary = None, _vocabulary_from_old_files(folder, kind, settings)
    else:
        original, vocabulary = _load_tokenizer_json(tokenizer_json), _vocabulary_from_json(tokenizer_json, kind)
    special = read_special(folder, settings, kind, tokenizer_json, vocabulary.special_pieces)
    try:
        backend = kind.build(vocabulary, settings, special.roles)
    except UserError:
        raise
    except Exception as problem:  # the library raises no narrower class
        raise file_error(vocabulary.path, str(problem)) from problem
    special.add_to(backend)
    if kind.exact_special_tokens:
        tokens = (*special.roles.values(), *special.without_role)
        backend.add_tokens([AddedToken(token, special=True) for token in tokens])
    if kind.set_template is not None:
        kind.set_template(backend, settings, special.roles)
    elif original is not None and original.post_processor is not None:
        backend.post_processor = original.post_processor
    return backend, special.roles, special.without_role


def _read_unchanged(
    folder: Path, settings: Settings, path: Path, guess_family: bool
) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """guess_family: whether to guess the roles of special tokens from the vocabulary: no file names a class."""
    backend = _load_tokenizer_json(path)
    special = read_special(folder, settings, None, path)
    special.add_to(backend)
    family = backends.family_of_vocabulary(backend.get_vocab()) if guess_family else None
    return backend, {**SPECIALS.get(family or "", {}), **special.roles}, special.without_role


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    require_bounded(path, read_json(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as problem:  # the library raises no narrower class than Exception, and panics
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise file_error(path, str(problem)) from problem
    if not backend.get_vocab_size(with_added_tokens=False):
        raise file_error(path, NO_ENTRIES)
    _require_dense_ids(path, backend.get_vocab())
    return backend


def _guess_class(folder: Path) -> TokenizerClass:
    path = next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).is_file()), None)
    if path is not None:
        content = read_bytes(path)
        with suppress(ValueError, KeyError):  # reading the vocabulary reports this error
            if read_model(content).kind == BPE:
                return LLAMA
        if b"<cls>" in content and b"<sep>" in content:
            return XLNET
        # ALBERT's vocabulary contains BERT's special tokens.
        return ALBERT if b"[CLS]" in content and b"[SEP]" in content else T5
    if (folder / "vocab.txt").is_file():
        return BERT
    vocabulary = read_json(folder / "vocab.json")
    if any(word.endswith("</w>") for word in vocabulary):
        return GPT1
    return ROBERTA if backends.family_of_vocabulary(vocabulary) == "roberta" else GPT2


def _vocabulary_from_json(path: Path, kind: TokenizerClass) -> FileVocabulary:
    content = read_json(path)
    model = content["model"]
    declared = model.get("type")
    if declared not in (None, kind.model):
        raise UserError(
            f"{path}: a {declared} vocabulary; the folder's class {kind.names[0]} needs {kind.model}",
            f"set the correct class in {TOKENIZER_CONFIG}; PreTrainedTokenizerFast uses tokenizer.json unchanged",
        )
    if kind.model == "Unigram":
        unigrams = [(piece, float(score)) for piece, score in model["vocab"]]
        return FileVocabulary(path, unigrams=unigrams, character_map=_character_map(content.get("normalizer")))
    merges = model.get("merges", ()) if kind.model == "BPE" else ()
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
    return FileVocabulary(path, model["vocab"], merges=[(first, second) for first, second in pairs])


def _character_map(normalizer: object) -> bytes:
    for step in _steps(normalizer):
        if step.get("type") == "Precompiled":
            return base64.b64decode(step["precompiled_charsmap"])
    return b""


def _vocabulary_from_old_files(folder: Path, kind: TokenizerClass, settings: Settings) -> FileVocabulary:
    paths = [folder / name for name in kind.files if (folder / name).is_file()]
    one_file = kind.files[0] in SENTENCEPIECE_FILES or kind.model != "BPE"
    if not paths or (not one_file and len(paths) < 2):
        raise UserError(
            f"tokenizer: {folder} has no {' and '.join(kind.files[:1] if one_file else kind.files)}, which "
            f"{kind.names[0]} needs",
            "copy the missing file into the folder, or give a folder with tokenizer.json",
        )
    if kind.files[0] in SENTENCEPIECE_FILES:
        return _read_sentencepiece(paths[0], kind, settings)
    vocabulary = (_read_wordpiece if kind.model == "WordPiece" else _read_bpe)(paths[0])
    if not vocabulary.entries:
        raise file_error(paths[0], NO_ENTRIES)
    return vocabulary


def _read_wordpiece(path: Path) -> FileVocabulary:
    # Not splitlines(): entries may contain other characters that are line ends in Unicode.
    words = read_text(path).split("\n")
    if words and not words[-1]:
        words.pop()
    return FileVocabulary(path, {word.removesuffix("\r"): number for number, word in enumerate(words)})


def _read_bpe(path: Path) -> FileVocabulary:
    vocabulary = read_json(path)
    if not all(isinstance(number, int) for number in vocabulary.values()):
        raise file_error(path, "the values are not integers")
    _require_dense_ids(path, vocabulary)
    path = path.with_name("merges.txt")
    merges: list[tuple[str, str]] = []
    for line in read_text(path).split("\n"):
        if line and not line.startswith("#version"):
            first, _, second = line.partition(" ")
            if not second or " " in second:
                raise file_error(path, f"{line!r} is not a pair of tokens")
            merges.append((first, second))
    return FileVocabulary(path, vocabulary, merges=merges)


def _read_sentencepiece(path: Path, kind: TokenizerClass, settings: Settings) -> FileVocabulary:
    try:
        model = read_model(read_bytes(path))
    except (ValueError, KeyError) as problem:
        raise file_error(path, str(problem)) from problem
    if model.kind != (BPE if kind.model == "BPE" else UNIGRAM):
        raise file_error(path, f"not a {kind.model} model")
    require_bounded_map(path, model.character_map)
    if kind.model == "BPE":
        # transformers reads special tokens from tokenizer_config.json and the class, not from this file.
        entries = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
        return FileVocabulary(path, entries, merges=merges_of(model))
    unigrams = [(piece, score) for piece, score, _ in model.pieces]
    if kind is T5:
        unigrams += backends.sentinel_entries(settings.sentinel_count)
    special_pieces = tuple(
        AddedToken(piece, normalized=False, special=type_ == CONTROL)
        for piece, _, type_ in model.pieces
        if type_ in (CONTROL, USER_DEFINED)
    )
    return FileVocabulary(path, unigrams=unigrams, character_map=model.character_map, special_pieces=special_pieces)


def _require_dense_ids(path: Path, vocabulary: Mapping[str, int]) -> None:
    largest, entries = max(vocabulary.values(), default=0), len(vocabulary)
    if largest > 2 * entries + 10_000:  # the embedding has a row for each id up to the largest, used or not
        raise file_error(path, f"the vocabulary has {entries} entries, but the largest id is {largest}")
