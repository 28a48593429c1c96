"""Read a tokenizer from a folder in Hugging Face's format: tokenizer.json, or the older files.

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

from lmtool.config.saved import JsonMapping
from lmtool.errors import UserError
from lmtool.tokenizers import backends
from lmtool.tokenizers.classes import (
    ALBERT,
    BERT,
    CONFIG,
    GPT1,
    GPT2,
    LLAMA,
    ROBERTA,
    SENTENCEPIECE_FILES,
    SETTINGS,
    T5,
    TOKENIZER_JSON,
    XLNET,
    FileVocabulary,
    Settings,
    TokenizerClass,
    broken,
    class_of,
    read_bytes,
    read_json,
    read_text,
)
from lmtool.tokenizers.configs import SPECIALS
from lmtool.tokenizers.sentencepiece_model import BPE, CONTROL, UNIGRAM, USER_DEFINED, merges_of, read_model
from lmtool.tokenizers.special import ADDED, SPECIAL_MAP, read_special

MOST = 1000
"""Maximum number of characters that replace one. The supported families need at most 66."""
_PARTS = ("normalizer", "pre_tokenizer"), ("decoder",), ("post_processor",)
_MAY_BE_EMPTY = ("?", "*", "|", "^", "$", "{0", "{,", "()", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G", r"\K")
"""Parts of a pattern that may match the empty string."""


def require_bounded(path: Path, content: Mapping[str, object]) -> None:
    """Raise UserError if the rules of a tokenizer.json may expand one character to more than `MOST`. path: of the file,
    for the error."""
    for names in _PARTS:
        growth, written = 1.0, list[str]()
        for step in (step for name in names for step in _steps(content.get(name))):
            growth *= _growth(step, written)
        if growth > MOST:
            raise broken(path, f"{' and '.join(names)} may replace one character by more than {MOST:,}")


def require_bounded_characters(path: Path, characters: bytes) -> None:
    """Raise UserError if SentencePiece's character map may expand one character to more than `MOST`."""
    if _longest_replacement(characters) > MOST:
        raise broken(path, f"the character map may replace one character by more than {MOST:,}")


def _steps(rule: object) -> Iterator[JsonMapping]:
    """The steps of a rule in order."""
    if not isinstance(rule, Mapping):
        return
    inner = [value for value in rule.values() if isinstance(value, list)] if rule.get("type") == "Sequence" else []
    if not inner:
        yield rule
    for step in (step for steps in inner for step in steps):
        yield from _steps(step)


def _growth(step: JsonMapping, written: list[str]) -> float:
    """Maximum number of characters by which a step replaces one; for a template, how often it repeats a text. written:
    texts written by earlier steps; a replacement appends its text."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        written.append(content)
        return _replacement_growth(step.get("pattern"), len(content))
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return max((len(normalize(kind, text)) / max(len(text), 1) for text in written), default=1.0)
    if kind == "Precompiled":
        try:
            return float(_longest_replacement(base64.b64decode(str(step.get("precompiled_charsmap")))))
        except ValueError:  # reported by the library
            return 1.0
    if kind == "TemplateProcessing":
        layouts = [step[name] for name in ("single", "pair") if isinstance(step.get(name), list)]
        return float(max((sum("Sequence" in piece for piece in layout) for layout in layouts), default=1))
    return {"ByteLevel": 4.0, "Metaspace": 2.0}.get(str(kind), 1.0)


def _replacement_growth(pattern: object, length: int) -> float:
    """Maximum growth if a pattern is replaced by `length` characters."""
    text, regular = "", True
    if isinstance(pattern, Mapping):
        regular = "Regex" in pattern
        text = str(pattern.get("Regex", pattern.get("String", "")))
    if not text or (regular and any(mark in text for mark in _MAY_BE_EMPTY)):
        return 1.0 + length
    return max(1.0, length if regular else math.ceil(length / len(text)))


def _longest_replacement(characters: bytes) -> int:
    """Number of bytes of the longest text in a character map. The map has the size of its trie, the trie, and
    zero-terminated texts."""
    if len(characters) < 4:
        return 1
    (trie,) = struct.unpack("<I", characters[:4])
    return max(map(len, characters[4 + trie :].split(b"\0")))


FILES = (
    TOKENIZER_JSON,
    SETTINGS,
    SPECIAL_MAP,
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    ADDED,
    *SENTENCEPIECE_FILES,
    CONFIG,
)
"""The files that may define a tokenizer."""
NO_ENTRIES = "the vocabulary has no entries"


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder contains a tokenizer's files."""
    if any((folder / name).is_file() for name in (TOKENIZER_JSON, "vocab.txt", *SENTENCEPIECE_FILES)):
        return True
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """Read a folder's tokenizer, its special tokens by role, and its special tokens without a role. UserError if a file
    is missing or broken, or if the folder names an unsupported transformers class."""
    if not has_tokenizer(folder):
        raise UserError(
            f"tokenizer: {folder} {'has no tokenizer.json' if folder.is_dir() else 'is not a folder'}",
            "use a folder with tokenizer.json (or vocab.txt, or vocab.json and merges.txt, or spiece.model), such as "
            "a run's checkpoint or the output of `lmtool tokenizer`",
        )
    settings = Settings.of(folder)
    kind = class_of(folder, settings)
    tokenizer_json = folder / TOKENIZER_JSON if (folder / TOKENIZER_JSON).is_file() else None
    if tokenizer_json is not None and not isinstance(kind, TokenizerClass):
        return _read_unchanged(folder, settings, tokenizer_json, guess_family=kind is None)
    if isinstance(kind, str):
        raise UserError(
            f"{settings.path}: tokenizer_class={kind} needs tokenizer.json, which {folder} lacks",
            f"copy tokenizer.json into the folder, or set the class of the other files, such as {BERT.names[0]}",
        )
    kind = kind or _class_by_files(folder)
    original = None if tokenizer_json is None else _load_tokenizer_json(tokenizer_json)
    vocabulary = (
        _from_old_files(folder, kind, settings)
        if tokenizer_json is None
        else _from_tokenizer_json(tokenizer_json, kind)
    )
    special = read_special(folder, settings, kind, tokenizer_json, vocabulary.marked)
    try:
        backend = kind.build(vocabulary, settings, special.roles)
    except UserError:
        raise
    except Exception as problem:  # the library raises no narrower class
        raise broken(vocabulary.path, str(problem)) from problem
    special.add_to(backend)
    if kind.bare:
        tokens = (*special.roles.values(), *special.without_role)
        backend.add_tokens([AddedToken(token, special=True) for token in tokens])
    if kind.around is not None:
        kind.around(backend, settings, special.roles)
    elif original is not None and original.post_processor is not None:
        backend.post_processor = original.post_processor
    return backend, special.roles, special.without_role


def _read_unchanged(
    folder: Path, settings: Settings, path: Path, guess_family: bool
) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """A tokenizer.json of a generic class. guess_family: no file names a class, so the special tokens of a known family
    get their roles."""
    backend = _load_tokenizer_json(path)
    special = read_special(folder, settings, None, path)
    special.add_to(backend)
    family = backends.family_of_vocabulary(backend.get_vocab()) if guess_family else None
    return backend, {**SPECIALS.get(family or "", {}), **special.roles}, special.without_role


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    require_bounded(path, read_json(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises no narrower class
        raise broken(path, str(problem)) from problem
    if not backend.get_vocab_size(with_added_tokens=False):
        raise broken(path, NO_ENTRIES)
    _check_numbers(path, backend.get_vocab())
    return backend


def _class_by_files(folder: Path) -> TokenizerClass:
    """The class of a folder with older files that names none."""
    path = next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).is_file()), None)
    if path is not None:
        content = read_bytes(path)
        with suppress(ValueError, KeyError):  # reported when the vocabulary is read
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


def _from_tokenizer_json(path: Path, kind: TokenizerClass) -> FileVocabulary:
    """The vocabulary in a tokenizer.json."""
    content = read_json(path)
    model = content["model"]
    declared = model.get("type")
    if declared not in (None, kind.model):
        raise UserError(
            f"{path}: a {declared} vocabulary; the folder's class {kind.names[0]} needs {kind.model}",
            f"set the correct class in {SETTINGS}; PreTrainedTokenizerFast uses tokenizer.json unchanged",
        )
    if kind.model == "Unigram":
        unigrams = [(piece, float(score)) for piece, score in model["vocab"]]
        return FileVocabulary(path, unigrams=unigrams, characters=_characters(content.get("normalizer")))
    merges = model.get("merges", ()) if kind.model == "BPE" else ()
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
    return FileVocabulary(path, model["vocab"], merges=[(first, second) for first, second in pairs])


def _characters(normalizer: object) -> bytes:
    """SentencePiece's character map among the steps of a normalizer."""
    for step in _steps(normalizer):
        if step.get("type") == "Precompiled":
            return base64.b64decode(step["precompiled_charsmap"])
    return b""


def _from_old_files(folder: Path, kind: TokenizerClass, settings: Settings) -> FileVocabulary:
    """The vocabulary in files older than tokenizer.json."""
    paths = [folder / name for name in kind.files if (folder / name).is_file()]
    one_file = kind.files[0] in SENTENCEPIECE_FILES or kind.model != "BPE"
    if not paths or (not one_file and len(paths) < 2):
        raise UserError(
            f"tokenizer: {folder} has no {' and '.join(kind.files[:1] if one_file else kind.files)}, which "
            f"{kind.names[0]} needs",
            "copy the missing file into the folder, or give a folder with tokenizer.json",
        )
    if kind.files[0] in SENTENCEPIECE_FILES:
        return _sentencepiece(paths[0], kind, settings)
    vocabulary = (_wordpiece if kind.model == "WordPiece" else _merges)(paths[0])
    if not vocabulary.entries:
        raise broken(paths[0], NO_ENTRIES)
    return vocabulary


def _wordpiece(path: Path) -> FileVocabulary:
    # Not splitlines(): entries may contain other characters that Unicode calls line ends.
    words = read_text(path).split("\n")
    if words and not words[-1]:
        words.pop()
    return FileVocabulary(path, {word.removesuffix("\r"): number for number, word in enumerate(words)})


def _merges(path: Path) -> FileVocabulary:
    vocabulary = read_json(path)
    if not all(isinstance(number, int) for number in vocabulary.values()):
        raise broken(path, "its values are not integers")
    _check_numbers(path, vocabulary)
    path = path.with_name("merges.txt")
    merges: list[tuple[str, str]] = []
    for line in read_text(path).split("\n"):
        if line and not line.startswith("#version"):
            first, _, second = line.partition(" ")
            if not second or " " in second:
                raise broken(path, f"{line!r} is not a pair of tokens")
            merges.append((first, second))
    return FileVocabulary(path, vocabulary, merges=merges)


def _sentencepiece(path: Path, kind: TokenizerClass, settings: Settings) -> FileVocabulary:
    try:
        model = read_model(read_bytes(path))
    except (ValueError, KeyError) as problem:
        raise broken(path, str(problem)) from problem
    if model.kind != (BPE if kind.model == "BPE" else UNIGRAM):
        raise broken(path, f"not a {kind.model} model")
    require_bounded_characters(path, model.characters)
    if kind.model == "BPE":
        # transformers reads special tokens from tokenizer_config.json and the class, not from this file.
        entries = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
        return FileVocabulary(path, entries, merges=merges_of(model))
    unigrams = [(piece, score) for piece, score, _ in model.pieces]
    if kind is T5:
        unigrams += backends.sentinel_entries(settings.sentinels)
    marked = tuple(
        AddedToken(piece, normalized=False, special=type_ == CONTROL)
        for piece, _, type_ in model.pieces
        if type_ in (CONTROL, USER_DEFINED)
    )
    return FileVocabulary(path, unigrams=unigrams, characters=model.characters, marked=marked)


def _check_numbers(path: Path, vocabulary: Mapping[str, int]) -> None:
    largest, entries = max(vocabulary.values(), default=0), len(vocabulary)
    if largest > 2 * entries + 10_000:  # the embedding needs a row for each id
        raise broken(path, f"{entries} entries, but an id of {largest}")
